"""Sends a run directory what it lacks at a start: the checkpoint to resume from, and rows of earlier steps.

Responsible for sending a loaded checkpoint bit for bit, tensor by tensor, and for completing `metrics.jsonl` and
`events.jsonl` of a directory that was lost or is new, so that every directory holds the whole run. It refuses to choose
what is sent: `resume` does.

The one idea: every rank takes part in every transfer, whether it needs it or not, so the ranks cannot get out of step;
a rank that needs nothing drops what arrives.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hetseq.checkpoint import Identity, Loaded
from hetseq.checkpoint.part_io import can_be_filled
from hetseq.comm.directory_groups import DirectoryGroups, send_bytes, send_tensor
from hetseq.monitor.metrics import row_key
from hetseq.run_directory import RunDirectory, replace_file

logger = logging.getLogger(__name__)

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
#: identifies a line of a file: of two lines with the same key the later counts
_Key = Callable[[int, Mapping[str, Any]], Any]


def send_checkpoint(
    sharing: DirectoryGroups,
    loaded: Loaded | None,
    *,
    source: int,
    has_it: bool,
    into: Mapping[str, torch.Tensor] | None = None,
    fits: Callable[[Loaded], bool] | None = None,
) -> Loaded:
    """The checkpoint that rank `source` has loaded, on every rank; collective.

    A rank with the same one (`has_it`) keeps it as it is. On other ranks `loaded` is ignored; the tensors go into the
    memory of `into`, with `fits` as in `CheckpointManager.load`, or into new memory tensor by tensor.
    """
    is_source = sharing.whole.rank == source
    head = _describe(loaded) if is_source and loaded is not None else {}
    head = json.loads(send_bytes(sharing.whole, json.dumps(head).encode(), source=source))
    outline = _outline(head)
    may_fill = not has_it and (fits is None or fits(outline))
    lent = into if into is not None and may_fill else {}
    tensors = {}
    for name, like in outline.tensors.items():
        if is_source and loaded is not None:
            tensor = loaded.tensors[name]
        elif name in lent and can_be_filled(lent[name], like):
            tensor = lent[name]
        else:
            tensor = torch.empty_like(like, device="cpu")
        send_tensor(sharing.whole, tensor.detach(), source=source)
        if not has_it:
            tensors[name] = tensor
    if has_it and loaded is not None:
        return loaded
    return replace(outline, tensors=tensors)


def _outline(head: Mapping[str, Any]) -> Loaded:
    """The inverse of `_describe`; of the tensors only shapes and types."""
    tensors = {name: torch.empty(shape, dtype=_DTYPES[dtype], device="meta") for name, dtype, shape in head["tensors"]}
    identity, kinds, path = Identity(**head["identity"]), tuple(head["kinds"]), Path(head["path"])
    return Loaded(tensors, head["state"], identity, kinds, path, [], head["run_id"], head["nonce"])


def _describe(loaded: Loaded) -> dict[str, Any]:
    identity = loaded.identity
    return {
        "identity": {"step": identity.step, "generation": identity.generation, "lineage": identity.lineage},
        "kinds": list(loaded.kinds),
        "path": str(loaded.path),
        "run_id": loaded.run_id,
        "nonce": loaded.nonce,
        "state": loaded.state,
        "tensors": [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in loaded.tensors.items()],
    }


def complete_rows(
    directory: RunDirectory, sharing: DirectoryGroups, *, step: int, source: int, is_received: bool
) -> None:
    """Give each directory the rows and events up to `step` that it lacks and another one has; collective.

    A directory that has just received the checkpoint of rank `source` (`is_received`) gets its rows as well: its own
    rows may belong to steps that were given up. Call it before anything is appended to these files. A file that cannot
    be read or written causes a warning.
    """
    _adopt_rows(directory.metrics, sharing, step=step, source=source, is_received=is_received)
    _complete(directory.metrics, lambda _, row: row_key(row), sharing, step=step, is_counted=True)
    _complete(directory.events, lambda place, _: place, sharing, step=step, is_counted=False)


def _adopt_rows(path: Path, sharing: DirectoryGroups, *, step: int, source: int, is_received: bool) -> None:
    """The rows of rank `source` up to `step`, in place of the own ones, for directories that got its checkpoint."""
    lines = _lines(path, lambda _, row: row_key(row)) if sharing.is_writer else {}
    earlier = [lines[name][0] for name in sorted(lines) if lines[name][1] <= step]
    facts = sharing.gather([len(earlier), is_received])
    if not facts[:, 1].any() or not facts[sharing.writers.index(source), 0]:
        return
    is_wanted = sharing.is_writer and is_received
    text = send_bytes(sharing.whole, b"".join(earlier), source=source, is_wanted=is_wanted)
    if is_wanted and text != b"".join(earlier):
        _write(path, text, f"the {len(text.splitlines())} rows", source, step)


def _write(path: Path, text: bytes, what: str, giver: int, step: int) -> None:
    try:
        replace_file(path, text, is_durable=True)
        logger.info("%s got %s from the directory of rank %d", path, what, giver)
    except OSError as error:
        logger.warning("cannot write %s (%s): it lacks rows up to step %d", path, error.strerror, step)


def _complete(path: Path, key: _Key, sharing: DirectoryGroups, *, step: int, is_counted: bool) -> None:
    """One file. The events of directories differ (each has its own saves), so only a file without any is incomplete."""
    lines = _lines(path, key) if sharing.is_writer else {}
    earlier = {name: line for name, (line, at) in lines.items() if at <= step}
    counts = sharing.gather([len(earlier)])[:, 0].tolist()
    most = max(counts)
    lacking = [count < (most if is_counted else min(most, 1)) for count in counts]
    if not any(lacking):
        return
    giver = sharing.writers[counts.index(most)]
    is_wanted = sharing.is_writer and lacking[sharing.number]
    text = send_bytes(sharing.whole, b"".join(earlier.values()), source=giver, is_wanted=is_wanted)
    if not is_wanted:
        return
    given = {name: line for name, (line, _) in _parse(text, key).items()}
    later = [line for line, at in lines.values() if at > step]
    merged = {**given, **earlier}
    lacked = b"".join([*(merged[name] for name in sorted(merged)), *later])
    _write(path, lacked, f"{len(merged) - len(earlier)} rows", giver, step)


def _lines(path: Path, key: _Key) -> dict[Any, tuple[bytes, int]]:
    try:
        return _parse(path.read_bytes(), key)
    except FileNotFoundError:
        return {}
    except OSError as error:
        logger.warning("cannot read %s (%s): rows of other directories replace it", path, error.strerror)
        return {}


def _parse(text: bytes, key: _Key) -> dict[Any, tuple[bytes, int]]:
    """Lines by key, each with its step (0 if it has none); other lines and a torn last line are left out."""
    found: dict[Any, tuple[bytes, int]] = {}
    *lines, _torn = text.split(b"\n")
    for place, line in enumerate(lines):
        try:
            row = json.loads(line)
            at = row.get("step", 0)
        except (ValueError, AttributeError):
            continue
        if isinstance(at, int):
            found[key(place, {"step": at, **row})] = (line + b"\n", at)
    return found
