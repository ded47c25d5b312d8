"""The archives of earlier versions in `tests/golden`: unpack them, and describe them as `old.json` does.

`tests/golden/write_old.py` used the functions below to write `old.json`. The tests call the same functions with the
present code and compare. An archive is unpacked into a given folder, beside `old_tasks.py`, and commands run in that
folder with relative paths.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import secrets
import shutil
import struct
import tarfile
import uuid
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from hetseq import CheckpointError
from hetseq.monitor.metrics import read_rows
from tests.support.commands import HETSEQ, start_command
from tests.support.trials import MARK, Trial, checkpoints

GOLDEN = Path(__file__).parents[1] / "golden"
SHARED_MEMORY = Path("/dev/shm")
# of an arena, as version 2 writes it: magic, version, status, serial, bytes and CRC-32 of the record
_HEADER = struct.Struct("<8sIIQQI")
_RECORD_AT, _RECORD_BYTES = 4096, 1 << 20


@functools.lru_cache(maxsize=1)
def told() -> dict[str, Any]:
    """`old.json`: the contents of each archive as the writing code read them, by the name of the archive."""
    found: dict[str, Any] = json.loads((GOLDEN / "old.json").read_text())
    return found


def unpack(name: str, folder: Path) -> Path:
    """Unpack an archive and the task file into `folder`; gives `folder / name`."""
    with tarfile.open(GOLDEN / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    shutil.copy(GOLDEN / "old_tasks.py", folder)
    return folder / name


def losses(run: Path) -> dict[str, float]:
    """The loss of each step, by the number of the step as text, as in JSON. Of two rows of a step the later counts."""
    rows = read_rows(run / "metrics.jsonl")
    return {str(row["step"]): row["loss"] for row in rows if "loss" in row}


def describe(run: Path) -> list[dict[str, Any]]:
    """Every commit of a run, oldest first: step, kinds, and digests of tensors and state or `is_damaged`."""
    found: list[dict[str, Any]] = []
    for commit in reversed(checkpoints(run).list()):
        entry: dict[str, Any] = {"step": commit.identity.step, "kinds": sorted(commit.kinds)}
        try:
            loaded = checkpoints(run).load(str(commit.path))
        except CheckpointError:
            found.append({**entry, "is_damaged": True})
            continue
        assert loaded is not None
        state = json.dumps(loaded.state, sort_keys=True).encode()
        tensors = {name: digest(tensor) for name, tensor in sorted(loaded.tensors.items())}
        found.append({**entry, "state": hashlib.sha256(state).hexdigest(), "tensors": tensors})
    return found


def digest(tensor: torch.Tensor) -> str:
    """The type, the shape and the SHA-256 of the bytes of a tensor."""
    content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return f"{str(tensor.dtype)[6:]} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


def plain(value: Any) -> Any:
    """A nested state as JSON, each value as [type, content]; a tensor becomes its digest."""
    if isinstance(value, torch.Tensor):
        return ["tensor", digest(value)]
    name = type(value).__name__
    if isinstance(value, dict):
        return [name, [[plain(key), plain(item)] for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        return [name, [plain(item) for item in value]]
    if isinstance(value, (set, frozenset)):
        return [name, sorted(repr(item) for item in value)]
    return [name, repr(value)]


def flip(path: Path, position: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@contextmanager
def started(words: Sequence[str], run: Path, *, is_cold: bool = False) -> Iterator[Trial]:
    """`hetseq WORDS`, running in the parent of the run directory; all its processes are killed at the end."""
    mark, rows = uuid.uuid4().hex, run / "metrics.jsonl"
    begin = rows.stat().st_size if rows.exists() else 0
    with start_command(words, cwd=run.parent, env={MARK: mark}, program=HETSEQ, is_cold=is_cold) as command:
        trial = Trial(command, run, mark, begin)
        try:
            yield trial
        finally:
            trial.kill_everything()


@contextmanager
def planted(arenas: Path, run: Path) -> Iterator[list[Path]]:
    """Put the arenas of a killed run into /dev/shm, as arenas of this user and of the directory `run`.

    The name of an arena holds the user id, and its record holds device and inode of the run directory. Both are
    replaced, and with them the length and the CRC of the record. The arenas are removed at the end.
    """
    about, made = run.stat(), list[Path]()
    try:
        for source in sorted(arenas.iterdir()):
            content = bytearray(source.read_bytes())
            magic, version, status, serial, size, crc32 = _HEADER.unpack_from(content)
            old = bytes(content[_RECORD_AT : _RECORD_AT + size])
            if size:  # 0 in an arena that was never filled
                assert (magic, version, crc32) == (b"hetseq-a", 2, zlib.crc32(old))
                record = json.loads(old)
                record["directory"] = f"{about.st_dev}:{about.st_ino}"
                new = json.dumps(record, separators=(",", ":")).encode()
                assert len(new) <= _RECORD_BYTES
                content[_RECORD_AT : _RECORD_AT + max(size, len(new))] = new.ljust(max(size, len(new)), b"\0")
                _HEADER.pack_into(content, 0, magic, version, status, serial, len(new), zlib.crc32(new))
            _, _, owner_run, _ = source.name.split("-")  # hetseq-USER-RUN-RANDOM
            path = SHARED_MEMORY / f"hetseq-{os.getuid()}-{owner_run}-{secrets.token_hex(8)}"
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            made.append(path)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
        yield made
    finally:
        for path in made:
            with suppress(FileNotFoundError):
                path.unlink()


def runs() -> dict[str, dict[str, Any]]:
    """The entry of `old.json` for each run, by the path of the run directory, as in optimizers/lamb."""
    several = told()["optimizers"]["runs"]
    alone = {name: facts for name, facts in told().items() if "checkpoints" in facts}
    return {**alone, **{f"optimizers/{name}": facts for name, facts in several.items()}}
