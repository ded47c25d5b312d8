"""What the memory planner predicts, against the run of each layout on seven emulated clusters.

    python bench/shard_plan.py [--clusters equal 3:1 server 4:2:1 small tight least] [--steps 5] [--rounds 1]

Each node is a network namespace with a cable of a given rate in either direction. A node plays a machine of a given
speed: it sleeps after each half of a layer (`slow_layers.py`, which says why not `--throttle`), so all nodes together
need less than 2 cores, mostly half of one. Memory is what the planner is told. All train a GPT of 3.2 M parameters with
AdamW, in buckets of half a MiB: a model this small has as many buckets as a large one has with the default.

For each cluster the inputs of the prediction come first. Each node trains alone, while the others do the same: half of
its share of a step, all of it, and all of it in two micro-batches. Its cost follows from these three. The links have
the rate of the cables. Nothing is fitted afterwards. Then `candidates` gives the best layout of each kind, and each one
that fits is run: its samples by `--balance`, its micro-batch by `--batch-size`, its owners by `--own`. A measured step
is the median over `--steps` steps, by the clock of this script from row to row.

Bars: the layout that `choose` gives is within 5 % of the fastest one that fits; each predicted step is within 15 % of
the measured one; what a node sends and receives by its cable is at most 1 % below the plan and 8 % above it, for the
protocols, of the larger of both ways. With other programs on more than a tenth of the cores the bars count as missed.
The script needs root or user namespaces, ip(8) and tc(8), and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
import slow_layers
from nodes import Lab, Run, await_, cpu_seconds_of_others, lab_of

from hetseq.balance.memory_plan import Layout, Misfit, ModelMemory, RankMemory, candidates, choose
from hetseq.balance.shares import Cost, assign_shares
from hetseq.parallel.model_layers import AUTO, find_layers

WITHIN, APART = 0.05, 0.15
FEWER_BYTES, MORE_BYTES = 0.01, 0.08  # on the cable than the plan says, of the larger of both ways
MOST_OTHERS = 0.10  # of the cores, for other programs during a measurement; with more the bars count as missed
SETTLE = 2  # steps that are not counted
ALONE_STEPS = 4
ITEM_BYTES = 4
BUCKET_BYTES = 1 << 19
ACTIVATION_BYTES = 1_350_000  # of a row: torch keeps 1.11 MB for each of eight rows, and 1.34 MB for a single one


@dataclass(frozen=True)
class Machine:
    """A node: the speed of the machine that it plays, 0 if it computes nothing, and its memory."""

    rows_per_s: float
    memory_bytes: int
    is_stable: bool = False


@dataclass(frozen=True)
class Cluster:
    """Machines with alike cables, and the samples of a step."""

    machines: tuple[Machine, ...]
    mbit_per_s: float
    samples: int


#: a replica takes 51.8 MB and the activations of a micro-batch. 92 % of the memory can be used: with 55 MB there is no
#: room for that, with 58.5 MB there is for a single row at a time. The parameters alone take 13 MB; with 14 MB there is
#: room for two layers, the root and some rows
SMALL, TIGHT, LEAST, LARGE = 55_000_000, 58_500_000, 14_000_000, 1_000_000_000
CLUSTERS = {
    "equal": Cluster((Machine(6, LARGE), Machine(6, LARGE)), 200, 16),
    "3:1": Cluster((Machine(6, LARGE), Machine(2, LARGE)), 60, 16),
    "server": Cluster((Machine(6, SMALL), Machine(6, SMALL), Machine(0, LARGE, is_stable=True)), 200, 16),
    "4:2:1": Cluster((Machine(6, LARGE), Machine(3, LARGE), Machine(1.5, LARGE)), 50, 28),
    "small": Cluster((Machine(6, LARGE), Machine(6, SMALL)), 200, 16),
    "tight": Cluster((Machine(6, TIGHT), Machine(6, TIGHT)), 200, 16),
    "least": Cluster((Machine(6, LEAST), Machine(6, LEAST), Machine(0, LARGE, is_stable=True)), 200, 16),
}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=5, help="counted steps of each run")
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args(words)
    if min(arguments.steps, arguments.rounds) < 1:
        parser.error("--steps and --rounds: expected numbers of at least 1")
    return arguments


@dataclass(frozen=True)
class Measured:
    """Counted steps of a run: the median of their seconds, and bytes of a step by node, received and sent."""

    step_s: float
    cable_bytes: tuple[tuple[float, float], ...]
    compute_s: tuple[float, ...]  # of each node as the rows say, medians; and besides it:
    overhead_s: tuple[float, ...]
    others: float  # part of the cores that other programs took


def main() -> int:
    """Measure and print; 1 if a bar is missed."""
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nodes and namespaces end with this script
    print(f"load of the machine at the start: {os.getloadavg()[0]:.2f}", flush=True)
    rows: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for name in arguments.clusters:
            rows += of_cluster(name, number, arguments.steps)
    return report(rows, arguments)


def of_cluster(name: str, number: int, steps: int) -> list[dict[str, Any]]:
    """Plan and run one cluster; a row for each layout that fits."""
    cluster, model = CLUSTERS[name], model_memory()
    variables = [{slow_layers.VARIABLE: f"{machine.rows_per_s or 1:g}"} for machine in cluster.machines]
    with (
        tempfile.TemporaryDirectory(prefix="hetseq-shard-plan-") as folder,
        lab_of(Path(folder), [1.0] * len(variables), cluster.mbit_per_s, variables) as lab,
    ):
        costs = costs_of(lab, cluster)
        found = candidates(ranks_of(cluster, costs), model, cluster.samples)
        for one in found:
            if isinstance(one, Misfit):
                print(f"{name}: {one.shard_model} does not fit: {one.reason}", flush=True)
        layouts = [one for one in found if isinstance(one, Layout)]
        turns = layouts[::-1] if number % 2 else layouts
        measured = {one.shard_model: together(lab, one, cluster.samples, steps) for one in turns}
    least_s = min(one.step_s for one in measured.values())
    chosen = choose(found)
    rows = [
        row_of(name, one, measured[one.shard_model], least_s=least_s, is_chosen=one is chosen, costs=costs)
        for one in layouts
    ]
    for row in rows:
        print(
            f"round {number + 1}, {row['what']}: {row['ratio']:.3f} of the measured {row['step_s']:.2f} s", flush=True
        )
    return rows


def model_memory() -> ModelMemory:
    """The model as the planner is told."""
    model = slow_layers.SlowTokens.network()
    sizes = [parameter.numel() for parameter in model.parameters()]
    layers = find_layers(model, [AUTO], flag="--shard-modules").values()
    in_layers = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    return ModelMemory(
        sum(sizes), ACTIVATION_BYTES, max(BUCKET_BYTES // ITEM_BYTES, *sizes), layers=len(layers),
        root_parameters=sum(sizes) - in_layers,
    )  # fmt: skip


def ranks_of(cluster: Cluster, costs: Sequence[Cost]) -> list[RankMemory]:
    """The nodes as the planner is told."""
    return [
        RankMemory(f"node {at}", cost, machine.memory_bytes, cluster.mbit_per_s * 1e6 / 8, is_stable=machine.is_stable)
        for at, (cost, machine) in enumerate(zip(costs, cluster.machines))
    ]


def training(samples: int, micro_batch: int) -> list[str]:
    """The words of a training but for its ranks."""
    options = {
        "task": f"{slow_layers.__file__}:SlowTokens", "global-batch-size": samples, "batch-size": micro_batch,
        "bucket-cap-mb": BUCKET_BYTES / 2**20, "optimizer": "adamw", "lr": 1e-3, "lr-scheduler": "constant",
        "max-update": 1_000_000, "log-format": "none", "memory-interval-updates": 0, "noise-scale-every": 0,
        "num-workers": 0, "check-replicas-every": 0,
    }  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return ["--cpu", "--disable-validation", "--no-save", *words]


# What the planner is told.


def costs_of(lab: Lab, cluster: Cluster) -> list[Cost]:
    """The cost of each node, which trains alone while all others do the same."""
    shares = assign_shares(cluster.samples, [machine.rows_per_s for machine in cluster.machines])
    runs: dict[tuple[int, int, int], Run] = {}  # by node, samples of a step, and of a micro-batch
    for node, share in enumerate(shares):
        if share:
            for size, micro_batch in ((share // 2, share // 2), (share, share), (share, share // 2)):
                words = training(size, micro_batch)
                runs[node, size, micro_batch] = lab.begin(f"alone-{node}-{size}-{micro_batch}", words, [node])
    everything = list(runs.values())
    await_(everything, lambda: all(len(run.seen) > SETTLE for run in everything), "the first steps of each node alone")
    firsts = [len(run.seen) - 1 for run in everything]

    def are_done() -> bool:
        return all(len(run.seen) > first + ALONE_STEPS for run, first in zip(everything, firsts))

    await_(everything, are_done, "the steps of each node alone")
    seconds = {key: step_s(run, first) for (key, run), first in zip(runs.items(), firsts)}
    for run in everything:
        lab.finish(run)
    return [
        cost_of(
            share, cluster.samples, half_s=seconds[node, share // 2, share // 2], whole_s=seconds[node, share, share],
            in_two_s=seconds[node, share, share // 2],
        ) if share else Cost(0.0, 1.0, limit=0)
        for node, share in enumerate(shares)
    ]  # fmt: skip


def cost_of(share: int, samples: int, *, half_s: float, whole_s: float, in_two_s: float) -> Cost:
    """The cost of a node from seconds of a step: of half its share, of all of it, and of all in two micro-batches."""
    per_sample_s = min(whole_s / share, (whole_s - half_s) / (share - share // 2))
    besides_s = whole_s - per_sample_s * share
    per_batch_s = min(besides_s, max(0.0, in_two_s - whole_s))
    return Cost(besides_s - per_batch_s, per_sample_s, per_batch_s=per_batch_s, batch=samples)


def step_s(run: Run, first: int = SETTLE) -> float:
    """Seconds of a step of a run, the median, from the row `first` on."""
    times = [seen.at_s for seen in run.seen[first:]]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


# The layouts.


def division(layout: Layout) -> list[str]:
    """The options that make a run this layout."""
    words = ["--shard-model", layout.shard_model, "--balance", ",".join(map(str, layout.shares))]
    if layout.shard_model != "none":
        words += ["--own", ",".join(f"{fraction:.6f}" for fraction in layout.fractions)]
    return words


def together(lab: Lab, layout: Layout, samples: int, steps: int) -> Measured:
    """Run a layout on all nodes."""
    words = [*training(samples, layout.micro_batch), *division(layout)]
    run = lab.begin(layout.shard_model, words, range(len(lab.hosts)))
    await_([run], lambda: run.steps_of(len(lab.hosts)) > SETTLE, "the first steps of all nodes")
    first, before, before_s = len(run.seen) - 1, lab.cable_bytes(), cpu_seconds_of_others()
    await_([run], lambda: len(run.seen) > first + steps, "the counted steps")
    others_s, after, last = cpu_seconds_of_others() - before_s, lab.cable_bytes(), len(run.seen) - 1
    if (shares := tuple(run.seen[-1].row["shares"])) != layout.shares:
        raise SystemExit(f"the run has the shares {shares}, and the layout has {layout.shares}")
    lab.finish(run)
    told = [seen.row["ranks"] for seen in run.seen[first + 1 :]]
    compute_s, overhead_s = (
        tuple(map(statistics.median, zip(*(ranks[key] for ranks in told)))) for key in ("compute_s", "overhead_s")
    )
    lasted_s = run.seen[last].at_s - run.seen[first].at_s
    return Measured(
        step_s(run, first),
        tuple(((now[0] - then[0]) / (last - first), (now[1] - then[1]) / (last - first))
              for then, now in zip(before, after)),
        compute_s,
        overhead_s,
        max(0.0, others_s) / lasted_s / (os.cpu_count() or 1),
    )  # fmt: skip


# Report.


def row_of(
    cluster: str, layout: Layout, measured: Measured, *, least_s: float, is_chosen: bool, costs: Sequence[Cost]
) -> dict[str, Any]:
    """The figures of a layout."""
    planned = list(zip(layout.received_bytes, layout.sent_bytes))
    above = [
        [(now - then) / max(1, *plan) for now, then in zip(ways, plan)]
        for ways, plan in zip(measured.cable_bytes, planned)
    ]
    ratio, of_fastest = layout.step_s / measured.step_s, measured.step_s / least_s
    return {
        "what": f"{cluster}, {layout.shard_model}", "cluster": cluster, "shard_model": layout.shard_model,
        "is_chosen": is_chosen, "micro_batch": layout.micro_batch, "shares": layout.shares,
        "fractions": layout.fractions, "compute_s": layout.compute_s, "exchange_s": layout.exchange_s,
        "predicted_s": layout.step_s, "step_s": measured.step_s, "ratio": ratio, "of_fastest": of_fastest,
        "computed_s": measured.compute_s, "overhead_s": measured.overhead_s,
        "planned_bytes": planned, "cable_bytes": measured.cable_bytes,
        "above_plan": above, "others": measured.others,
        "costs": [[cost.fixed_s, cost.per_batch_s, cost.per_unit_s] for cost in costs],
        "is_predicted": abs(ratio - 1) <= APART,
        "is_fast": not is_chosen or of_fastest <= 1 + WITHIN,
        "has_bytes": all(-FEWER_BYTES <= one <= MORE_BYTES for ways in above for one in ways),
        "is_calm": measured.others <= MOST_OTHERS,
    }  # fmt: skip


HEADS = ("cluster", "--shard-model", "samples", "owned, %", "micro-batch", "computing, s", "exchange, s",
         "predicted, s", "measured, s", "predicted / measured", "of the fastest", "bytes above plan, %",
         "bars")  # fmt: skip


def report(rows: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> int:
    """The table, the verdicts, the line of JSON; 1 if a bar is missed."""
    print()
    print(figures.table(HEADS, [cells(row) for row in rows]))
    print("(* is what the planner chooses; bytes by node: received, sent)")
    verdicts = {
        f"the chosen layout is within {WITHIN:.0%} of the fastest": "is_fast",
        f"a predicted step is within {APART:.0%} of the measured one": "is_predicted",
        f"bytes are at most {FEWER_BYTES:.0%} below the plan and {MORE_BYTES:.0%} above it": "has_bytes",
        f"other programs took at most {MOST_OTHERS:.0%} of the cores": "is_calm",
    }
    for what, key in verdicts.items():
        missed = [row["what"] for row in rows if not row[key]]
        print(f"{what}: {'NO, ' + '; '.join(missed) if missed else 'yes'}")
    print(figures.json_line("shard_plan", vars(arguments), rows))
    return 0 if all(row[key] for row in rows for key in verdicts.values()) else 1


def cells(row: Mapping[str, Any]) -> list[str]:
    """A line of the table."""
    owned = "-" if row["shard_model"] == "none" else ":".join(f"{100 * part:.3g}" for part in row["fractions"])
    seconds = (f"{row[key]:.2f}" for key in ("compute_s", "exchange_s", "predicted_s", "step_s"))
    moved = " ".join(",".join(f"{100 * one:.1f}" for one in ways) for ways in row["above_plan"])
    is_met = all(row[key] for key in ("is_fast", "is_predicted", "has_bytes", "is_calm"))
    return [
        row["cluster"], row["shard_model"] + "*" * row["is_chosen"], ":".join(map(str, row["shares"])), owned,
        str(row["micro_batch"]), *seconds, f"{row['ratio']:.3f}", f"{row['of_fastest']:.3f}", moved,
        "yes" if is_met else "NO",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
