"""Slices of memory between owners and the ranks that compute: exact, each byte once, whoever takes part."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hetseq.balance import chains
from hetseq.balance.chains import Link, chained_owner, link_of_gather, link_of_sum
from hetseq.comm.group import GlooGroup, Group
from hetseq.comm.slices import SliceExchange, TaggedSlices
from hetseq.errors import PeerLostError
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
#: elements, bounds, the ranks that compute
CASES = [
    (1000, (0, 600, 900, 1000), (0, 1, 2)),
    (1000, (0, 100, 200, 1000), (0, 1)),  # the last rank owns most and computes nothing
    (70_001, (0, 70_000, 70_000, 70_001), (1, 2)),  # rank 1 owns nothing, rank 0 computes nothing
    (5, (0, 0, 5, 5), (0,)),
    (300_000, (0, 0, 0, 300_000), (0, 1, 2)),
]


def exchange_of(group: Group, kind: str) -> SliceExchange:
    if kind == "shared":
        assert isinstance(group, GlooGroup)
        group.meet_neighbours()
        exchange = group.slices(CPU)
        assert type(exchange).__name__ == "SharedSlices"
        return exchange
    assert isinstance(group, GlooGroup)
    return TaggedSlices(group._transport, rank=group.rank, world_size=group.world_size, deadline_s=lambda: 20.0)


def gradients(rank: int, case: int, elements: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(100 * case + rank))


def transfer(group: Group, kind: str, rounds: int) -> dict[str, Any]:
    """A rank's life: all cases, begun together and awaited in order, several times over the same memory."""
    exchange, facts = exchange_of(group, kind), {"right": True, "sent": 0, "received": 0}
    for _ in range(rounds):
        pending: list[Any] = []
        for number, (elements, bounds, active) in enumerate(CASES):
            lo, hi = bounds[group.rank], bounds[group.rank + 1]
            flat = None
            if group.rank in active:
                flat = exchange.memory(elements, torch.float32, CPU)
                flat.copy_(gradients(group.rank, number, elements))
            total = torch.full((hi - lo,), torch.nan)
            pending.append((exchange.sum_to_owners(flat, total, bounds=bounds, givers=active), flat, total))
        for (transfer, flat, total), (number, (elements, bounds, active)) in zip(pending, enumerate(CASES)):
            transfer.wait()
            assert transfer.is_over()
            wanted = torch.zeros(elements)
            for rank in active:
                wanted += gradients(rank, number, elements)
            facts["right"] &= torch.equal(total, wanted[bounds[group.rank] : bounds[group.rank + 1]])
            if flat is not None:
                exchange.release(flat)
            whole = exchange.memory(elements, torch.float32, CPU).fill_(torch.nan)
            whole[bounds[group.rank] : bounds[group.rank + 1]] = total
            gathered = exchange.gather(whole, bounds=bounds, takers=active)
            gathered.wait()
            facts["right"] &= torch.equal(whole, wanted) or group.rank not in active
            exchange.release(whole)
            lo, hi = bounds[group.rank], bounds[group.rank + 1]
            own = exchange.memory(hi - lo, torch.float32, CPU)  # in memory of its own
            own.copy_(total)
            taken = torch.full((elements,), torch.nan) if group.rank in active else None
            exchange.gather(taken, bounds=bounds, takers=active, own=own).wait()
            facts["right"] &= taken is None or torch.equal(taken, wanted)
            exchange.release(own)
    exchange.close()
    return {**facts, "sent": exchange.sent_bytes // rounds, "received": exchange.received_bytes // rounds}


@pytest.mark.parametrize("kind", ["shared", "tagged"])
def test_sums_reach_their_owners_and_slices_those_that_compute(kind: str) -> None:
    ranks = run_ranks(transfer, 3, kind, 3, timeout_s=40)
    assert all(facts["right"] for facts in ranks)
    for rank, facts in enumerate(ranks):
        sent = received = 0
        for elements, bounds, active in CASES:
            own, others = bounds[rank + 1] - bounds[rank], len(set(active) - {rank})
            out = (elements - own if rank in active else 0) + 2 * own * others
            sent += 4 * out  # gradients to the other owners, twice the own parameters to all others that compute
            received += 4 * (own * others + 2 * (elements - own if rank in active else 0))
        assert (facts["sent"], facts["received"]) == (sent, received)


#: the rank that owns most of a memory; the ranks that compute
CHAINS = [(0, (0, 1, 2, 3)), (3, (0, 1, 2, 3)), (2, (0, 1, 3)), (4, (0, 1, 2, 3)), (1, (0, 2, 3, 4))]
_LARGE = 600_001  # elements: three pieces


def pass_on(group: Group, rounds: int) -> dict[str, Any]:
    """A rank's life: sums to one owner of nearly everything and back, all begun together, several times over."""
    exchange, facts = exchange_of(group, "tagged"), {"right": True, "sent": 0, "received": 0}
    for _ in range(rounds):
        pending: list[Any] = []
        for number, (owner, active) in enumerate(CHAINS):
            bounds = [7 * rank + _LARGE * (rank > owner) for rank in range(group.world_size + 1)]
            wanted = torch.zeros(bounds[-1])
            for rank in (*(rank for rank in active if rank != owner), *(rank for rank in active if rank == owner)):
                wanted += gradients(rank, number, bounds[-1])
            lo, hi = bounds[group.rank], bounds[group.rank + 1]
            flat = gradients(group.rank, number, bounds[-1]) if group.rank in active else None
            total, whole = torch.full((hi - lo,), torch.nan), torch.full((bounds[-1],), torch.nan)
            sum_ = exchange.sum_to_owners(flat, total, bounds=bounds, givers=active)
            pending.append((sum_, total, wanted, bounds, active, owner, flat, whole))
        for sum_, total, wanted, bounds, active, owner, _, whole in pending:
            sum_.wait()
            lo, hi = bounds[group.rank], bounds[group.rank + 1]
            near = torch.allclose(total, wanted[lo:hi], rtol=0, atol=1e-5)  # others add small slices in rank order
            facts["right"] &= torch.equal(total, wanted[lo:hi]) if group.rank == owner else near
            gathered = exchange.gather(
                whole if group.rank in active else None, bounds=bounds, takers=active, own=wanted[lo:hi].clone()
            )
            gathered.wait()
            facts["right"] &= group.rank not in active or torch.equal(whole, wanted)
    exchange.close()
    return {**facts, "sent": exchange.sent_bytes // rounds, "received": exchange.received_bytes // rounds}


def test_a_large_slice_takes_a_chain_and_no_link_carries_it_twice() -> None:
    ranks = run_ranks(pass_on, 5, 3, timeout_s=40)
    assert all(facts["right"] for facts in ranks)
    for rank, facts in enumerate(ranks):
        for way, ends in (("sent", lambda order: order[:-1]), ("received", lambda order: order[1:])):
            large = 0
            for owner, active in CHAINS:
                others = [one for one in active if one != owner]
                large += (rank in ends([*others, owner])) + (rank in ends([owner, *others]))
            assert abs(facts[way] - 4 * _LARGE * large) < 4 * 7 * 100  # beside slices of 7 elements


def test_a_chain_is_for_more_than_half_and_more_than_two_others() -> None:
    assert chained_owner((0, 4, 8, 8, 8), (0, 1, 2, 3)) is None
    assert chained_owner((0, 5, 8, 8, 8), (0, 1, 2, 3)) == 0
    assert chained_owner((0, 5, 8, 8, 8), (0, 1, 2)) is None
    assert chained_owner((0, 5, 8, 8, 8), (1, 2, 3)) == 0
    assert link_of_sum((0, 1, 8, 8, 8), (0, 1, 2, 3), 2) == Link(owner=1, before=0, after=3)
    assert link_of_gather((0, 1, 8, 8, 8), (0, 2, 3), 1) == Link(owner=1, before=None, after=0)
    assert link_of_gather((0, 1, 8, 8, 8), (0, 2, 3), 3) == Link(owner=1, before=2, after=None)
    assert link_of_sum((0, 1, 8, 8, 8, 8), (0, 1, 2, 3), 4) is None  # it gives nothing and owns nothing


def wait_in_another_order(group: Group, kind: str) -> bool:
    """One rank waits for the first of two transfers, the other one for the second; each takes part in both."""
    exchange, bounds = exchange_of(group, kind), (0, 4, 8)
    flat = exchange.memory(8, torch.float32, CPU).fill_(group.rank + 1.0)
    own = exchange.memory(4, torch.float32, CPU).fill_(group.rank + 5.0)
    total, whole = torch.empty(4), torch.empty(8)
    begun = [
        exchange.sum_to_owners(flat, total, bounds=bounds, givers=(0, 1)),
        exchange.gather(whole, bounds=bounds, takers=(0, 1), own=own),
    ]
    for transfer in begun if group.rank else begun[::-1]:
        transfer.wait()
    exchange.close()
    return total.tolist() == [3.0] * 4 and whole.tolist() == [5.0] * 4 + [6.0] * 4


@pytest.mark.parametrize("kind", ["shared", "tagged"])
def test_ranks_may_wait_for_transfers_in_different_orders(kind: str) -> None:
    assert run_ranks(wait_in_another_order, 2, kind, timeout_s=40, group_timeout_s=5) == [True, True]


def die_in_a_transfer(group: Group, kind: str, victim: int) -> str:
    exchange = exchange_of(group, kind)
    bounds: Sequence[int] = (0, 4, 8, 12)
    flat, total = exchange.memory(12, torch.float32, CPU).fill_(1.0), torch.zeros(4)
    exchange.sum_to_owners(flat, total, bounds=bounds, givers=(0, 1, 2)).wait()
    if group.rank == victim:
        os._exit(9)
    try:
        exchange.gather(flat, bounds=bounds, takers=(0, 1, 2)).wait()
        exchange.sum_to_owners(flat, total, bounds=bounds, givers=(0, 1, 2)).wait()
    except PeerLostError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize("kind", ["shared", "tagged"])
def test_a_rank_that_dies_is_a_lost_peer(kind: str) -> None:
    ranks = run_ranks(die_in_a_transfer, 3, kind, 1, timeout_s=40, group_timeout_s=20, dies=[1])
    assert all(str(ranks[rank]).startswith("lost a peer") for rank in (0, 2)), ranks


def die_in_a_chain(group: Group, victim: int) -> str:
    exchange = exchange_of(group, "tagged")
    bounds, active = (*(0 for _ in range(group.world_size)), _LARGE), tuple(range(group.world_size - 1))
    total = torch.zeros(bounds[group.rank + 1] - bounds[group.rank])
    flat = torch.ones(_LARGE) if group.rank in active else None
    exchange.sum_to_owners(flat, total, bounds=bounds, givers=active).wait()
    if group.rank == victim:
        os._exit(9)
    try:
        exchange.sum_to_owners(flat, total, bounds=bounds, givers=active).wait()
        exchange.gather(flat, bounds=bounds, takers=active, own=total).wait()
    except PeerLostError as error:
        group.sever()  # as a rank does that has noticed
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize("victim", [0, 2, 4])
def test_a_rank_of_a_chain_that_dies_is_a_lost_peer(victim: int) -> None:
    """The first one, one in the middle, and the owner."""
    ranks = run_ranks(die_in_a_chain, 5, victim, timeout_s=40, group_timeout_s=20, dies=[victim])
    assert all(str(ranks[rank]).startswith("lost a peer") for rank in range(5) if rank != victim), ranks


def sum_sizes(group: Group, sizes: list[int]) -> int:
    """The pieces of memory for what an owner receives, after sums of several sizes one after the other."""
    chains.FEWEST = 99
    exchange = exchange_of(group, "tagged")
    assert isinstance(exchange, TaggedSlices)
    everyone = tuple(range(group.world_size))
    for number, elements in enumerate(sizes):
        total = torch.empty(elements if group.rank == 0 else 0)
        bounds, wanted = (0, *(elements for _ in everyone)), torch.zeros(elements)
        for rank in everyone:
            wanted += gradients(rank, number, elements)
        flat = gradients(group.rank, number, elements)
        exchange.sum_to_owners(flat, total, bounds=bounds, givers=everyone).wait()
        assert torch.equal(total, wanted[: total.numel()])
    exchange.close()
    return len(exchange._free)


@pytest.mark.parametrize(("world_size", "pieces"), [(2, 1), (3, 2), (6, 2)])
def test_an_owner_receives_slices_of_several_sizes_and_many_ranks_in_the_same_memory(
    world_size: int, pieces: int
) -> None:
    found = run_ranks(sum_sizes, world_size, [100, 97, 111, 103, 99, 106], timeout_s=40)
    assert found == [pieces, *[0] * (world_size - 1)]


def wait_after_a_cut(group: Group) -> tuple[float, str]:
    """A transfer whose connections are cut, and whose send does not end before its deadline, as gloo's may."""
    assert isinstance(group, GlooGroup)
    exchange = group.slices(CPU)
    assert isinstance(exchange, TaggedSlices)
    over = threading.Event()
    exchange._await = lambda works: over.wait(20.0)  # type: ignore[method-assign,assignment,return-value]
    pending = exchange.swap({1 - group.rank: torch.zeros(4)}, {1 - group.rank: torch.zeros(4)})
    began_s = time.monotonic()
    threading.Timer(0.2, group.sever).start()
    try:
        pending.wait()
    except PeerLostError as error:
        exchange.close()
        return time.monotonic() - began_s, str(error)
    finally:
        over.set()
    return 0.0, ""


def test_no_rank_waits_for_a_send_whose_connection_is_cut() -> None:
    for seconds, told in run_ranks(wait_after_a_cut, 2):
        assert "its connections were cut" in told
        assert seconds < 5.0


def wait_out_of_order(group: Group, kind: str) -> bool:
    """Rank 1 waits for the second transfer alone, while rank 0 begins it once the first one is over."""
    exchange, bounds = exchange_of(group, kind), (0, 2, 4)
    exchange_deadline, group.deadline_s = group.deadline_s, 5.0  # a hang is an error
    begun = []
    for number in range(2):
        flat = exchange.memory(4, torch.float32, CPU).fill_(10 * number + group.rank)
        begun.append((flat, exchange.gather(flat, bounds=bounds, takers=(0, 1))))
        if group.rank == 0:
            begun[-1][1].wait()
    for _flat, gather in reversed(begun):
        gather.wait()
    group.deadline_s = exchange_deadline
    is_right = all(flat.tolist() == [10 * number] * 2 + [10 * number + 1] * 2 for number, (flat, _) in enumerate(begun))
    exchange.close()
    return is_right


@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_a_rank_that_waits_for_a_later_transfer_holds_up_no_rank_that_waits_for_an_earlier_one(kind: str) -> None:
    assert run_ranks(wait_out_of_order, 2, kind) == [True, True]
