"""What happens between two steps: validation and a checkpoint if they are due, and the telling of it all.

Every rank walks the same road here: whether to validate or save follows from numbers that the commit gave to all.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hetseq.accounting import account
from hetseq.commit import Verdict, Wish
from hetseq.config import ValidationConfig
from hetseq.controller import Controller, StepResult, TrainingState
from hetseq.errors import ConfigError
from hetseq.metrics import Metrics
from hetseq.pace import Shift
from hetseq.plan import StepPlan
from hetseq.replica_check import ReplicaCheck
from hetseq.run_directory import RunDirectory, StatusFile
from hetseq.saving import Saved, Saver, draw_nonce
from hetseq.sharing import Sharing
from hetseq.validation import Validator

_ABOUT_BYTES = 512


class StatusFiles:
    """What ranks do now: each rank writes its own file, a writer besides those of the ranks of other directories.

    So every run directory tells of all ranks. Made by all ranks together.
    """

    def __init__(self, directory: RunDirectory, sharing: Sharing, *, device: str) -> None:
        rank = sharing.whole.rank
        abouts = _gather_abouts(sharing, {"pid": os.getpid(), "node": socket.gethostname()[:200], "device": device})
        #: node and device of each rank
        self.names = [f"{about['node']}/{about['device']}" for about in abouts]
        foreign = set(range(len(abouts))) - set(sharing.ranks) if sharing.is_writer else set()
        self._files = {
            number: (StatusFile(directory.status / f"rank-{number}.json"), abouts[number])
            for number in [rank, *sorted(foreign)]
        }

    def write(self, now_s: float, *, force: bool = False, shares: Sequence[int] | None = None, **fields: Any) -> None:
        """As `StatusFile.write`; `shares` are samples of this step by rank."""
        for rank, (file, about) in self._files.items():
            share = {} if shares is None else {"share": shares[rank]}
            file.write(now_s, force=force, **fields, **share, **about)


def _gather_abouts(sharing: Sharing, about: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank says of itself, in rank order. Collective."""
    text = json.dumps(about, ensure_ascii=False).encode("utf-8", "replace")
    row = np.frombuffer(text.ljust(_ABOUT_BYTES), np.int64)
    return [json.loads(gathered.tobytes()) for gathered in sharing.whole.all_gather_rows(row)]


class RunBoundary:
    """Validates, saves and reports for one rank."""

    def __init__(
        self,
        *,
        config: ValidationConfig,
        validators: Sequence[Validator],
        saver: Saver,
        metrics: Metrics,
        status: StatusFiles,
        replicas: ReplicaCheck | None = None,
    ) -> None:
        self._config, self._validators, self._replicas = config, validators, replicas
        self._saver, self._metrics, self._status = saver, metrics, status

    def is_due(self, state: TrainingState) -> bool:
        """Rank zero: --persistent-time-interval has passed, so a checkpoint is wanted after this step."""
        return self._saver.is_overdue()

    def draw_nonce(self) -> int:
        """The name of the checkpoint that may follow this step."""
        return draw_nonce()

    def is_writing(self) -> bool:
        """Whether this rank still writes its part of a checkpoint that was begun after an earlier step."""
        return self._saver.is_writing()

    def after_step(self, controller: Controller, result: StepResult, *, ends_run: bool) -> None:
        """Report the step, compare the replicas, validate and save if due. Every rank calls it."""
        state, outcome, plan = controller.state, result.outcome, result.plan
        self._report(controller, result)
        self._saver.prepare_early()
        self._tell(self._saver.go_on(is_anyone_writing=outcome.writing))
        replicas = self._replicas
        if replicas is not None and replicas.is_due(plan.step):
            replicas.check(plan.step, plan.shares)
        is_best = False
        is_due = self._is_validation_due(result.plan)
        if self._validators and (is_due or ends_run):
            controller.replica.buffers.synchronise_(result.plan.shares)
            # a run that is made longer later has the best checkpoint of one that never ended here
            is_best = self._validate(controller, result.plan.epoch, counts=is_due)
        is_stopping = bool(outcome.wish & Wish.STOP)
        kinds = self._saver.kinds_due(
            state,
            epoch_ended=result.plan.epoch if result.plan.ends_epoch else None,
            is_best=is_best,
            is_overdue=outcome.save,
            is_stopping=is_stopping,
            ends_run=ends_run,
        )
        if kinds:
            if replicas is not None and not replicas.is_due(plan.step):  # else compared above
                replicas.check(plan.step, plan.shares)  # so that a checkpoint can always be gone back to
            controller.replica.buffers.synchronise_(result.plan.shares)
            is_last = ends_run or is_stopping
            self._tell(self._saver.save(state, nonce=outcome.nonce, kinds=kinds, is_last=is_last))
        elif ends_run or is_stopping:
            self._tell(self._saver.finish())

    def finish(self) -> None:
        """Wait for a checkpoint that is under way, and report it. Every rank calls it."""
        self._tell(self._saver.finish())

    def _report(self, controller: Controller, result: StepResult) -> None:
        plan, outcome = result.plan, result.outcome
        is_applied = outcome.verdict is Verdict.APPLY
        row: dict[str, Any] = {
            "step": plan.step,
            "epoch": plan.epoch,
            "loss": result.loss,
            "terms": _by_term(controller.terms, outcome.sums, result.counts) if is_applied else None,
            "counts": dict(zip(controller.terms, result.counts)),
            "samples": plan.size,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "seconds": result.seconds,
            "generation": controller.group.generation,
            "world_size": controller.group.world_size,
            "shares": list(plan.shares),
        }
        if not is_applied:
            row["skipped"] = True
        if len(plan.shares) > 1:
            told = account(outcome.rows, shares=plan.shares, work=result.work, seconds=result.seconds)
            row |= {**told, "ranks": {"names": self._status.names, **told["ranks"]}}
        self._metrics.saving(self._saver.progress())
        self._metrics.step(row)
        if result.shift is not None:
            self._metrics.event("rebalance", step=plan.step, **_shift_fields(result.shift))
        self._status.write(time.monotonic(), step=plan.step, epoch=plan.epoch, state="train", shares=plan.shares)

    def _is_validation_due(self, plan: StepPlan) -> bool:
        steps = self._config.validate_interval_updates
        is_due = plan.ends_epoch and plan.epoch % self._config.validate_interval == 0
        return is_due or (steps > 0 and plan.step % steps == 0)

    def _validate(self, controller: Controller, epoch: int, *, counts: bool) -> bool:
        """Evaluate every validation split; True if the first one is better than ever before, and that `counts`."""
        state, is_best = controller.state, False
        for place, validator in enumerate(self._validators):
            # a rank of a small share waits for the others, far longer than for a step
            with controller.patience_for(samples=len(validator.source.dataset)):
                values = validator.evaluate(
                    controller.task, controller.replica.model, controller.group, controller.pace.divide
                )
            if place == 0 and counts:
                is_best = self._is_best(state, values)
            named = {f"valid_{name}": value for name, value in values.items()}
            self._metrics.validation(
                {"step": state.position.step - 1, "epoch": epoch, "subset": validator.split, **named,
                 "best": place == 0 and is_best}
            )  # fmt: skip
        return is_best

    def _is_best(self, state: TrainingState, values: dict[str, float]) -> bool:
        name = self._config.best_checkpoint_metric
        if name not in values:
            raise ConfigError(f"--best-checkpoint-metric {name}: validation gives {', '.join(values)}")
        value = values[name]
        sign = -1 if self._config.maximize_best_checkpoint_metric else 1
        # what is not finite is never best: nothing could ever be better than NaN
        is_better = math.isfinite(value) and (state.best is None or sign * value < sign * state.best)
        if is_better:
            state.best = value
        return is_better

    def _tell(self, saves: list[Saved]) -> None:
        for saved in saves:
            result = saved.result
            fields = {
                "step": saved.step,
                "kinds": saved.kinds,
                "bytes": result.bytes,
                "seconds": result.seconds,
                "stall_seconds": result.stall_s,
            }
            if result.ok:
                self._metrics.event("save", path=str(result.path), **fields)
            else:
                self._metrics.event("save_failed", error=result.error, **fields)  # its writer has said it by now


def _shift_fields(shift: Shift) -> dict[str, Any]:
    return {
        "first_step": shift.first_step,
        "shares_before": list(shift.before),
        "shares": list(shift.after),
        "predicted_seconds_before": shift.before_s,
        "predicted_seconds": shift.after_s,
    }


def _by_term(terms: Sequence[str], sums: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
    return {term: total / count for term, total, count in zip(terms, sums, counts) if count}
