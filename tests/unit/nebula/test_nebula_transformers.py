"""Hugging Face's Trainer saves and goes on through `hetseq.nebula`; skipped without it or without accelerate."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetseq.nebula as nm
from hetseq.errors import ConfigError
from tests.support.nebula import flip, tags

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # what others warn of is their affair
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None,
        reason="transformers or accelerate is not installed",
    ),
]


class Net(nn.Module):
    """Dropout makes its numbers depend on the generators; two layers share their weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.second(self.drop(self.first(x))).pow(2).mean()}


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(os.environ)
    yield
    nm.close()
    os.environ.clear()
    os.environ.update(before)


def train(steps: int, place: Path, output: Path, resume: str | None = None, **options: Any) -> Net:
    """The net after so many steps, saved at every second one."""
    from transformers import Trainer, TrainingArguments

    from hetseq.nebula.transformers import NebulaCallback

    net = Net()
    data = [{"x": torch.full((4,), float(index))} for index in range(12)]
    given = {"save_strategy": "steps", "save_steps": 2, **options}
    args = TrainingArguments(
        output_dir=str(output), max_steps=steps, per_device_train_batch_size=2, report_to=[], use_cpu=True, seed=3,
        learning_rate=0.05, lr_scheduler_type="constant", logging_strategy="no", disable_tqdm=True, **given,
    )  # fmt: skip
    trainer = Trainer(model=net, args=args, train_dataset=data, callbacks=[NebulaCallback(place)])
    trainer.train(resume_from_checkpoint=resume)
    return net


def numbers(net: nn.Module) -> list[float]:
    return [float(value) for tensor in net.state_dict().values() for value in tensor.flatten()]


def test_a_run_that_goes_on_from_a_tag_ends_as_one_that_was_never_stopped(tmp_path: Path) -> None:
    from hetseq.nebula.transformers import resume_folder

    whole = train(9, tmp_path / "whole", tmp_path / "out")
    assert resume_folder(tmp_path / "parts", tmp_path / "resume") is None
    train(4, tmp_path / "parts", tmp_path / "out")
    assert tags(tmp_path / "parts") == ["checkpoint-4", "checkpoint-2"]
    folder = resume_folder(tmp_path / "parts", tmp_path / "resume")
    assert folder == str(tmp_path / "resume" / "checkpoint-4")
    again = train(9, tmp_path / "again", tmp_path / "out", folder)
    assert numbers(again) == numbers(whole)
    assert tags(tmp_path / "again") == ["checkpoint-9", "checkpoint-8", "checkpoint-6"]
    assert numbers(train(5, tmp_path / "other", tmp_path / "out")) != numbers(whole)
    assert not list((tmp_path / "out").glob("checkpoint-*"))  # the Trainer itself wrote none


def test_a_damaged_tag_gives_the_folder_of_the_one_before(tmp_path: Path) -> None:
    from hetseq.nebula.transformers import resume_folder

    train(4, tmp_path / "tags", tmp_path / "out")
    (newest,) = (tmp_path / "tags").glob("checkpoint-4.*")
    flip(newest / "optimizer.safetensors")
    assert str(resume_folder(tmp_path / "tags", tmp_path / "resume")).endswith("checkpoint-2")
    assert str(resume_folder(tmp_path / "tags", tmp_path / "resume", "checkpoint-2")).endswith("checkpoint-2")


def test_what_the_trainer_would_look_for_in_its_own_folder_is_refused(tmp_path: Path) -> None:
    options = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
    }
    with pytest.raises((ConfigError, ValueError)):
        train(2, tmp_path / "tags", tmp_path / "out", **options)
