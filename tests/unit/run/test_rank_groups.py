"""Groups of ranks that each hold all of the state: who is in one, what `--shard-groups auto` chooses, and how long."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hetseq.balance.memory_plan import USABLE, ModelMemory
from hetseq.comm.group import LocalGroup, Rows
from hetseq.config.sections import DistributedConfig
from hetseq.parallel.owned_state import OwnedState
from hetseq.run import owners, rank_room
from hetseq.run.rank_groups import chosen_rule, ranks_in_groups
from hetseq.training.precision import PRECISIONS
from tests.support.owned import set_free_memory

#: 25 numbers of one byte: 100 bytes of parameters, moments and gradients
MODEL = ModelMemory(25, 0, 0, 1, 0, 0, 2, 1, layers=4)
MEMORY = rank_room.StateMemory(MODEL, 0, has_layers=True)


def rooms_on(hosts: str, capacity: int = 0) -> list[rank_room.RankRoom]:
    return [rank_room.RankRoom(-1, 0.0, False, ord(host), False, capacity, None, 0) for host in hosts]


def groups(
    rule: str | Sequence[int], hosts: str, room: Sequence[int], slots: Sequence[int] = (), own: Any = None
) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks on these hosts, a letter each."""
    return ranks_in_groups(rule, rooms_on(hosts), room, own, MEMORY, slots or range(len(hosts)))


def test_groups_are_nodes_or_ranks_by_number_and_each_has_room_for_everything() -> None:
    assert groups("all", "aab", (100, 100, 100)) == ()
    assert groups("node", "abab", (50, 60, 50, 60)) == ((0, 2), (1, 3))
    assert groups("node", "aaa", (50, 60, 50)) == ()
    assert groups((2, 1), "aaa", (50, 50, 100)) == ((0, 1), (2,))
    assert groups((2, 1), "aa", (50, 100), slots=(0, 2)) == ()  # rank 0 alone has no room for all
    assert groups((2, 1), "aa", (100, 100), slots=(0, 2)) == ((0,), (1,))
    assert groups((2, 1), "aaa", (100, 100, 100), slots=(0, 2, 3)) == ((0,), (1, 2))
    assert groups((1, 1, 1), "aaa", (100, 20, 100)) == ((0, 1), (2,))
    assert groups((2, 1), "aaa", (1, 1, 1), own=(1, 1, 0)) == ()  # the second owns nothing
    assert groups((2, 1), "aaa", (1, 1, 1), own=(1, 0, 2)) == ((0, 1), (2,))


def test_a_single_number_is_the_size_of_every_group() -> None:
    assert groups((2,), "aaaa", (50,) * 4) == ((0, 1), (2, 3))
    assert groups((2,), "aaaa", (50,) * 4, slots=(0, 1, 4, 5)) == ((0, 1), (2, 3))
    assert groups((2,), "aaa", (50, 50, 40), slots=(0, 1, 2)) == ()  # the last one lacks a rank, and room
    assert groups((4,), "aaaa", (50,) * 4) == ()


def chosen(hosts: str, room: Sequence[int], own: Any = None, memory: rank_room.StateMemory = MEMORY) -> tuple[str, str]:
    return chosen_rule(rooms_on(hosts, 10_000), room, own, memory)


def test_a_group_for_each_node_needs_several_nodes_with_several_ranks_and_twice_the_room() -> None:
    assert chosen("aaaa", (200,) * 4) == ("all", "all ranks are on one node")
    assert chosen("abcd", (200,) * 4) == ("all", "each node has one rank")
    assert chosen("aabb", (100, 100, 100, 99)) == (
        "all",
        "the node of rank 2 has room for 199 bytes, less than twice the 100 bytes of the state, and what forward keeps"
        " is not known yet",
    )
    assert chosen("aabb", (100,) * 4, own=(1, 1, 0, 0)) == ("all", "the node of rank 2 owns nothing by --own")
    rule, why = chosen("abab", (100,) * 4)
    assert rule == "node"
    assert why.startswith("every node has room for twice the state, and the transfers of a step take 0.")


def part_told(why: str) -> float:
    return float(why.partition(" of the time")[0].rpartition(" ")[2])


def test_the_part_of_the_time_is_that_of_the_bytes_on_the_links() -> None:
    """Units of a byte at the speed between nodes; within one they take a tenth. P = 25 numbers, two ranks a node."""
    state = rank_room.StateMemory(MODEL, 0, has_layers=False)
    rule, why = chosen("aabb", (10_000,) * 4, memory=state)
    # together: a half of the parameters and of the gradients from the other node. By node: as much from the other rank
    # of the node, and 2 (2 - 1) / 2 of the half that a rank owns
    assert (rule, part_told(why)) == ("node", pytest.approx((0.5 * 0.1 + 0.5 * 0.1 + 0.5) / (0.5 + 0.5), abs=0.005))
    # three ranks on one node and one on the other: 3 sends 3/4 of the gradients and gives 1/4 to three, so 3/4 twice;
    # by node the two thirds of a node travel within, and a rank that owns everything has 2 (2 - 1) / 2 of all
    rule, why = chosen("aaab", (10_000,) * 4, memory=state)
    assert (rule, part_told(why)) == ("node", pytest.approx((2 * (2 / 3) * 0.1 + 1) / 1.5, abs=0.005))
    # many nodes of one rank beside one of two: nearly everything twice in both, and a little within the node
    rule, why = chosen("aabcde", (10_000,) * 6, memory=state)
    assert (rule, part_told(why)) == ("all", pytest.approx((2 * 0.5 * 0.1 + 2 * 4 / 5) / (2 * 5 / 6), abs=0.05))
    assert why.startswith("with a group for each node the transfers of a step would take 1 of the time")


class Four(LocalGroup):
    """Rank 0 of four ranks, two on each of two hosts; alone."""

    world_size = 4

    def all_gather_rows(self, row: Rows) -> Rows:
        rows = np.stack([row] * 4)
        if row.shape == (20,):  # of `rooms_of_ranks`, the host first
            rows[2:, 0] += 1
        return rows


PARAMETERS, STATE_BYTES = 6400, 12 * 6400


def divided(
    monkeypatch: pytest.MonkeyPatch, room: int, before: OwnedState | None = None, words: str = "auto"
) -> tuple[tuple[tuple[int, ...], ...], OwnedState]:
    """The groups of four ranks if so many bytes of the memory of a host are free, and what rank 0 owns."""
    model = torch.nn.Linear(PARAMETERS, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters()) if before is None else before.optimizer
    if before is not None:
        model.weight = next(iter(before.names))  # type: ignore[assignment]
    material: Any = SimpleNamespace(model=model, layers={}, fill=None, divided=None, precision=PRECISIONS["fp32"])
    config = DistributedConfig(shard_model="state", shard_groups=words)
    set_free_memory(monkeypatch, room)
    reducer, owned = owners.make_reducer(
        material, optimizer, Four(), config, slots=range(4),
        before=None if before is None else owners.OwnersOfBefore(before), is_first=before is None,
    )  # fmt: skip
    assert owned is not None
    if before is not None:
        owned.earlier = {}
    reducer.close()
    return reducer.division.groups, owned  # type: ignore[attr-defined]


def host_with(state: float) -> int:
    """The free memory of a host whose two ranks have room for so many states beside their parameters and a gradient."""
    return int((state * STATE_BYTES + 2 * 4 * PARAMETERS) / USABLE) + 4


def test_auto_says_in_one_line_what_it_chose_and_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for state, expected in ((2.0, ((0, 1), (2, 3))), (1.9, ())):
            assert divided(monkeypatch, host_with(state))[0] == expected
    told = [record.getMessage() for record in caplog.records if "--shard-groups auto" in record.getMessage()]
    assert len(told) == 2
    assert told[0].startswith("--shard-groups auto: one group for each node: every node has room for twice the state")
    assert told[1].startswith("--shard-groups auto: one group of all ranks: the node of rank 0 has room for 14")


def test_what_auto_chose_stays_the_rule_while_the_groups_can_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    by_node, owned = divided(monkeypatch, host_with(2.0))
    assert (by_node, owned.rule) == (((0, 1), (2, 3)), "node")
    again, owned = divided(monkeypatch, host_with(1.2), owned)
    assert (again, owned.rule) == (by_node, "node")  # no longer twice
    short, owned = divided(monkeypatch, host_with(0.3), owned)
    assert (short, owned.rule) == ((), "node")
    assert divided(monkeypatch, host_with(1.2), owned)[0] == by_node
    together, owned = divided(monkeypatch, host_with(1.2))
    assert (together, owned.rule) == ((), "all")
    assert divided(monkeypatch, host_with(3.0), owned)[0] == ()


def test_what_a_rank_holds_already_is_room_for_what_it_will_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    _, owned = divided(monkeypatch, host_with(1.0), words="node")
    (own,) = (fragment.owned for fragment in owned.fragments.values())
    own.grad = torch.ones_like(own)
    owned.optimizer.step()
    moments = 2 * 4 * own.numel()  # of this rank, and by `Four` of the other one of each host
    left = host_with(1.0) - 2 * moments
    assert divided(monkeypatch, left, owned, "node")[0] == ((0, 1), (2, 3))
    owned.optimizer.state.clear()
    assert divided(monkeypatch, left, owned, "node")[0] == ()
