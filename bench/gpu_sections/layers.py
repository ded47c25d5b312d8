"""Parameters that come and go, of ranks of one device and of the CPU: the losses of one rank, and what a rank holds.

The losses are compared in fp64, the memory with a network in bf16 of which two layers are a small part.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpu_sections.runs import PLAIN, Wanted, gap, train, train_all
from gpu_sections.section import Check, Place, holds, within
from gpu_sections.shard import memory, parameters_of

TASKS = Path(__file__).parent.parent / "random_tokens.py"
EXACT = (
    "--task", f"{TASKS}:Tiny", *PLAIN, "--optimizer", "adamw", "--lr", 1e-3, "--precision", "fp64",
    "--global-batch-size", 12, "--batch-size", 2, "--max-update", 12,
)  # fmt: skip
ALL = (*EXACT, "--shard-model", "all")
MEMORY = (
    *PLAIN, "--optimizer", "adamw", "--lr", 1e-4, "--precision", "bf16", "--global-batch-size", 4, "--batch-size", 2,
    "--checkpoint-modules", "auto", "--max-update", 4,
)  # fmt: skip
LEAST = 1e-10  # nats; fp64 rounds at 1e-16
OWN = (3, 1)
ALLOWED = 1.15  # of the formula
ALLOWED_BYTES = 400 * 2**20  # beside it: kernels, activations and what the allocator rounds up


def checks(place: Place) -> Iterator[Check]:
    """Curves of several layouts against one rank's; on a GPU also the memory of two ranks."""
    runs = train_all(
        place,
        [
            Wanted("one", EXACT, place.devices(1)),
            Wanted("two", (*ALL, "--own", "3,1"), place.devices(2)),
            Wanted("mixed", (*ALL, "--own", "1,0,3", "--balance", "3,1,1"), place.devices(2, 1)),
            Wanted("host", (*ALL, "--own-memory", "gpu:400K,host:1G"), place.devices(2)),
            Wanted("unevenly many", (*ALL, "--balance", "5,1", "--reduce-dtype", "fp64"), place.devices(1, 1)),
            Wanted("drawn later, one", (*EXACT, "--delayed-init"), place.devices(1)),
            Wanted("drawn later", (*ALL, "--delayed-init", "--own", "1,3"), place.devices(2)),
        ],
    )
    for name in ("two", "mixed", "host", "unevenly many"):
        yield within(f"{name} against one, nats", gap(runs["one"], runs[name]), LEAST)
    yield within("drawn later, nats", gap(runs["drawn later, one"], runs["drawn later"]), LEAST)
    if not place.is_gpu:
        return
    words = ("--task", f"{TASKS}:Huge", *MEMORY, "--balance", "1,1")
    replica = train(place, "replica", *words, devices=place.devices(2))
    own = train(
        place, "owned", *words, "--shard-model", "all", "--own", ",".join(map(str, OWN)), devices=place.devices(2)
    )
    yield within("bf16 against replicas, nats", gap(replica, own), 2e-2)
    parameters = parameters_of(own)
    for rank, weight in enumerate(OWN):
        most = ALLOWED * 16 * parameters * weight / sum(OWN) + ALLOWED_BYTES
        yield holds(
            f"memory of rank {rank}", memory(own, rank) <= most,
            seen=f"{memory(own, rank) / 2**20:,.0f} MiB, a replica {memory(replica, rank) / 2**20:,.0f}",
            expected=f"at most {most / 2**20:,.0f} MiB",
        )  # fmt: skip
