"""The values that a task keeps between steps, to named tensors and JSON and back."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hetseq.errors import CheckpointMismatch, TaskError
from hetseq.parallel.task_state import TaskState


class Averaging:
    """A task that keeps whatever `kept` is."""

    learning_rate_factor = 1.0

    def __init__(self, kept: Any = None) -> None:
        self.kept = kept

    def state_dict(self) -> Mapping[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kept = state["kept"]


def test_values_and_tensors_come_back() -> None:
    task = Averaging({"best": float("inf"), "names": ["a", None], "mean": {"w": torch.arange(3.0)}, "is_done": False})
    task.learning_rate_factor = 0.25
    state = TaskState(task)
    state.step = 7
    tensors, record = state.content()
    assert list(tensors) == ["task.kept.mean.w"]
    other = TaskState(Averaging())
    other.load(tensors, json.loads(json.dumps(record)))
    assert (other.step, other._task.learning_rate_factor, other.digest()) == (7, 0.25, state.digest())
    loaded: Any = other._task
    assert {key: value for key, value in loaded.kept.items() if key != "mean"} == {
        "best": float("inf"), "names": ["a", None], "is_done": False
    }  # fmt: skip
    assert torch.equal(loaded.kept["mean"]["w"], torch.arange(3.0))
    tensors["task.kept.mean.w"].zero_()
    assert torch.equal(loaded.kept["mean"]["w"], torch.arange(3.0)), "it has a memory of its own"


def test_tensors_enter_a_digest_by_their_names_alone() -> None:
    one, same, other = (TaskState(Averaging(kept)) for kept in (torch.ones(2), torch.zeros(2), 1))
    assert one.digest() == same.digest() != other.digest()
    assert 0 <= one.digest() < 2**63


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        ({1: 2}, r"a mapping whose keys are not all text, or \$tensor at kept"),
        ({"$tensor": 1}, r"a mapping whose keys are not all text, or \$tensor at kept"),
        ([3, {4}], "a set at kept.1"),
        (torch.nn.Linear(1, 1), "a Linear at kept"),
    ],
)
def test_a_value_that_no_checkpoint_can_hold_is_refused_by_its_place(kept: Any, told: str) -> None:
    with pytest.raises(TaskError, match=f"Averaging.state_dict gave {told}: expected numbers"):
        TaskState(Averaging(kept)).content()


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (
            {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
            r"two tensors that are called kept\.a\.b: name one otherwise",
        ),
        (torch.eye(2).to_sparse(), "a tensor of layout torch.sparse_coo at kept: expected a dense one"),
        (functools.reduce(lambda inner, _: [inner], range(100), 1), "more than 64 levels deep"),
    ],
    ids=["one name twice", "sparse", "deep"],
)
def test_a_state_that_would_not_come_back_is_refused(kept: Any, told: str) -> None:
    with pytest.raises(TaskError, match=told):
        TaskState(Averaging(kept)).content()


def test_a_checkpoint_without_a_tensor_of_its_record_is_refused() -> None:
    _, record = TaskState(Averaging(torch.ones(2))).content()
    with pytest.raises(CheckpointMismatch, match=r"lacks task\.kept, a tensor of the task's own state"):
        TaskState(Averaging()).load({}, record)


class Lazy(Averaging):
    """A task that has no state before its first use."""

    def state_dict(self) -> Mapping[str, Any]:
        return {} if self.kept is None else {"kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kept = state.get("kept")


def test_a_task_that_goes_back_before_its_first_use_forgets_it() -> None:
    task = Lazy()
    _, before = TaskState(task).content()
    task.kept = [1.0]
    TaskState(task).load({}, before, goes_back=True)
    assert task.kept is None
    fresh = Averaging()  # one that expects what it gave
    fresh.state_dict = dict  # type: ignore[method-assign,assignment]
    TaskState(fresh).load({}, before, goes_back=True)  # is not asked for nothing
