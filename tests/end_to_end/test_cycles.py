"""Starts and stops again and again in one place, and runs that start in the same instant: nothing is left or mixed.

The launchers are warm processes, so what a run leaves in its own process shows too: threads, open files, ports.
"""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import pytest

from hetseq.errors import EXIT_DISAGREE, EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from hetseq.monitor.metrics import read_rows
from tests.support.commands import ROOT
from tests.support.differing import write_what
from tests.support.nightly import nightly
from tests.support.nodes import Node, Nodes, listening
from tests.support.places import Place, directory, fresh_name

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TASK = ROOT / "tests" / "support" / "differing.py"
WORDS = shlex.split(
    f"--cpu --task {TASK}:Differing --global-batch-size 16 --max-update 2 --optimizer sgd --lr 0.001"
    " --lr-scheduler constant --precision fp64 --disable-validation --no-save --ranks 1"
)


def start(nodes: Nodes, url: str, rank: int, *words: object, seed: int = 1) -> Node:
    data = nodes.folder / "data"
    if not data.exists():
        write_what(data)
    meeting = ["--distributed-init-method", url, "--distributed-world-size", 2, "--distributed-rank", rank]
    return nodes.start(*WORDS, *meeting, "--data", data, "--seed", seed, *words, cwd=nodes.folder)


def belongings(node: Node) -> tuple[int, int]:
    """Threads and open files of its process."""
    process = Path("/proc") / str(node.pid)
    return len(os.listdir(process / "task")), len(os.listdir(process / "fd"))


def one_cycle(nodes: Nodes, place: Place, number: int) -> tuple[Node, Node | None]:
    """Three of four are runs; the others are a head that is stopped while it waits, or two that do not agree."""
    save = ["--save-dir", nodes.folder / "run"]
    if number % 8 == 3:
        head = start(nodes, place.url, 0, *save)
        nodes.wait_until_said(head, "waiting: 1 of 2")
        head.signal(signal.SIGTERM)
        assert [ended.code for ended in nodes.finish(head)] == [EXIT_INTERRUPTED], nodes.story()
        return head, None
    order = (0, 1) if number % 2 else (1, 0)
    seeds = (1, 2) if number % 8 == 7 else (1, 1)
    one, other = (start(nodes, place.url, rank, *save, seed=seed) for rank, seed in zip(order, seeds, strict=True))
    wanted = EXIT_DISAGREE if seeds == (1, 2) else EXIT_DONE
    assert [ended.code for ended in nodes.finish(one, other)] == [wanted] * 2, nodes.story()
    return one, other


@pytest.mark.parametrize("cycles", nightly(8, 100))  # of eight kinds
def test_many_starts_and_stops_in_one_directory_leave_nothing(nodes: Nodes, cycles: int) -> None:
    place = directory(nodes.folder)
    before: dict[int, tuple[int, int]] = {}
    for number in range(cycles):
        used = [node for node in one_cycle(nodes, place, number) if node is not None]
        assert place.leftovers() == [], f"cycle {number}"
        if number < 16:  # each kind has been there twice
            before |= {node.pid: belongings(node) for node in used}
        for node in used:
            assert listening(frozenset({node.pid})) == [], f"cycle {number}"
        nodes.forget(*used)
    after = {node.pid: belongings(node) for node in used}
    assert all(after[pid] <= before[pid] for pid in after), f"threads and open files: {before} became {after}"


@pytest.mark.nightly
def test_two_runs_that_start_in_one_folder_in_the_same_instant_do_not_meet(nodes: Nodes) -> None:
    """Two names in one shared folder are two places."""
    curves: dict[str, list[list[float]]] = {}
    nodes.prepare(4)
    for number in range(2):
        places = {name: Place(f"file://{nodes.folder / 'shared' / name}") for name in ("one", "other")}
        (nodes.folder / "shared").mkdir(exist_ok=True)
        started = [
            start(nodes, places[name].url, rank, "--save-dir", nodes.folder / f"{name}-{number}", seed=seed)
            for rank in (0, 1)
            for name, seed in (("one", 1), ("other", 2))
        ]
        assert [ended.code for ended in nodes.finish(*started)] == [0] * 4, nodes.story()
        for name in places:
            rows = read_rows(nodes.folder / f"{name}-{number}" / "metrics.jsonl")
            curves.setdefault(name, []).append([row["loss"] for row in rows])
        assert list((nodes.folder / "shared").iterdir()) == []
    assert all(curve == curves["one"][0] for curve in curves["one"])
    assert all(curve == curves["other"][0] for curve in curves["other"])
    assert curves["one"][0] != curves["other"][0]


def test_two_runs_that_start_in_one_place_in_the_same_instant_are_never_mixed(nodes: Nodes) -> None:
    """A place is for one run at a time: whoever is too many is refused in words, and what goes on is whole."""
    place = fresh_name(nodes.folder)
    nodes.prepare(4)
    for number in range(2):
        names = [nodes.folder / f"{name}-{number}" for name in ("one", "other")]
        words = ["--join-timeout", 5, "--save-dir"]
        started = [start(nodes, place.url, rank, *words, name) for rank in (0, 1) for name in names]
        ends = nodes.finish(*started, timeout_s=30)
        assert sum(ended.code == EXIT_DONE for ended in ends) in (0, 2, 4), nodes.story()
        for ended in ends:
            assert ended.code in (EXIT_DONE, EXIT_DISAGREE, EXIT_USAGE, EXIT_FAILED), nodes.story()
            if ended.code != EXIT_DONE:
                whys = ("claimed twice", "came too late", "did not come in time", "are starting, without it")
                assert any(why in ended.message for why in whys), nodes.story()
        for name in names:
            if (name / "metrics.jsonl").exists():
                assert [row["step"] for row in read_rows(name / "metrics.jsonl")] == [1, 2], nodes.story()
        assert place.leftovers() == []


def test_two_runs_with_one_run_directory_in_the_same_instant(nodes: Nodes) -> None:
    """The one that comes second is told who has it."""
    run = nodes.folder / "run"
    places = [Place(f"file://{nodes.folder / name}") for name in ("one", "other")]
    words = ["--save-dir", run, "--max-update", 100_000]
    nodes.prepare(4)
    started = [start(nodes, place.url, rank, *words) for rank in (0, 1) for place in places]
    nodes.wait_until(lambda: sum(node.poll() is not None for node in started) == 2, "two of four are refused")
    refused = [node for node in started if node.poll() is not None]
    for ended in nodes.finish(*refused):
        assert ended.code == EXIT_USAGE, nodes.story()
        assert str(run) in ended.message
    going = [node for node in started if node not in refused]
    rows = run / "metrics.jsonl"
    nodes.wait_until(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 3, "three steps")
    for node in going:  # whichever came first is their head, and may outlive the other
        node.signal(signal.SIGTERM)
    assert [ended.code for ended in nodes.finish(*going)] == [EXIT_FAILED] * 2, nodes.story()
    steps = [row["step"] for row in read_rows(rows)]
    assert steps == list(range(1, len(steps) + 1)), "one run wrote there"
