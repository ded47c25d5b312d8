"""What a rank owns of the optimizer's state: where parameters may be cut, and what is cut, saved and loaded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from hetseq.comm.group import LocalGroup
from hetseq.errors import ConfigError, TaskError
from hetseq.parallel.owned_gradients import OwnedGradients
from hetseq.parallel.owned_state import OwnedState, RefusingParameters
from hetseq.parallel.owned_units import Division
from tests.unit.parallel.test_optimizer_trial import ELEMENTWISE, Make


class Net(nn.Module):
    """Parameters of 12, 4, 0, 1 and 24 elements, the last in memory of its own order."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first = nn.Parameter(torch.randn(4, 3, generator=generator))
        self.bias = nn.Parameter(torch.randn(4, generator=generator))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.temperature = nn.Parameter(torch.tensor(0.5))
        image = torch.randn(1, 3, 2, 4, generator=generator)
        self.image = nn.Parameter(image.contiguous(memory_format=torch.channels_last))

    def forward(self) -> torch.Tensor:
        return torch.stack([(p * p).sum() for p in self.parameters()]).sum()


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


class OneOf(LocalGroup):
    """A rank of several, alone: for what needs no message."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size


@contextmanager
def owning(
    model: nn.Module, fractions: tuple[float, ...], rank: int = 0, *, cuts_tensors: bool = True
) -> Iterator[OwnedGradients]:
    reducer = OwnedGradients(
        list(model.parameters()), OneOf(rank, len(fractions)), Division(fractions, cuts_tensors), bucket_bytes=1 << 20
    )  # fmt: skip
    try:
        yield reducer
    finally:
        reducer.close()


def trained(model: nn.Module, make: Make, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = make(
        [{"params": [p for p in model.parameters() if p.dim() > 1]}, {"params": [model.bias, model.temperature]}]
    )
    for _ in range(steps):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    return optimizer


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.1)


@pytest.mark.parametrize("fractions", [(1, 1, 8), (2, 0, 1), (0, 1, 0), (1, 1, 1)])
@pytest.mark.parametrize("make", [adamw, torch.optim.Adagrad], ids=["adamw", "adagrad"])
def test_state_that_exists_is_cut_among_the_owners(make: Make, fractions: tuple[int, ...]) -> None:
    right = Net()
    whole = trained(right, make)
    found: dict[str, list[Any]] = {}
    for rank in range(3):
        model = Net()
        owned = OwnedState(trained(model, make), names_of(model))
        with owning(model, fractions, rank) as reducer:
            owned.adopt_(reducer, cut=3)
            tensors, numbers = owned.slices()
            assert numbers == {}
            assert owned.part == (sum(one.owned.numel() for one in reducer.fragments), 41)
            assert owned.cut == 3
            members = [one for group in owned.optimizer.param_groups for one in group["params"]]
            assert {id(one) for one in members} == {id(one.owned) for one in reducer.fragments}
            assert {id(one) for one in owned.optimizer.state} <= {id(one) for one in members}
            for name, value in tensors.items():
                found.setdefault(name, []).append(value)
    for name, parameter in right.named_parameters():
        if not parameter.numel():
            continue
        expected = {f"model.{name}": parameter.detach()}
        expected |= {f"optim.{name}.{key}": value for key, value in whole.state[parameter].items()}
        for full_name, value in expected.items():
            assert torch.equal(joined(found[full_name], value), value), full_name


@pytest.mark.parametrize("fractions", [(1, 1, 8), (2, 0, 1), (0, 1, 0)])
@pytest.mark.parametrize("kind", list(ELEMENTWISE))
def test_the_next_update_is_that_of_whole_parameters(kind: str, fractions: tuple[int, ...]) -> None:
    right = Net()
    whole = trained(right, ELEMENTWISE[kind])
    for one in right.parameters():
        one.grad = one.detach().sin()
    whole.step()
    updated = 0
    for rank in range(3):
        model = Net()
        owned = OwnedState(trained(model, ELEMENTWISE[kind]), names_of(model))
        with owning(model, fractions, rank) as reducer:
            owned.adopt_(reducer, cut=0)
            for fragment in reducer.fragments:
                fragment.owned.grad = fragment.owned.detach().sin()
            owned.optimizer.step()
            for fragment in reducer.fragments:
                expected = right.get_parameter(owned.names[fragment.parameter]).detach()
                mine = fragment.owned.detach().contiguous().flatten()
                # fused kernels compute the rest of a tensor by other instructions: 1 unit in the last place
                torch.testing.assert_close(
                    mine, expected.contiguous().flatten()[fragment.begin : fragment.end], rtol=2.5e-7, atol=1e-9
                )
                updated += len(mine)
    assert updated == 41


def joined(held: list[Any], like: torch.Tensor) -> torch.Tensor:
    """A whole tensor from what ranks hold of it: slices that cover it once, or equal whole ones."""
    if not all(isinstance(one, list) for one in held):
        assert all(torch.equal(one, held[0]) for one in held)
        assert len(held) == 1 or not like.dim()
        return held[0]  # type: ignore[no-any-return]
    pieces = sorted((piece for one in held for piece in one), key=lambda piece: piece.begin)
    assert [piece.begin for piece in pieces] + [like.numel()] == [0] + [piece.end for piece in pieces]
    assert {piece.shape for piece in pieces} == {tuple(like.shape)}
    return torch.cat([piece.tensor for piece in pieces]).view(like.shape)


@pytest.mark.parametrize("fractions", [(1, 1, 8), (2, 0, 1)])
def test_owners_take_their_part_of_whole_tensors_that_are_loaded(fractions: tuple[int, ...]) -> None:
    right = Net()
    whole = trained(right, adamw)
    for rank in range(3):
        model = Net()
        owned = OwnedState(trained(model, adamw, steps=0), names_of(model))
        with owning(model, fractions, rank) as reducer:
            owned.adopt_(reducer, cut=0)
            for name, parameter in right.named_parameters():
                for key, value in whole.state[parameter].items():
                    owned.load_(f"optim.{name}.{key}", value.contiguous())
                owned.load_(f"optim.{name}.note", 7)
            for fragment in reducer.fragments:
                state = owned.optimizer.state[fragment.owned]
                name = owned.names[fragment.parameter]
                right_state = whole.state[right.get_parameter(name)]
                assert state["note"] == 7
                assert state["step"] == right_state["step"]
                moment = right_state["exp_avg"].contiguous().flatten()[fragment.begin : fragment.end]
                assert torch.equal(state["exp_avg"].contiguous().flatten(), moment)
                assert state["exp_avg"].stride() == fragment.owned.stride()


def test_a_whole_tensor_in_another_memory_order_has_one_owner() -> None:
    sizes = []
    for rank in range(2):
        model = Net()
        with owning(model, (1, 1), rank) as reducer:
            sizes.append(
                {name: one.owned.shape for index, name in enumerate(names_of(model).values())
                 if (one := reducer.own_fragments.get(index))}
            )  # fmt: skip
    assert sum("image" in one for one in sizes) == 1
    (shape,) = [one["image"] for one in sizes if "image" in one]
    assert shape == (1, 3, 2, 4)
    assert not any("empty" in one for one in sizes)


@pytest.mark.parametrize("how", ["itself", "list", "mapping", "deep mapping", "key", "module", "other groups", "group"])
def test_an_optimizer_that_hides_parameters_is_refused(how: str) -> None:
    model = Net()
    optimizer: Any = adamw([{"params": list(model.parameters())}])
    OwnedState(optimizer, names_of(model))  # the twin
    hidden = {
        "itself": model.first, "list": [torch.ones(1), model.first], "mapping": {"slow": model.first},
        "deep mapping": {"slow": [{"weights": model.first}]}, "key": {model.first: "first"}, "module": [model],
        "other groups": torch.optim.SGD([model.first], lr=0.1),
    }  # fmt: skip
    place = "SGD.param_groups" if how == "other groups" else "AdamW.param_groups" if how == "group" else "AdamW.copy"
    if how == "group":
        optimizer.param_groups[0]["first of all"] = model.first
    else:
        optimizer.copy = hidden[how]
    with pytest.raises(ConfigError, match=f"AdamW keeps first in {place}, besides its groups"):
        OwnedState(optimizer, names_of(model))


def test_a_parameter_that_may_be_out_of_date_cannot_be_used() -> None:
    model = Net()
    other = torch.ones(4)
    uses: list[Callable[[], Any]] = [
        lambda: model.bias + 1,
        lambda: torch.cat([other, model.bias]),
        lambda: torch.add(other, other=model.bias),
        lambda: other.copy_(model.bias),
        model.bias.norm,
    ]
    for use in uses:
        use()  # the twin
        with RefusingParameters(names_of(model), "Toy.update_step", "it may be out of date"):
            assert (other + 1).shape == (4,)
            with pytest.raises(TaskError, match=r"^Toy\.update_step uses bias, but it may be out of date$"):
                use()


def test_frozen_parameters_stay_in_their_groups_and_foreign_ones_are_refused() -> None:
    model = Net()
    model.bias.requires_grad_(False)
    optimizer = adamw([{"params": list(model.parameters())}, {"params": []}])
    names = {parameter: name for parameter, name in names_of(model).items() if parameter.requires_grad}
    owned = OwnedState(optimizer, names)
    reducer = OwnedGradients(list(names), OneOf(0, 2), Division((1, 1)), bucket_bytes=1 << 20)
    owned.adopt_(reducer, cut=0)
    members = optimizer.param_groups[0]["params"]
    assert [one for one in members if not one.requires_grad] == [model.bias]
    assert {id(one) for one in members if one.requires_grad} == {id(one.owned) for one in reducer.fragments}
    reducer.close()
    names.popitem()
    with pytest.raises(ConfigError, match=r"AdamW has a parameter of shape \(1, 3, 2, 4\) that is not in the model"):
        OwnedState(adamw([{"params": list(model.parameters())}]), names)


def test_what_is_owned_follows_the_parameters_into_the_memory_of_a_new_generation() -> None:
    model = Net()
    names = names_of(model)
    owned = OwnedState(adamw([{"params": list(names)}]), names)
    with owning(model, (1, 1)) as first:
        owned.adopt_(first, cut=0)
    pairs = [(one.parameter, one.owned) for one in owned.fragments.values()]
    values = [part.detach().clone() for _, part in pairs]
    earlier = weakref.ref(model.first.untyped_storage())
    del first
    second = OwnedGradients(
        list(names), OneOf(0, 2), Division((1, 1)), bucket_bytes=1 << 20, moved=owned.follow_
    )  # fmt: skip
    assert earlier() is None, "nothing keeps the memory of before"
    for (parameter, part), value in zip(pairs, values, strict=True):
        assert part.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        assert torch.equal(part, value)
    second.close()


class WithScale(torch.optim.SGD):
    """Keeps one number for each parameter, in a tensor of shape (1,)."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["scale"] = torch.ones(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_number_is_no_slice_of_a_parameter_of_which_one_element_is_owned(rank: int) -> None:
    model = nn.Linear(65, 1, bias=False)
    owned = OwnedState(WithScale(model.parameters(), lr=0.1), names_of(model))
    with owning(model, (64, 1), rank) as reducer:
        owned.adopt_(reducer, cut=0)
        (one,) = reducer.fragments
        assert one.owned.numel() == (64, 1)[rank]
        one.owned.grad = torch.ones_like(one.owned)
        owned.optimizer.step()
        tensors, _ = owned.slices()
        assert isinstance(tensors["optim.weight.scale"], torch.Tensor), "each owner has all of it"
        assert isinstance(tensors["model.weight"], list)
