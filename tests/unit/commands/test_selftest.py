"""`hetseq selftest`: honest tasks are exact on random cuts, and each fault is told with the name of its term."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hetseq import registry
from hetseq.commands.selftest import run
from hetseq.commands.selftest.other_process import another_process, of_processes, presented
from hetseq.commands.selftest.splits import random_cut, shares
from hetseq.config.sections import Config, DataConfig
from hetseq.errors import ConfigError, MissingSplitError
from hetseq.task import load_split, make_task
from tests.support import bert

FAULTY = Path(__file__).parents[2] / "support" / "faulty.py"


@contextmanager
def _nobody(words: Sequence[str]) -> Iterator[None]:
    yield None


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other process: each import of torch takes longer than all tests of this file."""
    monkeypatch.setattr("hetseq.commands.selftest.another_process", _nobody)


def selftest(*words: str) -> tuple[int, dict]:  # type: ignore[type-arg]
    said: list[str] = []
    code = run([*words, "--rounds", "2", "--json"], said.append)
    return code, json.loads(said[0])


def examined(name: str, *words: str) -> tuple[int, dict]:  # type: ignore[type-arg]
    return selftest("--task", f"{FAULTY}:{name}", *words)


@pytest.mark.parametrize("name", ["Honest", "Noisy", "Padded", "Diffusing", "SeededNoise"])
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
        ("MeanOfItsOwn", "mean", "squares"),
        ("NarrowMean", "mean", "squares"),
        ("DividesByTokens", "mean", "squares"),
        ("Penalised", "penalty", "squares"),
        ("Largest", "mixing", "squares"),
        ("MixedUp", "mixing", "squares"),
        ("Averaging", "state", "squares"),
        ("DrawsElsewhere", "random loss", "squares"),
        ("Counting", "data order", "_Counting"),
        ("RandomCollater", "random batches", "collater"),
        ("OwnCollater", "random batches", "collater"),
        ("Nothing", "count", "squares"),
        ("Detached", "no gradient", "squares"),
        ("Frozen", "no gradient", "squares"),
        ("Few", "too few samples", "train"),
        ("UnknownMetric", "metric", "error"),
        ("WrongSummary", "metric", "summarise"),
        ("Sorting", "predictions", "predictions"),
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
    assert (kind, about) == (report["findings"][0]["kind"], report["findings"][0]["name"]), report["findings"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("OneInfinite", "their gradient is not finite, with count 32; first with sample 7 of the data"),
        ("Centred", "the model (_Centred) mixes the samples"),
        ("PartlyMean", "part of it is a mean"),
        ("Averaging", "in training the same micro-batch gives"),
        ("OwnCollater", "the second time, with the same seed"),
    ],
)
def test_a_finding_leads_to_the_place(name: str, words: str) -> None:
    assert words in examined(name)[1]["findings"][0]["text"]


def test_of_a_state_that_changes_no_weight_is_blamed() -> None:
    assert {finding["kind"] for finding in examined("Remembering")[1]["findings"]} == {"state"}


@pytest.mark.parametrize(("name", "words"), [("Single", "the task raised TypeError"), ("Narrowing", "converts fp64")])
def test_where_fp64_does_not_work_the_digits_of_fp32_are_compared(name: str, words: str) -> None:
    code, report = examined(name)
    assert (code, report["findings"], report["precision"]) == (0, [], "fp32")
    assert words in report["notes"][0]


@pytest.mark.parametrize(("name", "words"), [("DrawsOnce", "draws of NumPy"), ("Three", "takes at least 4 samples")])
def test_what_was_not_compared_is_said(name: str, words: str) -> None:
    code, report = examined(name)
    assert (code, report["verdict"]) == (0, "exact in evaluation")
    assert words in report["not_compared"]


def test_a_task_that_depends_on_its_process_is_told_by_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetseq.commands.selftest.another_process", another_process)
    code, report = examined("OfThisProcess")
    assert code == 1
    assert [(finding["kind"], finding["name"]) for finding in report["findings"]] == [
        ("process", "initial values"), ("process", "samples of train"),
    ]  # fmt: skip
    assert "sorted(names)" in report["findings"][1]["remedy"]


def test_data_in_parts_are_told_by_another_process_too() -> None:
    config = Config(data=DataConfig(data_by_host=True, global_batch_size=8))
    task = make_task(registry.find_task(f"{FAULTY}:Honest"), config)
    assert "samples of train" in presented(config, task, load_split(task, "train"))


def test_another_process_that_has_the_same_is_no_finding_and_a_broken_one_a_note() -> None:
    own = {"samples of train": "sample 0: a", "length of train": "2 samples", "initial values": "x"}
    assert list(of_processes(own, own)) == []
    assert [finding.name for finding in of_processes(own, {**own, "length of train": "3 samples"})] == [
        "length of train"
    ]
    with another_process(["--task", "no_such_task.py:Task"]) as answer:
        assert "no_such_task.py: does not exist" in str(answer())


def test_a_task_that_needs_two_samples_is_examined_with_two() -> None:
    kinds = [finding["kind"] for finding in examined("Pairing")[1]["findings"]]
    assert kinds == ["one sample", "mixing", "metric"]


def test_a_task_without_data_is_refused() -> None:
    with pytest.raises(MissingSplitError, match="without samples"):
        examined("Fewer")


def test_people_read_a_table_the_findings_and_a_verdict() -> None:
    said: list[str] = []
    assert run(["--task", f"{FAULTY}:Mean", "--rounds", "2"], said.append) == 1
    first, equal, empty, head, row, *rest = said
    assert first == "Mean: 2 steps of 32 of 40 samples, on 1, 2 and 3 emulated ranks, cpu, fp64"
    assert equal == "equal: relative difference up to 1.5e-08, half the digits of fp64"
    assert (empty, head.split()) == ("", ["term", "count", "loss", "difference", "of", "gradient"])
    assert row.split()[:2] == ["squares", "32"]
    assert row.endswith("NOT EXACT")
    assert rest[1].startswith("squares: loss gives a mean, not a sum: ")
    assert rest[2].startswith("  Use reduction='sum'")
    assert rest[3:] == ["", "not exact: Mean depends on how a step is split, or is incomplete (squares)"]


def test_a_line_for_scripts_has_no_number_that_json_has_not() -> None:
    said: list[str] = []
    run(["--task", f"{FAULTY}:Infinite", "--rounds", "1", "--json"], said.append)
    report = json.loads(said[0], parse_constant=lambda word: pytest.fail(word))
    assert report["terms"][0]["loss"] is None


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
