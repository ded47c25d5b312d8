"""Unequal ranks: their joint speed, as a share of the sum of their separate speeds.

    python bench/het.py 1,2 1,3 1,4 [--models mnist bert-tiny] [--rounds 5] [--change]

`1,3` are two ranks of which the second is slowed down 3 times (`--throttle 1:3`). In every round four things take
turns in the same processes: the run with `--balance auto`, the run with `--balance equal`, each rank training for
itself while all the others do the same (`busy`), and each rank training for itself while the others rest (`idle`). A
rank that trains for itself does whole steps of the same global batch, in micro-batches of the same size, slowed down by
the same code, with data, optimizer and metrics: everything but communication. The summed speeds of `busy` are 100 %;
the speeds of `idle`, listed beside, are higher, since two busy cores share caches and clock. A round goes through the
four and then back again, so that drifting machine speed affects all of them alike. `--change` then slows the last
rank down 3 times more in mid-run and counts the slow steps.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import figures
import random_images
import workloads
from bar_chart import Bar, picture
from ranks import Ranks, Timing, there_and_back

#: fewest samples of a step, and most of a micro-batch; a machine whose steps are too short with them takes more
SIZES = {"mnist": (1280, 64), "bert-tiny": (192, 8), "bert": (32, 4)}
FIRST_STEPS, CHANGE_STEPS, CHANGE = 12, 15, 3.0
LEAST_STEP_S = 0.5


def factors(text: str) -> tuple[float, ...]:
    """`1,3` gives (1.0, 3.0). Raises ArgumentTypeError for anything but two or more numbers of at least 1."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if len(found) < 2 or not all(1 <= factor < float("inf") for factor in found):
        raise argparse.ArgumentTypeError(f"{text!r}: expected how many times each rank is slowed down, as in 1,3")
    return found


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ratios", nargs="+", type=factors, metavar="RATIO", help="as in 1,2 1,3 1,4")
    parser.add_argument("--models", nargs="+", choices=workloads.MODELS, default=["mnist", "bert-tiny"])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--steps", type=int, default=6, help="counted steps of a run in a round, half of them each way")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="of a rank that trains for itself in a round, at least"
    )
    parser.add_argument("--batch", type=int, help="samples of a step (default: for steps of 500 ms)")
    parser.add_argument("--change", action="store_true", help="slow the last rank down 3 times more at the end")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="write the last case as bars, an SVG file")
    parser.add_argument("--no-pin", action="store_true", help="do not pin ranks to cores")
    arguments = parser.parse_args(words)
    if min(arguments.rounds, arguments.steps, arguments.batch or 1) < 1:
        parser.error("--rounds, --steps and --batch: expected numbers of at least 1")
    if arguments.batch and "mnist" in arguments.models and random_images.SAMPLES % arguments.batch:
        parser.error(
            f"--batch {arguments.batch}: expected a divisor of {random_images.SAMPLES}, the number of images,"
            " or an epoch would end in a shorter step"
        )
    return arguments


@dataclass
class Round:
    """Samples per second in one round: of both runs, and of each rank by itself."""

    auto: list[Timing]
    equal: list[Timing]
    busy: list[Timing]
    idle: list[Timing]


@dataclass
class Case:
    """All measurements of one model at one ratio."""

    model: str
    factors: tuple[float, ...]
    batch: int
    first: list[dict[str, Any]]  # the first steps of `--balance auto`
    rounds: list[Round] = field(default_factory=list)
    change: list[dict[str, Any]] | None = None


def main() -> None:
    """Measure and print."""
    arguments = parse()
    ranks = max(map(len, arguments.ratios))
    if ranks > len(os.sched_getaffinity(0)):
        print(f"({ranks} ranks share {len(os.sched_getaffinity(0))} cores: their speeds disturb each other)")
    rows = []
    for model in arguments.models:
        for ratio in arguments.ratios:
            with tempfile.TemporaryDirectory(prefix="hetseq-het-") as name:
                case = measure(model, ratio, Path(name), arguments)
            row = evaluate(case)
            rows.append(row)
            say(row)
    print()
    print(figures.table(HEADS, [cells(row) for row in rows]))
    settings = {name: value for name, value in vars(arguments).items() if name != "chart"}
    print(figures.json_line("het", settings, rows))
    if arguments.chart is not None:
        arguments.chart.write_text(drawn(rows[-1]), encoding="utf-8")


def measure(model: str, ratio: tuple[float, ...], folder: Path, arguments: argparse.Namespace) -> Case:
    """One model at one ratio: a start from an unknown cluster, then rounds."""
    cap = ["--max-sentences", str(SIZES[model][1])]
    slowed = ["--throttle", ",".join(f"{rank}:{factor:g}" for rank, factor in enumerate(ratio))]
    with Ranks(len(ratio), folder=folder / "ranks", model=model, is_pinned=not arguments.no_pin) as ranks:
        batch = arguments.batch or long_enough(ranks, model, ratio, folder)
        work = workloads.prepare(model, folder / "data", 8 * batch)
        words = [*workloads.hetseq_words(work, batch), *cap]
        for balance in ("auto", "equal"):
            ranks.open(balance, [[*words, *slowed, "--balance", balance]] * len(ratio))
        ranks.open("solo", [[*words, "--throttle", f"0:{factor:g}"] for factor in ratio], is_alone=True)
        case = Case(model, ratio, batch, first=ranks.together("auto", settle=0, steps=FIRST_STEPS)[0].steps)
        ranks.together("equal", settle=1, steps=1)
        ranks.side_by_side("solo", settle=1, least_s=0)
        for number in range(arguments.rounds):
            case.rounds.append(one_round(ranks, number, arguments))
        if arguments.change:
            ranks.slow_down("auto", len(ratio) - 1, CHANGE * ratio[-1])
            case.change = ranks.together("auto", settle=0, steps=CHANGE_STEPS)[0].steps
    return case


def long_enough(ranks: Ranks, model: str, ratio: tuple[float, ...], folder: Path) -> int:
    """Samples of a step that lasts at least `LEAST_STEP_S` at the summed speeds of the ranks, by the speed of one."""
    batch, cap = SIZES[model]
    work = workloads.prepare(model, folder / "trial", 8 * batch)
    words = [*workloads.hetseq_words(work, batch), "--max-sentences", str(cap)]
    ranks.open("trial", [words], is_alone=True)
    speed = ranks.alone("trial", 0, settle=3, least_s=2.0).speed * sum(1 / factor for factor in ratio)
    while batch < LEAST_STEP_S * speed and (more := workloads.larger_batch(model, batch)):
        batch = more
    return batch


def one_round(ranks: Ranks, number: int, arguments: argparse.Namespace) -> Round:
    """All four in turn and back again."""

    def half(turn: str) -> list[Timing]:
        least_s = arguments.seconds / 2
        if turn == "busy":
            return ranks.side_by_side("solo", settle=1, least_s=least_s)
        if turn == "idle":
            return [ranks.alone("solo", rank, settle=1, least_s=least_s) for rank in range(ranks.world_size)]
        return ranks.together(turn, settle=1, steps=-(-arguments.steps // 2))

    return Round(**there_and_back(["auto", "busy", "equal", "idle"], number, half))


def evaluate(case: Case) -> dict[str, Any]:
    """The figures of a case."""

    def share(run: str, solo: str) -> figures.Spread:
        return figures.spread(
            [
                figures.share_of_sum(slowest(getattr(one, run)).speed, [rank.speed for rank in getattr(one, solo)])
                for one in case.rounds
            ]
        )

    gains = [slowest(one.auto).speed / slowest(one.equal).speed for one in case.rounds]
    step_s = [slowest(one.auto).step_s for one in case.rounds]
    # the most disturbed rank of each round
    stretches = [
        max(figures.stretch(rank.wall_s, rank.cpu_s, factor) for rank, factor in zip(one.busy, case.factors))
        for one in case.rounds
    ]
    row: dict[str, Any] = {
        "model": case.model,
        "factors": case.factors,
        "batch": case.batch,
        "n": len(case.rounds),
        "step_s": figures.spread(step_s),
        "auto_of_busy": share("auto", "busy"),
        "equal_of_busy": share("equal", "busy"),
        "auto_of_idle": share("auto", "idle"),
        "equal_of_idle": share("equal", "idle"),
        "equal_at_most": figures.equal_split_share(case.factors),
        "gain": figures.spread(gains),
        "shares": case.rounds[-1].auto[0].steps[-1]["shares"],
        "settled_after": figures.settled_after([step["shares"] for step in case.first]),
        "speeds_busy": [
            figures.spread([one.busy[rank].speed for one in case.rounds]) for rank in range(len(case.factors))
        ],
        "wall_to_cpu": figures.spread(stretches),
    }
    if case.change is not None:
        row["change"] = {
            "slow_steps": figures.slow_steps([step["seconds"] for step in case.change]),
            "seconds": [step["seconds"] for step in case.change],
            "shares": [step["shares"] for step in case.change],
        }
    return row


def slowest(timings: Sequence[Timing]) -> Timing:
    """The slowest rank of a run."""
    return max(timings, key=lambda timing: timing.wall_s)


def drawn(row: dict[str, Any]) -> str:
    """README's picture: the joint speed of the ranks, as a share of their summed speeds at the same time."""
    names = ["a worker" if factor == 1 else f"one slowed down {factor:g} times" for factor in row["factors"]]
    bars = [
        Bar("equal shares", row["equal_of_busy"].median),
        Bar("HetSeq", row["auto_of_busy"].median, is_own=True),
        Bar("sum of the machines", 1.0),
    ]
    note = f"{row['model']}, {row['n']} rounds in turn, medians: python bench/het.py"
    return picture(f"Samples per second of {' and '.join(names)}, together", bars, note)


HEADS = (
    "model", "slowed", "B", "step, s", "auto, % of busy", "equal, % of busy", "(at most)", "auto, % of idle",
    "gain", "shares", "settled after", "wall / CPU",
)  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    return [
        row["model"], ":".join(f"{factor:g}" for factor in row["factors"]), str(row["batch"]),
        row["step_s"].shown(), row["auto_of_busy"].shown(".1f", 100), row["equal_of_busy"].shown(".1f", 100),
        f"{row['equal_at_most'] * 100:.0f}", row["auto_of_idle"].shown(".1f", 100), f"x{row['gain'].median:.2f}",
        "+".join(map(str, row["shares"])), f"{row['settled_after']} steps", row["wall_to_cpu"].shown(),
    ]  # fmt: skip


def say(row: dict[str, Any]) -> None:
    """Print a line as soon as it is known, with caveats."""
    ratio = ":".join(f"{factor:g}" for factor in row["factors"])
    print(
        f"{row['model']} {ratio}, {row['n']} rounds: auto {row['auto_of_busy'].shown('.1f', 100)} % of the summed"
        f" speeds, equal {row['equal_of_busy'].shown('.1f', 100)} %",
        flush=True,
    )
    if row["step_s"].median < LEAST_STEP_S:
        print(f"  steps of {row['step_s'].median:.2f} s are short: raise --batch to reach {LEAST_STEP_S} s")
    if mark := figures.busy_mark(row["wall_to_cpu"].high):
        print(f"  {mark}")
    if "change" in row:
        seconds = " ".join(f"{taken_s:.2f}" for taken_s in row["change"]["seconds"])
        print(f"  last rank {CHANGE:g} x slower: {row['change']['slow_steps']} slow steps ({seconds} s)")
        print("  shares " + " ".join("+".join(map(str, shares)) for shares in row["change"]["shares"]))


if __name__ == "__main__":
    main()
