"""The doctors' all-reduce: what is said of it, what a forecast makes of it, and that a bad participant keeps nobody."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetseq.balance.simulation import Link, ring_seconds
from hetseq.comm.group import Group, LocalGroup, Rows
from hetseq.commands.doctor import all_reduce_child as child
from hetseq.commands.doctor import all_reduce_client as participant
from hetseq.commands.doctor.all_reduce_client import Participant
from hetseq.commands.doctor.cluster_findings import compare
from hetseq.commands.doctor.forecast import foresee
from hetseq.commands.doctor.network_results import MIB, AllReduce, Trouble, Way, corrected, slowest_ways, why_not
from hetseq.commands.doctor.node_findings import judge
from hetseq.commands.doctor.report import cluster_document
from hetseq.errors import PeerLostError, RendezvousError
from tests.support.trials import until
from tests.unit.commands.test_doctor import BURN, GOOD
from tests.unit.commands.test_doctor_together import PAIR, WAYS

# 0.5 ms to begin with and 1 ms per MiB: the ways explain 64 MiB in 67 ms, and it takes 64.5
MEASURED = AllReduce((0, 1), {1 * MIB: 1.5e-3, 16 * MIB: 16.5e-3, 64 * MIB: 64.5e-3})
LOST = Trouble("lost a peer while waiting up to 20 s for a gradient bucket", is_secondary=True)


def said(all_reduce: AllReduce, **others: Any) -> list[str]:
    findings = compare(replace(PAIR, all_reduce=all_reduce, **others))
    return [f"{one.level} {' '.join(one.filled())}".strip() for one in findings if one.topic == "all-reduce"]


# What is said of it.


def test_each_size_has_a_line_with_its_bus_bandwidth_and_the_slowest_way_is_named() -> None:
    assert said(MEASURED) == [
        "ok 1 MiB over 2 nodes (gloo): 1.5 ms, bus bandwidth 699 MB/s",
        "ok 16 MiB over 2 nodes (gloo): 16.5 ms, bus bandwidth 1,017 MB/s",
        "ok 64 MiB over 2 nodes (gloo): 64.5 ms, bus bandwidth 1,040 MB/s",
        "ok 64 MiB take no longer than the slowest link explains (labA to labB, 1,000 MB/s)",
    ]


def test_bus_bandwidth_is_that_of_a_link_of_the_ring_however_many_nodes_there_are() -> None:
    four = AllReduce((0, 1, 2, 3), {64 * MIB: 1.0})
    assert four.bus_bytes_per_s(64 * MIB) == 64 * MIB * 2 * 3 / 4


@pytest.mark.parametrize(
    ("ways_per_s", "seconds", "level", "remedy"),
    [
        (1e9, 0.19, "ok", ""),  # 2.8 times what explains it
        (1e9, 0.22, "warning", "a free core"),
        (1e10, 0.05, "note", "nothing to fix in the network"),  # of a network that is faster than gloo
    ],
)
def test_an_all_reduce_far_slower_than_the_ways_explain_says_where_to_look(
    ways_per_s: float, seconds: float, level: str, remedy: str
) -> None:
    ways = dict.fromkeys(WAYS, Way(ways_per_s))
    last = said(AllReduce((0, 1), {64 * MIB: seconds}), ways=ways)[-1]
    assert last.startswith(f"{level} 64 MiB take")
    assert remedy in last


def test_sizes_that_would_take_too_long_are_named() -> None:
    assert "ok 16 MiB and 64 MiB left out: it would take too long here" in said(AllReduce((0, 1), {MIB: 2.0}))


def test_who_was_killed_is_to_blame_and_who_lost_him_is_not() -> None:
    killed = Trouble("its process was ended by SIGKILL")
    lines = said(AllReduce((0, 1), {MIB: 0.001}, {0: LOST, 1: killed}))
    assert lines[0].startswith("ok 1 MiB")  # what was measured before stands
    assert [line for line in lines if line.startswith("problem")] == [
        "problem it broke off because of labB: its process was ended by SIGKILL check on labB what ends or stops"
        " processes (memory, limits of the queue), and start all doctors again"
    ]


def test_nodes_that_lost_each_other_hear_of_firewalls() -> None:
    (line,) = said(AllReduce((0, 1), {}, {1: LOST, 0: LOST}))
    assert line.startswith("problem it broke off: labB lost the others: lost a peer")
    assert "firewall" in line


def test_a_node_that_left_meanwhile_is_named() -> None:
    (line,) = said(AllReduce((0, 1), {}, {0: LOST}), lost={1: "it closed the connection"})
    assert line.startswith("problem it broke off because labB left")


def test_none_is_tried_where_it_cannot_work() -> None:
    both, no_gloo = (GOOD, GOOD), replace(GOOD, torch=replace(GOOD.torch, has_gloo=False))
    assert why_not(both, WAYS, {}) == ""
    assert why_not((GOOD, no_gloo), WAYS, {}) == "torch or gloo does not work on <node2>"
    assert why_not(both, {**WAYS, (0, 1): Way(trouble="x")}, {}) == "<node1> does not reach <node2>"
    assert why_not(both, WAYS, {1: "gone"}) == "only one node is left"
    three = (*both, GOOD)
    assert why_not(three, {**WAYS, (0, 2): Way(trouble="x")}, {2: "gone"}) == ""
    assert said(AllReduce(reason="<node1> does not reach <node2>"))[0].startswith(
        "note not tried: labA does not reach labB"
    )


def test_answers_of_the_nodes_become_one_record_and_sizes_that_nobody_finished_are_missing() -> None:
    told = {str(MIB): 0.25, str(16 * MIB): 2.0}
    found = AllReduce.of((0, 1), {1: {"measured": told, "trouble": "x", "is_secondary": True}, 0: {"measured": {}}})
    assert found == AllReduce((0, 1), {MIB: 0.25, 16 * MIB: 2.0}, {1: Trouble("x", is_secondary=True)})


def test_the_file_for_others_has_the_figures_and_no_names() -> None:
    broken = replace(MEASURED, troubles={1: Trouble("labB at 10.0.0.7 was killed")})
    for all_reduce in (MEASURED, broken):
        examined = replace(PAIR, all_reduce=all_reduce)
        shown = cluster_document(examined, [judge(GOOD)] * 2, list(compare(examined)))
        assert shown["all_reduce"]["nodes"] == ["node1", "node2"]
        assert shown["all_reduce"]["sizes"][0] == {"bytes": MIB, "seconds": 1.5e-3, "bus_bytes_per_s": MIB / 1.5e-3}
        assert not any(name in json.dumps(shown) for name in ("labA", "labB", "10.0.0.7"))


# What a forecast makes of it.


@pytest.mark.parametrize("size", [MIB / 4, MIB, 4 * MIB, 16 * MIB, 20 * MIB, 128 * MIB])
def test_a_ring_over_its_link_takes_as_long_as_it_did(size: float) -> None:
    expected = 0.5e-3 + size / MIB * 1e-3  # the line that all three sizes lie on
    if size >= MIB:
        assert MEASURED.seconds_of(size) == pytest.approx(expected, rel=1e-9)  # rounding of a few operations
    assert ring_seconds([MEASURED.link(size)] * 2, 2, size) == pytest.approx(MEASURED.seconds_of(size), rel=1e-9)
    assert ring_seconds([replace(MEASURED, nodes=(0, 1, 2)).link(size)], 3, size) == pytest.approx(
        MEASURED.seconds_of(size), rel=1e-9
    )


@pytest.mark.parametrize("seconds", [{MIB: 0.5}, {MIB: 0.001, 16 * MIB: 0.1}, {MIB: 0.1, 16 * MIB: 0.001}])
def test_one_size_or_odd_times_still_give_a_link(seconds: dict[int, float]) -> None:
    for size in (MIB / 4, 4 * MIB, 64 * MIB):
        odd = AllReduce((0, 1), seconds)
        link = odd.link(size)
        assert link.bytes_per_s > 0
        assert link.latency_s >= 0
        assert ring_seconds([link], 2, size) == pytest.approx(odd.seconds_of(size), rel=1e-9)


def test_what_is_lost_in_the_nodes_stays_lost_when_the_slowest_is_left_out() -> None:
    links = {0: Link(1e9), 1: Link(1e9), 2: Link(1e8)}
    slow = AllReduce((0, 1, 2), {4 * MIB: ring_seconds([Link(5e7)], 3, 4 * MIB)})  # 20 ns a byte, the way has 10
    found = corrected(links, slow, 4 * MIB)
    assert 1 / found[2].bytes_per_s == pytest.approx(20e-9)
    assert 1 / found[0].bytes_per_s == pytest.approx(1e-9 + 10e-9)
    quick = AllReduce((0, 1, 2), {4 * MIB: ring_seconds([Link(2e8)], 3, 4 * MIB)})  # streams had each other in the way
    assert corrected(links, quick, 4 * MIB)[0].bytes_per_s == pytest.approx(2e9)
    assert corrected(links, AllReduce((0, 1, 2)), 4 * MIB) == links  # it broke off


def test_the_forecast_takes_the_exchange_as_it_was_measured() -> None:
    size = BURN.gradient_bytes
    slow = AllReduce((0, 1), {size: 0.25})
    text = next(iter(foresee(replace(PAIR, all_reduce=slow).candidates()))).text
    assert "of which 250.0 ms exchange over the network" in text
    assert "of which 4.4 ms exchange" in next(iter(foresee(PAIR.candidates()))).text  # the twin: by the ways
    assert slowest_ways(PAIR.ways)[0] == Link(1e9, 1e-4)


# One rank of it.


def told_by(group: Group, sizes: tuple[int, ...]) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    child.measure(group, torch.device("cpu"), lambda kind, **facts: found.append((kind, facts)), sizes)
    return [one for one in found if one[0] == "measured"]


def test_larger_sizes_are_left_out_where_they_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_ENOUGH_S", 0.0)
    assert len(told_by(LocalGroup(), (4096, 65536))) == 2
    monkeypatch.setattr(child, "_LONGEST_S", 0.0)
    assert len(told_by(LocalGroup(), (4096, 65536))) == 1


class WithASlowOne(LocalGroup):
    """The other rank says of each value that it was 5."""

    def all_gather_rows(self, row: Rows) -> Rows:
        return np.stack([row, np.full(row.shape, 5.0).view(np.int64)])


def test_an_all_reduce_takes_as_long_as_on_the_slowest_rank() -> None:
    ((_, facts),) = told_by(WithASlowOne(), (4096,))
    assert facts["seconds"] == 5.0


@pytest.fixture
def pipes() -> Iterator[tuple[child.ChildPipe, Any, Any]]:
    """A line, the end that writes to it and the end that reads from it."""
    (source, to_it), (from_it, sink) = os.pipe(), os.pipe()
    with contextlib.ExitStack() as closing:
        far = closing.enter_context(open(to_it, "wb", buffering=0))
        near = closing.enter_context(open(from_it, "rb"))
        line = child.ChildPipe(open(source, "rb"), open(sink, "wb"))  # noqa: SIM115  (the line's own)
        yield line, far, near
        far.close()
        until(lambda: not any(thread.name == "doctor-line" for thread in threading.enumerate()), "its end")
        line._source.close()
        line._sink.close()


def test_the_store_of_the_ranks_comes_and_goes_by_the_pipes(pipes: tuple[child.ChildPipe, Any, Any]) -> None:
    line, far, near = pipes
    line.set("0", b"here")
    assert json.loads(near.readline()) == {"kind": "set", "key": "0", "value": base64.b64encode(b"here").decode()}
    assert line.get("0", 0.0) == b"here"
    far.write(json.dumps({"kind": "value", "key": "1", "value": base64.b64encode(b"there").decode()}).encode() + b"\n")
    assert line.get("1", 10.0) == b"there"
    with pytest.raises(RendezvousError, match="waited 0 s for another node"):
        line.get("2", 0.0)
    far.write(b'{"kind": "part", "rank": 1}\n')
    assert line.part() == {"kind": "part", "rank": 1}


class Severed(LocalGroup):
    def __init__(self) -> None:
        super().__init__()
        self.is_over = threading.Event()

    def sever(self) -> None:
        self.is_over.set()


def test_the_word_that_somebody_is_lost_cuts_the_group_and_every_wait(pipes: tuple[child.ChildPipe, Any, Any]) -> None:
    line, far, _ = pipes
    early, late = Severed(), Severed()
    line.check()
    line.begin(early)
    assert not early.is_over.is_set()
    far.write(b'{"kind": "gone"}\n')
    with pytest.raises(PeerLostError):
        line.get("1", 10.0)
    assert early.is_over.wait(10.0)
    line.begin(late)  # one that was connected while the word came
    assert late.is_over.is_set()


# The doctor's end.

HEAD = "import json, os, signal, sys\nsay = lambda **facts: print(json.dumps(facts), flush=True)\n"
STUBS = {
    "absent": 'raise ImportError("libgloo is not there")',
    "killed": "say(kind='ready'); sys.stdin.readline(); os.kill(os.getpid(), signal.SIGKILL)",
    "aborted": "say(kind='ready'); sys.stdin.readline(); sys.stderr.write('terminate called\\n'); os._exit(3)",
    "stopped": "say(kind='ready'); sys.stdin.readline(); os.kill(os.getpid(), signal.SIGSTOP)",
    "lonely": "say(kind='ready'); sys.stdin.readline(); say(kind='measured', bytes=4, seconds=0.5)\n"
    "say(kind='trouble', trouble='lost a peer', is_secondary=True)",
    "polite": "print('hello from a library'); say(kind='ready'); part = json.loads(sys.stdin.readline())\n"
    "say(kind='set', key='k', value='mine')\nsay(kind='measured', bytes=part['rank'], seconds=1.5)\n"
    "assert json.loads(sys.stdin.readline()) == {'kind': 'value', 'key': 'k', 'value': 'other'}\nsay(kind='end')",
}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A participant whose process is one of the stubs."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with contextlib.ExitStack() as closing:

        def started(name: str) -> Participant:
            (tmp_path / f"{name}_stub.py").write_text(HEAD + STUBS[name])
            one = Participant(f"{name}_stub")
            closing.callback(one.close)
            return one

        yield started


def test_words_of_the_child_go_to_the_head_and_its_words_to_the_child(start: Any) -> None:
    polite = start("polite")
    assert polite.await_ready() == {}

    def say(record: dict[str, Any]) -> None:
        if record["kind"] == "set":
            polite.pass_on({**record, "kind": "value", "value": "other"})

    assert polite.take_part({"rank": 7}, say) == {"measured": {"7": 1.5}}


@pytest.mark.parametrize(
    ("name", "trouble", "is_secondary"),
    [
        ("killed", "its process was ended by SIGKILL", False),
        ("aborted", "its process ended with code 3: terminate called", False),
        ("lonely", "lost a peer", True),
    ],
)
def test_the_end_of_a_child_is_told_and_whose_fault_it_is(
    start: Any, name: str, trouble: str, is_secondary: bool
) -> None:
    one = start(name)
    assert one.await_ready() == {}
    answer = one.take_part({}, lambda record: None)
    assert (answer["trouble"], answer["is_secondary"]) == (trouble, is_secondary)
    assert answer["measured"] == ({"4": 0.5} if name == "lonely" else {})


def test_a_child_that_cannot_begin_says_why(start: Any) -> None:
    assert start("absent").await_ready()["trouble"].endswith("ImportError: libgloo is not there")
    assert "was not ready" in start("stopped").await_ready(0.0)["trouble"]


@pytest.mark.parametrize(("limit", "words"), [("GRACE_S", "hung"), ("SILENCE_S", "said nothing for 0 s")])
def test_a_child_that_stands_still_is_ended_and_to_blame(
    start: Any, monkeypatch: pytest.MonkeyPatch, limit: str, words: str
) -> None:
    monkeypatch.setattr(participant, limit, 0.0)
    one = start("stopped")
    assert one.await_ready() == {}
    if limit == "GRACE_S":
        one.pass_on({"kind": "gone"})
    answer = one.take_part({}, lambda record: None)
    assert words in answer["trouble"]
    assert answer["is_secondary"] is False
    one.close()
    assert one._child.poll() == -9


def test_the_head_hears_that_a_doctor_lives_while_its_child_is_silent(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participant, "_ALIVE_S", 0.0)
    monkeypatch.setattr(participant, "SILENCE_S", 0.1)
    one, heard = start("stopped"), []
    assert one.await_ready() == {}
    one.take_part({}, heard.append)
    assert {"kind": "alive"} in heard
