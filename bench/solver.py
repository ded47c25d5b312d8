"""Time to divide a step exactly among many unequal ranks.

    python bench/solver.py

Random costs with a fixed part, and the same with a step for each micro-batch of 16; the median of twenty divisions,
each with different costs.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import figures

from hetseq.balance.shares import Cost, balance_shares

CASES = ((8, 256), (64, 4096), (1024, 65_536), (64, 1_000_000))


def main() -> None:
    """Measure and print."""
    generator, rows = random.Random(1), []
    for ranks, units in CASES:
        straight, stairs = list[float](), list[float]()
        for _ in range(20):
            costs = [Cost(generator.uniform(0, 0.1), generator.uniform(0.1, 2)) for _ in range(ranks)]
            straight.append(seconds_of(units, costs))
            stairs.append(
                seconds_of(units, [replace(cost, per_batch_s=generator.uniform(0, 9), batch=16) for cost in costs])
            )
        medians = {"median_s": statistics.median(straight), "stairs_s": statistics.median(stairs)}
        rows.append({"ranks": ranks, "units": units, **medians})
    cells = [
        [str(row["ranks"]), f"{row['units']:,}", f"{row['median_s'] * 1e3:.2f} ms", f"{row['stairs_s'] * 1e3:.2f} ms"]
        for row in rows
    ]
    print(figures.table(["ranks", "units", "median", "with stairs"], cells))
    print(figures.json_line("solver", {}, rows))


def seconds_of(units: int, costs: Sequence[Cost]) -> float:
    """Of one division."""
    start = time.perf_counter()
    balance_shares(units, costs)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
