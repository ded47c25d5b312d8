"""Performance advice below the table of ranks; each sentence names something the user can change. Pure.

Decides what is worth a sentence and which option or command would help. It takes the medians of some steps (see
`rank_table`) and knows no clock, file or rank. Other clusters are predicted with the model of `hetseq plan`.

The one idea: following advice costs work, so each kind has a threshold below which nothing is said. A sentence that is
shown is withdrawn only at four fifths of its threshold, because advice that comes and goes is not believed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetseq.balance.shares import NEGLIGIBLE_GAIN
from hetseq.balance.simulation import RankModel, best_shares, predict, ring_factor
from hetseq.monitor.rank_table import RankSummary
from hetseq.monitor.step_time import TOLD, TOLD_OF_STAIRS, known_cost

ADVICE_STEPS = 20  # per judgement: enough to leave the first shares of a run, and one slow read, behind

_DATA = 0.05  # fraction of a step that a rank waits for its data
_MEMORY = 0.95  # fraction of the memory limit
_STAYS = 0.8  # fraction of a limit, for a sentence that is already shown
_MOST_SENTENCES = 3
_MOST_JUDGED = 8  # nodes removed in prediction, the slowest first; each costs the time of a rebalance


@dataclass(frozen=True)
class AdviceSetting:
    """The options that advice depends on: `run` as a user writes it.

    `unit` is how many samples are dealt as one piece, 0 if something else is dealt (tokens). `is_arranged`: the user
    (fixed shares, --throttle) or the place of the data decides the shares, so no advice is given about them.
    """

    run: str
    unit: int = 1
    is_arranged: bool = False


@dataclass(frozen=True)
class Advice:
    """One sentence; `key` stays the same while its figures change."""

    key: str
    text: str


class Adviser:
    """Remembers which sentences are shown."""

    def __init__(self, setting: AdviceSetting) -> None:
        self._setting = setting
        self._standing: tuple[Advice, ...] = ()

    def look(self, summary: RankSummary | None) -> tuple[Advice, ...]:
        """The sentences to show after these steps; unchanged if there are too few steps to judge by."""
        if summary is not None and summary.steps >= ADVICE_STEPS:
            keys = frozenset(advice.key for advice in self._standing)
            self._standing = advise(summary, self._setting, standing=keys)
        return self._standing


def advise(
    summary: RankSummary, setting: AdviceSetting, *, standing: frozenset[str] = frozenset()
) -> tuple[Advice, ...]:
    """At most three sentences about these steps, the most urgent first; `standing`: the keys shown so far."""
    if not summary.step_s or len(summary.share) < 1:
        return ()
    found = [*_about_memory(summary, standing), *_about_data(summary, standing)]
    if not setting.is_arranged:
        found += _about_ranks(summary, _models(summary), setting, standing)
    return tuple(found[:_MOST_SENTENCES])


# one kind of advice each


def _about_memory(summary: RankSummary, standing: frozenset[str]) -> Iterator[Advice]:
    """A GPU has its own memory; the CPU ranks of a node share the memory of the node."""
    nodes, devices = _nodes(summary), _devices(summary)
    used: dict[str, float] = {}
    for rank, node in enumerate(nodes):
        own, limit = summary.memory_bytes[rank], summary.memory_limit_bytes[rank]
        if limit > 0 and own > 0:
            place = _named(summary, rank) if devices[rank] != "cpu" else f"{node or 'this node'} (all ranks on its CPU)"
            used[place] = used.get(place, 0.0) + own / limit
    if used:
        place, part = max(used.items(), key=lambda item: item[1])
        if part > _limit(_MEMORY, "memory", standing, stays=0.97):
            yield Advice(
                "memory",
                f"{place} has used {part:.0%} of its memory: a smaller --batch-size there leaves room",
            )


def _about_data(summary: RankSummary, standing: frozenset[str]) -> Iterator[Advice]:
    parts = summary.data_s / _step_s(summary)
    late = np.flatnonzero(np.nan_to_num(parts) > max(_limit(_DATA, "data", standing), summary.step_spread))
    if len(late):
        worst = int(late[np.argmax(parts[late])])
        others = (
            f", and {len(late) - 1} other rank{'s wait' if len(late) > 2 else ' waits'} too" if len(late) > 1 else ""
        )
        node = _nodes(summary)[worst]
        yield Advice(
            "data",
            f"{_named(summary, worst)} waits {parts[worst]:.0%} of a step for its data{others}: more --num-workers"
            + (f" on {node}" if node else "")
            + " may help",
        )


def _about_ranks(
    summary: RankSummary, models: Sequence[RankModel], setting: AdviceSetting, standing: frozenset[str]
) -> Iterator[Advice]:
    """Nodes, and ranks of a node, whose removal would shorten a step by more than the spread between steps."""
    if len(models) < 2 or summary.communication_s is None:
        return
    total = _total(summary)
    with_all_s = _best_step_s(models, total, summary.communication_s, setting)
    for node, group in _judged(summary):
        if np.nansum(summary.owned_bytes[list(group)]):
            continue  # its part of the state may fit nowhere else
        others = [model for rank, model in enumerate(models) if rank not in group]
        if all(model.cost.limit == 0 for model in others):
            continue
        communication_s = summary.communication_s * ring_factor(len(others)) / ring_factor(len(models))
        gain = min(
            1 - _best_step_s(others, total, communication_s, setting) / with_all_s,
            _most_gain(summary, group),
        )
        key = f"without {'+'.join(str(summary.slots[rank]) for rank in group)}"
        if gain <= max(_limit(NEGLIGIBLE_GAIN, key, standing), summary.step_spread):
            continue
        is_first = 0 in group  # the run ends with its first node
        if len(group) == _nodes(summary).count(node) and not is_first:
            yield Advice(key, f"{node} costs {gain:.0%} of a step: `hetseq drop {setting.run} {node}` takes it out")
        else:
            place = node if len(group) > 1 else _named(summary, group[0])
            yield Advice(key, f"{place} costs {gain:.0%} of a step: a start without it (--devices) would be faster")
        return  # only the worst: without it, the predictions are for another cluster


# helpers of the sentences


def _most_gain(summary: RankSummary, group: Sequence[int]) -> float:
    """Upper bound of the gain without these ranks: the others compute at least as much as they do now."""
    others = [rank for rank in range(len(summary.share)) if rank not in group]
    return 1 - float(np.nan_to_num(summary.compute_s[others]).max(initial=0.0)) / _step_s(summary)


def _limit(limit: float, key: str, standing: frozenset[str], *, stays: float = _STAYS) -> float:
    return limit * stays if key in standing else limit


def _step_s(summary: RankSummary) -> float:
    return summary.step_s or math.nan


def _total(summary: RankSummary) -> int:
    return int(summary.share.sum())


def _models(summary: RankSummary) -> list[RankModel]:
    """The ranks as the planner sees them; a rank that had no work has no known cost and is given no samples."""
    # as lists: NumPy scalars, one by one, took half of the time of an advice on 256 ranks, 13 of 26 ms
    told = {
        name: [None if math.isnan(number) else number for number in getattr(summary, name).tolist()]
        for name in (*TOLD, *TOLD_OF_STAIRS)
    }
    models = []
    for rank, share in enumerate(summary.share.tolist()):
        cost = known_cost(share, {name: numbers[rank] for name, numbers in told.items()})
        models.append(RankModel(summary.names[rank], cost, told["overhead_s"][rank] or 0.0))
    return models


def _best_step_s(models: Sequence[RankModel], total: int, communication_s: float, setting: AdviceSetting) -> float:
    if all(model.cost.limit == 0 for model in models):
        return math.inf
    shares = best_shares(models, total, setting.unit or 1)
    return predict(models, shares, communication_s=communication_s).step_s


def _judged(summary: RankSummary) -> list[tuple[str, tuple[int, ...]]]:
    """Nodes with their ranks, and single ranks of nodes that have several, the slowest first."""
    nodes = _nodes(summary)
    by_node = {node: tuple(rank for rank, own in enumerate(nodes) if own == node) for node in dict.fromkeys(nodes)}
    groups = list(by_node.items()) if len(by_node) > 1 else []
    groups += [(nodes[rank], (rank,)) for ranks in by_node.values() if len(ranks) > 1 for rank in ranks]
    speeds = np.nan_to_num(summary.samples_per_s)
    return sorted(groups, key=lambda group: (speeds[list(group[1])].mean(), -len(group[1])))[:_MOST_JUDGED]


def _nodes(summary: RankSummary) -> list[str]:
    return [name.rpartition("/")[0] for name in summary.names]


def _devices(summary: RankSummary) -> list[str]:
    return [name.rpartition("/")[2].partition(":")[0] for name in summary.names]


def _named(summary: RankSummary, rank: int) -> str:
    name = summary.names[rank]
    return f"rank {summary.slots[rank]} ({name})" if name else f"rank {summary.slots[rank]}"
