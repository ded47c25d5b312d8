"""A run moves from device to CPU and back through checkpoints, and resumes from memory after a kill of its launcher."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_sections.runs import PICTURES, PLAIN, SGD, gap, start, told, train
from gpu_sections.section import Check, Place, within

SAVING = tuple(word for word in PLAIN if word != "--no-save")
SLOWLY = ("--lr", "0.05", "--momentum", "0.9")  # the later of two values of an option counts
WORDS = ("--task", PICTURES, *SAVING, *SGD, *SLOWLY, "--precision", "fp64", "--global-batch-size", 96)
KEEPING = (*WORDS, "--memory-interval-updates", 1, "--persistent-time-interval", 0, "--max-update", 60)


def checks(place: Place) -> Iterator[Check]:
    """20 steps on the device, 20 on two ranks of the CPU, 20 on the device; then a kill and the same command again."""
    whole = start(place, "whole", *WORDS, "--max-update", 60, devices=place.devices(1))
    for steps, devices in ((20, place.devices(1)), (40, "cpu,cpu"), (60, place.devices(1))):
        moved = train(place, "moved", *WORDS, "--max-update", steps, devices=devices)
    calm = whole.end()
    yield within("three starts against one, nats", gap(calm, moved), 1e-10)
    hurt = start(place, "hurt", *KEEPING, "--pause", 0.05, devices=place.devices(2))
    hurt.await_step(20)
    hurt.kill()
    back = train(place, "hurt", *KEEPING, devices=place.devices(2))
    yield told("resumed from memory", back.output, "the memory of this run's nodes")
    yield within("a killed run against a calm one, nats", gap(calm, back), 1e-10)
