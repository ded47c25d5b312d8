"""The loss of the first two samples is compared between ranks: a factor in forward is named, rounding is let be."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from hetseq import Task
from hetseq.cluster.membership.compatibility import Fields, difference
from hetseq.config.sections import Config
from hetseq.task import make_task
from hetseq.training.precision import PRECISIONS
from hetseq.training.task_checks import LossTrial, check_loss
from tests.unit.run.test_fingerprint import BY_HOST, Listed, lines, presented, rows


class Scaled(nn.Linear):
    """A factor in forward, as from an environment variable, a buffer, and noise."""

    def __init__(self, factor: float, *, buffer: float = 1.0, noise: float = 0.0) -> None:
        super().__init__(3, 2)
        self.factor, self.noise = factor, noise
        self.register_buffer("scale", torch.tensor(buffer))

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        output = self.factor * self.scale * super().forward(sample)
        return output + self.noise * torch.randn(()) if self.noise else output


class Squares(Task):
    def loss(self, model: Any, sample: Any) -> Any:
        return {"loss": model(sample["x"]).square().sum()}


class Contrast(Squares):
    def loss(self, model: Any, sample: Any) -> Any:
        output = model(sample["x"])
        return {"loss": (output @ output.T).exp().sum().log()}


def tried(
    model: nn.Module, *, task: type[Task] = Squares, precision: str = "fp32", collate: Any = default_collate,
    config: Config | None = None, scale: float = 1.0,
) -> Fields:  # fmt: skip
    """What a rank presents after the trial of the loss of a model with the usual values times `scale`."""
    torch.manual_seed(1)
    model.reset_parameters()  # type: ignore[operator]
    data = Listed({"x": row["x"] * scale} for row in rows())
    trial = check_loss(
        make_task(task, Config()), model, data, collate=collate, place=lambda batch: batch, terms=("loss",), seed=1,
        precision=PRECISIONS[precision],
    )  # fmt: skip
    return presented(None, model, config, trial=trial)


def test_a_factor_in_forward_is_named_with_both_losses() -> None:
    text = difference([("labA", tried(Scaled(1.0))), ("labB", tried(Scaled(0.9)))])
    assert text is not None
    _, line, remedy = text.splitlines()
    said = re.fullmatch(r"  loss of the first two samples: loss (\S+) on labA; loss (\S+) on labB", line)
    assert said is not None
    assert float(said[2]) == pytest.approx(0.81 * float(said[1]))
    assert "a factor in forward, environment variables, or files that the task reads" in remedy
    assert remedy.endswith(" [loss-differs]")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_may_differ_by_what_devices_round(precision: str) -> None:
    eps = PRECISIONS[precision].eps
    one, near, far = (tried(Scaled(factor), precision=precision) for factor in (1.0, 1 + max(eps, 1e-4), 0.9))
    assert lines(one, near) == []
    assert len(lines(one, far)) == 1


def test_a_loss_that_is_the_rest_of_larger_numbers_may_be_rounded() -> None:
    def of(mean: float, precision: str) -> Fields:
        return presented(trial=LossTrial({"critic": mean}, PRECISIONS[precision].loss_tolerance))

    assert lines(of(2e-6, "fp32"), of(7e-6, "fp32")) == []
    assert lines(of(2e-3, "bf16"), of(-7e-3, "bf16")) == []
    assert lines(of(2e-3, "fp32"), of(-7e-3, "fp32")) == [
        "loss of the first two samples: critic 0.002 on labA; critic -0.007 on labB"
    ]


def test_a_term_that_one_rank_cannot_tell_is_not_compared() -> None:
    one, other = LossTrial({"a": 1.0, "b": 2.0}), LossTrial({"b": 2.0})
    assert lines(presented(trial=one), presented(trial=other)) == []
    assert len(lines(presented(trial=one), presented(trial=LossTrial({"b": 3.0})))) == 1


NOISY = {
    "random loss": {"model": lambda factor: Scaled(factor, noise=1.0)},
    "a loss of both samples": {"task": Contrast},
    "random collater": {"collate": lambda batch: {"x": default_collate(batch)["x"] + torch.rand(len(batch), 3)}},
}


@pytest.mark.parametrize("name", NOISY)
def test_losses_that_another_rank_need_not_see_are_not_compared(name: str) -> None:
    given: dict[str, Any] = dict(NOISY[name])
    make = given.pop("model", Scaled)
    one, other = (tried(make(factor), **given) for factor in (1.0, 0.9))
    assert lines(one, other) == lines(one, tried(Scaled(0.9))) == []
    assert one["loss of the first two samples"].startswith("not compared: ")


def test_one_random_number_for_all_samples_is_a_random_loss() -> None:
    class OneDraw(Squares):
        def loss(self, model: Any, sample: Any) -> Any:
            return {"loss": torch.rand(()) * super().loss(model, sample)["loss"]}

    assert tried(Scaled(1.0), task=OneDraw)["loss of the first two samples"].startswith("not compared: ")


def test_other_buffers_give_other_losses_until_rank_zero_gives_its_own() -> None:
    assert lines(tried(Scaled(1.0, buffer=1.0)), tried(Scaled(1.0, buffer=2.0))) == []


def test_sparse_buffers_are_not_compared() -> None:
    model = Scaled(1.0)
    model.register_buffer("edges", torch.eye(3).to_sparse())
    assert len(lines(tried(Scaled(1.0)), tried(Scaled(0.9)))) == 1
    assert tried(model)["loss of the first two samples"].startswith("buffers: ")


def test_losses_of_other_parts_of_the_data_are_not_compared() -> None:
    assert "loss of the first two samples" in tried(Scaled(1.0))
    assert "loss of the first two samples" not in tried(Scaled(1.0), config=BY_HOST)
