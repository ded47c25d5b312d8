"""Checkpoints of a run as facts, text and JSON, for `hetseq checkpoints list` and `show`.

Reads a run directory without changing it, and formats its checkpoints; `command` chooses which. The one idea: the small
files and all sizes of a listed checkpoint agree, so the table promises no more than was checked; `verify` checks the
bytes.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetseq.checkpoint import Commit, Inspected, attempts, inspect, is_committed, read_history, scan
from hetseq.errors import CheckpointError
from hetseq.monitor.tables import Cells, table
from hetseq.run_directory import RunDirectory, json_line

_SHOWN_TENSORS = 5
#: entries of state.json that `show` prints, if present
_STATE_WORDS = {
    "epoch": "epoch",
    "samples_consumed": "samples consumed",
    "updates": "updates",
    "best": "best metric so far",
    "train_seconds": "seconds of training",
    "task": "task",
    "optimizer": "optimizer",
    "precision": "precision",
    "seed": "seed",
    "samples": "training samples",
    "resets": "resets",
}


# reading a run


@dataclass(frozen=True)
class Contents:
    """The checkpoints of a run: usable ones, newest first; why others are refused; saves that failed at the end."""

    run: Path
    usable: tuple[Inspected, ...]
    refused: Mapping[Path, str]
    uncommitted: tuple[Path, ...]
    failed_saves: tuple[Mapping[str, str], ...]


def read_contents(run: Path) -> Contents:
    """Read the checkpoints of a run directory; raises OSError if it cannot be read."""
    root = RunDirectory(run).checkpoints
    found = scan(root)
    usable, refused = [], {path: str(error) for path, error in found.refused.items()}
    for commit in found.commits:
        try:
            usable.append(inspect(commit))
        except (CheckpointError, OSError) as error:
            if is_committed(commit.path):  # else a run in progress has removed it since
                refused[commit.path] = str(error)
    uncommitted = tuple(path for path in attempts(root) if not is_committed(path))
    return Contents(run, tuple(usable), refused, uncommitted, tuple(_failed_saves(run)))


def _failed_saves(run: Path) -> list[dict[str, str]]:
    """The lines of the history after the last successful save."""
    try:
        rows = read_history(RunDirectory(run).history)
    except (OSError, csv.Error):
        return []  # the history is for people; no checkpoint depends on it
    failed = []
    for row in reversed(rows):
        if row.get("result") != "failed":
            break
        failed.append(row)
    return failed[::-1]


# text and JSON


def list_text(contents: Contents) -> Iterator[str]:
    """All checkpoints as text."""
    commits = [inspected.commit for inspected in contents.usable]
    if commits:
        yield from table(list(_list_rows(contents)), left=(2, 6))
        total = size_text(sum(commit.size_bytes for commit in commits))
        yield f"{counted(len(commits), 'checkpoint')}, {total} in {commits[0].path.parent}"
    else:
        yield f"{contents.run} has no checkpoints{' that can be used' if contents.refused else ''}"
    for path, reason in contents.refused.items():
        yield f"cannot be used: {path.name}: {reason}"
    for path in contents.uncommitted:
        yield f"never committed: {path.name}: it is being written, or its run was killed; the next start cleans up"
    if contents.failed_saves:
        last, count = contents.failed_saves[-1], len(contents.failed_saves)
        more = f" ({count} saves in a row)" if count > 1 else ""
        yield f"last save failed at step {last.get('step')}{more}: {last.get('error') or 'unknown reason'}"


def _list_rows(contents: Contents) -> Iterator[Cells]:
    marks = _marks([inspected.commit for inspected in contents.usable])
    has_generations = any(inspected.commit.identity.generation for inspected in contents.usable)
    yield ("step", "epoch", "kinds", "size", "created (UTC)", "parts", "", *(("generation",) * has_generations))
    for inspected, mark in zip(contents.usable, marks):
        commit, identity = inspected.commit, inspected.commit.identity
        yield (
            str(identity.step), _value(epoch_of(inspected.state) or "?"), ", ".join(commit.kinds),
            size_text(commit.size_bytes), _time(commit.attempt.created), str(len(commit.parts)), " and ".join(mark),
            *((str(identity.generation),) * has_generations),
        )  # fmt: skip


def _marks(commits: Sequence[Commit]) -> list[list[str]]:
    """Marks of the newest and the best checkpoint; newest first."""
    best = next((commit for commit in commits if "best" in commit.kinds), None)
    return [["newest"] * (at == 0) + ["best"] * (commit is best) for at, commit in enumerate(commits)]


def epoch_of(state: Mapping[str, Any]) -> int | None:
    """The epoch of the last step; a state saved at the end of an epoch names the next one, with no samples taken."""
    epoch = state.get("epoch")
    if not isinstance(epoch, int):
        return None
    return epoch - 1 if epoch > 1 and state.get("consumed") == 0 else epoch


def list_json(contents: Contents) -> str:
    """All checkpoints as one line of JSON, for scripts."""
    marks = _marks([inspected.commit for inspected in contents.usable])
    return _json({
        "run": str(contents.run),
        "checkpoints": [
            {
                **_facts(inspected),
                "is_newest": "newest" in mark,
                "is_best": "best" in mark,
            }
            for inspected, mark in zip(contents.usable, marks)
        ],
        "refused": [{"path": str(path), "reason": reason} for path, reason in contents.refused.items()],
        "uncommitted": [str(path) for path in contents.uncommitted],
        "failed_saves": [
            {"time_utc": row.get("time_utc"), "step": row.get("step"), "error": row.get("error")}
            for row in contents.failed_saves
        ],
    })  # fmt: skip


def _facts(inspected: Inspected) -> dict[str, Any]:
    commit = inspected.commit
    return {
        "path": str(commit.path),
        "step": commit.identity.step,
        "epoch": epoch_of(inspected.state),
        "kinds": commit.kinds,
        "bytes": commit.size_bytes,
        "created": commit.attempt.created,
        "parts": len(commit.parts),
        "generation": commit.identity.generation,
        "lineage": commit.identity.lineage,
        "run_id": commit.attempt.run_id,
    }


def show_text(inspected: Inspected, *, every_tensor: bool) -> Iterator[str]:
    """One checkpoint as text."""
    commit, state = inspected.commit, inspected.state
    yield str(commit.path)
    yield ""
    rows: list[Cells] = [("step", str(commit.identity.step))]
    said = {**state, "epoch": epoch_of(inspected.state)}
    rows += [(word, _value(said[key])) for key, word in _STATE_WORDS.items() if said.get(key) not in (None, {})]
    if "global_batch" in state:
        rows.append(("global batch", batch_text(state["global_batch"])))
    rows += [
        ("kinds", ", ".join(commit.kinds)),
        ("created (UTC)", _time(commit.attempt.created)),
        ("run", commit.attempt.run_id),
        ("lineage", commit.identity.lineage),
        ("generation", str(commit.identity.generation)),
    ]
    yield from table(rows, left=(0, 1))
    yield ""
    groups: list[Cells] = [("", "tensors", "elements", "size")]
    for name, count, elements, size in _groups(inspected):
        groups.append((name, str(count), f"{elements:,}", size_text(size)))
    yield from table(groups, left=(0,))
    yield ""
    specs = sorted(inspected.specs, key=lambda spec: -spec.bytes)
    shown = inspected.specs if every_tensor else specs[:_SHOWN_TENSORS]
    tensors: list[Cells] = [("tensor" if every_tensor else "largest", "type", "shape", "size")]
    tensors += [(spec.name, spec.dtype, "x".join(map(str, spec.shape)) or "-", size_text(spec.bytes)) for spec in shown]
    yield from table(tensors, left=(0, 1, 2))
    yield ""
    parts: list[Cells] = [("part", "pieces", "size")]
    for index, (record, header) in enumerate(zip(commit.parts, inspected.headers)):
        parts.append((str(index), str(len(header.pieces)), size_text(record.size_bytes)))
    yield from table(parts, left=())


def show_json(inspected: Inspected, passed_over: Sequence[str]) -> str:
    """One checkpoint as one line of JSON, for scripts."""
    return _json({
        **_facts(inspected),
        "state": inspected.state,
        "groups": [
            {"name": name, "tensors": count, "elements": elements, "bytes": size}
            for name, count, elements, size in _groups(inspected)
        ],
        "tensors": [
            {"name": spec.name, "dtype": spec.dtype, "shape": spec.shape, "bytes": spec.bytes}
            for spec in inspected.specs
        ],
        "part_bytes": [record.size_bytes for record in inspected.commit.parts],
        "passed_over": passed_over,
    })  # fmt: skip


def _groups(inspected: Inspected) -> list[tuple[str, int, int, int]]:
    """Name, tensors, elements and bytes of each group: model, optimizer, and other tensors."""
    words = {"model": "model", "optim": "optimizer"}
    sums: dict[str, tuple[int, int, int]] = {}
    for spec in inspected.specs:
        name = words.get(spec.name.partition(".")[0], "other")
        count, elements, size = sums.get(name, (0, 0, 0))
        sums[name] = (count + 1, elements + spec.elements, size + spec.bytes)
    return [(name, *counts) for name, counts in sums.items()]


def batch_text(batch: Any) -> str:
    """The global batch of a state.json: samples or tokens per step, or the number of micro-batches of each rank."""
    given = batch if isinstance(batch, dict) else {}
    for unit in ("samples", "tokens"):
        if given.get(unit):
            return f"{_value(given[unit])} {unit}"
    return _value(batch)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value)


def _time(created: str) -> str:
    """ "2026-01-31T12:00:00Z" in readable form."""
    return created.replace("T", " ").removesuffix("Z")


def size_text(count: int) -> str:
    """Bytes in readable units, in powers of ten: 1.2 MB."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def counted(count: int, noun: str) -> str:
    """1 checkpoint, 2 checkpoints."""
    return f"{count} {noun}{'s' * (count != 1)}"


def _json(record: Mapping[str, Any]) -> str:
    return json_line(record).decode().rstrip()
