"""How long it takes to divide a step exactly among many unequal ranks.

    python bench/solver.py

Random costs with a fixed part; the median of twenty divisions, each of other costs.
"""

from __future__ import annotations

import random
import statistics
import time

import figures

from hetseq.capacity import Cost, balance_shares

CASES = ((8, 256), (64, 4096), (1024, 65_536), (64, 1_000_000))


def main() -> None:
    """Measure and print."""
    generator, rows = random.Random(1), []
    for ranks, units in CASES:
        seconds = []
        for _ in range(20):
            costs = [Cost(generator.uniform(0, 0.1), generator.uniform(0.1, 2)) for _ in range(ranks)]
            start = time.perf_counter()
            balance_shares(units, costs)
            seconds.append(time.perf_counter() - start)
        rows.append({"ranks": ranks, "units": units, "median_s": statistics.median(seconds)})
    cells = [[str(row["ranks"]), f"{row['units']:,}", f"{row['median_s'] * 1e3:.2f} ms"] for row in rows]
    print(figures.table(["ranks", "units", "median"], cells))
    print(figures.json_line("solver", {}, rows))


if __name__ == "__main__":
    main()
