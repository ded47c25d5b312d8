"""LoRA on three unequal nodes behind slow cables, of which one leaves and returns: joint speed, and exactness.

    python bench/lora_nodes.py [--factors 1,2,4] [--mbit 20] [--rounds 2]

Each node is a network namespace with a cable of 20 Mbit/s in either direction, and runs `hetseq train --task
hf_causal_lm --lora-rank 8` on a model made from its configuration. `--throttle` makes the nodes 1, 2 and 4 times
slower: a piece of compute that takes c seconds of CPU lasts c, 2 c and 4 c, so the three need 1.75 cores. The first
node has a core to itself, all others share the second one.

A round has three parts, and the next round has them in the reversed order:

    busy    each node trains for itself, all at the same time, without communication; their summed speed is 100 %
    idle    each node trains for itself while the others rest
    joint   all train together; the last one is dropped, returns with the same command, and trains again

A node that trains does whole steps of the same global batch in micro-batches of the same size, by the same command line
but for the meeting place. A speed is samples over seconds, from the row of one step to the row of another, by the clock
of this script. The joint speed counts the steps for which all nodes were present, before the leave and after the
return, once the shares have settled. Bytes are those of the cables, all protocols included.

At the end smaller models train in fp64, in the same way with a leave and a return, and then on one device: losses and
adapters are compared. The script needs root or user namespaces, ip(8) and tc(8), and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
from het import factors
from nodes import Lab, Run, Seen, await_, cpu_seconds_of_others, environment, lab_of

BAR, MOST_APART = 0.90, 1e-11
MOST_OTHERS = 0.10  # of the cores, for other programs during a measurement; with more the bar counts as missed
SETTLE, ALONE_SETTLE, AWAY = 8, 1, 3  # steps that are not counted; steps without the node that has left
WORDS = ("river", "boat", "wide", "small", "steady", "hand", "water", "stone", "letter", "window", "garden", "light")
TIMED = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
#: the models whose numbers are compared. Only the first is judged: transformers computes the norms of a Llama in fp32,
#: also in an fp64 model, so a difference of 1e-16 now and then becomes one of 1e-8 in an element. Measured over 200
#: steps of 192 samples: GPT-2 5e-16, Llama 9e-11, and Llama with its norms in fp64 5e-16.
EXACT: dict[str, dict[str, int]] = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_inner": 64, "n_positions": 128},
    "llama": {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 128},
}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--factors", type=factors, default=(1.0, 2.0, 4.0), help="how much slower each node is")
    parser.add_argument(
        "--mbit", type=float, default=20.0, help="of each cable in either direction, 10^6 bits a second"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of a measurement, at least")
    parser.add_argument("--steps", type=int, default=8, help="of a measurement of the joint run, at least")
    parser.add_argument("--batch", type=int, default=192, help="samples of a step")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples of a micro-batch, at most")
    parser.add_argument("--rank", type=int, default=8, help="of LoRA")
    arguments = parser.parse_args(words)
    if min(arguments.rounds, arguments.steps, arguments.batch, arguments.micro_batch, arguments.rank) < 1:
        parser.error("--rounds, --steps, --batch, --micro-batch and --rank: expected numbers of at least 1")
    if not arguments.mbit > 0 or not arguments.seconds >= 0:
        parser.error("--mbit: expected a number above 0; --seconds: 0 or more")
    return arguments


@dataclass(frozen=True)
class Window:
    """A measurement of one run: samples and seconds of whole steps, and bytes that left the nodes by their cables."""

    samples: int
    seconds: float
    steps: int
    sent_bytes: int = 0
    communication_s: float = 0.0  # that no rank could hide, as the rows say
    own_estimate_s: float = 0.0  # seconds of each step times the efficiency that its row states
    others_s: float = 0.0  # CPU time of programs that are not this script's, from its look at the first row on

    @property
    def speed(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds

    def __add__(self, other: Window) -> Window:
        return Window(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))


def main() -> int:
    """Measure and print; 1 if a bar is missed."""
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nodes and namespaces end with this script
    print(f"load of the machine at the start: {os.getloadavg()[0]:.2f}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="hetseq-lora-nodes-") as name,
        lab_of(Path(name), arguments.factors, arguments.mbit) as lab,
    ):
        words = train_words(lab.folder, "llama", TIMED, arguments, precision="fp32")
        rounds = [one_round(lab, [*words, "--no-save"], number, arguments) for number in range(arguments.rounds)]
        compared = {
            kind: differences(lab, kind, train_words(lab.folder / "exact", kind, sizes, arguments, precision="fp64"))
            for kind, sizes in EXACT.items()
        }
    return report(rounds, compared, arguments)


def train_words(
    folder: Path, kind: str, sizes: Mapping[str, Any], arguments: argparse.Namespace, *, precision: str
) -> list[str]:
    """The command line of a training; its model, of this `model_type`, and its texts are made."""
    from tests.support.tiny_models import publish

    model = publish(folder / f"{kind}-model", kind, seed=1, initializer_range=0.05, **sizes)
    chance, texts = random.Random(0), folder / f"{kind}.jsonl"
    with texts.open("w", encoding="utf-8") as file:
        for _ in range(64 * arguments.batch):
            text = " ".join(chance.choices(WORDS, k=40))[: chance.randint(100, 120)]
            file.write(json.dumps({"text": text}) + "\n")
    options = {
        "task": "hf_causal_lm", "model": model, "data": texts, "max-length": 128, "lora-rank": arguments.rank,
        "precision": precision, "optimizer": "adamw", "lr": 1e-3, "lr-scheduler": "constant",
        "global-batch-size": arguments.batch, "batch-size": arguments.micro_batch, "max-update": 1_000_000,
        "log-format": "none", "memory-interval-updates": 0, "noise-scale-every": 0, "num-workers": 0,
    }  # fmt: skip
    return [
        "--cpu",
        "--disable-validation",
        *(word for key, value in options.items() for word in (f"--{key}", str(value))),
    ]


# Speed.


def one_round(lab: Lab, words: Sequence[str], number: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """All three parts in turn: windows of each node, and of all together."""
    everyone = range(len(lab.hosts))
    parts: dict[str, Callable[[str], list[Window]]] = {
        "busy": lambda name: alone(lab, name, words, everyone, arguments),
        "idle": lambda name: [alone(lab, f"{name}-{node}", words, [node], arguments)[0] for node in everyone],
        "joint": lambda name: [joint(lab, name, words, arguments)],
    }
    found = dict[str, Any]()
    for part in sorted(parts, reverse=number % 2 == 1):
        found[part] = parts[part](f"{part}-{number}")
        told = " + ".join(f"{window.speed:.2f}" for window in found[part])
        print(f"round {number + 1}, {part}: {told} samples/s", flush=True)
    return found


def alone(
    lab: Lab, name: str, words: Sequence[str], nodes: Sequence[int], arguments: argparse.Namespace
) -> list[Window]:
    """Each of these nodes trains for itself, all at the same time, until all have been measured."""
    runs = [lab.begin(f"{name}-{node}", words, [node]) for node in nodes]
    await_(runs, lambda: all(len(run.seen) > ALONE_SETTLE for run in runs), f"the first steps of {name}")
    firsts, before_s = [len(run.seen) - 1 for run in runs], cpu_seconds_of_others()

    def is_measured(run: Run, first: int) -> bool:
        counted = run.seen[first:]
        return len(counted) > 2 and counted[-1].at_s - counted[0].at_s >= float(arguments.seconds)

    await_(runs, lambda: all(map(is_measured, runs, firsts)), f"steps of {name}")
    others_s = cpu_seconds_of_others() - before_s
    windows = [window_of(run.seen[first:], others_s=others_s) for run, first in zip(runs, firsts)]
    for run in runs:
        lab.finish(run)
    return windows


def joint(lab: Lab, name: str, words: Sequence[str], arguments: argparse.Namespace) -> Window:
    """All train together, one leaves and returns; the steps of all, before and after."""
    run = lab.begin(name, words, range(len(lab.hosts)))
    before = measured(lab, run, arguments)
    leave_and_return(lab, run, words)
    after = measured(lab, run, arguments)
    lab.finish(run)
    return before + after


def measured(lab: Lab, run: Run, arguments: argparse.Namespace) -> Window:
    """The next steps of all nodes, once the shares have settled."""
    world_size = len(lab.hosts)
    await_([run], lambda: run.steps_of(world_size) >= SETTLE, f"{SETTLE} steps of {world_size} nodes")
    first, bytes_before, before_s = len(run.seen) - 1, lab.sent_bytes(), cpu_seconds_of_others()

    def is_over() -> bool:
        counted = run.seen[first:]
        lasts_s: float = counted[-1].at_s - counted[0].at_s
        return len(counted) > int(arguments.steps) and lasts_s >= float(arguments.seconds)

    await_([run], is_over, "the measured steps")
    counted = run.seen[first:]
    if run.steps_of(world_size) < len(counted):
        raise SystemExit(
            f"a node was lost during the measurement: {run.folder.with_suffix('.0.txt').read_text()[-3000:]}"
        )
    return window_of(counted, lab.sent_bytes() - bytes_before, others_s=cpu_seconds_of_others() - before_s)


def leave_and_return(lab: Lab, run: Run, words: Sequence[str]) -> None:
    """The last node is dropped, the others make some steps, and it comes back."""
    from hetseq.commands.drop import drop

    last = len(lab.hosts) - 1
    leaver = run.launchers.pop(last)
    drop([str(run.folder), lab.hosts[last].name])
    await_([run], lambda: leaver.poll() is not None, "the end of the node that leaves")
    if leaver.returncode != 0:
        raise SystemExit(f"the node that was dropped ended with {leaver.returncode}")
    await_([run], lambda: run.steps_of(last) >= AWAY, f"{AWAY} steps of {last} nodes")
    lab.start(run, words, last)
    await_([run], lambda: run.steps_of(last + 1) >= 1, "the return of the node")


def window_of(seen: Sequence[Seen], sent_bytes: int = 0, *, others_s: float) -> Window:
    """From the row of the first of these steps, which is not counted, to the row of the last."""
    rows = [one.row for one in seen[1:]]
    return Window(
        samples=sum(row["samples"] for row in rows),
        seconds=seen[-1].at_s - seen[0].at_s,
        steps=len(rows),
        sent_bytes=sent_bytes,
        communication_s=sum(row.get("communication_s") or 0.0 for row in rows),
        own_estimate_s=sum(row["seconds"] * (row.get("efficiency") or 0.0) for row in rows),
        others_s=max(0.0, others_s),
    )


# Exactness.


def differences(lab: Lab, kind: str, words: Sequence[str]) -> dict[str, Any]:
    """Losses and adapters of three nodes, with a leave and a return, against one device: the largest differences.

    A difference is relative: of a loss to that loss, of a number of the state to the largest one of its tensor.
    """
    from tests.support.trials import curve, last_state

    run = lab.begin(f"exact-{kind}", words, range(len(lab.hosts)))
    await_([run], lambda: run.steps_of(len(lab.hosts)) >= SETTLE, "steps of all nodes")
    leave_and_return(lab, run, words)
    await_([run], lambda: run.steps_of(len(lab.hosts)) >= SETTLE, "steps after the return")
    sizes = [seen.row["world_size"] for seen in run.seen]
    lab.finish(run)
    mine = curve(run.folder)
    one = lab.folder / f"one-{kind}"
    done = subprocess.run(
        [sys.executable, "-m", "hetseq", "train", *words, "--max-update", str(max(mine)), "--save-dir", str(one)],
        cwd=lab.folder, env=environment(lab.folder), capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"one device ended with {done.returncode}: {done.stderr[-3000:]}")
    right = curve(one)
    if mine.keys() != right.keys():
        raise SystemExit(f"the nodes have {len(mine)} steps, and one device {len(right)}")
    states = [last_state(folder).tensors for folder in (run.folder, one)]
    if states[0].keys() != states[1].keys():
        raise SystemExit("the state of the nodes and the state of one device have different tensors")
    return {
        "kind": kind,
        "steps": len(mine),
        "steps_of_all": sizes.count(len(lab.hosts)),
        "loss": max(abs(mine[step]["loss"] - right[step]["loss"]) / abs(right[step]["loss"]) for step in right),
        "state": max(apart(states[0][name], value) for name, value in states[1].items()),
        "learnt": right[1]["loss"] - right[max(right)]["loss"],
    }


def apart(found: Any, right: Any) -> float:
    """The largest difference of two tensors, relative to the largest number of the second."""
    largest = float(right.double().abs().max()) if right.numel() else 0.0
    difference = float((found.double() - right.double()).abs().max()) if right.numel() else 0.0
    return difference / largest if largest else difference


# Report.


HEADS = ("round", "joint, samples/s", "busy, summed", "idle, summed", "joint, % of busy", "% of idle",
         "% by the run itself", "step, s", "exchange, s", "sent, kB a step", "others, % of cores")  # fmt: skip


def report(
    rounds: Sequence[Mapping[str, Any]], compared: Mapping[str, Mapping[str, Any]], arguments: argparse.Namespace
) -> int:
    """The table, the verdicts, the line of JSON; 1 if a bar is missed."""
    rows = [figures_of(one) for one in rounds]
    cells = [
        [
            str(number), f"{row['joint']:.2f}", f"{row['busy']:.2f}", f"{row['idle']:.2f}", f"{row['of_busy']:.1%}",
            f"{row['of_idle']:.1%}",
            f"{row['own_estimate']:.1%}", f"{row['step_s']:.2f}", f"{row['communication_s']:.3f}",
            f"{row['sent_bytes'] / 1e3:.0f}", f"{row['others']:.0%}",
        ]
        for number, row in enumerate(rows, start=1)
    ]  # fmt: skip
    slowed = ":".join(f"{factor:g}" for factor in arguments.factors)
    print(f"LoRA of rank {arguments.rank}, nodes {slowed} times slower, cables of {arguments.mbit:g} Mbit/s")
    print(figures.table(HEADS, cells))
    others = max(row["others"] for row in rows)
    if others > MOST_OTHERS:
        print(f"(other programs took up to {others:.0%} of the cores: these speeds say little, and count as missed)")
    share = figures.spread([row["of_busy"] for row in rows])
    holds = share.median >= BAR and others <= MOST_OTHERS
    print(f"joint speed: {share.shown('.1f', 100)} % of the summed speeds (bar: {BAR:.0%}: {'yes' if holds else 'NO'})")
    is_exact = all(max(one["loss"], one["state"]) <= MOST_APART for one in list(compared.values())[:1])
    for number, (kind, one) in enumerate(compared.items()):
        verdict = "no bar: its norms are in fp32" if number else f"bar: {MOST_APART:g}: {'yes' if is_exact else 'NO'}"
        print(
            f"fp64, {kind}, {one['steps']} steps, {one['steps_of_all']} of them by all nodes, the loss fell by"
            f" {one['learnt']:.3f}: against one device, losses {one['loss']:.1e}, adapters and moments"
            f" {one['state']:.1e} ({verdict})"
        )
    print(figures.json_line("lora_nodes", vars(arguments), [*rows, *compared.values()]))
    return 0 if holds and is_exact else 1


def figures_of(one: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a round."""
    (together,) = one["joint"]
    sums = {part: sum(window.speed for window in one[part]) for part in ("busy", "idle")}
    return {
        "joint": together.speed,
        **sums,
        "of_busy": figures.share_of_sum(together.speed, [window.speed for window in one["busy"]]),
        "of_idle": figures.share_of_sum(together.speed, [window.speed for window in one["idle"]]),
        "speeds_busy": [window.speed for window in one["busy"]],
        "speeds_idle": [window.speed for window in one["idle"]],
        "own_estimate": together.own_estimate_s / together.seconds,
        "step_s": together.seconds / together.steps,
        "communication_s": together.communication_s / together.steps,
        "sent_bytes": together.sent_bytes / together.steps,
        "others": most_of_others([window for part in ("busy", "idle", "joint") for window in one[part]]),
    }


def most_of_others(windows: Sequence[Window]) -> float:
    """The largest part of the cores that programs of others took during a measurement."""
    return max(window.others_s / window.seconds for window in windows) / (os.cpu_count() or 1)


if __name__ == "__main__":
    sys.exit(main())
