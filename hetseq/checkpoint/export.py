"""Export of a HetSeq checkpoint to other formats.

Responsible for: the three export formats that need no model, and for a target of any format that is either complete or
absent. Does not choose the checkpoint. The one idea: everything is written into the folder `<target>.tmp`
beside the target, from spans that are verified as they are read, and is renamed once at the end; any
failure removes the folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import torch

from hetseq.checkpoint.part_format import HEADER_LIMIT
from hetseq.checkpoint.records import STATE_KEY, Commit
from hetseq.checkpoint.tensor_reader import Spans
from hetseq.errors import CheckpointError, ConfigError
from hetseq.system.files import creating, make_directory, sync_directory, write_all, write_new

# prefix of the names in a checkpoint -> name of that group in the export
_GROUPS = {"model.": "model", "optim.": "optimizer", "task.": "task"}
_REST = "other"
_RESERVED = ("", "__metadata__")  # not allowed as a tensor's name in a safetensors file


def export(commit: Commit, target: Path, *, form: str, advance: Callable[[int], None] = lambda count: None) -> Path:
    """Write a checkpoint in another format; returns the path of the result, which is `target`.

    * `safetensors`: a folder with `model.safetensors`, `optimizer.safetensors` (`<name>.<state>`) and `config.json`,
      the content of state.json. Takes 8 MiB of memory, whatever the size.
    * `torch`: one file for `torch.load(weights_only=True)`: {"model": ..., "optimizer": ..., "state": ...}. Takes the
      memory of all tensors.
    * `dcp`: a folder for `torch.distributed.checkpoint`, names as in the checkpoint, and `config.json`. Takes the
      memory of the two largest tensors.

    Names lose the prefixes `model.` and `optim.`, except in a dcp folder. A tensor with several names appears under
    each of them, as in `state_dict()`: `torch` stores it once, `safetensors` once per name; a dcp folder has only the
    first name. Tensors with neither prefix are exported as `other`. One process calls it; modes are 0700 and 0600.
    `advance` is called now and then with the number of bytes read.

    Raises ConfigError for an unknown format or a target that exists or is impossible; CheckpointError if the checkpoint
    is damaged or the disk refuses. Then nothing is left behind; a process that is killed leaves `<target>.tmp`.
    """
    write = _FORMS.get(form)
    if write is None:
        raise ConfigError(f"export in the form {form!r}: expected one of {', '.join(_FORMS)}")
    return export_by(write, commit, target, advance=advance)


def export_by(
    write: Callable[[Spans, Path], Path],
    commit: Commit,
    target: Path,
    *,
    advance: Callable[[int], None] = lambda count: None,
) -> Path:
    """Have `write` make the target from the tensors of a checkpoint, in an empty folder that it is given.

    It returns the path of what becomes the target: that folder, or one file in it. Otherwise as `export`, with the
    same errors; other exceptions of `write` are passed on, and nothing is left behind then either.
    """
    target = Path(os.path.abspath(target))
    _check_target(target, commit)
    beside = target.with_name(target.name + ".tmp")
    spans = Spans(commit, advance)
    try:
        _make(beside)
    except OSError as error:
        raise _refused(target, error) from None
    litter = [beside]
    try:
        written = write(spans, beside)
        sync_directory(beside)
        _check_target(target, commit)  # again: a rename would replace a file
        os.rename(written, target)
        litter.append(target)
        sync_directory(target.parent)
        litter.remove(target)
    except OSError as error:
        raise _refused(target, error) from None
    finally:
        for path in litter:
            _remove(path)
    return target


def _write_safetensors(spans: Spans, folder: Path) -> Path:
    for group, names in _groups(spans).items():
        _write_group(spans, names, folder / f"{group}.safetensors")
    _write_state(spans, folder)
    return folder


def _write_torch(spans: Spans, folder: Path) -> Path:
    record: dict[str, Any] = {"model": {}, "optimizer": {}}
    for group, names in _groups(spans).items():
        read = {stored: spans.whole(stored) for stored in dict.fromkeys(names.values())}
        record[group] = {name: read[stored] for name, stored in names.items()}  # tied ones share their memory
    record["state"] = _state(spans)
    path = folder / "checkpoint.pt"
    with creating(path) as descriptor:
        try:
            torch.save(record, cast(IO[bytes], _Sink(descriptor)))
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch raises an error of its own over the disk's
                raise error.__context__ from None
            raise
    return path


def _write_dcp(spans: Spans, folder: Path) -> Path:
    from hetseq.checkpoint.dcp import write_dcp  # a second of imports that the other formats do not need

    write_dcp(folder, spans)
    _write_state(spans, folder)
    return folder


_FORMS: dict[str, Callable[[Spans, Path], Path]] = {
    "safetensors": _write_safetensors,
    "torch": _write_torch,
    "dcp": _write_dcp,
}


class _Sink:
    """The file object that torch.save writes to."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes | memoryview) -> int:
        write_all(self._descriptor, data)
        return len(data)

    def flush(self) -> None:
        """A no-op: nothing is buffered."""


def _groups(spans: Spans) -> dict[str, dict[str, str]]:
    """For each group with tensors, and always for the model: the names in the export, and those in the checkpoint."""
    groups: dict[str, dict[str, str]] = {"model": {}}
    for stored in spans.specs:
        group, name = _REST, stored
        for prefix, title in _GROUPS.items():
            if stored.startswith(prefix) and stored.removeprefix(prefix) not in _RESERVED:
                group, name = title, stored.removeprefix(prefix)
        groups.setdefault(group, {})[name] = stored
    model, tied = groups["model"], spans.state.get("tied") or {}  # not written before 2026-11
    groups["model"] = {**model, **{name: model[first] for name, first in tied.items() if first in model}}
    return groups


def _write_group(spans: Spans, names: Mapping[str, str], path: Path) -> None:
    # by decreasing element size, for the alignment that the safetensors library expects
    order = sorted(names.items(), key=lambda pair: -spans.specs[pair[1]].itemsize)
    record: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, stored in order:
        spec = spans.specs[stored]
        record[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [offset, offset + spec.bytes]}
        offset += spec.bytes
    header = json.dumps(record, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > HEADER_LIMIT:
        raise CheckpointError(
            f"{len(names)} tensors need a header of {len(header)} bytes, and a safetensors file has room for"
            f" {HEADER_LIMIT}: export in the form torch or dcp"
        )
    with creating(path) as descriptor:
        write_all(descriptor, len(header).to_bytes(8, "little") + header)
        for _, stored in order:
            for block in spans.blocks(stored, 0, spans.specs[stored].elements):
                write_all(descriptor, block)


def _state(spans: Spans) -> dict[str, Any]:
    """The content of state.json: the attempt under "checkpoint", and the entries that the caller saved."""
    return {STATE_KEY: spans.commit.attempt.to_json(), **spans.state}


def _write_state(spans: Spans, folder: Path) -> None:
    write_new(folder / "config.json", json.dumps(_state(spans), indent=1).encode() + b"\n")


def _check_target(target: Path, commit: Commit) -> None:
    if os.path.lexists(target):
        raise ConfigError(f"export to {target}: it exists, and an export never overwrites: name a new path")
    if not target.parent.is_dir():
        raise ConfigError(f"export to {target}: the folder {target.parent} does not exist: make it first")
    if target.parent.resolve().is_relative_to(commit.path.resolve()):
        raise ConfigError(f"export to {target}: that is inside the checkpoint {commit.path}: name another folder")


def _make(beside: Path) -> None:
    try:
        make_directory(beside)
    except FileExistsError:
        raise ConfigError(
            f"export to {beside.with_suffix('')}: {beside} exists: either a killed export left it, or one is writing"
            " it now; if none is, remove it"
        ) from None


def _refused(target: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"export to {target}: the disk refused it ({error.strerror or error}), and nothing was left there: make room,"
        " or name a path on another disk"
    )


def _remove(path: Path) -> None:
    """Remove a file or a folder as far as the disk allows."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            os.unlink(path)
