"""Facts about the card, driver, torch, libraries and machine; and a test that HetSeq can be imported."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator

import torch

from gpu_sections.section import CORE, Check, Place, holds

OTHERS = ("h5py", "pytest", "transformers", "triton")


def checks(place: Place) -> Iterator[Check]:
    """All facts, of which a few must be so."""
    yield from software()
    if place.is_gpu:
        yield from card(torch.device(place.device))
    yield from machine(place)
    missing = [name for name in CORE if importlib.util.find_spec(name) is None]
    yield holds("packages", not missing, seen=f"without {', '.join(missing)}" if missing else "all there",
                expected=", ".join(CORE))  # fmt: skip
    absent = [name for name in OTHERS if importlib.util.find_spec(name) is None]
    yield Check("packages of single sections", f"without {', '.join(absent)}" if absent else "all there")
    import hetseq

    failed = []
    for name in hetseq.__all__:
        try:
            getattr(hetseq, name)
        except Exception as error:
            failed.append(f"{name} ({type(error).__name__}: {error})")
    yield holds("names of hetseq", not failed, seen="; ".join(failed) or f"{len(hetseq.__all__)} imported",
                expected="all can be imported")  # fmt: skip


def software() -> Iterator[Check]:
    """Versions."""
    yield Check("torch", f"{torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    yield holds("version of torch", version >= (2, 10), seen=torch.__version__, expected="2.10 or newer")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none"
    yield Check("NCCL", nccl)


def card(device: torch.device) -> Iterator[Check]:
    """The GPU, and whether this torch has kernels for it."""
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    yield Check(
        "card", f"{properties.name}, capability {properties.major}.{properties.minor},"
        f" {total / 2**30:.1f} GiB, of which {free / 2**30:.1f} are free"
    )  # fmt: skip
    for line in asked("nvidia-smi", "--query-gpu=name,driver_version,persistence_mode", "--format=csv,noheader"):
        yield Check("nvidia-smi", line)
    value = torch.arange(1000, device=device).sum().item()
    yield holds("a kernel runs", value == 499500, seen=str(value), expected="499500")
    yield Check("kernels of this torch", " ".join(torch.cuda.get_arch_list()))


def machine(place: Place) -> Iterator[Check]:
    """Cores, memory, limits."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    yield Check("machine", f"{cores} cores, {memory:.0f} GiB")
    shared = shutil.disk_usage("/dev/shm")
    yield Check("/dev/shm", f"{shared.free / 2**30:.1f} of {shared.total / 2**30:.1f} GiB free")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Check("memory that may be locked", "unlimited" if locked == resource.RLIM_INFINITY else f"{locked >> 10} KiB")
    yield Check("folder of the check", f"{shutil.disk_usage(place.folder).free / 2**30:.1f} GiB free")


def is_large_card(place: Place) -> bool:
    """Whether the GPU has at least 40 GiB, so that the larger sizes of `speed` and `overhead` fit."""
    return torch.cuda.get_device_properties(torch.device(place.device)).total_memory >= 40 * 2**30


def asked(*command: str) -> list[str]:
    """The lines that a command prints; one that says why it printed none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"{command[0]}: {error}"]
    return done.stdout.splitlines()
