"""The folders of tags on the disk: their names, their records, and which of them are complete.

Responsible for: `<path>/<tag>.<nonce>/`, the content of its sealed records, and the order of tags. Knows nothing of
tensors and torch. The one idea: a folder becomes a checkpoint at the moment when COMMIT.json appears in it, and
COMMIT.json names every other file by the sha256 of its manifest, which has a checksum for every 8 MiB of that file.

    model.safetensors        one file for each saved name: its tensors
    model.manifest.json      its size, its checksums, and the tree of plain values around the tensors
    rank-00001.done.json     with several ranks: the names this rank has written
    COMMIT.json              written last, by a rename
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from hetseq.checkpoint.layout import escape, unescape
from hetseq.checkpoint.part_format import check_sums, read_header
from hetseq.checkpoint.records import (
    CHUNK_BYTES,
    RECORD_LIMIT,
    STATE_LIMIT,
    DamagedError,
    TooNewError,
    seal,
    sha256,
    unseal,
)
from hetseq.checkpoint.verification import check_size, reason_of
from hetseq.errors import CheckpointError
from hetseq.system.files import COMMIT_NAME, read_bounded

FORMAT = "hetseq-nebula"
VERSION = 1
NAME_LIMIT = 200  # bytes of a tag or name in a file's name, which has at most 255
FILES_LIMIT = 100_000
_FOLDER = re.compile(r"(.+)\.([0-9a-f]{16})", re.DOTALL)
_HEX16 = re.compile(r"[0-9a-f]{16}")
_HEX64 = re.compile(r"[0-9a-f]{64}")
_MANIFEST_END = ".manifest.json"


@dataclass(frozen=True)
class TagAttempt:
    """One attempt to save one tag: fixed before its first byte is written, and the same on all ranks."""

    tag: str
    nonce: str
    created_ns: int  # by the clock of rank zero
    world_size: int
    num_of_files: int
    is_best: bool

    @property
    def folder_name(self) -> str:
        return f"{escape(self.tag)}.{self.nonce}"

    @property
    def order(self) -> tuple[Any, ...]:
        """Newer tags compare larger: by the integers in the tag, then by time."""
        return (numbers_in(self.tag), self.created_ns, self.nonce)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "tag": self.tag,
            "nonce": self.nonce,
            "created_ns": self.created_ns,
            "world_size": self.world_size,
            "num_of_files": self.num_of_files,
            "is_best": self.is_best,
        }

    @staticmethod
    def from_json(record: dict[str, Any], *, source: Path) -> TagAttempt:
        """The attempt that a record belongs to; DamagedError, or TooNewError for a newer version."""
        version = record.get("version")
        if record.get("format") != FORMAT or not _is_count(version) or version < 1:
            raise DamagedError(f"{source.name}: it is not a {FORMAT} record")
        if version > VERSION:
            raise TooNewError(
                f"{source.parent} has the format version {version}; this HetSeq reads up to version {VERSION}: load it"
                " with the HetSeq that wrote it, or a newer one, or name an older tag"
            )
        tag: Any = record.get("tag")
        nonce: Any = record.get("nonce")
        created: Any = record.get("created_ns")
        world: Any = record.get("world_size")
        files: Any = record.get("num_of_files")
        best: Any = record.get("is_best")
        is_whole = (
            isinstance(tag, str)
            and tag != ""
            and isinstance(nonce, str)
            and _HEX16.fullmatch(nonce) is not None
            and _is_count(created)
            and _is_count(world)
            and isinstance(files, int)
            and isinstance(best, bool)
        )
        if not is_whole:
            raise DamagedError(f"{source.name}: tag, nonce, created_ns, world_size or is_best is invalid")
        return TagAttempt(tag, nonce, created, world, files, best)


@dataclass(frozen=True)
class FileRecord:
    """A saved name: bytes of its file, and sha256 of its manifest."""

    name: str
    size_bytes: int
    manifest_sha256: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.size_bytes, "manifest_sha256": self.manifest_sha256}

    @staticmethod
    def from_json(entry: Any, *, source: Path) -> FileRecord:
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and _is_count(entry.get("bytes")):
            digest = entry.get("manifest_sha256")
            if isinstance(digest, str) and _HEX64.fullmatch(digest):
                return FileRecord(entry["name"], entry["bytes"], digest)
        raise DamagedError(f"{source.name}: the entry of a file is invalid")


@dataclass(frozen=True)
class TagManifest:
    """A writer's description of its file: bytes, CRC-32 of every chunk, and the tree around its tensors."""

    attempt: TagAttempt
    name: str
    size_bytes: int
    crc32: tuple[int, ...]
    tree: Any

    def to_bytes(self) -> bytes:
        record = self.attempt.to_json()
        record.update(
            name=self.name,
            bytes=self.size_bytes,
            chunk_bytes=CHUNK_BYTES,
            crc32=list(self.crc32),
            tree=self.tree,
        )
        return seal(record)

    @staticmethod
    def from_bytes(content: bytes, *, source: Path) -> TagManifest:
        record = unseal(content, source=source)
        attempt = TagAttempt.from_json(record, source=source)
        name, size, sums = record.get("name"), record.get("bytes"), record.get("crc32")
        if not (isinstance(name, str) and _is_count(size) and record.get("chunk_bytes") == CHUNK_BYTES):
            raise DamagedError(f"{source.name}: name, bytes or chunk_bytes is invalid")
        is_list = isinstance(sums, list) and all(_is_count(value) and value < 2**32 for value in sums)
        if not is_list or len(sums or ()) != math.ceil(size / CHUNK_BYTES):
            raise DamagedError(f"{source.name}: crc32 does not name one checksum for each {CHUNK_BYTES} bytes")
        return TagManifest(attempt, name, size, tuple(sums or ()), record.get("tree"))


@dataclass(frozen=True)
class TagCommit:
    """A complete tag on disk: its folder and the content of its COMMIT.json."""

    path: Path
    attempt: TagAttempt
    files: tuple[FileRecord, ...]

    @property
    def tag(self) -> str:
        return self.attempt.tag

    @property
    def order(self) -> tuple[Any, ...]:
        return self.attempt.order

    @property
    def size_bytes(self) -> int:
        """Bytes of the files of tensors."""
        return sum(file.size_bytes for file in self.files)

    def file(self, name: str) -> FileRecord | None:
        """The saved name, if the tag holds it."""
        return next((file for file in self.files if file.name == name), None)


def numbers_in(tag: str) -> tuple[int, ...]:
    """The integers in a tag, by which tags are ordered: (500,) for global_step500, (2, 500) for epoch=2-step=500."""
    return tuple(int(digits[:4000]) for digits in re.findall(r"[0-9]+", tag))


def check_name(kind: str, name: str) -> None:
    """ValueError for a tag or a name that cannot be part of a folder's or file's name."""
    if not isinstance(name, str):
        raise TypeError(f"the {kind} {name!r} is a {type(name).__name__}: expected a str")
    try:
        size = len(escape(name).encode())
    except UnicodeEncodeError:
        raise ValueError(f"the {kind} {name!r} cannot be part of a file's name") from None
    if not 0 < size <= NAME_LIMIT:
        raise ValueError(f"the {kind} {name[:80]!r} takes {size} bytes in a file's name: expected 1 to {NAME_LIMIT}")


def data_name(name: str) -> str:
    """The file of a saved name."""
    return f"{escape(name)}.safetensors"


def manifest_name(name: str) -> str:
    """The manifest file of a saved name."""
    return f"{escape(name)}{_MANIFEST_END}"


def done_name(rank: int) -> str:
    """The file in which a rank lists the names it has written."""
    return f"rank-{rank:05d}.done.json"


def done_bytes(attempt: TagAttempt, rank: int, files: Sequence[FileRecord], error: str | None) -> bytes:
    """A rank's report that it will write no more for a tag; `error` if it failed."""
    record = {**attempt.to_json(), "rank": rank, "files": [file.to_json() for file in files], "error": error}
    return seal(record)


def read_done(folder: Path, attempt: TagAttempt, rank: int) -> tuple[list[FileRecord], str | None]:
    """The names that a rank has written, and its error if it failed; FileNotFoundError before it has reported."""
    path = folder / done_name(rank)
    record = unseal(_content(path), source=path)
    files, error = record.get("files"), record.get("error")
    if (
        TagAttempt.from_json(record, source=path) != attempt
        or record.get("rank") != rank
        or not isinstance(files, list)
    ):
        raise DamagedError(f"{path.name}: it belongs to another checkpoint")
    return [FileRecord.from_json(entry, source=path) for entry in files], error if isinstance(error, str) else None


def commit_bytes(attempt: TagAttempt, files: Iterable[FileRecord]) -> bytes:
    """The content of COMMIT.json: the same for every process that completes this attempt."""
    in_order = sorted(files, key=lambda file: file.name)
    return seal({**attempt.to_json(), "files": [file.to_json() for file in in_order]})


def read_commit(folder: Path) -> TagCommit:
    """The commit of a folder, parsed but not verified.

    FileNotFoundError if there is none, DamagedError if it is incomplete or belongs to another folder.
    """
    path = folder / COMMIT_NAME
    record = unseal(_content(path), source=path)
    attempt, entries = TagAttempt.from_json(record, source=path), record.get("files")
    if not isinstance(entries, list) or len(entries) > FILES_LIMIT:
        raise DamagedError(f"{path.name}: files is invalid")
    files = tuple(FileRecord.from_json(entry, source=path) for entry in entries)
    if len({file.name for file in files}) != len(files):
        raise DamagedError(f"{path.name}: a name occurs twice")
    if folder.name != attempt.folder_name:
        raise DamagedError(f"{path.name}: it belongs to {attempt.folder_name}")
    return TagCommit(folder, attempt, files)


def read_manifest(folder: Path, attempt: TagAttempt, name: str) -> tuple[TagManifest, FileRecord]:
    """A manifest and its entry in a commit; DamagedError if it belongs to another name or tag."""
    path = folder / manifest_name(name)
    content = _content(path)
    manifest = TagManifest.from_bytes(content, source=path)
    if manifest.attempt != attempt or manifest.name != name:
        raise DamagedError(f"{path.name}: it belongs to another checkpoint, or to another name")
    return manifest, FileRecord(name, manifest.size_bytes, sha256(content))


def check_file(commit: TagCommit, file: FileRecord, *, deep: bool) -> TagManifest:
    """The manifest of a committed file, if everything of that file is unchanged; DamagedError names the difference.

    `deep` reads every byte of the file.
    """
    path = commit.path / data_name(file.name)
    try:
        manifest, found = read_manifest(commit.path, commit.attempt, file.name)
        if found != file:
            raise DamagedError(f"{manifest_name(file.name)}: it is not the one that {COMMIT_NAME} names")
        check_size(path, file.size_bytes)
        read_header(path)
        if deep:
            check_sums(path, manifest.crc32)
    except (OSError, EOFError) as error:
        raise DamagedError(f"{path.name}: {reason_of(error)}") from None
    return manifest


def check(commit: TagCommit, *, deep: bool) -> None:
    """DamagedError for the first file of a tag that has changed."""
    for file in commit.files:
        check_file(commit, file, deep=deep)


def folders(root: Path) -> list[Path]:
    """The folders of all attempts, complete or not; none if there is no such root."""
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    return [root / name for name in names if tag_of(name) is not None]


def tag_of(folder_name: str) -> str | None:
    """The tag in a folder's name; None if the name is not a tag's folder."""
    match = _FOLDER.fullmatch(folder_name)
    try:
        return unescape(match[1]) if match is not None else None
    except ValueError:
        return None


@dataclass(frozen=True)
class TagScan:
    """The complete tags of a root, newest first, and why other folders with a COMMIT.json were refused."""

    commits: list[TagCommit]
    refused: dict[Path, CheckpointError]


def scan(root: Path) -> TagScan:
    """Read every COMMIT.json in `root`."""
    commits: list[TagCommit] = []
    refused: dict[Path, CheckpointError] = {}
    for folder in folders(root):
        try:
            commits.append(read_commit(folder))
        except FileNotFoundError:
            continue
        except CheckpointError as error:
            refused[folder] = error
        except OSError as error:
            refused[folder] = DamagedError(f"{COMMIT_NAME}: {reason_of(error)}")
    return TagScan(sorted(commits, key=lambda commit: commit.order, reverse=True), refused)


def written_names(folder: Path) -> list[str]:
    """The names whose manifests are in a folder."""
    found = []
    for entry in sorted(os.listdir(folder)):
        if entry.endswith(_MANIFEST_END):
            try:
                found.append(unescape(entry.removesuffix(_MANIFEST_END)))
            except ValueError:
                continue
    return found


def superseded(commits: Sequence[TagCommit], *, keep: int) -> list[TagCommit]:
    """The tags that may be deleted, oldest first; `commits` newest first. Never the newest nor the newest best.

    `keep` is how many stay; -1 means all. The caller makes sure that one of the remaining tags is sound.
    """
    if keep == -1:
        return []
    best = next((commit for commit in commits if commit.attempt.is_best), None)
    return [commit for commit in commits[max(keep, 1) :] if commit is not best][::-1]


def _content(path: Path) -> bytes:
    limit = STATE_LIMIT if path.name.endswith(_MANIFEST_END) else RECORD_LIMIT
    try:
        return read_bounded(path, limit)
    except (ValueError, EOFError) as error:
        raise DamagedError(f"{path.name}: {error}") from None


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
