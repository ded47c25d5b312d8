"""The hub's thread: records reach the hub in order, its answers reach everybody, and nobody is left waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from hetseq.cluster.membership.admission import Claim
from hetseq.cluster.membership.coordinator import Coordinator
from hetseq.cluster.membership.coordinator_server import HubServer, LocalChannel, RecordChannel, local_pair
from hetseq.cluster.rendezvous.channel import Channel, ChannelClosed, ChannelTimeout, Listener, connect

KEY = bytes(32)
SECRET = Path("secret")


class Head:
    """A hub that serves, with the launcher of its own node."""

    def __init__(self, *, listens: bool = True) -> None:
        self.hub = Coordinator(join_timeout_s=60.0, paste="", now_s=time.monotonic())
        self.listener = Listener("127.0.0.1", 0, key=KEY, secret_file=SECRET) if listens else None
        self.beats = 0
        hubs_end, self.own = local_pair()
        self.server = HubServer(self.hub, hubs_end, listener=self.listener)
        self.server.beat = self.beat
        self.server.start()

    def beat(self) -> None:
        self.beats += 1

    def follower(self) -> Channel:
        assert self.listener is not None
        return connect("127.0.0.1", self.listener.port, KEY, deadline=time.monotonic() + 5, secret_file=SECRET)


@pytest.fixture
def head() -> Iterator[Head]:
    head = Head()
    yield head
    if head.server._is_open:
        head.server.close()
    head.own.close()


def claim(channel: RecordChannel, rank: int, world_size: int) -> None:
    record = Claim("lab", 100 + rank, 1, rank, world_size, None).to_record()
    facts: dict[str, Any] = {"address": "127.0.0.1", "door": 1, "fields": {}, "build": "", "save_dir": "/run"}
    channel.send({"kind": "claim", "claim": record, **facts})


def kind(channel: RecordChannel) -> str:
    while True:
        record = channel.receive(5.0)
        if record["kind"] != "tell":
            return str(record["kind"])


def test_the_node_of_the_head_and_one_from_elsewhere_are_members_alike(head: Head) -> None:
    with head.follower() as follower:
        claim(follower, 1, 2)
        claim(head.own, 0, 2)
        assert kind(follower) == kind(head.own) == "reach"


def test_who_waits_is_told_whom_for(head: Head) -> None:
    claim(head.own, 0, 2)
    assert "rank 1 is not claimed yet" in head.own.receive(5.0)["text"]


def test_a_member_whose_connection_ends_is_gone_and_the_others_hear_of_it(head: Head) -> None:
    follower = head.follower()
    claim(head.own, 0, 2)
    claim(follower, 1, 2)
    for channel in (follower, head.own):
        assert kind(channel) == "reach"
    follower.close()
    assert kind(head.own) == "ending"


def test_a_stranger_is_no_member(head: Head) -> None:
    assert head.listener is not None
    with pytest.raises(Exception, match="different secrets"):
        connect("127.0.0.1", head.listener.port, b"x" * 32, deadline=time.monotonic() + 5, secret_file=SECRET)
    claim(head.own, 0, 1)
    assert kind(head.own) == "own"


def test_last_words_are_read_after_the_server_has_closed(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetseq.cluster.membership.coordinator._LINGER_S", 0.1)
    monkeypatch.setattr("hetseq.cluster.membership.coordinator_server._LAST_WORDS_S", 0.1)
    with head.follower() as follower:
        claim(head.own, 0, 2)
        claim(follower, 0, 2)  # claimed twice
        time_s = time.monotonic()
        while head.hub.ending is None:
            assert time.monotonic() < time_s + 5
            time.sleep(0.005)
        head.server.close()
        for channel in (follower, head.own):
            assert kind(channel) == "ending"
            with pytest.raises(ChannelClosed):
                channel.receive(1.0)


def test_the_heart_beats_while_nobody_says_anything(head: Head) -> None:
    begin = time.monotonic()
    while head.beats < 2:
        assert time.monotonic() < begin + 5
        time.sleep(0.01)


def test_a_fault_of_the_hub_itself_ends_the_run_and_is_told(head: Head, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    head.hub.handle = broken  # type: ignore[method-assign]
    claim(head.own, 0, 1)
    record = head.own.receive(5.0)
    assert (record["kind"], record["code"]) == ("ending", 1)
    head.server.close()
    assert "ZeroDivisionError" in caplog.text


def test_a_local_channel_says_what_a_channel_says() -> None:
    one, other = local_pair()
    one.send({"kind": "x"})
    assert other.receive(1.0) == {"kind": "x"}
    with pytest.raises(ChannelTimeout):
        other.receive(0.01)
    one.send({"kind": "last"})
    one.close()
    assert other.receive(1.0) == {"kind": "last"}
    with pytest.raises(ChannelClosed):
        other.receive(1.0)
    with pytest.raises(ChannelClosed):
        other.send({})
    assert isinstance(one, LocalChannel)
    other.close()


def test_two_ends_that_tell_each_other_much_at_once_do_not_wait_for_each_other() -> None:
    """The commits of a large world, to a launcher that has just as much to say: either could have read nothing yet."""
    one, other = local_pair()
    large = {"rows": "x" * 1_000_000}
    for _ in range(3):
        one.send(large)
        other.send(large)
    for _ in range(3):
        assert one.receive(1.0) == other.receive(1.0) == large
    for end in (one, other):
        with pytest.raises(ChannelTimeout):
            end.receive(0.0)
        assert not wait([end], 0.0), "nothing is left to be heard"
    one.close()
    other.close()


def test_an_end_that_was_closed_is_heard_of_again_and_again() -> None:
    one, other = local_pair()
    one.close()
    for _ in range(2):
        assert wait([other], 0.0)
        with pytest.raises(ChannelClosed):
            other.receive(0.0)
    other.close()
    other.close()
