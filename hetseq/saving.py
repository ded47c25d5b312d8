"""What a checkpoint of a run contains, and when one is due.

A checkpoint is the replica's tensors and one JSON object. Random numbers are derived from (seed, step, position) and
learning rates from the number of updates, so there is no generator or scheduler to save: the step, the samples
consumed and the history say it all.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hetseq.checkpoint import CheckpointManager, Identity, Loaded, SaveResult
from hetseq.commit import parse_lineage
from hetseq.config import CheckpointConfig
from hetseq.controller import TrainingState
from hetseq.plan import GlobalBatch, Position
from hetseq.replica import Replica
from hetseq.sharing import Sharing

logger = logging.getLogger(__name__)

STATE_VERSION = 1
_LARGE_BYTES = 64 << 20


@dataclass(frozen=True)
class Provenance:
    """What the result of a run depends on, besides its parameters; equal on all ranks."""

    task: str
    optimizer: str
    seed: int
    split: str
    samples: int  # of the training split
    curriculum: int
    precision: str
    batch: GlobalBatch
    unit_size: int | None = None


@dataclass(frozen=True)
class Saved:
    """The end of a save of the state after `step`; `result` is that of this rank's directory."""

    step: int
    kinds: list[str]
    result: SaveResult


class Saver:
    """Decides when a checkpoint is due and has it written; one per rank, and all ranks save together.

    A save goes on while the next steps are trained: `save` begins it, and `go_on` after each later step ends it.
    """

    def __init__(
        self,
        manager: CheckpointManager,
        config: CheckpointConfig,
        provenance: Provenance,
        replica: Replica,
        *,
        sharing: Sharing,
        generation: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager, self._config, self._provenance, self._replica = manager, config, provenance, replica
        self._sharing, self._generation, self._now = sharing, generation, now
        self._last_s = now()
        self._is_prepared = False
        self._underway: tuple[int, list[str]] | None = None  # step and kinds; the same on all ranks
        self._result: SaveResult | None = None  # of the save under way in this rank's directory, once it is known
        self._hook = replica.optimizer.register_step_pre_hook(self._before_update)
        self.last_step = 0  # the newest step that some directory group has committed, or that was resumed from
        self.last_error: str | None = None  # of the last save into the directory of this rank
        self.failures: list[tuple[int, str]] = []  # step and reason of each save that failed there

    def is_overdue(self) -> bool:
        """Rank zero's clock: --persistent-time-interval has passed since the last save, which is over."""
        interval = self._config.persistent_time_interval
        is_free = self._underway is None and not self._config.no_save
        return bool(interval) and is_free and self._now() - self._last_s >= interval

    def is_writing(self) -> bool:
        """Whether this rank still writes its part of the save under way."""
        return self._manager.is_busy

    def kinds_due(
        self, state: TrainingState, *, epoch_ended: int | None, is_best: bool, is_overdue: bool, is_stopping: bool,
        ends_run: bool,
    ) -> list[str]:  # fmt: skip
        """Why the state after a step is to be saved; empty if it is not."""
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
        """Whether this rank speaks for its run directory."""
        return self._sharing.is_writer

    def progress(self) -> tuple[int, float] | None:
        """Step of the save under way and how much of this rank's part is written, from 0 to 1; None: there is none."""
        if self._underway is None:
            return None
        return self._underway[0], self._manager.share

    def prepare_early(self) -> None:
        """Get the memory for a large state before it is needed; after each step, collective the first time.

        A small one is prepared in a moment, and many short runs never save but at their end.
        """
        if not self._is_prepared and not self._config.no_save and self._replica.state_bytes() >= _LARGE_BYTES:
            self._prepare(self._content()[0])

    def save(self, state: TrainingState, *, nonce: int, kinds: list[str], is_last: bool) -> list[Saved]:
        """Begin to write the state into every run directory, once an earlier save is over; collective.

        Gives the saves that are over now: with `is_last` this one too. A failure of this rank's one is in its result.
        """
        over = self.finish()
        tensors, numbers = self._content()
        if not is_last and not self._is_prepared:
            self._prepare(tensors)
        step = state.position.step - 1
        identity = Identity(step=step, generation=self._generation, lineage=str(state.lineage))
        self._lend_patience()
        self._underway, self._result = (step, kinds), None
        result = self._manager.begin(
            tensors, describe(state, self._provenance, numbers), identity=identity, nonce=nonce, kinds=kinds,
            at_once=self._replica.changed_by_forward(),
        )  # fmt: skip
        self._last_s = self._now()
        over += self._take(result)
        return over + self.finish() if is_last else over

    def go_on(self, *, is_anyone_writing: bool) -> list[Saved]:
        """After each step: one event further with the save under way, unless a rank still writes. Collective."""
        if self._underway is None or is_anyone_writing:
            return []
        self._lend_patience()
        return self._take(self._manager.go_on() if self._manager.is_underway else None)

    def finish(self) -> list[Saved]:
        """Wait for the end of the save under way, if there is one. Collective."""
        if self._underway is None:
            return []
        self._lend_patience()
        return self._take(self._manager.finish() if self._manager.is_underway else None)

    def close(self) -> None:
        """Give memory and processes back; the writers finish what is under way, if they can."""
        self._hook.remove()
        self._manager.close()

    def _take(self, result: SaveResult | None) -> list[Saved]:
        """The save under way, if it is over in every directory now; `result`: it just ended in this one. Collective."""
        self._result = self._result or result
        own = self._result
        is_over, has_committed = own is not None, own is not None and own.ok
        if self._sharing.count > 1:
            # Awaited here, where all are patient: the next collective is one of a step, whose deadline is short.
            ends = self._sharing.gather([is_over, has_committed])
            is_over, has_committed = bool(ends[:, 0].all()), bool(ends[:, 1].any())
        if not is_over:
            return []
        assert own is not None
        assert self._underway is not None
        (step, kinds), self._underway = self._underway, None
        self.last_error = own.error
        if own.error is not None:
            self.failures.append((step, own.error))
        if has_committed:
            self.last_step = step
        return [Saved(step, kinds, own)]

    def _content(self) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        """What is saved of the replica: tensors by name, live, and the optimizer's numbers, if they are."""
        tensors = self._replica.model_tensors()
        if self._config.no_save_optimizer_state:
            return tensors, None
        optimizer_tensors, numbers = self._replica.optimizer_tensors()
        return {**tensors, **optimizer_tensors}, numbers

    def _prepare(self, tensors: Mapping[str, Tensor]) -> None:
        self._is_prepared = True
        self._lend_patience()
        refusal = self._manager.prepare(tensors)
        if refusal is None:
            memory_mb = self._manager.node_memory_bytes / 1e6
            logger.info("checkpoints wait in %.1f MB of this node's shared memory until they are written", memory_mb)
        elif self._config.memory_buffer_bytes() == 0:
            logger.info("training waits while a checkpoint is written: --memory-buffer-size 0")
        elif self._sharing.is_writer:
            logger.warning(
                "training waits while a checkpoint is written, for there is no memory to copy it to: %s; see to"
                " /dev/shm and --memory-buffer-size, or say --memory-buffer-size 0",
                refusal,
            )

    def _before_update(self, *_: Any) -> None:
        self._manager.settle()

    def keep(self, received: Loaded | None) -> None:
        """Write a checkpoint that came from another directory into this one; None: nothing came. Collective.

        The copy has the name of the original, unless something damaged stands there. A failure is only a warning: the
        next save makes up for it.
        """
        if received is not None and not self._config.no_save:
            self._lend_patience()
            step = received.identity.step
            for nonce in (received.nonce, received.nonce ^ 1):
                result = self._manager.save(
                    received.tensors, received.state, identity=received.identity, nonce=nonce, kinds=received.kinds
                )
                if result.ok:
                    logger.info("step %d, which this directory lacked, is in %s now", step, result.path)
                    break
        self._sharing.gather([0])  # the others wait here, patiently

    def _lend_patience(self) -> None:
        """A directory group of its own waits as long as the group of all ranks does now."""
        self._sharing.group.deadline_s = self._sharing.whole.deadline_s


def draw_nonce() -> int:
    """Names one attempt of one checkpoint."""
    return secrets.randbits(63)


def describe(
    state: TrainingState, provenance: Provenance, optimizer_numbers: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The content of `state.json`; `optimizer_numbers` is None where the optimizer's state is left out."""
    return {
        "state_version": STATE_VERSION,
        "step": state.position.step - 1,
        "epoch": state.position.epoch,
        "consumed": state.position.consumed,
        "samples_consumed": (state.position.epoch - 1) * provenance.samples + state.position.consumed,
        "updates": state.updates,
        "lineage": str(state.lineage),
        "skipped_in_a_row": state.skipped_in_a_row,
        "best": state.best,
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
        "global_batch": {
            "samples": provenance.batch.samples,
            "tokens": provenance.batch.tokens,
            "update_freq": list(provenance.batch.update_freq),
        },
        "optimizer_numbers": None if optimizer_numbers is None else dict(optimizer_numbers),
    }


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
        best=saved["best"],
        train_seconds=saved["train_seconds"],
        resets=dict(saved["resets"]),
    )
