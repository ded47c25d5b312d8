"""One rank against several: the cost of communication, and the efficiency of eight machines.

    python bench/scale.py [--ranks 2] [--model bert] [--rounds 5]
    python bench/scale.py --emulate 8 [--rounds 5]

The first form gives every rank a core and the same number of samples, and six things take turns in the same processes:
each rank training for itself while the others rest (`alone`), the same while all of them do (`both busy`), HetSeq
exchanging gradients as on one node (through shared memory) and as between nodes (gloo, here over the loopback),
and a bare loop under DistributedDataParallel with `gradient_as_bucket_view`, in its default process and in
processes set up like HetSeq's workers, which keep freed memory and multiply fp32 by the faster library. 100 % are
the summed speeds of `both busy`: busy cores share caches and clock, which is not a communication cost. A round goes
through the six and then back again, so that drifting machine speed affects all of them alike.

The second form is about the number of ranks. 1, 2, 4 and 8 ranks train the MNIST net, dropout included, on steps of the
same global batch; all ranks are slowed down 8 times (`--throttle`), so that a core or two carry them. `--unit-size`
gives them the same curve, which is checked step by step, so time to a loss is proportional to step time. Efficiency is
the time of one rank over the time of W ranks, divided by W.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import figures
import random_images
import workloads
from ranks import Ranks, Timing, there_and_back

#: samples of a rank's step; steps of some hundred milliseconds on the machine of the tables
LOCAL_BATCH = {"mnist": 512, "bert-tiny": 64, "bert": 16}
#: of the first form, in the order of the table
TURNS = ("alone", "both busy", "ours", "gloo", "ddp", "ddp, alike")
#: of the second form: samples of a step and of a micro-batch. Small micro-batches on purpose: all ranks begin a step at
#: once, and queue for the cores until their sleeps have drawn them apart. A share of eight ranks is 48
#: of them: one more, the least that a share can change by, is 2 % of a step
EMULATED_BATCH, UNIT = 3072, 8
# calm: with a rate of 0.05 and momentum this net, on synthetic data, turns rounding into 1e-3 within 18 steps, also
# between single and double precision on one rank
SGD = ["--optimizer", "sgd", "--lr", "0.01", "--momentum", "0"]
LARGEST_GAP = 1e-5


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="of the first form")
    parser.add_argument("--model", choices=workloads.MODELS, default="bert", help="of the first form")
    parser.add_argument("--batch", type=int, help="samples of a rank's step, or of all ranks' step with --emulate")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--steps", type=int, help="counted steps of a round (default: 10, or 2 with --emulate)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a rank that trains for itself, at least")
    parser.add_argument("--balance", default="auto", help="as in `hetseq train`")
    parser.add_argument("--emulate", type=int, metavar="N", help="1, 2, 4, ... N ranks, all slowed down N times")
    parser.add_argument("--no-pin", action="store_true", help="do not pin ranks to cores")
    arguments = parser.parse_args(words)
    arguments.steps = arguments.steps or (2 if arguments.emulate else 10)
    arguments.batch = arguments.batch or (EMULATED_BATCH if arguments.emulate else LOCAL_BATCH[arguments.model])
    if min(arguments.rounds, arguments.steps, arguments.batch) < 1:
        parser.error("--rounds, --steps and --batch: expected numbers of at least 1")
    if arguments.emulate is None and arguments.ranks < 2:
        parser.error(f"--ranks {arguments.ranks}: expected 2 or more")
    if arguments.emulate is not None and arguments.emulate not in (2, 4, 8, 16, 32):
        parser.error(f"--emulate {arguments.emulate}: expected 2, 4, 8, 16 or 32 ranks")
    samples = random_images.SAMPLES
    whole = arguments.batch if arguments.emulate else arguments.batch * arguments.ranks
    if (arguments.emulate or arguments.model == "mnist") and samples % whole:
        parser.error(
            f"steps of {whole} samples: expected a divisor of {samples}, or an epoch would end in a shorter one"
        )
    return arguments


def main() -> int:
    """Measure and print; 1 if curves that must be equal were not."""
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="hetseq-scale-") as name:
        if arguments.emulate:
            return emulate(arguments, Path(name))
        compare(arguments, Path(name))
    return 0


# Several ranks against each for itself.


def compare(arguments: argparse.Namespace, folder: Path) -> None:
    """The first form."""
    world_size, batch = arguments.ranks, arguments.batch
    work = workloads.prepare(arguments.model, folder / "data", 16 * world_size * batch)
    # a share is one micro-batch, as under DDP, also where it comes out larger than the others'
    cap = ["--max-sentences", str(2 * batch)]
    ours = [*workloads.hetseq_words(work, world_size * batch), *cap, "--balance", arguments.balance]
    solo = [*workloads.hetseq_words(work, batch), *cap]
    rounds: list[dict[str, list[Timing]]] = []
    is_pinned = not arguments.no_pin
    with Ranks(world_size, folder=folder / "ranks", model=arguments.model, is_pinned=is_pinned) as ranks:
        ranks.open("ours", [ours] * world_size, shares_memory=True)
        ranks.open("gloo", [ours] * world_size)
        ranks.open("solo", [solo] * world_size, is_alone=True)
        ranks.open_ddp("ddp", batch)
        for name in ("ours", "gloo", "ddp"):
            ranks.together(name, settle=5, steps=1)
        ranks.side_by_side("solo", settle=3, least_s=0)
        for number in range(arguments.rounds):
            rounds.append(one_round(ranks, number, arguments))
    report(rounds, arguments)


def one_round(ranks: Ranks, number: int, arguments: argparse.Namespace) -> dict[str, list[Timing]]:
    """All in turn and back again."""

    def half(turn: str) -> list[Timing]:
        steps, least_s = -(-arguments.steps // 2), arguments.seconds / 2
        if turn == "alone":
            return [ranks.alone("solo", rank, settle=1, least_s=least_s) for rank in range(ranks.world_size)]
        if turn == "both busy":
            return ranks.side_by_side("solo", settle=1, least_s=least_s)
        if turn == "ddp":
            ranks.set_as(is_worker=False)
            timings = ranks.together("ddp", settle=1, steps=steps)
            ranks.set_as(is_worker=True)
            return timings
        return ranks.together(turn.partition(",")[0], settle=1, steps=steps)

    return there_and_back(TURNS, number, half)


def speed(turn: str, timings: Sequence[Timing]) -> float:
    """Samples per second of all ranks together."""
    if turn in ("alone", "both busy"):
        return sum(timing.speed for timing in timings)
    return min(timing.speed for timing in timings)  # all ranks trained all the samples, the slowest sets the time


def evaluate(rounds: Sequence[dict[str, list[Timing]]], batch: int) -> list[dict[str, Any]]:
    """A row per measured configuration."""
    rows = []
    for turn in TURNS:
        speeds = [speed(turn, seen[turn]) for seen in rounds]
        limits = [speed("both busy", seen["both busy"]) for seen in rounds]
        ddp, alike = ([speed("ddp", seen[rival]) for seen in rounds] for rival in ("ddp", "ddp, alike"))
        world_size = len(rounds[0][turn])
        rows.append(
            {
                "what": turn,
                "n": len(rounds),
                "step_s": figures.spread([world_size * batch / reached for reached in speeds]),
                "cpu_s": figures.spread(
                    [fmean(timing.cpu_s / len(timing.steps) for timing in seen[turn]) for seen in rounds]
                ),
                "samples_per_s": figures.spread(speeds),
                "of_busy": figures.spread(figures.paired(speeds, limits)),
                "of_ddp": figures.spread(figures.paired(speeds, ddp)),
                "of_ddp_alike": figures.spread(figures.paired(speeds, alike)),
                "wall_to_cpu": figures.spread(
                    [max(figures.stretch(timing.wall_s, timing.cpu_s) for timing in seen[turn]) for seen in rounds]
                ),
                "shares": Counter("+".join(map(str, step["shares"])) for seen in rounds for step in seen[turn][0].steps)
                if turn in ("ours", "gloo")
                else {},
            }
        )
    return rows


def report(rounds: Sequence[dict[str, list[Timing]]], arguments: argparse.Namespace) -> None:
    """Print a table, caveats, and the same as one line of JSON."""
    rows = evaluate(rounds, arguments.batch)
    names = {
        "ours": f"HetSeq, --balance {arguments.balance}",
        "gloo": "the same, as between nodes",
        "ddp": "DDP, gradient_as_bucket_view",
        "ddp, alike": "the same, set up like our workers",
    }
    print(
        f"{arguments.ranks} ranks, one thread each, {arguments.model}, {arguments.batch} samples a rank and step, AdamW"
    )
    heads = [
        "", "step, ms", "CPU of a rank, ms", "samples/s", "% of both busy", "x DDP", "x DDP, set alike", "wall / CPU",
        "n",
    ]  # fmt: skip
    cells = [
        [
            names.get(row["what"], row["what"]), row["step_s"].shown(".0f", 1e3),
            row["cpu_s"].shown(".0f", 1e3), row["samples_per_s"].shown(".1f"),
            row["of_busy"].shown(".1f", 100), row["of_ddp"].shown(".3f"), row["of_ddp_alike"].shown(".3f"),
            row["wall_to_cpu"].shown(), str(row["n"]),
        ]
        for row in rows
    ]  # fmt: skip
    print(figures.table(heads, cells))
    for row in rows:
        if row["shares"]:
            told = ", ".join(f"{shares} in {steps}" for shares, steps in row["shares"].items())
            print(f"{names[row['what']]}: counted steps by shares: {told}")
    if mark := figures.busy_mark(rows[1]["wall_to_cpu"].high):
        print(f"({mark})")
    print(figures.json_line("scale", vars(arguments), rows))


# More and more ranks, all slowed down.


def emulate(arguments: argparse.Namespace, folder: Path) -> int:
    """The second form."""
    worlds = [2**power for power in range(arguments.emulate.bit_length())]
    work = workloads.prepare("mnist", folder / "data", 0)
    words = [*workloads.hetseq_words(work, arguments.batch), *SGD, "--unit-size", str(UNIT)]
    seen: dict[int, list[list[Timing]]] = {world: [] for world in worlds}
    curves: dict[int, list[float]] = {world: [] for world in worlds}
    with Ranks(worlds[-1], folder=folder / "ranks", model="mnist", is_pinned=not arguments.no_pin) as ranks:
        for world in worlds:
            slowed = ",".join(f"{rank}:{arguments.emulate}" for rank in range(world))
            ranks.open(f"w{world}", [[*words, "--balance", arguments.balance, "--throttle", slowed]] * world)
        for number in range(arguments.rounds + 1):  # the first one is for warming up
            begin = number % len(worlds)
            for world in worlds[begin:] + worlds[:begin]:
                timings = ranks.together(f"w{world}", ranks=world, settle=1, steps=arguments.steps)
                curves[world] += [step["loss"] for step in timings[0].settling + timings[0].steps]
                if number:
                    seen[world].append(timings)
    rows = evaluate_worlds(seen, curves, factor=arguments.emulate)
    return report_worlds(rows, arguments)


def evaluate_worlds(
    seen: dict[int, list[list[Timing]]], curves: dict[int, list[float]], *, factor: int
) -> list[dict[str, Any]]:
    """A row per number of ranks; the first is one rank."""
    seconds = {world: [max(timing.step_s for timing in one) for one in rounds] for world, rounds in seen.items()}
    rows = []
    for world, rounds in seen.items():
        efficiencies = [figures.efficiency(one_s, many_s, world) for one_s, many_s in zip(seconds[1], seconds[world])]
        rows.append(
            {
                "ranks": world,
                "n": len(rounds),
                "step_s": figures.spread(seconds[world]),
                "efficiency": figures.spread(efficiencies),
                "step": len(curves[world]),
                "loss": curves[world][-1],
                "gap": figures.largest_gap([curves[1], curves[world]]),
                # only for one rank: several ranks queue for the cores, and wait for each other
                "wall_to_cpu": figures.spread([figures.stretch(one[0].wall_s, one[0].cpu_s, factor) for one in rounds]),
            }
        )
    return rows


def report_worlds(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> int:
    """A table, whether the curves were equal, and the same as one line of JSON."""
    cores = len(os.sched_getaffinity(0))
    print(
        f"MNIST net with dropout, steps of {arguments.batch} samples, --unit-size {UNIT}, SGD; every rank slowed down"
        f" {arguments.emulate} times, on {cores} cores"
    )
    heads = ["ranks", "step, s", "efficiency", "loss", "after steps", "gap to one rank", "n"]
    cells = [
        [
            str(row["ranks"]), row["step_s"].shown(), row["efficiency"].shown(".3f"), f"{row['loss']:.5f}",
            str(row["step"]), f"{row['gap']:.1e}", str(row["n"]),
        ]
        for row in rows
    ]  # fmt: skip
    print(figures.table(heads, cells))
    if mark := figures.busy_mark(rows[0]["wall_to_cpu"].high):
        print(f"({mark})")
    is_equal = all(row["gap"] <= LARGEST_GAP for row in rows)
    if not is_equal:
        print(f"the curves differ by more than {LARGEST_GAP:g}: these times are not times to an equal loss")
    print(figures.json_line("scale", vars(arguments), rows))
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
