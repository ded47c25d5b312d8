"""Coordinator of the doctors of several nodes: they meet, and the head leads the common examination.

Runs the rendezvous and sends the requests; `node_agent` does the work of a node, and `cluster_findings` judges the
results. It starts no ranks of a run.

The one idea: the head treats itself as one of the nodes. A request goes to several nodes at once, and each answer has a
deadline. A node that misses it, or leaves, gets no further requests and becomes a finding.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol

from hetseq.cluster.membership.compatibility import node_fields
from hetseq.cluster.rendezvous.channel import Channel, ChannelClosed, ChannelError, ChannelTimeout
from hetseq.cluster.rendezvous.meet import Meeting, OtherNodes, meet
from hetseq.cluster.rendezvous.sockets import ask_when_idle
from hetseq.commands.doctor.all_reduce_client import READY_S
from hetseq.commands.doctor.cluster_findings import Examination
from hetseq.commands.doctor.facts import Facts, from_json, to_json
from hetseq.commands.doctor.network_results import AllReduce, Trouble, Way, why_not
from hetseq.commands.doctor.node_agent import MARK_S, Helper
from hetseq.config.sections import Config, DistributedConfig
from hetseq.errors import RendezvousError

PROTOCOL = 2
#: the fields of a run's contract that matter here: a doctor has no options of a run
_FIELDS = ("protocol", "hetseq", "torch", "source of hetseq")
_ANSWER_S = 2 * MARK_S
_TURN_S, _WELCOME_S = 0.5, 30.0
_LIFE_S, _QUIET_S = 5.0, 60.0  # interval of the head's heartbeats; a head that is silent for longer is lost
_SILENT_S = 15.0  # during an all-reduce a doctor sends a heartbeat every two seconds
_ALL_REDUCE_S = 300.0
_MOST_NODES = 256
_TELL_EVERY_S = 10.0

Tell = Callable[[str], None]
Record = dict[str, Any]


def fields() -> dict[str, str]:
    """The facts in which all nodes must be equal."""
    return {name: value for name, value in node_fields(Config()).items() if name in _FIELDS}


def examine_together(
    config: DistributedConfig,
    facts: Facts,
    *,
    nodes: int,
    directory: Path | None,
    interface: str | None,
    command: str,
    tell: Tell,
    judge: Callable[[Examination], int],
) -> tuple[int, bool]:
    """The exit code of the common examination of `nodes` nodes, and whether this node is the head; every node calls it.

    `judge` is called only on the head, prints, and returns the code that all nodes end with. Raises RendezvousError or
    a subclass if the others are not found within --join-timeout, or the head is lost.
    """
    with ExitStack() as closing:
        meeting = meet(
            config, pause=time.sleep, tell=tell, others=OtherNodes(command), interface=interface, name="doctor"
        )
        closing.callback(meeting.close)
        helper = Helper(meeting.address, meeting.key, directory, facts.rank_device)
        closing.callback(helper.close)
        hello = {
            "kind": "doctor", "protocol": PROTOCOL, "facts": to_json(facts), "fields": fields(),
            "address": helper.door.address, "port": helper.door.port,
        }  # fmt: skip
        if meeting.channel is not None:
            return _follow(meeting.channel, helper, hello), False
        head = _Head(meeting, helper, hello, tell)
        closing.callback(head.close)
        head.gather(nodes, timeout_s=config.join_timeout, command=command)
        code = judge(head.examine(with_directory=directory is not None))
        head.end(code)
        return code, True


def _follow(channel: Channel, helper: Helper, hello: Record) -> int:
    """Handle the head's requests until it sends the exit code."""
    try:
        ask_when_idle(channel.fileno())
        channel.send(hello)
        if channel.receive(_WELCOME_S).get("kind") != "welcome":
            raise ChannelClosed("it does not answer like a doctor")
        while True:
            request = channel.receive(_QUIET_S)
            if request.get("kind") == "end":
                return int(request["code"])
            if request.get("kind") != "alive":
                helper.take(request, channel.send)
    except (ChannelError, KeyError) as error:
        raise RendezvousError(
            f"the head of the examination is lost, or is not a doctor ({error}): run the same hetseq doctor command on"
            " all nodes again, and do not start hetseq train at this address meanwhile"
        ) from error


class _Node(Protocol):
    """A node as the head sees it."""

    def start(self, request: Record) -> None: ...
    def finish(self, timeout_s: float) -> Record: ...


class _Here:
    """The head's own node: a thread does its work, in parallel with the other nodes."""

    def __init__(self, helper: Helper) -> None:
        self._helper = helper
        self._answers: queue.SimpleQueue[Record] = queue.SimpleQueue()

    def start(self, request: Record) -> None:
        threading.Thread(target=self._helper.take, args=(request, self._answers.put), daemon=True).start()

    def finish(self, timeout_s: float) -> Record:
        try:
            return self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise ChannelTimeout(f"no answer within {timeout_s:.0f} s") from None


class _There:
    """Another node."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def start(self, request: Record) -> None:
        self.channel.send(request)

    def finish(self, timeout_s: float) -> Record:
        return self.channel.receive(timeout_s)


class _Head:
    """Leads the examination."""

    def __init__(self, meeting: Meeting, helper: Helper, hello: Record, tell: Tell) -> None:
        self._meeting, self._tell = meeting, tell
        self._nodes: list[_Node] = [_Here(helper)]
        self._hellos = [hello]
        self._lost: dict[int, str] = {}
        self._life_at = time.monotonic()

    def gather(self, nodes: int, *, timeout_s: float, command: str) -> None:
        """Wait until `nodes` nodes have come; raises RendezvousError after `timeout_s`."""
        begin = told = time.monotonic()
        while len(self._nodes) < nodes:
            waited_s = time.monotonic() - begin
            here = ", ".join(name_of(self._hellos))
            if waited_s > timeout_s:
                raise RendezvousError(
                    f"{len(self._nodes)} of {nodes} nodes came in {timeout_s:g} s (--join-timeout): {here}. Start on"
                    f" the others: {command}"
                )
            if (len(self._nodes) == 1 and told == begin) or time.monotonic() - told > _TELL_EVERY_S:
                told = time.monotonic()
                self._tell(
                    f"waiting for {nodes - len(self._nodes)} of {nodes} nodes; here: {here}. Type there: {command}"
                )
            self._welcome()

    def _welcome(self) -> None:
        assert self._meeting.listener is not None
        self._show_life()
        try:
            channel = self._meeting.listener.accept(_TURN_S)
        except ChannelTimeout:
            return
        try:
            hello = channel.receive(_TURN_S * 10)
            if hello.get("kind") != "doctor" or hello.get("protocol") != PROTOCOL or len(self._nodes) >= _MOST_NODES:
                raise ValueError("not a doctor")
            from_json(hello["facts"])
            channel.send({"kind": "welcome"})
            ask_when_idle(channel.fileno())
        except (ChannelError, KeyError, TypeError, ValueError) as error:
            channel.close()
            self._tell(f"{channel.host} connected but is not a doctor of this version ({error}): it was rejected")
            return
        self._nodes.append(_There(channel))
        self._hellos.append(hello)

    def examine(self, *, with_directory: bool) -> Examination:
        """Run all rounds and return their results."""
        session, count = secrets.token_hex(8), len(self._nodes)
        self._ask({number: {"kind": "begin", "session": session, "number": number} for number in range(count)})
        ways: dict[tuple[int, int], Way] = {}
        for offset in range(1, count):
            pairs = {number: (number + offset) % count for number in range(count)}
            requests = {
                source: {"kind": "stream", "target": target, **self._door_of(target)}
                for source, target in pairs.items()
                if target not in self._lost
            }
            for source, (answer, _) in self._ask(requests).items():
                ways[source, pairs[source]] = _way(answer)
        delays_s = self._try_directory() if with_directory else {}
        facts = tuple(from_json(hello["facts"]) for hello in self._hellos)
        reason = why_not(facts, ways, self._lost)
        return Examination(
            names=tuple(name_of(self._hellos)),
            facts=facts,
            fields=tuple(hello["fields"] for hello in self._hellos),
            ways=dict(sorted(ways.items())),
            delays_s=delays_s,
            lost=self._lost,
            addresses=tuple(str(hello["address"]) for hello in self._hellos),
            all_reduce=AllReduce(reason=reason) if reason else self._all_reduce(session),
        )

    def end(self, code: int) -> None:
        """Send the exit code to all nodes."""
        for node in self._others():
            with suppress(ChannelError):  # the node is gone
                node.channel.send({"kind": "end", "code": code})

    def close(self) -> None:
        """Close the channels after their last messages have arrived."""
        for node in self._others():
            node.channel.close(linger_s=0.5)

    def _others(self) -> Iterable[_There]:
        return [node for node in self._nodes if isinstance(node, _There)]

    def _door_of(self, number: int) -> Record:
        return {name: self._hellos[number][name] for name in ("address", "port")}

    def _try_directory(self) -> dict[tuple[int, int], float | None]:
        """Each node writes a file once; returns the seconds until each other node sees it, None if never."""
        delays_s: dict[tuple[int, int], float | None] = {}
        for source in range(len(self._nodes)):
            mark = {"mark": source, "content": secrets.token_hex(16)}
            others = [number for number in range(len(self._nodes)) if number not in (source, *self._lost)]
            if source in self._lost:
                continue
            self._start({number: {"kind": "find mark", **mark} for number in others})
            written = self._ask({source: {"kind": "leave mark", **mark}})
            begin = time.monotonic()
            for number, (answer, when) in self._finish(others).items():
                delays_s[source, number] = max(0.0, when - begin) if answer.get("is_seen") else None
            if written:
                self._ask({source: {"kind": "remove mark", **mark}})
        return delays_s

    def _all_reduce(self, session: str) -> AllReduce:
        """An all-reduce over the remaining nodes as ranks of a run: their processes meet through the head."""
        nodes = [number for number in range(len(self._nodes)) if number not in self._lost]
        prepared = self._ask({number: {"kind": "prepare all-reduce"} for number in nodes}, READY_S + _SILENT_S)
        troubles = {
            number: Trouble(answer["trouble"]) for number, (answer, _) in prepared.items() if "trouble" in answer
        }
        if troubles or len(prepared) < len(nodes):
            return AllReduce(tuple(nodes), troubles=troubles)
        sources = [str(self._hellos[number]["address"]) for number in nodes]
        part = {"kind": "all-reduce", "name": session, "world_size": len(nodes), "sources": sources}
        self._start({number: {**part, "rank": rank} for rank, number in enumerate(nodes)})
        answers: dict[int, Record] = {}
        listening = [threading.Thread(target=self._carry, args=(number, nodes, answers)) for number in nodes]
        for thread in listening:
            thread.start()
        self._await(listening, _ALL_REDUCE_S)
        return AllReduce.of(tuple(nodes), dict(answers))

    def _carry(self, number: int, nodes: Sequence[int], answers: dict[int, Record]) -> None:
        """Relay a node's entries to the ranks' store until it answers; if it is lost, tell the others."""
        others = [other for other in nodes if other != number]
        while True:
            record = self._try(number, lambda node: node.finish(_SILENT_S))
            if record is not None and record.get("kind") == "alive":
                continue
            if record is not None and record.get("kind") == "set":
                self._send({other: {**record, "kind": "value"} for other in others})
                continue
            if record is not None:
                answers[number] = record
            if record is None or "trouble" in record:
                self._send({other: {"kind": "gone"} for other in others if other not in answers})
            return

    def _ask(self, requests: Mapping[int, Record], timeout_s: float = _ANSWER_S) -> dict[int, tuple[Record, float]]:
        """The answers, and when they came; nodes without an answer count as lost from now on."""
        self._start(requests)
        return self._finish(list(requests), timeout_s)

    def _show_life(self) -> None:
        """Send heartbeats to the nodes, and in a shared directory; called about twice a second."""
        if self._meeting.attempt is not None:
            self._meeting.attempt.show_life()
        if time.monotonic() > self._life_at + _LIFE_S:
            self._life_at = time.monotonic()
            self._send({number: {"kind": "alive"} for number in range(1, len(self._nodes))})

    def _await(self, threads: Sequence[threading.Thread], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            self._show_life()
            for thread in threads:
                thread.join(_TURN_S / len(threads))

    def _start(self, requests: Mapping[int, Record]) -> None:
        self._show_life()
        self._send(requests)

    def _send(self, requests: Mapping[int, Record]) -> None:
        for number, request in requests.items():
            if number not in self._lost:
                self._try(number, lambda node, request=request: node.start(request))  # type: ignore[misc]

    def _finish(self, numbers: Sequence[int], timeout_s: float = _ANSWER_S) -> dict[int, tuple[Record, float]]:
        found: dict[int, tuple[Record, float]] = {}

        def take(number: int) -> None:
            answer = self._try(number, lambda node: node.finish(timeout_s))
            if answer is not None:
                found[number] = answer, time.monotonic()

        threads = [threading.Thread(target=take, args=(number,)) for number in numbers if number not in self._lost]
        for thread in threads:
            thread.start()
        self._await(threads, 2 * timeout_s)
        return found

    def _try(self, number: int, act: Callable[[_Node], Any]) -> Any:
        try:
            return act(self._nodes[number])
        except ChannelError as error:
            self._lost[number] = str(error)
            return None


def _way(answer: Record) -> Way:
    if "trouble" in answer:
        return Way(trouble=str(answer["trouble"]))
    return Way(float(answer["bytes_per_s"]), float(answer["latency_s"]))


def name_of(hellos: Sequence[Record]) -> list[str]:
    """A name for each node: its host, with a number if several doctors run on one host."""
    names: list[str] = []
    for hello in hellos:
        host = str(hello["facts"]["network"]["host"])
        taken = sum(name.partition("#")[0] == host for name in names)
        names.append(f"{host}#{taken + 1}" if taken else host)
    return names
