"""Who owns how much, from the memory of the ranks and the options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hetseq.balance.memory_plan import USABLE, ModelMemory
from hetseq.comm.group import LocalGroup, Rows
from hetseq.config.sections import DistributedConfig
from hetseq.errors import ConfigError
from hetseq.parallel.owned_gradients import OwnedGradients
from hetseq.parallel.owned_parameters import OwnedParameters
from hetseq.parallel.owned_state import refuse_shared_memory
from hetseq.parallel.owned_units import that_stay
from hetseq.run import owners, rank_room
from hetseq.training.precision import PRECISIONS
from tests.support.owned import set_free_memory

PARAMETERS = 1000
STATE_BYTES = 12 * PARAMETERS  # of AdamW: two moments and the gradient
PLENTY = 1 << 30


@pytest.fixture(autouse=True)
def _memory_of_this_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "keep_freed_memory", lambda: None)


def material_of(
    model: torch.nn.Module, layers: Mapping[str, torch.nn.Module] | None = None, precision: str = "fp32"
) -> Any:
    return SimpleNamespace(model=model, layers=layers or {}, fill=None, divided=None, precision=PRECISIONS[precision])


def owns_all(monkeypatch: pytest.MonkeyPatch, *, shard_model: str, own_memory: int, room: int = PLENTY) -> bool:
    """Whether the state of a rank alone has an owner; False if it is a replica. Raises ConfigError."""
    set_free_memory(monkeypatch, room)
    model = torch.nn.Linear(PARAMETERS, 1, bias=False)
    config = DistributedConfig(shard_model=shard_model, own_memory=f"{own_memory}")
    reducer, owned = owners.make_reducer(
        material_of(model), torch.optim.AdamW(model.parameters()), LocalGroup(), config, slots=(0,), before=None,
        is_first=True,
    )  # fmt: skip
    try:
        assert (owned is None) == (not isinstance(reducer, OwnedGradients))
        return owned is not None
    finally:
        reducer.close()


def test_all_of_own_memory_is_for_state(monkeypatch: pytest.MonkeyPatch) -> None:
    assert owns_all(monkeypatch, shard_model="state", own_memory=STATE_BYTES)
    with pytest.raises(ConfigError, match=r"12 kB, and there is room for 12 kB \(rank 0 12 kB\): 1 bytes are missing"):
        owns_all(monkeypatch, shard_model="state", own_memory=STATE_BYTES - 1)


def test_own_memory_does_not_add_to_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="there is room for"):
        owns_all(monkeypatch, shard_model="state", own_memory=PLENTY, room=STATE_BYTES)


def test_own_memory_limits_the_state_of_replicas_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not owns_all(monkeypatch, shard_model="auto", own_memory=STATE_BYTES)
    with pytest.raises(ConfigError, match="12 kB, and there is room for 12 kB"):
        owns_all(monkeypatch, shard_model="auto", own_memory=STATE_BYTES - 1)


def test_auto_takes_the_first_layout_that_every_rank_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models, in memory, two ranks of a host need, each: none 4, state 3.5, all about 2.4 with 24 equal layers."""
    size = 24 * 4 * 16 * 16

    def chosen(room: float, *, has_layers: bool = True) -> type[object]:
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(24)))
        layers = dict(model.named_children()) if has_layers else {}
        config = DistributedConfig(shard_model="auto")
        # beside the model, which is there already
        set_free_memory(monkeypatch, int(2 * (room / USABLE - 1) * size))
        reducer, owned = owners.make_reducer(
            material_of(model, layers), torch.optim.AdamW(model.parameters()), RankOf(), config, slots=(0, 1),
            before=None, is_first=True,
        )  # fmt: skip
        reducer.close()
        assert (owned is not None and owned.has_layers) == isinstance(reducer, OwnedParameters)
        set_free_memory(monkeypatch, PLENTY)
        later, _ = owners.make_reducer(
            material_of(model, layers), torch.optim.AdamW(model.parameters()), RankOf(), config, slots=(0, 1),
            before=owners.OwnersOfBefore(owned), is_first=False,
        )  # fmt: skip
        later.close()
        assert type(later) is type(reducer)  # as long as the run lasts
        return type(reducer)

    assert chosen(4.2) not in (OwnedGradients, OwnedParameters)
    assert chosen(3.7) is OwnedGradients
    assert chosen(3) is OwnedParameters
    for has_layers, told in ((True, "all: parameters, optimizer state"), (False, "state: rank 0 lacks")):
        with pytest.raises(ConfigError, match=f"--shard-model {told}"):
            chosen(2, has_layers=has_layers)


class BesideSmall(LocalGroup):
    """Rank 0 of two, the other of which is on a host with so many bytes; alone."""

    world_size = 2

    def __init__(self, small_bytes: int) -> None:
        super().__init__()
        self.small_bytes = small_bytes

    def all_gather_rows(self, row: Rows) -> Rows:
        rows = np.stack([row, row])
        if row.shape == (len(row_of().numbers()),):
            rows[1] = rank_room.Told.of(row.tolist())._replace(host=5, of_machine=self.small_bytes).numbers()
        return rows


@pytest.mark.parametrize(("balance", "kind"), [("auto", "all"), ("1,1", "all"), ("1,0", "state")])
def test_auto_leaves_each_rank_that_computes_room_for_its_samples(
    balance: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(24)))
    size = 24 * 4 * 16 * 16
    set_free_memory(monkeypatch, 100 * size)
    config = DistributedConfig(shard_model="auto", balance=balance)
    # of models, beside the one that is there: parameters fit, and a gradient does not
    reducer, owned = owners.make_reducer(
        material_of(model, dict(model.named_children())), torch.optim.AdamW(model.parameters()),
        BesideSmall(size // 2), config, slots=(0, 1), before=None, is_first=True,
    )  # fmt: skip
    reducer.close()
    assert owned is not None
    assert ("all" if owned.has_layers else "state") == kind


def test_auto_counts_the_copies_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(precision: str, ranks: LocalGroup, count: int) -> str:
        """For ranks that each have room for a replica in fp32, and for a quarter of the parameters beside it."""
        model = torch.nn.Linear(PARAMETERS, 1, bias=False)
        set_free_memory(monkeypatch, count * (int((16 + 1) * PARAMETERS / USABLE) - 4 * PARAMETERS))
        reducer, owned = owners.make_reducer(
            material_of(model, precision=precision), torch.optim.AdamW(model.parameters()), ranks,
            DistributedConfig(shard_model="auto"), slots=range(count), before=None, is_first=True,
        )  # fmt: skip
        reducer.close()
        return "none" if owned is None else "state"

    assert (chosen("fp32", RankOf(), 2), chosen("bf16", RankOf(), 2)) == ("none", "state")
    # where nothing else fits it is tried
    assert chosen("bf16", LocalGroup(), 1) == "none"


def row_of(
    *, is_on_gpu: bool = False, of_machine: int = 1000, in_groups: Mapping[int, int] | None = None, most: int = -1,
    on_host: int = -1,
) -> rank_room.Told:  # fmt: skip
    """A rank with a model of 10 bytes, and 100 free on its GPU if it has one."""
    on_gpu, left = 100 if is_on_gpu else -1, in_groups or {}
    return rank_room.Told(
        7, is_on_gpu, of_machine, tuple(left), tuple(left.values()), on_gpu, 10, most, on_host, -1, 0, 0, -1, 0
    )


def test_ranks_of_a_host_divide_what_limits_their_memory() -> None:
    rows = [row_of(in_groups={1: 400}), row_of(in_groups={2: 240}), row_of(in_groups={2: 240}), row_of(is_on_gpu=True)]
    assert [rank_room.room_of(row, rows).capacity for row in rows] == [333 + 10, 120 + 10, 120 + 10, 100 + 10]
    wide = [row._replace(of_machine=9000) for row in rows[:3]]
    rooms = [rank_room.room_of(row, wide) for row in wide]
    assert [one.capacity for one in rooms] == [400 + 10, 120 + 10, 120 + 10]
    assert rank_room.room_by_weight(rooms, (400, 120, 120), (5, 3, 1)) == (400, 180, 60)


def test_groups_within_a_group_divide_what_that_leaves() -> None:
    rows = [row_of(in_groups={3: 80, 1: 90}), row_of(in_groups={4: 40, 1: 91}), row_of(in_groups={5: 20, 1: 90})]
    assert [rank_room.room_of(row, rows).capacity for row in rows] == [30 + 10, 30 + 10, 20 + 10]


@pytest.mark.parametrize("count", [0, 1, 4, 6])
def test_ranks_learn_of_groups_in_rows_of_one_length(count: int) -> None:
    told = row_of(in_groups={number: 10 * number for number in range(1, count + 1)}, on_host=5)
    assert len(told.numbers()) == len(row_of().numbers())
    found = rank_room.Told.of(told.numbers())
    assert found == told._replace(pools=told.pools[:4], in_pools=told.in_pools[:4])


def test_ranks_on_gpus_and_the_cpu_of_a_host_divide_what_they_may_own_in_its_memory() -> None:
    rows = [row_of(is_on_gpu=True, most=40, on_host=400), row_of(most=400, on_host=400)]
    beside_gpu, on_cpu = (rank_room.room_of(row, rows) for row in rows)
    assert (beside_gpu.limit, beside_gpu.host_room) == (40, 200)
    assert (on_cpu.limit, on_cpu.capacity) == (200, 500 + 10)


def test_what_a_gpu_owns_may_be_in_memory_of_its_host_where_parameters_come_and_go() -> None:
    memory = [
        rank_room.StateMemory(ModelMemory(10, compute_bytes_per_parameter=1), 0, has_layers=has_layers)
        for has_layers in (False, True)
    ]
    plain, given, short = (
        rank_room.room_of(row, [row, row, row_of(), row_of()])
        for row in (
            row_of(is_on_gpu=True),
            row_of(is_on_gpu=True, most=40, on_host=600),
            row_of(is_on_gpu=True, most=40, on_host=5000),
        )
    )
    assert (plain.capacity, plain.limit, plain.host_room) == (110, None, 0)
    assert (given.capacity, given.limit, given.host_room) == (110, 20, 150)
    assert short.host_room == int(USABLE * 250)
    for of, on_device in ((plain, int(USABLE * 110)), (given, 20)):
        assert rank_room.device_room([of], memory[1]) == (on_device,)
        assert rank_room.state_room([of], memory[1]) == (on_device + of.host_room,)
        assert rank_room.state_room([of], memory[0]) == (min(on_device, int(USABLE * 100)),)


def test_the_first_units_stay_on_the_device_and_later_ones_that_fit() -> None:
    assert that_stay([3, 4, 2, 9, 1], None) == [True] * 5
    assert that_stay([3, 4, 2, 9, 1], 6) == [True, False, True, False, True]
    assert that_stay([3, 0], 0) == [False, True]


class RankOf(LocalGroup):
    """Rank 0 of two alike, alone."""

    world_size = 2

    def all_gather_rows(self, row: Rows) -> Rows:
        return np.stack([row, row])


def divide(own: str, make: Callable[..., torch.optim.Optimizer]) -> None:
    """Divide a model with a large tensor and a small one. Raises ConfigError."""
    model = torch.nn.Sequential(torch.nn.Linear(PARAMETERS, 1, bias=False), torch.nn.Linear(1, PARAMETERS // 10))
    config = DistributedConfig(shard_model="state", own=own)
    reducer, _ = owners.make_reducer(
        material_of(model), make(model.parameters()), RankOf(), config, slots=(0, 1), before=None,
        is_first=True,
    )  # fmt: skip
    reducer.close()


def room_for(monkeypatch: pytest.MonkeyPatch, state_bytes: float) -> None:
    """Of each of two ranks of a host, if they divide it into halves: usable memory, without a whole gradient."""
    set_free_memory(monkeypatch, int(2 * (state_bytes + 4 * 1200) / USABLE) + 2)


def test_weights_that_do_not_fit_are_refused_with_three_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    for own, lack in (("1,1", r"rank 0 lacks 3\.\d+ kB, rank 1 lacks 3\.\d+ kB"), ("1,0", r"rank 0 lacks 7\.2 kB")):
        room_for(monkeypatch, 12 * 1200 / 4)
        with pytest.raises(ConfigError, match=f"^--own {own}: {lack} for its part of optimizer state and gradient"):
            divide(own, torch.optim.AdamW)
        room_for(monkeypatch, 12 * 1200 / 2)
        divide(own, torch.optim.AdamW)  # the memory of the host is divided by the weights


def test_a_tensor_too_large_for_every_owner_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    room_for(monkeypatch, 12 * 1200 / 2 + 100)
    divide("auto", torch.optim.AdamW)
    told = r"rank \d lacks .*; Adafactor updates whole tensors, and 0.weight alone takes 12 kB: take an optimizer"
    with pytest.raises(ConfigError, match=told):
        divide("auto", torch.optim.Adafactor)


def test_parameters_and_buffers_in_the_same_memory_are_refused() -> None:
    first, second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    model = torch.nn.Sequential(first, second)
    names = {one: name for name, one in model.named_parameters()}
    refuse_shared_memory(model, names)
    second.register_buffer("head", first.weight.detach()[1:2])
    with pytest.raises(ConfigError, match=r"0\.weight and 1\.head are two tensors in the same memory"):
        refuse_shared_memory(model, names)
    refuse_shared_memory(model, {second.weight: "1.weight"})  # the first is not trained, and stays where it is
    del second.head
    second.weight = torch.nn.Parameter(first.weight.data)
    with pytest.raises(ConfigError, match="two tensors in the same memory: use one parameter under both names"):
        refuse_shared_memory(model, names)
    second.weight = first.weight
    refuse_shared_memory(model, names)
    flat = torch.zeros(32)
    parts = [torch.nn.Parameter(part.view(4, 4)) for part in flat.split(16)]
    model = torch.nn.ParameterList(parts)  # one beside the other
    refuse_shared_memory(model, {one: name for name, one in model.named_parameters()})


def test_what_has_owners_stays_when_a_task_freezes_some_of_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 1), torch.nn.Linear(1, 100))
    config = DistributedConfig(shard_model="state", own="equal")
    material, optimizer, told = material_of(model), torch.optim.AdamW(model.parameters()), {"slots": (0, 1)}
    first, owned = owners.make_reducer(material, optimizer, RankOf(), config, before=None, is_first=True, **told)
    first.close()
    model[0].requires_grad_(False)
    before = owners.OwnersOfBefore(owned)
    second, _ = owners.make_reducer(material, optimizer, RankOf(), config, before=before, is_first=False, **told)
    assert second.used.shape == first.used.shape == (4,)
    assert [one.requires_grad for one in model.parameters()] == [False, False, True, True]
    for is_trained in (False, True):
        model[0].requires_grad_(is_trained)
        with second.without_sending():
            second.begin()
            second.backward(model(torch.ones(1, 100)).sum())
            second.finish()
        assert second.used.tolist() == [is_trained, is_trained, True, True]
    second.close()
