"""The JSON records of a checkpoint: their content, their seal, and when they are valid.

Responsible for: the format's version, and the three records `part-00000.json` (manifest), `state.json` and
`COMMIT.json`. Does not know where files are. The one idea: each record repeats the checkpoint it belongs to (run,
step, generation, lineage, nonce, kinds, number of parts), so records of two checkpoints are never taken for one; and
`COMMIT.json` is a function of the others, so any process that finds a complete checkpoint can commit it.

A sealed record carries the sha256 of its own content under "seal": it protects against corruption and careless edits,
not against malice, so every number is checked before it is used. The seal stays the same in later versions of the
format, so a reader can tell a newer checkpoint from a damaged one.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from hetseq.errors import CheckpointError, CheckpointRefused

FORMAT = "hetseq-checkpoint"
VERSION = 1
KINDS = ("epoch", "interval", "time", "best", "final", "signal")
CHUNK_BYTES = 8 << 20
RECORD_LIMIT = 64 << 20  # bytes of a manifest or COMMIT; 1 TB in one part needs 1.5 MB
STATE_LIMIT = 1 << 30  # bytes of state.json
PARTS_LIMIT = 100_000
STATE_KEY = "checkpoint"  # the one name in state.json that is not the caller's

_HEX16 = re.compile(r"[0-9a-f]{16}")
_HEX64 = re.compile(r"[0-9a-f]{64}")


class DamagedError(CheckpointError):
    """A checkpoint whose files do not match its COMMIT.json; the message names the file and the reason."""


class TooNewError(CheckpointRefused):
    """A checkpoint in the format of a later HetSeq: resuming from an older one would lose work without notice."""


@dataclass(frozen=True)
class Identity:
    """Which state a checkpoint holds: its step, the generation that wrote it, its lineage (16 hex digits)."""

    step: int
    generation: int
    lineage: str

    def __post_init__(self) -> None:
        for name, value in (("step", self.step), ("generation", self.generation)):
            if not _is_count(value):
                raise ValueError(f"{name} {value!r}: expected an integer from 0 to 2^63 - 1")
        if not _HEX16.fullmatch(self.lineage):
            raise ValueError(f"lineage {self.lineage!r}: expected 16 hexadecimal digits in lower case")


@dataclass(frozen=True)
class Attempt:
    """The identity of a checkpoint, fixed before its first byte is written."""

    run_id: str
    identity: Identity
    nonce: int
    kinds: tuple[str, ...]
    created: str
    number_of_parts: int
    #: it may be deleted once newer ones exist, see `retention`; absent in records before 2026-11-26
    is_prunable: bool = False

    def to_json(self) -> dict[str, Any]:
        record = {
            "format": FORMAT,
            "version": VERSION,
            "run_id": self.run_id,
            "step": self.identity.step,
            "generation": self.identity.generation,
            "lineage": self.identity.lineage,
            "nonce": f"{self.nonce:016x}",
            "kinds": list(self.kinds),
            "created": self.created,
            "number_of_parts": self.number_of_parts,
        }
        return record | ({"prunable": True} if self.is_prunable else {})

    @staticmethod
    def from_json(record: Mapping[str, Any], *, source: Path) -> Attempt:
        """The attempt that a record belongs to; DamagedError, or CheckpointRefused for a newer version."""
        check_version(record, source=source)
        nonce: Any = record.get("nonce")
        kinds: Any = record.get("kinds")
        run_id: Any = record.get("run_id")
        created: Any = record.get("created")
        parts: Any = record.get("number_of_parts")
        try:
            identity = Identity(record["step"], record["generation"], record["lineage"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{source.name}: {error}") from None
        is_whole = (
            isinstance(nonce, str)
            and _HEX16.fullmatch(nonce) is not None
            and isinstance(kinds, list)
            and all(isinstance(kind, str) for kind in kinds)
            and isinstance(run_id, str)
            and isinstance(created, str)
            and _is_count(parts)
            and 1 <= parts <= PARTS_LIMIT
        )
        if not is_whole:
            raise DamagedError(f"{source.name}: nonce, kinds, run_id, created or number_of_parts is invalid")
        is_prunable = record.get("prunable") is True
        return Attempt(run_id, identity, int(nonce, 16), tuple(kinds), created, parts, is_prunable)


@dataclass(frozen=True)
class PartRecord:
    """Size of a part in bytes, and sha256 of its manifest."""

    size_bytes: int
    manifest_sha256: str


@dataclass(frozen=True)
class Manifest:
    """A writer's description of its part: size and the CRC-32 of every chunk of the file."""

    attempt: Attempt
    state_sha256: str
    index: int
    size_bytes: int
    crc32: tuple[int, ...]

    def to_bytes(self) -> bytes:
        record = self.attempt.to_json()
        record.update(
            part=self.index,
            bytes=self.size_bytes,
            chunk_bytes=CHUNK_BYTES,
            crc32=list(self.crc32),
            state_sha256=self.state_sha256,
        )
        return seal(record)

    @staticmethod
    def from_bytes(content: bytes, *, source: Path) -> Manifest:
        record = unseal(content, source=source)
        attempt = Attempt.from_json(record, source=source)
        index, size = record.get("part"), record.get("bytes")
        sums: Any = record.get("crc32")
        if not (_is_count(index) and _is_count(size) and record.get("chunk_bytes") == CHUNK_BYTES):
            raise DamagedError(f"{source.name}: part, bytes or chunk_bytes is invalid")
        is_list = isinstance(sums, list) and all(_is_count(value) and value < 2**32 for value in sums)
        if not is_list or len(sums) != math.ceil(size / CHUNK_BYTES):
            raise DamagedError(f"{source.name}: crc32 does not name one checksum for each {CHUNK_BYTES} bytes")
        return Manifest(attempt, _digest_in(record, "state_sha256", source), index, size, tuple(sums))


@dataclass(frozen=True)
class Commit:
    """A committed checkpoint: its folder, the content of `COMMIT.json`, and the sha256 of that file."""

    path: Path
    attempt: Attempt
    state_sha256: str
    state_bytes: int
    parts: tuple[PartRecord, ...]
    sha256: str

    @property
    def identity(self) -> Identity:
        return self.attempt.identity

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.attempt.kinds

    @property
    def is_prunable(self) -> bool:
        return self.attempt.is_prunable

    @property
    def size_bytes(self) -> int:
        """Bytes of the parts and of state.json."""
        return self.state_bytes + sum(part.size_bytes for part in self.parts)

    @property
    def order(self) -> tuple[int, int, int]:
        """Newer checkpoints compare larger: by step, then generation; the nonce only makes the order total."""
        return (self.identity.step, self.identity.generation, self.attempt.nonce)


def commit_bytes(attempt: Attempt, *, state_sha256: str, state_bytes: int, parts: Sequence[PartRecord]) -> bytes:
    """The content of COMMIT.json: the same for every process that completes this attempt."""
    record = attempt.to_json()
    record["state"] = {"bytes": state_bytes, "sha256": state_sha256}
    record["parts"] = [
        {"part": index, "bytes": part.size_bytes, "manifest_sha256": part.manifest_sha256}
        for index, part in enumerate(parts)
    ]
    return seal(record)


def parse_commit(content: bytes, *, source: Path) -> Commit:
    """The commit in `source`, a COMMIT.json; DamagedError, or CheckpointRefused for a newer version."""
    record = unseal(content, source=source)
    attempt = Attempt.from_json(record, source=source)
    state, entries = record.get("state"), record.get("parts")
    if not isinstance(state, dict) or not _is_count(state.get("bytes")) or state["bytes"] > STATE_LIMIT:
        raise DamagedError(f"{source.name}: state is invalid")
    if not isinstance(entries, list) or len(entries) != attempt.number_of_parts:
        raise DamagedError(f"{source.name}: parts does not name {attempt.number_of_parts} parts")
    parts = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.get("part") != index or not _is_count(entry.get("bytes")):
            raise DamagedError(f"{source.name}: the entry of part {index} is invalid")
        parts.append(PartRecord(entry["bytes"], _digest_in(entry, "manifest_sha256", source)))
    digest = _digest_in(state, "sha256", source)
    return Commit(source.parent, attempt, digest, state["bytes"], tuple(parts), sha256(content))


def state_bytes(attempt: Attempt, state: Mapping[str, Any]) -> bytes:
    """The content of state.json: the caller's entries, and the attempt, which makes it the statement of intent."""
    content = json.dumps({STATE_KEY: attempt.to_json(), **state}, indent=1).encode()
    if len(content) > STATE_LIMIT:
        raise ValueError(f"state takes {len(content)} bytes as JSON, at most {STATE_LIMIT}: put arrays into tensors")
    return content


def parse_state(content: bytes, *, source: Path) -> tuple[Attempt, dict[str, Any]]:
    """Attempt and the caller's entries of a state.json; DamagedError, or CheckpointRefused for a newer version."""
    record = parse_json(content, source=source)
    attempt = record.pop(STATE_KEY, None)
    if not isinstance(attempt, dict):
        raise DamagedError(f"{source.name}: it has no entry {STATE_KEY!r}")
    return Attempt.from_json(attempt, source=source), record


def check_version(record: Mapping[str, Any], *, source: Path) -> None:
    """DamagedError if this is not a HetSeq record, CheckpointRefused if it has a newer version."""
    version = record.get("version")
    if record.get("format") != FORMAT or not _is_count(version) or version < 1:
        raise DamagedError(f"{source.name}: it is not a {FORMAT} record")
    if version > VERSION:
        raise TooNewError(
            f"{source.parent} is a checkpoint of format version {version}; this HetSeq reads up to version {VERSION}:"
            " load it with the HetSeq that wrote it, or a newer one, or name an older checkpoint"
        )


def check_state(state: Mapping[str, Any]) -> None:
    """TypeError or ValueError for a state that cannot be saved."""
    check_json(state, where="state")
    if STATE_KEY in state:
        raise ValueError(f"state has an entry {STATE_KEY!r}: that name belongs to HetSeq; choose another")


def check_json(value: Any, *, where: str) -> None:
    """TypeError for a value that JSON would not restore (tuples, which come back as lists, are fine)."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}: keys in a checkpoint's state are strings")
            check_json(item, where=f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_json(item, where=f"{where}[{index}]")
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(
            f"{where} is a {type(value).__name__}: a checkpoint's state holds JSON only; tensors go into the tensors,"
            " everything else as numbers or text"
        )


def seal(record: Mapping[str, Any]) -> bytes:
    """A JSON record with the sha256 of its content under "seal"."""
    return json.dumps({**record, "seal": _seal_of(record)}, indent=1).encode() + b"\n"


def unseal(content: bytes, *, source: Path) -> dict[str, Any]:
    """The record without its seal; DamagedError if the content does not match the seal."""
    record = parse_json(content, source=source)
    if record.pop("seal", None) != _seal_of(record):
        raise DamagedError(f"{source.name}: its content does not match its seal; it was damaged or edited by hand")
    return record


def parse_json(content: bytes, *, source: Path) -> dict[str, Any]:
    """A JSON object without repeated keys; DamagedError for anything else."""
    try:
        record = json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{source.name}: it is not JSON ({str(error)[:120]})") from None
    if not isinstance(record, dict):
        raise DamagedError(f"{source.name}: it is not a JSON object")
    return record


def sha256(content: bytes) -> str:
    """The digest as 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def utc_text(seconds: int) -> str:
    """Seconds since 1970 as "2026-01-31T12:00:00Z"."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _seal_of(record: Mapping[str, Any]) -> str:
    try:
        return sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())
    except RecursionError:
        return ""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key occurs twice")
    return record


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _digest_in(record: Mapping[str, Any], key: str, source: Path) -> str:
    digest = record.get(key)
    if not isinstance(digest, str) or not _HEX64.fullmatch(digest):
        raise DamagedError(f"{source.name}: {key} is not a sha256")
    return digest
