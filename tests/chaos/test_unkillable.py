"""Processes that even SIGKILL does not end, because they wait in the kernel for a mount that never answers (FT-22).

A task of the test opens a file of such a mount (`tests/support/cached_mount.py`), once in a run, so that one rank hangs
there in the middle of a step. The others fence it and continue without waiting for its process, which stays until the
mount is released.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetseq.checkpoint.leftover_memory import await_writers
from hetseq.run_directory import RunDirectory
from tests.chaos.ground import take_shared_files
from tests.chaos.runs import Outcome, _events, _rows, _tensors, verdict, words
from tests.support.cached_mount import CachedMount, cached_mount
from tests.support.commands import TRAIN
from tests.support.nodes import Node, Nodes, Stock, living_under
from tests.support.trials import until

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.timeout(180)]

STEPS = 120
TASK = """
import os
from hetseq.checkpoint import writer_client as writer_process
from tests.chaos.ledger_task import Ledger, numbers

writer_process._SILENCE_S, writer_process._LOOK_S = 3.0, 0.5  # a quarter of an hour is too long for a test
WHERE = float(numbers()[100])


class Hung(Ledger):
    def loss(self, model, sample):
        if WHERE in sample["number"].tolist():
            try:
                os.close(os.open({marker!r}, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass  # another rank hangs
            else:
                open({file!r}).close()
        return super().loss(model, sample)
"""


@pytest.fixture(scope="module")
def calm(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run of one process, undisturbed."""
    nodes = Nodes(stock, tmp_path_factory.mktemp("calm"))
    try:
        calm = outcome(nodes, nodes.start(*words(nodes.folder / "run", ranks=1, steps=STEPS), cold=True))
    finally:
        nodes.close()
    assert calm.code == 0, calm.said
    return calm


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folders of a test's mount, task and runs; frees the memory of its runs."""
    for name in ("backing", "mount"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "backing" / "never").touch()
    yield tmp_path
    for config in tmp_path.rglob("config.yaml"):
        directory = RunDirectory(config.parent)
        assert await_writers(directory.run_id, patience_s=10.0) == []
        take_shared_files(directory)


@pytest.fixture
def mount(request: pytest.FixtureRequest, folder: Path) -> Iterator[CachedMount]:
    """A mount on which one file never answers, or what the test asks for."""
    pattern = getattr(request, "param", "never")
    with cached_mount(folder / "backing", folder / "mount", cache_s=0.0, unanswered=pattern) as mount:
        yield mount


@pytest.fixture
def nodes(stock: Stock, folder: Path, mount: CachedMount) -> Iterator[Nodes]:
    nodes = Nodes(stock, folder)
    yield nodes
    mount.let_go()  # first, so that nothing hangs that is to be ended
    nodes.close()


def start(
    nodes: Nodes, mount: CachedMount, *more: object, steps: int = STEPS, hangs: bool = True, run: Path | None = None
) -> Node:
    """Three ranks in one launcher, of which one will hang; cold, so that the interpreter ends too."""
    task, marker = nodes.folder / "hung.py", nodes.folder / "has-hung"
    task.write_text(TASK.format(marker=str(marker), file=str(mount.point / "never")))
    if not hangs:
        marker.touch()
    options = words(run or nodes.folder / "run", ranks=3, steps=steps, task=f"{task}:Hung", step_deadline=2)
    return nodes.start(*options, *more, cold=True, program=(*mount.enter, *TRAIN))


def state_of(pid: int) -> str:
    """The letter of the kernel for a process; nothing if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def held_in(said: str) -> tuple[int, int]:
    """Rank and process of the one that is said to be held; AssertionError unless it is said once."""
    found = re.findall(r"rank (\d) \(pid (\d+)\) was killed but has not ended within 10 s: the kernel holds it", said)
    assert len(found) == 1, said
    return int(found[0][0]), int(found[0][1])


def check_held(pid: int, mount: CachedMount) -> None:
    """That process, killed long ago, is still there, and ends when the mount is released."""
    assert state_of(pid) == "D"
    mount.let_go()
    until(lambda: state_of(pid) in ("", "Z", "X"), "the end of the one that hung", within_s=10)


def outcome(nodes: Nodes, node: Node, run: Path | None = None) -> Outcome:
    (ended,), run = nodes.finish(node, timeout_s=90), run or nodes.folder / "run"
    return Outcome(ended.code, nodes.story(), _rows(run), _events(run), _tensors(run), ended.seconds)


@pytest.mark.fault("FT-22")
def test_a_rank_that_cannot_be_killed_is_left_behind_and_the_run_ends_without_it(
    nodes: Nodes, mount: CachedMount, calm: Outcome
) -> None:
    before = living_under(os.getpid())
    found = outcome(nodes, start(nodes, mount, "--max-restarts", 0))
    rank, pid = held_in(found.said)
    assert verdict(found, calm) == ""
    assert f"rank {rank} on" in found.said
    assert "fell silent, last seen on cpu in step" in found.said
    assert "waits in the kernel for a disk or a network mount (state D); what its threads do: " in found.said
    left = living_under(os.getpid()) - before - {pid}
    assert {"hetseq.checkpoint.writer" in Path(f"/proc/{each}/cmdline").read_text() for each in left} <= {True}
    check_held(pid, mount)


@pytest.mark.long
@pytest.mark.fault("FT-22")
def test_another_process_takes_the_place_of_one_that_cannot_be_killed(
    nodes: Nodes, mount: CachedMount, calm: Outcome
) -> None:
    node = start(nodes, mount, steps=1_000_000)
    nodes.wait_until_said(node, "is back: 3 ranks continue", within_s=60)
    node.signal(signal.SIGTERM)
    found = outcome(nodes, node)
    _, pid = held_in(found.said)
    assert found.code == 75, found.said
    assert [row["step"] for row in found.rows] == list(range(1, len(found.rows) + 1))
    assert [row["loss"] for row in found.rows[:STEPS]] == pytest.approx([row["loss"] for row in calm.rows], rel=1e-11)
    check_held(pid, mount)


@pytest.mark.long
@pytest.mark.fault("FT-22")
def test_a_launcher_is_stopped_while_one_of_its_ranks_cannot_be_killed(nodes: Nodes, mount: CachedMount) -> None:
    node = start(nodes, mount, steps=1_000_000)
    nodes.wait_until_said(node, "fell silent", within_s=60)
    node.signal(signal.SIGTERM)
    (ended,) = nodes.finish(node, timeout_s=60)
    _, pid = held_in(ended.err)
    assert ended.code == 75, nodes.story()
    check_held(pid, mount)


def test_the_same_run_on_a_mount_that_answers_has_nobody_to_leave_behind(
    nodes: Nodes, mount: CachedMount, calm: Outcome
) -> None:
    """The twin."""
    found = outcome(nodes, start(nodes, mount, hangs=False))
    assert verdict(found, calm) == ""
    assert "fell silent" not in found.said
    with pytest.raises(AssertionError):
        held_in(found.said)


def part_of(step: int) -> str:
    """The pattern of the parts of one checkpoint."""
    return f"run/checkpoints/step-{step:09}.*/part-*"


@pytest.mark.long
@pytest.mark.parametrize("mount", [part_of(44)], indirect=True)
def test_writers_that_hang_in_the_middle_of_a_run_cost_saves_and_nothing_else(
    nodes: Nodes, mount: CachedMount, calm: Outcome
) -> None:
    before = living_under(os.getpid())
    node = start(nodes, mount, hangs=False, run=mount.point / "run")
    found = outcome(nodes, node, nodes.folder / "backing" / "run")
    assert verdict(found, calm) == ""
    assert "checkpoint of step 44 failed, the older ones stay: rank" in found.said
    assert "does --save-dir respond?" in found.said
    check_writers(living_under(os.getpid()) - before, mount)


@pytest.mark.long
@pytest.mark.parametrize("mount", [part_of(STEPS)], indirect=True)
def test_writers_that_hang_at_the_end_of_a_run_do_not_hold_it(nodes: Nodes, mount: CachedMount) -> None:
    before = living_under(os.getpid())
    (ended,) = nodes.finish(start(nodes, mount, hangs=False, run=mount.point / "run"), timeout_s=90)
    assert ended.code == 1, nodes.story()
    assert "the final save failed: rank" in ended.message
    assert "does --save-dir respond?; the newest checkpoint is of step 110" in ended.message
    check_writers(living_under(os.getpid()) - before, mount)


def check_writers(left: frozenset[int], mount: CachedMount) -> None:
    """These hang in the kernel, all or the first of them, and end when the mount is released."""
    assert "D" in map(state_of, left)
    mount.let_go()
    until(lambda: all(state_of(pid) in ("", "Z", "X") for pid in left), "the end of the writers", within_s=10)
