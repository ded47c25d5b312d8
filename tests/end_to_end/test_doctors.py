"""Two real doctors on loopback: their all-reduce, and what is said when the process of one of them is killed in it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.commands import HETSEQ, Command, start_command
from tests.support.places import tcp
from tests.support.trials import until

pytestmark = pytest.mark.slow

WITHIN_S = 60.0


@contextmanager
def two_doctors(folder: Path) -> Iterator[list[Command]]:
    """Both with the same line; which of them leads is not known."""
    words = [
        "doctor",
        "--join",
        tcp().url,
        "--min-nodes",
        "2",
        "--seconds",
        "0",
        "--secret-file",
        str(folder / "secret"),
    ]
    with ExitStack() as closing:
        yield [
            closing.enter_context(
                start_command([*words, "--json", f"{number}.json"], cwd=folder, program=HETSEQ, is_one_stream=True)
            )
            for number in range(2)
        ]


def ends(doctors: list[Command]) -> tuple[list[int], str]:
    """Their codes, and what the one that led said of all nodes."""
    finished = [doctor.finish(timeout_s=WITHIN_S) for doctor in doctors]
    assert not any("Traceback" in one.out for one in finished)
    (leader,) = [one.out for one in finished if "all nodes together:\n" in one.out]
    return [one.code for one in finished], leader.partition("all nodes together:\n")[2]


def test_two_doctors_add_up_one_two_and_sixty_four_mebibytes(tmp_path: Path) -> None:
    with two_doctors(tmp_path) as doctors:
        codes, said = ends(doctors)
    assert codes == [0, 0], said
    (shown,) = [content for file in tmp_path.glob("*.json") if "together" in (content := json.loads(file.read_text()))]
    assert shown["all_reduce"]["nodes"] == ["node1", "node2"]
    for one, mebibytes in zip(shown["all_reduce"]["sizes"], (1, 16, 64), strict=True):
        assert one["bytes"] == mebibytes << 20
        assert one["bus_bytes_per_s"] == pytest.approx(one["bytes"] / one["seconds"])  # 2 (n - 1) / n is 1 for two
        milliseconds = f"{1000 * one['seconds']:,.1f} ms, bus bandwidth {one['bus_bytes_per_s'] / 1e6:,.0f} MB/s"
        assert f"{mebibytes} MiB over 2 nodes (gloo): {milliseconds}" in said


def rank_of(doctor: Command) -> int | None:
    """The process of its rank, once it has a connection to the other one."""
    for file in Path(f"/proc/{doctor.pid}/task").glob("*/children"):
        children = []
        with suppress(OSError):  # a thread that has just ended
            children = [int(pid) for pid in file.read_text().split()]
        for pid in children:
            with suppress(OSError):
                is_rank = b"hetseq.commands.doctor.all_reduce_child" in Path(f"/proc/{pid}/cmdline").read_bytes()
                links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()] if is_rank else []
                if sum(link.startswith("socket:") for link in links) > 1:
                    return pid
    return None


def test_a_rank_that_is_killed_is_named_and_neither_doctor_hangs(tmp_path: Path) -> None:
    with two_doctors(tmp_path) as doctors:
        os.kill(until(lambda: rank_of(doctors[1]), "a connection of the rank", within_s=WITHIN_S), signal.SIGKILL)
        codes, said = ends(doctors)
    assert codes == [1, 1], said
    (blamed,) = [line for line in said.splitlines() if "broke off" in line]
    assert "because of" in blamed
    assert "its process was ended by SIGKILL" in blamed
