"""The doctor's child process that imports torch: versions, devices, and the speed of each device.

Prints a line of JSON after each piece of work, at once, so that the parent knows in which one a driver hangs. It judges
nothing, and the parent kills it at its deadline.

The one idea: two batch sizes give the two numbers of the cost model, seconds per step and seconds per sample.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from hetseq.comm.group import has_gloo
from hetseq.commands.doctor.facts import Burn, Device
from hetseq.monitor.versions import torch_build
from hetseq.system import device_memory as memory
from hetseq.system import matmul_backend as products
from hetseq.system.gpu import is_built_for

_WIDTH = 512
_SMALL, _LARGE = 16, 256  # samples of a step
_MATRIX = {"cpu": 512, "cuda": 4096}  # rows and columns
_AT_ONCE = 5


def main(words: list[str]) -> None:
    """Report torch, its devices, and `words[0]` seconds of burn-in on each; `words[1]`: number of CPU threads."""
    seconds, threads = float(words[0]), int(words[1])
    _tell(**torch_build(), has_gloo=has_gloo())
    torch.set_num_threads(threads)
    if not torch.cuda.device_count():
        products.multiply_by_the_faster_library()  # as a worker of a run does
    devices = [gpu(index) for index in range(torch.cuda.device_count())] or [_cpu()]
    _tell(devices=[dataclasses.asdict(device) for device in devices])
    burns = []
    for device in devices:
        if seconds > 0 and device.is_built_for:
            burns.append(dataclasses.asdict(burn(torch.device(device.device), seconds)))
            _tell(burns=burns)


def _tell(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def _cpu() -> Device:
    limit = memory.limit_bytes(torch.device("cpu"))
    return Device("cpu", "CPU", limit, limit)


def gpu(index: int) -> Device:
    """A GPU as torch sees it; the first call starts its driver."""
    about = torch.cuda.get_device_properties(index)
    free, _ = torch.cuda.mem_get_info(index)
    capability = f"{about.major}.{about.minor}"
    return Device(f"cuda:{index}", about.name, about.total_memory, free, capability, is_built_for(about))


def burn(device: torch.device, seconds: float) -> Burn:
    """Burn-in: matrix products for a quarter of the time, then training steps of both sizes in turn."""
    side = _MATRIX[device.type]
    left, right = (torch.randn(side, side, device=device) for _ in range(2))
    products = _timed(lambda: left @ right, device, seconds / 4)
    network = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU()))).to(device)
    steps = {size: _step(network, torch.randn(size, _WIDTH, device=device)) for size in (_SMALL, _LARGE)}
    times: dict[int, list[float]] = {size: [] for size in steps}
    end = time.monotonic() + 0.75 * seconds
    while not times[_LARGE] or time.monotonic() < end:
        for size, step in steps.items():
            times[size] += _timed(step, device, 0.0)
    small, large = (statistics.median(times[size]) for size in (_SMALL, _LARGE))
    per_sample_s = max(large - small, large * 1e-3) / (_LARGE - _SMALL)
    third = max(1, len(times[_LARGE]) // 3)
    return Burn(
        device=str(device),
        fixed_s=max(0.0, large - _LARGE * per_sample_s),
        per_sample_s=per_sample_s,
        tflops=2 * side**3 / statistics.median(products) / 1e12,
        fade=statistics.median(times[_LARGE][:third]) / statistics.median(times[_LARGE][-third:]),
        gradient_bytes=sum(4 * parameter.numel() for parameter in network.parameters()),
    )


def _step(network: nn.Module, batch: torch.Tensor) -> Callable[[], object]:
    def step() -> None:
        network.zero_grad()
        network(batch).square().sum().backward()

    return step


def _timed(work: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Seconds of each call, repeated for about `seconds`, at least once; the first call is not counted."""
    times: list[float] = []
    work()
    end = time.monotonic() + seconds
    while not times or time.monotonic() < end:
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(_AT_ONCE):
            work()
        _synchronize(device)  # sync: the clock is read when the device is done
        times.append((time.perf_counter() - begin) / _AT_ONCE)
    return times


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(sys.argv[1:])
