"""The contract of a task: what is kept is used as it is, what is broken is told in the words of the user's own file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from hetseq import Config, Task
from hetseq.config.sections import TaskConfig
from hetseq.errors import ConfigError, HetSeqError, MissingSplitError, TaskError, TaskFileError
from hetseq.task import (
    build_model,
    check_sums,
    collater_of,
    counts_of,
    is_overridden,
    lengths_of,
    load_split,
    make_task,
    task_arguments,
)


class Own(Task):
    """A task whose answers are set by the test."""

    counts: Any = None
    split: Any = None

    def count(self, sample: Any) -> Any:
        return self.counts

    def load_dataset(self, split: str) -> Any:
        return self.split


def own(**answers: Any) -> Own:
    task = make_task(Own, Config())
    assert isinstance(task, Own)
    for name, value in answers.items():
        setattr(task, name, value)
    return task


def said(kind: type[HetSeqError], fn: Any, *args: Any) -> str:
    with pytest.raises(kind) as caught:
        fn(*args)
    return str(caught.value)


# Counts.


def test_a_task_that_counts_nothing_counts_its_samples() -> None:
    assert counts_of(own(), "sample", 5) == {"loss": 5.0}
    assert counts_of(own(counts={"loss": 3}), "sample", 5) == {"loss": 3.0}


def test_counts_may_be_any_kind_of_number() -> None:
    task = own(counts={"a": 2, "b": torch.tensor(3), "c": np.float32(0.5), "d": True, "e": 0})
    assert counts_of(task, None, 1) == {"a": 2.0, "b": 3.0, "c": 0.5, "d": 1.0, "e": 0.0}


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ({}, "gave no terms: expected a dict of term to count"),
        (7, "returned int: expected a dict of term to count"),
        ([1, 2], "returned list: expected a dict"),
        ({"a": -1}, "gave -1.0 for 'a': expected 0 or more"),
        ({"a": math.nan}, "gave nan for 'a'"),
        ({"a": math.inf}, "gave inf for 'a'"),
        ({"a": "many"}, "gave 'many' for 'a': expected a number"),
        ({"a": None}, "gave None for 'a': expected a number"),
        ({"a": torch.ones(2)}, "for 'a': expected a number"),
    ],
)
def test_a_count_that_divides_nothing_is_refused(counts: Any, reason: str) -> None:
    message = said(TaskError, counts_of, own(counts=counts), None, 1)
    assert message.startswith("Own.count ")
    assert reason in message


# Sums.


def test_sums_with_the_terms_of_the_counts_are_passed_on() -> None:
    sums = {"b": torch.tensor(1.0), "a": torch.tensor(2.0, dtype=torch.float64)}
    assert check_sums(own(), sums, ("a", "b")) is sums


@pytest.mark.parametrize(
    ("sums", "reason"),
    [
        (torch.tensor(1.0), "returned Tensor: expected a dict of term to summed loss"),
        (None, "returned NoneType: expected a dict"),
        ({"a": torch.tensor(1.0)}, "returned the terms ['a'], but Own.count counts ['a', 'b']"),
        ({"a": torch.tensor(1.0), "c": torch.tensor(1.0)}, "['a', 'c'], but Own.count counts ['a', 'b']"),
        ({"a": torch.tensor(1.0), "b": torch.ones(4)}, "gave (4,) for 'b': expected the sum"),
        ({"a": torch.tensor(1.0), "b": 1.0}, "gave float for 'b': expected the sum"),
    ],
)
def test_sums_that_break_the_contract_are_refused(sums: Any, reason: str) -> None:
    message = said(TaskError, check_sums, own(), sums, ("a", "b"))
    assert message.startswith("Own.loss ")
    assert reason in message


class Mean(torch.nn.Module):
    """A model of 2020: it returns the mean loss of its samples."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x - y).abs().mean()


@pytest.mark.parametrize("kind", [tuple, list, dict])
def test_a_model_that_returns_its_mean_needs_no_loss(kind: type) -> None:
    x, y = torch.tensor([1.0, 5.0, 3.0]), torch.tensor([0.0, 1.0, 1.0])
    sample = {"x": x, "y": y} if kind is dict else kind([x, y])
    sums = own().micro_step(Mean(), sample, {"loss": 3.0})
    assert {term: value.item() for term, value in sums.items()} == {"loss": 7.0}
    assert own().micro_step(Mean(), sample, {"loss": 1.0})["loss"].item() != 7.0


def test_a_model_that_returns_outputs_needs_a_loss() -> None:
    message = said(TaskError, own().micro_step, torch.nn.Identity(), torch.ones(3), {"loss": 3.0})
    assert message.startswith("the model returned Tensor, expected its mean loss")
    assert "loss(model, sample)" in message


def test_a_loss_of_ones_own_is_called_as_it_is() -> None:
    class Losing(Own):
        def loss(self, model: Any, sample: Any) -> Any:
            return {"loss": sample}

    task = make_task(Losing, Config())
    assert task.micro_step(torch.nn.Identity(), 5, {"loss": 3.0}) == {"loss": 5}
    assert is_overridden(task, "loss")
    assert not is_overridden(own(), "loss")


# Tasks of 2020.


def test_arguments_are_flat_as_they_were_in_2020() -> None:
    config = Config(task=TaskConfig(vocab_file="vocab.txt", seed=3))
    args = task_arguments(config)
    assert (args.dict, args.seed, args.max_sentences, args.update_freq) == ("vocab.txt", 3, None, (1,))
    assert args.config is config
    assert not hasattr(args, "no_such_option")


def test_a_hook_of_2020_that_is_not_called_any_more_is_refused_with_what_to_write() -> None:
    class Old(Task):
        def train_step(self, sample: Any, model: Any, optimizer: Any) -> None: ...

    message = said(TaskFileError, make_task, Old, Config())
    assert message.startswith("Old overrides train_step")
    assert "def loss(self, model, sample)" in message


def test_setup_task_may_make_the_task_itself() -> None:
    class Old(Task):
        @classmethod
        def setup_task(cls, args: Any, **kwargs: Any) -> Any:
            task = cls(args)
            task.vocabulary = args.dict  # type: ignore[attr-defined]
            return task

    assert make_task(Old, Config(task=TaskConfig(vocab_file="words"))).vocabulary == "words"  # type: ignore[attr-defined]

    class Forgetful(Task):
        @classmethod
        def setup_task(cls, args: Any, **kwargs: Any) -> Any: ...

    assert "setup_task returned NoneType, expected the task" in said(TaskFileError, make_task, Forgetful, Config())


def test_build_model_may_take_args() -> None:
    class Old(Own):
        def build_model(self, args: Any) -> Any:  # type: ignore[override]
            return torch.nn.Linear(args.seed, 1)

    class New(Own):
        def build_model(self) -> Any:
            return torch.nn.Linear(2, 1)

    old = build_model(make_task(Old, Config(task=TaskConfig(seed=5))))
    new = build_model(make_task(New, Config()))
    assert (old.in_features, new.in_features) == (5, 2)


def test_a_build_model_that_gives_no_module_is_refused() -> None:
    class Wrong(Own):
        def build_model(self) -> Any:
            return lambda x: x

    assert "build_model returned function, expected a Module" in said(
        TaskFileError, build_model, make_task(Wrong, Config())
    )
    assert "Own has no build_model()" in said(TaskFileError, build_model, own())


# Data sets.


class Misspelt(Task):
    def build_modle(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)


def test_a_method_that_is_missing_may_be_there_with_another_name() -> None:
    task = make_task(Misspelt, Config())
    assert said(TaskFileError, build_model, task) == (
        "Misspelt has no build_model(): expected a method that returns the model; it has build_modle: rename that to"
        " build_model"
    )
    assert said(TaskFileError, load_split, task, "train") == (
        "Misspelt has no load_dataset(split): expected a method that returns the samples of a split; write one"
    )


def test_a_split_is_returned_or_kept_in_datasets() -> None:
    assert load_split(own(split=[1, 2]), "train") == [1, 2]
    old = own()
    old.datasets["train"] = [3]
    assert load_split(old, "train") == [3]
    assert "neither returned nor in self.datasets['valid']" in said(MissingSplitError, load_split, old, "valid")


@pytest.mark.parametrize(
    ("split", "kind", "reason"),
    [([], MissingSplitError, "without samples"), (7, TaskFileError, "gave a int: expected a data set with __len__")],
)
def test_what_is_no_data_set_is_refused(split: Any, kind: type[HetSeqError], reason: str) -> None:
    message = said(kind, load_split, own(split=split), "train")
    assert message.startswith("Own.load_dataset('train')")
    assert reason in message


class WithLengths(list):  # type: ignore[type-arg]
    lengths = (5, 6, 7)


class WithTokens(list):  # type: ignore[type-arg]
    def num_tokens(self, index: int) -> int:
        return int(self[index]) * 10


def test_lengths_come_from_a_table_or_one_by_one() -> None:
    table, single = lengths_of(WithLengths([1, 1, 1])), lengths_of(WithTokens([3, 2, 1]))
    assert table is not None
    assert single is not None
    assert table(np.array([2, 0])).tolist() == [7, 5]
    assert single(np.array([2, 0])).tolist() == [10, 30]
    assert lengths_of([1, 2]) is None
    assert "2 samples but (3,) lengths" in said(ConfigError, lengths_of, WithLengths([1, 1]))


def test_the_tasks_collater_comes_before_the_data_sets() -> None:
    class Set(list):  # type: ignore[type-arg]
        collater = staticmethod(sum)

    task = own()
    assert collater_of(task, [1]) is default_collate
    assert collater_of(task, Set()) is sum
    task.collater = max  # type: ignore[attr-defined]
    assert collater_of(task, Set()) is max
