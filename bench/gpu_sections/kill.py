"""Two ranks are killed while a run trains, one on the device and one on the CPU, and come back; the losses stay."""

from __future__ import annotations

import time
from collections.abc import Iterator

from gpu_sections.runs import PICTURES, PLAIN, SGD, gap, start
from gpu_sections.section import Check, Place, holds, within

STEPS = 600
PAUSE_S, PAUSE_ON_GPU_S = 0.02, 0.06  # so long that two ranks come back in time; one with a GPU takes 8 s to begin
WORDS = (
    "--task", PICTURES, *PLAIN, *SGD, "--precision", "fp64", "--global-batch-size", 48, "--max-update", STEPS,
)  # fmt: skip
LEAST = 1e-9  # nats, after 600 steps
RECOVERED_S, RECOVERED_ON_GPU_S = 5.0, 15.0


def checks(place: Place) -> Iterator[Check]:
    """Kill a rank of the device, then one of the CPU, each once all ranks train."""
    pause_s = PAUSE_ON_GPU_S if place.is_gpu else PAUSE_S
    calm = start(place, "calm", *WORDS, devices=place.devices(1))
    hurt = start(place, "hurt", *WORDS, "--pause", pause_s, devices=place.devices(2, 1))
    hurt.await_step(10)
    for times, slot, kind in ((1, 1, place.device), (2, 2, "cpu")):
        began_s = time.monotonic()
        hurt.kill_rank(slot)
        place.begin(f"rank {slot} on {kind} was killed and is awaited")
        hurt.await_return(3, times=times)
        yield Check(f"rank {slot} on {kind} takes part again after", f"{time.monotonic() - began_s:.1f} s")
    hurt.hurry()
    run = hurt.end()
    seconds = [event["seconds"] for event in run.events("generation") if event["seconds"] is not None]
    yield within(
        "the others stood still for", max(seconds), RECOVERED_ON_GPU_S if place.is_gpu else RECOVERED_S, unit=" s"
    )
    stories = run.stories
    yield holds("stories", stories.count("was killed") == 2, seen=stories, expected="two that a rank was killed")
    yield within("losses against a calm run, nats", gap(calm.end(), run), LEAST)
