"""A script's part in a run: what it owns, its loop, and what ranks do together between two steps."""

from __future__ import annotations

import dis
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch.utils.data import default_collate

from hetseq.balance.shares import assign_shares
from hetseq.comm.group import Group, LocalGroup
from hetseq.config.sections import Config
from hetseq.data.fetch import seed_everything
from hetseq.data.lanes import check_is_indexed
from hetseq.data.loader import Source, place_on, range_reader
from hetseq.data.plan import derive_seed
from hetseq.errors import EXIT_DONE, TaskError
from hetseq.loop.between import Results, together
from hetseq.loop.check import Check
from hetseq.loop.owned import Owned
from hetseq.loop.script_task import Count, ScriptMaterial, ScriptTask, material_of
from hetseq.loop.step import Step
from hetseq.run.task_hooks import Call
from hetseq.system import rank_phase as whereabouts
from hetseq.system.rank_phase import Phase
from hetseq.training.precision import PRECISIONS
from hetseq.training.share import Part
from hetseq.training.step_engine import Between, Compute, Engine, PeerLost, Question, Settled

T = TypeVar("T")
Sums = Mapping[str, "tuple[torch.Tensor | float, torch.Tensor | float]"]

_SCRIPT_DEADLINE_S = 600.0  # how long the script of a rank may take between two steps, before its peers give it up
_AFTER_STEP = -1  # in the place of a position: the seed of the code behind the inner loop


class Life(Protocol):
    """The rank that a script drives: `launch.rank_life`."""

    #: ends this process, with an error as its reason
    give_up: Callable[[BaseException], NoReturn]
    #: called in a generation that follows a loss, before the rank continues: the group of the ranks that hold the state
    on_regroup: Callable[[Group], None] | None

    @property
    def group(self) -> Group:
        """The ranks of the generation."""
        ...

    @property
    def first_place(self) -> tuple[int, int]:
        """Rank and number of ranks at the start of this process."""
        ...

    def present(self, config: Config, material: ScriptMaterial, also: Mapping[str, str] | None = None) -> None:
        """Compare what this rank would train with its peers."""
        ...

    def run(self) -> Engine[dict[str, Any]]:
        """The engine of all its generations; returns its report."""
        ...

    def divide(self, total: int) -> tuple[int, ...]:
        """How many of `total` pieces of work each rank of the generation takes."""
        ...


class Run:
    """This rank's part in a run; `hetseq.start` makes it.

    A script calls, on every rank: `own`, then `steps`, and between two steps `evaluate`, `only_first` and `stop`. What
    stands before the loop runs at every start of a process, what stands in the inner loop may run again, and what
    stands behind the inner loop runs once for each step.
    """

    def __init__(
        self, config: Config, life: Life, *, device: torch.device, name: str, facts: Mapping[str, str]
    ) -> None:
        self._config, self._life, self._name, self._facts = config, life, name, facts
        self._device, self._precision = device, PRECISIONS[config.optimization.precision]
        self._owned = Owned(device, self._precision.storage)
        self._task: ScriptTask | None = None
        self._engine: Engine[dict[str, Any]] | None = None
        self._question: Question | None = None
        self._rank, self._world_size = life.first_place
        self._is_in_engine, self._is_checked, self._is_before_session = False, False, False
        self._results, self._between = Results(), LocalGroup()  # type: tuple[Results, Group]
        self.report: dict[str, Any] | None = None
        life.on_regroup = self._regrouped
        seed_everything(config.task.seed)

    @property
    def device(self) -> torch.device:
        """The device of this rank, where `own` puts modules and the loop its batches."""
        return self._device

    @property
    def rank(self) -> int:
        """The number of this rank, from 0; it may change when ranks are lost or join."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks; it may change."""
        return self._world_size

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints: only one rank does, at any time in the loop."""
        return self.rank == 0

    def own(self, *things: Any, **named: Any) -> Any:
        """Register modules, the optimizer and all else that must be saved, resumed and given to ranks that join.

        Modules are moved to the device and precision of this rank; those with parameters that require a gradient are
        trained. Other objects have `state_dict` and `load_state_dict`, as schedulers do: numbers, text and tensors.
        Returns the same objects, one alone or a tuple. Before `steps`; every rank calls it alike. Raises TaskError.
        """
        if self._engine is not None:
            raise TaskError("run.own comes before run.steps: a rank that joined would lack the object")
        for name, thing in [*((None, thing) for thing in things), *named.items()]:
            self._owned.add(name, thing)
        own = (*things, *named.values())
        return own[0] if len(own) == 1 else own

    def steps(
        self,
        data: Any,
        *,
        global_batch_size: int,
        max_epoch: int | None = None,
        max_steps: int | None = None,
        collate: Callable[[Any], Any] = default_collate,
        count: Count | None = None,
        clip_norm: float = 0.0,
        shuffle: bool = True,
    ) -> Iterator[Step]:
        """Each step of the run once, from where it stands: a resumed run and a rank that joins begin there.

        `data` has `__len__` and `__getitem__`; `global_batch_size` is in samples over all ranks, and the last step of
        an epoch may be smaller. The loop ends after `max_epoch` epochs or `max_steps` applied steps, the first to come,
        or when every rank leaves it by `break`, or after `stop`. `clip_norm` limits the L2 norm of the gradient (0: no
        limit). `count(batch)` gives the denominator of each loss term, from the collated batch alone: needed for
        several terms, whose sum / count are added. Every rank calls it alike. Raises TaskError, and SystemExit where
        the run ends early.
        """
        if self._engine is not None:
            raise TaskError("run.steps was called twice: a script has one loop over run.steps")
        self._begin(
            data, ScriptTask(self._owned, collate=collate, count=count),
            self._options(global_batch_size, max_epoch, max_steps, clip_norm, shuffle=shuffle),
        )  # fmt: skip
        question = self._ask(None)
        while question is not None:
            assert isinstance(question, Compute), "a step that was settled before its micro-batches were given"
            self._is_before_session = False
            step = Step(self, question, self._terms)
            try:
                yield step
            except GeneratorExit:  # `break`, or an exception on its way out of the script
                if step.is_settled and _is_break(sys._getframe().f_back):
                    self._leave()
                return
            if not step.is_settled:
                raise TaskError(
                    f"the loop left step {step.number} before its micro-batches were used up: let `for batch in step`"
                    " run to its end; run.stop() ends the run after a step"
                )
            question = self._ask(None)

    def evaluate(
        self, data: Any, measure: Callable[[Any], Sums], *, batch_size: int,
        collate: Callable[[Any], Any] = default_collate,
    ) -> dict[str, float]:  # fmt: skip
        """sum / count over a whole data set, each sample once, by name; the same on every rank.

        `measure(batch)` gives `{"loss": (sum, count)}` for one batch, with all modules of `own` in evaluation mode and
        without gradients. The data are cut by `batch_size` alone and added up in their order, so equal devices give the
        same bits on any number of ranks. Between two steps every rank calls it; before and after the loop each rank
        measures all data by itself. Raises TaskError.
        """
        check_is_indexed(data, "run.evaluate got")
        source = Source(data, collate, lambda *_: (), place_on(self._device, self._precision.storage), 0,
                        self._config.task.seed)  # fmt: skip
        pieces = [(start, min(start + batch_size, len(data))) for start in range(0, len(data), batch_size)]

        def work() -> list[dict[str, list[float]]]:
            whereabouts.enter(Phase.VALIDATION)
            own = self._measured(measure, source, pieces)
            whereabouts.enter(Phase.SCRIPT)
            return [row for rows in together(self._group, Call.EVALUATE, self._results.step, own) for row in rows]

        rows = self._between_steps(Call.EVALUATE, work)
        totals: dict[str, list[float]] = {}
        for row in rows:
            for name, (total, number) in row.items():
                before = totals.get(name, [0.0, 0.0])
                totals[name] = [before[0] + total, before[1] + number]
        return {name: total / number for name, (total, number) in totals.items() if number}

    def only_first(self, work: Callable[[], T]) -> T:
        """The result of `work()`, called on the first rank alone; its JSON form on every rank. Between two steps.

        For what one rank must do or decide: a sample from the model, a file, a random choice. Every rank calls it.
        """
        if not isinstance(self._question, (Settled, Between)):
            raise TaskError("run.only_first belongs between two steps, behind the inner loop: there all ranks call it")

        def first() -> Any:
            return together(self._group, Call.ONLY_FIRST, self._results.step, work() if self.is_first else None)[0]

        result: T = self._between_steps(Call.ONLY_FIRST, first)
        return result

    def close(self) -> None:
        """At the end of the script: a loop that it has left after a step ends the run. HetSeq calls it."""
        if isinstance(self._question, (Settled, Between)):
            self._leave()

    @property
    def is_in_step(self) -> bool:
        """Whether a step waits for micro-batches of this rank."""
        return isinstance(self._question, Compute)

    def stop(self) -> None:
        """End the run after this step, on all ranks, with exit code 0. Any rank, alone, between two steps."""
        if self._task is None:
            raise TaskError("run.stop belongs into the loop over run.steps")
        self._task.wants_to_stop = True

    def take_smaller(self) -> bool:
        """Remember half the size of micro-batches for the next process on this device; False if that is impossible.

        After memory ran out in the loop, whose frames may hold what filled it. HetSeq calls it.
        """
        if not isinstance(self._question, Compute) or not self._question.data.micro_batches:
            return False
        largest = max(self._question.data.micro_batches, key=lambda batch: batch.size)
        return self._question.computer.sizes.refuse(largest.size, largest.work)

    # for Step

    def answer(self, answer: Part | PeerLost) -> Compute | Settled:
        question = self._ask(answer)
        if question is None:
            self._exit()
        assert not isinstance(question, Between), "a step is under way"
        if isinstance(question, Settled):
            self._results.begin(question.result.plan.step)
            whereabouts.enter(Phase.SCRIPT)
            seed_everything(derive_seed(self._config.task.seed, question.result.plan.step, _AFTER_STEP))
        return question

    def check_of(self, question: Compute) -> Check | None:
        if self._is_checked:
            return None
        self._is_checked = True
        level = logging.WARNING if self.is_first else logging.INFO
        return Check(question, self._owned.modules, has_late_count=not self._script.counts_ahead, level=level)

    # the engine

    @property
    def _script(self) -> ScriptTask:
        assert self._task is not None
        return self._task

    def _options(
        self, size: int, max_epoch: int | None, max_steps: int | None, clip_norm: float, *, shuffle: bool
    ) -> Config:  # fmt: skip
        """The options of the command line, and what the script says."""
        config = self._config
        given = config.data.global_batch_size
        if given is not None and given != size:
            raise TaskError(f"--global-batch-size {given}: the script says global_batch_size={size}, which holds")
        if not max_epoch and not max_steps:
            raise TaskError("run.steps has no end: give it max_epoch or max_steps; break and run.stop() end it earlier")
        curriculum = config.data.curriculum if shuffle else _NEVER
        return replace(
            config,
            data=replace(config.data, global_batch_size=size, curriculum=curriculum),
            optimization=replace(
                config.optimization, clip_norm=clip_norm, max_epoch=max_epoch or 0, max_update=max_steps or 0,
                lr_scheduler="constant", min_lr=-1.0,
            ),
            validation=replace(config.validation, disable_validation=True),
        )  # fmt: skip

    def _begin(self, data: Any, task: ScriptTask, config: Config) -> None:
        material = material_of(
            self._name, task, data, device=self._device, precision=self._precision, seed=config.task.seed,
            deadline_s=_SCRIPT_DEADLINE_S,
        )  # fmt: skip
        self._owned.guard(self._refuse)
        self._config, self._task, self._terms = config, task, material.terms
        self._life.present(config, material, self._facts)
        self._engine = self._life.run()

    def _ask(self, answer: Part | PeerLost | None) -> Question | None:
        """Answer the question at hand; returns the next one. None: the run is over, and the loop ends."""
        assert self._engine is not None
        if isinstance(self._question, (Settled, Between)):
            whereabouts.enter(Phase.BOUNDARY)
        self._question, self._is_in_engine = None, True
        try:
            self._question = self._engine.send(answer)
        except StopIteration as end:
            self.report = end.value
            if self.report["code"] != EXIT_DONE:
                self._exit()
        finally:
            self._is_in_engine = False
        if self._question is not None:
            self._rank, self._world_size = self._group.rank, self._group.world_size
        return self._question

    def _exit(self) -> NoReturn:
        """End the script of a rank whose run ends in the middle of it; `finally` blocks run."""
        assert self.report is not None
        raise SystemExit(self.report["code"])

    def _leave(self) -> None:
        """The script has left its loop: all ranks have, after the same step, or the run fails.

        Python drops what a generator raises while it is closed, so this rank then ends at once.
        """
        self._script.has_left = True
        try:
            question = self._ask(None)
            assert question is None, "a run that was left continues"
        except BaseException as error:
            self._life.give_up(error)

    def _refuse(self, call: str) -> None:
        if not self._is_in_engine and self.report is None:  # behind the loop the script may train on
            raise TaskError(f"{call} was called by the script: the step does that, when its micro-batches are used up")

    # between two steps

    @property
    def _group(self) -> Group:
        if self._question is None:
            return LocalGroup()
        return self._between if self._is_before_session else self._life.group

    def _between_steps(self, call: Call, work: Callable[[], T]) -> T:
        if isinstance(self._question, Compute):
            raise TaskError(f"{_NAMES[call]} was called in the middle of a step: it belongs behind `for batch in step`")
        if self._question is None:
            return work()
        return self._results.next(call, work, self._recover)

    def _recover(self, reason: str) -> None:
        """Regroup after a peer was lost between two steps; the script continues where it is."""
        question = self._ask(PeerLost(reason))
        if question is None:
            self._exit()
        assert isinstance(question, Between), "the script is between two steps"
        whereabouts.enter(Phase.SCRIPT)

    def _regrouped(self, group: Group) -> None:
        """A new generation has formed; `group` are the ranks that hold the state."""
        self._between, self._is_before_session = group, True
        self._results.share(group)

    def _measured(
        self, measure: Callable[[Any], Sums], source: Source, pieces: list[tuple[int, int]]
    ) -> list[dict[str, list[float]]]:  # fmt: skip
        """The sums and counts of this rank's pieces."""
        group, read = self._group, range_reader(source)
        is_whole = self._question is not None and not self._is_before_session
        shares = self._life.divide(len(pieces)) if is_whole else ()
        if len(shares) != group.world_size:
            shares = assign_shares(len(pieces), (1.0,) * group.world_size)
        first = sum(shares[: group.rank])
        training = [(part, part.training) for module in self._owned.modules for part in module.modules()]
        rows = []
        try:
            for module in self._owned.modules:
                module.eval()
            with torch.no_grad(), self._precision.computing(self._device):
                for start, stop in pieces[first : first + shares[group.rank]]:
                    found = measure(source.place(read(start, stop).sample))
                    rows.append({name: [float(total), float(number)] for name, (total, number) in found.items()})
        finally:
            for part, was_training in training:
                part.training = was_training
        return rows


def _is_break(frame: FrameType | None) -> bool:
    """Whether the frame drops a loop's iterator by `break` or `return`, not because of an exception."""
    code = None if frame is None else frame.f_code.co_code
    return code is not None and frame is not None and dis.opname[code[frame.f_lasti]].startswith("POP_")


_NAMES = {Call.EVALUATE: "run.evaluate", Call.ONLY_FIRST: "run.only_first"}
_NEVER = 10**9  # the epoch from which on samples are shuffled
