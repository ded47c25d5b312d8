"""A script's part in a run: what it owns, its loop, and what ranks do together between two steps."""

from __future__ import annotations

import dis
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import FrameType, FunctionType
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import default_collate

from hetseq.balance.shares import assign_shares
from hetseq.comm.group import Group, LocalGroup
from hetseq.config.sections import Config
from hetseq.data.fetch import seed_everything
from hetseq.data.loader import Source, place_on
from hetseq.data.plan import derive_seed
from hetseq.errors import EXIT_DONE, TaskError, few
from hetseq.loop.between import Results, together
from hetseq.loop.check import Check
from hetseq.loop.evaluation import Rows, Sums, means, measured, pieces_of
from hetseq.loop.owned import Owned
from hetseq.loop.refusals import refuse_data
from hetseq.loop.script_task import Count, LoopArguments, ScriptMaterial, ScriptTask, material_of
from hetseq.loop.step import Step
from hetseq.parallel.buffers import BufferKeeper
from hetseq.run.task_hooks import Call
from hetseq.system import rank_phase as whereabouts
from hetseq.system.processes import holding_interrupts
from hetseq.system.rank_phase import Phase
from hetseq.training.precision import PRECISIONS
from hetseq.training.share import Part
from hetseq.training.step_engine import Between, Compute, Engine, PeerLost, Question, Settled

logger = logging.getLogger(__name__)

T = TypeVar("T")
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

    def present(self, config: Config, material: ScriptMaterial) -> None:
        """Compare what this rank would train with its peers."""
        ...

    def save(self) -> None:
        """Save the state after the last update, for a rank alone whose script leaves a step."""
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
        self, config: Config, life: Life, *, device: torch.device, name: str, is_alone: bool = False,
        tell_check: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self._config, self._life, self._name = config, life, name
        self._device, self._precision = device, PRECISIONS[config.optimization.precision]
        self._owned = Owned(device, self._precision.storage)
        self._task: ScriptTask | None = None
        self._engine: Engine[dict[str, Any]] | None = None
        self._question: Question | None = None
        self._step: Step | None = None  # the one that the script is in, or has just ended
        self._wants_to_stop = False
        self._tell_check = tell_check  # with it, the run ends before its first update
        self._is_alone = is_alone  # the only rank, without a launcher
        self._loops, self._asked = 0, dict[str, Any]()  # how often `steps` was called, and with what
        self.is_closed = False
        self._buffers: BufferKeeper | None = None
        self._settled_own = ""  # the numbers of owned objects after the last update
        self._rank, self._world_size = life.first_place
        self._is_in_engine, self._is_before_session = False, False
        self._checked: set[int] = set()  # phases
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
        """Register modules, optimizers and all else that must be saved, resumed and given to ranks that join.

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
        weights: Mapping[str, float] | None = None,
        metrics: Sequence[str] = (),
        phases: int = 1,
        clip_norm: float = 0.0,
        clip_epsilon: float = 0.0,
        shuffle: bool = True,
    ) -> Iterator[Step]:
        """Each step of the run once, from where it stands: a resumed run and a rank that joins begin there.

        `data` has `__len__` and `__getitem__`; `global_batch_size` is in samples over all ranks, and the last step of
        an epoch may be smaller. The loop ends after `max_epoch` epochs or `max_steps` applied steps, the first to come,
        or when every rank leaves it by `break`, or after `stop`. `clip_norm` limits the L2 norm of the gradient (0: no
        limit); `clip_epsilon` is added to the norm, 1e-6 as in `torch.nn.utils.clip_grad_norm_`. `count(batch)` gives
        the denominator of each loss term, from the collated batch alone: needed for several terms, whose sum / count
        are added, each times its weight in `weights` (default: 1). `metrics` are the names of what `step.add` adds.
        `phases` is the number of updates in a step, each with an inner loop over the same samples (`step.of`). Every
        rank calls it alike. In a notebook a cell that was interrupted may run again,
        with the same arguments: it continues where it was. Raises TaskError, and SystemExit where the run ends early.
        """
        mine = self._loops = self._loops + 1
        asked = {
            "data": data, "global_batch_size": global_batch_size, "max_epoch": max_epoch, "max_steps": max_steps,
            "collate": collate, "count": count, "weights": weights, "metrics": tuple(metrics), "phases": phases,
            "clip_norm": clip_norm, "clip_epsilon": clip_epsilon, "shuffle": shuffle,
        }  # fmt: skip
        if mine > 1:
            question = self._again(asked)
        else:
            if isinstance(metrics, str):
                raise TaskError(f"run.steps got metrics={metrics!r}: expected a tuple of names, as in ({metrics!r},)")
            task = ScriptTask(
                self._owned, LoopArguments(collate, count, weights or {}, tuple(metrics), phases, clip_epsilon)
            )
            config = self._options(
                global_batch_size, max_epoch, max_steps and max_steps * phases, clip_norm, shuffle=shuffle
            )
            self._begin(data, task, config)
            self._asked, question = asked, self._ask(None)
        while question is not None:
            assert isinstance(question, Compute), "a step that was settled before its micro-batches were given"
            self._is_before_session = False
            self._script.begin_log()
            step = self._step = Step(self, question, self._terms, phases=phases, samples=len(data))
            try:
                yield step
            except GeneratorExit:  # `break`, or an exception on its way out of the script
                if mine == self._loops and step.is_settled and _is_break(sys._getframe().f_back):
                    self._leave()
                return
            if not step.is_settled:
                raise TaskError(
                    f"the loop left step {step.number} before its micro-batches were used up: let `for batch in step`"
                    " run to its end, once for each of phases=; run.stop() ends the run after a step"
                )
            self._script.wants_to_stop = self._wants_to_stop
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
        refuse_data("run.evaluate", data)
        source = Source(data, collate, lambda *_: (), place_on(self._device, self._precision.storage), 0,
                        self._config.task.seed)  # fmt: skip
        pieces = pieces_of(len(data), batch_size)

        def work() -> Rows:
            whereabouts.enter(Phase.VALIDATION)
            own = self._owned.modules
            rows = measured(measure, source, self._share_of(pieces), own, self._precision.computing(self._device))
            whereabouts.enter(Phase.SCRIPT)
            return [row for rows in together(self._group, Call.EVALUATE, self._results.step, rows) for row in rows]

        return means(self._between_steps(Call.EVALUATE, work), len(pieces))

    def only_first(self, work: Callable[[], T]) -> T:
        """The result of `work()`, called on the first rank alone; its JSON form on every rank. Between two steps.

        For what one rank must do or decide: a sample from the model, a file, a random choice. Every rank calls it.
        """
        if not self.is_in_step and not isinstance(self._question, (Settled, Between)):
            raise TaskError("run.only_first belongs between two steps, behind the inner loop: there all ranks call it")

        def first() -> Any:
            value = work() if self.is_first else None
            try:
                return together(self._group, Call.ONLY_FIRST, self._results.step, value)[0]
            except TypeError as error:
                raise TaskError(
                    f"run.only_first: its function returned what JSON cannot hold ({error}): expected numbers, text,"
                    " None, and lists and dicts of them"
                ) from None

        result: T = self._between_steps(Call.ONLY_FIRST, first)
        return result

    def log(self, **numbers: Any) -> None:
        """Put numbers into the step's row in `metrics.jsonl`, under `log`, and so into TensorBoard and all trackers.

        Numbers, and tensors without dimensions; of a name that is given twice the last value counts. Behind the inner
        loop; every rank may call it, and the rank that writes takes its own numbers, once for each step. Raises
        TaskError.
        """
        if self.is_in_step or not isinstance(self._question, (Settled, Between)):
            raise TaskError("run.log belongs behind the inner loop: its numbers go into the row of the step before it")
        self._script.log({name: _number(name, value) for name, value in numbers.items()})

    def close(self) -> None:
        """End the run, with a checkpoint; the gradient of a step that is not complete is lost.

        At the end of the script HetSeq calls it.
        """
        self.is_closed = True
        if isinstance(self._question, (Settled, Between)) and not self.is_in_step:
            self._leave()
        elif self._is_alone and self._engine is not None:
            if self._question is not None and not self.only_checks:
                self._life.save()
            self._engine.close()

    @property
    def is_in_step(self) -> bool:
        """Whether a step waits for micro-batches of this rank."""
        return self.report is None and self._step is not None and not self._step.is_settled

    def stop(self) -> None:
        """End the run after this step, on all ranks, with exit code 0. Any rank, alone, between two steps."""
        if self._task is None:
            raise TaskError("run.stop belongs into the loop over run.steps")
        self._wants_to_stop = True

    def take_smaller(self) -> bool:
        """Remember half the size of micro-batches for the next process on this device; False if that is impossible.

        After memory ran out in the loop, whose frames may hold what filled it. HetSeq calls it.
        """
        if not isinstance(self._question, Compute) or not self._question.data.micro_batches:
            return False
        largest = max(self._question.data.micro_batches, key=lambda batch: batch.size)
        return self._question.computer.sizes.refuse(largest.size, largest.work)

    # for Step

    @property
    def group(self) -> Group:
        """The ranks of the generation."""
        return self._life.group

    def only(self, optimizers: Sequence[torch.optim.Optimizer]) -> AbstractContextManager[None]:
        return self._owned.only(optimizers)

    def go_on(self) -> Compute:
        if (own := self._script.digest()) != self._settled_own:
            raise TaskError(
                "an object of run.own was changed between two phases of a step: do it behind the last inner loop, since"
                " a rank that joins, or a run that resumes, in the middle of a step would do it again"
            )
        self._settled_own = own
        self._script.begin_log()
        question = self._ask(None)
        if question is None:
            self._exit()
        assert isinstance(question, Compute), "another phase of the step follows"
        self._is_before_session = False
        return question

    def answer(self, answer: Part | PeerLost) -> Compute | Settled:
        question = self._ask(answer)
        if question is None:
            self._exit()
        assert not isinstance(question, Between), "a step is under way"
        if isinstance(question, Settled):
            if not self._results.step:
                self._warn_of_buffers()
            self._results.begin(question.result.plan.step)
            if self._script.loop.phases > 1:
                self._settled_own = self._script.digest()
            whereabouts.enter(Phase.SCRIPT)
            seed_everything(derive_seed(self._config.task.seed, question.result.plan.step, _AFTER_STEP))
        return question

    def check_of(self, question: Compute, phase: int) -> Check | None:
        self._buffers = question.computer.replica.buffers
        if phase in self._checked:
            return None
        self._checked.add(phase)
        level = logging.WARNING if self.is_first and not self.only_checks else logging.INFO
        return Check(question, self._script, has_late_count=self._terms.has_late_count, level=level)

    @property
    def only_checks(self) -> bool:
        return self._tell_check is not None

    def tell(self, found: str, *, is_last: bool) -> None:
        assert self._tell_check is not None
        self._tell_check(found)
        if is_last:
            self.report = {"code": EXIT_DONE}
            raise SystemExit(EXIT_DONE)

    def _warn_of_buffers(self) -> None:
        """Tell once which parts of the model are changed by forward; of batch norm the run tells at its start."""
        assert self._buffers is not None
        found = {
            f"{name} of {type(module).__name__}"
            for module, name in self._buffers.changing()
            if not isinstance(module, _BatchNorm)
        }
        if found and self.is_first:
            logger.warning(
                "forward changes %s: the changes of all ranks are averaged, and the course depends a little on how a"
                " step is cut", few(sorted(found)),
            )  # fmt: skip

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
        self._owned.settle()
        material = material_of(
            self._name, task, data, device=self._device, precision=self._precision, seed=config.task.seed,
            deadline_s=config.distributed.script_deadline,
        )  # fmt: skip
        self._owned.guard(self._refuse)
        self._config, self._task, self._terms = config, task, material.sums
        self._life.present(config, material)
        self._engine = self._life.run()

    def _ask(self, answer: Part | PeerLost | None) -> Question | None:
        """Answer the question at hand; returns the next one. None: the run is over, and the loop ends."""
        assert self._engine is not None
        if isinstance(self._question, (Settled, Between)):
            whereabouts.enter(Phase.BOUNDARY)
        self._question, self._is_in_engine = None, True
        try:
            with holding_interrupts():
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

    def _again(self, asked: Mapping[str, Any]) -> Question | None:
        """The question for a loop over a run whose loop was interrupted. Raises TaskError."""
        if not self._is_alone or self.report is not None or self.is_closed:
            remedy = "; run.close() and hetseq.start() begin another run" if self._is_alone else ""
            raise TaskError(f"run.steps was called twice: a script has one loop over run.steps{remedy}")
        others = [name for name, value in asked.items() if not _is_same(value, self._asked.get(name))]
        if others or self._question is None:
            why = f"was given another {few(others)}" if others else "was interrupted in the middle of an update"
            raise TaskError(
                f"run.steps continues a loop that was interrupted, and {why}: run.close() and hetseq.start() begin"
                " another run"
            )
        return self._question if isinstance(self._question, Compute) else self._ask(None)

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
        is_over = self.is_closed or self.report is not None  # then the script may train on
        if not self._is_in_engine and not is_over:
            raise TaskError(f"{call} was called by the script: the step does that, when its micro-batches are used up")

    # between two steps

    @property
    def _group(self) -> Group:
        if self._question is None:
            return LocalGroup()
        return self._between if self._is_before_session else self._life.group

    def _between_steps(self, call: Call, work: Callable[[], T]) -> T:
        if self.is_in_step:
            raise TaskError(
                f"{_NAMES[call]} was called in the middle of a step: it belongs behind the last `for batch in step`"
            )
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
        group.deadline_s = max(group.deadline_s, self._config.distributed.script_deadline)
        self._between, self._is_before_session = group, True
        self._results.share(group)

    def _share_of(self, pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The pieces that this rank evaluates."""
        group = self._group
        is_whole = self._question is not None and not self._is_before_session
        shares = self._life.divide(len(pieces)) if is_whole else ()
        if len(shares) != group.world_size:
            shares = assign_shares(len(pieces), (1.0,) * group.world_size)
        first = sum(shares[: group.rank])
        return pieces[first : first + shares[group.rank]]


def _number(name: str, value: Any) -> float:
    """A number for a tracker by a name that each of them takes. Raises TaskError."""
    if not 0 < len(name) <= _LONGEST_NAME or any(part in ("", ".", "..") for part in name.split("/")):
        raise TaskError(
            f"run.log got the name {name[:60]!r}: expected 1 to {_LONGEST_NAME} characters, and between slashes a name"
            " each"
        )
    if getattr(value, "shape", None) == ():  # of torch or NumPy
        value = value.item()
    if not isinstance(value, (int, float)) or (isinstance(value, int) and abs(value) > _LARGEST):
        got = "a whole number of too many digits" if isinstance(value, int) else type(value).__name__
        raise TaskError(f"run.log({name}=...) got {got}: expected a number, or a tensor without dimensions")
    return value


def _is_break(frame: FrameType | None) -> bool:
    """Whether the frame drops a loop's iterator by `break` or `return`, not because of an exception."""
    code = None if frame is None else frame.f_code.co_code
    return code is not None and frame is not None and dis.opname[code[frame.f_lasti]].startswith("POP_")


def _words_of(function: FunctionType) -> tuple[Any, ...]:
    """All that a function is made of, but the names that it finds in its module."""
    kept = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return function.__code__, function.__defaults__, function.__kwdefaults__, tuple(map(id, kept))


def _is_same(one: Any, other: Any) -> bool:
    """Whether two arguments mean the same; a function does that was defined again by the same words."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        return _words_of(one) == _words_of(other)
    return one is other or (isinstance(one, (int, float, tuple, dict)) and bool(one == other))


_NAMES = {Call.EVALUATE: "run.evaluate", Call.ONLY_FIRST: "run.only_first"}
_LONGEST_NAME = 250  # of MLflow
_LARGEST = int(sys.float_info.max)
_NEVER = 10**9  # the epoch from which on samples are shuffled
