"""Doctors of several nodes: what they find together, and that one who leaves or lies keeps nobody."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetseq.cluster.rendezvous.channel import Channel, ChannelClosed, Listener, connect
from hetseq.cluster.rendezvous.secret import derive_key, load_secret
from hetseq.cluster.rendezvous.sockets import ForeignBytes
from hetseq.commands import doctor
from hetseq.commands.doctor import coordinator as meeting
from hetseq.commands.doctor.cluster_findings import Examination, Way, compare, side_by_side
from hetseq.commands.doctor.coordinator import PROTOCOL, examine_together, name_of
from hetseq.commands.doctor.facts import Facts, to_json
from hetseq.commands.doctor.network_results import AllReduce, Trouble
from hetseq.commands.doctor.node_agent import Door, Helper, stream_to
from hetseq.commands.doctor.node_findings import judge
from hetseq.commands.doctor.report import COLUMNS, cluster_document
from hetseq.config.sections import DistributedConfig
from hetseq.errors import ConfigError, RendezvousError
from tests.unit.commands.test_doctor import GOOD

FIELDS = {"protocol": "1", "hetseq": "2.0.0", "torch": "2.13.0", "source of hetseq": "0123456789ab"}
WAYS = {(0, 1): Way(1e9, 1e-4), (1, 0): Way(1.1e9, 1e-4)}
PAIR = Examination(("labA", "labB"), (GOOD, GOOD), (FIELDS, FIELDS), WAYS, {(0, 1): 0.02, (1, 0): 0.03})


def worth_a_look(examined: Examination) -> list[tuple[str, str]]:
    return [(one.level, " ".join(one.filled())) for one in compare(examined) if one.level != "ok"]


def test_two_good_nodes_have_nothing_but_ok() -> None:
    assert worth_a_look(PAIR) == []


BAD: list[tuple[str, Any, str, str]] = [
    ("fields", (FIELDS, {**FIELDS, "torch": "2.12.0"}), "problem", "torch differs: labA 2.13.0, labB 2.12.0"),
    ("fields", (FIELDS, {**FIELDS, "source of hetseq": "ba9876543210"}), "problem", "source of hetseq differs"),
    ("facts", (GOOD, replace(GOOD, python="3.12.1")), "note", "Python differs: labA 3.11.7, labB 3.12.1"),
    ("facts", (GOOD, replace(GOOD, numpy="2.1.0")), "note", "numpy differs"),
    ("ways", {**WAYS, (0, 1): Way(trouble="no answer")}, "problem", "labA does not reach labB: no answer"),
    ("ways", {**WAYS, (1, 0): Way(2e7, 1e-4)}, "warning", "labB sends 20 MB/s to labA"),
    ("delays_s", {(0, 1): None, (1, 0): 0.1}, "problem", "labB does not see files of labA"),
    ("delays_s", {(0, 1): 3.1, (1, 0): 0.1}, "note", "after up to 3.1 s"),
    ("lost", {1: "it closed the connection"}, "problem", "labB left the examination: it closed the connection"),
]


def test_nodes_with_different_torch_get_the_command_for_the_cards_of_each() -> None:
    old = replace(GOOD, capabilities=("6.1",), driver="580.1", torch=replace(GOOD.torch, devices=()))
    fields = ({**FIELDS, "torch": "2.14.1"}, {**FIELDS, "torch": "2.13.0"})
    examined = replace(PAIR, facts=(old, GOOD), fields=fields)
    (found,) = [one for one in compare(examined) if one.text.startswith("torch differs")]
    index = "https://download.pytorch.org/whl/cu126"
    remedy = found.filled()[1]
    assert remedy == f"on labA: pip install torch==2.13.0 --index-url {index}; or use hetseq ssh --install for all"


@pytest.mark.parametrize(("part", "value", "level", "words"), BAD, ids=[f"{bad[0]} {bad[3]}" for bad in BAD])
def test_what_is_bad_between_nodes_gives_its_finding_and_no_other_one(
    part: str, value: Any, level: str, words: str
) -> None:
    (found,) = worth_a_look(replace(PAIR, **{part: value}))
    assert found[0] == level
    assert words in found[1]


def test_a_rank_has_the_slowest_way_of_its_node() -> None:
    three = replace(
        PAIR, names=("a", "b", "c"), facts=(GOOD,) * 3, ways={(0, 1): Way(5e8, 1e-3), (0, 2): Way(1e8, 1e-4)}
    )
    first, second, _ = three.candidates()
    assert first.link is not None
    assert (first.link.bytes_per_s, first.link.latency_s) == (1e8, 1e-4)
    assert second.link is None


def test_the_tables_of_twenty_nodes_fit_the_page() -> None:
    nodes = range(20)
    ways = {(source, target): Way(1.25e10, 1e-5) for source in nodes for target in nodes if source != target}
    names = tuple(f"node-of-a-long-name-{number}" for number in nodes)
    lines = list(side_by_side(Examination(names, (GOOD,) * 20, (FIELDS,) * 20, ways)))
    assert max(map(len, lines)) <= COLUMNS
    assert sum("12,500" in line for line in lines) == 60


def test_the_table_shows_the_addresses_at_which_the_nodes_were_reached() -> None:
    assert sum("10.0.0.7" in line for line in side_by_side(PAIR)) == 2
    reached = list(side_by_side(replace(PAIR, addresses=("127.0.0.1", "127.0.0.2"))))
    assert [line.split()[-1] for line in reached[1:3]] == ["127.0.0.1", "127.0.0.2"]


def test_the_file_for_others_does_not_name_the_nodes() -> None:
    bad = replace(PAIR, ways={(0, 1): Way(trouble="labB said no"), (1, 0): Way(1e6)}, lost={1: "labB has gone"})
    shown = json.dumps(cluster_document(bad, [judge(GOOD)] * 2, list(compare(bad))))
    assert not any(name in shown for name in ("labA", "labB", "10.0.0.7", "eno1", "/shared"))
    assert "<node2> left the examination" in shown
    assert any("labB" in one.filled()[0] for one in compare(bad))  # the twin: the terminal says it


def test_two_doctors_on_one_host_have_two_names() -> None:
    hello = {"facts": to_json(GOOD)}
    assert name_of([hello, hello, hello]) == ["labA", "labA#2", "labA#3"]


# Streams.


def test_a_stream_arrives_whole_and_is_measured() -> None:
    with contextlib.closing(Door("127.0.0.1", b"key")) as door:
        door.expect("session", 1)
        found = stream_to(door.address, door.port, b"key", "session", 0, 1)
    assert found.bytes_per_s > 0
    assert found.latency_s > 0


@pytest.mark.parametrize(
    "stranger", [(b"other key", "session", 1), (b"key", "another session", 1), (b"key", "session", 2)]
)
def test_a_stranger_is_not_let_in(stranger: tuple[bytes, str, int]) -> None:
    key, session, target = stranger
    with contextlib.closing(Door("127.0.0.1", b"key")) as door:
        door.expect("session", 1)
        with pytest.raises(ConnectionResetError):
            stream_to(door.address, door.port, key, session, 0, target)


def test_a_door_that_cannot_prove_itself_gets_no_stream() -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:

        def welcome() -> None:
            connection, _ = foreign.accept()
            with connection:
                connection.sendall(bytes(32))
                connection.recv(1)

        thread = threading.Thread(target=welcome)
        thread.start()
        with pytest.raises(ForeignBytes, match="another program"):
            stream_to("127.0.0.1", foreign.getsockname()[1], b"key", "session", 0, 1)
        thread.join(5.0)


def test_a_helper_answers_what_went_wrong(tmp_path: Path) -> None:
    with contextlib.closing(Helper("127.0.0.1", b"key", None)) as helper:
        helper.answer({"kind": "begin", "session": "session", "number": 0})
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            way = {"kind": "stream", "address": "127.0.0.1", "port": unused.getsockname()[1], "target": 1}
            assert "connection refused" in helper.answer(way)["trouble"]
        assert helper.answer({"kind": "leave mark", "mark": 0, "content": "x"}) == {
            "trouble": "no --dir was given here"
        }


# Meetings.


@pytest.fixture
def url() -> str:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{asking.getsockname()[1]}"


class Rank:
    """In place of a participant: it puts one value into the store, waits for those of the others, and is done."""

    def __init__(self) -> None:
        self._values: set[str] = set()
        self._changed = threading.Condition()
        self._is_gone = False

    def await_ready(self) -> dict[str, Any]:
        return {}

    def pass_on(self, record: dict[str, Any]) -> None:
        with self._changed:
            if record["kind"] == "gone":
                self._is_gone = True
            else:
                self._values.add(record["key"])
            self._changed.notify_all()

    def take_part(self, part: dict[str, Any], say: Any) -> dict[str, Any]:
        say({"kind": "alive"})
        say({"kind": "set", "key": str(part["rank"]), "value": ""})
        others = {str(rank) for rank in range(part["world_size"])} - {str(part["rank"])}
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_gone or self._values >= others, 20.0)
            if self._is_gone:
                return {"measured": {}, "trouble": "another node was lost", "is_secondary": True}
        assert part["sources"] == ["127.0.0.1"] * part["world_size"]
        return {"measured": {str(1 << 20): 0.001}}

    def close(self) -> None:
        pass


class BrokenRank(Rank):
    def await_ready(self) -> dict[str, Any]:
        return {"trouble": "its process ended with code 1"}


@pytest.fixture(autouse=True)
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real ranks are in tests/end_to_end/test_doctors.py."""
    monkeypatch.setattr("hetseq.commands.doctor.node_agent.Participant", Rank)


class Doctors:
    """Several at one meeting, each in a thread of its own."""

    def __init__(self, url: str, secret: Path, directory: Path | None, *, nodes: int = 2) -> None:
        self.config = DistributedConfig(join=url, min_ranks=nodes, join_timeout=20.0, secret_file=str(secret))
        self.nodes, self.directory = nodes, directory
        self.ends: list[tuple[int, bool] | RendezvousError] = []
        self.examined: list[Examination] = []
        self.told: list[str] = []
        self._threads: list[threading.Thread] = []

    def start(self, facts: Facts, code: int = 0) -> None:
        self._threads.append(threading.Thread(target=self._run, args=(facts, code)))
        self._threads[-1].start()

    def _run(self, facts: Facts, code: int) -> None:
        def judged(examined: Examination) -> int:
            self.examined.append(examined)
            return code

        try:
            end = examine_together(
                self.config, facts, nodes=self.nodes, directory=self.directory, interface="lo", command="LINE",
                tell=self.told.append, judge=judged,
            )  # fmt: skip
        except RendezvousError as error:
            self.ends.append(error)
        else:
            self.ends.append(end)

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(30.0)


def visit(url: str, secret: Path) -> Channel:
    """A channel to the head, as soon as it listens."""
    key = derive_key(load_secret(secret), "control")
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    end = time.monotonic() + 10.0
    while True:
        with contextlib.suppress(RendezvousError):
            return connect(host, int(port), key, deadline=time.monotonic() + 5.0, secret_file=secret)
        assert time.monotonic() < end


def test_three_doctors_meet_and_all_end_with_the_same_code(url: str, tmp_path: Path) -> None:
    doctors = Doctors(url, tmp_path / "secret", tmp_path, nodes=3)
    for _ in range(3):
        doctors.start(GOOD, code=1)
    doctors.wait()
    assert sorted(doctors.ends) == [(1, False), (1, False), (1, True)]  # type: ignore[type-var]
    (examined,) = doctors.examined
    assert len(examined.ways) == 6
    assert [way.trouble for way in examined.ways.values()] == [""] * 6
    assert set(examined.delays_s) == set(examined.ways)
    assert None not in examined.delays_s.values()
    assert examined.all_reduce == AllReduce((0, 1, 2), {1 << 20: 0.001})
    assert examined.facts == (GOOD,) * 3
    assert examined.addresses == ("127.0.0.1",) * 3
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_a_node_that_leaves_on_the_way_is_named_and_keeps_nobody(url: str, tmp_path: Path) -> None:
    doctors = Doctors(url, tmp_path / "secret", None)
    doctors.start(GOOD)
    channel = visit(url, tmp_path / "secret")
    hello = {"kind": "doctor", "protocol": PROTOCOL, "facts": to_json(GOOD), "fields": FIELDS}
    channel.send({**hello, "address": "127.0.0.1", "port": 9})
    assert channel.receive(10.0) == {"kind": "welcome"}
    channel.receive(10.0)
    channel.close()
    doctors.wait()
    assert doctors.ends == [(0, True)]
    assert list(doctors.examined[0].lost) == [1]


def test_a_node_that_leaves_during_the_all_reduce_is_named_and_keeps_nobody(url: str, tmp_path: Path) -> None:
    doctors = Doctors(url, tmp_path / "secret", None)
    doctors.start(GOOD)
    secret = load_secret(tmp_path / "secret") if (tmp_path / "secret").exists() else None
    channel = visit(url, tmp_path / "secret")
    key = derive_key(secret or load_secret(tmp_path / "secret"), "ranks")
    with contextlib.closing(Helper("127.0.0.1", key, None)) as helper:
        hello = {"kind": "doctor", "protocol": PROTOCOL, "facts": to_json(GOOD), "fields": FIELDS}
        channel.send({**hello, "address": "127.0.0.1", "port": helper.door.port})
        assert channel.receive(10.0) == {"kind": "welcome"}
        while (request := channel.receive(10.0))["kind"] != "all-reduce":
            helper.take(request, channel.send)
        channel.close()
        doctors.wait()
    (examined,) = doctors.examined
    assert [way.trouble for way in examined.ways.values()] == [""] * 2
    assert list(examined.lost) == [1]
    assert examined.all_reduce is not None
    assert examined.all_reduce.troubles == {0: Trouble("another node was lost", is_secondary=True)}


def test_a_node_whose_rank_cannot_begin_is_named(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doctors = Doctors(url, tmp_path / "secret", None)
    monkeypatch.setattr("hetseq.commands.doctor.node_agent.Participant", BrokenRank)
    doctors.start(GOOD)
    doctors.start(GOOD)
    doctors.wait()
    trouble = Trouble("its process ended with code 1")
    assert doctors.examined[0].all_reduce == AllReduce((0, 1), troubles={0: trouble, 1: trouble})


def test_words_for_no_rank_and_a_part_without_one_hurt_nobody() -> None:
    heard: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    with contextlib.closing(Helper("127.0.0.1", b"key", None)) as helper:
        helper.take({"kind": "value", "key": "0", "value": ""}, heard.put)
        helper.take({"kind": "gone"}, heard.put)
        helper.take({"kind": "all-reduce"}, heard.put)
        assert heard.get(timeout=10.0)["trouble"] == "no all-reduce was prepared here"


@pytest.mark.parametrize(
    "hello",
    [
        {"kind": "join", "protocol": PROTOCOL},
        {"kind": "doctor", "protocol": PROTOCOL, "facts": {}},
        {"kind": "doctor", "protocol": 0},
    ],
)
def test_who_is_no_doctor_is_sent_away_and_the_others_meet(url: str, tmp_path: Path, hello: dict[str, Any]) -> None:
    doctors = Doctors(url, tmp_path / "secret", None)
    doctors.start(GOOD)
    channel = visit(url, tmp_path / "secret")
    channel.send({"facts": to_json(GOOD), "fields": FIELDS, "address": "127.0.0.1", "port": 9, **hello})
    with pytest.raises(ChannelClosed):
        channel.receive(10.0)
    channel.close()
    doctors.start(GOOD)
    doctors.wait()
    assert sorted(doctors.ends) == [(0, False), (0, True)]  # type: ignore[type-var]
    assert any("is not a doctor of this version" in line for line in doctors.told)
    assert doctors.examined[0].lost == {}


def test_a_head_that_is_no_doctor_is_told_from_one(url: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    key = derive_key(load_secret(secret), "control")
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    doctors = Doctors(url, secret, None)
    with Listener(host, int(port), key=key, secret_file=secret) as launcher:
        doctors.start(GOOD)
        with launcher.accept(10.0) as channel:
            assert channel.receive(10.0)["kind"] == "doctor"
            channel.send({"kind": "ending", "code": 1})
            doctors.wait()
    (error,) = doctors.ends
    assert "is not a doctor (it does not answer like a doctor)" in str(error)


def test_a_head_says_that_it_lives_while_others_are_awaited(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_LIFE_S", 0.0)
    doctors = Doctors(url, tmp_path / "secret", None, nodes=3)
    doctors.config = replace(doctors.config, join_timeout=1.0)
    doctors.start(GOOD)
    channel = visit(url, tmp_path / "secret")
    hello = {"kind": "doctor", "protocol": PROTOCOL, "facts": to_json(GOOD), "fields": FIELDS}
    channel.send({**hello, "address": "127.0.0.1", "port": 9})
    assert [channel.receive(10.0)["kind"] for _ in range(2)] == ["welcome", "alive"]
    channel.close()
    doctors.wait()


def test_a_head_that_is_silent_is_lost(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_QUIET_S", 0.1)
    secret = tmp_path / "secret"
    key = derive_key(load_secret(secret), "control")
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    doctors = Doctors(url, secret, None)
    with Listener(host, int(port), key=key, secret_file=secret) as launcher:
        doctors.start(GOOD)
        with launcher.accept(10.0) as channel:
            channel.receive(10.0)
            channel.send({"kind": "welcome"})
            channel.send({"kind": "alive"})
            doctors.wait()
    (error,) = doctors.ends
    assert "the head of the examination is lost, or is not a doctor (nothing from 127.0.0.1" in str(error)


def test_a_head_to_whom_nobody_comes_says_what_to_type_elsewhere(url: str, tmp_path: Path) -> None:
    doctors = Doctors(url, tmp_path / "secret", None)
    doctors.config = replace(doctors.config, join_timeout=1.0)
    doctors.start(GOOD)
    doctors.wait()
    (error,) = doctors.ends
    assert "1 of 2 nodes came in 1 s (--join-timeout): labA. Start on the others: LINE" in str(error)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--join", "tcp://a:1"], "expected --min-nodes N"),
        (["--join", "tcp://a:1", "--min-nodes", "1"], "--min-nodes 1: expected"),
        (["--min-nodes", "2"], "expected --join URL beside it"),
        (["--join", "tcp://a:1", "--min-nodes", "2", "--join-timeout", "0"], "--join-timeout 0"),
    ],
)
def test_a_wrong_command_line_is_answered(words: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        doctor.parse(words)
    assert part in str(caught.value)


def test_a_place_that_is_none_is_refused_before_anything_is_examined() -> None:
    said: list[str] = []
    with pytest.raises(ConfigError, match="expected tcp://HOST:PORT"):
        doctor.run(["--join", "labA", "--min-nodes", "2"], said.append)
    assert said == []
