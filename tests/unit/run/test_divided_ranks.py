"""Ranks that divide a model: owners, limits that they agree on, and options that are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hetseq import config as options
from hetseq.balance.layout import layout_of
from hetseq.comm.group import LocalGroup, Rows
from hetseq.config.sections import DistributedConfig, MemoryConfig
from hetseq.data.plan import MicroBatchCap
from hetseq.errors import ConfigError, DeviceMemoryError, TaskError
from hetseq.parallel.owned_units import TensorPlaces
from hetseq.parallel.tensor_ranks import TensorRanks
from hetseq.run.divided_ranks import groups_of_models, meet, sizes_in_step, validators_in_step
from hetseq.run.loaded_task import LoadedTask, load_material
from hetseq.run.owners import warn_of_no_save
from hetseq.run.rank_groups import ranks_in_groups
from hetseq.task import make_task
from hetseq.training.micro_batch_size import MicroBatchSizes
from hetseq.training.share import ShareComputer
from hetseq.training.validation import Validator
from tests.support.divided import NextWordTask


class OneOf(LocalGroup):
    """A rank among others that give these limits of samples and tokens, and other facts of one number."""

    def __init__(self, rank: int, limits: list[tuple[int | None, int | None]], facts: list[int] | None = None) -> None:
        super().__init__()
        self.rank, self.world_size, self._facts = rank, len(limits), facts
        self._rows = np.array([[2**63 - 1 if one is None else one for one in row] for row in limits], np.int64)

    def all_gather_rows(self, row: Rows) -> Rows:
        if len(row) == 1:
            return np.array([[int(row[0]) + one] for one in self._facts or [0] * self.world_size], np.int64)
        assert row.tolist() == self._rows[self.rank].tolist()
        return self._rows


LAYOUT = layout_of([0, 1, 2], (2, 1))


def agreed(rank: int, limits: list[tuple[int | None, int | None]], facts: list[int] | None = None) -> MicroBatchCap:
    sizes = MicroBatchSizes(MicroBatchCap(*limits[rank]))
    return sizes_in_step(sizes, OneOf(rank, limits, facts), LAYOUT, MemoryConfig()).cap


def test_ranks_of_one_model_cut_by_the_smallest_limits_and_others_by_their_own() -> None:
    limits: list[tuple[int | None, int | None]] = [(8, None), (None, None), (2, 64)]
    assert [agreed(rank, limits) for rank in range(3)] == [MicroBatchCap(8), MicroBatchCap(8), MicroBatchCap(2, 64)]


def test_ranks_of_one_model_that_count_tokens_on_one_of_them_only_are_refused() -> None:
    with pytest.raises(ConfigError, match="some ranks that hold one model together have --max-tokens"):
        agreed(0, [(8, None), (8, 64), (8, None)])


def test_ranks_of_one_model_that_checkpoint_other_modules_are_refused() -> None:
    limits: list[tuple[int | None, int | None]] = [(8, None)] * 3
    assert agreed(0, limits, facts=[0, 0, 1]).samples == 8  # the third rank has a model of its own
    with pytest.raises(ConfigError, match="different --checkpoint-modules"):
        agreed(0, limits, facts=[0, 1, 1])


def test_a_rank_with_a_model_of_its_own_may_cut_validation_by_its_memory() -> None:
    limits: list[tuple[int | None, int | None]] = [(8, None), (4, None), (2, None)]
    for rank, (samples, is_in_step) in enumerate([(4, True), (4, True), (2, False)]):
        source: Any = None
        validator = Validator("valid", source, MicroBatchCap(*limits[rank]), None, (), ())
        (found,) = validators_in_step([validator], OneOf(rank, limits), LAYOUT)
        assert (found.cap.samples, found.is_in_step) == (samples, is_in_step)


def test_each_model_is_a_group_and_ranks_whose_model_is_not_whole_own_nothing() -> None:
    assert groups_of_models([0, 1], (2,)) == ((), (1.0, 1.0))
    assert groups_of_models([0, 1, 2], (2, 1)) == (((0, 1), (2,)), (1.0, 1.0, 1.0))
    assert groups_of_models([1, 2, 3], (2, 1)) == (((0, 1), (2,)), (0.0, 1.0, 1.0))
    assert groups_of_models([0, 2, 3], (2,)) == ((), (0.0, 1.0, 1.0))


def test_groups_that_cut_a_model_are_refused() -> None:
    DistributedConfig(shard_model="state", shard_groups="2+2", tensor_parallel_degree="2")
    DistributedConfig(shard_model="state", shard_groups="3", tensor_parallel_degree="2+1")
    for groups, slot in (("1+3", 1), ("3", 3), ("2+1+1", 3)):
        with pytest.raises(ConfigError, match=f"--shard-groups .*: a group begins with rank {slot}, in the middle"):
            DistributedConfig(shard_model="state", shard_groups=groups, tensor_parallel_degree="2")


def test_a_run_without_any_whole_model_is_told_what_to_start() -> None:
    divided: Any = None
    config = DistributedConfig(tensor_parallel_degree="2")
    with pytest.raises(ConfigError, match="no model is whole, since of the ranks that divide it only 1 is here"):
        meet(divided, LocalGroup(), layout_of([1], (2,)), [1], config)


@pytest.mark.parametrize("degree", ["0", "2+3", "two", "2+", ""])
def test_a_degree_that_is_none_is_refused(degree: str) -> None:
    with pytest.raises(ConfigError, match=r"--tensor-parallel-degree .*expected the ranks of each model: one number"):
        DistributedConfig(tensor_parallel_degree=degree)


@pytest.mark.parametrize("parts", [{}, {"head.weight": "a part"}])
def test_a_run_that_saves_nothing_is_offered_whole_states_only_if_a_rank_can_have_one(
    parts: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    owned: Any = SimpleNamespace(described=SimpleNamespace(parts=parts))
    warn_of_no_save(owned, OneOf(0, [(None, None)] * 2), makes_images=False)
    (said,) = caplog.messages
    assert "keeps no state: if a rank that owns a part of it is lost" in said
    assert ("--shard-model none" in said) == (not parts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_model": "all"}, "divides layers, which with --shard-model all come and go as a whole"),
        ({"shard_model": "auto"}, "divides layers, which with --shard-model auto come and go as a whole"),
        ({"delayed_init": True}, "divides a model that has its first numbers: leave --delayed-init out"),
    ],
)
def test_what_cannot_be_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DistributedConfig(tensor_parallel_degree="2", **options)


def loaded(slot: int, *words: str) -> LoadedTask:
    config = options.complete(options.parse(["--tensor-parallel-degree", "2", *words]))
    return load_material(config, torch.device("cpu"), make_task(NextWordTask, config), slot=slot)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--compile",), "--compile cannot compile the sums between the 2 ranks that divide the model"),
        (("--data-by-host",), "compute the same samples, and with --data-by-host each host has others"),
    ],
)
def test_a_task_is_not_divided_beside_these_options(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(0, *words)


def test_a_divided_task_knows_its_ties_and_keeps_no_tensors() -> None:
    material = loaded(1)
    assert material.divided is not None
    assert material.divided.tied == {"head.weight": "words.weight"}
    material.task.state_dict = lambda: {"average": torch.zeros(2)}  # type: ignore[method-assign]
    with pytest.raises(TaskError, match=r"state_dict\(\) of NextWordTask has the tensor .*average"):
        material.task_state.content()


def test_a_shadow_beside_divided_models_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="--shadow follows a run whose ranks have the whole model"):
        DistributedConfig(tensor_parallel_degree="2", shadow=True, join="tcp://127.0.0.1:1", min_ranks=1)


def test_a_group_that_lacks_a_part_of_the_model_joins_another_one() -> None:
    rooms: Any = [SimpleNamespace(host=0)] * 3
    tensors = TensorPlaces(((0,), (0,), (1,)), (), frozenset({1}))
    memory: Any = SimpleNamespace(bytes=1)
    for has_model, groups in ((None, ((0,), (1, 2))), (tensors.are_whole, ())):
        assert ranks_in_groups((2,), rooms, [1, 1, 1], None, memory, [0, 2, 3], has_model) == groups


def test_a_share_that_fits_no_memory_ends_the_run_with_a_smaller_batch_as_remedy() -> None:
    computer: Any = ShareComputer.__new__(ShareComputer)
    computer.device, computer.name, computer.sizes = torch.device("cpu"), "rank 0", MicroBatchSizes(MicroBatchCap(8))
    computer.replica = SimpleNamespace(divided=SimpleNamespace(ranks=TensorRanks(2, 0)))
    computer.attempt = lambda data, counts: (None, SimpleNamespace(size=8, work=8))
    computer._cut_in_rounds = lambda data: False
    data: Any = SimpleNamespace(micro_batches=[])
    with pytest.raises(
        DeviceMemoryError, match=r"a micro-batch of 8 samples, which ranks .*: give a smaller --batch-size"
    ):
        computer.compute(data, (), lambda data, cap: data)
