"""Evaluating a split: every sample once on any number of ranks, and the numbers of a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from hetseq import Config, Task
from hetseq.balance.shares import assign_shares
from hetseq.comm.group import LocalGroup
from hetseq.data.loader import Source
from hetseq.data.plan import MicroBatchCap
from hetseq.errors import DeviceMemoryError, TaskError, codes_in
from hetseq.system import device_memory as memory
from hetseq.task import counts_of, lengths_of, make_task
from hetseq.training.micro_batch_size import MicroBatchSizes
from hetseq.training.validation import Validator
from tests.support import cuda_errors

N = 13
TERMS = ("square", "masked")
WEIGHTS = (1.0, 0.25)


class Rows(list):  # type: ignore[type-arg]
    """Sample i: its index, a number, and a mask that is empty for two thirds of the data."""

    lengths = tuple(1 + index % 4 for index in range(N))

    def __init__(self, n: int = N) -> None:
        generator = np.random.default_rng(1)
        super().__init__(
            {"index": index, "x": torch.tensor(generator.normal()).double(), "mask": float(index % 3 == 1)}
            for index in range(n)
        )


class Judged(Task):
    """Two terms, two metrics; remembers which samples it was asked to judge."""

    most = N  # samples that memory holds at once

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.seen: list[int] = []
        self.sizes: list[int] = []  # of all forwards, also of those in vain

    def count(self, sample: Any) -> Any:
        return {"square": len(sample["x"]), "masked": sample["mask"].sum()}

    def loss(self, model: Any, sample: Any) -> Any:
        assert not torch.is_grad_enabled()
        assert not model.training
        self.sizes.append(len(sample["x"]))
        if self.sizes[-1] > self.most:
            raise cuda_errors.out_of_memory()
        self.seen += sample["index"].tolist()
        error = (model(sample["x"][:, None])[:, 0] - 1) ** 2
        mask = sample["mask"]
        return {"square": error.sum(), "masked": (error * mask).sum() / mask.sum() * mask.sum()}  # 0/0 without a mask

    def metrics(self, model: Any, sample: Any) -> Any:
        return {"positive": ((sample["x"] > 0).sum(), len(sample["x"])), "none": (0.0, 0.0)}


class Recalled(LocalGroup):
    """A rank among several in one process: answers with the rows that the others left in `table`."""

    def __init__(self, rank: int, world_size: int, table: dict[int, Any]) -> None:
        super().__init__()
        self.rank, self.world_size, self.table = rank, world_size, table

    def all_gather_rows(self, row: Any) -> Any:
        self.table[self.rank] = row.copy()
        return np.stack([self.table.get(rank, np.zeros_like(row)) for rank in range(self.world_size)])


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.9)).double()


def judge() -> Judged:
    task = make_task(Judged, Config())
    assert isinstance(task, Judged)
    return task


def make_validator(task: Task, rows: Any, cap: MicroBatchCap = MicroBatchCap(4)) -> Validator:  # noqa: B008
    def count(sample: Any, size: int) -> tuple[float, ...]:
        counts = counts_of(task, sample, size)
        return tuple(counts[term] for term in TERMS)

    source = Source(rows, default_collate, count, lambda sample: sample, len(TERMS), seed=7)
    return Validator("valid", source, cap, lengths_of(rows) if cap.tokens else None, TERMS, WEIGHTS)


def evaluate(
    weights: tuple[float, ...],
    *,
    n: int = N,
    cap: MicroBatchCap = MicroBatchCap(4),  # noqa: B008
) -> tuple[list[dict[str, float]], list[list[int]]]:
    """Results of each rank, and the samples that each judged."""
    table: dict[int, Any] = {}
    assign: Callable[[int], tuple[int, ...]] = lambda total: assign_shares(total, weights)  # noqa: E731
    for _ in range(2):  # first for the rows, then with the rows of all
        results, seen = [], []
        for rank in range(len(weights)):
            task, group = judge(), Recalled(rank, len(weights), table)
            results.append(make_validator(task, Rows(n), cap).evaluate(task, make_model(), group, assign))
            seen.append(task.seen)
    return results, seen


def plain_loop(n: int = N) -> dict[str, float]:
    """One sample after the other, in floats."""
    model = make_model().eval()
    square = masked = positive = masks = 0.0
    for row in Rows(n):
        error = (model(row["x"].reshape(1, 1)).item() - 1) ** 2
        square, masked, masks = square + error, masked + error * row["mask"], masks + row["mask"]
        positive += float(row["x"]) > 0
    means = {"square": square / n, "masked": masked / masks if masks else 0.0}
    return {"loss": means["square"] + 0.25 * means["masked"], **means, "none": 0.0, "positive": positive / n}


@pytest.mark.parametrize(
    "weights",
    [(1.0,), (1.0, 1.0), (5.0, 2.0, 1.0), (1.0, 0.0, 3.0), (1.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 1.0), (1.0,) * 20],
)
def test_every_sample_is_judged_once_and_the_numbers_are_those_of_a_plain_loop(weights: tuple[float, ...]) -> None:
    results, seen = evaluate(weights)
    assert sorted(index for rank in seen for index in rank) == list(range(N))
    assert all(result == results[0] for result in results)  # to the bit
    assert results[0] == pytest.approx(plain_loop(), rel=1e-12)
    assert list(results[0]) == ["loss", "square", "masked", "none", "positive"]


def test_the_mean_of_the_ranks_means_is_something_else() -> None:
    halves = []
    for rank in range(2):
        task, group = judge(), Recalled(rank, 2, {})
        halves.append(
            make_validator(task, Rows()).evaluate(task, make_model(), group, lambda total: assign_shares(total, (5, 1)))
        )
    assert sum(half["loss"] for half in halves) / 2 != pytest.approx(plain_loop()["loss"], rel=0.01)


@pytest.mark.parametrize("cap", [MicroBatchCap(), MicroBatchCap(1), MicroBatchCap(tokens=5), MicroBatchCap(3, 7)])
def test_the_size_of_validation_batches_changes_nothing(cap: MicroBatchCap) -> None:
    results, seen = evaluate((2.0, 1.0), cap=cap)
    assert sorted(index for rank in seen for index in rank) == list(range(N))
    assert results[0] == pytest.approx(plain_loop(), rel=1e-12)


@pytest.mark.parametrize("n", [1, 2])
def test_with_fewer_samples_than_ranks_the_idle_ones_know_the_result(n: int) -> None:
    results, seen = evaluate((1.0, 1.0, 1.0), n=n)
    assert [len(rank) for rank in seen] == [1, n - 1, 0]
    assert results[2] == results[0] == pytest.approx(plain_loop(n), rel=1e-12)
    assert results[0] != pytest.approx(plain_loop(n + 1), rel=1e-3)


def test_a_mask_that_is_empty_everywhere_counts_for_nothing() -> None:
    (result,), _ = evaluate((1.0,), n=1)
    assert result["masked"] == 0.0
    assert result["loss"] == result["square"] > 0


@pytest.mark.parametrize("was_training", [True, False])
def test_the_model_is_left_as_it_was(was_training: bool) -> None:
    task, model = judge(), make_model().train(was_training)
    make_validator(task, Rows()).evaluate(task, model, LocalGroup(), lambda total: (total,))
    assert model.training is was_training

    class Failing(Judged):
        def loss(self, model: Any, sample: Any) -> Any:
            raise KeyError("in loss")

    failing = make_task(Failing, Config())
    with pytest.raises(KeyError, match="in loss"):
        make_validator(failing, Rows()).evaluate(failing, model, LocalGroup(), lambda total: (total,))
    assert model.training is was_training


@pytest.mark.parametrize("cap", [MicroBatchCap(), MicroBatchCap(8), MicroBatchCap(tokens=30), MicroBatchCap(9, 25)])
@pytest.mark.parametrize("hook", ["loss", "metrics"])
def test_what_memory_does_not_hold_is_judged_in_halves_with_the_same_numbers(
    cap: MicroBatchCap, hook: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released: list[int] = []
    monkeypatch.setattr(memory, "release", lambda device: released.append(task.sizes[-1]))

    class Full(Judged):
        most = 3

        def metrics(self, model: Any, sample: Any) -> Any:
            if len(sample["x"]) > self.most:
                raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
            return super().metrics(model, sample)

        def loss(self, model: Any, sample: Any) -> Any:
            self.most = N if hook == "metrics" else 3
            found = super().loss(model, sample)
            self.most = 3
            return found

    task, model = make_task(Full, Config()), make_model()
    assert isinstance(task, Full)
    validator = make_validator(task, Rows(), cap)
    for _ in range(2):
        task.seen.clear()
        result = validator.evaluate(task, model, LocalGroup(), lambda total: (total,))
        assert result == pytest.approx(plain_loop(), rel=1e-12)
        assert sorted(set(task.seen)) == list(range(N))
        if hook == "loss":
            assert sorted(task.seen) == list(range(N)), "no sample is judged twice"
    assert all(size > 3 for size in released)
    assert len(released) == sum(size > 3 for size in task.sizes) < 4, "what was refused is not tried again"
    (told,) = [record.message for record in caplog.records]
    assert codes_in(told) == ["batch-halved"]
    assert f"did not hold a micro-batch of {released[0]} samples of valid" in told


def test_where_memory_does_not_hold_one_sample_validation_ends_in_words() -> None:
    task = judge()
    task.most = 0
    with pytest.raises(DeviceMemoryError, match="the memory of cpu does not hold even one sample of valid") as raised:
        make_validator(task, Rows()).evaluate(task, make_model(), LocalGroup(), lambda total: (total,))
    assert "leave this device out of --devices" in str(raised.value)
    assert task.sizes == [4, 2, 1]


def test_another_error_is_no_lack_of_memory() -> None:
    class Broken(Judged):
        def loss(self, model: Any, sample: Any) -> Any:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    task = make_task(Broken, Config())
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        make_validator(task, Rows()).evaluate(task, make_model(), LocalGroup(), lambda total: (total,))


def test_forwards_are_no_larger_than_training_has_learned() -> None:
    task, training = judge(), MicroBatchSizes(MicroBatchCap())
    validator = replace(make_validator(task, Rows(), MicroBatchCap()), learned=lambda: training.cap)
    for expected in ([N], [3] * 4 + [1]):
        task.sizes.clear()
        result = validator.evaluate(task, make_model(), LocalGroup(), lambda total: (total,))
        assert result == pytest.approx(plain_loop(), rel=1e-12)
        assert task.sizes == expected
        training.refuse(7)


def test_metrics_that_change_their_names_are_refused() -> None:
    class Fickle(Judged):
        def metrics(self, model: Any, sample: Any) -> Any:
            return {f"of_{len(sample['x'])}": (1.0, 1.0)}

    task = make_task(Fickle, Config())
    with pytest.raises(TaskError, match=r"Fickle.metrics gave \['of_4'\], earlier \['of_1'\]: give the same names"):
        make_validator(task, Rows()).evaluate(task, make_model(), LocalGroup(), lambda total: (total,))


class Summarised(Judged):
    """The root of a mean, which no quotient of sums is."""

    def summarise(self, sums: Any) -> Any:
        assert list(sums) == ["none", "positive"]
        total, count = sums["positive"]
        return {"root": (total / count) ** 0.5}


def test_a_task_may_make_other_figures_of_the_sums_of_all_samples() -> None:
    task, table = make_task(Summarised, Config()), {}
    for _ in range(2):
        results = [
            make_validator(task, Rows()).evaluate(
                task, make_model(), Recalled(rank, 3, table), lambda total: assign_shares(total, (5.0, 2.0, 1.0))
            )
            for rank in range(3)
        ]
    plain = plain_loop()
    assert results[0] == results[1] == results[2]
    assert results[0] == pytest.approx(
        {name: plain[name] for name in ("loss", *TERMS)} | {"root": plain["positive"] ** 0.5}, rel=1e-12
    )
    assert make_validator(task, Rows()).names(task, make_model()) == list(results[0]) == ["loss", *TERMS, "root"]


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        (None, "Wrong.summarise returned None: expected a dict of name to number"),
        ({"a": "b"}, "expected a dict of name to number"),
        ({"square": 1.0}, "Wrong.summarise gave 'square', which is the name of a loss"),
    ],
)
def test_figures_that_are_none_are_refused(figures: Any, message: str) -> None:
    class Wrong(Judged):
        def summarise(self, sums: Any) -> Any:
            return figures

    task = make_task(Wrong, Config())
    with pytest.raises(TaskError, match=message):
        make_validator(task, Rows()).evaluate(task, make_model(), LocalGroup(), lambda total: (total,))


@pytest.mark.parametrize("name", ["loss", "square"])
def test_a_metric_with_the_name_of_a_loss_is_refused(name: str) -> None:
    class Twice(Judged):
        def metrics(self, model: Any, sample: Any) -> Any:
            return {name: (100.0, 1.0)}

    task = make_task(Twice, Config())
    with pytest.raises(TaskError, match=f"Twice.metrics gave '{name}', which is the name of a loss: give it another"):
        make_validator(task, Rows()).evaluate(task, make_model(), LocalGroup(), lambda total: (total,))


def test_the_names_of_the_numbers_are_known_before_any_are() -> None:
    task, model = judge(), make_model()
    validator = make_validator(task, Rows())
    names = validator.names(task, model)
    assert names == list(validator.evaluate(task, model, LocalGroup(), lambda total: (total,)))
    assert model.training
