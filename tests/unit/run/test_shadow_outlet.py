"""A rank's connection to a shadow, over loopback: what a connection that was lost may have cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from hetseq.cluster.membership.step_commit import Lineage
from hetseq.errors import PeerLostError
from hetseq.run.shadow_links import ShadowLinks
from hetseq.run.shadow_outlet import Following, Message, Outlet
from tests.support.trials import until

FIRST, NEXT = Lineage(4, 44), Lineage(5, 55)


class Store:
    """The store of one generation, in one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str, timeout_s: float) -> bytes:
        if key not in self.values:
            raise PeerLostError("the generation is over")
        return self.values[key]

    def check(self) -> None:
        pass


FOLLOWING = Following(("2.0",), Store(), "run/1", b"k" * 32, "127.0.0.1")


@pytest.fixture
def links() -> Iterator[ShadowLinks]:
    with closing(ShadowLinks(FOLLOWING, "2.0", generation=1, world_size=1)) as links:
        yield links


@pytest.fixture
def outlet(links: ShadowLinks) -> Iterator[Outlet]:
    with closing(Outlet(0, "2.0", FOLLOWING, {"kind": "hello"}, rank=0, lineage=FIRST)) as outlet:
        yield outlet


def read_until(links: ShadowLinks, has_come: Any, what: str, *, lineage: Lineage = FIRST) -> None:
    """Read until something has come; a rank that connects is told that the shadow has this state."""

    def look() -> bool:
        assert links.wait(lambda hello: {"lineage": [lineage.step, lineage.chain]}), "it reads no more"
        return bool(has_come())

    until(look, what, within_s=10.0)


def test_a_shadow_whose_connection_was_lost_may_lack_what_followed_its_last_step(
    links: ShadowLinks, outlet: Outlet
) -> None:
    read_until(links, outlet.can_take_state, "the rank is connected")
    assert not outlet.lacks_state
    outlet.append(Message({"kind": "step", "step": 5}, before=FIRST), NEXT)
    read_until(links, lambda: links.readers[0].is_whole, "the step")
    outlet.append(Message({"kind": "after", "step": 5}, [memoryview(bytes(64 << 20))]), NEXT)
    links.readers[0].clear()
    until(lambda: outlet.sent_steps == 1 and not outlet._waiting, "it is being sent")
    assert outlet.has_unsent_step()
    links._forget(0)
    until(lambda: not outlet._is_connected, "the rank notices it")
    read_until(links, outlet.can_take_state, "the rank is connected again", lineage=NEXT)
    assert outlet.lacks_state, "the shadow has the step, and not what followed from it"


def test_at_the_end_rank_zero_is_heard_to_the_end_although_another_rank_is_gone() -> None:
    """What follows from a step comes from rank zero alone."""
    links = ShadowLinks(FOLLOWING, "2.0", generation=1, world_size=2)
    first, other = (Outlet(0, "2.0", FOLLOWING, {"kind": "hello"}, rank=rank, lineage=FIRST) for rank in (0, 1))
    with closing(links), closing(first), closing(other):
        read_until(links, lambda: first.can_take_state() and other.can_take_state(), "both are connected")
        other.close()
        read_until(links, lambda: 1 not in links.readers, "one is gone")
        links.sever()
        first.append(Message({"kind": "after", "step": 4}), FIRST)
        read_until(links, lambda: links.readers[0].is_whole, "what followed")
        links.readers[0].clear()
        first.append(Message({"kind": "step", "step": 5}), NEXT)
        read_until(links, lambda: links.readers[0].is_whole, "a step of which the other portion is missing")
        assert not links.wait(lambda hello: {})


def test_the_longest_work_so_far_decides_how_long_a_round_waits_for_a_shadow(links: ShadowLinks) -> None:
    least_s = links.deadline_s
    links.allow_for(50.0)
    links.allow_for(1.0)
    assert links.deadline_s == least_s + 100.0


def test_strangers_at_the_door_keep_no_rank_out(links: ShadowLinks) -> None:
    """Silent ones have 5 s each, which the shadow does not wait."""
    import socket

    strangers = [socket.create_connection(("127.0.0.1", links._door.port)) for _ in range(70)]
    with closing(Outlet(0, "2.0", FOLLOWING, {"kind": "hello"}, rank=0, lineage=FIRST)) as outlet:
        read_until(links, outlet.can_take_state, "the rank is connected")
    assert len(links._guests) <= 65
    for stranger in strangers:
        stranger.close()
