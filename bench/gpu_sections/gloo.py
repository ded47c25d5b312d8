"""All-reduces of gloo on tensors of this device, as HetSeq calls them, and the effect of a killed peer.

Three processes over the loopback, the last of them on the CPU. They use torch's process group itself. This section
checks torch; `worlds` checks HetSeq.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_sections.section import Check, Place, holds, within

WORLD = 3
DEADLINE = timedelta(seconds=20)
NOTICED_S, NOTICED_ON_GPU_S = 1.0, 3.0


def checks(place: Place) -> Iterator[Check]:
    """Sums behind busy kernels with ranks that are late by turns; then a kill in the middle of a sum."""
    mib, rounds = ((1, 4, 16, 64), 12) if place.is_gpu else ((1, 4), 20)
    devices = [place.device, place.device, "cpu"]
    place.begin(f"sums on {', '.join(devices)}")
    began_s = time.perf_counter()
    found = in_processes(sums, devices, place.folder / "sums", mib, rounds)
    seconds = time.perf_counter() - began_s
    count = len(mib) * rounds
    wrong = sum(one["wrong"] for one in found)
    yield holds("sums", wrong == 0, seen=f"{WORLD * count - wrong} of {WORLD * count} right", expected="all right")
    digests = {one["digest"] for one in found}
    yield holds("bits", len(digests) == 1, seen=f"{len(digests)} versions on {WORLD} ranks", expected="1 version")
    yield Check("time of these sums", f"{seconds:.1f} s with the start of the processes")
    place.begin("a peer is killed in a sum")
    found = in_processes(loses_a_peer, devices, place.folder / "kill")
    told = [one for one in found if one]
    noticed = max((one["seconds"] for one in told), default=float("nan"))
    yield within("a killed peer is noticed after", noticed, NOTICED_ON_GPU_S if place.is_gpu else NOTICED_S, unit=" s")
    usable = sum(one["usable"] for one in told)
    yield holds("device of survivors", usable == WORLD - 1, seen=f"{usable} of {WORLD - 1} compute on",
                expected="all compute on")  # fmt: skip


def in_processes(work: Any, devices: list[str], path: Path, *arguments: Any) -> list[dict[str, Any]]:
    """What `work(rank, device, group, path, *arguments)` gives in a process for each device; {} where it was killed."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in devices]
    processes = [
        context.Process(target=_rank, args=(work, rank, device, len(devices), path, pipes[rank][1], arguments))
        for rank, device in enumerate(devices)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    found = []
    for receiver, _ in pipes:
        try:
            found.append(receiver.recv())
        except EOFError:
            found.append({})
    for process in processes:
        process.join()
    raised = [one["raised"] for one in found if "raised" in one]
    if raised:
        raise RuntimeError(raised[0])
    return found


def _rank(
    work: Any, rank: int, device: str, world: int, path: Path, sender: Connection, arguments: tuple[Any, ...]
) -> None:
    try:
        if device != "cpu":
            torch.cuda.set_device(device)
        torch.set_num_threads(1)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = DEADLINE
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        group = gloo(dist.FileStore(str(path), world), rank, world, options)
        sender.send(work(rank, torch.device(device), group, path, *arguments))
    except Exception as error:
        sender.send({"raised": f"rank {rank} on {device}: {type(error).__name__}: {error}"})


def sums(
    rank: int, device: torch.device, group: Any, path: Path, sizes: tuple[int, ...], rounds: int
) -> dict[str, Any]:
    """Sums whose terms are made, and looked at, by kernels that wait behind others."""
    wrong, digest = 0, 0
    busy = torch.randn(1024, 1024, device=device)
    for number in range(rounds):
        for mib in sizes:
            elements = mib * 2**18
            if number % WORLD == rank:
                time.sleep(0.002)
            for _ in range(8 if device.type == "cuda" else 0):
                busy = (busy @ busy).clamp_(-1, 1)
            term = torch.arange(elements, dtype=torch.float32, device=device).remainder_(1009).mul_(rank + 1 + number)
            third = term / 3  # whose sum is rounded
            for tensor in (term, third):
                group.allreduce([tensor]).wait(DEADLINE)
            factor = sum(other + 1 + number for other in range(WORLD))
            right = torch.arange(elements, dtype=torch.float32, device=device).remainder_(1009).mul_(factor)
            wrong += int(not torch.equal(term, right))
            digest = (31 * digest + int(third.view(torch.int32).long().sum())) % 2**61
    return {"wrong": wrong, "digest": digest}


def loses_a_peer(rank: int, device: torch.device, group: Any, path: Path) -> dict[str, Any]:
    """Kill the last rank in the middle of a sum; seconds until the others notice, and whether they can continue."""
    tensor = torch.ones(32 * 2**20, device=device)  # 128 MiB
    group.allreduce([torch.ones(1, device=device)]).wait(DEADLINE)
    killed = path.with_suffix(".killed")
    work = group.allreduce([tensor])
    if rank == WORLD - 1:
        time.sleep(0.01)
        killed.with_suffix(".new").write_text(repr(time.monotonic()))  # the same clock in all processes of a machine
        killed.with_suffix(".new").rename(killed)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        work.wait(DEADLINE)
    except RuntimeError:
        pass
    else:  # the sum was over before the kill: the next one is not
        try:
            group.allreduce([tensor]).wait(DEADLINE)
        except RuntimeError:
            pass
    seconds = time.monotonic() - float(killed.read_text())
    usable = torch.full((1000,), 2.0, device=device).sum().item() == 2000
    return {"seconds": seconds, "usable": usable}
