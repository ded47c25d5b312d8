"""--noise-scale-every: measuring changes no number of the training, and all ranks know the same estimate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetseq.comm.group import Group
from tests.support.ranks import run_ranks
from tests.support.training import Facts, prepared, train

WORDS = (
    "--task mnist --dropout 0 --global-batch-size 48 --precision fp64 --optimizer sgd --lr 0.1 --lr-scheduler constant"
    " --no-save --disable-validation --max-update 8"
)


def trained(group: Group, save_dir: str, words: list[str]) -> Facts:
    return train(group, save_dir, [*WORDS.split(), *words])


@pytest.mark.parametrize("micro_batch", ["48", "8"])
def test_measuring_changes_no_bit_of_the_training(micro_batch: str, tmp_path: Path) -> None:
    words = ["--balance", "3,1", "--batch-size", micro_batch, "--noise-scale-every"]
    plain = run_ranks(trained, 2, prepared(tmp_path / "plain"), [*words, "0"])
    measured = run_ranks(trained, 2, prepared(tmp_path / "measured"), [*words, "1"])
    assert measured[0].losses == plain[0].losses
    assert torch.equal(measured[0].parameters, plain[0].parameters)
    assert plain[0].noise_scales == [None] * 8
    assert measured[0].noise_scales == measured[1].noise_scales


def test_the_same_first_micro_batch_gives_the_same_estimate_on_any_ranks(tmp_path: Path) -> None:
    words = ["--batch-size", "16", "--noise-scale-every", "1"]
    ((alone),) = run_ranks(trained, 1, prepared(tmp_path / "one"), words)
    first, _ = run_ranks(trained, 2, prepared(tmp_path / "two"), [*words, "--balance", "1,0"])
    assert alone.noise_scales[:4] == [None] * 4
    assert first.noise_scales[5:] == pytest.approx(alone.noise_scales[5:], rel=1e-9)
    assert any(alone.noise_scales)


def test_one_rank_with_one_micro_batch_measures_nothing(tmp_path: Path) -> None:
    (alone,) = run_ranks(trained, 1, prepared(tmp_path / "one"), ["--batch-size", "48", "--noise-scale-every", "1"])
    assert alone.noise_scales == [None] * 8
