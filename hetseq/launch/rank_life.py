"""The life of one rank: it loads, passes the compatibility check, then trains generation after generation.

It presents the fields that all ranks must agree on, waits for `go`, and sends `ready` before its first step. After
losing a peer it reports the state it holds, and continues according to the record of the next generation. Does not know
what a process is, nor who computes gradients: it is an engine (`training.step_engine`).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch

from hetseq.checkpoint.directory import scan
from hetseq.checkpoint.images import images_here
from hetseq.cluster.membership.assignment import Assignment, GenerationRanks, InferenceJob
from hetseq.cluster.membership.decide import Image, Record, Report
from hetseq.cluster.membership.step_commit import Wish, parse_lineage
from hetseq.comm.directory_groups import everything_shared, share
from hetseq.comm.group import Group, GroupMeeting, LocalGroup, connect
from hetseq.config.sections import CheckpointConfig, Config
from hetseq.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    HetSeqError,
    PeerLostError,
    RendezvousError,
)
from hetseq.launch.generation import Generation, after, report_of, settle, unsettled
from hetseq.launch.launcher_link import LauncherLink, NoLauncher
from hetseq.launch.stop_request import StopRequest
from hetseq.monitor.metrics import Display, Metrics, Recording
from hetseq.monitor.rank_log import RankOutput
from hetseq.monitor.tensorboard import hyperparameters
from hetseq.monitor.trackers.protocol import Tracker, trackers_of
from hetseq.monitor.versions import gather_versions
from hetseq.run import inference as sweep
from hetseq.run.build import RankJob, build_session
from hetseq.run.checkpointing import Saver
from hetseq.run.closing import Kind, closing_lines
from hetseq.run.fingerprint import rank_fields
from hetseq.run.loaded_task import LoadedTask, load_material
from hetseq.run.regroup import KeptState, succession_by
from hetseq.run.session import Session
from hetseq.run.shadow import Shadow
from hetseq.run.shadow_links import ShadowLinks
from hetseq.run.shadow_outlet import Following
from hetseq.run_directory import RunDirectory
from hetseq.system import faults, gpu
from hetseq.system import matmul_backend as products
from hetseq.system import rank_phase as whereabouts
from hetseq.system.processes import keep_freed_memory
from hetseq.system.rank_phase import Phase
from hetseq.system.started_by import DEMO
from hetseq.training.controller import Halt
from hetseq.training.replica_check import ReplicasDiffer
from hetseq.training.step_engine import Engine

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 120.0  # all ranks have loaded and connect within seconds; launchers notice one that dies
_RECONNECT_TIMEOUT_S = 20.0  # all ranks are told to connect at the same time


class LeftBehindError(HetSeqError):
    """A script cannot be moved to a state that its rank did not reach; another process takes its place."""


class RankLife:
    """The life of one rank through the generations of its run."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        placement: Assignment,
        stop: StopRequest,
        line: LauncherLink | NoLauncher,
        closing: ExitStack,
        errand: InferenceJob | None,
    ) -> None:
        self._config, self._directory, self._placement, self._line = config, directory, placement, line
        self._stop, self._closing, self._errand = stop, closing, errand
        self.is_ready = False
        self._has_built = False  # task and model may have been changed by a state
        self.generation = Generation(placement.crew, None)
        #: for a script that drives this rank: called in each later generation with the ranks that hold the state
        self.on_regroup: Callable[[Group], None] | None = None
        #: for the same: ends this process, with an error as its reason, where no exception can be raised
        self.give_up: Callable[[BaseException], NoReturn] = _raise
        #: trackers of a script, beside those of --tracker
        self.trackers: Sequence[Tracker] = ()
        self._gone_back_to = 0
        self._saved = 0  # the step of the newest checkpoint that this rank has known of
        self.output = RankOutput(directory, placement.slot)
        if isinstance(line, LauncherLink):  # else a user runs this rank, perhaps in a debugger
            self.output.wait_for_no_reader()
            line.look_after(self.output.limit_prints)
        crew = None if placement.is_replacement else placement.crew
        rank = None if crew is None else crew.rank_of(placement.slot)
        self.output.show(rank == 0)
        self._metrics = Metrics(
            Recording(directory, hparams=hyperparameters(config)), Display(config.log),
            is_writer=crew is not None and rank is not None and crew.writer_of(rank) == rank, has_display=rank == 0,
        )  # fmt: skip
        closing.callback(self._metrics.close)
        self.output.log_to(self._metrics.log_handler, closing)

    def load(self) -> None:
        """Open the device, load task, data and model on it, and present them to the peers."""
        config, device, errand = self._config, torch.device(self._placement.device), self._errand
        self.open_device()
        whereabouts.enter(Phase.LOADING)
        slot = self._placement.slot
        material = load_material(config, device, slot=slot) if errand is None else sweep.prepare(errand, config, device)
        self.present(config, material)

    def open_device(self) -> None:
        """Prepare the device and the libraries of this process for training."""
        config, placement = self._config, self._placement
        torch.set_num_threads(placement.threads)
        device = torch.device(placement.device)
        if device.type == "cuda":
            gpu.open_device(device, f"rank {placement.slot} on {socket.gethostname()}")
            gpu.allow_tf32(config.optimization.precision == "tf32")
        else:
            keep_freed_memory()
            products.multiply_by_the_faster_library()
        faults.arm(placement.faults, slot=placement.slot, incarnation=placement.starts)
        if device.type == "cuda" and config.optimization.precision == "bf16" and not gpu.has_bf16(device):
            logger.warning("%s has no bf16: torch emulates it, several times slower than --precision fp16", device)

    def present(self, config: Config, material: LoadedTask) -> None:
        """Tell the peers what this rank would train, by the options of `config`."""
        self._config, self._material = config, material
        if self._errand is None:
            options = {name: value for name, value in config.flat().items() if value not in (None, ())}
            self._metrics.track(trackers_of(config.log.tracker_specs(), self.trackers), options)
        faults.point("loading")
        whereabouts.enter(Phase.MEETING)
        self._line.present(rank_fields(config, material))

    @property
    def first_place(self) -> tuple[int, int]:
        """Rank and number of ranks at the start of this process; a process that joins knows its slot alone."""
        crew, slot = self._placement.crew, self._placement.slot
        return (slot if self._placement.is_replacement else crew.rank_of(slot)), crew.world_size

    @property
    def group(self) -> Group:
        """The ranks of the generation."""
        assert self.generation.group is not None
        return self.generation.group

    def divide(self, total: int) -> tuple[int, ...]:
        """How many of `total` pieces of work each rank takes, by its speed; empty while there is no session."""
        session = self.generation.session
        return () if session is None else session.controller.pace.divide(total)

    def save(self) -> None:
        """Save the state after the last update, for a rank alone whose script leaves a step."""
        if self.generation.session is not None:
            self.generation.session.save()

    def run(self) -> Engine[dict[str, Any]]:
        """Run all generations that this rank takes part in; returns its report."""
        generation = self.generation
        if self._placement.is_replacement:
            faults.point("join")
            begun = self._follow() if self._placement.is_shadow else self._read(self._line_of_record(), None)
            if begun is None:
                message = "a shadow has left; the others continue, and the same command has it follow them again"
                return {"code": EXIT_STOPPED, "message": message, "has_left": True}
            generation = self.generation = begun
        while True:
            lost = yield from self._live(generation)
            if not isinstance(lost, str):
                self._metrics.code = lost["code"]
                return lost
            generation = self.generation = self._succeed(generation, lost)

    def _follow(self) -> Generation | None:
        """Follow the run as a shadow until this process is a rank; None if it was asked to leave before."""
        line, placement, shadow = self._line, self._placement, None
        assert isinstance(line, LauncherLink), "a shadow has a launcher"
        told = line.await_record()
        while True:
            record, crew = Record.from_record(told["record"]), GenerationRanks.from_record(told["crew"])
            if placement.incarnation in record.roster:
                is_needed = shadow is not None and placement.incarnation not in record.fresh
                return self._read(told, shadow.kept() if shadow is not None and is_needed else None)
            if shadow is None:
                alone = LocalGroup(generation=crew.generation)
                job = RankJob(self._config, self._directory, alone, self._material, self._metrics)
                shadow = Shadow(job, self._closing)
            links = ShadowLinks(
                self._following(crew, record.shadows), placement.incarnation, generation=crew.generation,
                world_size=crew.world_size,
            )  # fmt: skip
            try:
                with suppress(PeerLostError):  # the generation may be over already
                    line.begin(crew.generation, links)
                shadow.follow(
                    links, generation=crew.generation, world_size=crew.world_size, is_leaving=self._is_leaving
                )
            finally:
                links.close()
            if self._is_leaving():
                return None
            faults.point("regroup")
            report = Report(placement.incarnation, crew.generation, lineage=shadow.lineage, saved=shadow.saved)
            told = line.report(report.to_record())

    def _is_leaving(self) -> bool:
        return bool(self._wish() & (Wish.LEAVE | Wish.STOP))

    def _following(self, crew: GenerationRanks, shadows: Sequence[str]) -> Following:
        """How the ranks of a generation and its shadows find each other."""
        line, placement = self._line, self._placement
        assert isinstance(line, LauncherLink)
        return Following(
            tuple(shadows), line.store(crew.generation), f"{placement.name}/{crew.generation}", placement.key,
            placement.host, crew.addresses,
        )  # fmt: skip

    def _live(self, generation: Generation) -> Engine[dict[str, Any] | str]:
        """Run one generation to its end; returns the report of this rank, or why another generation must follow.

        Resources stay open in `generation`. The exception handler ends before anything else happens, because the
        exception keeps the failed frames alive.
        """
        try:
            self._form(generation)
            if self._errand is not None:
                return self._do(self._errand, generation)
            self._tell_script(generation)
            yield from settle(generation)
            return (yield from self._train(generation))
        except (PeerLostError, RendezvousError) as error:
            if not self.is_ready and not self._placement.is_replacement:
                raise
            lost = str(error)
        return lost

    def _form(self, generation: Generation) -> None:
        """Connect to the peers of the generation."""
        crew, placement, line = generation.crew, self._placement, self._line
        rank = crew.rank_of(placement.slot)
        whereabouts.enter(Phase.CONNECTING)
        faults.point("form")
        line.begin(crew.generation, None)
        generation.group = _connect(placement, crew, line)
        line.begin(crew.generation, generation.group)
        generation.sharing = share(generation.group, crew.parts) if crew.parts else everything_shared(generation.group)
        self.output.show(rank == 0)
        self._metrics.lead(is_writer=crew.writer_of(rank) == rank, has_display=rank == 0)

    def _tell_script(self, generation: Generation) -> None:
        """Give a script that drives this rank the ranks that hold the same state. Raises LeftBehindError."""
        if self.on_regroup is not None and generation.lost and self.is_ready:
            raise LeftBehindError(
                f"{generation.lost}: the script begins anew from the newest state in memory or on disk"
            )
        if self.on_regroup is not None and generation.has_old_copies:
            raise LeftBehindError("a rank was lost before all had the new parameters: the script begins anew")
        if self.on_regroup is None or generation.succession is None or generation.group is None:
            return
        survivors = generation.survivors
        if generation.group.rank in survivors:
            self.on_regroup(generation.group.subgroup(survivors, "script"))
        elif self.is_ready:
            raise LeftBehindError("this rank lacks a step that the others have made: its script begins anew")

    def _do(self, errand: InferenceJob, generation: Generation) -> dict[str, Any]:
        assert generation.group is not None
        return {"code": EXIT_DONE, "message": sweep.perform(errand, self._config, self._material, generation.group)}

    def _train(self, generation: Generation) -> Engine[dict[str, Any] | str]:
        config = self._config
        if generation.succession is None and (generation.lost or self._has_built):
            config = self._begin_anew(generation)
        self._has_built = True
        while True:
            whereabouts.enter(Phase.BUILDING)
            generation.session = session = self._build(config, generation)
            self._tell(generation, session)
            if not self.is_ready:
                self._line.ready()
                self.is_ready = True
            if generation.succession is None and session.controller.has_ended():
                session.close()
                self._sum_up(session, start_s=None)
                return {"code": EXIT_DONE}
            self._tell_versions(generation, session)
            differing = None
            try:
                halt = yield from session.steps()
                whereabouts.enter(Phase.ENDING)
                report = self._finish(session, halt)
                if halt is Halt.LEAVING:  # the others save again what is being written now, without waiting for it
                    session.suspend(is_leaving=True)
                if halt is not Halt.CHANGING:  # else `_succeed` suspends it, without waiting for a peer that dies now
                    session.close(has_failed=session.saver.last_error is not None)
                if isinstance(report, dict) and report["code"] == EXIT_DONE:
                    self._sum_up(session, start_s=time.monotonic() - self._placement.begun_s)
                return report
            except ReplicasDiffer as error:
                self._gone_back_to = _newest_to_go_back_to(session, error, self._gone_back_to)
                self._metrics.goes_back(self._gone_back_to)
                differing = error
            except PeerLostError:
                raise
            except BaseException as error:
                # closing a session releases page-locked memory, see `never_release`, and could lose the reason
                if not gpu.is_unusable(error, self._material.device):
                    session.__exit__(*sys.exc_info())
                raise
            session.__exit__(type(differing), differing, None)
            generation.session, generation.succession = None, None
            del session  # frees its tensors before new ones are created
            config = _as_for_a_restart(config)

    def _begin_anew(self, generation: Generation) -> Config:
        """Load task, data and model again: no rank has all of the state, and no update of the model may remain.

        Returns the config by which the run continues from its newest state.
        """
        level = logging.WARNING if generation.group is not None and generation.group.rank == 0 else logging.INFO
        text = "%s: all ranks continue from the newest state in memory or on disk [state-lost]"
        if self._config.checkpoint.no_save and not self._config.checkpoint.memory_interval_updates:
            text = "%s: all ranks begin again where this start began, since --no-save keeps no state [state-lost]"
        if generation.lost:
            logger.log(level, text, generation.lost)
        config = _as_for_a_restart(self._config)
        # a script cannot run twice in a process; one that comes here has just begun
        if self._material.own_loop is None:
            self._material = load_material(config, torch.device(self._placement.device), slot=self._placement.slot)
        return config

    def _sum_up(self, session: Session, *, start_s: float | None) -> None:
        """Log the closing summary, below the last display of the steps."""
        controller = session.controller
        if controller.group.rank == 0:
            self._metrics.code = EXIT_DONE
            self._metrics.close()
            commits = scan(self._directory.checkpoints).commits
            best_step = next((commit.identity.step for commit in commits if "best" in commit.kinds), None)
            is_known = best_step is not None or self._config.checkpoint.no_save
            kind = Kind.TASK
            if self._material.own_loop is not None:
                kind = Kind.ALONE if isinstance(self._line, NoLauncher) else Kind.SCRIPT
            for line in closing_lines(
                self._config, controller.state, step=session.last_step, start_s=start_s,
                best=self._metrics.best(best_step) if is_known else None, has_saved=bool(commits),
                kind=Kind.DEMO if self._placement.started_by == DEMO else kind,
            ):  # fmt: skip
                logger.info(line)

    def _tell(self, generation: Generation, session: Session) -> None:
        """Log why the run regrouped: once on the terminal, and in every log."""
        crew, lost_s = generation.crew, generation.lost_s
        generation.is_told = True
        if crew.generation == 0:
            return
        seconds = None if lost_s is None else round(time.monotonic() - lost_s, 3)
        slots = list(crew.slots)
        self._metrics.event(
            "generation", generation=crew.generation, step=session.last_step, ranks=slots, story=generation.story,
            seconds=seconds,
            **({"state_bytes": sum(moved), "state_bytes_by_rank": moved} if (moved := session.moved_bytes) else {}),
            **({"lost": generation.lost} if generation.lost else {}),
            **({"image": session.last_step} if generation.image else {}),
        )  # fmt: skip
        level = logging.WARNING if generation.group is not None and generation.group.rank == 0 else logging.INFO
        took = "" if seconds is None else f" (regrouped in {seconds:.2f} s)"
        who = f"rank {slots[0]} continues" if len(slots) == 1 else f"{len(slots)} ranks continue"
        story = generation.story or "a step could not be finished in time"
        if generation.image:
            logger.log(
                level,
                "%s: %s after step %d, of which the nodes' memory has an image, because %s%s [went-back]",
                story, who, session.last_step, generation.lost, took,
            )  # fmt: skip
            return
        logger.log(level, "%s: %s after step %d%s", story, who, session.last_step, took)

    def _tell_versions(self, generation: Generation, session: Session) -> None:
        """Record the versions of all ranks, at a start and when a rank has joined. Collective."""
        if generation.succession is None or generation.succession.record.fresh:
            group, slots = session.controller.group, generation.crew.slots
            nodes = gather_versions(group, self._material.device, slots)
            self._metrics.event("versions", step=session.last_step, nodes=nodes)

    def _build(self, config: Config, generation: Generation) -> Session:
        assert generation.group is not None
        job = RankJob(
            config, self._directory, generation.group, self._material, self._metrics, self._wish,
            generation.sharing, generation.crew.slots, generation.succession, self._placement.name or "alone",
            self._following(generation.crew, generation.shadows) if generation.shadows else None,
        )  # fmt: skip
        session = build_session(job)
        self._line.show(session.status.renew)
        return session

    def _wish(self) -> Wish:
        return self._stop.wish(self._line)

    def _finish(self, session: Session, halt: Halt) -> dict[str, Any] | str:
        """The report of a rank that is done, or why the run must regroup."""
        if halt is Halt.CHANGING:
            return "ranks are leaving or joining"
        if halt is Halt.LEAVING:
            message = f"left after step {session.last_step}; the others continue, and the same command joins them again"
            return {"code": EXIT_STOPPED, "message": message, "has_left": True}
        return _last_words(session, has_ended=halt is Halt.ENDED)

    def _succeed(self, generation: Generation, lost: str) -> Generation:
        """Move from a generation that is over to the next one. Raises PeerLostError if this rank has no place in it."""
        line, session, now_s = self._line, generation.session, time.monotonic()
        assert isinstance(line, LauncherLink), "there is no launcher to regroup with"
        whereabouts.enter(Phase.REGROUPING)
        logger.debug("generation %d is over: %s", generation.crew.generation, lost)
        faults.point("regroup")
        generation.sever()
        carried = generation.succession.carried if generation.succession is not None else None
        if session is not None:
            report = session.controller.report(self._placement.incarnation)
            session.suspend()
        else:
            report = report_of(self._placement.incarnation, generation.crew.generation, generation.succession)
        record = line.report(self._with_images(report, session, carried).to_record())
        next_record = Record.from_record(record["record"])
        carried = self._carry(generation, next_record)
        following = after(generation, self._read(record, carried), now_s)
        following.unsettled = unsettled(generation)
        if carried is not None and carried.owned is not None:
            following.has_old_copies = carried.due is not None or following.unsettled is not None
        generation.close()
        return following

    def _with_images(self, report: Report, session: Session | None, carried: KeptState | None) -> Report:
        """A report with the images in the memory of this node, and the newest checkpoint that this rank knows of."""
        if not self._config.distributed.has_owners:
            return report
        directory, saver = self._directory, None if session is None else session.saver
        last = 0 if saver is None else saver.last_step
        if saver is None and carried is not None:
            last = carried.saver.last_step
        self._saved = max(self._saved, last)
        images = tuple(
            Image(
                one.plan, parse_lineage(one.identity.step, one.identity.lineage), one.identity.generation, one.parts,
                one.number_of_parts,
            )
            for one in images_here(directory.run_id, directory.path, start=self._placement.name or "alone")
        )  # fmt: skip
        return replace(report, images=images, saved=self._saved)

    def _carry(self, generation: Generation, record: Record) -> KeptState | None:
        """The state that this rank keeps for the next generation; None if it will receive the state."""
        session, succession = generation.session, generation.succession
        if record.image:  # of a rank that has a state only the objects are kept
            if session is not None:
                return session.carry(None)
            return succession.carried if succession is not None else None
        if self._placement.incarnation in record.fresh:
            if session is not None:
                session.close()
            return None
        if session is not None:
            return session.carry(record.last)
        assert succession is not None
        return succession.carried

    def _line_of_record(self) -> dict[str, Any]:
        assert isinstance(self._line, LauncherLink)
        return self._line.await_record()

    def _read(self, told: dict[str, Any], carried: KeptState | None) -> Generation:
        """The generation that a record describes. Raises PeerLostError."""
        record, crew = Record.from_record(told["record"]), GenerationRanks.from_record(told["crew"])
        return Generation(crew, succession_by(record, carried), told["story"], record.lost, record.shadows)


def _raise(error: BaseException) -> NoReturn:
    raise error


def _newest_to_go_back_to(session: Session, error: ReplicasDiffer, gone_back_to: int) -> int:
    """The step of the newest checkpoint. Raises `error` if there is none, or if the run went back to it before."""
    newest = session.saver.last_step  # the same on all ranks
    if newest <= gone_back_to:
        raise error
    level = logging.WARNING if session.controller.group.rank == 0 else logging.INFO  # all ranks know it
    logger.log(level, "%s; going back to the checkpoint of step %d", error, newest)
    return newest


def _as_for_a_restart(config: Config) -> Config:
    """The config to restore the run's own newest checkpoint; else the other run's folder that it began from."""
    if not os.path.isdir(config.checkpoint.restore_file):
        config = replace(config, checkpoint=replace(config.checkpoint, restore_file=CheckpointConfig.restore_file))
    return config


def _last_words(session: Session, *, has_ended: bool) -> dict[str, Any]:
    """The report of a rank whose run is over."""
    saver = session.saver
    _repeat_failures(saver, has_ended=has_ended)
    if has_ended and saver.last_error is None:
        return _nothing_learned(session) or {"code": EXIT_DONE}
    if has_ended:
        kept = f"the newest checkpoint is of step {saver.last_step}" if saver.last_step else "nothing was ever saved"
        message = f"the final save failed: {saver.last_error}; {kept}: check --save-dir, then run this command again"
        return {"code": EXIT_FAILED, "message": f"{message} [save-failed]"}
    if saver.last_step:
        message = f"stopped after step {session.last_step}; the same command resumes from step {saver.last_step}"
        return {"code": EXIT_STOPPED, "message": message}
    return {"code": EXIT_FAILED, "message": f"stopped after step {session.last_step}, and nothing was ever saved"}


def _nothing_learned(session: Session) -> dict[str, Any] | None:
    """The report of a run whose steps were all skipped; None: at least one was applied, or there was none."""
    steps = session.last_step
    if session.controller.state.updates or not steps:
        return None
    message = (
        f"none of {steps} steps was applied: no gradient was finite; lower --lr, or look at the samples that the"
        " warnings in log/rank-0.txt name [loss-not-finite]"
    )
    return {"code": EXIT_FAILED, "message": message}


def _repeat_failures(saver: Saver, *, has_ended: bool) -> None:
    """Warn again at the end which saves failed: their own lines have long scrolled away."""
    failures = saver.failures[:-1] if has_ended and saver.last_error is not None else saver.failures
    if failures and saver.writes_here:
        reason = failures[-1][1]
        steps = ", ".join(str(failed) for failed, _ in failures[:5]) + (", ..." if len(failures) > 5 else "")
        if len(failures) == 1:
            logger.warning("1 save of this run failed, after step %s: %s", steps, reason)
        else:
            logger.warning(
                "%d saves of this run failed, after steps %s; the last of them: %s", len(failures), steps, reason
            )


def _connect(placement: Assignment, crew: GenerationRanks, line: LauncherLink | NoLauncher) -> Group:
    if crew.world_size == 1 or isinstance(line, NoLauncher):
        return LocalGroup(generation=crew.generation)
    name = f"{placement.name}/{crew.generation}"
    sources = tuple(sorted({*placement.sources, *crew.addresses}))  # nodes may have joined since the start
    meeting = GroupMeeting(
        line.store(crew.generation), name, placement.key, placement.host, sources,
        generation=crew.generation, shares_memory=crew.is_only_node,
    )  # fmt: skip
    timeout_s = _RECONNECT_TIMEOUT_S if crew.generation else _CONNECT_TIMEOUT_S
    return connect(rank=crew.rank_of(placement.slot), world_size=crew.world_size, meeting=meeting, timeout_s=timeout_s)
