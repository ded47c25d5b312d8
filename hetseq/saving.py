"""What a checkpoint of a run contains, when one is due, and whether it may be gone on from.

A checkpoint is the replica's tensors and one JSON object. Random numbers are derived from (seed, step, position) and
learning rates from the number of updates, so there is no generator or scheduler to save: the step, the samples
consumed and the history say it all. On resume the command line wins for everything but what the result depends on; a
difference there is refused with both values unless a `--reset-*` option covers it.
"""

from __future__ import annotations

import ast
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
from hetseq.errors import CheckpointMismatch, ConfigError
from hetseq.plan import GlobalBatch, Position
from hetseq.replica import Replica

logger = logging.getLogger(__name__)

STATE_VERSION = 1


@dataclass(frozen=True)
class Provenance:
    """What the result of a run depends on, besides its parameters; equal on all ranks."""

    task: str
    optimizer: str
    seed: int
    samples: int  # of the training split
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
        generation: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manager, self._config, self._provenance, self._replica = manager, config, provenance, replica
        self._generation, self._now = generation, now
        self._last_s = now()
        self.last_step = 0  # the newest step committed by this process or resumed from
        self.last_error: str | None = None

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
        """Write the state; collective. A failure of the file system is in the result, not raised."""
        tensors = self._replica.model_tensors()
        numbers: dict[str, Any] | None = None
        if not self._config.no_save_optimizer_state:
            optimizer_tensors, numbers = self._replica.optimizer_tensors()
            tensors.update(optimizer_tensors)
        step = state.position.step - 1
        identity = Identity(step=step, generation=self._generation, lineage=str(state.lineage))
        described = describe(state, self._provenance, numbers)
        result = self._manager.save(tensors, described, identity=identity, nonce=nonce, kinds=kinds)
        self._last_s = self._now()
        self.last_error = result.error
        if result.ok:
            self.last_step = step
        return result


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
        "task": provenance.task,
        "optimizer": provenance.optimizer,
        "seed": provenance.seed,
        "samples": provenance.samples,
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


def choose_batch(saved: Mapping[str, Any], asked: GlobalBatch, *, is_explicit: bool, resets_data: bool) -> GlobalBatch:
    """The global batch to go on with: the checkpoint's, unless the data begin anew.

    Another explicit --global-batch-size is refused; a product of --max-sentences, ranks and --update-freq gives way.
    """
    batch = saved_batch(saved)
    if resets_data or batch == asked:
        return asked
    if is_explicit:
        raise CheckpointMismatch(
            f"--global-batch-size {asked.samples} differs from the checkpoint's {_in_words(batch)}: leave it out, or"
            " begin the data anew with --reset-dataloader"
        )
    logger.info(
        "the global batch stays %s, as in the checkpoint (the options would give %s)",
        _in_words(batch),
        _in_words(asked),
    )
    return batch


def _in_words(batch: GlobalBatch) -> str:
    parts = [f"{batch.samples} samples" if batch.samples else "", f"{batch.tokens} tokens" if batch.tokens else ""]
    freq = "" if batch.update_freq == (1,) else f" x {','.join(map(str, batch.update_freq))}"
    return " or ".join(part for part in parts if part) + freq


def check_provenance(saved: Mapping[str, Any], here: Provenance, config: CheckpointConfig) -> None:
    """Raise CheckpointMismatch where the checkpoint is of a run with another result."""
    anew = ", or begin the data anew: --reset-dataloader"
    checks: list[tuple[str, object, bool, str]] = [
        ("task", here.task, False, "give the same --task"),
        ("precision", here.precision, False, f"give --precision {saved['precision']}"),
        (
            "optimizer", here.optimizer, config.reset_optimizer,
            "give the same --optimizer, or begin with a fresh one: --reset-optimizer",
        ),
        ("seed", here.seed, config.reset_dataloader, f"give --seed {saved['seed']}{anew}"),
        ("samples", here.samples, config.reset_dataloader, f"give the same --data{anew}"),
    ]  # fmt: skip
    for name, value, is_covered, remedy in checks:
        if saved[name] != value and not is_covered:
            raise CheckpointMismatch(
                f"the checkpoint was trained with {name} {saved[name]}, this command says {value}: {remedy}; or choose"
                " another --save-dir"
            )


def restore(loaded: Loaded, replica: Replica, here: Provenance, config: CheckpointConfig) -> TrainingState:
    """Put a checkpoint into the replica and give the state that goes with it. Raises CheckpointMismatch."""
    saved = loaded.state
    version = saved.get("state_version")
    if version != STATE_VERSION:
        raise CheckpointMismatch(f"{loaded.path}: state version {version}, this HetSeq reads {STATE_VERSION}")
    check_provenance(saved, here, config)
    replica.load_model(loaded.tensors)
    if not config.reset_optimizer:
        if saved["updates"] and saved["optimizer_numbers"] is None:
            logger.warning("%s holds no optimizer state: the optimizer begins afresh", loaded.path)
        replica.load_optimizer(loaded.tensors, saved["optimizer_numbers"] or {})
    position = Position(saved["step"] + 1, saved["epoch"], saved["consumed"])
    if config.reset_dataloader:
        position = Position(saved["step"] + 1, 1, 0)
    return TrainingState(
        position=position,
        updates=0 if config.reset_lr_scheduler else saved["updates"],
        lineage=parse_lineage(saved["step"], saved["lineage"]),
        skipped_in_a_row=saved["skipped_in_a_row"],
        best=None if config.reset_meters else saved["best"],
        train_seconds=saved["train_seconds"],
    )


def parse_overrides(text: str) -> dict[str, Any]:
    """The settings of --optimizer-overrides "{'eps': 1e-6}"; a literal, never evaluated."""
    try:
        overrides = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        overrides = None
    if not isinstance(overrides, dict) or not all(isinstance(key, str) for key in overrides):
        raise ConfigError(f"--optimizer-overrides {text}: expected a dict, as in \"{{'eps': 1e-6}}\"")
    return overrides
