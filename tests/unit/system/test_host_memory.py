"""Memory of the host and of control groups, read from a made-up /proc and /sys/fs/cgroup."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetseq.system import host_memory

MIB = 1 << 20
MEMINFO = f"MemTotal: {100 * 1024} kB\nMemFree: 1 kB\nMemAvailable: {50 * 1024} kB\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 50 MiB available, and no control group; its root."""
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path / "cgroup")
    written(tmp_path / "proc" / "meminfo", MEMINFO)
    written(tmp_path / "proc" / "self" / "cgroup", "0::/job/step\n")
    return tmp_path


def written(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content}")


def limit(folder: Path, limit_bytes: object, used_bytes: int, *, inactive: int | None = None) -> None:
    """What the kernel writes for a control group of version 2."""
    written(folder / "memory.max", f"{limit_bytes}\n")
    written(folder / "memory.current", f"{used_bytes}\n")
    if inactive is not None:
        written(folder / "memory.stat", f"anon 17\ninactive_file {inactive}\n")


def test_without_a_limit_it_is_what_the_machine_has_available(machine: Path) -> None:
    assert (host_memory.available_bytes(), host_memory.group_memory()) == (50 * MIB, (None, 0))
    limit(machine / "cgroup" / "job" / "step", "max", 3 * MIB)
    assert host_memory.available_bytes() == 50 * MIB
    assert host_memory.limit_bytes() == host_memory.machine_bytes()


def test_the_tightest_group_on_the_way_up_counts(machine: Path) -> None:
    limit(machine / "cgroup" / "job" / "step", 40 * MIB, 1 * MIB)
    limit(machine / "cgroup" / "job", 20 * MIB, 12 * MIB)
    limit(machine / "cgroup", 1 << 50, 0)
    assert host_memory.group_memory() == (20 * MIB, 12 * MIB)
    assert host_memory.available_bytes() == 8 * MIB
    assert host_memory.limit_bytes() == 20 * MIB


def test_groups_that_leave_less_than_the_machine_have_numbers_the_tightest_first(machine: Path) -> None:
    job, step = machine / "cgroup" / "job", machine / "cgroup" / "job" / "step"
    limit(step, 40 * MIB, 1 * MIB)
    limit(job, 60 * MIB, 12 * MIB)
    numbers = job.stat().st_ino, step.stat().st_ino
    assert host_memory.available() == host_memory.Available(50 * MIB, dict(zip(numbers, (48 * MIB, 39 * MIB))))
    limit(job, 60 * MIB, 30 * MIB)
    assert [*host_memory.available().by_group.items()] == [(numbers[0], 30 * MIB), (numbers[1], 39 * MIB)]
    limit(job, 90 * MIB, 30 * MIB)
    limit(step, "max", 1 * MIB)
    assert host_memory.available() == host_memory.Available(50 * MIB, {})


def test_file_pages_that_the_kernel_would_give_up_are_not_in_use(machine: Path) -> None:
    limit(machine / "cgroup" / "job" / "step", 20 * MIB, 18 * MIB, inactive=10 * MIB)
    assert host_memory.available_bytes() == 12 * MIB


def test_groups_of_version_1_have_other_names(machine: Path) -> None:
    written(machine / "proc" / "self" / "cgroup", "5:cpu,cpuacct:/a\n4:memory:/job\n")
    written(machine / "cgroup" / "memory" / "job" / "memory.limit_in_bytes", 30 * MIB)
    written(machine / "cgroup" / "memory" / "job" / "memory.usage_in_bytes", 10 * MIB)
    written(machine / "cgroup" / "memory" / "job" / "memory.stat", f"total_inactive_file {MIB}\n")
    assert host_memory.available_bytes() == 21 * MIB


@pytest.mark.parametrize("meminfo", [None, "", "MemAvailable: many kB\n"])
def test_where_nothing_says_how_much_it_is_nothing(machine: Path, meminfo: str | None) -> None:
    (machine / "proc" / "meminfo").unlink()
    if meminfo is not None:
        written(machine / "proc" / "meminfo", meminfo)
    assert host_memory.available_bytes() == 0


def test_a_group_that_uses_more_than_its_limit_has_nothing_left(machine: Path) -> None:
    limit(machine / "cgroup", 5 * MIB, 6 * MIB)
    assert host_memory.available_bytes() == 0
