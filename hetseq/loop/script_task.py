"""A script in the place of a task: what the rest of HetSeq asks a task for, answered from `run.own` and `run.steps`."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from hetseq.data.fetch import seed_everything
from hetseq.data.loader import Source, place_on
from hetseq.errors import TaskError
from hetseq.loop.owned import Owned
from hetseq.loop.refusals import refuse_data, refuse_process_group
from hetseq.parallel.task_state import TaskState
from hetseq.run.loaded_task import LoadedTask, OwnLoop
from hetseq.task import Task, TrainedStep, counts_of
from hetseq.training.precision import Precision

Count = Callable[[Any], Mapping[str, float]]


@dataclass(frozen=True)
class Terms:
    """The sums of a loop: the terms of its loss, and its metrics, each with a count."""

    losses: tuple[str, ...]  # of the loss
    has_late_count: bool  # the count of the loss is known only after its forward
    metrics: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All sums of a step, in their order; a count stands behind its term."""
        late = ("count",) if self.has_late_count else ()
        return (*self.losses, *late, *(name for metric in self.metrics for name in (metric, f"{metric} count")))

    @property
    def late_counts(self) -> dict[int, int]:
        """Places of the terms whose counts are sums too -> places of these."""
        first = len(self.losses) + self.has_late_count
        beside = {place: place + 1 for place in range(first, len(self.names), 2)}
        return {0: 1, **beside} if self.has_late_count else beside

    def place_of(self, metric: str) -> int:
        """The place of the sum of a metric; its count has the next place. Raises TaskError."""
        if metric not in self.metrics:
            told = f"metrics={self.metrics!r}" if self.metrics else f'metrics=("{metric}",)'
            raise TaskError(f"step.add got {metric!r}: run.steps names what it adds, as in {told}")
        return len(self.losses) + self.has_late_count + 2 * self.metrics.index(metric)


@dataclass(frozen=True)
class LoopArguments:
    """What `run.steps` was given about its batches and sums."""

    collate: Callable[[Any], Any]
    count: Count | None
    weights: Mapping[str, float]
    metrics: tuple[str, ...]
    phases: int
    clip_epsilon: float


class ScriptTask(Task):
    """The parts of a script that training, checkpoints and other ranks need. Its loss is computed by the script."""

    def __init__(self, owned: Owned, loop: LoopArguments) -> None:  # no arguments of a command: a script has its own
        self.owned, self.loop = owned, loop
        if type(loop.phases) is not int or loop.phases < 1:
            raise TaskError(f"run.steps got phases={loop.phases}: expected the number of updates in a step, from 1")
        if loop.count is None and loop.weights:
            raise TaskError("run.steps got weights= without count=: several terms need the count of each, in advance")
        self.has_left = False  # the script has left its loop
        self._script = _source()
        self.collate_seed: int | None = None  # with it, what the collater draws begins anew
        self._numbers: dict[str, float] = {}
        self.begin_log()

    def collater(self, samples: Any) -> Any:
        if self.collate_seed is not None:
            seed_everything(self.collate_seed)
        return self.loop.collate(samples)

    def weigh(self, terms: Terms) -> None:
        """Give the terms of the loss their weights, and others none. Raises TaskError for a weight of no term."""
        if unknown := sorted(set(self.loop.weights) - set(terms.losses)):
            raise TaskError(
                f"run.steps got weights for {', '.join(unknown)}: count= counts {', '.join(sorted(terms.losses))}"
            )
        weights = {name: self.loop.weights.get(name, 1.0) if name in terms.losses else 0.0 for name in terms.names}
        self.__dict__["term_weights"] = weights  # of this script, not of its class

    def begin_log(self) -> None:
        """Begin the numbers of another step."""
        self._numbers = self.__dict__["numbers_of_run_log"] = {}  # of this script, not of its class

    def log(self, numbers: Mapping[str, float]) -> None:
        """Put numbers beside those that were logged for this step."""
        self._numbers.update(numbers)

    @property
    def counts_ahead(self) -> bool:
        """Whether the counts of a micro-batch are known before its forward."""
        return self.loop.count is not None

    def count(self, sample: Any) -> Any:
        return None if self.loop.count is None else self.loop.count(sample)

    def build_optimizer(self, parameter_groups: Any) -> torch.optim.Optimizer:
        return self.owned.optimizer()

    def different_answers(self, answer: bool, rank: int) -> str:
        who = ("rank 0", f"rank {rank}") if answer else (f"rank {rank}", "rank 0")
        return f"{who[0]} left the loop, and {who[1]} continues"

    def after_step(self, step: TrainedStep) -> bool:
        return self.has_left

    def state_dict(self) -> dict[str, Any]:
        return {**self.owned.state_dict(), "phases": self.loop.phases, "script": self._script}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if (before := state.get("phases", 1)) != self.loop.phases:
            raise TaskError(
                f"run.steps got phases={self.loop.phases}, and the run was saved with phases={before}: its steps are"
                " counted by phases, so begin another run"
            )
        self.stays_ended = self._script is not None and state.get("script") == self._script
        self.owned.load_state_dict(state)

    def digest(self) -> str:
        """The owned numbers and texts as one text; tensors enter by their names alone."""
        return TaskState(self).text().decode()


def _source() -> str | None:
    """A digest of the script, whose loop may end otherwise once it was changed; None in a notebook."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    with suppress(OSError):
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return None


@dataclass(eq=False)
class ScriptMaterial(LoadedTask):
    """A script, its data and its model on this rank."""

    sums: Terms = Terms(("loss",), True)

    def source(self, dataset: Any) -> Source:
        task, terms = cast(ScriptTask, self.task), self.sums
        others = (0.0,) * (len(terms.names) - len(terms.losses))

        def count(sample: Any, size: int) -> tuple[float, ...]:
            if terms.has_late_count:
                return (float(size), *others)
            counts = counts_of(task, sample, size)
            if set(counts) != set(terms.losses):
                raise TaskError(f"count of run.steps gave {sorted(counts)}, earlier {sorted(terms.losses)}")
            return (*(counts[term] for term in terms.losses), *others)

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
    refuse_process_group()
    refuse_data("run.steps", dataset)
    is_late = not task.counts_ahead
    losses = ("loss",) if is_late else tuple(counts_of(task, task.collater([dataset[0]]), 1))
    terms = Terms(losses, is_late, task.loop.metrics)
    if len(set(terms.names)) < len(terms.names) or not all(isinstance(name, str) for name in terms.metrics):
        raise TaskError(f"run.steps got metrics={terms.metrics!r}: expected names other than {', '.join(losses)}")
    task.weigh(terms)
    return ScriptMaterial(
        task, dataset, {}, task.owned.model(), terms.names, place_on(device, precision.storage), seed, device,
        precision, sums=terms,
        own_loop=OwnLoop(terms.late_counts, deadline_s, task.loop.phases, task.loop.clip_epsilon),
    )  # fmt: skip
