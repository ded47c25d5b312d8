"""What a session makes of a data set before the first step, and when it validates."""

from __future__ import annotations

import itertools
import logging
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetseq import config as options
from hetseq.comm.group import Group
from hetseq.run.build import RankJob, build_session
from hetseq.run.loaded_task import load_material
from hetseq.run_directory import RunDirectory
from hetseq.task import make_task
from hetseq.training.share_policy import Shift
from tests.support import toys
from tests.support.logs import Keeping
from tests.support.ranks import RankRaised, run_ranks
from tests.support.training import Recorder, prepared, toy_words, train


class Longer(toys.Rows):
    """Sample i has i + 1 tokens."""

    lengths = tuple(range(1, 9))


class LongestFirst(Longer):
    """The same, listed in 2020's way."""

    def ordered_indices(self) -> Any:
        return np.arange(8)[::-1]


class Sentences(toys.Toy):
    dataset: type[toys.Rows] = Longer

    def load_dataset(self, split: str) -> Any:
        return self.dataset({"x": torch.arange(1.0, 9.0)})

    def build_model(self) -> Any:
        return torch.nn.Linear(1, 1)

    def loss(self, model: Any, sample: Any) -> Any:
        return {"loss": model(sample["x"][:, None]).sum()}


class SentencesLongestFirst(Sentences):
    dataset = LongestFirst


def take_steps(group: Group, save_dir: str, task_class: type[Sentences], steps: int) -> list[list[int]]:
    """A rank's life: the samples of its part of each step."""
    words = toy_words("Integers", balance="equal", max_tokens=8)
    config = options.complete(options.parse([*words, "--save-dir", save_dir]))
    task, directory = make_task(task_class, config), RunDirectory(Path(save_dir))
    material = load_material(config, torch.device("cpu"), task)
    session = build_session(RankJob(config, directory, group, material, metrics=Recorder()))
    try:
        plans = session.controller.planner.plans(session.controller.state.position)
        taken = [session.controller.loader.take(plan) for plan, _ in zip(plans, range(steps))]
    finally:
        session.close()
    return [[int(x) for batch in data.micro_batches for x in batch.sample["x"]] for data in taken]


@pytest.mark.parametrize(
    ("world_size", "task_class", "steps"),
    [
        (1, Sentences, [[1, 2, 3], [4], [5], [6], [7], [8]]),
        (1, SentencesLongestFirst, [[8], [7], [6], [5], [4, 3], [2, 1]]),
        (2, Sentences, [[1, 2, 3, 4, 5], [6, 7], [8]]),
        (2, SentencesLongestFirst, [[8, 7], [6, 5, 4], [3, 2, 1]]),
    ],
)
def test_steps_are_filled_by_the_lengths_of_the_samples_in_them(
    world_size: int, task_class: type[Sentences], steps: list[list[int]], tmp_path: Path
) -> None:
    ranks = run_ranks(take_steps, world_size, prepared(tmp_path / "run"), task_class, len(steps))
    assert [[*itertools.chain(*parts)] for parts in zip(*ranks)] == steps


def test_a_cap_that_does_not_hold_the_longest_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankRaised, match="--max-tokens 7 does not hold sample 7 of the training data, which has 8"):
        run_ranks(begin_sentences, 1, prepared(tmp_path), ["--max-tokens", "7"])
    run_ranks(begin_sentences, 1, prepared(tmp_path), ["--max-tokens", "8"])


def begin_sentences(group: Group, save_dir: str, words: list[str]) -> None:
    config = options.complete(options.parse([*toy_words("Integers"), *words, "--save-dir", save_dir]))
    material = load_material(config, torch.device("cpu"), make_task(Sentences, config))
    build_session(RankJob(config, RunDirectory(Path(save_dir)), group, material, metrics=Recorder())).close()


class OwnBeginning(toys.Integers):
    """A task whose model begins otherwise on each rank, as a normal distribution does on another kind of CPU."""

    rank = 0

    def build_model(self) -> torch.nn.Module:
        model = super().build_model()
        model.register_buffer("seen", torch.full((3,), float(self.rank)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(self.rank * 2.0**-40)
        return model


def begin(group: Group, save_dir: str) -> tuple[list[float], list[float]]:
    """The model's numbers before and after the session is built."""
    config = options.complete(options.parse([*toy_words("Integers", global_batch_size=4), "--save-dir", save_dir]))
    task = make_task(OwnBeginning, config)
    task.rank = group.rank
    material = load_material(config, torch.device("cpu"), task)

    def numbers() -> list[float]:
        tensors = (*material.model.parameters(), *material.model.buffers())
        return torch.cat([tensor.detach().flatten().double() for tensor in tensors]).tolist()

    before = numbers()
    build_session(RankJob(config, RunDirectory(Path(save_dir)), group, material, metrics=Recorder())).close()
    return before, numbers()


def test_all_ranks_begin_with_the_model_of_rank_zero(tmp_path: Path) -> None:
    (first, zero), (_, one), (other, two) = run_ranks(begin, 3, prepared(tmp_path / "run"))
    assert other != first
    assert zero == one == two == first


def join(group: Group, save_dir: str, words: list[str]) -> None:
    """A rank of a run whose nodes meet by --join."""
    words = [*toy_words("Integers"), *words, "--join", "file:///anywhere", "--min-ranks", "1", "--save-dir", save_dir]
    config = options.complete(options.parse(words))
    material = load_material(config, torch.device("cpu"))
    build_session(RankJob(config, RunDirectory(Path(save_dir)), group, material, metrics=Recorder())).close()


def test_the_step_of_a_run_that_is_joined_does_not_depend_on_who_came_first(tmp_path: Path) -> None:
    run = prepared(tmp_path / "run")
    run_ranks(join, 1, run, ["--global-batch-size", "4"])
    with pytest.raises(RankRaised, match="ConfigError: --join needs --global-batch-size"):
        run_ranks(join, 1, run, ["--batch-size", "4"])


def validate(group: Group, save_dir: str, runs: list[list[str]]) -> list[list[tuple[int, bool]]]:
    return [[(row["step"], row["best"]) for row in train(group, save_dir, words).validations] for words in runs]


def test_validation_comes_after_epochs_after_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    # 32 samples, 8 a step: an epoch has 4 steps
    words = [word for word in toy_words("Integers") if word != "--disable-validation"]
    ends = [*words, "--global-batch-size", "8", "--max-update", "10"]
    runs = [ends, [*ends, "--validate-interval", "2"], [*ends, "--validate-interval-updates", "3"]]
    for found in run_ranks(validate, 2, prepared(tmp_path), runs):
        assert [[step for step, _ in run] for run in found] == [[4, 8, 10], [8, 10], [3, 4, 6, 8, 9, 10]]


def test_a_validation_that_only_the_end_brought_is_never_the_best(tmp_path: Path) -> None:
    """A run that is made longer afterwards has the best checkpoint of one that never ended there."""
    words = [word for word in toy_words("Integers") if word != "--disable-validation"]
    short = [*words, "--global-batch-size", "8", "--max-update", "2"]
    ((early, due),) = run_ranks(validate, 1, prepared(tmp_path), [short, [*short, "--validate-interval-updates", "2"]])
    assert early == [(2, False)]
    assert due == [(2, True)], "the twin: the first one that was due"


class Normalised(toys.Integers):
    """Normalises over each micro-batch, which one sample alone does not allow."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).double()


def first_micro_batches(group: Group, save_dir: str, runs: list[tuple[type[toys.Toy], list[str]]]) -> list[Any]:
    """Samples of each micro-batch of a rank's first step."""
    found = []
    for task_class, words in runs:
        config = options.complete(options.parse([*toy_words("Integers"), *words, "--save-dir", save_dir]))
        material = load_material(config, torch.device("cpu"), make_task(task_class, config))
        session = build_session(RankJob(config, RunDirectory(Path(save_dir)), group, material, metrics=Recorder()))
        controller = session.controller
        data = controller.loader.take(controller.planner.plan(controller.state.position))
        found.append([batch.size for batch in data.micro_batches])
        session.close()
    return found


def test_the_first_step_of_unknown_ranks_grows_from_one_sample_on(tmp_path: Path) -> None:
    def words(*more: str) -> list[str]:
        return ["--global-batch-size", "16", *more]

    runs = [
        (toys.Integers, words()),
        (toys.Integers, words("--batch-size", "2")),
        (toys.Integers, words("--balance", "equal")),
        (toys.Integers, words("--unit-size", "4")),
        (Normalised, words()),
    ]
    grown = [[1, 2, 4, 1], [1, 2, 2, 2, 1], [8], [4, 4], [8]]
    assert run_ranks(first_micro_batches, 2, prepared(tmp_path), runs) == [grown] * 2
    assert run_ranks(first_micro_batches, 1, prepared(tmp_path / "alone"), runs[:1]) == [[[16]]], "nothing to learn"


def warnings_of(group: Group, save_dir: str, runs: list[list[str]]) -> list[list[str]]:
    told = []
    for words in runs:
        handler = Keeping()
        logging.getLogger("hetseq.run.announcements").addHandler(handler)
        train(group, save_dir, [*toy_words("Integers"), *words])
        logging.getLogger("hetseq.run.announcements").removeHandler(handler)
        told.append([record.getMessage() for record in handler.records if record.levelno >= logging.WARNING])
    return told


def test_ranks_that_can_never_have_anything_to_do_are_told_of(tmp_path: Path) -> None:
    batches = [["2"], ["3"], ["8", "--unit-size", "8"]]
    runs = [["--max-update", "1", "--global-batch-size", *batch] for batch in batches]
    few, enough, units = run_ranks(warnings_of, 3, prepared(tmp_path), runs)[0]
    assert few == ["a step has 2 pieces of work for 3 ranks, so some have nothing to do: make the global batch larger"]
    assert enough == []
    assert units[0].startswith("a step has 1 piece of work for 3 ranks")
    assert units[0].endswith("make the global batch larger, or --unit-size smaller")


def tell(group: Group, save_dir: str, words: list[str]) -> tuple[list[dict[str, Any]], list[tuple[str, Any]]]:
    """The rows and events of a run whose shares are said to change after its second step."""
    config = options.complete(options.parse([*toy_words("Integers"), *words, "--save-dir", save_dir]))
    material, recorder = load_material(config, torch.device("cpu")), Recorder()
    session = build_session(RankJob(config, RunDirectory(Path(save_dir)), group, material, metrics=recorder))
    shift = Shift(4, (4, 4), (5, 3), 2.0, 1.5)
    session.controller.pace.follow = lambda plan, rows: shift if plan.step == 2 else None  # type: ignore[method-assign]
    try:
        session.train()
    finally:
        session.close()
    return recorder.rows, recorder.events


def test_rows_tell_of_each_rank_and_an_event_of_other_shares(tmp_path: Path) -> None:
    words = ["--global-batch-size", "8", "--max-update", "3", "--balance", "equal"]
    rows, events = run_ranks(tell, 2, prepared(tmp_path / "two"), words)[0]
    host = socket.gethostname()
    assert [row["ranks"]["names"] for row in rows] == [[f"{host}/cpu"] * 2] * 3
    for row in rows:
        lists = {name: len(values) for name, values in row["ranks"].items()}
        assert set(lists.values()) == {2}, lists
        assert min(row["ranks"]["wait_s"]) == 0.0
        assert min(row["ranks"]["compute_s"]) > 0
    assert [fields for name, fields in events if name == "rebalance"] == [
        {"step": 2, "first_step": 4, "shares_before": [4, 4], "shares": [5, 3], "predicted_seconds_before": 2.0,
         "predicted_seconds": 1.5}
    ]  # fmt: skip
    alone, _ = run_ranks(tell, 1, prepared(tmp_path / "one"), words)[0]
    assert all("ranks" not in row for row in alone)
