"""What a run has found out about its ranks: the last steady steps of its `metrics.jsonl`, as a model of the cluster.

Responsible for choosing the steps to judge by, and for saying what is missing in them. It reads one file and predicts
nothing. The one idea: a run may have been resumed elsewhere, may have changed its shares, and ends its epochs with odd
steps, so only steps of the present ranks with the same shares count, and of those the median.
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

_ROWS = 50  # how many of the last steps are looked at
_SETTLING = 5  # the first steps of a run: caches, connections, shares that are not yet known
_ENOUGH = 5  # steps with equal shares of which the median is believed


@dataclass(frozen=True)
class MeasuredRun:
    """What the last steady steps of a run say: medians over `steps` steps; lists by rank."""

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
        """What the model's times are multiplied by, so that it gives the measured step."""
        return self.step_s / predict(self.ranks, self.shares, communication_s=self.communication_s).step_s

    def communication_of(self, world_size: int) -> float:
        """The exchange with so many ranks: the measured one, in proportion to the bytes each link carries in a ring."""
        measured = ring_factor(len(self.ranks))
        return self.communication_s * ring_factor(world_size) / measured if measured else 0.0


def read_measured(run: Path) -> MeasuredRun:
    """The last steady steps in the `metrics.jsonl` of a run directory. Raises ConfigError where they are missing."""
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
    ]  # of many ranks: some
    ranks: tuple[RankModel, ...]
    notes: tuple[str, ...]
    if world_size == 1 and "ranks" not in steady[-1]:
        noise = tuple(row["seconds"] / step_s for row in steady)
        ranks = (RankModel("", Cost(0.0, step_s / shares[0]), noise=noise),)
        notes = ("one rank: its fixed cost per step is not known and is taken as none",)
        communication_s = 0.0
    elif not telling:
        raise ConfigError(
            f"{path}: the steps up to {steady[-1]['step']} do not say what each rank costs (no `ranks` in their rows):"
            " an older HetSeq wrote them; go on with the run for a few steps with this one, and ask again"
        )
    else:
        telling = with_present_micro_batches(telling)
        ranks, notes = _rank_models(path, telling, shares)
        communication_s = statistics.median(row["communication_s"] for row in telling)
    if world_size == 1:
        notes += ("one rank exchanges nothing: the exchange with more of them is not known and is taken as none",)
    return MeasuredRun(run, len(steady), steady[-1]["step"], shares, step_s, ranks, communication_s, notes)


def _steady(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The steps to judge by: the last ones of the present membership, all with the same shares."""
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
    """Where the ranks are; None in a row that does not say."""
    return (row.get("ranks") or {}).get("names")


def _rank_models(
    path: Path, rows: Sequence[Mapping[str, Any]], shares: Sequence[int]
) -> tuple[tuple[RankModel, ...], tuple[str, ...]]:
    """The ranks of these rows, and what had to be assumed of them."""
    models, notes = [], []
    keys = (*TOLD, *(key for key in TOLD_OF_STAIRS if key in rows[-1]["ranks"]))
    for rank, share in enumerate(shares):
        told = {key: _median(path, rows, key, rank) for key in keys}
        name = str((_names(rows[-1]) or [""] * len(shares))[rank])
        cost = known_cost(share, told)
        if cost.limit == 0:
            notes.append(f"{named(rank, name)} has had no samples yet: its speed is not known, and it is given none")
        elif not told["per_sample_s"]:
            notes.append(f"{named(rank, name)}: its fixed and its per-sample cost are not told apart yet")
        models.append(RankModel(name, cost, told["overhead_s"] or 0.0, _noise(rows, rank, told["compute_s"])))
    return tuple(models), tuple(notes)


def _noise(rows: Sequence[Mapping[str, Any]], rank: int, usual_s: float | None) -> tuple[float, ...]:
    """By row how long the rank computed over how long it usually does; none for a rank that computes nothing."""
    times = [row["ranks"]["compute_s"][rank] for row in rows]
    return tuple(time / usual_s for time in times) if usual_s and None not in times else ()


def named(rank: int, name: str) -> str:
    """A rank in words: `rank 2 (labB/cpu)`, or `rank 2` where no row says where it is."""
    return f"rank {rank} ({name})" if name else f"rank {rank}"


def _median(path: Path, rows: Sequence[Mapping[str, Any]], key: str, rank: int) -> float | None:
    """The middle of what the rows say of a rank; None if none of them knows it."""
    try:
        values = [row["ranks"][key][rank] for row in rows]
    except (KeyError, IndexError):
        raise ConfigError(
            f"{path}: the rows do not say {key} of rank {rank}: another version of HetSeq wrote them; go on with the"
            " run for a few steps with this one, and ask again"
        ) from None
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
