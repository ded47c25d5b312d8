"""`hetseq selftest`: honest tasks are exact on random cuts, and each fault is told with the name of its term."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hetseq.errors import ConfigError
from hetseq.selftest import run
from hetseq.selftest.cuts import random_cut, shares
from tests.support import bert

FAULTY = Path(__file__).parents[1] / "support" / "faulty.py"


def selftest(*words: str) -> tuple[int, dict]:  # type: ignore[type-arg]
    said: list[str] = []
    code = run([*words, "--rounds", "2", "--json"], said.append)
    return code, json.loads(said[0])


def examined(name: str, *words: str) -> tuple[int, dict]:  # type: ignore[type-arg]
    return selftest("--task", f"{FAULTY}:{name}", *words)


@pytest.mark.parametrize("name", ["Honest", "Noisy", "Padded"])
def test_an_honest_task_is_exact(name: str) -> None:
    code, report = examined(name)
    assert (code, report["verdict"], report["findings"], report["precision"]) == (0, "exact", [], "fp64")


def test_mnist_is_exact_and_its_dropout_is_no_fault() -> None:
    code, report = selftest("--task", "mnist")
    assert (code, report["findings"]) == (0, [])
    assert "random in training" in report["notes"][0]


def test_bert_is_exact_in_both_terms(tmp_path: Path) -> None:
    code, report = selftest("--task", "bert", "--data", str(bert.write_folder(tmp_path / "data", 60)))
    assert (code, report["findings"]) == (0, [])
    assert [row["name"] for row in report["terms"]] == ["mlm", "nsp"]
    assert all(row["gradient_difference"] < 1e-12 for row in report["terms"])


@pytest.mark.parametrize(
    ("name", "kind", "about"),
    [
        ("Mean", "mean", "squares"),
        ("ConstantCount", "count", "squares"),
        ("CountsPadding", "count of padding", "squares"),
        ("SeesPadding", "padding", "squares"),
        ("Contrastive", "mixing", "squares"),
        ("Normed", "batch statistics", "1 (BatchNorm1d)"),
        ("Remembering", "state", "squares"),
        ("Infinite", "not finite", "squares"),
        ("WrongMetric", "metric", "error"),
        ("OneLine", "predictions", "predictions"),
        ("Squeezing", "one sample", "loss"),
        ("Forgetful", "state_dict", "squares"),
        ("Redrawn", "random data", "_Redrawn"),
    ],
)
def test_a_fault_is_named(name: str, kind: str, about: str) -> None:
    code, report = examined(name)
    assert code == 1
    assert (kind, about) in [(finding["kind"], finding["name"]) for finding in report["findings"]], report["findings"]


def test_batch_normalisation_is_exact_in_units() -> None:
    assert examined("Normed", "--unit-size", "4")[0] == 0


def test_a_mistake_in_the_command_is_refused() -> None:
    with pytest.raises(ConfigError, match="--rounds 0: expected a whole number of 1 or more"):
        run(["--task", "mnist", "--rounds", "0"], print)


def test_cuts_cover_the_step_unequally_and_leave_one_rank_a_single_sample() -> None:
    for seed in range(50):
        cut = random_cut(32, 3, np.random.default_rng(seed))
        assert [i for rank in cut for run in rank for i in range(*run)] == list(range(32))
        assert shares(cut)[0] == 1
        assert len(set(shares(cut))) > 1
