"""Real runs with kills against their simulation: is the goodput that `hetseq simulate` predicts the measured one?

    python bench/goodput.py [--seconds 40] [--ranks 3] [--every 10] [--sample-ms 12] [--only replicas restart]

Three kinds of runs, each at five rates of kills, from one in 10 steps to one in 100: replicas of HetSeq, which continue
in place; its owners of parts of the state, which go back in place to an image that is at most --image-steps old; and
`torchrun --max-restarts`, which restarts all ranks from the newest file of `torch.save`. All train the toy of
bench/recover.py. A sample takes a fixed time of sleep, so a step takes some 100 ms on a busy machine too, and more
where fewer ranks share it.

The gap from the first new step after a kill to the next kill is exponential. Every kill is a SIGKILL to one rank, by
its process id, at a time that the script knows. From the lines that each rank writes after its steps it takes

    goodput     useful steps x the calm step time / wall time, from a checkpoint until the end of the run
    step_s      mean step before the first kill, checkpoints included
    halt_s      mean time from a kill until training continues: of a restart, from the signal to the first new step,
                less that step; in place, from the end of the step under way to the next one, less that
    join_s      mean halt when the killed rank is back; back_s: from the signal until then

In place these three are taken from kills that no other kill followed before the rank was back.

`hetseq.balance.goodput` gets these numbers and the kills, and nothing about the steps that were made. Where the halts
are measured one by one, each kill comes as long after the halt before it as in the run, and all halts are equally long.
The bar: it predicts the goodput of each run within a tenth. A further kind of run is one more entry of `KINDS`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import figures
import recover

from hetseq.balance.goodput import Absence, Disk, StepTime, Way, images, live, restart, retry

BAR = 0.10
RATES = (10, 18, 32, 56, 100)  # steps from one kill to the next, on average
CALM_STEPS, SETTLING_STEPS = 60, 20  # before the first kill, of which the first ones do not count
SAVED_STEPS = 5  # after the last calm step: a checkpoint of it is on the disk
RESTARTS = 10_000
HEADS = ("", "steps per kill", "kills", "steps", "halt, s", "measured", "simulated", "simulated / measured")


@dataclass(frozen=True)
class Record:
    """What a run has left: the lines of its steps, in order of time, and its kills."""

    lines: Sequence[recover.Line]
    kills_ns: Sequence[int]


@dataclass(frozen=True)
class Costs:
    """What kills have cost. `halts_s`: of each kill where that is known; `back_s`: until its rank can take part."""

    halt_s: float = 0.0
    join_s: float = 0.0
    back_s: float = 0.0
    halts_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Measured:
    """Figures of one run. `kills_s` are since its begin, as if all halts were equally long."""

    wall_s: float
    steps: int
    step_s: float
    kills_s: tuple[float, ...]
    halt_s: float
    join_s: float
    back_s: float

    @property
    def goodput(self) -> float:
        """Useful steps x calm step time / wall time."""
        return self.steps * self.step_s / self.wall_s


@dataclass(frozen=True)
class Kind:
    """A kind of run: its command, its costs by its record, and the way to simulate it.

    `costs` takes the record, the calm step and the arguments. `is_in_place`: the others continue in their processes.
    """

    command: Callable[[Path, argparse.Namespace], list[str]]
    costs: Callable[[Record, float, argparse.Namespace], Costs]
    way: Callable[[Measured, argparse.Namespace], Way]
    is_in_place: bool


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="of each run, from its first kill on")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--image-steps", type=int, default=5, help="steps between two images")
    parser.add_argument(
        "--sample-ms", type=float, default=12.0, help=f"of a sample; a rank has {recover.SAMPLES_PER_RANK}"
    )
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS), help="kinds of runs")
    parser.add_argument("--rates", nargs="+", type=int, default=list(RATES), help="steps per kill")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    arguments = parser.parse_args(words)
    if (
        min(arguments.every, arguments.image_steps) < 1
        or arguments.ranks < 2
        or not 0 < arguments.sample_ms <= 1000
        or min(arguments.rates) < 1
    ):
        parser.error(
            "--every, --image-steps, --rates: expected at least 1; --ranks: at least 2; --sample-ms: above 0 and up to"
            " 1000"
        )
    if not 1 <= arguments.seconds <= 3600:
        parser.error("--seconds: expected 1 to 3600")
    return arguments


def main() -> int:
    """Run, simulate, print; 1 if the bar is missed."""
    arguments = parse()
    rows = []
    with tempfile.TemporaryDirectory(prefix="hetseq-goodput-") as name:
        for steps_per_kill in arguments.rates:
            for kind in arguments.only:
                folder = Path(name, f"{kind}-{steps_per_kill}")
                (folder / "tmp").mkdir(parents=True)
                load = os.getloadavg()[0]
                record = one_run(KINDS[kind], folder, arguments, steps_per_kill)
                measured = measure(record, KINDS[kind], arguments)
                predicted = simulate(KINDS[kind], measured, arguments)
                rows.append({"what": kind, "steps_per_kill": steps_per_kill, "simulated": predicted, "load": load,
                             "goodput": measured.goodput, **asdict(measured)})  # fmt: skip
                told = f"{predicted:.3f} simulated, {measured.goodput:.3f} measured"
                print(f"{kind}, {steps_per_kill} steps per kill: {told}", file=sys.stderr, flush=True)
    return report(rows, arguments)


# runs


def replicas(folder: Path, arguments: argparse.Namespace) -> list[str]:
    """The command of HetSeq with a replica on each rank."""
    return [*recover.hetseq(folder, arguments), "--max-restarts", str(RESTARTS)]


def owners(folder: Path, arguments: argparse.Namespace) -> list[str]:
    """The command of HetSeq with a part of the state on each rank."""
    image_steps = ["--memory-interval-updates", str(arguments.image_steps)]
    return [*replicas(folder, arguments), "--shard-model", "state", "--own", "equal", *image_steps]


def restarts(folder: Path, arguments: argparse.Namespace) -> list[str]:
    """The command of torchrun."""
    return recover.torchrun(folder, arguments, restarts=RESTARTS)


def one_run(kind: Kind, folder: Path, arguments: argparse.Namespace, steps_per_kill: int) -> Record:
    """Train, kill ranks for some seconds, and end everything once training has continued after the last kill."""
    steps, chance, kills_ns = folder / "steps", random.Random(f"{arguments.seed} {steps_per_kill}"), list[int]()
    with (folder / "said").open("w+b") as said:
        first = CALM_STEPS + SAVED_STEPS
        process = recover.started(kind.command(folder, arguments), folder, said)
        try:
            recover.await_(process, said, lambda: recover.newest(steps) >= first, f"step {first}")
            step_s = calm_step_s(recover.read_lines(steps))
            end_s = time.monotonic() + arguments.seconds
            while True:
                time.sleep(chance.expovariate(1 / (steps_per_kill * step_s)))
                if time.monotonic() > end_s:
                    break
                victim = chance.random()
                recover.await_(process, said, lambda: len(living(recover.read_lines(steps))) >= 2, "two ranks")
                pids = living(recover.read_lines(steps))
                kills_ns.append(time.monotonic_ns())
                os.kill(pids[int(victim * len(pids))], signal.SIGKILL)
                recover.await_(
                    process,
                    said,
                    lambda: is_resumed(recover.read_lines(steps), kills_ns[-1], kind),
                    "the next new step",
                )
        finally:
            recover.end(process)
            recover.sweep(folder / "run")
    return Record(sorted(recover.read_lines(steps), key=lambda line: line.made_ns), kills_ns)


def living(lines: Sequence[recover.Line]) -> list[int]:
    """The processes that have made a step and live."""
    return [pid for pid in recover.pids(lines) if recover.start_time(pid)]


def is_resumed(lines: Sequence[recover.Line], killed_ns: int, kind: Kind) -> bool:
    """A step was made after the kill: by a new process, or in place by any."""
    return bool(resumed(lines, killed_ns, kind))


def resumed(lines: Sequence[recover.Line], killed_ns: int, kind: Kind) -> list[recover.Line]:
    """The lines of new steps since a kill; in place, a step is new if no rank had made it before."""
    before = [line for line in lines if line.made_ns <= killed_ns]
    newest, old = max(line.step for line in before), {line.pid for line in before}
    after = [line for line in lines if line.made_ns > killed_ns]
    return [line for line in after if (line.step > newest if kind.is_in_place else line.pid not in old)]


# figures


def calm_step_s(lines: Sequence[recover.Line]) -> float:
    """The mean step before any kill."""
    first_ns = first_lines(line for line in lines if line.step <= CALM_STEPS)
    return (first_ns[CALM_STEPS] - first_ns[SETTLING_STEPS]) / (CALM_STEPS - SETTLING_STEPS) / 1e9


def first_lines(lines: Any) -> dict[int, int]:
    """When the first rank had made each step, in ns."""
    first_ns: dict[int, int] = {}
    for line in lines:
        first_ns[line.step] = min(line.made_ns, first_ns.get(line.step, line.made_ns))
    return first_ns


def measure(record: Record, kind: Kind, arguments: argparse.Namespace) -> Measured:
    """The figures of a run: from the newest checkpoint before the first kill to its newest step."""
    last_ns = record.kills_ns[-1] if record.kills_ns else 0
    calm = [line for line in record.lines if not record.kills_ns or line.made_ns <= record.kills_ns[0]]
    first_ns = first_lines(calm)
    begin = CALM_STEPS // arguments.every * arguments.every
    good = resumed(record.lines, last_ns, kind) if record.kills_ns else calm
    newest = max(line.step for line in good)
    end_ns = min(line.made_ns for line in good if line.step == newest)
    step_s = calm_step_s(record.lines)
    kills_s = tuple((killed_ns - first_ns[begin]) / 1e9 for killed_ns in record.kills_ns)
    costs = kind.costs(record, step_s, arguments) if kills_s else Costs()
    if costs.halts_s:
        late_s = itertools.accumulate((costs.halt_s - halt_s for halt_s in costs.halts_s), initial=0.0)
        kills_s = tuple(at_s + by_s for at_s, by_s in zip(kills_s, late_s))
    wall_s = (end_ns - first_ns[begin]) / 1e9
    return Measured(wall_s, newest - begin, step_s, kills_s, costs.halt_s, costs.join_s, costs.back_s)


def costs_in_place(record: Record, step_s: float, arguments: argparse.Namespace) -> Costs:
    """By the kills that met all ranks, and no other kill before the lost rank was back; 0 if there are none."""
    first_ns, halts_s, joins_s, backs_s = first_lines(record.lines), list[float](), list[float](), list[float]()
    fewer_s = step_of(step_s, arguments)((arguments.ranks - 1,))
    kills_ns = (-math.inf, *record.kills_ns, math.inf)
    for last_ns, at_ns, next_ns in zip(kills_ns, record.kills_ns, kills_ns[2:]):
        before = [line for line in record.lines if line.made_ns <= at_ns]
        newest, old = max(line.step for line in before), {line.pid for line in before}
        new = [line for line in record.lines if line.made_ns > at_ns and line.pid not in old]
        made_by = {line.pid for line in before if line.step == newest}
        if last_ns > first_ns[newest] or len(made_by) < arguments.ranks or not new or new[0].made_ns > next_ns:
            continue
        # the step under way is computed to its end, and the next one is made without the lost rank
        noticed_ns = max(at_ns, first_ns[newest] + step_s * 1e9)
        again_ns, joined_ns = first_ns[newest + 1], new[0].made_ns
        join_s = (joined_ns - first_ns[new[0].step - 1]) / 1e9 - step_s
        halts_s.append(max(0.0, (again_ns - noticed_ns) / 1e9 - fewer_s))
        joins_s.append(max(0.0, join_s))
        backs_s.append(max(0.0, (joined_ns - at_ns) / 1e9 - join_s - step_s))
    halt_s, join_s, back_s = (statistics.mean(values or [0.0]) for values in (halts_s, joins_s, backs_s))
    return Costs(halt_s, join_s, back_s)


def costs_of_images(record: Record, step_s: float, arguments: argparse.Namespace) -> Costs:
    """As `costs_in_place`; the first step of the others is mostly one that they do again."""
    halts_s, joins_s, backs_s = list[float](), list[float](), list[float]()
    fewer_s = step_of(step_s, arguments)((arguments.ranks - 1,))
    for at_ns, next_ns in zip(record.kills_ns, (*record.kills_ns[1:], math.inf)):
        before = [line for line in record.lines if line.made_ns <= at_ns]
        old, last = {line.pid for line in before}, before[-1]
        new = [line for line in record.lines if line.made_ns > at_ns and line.pid not in old]
        made_by = {line.pid for line in before[-arguments.ranks :] if line.step == last.step}
        if len(made_by) < arguments.ranks or not new or new[0].made_ns > next_ns:
            continue
        first_ns = min(line.made_ns for line in before[-arguments.ranks :])
        again_ns = min(line.made_ns for line in record.lines if line.made_ns > at_ns and line.pid in old)
        joined_ns = new[0].made_ns
        others_ns = [line.made_ns for line in record.lines if at_ns < line.made_ns < joined_ns and line.pid in old]
        if not others_ns:
            continue
        join_s = (joined_ns - max(others_ns)) / 1e9 - step_s
        halts_s.append(max(0.0, (again_ns - max(at_ns, first_ns + step_s * 1e9)) / 1e9 - fewer_s))
        joins_s.append(max(0.0, join_s))
        backs_s.append(max(0.0, (joined_ns - at_ns) / 1e9 - join_s - step_s))
    halt_s, join_s, back_s = (statistics.mean(values or [0.0]) for values in (halts_s, joins_s, backs_s))
    return Costs(halt_s, join_s, back_s)


def costs_of_restarts(record: Record, step_s: float, arguments: argparse.Namespace) -> Costs:
    """From each signal to the first step of a new process, less that step; all ranks are back then."""
    next_ns = [
        min(line.made_ns for line in resumed(record.lines, at_ns, KINDS["restart"])) for at_ns in record.kills_ns
    ]
    halts_s = [(next_ns - at_ns) / 1e9 - step_s for next_ns, at_ns in zip(next_ns, record.kills_ns)]
    return Costs(statistics.mean(halts_s), halts_s=tuple(halts_s))


# simulation


def way_in_place(measured: Measured, arguments: argparse.Namespace) -> Way:
    """Replicas. No rank restarts from the disk unless all are lost; calm steps include the saves."""
    return retry(Disk(arguments.every, 0.0, measured.halt_s), regroup_s=measured.halt_s, join_s=measured.join_s)


def way_of_images(measured: Measured, arguments: argparse.Namespace) -> Way:
    """Owners. All ranks are on one node, whose memory keeps what a killed rank had: no two kills lose it."""
    way = images(
        Disk(arguments.every, 0.0, measured.halt_s), regroup_s=measured.halt_s, every=arguments.image_steps,
        image_s=0.0, join_s=measured.join_s,
    )  # fmt: skip
    return replace(way, has_neighbours=False)


def way_of_restarts(measured: Measured, arguments: argparse.Namespace) -> Way:
    """Restarts from the newest checkpoint."""
    return restart(Disk(arguments.every, 0.0, measured.halt_s))


KINDS = {
    "replicas": Kind(replicas, costs_in_place, way_in_place, is_in_place=True),
    "images": Kind(owners, costs_of_images, way_of_images, is_in_place=True),
    "restart": Kind(restarts, costs_of_restarts, way_of_restarts, is_in_place=False),
}


def simulate(kind: Kind, measured: Measured, arguments: argparse.Namespace) -> float:
    """The goodput of a run with these kills and these costs."""
    absences = absences_of(measured.kills_s, measured.back_s, arguments.ranks)
    step_s = step_of(measured.step_s, arguments)
    way, nodes = kind.way(measured, arguments), [arguments.ranks]
    return live(way, absences, nodes=nodes, step_s=step_s, wall_s=measured.wall_s).fraction


def step_of(calm_s: float, arguments: argparse.Namespace) -> StepTime:
    """The step by the ranks that are left, who share its samples equally; `calm_s`: with all of them."""
    paced_s = arguments.sample_ms / 1e3 * recover.SAMPLES_PER_RANK
    return lambda left: calm_s + paced_s * (arguments.ranks / left[0] - 1) if left[0] else math.inf


def absences_of(kills_s: Sequence[float], back_s: float, ranks: int) -> list[Absence]:
    """One for each kill, of a rank that is there; all ranks are equal. The one that is away longest is back first."""
    free_s, absences = [0.0] * ranks, list[Absence]()
    for at_s in kills_s:
        rank = min(range(ranks), key=lambda one: free_s[one])
        if free_s[rank] <= at_s:
            free_s[rank] = at_s + back_s
            absences.append(Absence(at_s, at_s + back_s, rank))
    return absences


def report(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> int:
    """The table, the verdict, the line of JSON; 1 if the bar is missed."""
    cells = []
    for row in rows:
        shown = (f"{row[name]:.3f}" for name in ("halt_s", "goodput", "simulated"))
        counts = (str(row["steps_per_kill"]), str(len(row["kills_s"])), str(row["steps"]))
        cells.append([row["what"], *counts, *shown, f"{row['simulated'] / row['goodput']:.3f}"])
    load = statistics.mean(row["load"] for row in rows)
    print(
        f"{arguments.ranks} ranks, a checkpoint every {arguments.every} steps; load {load:.1f}, {os.cpu_count()} cores"
    )
    print(figures.table(HEADS, cells))
    missed = [row for row in rows if abs(row["simulated"] / row["goodput"] - 1) > BAR]
    print(f"{len(rows) - len(missed)} of {len(rows)} within {BAR:.0%} of the measured goodput (bar: all of them)")
    print(figures.json_line("goodput", vars(arguments), rows))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
