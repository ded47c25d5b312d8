"""A script in the place of a task: what the rest of HetSeq asks a task for, answered from `run.own` and `run.steps`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from hetseq.data.lanes import check_is_indexed
from hetseq.data.loader import Source, place_on
from hetseq.errors import TaskError
from hetseq.loop.owned import Owned
from hetseq.run.loaded_task import LoadedTask, OwnLoop
from hetseq.task import Task, TrainedStep, counts_of
from hetseq.training.precision import Precision

#: the terms of a loop whose count is known only after its forward: the sum, and beside it that count
LATE_TERMS = ("loss", "count")
Count = Callable[[Any], Mapping[str, float]]


class ScriptTask(Task):
    """The parts of a script that training, checkpoints and other ranks need. Its loss is computed by the script."""

    def __init__(self, owned: Owned, *, collate: Callable[[Any], Any], count: Count | None) -> None:
        # no arguments: a script has its own
        self.owned, self.collater, self._count = owned, collate, count
        if count is None:
            self.__dict__["term_weights"] = {"loss": 1.0, "count": 0.0}  # of this script, not of its class
        self.has_left = False  # the script has left its loop

    @property
    def counts_ahead(self) -> bool:
        """Whether the counts of a micro-batch are known before its forward."""
        return self._count is not None

    def count(self, sample: Any) -> Any:
        return None if self._count is None else self._count(sample)

    def build_optimizer(self, parameter_groups: Any) -> torch.optim.Optimizer:
        return self.owned.optimizer()

    def different_answers(self, answer: bool, rank: int) -> str:
        who = ("rank 0", f"rank {rank}") if answer else (f"rank {rank}", "rank 0")
        return f"{who[0]} left the loop, and {who[1]} continues"

    def after_step(self, step: TrainedStep) -> bool:
        return self.has_left

    def state_dict(self) -> dict[str, Any]:
        return self.owned.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.owned.load_state_dict(state)


@dataclass(frozen=True)
class ScriptMaterial(LoadedTask):
    """A script, its data and its model on this rank."""

    def source(self, dataset: Any) -> Source:
        task = cast(ScriptTask, self.task)

        def count(sample: Any, size: int) -> tuple[float, ...]:
            if self.terms == LATE_TERMS:
                return float(size), 0.0
            counts = counts_of(task, sample, size)
            if set(counts) != set(self.terms):
                raise TaskError(f"count of run.steps gave {sorted(counts)}, earlier {sorted(self.terms)}")
            return tuple(counts[term] for term in self.terms)

        return Source(
            dataset, task.collater, count, self.place, len(self.terms), self.seed, self.device.type == "cuda",
            self.split,
        )  # fmt: skip


def material_of(
    name: str, task: ScriptTask, dataset: Any, *, device: torch.device, precision: Precision, seed: int,
    deadline_s: float,
) -> ScriptMaterial:  # fmt: skip
    """The script `name` as the rest of HetSeq sees it. Raises TaskError, and errors of the data set."""
    task.__class__ = type(name, (ScriptTask,), {"__module__": ScriptTask.__module__})  # its name in messages
    check_is_indexed(dataset, "run.steps got")
    if not len(dataset):
        raise TaskError("run.steps got data without a sample")
    is_late = not task.counts_ahead
    terms = LATE_TERMS if is_late else tuple(counts_of(task, task.collater([dataset[0]]), 1))
    return ScriptMaterial(
        task, dataset, {}, task.owned.model(), terms, place_on(device, precision.storage), seed, device, precision,
        own_loop=OwnLoop(is_late, deadline_s),
    )  # fmt: skip
