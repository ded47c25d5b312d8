"""Resident memory of a tree of processes, as Linux counts it.

The one idea: a page that several processes share counts once, divided among them (PSS), so the sum over a tree of
processes is its whole use, shared memory included.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_KB = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # the name in brackets may hold anything, the parent is the second field behind it
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def pss_bytes(pid: int) -> int:
    """What a process and its descendants take; one that ends meanwhile counts as nothing."""
    return sum(_field(process, "smaps_rollup", "Pss") for process in tree(pid))


def growth_bytes(action: Callable[[], object]) -> int:
    """By how much this process and its descendants grew at most during `action`, each counted for itself."""
    processes = tree(os.getpid())
    for process in processes:
        Path(f"/proc/{process}/clear_refs").write_text("5")  # the high-water mark begins anew
    before = {process: _field(process, "status", "VmRSS") for process in processes}
    action()
    return sum(max(0, _field(process, "status", "VmHWM") - before[process]) for process in processes)


def _field(process: int, file: str, name: str) -> int:
    with suppress(OSError):
        fields = dict(_KB.findall(Path(f"/proc/{process}/{file}").read_text()))
        return 1024 * int(fields.get(name, 0))
    return 0
