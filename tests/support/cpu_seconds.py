"""CPU seconds per test file and of the slowest tests: `pytest -p tests.support.cpu_seconds ...`.

The CPU time of a test is the use of pytest and all its descendants while the test runs, warm servers included. Wall
time means little on a shared machine. With HETSEQ_CPU_TABLE=FILE every test is also a line of FILE, as JSON.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MOST_ROWS = 40

_used: dict[str, float] = {}


def cpu_s() -> float:
    """CPU seconds of this process and its descendants, including children that ended and were waited for."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it has just ended
        children.setdefault(int(fields[1]), []).append(int(name))
        ticks[int(name)] = sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return sum(ticks.get(pid, 0) for pid in _family(os.getpid(), children)) / TICKS_PER_S


def _family(pid: int, children: dict[int, list[int]]) -> Iterator[int]:
    yield pid
    for child in children.get(pid, []):
        yield from _family(child, children)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before_s = cpu_s()
    result = yield
    _used[item.nodeid] = cpu_s() - before_s
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    files: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for nodeid, used_s in _used.items():
        files[nodeid.partition("::")[0]] += used_s
        tests[nodeid] += used_s
    terminalreporter.section("CPU seconds")
    terminalreporter.write_line(f"{cpu_s():9.1f} in all, {sum(files.values()):.1f} of them in tests")
    for name, used_s in [*files.most_common(MOST_ROWS), *tests.most_common(MOST_ROWS)]:
        terminalreporter.write_line(f"{used_s:9.1f} {name}")
    if place := os.environ.get("HETSEQ_CPU_TABLE"):
        lines = [json.dumps({"test": name, "cpu_s": round(used_s, 3)}) for name, used_s in _used.items()]
        Path(place).write_text("\n".join(lines) + "\n", encoding="utf-8")
