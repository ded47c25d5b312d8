"""Shadow feed: what a rank sends, besides training, to the processes that follow its run.

Responsible for one rank's part of it: copies of gradients and of the state, and their order (`run.shadow` is the other
end, `run.shadow_outlet` sends). Refuses to wait: the training thread copies memory, and never looks at a connection. A
step for which there is no room is not sent to a shadow, which lacks the state from then on.

The one idea: a shadow that lacks the state gets it from all ranks after the same step, without a word among them: the
rank that knows of it says so in its row of the next commit, and all ranks see the same rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from hetseq.cluster.membership.step_commit import Lineage, Verdict
from hetseq.comm.group import Group
from hetseq.parallel import portions as parts
from hetseq.parallel.checksums import checksums
from hetseq.parallel.replica import Replica
from hetseq.run.regroup import PendingWork
from hetseq.run.shadow_outlet import Buffer, Following, Message, Outlet, StateMessage
from hetseq.training.controller import Controller, TrainingState
from hetseq.training.step_engine import StepResult

logger = logging.getLogger(__name__)

_SPARE = 1  # buffers beside those that wait
_WAITING = 3  # buffers for each shadow: two that wait and one that is being sent

Row = Mapping[str, Any]


class ShadowFeed:
    """The feed of one rank in one generation, which begins with the state of `lineage`.

    `describe` gives the record of the state, with the last rows of `metrics.jsonl`; `facts` what a rank knows of saves.
    `watches_task`: the task may change its state between two steps.
    """

    def __init__(
        self,
        following: Following,
        replica: Replica,
        group: Group,
        *,
        lineage: Lineage,
        describe: Callable[[TrainingState, Sequence[Row]], dict[str, Any]],
        facts: Callable[[], dict[str, Any]],
        watches_task: bool,
    ) -> None:
        self._replica, self._rank = replica, group.rank
        self._describe, self._facts, self._watches_task = describe, facts, watches_task
        self._portions = parts.portions_of(replica, group)
        self._pieces = parts.gradient_pieces(self._portions)
        self._offsets, self._bytes = parts.offsets_of(self._pieces)
        count = _SPARE + _WAITING * len(following.shadows)  # so that there is always a free one
        self._buffers = [Buffer(torch.empty(0, dtype=torch.uint8)) for _ in range(count)]
        self._lineage = lineage  # after the last step
        self._staged: tuple[Buffer, list[Outlet]] | None = None
        self._is_closed = False
        self._told: dict[str, Any] = {}  # the facts, as they were told last
        #: checksums of what a shadow has besides what the updates change
        self._seen: dict[str, int] = {}
        self._of_task: Any = None  # the same for the state of the task
        self._changed: set[str] = set()  # names of what a hook has changed in this generation
        if self._rank == 0:
            self._news()
            self._changed.clear()
        hello = {
            "kind": "hello", "rank": self._rank, "has_owners": replica.owned is not None,
            "has_layers": not replica.has_parameters,
            "trained": replica.trained_names, "pieces": [piece.to_record() for piece in self._pieces],
            "begins": [lineage.step, lineage.chain], "watches_task": watches_task,
        }  # fmt: skip
        self._hook = replica.optimizer.register_step_pre_hook(lambda *_: self.settle())
        self._outlets = [
            Outlet(place, shadow, following, hello, rank=self._rank, lineage=lineage)
            for place, shadow in enumerate(following.shadows)
        ]

    @property
    def lacking(self) -> int:
        """A bit for each shadow that lacks the state and can take it, for the row of the next commit."""
        return sum(1 << outlet.place for outlet in self._outlets if outlet.wants_state())

    @property
    def unsent(self) -> bool:
        """Whether a step has still to be sent to a shadow that follows, for the row of the next commit."""
        return any(outlet.has_unsent_step() for outlet in self._outlets)

    def told(self) -> list[dict[str, Any]]:
        """What a viewer of the run may know of each shadow, as far as this rank knows it."""
        return [outlet.told() for outlet in self._outlets]

    def settle(self) -> None:
        """Wait until no part of the state is being copied."""
        for outlet in self._outlets:
            outlet.settle()

    def before_update(self) -> None:
        """Copy the gradient, clipped and complete, for the shadows that can take this step."""
        takers = [outlet for outlet in self._outlets if outlet.has_room()]
        if not takers:
            return
        buffer = next(one for one in self._buffers if not one.users)
        if buffer.memory.numel() != self._bytes:
            buffer.memory = torch.empty(self._bytes, dtype=torch.uint8)
        with torch.no_grad():
            for one, piece, offset in zip(self._portions, self._pieces, self._offsets):
                target = parts.view_of(buffer.memory, offset, piece)
                if one.held.grad is None:
                    target.zero_()
                else:
                    target.copy_(one.elements(one.held.grad))  # sync: a GPU's gradient comes to the host
        self._staged = buffer, takers

    def after_update(self, controller: Controller, result: StepResult, due: PendingWork) -> None:
        """Have the step sent, before anything that follows from it is done. Every rank calls it."""
        staged, self._staged = self._staged, None
        before, self._lineage = self._lineage, controller.state.lineage
        if staged is None and result.outcome.verdict is Verdict.SKIP:
            staged = Buffer(torch.empty(0, dtype=torch.uint8)), [one for one in self._outlets if one.has_room()]
        buffer, takers = (None, []) if staged is None else staged
        for outlet in self._outlets:
            if outlet not in takers:
                outlet.lack(self._lineage)
            elif not result.outcome.lacking >> outlet.place & 1 and buffer is not None:
                outlet.append(self._step(controller, due, before, buffer), self._lineage)
        if self._rank == 0 and self._watches_task:  # a hook may change what the step brings
            self._seen |= _sums_of(self._replica.buffer_tensors(only_changing=True))

    def after_step(self, controller: Controller, result: StepResult, rows: Sequence[Row]) -> None:
        """Have the rest sent, when all that follows from the step is done, and the state to the shadows that lack it.

        `rows` are the last ones of `metrics.jsonl`. Every rank calls it.
        """
        lacking = [outlet for outlet in self._outlets if result.outcome.lacking >> outlet.place & 1]
        for outlet in lacking:
            if outlet.can_take_state():
                outlet.append_state(self._state(controller, rows, known=outlet.known), self._lineage)
            else:
                outlet.lack(self._lineage)
        if self._rank == 0 and (message := self._what_followed(controller, rows)) is not None:
            for outlet in self._outlets:
                if not outlet.lacks_state and outlet not in lacking:
                    outlet.append(message, self._lineage)

    def lack(self) -> None:
        """The shadows may have received something wrong: they get the state again. Every rank calls it."""
        for outlet in self._outlets:
            outlet.lack(self._lineage)

    def close(self) -> None:
        """End. What waits is still sent for a moment, by threads of their own; may be called twice. Any rank, alone."""
        self._hook.remove()
        for outlet in self._outlets:
            outlet.close()
            if outlet.sent_steps and not self._is_closed:
                logger.info(
                    "sent the shadow %s %d steps in %d bytes", outlet.shadow, outlet.sent_steps, outlet.sent_bytes
                )  # fmt: skip
        self._is_closed = True

    def _step(self, controller: Controller, due: PendingWork, before: Lineage, buffer: Buffer) -> Message:
        assert controller.last_update is not None
        tag, verdict = controller.last_update
        header: dict[str, Any] = {
            "kind": "step", "step": tag.step, "attempt": tag.attempt, "verdict": int(verdict),
            "before": [before.step, before.chain],
        }  # fmt: skip
        content = [buffer.memory.numpy().data] if verdict is Verdict.APPLY else []
        if self._rank == 0:
            row = {key: value for key, value in due.row.items() if key != "ranks"}
            row["log"] = dict(row.get("log", {}))  # which the task may change while this is sent
            buffers = self._replica.buffer_tensors(only_changing=True) if verdict is Verdict.APPLY else {}
            pieces = [parts.whole("model", name, value) for name, value in buffers.items()]
            after = controller.state.lineage
            header |= {
                "after": [after.step, after.chain], "due": {**asdict(due), "row": row},
                "train_seconds": controller.state.train_seconds, "buffers": [piece.to_record() for piece in pieces],
            }  # fmt: skip
            content += [controller.rows.data, _packed(pieces, list(buffers.values())).numpy().data]
        return Message(header, content, buffer, before)

    def _state(self, controller: Controller, rows: Sequence[Row], *, known: Mapping[str, int]) -> StateMessage:
        """The state of this rank's portion; rank zero's without the frozen parameters whose checksums are `known`."""
        portions = [*self._portions, *parts.frozen_portions_of(self._replica)]
        pieces, numbers = parts.state_pieces(self._replica, portions)
        device = next(iter(self._replica.model.parameters())).device
        header: dict[str, Any] = {"kind": "state", "step": self._lineage.step, "numbers": numbers}
        if self._rank == 0:
            changeable = self._replica.changed_by_forward()
            common = {name: one for name, one in self._replica.model_tensors().items() if name in changeable}
            frozen = {name: one for name, one in self._replica.frozen_tensors().items() if name not in self._changed}
            for name, found in _sums_of(frozen).items():
                if found == known.get(name):  # a large frozen model would take longer than the steps that are kept
                    del common[name]
            tensors, task_state = self._replica.task_state.content()
            content = {**self._describe(controller.state, rows), "task_state": task_state}
            header |= {"content": content, "facts": self._facts()}
            # the next forward may change these, before the copy has reached them
            pieces += [(parts.whole("model", name, one), one.clone()) for name, one in common.items()]
            pieces += [(parts.whole("task", name, one), one.clone()) for name, one in tensors.items()]
        ready = None
        if device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        return StateMessage(header, pieces, ready)

    def _what_followed(self, controller: Controller, rows: Sequence[Row]) -> Message | None:
        """What has changed since the step, besides its update; None for nothing."""
        state, step = controller.state, self._lineage.step
        told = {
            "best": state.best, "ended_by_task": state.ended_by_task, "facts": self._facts(),
            "rows": [row for row in rows if row.get("step") == step and "loss" not in row],
        }  # fmt: skip
        changed, tensors, task_state = self._news()
        if told == self._told and not changed and task_state is None and not self._watches_task:
            return None
        self._told = told
        header: dict[str, Any] = {"kind": "after", "step": step, **told, "task_step": self._replica.task_state.step}
        if task_state is not None:
            header["task_state"] = task_state
        pieces = [parts.whole("task", name, one) for name, one in tensors.items()]
        pieces += [parts.whole("model", name, one) for name, one in changed.items()]
        header["pieces"] = [piece.to_record() for piece in pieces]
        return Message(header, [_packed(pieces, [*tensors.values(), *changed.values()]).numpy().data])

    def _news(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any] | None]:
        """What has changed since the last call besides what a step brings: tensors of the model; and tensors and record
        of the task's state, None if that is still the same.

        By checksums, since a task may put another tensor in the place of one, and `.data` has no version.
        """
        watched = self._watched()
        tensors, record = self._replica.task_state.content() if self._watches_task else ({}, {})
        sums = _sums_of({**watched, **tensors})
        of_task = record.get("learning_rate_factor"), record.get("values"), [sums[name] for name in tensors]
        changed = {name: one for name, one in watched.items() if sums[name] != self._seen.get(name)}
        is_same = of_task == self._of_task
        self._seen |= {name: sums[name] for name in watched}
        self._changed |= changed.keys()
        self._of_task = of_task
        return (changed, {}, None) if is_same else (changed, tensors, record)

    def _watched(self) -> dict[str, Tensor]:
        """What may change in the model besides an update: where the task has a hook, all that is not trained; else the
        buffers that no step brings, since forward may begin to change them later."""
        if not self._watches_task:
            brought = self._replica.buffer_tensors(only_changing=True)
            return {name: one for name, one in self._replica.buffer_tensors().items() if name not in brought}
        untrained = self._replica.changed_by_forward()
        return {name: one for name, one in self._replica.model_tensors().items() if name in untrained}


def _sums_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Checksums by name (sync)."""
    return dict(zip(tensors, checksums(tensors.values())))


def _packed(pieces: Sequence[parts.Piece], values: Sequence[Tensor]) -> Tensor:
    """Copies of whole tensors in one memory."""
    offsets, size = parts.offsets_of(pieces)
    memory = torch.empty(size, dtype=torch.uint8)
    with torch.no_grad():
        for piece, offset, value in zip(pieces, offsets, values):
            parts.view_of(memory, offset, piece).copy_(value.detach().reshape(-1))
    return memory
