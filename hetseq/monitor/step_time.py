"""Time breakdown of a step by rank, from the rows that all ranks brought to its commit. Pure.

A step lasts as long as its slowest rank plus the communication after it. Every rank is busy for a while (data, forward
and backward, its update), then idle. All others waited for the rank that is idle least, and its idle time is the time
of communication; the rest of another rank's idle time is its wait for peers.

`known_cost` gives a later reader of such a row the cost of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from hetseq.balance.shares import Cost
from hetseq.cluster.membership.step_commit import CommitRow, Measured, OwnedBytes

#: keys of each rank in a row of `metrics.jsonl` from which `known_cost` makes its cost
TOLD = ("compute_s", "overhead_s", "fixed_s", "per_sample_s")
#: and keys that rows of older versions lack, whose costs are linear
TOLD_OF_STAIRS = ("per_micro_batch_s", "micro_batch")
#: and keys of each rank where ranks own parts of the state
TOLD_OF_OWNERS = tuple(field.name for field in fields(OwnedBytes))


def busy_s(measured: Measured) -> float:
    """Seconds that a rank worked in a step, including the wait for its data but not for peers."""
    return measured.compute_s + measured.data_s + measured.overhead_s


def account(
    rows: Sequence[CommitRow], *, shares: Sequence[int], work: int, seconds: float, samples: int | None = None
) -> dict[str, Any]:
    """The keys of `metrics.jsonl` about the ranks: `communication_s`, `efficiency`, `pace` and `ranks`, lists by rank.

    `samples` are those of the step (default: the sum of the shares), of which several ranks may compute the same.
    `work` is the total weight of the step's samples when they were divided. The efficiency is the speed of the run /
    the sum of the speeds that its ranks would have on their own, at their shares; None if one of them is unknown. One
    that owns a part of the state and has never had samples is a memory server, and has no speed.
    """
    samples, measured = sum(shares) if samples is None else samples, [row.measured for row in rows]
    costs = [_in_samples(one.cost, share, work / samples) for share, one in zip(shares, measured)]
    least_idle_s = min(one.idle_s for one in measured)
    busy = [busy_s(one) for one in measured]
    speeds = [_solo_speed(share, one, work / samples) for share, one in zip(shares, measured)]
    serves = [share == 0 and one.cost is None and one.state is not None for share, one in zip(shares, measured)]
    known = [speed for speed in speeds if speed]
    return {
        "communication_s": least_idle_s,
        "efficiency": samples / seconds / sum(known) if len(known) + sum(serves) == len(speeds) else None,
        "pace": busy.index(max(busy)),
        "ranks": {
            "compute_s": [one.compute_s for one in measured],
            "data_s": [one.data_s for one in measured],
            "overhead_s": [one.overhead_s for one in measured],
            "wait_s": [one.idle_s - least_idle_s for one in measured],
            "fixed_s": [cost and cost.fixed_s for cost in costs],
            "per_sample_s": [cost and cost.per_unit_s for cost in costs],
            "per_micro_batch_s": [cost and cost.per_batch_s for cost in costs],
            "micro_batch": [cost and cost.batch for cost in costs],
            "memory_bytes": [one.memory_bytes for one in measured],
            "memory_limit_bytes": [one.memory_limit_bytes for one in measured],
            **_of_owners([one.state for one in measured if one.state is not None]),
        },
    }


def _of_owners(states: Sequence[OwnedBytes]) -> dict[str, list[int]]:
    """The keys `TOLD_OF_OWNERS` by rank, without those that no rank knows."""
    by_key = {key: [getattr(state, key) for state in states] for key in TOLD_OF_OWNERS if states}
    return {key: values for key, values in by_key.items() if key != "planned_bytes" or any(values)}


def owned_by(ranks: Mapping[str, Any], rank: int) -> dict[str, int]:
    """What the `ranks` of a row say about the state of one rank, for its file in `status/`; empty if no rank owns."""
    return {key: ranks[key][rank] for key in TOLD_OF_OWNERS if ranks.get(key)}


def known_cost(share: float, told: Mapping[str, float | None]) -> Cost:
    """The cost of samples on a rank, from its values of `TOLD` and possibly `TOLD_OF_STAIRS`; None: unknown.

    If the parts of the cost are unknown, all computing time counts for its `share` of samples; a rank that has had no
    samples can be given none.
    """
    overhead_s, compute_s = told["overhead_s"] or 0.0, told["compute_s"]
    fixed_s, per_sample_s, micro_batch = told["fixed_s"], told["per_sample_s"], told.get("micro_batch")
    if fixed_s is not None and per_sample_s:
        stairs_s = told.get("per_micro_batch_s") if micro_batch else None
        return Cost(max(fixed_s, 0.0), per_sample_s, None, stairs_s or 0.0, int(micro_batch) if micro_batch else None)
    if share and compute_s:
        return Cost(overhead_s, compute_s / share)
    return Cost(overhead_s, 1.0, limit=0)


def _in_samples(cost: Cost | None, share: int, work_per_sample: float) -> Cost | None:
    """A cost by work as a cost by samples: unchanged if a sample is one unit, else linear around the share."""
    if cost is None or work_per_sample == 1:
        return cost
    line = cost.line(round(share * work_per_sample))
    return replace(line, per_unit_s=line.per_unit_s * work_per_sample)


def _solo_speed(share: int, measured: Measured, work_per_sample: float) -> float | None:
    """Samples per second of a rank on its own; None if it had no work and its cost is unknown."""
    if share:
        return share / busy_s(measured) if busy_s(measured) > 0 else None
    return 1 / (measured.cost.slope_s * work_per_sample) if measured.cost and work_per_sample else None
