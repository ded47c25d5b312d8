"""Memory of the host: of the machine, and within the control groups of this process. Standard library only.

A queue or a container gives a process less than the machine has. The limit may be in its own control group or in one
above it, and the tightest one counts; versions 1 and 2 name the files differently. Missing figures are not an error: a
file that does not exist limits nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


def machine_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def limit_bytes() -> int:
    """Memory of the machine, or of the tightest control group."""
    limit, _ = group_memory()
    return machine_bytes() if limit is None else min(machine_bytes(), limit)


@dataclass(frozen=True)
class Available:
    """Memory that programs could still get, in bytes; 0 if unknown."""

    of_machine: int  # all programs together
    #: by control group of this process, all in it together, the least first; groups have numbers that no other one on
    #: this machine has
    by_group: dict[int, int]

    @property
    def here(self) -> int:
        """What programs in the control group of this process could get."""
        return min([self.of_machine, *self.by_group.values()])


def available() -> Available:
    """Memory that this process could still get, and with whom it shares that."""
    try:
        lines = (_PROC / "meminfo").read_text().splitlines()
        of_machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return Available(0, {})
    left = sorted((max(0, one.limit - one.used), one.number) for one in _limits())
    return Available(of_machine, {number: bytes_ for bytes_, number in left if bytes_ < of_machine})


def available_bytes() -> int:
    """Memory that programs in this control group could still get; 0 if unknown."""
    return available().here


def group_memory() -> tuple[int | None, int]:
    """Limit and use of the tightest control group, in bytes; None: no limit."""
    return min(((one.limit, one.used) for one in _limits()), default=(None, 0))


def group_files(controller: str, name: str, old_name: str) -> list[Path]:
    """The files of a limit in this process's control group and those above it, as versions 2 and 1 name them."""
    found = []
    with suppress(OSError, ValueError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root, file = (_GROUPS / controller, old_name) if controllers else (_GROUPS, name)
            inner = root / path.lstrip("/")
            found += [folder / file for folder in (inner, *inner.parents) if folder.is_relative_to(root)]
    return found


@dataclass(frozen=True)
class _Limit:
    """Of a control group, in bytes."""

    limit: int
    used: int
    number: int  # no other one of this machine has it, under whatever path


def _limits() -> Iterator[_Limit]:
    """Each control group that has a limit, the innermost first."""
    for file in group_files("memory", "memory.max", "memory.limit_in_bytes"):
        in_use = "memory.current" if file.name == "memory.max" else "memory.usage_in_bytes"
        with suppress(OSError, ValueError):  # absent, or "max"
            used = int(file.with_name(in_use).read_text())
            unclaimed = max(0, used - _reclaimable(file.with_name("memory.stat")))
            yield _Limit(int(file.read_text()), unclaimed, file.parent.stat().st_ino)


def _reclaimable(path: Path) -> int:
    """File pages that the kernel reclaims before memory runs out; they count as used (cgroup-v2, memory.stat)."""
    with suppress(OSError, ValueError):
        words = dict(line.split() for line in path.read_text().splitlines())
        return int(words.get("total_inactive_file", words.get("inactive_file", 0)))
    return 0
