"""Shared secret of one user's nodes: created once, kept in a private file, read by every launcher.

The file is complete or absent, however many launchers start at once and on any network mount. A file that
another user could have read or planted is refused. The module knows no runs or channels: they get keys from
`derive_key`. The secret never appears in a message, a log line, argv or the environment.

The one idea: the secret is written whole under a random name, then linked to its final name. link(2) has one winner,
even on NFS, and a reader never sees half a file. A launcher that loses, or does not see the winner's file yet, retries
for 15 s.
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
#: how long a file may stay invisible or incomplete: network mounts cache folder contents for seconds
PATIENCE_S = 15.0
_PAUSE_S = 0.1
# 64 digits and a newline; a file written by the user may have other white space around the digits
_LONGEST_FILE = 2 * SECRET_BYTES + 8
# errors of link(2) on file systems without hard links, including misleading ones
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class SecretError(RendezvousError):
    """A secret that cannot be created, read or trusted; only this node knows, before the first step."""

    exit_code = EXIT_USAGE


def secret_file(path: str | os.PathLike[str] | None = None) -> Path:
    """Absolute path of the secret: `path`, or `~/.hetseq/secret`. Raises SecretError if there is no home directory."""
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

    Unless `create` is false, a missing file is created with mode 0600, and the default folder with mode 0700. A missing
    or short file is read again for `patience_s`. Raises SecretError, with the command to type, if the file or folder
    belongs to another user or others could read or write it, and if the file is a link or does not contain a secret.
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
    """A 32-byte key for one purpose: HMAC-SHA256 over the labels, with their lengths, so that no two lists collide."""
    words = [label.encode() for label in labels]
    return hmac.digest(secret, b"".join(len(word).to_bytes(4, "big") + word for word in words), "sha256")


def copy_command(host: str, file: Path) -> str:
    """The command that, typed on this node, copies the secret from `host`."""
    with contextlib.suppress(RuntimeError, ValueError):
        # a relative path starts at the home directory, whose path may differ on `host`
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
            create = False  # the file exists now, whichever launcher created it: only wait until it is visible
            continue
        if now() >= deadline:
            raise SecretError(
                f"{file} is still {found} after {patience_s:.0f} s: remove it (and {file.name}.claim, if there is one)"
                " and start again to create a new one, or copy it from another node of the run"
            )
        if not was_told:
            logger.warning("%s is %s; waiting up to %.0f s for it", file, found, patience_s)
            was_told = True
        sleep(_PAUSE_S)


_MISSING = "missing"


def _read(folder: int, file: Path) -> bytes | str:
    """The secret, or in words why it is not readable yet. Raises SecretError if waiting cannot help."""
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
                f"{file} is a link, and HetSeq does not follow links to a secret: name the file itself with"
                f" --secret-file, or remove the link (rm {shlex.quote(str(file))})"
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
    """Refuse a file that another user could have written or read."""
    if not stat.S_ISREG(facts.st_mode):
        raise SecretError(f"{file} is not a regular file: name the secret's file with --secret-file")
    if facts.st_uid != os.geteuid():
        raise SecretError(
            f"{file} belongs to user {facts.st_uid} and you are {os.geteuid()}: another user's secret protects nothing."
            " Name a file of your own with --secret-file"
        )
    if facts.st_mode & 0o077:
        raise SecretError(
            f"{file} has mode {stat.S_IMODE(facts.st_mode):04o}, so others may know the secret: chmod 600"
            f" {shlex.quote(str(file))} (if they do, remove it on all nodes so that a new one is created; if the mode"
            " does not change, its file system has no modes: name a file elsewhere with --secret-file)"
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
        " or remove this one so that a new secret is created"
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
    """A descriptor of the checked folder, so that no other folder can take its place."""
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
    # others may list the folder, since the file's mode protects it; they must not be able to replace the file
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
    """Create a secret in `file`, unless another launcher was first."""
    beside = f".{file.name}.{secrets.token_hex(8)}"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(beside, flags, 0o600, dir_fd=folder)
        try:
            with open(descriptor, "wb") as out:
                os.fchmod(descriptor, 0o600)  # independent of the umask
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
    # No hard links here. mkdir(2) has one winner too, and the holder of the claim can check the name, then rename.
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
