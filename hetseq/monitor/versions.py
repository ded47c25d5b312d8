"""What software and hardware each rank of a run has: asked of its own process, gathered, and kept with the run.

Responsible for the names of the facts and for asking torch, the driver and a git checkout for them. Refuses to compare:
what has to be equal is the contract's (`cluster.contract`), and what merely differs is for a report to show.

The one idea: whoever computes says what it has. A launcher knows no torch, and another process of the same node may
have been started in another environment.
"""

from __future__ import annotations

import functools
import json
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hetseq
from hetseq.comm.group import RowTransport

#: what a rank tells of its software, in the order in which it is shown; what there is none of is left out
NAMES = ("hetseq", "commit", "python", "torch", "numpy", "cuda", "rocm", "cudnn", "nccl", "driver")

_BYTES = 8192  # of what one rank tells: all of it as JSON, be every character of every name escaped
_LONGEST = 64  # characters of one version
_DRIVER = Path("/proc/driver/nvidia/version")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


def torch_build() -> dict[str, str]:
    """What torch was built with, empty where it was not: its version, and those of CUDA, ROCm and NCCL."""
    return {
        "version": str(torch.__version__), "cuda": torch.version.cuda or "", "rocm": torch.version.hip or "",
        "nccl": _nccl(),
    }  # fmt: skip


def versions_of(device: torch.device) -> dict[str, str]:
    """The versions of this process, which computes on `device`, by `NAMES`."""
    build = torch_build()
    found = {
        **build,
        "torch": build["version"],
        "hetseq": hetseq.__version__,
        "commit": commit_of(Path(hetseq.__file__).resolve().parents[1]),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cudnn": str(torch.backends.cudnn.version() or "") if device.type == "cuda" else "",
        "driver": driver_version(),
    }
    return {name: found[name][:_LONGEST] for name in NAMES if found[name]}


@functools.cache
def commit_of(checkout: Path) -> str:
    """The commit that a git checkout has, 12 digits; empty where there is none. It does not tell what was edited since.

    Read from the files of git, since a node may have none installed: gitrepository-layout(5).
    """
    with suppress(OSError):
        folder = checkout / ".git"
        if folder.is_file():  # a worktree
            folder = checkout / folder.read_text().partition("gitdir:")[2].strip()
        head = (folder / "HEAD").read_text().strip()
        if head.startswith("ref: "):
            head = _commit_of_reference(folder, head.removeprefix("ref: "))
        return head[:12] if _COMMIT.fullmatch(head) else ""
    return ""


def _commit_of_reference(folder: Path, name: str) -> str:
    common = folder
    with suppress(OSError):
        common = folder / (folder / "commondir").read_text().strip()
    with suppress(OSError):
        return (common / name).read_text().strip()
    lines = (common / "packed-refs").read_text().splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), "")


def driver_version() -> str:
    """Of the NVIDIA driver that this kernel has loaded; empty if there is none."""
    with suppress(OSError):
        found = re.search(r"\s(\d+(?:\.\d+)+)\s", _DRIVER.read_text())
        return found.group(1) if found else ""
    return ""


def gather_versions(
    group: RowTransport, device: torch.device, slots: Sequence[int]
) -> list[dict[str, Any]]:  # fmt: skip
    """What all ranks have, for `events.jsonl`: one entry for those that have the same on one node. Collective.

    An entry has `node`, `ranks` (their slots), `devices` (what each is called) and the versions.
    """
    about = {"node": socket.gethostname()[:200], "device": _name_of(device)[:100], "versions": versions_of(device)}
    text = json.dumps(about).encode().ljust(_BYTES)
    rows = group.all_gather_rows(np.frombuffer(text[:_BYTES], np.int64))
    return by_node([json.loads(row.tobytes()) for row in rows], slots)


def by_node(told: Sequence[Mapping[str, Any]], slots: Sequence[int]) -> list[dict[str, Any]]:
    """What each rank told, put together by node and versions, in the order of the ranks."""
    found: dict[str, dict[str, Any]] = {}
    for about, slot in zip(told, slots, strict=True):
        key = json.dumps([about["node"], about["versions"]])
        entry = found.setdefault(key, {"node": about["node"], "ranks": [], "devices": [], **about["versions"]})
        entry["ranks"].append(slot)
        entry["devices"].append(about["device"])
    return list(found.values())


def _name_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else _cpu_name()


@functools.cache
def _cpu_name() -> str:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, "CPU")
    return "CPU"


def _nccl() -> str:
    """Its version; empty where this torch was built without it."""
    if not (torch.version.cuda or torch.version.hip):
        return ""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except AttributeError:
        return ""
