"""Two hosts that train together, and a network between them that silently drops everything for a while.

Only one side may continue. Each host keeps a run directory that the other one cannot see, so the rows of both show
which ranks have committed each step, and in which generation: a step that two sides have made has two such marks.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hetseq.errors import EXIT_DONE, EXIT_STOPPED
from tests.chaos.paced_task import PACE, Paced
from tests.chaos.runs import Outcome, _events, _rows, _tensors, verdict, words
from tests.support.hosts import Host, two_hosts
from tests.support.nightly import nightly
from tests.support.nodes import Node, Nodes, Process, Stock
from tests.support.places import free_port

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.timeout(300)]

STEPS = 240
DEADLINE_S = 3
QUICK_S, SLOW_S = 0.0, 0.3
TASK = f"{Path(__file__).with_name('paced_task.py')}:{Paced.__name__}"
Marks = dict[int, set[tuple[int, tuple[int, ...]]]]


@dataclass
class Lab:
    """The two hosts, a warm process in each, and the folder that each has to itself."""

    hosts: tuple[Host, Host]
    processes: tuple[Process, Process]
    folder: Path

    @property
    def run(self) -> Path:
        """The run directory of either host, which the other one does not see."""
        return self.folder / "local" / "run"

    def pace(self, seconds: float) -> None:
        """From now on a forward takes so much longer."""
        new = self.folder / "pace.new"
        new.write_text(str(seconds))
        new.rename(self.folder / "pace")

    def start(self, nodes: Nodes, at: int, place: str, **options: Any) -> Node:
        """The rank of a host."""
        options = {"step_deadline": DEADLINE_S, **options}
        flags = words(
            self.run, ranks=2, steps=STEPS, task=TASK, distributed_init_method=place, join_timeout=60, **options
        )
        flags = [*flags, "--distributed-rank", str(at), "--ranks", "1"]
        return nodes.start(*flags, process=self.processes[at])

    def rows(self, at: int) -> list[dict[str, Any]]:
        """All rows that were ever written there, of a step perhaps several."""
        text = self.hosts[at].run("sh", "-c", f"cat {self.run}/metrics.jsonl 2>&- || true")
        rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [row for row in rows if "loss" in row]

    def newest(self, at: int) -> int:
        """The newest step that has a row there."""
        return max((row["step"] for row in self.rows(at)), default=0)

    def connections(self, at: int) -> list[str]:
        """Established TCP connections of that host, as the kernel writes them, but not those within it."""
        lines = self.hosts[at].run("cat", "/proc/net/tcp").splitlines()[1:]
        return [line for line in lines if line.split()[3] == "01" and not line.split()[2].startswith("0100007F")]

    def repeated(self, at: int) -> int:
        """How often the kernel has sent the same again at most, on one of these; it waits twice as long each time."""
        return max((int(line.split()[6], 16) for line in self.connections(at)), default=0)

    def outcome(self, at: int, code: int, said: str, folder: Path) -> Outcome:
        """What a run has left on one host."""
        copy = folder / f"copy-{at}"
        shutil.rmtree(copy, ignore_errors=True)
        self.hosts[at].run("cp", "-r", str(self.run), str(copy))
        return Outcome(code, said, _rows(copy), _events(copy), _tensors(copy), 0.0)


@pytest.fixture(scope="module")
def wired(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    with two_hosts(folder) as hosts:
        processes: list[Process] = []
        try:
            for host in hosts:
                environment = {"GLOO_SOCKET_IFNAME": None, PACE: str(folder / "pace")}
                processes.append(stock.start(environment, prefix=host.enter))
            yield Lab(hosts, (processes[0], processes[1]), folder)
        finally:
            for process in processes:
                process.close()


@pytest.fixture
def nodes(stock: Stock, wired: Lab, tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(stock, tmp_path)
    try:
        yield nodes
    finally:
        nodes.close()


@pytest.fixture
def lab(wired: Lab, nodes: Nodes) -> Iterator[Lab]:
    """The hosts, as if they had just been set up."""
    yield wired
    for host in wired.hosts:
        host.heal()
        host.run("rm", "-rf", str(wired.run))


@pytest.fixture(scope="module")
def calm(stock: Stock, wired: Lab, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run of one host, undisturbed."""
    nodes = Nodes(stock, tmp_path_factory.mktemp("calm"))
    wired.pace(QUICK_S)
    try:
        save_dir = nodes.folder / "run"
        nodes.start(*words(save_dir, ranks=1, steps=STEPS, task=TASK), process=wired.processes[0])
        (ended,) = nodes.finish()
        assert ended.code == EXIT_DONE, ended.err
        return Outcome(ended.code, "", _rows(save_dir), _events(save_dir), _tensors(save_dir), 0.0)
    finally:
        nodes.close()


def begin(lab: Lab, nodes: Nodes, place: str, **options: Any) -> tuple[Node, Node]:
    """Both hosts train, slowly."""
    lab.pace(SLOW_S)
    head = lab.start(nodes, 0, place, **options)
    nodes.wait_until_said(head, "waiting: ")
    other = lab.start(nodes, 1, place, **options)
    nodes.wait_until(lambda: lab.newest(1) >= 5, "five steps")
    return head, other


def marks(rows: Iterable[dict[str, Any]]) -> Marks:
    """The committers of each step: generation and slots, one pair if it was one side."""
    found: Marks = defaultdict(set)
    for row in rows:
        found[row["step"]].add((row["generation"], tuple(row.get("slots", range(row["world_size"])))))
    return found


def twice(found: Marks) -> dict[int, set[tuple[int, tuple[int, ...]]]]:
    """The steps that more than one side has committed."""
    return {step: sides for step, sides in found.items() if len(sides) > 1}


def alone(lab: Lab, at: int) -> set[int]:
    """The steps that one host has committed without the other one, as far as it has written."""
    return {row["step"] for row in lab.rows(at) if row["world_size"] == 1}


def finish(lab: Lab, nodes: Nodes, calm: Outcome, *, at: int = 0) -> None:
    """Let them train to the end, quickly: the result equals an undisturbed run's, and each step was made once."""
    lab.pace(QUICK_S)
    ends = nodes.finish(timeout_s=120)
    assert [ended.code for ended in ends] == [EXIT_DONE] * len(ends), nodes.story()
    assert not any("Traceback" in ended.err for ended in ends), nodes.story()
    found = lab.outcome(at, ends[0].code, nodes.story(), nodes.folder)
    assert verdict(found, calm) == ""
    assert twice(marks([*lab.rows(0), *lab.rows(1)])) == {}


@pytest.mark.fault("FT-5")
def test_a_cut_that_only_the_ranks_notice(lab: Lab, nodes: Nodes, calm: Outcome) -> None:
    """The connection between the launchers outlives it: the isolated side hears that it is out."""
    head, other = begin(lab, nodes, f"file://{nodes.folder / 'meeting'}")
    lab.hosts[1].cut()
    nodes.wait_until(lambda: len(alone(lab, 0)) >= 5, "the head's side continues", within_s=20)
    lab.hosts[1].heal()
    nodes.wait_until_said(head, "rank 1 on labB fell silent", "rank 1 on labB is back: 2 ranks continue", within_s=60)
    assert "joining the run again" not in other.err, nodes.story()
    finish(lab, nodes, calm)


@pytest.mark.fault("FT-5")
@pytest.mark.parametrize("mute", [0, *nightly(1)], ids=["the head", "the other"])
def test_a_cut_in_one_direction(lab: Lab, nodes: Nodes, calm: Outcome, mute: int) -> None:
    """One of the two can send but not receive: the others continue a few seconds after the deadline."""
    head, _ = begin(lab, nodes, f"file://{nodes.folder / 'meeting'}")
    lab.hosts[mute].mute(lab.hosts[1 - mute])
    # long before TCP itself gives up, which is 20 s after the deadline
    nodes.wait_until(lambda: bool(alone(lab, 0)), "the head's side continues", within_s=15)
    lab.hosts[mute].heal()
    nodes.wait_until_said(head, "rank 1 on labB fell silent", "rank 1 on labB is back: 2 ranks continue", within_s=60)
    finish(lab, nodes, calm)


@pytest.mark.long
@pytest.mark.fault("FT-5")
def test_a_cut_that_the_launchers_notice_too(lab: Lab, nodes: Nodes, calm: Outcome) -> None:
    head, other = begin(lab, nodes, f"file://{nodes.folder / 'meeting'}")
    lab.hosts[1].cut()
    nodes.wait_until_said(other, "labB cannot reach the head labA", within_s=60)
    assert len(alone(lab, 0)) >= 5, "the head's side continues"
    lab.hosts[1].heal()
    nodes.wait_until_said(other, "joining the run again at its new head", within_s=30)
    nodes.wait_until_said(head, "is back: 2 ranks continue", within_s=60)
    finish(lab, nodes, calm)


@pytest.mark.long
@pytest.mark.fault("FT-6")
def test_a_cut_that_is_shorter_than_the_deadline(lab: Lab, nodes: Nodes, calm: Outcome) -> None:
    """And longer than what a word between launchers may take: none is said before the deadline has passed."""
    begin(lab, nodes, f"file://{nodes.folder / 'meeting'}", step_deadline=120)
    lab.hosts[1].cut()
    nodes.wait_until(lambda: lab.repeated(0) >= 7, "the kernel has repeated itself for 25 s", within_s=60)
    frozen = lab.newest(0)
    lab.hosts[1].heal()
    nodes.wait_until(lambda: lab.newest(0) > frozen + 1, "the next repetition, after as long again", within_s=60)
    finish(lab, nodes, calm)
    assert not [event for event in lab.outcome(0, 0, "", nodes.folder).events if event["event"] == "generation"]


@pytest.mark.long
@pytest.mark.fault("FT-5")
def test_over_tcp_the_side_without_the_head_saves_and_stops(lab: Lab, nodes: Nodes, calm: Outcome) -> None:
    head, other = begin(lab, nodes, f"tcp://{lab.hosts[0].address}:{free_port()}")
    lab.hosts[1].cut()
    (ended,) = nodes.finish(other, timeout_s=60)
    assert ended.code == EXIT_STOPPED, nodes.story()
    assert not alone(lab, 1), "it commits nothing more"
    assert len(alone(lab, 0)) >= 5, "the head's side continues"
    lab.hosts[1].heal()
    nodes.forget(other)
    lab.start(nodes, 1, other.args[other.args.index("--distributed-init-method") + 1])
    nodes.wait_until_said(head, "rank 1 on labB is back: 2 ranks continue", within_s=60)
    finish(lab, nodes, calm)


@pytest.mark.long
@pytest.mark.fault("FT-2", "FT-5")
def test_a_head_that_loses_the_directory_too_is_replaced_and_commits_nothing(
    lab: Lab, nodes: Nodes, calm: Outcome
) -> None:
    """Its cable was pulled, and the shared directory is at the other end of it."""
    shared = nodes.folder / "shared"
    shared.mkdir()
    place = f"file://{shared / 'meeting'}"
    head, _ = begin(lab, nodes, place)
    lab.hosts[0].cut()
    lab.hosts[0].run("mount", "-t", "tmpfs", "none", str(shared))
    try:
        (ended,) = nodes.finish(head, timeout_s=60)
        assert ended.code == EXIT_STOPPED, nodes.story()
        nodes.wait_until(lambda: len(alone(lab, 1)) >= 5, "the other side continues", within_s=90)
        assert not alone(lab, 0)
    finally:
        lab.hosts[0].run("umount", str(shared))
    lab.hosts[0].heal()
    nodes.forget(head)
    again = lab.start(nodes, 0, place)
    nodes.wait_until_said(again, "rank 0 on labA is back: 2 ranks continue", within_s=60)
    finish(lab, nodes, calm, at=1)


@pytest.mark.long
@pytest.mark.fault("FT-5", "FT-6")
def test_a_link_that_comes_and_goes(lab: Lab, nodes: Nodes, calm: Outcome) -> None:
    """Cut while both train, again while the replacement loads, and again once it trains."""
    head, other = begin(lab, nodes, f"file://{nodes.folder / 'meeting'}")

    def cut_until_the_others_go_on() -> None:
        before = len(alone(lab, 0))
        lab.hosts[1].cut()
        nodes.wait_until(lambda: len(alone(lab, 0)) >= before + 3, "the head's side continues", within_s=30)
        lab.hosts[1].heal()

    def times_back() -> int:
        return head.err.count("rank 1 on labB is back: 2 ranks continue")

    workers = other.workers()
    cut_until_the_others_go_on()
    nodes.wait_until(lambda: bool(other.workers() - workers), "a replacement", within_s=30)
    cut_until_the_others_go_on()
    for times in (1, 2):
        nodes.wait_until(lambda times=times: times_back() == times, "is back", within_s=60)  # type: ignore[misc]
        if times == 1:
            cut_until_the_others_go_on()
    finish(lab, nodes, calm)


@pytest.mark.long
def test_a_laptop_that_wakes_up_finds_the_head_again(lab: Lab, nodes: Nodes, calm: Outcome) -> None:
    """Over tcp://, and after the head has given its connection up."""
    head, other = begin(lab, nodes, f"tcp://{lab.hosts[0].address}:{free_port()}")
    asleep = [other.pid, *other.workers(), *other.before]
    for pid in asleep:
        other.signal(signal.SIGSTOP, pid)
    lab.hosts[1].cut()
    try:
        nodes.wait_until(lambda: not lab.connections(0), "connections given up", within_s=60)
    finally:
        lab.hosts[1].heal()
        for pid in asleep:
            other.signal(signal.SIGCONT, pid)
    nodes.wait_until_said(other, "joining the run again at its new head", within_s=30)
    nodes.wait_until_said(head, "rank 1 on labB is back: 2 ranks continue", within_s=60)
    finish(lab, nodes, calm)


@pytest.mark.long
def test_a_launcher_without_workers_does_not_wait_for_a_head_that_is_cut_off(lab: Lab, nodes: Nodes) -> None:
    head, other = begin(lab, nodes, f"tcp://{lab.hosts[0].address}:{free_port()}", max_restarts=0)
    (worker,) = other.workers()
    other.signal(signal.SIGKILL, worker)
    nodes.wait_until_said(head, "rank 1 on labB was killed (SIGKILL", "rank 0 continues after step")
    nodes.wait_until(lambda: not other.workers(), "no workers")
    lab.hosts[1].cut()
    (ended,) = nodes.finish(other, timeout_s=60)
    assert ended.code != EXIT_DONE
    assert "rank 1 was killed" in ended.message, nodes.story()
    head.signal(signal.SIGTERM)
    nodes.finish(head)


def test_a_step_of_two_sides_would_be_noticed() -> None:
    """The twin."""
    both = [{"step": step, "generation": 0, "world_size": 2} for step in (1, 2)]
    one, other = ([{"step": 3, "generation": 1, "world_size": 1, "slots": [slot]}] for slot in (0, 1))
    assert twice(marks([*both, *both, *one, *one])) == {}, "rows of both directories, and one that was written twice"
    assert twice(marks([*both, *one, *other])).keys() == {3}
    assert twice(marks([*both, *one, {**one[0], "generation": 2}])).keys() == {3}
