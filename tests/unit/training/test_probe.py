"""The look before the first step: a loss that is secretly a mean is found, an honest sum is left in peace."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from hetseq import Config, Task
from hetseq.errors import TaskError
from hetseq.task import make_task
from hetseq.training.task_checks import changed_terms, check_loss, find_terms

ROWS = [torch.tensor([1.0, 2.0]), torch.tensor([30.0, 4.0]), torch.tensor([5.0, 6.0])]


class Summing(Task):
    """An honest task; `shape` of its loss is what the others change."""

    def count(self, sample: Any) -> Any:
        return {"loss": len(sample)}

    def loss(self, model: Any, sample: Any) -> Any:
        return {"loss": model(sample).sum()}


class Averaging(Summing):
    def loss(self, model: Any, sample: Any) -> Any:
        return {"loss": model(sample).sum(1).mean()}


class OneOfTwoAverages(Summing):
    def count(self, sample: Any) -> Any:
        return {"kind": len(sample), "tokens": 2 * len(sample)}

    def loss(self, model: Any, sample: Any) -> Any:
        output = model(sample)
        return {"kind": output.sum(), "tokens": output.mean()}


class MeanModel(Task):
    """No loss of its own: its model gives the mean, which is right there."""


class Dropping(Summing):
    def loss(self, model: Any, sample: Any) -> Any:
        return {"loss": model(sample).sum() * random.uniform(0.4, 0.6)}


class Noisy(list):  # type: ignore[type-arg]
    """Samples that a data set draws anew each time they are asked for."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) * random.random()


def task_of(kind: type[Task]) -> Task:
    return make_task(kind, Config())


def check(
    kind: type[Task], rows: Any = ROWS, model: torch.nn.Module | None = None, collate: Any = default_collate
) -> None:
    task = task_of(kind)
    terms = find_terms(task, rows, collate)
    check_loss(
        task,
        model or torch.nn.Identity(),
        rows,
        collate=collate,
        place=lambda sample: sample,
        terms=terms,
        seed=7,
    )


def test_a_mean_is_found_and_a_sum_is_not() -> None:
    with pytest.raises(TaskError, match=r"Averaging\.loss returns the mean of 'loss', not its sum") as caught:
        check(Averaging)
    assert "give 3 and 34 alone but 18.5 together, expected 37" in str(caught.value)
    assert "reduction='sum'" in str(caught.value)
    check(Summing)


def test_of_two_terms_the_mean_is_named() -> None:
    with pytest.raises(TaskError, match="the mean of 'tokens'"):
        check(OneOfTwoAverages)


def test_a_model_that_averages_is_left_to_the_task_of_2020() -> None:
    check(MeanModel)


def test_a_data_set_of_one_sample_cannot_tell() -> None:
    check(Averaging, ROWS[:1])
    with pytest.raises(TaskError):
        check(Averaging, ROWS[:2])


def test_randomness_in_loss_and_data_is_held_still() -> None:
    random.seed(1)
    for _ in range(20):
        check(Dropping, Noisy(ROWS))
        with pytest.raises(TaskError):
            check(Averaging, Noisy(ROWS))


def masked_at_random(samples: Any) -> Any:
    """As a collater of masked language models: which entries count is drawn anew for each batch, six of them."""
    rows = torch.stack(list(samples))
    is_counted = torch.zeros(rows.numel(), dtype=torch.bool)
    is_counted[torch.randperm(rows.numel())[:6]] = True
    return {"rows": rows, "is_counted": is_counted.view(rows.shape)}


class Masked(Task):
    """A sum over entries that count, or their mean."""

    averages = False

    def count(self, sample: Any) -> Any:
        return {"loss": int(sample["is_counted"].sum())}

    def loss(self, model: Any, sample: Any) -> Any:
        counted = model(sample["rows"])[sample["is_counted"]]
        return {"loss": counted.mean() if self.averages else counted.sum()}


class MaskedMean(Masked):
    averages = True


EQUAL = [torch.full((6,), 2.0), torch.full((6,), 2.0)]  # each entry costs the same, as at the start of training


@pytest.mark.parametrize("seed", range(10))
def test_a_random_collater_is_no_mean(seed: int) -> None:
    torch.manual_seed(seed)
    check(Masked, EQUAL, collate=masked_at_random)
    with pytest.raises(TaskError, match="the mean of 'loss'"):
        check(MaskedMean, EQUAL, collate=masked_at_random)


def test_a_random_batch_that_cannot_be_cut_says_nothing_of_sums() -> None:
    def collate(samples: Any) -> Any:
        batch = masked_at_random(samples)
        return {**batch, "total": batch["rows"].sum()}

    check(Masked, EQUAL, collate=collate)
    check(MaskedMean, EQUAL, collate=collate)


def test_dropout_is_off_while_looking_and_back_on_afterwards() -> None:
    model = torch.nn.Dropout(0.5)
    assert model.training
    check(Summing, model=model)
    assert model.training
    with pytest.raises(TaskError):
        check(Averaging, model=model.eval())
    assert not model.training


def test_looking_leaves_no_gradient() -> None:
    model = torch.nn.Linear(2, 2)
    check(Summing, model=model)
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("loss", "reason"), [({"other": torch.tensor(1.0)}, "count counts"), ({"loss": torch.ones(3)}, "expected the sum")]
)
def test_a_broken_loss_is_found_at_the_start(loss: Any, reason: str) -> None:
    class Broken(Summing):
        def loss(self, model: Any, sample: Any) -> Any:
            return loss

    with pytest.raises(TaskError, match=reason):
        check(Broken)


def test_terms_come_in_the_order_of_count_and_weights_must_name_them() -> None:
    assert find_terms(task_of(OneOfTwoAverages), ROWS, default_collate) == ("kind", "tokens")

    class Mistyped(OneOfTwoAverages):
        term_weights = {"token": 2.0}

    with pytest.raises(
        TaskError, match=r"Mistyped.term_weights names \['token'\], but count gives \['kind', 'tokens'\]"
    ):
        find_terms(task_of(Mistyped), ROWS, default_collate)


def test_terms_that_come_and_go_are_told_apart_from_the_first() -> None:
    message = str(changed_terms(task_of(Summing), {"a": 1.0}, ("a", "b")))
    assert "gave the terms ['a'], but ['a', 'b'] for the first sample" in message


def test_a_data_set_that_answers_at_once_is_asked_at_once() -> None:
    class AtOnce(list):  # type: ignore[type-arg]
        asked: list[list[int]] = []

        def __getitems__(self, indices: list[int]) -> Any:
            self.asked.append(indices)
            return [self[index] for index in indices]

    rows = AtOnce(ROWS)
    check(Summing, rows)
    assert rows.asked == [[0], [0], [1], [0, 1]]
