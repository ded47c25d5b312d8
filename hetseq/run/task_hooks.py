"""Calls the task's `after_step`: once for each step on every rank, though a lost peer may interrupt the work around it.

The ranks then compare what their tasks have decided, because each decides alone from numbers that all share. Only tasks
with an `after_step` of their own pay for this small gather.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hetseq.comm.group import Group, Rows, RowTransport
from hetseq.errors import DisagreementError, TaskError, TaskFileError
from hetseq.parallel.task_state import TaskState
from hetseq.run.regroup import PendingWork
from hetseq.task import Task, TrainedStep, is_overridden
from hetseq.training.controller import Controller

_TEXT_BYTES = 4096  # of a record, in the message about ranks that differ

#: name of a split -> its figures
Figures = Mapping[str, Mapping[str, float]]


class Call(enum.IntEnum):
    """The calls in which ranks meet between two steps, as rows of numbers."""

    END_OF_STEP, EVALUATE, ONLY_FIRST, WHOLE = range(4)

    @property
    def words(self) -> str:
        """The call as it appears in messages."""
        return ("at the end of the step", "in run.evaluate", "in run.only_first", "in step.whole")[self]


def meet(group: RowTransport, call: Call, step: int, values: tuple[int, int, int]) -> Rows:
    """The three numbers of each rank, (world_size, 3), if all are in the same call after the same step. Collective.

    Raises DisagreementError on every rank if they are not, and PeerLostError.
    """
    rows = group.all_gather_rows(np.array([call, step, *values], np.int64))
    for rank, (other, of_step) in enumerate(rows[:, :2].tolist()):
        if (other, of_step) != (rows[0, 0], rows[0, 1]):
            raise DisagreementError(
                f"rank 0 is {Call(rows[0, 0]).words} after step {rows[0, 1]}, rank {rank} {Call(other).words} after"
                f" step {of_step}: the script took different ways; let it decide by numbers that are equal on all"
                " ranks, such as step.loss, not by its rank"
            )
    return rows[:, 2:]


class TaskHooks:
    """The hook of one task. Every rank calls `call` after the same steps."""

    def __init__(self, task: Task, state: TaskState) -> None:
        self._task, self._state, self._name = task, state, f"{type(task).__name__}.after_step"
        self.is_used = is_overridden(task, "after_step")
        if is_overridden(task, "state_dict"):
            if not is_overridden(task, "load_state_dict"):
                raise TaskFileError(
                    f"{type(task).__name__} has a state_dict() but no load_state_dict(state): write both"
                )
            state.content()  # what no checkpoint can hold is found before the first step

    def call(self, controller: Controller, due: PendingWork, figures: Figures) -> None:
        """Let the task see the step of `due` if it has not yet, and agree on whether the run ends with it. Collective.

        `figures` are those of a validation just done. Raises DisagreementError if the tasks of two ranks differ, and
        TaskError for an answer that is no bool.
        """
        if self._state.step < due.step:  # else a lost peer has interrupted this call after the task had answered
            controller.state.ended_by_task = self._ask(controller, due, figures)
            self._state.step = due.step
        if self._agree(controller.group, due.step, is_over=controller.state.ended_by_task):
            controller.state.ended_by_task = True

    def _ask(self, controller: Controller, due: PendingWork, figures: Figures) -> bool:
        row, replica = due.row, controller.replica
        step = TrainedStep(
            number=due.step, epoch=due.epoch, ends_epoch=due.ends_epoch, loss=row["loss"], terms=row["terms"],
            grad_norm=row["grad_norm"], lr=row["lr"], valid=figures, model=replica.model, optimizer=replica.optimizer,
        )  # fmt: skip
        training = [(module, module.training) for module in replica.model.modules()]
        is_alike = replica.buffers.changing_alike()
        with is_alike, torch.set_grad_enabled(torch.is_grad_enabled()), replica.refusing_absent(self._name):
            answer = self._task.after_step(step)
        for module, was_training in training:  # as a hook that evaluates may leave it
            module.training = was_training
        if answer is not None and type(answer) is not bool:
            raise TaskError(
                f"{type(self._task).__name__}.after_step returned {answer!r}: expected True to end the run, else None"
            )
        factor = self._task.learning_rate_factor
        if type(factor) not in (int, float) or not 0 < factor < float("inf"):
            raise TaskError(
                f"{type(self._task).__name__}.learning_rate_factor is {factor!r} after step {due.step}: expected a"
                " number above 0"
            )
        return bool(answer)

    def _agree(self, group: Group, step: int, *, is_over: bool) -> bool:
        """Whether a rank asks all to end the run. Raises DisagreementError if their answers or states differ."""
        row = is_over, self._state.digest(), self._task.wants_to_stop
        rows = meet(group, Call.END_OF_STEP, step, row)  # (world_size, 3)
        odd = np.flatnonzero((rows[:, :2] != rows[0, :2]).any(axis=1)).tolist()
        if not odd:
            return bool(rows[:, 2].any())
        rank = odd[0]
        if rows[rank, 0] != rows[0, 0]:
            what = self._task.different_answers(bool(rows[0, 0]), rank)
        else:
            what = f"the state of {type(self._task).__name__} differs: {self._differing(group, rank)}"
        raise DisagreementError(
            f"after step {step} {what}; let it follow from the step's numbers, which are equal on all ranks, not from"
            " clocks, unseeded random numbers, tensors or files of a node"
        )

    def _differing(self, group: Group, rank: int) -> str:
        """The first value that `rank` and rank 0 do not share. Collective."""
        text = self._state.text()[:_TEXT_BYTES].ljust(_TEXT_BYTES)
        rows = group.all_gather_rows(np.frombuffer(text, np.int64))  # (world_size, words)
        first, other = (_flat(rows[number].tobytes()) for number in (0, rank))
        for key in [*first, *other]:
            if json.dumps(first.get(key)) != json.dumps(other.get(key)):  # as text, since NaN differs from itself
                return f"{key} is {first.get(key)!r} on rank 0, {other.get(key)!r} on rank {rank}"
        return f"rank {rank} holds other values than rank 0"


def _flat(text: bytes) -> dict[str, Any]:
    """The values of a record by path; empty if it was too long to travel whole."""
    try:
        record: dict[str, Any] = json.loads(text)
    except ValueError:
        return {}
    found: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}.{key}" if path else key)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):  # as groups of an optimizer
            walk({str(place): item for place, item in enumerate(value)}, path)
        else:
            found[path] = value

    walk({**record.pop("values"), **record}, "")
    return found
