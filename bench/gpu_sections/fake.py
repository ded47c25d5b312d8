"""Faults of GPUs in torch's own words, made on the CPU: what HetSeq makes of a text does not need the card.

Memory that runs out in the words of every library, and a device that fails in the middle of an exchange, which its own
rank has to answer for. `lost_device` and `memory` have the rest, on the CPU too.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpu_sections import faults
from gpu_sections.runs import PICTURES, PLAIN, SGD, gap, start, told
from gpu_sections.section import Check, Place, equal, holds, within

WORDS = ("--task", PICTURES, *PLAIN, *SGD, "--precision", "fp64", "--global-batch-size", 96, "--max-update", 12)


def checks(place: Place) -> Iterator[Check]:
    """A calm run, one that is told of exhaustion in all words, and two nodes of which one loses its device."""
    calm = start(place, "calm", *WORDS, devices="cpu")
    # micro-batches of 96, 48, 24, 12 and 6 pictures are refused, a text each
    hungry = start(place, "texts", *WORDS, "--fault", "exhaust-texts", "--fits", 4, devices="cpu").end()
    calm_run = calm.end()
    yield equal("texts of exhaustion", hungry.logs.count("[batch-halved]"), len(faults.EXHAUSTED))
    yield holds("no text is taken for a failed device", "device failed" not in hungry.output, seen=hungry.last_words,
                expected="a run in one process")  # fmt: skip
    yield within("losses after them, nats", gap(calm_run, hungry), 1e-10)
    words = (
        *WORDS, "--fault", "lose-in-exchange", "--distributed-init-method", f"file://{place.folder / 'meeting'}",
        "--distributed-world-size", 2, "--secret-file", place.folder / "secret",
    )  # fmt: skip
    nodes = [start(place, "nodes", *words, "--distributed-rank", rank, devices="cpu") for rank in range(2)]
    run, _ = (node.end() for node in nodes)
    yield told("an error of the device in the exchange", run.stories, "its device failed")
    yield within("losses after it, nats", gap(calm_run, run), 1e-10)
