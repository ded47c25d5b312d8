"""Cost model of a run's ranks, from the last steady steps of its `metrics.jsonl`.

Chooses the steps to use, and reports missing measurements. It reads one file and predicts nothing. The one idea: a run
may have been resumed elsewhere, may have changed its shares, and ends its epochs with odd steps. So only steps of the
present ranks with the same shares count, and the median of these.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetseq.balance.shares import Cost
from hetseq.balance.simulation import RankModel, predict, ring_factor
from hetseq.errors import ConfigError
from hetseq.monitor.metrics import read_rows
from hetseq.monitor.rank_table import with_present_micro_batches
from hetseq.monitor.step_time import TOLD, TOLD_OF_STAIRS, known_cost
from hetseq.which_run import existing_run

_ROWS = 50  # last steps to look at
_SETTLING = 5  # first steps of a run: caches, connections, shares that are not yet known
_ENOUGH = 5  # steps with equal shares for a reliable median


@dataclass(frozen=True)
class MeasuredRun:
    """Measurements of the last steady steps of a run: medians over `steps` steps; lists by rank."""

    run: Path
    steps: int
    last_step: int
    shares: tuple[int, ...]
    step_s: float
    ranks: tuple[RankModel, ...]
    communication_s: float
    notes: tuple[str, ...] = ()
    unit: int = 1  # samples that are dealt as one piece

    @property
    def total(self) -> int:
        """Samples of a step."""
        return sum(self.shares)

    @property
    def scale(self) -> float:
        """The factor from the model's times to the measured step."""
        return self.step_s / predict(self.ranks, self.shares, communication_s=self.communication_s).step_s

    def communication_of(self, world_size: int) -> float:
        """Seconds of the exchange between `world_size` ranks, scaled by the bytes that each link carries in a ring."""
        measured = ring_factor(len(self.ranks))
        return self.communication_s * ring_factor(world_size) / measured if measured else 0.0


def read_measured(run: Path) -> MeasuredRun:
    """Read the last steady steps in the `metrics.jsonl` of a run directory. Raises ConfigError if there are none."""
    path = existing_run(run).metrics
    try:
        rows = read_rows(path)
    except FileNotFoundError:
        rows = []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    steps = [row for row in rows if row.get("shares") and row.get("seconds") and not row.get("skipped")]
    if not steps:
        raise ConfigError(f"{path} has no step yet: expected the rows of at least one; train first")
    steady = _steady(steps)
    shares, world_size = tuple(steady[-1]["shares"]), len(steady[-1]["shares"])
    step_s = statistics.median(row["seconds"] for row in steady)
    telling = [
        row for row in steady if row.get("ranks") and row.get("communication_s") is not None
    ]  # in a large world, only some rows have them
    ranks: tuple[RankModel, ...]
    notes: tuple[str, ...]
    if world_size == 1 and "ranks" not in steady[-1]:
        noise = tuple(row["seconds"] / step_s for row in steady)
        ranks = (RankModel("", Cost(0.0, step_s / shares[0]), noise=noise),)
        notes = ("one rank: its fixed cost per step is unknown and assumed to be 0",)
        communication_s = 0.0
    elif not telling:
        raise ConfigError(
            f"{path}: the steps up to {steady[-1]['step']} lack the cost of each rank (no `ranks` in their rows): an"
            " older HetSeq wrote them; continue the run for a few steps with this version, and try again"
        )
    else:
        telling = with_present_micro_batches(telling)
        ranks, notes = _rank_models(path, telling, shares)
        communication_s = statistics.median(row["communication_s"] for row in telling)
    if world_size == 1:
        notes += ("one rank exchanges nothing: the exchange between several is unknown and assumed to take 0 s",)
    return MeasuredRun(run, len(steady), steady[-1]["step"], shares, step_s, ranks, communication_s, notes)


def _steady(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The steps to use: the last ones of the present membership, all with the same shares."""
    names = next((names for row in reversed(steps) if (names := _names(row)) is not None), None)
    recent = list[Mapping[str, Any]]()
    for row in reversed(steps):
        is_same = all(row.get(key) == steps[-1].get(key) for key in ("world_size", "generation"))
        if len(recent) == _ROWS or not is_same or _names(row) not in (None, names):
            break
        recent.append(row)
    recent.reverse()
    if len(recent) < _ROWS:
        recent = recent[_SETTLING:] or recent[-1:]
    usual, _ = Counter(sum(row["shares"]) for row in recent).most_common(1)[0]  # the last step of an epoch is smaller
    newest_first = [tuple(row["shares"]) for row in reversed(recent) if sum(row["shares"]) == usual]
    counts = Counter(newest_first)
    chosen = next((shares for shares in newest_first if counts[shares] >= _ENOUGH), counts.most_common(1)[0][0])
    return [row for row in recent if tuple(row["shares"]) == chosen]


def _names(row: Mapping[str, Any]) -> list[str] | None:
    """Node and device of the ranks; None if the row lacks them."""
    return (row.get("ranks") or {}).get("names")


def _rank_models(
    path: Path, rows: Sequence[Mapping[str, Any]], shares: Sequence[int]
) -> tuple[tuple[RankModel, ...], tuple[str, ...]]:
    """The ranks of these rows, and notes about assumptions."""
    models, notes = [], []
    keys = (*TOLD, *(key for key in TOLD_OF_STAIRS if key in rows[-1]["ranks"]))
    for rank, share in enumerate(shares):
        told = {key: _median(path, rows, key, rank) for key in keys}
        name = str((_names(rows[-1]) or [""] * len(shares))[rank])
        cost = known_cost(share, told)
        if cost.limit == 0:
            notes.append(f"{named(rank, name)} has had no samples yet: its speed is unknown, and it gets none")
        elif not told["per_sample_s"]:
            notes.append(f"{named(rank, name)}: its fixed and its per-sample cost cannot be separated yet")
        models.append(RankModel(name, cost, told["overhead_s"] or 0.0, _noise(rows, rank, told["compute_s"])))
    return tuple(models), tuple(notes)


def _noise(rows: Sequence[Mapping[str, Any]], rank: int, usual_s: float | None) -> tuple[float, ...]:
    """By row, the computing time of the rank / its usual time; empty for a rank that computes nothing."""
    times = [row["ranks"]["compute_s"][rank] for row in rows]
    return tuple(time / usual_s for time in times) if usual_s and None not in times else ()


def named(rank: int, name: str) -> str:
    """A rank in words: `rank 2 (labB/cpu)`, or `rank 2` without a name."""
    return f"rank {rank} ({name})" if name else f"rank {rank}"


def _median(path: Path, rows: Sequence[Mapping[str, Any]], key: str, rank: int) -> float | None:
    """The median of a rank's known values in the rows; None if none is known."""
    try:
        values = [row["ranks"][key][rank] for row in rows]
    except (KeyError, IndexError):
        raise ConfigError(
            f"{path}: the rows lack {key} of rank {rank}: another version of HetSeq wrote them; continue the run for a"
            " few steps with this version, and try again"
        ) from None
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
