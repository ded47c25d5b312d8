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

from hetseq.checkpoint import CheckpointManager, Identity, Loaded, SaveResult
from hetseq.commit import parse_lineage
from hetseq.config import CheckpointConfig
from hetseq.controller import TrainingState
from hetseq.plan import GlobalBatch, Position
from hetseq.replica import Replica
from hetseq.sharing import Sharing

logger = logging.getLogger(__name__)

STATE_VERSION = 1


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


class Saver:
    """Decides when a checkpoint is due and writes it; one per rank, and all ranks save together."""

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
        self.last_step = 0  # the newest step that some directory group has committed, or that was resumed from
        self.last_error: str | None = None  # of the last save into the directory of this rank

    def is_overdue(self) -> bool:
        """Rank zero's clock: --persistent-time-interval has passed since the last save."""
        interval = self._config.persistent_time_interval
        return bool(interval) and not self._config.no_save and self._now() - self._last_s >= interval

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

    def save(self, state: TrainingState, *, nonce: int, kinds: list[str]) -> SaveResult:
        """Write the state into every run directory; collective. A failure of this rank's one is in the result."""
        tensors = self._replica.model_tensors()
        numbers: dict[str, Any] | None = None
        if not self._config.no_save_optimizer_state:
            optimizer_tensors, numbers = self._replica.optimizer_tensors()
            tensors.update(optimizer_tensors)
        step = state.position.step - 1
        identity = Identity(step=step, generation=self._generation, lineage=str(state.lineage))
        described = describe(state, self._provenance, numbers)
        self._lend_patience()
        result = self._manager.save(tensors, described, identity=identity, nonce=nonce, kinds=kinds)
        # Awaited here, where all are patient: the next collective is one of a step, whose deadline is short.
        has_committed = self._sharing.gather([result.ok])[:, 0]
        self._last_s = self._now()
        self.last_error = result.error
        if has_committed.any():
            self.last_step = step
        return result

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
