"""A device fails under one rank: the run resumes without it, takes in another process in its place, and ends well."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from gpu_sections.runs import PICTURES, PLAIN, SGD, gap, start, told
from gpu_sections.section import Check, Place, equal, within

WORDS = ("--task", PICTURES, *PLAIN, *SGD, "--precision", "fp64", "--global-batch-size", 96, "--max-update", 400)


def checks(place: Place) -> Iterator[Check]:
    """A write to address 16 on a GPU; on a CPU the error that torch would raise for it."""
    calm = start(place, "calm", *WORDS, devices=place.devices(1))
    # loader processes, because their page-locked batches wait in memory when the device fails
    faulty = ("--fault", "lose-device", "--fault-at", 10, "--pause", 0.06, "--num-workers", 1)
    running = start(place, "hurt", *WORDS, *faulty, devices=place.devices(2))
    running.await_return(2)
    running.hurry()
    hurt = running.end()
    took_part = hurt.rows[-1]["world_size"]
    yield equal("ranks at the end", took_part, 2)
    yield told("the run says so", hurt.stories, "its device failed")
    yield within("losses against a calm run, nats", gap(calm.end(), hurt), 1e-9)
    if place.is_gpu:
        script = f"import torch; print(int(torch.ones(1000, device={place.device!r}).sum()))"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        yield equal("the GPU computes for other processes", done.stdout.strip(), "1000")
