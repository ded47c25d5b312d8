"""What other programs do on the cores of this job: two readings of /proc, and their difference.

It judges nothing. The one idea: only cores that this process may use are counted, and time is counted in the kernel's
own ticks, so a job with a few cores of a large machine does not see its neighbours, and no clock is needed.
"""

from __future__ import annotations

import os
import pwd
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetseq.commands.doctor.facts import Contention

WATCH_S = 0.5
_PROC = Path("/proc")
_LEAST, _MOST = 0.1, 3  # cores of a program that is named; number of them
_IDLE, _WAITING_FOR_DISK, _GUESTS = 3, 4, 8  # columns of /proc/stat; time of guests is part of user time


@dataclass(frozen=True)
class Reading:
    """Ticks since the start of each core (busy, all) and of each program; microseconds with one waiting for a core."""

    cores: dict[int, tuple[int, int]]
    programs: dict[int, tuple[str, int, int]]  # pid -> name, core it was last on, ticks
    waiting_us: int | None


def watch(pause: Callable[[float], None] = time.sleep) -> Contention | None:
    """The use of this job's cores by others during half a second; None if the kernel does not tell."""
    before = read()
    pause(WATCH_S)
    return between(before, read(), os.sched_getaffinity(0))


def read(proc: Path = _PROC) -> Reading:
    """The counters as they are now."""
    pressure = re.search(r"^some .*total=(\d+)", _text(proc / "pressure" / "cpu"), re.M)
    return Reading(
        dict(_cores(_text(proc / "stat"))),
        {int(path.name): found for path in proc.glob("[0-9]*") if (found := _program(path)) is not None},
        int(pressure[1]) if pressure else None,
    )


def between(before: Reading, after: Reading, mine: Collection[int]) -> Contention | None:
    """What was done on the cores `mine` between two readings; None if no time has passed by the kernel's counters."""
    spans = {
        core: (after.cores[core][0] - busy, after.cores[core][1] - total)
        for core, (busy, total) in before.cores.items()
        if core in mine and core in after.cores
    }
    ticks = max((total for _, total in spans.values()), default=0)
    if ticks <= 0:
        return None
    used = {
        pid: (after.programs[pid][2] - spent) / ticks
        for pid, (_, _, spent) in before.programs.items()
        if pid in after.programs and after.programs[pid][1] in mine
    }
    busiest = sorted((pid for pid in used if used[pid] >= _LEAST), key=lambda pid: -used[pid])[:_MOST]
    waiting = None
    if before.waiting_us is not None and after.waiting_us is not None:
        waiting = min(1.0, (after.waiting_us - before.waiting_us) / (1e6 * ticks / os.sysconf("SC_CLK_TCK")))
    return Contention(
        cores=sum(busy / total for busy, total in spans.values() if total > 0),
        waiting=waiting,
        programs=tuple(f"{after.programs[pid][0]} ({used[pid]:.1f} cores, pid {pid}{_owner(pid)})" for pid in busiest),
    )


def _cores(text: str) -> Iterator[tuple[int, tuple[int, int]]]:
    for number, line in re.findall(r"^cpu(\d+) (.*)$", text, re.M):
        ticks = [int(word) for word in line.split()][:_GUESTS]
        yield int(number), (sum(ticks) - ticks[_IDLE] - ticks[_WAITING_FOR_DISK], sum(ticks))


def _program(folder: Path) -> tuple[str, int, int] | None:
    """Name, core and ticks of a process by proc(5); None if it has ended, or is of another kind."""
    found = re.fullmatch(r"\d+ \((.*)\) (.*)", _text(folder / "stat").strip(), re.S)
    words = found[2].split() if found else []
    return (found[1], int(words[36]), int(words[11]) + int(words[12])) if found and len(words) > 36 else None


def _owner(pid: int) -> str:
    with suppress(OSError, KeyError):
        return f", {pwd.getpwuid((_PROC / str(pid)).stat().st_uid).pw_name}"
    return ""


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
