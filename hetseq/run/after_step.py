"""What a rank does between two steps: report the step, then validate and save a checkpoint if they are due.

Every rank takes the same branches: whether to validate or save follows from numbers that the commit gave to all ranks.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from hetseq.balance.noise_scale import NoiseScale
from hetseq.cluster.membership.step_commit import SaveStatus, Verdict, Wish
from hetseq.comm.directory_groups import DirectoryGroups
from hetseq.config.sections import ValidationConfig
from hetseq.errors import ConfigError
from hetseq.monitor.metrics import Metrics
from hetseq.monitor.status import RunStatus
from hetseq.monitor.step_time import account, owned_by
from hetseq.run.checkpointing import Saved, Saver, Underway, draw_nonce
from hetseq.run.regroup import PendingWork
from hetseq.run.shadow_feed import ShadowFeed
from hetseq.run.step_watch import StepWatch
from hetseq.run.task_hooks import TaskHooks
from hetseq.run_directory import RunDirectory, StatusFile
from hetseq.system.rank_phase import Phase, Stand, amid
from hetseq.system.task_failure import noting
from hetseq.training.controller import Controller, TrainingState
from hetseq.training.replica_check import ReplicaCheck
from hetseq.training.share_policy import Shift
from hetseq.training.step_engine import StepResult
from hetseq.training.validation import Validator

_ABOUT_BYTES = 512
_NONCES = 2**63


class StatusFiles:
    """The status files that this rank writes: its own, and in a writer also those of ranks in other directories.

    So every run directory describes all ranks. All ranks construct it together.
    """

    def __init__(
        self,
        directory: RunDirectory,
        sharing: DirectoryGroups,
        *,
        device: str,
        slots: Sequence[int] | None = None,
        run: RunStatus | None = None,
    ) -> None:
        rank = self._rank = sharing.whole.rank
        #: a writer's file describes the whole run with it; None on other ranks
        self.run = run if sharing.is_writer else None
        abouts = _gather_abouts(sharing, {"pid": os.getpid(), "node": socket.gethostname()[:200], "device": device})
        #: node and device of each rank
        self.names = [f"{about['node']}/{about['device']}" for about in abouts]
        #: by rank: the number in the names of its files
        self.slots = tuple(slots) if slots is not None else tuple(range(len(abouts)))
        foreign = set(range(len(abouts))) - set(sharing.ranks) if sharing.is_writer else set()
        self._newest: dict[str, Any] = {}  # last written into this rank's own file
        self._writing = threading.Lock()
        self._files = {
            number: (StatusFile(directory.status / f"rank-{self.slots[number]}.json"), abouts[number])
            for number in [rank, *sorted(foreign)]
        }
        if sharing.is_writer:
            self._mark_gone(directory)

    def _mark_gone(self, directory: RunDirectory) -> None:
        """Mark the files of ranks that have left the run."""
        for path in sorted(directory.status.glob("rank-*.json")):
            slot = path.stem.partition("-")[2]
            if slot.isdigit() and int(slot) not in self.slots:
                with suppress(OSError, ValueError):
                    about = json.loads(path.read_text())
                    if about.get("pid") is not None:
                        about = {key: value for key, value in about.items() if key != "run"}
                        StatusFile(path).write(0.0, force=True, **{**about, "pid": None, "state": "gone", "share": 0})

    def is_due(self, now_s: float) -> bool:
        """Whether `write` would write this rank's own file."""
        return self._files[self._rank][0].is_due(now_s)

    def write(
        self, now_s: float, *, force: bool = False, shares: Sequence[int] | None = None,
        ranks: Mapping[str, Any] | None = None, **fields: Any,
    ) -> None:  # fmt: skip
        """As `StatusFile.write`; `shares` are samples of this step by rank, `ranks` what its row says of them."""
        for rank, (file, about) in self._files.items():
            if not (force or file.is_due(now_s)):
                continue
            share = {} if shares is None else {"share": shares[rank]}
            run = {"run": self.run.told(now_s)} if self.run is not None and rank == self._rank else {}
            told = {**fields, **share, **about, **run, **owned_by(ranks or {}, rank)}
            with self._writing:
                file.write(now_s, force=force, **told)
                if rank == self._rank:
                    self._newest = told

    def renew(self, stand: Stand) -> None:
        """Write the phase of this rank again, for readers of its file during a long wait. For any thread."""
        now = {"phase": stand.phase.words, "phase_s": round(stand.for_s, 1), "waits": stand.is_waiting}
        with self._writing:
            if self._newest:
                self._files[self._rank][0].write(time.monotonic(), **{**self._newest, **now})


def _gather_abouts(sharing: DirectoryGroups, about: dict[str, Any]) -> list[dict[str, Any]]:
    """The description of each rank by itself, in rank order. Collective."""
    text = json.dumps(about, ensure_ascii=False).encode("utf-8", "replace")
    row = np.frombuffer(text.ljust(_ABOUT_BYTES), np.int64)
    return [json.loads(gathered.tobytes()) for gathered in sharing.whole.all_gather_rows(row)]


class AfterStep:
    """Validates, saves and reports for one rank."""

    def __init__(
        self,
        *,
        config: ValidationConfig,
        validators: Sequence[Validator],
        saver: Saver,
        metrics: Metrics,
        status: StatusFiles,
        watch: StepWatch,
        hooks: TaskHooks,
        replicas: ReplicaCheck | None = None,
    ) -> None:
        self._config, self._validators, self._replicas = config, validators, replicas
        self.shadows: ShadowFeed | None = None  # what this rank sends, if shadows follow the run
        self._saver, self._metrics, self._status, self._watch, self._hooks = saver, metrics, status, watch, hooks
        self._noise_scale = NoiseScale()

    def save_status(self, state: TrainingState) -> SaveStatus:
        """The fields about saving in this rank's row of the step being committed."""
        status = self._saver.status(state.position.step)
        if self.shadows is None:
            return status
        return replace(status, lacking=self.shadows.lacking, unsent=self.shadows.unsent)

    def before_update(self) -> None:
        """Keep the gradient for the shadows of the run, if there are any. Any rank, alone."""
        if self.shadows is not None:
            self.shadows.before_update()

    def close(self) -> None:
        """Send no more to shadows; may be called twice. Any rank, alone."""
        if self.shadows is not None:
            self.shadows.close()

    def settle(self) -> None:
        """Wait until no part of the state is being copied. Any rank, alone."""
        self._saver.settle()
        if self.shadows is not None:
            self.shadows.settle()

    def after_step(self, controller: Controller, result: StepResult, *, ends_run: bool) -> None:
        """Report the step, compare the replicas, validate and save if due. Every rank calls it."""
        outcome = result.outcome
        self._saver.note_commit(outcome.rows)
        due = self.due(controller, result)
        if self.shadows is not None:
            self.shadows.after_update(controller, result, due)
        if not outcome.unsent:
            self._metrics.release()
        self._report(result, due.row)
        self._watch.see(result)
        self._saver.prepare_early()
        self._tell(self._saver.go_on(controller.state, is_anyone_writing=outcome.writing, failed=outcome.failed))
        # the part of a rank that leaves goes to the others by way of a checkpoint
        leaving = [rank for rank, row in enumerate(outcome.rows) if row.wish & Wish.LEAVE]
        is_stopping = bool(outcome.wish & Wish.STOP) or any(map(controller.replica.is_owner, leaving))
        is_saved, is_over = self._follow_up(
            controller, due, shares=result.counted_shares, is_stopping=is_stopping, ends_run=ends_run
        )  # fmt: skip
        if self._saver.is_keep_wanted(outcome, is_saved=is_saved) and not is_over:
            controller.replica.buffers.synchronise_(result.counted_shares)
            self._saver.keep(controller.state, nonce=outcome.nonce, rows=self._metrics.last_rows())
        if self.shadows is not None:
            self.shadows.after_step(controller, result, self._metrics.last_rows())

    def due(self, controller: Controller, result: StepResult) -> PendingWork:
        """The work that follows from a step, for a next generation that may have to do it."""
        plan, outcome = result.plan, result.outcome
        row = self._row(controller, result)
        return PendingWork(
            plan.step, plan.epoch, plan.ends_epoch, outcome.save, outcome.nonce, result.best_before, row
        )  # fmt: skip

    def make_up(self, controller: Controller, due: PendingWork, *, ends_run: bool) -> None:
        """Do the work after the last step of the previous generation, which was interrupted. Every rank calls it.

        Parts that were done are repeated: a row is written twice, and a checkpoint gets another name.
        """
        self._metrics.release()  # in a generation without shadows no commit tells anything
        self._metrics.step(_final(due.row))
        group = controller.group
        due = replace(due, nonce=(due.nonce + group.generation) % _NONCES)
        equal = (1,) * group.world_size
        self._follow_up(controller, due, shares=equal, is_stopping=False, ends_run=ends_run)

    def take_over(self, owed: Underway | None, state: TrainingState, due: PendingWork | None) -> None:
        """Owe the save that the previous generation gave up, or report that its state is gone. Every rank calls it."""
        is_repeated = owed is not None and due is not None and due.step == owed.step
        self._tell(self._saver.take_over(owed, state, is_repeated=is_repeated))

    def save_owed(self, controller: Controller) -> None:
        """Begin again the save that the previous generation gave up, if this is its state. Every rank calls it."""
        if kinds := self._saver.kinds_owed(controller.state):
            self._save(controller, kinds, is_last=False)

    def save_now(self, controller: Controller) -> None:
        """Save the state between two steps, and wait for it. Every rank calls it."""
        kinds = self._saver.kinds_due(
            controller.state, epoch_ended=None, is_best=False, is_overdue=False, is_stopping=True, ends_run=False
        )  # fmt: skip
        if kinds:
            self._save(controller, [*self._saver.kinds_owed(controller.state), *kinds], is_last=True)

    def _save(self, controller: Controller, kinds: list[str], *, is_last: bool) -> None:
        """Save the state between two steps. Every rank calls it."""
        nonce = int(controller.group.all_gather_rows(np.array([draw_nonce()], np.int64))[0, 0])
        self._saver.settle()
        rows = self._metrics.last_rows()
        with controller.patience_for(samples=0), amid(Phase.SAVING, Phase.BOUNDARY):
            self._tell(self._saver.save(controller.state, nonce=nonce, kinds=kinds, is_last=is_last, rows=rows))

    def _follow_up(
        self, controller: Controller, due: PendingWork, *, shares: tuple[int, ...], is_stopping: bool, ends_run: bool
    ) -> tuple[bool, bool]:
        """Compare the replicas, validate and save, as far as due; whether it saved, and whether the run is over."""
        state, replicas, buffers = controller.state, self._replicas, controller.replica.buffers
        if replicas is not None and replicas.is_due(due.step):
            self._saver.settle()  # the check may overwrite replicas to make them equal
            controller.replica.reducer.gather()
            with amid(Phase.COMPARING, Phase.BOUNDARY):
                self._compare(replicas, due.step, shares)
        is_best, figures = False, dict[str, dict[str, float]]()
        is_due = self._is_validation_due(due)
        if self._validators and (is_due or ends_run):
            buffers.synchronise_(shares)
            # a run that is extended later gets the best checkpoint of a run that never ended here
            is_best, figures = self._validate(controller, due.epoch, counts=is_due)
        if self._hooks.is_used:
            controller.replica.reducer.gather()
            # a validation that only the end of this start asks for is none of a run that went through
            self._hooks.call(controller, due, figures if is_due else {})
            if replicas is not None and replicas.is_due(due.step) and controller.replica.owned is not None:
                # the next update replaces copies of what other ranks own, and would hide what a hook has changed there
                with amid(Phase.COMPARING, Phase.BOUNDARY):
                    self._compare(replicas, due.step, shares)
            if state.ended_by_task and not ends_run:
                ends_run = True
                if self._validators and not figures:
                    buffers.synchronise_(shares)
                    self._validate(controller, due.epoch, counts=False)
        kinds = self._saver.kinds_due(
            state,
            epoch_ended=due.epoch if due.ends_epoch else None,
            is_best=is_best,
            is_overdue=due.is_overdue,
            is_stopping=is_stopping,
            ends_run=ends_run,
        )
        if kinds:
            if replicas is not None and not replicas.is_due(due.step):  # else compared above
                self._saver.settle()
                controller.replica.reducer.gather()
                self._compare(replicas, due.step, shares)  # so that every checkpoint is safe to go back to
            buffers.synchronise_(shares)
            is_last = ends_run or is_stopping
            rows = self._metrics.last_rows()
            with amid(Phase.SAVING, Phase.BOUNDARY):
                saves = self._saver.save(state, nonce=due.nonce, kinds=kinds, is_last=is_last, rows=rows)
            self._tell(saves)
        elif ends_run or is_stopping:
            with amid(Phase.SAVING, Phase.BOUNDARY):
                self._tell(self._saver.finish(state))
        return bool(kinds), ends_run or is_stopping

    def _compare(self, replicas: ReplicaCheck, step: int, shares: tuple[int, ...]) -> None:
        """Compare the replicas; shadows may have a part of one that was wrong. Every rank calls it."""
        if replicas.check(step, shares) and self.shadows is not None:
            self.shadows.lack()

    def finish(self, controller: Controller) -> None:
        """Wait for a checkpoint that is under way, and report it. Every rank calls it."""
        self._tell(self._saver.finish(controller.state))

    def _report(self, result: StepResult, row: Mapping[str, Any]) -> None:
        plan = result.plan
        self._metrics.saving(self._saver.progress())
        if self.shadows is not None:
            # what a user sees no kill may take back: the row waits until a later commit tells that they have the step
            self._metrics.hold()
        self._metrics.step(_final(row))
        if result.shift is not None:
            self._metrics.event("rebalance", step=plan.step, **_shift_fields(result.shift))
        now_s, run = time.monotonic(), self._status.run
        if run is not None:
            told = row if "ranks" in row else {**row, **self._accounted(result)}
            run.step(told, now_s, saved_step=self._saver.last_step)
            if self._status.is_due(now_s):
                run.shadows = [] if self.shadows is None else self.shadows.told()
                self._metrics.advise(run.advise(now_s), step=plan.step)
        self._status.write(
            now_s, step=plan.step, epoch=plan.epoch, state="train", shares=result.shares, ranks=row.get("ranks")
        )  # fmt: skip

    def _accounted(self, result: StepResult) -> dict[str, Any]:
        """Where the time of a step went, rank by rank, with the names of the ranks."""
        told = account(
            result.outcome.rows, shares=result.shares, work=result.work, seconds=result.seconds,
            samples=result.plan.size,
        )  # fmt: skip
        return {**told, "ranks": {"names": self._status.names, **told["ranks"]}}

    def _row(self, controller: Controller, result: StepResult) -> dict[str, Any]:
        """The row of a step in `metrics.jsonl`."""
        plan, outcome = result.plan, result.outcome
        is_applied = outcome.verdict is Verdict.APPLY
        row: dict[str, Any] = {
            "step": plan.step,
            "epoch": plan.epoch,
            "loss": result.loss,
            "terms": _by_term(controller.terms, outcome.sums, result.counts) if is_applied else None,
            "counts": {
                term: count
                for place, (term, count) in enumerate(zip(controller.terms, result.counts))
                if place not in controller.late_counts.values()
            },
            "samples": plan.size,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "seconds": result.seconds,
            "generation": controller.group.generation,
            "world_size": controller.group.world_size,
            "shares": list(result.shares),
            "log": controller.task.numbers_of_run_log,  # which a loop still fills while the step's work is interrupted
        }
        if not is_applied:
            row["skipped"] = True
        if self._saver.safe_image is not None:
            row["image"] = self._saver.safe_image
        if result.loss_scale is not None:
            row["loss_scale"] = result.loss_scale
        if len(result.shares) > 1:
            row |= self._accounted(result)
        if is_applied:
            parts = [one.partial for one in outcome.rows]
            self._noise_scale.add(parts, samples=plan.size, norm=result.grad_norm)
        if self._noise_scale.samples is not None:
            row["noise_scale"] = self._noise_scale.samples
        if self._status.slots != tuple(range(len(self._status.slots))):
            row["slots"] = list(self._status.slots)
        return row

    def _is_validation_due(self, due: PendingWork) -> bool:
        steps = self._config.validate_interval_updates
        is_due = due.ends_epoch and due.epoch % self._config.validate_interval == 0
        return is_due or (steps > 0 and due.step % steps == 0)

    def _validate(
        self, controller: Controller, epoch: int, *, counts: bool
    ) -> tuple[bool, dict[str, dict[str, float]]]:
        """Evaluate every validation split: whether the first one is the best so far, and `counts`; figures by split."""
        state, is_best, figures = controller.state, False, {}
        controller.replica.reducer.gather()
        for place, validator in enumerate(self._validators):
            # a rank with a small share waits for the others, far longer than in a step
            patience = controller.patience_for(samples=len(validator.source.dataset))
            told = f"validation after step {state.position.step - 1}"
            with amid(Phase.VALIDATION, Phase.BOUNDARY), noting(told), patience:
                values = validator.evaluate(
                    controller.task, controller.replica.model, controller.group, controller.pace.divide,
                    controller.replica.reducer, controller.layout,
                )  # fmt: skip
            if place == 0 and counts:
                is_best = self._is_best(state, values)
            figures[validator.split] = dict(values)
            named = {f"valid_{name}": value for name, value in values.items()}
            self._metrics.validation(
                {"step": state.position.step - 1, "epoch": epoch, "subset": validator.split, **named,
                 "best": place == 0 and is_best}
            )  # fmt: skip
        return is_best, figures

    def _is_best(self, state: TrainingState, values: dict[str, float]) -> bool:
        name = self._config.best_checkpoint_metric
        if name not in values:
            raise ConfigError(f"--best-checkpoint-metric {name}: validation gives {', '.join(values)}")
        value = values[name]
        sign = -1 if self._config.maximize_best_checkpoint_metric else 1
        # a value that is not finite is never best: no value would compare better than NaN
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
                if self._status.run is not None:
                    self._status.run.saved(saved.step, time.monotonic())
                self._metrics.event("save", path=str(result.path), **fields)
            else:
                self._metrics.event("save_failed", error=result.error, **fields)  # its writer has logged it by now


def _final(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with what was logged by now; without `log` if nothing was."""
    logged = dict(row.get("log", {}))
    return {**{key: value for key, value in row.items() if key != "log"}, **({"log": logged} if logged else {})}


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
