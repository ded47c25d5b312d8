"""Where the time of a step went, rank by rank, from the rows that all ranks brought to its commit: pure.

A step is as long as its slowest rank and what travels after it. Every rank is busy for a while (data, forward and
backward, its update), then idle. The rank that is idle least was awaited by all others, and its idle time is what
communication took; whatever another one was idle for longer than that, it waited for its peers.

Whoever reads such a row later has the cost of a rank back from it here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetseq.balance.shares import Cost
from hetseq.cluster.membership.step_commit import CommitRow, Measured

#: what a row of `metrics.jsonl` tells of each rank that its cost is made of (see `known_cost`), by their names there
TOLD = ("compute_s", "overhead_s", "fixed_s", "per_sample_s")
#: and what rows of older versions do not tell, whose costs are straight ones
TOLD_OF_STAIRS = ("per_micro_batch_s", "micro_batch")


def busy_s(measured: Measured) -> float:
    """How long a rank worked in a step, waiting for nobody but its data."""
    return measured.compute_s + measured.data_s + measured.overhead_s


def account(rows: Sequence[CommitRow], *, shares: Sequence[int], work: int, seconds: float) -> dict[str, Any]:
    """What `metrics.jsonl` tells of the ranks: `communication_s`, `efficiency`, `pace` and `ranks`, lists by rank.

    `work` is what the samples of the step weighed together where they were divided. The efficiency is the speed of the
    run by the sum of the speeds that its ranks would have on their own, at their shares; None where one is not known.
    """
    samples, measured = sum(shares), [row.measured for row in rows]
    costs = [_in_samples(one.cost, share, work / samples) for share, one in zip(shares, measured)]
    least_idle_s = min(one.idle_s for one in measured)
    busy = [busy_s(one) for one in measured]
    speeds = [_solo_speed(share, one, work / samples) for share, one in zip(shares, measured)]
    known = [speed for speed in speeds if speed]
    return {
        "communication_s": least_idle_s,
        "efficiency": samples / seconds / sum(known) if len(known) == len(speeds) else None,
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
        },
    }


def known_cost(share: float, told: Mapping[str, float | None]) -> Cost:
    """What samples cost a rank of which `TOLD`, and perhaps `TOLD_OF_STAIRS`, are told; None: not known.

    Where the parts of its cost are not known, all it computed was for its `share` of samples; a rank that has had none
    can be given none.
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
    """A cost by work as one by samples: as it is where a sample is a unit, else the straight one about the share."""
    if cost is None or work_per_sample == 1:
        return cost
    line = cost.line(round(share * work_per_sample))
    return replace(line, per_unit_s=line.per_unit_s * work_per_sample)


def _solo_speed(share: int, measured: Measured, work_per_sample: float) -> float | None:
    """Samples per second of a rank on its own; None if it had nothing to do and nobody knows what it could."""
    if share:
        return share / busy_s(measured) if busy_s(measured) > 0 else None
    return 1 / (measured.cost.slope_s * work_per_sample) if measured.cost and work_per_sample else None
