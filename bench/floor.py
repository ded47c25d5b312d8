"""Peak speed of this machine: matrix products and copies, on one thread and on all cores.

    python bench/floor.py [--rounds 15] [--size 2048]

Every other training figure is a share of these. Four operations take turns, first on one thread, then on as many as
there are cores: square products in fp32 and in bf16, the narrow product of a BERT's vocabulary head (640 rows of 256
times 30,522 words, fp32), and a copy larger than any cache, which counts both bytes read and bytes written. The speed
by CPU time, per thread, is listed beside the speed by wall time, for a machine with other users.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import figures
import torch
from settings import products_of_a_worker

WARM_UP = 3
HEAD_ROWS, HEAD_WIDTH, HEAD_WORDS = 640, 256, 30522
COPIED_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Floor:
    """A repeated operation: `amount` per call, in units of `unit` times a second."""

    name: str
    unit: str
    amount: float
    call: Callable[[], Any]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds")
    parser.add_argument("--size", type=int, default=2048, help="rows and columns of the square matmuls")
    arguments = parser.parse_args(words)
    if min(arguments.rounds, arguments.size) < 1:
        parser.error("--rounds and --size: expected numbers of at least 1")
    return arguments


def floors(size: int) -> list[Floor]:
    """All of them, with their operands."""
    square = torch.randn(size, size)
    half = square.bfloat16()
    rows, words = torch.randn(HEAD_ROWS, HEAD_WIDTH), torch.randn(HEAD_WORDS, HEAD_WIDTH)
    source, target = (torch.zeros(COPIED_BYTES, dtype=torch.uint8) for _ in range(2))
    product, half_product = torch.empty_like(square), torch.empty_like(half)
    logits = torch.empty(HEAD_ROWS, HEAD_WORDS)
    cube = 2 * size**3 / 1e9

    def in_a_worker() -> None:
        with products_of_a_worker():
            torch.mm(square, square, out=product)

    return [
        Floor(f"matmul {size}, fp32", "GFLOP/s", cube, lambda: torch.mm(square, square, out=product)),
        Floor(f"matmul {size}, fp32, in a worker", "GFLOP/s", cube, in_a_worker),
        Floor(f"matmul {size}, bf16", "GFLOP/s", cube, lambda: torch.mm(half, half, out=half_product)),
        Floor(
            f"vocabulary head {HEAD_ROWS} x {HEAD_WIDTH} x {HEAD_WORDS}, fp32", "GFLOP/s",
            2 * HEAD_ROWS * HEAD_WIDTH * HEAD_WORDS / 1e9, lambda: torch.mm(rows, words.T, out=logits),
        ),
        Floor(f"copy {COPIED_BYTES >> 20} MiB", "GB/s", 2 * COPIED_BYTES / 1e9, lambda: target.copy_(source)),
    ]  # fmt: skip


def main() -> None:
    """Measure and print."""
    arguments = parse()
    torch.manual_seed(0)
    what, rows = floors(arguments.size), []
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        torch.set_num_threads(threads)
        rows += measure(what, threads, arguments.rounds)
    heads = ["", "threads", "by wall time", "best", "by CPU time", "", "wall / CPU", "n"]
    cells = [
        [
            row["what"], str(row["threads"]), row["speed"].shown(".0f"), f"{row['best']:.0f}",
            row["speed_by_cpu"].shown(".0f"), row["unit"], row["wall_to_cpu"].shown(), str(row["n"]),
        ]
        for row in rows
    ]  # fmt: skip
    print(figures.table(heads, cells))
    if mark := figures.busy_mark(max(row["wall_to_cpu"].median for row in rows)):
        print(f"({mark}; CPU time suffers less)")
    print(figures.json_line("floor", vars(arguments), rows))


def measure(what: Sequence[Floor], threads: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each, called once a round."""
    walls: dict[str, list[float]] = {floor.name: [] for floor in what}
    cpus: dict[str, list[float]] = {floor.name: [] for floor in what}  # of one thread
    for number in range(WARM_UP + rounds):
        for floor in what:
            cpu, wall = time.process_time(), time.perf_counter()
            floor.call()
            cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - wall
            if number >= WARM_UP:
                walls[floor.name].append(wall_s)
                cpus[floor.name].append(cpu_s / threads)
    return [
        {
            "what": floor.name,
            "threads": threads,
            "unit": floor.unit,
            "n": rounds,
            "speed": figures.spread([floor.amount / wall_s for wall_s in walls[floor.name]]),
            "best": floor.amount / min(walls[floor.name]),
            "speed_by_cpu": figures.spread([floor.amount / cpu_s for cpu_s in cpus[floor.name]]),
            "wall_to_cpu": figures.spread(list(map(figures.stretch, walls[floor.name], cpus[floor.name]))),
        }
        for floor in what
    ]


if __name__ == "__main__":
    main()
