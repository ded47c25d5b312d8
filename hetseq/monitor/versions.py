"""Software and hardware versions of each rank, read in its own process, gathered, and kept with the run.

Names the facts and reads them from torch, the driver and a git checkout. It compares nothing: a run refuses unequal
versions where they matter (`cluster.membership.compatibility`), and the report shows the other differences.

The one idea: the process that computes reports its own versions. A launcher knows no torch, and another process of the
same node may have been started in another environment.
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

#: the software of a rank, in the order of display; software that a rank does not have is left out
NAMES = ("hetseq", "commit", "python", "torch", "numpy", "cuda", "rocm", "cudnn", "nccl", "driver")

_BYTES = 8192  # of one rank's facts as JSON: enough even if every character of every name is escaped
_LONGEST = 64  # characters of one version
_DRIVER = Path("/proc/driver/nvidia/version")
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


def torch_build() -> dict[str, str]:
    """The versions of torch, and of the CUDA, ROCm and NCCL it was built with; empty if it was built without."""
    return {
        "version": str(torch.__version__), "cuda": torch.version.cuda or "", "rocm": torch.version.hip or "",
        "nccl": _nccl(),
    }  # fmt: skip


def versions_of(device: torch.device) -> dict[str, str]:
    """The versions of this process, which computes on `device`, by their `NAMES`."""
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
    """The commit of a git checkout, 12 digits; "" if there is none. Uncommitted edits are not visible in it.

    Read from the files of the repository, since git may not be installed on a node: gitrepository-layout(5).
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
    """The version of the loaded NVIDIA kernel driver; "" if there is none."""
    with suppress(OSError):
        found = re.search(r"\s(\d+(?:\.\d+)+)\s", _DRIVER.read_text())
        return found.group(1) if found else ""
    return ""


def gather_versions(
    group: RowTransport, device: torch.device, slots: Sequence[int]
) -> list[dict[str, Any]]:  # fmt: skip
    """The versions of all ranks, for `events.jsonl`: one entry for ranks of a node with the same versions. Collective.

    An entry has `node`, `ranks` (their slots), `devices` (their names) and the versions.
    """
    about = {"node": socket.gethostname()[:200], "device": _name_of(device)[:100], "versions": versions_of(device)}
    text = json.dumps(about).encode().ljust(_BYTES)
    rows = group.all_gather_rows(np.frombuffer(text[:_BYTES], np.int64))
    return by_node([json.loads(row.tobytes()) for row in rows], slots)


def by_node(told: Sequence[Mapping[str, Any]], slots: Sequence[int]) -> list[dict[str, Any]]:
    """The facts of the ranks, grouped by node and versions, in the order of the ranks."""
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
    """The version of NCCL; "" if this torch was built without it."""
    if not (torch.version.cuda or torch.version.hip):
        return ""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except AttributeError:
        return ""
