"""BERT-large in bf16 on two ranks of one device that own three quarters and one quarter of the state, against replicas.

Replicas train before and after, as the clock of the device may drift. On a CPU the network is tiny, and speeds and
memory are only reported.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator

from workloads import Rows, write_rows

from gpu_sections.runs import PLAIN, Run, RunFailed, gap, train
from gpu_sections.section import Check, Place, holds, within

STEPS, SETTLE = 14, 4  # of a run; before times are taken
OWN = (3, 1)
SLOWER, SLACK, ALLOWED_BYTES = 1.25, 1.05, 100 * 2**20
APART = 2e-2  # nats; products in bf16, which a GPU does not repeat to the bit
UNIT_BYTES = 25 * 2**20  # --bucket-cap-mb
LARGE, ROWS = Rows(24, 1024, 16, 30522, 128, 20), 64
TINY, FEW_ROWS = Rows(2, 64, 2, 512, 32, 4), 8


def checks(place: Place) -> Iterator[Check]:
    """The curve, the time of a step and the memory of each rank."""
    shape, rows = (LARGE, ROWS) if place.is_gpu else (TINY, FEW_ROWS)
    data = place.folder / "data"
    place.begin("the data")
    write_rows(data, shape, 8 * rows)
    words = (
        "--task", "bert", "--data", data, "--precision", "bf16", "--dropout", 0, "--optimizer", "adamw", "--lr", 1e-3,
        "--global-batch-size", rows, "--batch-size", rows // 2, "--balance", "1,1", "--max-update", STEPS, *PLAIN,
    )  # fmt: skip
    own = ("--shard-model", "state", "--own", ",".join(map(str, OWN)))
    before = train(place, "replicas", *words, devices=place.devices(2))
    owned = train(place, "owned", *words, *own, devices=place.devices(2))
    after = train(place, "replicas-again", *words, devices=place.devices(2))
    parameters = parameters_of(owned)
    yield Check("model", f"BERT of {parameters / 1e6:,.1f} M parameters, in bf16")
    yield within("replicas against owners, nats", gap(before, owned), APART)
    yield holds("the loss falls", owned.losses[-1] < owned.losses[0], seen=f"{owned.losses[-1]:.3f}", expected="less")
    times = [step_s(run) for run in (before, owned, after)]
    ratio = times[1] / statistics.mean([times[0], times[2]])
    figure = f"{ratio:.3f} x replicas, {times[1]:.3g} s"
    if place.is_gpu:
        yield holds("time of a step", ratio <= SLOWER, seen=figure, expected=f"at most {SLOWER} x")
    else:
        yield Check("time of a step", figure)
    travelling = 3 * max(UNIT_BYTES, 4 * shape.vocabulary * shape.hidden)
    for rank, weight in enumerate(OWN):
        # by the formula, and whatever a replica holds beside its 16 bytes a parameter
        ours = 4 * parameters + 12 * parameters * weight / sum(OWN) + travelling
        most = SLACK * ours + max(0, memory(before, rank) - 16 * parameters) + ALLOWED_BYTES
        figure = f"{memory(owned, rank) / 2**20:,.0f} MiB, a replica {memory(before, rank) / 2**20:,.0f}"
        if place.is_gpu:
            expected = f"at most {most / 2**20:,.0f} MiB"
            yield holds(f"memory of rank {rank}", memory(owned, rank) <= most, seen=figure, expected=expected)
        else:
            yield Check(f"memory of rank {rank}", figure)


def parameters_of(run: Run) -> int:
    """The number of parameters, as the run says it. Raises RunFailed where it does not."""
    found = re.search(r"([\d,]+) parameters", run.output)
    if found is None:
        raise RunFailed(f"{run.name} did not say how many parameters it trains: {run.last_words}")
    return int(found[1].replace(",", ""))


def step_s(run: Run) -> float:
    """Seconds of a step, the median."""
    return statistics.median(float(row["seconds"]) for row in run.rows[SETTLE:])


def memory(run: Run, rank: int) -> int:
    """Bytes that a rank held at most."""
    return max(int(row["ranks"]["memory_bytes"][rank]) for row in run.rows)
