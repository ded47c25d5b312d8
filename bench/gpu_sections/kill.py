"""Two ranks are killed while a run trains, one on the device and one on the CPU, and come back; the losses stay."""

from __future__ import annotations

import time
from collections.abc import Iterator

from gpu_sections.runs import PICTURES, PLAIN, SGD, RunFailed, Running, gap, start
from gpu_sections.section import Check, Place, holds, within

STEPS, PAUSE_S = 600, 0.06  # so long that two ranks come back in time, where a process with a GPU takes 8 s to begin
WORDS = (
    "--task", PICTURES, *PLAIN, *SGD, "--precision", "fp64", "--global-batch-size", 48, "--max-update", STEPS,
)  # fmt: skip
LEAST = 1e-9  # nats, after 600 steps
RECOVERED_S = 5.0


def checks(place: Place) -> Iterator[Check]:
    """Kill a rank of the device, then one of the CPU, each once all ranks train."""
    calm = start(place, "calm", *WORDS, devices=place.devices(1))
    hurt = start(place, "hurt", *WORDS, "--pause", PAUSE_S, devices=place.devices(2, 1))
    for slot, kind in ((1, place.device), (2, "cpu")):
        hurt.await_step(hurt.now().rows[-1]["step"] + 10 if hurt.now().rows else 10)
        began_s = time.monotonic()
        hurt.kill_rank(slot)
        place.begin(f"rank {slot} on {kind} was killed and is awaited")
        await_all(hurt, slot)
        yield Check(f"rank {slot} on {kind} takes part again after", f"{time.monotonic() - began_s:.1f} s")
    (place.folder / "hurt.hurry").touch()
    run = hurt.end()
    seconds = [event["seconds"] for event in run.events("generation") if event["seconds"] is not None]
    yield within("the others stood still for", max(seconds), RECOVERED_S, unit=" s")
    stories = run.stories
    yield holds("stories", stories.count("was killed") == 2, seen=stories, expected="two that a rank was killed")
    yield within("losses against a calm run, nats", gap(calm.end(), run), LEAST)


def await_all(run: Running, slot: int) -> None:
    """Wait until all three ranks train again. Raises RunFailed where the run ends before."""
    told = 0
    while True:
        has_ended = run.process.poll() is not None
        events = run.now().events("generation")
        losses = [
            number
            for number, event in enumerate(events)
            if f"rank {slot} " in event["story"] and slot not in event["ranks"]
        ]
        if losses:
            told = losses[-1] + 1
        if told and any(slot in event["ranks"] for event in events[told:]):
            return
        if has_ended:
            raise RunFailed(f"{run.name} ended before rank {slot} came back: {run.now().last_words}")
        time.sleep(0.05)
