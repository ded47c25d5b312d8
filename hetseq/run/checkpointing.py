"""The content of a run's checkpoints, and the decision when one is due.

A checkpoint is the replica's tensors and one JSON object. Random numbers are derived from (seed, step, position) and
learning rates from the number of updates, so no generator or scheduler is saved: the step, the samples consumed and
the history are enough.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from hetseq.checkpoint import CheckpointManager, Held, Identity, Loaded, SaveResult
from hetseq.checkpoint.images import Images
from hetseq.cluster.membership.step_commit import CommitRow, Outcome, SaveStatus, parse_lineage
from hetseq.comm.directory_groups import DirectoryGroups
from hetseq.config.sections import WITHOUT_END, CheckpointConfig
from hetseq.data.plan import GlobalBatch, Position
from hetseq.parallel.owned_units import OwnedUnits
from hetseq.parallel.replica import Replica, tied_names
from hetseq.run.foreign_parts import with_foreign_parts
from hetseq.run.image_making import say_what_protects
from hetseq.run_directory import jsonable
from hetseq.system import faults
from hetseq.training.controller import TrainingState
from hetseq.training.precision import LossScale

logger = logging.getLogger(__name__)

Rows = Sequence[Mapping[str, Any]]

STATE_VERSION = 1
_LARGE_BYTES = 64 << 20
_LEAST_KEEPING_S = 1.0
_KEEPING_SHARE = 100  # the next copy to memory comes after this many times the duration of the last


@dataclass(frozen=True)
class Provenance:
    """The properties that determine the result of a run, besides its parameters; equal on all ranks."""

    task: str
    optimizer: str
    seed: int
    split: str
    samples: int  # of the training split, on all hosts
    curriculum: int
    precision: str
    batch: GlobalBatch
    unit_size: int | None = None
    shuffle_block: int | None = None
    vocabulary: str | None = None  # a digest of the meaning of the numbers in the samples; None: unknown
    recipe: Mapping[str, Any] = field(default_factory=dict, compare=False)  # see `hetseq.run.recipe`
    lanes: str | None = None  # the order of training data that are `Lanes`
    base: str | None = None  # frozen weights that no checkpoint holds, by their content
    parts: str | None = None  # of the training split on different hosts, see `data_by_host`; None: every host has all


@dataclass(frozen=True)
class Underway:
    """A save that has begun: step and best metric of its state, why it is saved, and the name of the checkpoint.

    Without `kinds` it was given up, and a checkpoint of any later step makes up for it.
    """

    step: int
    kinds: list[str]
    best: float | None
    nonce: int


@dataclass(frozen=True)
class Saved:
    """The end of a save of the state after `step`; `result` belongs to this rank's directory."""

    step: int
    kinds: list[str]
    result: SaveResult


@dataclass
class KnownSaves:
    """What a process knows of the run's saves that makes none itself: what a `Saver` of the run has told."""

    last_step: int = 0
    best: float | None = None
    known: tuple[int, ...] = ()
    owes: Underway | None = None
    last_s: float = field(default_factory=time.monotonic)
    failures: list[tuple[int, str]] = field(default_factory=list)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> KnownSaves:
        """The inverse of `Saver.facts`."""
        owes = None if record["owes"] is None else Underway(**record["owes"])
        return cls(record["last_step"], record["best"], tuple(record["known"]), owes)


class Saver:
    """Decides when a checkpoint is due and has it written; one per rank, and all ranks save together.

    A save continues while the next steps are trained: `save` begins it, and `go_on` after each later step ends it.
    `before` is this rank's saver of the previous generation; its clock and failures carry over. Where ranks own parts
    of the state, `images` keep it in memory, otherwise the manager does.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        config: CheckpointConfig,
        provenance: Provenance,
        replica: Replica,
        *,
        sharing: DirectoryGroups,
        images: Images | None = None,
        before: Saver | KnownSaves | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager, self._config, self._provenance, self._replica = manager, config, provenance, replica
        self._sharing, self._generation, self._now = sharing, sharing.whole.generation, now
        self._images = images
        self._making_s = 0.0  # on the slowest rank, of the newest image
        self._last_s: float = now() if before is None else before.last_s
        self._kept_s: float | None = None  # when a state was last kept in memory
        self._kept_step = 0
        self._is_prepared = False
        self._has_said_too_large = False
        self._underway: Underway | None = None  # the same on all ranks
        self._result: SaveResult | None = None  # of the save under way in this rank's directory, once known
        self._hook = replica.optimizer.register_step_pre_hook(self._before_update)
        self.owed: Underway | None = None  # the previous generation gave it up
        self.best: float | None = None  # metric of the best checkpoint, as far as this rank knows
        self.last_step = 0  # the newest step that some directory group has committed, or that was resumed from
        self.last_error: str | None = None  # of the last save into the directory of this rank
        #: step and reason of each save that failed there
        self.failures: list[tuple[int, str]] = [] if before is None else before.failures

    @property
    def owes(self) -> Underway | None:
        """The save that was under way when the generation ended, with its result unknown on every rank."""
        return self._underway or self.owed

    @property
    def last_s(self) -> float:
        """When a save last began, on this process's clock."""
        return self._last_s

    def facts(self) -> dict[str, Any]:
        """What this rank knows of the run's saves, as a JSON object."""
        owes = None if self.owes is None else asdict(self.owes)
        return {"last_step": self.last_step, "best": self.best, "known": list(self.known), "owes": owes}

    def record_of(self, state: TrainingState, rows: Rows) -> dict[str, Any]:
        """The record of a state, as in a checkpoint, without the numbers of the optimizer."""
        return describe(state, self._provenance, {}, rows)

    def is_overdue(self) -> bool:
        """Rank zero's clock: --persistent-time-interval has passed since the last save, which is over."""
        interval = self._config.persistent_time_interval
        is_free = self._underway is None and not self._config.no_save
        if self.owed is not None and is_free:
            return True
        return bool(interval) and is_free and self._now() - self._last_s >= interval

    @property
    def known(self) -> tuple[int, ...]:
        """The nonces of the commits that precede the state, as far as this rank knows."""
        return self._manager.known

    def settle(self) -> None:
        """Wait until no part of the state is being copied. Any rank may call it alone."""
        self._manager.settle()
        if self._images is not None:
            self._images.settle()

    def is_keep_due(self, step: int) -> bool:
        """Whether to keep the state after this step in memory, by --memory-interval-updates; rank zero decides."""
        every, images = self._config.memory_interval_updates, self._images
        if not every or not (self._manager.keeps_states if images is None else not images.is_refused):
            return False
        if self._kept_s is None:
            return True
        if every > 0:
            # an image that was due while the one before was under way is made up for
            return step % every == 0 or (images is not None and step // every > self._kept_step // every)
        keeping_s = self._manager.keeping_s if images is None else self._making_s
        return self._now() - self._kept_s >= max(_LEAST_KEEPING_S, _KEEPING_SHARE * keeping_s)

    def is_keep_wanted(self, outcome: Outcome, *, is_saved: bool) -> bool:
        """Whether to keep the state after a committed step in memory, given whether it is being saved as well.

        An image is made of each saved state, so that memory is as new as the disk: a generation that goes back to an
        image loads nothing.
        """
        if self._images is None:
            return outcome.keep and not is_saved
        is_free = all(row.saving.sealed for row in outcome.rows)
        return is_free and not self._images.is_refused and (outcome.keep or is_saved)

    def status(self, step: int) -> SaveStatus:
        """The fields about saving in this rank's row of step `step`, which is being committed."""
        return SaveStatus(
            save=self.is_overdue(),
            nonce=draw_nonce(),
            writing=self._manager.is_busy,
            failed=self._manager.has_failed,
            keep=self.is_keep_due(step),
            sealed=self._manager.is_sealed if self._images is None else self._images.is_safe,
            making_us=0 if self._images is None else round(1e6 * self._images.making_s),
        )

    def note_commit(self, rows: Sequence[CommitRow]) -> None:
        """After each commit, given the rows of all ranks: what they say of the newest image. Any rank, alone."""
        if self._images is not None:
            self._making_s = max(row.saving.making_us for row in rows) / 1e6
            self._images.note_commit(are_all_safe=all(row.saving.sealed for row in rows))
            if self._images.safe_step is not None:
                self._manager.forget_images()

    def kinds_due(
        self, state: TrainingState, *, epoch_ended: int | None, is_best: bool, is_overdue: bool, is_stopping: bool,
        ends_run: bool,
    ) -> list[str]:  # fmt: skip
        """The reasons to save the state after a step; empty if there is none."""
        config = self._config
        if config.no_save:
            return []
        every = config.save_interval_updates
        reasons = {
            "epoch": epoch_ended is not None
            and epoch_ended % config.save_interval == 0
            and not config.no_epoch_checkpoints,
            "interval": bool(every) and (state.position.step - 1) % every == 0,
            "time": is_overdue,
            "best": is_best,
            "final": ends_run and not config.no_last_checkpoints,
            "signal": is_stopping,
        }
        return [kind for kind, holds in reasons.items() if holds]

    @property
    def writes_here(self) -> bool:
        """Whether this rank writes for its run directory."""
        return self._sharing.is_writer

    def progress(self) -> tuple[int, float] | None:
        """Step of the save under way and how much of this rank's part is written, from 0 to 1; None: there is none."""
        if self._underway is None:
            return None
        return self._underway.step, self._manager.share

    def prepare_early(self) -> None:
        """Allocate the memory for a large state before it is needed; after each step, collective the first time.

        A small state is prepared in a moment, and many short runs save only at their end.
        """
        keeps = self._config.memory_interval_updates > 0 and self._images is None
        is_wanted = keeps or self._replica.state_bytes() >= _LARGE_BYTES
        if not self._is_prepared and not self._config.no_save and is_wanted:
            self._prepare(self._content()[0])

    def save(
        self, state: TrainingState, *, nonce: int, kinds: list[str], is_last: bool, rows: Rows = ()
    ) -> list[Saved]:
        """Begin to write the state into every run directory, once an earlier save is over; collective.

        `rows` are the last rows of `metrics.jsonl`, for a resume that finds that file without them.

        Returns the saves that are over now, with `is_last` including this one. A failure on this rank is in its result.
        """
        over = self.finish(state)
        self._replica.task_state.share(self._sharing.whole)
        tensors, numbers = self._content()
        if not is_last and not self._is_prepared:
            self._prepare(tensors)
        identity = self._identity(state)
        self._lend_patience()
        self._underway = Underway(identity.step, kinds, state.best, nonce)
        self._result = self.owed = None
        result = self._manager.begin(
            tensors, self._describe(state, numbers, rows), identity=identity, nonce=nonce, kinds=kinds,
            at_once=self._replica.changed_by_forward(),
        )  # fmt: skip
        faults.point("snapshot")
        self._last_s = self._now()
        over += self._take(result, state)
        return over + self.finish(state) if is_last else over

    def keep(self, state: TrainingState, *, nonce: int, rows: Rows = ()) -> None:
        """Copy the state to the memory of the nodes, where it survives a kill; once all ranks were sealed. Collective.

        A directory group without room for it does nothing.
        """
        self._kept_s, self._kept_step = self._now(), state.position.step - 1
        self._replica.task_state.share(self._sharing.whole)
        if self._images is not None:
            self._make_image(self._images, state, nonce=nonce, rows=rows)
            return
        if not self._manager.keeps_states:
            return
        self._lend_patience()
        tensors, numbers = self._content()
        is_kept = self._manager.keep(
            tensors, self._describe(state, numbers, rows), identity=self._identity(state), nonce=nonce,
            at_once=self._replica.changed_by_forward(),
        )  # fmt: skip
        faults.point("snapshot")
        if not is_kept and not self._manager.is_underway:
            self._say_too_large()

    @property
    def safe_image(self) -> int | None:
        """The step of the newest image in memory that survives the loss of a node; None: no such image is known."""
        return None if self._images is None else self._images.safe_step

    @property
    def image_facts(self) -> dict[str, Any]:
        """What images in memory have cost on this rank in this generation; empty if there were none."""
        return {} if self._images is None or not self._images.has_made_one else self._images.facts

    def _make_image(self, images: Images, state: TrainingState, *, nonce: int, rows: Rows) -> None:
        before = images.protection
        tensors, numbers = self._replica.held_tensors(self._sharing.whole)
        tensors |= self._replica.task_state.content()[0]
        numbers = self._replica.all_numbers(numbers, self._sharing.whole)
        known = [*self._manager.known, *([] if self._underway is None else [self._underway.nonce])]
        saved = {"last": self.last_step, "best": self.best, "known": self._manager.known}
        is_made = images.make(
            tensors, {**self._describe(state, numbers, rows), "saved": saved}, identity=self._identity(state),
            nonce=nonce, at_once=self._replica.changed_by_forward(), known=known,
        )  # fmt: skip
        faults.point("snapshot")
        if images.protection != before and images.protection is not None:
            say_what_protects(images.protection, self._sharing.whole)
        if not is_made and not images.is_refused:
            self._say_too_large()

    def _say_too_large(self) -> None:
        if not self._has_said_too_large:
            self._has_said_too_large = True
            logger.info("too many numbers besides tensors for a state in memory: a kill costs the steps since a save")

    def _describe(self, state: TrainingState, numbers: Mapping[str, Any] | None, rows: Rows) -> dict[str, Any]:
        divided = self._replica.divided
        tied = tied_names(self._replica.model) if divided is None else dict(divided.tied)
        own = {"tied": tied, "task_state": self._replica.task_state.content()[1]}
        return {**describe(state, self._provenance, numbers, rows), **own}

    def _identity(self, state: TrainingState) -> Identity:
        return Identity(step=state.position.step - 1, generation=self._generation, lineage=str(state.lineage))

    def take_over(self, owed: Underway | None, state: TrainingState, *, is_repeated: bool) -> list[Saved]:
        """Owe a save that the previous generation gave up, and report it if its state is gone. Collective.

        `is_repeated`: the work after its step is about to be done again.
        """
        self.owed = owed
        if owed is None or not owed.kinds or is_repeated or owed.step == state.position.step - 1:
            return []
        self.owed = replace(owed, kinds=[])
        commits = self._manager.list() if self.writes_here else []
        is_there = any(commit.attempt.nonce == owed.nonce for commit in commits)
        if self._sharing.gather([is_there])[:, 0].any():  # the ranks that knew of it are gone
            if "best" in owed.kinds:
                self.best = owed.best
            return []
        error = "given up: a rank was lost while it was written"
        result = self._manager.give_up(owed.step, nonce=owed.nonce, kinds=owed.kinds, error=error)
        self._forget_best(owed, state, error)
        return [Saved(owed.step, owed.kinds, result)]

    def kinds_owed(self, state: TrainingState) -> list[str]:
        """Why a save was begun that the previous generation gave up; empty unless `state` is still that of its step."""
        is_there = self.owed is not None and self.owed.step == state.position.step - 1
        return list(self.owed.kinds) if self.owed is not None and is_there else []

    def _forget_best(self, lost: Underway, state: TrainingState, error: str) -> None:
        """The best metric is again that of the best checkpoint that exists, since the better one was not written."""
        if "best" not in lost.kinds or state.best != lost.best:  # a still better state is being saved
            return
        state.best = self.best
        logger.log(
            logging.WARNING if self._sharing.whole.rank == 0 else logging.INFO,
            "the best checkpoint, of step %d, is lost (%s): %s", lost.step, error,
            "the next validation is saved as the best" if self.best is None
            else f"--resume best means the one before, and the next validation better than {self.best:.6g} is saved",
        )  # fmt: skip

    def go_on(
        self, state: TrainingState, *, is_anyone_writing: bool, failed: Sequence[int] = ()
    ) -> list[Saved]:  # fmt: skip
        """After each step: advance the save under way, unless a rank still writes. Collective.

        The parts of the ranks `failed` have failed: the other ranks of their run directory abandon theirs.
        """
        if self._underway is not None and not set(failed).isdisjoint(self._sharing.ranks):
            self._manager.cancel()
        if self._underway is None or is_anyone_writing:
            return []
        self._lend_patience()
        return self._take(self._manager.go_on() if self._manager.is_underway else None, state)

    def finish(self, state: TrainingState) -> list[Saved]:
        """Wait for the end of the save under way, if there is one. Collective."""
        if self._underway is None:
            return []
        self._lend_patience()
        return self._take(self._manager.finish() if self._manager.is_underway else None, state)

    def close(self, *, has_failed: bool = False, is_hasty: bool = False) -> None:
        """Release memory and processes. The writers finish the save under way if they can; with `is_hasty` it does not
        wait, and stops writers that depend on another rank.

        With `has_failed` the newest state stays in memory, and the next start of the run finds it there.
        """
        self._hook.remove()
        if self._images is not None:
            self._images.close(keep=has_failed)
        self._manager.close(has_failed=has_failed, is_hasty=is_hasty)

    def forget_images(self) -> None:
        """Free all images of this run in the memory of this node: the run is over, or its state is in files."""
        if self._images is not None:
            self._images.free()

    def _take(self, result: SaveResult | None, state: TrainingState) -> list[Saved]:
        """The save under way, once it is over in every directory; `result`: it just ended in this one. Collective."""
        self._result = self._result or result
        own = self._result
        is_over, has_committed = own is not None, own is not None and own.ok
        if self._sharing.count > 1:
            # Waits here, with a long deadline: the next collective belongs to a step, whose deadline is short.
            ends = self._sharing.gather([is_over, has_committed])
            is_over, has_committed = bool(ends[:, 0].all()), bool(ends[:, 1].any())
        if not is_over:
            return []
        assert own is not None
        assert self._underway is not None
        save, self._underway = self._underway, None
        self.last_error = own.error
        if own.error is not None:
            self.failures.append((save.step, own.error))
        if has_committed:
            self.last_step = save.step
            self.best = save.best if "best" in save.kinds else self.best
        else:
            self._forget_best(save, state, own.error or "it was not committed")
        return [Saved(save.step, save.kinds, own)]

    def _content(self) -> tuple[dict[str, Held], dict[str, Any] | None]:
        """The saved part of the replica: tensors by name, live, and the optimizer's numbers, unless left out."""
        tensors, numbers = self._replica.held_tensors(self._sharing.whole)
        task_tensors = self._replica.task_state.content()[0]
        if self._replica.owned is not None and self._sharing.count > 1:
            reducer, common = self._replica.reducer, frozenset(self._replica.common_model_tensors())
            assert isinstance(reducer, OwnedUnits)
            tensors = with_foreign_parts(tensors, common, reducer.exchange, self._sharing)
        tensors |= task_tensors
        if self._config.no_save_optimizer_state:
            return {name: held for name, held in tensors.items() if not name.startswith("optim.")}, None
        return tensors, self._replica.all_numbers(numbers, self._sharing.whole)

    def _prepare(self, tensors: Mapping[str, Held]) -> None:
        self._is_prepared = True
        self._lend_patience()
        refusal = self._manager.prepare(tensors)
        if refusal is None:
            if self._generation == 0:  # once per start, not after each recovery
                memory_mb = self._manager.node_memory_bytes / 1e6
                reason = ", kept for crash recovery" if self._manager.keeps_states else ""
                logger.info("async checkpoints: %.1f MB of /dev/shm%s", memory_mb, reason)
            if self._config.memory_interval_updates and not self._manager.keeps_states and self._images is None:
                logger.info("there is no room for a second state in memory: after a kill the run resumes from the disk")
        elif self._config.memory_buffer_bytes() == 0:
            logger.info("training waits while a checkpoint is written: --memory-buffer-size 0")
        elif self._sharing.is_writer:
            logger.warning(
                "training waits while a checkpoint is written, because there is no memory to copy it to: %s; check"
                " /dev/shm and --memory-buffer-size, or set --memory-buffer-size 0 [memory-for-saves]",
                refusal,
            )

    def _before_update(self, *_: Any) -> None:
        self.settle()

    def adopt(self, received: Loaded | None, *, step: int) -> None:
        """Write the resumed checkpoint, the state of `step`, into this directory if it lacks it. Collective.

        It came from another directory or from memory, and may be here anyway; None: it is here. The copy has the name
        of the original, unless that name is taken by something damaged. A failure causes only a warning, and the next
        save comes soon.
        """
        is_there = received is None
        if received is not None and not self._config.no_save:
            self._lend_patience()
            is_there = self._is_written(received)
        if received is not None and not self._config.no_save and not is_there:
            for nonce in (received.nonce, received.nonce ^ 1):
                result = self._manager.save(
                    received.tensors, received.state, identity=received.identity, nonce=nonce, kinds=received.kinds
                )
                if result.ok:
                    logger.info("step %d, which this directory lacked, is in %s now", step, result.path)
                    is_there = True
                    break
            if not is_there:
                self._last_s = -math.inf
        if self._sharing.gather([is_there])[:, 0].any():  # the others wait here, with a long deadline
            self.last_step = step

    def _is_written(self, received: Loaded) -> bool:
        """Whether a whole checkpoint of this state is here: all ranks may have been killed just after its commit."""
        group, is_there = self._sharing.group, False
        if group.rank == 0:
            same = [commit for commit in self._manager.list() if commit.identity == received.identity]
            is_there = any(not self._manager.verify(commit) for commit in same)
        return bool(group.all_gather_rows(np.array([is_there], np.int64))[0, 0])

    def _lend_patience(self) -> None:
        """Give the directory group the present deadline of the group of all ranks."""
        self._sharing.group.deadline_s = self._sharing.whole.deadline_s


def draw_nonce() -> int:
    """A random name for one attempt of one checkpoint."""
    return secrets.randbits(63)


def describe(
    state: TrainingState, provenance: Provenance, optimizer_numbers: Mapping[str, Any] | None, rows: Rows = ()
) -> dict[str, Any]:
    """The content of `state.json`; `optimizer_numbers` is None if the optimizer's state is left out."""
    return {
        "state_version": STATE_VERSION,
        "step": state.position.step - 1,
        "epoch": state.position.epoch,
        "consumed": state.position.consumed,
        "samples_consumed": (state.position.epoch - 1) * provenance.samples + state.position.consumed,
        "updates": state.updates,
        "lineage": str(state.lineage),
        "skipped_in_a_row": state.skipped_in_a_row,
        "decay_steps": state.decay_steps,
        "loss_scale": [state.loss_scale.factor, state.loss_scale.steps],
        "best": state.best,
        "ended_by_task": state.ended_by_task,
        "train_seconds": state.train_seconds,
        "resets": state.resets,
        "task": provenance.task,
        "optimizer": provenance.optimizer,
        "seed": provenance.seed,
        "samples": provenance.samples,
        "split": provenance.split,
        "curriculum": provenance.curriculum,
        "precision": provenance.precision,
        "unit_size": provenance.unit_size,
        "shuffle_block": provenance.shuffle_block,
        "vocabulary": provenance.vocabulary,
        "lanes": provenance.lanes,
        "parts": provenance.parts,
        "base": provenance.base,
        "recipe": dict(provenance.recipe),
        "global_batch": batch_record(provenance.batch),
        "rows": [jsonable(row) for row in rows],
        "optimizer_numbers": None if optimizer_numbers is None else dict(optimizer_numbers),
    }


def batch_record(batch: GlobalBatch) -> dict[str, Any]:
    """The batch as a JSON object."""
    return {"samples": batch.samples, "tokens": batch.tokens, "update_freq": list(batch.update_freq)}


def saved_batch(saved: Mapping[str, Any]) -> GlobalBatch:
    """The global batch that a checkpoint was trained with."""
    batch = saved["global_batch"]
    return GlobalBatch(batch["samples"], batch["tokens"], tuple(batch["update_freq"]))


def read_state(saved: Mapping[str, Any]) -> TrainingState:
    """The inverse of `describe`."""
    return TrainingState(
        position=Position(saved["step"] + 1, saved["epoch"], saved["consumed"]),
        updates=saved["updates"],
        lineage=parse_lineage(saved["step"], saved["lineage"]),
        skipped_in_a_row=saved["skipped_in_a_row"],
        decay_steps=saved.get("decay_steps", WITHOUT_END),  # not written before 2026-11
        loss_scale=LossScale(*saved.get("loss_scale", ())),  # not written before fp16 was supported
        best=saved["best"],
        ended_by_task=saved.get("ended_by_task", False),  # not written before 2026-11
        train_seconds=saved["train_seconds"],
        resets=dict(saved["resets"]),
    )
