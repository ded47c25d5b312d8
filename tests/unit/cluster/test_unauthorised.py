"""A thousand that want to take part in a run that trains, and may not: without the secret, or to train something else.

The hub and its listener are those of a head; its own launcher is played by the test.
"""

from __future__ import annotations

import json
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hetseq.cluster.membership.admission import Claim
from hetseq.cluster.membership.coordinator import StartPhase
from hetseq.cluster.membership.coordinator_server import RecordChannel
from hetseq.cluster.rendezvous.channel import MAC_BYTES, ChannelClosed, ChannelTimeout, connect
from hetseq.errors import EXIT_DISAGREE
from tests.support.strangers import Attempt, admitted, forged, hello, knock, overhear
from tests.support.trials import until
from tests.unit.cluster.test_hub_server import KEY, SECRET, Head, kind

FIELDS = {"--lr": "0.1"}
EACH = 250


def wish(rank: int | None, fields: dict[str, str]) -> dict[str, object]:
    """What a launcher with one worker says first: for rank zero of one, or (None) to join."""
    claim = Claim("lab", 100, 1, rank, None if rank is None else 1, 1 if rank is None else None).to_record()
    facts = {"address": "127.0.0.1", "door": 1, "build": "", "save_dir": "/run"}
    return {"kind": "claim", "claim": claim, "fields": fields, **facts}


@pytest.fixture
def head() -> Iterator[Head]:
    """A head whose only rank trains."""
    head = Head()
    head.own.send(wish(0, FIELDS))
    assert kind(head.own) == "own"
    head.own.send({"kind": "owned", "path": "/run", "mark": {}, "run_id": "a" * 16, "newest": None})
    assert kind(head.own) == "begin"
    head.own.send({"kind": "present", "rank": 0, "fields": {"parameters": "weight"}})
    assert kind(head.own) == "go"
    head.own.send({"kind": "ready"})
    until(lambda: head.hub.phase is StartPhase.RUNNING, "training")
    yield head
    head.server.close()
    head.own.close()


def answers(head: Head, fields: dict[str, str]) -> list[str]:
    """What somebody who holds the secret hears, until he is asked for something or the channel ends."""
    assert head.listener is not None
    deadline = time.monotonic() + 10
    heard: list[str] = []
    with connect("127.0.0.1", head.listener.port, KEY, deadline=deadline, secret_file=SECRET) as channel:
        channel.send(wish(None, fields))
        try:
            while not heard or heard[-1] == "tell":
                record = channel.receive(10.0)
                heard.append(f"ending {record['code']}" if record["kind"] == "ending" else record["kind"])
        except ChannelClosed:
            heard.append("closed")
    return heard


def heard_by(channel: RecordChannel) -> list[str]:
    """The kinds of records that have come to a launcher."""
    kinds = []
    with suppress(ChannelTimeout):
        while True:
            kinds.append(str(channel.receive(0.05)["kind"]))
    return kinds


@pytest.mark.figure("unauthorised joins")
def test_of_a_thousand_nobody_joins(head: Head, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    assert head.listener is not None
    old, record = overhear(KEY, tmp_path), json.dumps(wish(None, FIELDS)).encode()
    claim = struct.pack("!I", len(record)) + record + bytes(MAC_BYTES)
    crowd = []
    for _ in range(EACH):
        first = hello()
        crowd += [
            Attempt("no secret", claim),
            Attempt("wrong secret", first, forged(first, b"client", b"x" * 32)),
            Attempt("replayed proof", old[0], lambda _: old[1] + claim),
        ]
    knock("127.0.0.1", head.listener.port, crowd)
    refused = head.listener.refused
    until(lambda: refused.total() == 3 * EACH, f"{3 * EACH} refusals")
    others = Counter(answers(head, {"--lr": "0.2"})[-1] for _ in range(EACH))
    assert sum(attempt.is_in for attempt in crowd) == 3 * EACH
    let_in = len(admitted(crowd)) + others.total() - others[f"ending {EXIT_DISAGREE}"]
    record_property("unauthorised joins", f"{let_in} of {len(crowd) + others.total():,}")
    assert let_in == 0, (admitted(crowd), others)
    assert others.total() == EACH
    assert head.hub.phase is StartPhase.RUNNING
    assert heard_by(head.own) == ["begun"]  # the rank that trains was asked for nothing
    assert answers(head, FIELDS)[-1] == "see"  # the twin: who has secret and contract is asked for its directory
