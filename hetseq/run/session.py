"""A rank ready to train in one generation of its run: it trains to the end and keeps the state for the next generation.

`run.build` makes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetseq.cluster.membership.decide import Update
from hetseq.errors import DisagreementError
from hetseq.monitor.metrics import Metrics
from hetseq.run.after_step import AfterStep, StatusFiles
from hetseq.run.checkpointing import Provenance, Saver
from hetseq.run.regroup import KeptState, PendingWork
from hetseq.training.controller import Controller, Halt
from hetseq.training.replica_check import ReplicasDiffer
from hetseq.training.step_engine import Engine, StepResult, drive


@dataclass
class Session:
    """A rank ready to train in one generation of its run."""

    controller: Controller
    saver: Saver
    status: StatusFiles
    boundary: AfterStep
    _provenance: Provenance
    _metrics: Metrics
    _is_last: bool = False  # nothing is trained in this generation
    _due: PendingWork | None = None  # left over from the generation before
    #: of the optimizer's state, to each rank, when this generation began; empty unless ranks own parts
    moved_bytes: tuple[int, ...] = ()
    _is_trusted: bool = True  # all ranks hold the same state
    _is_open: bool = True
    _is_suspended: bool = False
    _has_told_of_images: bool = False
    caught_up: StepResult | None = None  # of the step that `carry` has made, which no driver knows of yet

    @property
    def last_step(self) -> int:
        return self.controller.state.position.step - 1

    def train(self) -> Halt:
        """`steps`, driven for a task."""
        return drive(self.steps())

    def steps(self) -> Engine[Halt]:
        """Train to the end, or until a rank asks for something else. Collective; raises on all ranks what ended it.

        If replicas differ, it waits for a checkpoint under way, which was begun while they were equal.
        """
        try:
            self._make_up()
            halt = self._stop_here() if self._is_last else (yield from self.controller.steps())
        except (ReplicasDiffer, DisagreementError) as error:
            self._is_trusted = False
            if isinstance(error, ReplicasDiffer):
                self.boundary.finish(self.controller)
            raise
        if halt is not Halt.CHANGING:
            word = {Halt.ENDED: "done", Halt.STOPPED: "stopped", Halt.LEAVING: "gone"}[halt]
            self.status.write(0.0, force=True, step=self.last_step, state=word)
        return halt

    def _make_up(self) -> None:
        """Do the interrupted work that followed from the last step."""
        if self._due is not None:
            controller = self.controller
            with controller.patience_for(samples=0):
                self.boundary.make_up(controller, self._due, ends_run=controller.has_ended())
            self._due = None
        if not self._is_last:
            self.boundary.save_owed(self.controller)

    def save(self) -> None:
        """Save the state after the last update, whatever a forward has changed since then. Every rank calls it."""
        self.controller.replica.buffers.restore_()
        self.boundary.save_now(self.controller)

    def _stop_here(self) -> Halt:
        """Save the state as it is: too few ranks are left to continue."""
        if self.controller.has_ended():
            return Halt.ENDED
        self.boundary.save_now(self.controller)
        return Halt.STOPPED

    def carry(self, last: Update | None) -> KeptState:
        """The state for the next generation, once this one is over; `last` is the update that led to its base.

        Closes the session.
        """
        controller, unsettled = self.controller, self.controller.unsettled
        controller.catch_up(last)
        due = self._due
        if controller.unsettled is not None:
            due = self.boundary.due(controller, controller.unsettled)
            if controller.unsettled is not unsettled:
                self._metrics.step({key: value for key, value in due.row.items() if key != "log"})
                self.caught_up = controller.unsettled
        carried = KeptState(
            controller.replica.optimizer, controller.state, self._provenance, self.saver, controller.pace.meter, due,
            self._metrics.last_rows(), controller.replica.owned,
        )  # fmt: skip
        self.close()
        return carried

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        # otherwise the state is in files now; parts of states that differ cannot be resumed from
        self.close(has_failed=self._is_trusted and (kind is not None or self.saver.last_error is not None))

    def suspend(self, *, is_leaving: bool = False) -> None:
        """Stop the threads and processes of a generation that is over. The model stays as it is.

        Where ranks own parts of the state, the images in memory stay too: the others may need them. They have all they
        need if this rank `is_leaving`.
        """
        self._is_suspended = True
        self._tell_of_images()
        self.boundary.close()
        self.saver.close(is_hasty=True, has_failed=self.controller.replica.owned is not None and not is_leaving)
        self.controller.loader.close()

    def _tell_of_images(self) -> None:
        """Record what the images of this generation have cost the rank that writes here."""
        if not self._has_told_of_images and (facts := self.saver.image_facts):
            self._has_told_of_images = True
            self._metrics.event("images", step=self.last_step, **facts)

    def close(self, *, has_failed: bool = False) -> None:
        """Release everything except model and optimizer; may be called twice."""
        if self._is_open:
            self._is_open = False
            self._tell_of_images()
            self.boundary.close()
            self.saver.close(has_failed=has_failed)
            if not (has_failed or self._is_suspended):
                self.saver.forget_images()
            self.controller.loader.close()
            self.controller.replica.reducer.close()
