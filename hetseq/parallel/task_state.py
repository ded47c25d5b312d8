"""The values that a user's task keeps between steps, as named tensors and a JSON record like the rest of a replica.

A task that derives something from the course of its run (an average of the weights, the best loss, a patience) gives it
in `state_dict`. It is then in every checkpoint, and a rank that joins receives it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from hetseq.comm.directory_groups import gather_texts
from hetseq.comm.group import RowTransport
from hetseq.errors import CheckpointMismatch, TaskError

_TENSOR = "$tensor"  # stands for a tensor in the record
_STREAM = "lanes"  # the key of the stream's place in the record
_DEEPEST = 64


class KeepsState(Protocol):
    """The part of a task that this module needs."""

    learning_rate_factor: float
    stays_ended: bool

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Stream(Protocol):
    """Training data that continue near their place if they are given what other ranks know: `data.lanes`."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def hear(self, states: Iterable[Mapping[str, Any]]) -> None: ...


class TaskState:
    """The state of the task of one rank. `step` is the last one whose `after_step` the task has seen.

    With it travels the place of a `stream`, which saves reading and changes no number.
    """

    def __init__(self, task: KeepsState, stream: Stream | None = None, *, is_script: bool = False) -> None:
        self._task, self._stream, self.is_script, self.step = task, stream, is_script, 0
        self.refuses_tensors = False  # ranks divide the model

    @property
    def stays_ended(self) -> bool:
        """Whether a run that its task has ended is over for this command; known once the state is loaded."""
        return self._task.stays_ended

    def content(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Live tensors by name (`task.<key>...`), and the record, which is JSON.

        Raises TaskError for a value that neither JSON nor a tensor can hold, and for a tensor where ranks
        divide the model.
        """
        tensors, record = self._own()
        if tensors and self.refuses_tensors:
            raise TaskError(
                f"state_dict() of {type(self._task).__name__} has the tensor {next(iter(tensors))}, of which ranks that"
                " divide the model (--tensor-parallel-degree) may have different parts: keep numbers and text there"
            )
        return tensors, record if self._stream is None else {**record, _STREAM: self._stream.state_dict()}

    def load(self, tensors: Mapping[str, Tensor], record: Mapping[str, Any], *, goes_back: bool = False) -> None:
        """Give the task what `content` gave. Raises CheckpointMismatch if a tensor of the record is missing.

        A task that `goes_back` has made later steps: it is given an empty state too, if its own is not empty.
        """
        self.step, self._task.learning_rate_factor = record["step"], record["learning_rate_factor"]
        if record["values"] or (goes_back and self._own()[1]["values"]):
            self._task.load_state_dict(_joined(record["values"], tensors))
        if self._stream is not None and _STREAM in record:
            self._stream.load_state_dict(record[_STREAM])

    def share(self, group: RowTransport) -> None:
        """Learn where the other ranks are in a stream, if there is one. Collective."""
        if self._stream is not None:
            self._stream.hear(map(json.loads, gather_texts(group, json.dumps(self._stream.state_dict()))))

    def digest(self) -> int:
        """63 bits of the record; tensors enter by their names alone, since devices round differently."""
        return int.from_bytes(hashlib.blake2b(self.text(), digest_size=8).digest(), "big") >> 1

    def text(self) -> bytes:
        """The record as JSON, the same for the same values."""
        return json.dumps(self._own()[1], sort_keys=True).encode()

    def _own(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        values = _split(self._task.state_dict(), "task", tensors, type(self._task).__name__)
        return tensors, {"step": self.step, "learning_rate_factor": self._task.learning_rate_factor, "values": values}


def without_place(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a checkpoint for data that are read from their beginning."""
    return {key: value for key, value in record.items() if key != _STREAM}


def _split(value: Any, name: str, tensors: dict[str, Tensor], task: str) -> Any:
    """`value` as JSON, with its tensors put into `tensors` under names that begin with `name`."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise TaskError(
                f"{task}.state_dict gave a tensor of layout {value.layout} at {_shown(name)}: expected a dense one"
            )
        if name in tensors:
            raise TaskError(f"{task}.state_dict gave two tensors that are called {_shown(name)}: name one otherwise")
        tensors[name] = value.detach()
        return {_TENSOR: name}
    if name.count(".") > _DEEPEST:
        raise TaskError(f"{task}.state_dict is more than {_DEEPEST} levels deep at {_shown(name)[:60]}...")
    if isinstance(value, Mapping) and all(type(key) is str and key != _TENSOR for key in value):
        return {key: _split(item, f"{name}.{key}", tensors, task) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_split(item, f"{name}.{place}", tensors, task) for place, item in enumerate(value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    kind = (
        f"a mapping whose keys are not all text, or {_TENSOR}"
        if isinstance(value, Mapping)
        else f"a {type(value).__name__}"
    )
    raise TaskError(
        f"{task}.state_dict gave {kind} at {_shown(name)}: expected numbers, text, None, tensors, and lists and dicts"
        " of them"
    )


def _shown(name: str) -> str:
    return name.removeprefix("task").lstrip(".") or "its top"


def _joined(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `_split`; a tuple comes back as a list."""
    if isinstance(value, Mapping):
        if _TENSOR not in value:
            return {key: _joined(item, tensors) for key, item in value.items()}
        name = value[_TENSOR]
        if name not in tensors:
            raise CheckpointMismatch(f"the checkpoint lacks {name}, a tensor of the task's own state")
        return torch.clone(tensors[name])
    return [_joined(item, tensors) for item in value] if isinstance(value, list) else value
