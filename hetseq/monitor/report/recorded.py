"""The records of a run as NumPy arrays, by step and by rank, for notebooks and reports.

`load_run` reads the rows, events and saves of a run directory, finished or in progress. It changes no file, does not
follow a run and imports no torch.

The one idea: a file is read line by line straight into flat columns, so a run of 100,000 steps on 64 ranks is never in
memory as Python objects. A missing value is NaN or empty, never an error: the last line of a run in progress is torn, a
run of one rank has no `ranks`, and of two rows of a step the later counts.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from hetseq.checkpoint.history import COLUMNS, read_history
from hetseq.errors import ConfigError
from hetseq.monitor.metrics import row_key
from hetseq.monitor.step_time import TOLD_OF_OWNERS
from hetseq.which_run import existing_run

logger = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]
Floats32 = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

_RUN_ID = re.compile(r"\brun id ([0-9a-f]{16})\b")
_SCALARS = ("epoch", "loss", "lr", "grad_norm", "samples", "seconds", "generation", "communication_s", "efficiency")
_OF_RANKS = ("compute_s", "wait_s", "data_s", "overhead_s")
_OF_OWNERS = (*TOLD_OF_OWNERS, "memory_bytes")
_NOT_NUMBERS = ("time_utc", "run", "tier", "kinds", "result", "error")


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """The records of a run directory, as returned by `hetseq.load_run`.

    With n steps and m slots (places of workers; a worker that replaces another has its slot), arrays by step are (n,)
    and arrays by step and slot (n, m). Durations are in seconds; NaN means unknown or absent.
    """

    path: Path
    #: 16 hexadecimal digits, "" if config.yaml is absent
    run_id: str
    #: the options of `config.yaml` by their keys, as YAML loads them
    config: Mapping[str, Any]
    #: the text of `config.yaml`
    config_text: str
    #: (n,) the numbers of the steps, ascending
    steps: Integers
    #: (n,) from 1
    epoch: Floats
    #: (n,) nats, before the update; NaN where the step was skipped because its gradient was not finite
    loss: Floats
    #: by loss term: (n,) its sum / its count, NaN where no sample had it
    terms: Mapping[str, Floats]
    #: (n,)
    lr: Floats
    #: (n,) of the whole gradient before clipping
    grad_norm: Floats
    #: (n,) samples of the step over all ranks
    samples: Floats
    #: (n,) seconds of the step
    seconds: Floats
    #: (n,) seconds in steps up to and including this one: without validations, blocking saves, and pauses
    elapsed_s: Floats
    #: (n,) counts the memberships of the run since it was started
    generation: Floats
    #: (n,) seconds that every rank spent in communication without computing
    communication_s: Floats
    #: (n,) the speed of the run / the sum of the speeds of its ranks alone
    efficiency: Floats
    #: (m,) the slots that ever took part, ascending
    slots: Integers
    #: by slot: its last node and device, "" if no row has them
    names: tuple[str, ...]
    #: (n, m) samples of each slot, NaN where it did not take part
    shares: Floats32
    #: (n, m) seconds in forward and backward
    compute_s: Floats32
    #: (n, m) seconds of waiting for slower ranks
    wait_s: Floats32
    #: (n, m) seconds of waiting for the loader
    data_s: Floats32
    #: (n, m) seconds in the optimizer, in reporting and the like
    overhead_s: Floats32
    #: with `--shard-model` by kind: (n, m) bytes, `owned_bytes` of the state, `sent_bytes` and `received_bytes` of the
    #: step, `memory_bytes` in use, and if there was a plan `planned_bytes`; empty without
    sharding: Mapping[str, Floats]
    #: by subset: `step` (v,) and each figure without its `valid_` (v,)
    validation: Mapping[str, Mapping[str, Floats]]
    #: by slot: the last state of its rank in `status/`: start, train, done, stopped or gone
    states: Mapping[int, str]
    #: rows of `events.jsonl` as they were written
    events: tuple[Mapping[str, Any], ...] = field(repr=False)
    #: rows of `checkpointHistories.csv`; numbers as float, NaN where a cell is empty
    checkpoints: tuple[Mapping[str, Any], ...] = field(repr=False)

    @property
    def world_size(self) -> Integers:
        """(n,) the number of ranks of each step."""
        sizes: Integers = np.isfinite(self.shares).sum(axis=1, dtype=np.int64)
        return sizes

    @property
    def versions(self) -> dict[int, dict[str, str]]:
        """By slot: `node`, `device`, and the software of its rank when it last joined, such as `torch` and `driver`."""
        found: dict[int, dict[str, str]] = {}
        for event in self.events:
            nodes = event.get("nodes") if event.get("event") == "versions" else None
            for entry in nodes if isinstance(nodes, list) else ():
                with suppress(KeyError, TypeError, ValueError):
                    told = {str(key): value for key, value in entry.items() if isinstance(value, str)}
                    for slot, device in zip(entry["ranks"], entry["devices"], strict=True):
                        found[int(slot)] = {**told, "device": str(device)}
        return dict(sorted(found.items()))

    def _repr_html_(self) -> str:
        """The loss curve as a picture, for notebooks."""
        from hetseq.monitor.report.page import notebook_view

        return notebook_view(self)


def load_run(directory: str | os.PathLike[str]) -> RecordedRun:
    """Load the records of a run directory (`--save-dir`) into NumPy arrays; the run may be in progress.

    Raises ConfigError if the directory does not exist, has no run in it, or cannot be read.
    """
    run = existing_run(Path(os.path.abspath(directory)))
    try:
        columns = _Columns()
        for row in _rows(run.metrics):
            columns.add(row)
        config_text = run.config_file.read_text("utf-8", "replace") if run.config_file.is_file() else ""
        events, saves = tuple(_rows(run.events)), tuple(map(_save, read_history(run.history)))
    except OSError as error:
        raise ConfigError(f"{error.filename or run.path} cannot be read: {error.strerror}") from None
    run_id = _RUN_ID.search(config_text.partition("\n")[0])
    return RecordedRun(
        path=run.path, run_id=run_id.group(1) if run_id else "", config=_options(config_text), config_text=config_text,
        states=_states(run.status), events=events, checkpoints=saves, **columns.arrays(),
    )  # fmt: skip


def until(run: RecordedRun, step: int) -> RecordedRun:
    """The records of a run up to and including a step: all that a checkpoint of this step is the result of."""
    is_before = run.steps <= step  # (n,)
    by_step: dict[str, Any] = {
        entry.name: value[is_before]
        for entry in fields(run)
        if entry.name != "slots" and isinstance(value := getattr(run, entry.name), np.ndarray)
    }
    validation = {
        subset: {name: values[is_in] for name, values in figures.items()}
        for subset, figures in run.validation.items()
        if (is_in := figures["step"] <= step).any()
    }
    terms = {name: values[is_before] for name, values in run.terms.items()}
    sharding = {name: values[is_before] for name, values in run.sharding.items()}
    # an event names the step before it, so one that names this step came later
    events = tuple(event for event in run.events if _number(event.get("step")) < step)
    saves = tuple(save for save in run.checkpoints if save["step"] <= step)
    return replace(
        run, **by_step, terms=terms, sharding=sharding, validation=validation, events=events, checkpoints=saves
    )


class _Columns:
    """The rows of a `metrics.jsonl` in flat columns, in the order of the file."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._scalars = {key: array("d") for key in _SCALARS}
        self._terms: dict[str, tuple[array[int], array[float]]] = {}  # row, value
        self._row, self._slot, self._share = array("q"), array("q"), array("f")
        self._of_ranks = {key: array("f") for key in _OF_RANKS}
        self._owners: dict[str, tuple[array[int], array[float]]] = {}  # place in the columns of ranks, value
        self._names: dict[int, str] = {}
        self._validations: dict[tuple[int, str], Mapping[str, Any]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        step = row.get("step")
        if not _is_count(step):
            return
        key = row_key(row)
        if key[1]:
            self._validations[key] = row
            return
        number = len(self._steps)
        self._steps.append(step)
        for name, column in self._scalars.items():
            column.append(_number(row.get(name)))
        terms = row.get("terms")
        for name, value in terms.items() if isinstance(terms, dict) else ():
            rows, values = self._terms.setdefault(name, (array("q"), array("d")))
            rows.append(number)
            values.append(_number(value))
        self._add_ranks(number, row)

    def _add_ranks(self, number: int, row: Mapping[str, Any]) -> None:
        shares = row.get("shares")
        if not isinstance(shares, list):
            return
        size = len(shares)
        slots = row.get("slots", range(size))
        if not isinstance(slots, (list, range)) or len(slots) != size or not all(map(_is_count, slots)):
            return
        self._row.extend([number] * size)
        self._slot.extend(slots)
        self._share.extend(map(_number, shares))
        ranks = row.get("ranks")
        if not isinstance(ranks, dict):
            ranks = {}
        if size == 1 and not ranks:  # a single rank never waits, and its row does not break the step down
            ranks = {"compute_s": [row.get("seconds")]}
        for key, column in self._of_ranks.items():
            values = ranks.get(key)
            if not isinstance(values, list) or len(values) != size:
                values = [None] * size
            column.extend(map(_number, values))
        for key in _OF_OWNERS if "owned_bytes" in ranks else ():
            values = ranks.get(key)
            if isinstance(values, list) and len(values) == size:
                places, known = self._owners.setdefault(key, (array("q"), array("d")))
                places.extend(range(len(self._row) - size, len(self._row)))
                known.extend(map(_number, values))
        names = ranks.get("names")
        if isinstance(names, list) and len(names) == size:
            self._names.update(zip(slots, map(str, names)))

    def arrays(self) -> dict[str, Any]:
        """The fields of a `RecordedRun` that come from this file."""
        written = np.array(self._steps, np.int64)
        # of two rows of a step the later counts: the first of the reversed ones
        steps, places = np.unique(written[::-1], return_index=True)
        kept = len(written) - 1 - places
        scalars = {key: np.array(column, np.float64)[kept] for key, column in self._scalars.items()}
        slots, columns = np.unique(np.array(self._slot, np.int64), return_inverse=True)
        rows, size = np.array(self._row, np.int64), (len(written), len(slots))

        def spread(values: array[float]) -> Floats32:
            table = np.full(size, np.nan, np.float32)
            table[rows, columns] = np.array(values, np.float32)
            return table[kept]

        def spread_some(places: array[int], values: array[float]) -> Floats:
            table, at = np.full(size, np.nan), np.array(places, np.int64)
            table[rows[at], columns[at]] = np.array(values)
            return table[kept]

        return {
            "steps": steps, **scalars, "elapsed_s": np.cumsum(np.nan_to_num(scalars["seconds"])),
            "terms": {name: self._term(name, len(written))[kept] for name in self._terms}, "slots": slots,
            "names": tuple(self._names.get(int(slot), "") for slot in slots), "shares": spread(self._share),
            **{key: spread(column) for key, column in self._of_ranks.items()}, "validation": self._validation(),
            "sharding": {key: spread_some(*known) for key, known in self._owners.items()},
        }  # fmt: skip

    def _term(self, name: str, size: int) -> Floats:
        rows, values = self._terms[name]
        column = np.full(size, np.nan)
        column[np.array(rows, np.int64)] = np.array(values)
        return column

    def _validation(self) -> dict[str, dict[str, Floats]]:
        subsets: dict[str, list[Mapping[str, Any]]] = {}
        for (_, subset), row in sorted(self._validations.items(), key=lambda item: item[0]):
            subsets.setdefault(subset, []).append(row)
        found = {}
        for subset, rows in subsets.items():
            names = sorted({key for row in rows for key in row if key.startswith("valid_")})
            figures = {
                key.removeprefix("valid_"): np.array([_number(row.get(key)) for row in rows]) for key in names
            }  # fmt: skip
            found[subset] = {"step": np.array([float(row["step"]) for row in rows]), **figures}
        return found


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file of JSON lines, without a torn last line; none if the file is absent."""
    if not path.is_file():
        return
    broken = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if isinstance(row, dict):
                yield row
            else:
                broken += 1
    if broken:
        logger.warning("%s: %d lines are not rows and are left out", path, broken)


def _states(folder: Path) -> dict[int, str]:
    found = {}
    for path in folder.glob("rank-*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            found[int(path.stem.partition("-")[2])] = str(json.loads(path.read_text("utf-8"))["state"])
    return found


def _is_count(value: Any) -> TypeGuard[int]:
    """Whether this is a whole number >= 0 that a column can hold."""
    return type(value) is int and 0 <= value < 1 << 63


def _number(value: object) -> float:
    """A number of JSON; NaN for everything else."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _save(row: Mapping[str, str | None]) -> dict[str, Any]:
    return {column: row.get(column) or "" if column in _NOT_NUMBERS else _cell(row.get(column)) for column in COLUMNS}


def _cell(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def _options(text: str) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


def names_of(run: RecordedRun) -> Sequence[str]:
    """The names of the slots of a run: `rank 2, labB/cpu`."""
    return [f"rank {slot}, {name}" if name else f"rank {slot}" for slot, name in zip(run.slots, run.names)]
