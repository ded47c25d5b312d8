"""Layouts with one group of ranks for each node: bytes, seconds and memory by hand, and against single messages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hetseq.balance.memory_plan import Candidate, Layout, Misfit, ModelMemory, RankMemory, candidates, choose, nodes_of
from hetseq.balance.shares import Cost
from hetseq.errors import ConfigError

GB = 10**9
FAR, NEAR = 1.25e9, 12.5e9
#: 4 GB of parameters and 4 GB of gradients, in pieces of 0.15 GB; the second has four layers and a root of 0.1 GB
BILLION = ModelMemory(1_000_000_000, 250_000_000, 37_500_000)
FIVE = ModelMemory(125_000_000, 300_000_000, layers=4)
TENTH = GB // 10


def rank(node: str, memory_gb: float = 80, samples_per_s: float = 4, **other: Any) -> RankMemory:
    cost = Cost(0.0, 1 / samples_per_s) if samples_per_s else Cost(0.0, 1.0, limit=0)
    plain = RankMemory(f"{memory_gb:g}G", cost, int(memory_gb * GB), FAR, node=node, node_bytes_per_s=NEAR)
    return replace(plain, **other)


def pair(ranks: Sequence[RankMemory], kind: str, model: ModelMemory, total: int) -> tuple[Candidate, Candidate]:
    """The layout of this kind with one group, and with one for each node."""
    together, by_node = candidates(ranks, model, total, kinds=(kind,))
    assert (together.groups, by_node.groups) == ((), nodes_of(ranks))
    return together, by_node


def both(ranks: Sequence[RankMemory], kind: str, model: ModelMemory, total: int) -> tuple[Layout, Layout]:
    together, by_node = pair(ranks, kind, model, total)
    assert isinstance(together, Layout), together
    assert isinstance(by_node, Layout), by_node
    return together, by_node


FOUR = [rank("a"), rank("a"), rank("b"), rank("b")]


def test_with_a_group_for_each_node_only_sums_travel_between_nodes() -> None:
    together, by_node = both(FOUR, "state", BILLION, 4)
    assert (together.fractions, by_node.fractions) == ((0.25,) * 4, (0.5,) * 4)
    assert by_node.groups == ((0, 1), (2, 3))
    # a half of the parameters from the other rank, and as much to it; as much of gradients; and 2 (2 - 1) / 2 of the
    # half of the gradients that it owns
    assert by_node.sent_bytes == by_node.received_bytes == (2 * GB + 2 * GB + 2 * GB,) * 4
    assert by_node.exchange_s == pytest.approx((2 + 2) * GB / NEAR + 2 * GB / FAR)
    # three quarters, of which two are on the other node
    assert together.sent_bytes == together.received_bytes == (3 * GB + 3 * GB,) * 4
    assert together.exchange_s == pytest.approx((2 + 2) * GB / FAR)
    # of 12 bytes for each parameter it owns a half in place of a quarter
    assert [a - b for a, b in zip(together.left_bytes, by_node.left_bytes)] == [3 * GB] * 4


def test_sums_across_groups_travel_once_a_step_however_many_rounds_there_are() -> None:
    _, one = both(FOUR, "all", FIVE, 4)
    in_two = [replace(other, cost=replace(other.cost, batch=1)) for other in FOUR]
    _, two = both(in_two, "all", FIVE, 8)
    assert (one.rounds, two.rounds) == (1, 2)
    # a half of five units and, for backward, of three; of five units of gradients; across groups a half of them
    of_a_round, across = 4 * TENTH + 5 * TENTH // 2, 5 * TENTH // 2
    assert one.sent_bytes == one.received_bytes == (of_a_round + across,) * 4
    assert two.sent_bytes == two.received_bytes == (2 * of_a_round + across,) * 4


def test_nothing_hides_the_sums_across_groups() -> None:
    slow = [replace(one, cost=Cost(0.0, 1000.0)) for one in FOUR]
    together, by_node = both(slow, "state", BILLION, 4)
    # parameters before forward; gradients go while backward computes
    assert together.step_s == pytest.approx(1000 + 2 * GB / FAR)
    assert by_node.step_s == pytest.approx(1000 + 2 * GB / NEAR + 2 * GB / FAR)
    assert choose((together, by_node)) is together


def test_without_a_link_of_their_own_ranks_of_a_node_use_the_one_that_they_have() -> None:
    plain = [replace(one, node_bytes_per_s=None) for one in FOUR]
    together, by_node = both(plain, "state", BILLION, 4)
    assert together.exchange_s == pytest.approx(6 * GB / FAR)
    assert by_node.exchange_s == pytest.approx(6 * GB / FAR)
    (without_nodes,) = candidates([replace(one, node="") for one in plain], BILLION, 4, kinds=("state",))
    assert without_nodes == together


def test_nodes_of_unequal_size_divide_everything_by_their_own_memory() -> None:
    ranks = [rank("a", 30), rank("b", 80), rank("a", 20, 0)]
    _, by_node = both(ranks, "state", replace(BILLION, activation_bytes_per_sample=0), 2)
    assert by_node.groups == ((0, 2), (1,))
    assert by_node.shares == (1, 1, 0)
    # of one micro-batch: the parameters, and of 0.15 GB three units that leave and two that come
    room = 0.92 * 30 * GB - 4 * GB - 5 * 0.15 * GB, 0.92 * 20 * GB - 4 * GB - 2 * 0.15 * GB
    first = room[0] / sum(room)
    assert by_node.fractions == pytest.approx((first, 1.0, 1 - first))
    # node b exchanges nothing within; its sums: 2 (2 - 1) / 2 of everything
    assert (by_node.sent_bytes[1], by_node.received_bytes[1]) == (4 * GB, 4 * GB)
    # rank 2 computes nothing: rank 0 gets its part of the parameters, and sends it its part of the gradients
    part = round((1 - first) * 4 * GB)
    assert by_node.sent_bytes[2] == pytest.approx(part + part, abs=2)
    assert by_node.received_bytes[0] == pytest.approx(part + first * 4 * GB, abs=2)


def test_the_layout_of_nodes_is_asked_for_only_where_it_is_another_one() -> None:
    def groups(*nodes: str) -> list[bool]:
        return [bool(one.groups) for one in candidates([rank(node) for node in nodes], FIVE, 4)]

    assert groups("a", "a", "b") == [False, False, True, False, True]
    assert groups("a", "b") == groups("a", "a") == groups("", "", "") == [False] * 3


def test_a_node_without_room_for_everything_is_told() -> None:
    _, misfit = pair([rank("a"), rank("a"), rank("b", 8), rank("b", 8)], "state", BILLION, 4)
    assert isinstance(misfit, Misfit)
    # 4 GB of parameters, a sample, and five units; the state takes 12 GB
    room = [int(0.92 * 8 * GB) - 4 * GB - 250_000_000 - 5 * 150_000_000] * 2
    assert misfit.missing_state_bytes == 12 * GB - sum(room)
    assert misfit.reason == (
        "each node needs 12 GB for optimizer state and gradient sums, and 1 of 2 have not as much room (8G 4.72 GB):"
        " divide them among all ranks with --shard-groups all"
    )
    assert misfit.name == "state --shard-groups node"
    alone, _ = found = pair([rank("a", 8), rank("a", 8), rank("b", 8)], "all", replace(BILLION, parameters=3 * GB), 4)
    with pytest.raises(ConfigError, match=r"^--shard-model all: parameters, optimizer state and gradient sums take"):
        choose(found)
    assert isinstance(alone, Misfit)


def test_on_slow_links_a_group_for_each_node_is_chosen() -> None:
    found = both([replace(one, link_bytes_per_s=FAR / 10) for one in FOUR], "all", FIVE, 16)
    assert choose(found) is found[1]
    assert found[1].name == "all --shard-groups node"


def messages(layout: Layout, nodes: Sequence[str]) -> tuple[list[float], list[float]]:
    """What ranks send and receive for one byte of the model, when parameters come; added up message by message."""
    sent, received = [0.0] * len(nodes), [0.0] * len(nodes)
    for group in layout.groups or (range(len(nodes)),):
        takers = [taker for taker in group if layout.shares[taker]]
        for owner in group:
            path = [owner, *(taker for taker in takers if taker != owner)]
            is_chain = layout.fractions[owner] > 0.5 and len(path) > 3
            steps = itertools.pairwise(path) if is_chain else ((owner, taker) for taker in path[1:])
            for sender, receiver in steps:
                sent[sender] += layout.fractions[owner]
                received[receiver] += layout.fractions[owner]
    return sent, received


def test_bytes_are_those_of_single_messages() -> None:
    """For the sums of gradients the same messages go the other way; their bytes are those of the parameters here."""
    draw, seen = random.Random(7), {"chain": 0, "groups": 0}
    for _ in range(200):
        nodes = [draw.choice("abc") for _ in range(draw.randint(2, 7))]
        ranks = [rank(node, draw.choice((60, 80, 400)), draw.choice((0, 4, 4)), is_stable=draw.random() < 0.2)
                 for node in nodes]  # fmt: skip
        ranks[0] = rank(nodes[0])
        for layout in candidates(ranks, BILLION, len(ranks), kinds=("state",)):
            assert isinstance(layout, Layout)
            sent, received = messages(layout, nodes)
            size, count = 4 * GB, len(layout.groups)
            across = [2 * (count - 1) / count * own if count else 0.0 for own in layout.fractions]
            has_chain = any(own > 0.5 for own in layout.fractions) and len(ranks) > 3
            seen["groups"] += count > 1
            seen["chain"] += has_chain
            assert sum(layout.sent_bytes) == pytest.approx(sum(layout.received_bytes), abs=len(ranks))
            if not has_chain:  # a sum that goes along a chain takes another path
                both_ways = [(a + b + c) * size for a, b, c in zip(sent, received, across)]
                assert layout.sent_bytes == pytest.approx(both_ways, abs=4)
                assert layout.received_bytes == pytest.approx(both_ways, abs=4)
            total = 2 * sum(sent) + sum(across)
            assert sum(layout.sent_bytes) == pytest.approx(total * size, abs=len(ranks))
    assert min(seen.values()) > 20


def test_a_chain_within_a_node_uses_the_link_of_the_node() -> None:
    ranks = [rank("a", 80, 0, is_stable=True), *(rank("a") for _ in range(3)), rank("b", 80, 0)]
    together, _ = both(ranks, "state", BILLION, 3)
    assert together.fractions == (1, 0, 0, 0, 0)
    # 4 GB from rank to rank, and 4 GB of gradients back
    assert together.exchange_s == pytest.approx(2 * 4 * GB / NEAR)
