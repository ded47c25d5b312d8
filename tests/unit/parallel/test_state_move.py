"""Parts of the state move to new owners: bit for bit, only what a rank lacks, and its bytes are counted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from hetseq.comm.group import GlooGroup, Group, LocalGroup
from hetseq.parallel.owned_gradients import OwnedGradients
from hetseq.parallel.owned_state import OwnedState
from hetseq.parallel.owned_units import Division
from hetseq.parallel.state_move import place_of_state
from tests.support.nightly import nightly
from tests.support.ranks import run_ranks

Fractions = tuple[float, ...]
Groups = tuple[tuple[int, ...], ...]


class Net(nn.Module):
    """Two types, no elements, one element, and a memory order of its own."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = nn.Parameter(torch.randn(14, 5, generator=generator))
        self.wide = nn.Parameter(torch.randn(31, generator=generator, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(3, 0))
        self.single = nn.Parameter(torch.randn((), generator=generator))
        image = torch.randn(2, 3, 2, 4, generator=generator)
        self.image = nn.Parameter(image.contiguous(memory_format=torch.channels_last))
        self.last = nn.Parameter(torch.randn(40, generator=generator))


class Odd(torch.optim.Optimizer):
    """Whole tensors; its state has a shape of its own, a number, and a tensor without a dimension."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                state["times"] = state.get("times", 0) + 1
                state["rows"] = one.double().reshape(one.shape[0] if one.dim() else 1, -1).sum(1) + state["times"]
                state["scale"] = one.abs().mean()
                one.mul_(0.5)


def begun(kind: str) -> tuple[Net, torch.optim.Optimizer]:
    """A model and its optimizer after two steps, with the same bits on every rank."""
    model = Net()
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = Odd(parameters) if kind == "odd" else torch.optim.AdamW(parameters, lr=0.1)
    for _ in range(2):
        for one in parameters:
            one.grad = torch.sin(one.detach() * 3)
        optimizer.step()
        for one in parameters:
            one.grad = None
    return model, optimizer


@dataclass
class Facts:
    """What one rank saw: by cut, whether it has the right bits of all that it owns, and the bytes it got."""

    is_right: list[bool]
    received: list[int]  # of the optimizer's state
    messages: list[int]  # bytes of everything, as the transport counts them
    owned: list[dict[str, tuple[int, int]]]
    parts: list[tuple[int, int]]


def wander(
    group: Group,
    kind: str,
    cuts: list[Fractions],
    shares_memory: bool,
    groups: Sequence[Groups] = (),
    joiners: Sequence[int | None] = (),
) -> Facts:
    """Own by one cut after the other; an undivided copy gives the expected values.

    By cut: the `groups` of ranks, and the rank that has lost all it had, as one that joins; empty: none.
    """
    if shares_memory and isinstance(group, GlooGroup):
        group.meet_neighbours()
    (right, whole), (model, optimizer) = begun(kind), begun(kind)
    owned = OwnedState(optimizer, {one: name for name, one in model.named_parameters()})
    facts, reducer = Facts([], [], [], [], []), None
    for number, fractions in enumerate(cuts):
        if joiners and joiners[number] == group.rank:
            lose_all(model, optimizer, owned)
        owned.earlier = owned.held()
        before = reducer
        division = Division(fractions, kind != "odd", groups=groups[number] if groups else ())
        reducer = OwnedGradients(list(model.parameters()), group, division, bucket_bytes=160)
        if before is None:
            owned.adopt_(reducer, cut=number)
            # from here on of each parameter only what this rank owns is right
            spoil_copies(model, owned)
            facts.received.append(0)
        else:
            before.close()
            facts.received.append(owned.take_over_(reducer, group, cut=number)[group.rank])
        facts.messages.append(reducer.exchange.received_bytes)
        facts.is_right.append(is_right(owned, right, whole))
        facts.owned.append({name: (one.begin, one.end) for name, one in owned.fragments.items()})
        facts.parts.append(owned.part)
        reducer.gather()
        facts.is_right[-1] &= all(
            torch.equal(mine, other) for mine, other in zip(model.parameters(), right.parameters())
        )
        spoil_copies(model, owned)
        group.all_gather_rows(torch.zeros(1, dtype=torch.int64).numpy())
    assert reducer is not None
    reducer.close()
    return facts


@torch.no_grad()
def lose_all(model: Net, optimizer: torch.optim.Optimizer, owned: OwnedState) -> None:
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    optimizer.state.clear()
    owned.fragments = {}


@torch.no_grad()
def spoil_copies(model: Net, owned: OwnedState) -> None:
    kept = [(one.owned, one.owned.detach().clone()) for one in owned.fragments.values()]
    for parameter in model.parameters():
        parameter.fill_(torch.nan)
    for own, value in kept:
        own.copy_(value)


def is_right(owned: OwnedState, right: Net, whole: torch.optim.Optimizer) -> bool:
    """Whether parameters and state of all fragments have the bits of the copy."""
    for name, one in owned.fragments.items():
        parameter, state = right.get_parameter(name), owned.optimizer.state[one.owned]
        if not torch.equal(one.owned.detach(), cut_of(parameter.detach(), one.owned, one.begin, one.end)):
            return False
        if state.keys() != whole.state[parameter].keys():
            return False
        for key, value in whole.state[parameter].items():
            if not isinstance(value, torch.Tensor):
                if state[key] != value:
                    return False
                continue
            divided = value.dim() > 0 and value.shape == parameter.shape
            expected = cut_of(value, one.owned, one.begin, one.end) if divided else value
            if not torch.equal(state[key], expected) or state[key].dtype != value.dtype:
                return False
    return len(owned.optimizer.state) == len(owned.fragments)


def cut_of(value: torch.Tensor, like: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return value if value.shape == like.shape else value.reshape(-1)[begin:end]


def draw(chance: random.Random, world_size: int, count: int) -> list[Fractions]:
    """Cuts in a row; in each some ranks may own nothing."""
    cuts: list[Fractions] = []
    while len(cuts) < count:
        one = tuple(float(chance.choice([0, 0, 1, 2, 5, 9])) for _ in range(world_size))
        if any(one):
            cuts.append(one)
    return cuts


def bytes_that_move(ranks: list[Facts], cut: int, joiner: int | None = None) -> tuple[list[int], list[int]]:
    """By rank: the bytes of AdamW's moments that it owns by a cut and not by the one before, and with the parameters.

    A `joiner` has nothing of the one before. The moments of a parameter without dimensions are told with the counters,
    and not sent.
    """
    parameters = dict(Net().named_parameters())
    state, everything = [], []
    for rank, facts in enumerate(ranks):
        fresh = dict.fromkeys(parameters, 0)
        for name, (begin, end) in facts.owned[cut].items():
            low, high = (0, 0) if rank == joiner else facts.owned[cut - 1].get(name, (0, 0))
            elements = end - begin - max(0, min(end, high) - max(begin, low))
            fresh[name] = elements * parameters[name].element_size()
        state.append(sum(2 * fresh[name] for name, one in parameters.items() if one.dim()))
        everything.append(state[-1] + sum(fresh.values()))
    return state, everything


def check(ranks: list[Facts], cuts: list[Fractions]) -> None:
    total = sum(one.numel() for one in Net().parameters())
    for number in range(len(cuts)):
        assert [facts.is_right[number] for facts in ranks] == [True] * len(ranks), f"cut {cuts[number]}"
        assert [facts.parts[number][1] for facts in ranks] == [total] * len(ranks)
        assert sum(facts.parts[number][0] for facts in ranks) == total


@pytest.mark.parametrize("kind", ["adamw", "odd"])
def test_alone_nothing_moves_and_all_is_kept(kind: str) -> None:
    facts = wander(LocalGroup(), kind, [(1.0,), (3.0,), (1.0,)], False)
    check([facts], [(1.0,)] * 3)
    assert facts.received == facts.messages == [0, 0, 0]


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
@pytest.mark.parametrize("seed", [1, *nightly(2, 3, 4, 5)])
def test_random_cuts_of_three_ranks_have_the_same_bits(seed: int, shares_memory: bool) -> None:
    cuts = [*draw(random.Random(seed), 3, 6), (0.0, 0.0, 1.0), (1.0, 1.0, 0.0), (6.0, 2.0, 1.0), (6.0, 2.0, 1.0)]
    ranks = run_ranks(wander, 3, "adamw", cuts, shares_memory, timeout_s=60)
    check(ranks, cuts)
    for number in range(1, len(cuts)):
        told = [facts.received[number] for facts in ranks], [facts.messages[number] for facts in ranks]
        assert told == bytes_that_move(ranks, number)
    assert [facts.received[-1] for facts in ranks] == [0] * 3, "nothing has changed"
    assert sum(facts.received[-2] for facts in ranks) > 0


@pytest.mark.parametrize("seed", [1, *nightly(2, 3)])
def test_state_in_shapes_of_its_own_moves_with_its_parameter(seed: int) -> None:
    cuts = [*draw(random.Random(seed), 3, 5), (0.0, 0.0, 1.0), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0)]
    ranks = run_ranks(wander, 3, "odd", cuts, True, timeout_s=60)
    check(ranks, cuts)
    rows = sum((one.shape[0] if one.dim() else 1) * 8 for one in Net().parameters() if one.numel())
    assert [facts.received[-2] for facts in ranks] == [rows, 0, 0]
    assert [facts.messages[-1] for facts in ranks] == [0, 0, 0]


TWO_AND_TWO, THREE_AND_ONE = ((0, 1), (2, 3)), ((0, 2, 3), (1,))
CUTS: list[tuple[Fractions, Groups, int | None]] = [
    ((1.0, 2.0, 1.0, 1.0), TWO_AND_TWO, None),
    ((1.0, 2.0, 1.0, 1.0), TWO_AND_TWO, None),  # nothing has changed
    ((1.0, 2.0, 1.0, 1.0), TWO_AND_TWO, 1),  # it returns
    ((1.0, 0.0, 3.0, 1.0), TWO_AND_TWO, 3),
    ((2.0, 1.0, 1.0, 5.0), THREE_AND_ONE, 0),
    ((2.0, 1.0, 1.0, 5.0), (), 3),  # all ranks are one group
    ((1.0, 1.0, 0.0, 1.0), TWO_AND_TWO, None),
]


@pytest.mark.parametrize(
    ("kind", "shares_memory"), [("adamw", True), ("adamw", False), ("odd", True)], ids=["shared", "gloo", "whole"]
)
def test_with_groups_each_rank_is_sent_what_it_lacks_and_no_more(kind: str, shares_memory: bool) -> None:
    cuts, groups, joiners = zip(*CUTS)
    ranks = run_ranks(wander, 4, kind, list(cuts), shares_memory, groups, joiners, timeout_s=60)
    total = sum(one.numel() for one in Net().parameters())
    for number, (_, of_ranks, joiner) in enumerate(CUTS):
        assert [facts.is_right[number] for facts in ranks] == [True] * 4, f"cut {number}"
        assert sum(facts.parts[number][0] for facts in ranks) == total * max(1, len(of_ranks))
        if kind == "adamw" and number:
            told = [facts.received[number] for facts in ranks], [facts.messages[number] for facts in ranks]
            assert told == bytes_that_move(ranks, number, joiner), f"cut {number}"
    assert [facts.messages[1] for facts in ranks] == [0] * 4
    assert [bool(facts.messages[2]) for facts in ranks] == [False, True, False, False]


def join(group: Group, cuts: list[Fractions]) -> list[int]:
    """Ranks 0 and 1 own all; rank 2 comes without any state. The bytes of state that this rank gets by each cut."""
    model, optimizer = begun("adamw")
    right, whole = begun("adamw")
    if group.rank == 2:
        optimizer = torch.optim.AdamW(list(model.parameters()), lr=0.1)
    owned = OwnedState(optimizer, {one: name for name, one in model.named_parameters()})
    first = OwnedGradients(list(model.parameters()), group, Division((1.0, 1.0, 0.0)), bucket_bytes=160)
    owned.adopt_(first, cut=0)
    first.close()
    received = []
    for number, fractions in enumerate(cuts):
        owned.earlier = owned.held()
        reducer = OwnedGradients(list(model.parameters()), group, Division(fractions), bucket_bytes=160)
        received.append(owned.take_over_(reducer, group, cut=number)[group.rank])
        assert is_right(owned, right, whole)
        reducer.close()
    return received


def test_a_rank_that_joins_is_sent_no_more_than_it_will_own() -> None:
    first, second, third = run_ranks(join, 3, [(1.0, 1.0, 0.0), (0.0, 0.0, 1.0)], timeout_s=60)
    moments = 2 * sum(one.nbytes for one in Net().parameters() if one.dim())
    assert (first, second, third) == ([0, 0], [0, 0], [0, moments])


@pytest.mark.parametrize(
    ("key", "shape", "group", "moves"),
    [
        ("step", (), {}, False),
        ("step", (), {"fused": True}, True),
        ("step", (), {"capturable": True}, True),
        ("exp_avg", (), {}, True),
        ("exp_avg", (3,), {"fused": None}, True),
    ],
)
def test_only_a_counter_of_steps_may_be_elsewhere_than_its_parameter(
    key: str, shape: tuple[int, ...], group: dict[str, object], moves: bool
) -> None:
    """As torch loads a state, with `meta` in the place of a GPU."""
    parameter = torch.nn.Parameter(torch.ones(shape, device="meta"))
    assert place_of_state(key, torch.zeros(shape), parameter, group).is_meta == moves
    optimizer = torch.optim.SGD([parameter])
    optimizer.param_groups[0].update(group)
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {0: {key: torch.zeros(shape)}}, "param_groups": groups})
    assert optimizer.state[parameter][key].is_meta == moves
