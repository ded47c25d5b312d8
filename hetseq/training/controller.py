"""The training loop: one step, written to read as the protocol it follows, and the work between steps.

A step counts first (the global count of each loss term is known before any forward), computes this rank's share,
sums the gradients, and commits: a small gather in which every rank proves that it holds the complete gradient and
all receive the same verdict. Only then does anything change. The controller knows no files, sockets, signals or flags;
it receives objects that do.
"""

from __future__ import annotations

import base64
import enum
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from torch.profiler import record_function as phase

from hetseq.balance.layout import Layout
from hetseq.cluster.membership.decide import Report, Tag, Update
from hetseq.cluster.membership.step_commit import (
    CommitRow,
    Lineage,
    Measured,
    Outcome,
    RowFormat,
    SaveStatus,
    Verdict,
    Vote,
    Wish,
    Words,
    add_in_rank_order,
    resolve,
)
from hetseq.comm.group import Group, gather_floats
from hetseq.config.sections import OptimizationConfig
from hetseq.data.loader import StepData, StepLoader
from hetseq.data.plan import Planner, Position, StepPlan
from hetseq.errors import NonFiniteError
from hetseq.system import faults
from hetseq.system import rank_phase as whereabouts
from hetseq.system.rank_phase import Phase
from hetseq.system.task_failure import noting
from hetseq.training.held_gradient import HeldGradient, with_late_counts
from hetseq.training.precision import LossScale
from hetseq.training.share import Part, ShareComputer
from hetseq.training.share_policy import SharePolicy
from hetseq.training.step_deadline import FIRST_DEADLINE_S, StepDeadline
from hetseq.training.step_engine import Compute, Engine, Settled, StepResult, computed, drive, ended
from hetseq.training.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

_SLOWEST_DISK = 5e6  # bytes per second; a rank that saves more slowly counts as lost


class Halt(enum.Enum):
    """Why all ranks stop training after the same step."""

    ENDED = "all is done"
    STOPPED = "a rank was asked to stop"
    LEAVING = "this rank leaves, the others continue"
    CHANGING = "other ranks go, or wait to be taken in"


@dataclass
class TrainingState:
    """The progress of a run; a resume needs only this and the replica's tensors."""

    position: Position = field(default_factory=Position)
    updates: int = 0  # optimizer steps applied; skipped steps consume samples but do not count here
    lineage: Lineage = field(default_factory=Lineage)
    skipped_in_a_row: int = 0
    loss_scale: LossScale = field(default_factory=LossScale)  # used if the precision needs it
    decay_steps: int | None = None  # the update at which the decay of the learning rate has ended; None: not known yet
    best: float | None = None
    ended_by_task: bool = False  # its `after_step` has ended the run
    train_seconds: float = 0.0
    resets: dict[str, int] = field(default_factory=dict)  # the --reset-* options done so far, and at which step


class Boundary(Protocol):
    """The work after a step besides training: validating, saving, reporting. Every rank calls all of it."""

    def save_status(self, state: TrainingState) -> SaveStatus:
        """The fields about saving in this rank's row of the step being committed, with a fresh nonce; not collective.

        `state` is the state before the step.
        """
        ...

    def settle(self) -> None:
        """Wait until nothing copies the state any more: it is about to change. Any rank, alone."""
        ...

    def before_update(self) -> None:
        """The gradient of the step is whole and clipped, and the optimizer comes next. Any rank, alone; never waits."""
        ...

    def after_step(self, controller: Controller, result: StepResult, *, ends_run: bool) -> None:
        """Do the work due after a committed step; `ends_run`: it was the last. Collective. Raises PeerLostError."""
        ...


@dataclass(frozen=True)
class StepFeed:
    """The samples of the coming steps: their plan, the loader of this rank's part, and the share policy."""

    planner: Planner
    loader: StepLoader
    pace: SharePolicy
    layout: Layout  # which ranks compute a share together


@dataclass(frozen=True)
class Recipe:
    """How a step changes the parameters, and when training ends."""

    config: OptimizationConfig
    learning_rate: Callable[[int, int], float] | None  # of (updates so far, epoch); None: the driver sets it
    #: term -> the later one whose sums are its count, known only after forward; for the first term, the gradient has
    #: been divided by the size of the step in its place
    late_counts: Mapping[int, int] = field(default_factory=dict)
    clip_epsilon: float = 0.0  # added to the norm where it is compared with the limit and divides it


@dataclass(frozen=True)
class RankContext:
    """The facts that a step needs from its process."""

    memory: Callable[[], tuple[int, int]] = lambda: (0, 0)  # bytes in use, and the limit
    wish: Callable[[], Wish] = lambda: Wish.NONE
    step_deadline_s: float | None = None
    driver_deadline_s: float = 0.0  # how long a driver may take between two steps


class Controller:
    """Trains one replica in step with its peers."""

    def __init__(
        self,
        computer: ShareComputer,
        group: Group,
        *,
        feed: StepFeed,
        recipe: Recipe,
        boundary: Boundary,
        state: TrainingState,
        context: RankContext,
    ) -> None:
        self.task, self.replica, self.group = computer.task, computer.replica, group
        self.planner, self.loader, self.pace = feed.planner, feed.loader, feed.pace
        self.terms, self.weights, self.state = computer.terms, computer.weights, state
        self.layout = feed.layout
        self._computer, self._boundary, self._context = computer, boundary, context
        self._config, self._learning_rate, self.late_counts = recipe.config, recipe.learning_rate, recipe.late_counts
        self._clip_epsilon = recipe.clip_epsilon
        self._has_loss_scale = computer.precision.has_loss_scale
        self._format = RowFormat(
            len(self.terms), len(self.replica.reducer.used), has_owners=self.replica.owned is not None
        )  # fmt: skip
        self._plan = self.planner.plan(state.position)
        self._counts_ahead: tuple[float, ...] | None = None
        self._deadline = StepDeadline(context.step_deadline_s, compiles=recipe.config.compile)
        self._cap = computer.sizes.cap  # by which the loader cuts
        self._clock = Stopwatch()
        self._update_s = 0.0  # duration of the update of the last step
        self._held: HeldGradient | None = None
        self._rows: Words = np.zeros((0, 0), np.int64)  # of the last commit
        self._last: tuple[Tag, Verdict] | None = None  # the last update that this controller has made
        self._unsettled: StepResult | None = None
        self.is_settling = False  # the driver has the last step's result, and the engine waits for it

    def fit(self) -> Halt:
        """All steps of a task: `steps`, driven. Every rank calls it."""
        return drive(self.steps())

    def train_step(self) -> StepResult:
        """One step of a task: `step`, driven. Every rank calls it."""
        return drive(self.step())

    def steps(self) -> Engine[Halt]:
        """Train until the configured end, or until a rank asks for something else. Every rank drives it."""
        if self._learning_rate is not None:  # else the script of the user decides
            self.replica.model.train()
        with self.replica.buffers.changing_alike(), self.replica.refusing_parameters(self._update_step_name):
            self.task.update_step(self.state.updates)  # values that a task derives from it are not in a checkpoint
        while not self.has_ended():
            with noting(f"step {self._plan.step}"):
                outcome = (yield from self.step()).outcome
            if outcome.wish and not self._is_amid and not self.has_ended():
                is_leaving = outcome.rows[self.group.rank].wish & Wish.LEAVE
                return Halt.STOPPED if outcome.wish & Wish.STOP else Halt.LEAVING if is_leaving else Halt.CHANGING
        return Halt.ENDED

    def step(self) -> Engine[StepResult]:
        """One step of the global batch: every rank enters, every rank leaves with the same verdict."""
        plan, clock = self._plan, self._clock
        faults.at_step(plan.step)
        clock.start()
        self._computer.loss_scale = self._scale
        self.group.deadline_s = self._deadline.of(plan)
        with phase("count"):
            whereabouts.enter(Phase.DATA, plan.step)
            data = self.loader.take(plan)
            clock.lap("data")
            whereabouts.enter(Phase.COUNT)
            faults.point("count")
            counts = self._counts_ahead or self._gather_counts(data)
            clock.lap("idle")
        outcome = yield from self._agree(plan, data, counts)
        is_to_blame = outcome.verdict is Verdict.SKIP and not self._is_overflow(outcome)
        result = self._resolve(outcome)
        whereabouts.enter(Phase.BOUNDARY)
        faults.point("boundary")
        if is_to_blame:
            yield from self._explain_skip(plan, data, counts)
        if self._learning_rate is None:  # a script may look at the parameters between two steps
            self.replica.reducer.gather()
        self.is_settling = True
        driver_s = self._context.driver_deadline_s
        with self.replica.buffers.changing_alike(), self._patience(driver_s):
            yield from ended(Settled(result))
        self.is_settling = False
        patience_s = FIRST_DEADLINE_S + driver_s + self.replica.state_bytes() / _SLOWEST_DISK
        with phase("checkpoint"), self._patience(patience_s):
            self._boundary.after_step(self, result, ends_run=self.has_ended())
        self._unsettled = None
        return result

    def _agree(self, plan: StepPlan, data: StepData, counts: tuple[float, ...]) -> Engine[Outcome]:
        """Sum the gradients until every rank holds the whole sum, again whenever memory ran out on a rank; the verdict
        of all ranks."""
        clock = self._clock
        for attempt in itertools.count():
            with phase("gather"):
                self.replica.reducer.gather(self.layout.by_rank(plan.shares))
                clock.lap("idle")
            with phase("forward_backward"):
                whereabouts.enter(Phase.FORWARD_BACKWARD)
                faults.point("forward_backward")
                part = yield from self._compute(data, counts)
                clock.lap("compute")
                clock.move(part.waited_s, "compute", "idle")
                whereabouts.enter(Phase.DATA)
                upcoming = self._look_ahead(plan)  # fetched while the buckets travel
                clock.lap("data")
            with phase("reduce"):
                whereabouts.enter(Phase.REDUCE)
                faults.point("reduce")
                self.replica.reducer.finish()
                self.replica.buffers.send(self.layout.at_leaders(plan.shares))
                self.replica.buffers.finish()
                clock.lap("idle")
            with phase("commit"):
                norm = self.replica.reducer.norm() / self._scale  # of this rank's part
                clock.lap("other")
                # from here on this rank holds the whole gradient of this attempt
                rate = self._rate(plan.epoch)  # a script may have set it at the top of the step
                self._held = HeldGradient(plan, attempt, counts, rate) if part.is_whole else None
                whereabouts.enter(Phase.COMMIT)
                faults.point("commit")
                outcome = self._commit(plan, attempt, norm, part, upcoming)
                clock.lap("idle")
            if outcome.verdict is not Verdict.REDO:
                break
            self._held = None
            self.replica.buffers.restore_()
            logger.info("step %d is done again: memory ran out on rank %s", plan.step, _redoing(outcome))
        return outcome

    def _compute(self, data: StepData, counts: tuple[float, ...]) -> Engine[Part]:
        return computed(Compute(self._computer, data, counts, self.loader.fetch_again))

    def has_ended(self) -> bool:
        """Whether updates or epochs are done or the learning rate is at its minimum; never amid repeated samples."""
        state, config = self.state, self._config
        if self._is_amid:
            return False
        if state.ended_by_task:
            return True
        if config.max_update and self._done >= config.max_update:
            return True
        if config.max_epoch and state.position.epoch > config.max_epoch:
            return True
        if self._learning_rate is None:
            return False
        begins_epoch = state.position.consumed == 0 and state.position.epoch > 1
        return begins_epoch and self._rate(state.position.epoch) <= config.min_lr

    @property
    def _done(self) -> int:
        """What --max-update counts: updates; of steps in a row over the same samples also those that were skipped."""
        return self.state.updates if self.planner.repeats == 1 else self.state.position.step - 1

    @property
    def _is_amid(self) -> bool:
        """Whether the next step uses the samples of the last one again."""
        return (self.state.position.step - 1) % self.planner.repeats != 0

    def _rate(self, epoch: int) -> float:
        """The learning rate of the next update; that of the first group if the driver sets it."""
        if self._learning_rate is None:
            return float(self.replica.optimizer.param_groups[0]["lr"])
        return self._learning_rate(self.state.updates, epoch) * self.task.learning_rate_factor

    def patience_for(self, *, samples: int) -> AbstractContextManager[None]:
        """A longer deadline for work between steps on `samples` samples: ranks may be minutes apart, yet not lost."""
        return self._patience(self._deadline.beside_steps(samples))

    @contextmanager
    def _patience(self, at_least_s: float) -> Iterator[None]:
        before, self.group.deadline_s = self.group.deadline_s, max(at_least_s, self.group.deadline_s)
        try:
            yield
        finally:
            self.group.deadline_s = before

    # count

    def _gather_counts(self, data: StepData) -> tuple[float, ...]:
        """Global counts of a step whose counts did not arrive with the previous commit."""
        rows = gather_floats(self.group, [float(data.samples), *data.counts])  # (world_size, 1 + terms)
        return add_in_rank_order(rows[list(self.layout.leaders), 1:].tolist())

    def _look_ahead(self, plan: StepPlan) -> StepData | None:
        """This rank's part of the next step, if there is one and it is at hand."""
        is_last_update = self._config.max_update and self._done + 1 >= self._config.max_update
        is_last_epoch = plan.ends_epoch and self._config.max_epoch and plan.epoch >= self._config.max_epoch
        if is_last_update or is_last_epoch:
            return None
        return self.loader.peek(self.planner.plan(plan.next_position()))

    # commit

    def _commit(self, plan: StepPlan, attempt: int, norm: float, part: Part, upcoming: StepData | None) -> Outcome:
        reducer, state = self.replica.reducer, self.state
        is_finite = math.isfinite(norm) or reducer.is_finite()
        agreed = self.planner.digest(plan) ^ reducer.layout_digest
        digest = state.lineage.digest(generation=self.group.generation, attempt=attempt, plan=agreed)
        row = CommitRow(
            digest=digest,
            vote=Vote.REDO if not part.is_whole else Vote.OK if is_finite else Vote.NON_FINITE,
            next_samples=upcoming.samples if upcoming else 0,
            next_counts=upcoming.counts if upcoming else (0.0,) * len(self.terms),
            sums=part.sums,
            used=reducer.used,
            measured=self._measure(part),
            wish=self._context.wish(),
            saving=self._boundary.save_status(state),
            partial=part.partial,
            norm=norm,
        )
        return self._read(plan, self.group.all_gather_rows(self._format.pack(row)))

    def _read(self, plan: StepPlan, rows: Words) -> Outcome:
        """The outcome that the rows of a commit, (world_size, words), give."""
        next_size = self.planner.plan(plan.next_position()).size
        unpacked = [self._format.unpack(words) for words in rows]
        outcome = resolve(unpacked, next_samples=next_size, leaders=self.layout.leaders)
        self._rows = rows
        return outcome

    def _measure(self, part: Part) -> Measured:
        seconds = self._clock.seconds
        compute_s, data_s = sum(part.seconds), seconds["data"]
        # this rank's other work, in this step so far and in the update of the previous step
        overhead_s = seconds["compute"] - compute_s + seconds["other"] + self._update_s
        cost = self.pace.learn(part, overhead_s=data_s + overhead_s) if part.is_whole else None
        state = self.replica.owned_bytes()
        return Measured(compute_s, data_s, seconds["idle"], overhead_s, *self._context.memory(), cost, state)

    def _clip(self, norm: float, correction: float) -> None:
        """Scale the gradient to the size in which it is applied; `norm` includes the correction."""
        factor, norm = correction / self._scale, norm + self._clip_epsilon
        if self._config.clip_norm and norm > self._config.clip_norm:
            factor *= self._config.clip_norm / norm
        if factor != 1:
            self.replica.reducer.scale_(factor)

    def _update(self, outcome: Outcome, rate: float) -> None:
        self.replica.reducer.drop_unused_(outcome.used)
        self.replica.buffers.keep_()
        self._boundary.before_update()
        if self._learning_rate is not None:
            self.replica.set_learning_rate(rate)
        self.replica.update()
        self.replica.reducer.changed()
        self.state.updates += 1
        self.state.skipped_in_a_row = 0
        if self._has_loss_scale:
            self.state.loss_scale = self.state.loss_scale.after_update()
        with self.replica.buffers.changing_alike(), self.replica.refusing_parameters(self._update_step_name):
            self.task.update_step(self.state.updates)

    def _skip(self, outcome: Outcome) -> None:
        state = self.state
        self._boundary.settle()  # of an update the optimizer waits for it
        self.replica.buffers.restore_()
        if not self._is_overflow(outcome):
            state.skipped_in_a_row += 1
            return
        tried, state.loss_scale = state.loss_scale, state.loss_scale.after_overflow()
        logger.log(
            logging.WARNING if self.group.rank == 0 else logging.INFO,
            "step %d skipped: its gradient, times %g, is too large for fp16; the next loss is multiplied by %g",
            state.position.step, tried.factor, state.loss_scale.factor,
        )  # fmt: skip

    @property
    def _update_step_name(self) -> str:
        return f"{type(self.task).__name__}.update_step"

    @property
    def _scale(self) -> float:
        return self.state.loss_scale.factor if self._has_loss_scale else 1.0

    def _is_overflow(self, outcome: Outcome) -> bool:
        """Whether a gradient is not finite because the loss scale was too large, while the losses are numbers."""
        return self._has_loss_scale and self.state.loss_scale.may_fall and all(map(math.isfinite, outcome.sums))

    def _explain_skip(self, plan: StepPlan, data: StepData, counts: tuple[float, ...]) -> Engine[None]:
        """Log which rank produced values that are not finite. Collective."""
        blame = yield from self._find_non_finite(data, counts)
        self.replica.buffers.restore_()
        message = f"step {plan.step} skipped: its gradient is not finite; {blame}"
        if self.state.skipped_in_a_row >= self._config.max_skipped_steps:
            raise NonFiniteError(
                f"{message}. {self.state.skipped_in_a_row} steps in a row were skipped (--max-skipped-steps): lower"
                " --lr, raise --warmup-updates, or look at the named samples"
            )
        logger.log(logging.WARNING if self.group.rank == 0 else logging.INFO, message)  # all ranks know this

    def _find_non_finite(self, data: StepData, counts: tuple[float, ...]) -> Engine[str]:
        """Every rank computes its share once more, without sending it, and the ranks compare; only after a skip."""
        with self.replica.reducer.without_sending():
            sums = (yield from self._compute(data, counts)).sums
            self.replica.reducer.finish()
            is_bad = not self.replica.reducer.is_finite()
        flags = [float(is_bad), *(float(not math.isfinite(value)) for value in sums)]
        rows = gather_floats(self.group, flags)  # (world_size, 1 + terms)
        blamed = []
        for rank in np.flatnonzero(rows[:, 0]).tolist():
            terms = [term for term, bad in zip(self.terms, rows[rank, 1:]) if bad]
            what = f"loss term {', '.join(map(repr, terms))}" if terms else "a gradient of finite losses"
            start, stop = data.plan.range_of(self.layout.group_of(rank))
            blamed.append(
                f"rank {rank} produced it ({what}; positions {start} to {stop - 1} of epoch {data.plan.epoch})"
            )
        if blamed:
            return "; ".join(blamed)
        found = "it was not there when every rank computed its share again"
        if self.group.world_size == 1:
            return f"{found}: look at the memory of this device"
        return f"{found}: the sum over the ranks overflowed, or the memory of a device is at fault"

    # after the verdict

    def follow(self, rows: Words, outcome: Outcome, attempt: int) -> StepResult:
        """Make the update of a step that the ranks of a run have committed, for a process that is none of them.

        `.grad` is the gradient as the ranks have clipped it, `rows` are the rows of the commit.
        """
        self._clock.start()
        self._rows = rows
        self._held = HeldGradient(self._plan, attempt, (), self._rate(self._plan.epoch))
        return self._resolve(outcome, is_clipped=True)

    def _resolve(self, outcome: Outcome, *, is_clipped: bool = False) -> StepResult:
        """Apply the verdict to the held gradient. Nothing here waits for a peer, so a rank that loses a peer has either
        done all of it or not seen the verdict; an exception under way ends the process."""
        held, self._held = self._held, None
        assert held is not None
        if self._learning_rate is None:
            held = replace(held, rate=self.replica.rate_of(outcome.used))
        whereabouts.enter(Phase.UPDATE)
        if outcome.verdict is Verdict.APPLY:
            correction = 1.0
            if self.late_counts:
                held, correction = with_late_counts(held, outcome, self.late_counts)
                outcome = replace(outcome, norm=outcome.norm * correction)
            with phase("clip"):
                faults.point("clip")
                if not is_clipped:
                    self._clip(outcome.norm, correction)
            with phase("optimizer"):
                faults.point("optimizer")
                self._update(outcome, held.rate)
        else:
            self._skip(outcome)
        self._clock.lap("update")
        result = self._unsettled = self._conclude(held, outcome)
        return result

    def _conclude(self, held: HeldGradient, outcome: Outcome) -> StepResult:
        state, plan, tag = self.state, held.plan, Tag(held.plan.step, self.group.generation, held.attempt)
        state.lineage = state.lineage.extend(
            tag.step, generation=tag.generation, attempt=tag.attempt, verdict=outcome.verdict
        )  # fmt: skip
        self._last = tag, outcome.verdict
        state.position = plan.next_position()
        shift = self.pace.follow(plan, outcome.rows)
        if self._computer.sizes.cap != self._cap:  # this rank has learned a new size from its memory
            self._cap = self._computer.sizes.cap
            self.loader.change(state.position.step, cap=self._cap)
        self._plan = self.planner.plan(state.position)
        self._counts_ahead = outcome.next_counts
        seconds, self._update_s = self._clock.total(), self._clock.seconds["update"]
        state.train_seconds += seconds
        self._deadline.learn(plan, seconds)
        is_applied = outcome.verdict is Verdict.APPLY
        loss = weighted_loss(self.weights, outcome.sums, held.counts) if is_applied else None
        work = self.planner.work(plan.epoch, plan.start, plan.stop)
        scale = state.loss_scale.factor if self._has_loss_scale else None
        return StepResult(
            plan, outcome, held.counts, loss, held.rate, outcome.norm, seconds, work, shift, self.layout, scale,
            state.best,
        )  # fmt: skip

    @property
    def rows(self) -> Words:
        """The rows of the last commit. Shape (world_size, words)."""
        return self._rows

    @property
    def last_update(self) -> tuple[Tag, Verdict] | None:
        """The last update that this controller has made."""
        return self._last

    # when the generation is over

    def report(self, incarnation: str) -> Report:
        """The state of this rank after it lost its peers or is about to change them; it must not train any more."""
        held, last = self._held, None
        if self._last is not None:
            tag, verdict = self._last
            last = Update(tag, verdict, base64.b64encode(self._rows.tobytes()).decode())
        owned = self.replica.owned
        return Report(
            incarnation,
            self.group.generation,
            lineage=self.state.lineage,
            gradient=None if held is None else Tag(held.plan.step, self.group.generation, held.attempt),
            last=last,
            cost=self.pace.cost(),
            part=None if owned is None else owned.part,
            cut=None if owned is None else owned.cut,
        )

    def catch_up(self, last: Update | None) -> None:
        """Make the update whose commit another rank has seen, if this rank lacks it; its rows say which one it was.

        Otherwise undo the changes that a forward has made since the last update.
        """
        if last is None or last.tag.step == self.state.position.step - 1 or self._held is None:
            self._held = None
            self.replica.buffers.restore_()
            return
        rows = np.frombuffer(base64.b64decode(last.rows), np.int64).reshape(-1, self._format.words)
        self._resolve(self._read(self._held.plan, rows))

    @property
    def unsettled(self) -> StepResult | None:
        """The last step, if what follows from it (validation, saving) was interrupted."""
        return self._unsettled


def weighted_loss(weights: tuple[float, ...], sums: tuple[float, ...], counts: tuple[float, ...]) -> float:
    """Sum over terms of weight * sum / count; a term without count or weight contributes nothing."""
    return float(sum(w * s / c for w, s, c in zip(weights, sums, counts) if c and w))


def _redoing(outcome: Outcome) -> str:
    return ", ".join(str(rank) for rank, row in enumerate(outcome.rows) if row.vote is Vote.REDO)
