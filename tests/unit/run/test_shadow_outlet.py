"""A rank's connection to a shadow, over loopback: strangers beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from hetseq.cluster.membership.step_commit import Lineage
from hetseq.errors import PeerLostError
from hetseq.run.shadow_links import ShadowLinks
from hetseq.run.shadow_outlet import Following, Outlet
from tests.support.trials import until

FIRST = Lineage(4, 44)


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


def read_until(links: ShadowLinks, has_come: Any, what: str, *, lineage: Lineage = FIRST) -> None:
    """Read until something has come; a rank that connects is told that the shadow has this state."""

    def look() -> bool:
        assert links.wait(lambda hello: {"lineage": [lineage.step, lineage.chain]}), "it reads no more"
        return bool(has_come())

    until(look, what, within_s=10.0)


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
