"""The same losses on one rank, on two, and on ranks of the GPU and of the CPU together, in fp64."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_sections.runs import PICTURES, PLAIN, SGD, Wanted, gap, train, train_all
from gpu_sections.section import Check, Place, holds, within

COMMON = ("--task", PICTURES, *PLAIN, *SGD)
EXACT = (*COMMON, "--precision", "fp64", "--global-batch-size", 96, "--max-update", 40)
#: so much work that a GPU is faster than a core; with the learning rate of the others it diverges on every device
LARGE = (*COMMON, "--lr", 0.03, "--side", 32, "--width", 48, "--global-batch-size", 512, "--max-update", 40)
LEAST = 1e-10  # nats; fp64 rounds at 1e-16, and 40 steps of this network keep it below 1e-12


def checks(place: Place) -> Iterator[Check]:
    """Curves of several worlds against the curve of one rank; on a GPU also the shares of GPU and CPU."""
    wanted = [
        Wanted("one", EXACT, place.devices(1)),
        Wanted("two", EXACT, place.devices(2)),
        Wanted("mixed", (*EXACT, "--balance", "5,2,1"), place.devices(1, 2)),
    ]
    if place.is_gpu:
        wanted.append(Wanted("cpu", EXACT, "cpu"))
    runs = train_all(place, wanted)
    for name in ("two", "mixed", *(["cpu"] if place.is_gpu else [])):
        yield within(f"{name} against one, nats", gap(runs["one"], runs[name]), LEAST)
    first, last = runs["one"].losses[0], runs["one"].losses[-1]
    yield holds("the loss falls", last < 0.9 * first, seen=f"{first:.3f} to {last:.3f}", expected="by a tenth")
    if place.is_gpu:
        gpu, cpu = train(place, "shares", *LARGE, devices=place.devices(1, 1)).rows[-1]["shares"]
        yield holds("shares of GPU and CPU", gpu > cpu, seen=f"{gpu} and {cpu}", expected="more for the GPU")
