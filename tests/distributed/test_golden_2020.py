"""A task written as the documentation of 2020 taught it trains, and its mean loss gives the gradient of our sum."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetseq.comm.group import Group
from tests.support.ranks import run_ranks
from tests.support.training import Facts, prepared, train

GOLDEN = Path(__file__).parents[1] / "golden" / "mnist_2020.py"
WORDS = "--batch-size 7 --max-update 9 --optimizer sgd --lr 0.05 --valid-subset test --no-save --precision fp64"


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A folder as torchvision left it in 2020, with made-up images."""
    processed = tmp_path / "data" / "MNIST" / "processed"
    processed.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for name, size in (("training.pt", 50), ("test.pt", 9)):
        images = torch.randint(0, 256, (size, 28, 28), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, 10, (size,), generator=generator)
        torch.save((images, labels), processed / name)
    return str(tmp_path / "data")


def run(task: str, world_size: int, data: str, path: Path, *more: str) -> Facts:
    words = ["--task", task, "--data", data, *WORDS.split(), *more]
    facts: list[Facts] = run_ranks(train, world_size, prepared(path), words)
    assert len({tuple(each.losses) for each in facts}) == 1
    return facts[0]


def test_a_task_of_2020_trains_like_ours(data: str, tmp_path: Path) -> None:
    ours = run("mnist", 1, data, tmp_path / "ours")
    theirs = run(f"{GOLDEN}:MNISTTask", 1, data, tmp_path / "theirs")
    assert torch.allclose(theirs.parameters, ours.parameters, rtol=0, atol=1e-15)
    assert theirs.losses == pytest.approx(ours.losses, abs=1e-14)
    assert "valid_accuracy" not in theirs.validations[0]  # 2020 had no hook for metrics
    assert torch.any(theirs.parameters != run("mnist", 1, data, tmp_path / "other", "--seed", "2").parameters)


def train_without_dropout(group: Group, save_dir: str, words: list[str]) -> Facts:
    """Dropout depends on how a step is cut into micro-batches; a rank is a process, so it may be switched off here."""
    for kind in (torch.nn.Dropout, torch.nn.Dropout2d):
        kind.forward = lambda self, x: x
    return train(group, save_dir, words)


@pytest.mark.slow
def test_its_mean_loss_is_exact_on_unequal_ranks(data: str, tmp_path: Path) -> None:
    # 21 samples a step, 50 an epoch: the third step is a ragged one
    def curve(world_size: int, *more: str) -> Facts:
        words = ["--task", f"{GOLDEN}:MNISTTask", "--data", data, *WORDS.split(), *more]
        return run_ranks(train_without_dropout, world_size, prepared(tmp_path / str(world_size)), words)[0]

    one, three = curve(1, "--update-freq", "3"), curve(3, "--balance", "5,2,1")
    assert three.losses == pytest.approx(one.losses, abs=1e-12)
    assert torch.allclose(three.parameters, one.parameters, rtol=0, atol=1e-12)
