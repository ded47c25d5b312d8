"""Images of the state in the memory of two nodes: what they cost, and how long the loss of a node lasts.

    python bench/images.py [--only pace link loss] [--seconds 60] [--steps 20] [--rounds 5]

Each node is a network namespace with memory of its own and a cable; all train a GPT of 3.2 M parameters with AdamW, of
which each owns an equal part (`--shard-model state`). A node plays a machine of a given speed (`slow_layers.py`).

`pace`: two nodes with an image as often as the default allows, for `--seconds`. Bar: the training thread of the writer
waits for images for at most 1 % of the time. Beside it: the processor time of the threads that copy, send and receive.

`link`: two nodes on cables of 1 Gbit/s, with an image in every step and with none, one after the other. An image takes
three numbers of 4 bytes for each parameter to the other node. Predicted: the larger of a step without images, and the
bytes of a step and its image over the rate of the cable. Bar: the measured step is within 20 % of it. Images that were
not in every step, as the one before was still under way, count as often as they were made.

`loss`: three nodes on cables of 1 Gbit/s. All processes of a node get SIGKILL, and it is started again afterwards.
Bar, for the median: from the kill to the first row of a step that is new or done again, without the step itself: at
most 1 s, and the bytes that the node with the busiest cable has received meanwhile over its rate.

The script needs root or user namespaces, ip(8) and tc(8), and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import figures
import slow_layers
from nodes import Lab, Run, await_, lab_of
from resident import tree

PARTS = ("pace", "link", "loss")
BLOCKED_BAR, LINK_APART, LOSS_BAR_S = 0.01, 0.20, 1.0
MBIT_PER_S, FREE_MBIT_PER_S = 1000.0, 100_000.0
ROWS_PER_S, SAMPLES = 40.0, 8  # of a node; of a step of two nodes
NUMBERS, ITEM_BYTES = 3, 4  # of a parameter: itself and two moments
SETTLE = 3
BUCKET_MIB = 0.5


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of `pace`")
    parser.add_argument("--steps", type=int, default=20, help="counted steps of each half of `link`")
    parser.add_argument("--rounds", type=int, default=5, help="kills of `loss`")
    arguments = parser.parse_args(words)
    if min(arguments.seconds, arguments.steps, arguments.rounds) < 1:
        parser.error("--seconds, --steps and --rounds: expected numbers of at least 1")
    return arguments


def main() -> int:
    """Measure and print; 1 if a bar is missed."""
    arguments, rows = parse(), list[dict[str, Any]]()
    for part in arguments.only:
        with tempfile.TemporaryDirectory(prefix="hetseq-images-") as name:
            load = os.getloadavg()[0]
            found = {"pace": pace, "link": link, "loss": loss}[part](arguments, Path(name))
        print(found.pop("text"))
        print(f"  load {load:.1f} on {os.cpu_count()} cores before it")
        rows.append({**found, "load": load})
    missed = [row["what"] for row in rows if not row["is_met"]]
    print(f"missed: {'; '.join(missed)}" if missed else "all bars are met")
    print(figures.json_line("images", vars(arguments), rows))
    return 1 if missed else 0


def training(nodes: int, every: int) -> list[str]:
    """The words of a training with owners; `every` as --memory-interval-updates."""
    options = {
        "task": f"{slow_layers.__file__}:SlowTokens", "global-batch-size": SAMPLES * nodes // 2, "batch-size": SAMPLES,
        "bucket-cap-mb": BUCKET_MIB, "optimizer": "adamw", "lr": 1e-3, "lr-scheduler": "constant",
        "max-update": 1_000_000, "log-format": "none", "memory-interval-updates": every, "noise-scale-every": 0,
        "num-workers": 0, "check-replicas-every": 0, "shard-model": "state", "own": ",".join("1" * nodes),
        "balance": ",".join("1" * nodes), "persistent-time-interval": 0,
    }  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return ["--cpu", "--disable-validation", "--no-save", *words]


def variables(nodes: int) -> list[Mapping[str, str]]:
    """The speed of each node."""
    return [{slow_layers.VARIABLE: str(ROWS_PER_S)}] * nodes


def image_bytes(nodes: int) -> float:
    """What one node sends of an image."""
    elements = sum(parameter.numel() for parameter in slow_layers.SlowTokens.network().parameters())
    return elements * NUMBERS * ITEM_BYTES / nodes


def pace(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The training thread's wait at the default pace."""
    with lab_of(folder, [1.0] * 2, FREE_MBIT_PER_S, variables(2)) as lab:
        run = lab.begin("pace", training(2, -1), range(2))
        await_([run], lambda: run.steps_of(2) > SETTLE, "the first steps")
        began_s = time.monotonic()
        await_([run], lambda: time.monotonic() - began_s > arguments.seconds, "the time")
        lasted_s = run.seen[-1].at_s - run.seen[0].at_s
        lab.finish(run)
        events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    (told,) = (event for event in events if event["event"] == "images")
    blocked, helper = told["blocked_seconds"] / lasted_s, told["helper_cpu_seconds"] / lasted_s
    return {
        "what": "images at the default pace", "blocked": blocked, "helper": helper, "images": told["images"],
        "seconds": lasted_s, "bytes": image_bytes(2), "is_met": blocked <= BLOCKED_BAR,
        "text": f"pace: {told['images']} images in {lasted_s:.0f} s; the training thread waited for {blocked:.3%} of"
        f" the time, helper threads computed for {helper:.3%}",
    }  # fmt: skip


def link(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A step with an image, and one without, on a slow cable."""
    rate = MBIT_PER_S * 1e6 / 8
    step_s, bytes_of, images = {}, {}, 0
    with lab_of(folder, [1.0] * 2, MBIT_PER_S, variables(2)) as lab:
        for every in (0, 1):
            run = lab.begin(f"every-{every}", training(2, every), range(2))
            await_([run], lambda run=run: run.steps_of(2) > SETTLE, "the first steps")  # type: ignore[misc]
            first, before = len(run.seen) - 1, lab.cable_bytes()
            await_([run], lambda run=run, first=first: len(run.seen) > first + arguments.steps, "the steps")  # type: ignore[misc]
            after, last = lab.cable_bytes(), len(run.seen) - 1
            lab.finish(run)
            step_s[every] = (run.seen[last].at_s - run.seen[first].at_s) / (last - first)
            moved = [max(now[0] - then[0], now[1] - then[1]) for then, now in zip(before, after)]
            bytes_of[every] = max(moved) / (last - first)
            images = len({seen.row["image"] for seen in run.seen[first + 1 : last + 1] if "image" in seen.row})
    often = images / arguments.steps
    predicted_s = max(step_s[0], (bytes_of[0] + often * image_bytes(2)) / rate)
    ratio = step_s[1] / predicted_s
    return {
        "what": "an image in every step over 1 Gbit/s", "step_s": step_s, "bytes": bytes_of, "often": often,
        "image_bytes": image_bytes(2), "predicted_s": predicted_s, "ratio": ratio,
        "is_met": abs(ratio - 1) <= LINK_APART,
        "text": f"link: a step takes {step_s[0]:.3f} s and {bytes_of[0] / 1e6:.1f} MB without images, {step_s[1]:.3f} s"
        f" and {bytes_of[1] / 1e6:.1f} MB with one of {image_bytes(2) / 1e6:.1f} MB in {often:.0%} of the steps;"
        f" predicted {predicted_s:.3f} s, measured / predicted {ratio:.2f}",
    }  # fmt: skip


def loss(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """From the kill of a node to the next step of the others."""
    rate, told = MBIT_PER_S * 1e6 / 8, []
    with lab_of(folder, [1.0] * 3, MBIT_PER_S, variables(3)) as lab:
        words = training(3, 4)
        run = lab.begin("loss", words, range(3))
        for number in range(arguments.rounds):
            await_([run], lambda: run.steps_of(3) > 8 + 3 * number, "steps of all nodes")  # noqa: B023
            victim = 1 + number % 2
            step_s = statistics.median(
                later.at_s - earlier.at_s for earlier, later in zip(run.seen[-6:], run.seen[-5:])
            )
            told.append(kill(lab, run, victim, rate) | {"step_s": step_s})
            lab.start(run, words, victim)
        lab.finish(run)
        events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    for one in told:
        one["late_s"] = one["seconds"] - one["step_s"] - one["link_s"]
    went_back = sum(1 for event in events if event.get("image"))
    late_s = [one["late_s"] for one in told]
    return {
        "what": "the loss of a node", "kills": told, "went_back": went_back,
        "is_met": statistics.median(late_s) <= LOSS_BAR_S and went_back == len(told),
        "text": f"loss: {len(told)} kills, {went_back} times back to an image; the next step after"
        f" {statistics.median(one['seconds'] for one in told):.2f} s"
        f" (at most {max(one['seconds'] for one in told):.2f}), of which a step takes"
        f" {statistics.median(one['step_s'] for one in told):.2f} s and the cable"
        f" {statistics.median(one['link_s'] for one in told):.2f} s: the rest is {statistics.median(late_s):.2f} s, at"
        f" most {max(late_s):.2f} s",
    }  # fmt: skip


def kill(lab: Lab, run: Run, victim: int, rate: float) -> dict[str, float]:
    """Kill all processes of a node at once; the seconds until the others have made a step, and of their cables."""
    launcher = run.launchers.pop(victim)
    before, count, began_s = lab.cable_bytes(), len(run.seen), time.monotonic()
    for pid in tree(launcher.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    launcher.wait()
    await_([run], lambda: run.steps_of(2) > 0 and len(run.seen) > count, "the step after a kill")
    first = next(seen for seen in run.seen[count:] if seen.row["world_size"] == 2)
    received = [now[0] - then[0] for then, now in zip(before, lab.cable_bytes())]
    return {"seconds": first.at_s - began_s, "link_s": max(received) / rate}


if __name__ == "__main__":
    sys.exit(main())
