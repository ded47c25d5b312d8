"""A model is looked at before it is trained: what could not be saved or rightly updated is refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hetseq.comm.group import LocalGroup
from hetseq.errors import TaskError
from hetseq.parallel.buffers import BufferKeeper
from hetseq.parallel.gradient_sync import Gradients
from hetseq.parallel.replica import Replica, check_model
from hetseq.parallel.task_state import TaskState
from hetseq.system import device_memory as memory
from tests.support.replicas import Stateless


def with_parameter(value: torch.Tensor) -> nn.Module:
    model = nn.Linear(4, 1)
    model.extra = nn.Parameter(value)
    return model


def with_buffer(value: torch.Tensor, *, persistent: bool = True) -> nn.Module:
    model = nn.Linear(4, 1)
    model.register_buffer("extra", value, persistent=persistent)
    return model


EXPANDED = torch.ones(1).expand(5)
OVERLAPPING = torch.arange(6.0).as_strided((3, 2), (1, 1))
GAPPED = torch.zeros(4, 6)[:, :3]


@pytest.mark.parametrize("value", [EXPANDED, OVERLAPPING, GAPPED], ids=["expanded", "overlapping", "gapped"])
@pytest.mark.parametrize("make", [with_parameter, with_buffer])
def test_elements_that_share_memory_or_leave_gaps_are_refused(make: Any, value: torch.Tensor) -> None:
    with pytest.raises(TaskError, match=r"extra of shape .* has strides .*\.contiguous\(\)"):
        check_model(make(value))
    check_model(make(value.contiguous()))


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(5, 3).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(()),
        torch.randn(3, 0, 4),
        torch.arange(4.0).expand(1, 4),
    ],
    ids=["transposed", "channels last", "scalar", "empty", "a dimension of one"],
)
def test_any_order_of_dimensions_will_do(value: torch.Tensor) -> None:
    check_model(with_parameter(value))
    check_model(with_buffer(value))


def test_a_cache_may_lie_in_memory_as_it_likes() -> None:
    check_model(with_buffer(EXPANDED, persistent=False))


@pytest.mark.parametrize("make", [with_parameter, with_buffer])
def test_complex_numbers_are_refused(make: Any) -> None:
    with pytest.raises(TaskError, match="extra is complex"):
        check_model(make(torch.ones(3, dtype=torch.complex64)))


class Remembering(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_extra_state_is_refused_since_no_checkpoint_could_hold_it() -> None:
    with pytest.raises(TaskError, match=r"^1 \(Remembering\) keeps extra state"):
        check_model(nn.Sequential(nn.Linear(4, 4), Remembering(4, 1)))
    check_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_cached_memory_is_given_back_before_the_first_update_which_allocates(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that runs out of memory cannot be done again: some parameters have changed."""
    model, released = nn.Linear(4, 1), []
    parameters = list(model.parameters())
    replica = Replica(
        model, optimizer(parameters, lr=0.1), Gradients(parameters), BufferKeeper(model, LocalGroup()),
        TaskState(Stateless()),
    )  # fmt: skip
    monkeypatch.setattr(memory, "release", lambda device: released.append((device, len(replica.optimizer.state))))
    before = model.weight.detach().clone()
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        replica.update()
    assert released == [(torch.device("cpu"), 0)]
    assert not torch.equal(model.weight, before)
