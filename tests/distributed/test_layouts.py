"""Parameters whose memory is not in the order of their dimensions: fused optimizers walk it as it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetseq import Task
from hetseq.comm.group import Group
from tests.support import toys
from tests.support.lives import Life, Line, live, words
from tests.support.ranks import run_ranks
from tests.support.training import prepared

STEPS = 6  # with a ragged one in between
LIMIT = 1e-12


class Net(nn.Module):
    """A convolution whose weight has its channels last, and a weight that is the transpose of what lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        conv: Any = nn.Conv2d(3, 4, 3)
        self.conv = conv.to(memory_format=torch.channels_last)
        self.weight = nn.Parameter(torch.randn(2, 4 * 9).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.conv(x)).flatten(1) @ self.weight


class Pictures(Line):
    optimizer = "sgd"

    def rows(self) -> toys.Batch:
        generator = torch.Generator().manual_seed(2)
        return {"x": torch.randn(25, 3, 5, 5, generator=generator, dtype=torch.float64)}

    def build_model(self) -> nn.Module:
        return Net()

    def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> Any:
        return OPTIMIZERS[self.optimizer](parameter_groups)

    def loss(self, model: Any, sample: Any) -> dict[str, torch.Tensor]:
        return {"loss": ((model(sample["x"]) - 1) ** 2).sum()}


class PicturesAdamW(Pictures):
    optimizer = "adamw"


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0, fused=True),
}
TASKS: list[type[Pictures]] = [Pictures, PicturesAdamW]


def plain_torch(task_class: type[Pictures]) -> torch.Tensor:
    """The plain loop over whole batches; shares no code with the product."""
    torch.manual_seed(7)
    model = Net().double()
    x, optimizer, at = task_class.rows(None)["x"], OPTIMIZERS[task_class.optimizer](model.parameters()), 0  # type: ignore[arg-type]
    for _ in range(STEPS):
        end = min(25, at + 10)
        optimizer.zero_grad()
        (((model(x[at:end]) - 1) ** 2).sum() * (1 / (end - at))).backward()
        optimizer.step()
        at = end % 25
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def live_on(group: Group, save_dir: str, updates: list[int], task_class: type[Task]) -> list[Life]:
    lives = [live(group, save_dir, words(f"--max-update {n} {BALANCE[group.world_size]}"), task_class) for n in updates]
    assert [life.error for life in lives] == [None] * len(updates)
    return lives


BALANCE = {1: "", 3: "--balance 5,2,1"}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("task_class", TASKS)
def test_an_update_is_that_of_plain_torch_whatever_the_memory_layout(
    task_class: type[Pictures], world_size: int, tmp_path: Path
) -> None:
    right = plain_torch(task_class)
    for (life,) in run_ranks(live_on, world_size, prepared(tmp_path / "run"), [STEPS], task_class):
        error = float((life.parameters - right).abs().max())
        assert error <= (LIMIT if world_size > 1 else 0.0)  # alone to the bit


@pytest.mark.parametrize("task_class", TASKS)
def test_a_resume_keeps_the_memory_layout_of_the_optimizer(task_class: type[Pictures], tmp_path: Path) -> None:
    ((begun, gone_on),) = run_ranks(live_on, 1, prepared(tmp_path / "run"), [3, STEPS], task_class)
    right = plain_torch(task_class)
    assert gone_on.first_step == 4
    assert torch.equal(gone_on.parameters, right)
    assert not torch.equal(begun.parameters, right)


def test_gradients_in_another_order_of_memory_are_told_apart() -> None:
    """What the measure sees when gradients are laid out as if every parameter were contiguous."""
    torch.manual_seed(7)
    model = Net().double()
    before = model.weight.detach().clone()
    gradient = torch.arange(72.0, dtype=torch.float64).view(36, 2)
    model.weight.grad = gradient  # contiguous, its parameter is not
    assert model.weight.stride() != gradient.stride()
    OPTIMIZERS["sgd"]([model.weight]).step()
    assert float((model.weight.detach() - (before - 0.05 * gradient)).abs().max()) > 0.1
