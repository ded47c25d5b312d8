"""File store: a lock-free key-value store in a shared directory, where every key is a chain of immutable files.

A value appears whole or not at all, exactly one of several writers of the same number wins, and a value that was not
written with the run's key is refused. The store does not interpret values and does not know other nodes.

The one idea: version N of a key is the file `KEY.N`. A writer prepares the whole content in a draft of its own and then
link(2)s it to the next number, which fails if that number exists: one writer wins and no file is half written, even
over NFS, where locks may be local or missing. If the reply is lost, the link count of the draft tells: two means that
it was linked. Where link(2) is refused (FAT, SMB, some FUSE), only one writer can mkdir(2) `KEY.N.d`, and the winner
renames its draft to `KEY.N`. A writer that dies between these two steps leaves a number that is taken but empty
(`Version.content` is None): readers skip it, writers continue after it. A lost reply to mkdir(2) wastes such a number
too, but never gives two winners.

Directory listings lag behind on network file systems, so versions are counted upwards from 1 by opening them by name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hetseq.cluster.rendezvous.process_identity import Process, is_alive, this_process
from hetseq.errors import EXIT_DISAGREE, EXIT_USAGE, RendezvousError
from hetseq.run_directory import open_private
from hetseq.system.files import write_all

CONTENT_LIMIT_BYTES = 1 << 20
POLL_S = 0.05
#: drafts of other machines are removed after this time, by the clock of the file system
LITTER_AGE_S = 3600.0
_MAC_BYTES = 32
_STALE_RETRIES = 5
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_DRAFT = re.compile(r"\.draft-([0-9a-f]*)-(\d+)-(\d+)-[0-9a-f]+")
_REFUSES_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_TROUBLES = {
    errno.EACCES: "you may not use it",
    errno.EPERM: "you may not use it",
    errno.EROFS: "its file system is read-only",
    errno.ENOSPC: "no space is left on its file system",
    errno.EDQUOT: "your disk quota is used up",
    errno.EIO: "its disk or network mount fails (input/output error)",
    errno.ESTALE: "its network mount is stale",
    errno.ENOTDIR: "one of its parents is a file",
    errno.ENAMETOOLONG: "the name is too long",
}


class PlaceError(RendezvousError):
    """A meeting directory that this node cannot use; only this node knows, and nothing has started yet."""

    exit_code = EXIT_USAGE


class OtherSecret(RendezvousError):
    """A file that was written with another secret than this node's."""

    exit_code = EXIT_DISAGREE


class DirectoryGone(RendezvousError):
    """The directory was removed, as a run does with an empty directory that it made: make it again and continue."""


@dataclass(frozen=True)
class Version:
    """One version of a key, numbered from 1; `content` is None if its writer took the number but did not fill it."""

    number: int
    content: bytes | None


class SharedDirectory:
    """The store in one directory; `key` signs and checks its values. Create it with `open`, which checks the directory.

    Every method raises RendezvousError, naming the file, if the file system fails or a file was not written with the
    key, and DirectoryGone if the directory has vanished. Names consist of letters, digits, `_` and `-`. Any number of
    processes on any number of nodes may call any method at the same time.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        self.path = path
        self._key = key
        self._ends: dict[str, int] = {}

    @classmethod
    def open(cls, path: Path, key: bytes) -> SharedDirectory:
        """The store in an existing directory that this user owns and no other user may write to."""
        directory = cls(path, key)
        with directory._draft(b"") as draft, _named(path):
            # Compare with the owner of a new file, not the user id, so that mounts that squash or map ids work.
            found, own_uid = os.stat(path), os.lstat(draft).st_uid
        if found.st_uid != own_uid:
            raise PlaceError(
                f"the shared directory {path} belongs to user id {found.st_uid}, not to you ({own_uid}): name a"
                f" directory of your own, such as {path / 'my-run'}"
            )
        if found.st_mode & 0o022:
            raise PlaceError(
                f"others may write to the shared directory {path} (mode {stat.S_IMODE(found.st_mode):04o}), so they"
                f" could take part in the run: chmod go-w {path}, or name a new directory, such as {path / 'my-run'}"
            )
        return directory

    def folder(self, name: str, key: bytes) -> SharedDirectory:
        """The store in the subdirectory `name`, which may not exist yet."""
        _check_name(name)
        return SharedDirectory(self.path / name, key)

    def make(self) -> None:
        """Make the directory of this store; called by the launcher that chose its name."""
        with _named(self.path):
            os.mkdir(self.path, 0o700)

    def publish(self, name: str, content: bytes, *, version: int = 1) -> bool:
        """Write one version if it does not exist yet: True for the one winner, False for all others."""
        file = self.file(name, version)
        if len(content) > CONTENT_LIMIT_BYTES:
            raise ValueError(f"{len(content)} bytes for {name}: at most {CONTENT_LIMIT_BYTES}")
        with self._draft(self._seal(name, version, content)) as draft, _named(file):
            try:
                os.link(draft, file)
                return True
            except OSError as error:
                if _has_two_links(draft):
                    return True  # only the reply was lost, or the request was sent twice
                if error.errno == errno.EEXIST:
                    return False
                if error.errno not in _REFUSES_LINKS:
                    raise
            return _claim_by_mkdir(draft, file)

    def append(self, name: str, content: bytes) -> int:
        """Write a new version after all existing ones, and return its number."""
        number = self._ends.get(name, 0) + 1
        while self._is_taken(name, number) or not self.publish(name, content, version=number):
            number += 1
        self._ends[name] = number
        return number

    def versions(self, name: str) -> Iterator[Version]:
        """All versions from 1 upwards, up to the first free number."""
        number = 1
        while (found := self._look(name, number)) is not None:
            yield found
            number += 1

    def newest(self, name: str) -> Version | None:
        """The last version, even if it is still empty; None if there is none."""
        found = None
        for found in self.versions(name):  # noqa: B007  (keeps the last one)
            pass
        return found

    def read(self, name: str) -> bytes | None:
        """The content of the newest version that has one."""
        contents = [version.content for version in self.versions(name) if version.content is not None]
        return contents[-1] if contents else None

    def wait(self, name: str, *, deadline_s: float, now: Callable[[], float], sleep: Callable[[float], None]) -> bytes:
        """Wait for `read` to return content. Raises RendezvousError at `deadline_s`, a time of the clock `now`."""
        began_s = now()
        while (content := self.read(name)) is None:
            if now() >= deadline_s:
                claim = _claim_of(self.file(name, 1))
                hint = f"; {claim} was left by a writer that died: remove it" if os.path.lexists(claim) else ""
                raise RendezvousError(
                    f"{self.file(name, 1)} did not appear on {socket.gethostname()} within {now() - began_s:.0f} s"
                    f"{hint}. Is the other node started, and is this the same directory there?"
                )
            sleep(POLL_S)
        return content

    def remove(self, name: str, version: int) -> None:
        """Free a number; only for the owner of the chain, because the number can be taken again afterwards."""
        file = self.file(name, version)
        is_claimed = os.path.lexists(_claim_of(file))
        with _named(file):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)
            if is_claimed:  # last, so that the number becomes free only when all its files are gone
                with contextlib.suppress(FileNotFoundError):
                    os.rmdir(_claim_of(file))

    def listed(self, name: str) -> list[int]:
        """Numbers of the key in a directory listing: good enough for cleaning up, not for decisions."""
        pattern = re.compile(re.escape(name) + r"\.(\d+)(\.d)?")
        with _named(self.path):
            return sorted({int(match[1]) for entry in os.listdir(self.path) if (match := pattern.fullmatch(entry))})

    def sweep(self) -> None:
        """Remove drafts of killed writers: of this machine if the process has ended, of others if they are old."""
        with self._draft(b"") as mine, contextlib.suppress(OSError):
            newest_s = os.lstat(mine).st_mtime
            for entry in os.listdir(self.path):
                match = _DRAFT.fullmatch(entry)
                if match is None or entry == mine.name:
                    continue
                with contextlib.suppress(OSError):
                    life = is_alive(Process(match[1], int(match[2]), int(match[3])))
                    is_old = newest_s - os.lstat(self.path / entry).st_mtime > LITTER_AGE_S
                    if life is False or (life is None and is_old):
                        os.unlink(self.path / entry)

    def clear(self) -> None:
        """Remove the directory and its files; for the launcher that made it. Files that cannot be removed stay."""
        for _ in range(_STALE_RETRIES):  # a listing may lag behind
            with contextlib.suppress(OSError), os.scandir(self.path) as found:
                for entry in found:
                    with contextlib.suppress(OSError):
                        (os.rmdir if entry.is_dir(follow_symlinks=False) else os.unlink)(entry.path)
            try:
                os.rmdir(self.path)
                return
            except FileNotFoundError:
                return
            except OSError:
                continue

    def file(self, name: str, version: int) -> Path:
        """The path of a version, which may not exist."""
        _check_name(name)
        return self.path / f"{name}.{version}"

    def _look(self, name: str, version: int) -> Version | None:
        file = self.file(name, version)
        raw = load(file)
        if raw is None and os.path.lexists(_claim_of(file)):
            raw = load(file)  # it may have been filled in the meantime
            if raw is None:
                return Version(version, None)
        return None if raw is None else Version(version, self._unseal(name, version, raw))

    def _is_taken(self, name: str, version: int) -> bool:
        file = self.file(name, version)
        return os.path.lexists(file) or os.path.lexists(_claim_of(file))

    def _mac(self, name: str, version: int, content: bytes) -> bytes:
        head = b"hetseq value 1\0" + name.encode() + b"\0" + version.to_bytes(8, "big")
        return hmac.new(self._key, head + content, hashlib.sha256).digest()

    def _seal(self, name: str, version: int, content: bytes) -> bytes:
        return self._mac(name, version, content) + content

    def _unseal(self, name: str, version: int, raw: bytes) -> bytes:
        mac, content = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(name, version, content)):
            raise OtherSecret(
                f"{self.file(name, version)} was not written with this run's secret: a node has another secret (copy"
                " the secret file of one node to all), or the file is older than the present secret (remove it if no"
                " run uses it)"
            )
        return content

    @contextlib.contextmanager
    def _draft(self, data: bytes) -> Iterator[Path]:
        """A file with `data`, synced to the disk, under a unique name; removed on exit."""
        me = this_process()
        path = self.path / f".draft-{me.machine}-{me.pid}-{me.start}-{secrets.token_hex(8)}"
        with _named(self.path):
            descriptor = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with _named(self.path):
                try:
                    write_all(descriptor, data)
                    if data:
                        os.fsync(descriptor)  # before it gets its name: a reader of the name must see the content
                finally:
                    os.close(descriptor)
            yield path
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)


def load(file: Path, *, limit_bytes: int = CONTENT_LIMIT_BYTES + _MAC_BYTES) -> bytes | None:
    """The bytes of a regular file, or None if it is missing. Refuses links, devices, pipes and oversized files.

    Opens the file by name, which makes NFS ask the server. A missing file is tried again after opening its directory,
    because NFS caches for a while that a name is missing.
    """
    for chance in range(_STALE_RETRIES):
        with _named(file):
            try:
                # O_NONBLOCK: a pipe planted in its place must not block the open
                descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                if chance:
                    return None
                with contextlib.suppress(OSError):
                    os.close(os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
                continue
            except OSError as error:
                if error.errno == errno.ESTALE and chance < _STALE_RETRIES - 1:
                    continue
                if error.errno == errno.ELOOP:
                    raise RendezvousError(f"{file} is a link, which HetSeq never makes there: remove it") from None
                raise
            try:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise RendezvousError(f"{file} is not a regular file, and HetSeq makes no others: remove it")
                if found.st_size > limit_bytes:
                    raise RendezvousError(
                        f"{file} has {found.st_size} bytes, more than the {limit_bytes} that HetSeq writes: remove it"
                    )
                with os.fdopen(os.dup(descriptor), "rb") as reader:
                    return reader.read(limit_bytes)
            finally:
                os.close(descriptor)
    return None


def trouble(path: Path, error: OSError) -> RendezvousError:
    """`error` in words, with the path and the host where it happened."""
    words = _TROUBLES.get(error.errno or 0, error.strerror or str(error))
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return DirectoryGone(f"the shared directory of {path} was removed on {socket.gethostname()} while in use")
    return PlaceError(
        f"{path} cannot be used on {socket.gethostname()}: {words}. Make it usable, or name another shared directory"
    )


def _claim_by_mkdir(draft: Path, file: Path) -> bool:
    claim = _claim_of(file)
    try:
        os.mkdir(claim, 0o700)
    except FileExistsError:
        return False
    if os.path.lexists(file):  # written by a node on which link(2) works
        os.rmdir(claim)
        return False
    try:
        os.rename(draft, file)
    except OSError:
        if os.path.lexists(draft):  # else it was renamed, and only the reply was lost
            os.rmdir(claim)
            raise
    return True


def _claim_of(file: Path) -> Path:
    return file.with_name(file.name + ".d")


def _has_two_links(draft: Path) -> bool:
    """Whether the draft was linked; opens it again, because the attributes of an open file may be cached."""
    try:
        descriptor = os.open(draft, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.fstat(descriptor).st_nlink == 2
    finally:
        os.close(descriptor)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name in a shared directory: letters, digits, - and _, at most 100")


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turn an OSError into a RendezvousError that names the file."""
    try:
        yield
    except OSError as error:
        raise trouble(path, error) from error
