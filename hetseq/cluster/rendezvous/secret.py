"""The secret that the nodes of one user share: made once, kept in a file of his own, read by every launcher.

Responsible for a file that is there complete or not at all, however many launchers start in the same moment and over
whatever network mount, and for refusing one that somebody else could have read or planted. It knows nothing of runs
and channels: they take keys from `derive_key`. The bytes never stand in a message, a log line, argv or the environment.

The one idea: the secret is written whole under a random name and then linked to its own. link(2) has one winner, also
on NFS, and a reader never meets half a file; who loses, or does not see the winner's file yet, reads again for 15 s.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import re
import secrets
import shlex
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

from hetseq.errors import EXIT_USAGE, RendezvousError

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
#: how long a file may stay invisible or incomplete: network mounts cache what they know of a folder for seconds
PATIENCE_S = 15.0
_PAUSE_S = 0.1
# 64 digits and a newline; somebody's own may have other white space around them
_LONGEST_FILE = 2 * SECRET_BYTES + 8
# link(2) of a file system that has no links, or of one that will not say so properly
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class SecretError(RendezvousError):
    """A secret that cannot be made, read or trusted; known to one node alone and before the first step."""

    exit_code = EXIT_USAGE


def secret_file(path: str | os.PathLike[str] | None = None) -> Path:
    """Where the secret lies: `path` made absolute, or `~/.hetseq/secret`; raises SecretError where there is no home."""
    try:
        return Path(os.path.abspath(Path("~/.hetseq/secret" if path is None else path).expanduser()))
    except RuntimeError:  # no HOME, and no entry in the user database
        raise SecretError(
            f"{socket.gethostname()} knows no home directory for user {os.geteuid()}, so there is no place for the"
            " secret: name a file with --secret-file"
        ) from None


def load_secret(
    path: str | os.PathLike[str] | None = None,
    *,
    create: bool = True,
    patience_s: float = PATIENCE_S,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bytes:
    """The 32 bytes of the secret in `path` (`~/.hetseq/secret`); called once by every launcher.

    A missing file is made, mode 0600, unless `create` is false; so is the folder of the default, mode 0700. A file that
    is missing or short is read again for `patience_s`. Raises SecretError, with the line to type, for a file or folder
    of somebody else, one that others could read or write, a link, and for what does not hold a secret.
    """
    file = secret_file(path)
    if path is None and create:
        _make_folder(file.parent)
    folder = _open_folder(file)
    try:
        return _await(folder, file, create=create, patience_s=patience_s, now=now, sleep=sleep)
    finally:
        os.close(folder)


def derive_key(secret: bytes, *labels: str) -> bytes:
    """A key of 32 bytes for one purpose: HMAC-SHA256 over the labels. Other labels, or other borders, another key."""
    words = [label.encode() for label in labels]
    return hmac.digest(secret, b"".join(len(word).to_bytes(4, "big") + word for word in words), "sha256")


def copy_command(host: str, file: Path) -> str:
    """The line that, typed on this node, brings the secret from `host`."""
    with contextlib.suppress(RuntimeError, ValueError):
        # both ends of scp begin at the home, which may have another path over there
        inside = file.relative_to(Path.home())
        return f"scp {shlex.quote(f'{_bracketed(host)}:{inside}')} {shlex.quote(str(file))}"
    return f"scp {shlex.quote(f'{_bracketed(host)}:{file}')} {shlex.quote(str(file))}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _await(
    folder: int,
    file: Path,
    *,
    create: bool,
    patience_s: float,
    now: Callable[[], float],
    sleep: Callable[[float], None],
) -> bytes:
    deadline = now() + patience_s
    was_told = False
    while True:
        found = _read(folder, file)
        if isinstance(found, bytes):
            return found
        if found == _MISSING and create:
            _make(folder, file)
            create = False  # whoever made it: it is only a matter of seeing it
            continue
        if now() >= deadline:
            raise SecretError(
                f"{file} is still {found} after {patience_s:.0f} s: remove it (and {file.name}.claim, if there is one)"
                " and start again to have one made, or copy it from another node of the run"
            )
        if not was_told:
            logger.warning("%s is %s; waiting up to %.0f s for it", file, found, patience_s)
            was_told = True
        sleep(_PAUSE_S)


_MISSING = "missing"


def _read(folder: int, file: Path) -> bytes | str:
    """The secret, or in words what is not there yet; raises SecretError for what waiting does not mend."""
    try:
        # O_NONBLOCK: a pipe planted under the name would block the open
        descriptor = os.open(file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return _MISSING
    except OSError as error:
        if error.errno == errno.ESTALE:
            return "stale on its network mount"
        if error.errno == errno.ELOOP:
            raise SecretError(
                f"{file} is a link, and a secret is read from no link: name the file itself with --secret-file, or"
                f" remove the link (rm {shlex.quote(str(file))})"
            ) from None
        raise SecretError(
            f"{file} cannot be read: {error.strerror}; if it is yours, chmod 600 {shlex.quote(str(file))}, else name"
            " another file with --secret-file"
        ) from error
    try:
        facts = os.fstat(descriptor)
        _check(file, facts)
        content = os.read(descriptor, _LONGEST_FILE + 1)
    except OSError as error:
        if error.errno == errno.ESTALE:
            return "stale on its network mount"
        raise SecretError(f"{file} cannot be read: {error.strerror}; name another file with --secret-file") from error
    finally:
        os.close(descriptor)
    return _parse(file, content)


def _check(file: Path, facts: os.stat_result) -> None:
    """Refuse what somebody else could have written or read."""
    if not stat.S_ISREG(facts.st_mode):
        raise SecretError(f"{file} is no regular file: name the file of the secret with --secret-file")
    if facts.st_uid != os.geteuid():
        raise SecretError(
            f"{file} belongs to user {facts.st_uid} and you are {os.geteuid()}: a secret of somebody else protects"
            " nothing. Name a file of your own with --secret-file"
        )
    if facts.st_mode & 0o077:
        raise SecretError(
            f"{file} has mode {stat.S_IMODE(facts.st_mode):04o}, so others may know the secret: chmod 600"
            f" {shlex.quote(str(file))} (if they do, remove it on all nodes and have a new one made; if the mode stays,"
            " its file system keeps none: name a file elsewhere with --secret-file)"
        )


def _parse(file: Path, content: bytes) -> bytes | str:
    digits = content.strip()
    if re.fullmatch(rb"[0-9a-fA-F]{%d}" % (2 * SECRET_BYTES), digits):
        return bytes.fromhex(digits.decode())
    if not digits:
        return "empty"
    if len(digits) < 2 * SECRET_BYTES and re.fullmatch(rb"[0-9a-fA-F]+", digits):
        return f"truncated ({len(digits)} of {2 * SECRET_BYTES} digits)"  # a copy may be under way
    raise SecretError(
        f"{file} holds no secret, which is {2 * SECRET_BYTES} hexadecimal digits: name another file with --secret-file,"
        " or remove this one and have a secret made"
    )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return
    except FileNotFoundError:
        raise SecretError(
            f"your home {folder.parent} does not exist on {socket.gethostname()}: name a file with --secret-file"
        ) from None
    except OSError as error:
        raise SecretError(
            f"{folder} cannot be made on {socket.gethostname()}: {error.strerror}; name a file with --secret-file"
        ) from error


def _open_folder(file: Path) -> int:
    """A descriptor of the folder, so that what is checked is what is used."""
    folder = file.parent
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SecretError(
            f"the folder of the secret {file} does not exist on {socket.gethostname()}: mkdir -m 700 -p"
            f" {shlex.quote(str(folder))}, or name another file with --secret-file"
        ) from None
    except OSError as error:
        raise SecretError(
            f"the folder of the secret {file} cannot be opened: {error.strerror}; name another with --secret-file"
        ) from error
    facts = os.fstat(descriptor)
    # others may look, the file guards itself; what they may not do is to put another file in its place
    is_loose = facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX
    if not is_loose and facts.st_uid in (0, os.geteuid()):
        return descriptor
    os.close(descriptor)
    if is_loose:
        raise SecretError(
            f"{folder} has mode {stat.S_IMODE(facts.st_mode):04o}, so others could replace the secret in it: chmod 700"
            f" {shlex.quote(str(folder))}, or name a file in a folder of your own with --secret-file"
        )
    raise SecretError(
        f"{folder}, the folder of the secret, belongs to user {facts.st_uid} and you are {os.geteuid()}: name a file in"
        " a folder of your own with --secret-file"
    )


def _make(folder: int, file: Path) -> None:
    """Have a secret under the name of `file`: this one, or that of whoever was first."""
    beside = f".{file.name}.{secrets.token_hex(8)}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(beside, flags, 0o600, dir_fd=folder)
        try:
            with open(descriptor, "wb") as out:
                os.fchmod(descriptor, 0o600)  # whatever the umask left of it
                out.write(secrets.token_hex(SECRET_BYTES).encode() + b"\n")
                out.flush()
                os.fsync(descriptor)
            _publish(folder, beside, file.name)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside, dir_fd=folder)
    except OSError as error:
        raise SecretError(
            f"{file} cannot be made on {socket.gethostname()}: {error.strerror}; name a file that you may write with"
            " --secret-file"
        ) from error


def _publish(folder: int, beside: str, name: str) -> None:
    """Give the complete file its name, unless the name is taken."""
    try:
        os.link(beside, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    else:
        return
    # No links here. mkdir(2) has one winner too, and who holds the claim may look and then rename.
    claim = f"{name}.claim"
    try:
        os.mkdir(claim, 0o700, dir_fd=folder)
    except FileExistsError:
        return
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        os.rename(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.rmdir(claim, dir_fd=folder)
