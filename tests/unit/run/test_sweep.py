"""A pass over a split by all ranks: the same bits on any number, each sample once, pieces dealt by speed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from hetseq import Config, Task
from hetseq.comm.group import LocalGroup
from hetseq.data.loader import Source
from hetseq.data.plan import MicroBatchCap
from hetseq.errors import DeviceMemoryError, HetSeqError, TaskError, TaskFileError
from hetseq.run.inference import evaluate, predict, size_of_round, sweep
from hetseq.task import make_task
from hetseq.training.validation import Validator
from tests.support import cuda_errors

N = 13  # no number of ranks below divides it, nor do 4 samples a piece


class Ranked(LocalGroup):
    """One of several ranks that are threads of this process."""

    def __init__(self, rank: int, table: dict[int, Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.world_size, self._table, self._barrier = rank, barrier.parties, table, barrier

    def all_gather_rows(self, row: Any) -> Any:
        self._table[self.rank] = row.copy()
        self._barrier.wait(10)
        rows = np.stack([self._table[rank] for rank in range(self.world_size)])
        self._barrier.wait(10)
        return rows


def on_ranks(world_size: int, life: Callable[[Any, Any], Any]) -> list[Any]:
    """What `life(group, model)` gives on each rank."""
    models = [make_model() for _ in range(world_size)]  # here, since all threads share one generator
    table: dict[int, Any] = {}
    barrier = threading.Barrier(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        lives = [pool.submit(life, Ranked(rank, table, barrier), models[rank]) for rank in range(world_size)]
        return [future.result(20) for future in lives]


class Rows(list):  # type: ignore[type-arg]
    """Sample i: its index and three numbers; without a label, and listed backwards as a data set of 2020 may."""

    lengths = tuple(1 + index % 4 for index in range(N))

    def __init__(self) -> None:
        generator = np.random.default_rng(1)
        super().__init__({"index": index, "x": torch.from_numpy(generator.normal(size=3))} for index in range(N))

    def ordered_indices(self) -> Any:
        return np.arange(N)[::-1]


class Named(Task):
    """Predicts the index and the score of each sample; `said` is said of the batch with sample 0 instead."""

    said: Any = None
    most = N  # samples that memory holds at once
    most_tokens = 100

    def _need_memory(self, sample: Any) -> None:
        if len(sample["index"]) > self.most:
            raise cuda_errors.out_of_memory()

    def loss(self, model: Any, sample: Any) -> Any:
        self._need_memory(sample)
        return {"loss": (model(sample["x"]) ** 2).sum()}

    def metrics(self, model: Any, sample: Any) -> Any:
        return {"positive": ((sample["x"] > 0).sum(), sample["x"].numel())}

    def predictions(self, model: Any, sample: Any) -> list[str]:
        assert not model.training
        assert not torch.is_grad_enabled()
        self._need_memory(sample)
        size, tokens = len(sample["index"]), sum(Rows.lengths[index] for index in sample["index"].tolist())
        assert size == 1 or tokens <= self.most_tokens
        if self.said is not None and 0 in sample["index"].tolist():
            return self.said  # type: ignore[no-any-return]
        scores = model(sample["x"])[:, 0].tolist()
        return [f"{index} {'é' * (index % 3)}{score:.17g}" for index, score in zip(sample["index"].tolist(), scores)]


def make_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Dropout(0.9)).double()


def validator(cap: MicroBatchCap = MicroBatchCap(4)) -> Validator:  # noqa: B008
    source = Source(
        Rows(), default_collate, lambda sample, size: (float(size),), lambda sample: sample, 1, seed=7
    )  # fmt: skip
    lengths = None if cap.tokens is None else lambda places: np.array(Rows.lengths)[::-1][places]
    return Validator("valid", source, cap, lengths, ("loss",), (1.0,))


@pytest.mark.parametrize("weights", [None, (5.0, 1.0, 0.0)])
def test_the_numbers_have_the_same_bits_on_any_number_of_ranks(weights: tuple[float, ...] | None) -> None:
    task, results = make_task(Named, Config()), []
    for world_size in (1, 2, 3):
        fixed = None if weights is None else weights[:world_size]
        results += on_ranks(
            world_size, lambda group, model, fixed=fixed: evaluate(validator(), task, model, group, weights=fixed)
        )  # fmt: skip
    plain = validator().evaluate(task, make_model(), LocalGroup(), lambda total: (total,))
    assert results == [plain] * 6
    x, model = torch.stack([row["x"] for row in Rows()]), make_model().eval()
    assert plain["loss"] == pytest.approx((model(x) ** 2).mean().item(), rel=1e-12)
    assert plain["positive"] == (x > 0).double().mean().item()


@pytest.mark.parametrize("cap", [MicroBatchCap(4), MicroBatchCap(3, 5), MicroBatchCap(100)], ids=str)
def test_each_sample_has_one_line_in_the_order_of_the_data_set(tmp_path: Path, cap: MicroBatchCap) -> None:
    task, texts = make_task(Named, Config()), []
    task.most_tokens = cap.tokens or Named.most_tokens  # type: ignore[attr-defined]
    for world_size in (1, 2, 3):
        path = tmp_path / f"{world_size}.txt"
        life = lambda group, model, path=path: predict(validator(cap), task, model, group, path)  # noqa: E731
        assert on_ranks(world_size, life) == [N] * world_size
        texts.append(path.read_text())
    assert texts[0] == texts[1] == texts[2]
    assert [line.split()[0] for line in texts[0].splitlines()] == [str(index) for index in range(N)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_memory_does_not_hold_is_evaluated_and_predicted_in_halves(tmp_path: Path, world_size: int) -> None:
    """Pieces stay those that the ranks were dealt, so the lines are in order and the numbers those of a calm run."""
    calm, task = make_task(Named, Config()), make_task(Named, Config())
    task.most = 3  # type: ignore[attr-defined]
    for cap in (MicroBatchCap(7), MicroBatchCap(9, 20), MicroBatchCap(100)):
        expected = evaluate(validator(cap), calm, make_model(), LocalGroup())
        life = lambda group, model, cap=cap: evaluate(validator(cap), task, model, group)  # noqa: E731
        found = on_ranks(world_size, life)
        assert found == [found[0]] * world_size
        assert found[0] == pytest.approx(expected, rel=1e-12)
        paths = [tmp_path / f"{cap.samples}-{name}.txt" for name in ("calm", "full")]
        predict(validator(cap), calm, make_model(), LocalGroup(), paths[0])
        life = lambda group, model, cap=cap, path=paths[1]: predict(validator(cap), task, model, group, path)  # noqa: E731
        on_ranks(world_size, life)
        assert paths[1].read_text() == paths[0].read_text()
        assert len(paths[1].read_text().splitlines()) == N


def test_where_memory_does_not_hold_one_sample_it_is_said() -> None:
    task = make_task(Named, Config())
    task.most = 0  # type: ignore[attr-defined]
    with pytest.raises(DeviceMemoryError, match="the memory of cpu does not hold even one sample of valid"):
        evaluate(validator(), task, make_model(), LocalGroup())


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (["a"], "Named.predictions gave 1 of them for 4 samples: expected a list with one text for each"),
        (iter("abcd"), "gave str_ascii_iterator for 4 samples"),
        (["a", "b\nc", "d", "e"], r"gave 'b\\nc' for sample 1: expected one line"),
        (["a", "b\r", "d", "e"], "for sample 1: expected one line"),
        (["a", "b", "c", 7], "gave 7 for sample 3: expected a text"),
        (["a", "b", "c", "\ud800"], "is not Unicode"),
    ],
)
def test_what_is_no_line_per_sample_is_refused(tmp_path: Path, said: Any, words: str) -> None:
    task = make_task(Named, Config())
    task.said = said  # type: ignore[attr-defined]
    with pytest.raises(TaskError, match=words):
        predict(validator(), task, make_model(), LocalGroup(), tmp_path / "out.txt")


def test_a_task_without_predictions_is_told_what_to_write() -> None:
    class Silent(Task):
        pass

    with pytest.raises(TaskFileError, match=r"(?s)^Silent has no predictions.*def predictions\(self, model, sample\)"):
        make_task(Silent, Config()).predictions(make_model(), None)


def test_a_file_that_cannot_be_written_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(Named, Config())
    with pytest.raises(HetSeqError, match=r"cannot be written in .*gone: No such file or directory; choose another"):
        predict(validator(), task, make_model(), LocalGroup(), tmp_path / "gone" / "out.txt")
    monkeypatch.setattr("hetseq.run.inference._ANEW", os.O_WRONLY)
    with pytest.raises(HetSeqError, match="cannot be written in /dev: No space left"):
        predict(validator(), task, make_model(), LocalGroup(), Path("/dev/full"))


def test_first_one_piece_each_then_half_of_what_is_left_and_no_round_lasts_long() -> None:
    assert size_of_round(100, 3, []) == 3
    assert size_of_round(2, 3, []) == 2
    assert size_of_round(100, 3, [50.0, 50.0, 50.0]) == 50
    assert size_of_round(5, 3, [50.0, 50.0, 50.0]) == 3
    assert size_of_round(2, 3, [50.0, 50.0, 50.0]) == 2
    assert size_of_round(10**6, 2, [1.0, 0.5]) == 30  # 20 s of both together
    assert size_of_round(10**6, 2, [1e-3, 1e-3]) == 2
    assert size_of_round(10**6, 2, [1e6, 1e6]) == 512


@pytest.mark.parametrize(
    ("weights", "of_rank_zero"), [(None, range(155, 165)), ((1.0, 1.0), range(100, 110)), ((1.0, 0.0), [200])]
)
def test_pieces_are_dealt_by_the_speed_that_each_rank_shows_or_by_fixed_weights(
    weights: tuple[float, ...] | None, of_rank_zero: Sequence[int]
) -> None:
    """Rank zero takes 10 ms for a piece, but 1 s more for the first one, as a GPU does; the other one always 40 ms.

    Rounds of an odd number give rank zero one more where both weigh the same.
    """
    pieces = [(index, index + 1) for index in range(200)]

    def life(group: Any, _: Any) -> tuple[list[bytes], int]:
        clock, done = [0.0], list[tuple[int, int]]()

        def work(mine: Sequence[tuple[int, int]]) -> list[bytes]:
            clock[0] += (0.01, 0.04)[group.rank] * len(mine) + (0.0 if done else (1.0, 0.0)[group.rank])
            done.extend(mine)
            return [str(start).encode() for start, _ in mine]

        return list(sweep(group, pieces, work, weights=weights, now=lambda: clock[0])), len(done)

    (answers, mine), (others, rest) = on_ranks(2, life)
    assert answers == others == [str(index).encode() for index in range(200)]
    assert mine + rest == 200
    assert mine in of_rank_zero
