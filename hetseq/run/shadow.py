"""Shadow: a process that follows a run without computing, and takes over if no rank has the state any more.

Responsible for the state that it follows with, on the CPU: it gets what `run.shadow_feed` sends on all ranks, and makes
each update through the same `Controller` as a rank. Refuses to decide whether it is needed (`cluster.membership`). The
one idea: a step counts only when the portions of all ranks have arrived; then this process holds what the ranks hold.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hetseq.balance.cost_meter import CostMeter
from hetseq.balance.layout import one_rank_each
from hetseq.cluster.membership.step_commit import Lineage, RowFormat, SaveStatus, Verdict, resolve
from hetseq.cluster.rendezvous.byte_stream import FrameReader
from hetseq.comm.group import LocalGroup
from hetseq.config.sections import DistributedConfig
from hetseq.errors import DisagreementError
from hetseq.parallel import portions as parts
from hetseq.parallel.buffers import BufferKeeper
from hetseq.parallel.checksums import checksums
from hetseq.parallel.gradient_sync import Gradients
from hetseq.parallel.owned_names import owned_names
from hetseq.parallel.owned_state import OwnedState
from hetseq.parallel.portions import Piece
from hetseq.parallel.replica import Replica, trained_parameters
from hetseq.run.build import (
    FirstState,
    RankJob,
    build_controller,
    build_feed,
    build_replica,
    override,
    provenance_of,
)
from hetseq.run.checkpointing import KnownSaves, Provenance, read_state, saved_batch
from hetseq.run.planning import micro_batch_sizes
from hetseq.run.regroup import KeptState, PendingWork
from hetseq.run.shadow_links import ShadowLinks
from hetseq.system import faults
from hetseq.system import rank_phase as whereabouts
from hetseq.system.rank_phase import Phase
from hetseq.training.controller import Controller, TrainingState
from hetseq.training.step_engine import StepResult

logger = logging.getLogger(__name__)

_MOST_ROWS = 20  # of `metrics.jsonl`, as a rank remembers


def of_one_replica(config: DistributedConfig) -> DistributedConfig:
    """The options of a process that has all of the state, in a run whose ranks may own parts."""
    return replace(
        config, shard_model="none", shard_modules=("auto",), own="auto", own_memory=None, shard_groups="all",
        reduce_dtype=None, balance="equal",
    )  # fmt: skip


class Shadow:
    """The state of one process that follows a run through its generations."""

    def __init__(self, job: RankJob, closing: ExitStack) -> None:
        """`job` describes a rank alone; its state comes later."""
        distributed = of_one_replica(job.config.distributed)
        data = replace(job.config.data, num_workers=0)  # none are fetched
        self._job = replace(job, config=replace(job.config, distributed=distributed, data=data))
        self._replica: Replica = build_replica(self._job, closing)
        override(self._replica.optimizer, job.config.checkpoint)
        self._every = dict(job.material.model.named_parameters())
        #: what has owners where ranks have some, by whether parameters come and go; a task may freeze some later
        self._described = {has: owned_names(job.material.model, with_frozen=has) for has in (False, True)}
        #: by name, in the order of the ranks
        self._parameters = dict(trained_parameters(job.material.model))
        self._gradients: dict[str, Tensor] = {}
        self._pieces: dict[int, list[Piece]] = {}  # of a gradient, by the rank that sends them
        self._closing, self._open = closing, ExitStack()  # of the process; of the present controller
        closing.callback(lambda: self._open.close())
        self._controller: Controller | None = None
        self._provenance: Provenance | None = None
        self._saves = KnownSaves()
        self._due: PendingWork | None = None
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=_MOST_ROWS)
        self._world_size, self._generation, self._has_owners, self._has_layers = 1, 0, False, False
        self._has_state = False
        self._begins: Lineage | None = None  # the state that the ranks last began with
        self._loading: tuple[int, set[int]] | None = (
            None  # the step of the state that arrives; ranks that have sent all
        )
        self.steps, self.step_bytes, self.states = 0, 0, 0  # followed in this generation

    @property
    def lineage(self) -> Lineage | None:
        """The state that this process has; None if it has none."""
        return self._controller.state.lineage if self._has_state and self._controller is not None else None

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint that it has heard of."""
        return self._saves.last_step

    def kept(self) -> KeptState:
        """The state, as a rank keeps it between two generations. This object must not be used after that."""
        assert self._controller is not None
        assert self._provenance is not None
        state, optimizer = self._controller.state, self._replica.optimizer
        self._replica.reducer.begin()  # without gradients
        self._gradients.clear()
        self._open.close()
        owned = None
        if self._has_owners:
            owned = OwnedState.of_whole(optimizer, self._described[self._has_layers])
            owned.has_layers = self._has_layers
        return KeptState(
            optimizer, state, self._provenance, self._saves, CostMeter(), self._due, tuple(self._rows), owned
        )  # fmt: skip

    def follow(self, links: ShadowLinks, *, generation: int, world_size: int, is_leaving: Callable[[], bool]) -> None:
        """Follow a generation to its end, or until this process `is_leaving`."""
        logger.info("process %d follows %d ranks in generation %d", os.getpid(), world_size, generation)
        self._world_size, self._generation, self._loading = world_size, generation, None
        self._begins = None
        self.steps = self.step_bytes = self.states = 0
        if self._has_state and self._controller is not None:
            self._continue(self._controller.state)
        whereabouts.enter(Phase.FOLLOWING)
        while not is_leaving() and links.wait(lambda hello: self._answer(hello)):
            began_s = time.monotonic()
            while self._advance(links.readers):
                pass
            links.allow_for(time.monotonic() - began_s)
        self._loading = None
        if self.steps or self.states:
            logger.info(
                "followed generation %d to step %d: %d steps in %d bytes, the whole state %d times", generation,
                self.lineage.step if self.lineage is not None else 0, self.steps, self.step_bytes, self.states,
            )  # fmt: skip

    def _answer(self, hello: Mapping[str, Any]) -> dict[str, Any]:
        """What a rank is told that has connected: which state this process has, and where it is."""
        self._has_owners, self._has_layers = bool(hello["has_owners"]), bool(hello["has_layers"])
        if hello["trained"] != list(self._parameters):
            self._train(hello["trained"])
        self._pieces[int(hello["rank"])] = [Piece.from_record(record) for record in hello["pieces"]]
        begins, told, own = Lineage(*hello["begins"]), Lineage(*hello["lineage"]), self.lineage
        # steps that are made again in one generation have the lineages that they had, so `told` may hide it
        back = begins if begins != self._begins and _is_beyond(own, begins) else told
        self._begins = begins
        if own is not None and _is_beyond(own, back):
            logger.info("the ranks have gone back to step %d: the state of step %d is given up", back.step, own.step)
            self._has_state = False
        own = self.lineage
        if hello["watches_task"] and self._due is not None:
            own = None  # what a hook did after its last step was lost with a connection; the state itself is whole
        lineage = None if own is None else [own.step, own.chain]
        answer: dict[str, Any] = {"lineage": lineage, "node": socket.gethostname()}
        if hello["rank"] == 0:
            frozen = self._replica.frozen_tensors()
            answer["frozen"] = dict(zip(frozen, checksums(frozen.values())))
        return answer

    def _train(self, names: Sequence[str]) -> None:
        """Expect gradients of these parameters: a task may have frozen some, or trains them from now on."""
        model, before = self._job.material.model, self._replica
        every = dict(model.named_parameters())
        self._parameters = {name: every[name] for name in names}
        self._gradients.clear()
        self._replica = Replica(
            model, before.optimizer, Gradients(list(self._parameters.values())),
            BufferKeeper(model, LocalGroup()), before.task_state,
        )  # fmt: skip
        if self._has_state and self._controller is not None:
            self._continue(self._controller.state)

    # what has arrived

    def _advance(self, readers: dict[int, FrameReader]) -> bool:
        """Deal with whole messages; returns whether there may be more to do. Every message is used or dropped."""
        first = readers.get(0)
        if first is not None and first.is_whole and first.header is not None and first.header["kind"] == "after":
            self._take_what_followed(first.header, first.content)
            first.clear()
            first.read()
            return True
        if self._loading is not None:
            return self._load_some(readers)
        if len(readers) < self._world_size or not all(reader.is_whole for reader in readers.values()):
            return False
        if any(reader.header is not None and reader.header["kind"] == "hello" for reader in readers.values()):
            return False
        headers = {rank: reader.header for rank, reader in readers.items() if reader.header is not None}
        newest = max(header["step"] for header in headers.values())
        kinds = {header["kind"] for header in headers.values()}
        late = {rank for rank, header in headers.items() if header["step"] < newest or header.get("part")}
        if not late and kinds == {"state"}:
            self._begin_state(newest)
            return True
        if not late and kinds == {"step"} and self._fits(headers[0]):
            self._take_step(readers, headers)
            late = set(headers)
        elif not late:  # steps that cannot be used, beside the state of some ranks or not
            late = {rank for rank, header in headers.items() if header["kind"] == "step"}
        for rank in late:
            readers[rank].clear()
            readers[rank].read()
        return True

    def _fits(self, header: Mapping[str, Any]) -> bool:
        return self.lineage is not None and list(header["before"]) == [self.lineage.step, self.lineage.chain]

    # the state

    def _begin_state(self, step: int) -> None:
        faults.point("follow_state")
        self._has_state, self._loading = False, (step, set())
        for parameter in self._parameters.values():
            self._replica.optimizer.state.pop(parameter, None)

    def _load_some(self, readers: dict[int, FrameReader]) -> bool:
        """Take a frame of the state from each rank that has one; the state is whole when all have sent their last."""
        assert self._loading is not None
        step, done = self._loading
        if len(readers) < self._world_size:
            self._loading = None
            return False
        has_read = False
        for rank, reader in readers.items():
            if rank in done or not reader.is_whole or reader.header is None:
                continue
            header, content, has_read = reader.header, _memory(reader.content), True
            if header["kind"] != "state" or header["step"] != step:  # this rank has begun again
                self._loading = None
                return True
            self._load(header, content)
            if header["is_last"]:
                done.add(rank)
            reader.clear()
            reader.read()
        if len(done) == self._world_size:
            self._loading = None
            self._end_state()
        return has_read

    def _load(self, header: Mapping[str, Any], memory: Tensor) -> None:
        if "content" in header:
            self._content, self._facts, self._task_tensors = header["content"], header["facts"], dict[str, Tensor]()
        for full_name, value in header.get("numbers", {}).items():
            name, _, key = full_name.removeprefix("optim.").rpartition(".")
            self._replica.optimizer.state[self._parameters[name]][key] = value
        live = None
        pieces = [Piece.from_record(record) for record in header["pieces"]]
        for piece, offset in zip(pieces, parts.offsets_of(pieces)[0]):
            if piece.kind == "task":
                self._task_tensors[piece.name] = parts.value_of(memory, offset, piece)
            elif piece.kind == "model":
                live = self._replica.model_tensors() if live is None else live
                live[piece.name].copy_(parts.value_of(memory, offset, piece))
            else:
                self._load_trained(piece, parts.view_of(memory, offset, piece))

    def _load_trained(self, piece: Piece, values: Tensor) -> None:
        if piece.kind == "param":
            parts.put_(self._every[piece.name].detach(), piece, values)
            return
        parameter = self._parameters[piece.name]
        state = self._replica.optimizer.state[parameter]
        if piece.shape is not None:
            state[piece.key] = values.clone().view(piece.shape)
            return
        if piece.key not in state:
            state[piece.key] = parts.state_like(parameter, piece.dtype)
        parts.put_(state[piece.key], piece, values)

    def _end_state(self) -> None:
        content = self._content
        self._replica.reducer.changed()
        self._replica.buffers.renew()
        self._replica.task_state.load(self._task_tensors, content["task_state"])
        self._saves, self._due = KnownSaves.from_record(self._facts), None
        self._rows = deque(content["rows"], maxlen=_MOST_ROWS)
        batch = saved_batch(content)
        self._provenance = replace(
            provenance_of(self._job, self._replica, batch, None), samples=content["samples"], parts=content["parts"]
        )  # fmt: skip
        self._continue(read_state(content))
        self._has_state = True
        self.states += 1
        logger.info("got the state after step %d from %d ranks", content["step"], self._world_size)
        del self._content, self._facts, self._task_tensors

    def _continue(self, state: TrainingState) -> None:
        """Make the controller that follows the present generation from this state."""
        assert self._provenance is not None
        self._open.close()
        self._open = ExitStack()
        job = replace(self._job, group=LocalGroup(generation=self._generation))
        first, sizes = (
            FirstState(state, self._provenance),
            micro_batch_sizes(job.config.data, job.material, job.directory),
        )
        with self._replica.buffers.changing_alike():
            job.material.task.update_step(state.updates)  # as each rank does at the start of a generation
        feed = build_feed(job, first, sizes, self._open)
        feed = replace(feed, steps=replace(feed.steps, layout=one_rank_each(self._world_size)))
        self._controller = build_controller(job, self._replica, first, feed, _NothingBetween(), sizes)
        self._controller.replica.model.train()
        self._format = RowFormat(len(job.material.terms), len(self._parameters), has_owners=self._has_owners)

    # a step

    def _take_step(self, readers: Mapping[int, FrameReader], headers: Mapping[int, Mapping[str, Any]]) -> None:
        controller, header = self._controller, headers[0]
        assert controller is not None
        faults.point("follow")
        is_applied = header["verdict"] == Verdict.APPLY
        contents = {rank: _memory(reader.content) for rank, reader in readers.items()}
        begin = 0
        for rank in sorted(contents) if is_applied else ():
            pieces = self._pieces[rank]
            offsets, size = parts.offsets_of(pieces)
            begin = size if rank == 0 else begin
            for piece, offset in zip(pieces, offsets):
                self._take_gradient(piece, parts.view_of(contents[rank], offset, piece))
        words = self._world_size * self._format.words
        rows = contents[0][begin : begin + 8 * words].clone().view(torch.int64).numpy().reshape(self._world_size, -1)
        self._take_buffers(header["buffers"], contents[0][begin + 8 * words :])
        outcome = resolve(
            [self._format.unpack(row) for row in rows], next_samples=-1,
            leaders=one_rank_each(self._world_size).leaders,
        )  # fmt: skip
        controller.follow(rows, outcome, header["attempt"])
        own = controller.state.lineage
        if [own.step, own.chain] != list(header["after"]):
            raise DisagreementError(f"the shadow made another update of step {header['step']} than the ranks")
        controller.state.train_seconds = header["train_seconds"]
        self._due = PendingWork(**header["due"])
        self._rows.append({key: value for key, value in self._due.row.items() if key != "log"})
        self.steps += 1
        self.step_bytes += sum(reader.frame_bytes for reader in readers.values())
        whereabouts.enter(Phase.FOLLOWING, header["step"])

    def _take_gradient(self, piece: Piece, values: Tensor) -> None:
        parameter = self._parameters[piece.name]
        if piece.name not in self._gradients:
            self._gradients[piece.name] = torch.zeros_like(parameter)
        parameter.grad = self._gradients[piece.name]
        parts.put_(parameter.grad, piece, values)

    def _take_buffers(self, records: Sequence[Sequence[Any]], memory: Tensor) -> None:
        pieces = [Piece.from_record(record) for record in records]
        if not pieces:
            return
        live = self._replica.model_tensors()
        for piece, offset in zip(pieces, parts.offsets_of(pieces)[0]):
            live[piece.name].copy_(parts.value_of(memory, offset, piece))
        self._replica.buffers.renew()

    def _take_what_followed(self, header: Mapping[str, Any], content: memoryview) -> None:
        """Rank zero has done all that follows from the last step."""
        if self.lineage is None or self._controller is None or self.lineage.step != header["step"]:
            return
        state, task_state = self._controller.state, self._replica.task_state
        state.best, state.ended_by_task = header["best"], header["ended_by_task"]
        self._saves, self._due = KnownSaves.from_record(header["facts"]), None
        self._rows.extend(header["rows"])
        task_state.step = header["task_step"]
        memory, tensors = _memory(content), dict[str, Tensor]()
        pieces = [Piece.from_record(record) for record in header["pieces"]]
        live = self._replica.model_tensors() if pieces else {}
        for piece, offset in zip(pieces, parts.offsets_of(pieces)[0]):
            value = parts.value_of(memory, offset, piece)
            if piece.kind == "task":
                tensors[piece.name] = value
            else:
                live[piece.name].copy_(value)
        if pieces:
            self._replica.buffers.renew()
        if "task_state" in header:
            task_state.load(tensors, header["task_state"])


class _NothingBetween:
    """The work of a shadow between two steps: none. The ranks validate, save and report."""

    def save_status(self, state: TrainingState) -> SaveStatus:
        return SaveStatus()

    def settle(self) -> None:
        pass

    def before_update(self) -> None:
        pass

    def after_step(self, controller: Controller, result: StepResult, *, ends_run: bool) -> None:
        pass


def _is_beyond(own: Lineage | None, other: Lineage) -> bool:
    """Whether a state follows from another one, or from another history."""
    return own is not None and (own.step > other.step or (own.step == other.step and own != other))


def _memory(content: memoryview) -> Tensor:
    """The content of a message; it changes when the next one is read."""
    return torch.frombuffer(content, dtype=torch.uint8) if content.nbytes else torch.empty(0, dtype=torch.uint8)
