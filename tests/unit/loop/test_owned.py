"""What a script may own, by which names, and that its numbers come back."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from hetseq.errors import TaskError
from hetseq.loop.owned import Owned
from hetseq.parallel.task_state import TaskState

CPU = torch.device("cpu")


class Keeper:
    """Whatever a script keeps."""

    def __init__(self, kept: Any = None) -> None:
        self.kept = kept

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


def owned(**things: Any) -> Owned:
    own = Owned(CPU, torch.float64)
    for name, thing in things.items():
        own.add(name, thing)
    return own


def settled(**things: Any) -> Owned:
    own = owned(**things)
    own.settle()
    return own


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_a_model_moves_to_the_type_of_the_run_and_its_optimizer_holds_the_same_parameters() -> None:
    model, optimizer = trained()
    own = settled(model=model, optimizer=optimizer)
    assert next(model.parameters()).dtype == torch.float64
    assert own.model() is model
    assert own.optimizer() is optimizer


def test_several_trained_modules_are_one_and_others_are_state() -> None:
    (one, _), (other, _), frozen = trained(), trained(), nn.Linear(2, 1).requires_grad_(False)
    own = owned(one=one, other=other, frozen=frozen)
    own.add("optimizer", torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1))
    own.settle()
    assert [name for name, _ in own.model().named_parameters()] == [
        "one.weight", "one.bias", "other.weight", "other.bias"
    ]  # fmt: skip
    assert list(own.state_dict()["own"]) == ["frozen"]


def test_numbers_of_the_optimizer_and_the_state_of_others_come_back() -> None:
    class Script:
        learning_rate_factor = 1.0

        def __init__(self, own: Owned) -> None:
            self.state_dict, self.load_state_dict = own.state_dict, own.load_state_dict

    (model, optimizer), keeper = trained(), Keeper({"best": 3.5, "mean": torch.ones(2)})
    optimizer.param_groups[0].update(lr=0.025, betas=(0.8, 0.9))
    tensors, record = TaskState(Script(settled(model=model, optimizer=optimizer, keeper=keeper))).content()
    (model, other), again = trained(), Keeper()
    TaskState(Script(settled(model=model, optimizer=other, keeper=again))).load(tensors, json.loads(json.dumps(record)))
    assert (other.param_groups[0]["lr"], other.param_groups[0]["betas"]) == (0.025, (0.8, 0.9))
    assert again.kept["best"] == 3.5
    assert torch.equal(again.kept["mean"], torch.ones(2))


def test_a_script_that_owns_other_objects_than_the_run_was_saved_with_is_refused() -> None:
    model, optimizer = trained()
    state = settled(model=model, optimizer=optimizer, keeper=Keeper(1)).state_dict()
    with pytest.raises(
        TaskError, match=r"saved with keeper beside model and optimizer, and the script gives run.own noth"
    ):
        settled(model=model, optimizer=optimizer).load_state_dict(state)


@pytest.mark.parametrize(
    ("things", "told"),
    [
        ([Keeper(), Keeper()], r"two objects are called keeper: name them, as in run.own\(keeper_a=..., ...\)"),
        ([3], r"run.own got a int: expected a module, an optimizer, or an object with state_dict and load_state_dict"),
    ],
)
def test_objects_that_cannot_be_told_apart_or_kept_are_refused(things: list[Any], told: str) -> None:
    own = Owned(CPU, torch.float32)
    *first, last = things
    for thing in first:
        own.add(None, thing)
    with pytest.raises(TaskError, match=told):
        own.add(None, last)


def test_a_loop_without_what_it_trains_is_refused() -> None:
    model, optimizer = trained()
    with pytest.raises(TaskError, match=r"run.steps comes before run.own\(model, optimizer\): nothing would be"):
        owned().settle()
    with pytest.raises(TaskError, match=r"run.own got no optimizer: expected at least one"):
        owned(model=model).settle()
    with pytest.raises(TaskError, match=r"two has parameters of no module that run.own was given"):
        owned(model=model, one=optimizer, two=trained()[1]).settle()
    with pytest.raises(TaskError, match=r"weight is in two optimizers, one and two: expected one"):
        owned(model=model, one=optimizer, two=torch.optim.SGD([model.weight], lr=0.1)).settle()
    with pytest.raises(TaskError, match="bias of the model require a gradient and are in no optimizer"):
        owned(model=model, optimizer=torch.optim.SGD([model.weight], lr=0.1)).settle()
    more = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(TaskError, match="optimizer has parameters of no module"):
        owned(model=model, optimizer=more).settle()


def test_several_optimizers_update_what_has_a_gradient_and_keep_their_state_by_parameter() -> None:
    (one, adam), other = trained(), nn.Linear(2, 1)
    momentum = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    own = settled(one=one, other=other, adam=adam, momentum=momentum)
    joint, before = own.optimizer(), [value.clone() for value in one.parameters()]
    assert type(joint).__name__ == "AdamW+SGD"
    with own.only([momentum]):
        assert not any(value.requires_grad for value in one.parameters())
        (one(torch.ones(1, 2, dtype=torch.float64)) + other(torch.ones(1, 2, dtype=torch.float64))).sum().backward()
    assert all(value.requires_grad for value in one.parameters())
    joint.step()
    assert all(torch.equal(value, was) for value, was in zip(one.parameters(), before))
    assert not adam.state, "it has made no step"
    assert joint.state.get(other.weight) is momentum.state[other.weight]
    assert joint.state.get(one.weight) is None
    joint.state[one.weight]["step"] = torch.tensor(3.0)
    assert adam.state[one.weight]["step"] == 3
    momentum.param_groups[0]["lr"] = 0.25
    assert [group["lr"] for group in joint.param_groups] == [0.1, 0.25]
    with pytest.raises(TaskError, match=r"step\.of got an optimizer that run.own was not given"), own.only([joint]):
        pass


def test_calls_of_the_optimizer_go_to_the_guard() -> None:
    model, optimizer = trained()
    own, calls = settled(model=model, optimizer=optimizer), list[str]()
    own.guard(calls.append)
    optimizer.step()
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    optimizer.zero_grad()
    assert calls == ["optimizer.step()", "optimizer.zero_grad()"]
    assert all(parameter.grad is None for parameter in model.parameters()), (
        "it does what it is asked if nothing is raised"
    )
