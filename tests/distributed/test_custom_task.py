"""The task that the manual shows keeps the manual's promise: one curve, whatever the ranks and shares."""

from __future__ import annotations

from pathlib import Path

from hetseq.comm.group import Group
from tests.support.ranks import run_ranks
from tests.support.training import prepared, train

SPIRALS = Path(__file__).resolve().parents[2] / "docs" / "examples" / "spirals.py"
WORDS = ["--task", f"{SPIRALS}:Spirals", "--global-batch-size", "60", "--max-update", "12", "--lr", "0.03", "--no-save"]
WORDS += ["--precision", "fp64", "--disable-validation"]


def train_spirals(group: Group, save_dir: str, words: list[str]) -> list[float | None]:
    return train(group, save_dir, [*WORDS, *words]).losses


def largest_difference(one: list[float | None], other: list[float | None]) -> float:
    return max(abs((a or 0) - (b or 0)) for a, b in zip(one, other, strict=True))


def test_the_thirty_lines_have_one_curve_on_one_and_on_three_unequal_ranks(tmp_path: Path) -> None:
    (one,) = run_ranks(train_spirals, 1, prepared(tmp_path / "1"), [])
    three = run_ranks(train_spirals, 3, prepared(tmp_path / "3"), ["--balance", "5,2,1"])
    (other,) = run_ranks(train_spirals, 1, prepared(tmp_path / "2"), ["--seed", "2"])
    assert all(largest_difference(one, losses) <= 1e-12 for losses in three)
    assert largest_difference(one, other) > 1e-3  # the twin: another seed is another curve
