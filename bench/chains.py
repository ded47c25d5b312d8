"""A memory server that owns the whole state, by chains against directly, on slow cables.

    python bench/chains.py [--steps 4] [--rounds 2] [--mbit 100] [--mtu 1500]

Five nodes, each a network namespace with a cable of its own: four compute a GPT of 6.2 M parameters in fp32, one owns
all of its optimizer state. With `--shard-model state` a step moves the parameters P from the server to all others and
their gradients to the server. Directly its cable carries each four times; in a chain once, and a cable between two
others carries both twice. Runs take turns; a step is the median from row to row, by the clock of this script.

Bars: the cable of the server carries at most 1.05 P in either direction of a step, all protocols included; a step takes
at most 0.6 of the time that it takes directly. Where a packet has 1500 bytes, headers are 4.6 % and acknowledgements
about 1 %, which misses the first bar; where it has 9000 (`--mtu 9000`), 1.1 % together. What a cable carries without
headers is printed too. Needs root or user namespaces, ip(8) and tc(8), and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import chained_tokens
import figures
from nodes import Lab, await_, lab_of

MOST_BYTES, MOST_TIME = 1.05, 0.6
COMPUTING, SETTLE = 4, 2
WORDS = (
    "--cpu", "--disable-validation", "--no-save", "--global-batch-size", "8", "--batch-size", "2", "--optimizer",
    "adamw", "--lr", "1e-3", "--lr-scheduler", "constant", "--max-update", "1000000", "--log-format", "none",
    "--memory-interval-updates", "0", "--noise-scale-every", "0", "--num-workers", "0", "--check-replicas-every", "0",
    "--shard-model", "state", "--balance", "1,1,1,1,0", "--own", "0,0,0,0,1", "--bucket-cap-mb", "4",
)  # fmt: skip


def parse() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="counted steps of a run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind")
    parser.add_argument("--mbit", type=float, default=100.0, help="of a cable, per second, in either direction")
    parser.add_argument("--mtu", type=int, default=1500, help="the largest packet that a cable carries, in bytes")
    return parser.parse_args()


def main() -> int:
    """Measure and print; 1 if a bar is missed."""
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nodes and namespaces end with this script
    print(f"load of the machine at the start: {os.getloadavg()[0]:.2f}", flush=True)
    model_bytes = 4 * sum(one.numel() for one in chained_tokens.Chained.network().parameters())
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="hetseq-chains-") as folder,
        lab_of(Path(folder), [1.0] * (COMPUTING + 1), arguments.mbit, mtu=arguments.mtu) as lab,
    ):
        for number, kind in itertools.product(range(arguments.rounds), ("Chained", "Direct")):
            rows.append(measure(lab, kind, f"{kind}-{number}", arguments.steps, model_bytes))
            print(described(rows[-1]), flush=True)
    return report(rows)


def measure(lab: Lab, kind: str, name: str, steps: int, model_bytes: int) -> dict[str, Any]:
    """The seconds of a step, and what each cable carried of it, in models."""
    run = lab.begin(name, ["--task", f"{chained_tokens.__file__}:{kind}", *WORDS], range(COMPUTING + 1))
    await_([run], lambda: run.steps_of(COMPUTING + 1) > SETTLE, "the first steps of all nodes")
    first, before, framed_before = len(run.seen) - 1, lab.payload_bytes(), lab.cable_bytes()
    await_([run], lambda: len(run.seen) > first + steps, "the counted steps")
    after, framed_after, last = lab.payload_bytes(), lab.cable_bytes(), len(run.seen) - 1
    lab.finish(run)
    times = [seen.at_s for seen in run.seen[first : last + 1]]

    def of_a_step(then: list[tuple[int, int]], now: list[tuple[int, int]]) -> list[tuple[float, float]]:
        scale = (last - first) * model_bytes
        return [((b[0] - a[0]) / scale, (b[1] - a[1]) / scale) for a, b in zip(then, now)]

    return {
        "what": kind, "step_s": statistics.median(later - earlier for earlier, later in itertools.pairwise(times)),
        "carried": of_a_step(before, after), "framed": of_a_step(framed_before, framed_after),
        "losses": [seen.row["loss"] for seen in run.seen[: first + 1]],
    }  # fmt: skip


def described(row: dict[str, Any]) -> str:
    """A run in one line."""
    *others, server = row["carried"]
    most = max(max(both) for both in others)
    return (
        f"{row['what']}: a step takes {row['step_s']:.2f} s; the server receives {server[0]:.3f} P and sends"
        f" {server[1]:.3f} P, another node at most {most:.3f} P"
    )


def report(rows: list[dict[str, Any]]) -> int:
    """Print the ratio, and each bar that was missed; 1 if there is one."""
    chained, direct = ([row for row in rows if row["what"] == kind] for kind in ("Chained", "Direct"))
    ratios = [one["step_s"] / other["step_s"] for one, other in zip(chained, direct)]
    apart = max(abs(a - b) for one, other in zip(chained, direct) for a, b in zip(one["losses"], other["losses"]))
    most, framed = (max(max(row[name][-1]) for row in chained) for name in ("carried", "framed"))
    shown = figures.spread(ratios).shown(".3f")
    print(f"chained against direct: {shown} of the time; losses at most {apart:.1e} apart")
    print(f"the cable of the server carries at most {framed:.3f} P, without the headers of packets {most:.3f} P")
    missed = [
        text
        for is_missed, text in (
            (statistics.median(ratios) > MOST_TIME, f"time: the bar is {MOST_TIME}"),
            (framed > MOST_BYTES, f"bytes: the bar is {MOST_BYTES} P"),
        )
        if is_missed
    ]
    print("; ".join(missed) if missed else "all bars are met")
    return bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())
