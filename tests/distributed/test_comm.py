"""Groups: bytes from one rank to all, groups within a group, and a rank that is not who it says it is."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from hetseq.comm import group as comm
from hetseq.comm import socket_filter as wall
from hetseq.comm.group import GlooGroup, Group
from hetseq.errors import PeerLostError, RendezvousError
from tests.support.ranks import RankRaised, run_ranks

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no socket filters")
ODD = [
    torch.tensor([-0.0, float("nan"), 1.5], dtype=torch.float32),
    torch.tensor([[1, 2], [3, -(2**62)]]),
    torch.tensor([True, False]),
    torch.tensor(7.25, dtype=torch.bfloat16),
    torch.arange(6, dtype=torch.float64).view(2, 3).t(),
    torch.empty(0, 3),
]


def receive(group: Group, source: int) -> list[bytes]:
    received = []
    for tensor in ODD:
        mine = tensor.clone() if group.rank == source else torch.zeros_like(tensor)
        group.broadcast(mine, source=source)
        received.append(mine.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return received


@pytest.mark.parametrize(("world", "source"), [(1, 0), (2, 1), (3, 0), (3, 2)])
def test_everybody_gets_the_bytes_of_the_source(world: int, source: int) -> None:
    expected = [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in ODD]
    assert run_ranks(receive, world, source) == [expected] * world


def gather_in_parts(group: Group, parts: list[list[int]]) -> tuple[int, list[list[int]]]:
    mine = next(part for part in parts if group.rank in part)
    inner = group.subgroup(mine, "parts")
    rows = inner.all_gather_rows(np.array([group.rank], np.int64))
    group.all_gather_rows(np.zeros(1, np.int64))  # the outer one works on
    inner.close()
    return inner.rank, rows.tolist()


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([[0, 1], [2]], [(0, [[0], [1]]), (1, [[0], [1]]), (0, [[2]])]),
        ([[0, 2], [1]], [(0, [[0], [2]]), (0, [[1]]), (1, [[0], [2]])]),
        ([[0, 1, 2]], [(rank, [[0], [1], [2]]) for rank in range(3)]),
        ([[0], [1], [2]], [(0, [[rank]]) for rank in range(3)]),
    ],
)
def test_a_part_of_a_group_is_a_group_of_its_own(parts: list[list[int]], expected: list[object]) -> None:
    assert run_ranks(gather_in_parts, 3, parts) == expected


def connect_again(group: GlooGroup, keys: list[bytes]) -> int:
    """A second group over the same store, in which each rank says that the key is its own."""
    inner = group.subgroup([*range(group.world_size)][::-1], "again") if not keys else None
    if inner is not None:
        return inner.rank
    meeting = comm.GroupMeeting(group._meeting.store, group._meeting.name + "/other", keys[group.rank])
    other = comm.connect(rank=group.rank, world_size=group.world_size, meeting=meeting, timeout_s=5)
    return int(other.all_gather_rows(np.array([1], np.int64)).sum())


def test_ranks_with_one_key_prove_themselves_to_each_other() -> None:
    assert run_ranks(connect_again, 3, []) == [2, 1, 0]
    assert run_ranks(connect_again, 3, [b"same"] * 3) == [3, 3, 3]


def test_a_rank_without_the_key_is_found_by_every_other_before_anything_is_sent_to_it() -> None:
    with pytest.raises(RankRaised) as failure:
        run_ranks(connect_again, 3, [b"same", b"same", b"another"])
    report = str(failure.value)
    assert report.count("the process that connected as rank 2 does not hold the key of this run") == 2
    assert "the process that connected as rank 0 does not hold the key of this run" in report


def close_amid_a_sum(group: GlooGroup, deadline_s: float) -> float:
    """The seconds that rank 0 needs to leave a sum in which the others, who live, never take part."""
    group.deadline_s = deadline_s
    seconds = 0.0
    if group.rank == 0:
        group.all_reduce_sum(torch.zeros(8))
        began = time.monotonic()
        group.close()
        seconds = time.monotonic() - began
        group._meeting.store.set("left", b"")
    group._meeting.store.get("left", 2 * deadline_s)
    return seconds


def test_who_closes_a_group_does_not_wait_for_what_its_transport_still_waits_for() -> None:
    assert max(run_ranks(close_amid_a_sum, 2, 20.0)) < 10.0, "not by the deadline of the sum"


def send_over_what_was_cut(group: GlooGroup, deadline_s: float) -> float:
    """The longest that rank 0 needs to see that the connections over which it sends have just been cut."""
    longest = 0.0
    for number in range(40):  # gloo forgets about one send in eight
        meeting = comm.GroupMeeting(group._meeting.store, f"{group._meeting.name}/cut-{number}", b"key")
        other = comm.connect(rank=group.rank, world_size=2, meeting=meeting, timeout_s=deadline_s)
        other.broadcast(torch.zeros(300), source=0)
        if group.rank == 0:
            time.sleep(0.02)  # the peer is ready to receive, and that is known here
            with mock.patch.object(wall, "_sockets", partial(iter, list(wall._sockets()))):  # found before: no delay
                other.sever()
        began = time.monotonic()
        with pytest.raises(PeerLostError):
            other.broadcast(torch.zeros(300), source=0)
        longest = max(longest, time.monotonic() - began)
        other.close()
        group.all_gather_rows(np.zeros(1, np.int64))
    return longest


def test_a_send_over_connections_that_were_just_cut_ends_at_once() -> None:
    assert max(run_ranks(send_over_what_was_cut, 2, 10.0)) < 5.0, "not by the deadline of the group"


def find_doors(group: GlooGroup) -> int:
    """How many doors the ranks of a second group know, if every free number had been a listener's before."""
    before = dict.fromkeys(range(1024), ("127.0.0.1", 1)) | wall.listening()
    with mock.patch.object(wall, "listening", listen := mock.Mock(wraps=wall.listening)):
        listen.side_effect = [before, mock.DEFAULT]
        meeting = comm.GroupMeeting(group._meeting.store, group._meeting.name + "/doors", b"key")
        other = comm.connect(rank=group.rank, world_size=group.world_size, meeting=meeting, timeout_s=5)
    return len(other._ports)


def test_a_door_is_found_under_a_number_that_another_one_has_given_back() -> None:
    assert run_ranks(find_doors, 2) == [2, 2]


class Crowded:
    """A store that lets strangers come to gloo's port, and say that they are ranks, before a peer knows of it."""

    def __init__(self, store: comm.Store, source: str) -> None:
        self._store, self._source = store, source
        self._others = wall.listening()
        self.strangers: list[socket.socket] = []

    def set(self, key: str, value: bytes) -> None:
        for descriptor, place in wall.listening().items():
            if descriptor not in self._others:
                self.strangers += [self._come(place, pair) for pair in range(2)]
        self._store.set(key, value)

    def check(self) -> None:
        pass

    def get(self, key: str, timeout_s: float) -> bytes:
        return self._store.get(key, timeout_s)

    def _come(self, place: tuple[str, int], pair: int) -> socket.socket:
        stranger = socket.socket()
        stranger.settimeout(0.05)
        stranger.bind((self._source, 0))
        with contextlib.suppress(TimeoutError):
            stranger.connect(place)
            stranger.sendall(pair.to_bytes(8, "little"))  # as gloo says which pair of ranks a connection is for
        return stranger


def connect_in_a_crowd(group: GlooGroup, sources: tuple[str, ...], source: str) -> tuple[str, int]:
    store = Crowded(group._meeting.store, source)
    meeting = comm.GroupMeeting(store, group._meeting.name + "/crowded", b"key", sources=sources)
    try:
        inner = comm.connect(rank=group.rank, world_size=2, meeting=meeting, timeout_s=0.5)
        said, total = "", int(inner.all_gather_rows(np.array([1], np.int64)).sum())
    except RendezvousError as error:
        said, total = str(error), 0
    finally:
        for stranger in store.strangers:
            stranger.close()
    group.all_gather_rows(np.zeros(1, np.int64))
    return said, total


@LINUX
def test_strangers_from_elsewhere_take_no_place_while_the_ranks_connect() -> None:
    assert run_ranks(connect_in_a_crowd, 2, ("127.0.0.1",), "127.0.0.2") == [("", 2)] * 2


@LINUX
def test_strangers_from_a_node_of_the_run_end_the_start_in_time_and_with_a_reason() -> None:
    for said, total in run_ranks(connect_in_a_crowd, 2, ("127.0.0.1", "127.0.0.2"), "127.0.0.2"):
        assert "waited up to 0.5 s for 2 ranks" in said
        assert total == 0


def knock_at_each_other(group: GlooGroup) -> bool:
    ports = group.all_gather_rows(np.array([min(port for _, port in wall.listening().values())], np.int64))
    with socket.socket() as knocking:
        knocking.settimeout(0.1)
        is_in = knocking.connect_ex(("127.0.0.1", int(ports[1 - group.rank, 0]))) == 0
    group.all_gather_rows(np.zeros(1, np.int64))
    return is_in


@LINUX
def test_once_all_ranks_are_there_nobody_connects_to_one_any_more() -> None:
    assert run_ranks(knock_at_each_other, 2) == [False, False]


def wait_for_nobody(group: GlooGroup) -> float:
    """A group that a peer never enters."""
    if group.rank == 1:
        group.all_gather_rows(np.zeros(1, np.int64))
        return 0.0
    meeting = comm.GroupMeeting(group._meeting.store, group._meeting.name + "/empty", b"key")
    began = time.monotonic()
    with pytest.raises(RendezvousError, match=r"rank 0 at 127\.0\.0\.1 waited up to 0\.5 s for 2 ranks"):
        comm.connect(rank=0, world_size=2, meeting=meeting, timeout_s=0.5)
    seconds = time.monotonic() - began
    group.all_gather_rows(np.zeros(1, np.int64))
    return seconds


def test_a_peer_that_never_comes_is_an_error_after_the_given_time() -> None:
    assert 0.4 < run_ranks(wait_for_nobody, 2)[0] < 5
