"""Builds one rank that is ready to train from its configuration: the only place where all components meet.

`build_session` reads like a plan: model, initial state, samples and shares, reports, and the controller over them.
Every rank runs it in the same order, since parts of it are collective.
"""

from __future__ import annotations

import functools
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hetseq import registry
from hetseq.balance.cost_meter import AtOnce, complete_costs
from hetseq.balance.layout import Layout, layout_of
from hetseq.cluster.membership.step_commit import Wish
from hetseq.comm.directory_groups import DirectoryGroups, everything_shared
from hetseq.comm.group import Group, RowTransport
from hetseq.config.sections import (
    CheckpointConfig,
    Config,
    DataConfig,
)
from hetseq.data.lanes import lanes_of
from hetseq.data.loader import StepLoader
from hetseq.data.plan import GlobalBatch, Planner, steps_in_epoch
from hetseq.data.shards import Shards
from hetseq.errors import ConfigError, TaskError
from hetseq.monitor.advice import AdviceSetting
from hetseq.monitor.metrics import Metrics
from hetseq.monitor.status import RunStatus
from hetseq.parallel.buffers import BufferKeeper
from hetseq.parallel.delayed_init import RefusingNumbers
from hetseq.parallel.replica import Replica, batch_norms, begin_alike_, trained_parameters
from hetseq.run import horizon
from hetseq.run.after_step import AfterStep, StatusFiles
from hetseq.run.announcements import (
    say_what_runs,
    say_what_the_batch_means,
    warn_of_batch_norm,
    warn_of_carried_state,
)
from hetseq.run.base_again import base_again
from hetseq.run.checkpointing import Provenance, Saver
from hetseq.run.data_by_host import parts_of_ranks, say_what_holds, shards_of, text_of
from hetseq.run.divided_ranks import meet, sizes_in_step, validators_in_step
from hetseq.run.image_making import make_images
from hetseq.run.loaded_task import LoadedTask
from hetseq.run.owners import OwnersOfBefore, make_reducer, warn_of_no_save
from hetseq.run.planning import check_best_metric, make_validators, micro_batch_sizes, planner_of, weights_by_slot
from hetseq.run.recipe import changes, recipe_of
from hetseq.run.regroup import KeptState, Regroup, StartState, go_back, hand_over
from hetseq.run.resume import Beginning, Target, begin_from, choose_checkpoint, nothing_to_do, open_checkpoints, resume
from hetseq.run.session import Session
from hetseq.run.shadow_feed import ShadowFeed
from hetseq.run.shadow_outlet import Following
from hetseq.run.start_notes import log_again
from hetseq.run.step_watch import StepWatch
from hetseq.run.task_hooks import TaskHooks
from hetseq.run_directory import RunDirectory
from hetseq.system.device_memory import in_use_bytes, limit_bytes
from hetseq.training.controller import Boundary, Controller, RankContext, Recipe, StepFeed, TrainingState
from hetseq.training.lr_scaling import Course, scaled
from hetseq.training.micro_batch_size import MicroBatchSizes
from hetseq.training.optim import parameter_groups
from hetseq.training.replica_check import ReplicaCheck, kind_of
from hetseq.training.share import ComputeDevice, ShareComputer
from hetseq.training.share_policy import (
    NOTHING,
    AlternatingShares,
    FixedShares,
    MeasuredShares,
    SharePolicy,
    assigner,
    assigner_by,
    turn_of,
)
from hetseq.training.throttle import Throttle
from hetseq.training.validation import Validator

logger = logging.getLogger(__name__)

_START_DEADLINE_S = 1800.0  # data may take minutes to read; a rank that dies meanwhile is seen by its launcher
_NEXT_DEADLINE_S = 120.0  # for ranks that lack only the state
_SLOWEST_NETWORK = 5e6  # bytes per second


@dataclass(frozen=True)
class RankJob:
    """The parts from which one rank is built, in one generation of its run.

    `sharing` says which ranks use `directory` together with this one (default: all of them), `slots` names the ranks
    for users (default: by number). With a `succession` the state comes from the previous generation, otherwise from
    the newest checkpoint if there is one.
    """

    config: Config
    directory: RunDirectory
    group: Group
    material: LoadedTask
    metrics: Metrics
    wish: Callable[[], Wish] = lambda: Wish.NONE
    sharing: DirectoryGroups | None = None
    slots: tuple[int, ...] = ()
    succession: Regroup | None = None
    start: str = "start"  # identifies this start of the run
    following: Following | None = None  # the shadows of the run

    @functools.cached_property
    def directory_group(self) -> DirectoryGroups:
        """The ranks that share the run directory, and those that do not."""
        return self.sharing or everything_shared(self.group)

    @property
    def slots_of_ranks(self) -> tuple[int, ...]:
        """The slot of each rank."""
        return self.slots or tuple(range(self.group.world_size))

    @functools.cached_property
    def layout(self) -> Layout:
        """Which ranks compute a share together: those that hold one model together."""
        return layout_of(self.slots_of_ranks, self.config.distributed.tensor_sizes())

    @property
    def own_slot(self) -> int:
        """The slot of this rank."""
        return self.slots_of_ranks[self.group.rank]

    @property
    def carried(self) -> KeptState | None:
        """The state that this rank keeps from the previous generation."""
        return self.succession.carried if self.succession is not None else None

    @property
    def is_first(self) -> bool:
        """Whether this is a start of the run, not a later generation."""
        return self.succession is None


@dataclass(frozen=True)
class FirstState:
    """The state that steps begin with."""

    state: TrainingState
    provenance: Provenance
    parts: Sequence[tuple[str, int]] | None = None  # of the data, by rank, with --data-by-host


@dataclass(frozen=True)
class Start:
    """The state that training begins with, and its source: the previous generation, a checkpoint, or neither."""

    first: FirstState
    saver: Saver
    inherited: StartState | None = None
    beginning: Beginning | None = None

    @property
    def state(self) -> TrainingState:
        return self.first.state

    @property
    def provenance(self) -> Provenance:
        return self.first.provenance


@dataclass(frozen=True)
class Feed:
    """Which samples this rank computes, step after step."""

    steps: StepFeed
    shards: Shards | None
    is_last: bool  # nothing is trained in this generation


@dataclass(frozen=True)
class Reports:
    """The objects that report, validate and save after each step."""

    run_status: RunStatus
    status: StatusFiles
    replicas: ReplicaCheck | None
    boundary: AfterStep


def build_session(job: RankJob) -> Session:
    """Build the session of one rank; collective. Raises HetSeqError for contradictory options and unreadable files."""
    with ExitStack() as undo, _patience(job, job.group), _patience(job, job.directory_group.group):
        was_absent = job.material.fill is not None
        replica = build_replica(job, undo)
        is_untried = was_absent or not replica.has_parameters or replica.divided is not None
        if job.is_first and is_untried and not job.layout.is_idle(job.group.rank):
            job.material.try_out(replica.reducer)
        sizes = micro_batch_sizes(job.config.data, job.material, job.directory)
        if job.material.divided is not None:
            sizes = sizes_in_step(sizes, job.group, job.layout, job.config.memory)
        validators = make_validators(job.config, job.material, sizes)
        if job.material.divided is not None:
            validators = validators_in_step(validators, job.group, job.layout)
        if not job.layout.is_idle(job.group.rank):
            check_best_metric(job.config.validation, validators, job.material, replica.reducer)
        start = find_start(job, replica, undo)
        feed = build_feed(job, start.first, sizes, undo)
        reports = build_reports(job, replica, start, feed, validators, undo)
        controller = build_controller(job, replica, start.first, feed, reports.boundary, sizes)
        begin(job, start, reports, controller)
        undo.pop_all()
    announce(job, start, feed, reports, controller)
    due, moved = (start.inherited.due, start.inherited.moved_bytes) if start.inherited is not None else (None, ())
    return Session(
        controller, start.saver, reports.status, reports.boundary, start.provenance, job.metrics, feed.is_last, due,
        moved,
    )  # fmt: skip


def build_replica(job: RankJob, undo: ExitStack) -> Replica:
    """The replica of this rank, with the optimizer of the previous generation, if this rank has one."""
    config, model = job.config, job.material.model
    if job.material.divided is not None:
        meet(job.material.divided, job.group, job.layout, job.slots_of_ranks, config.distributed)
    parameters = [parameter for _, parameter in trained_parameters(model)]
    if not parameters:
        raise ConfigError(
            f"the model of {type(job.material.task).__name__} has no parameter to train: expected at least one"
        )
    optimizer = job.carried.optimizer if job.carried is not None else _build_optimizer(config, job.material)
    before = OwnersOfBefore(job.carried.owned) if job.carried is not None else None
    reducer, owned = make_reducer(
        job.material, optimizer, job.group, config.distributed, slots=job.slots_of_ranks, before=before,
        is_first=job.is_first,
    )  # fmt: skip
    undo.callback(reducer.close)
    return Replica(
        model, optimizer, reducer, BufferKeeper(model, job.group), job.material.task_state, owned, job.material.divided
    )


def find_start(job: RankJob, replica: Replica, undo: ExitStack) -> Start:
    """The state of the previous generation, of a checkpoint, or a fresh one; and its saver. Collective."""
    config = job.config
    asked = global_batch(config.data, job.group, job.layout)
    parts = parts_of_ranks(job.material, job.group) if config.data.data_by_host else None
    provenance = provenance_of(job, replica, asked, parts) if job.carried is None else job.carried.provenance
    inherited: StartState | None = None
    beginning: Beginning | None = None
    checkpoints = functools.partial(
        open_checkpoints, config.checkpoint, job.directory, job.directory_group.group,
        has_end=horizon.has_end(config.optimization), keeps_states=replica.owned is None,
    )  # fmt: skip
    images = make_images(config.checkpoint, job.directory, job.group, replica, start=job.start)
    if images is not None:
        undo.callback(images.close, keep=True)
    if job.succession is not None:
        if job.succession.record.image:
            inherited = go_back(job.succession, replica, provenance, job.directory_group, images)
            replica.take_base(functools.partial(base_again, config, job.material))
        else:
            inherited = hand_over(job.succession, replica, provenance, job.directory_group)
        state, provenance = inherited.state, inherited.provenance
        manager = checkpoints(known=inherited.known)
    else:
        manager = checkpoints()
        state, is_explicit = TrainingState(), config.data.global_batch_size is not None
        target = Target(replica, provenance, is_explicit)
        beginning = choose_checkpoint(manager, config.checkpoint, job.directory, job.directory_group, target)
        if beginning is not None:
            state, provenance = resume(
                beginning, config.checkpoint, replica, provenance, is_explicit_batch=is_explicit
            )  # fmt: skip
        if beginning is None or (config.checkpoint.reset_dataloader and provenance.batch == asked):
            _check_batch_of_join(config, is_explicit=is_explicit)
        if beginning is None:
            begin_alike_(replica, job.group)
    if job.carried is None:  # also on a rank that joins: its optimizer is new
        override(replica.optimizer, config.checkpoint)
    if images is not None:
        record = None if job.succession is None else job.succession.record
        images.keep_only(
            record.image if record is not None else "", holds_state=job.carried is not None,
            step=state.position.step - 1,
        )  # fmt: skip
    before = job.carried.saver if job.carried is not None else None
    saver = Saver(
        manager, config.checkpoint, provenance, replica, sharing=job.directory_group, images=images, before=before
    )  # fmt: skip
    undo.callback(saver.close)
    if "meters" in state.resets:
        manager.keep_best_until(state.resets["meters"])
    return Start(FirstState(state, provenance, parts), saver, inherited, beginning)


def build_feed(job: RankJob, start: FirstState, sizes: MicroBatchSizes, undo: ExitStack) -> Feed:
    """The plan of the steps, the loader of this rank's part of them, and the share policy."""
    config, rank, layout, carried = job.config, job.group.rank, job.layout, job.carried
    turns = weights_by_slot(config.distributed, layout.of_leaders(job.slots_of_ranks), idle=layout.idle)
    is_balanced = config.distributed.balance == "auto" and len(layout.busy) > 1
    by_rank = job.succession.record.costs if job.succession is not None else ()
    costs = layout.of_leaders(by_rank) if by_rank else ()
    table = complete_costs(costs) if is_balanced else None
    if table is not None:
        table = tuple(NOTHING if at in layout.idle else one for at, one in enumerate(table))
    weights = turn_of(start.state.position.step, turns)
    assign = assigner(table) if table is not None else assigner_by(weights)
    known = start.provenance.parts
    shards = shards_of(known, layout.of_leaders(start.parts)) if start.parts and known else None
    is_last = job.succession is not None and (
        job.succession.record.is_last or (shards is not None and bool(shards.lost))
    )
    planner = planner_of(config, job.material, start.provenance.batch, assign, shards)
    is_first_measured = (is_balanced or sizes.is_learning) and not sizes.is_fixed and carried is None
    if batch_norms(job.material.model):
        is_first_measured = False  # batch norm fails on a micro-batch of one sample
    if job.material.divided is not None:
        is_first_measured = False  # a rank that joins would cut the share in another way than its peers
    loader = StepLoader(
        job.material.source(job.material.train), planner, start.state.position,
        group=layout.group_of(rank), cap=sizes.cap, first_cap=sizes.first() if is_first_measured else None,
        # workers would at once fetch steps that are never trained, perhaps of data that are gone
        num_workers=0 if is_last else _num_workers(config.data.num_workers, job.material),
    )  # fmt: skip
    undo.callback(loader.close)
    at_once, meter = functools.partial(_most_work_at_once, planner, sizes), carried.meter if carried else None
    pace: SharePolicy = FixedShares(weights, meter=meter, at_once=at_once)
    if len(turns) > 1:
        pace = AlternatingShares(turns, planner, loader, meter=meter, at_once=at_once)
    elif is_balanced:
        pace = MeasuredShares(
            planner, loader, rank=rank, layout=layout, meter=meter, costs=costs, at_once=at_once,
        )  # fmt: skip
    return Feed(StepFeed(planner, loader, pace, layout), shards, is_last)


def build_reports(
    job: RankJob, replica: Replica, start: Start, feed: Feed, validators: list[Validator], undo: ExitStack
) -> Reports:  # fmt: skip
    """Build what runs after each step: status, validation, saves, the comparison of replicas. Collective."""
    config, planner = job.config, feed.steps.planner
    unit = 0 if planner.lengths is not None else planner.unit
    is_throttled = any(factor != 1 for factor in config.distributed.throttle_factors().values())
    is_arranged = config.distributed.balance != "auto" or is_throttled or feed.shards is not None
    setting = AdviceSetting(str(config.checkpoint.save_dir), unit, is_arranged)
    run_status, device = RunStatus(setting), job.material.device
    status = StatusFiles(
        job.directory, job.directory_group, device=str(device), slots=job.slots_of_ranks, run=run_status
    )  # fmt: skip
    replicas, every = None, config.distributed.check_replicas_every
    if every and job.group.world_size > 1:
        replicas = ReplicaCheck(replica, job.group, job.metrics, every=every, kind=kind_of(device))
    most = config.optimization.max_skipped_steps
    watch = StepWatch(
        job.material.terms, job.metrics, rank=job.group.rank, most=most, group_of=feed.steps.layout.group_of,
        beside=job.material.terms_of_no_loss,
    )  # fmt: skip
    hooks = TaskHooks(job.material.task, replica.task_state)
    boundary = AfterStep(
        config=config.validation, validators=validators, saver=start.saver, metrics=job.metrics, status=status,
        replicas=replicas, watch=watch, hooks=hooks,
    )  # fmt: skip
    if job.following is not None:
        boundary.shadows = ShadowFeed(
            job.following, replica, job.group, lineage=start.state.lineage, describe=start.saver.record_of,
            facts=start.saver.facts, watches_task=hooks.is_used,
        )  # fmt: skip
        undo.callback(boundary.close)
    return Reports(run_status, status, replicas, boundary)


def build_controller(
    job: RankJob, replica: Replica, start: FirstState, feed: Feed, boundary: Boundary, sizes: MicroBatchSizes
) -> Controller:
    """One training step, and the loop."""
    config, material, loop = job.config, job.material, job.material.own_loop
    name = f"rank {job.own_slot} on {socket.gethostname()}"
    computer = ShareComputer(
        material.task, replica, terms=material.terms,
        on=ComputeDevice(material.device, material.precision, name, material.offload),
        sizes=sizes, seed=config.task.seed,
        throttle=Throttle(config.distributed.throttle_factors().get(job.own_slot, 1.0)),
        # of ranks that divide a model none has the whole gradient of a micro-batch
        noise_scale_every=config.optimization.noise_scale_every if material.divided is None else 0,
    )  # fmt: skip
    return Controller(
        computer, job.group, feed=feed.steps, boundary=boundary, state=start.state,
        recipe=Recipe(
            config.optimization, _schedule(job, start, feed) if loop is None else None,
            late_counts={} if loop is None else loop.late_counts,
            clip_epsilon=0.0 if loop is None else loop.clip_epsilon,
        ),
        context=RankContext(
            _memory_of(material.device), job.wish, config.distributed.step_deadline,
            driver_deadline_s=0.0 if loop is None else loop.deadline_s,
        ),
    )  # fmt: skip


def begin(job: RankJob, start: Start, reports: Reports, controller: Controller) -> None:
    """Record this start in the run directory, now that no check can fail any more. Collective."""
    beginning, inherited = start.beginning, start.inherited
    if beginning is not None and not beginning.is_own and controller.has_ended():
        raise nothing_to_do(job.config.checkpoint, start.state)
    if beginning is not None:
        if changes(beginning.loaded.state.get("recipe", {}), start.provenance.recipe):
            job.metrics.goes_back(start.state.position.step - 1)
        begin_from(beginning, job.directory, start.saver, job.directory_group, metrics=job.metrics)
    if inherited is not None:
        start.saver.last_step, start.saver.best = inherited.last_saved, inherited.best
        job.metrics.complete(inherited.rows, step=start.state.position.step - 1)
        reports.boundary.take_over(inherited.owed, start.state, inherited.due)
    else:
        start.saver.best = start.state.best
    if reports.replicas is not None and job.is_first:
        controller.replica.reducer.gather()
        reports.replicas.check(start.state.position.step - 1, (1,) * job.group.world_size)


def announce(job: RankJob, start: Start, feed: Feed, reports: Reports, controller: Controller) -> None:
    """Log the task, the shares and the point where training begins."""
    batch, state = start.provenance.batch, start.state
    total = _total_steps(job.config, feed.steps.planner.n, batch, state)
    reports.run_status.total_steps = total
    job.metrics.set_total(total)
    reports.status.write(0.0, force=True, step=state.position.step - 1, state="start" if job.is_first else "train")
    if job.is_first or job.carried is None:
        say_what_runs(controller, job.material, reports.status.names)
    if feed.shards is not None and job.group.rank == 0:
        say_what_holds(feed.shards, job.layout.of_leaders(job.slots_of_ranks), has_begun=not job.is_first)
    if job.is_first:
        course = Course(feed.steps.planner.n, state.position, state.updates, total)
        say_what_the_batch_means(job.config.optimization, batch, course, start.beginning)
        is_resumed = start.beginning is not None
        for sentence in horizon.in_words(job.config.optimization, state, total, is_resumed=is_resumed):
            logger.info(sentence)
    if job.config.data.unit_size is None and job.is_first:
        warn_of_batch_norm(controller)
    if start.beginning is None and job.is_first and job.group.rank == 0:
        log_again(job.material.start_notes)
    if job.config.checkpoint.no_save and job.is_first and job.group.rank == 0:
        makes_images = job.config.checkpoint.memory_interval_updates != 0
        warn_of_no_save(controller.replica.owned, controller.group, makes_images=makes_images)
    if job.material.trial.carried and job.is_first and job.group.rank == 0:
        warn_of_carried_state(job.material.trial.carried)


# Helpers of the builders


def _build_optimizer(config: Config, material: LoadedTask) -> torch.optim.Optimizer:
    """The optimizer of the task, else the one that --optimizer names."""
    groups = parameter_groups(material.model, config.optimization)
    source = f"{type(material.task).__name__}.build_optimizer"
    with nullcontext() if material.fill is None else RefusingNumbers(material.model, source):
        built: Any = material.task.build_optimizer(groups)
        if built is None:
            source = config.optimization.optimizer
            built = registry.find_optimizer(source)(groups, config.optimization, config.extras.get("optimizer"))
    if isinstance(built, torch.optim.Optimizer):
        return built
    if isinstance(built, (list, tuple)):
        raise TaskError(
            f"{source} returned {len(built)} optimizers in a {type(built).__name__}: expected one. Give one optimizer"
            " parameter groups with settings of their own, or take turns by terms whose count is 0 in the other's turn"
        )
    kind = type(built)
    raise TaskError(f"{source} returned a {kind.__module__}.{kind.__qualname__}: expected a torch.optim.Optimizer")


def global_batch(config: DataConfig, group: RowTransport, layout: Layout) -> GlobalBatch:
    """The global batch the options ask for; collective, since --batch-size may differ from node to node."""
    rows = group.all_gather_rows(np.array([config.max_sentences or 0, config.max_tokens or 0], np.int64))
    if config.global_batch_size is not None:
        return GlobalBatch(config.global_batch_size)
    busy = [layout.leader_of(number) for number in layout.busy]
    samples, tokens = (int(total) for total in rows[busy].sum(axis=0))
    if not samples and not tokens:
        raise ConfigError(
            "the size of a step is not given: say --batch-size N (samples of a rank's micro-batch), --max-tokens N,"
            " or --global-batch-size N (samples of a step over all ranks)"
        )
    return GlobalBatch(samples or None, tokens or None, config.update_freq)


def _memory_of(device: torch.device) -> Callable[[], tuple[int, int]]:
    """Returns a function that gives the bytes in use, and the limit as it was at the start."""
    limit = limit_bytes(device)
    return lambda: (in_use_bytes(device), limit)


def _most_work_at_once(planner: Planner, sizes: MicroBatchSizes) -> AtOnce | None:
    """A micro-batch's cap in the unit in which the work of a step is divided; None for a whole share."""
    cap = sizes.cap
    if planner.unit > 1:
        return AtOnce(1)
    if planner.lengths is not None:
        return AtOnce(cap.tokens, is_filled=False) if cap.tokens else None
    return AtOnce(most) if (most := cap.most_samples) else None


def provenance_of(
    job: RankJob, replica: Replica, batch: GlobalBatch, parts: Sequence[tuple[str, int]] | None
) -> Provenance:  # fmt: skip
    """The properties of this run that determine its result."""
    config, material = job.config, job.material
    return Provenance(
        task=type(material.task).__name__,
        optimizer=type(replica.optimizer).__name__,
        seed=config.task.seed,
        split=config.data.train_subset,
        samples=len(material.train) if parts is None else sum(samples for _, samples in set(parts)),
        curriculum=config.data.curriculum,
        precision=config.optimization.precision,
        batch=batch,
        unit_size=config.data.unit_size,
        shuffle_block=config.data.shuffle_block,
        vocabulary=getattr(material.train, "vocabulary_digest", None),
        lanes=None if (lanes := lanes_of(material.train)) is None else lanes.in_words(),
        parts=None if parts is None else text_of(parts),
        base=material.base,
        recipe=recipe_of(config.optimization, material.task, delayed_init=config.distributed.delayed_init),
    )


def _check_batch_of_join(config: Config, *, is_explicit: bool) -> None:
    """Raise ConfigError if the size of a step, and so the result, would depend on which nodes came first."""
    if config.distributed.join is not None and not is_explicit:
        raise ConfigError(
            "--join needs --global-batch-size N (samples of a step over all ranks) when a run begins: with"
            " --batch-size alone a step would be larger the more ranks came in time, and the result another"
        )


def override(optimizer: torch.optim.Optimizer, config: CheckpointConfig) -> None:
    """Apply --optimizer-overrides. Raises ConfigError for a setting that this optimizer does not have."""
    overrides = config.optimizer_override_values()
    unknown = sorted(set(overrides) - set(optimizer.defaults))
    if unknown:
        raise ConfigError(
            f"--optimizer-overrides: {type(optimizer).__name__} has no {', '.join(unknown)}; it has"
            f" {', '.join(sorted(optimizer.defaults))}"
        )
    for group in optimizer.param_groups:
        group.update(overrides)


def _num_workers(asked: int, material: LoadedTask) -> int:
    """At most one process for lanes: two would take turns, and each would read every lane of this rank."""
    number = asked if asked >= 0 else 2 if material.device.type == "cuda" else 0
    return number if lanes_of(material.train) is None else min(1, number)


def _schedule(job: RankJob, start: FirstState, feed: Feed) -> Callable[[int, int], float]:
    config, batch = job.config, start.provenance.batch
    total = _total_steps(config, feed.steps.planner.n, batch, start.state)
    options = horizon.settled(config.optimization, start.state, total)
    build = registry.find_lr_scheduler(options.lr_scheduler)
    schedule: Callable[[int, int], float] = build(options, config.extras.get("lr_scheduler"))
    return schedule if options.scale_lr == "none" else scaled(schedule, options, batch)


def _total_steps(config: Config, samples: int, batch: GlobalBatch, state: TrainingState) -> int | None:
    """The last step of the run as far as it is known beforehand; updates and epochs may be counted anew."""
    place, limits = state.position, []
    if config.optimization.max_update:
        limits.append(config.optimization.max_update - state.updates)
    if config.optimization.max_epoch:
        epochs = [
            steps_in_epoch(samples - (place.consumed if epoch == place.epoch else 0), batch, epoch)
            for epoch in range(place.epoch, config.optimization.max_epoch + 1)
        ]
        if None not in epochs:
            limits.append(sum(steps or 0 for steps in epochs))
    return place.step - 1 + min(limits) if limits else None


@contextmanager
def _patience(job: RankJob, group: Group) -> Iterator[None]:
    """Raise the group's deadline while peers read data or send the state."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in job.material.model.parameters())
    deadline_s = _START_DEADLINE_S if job.is_first else _NEXT_DEADLINE_S + 3 * size / _SLOWEST_NETWORK
    if job.material.own_loop is not None:  # a rank that joins waits for scripts between two steps
        deadline_s += job.material.own_loop.deadline_s
    before, group.deadline_s = group.deadline_s, deadline_s
    try:
        yield
    finally:
        group.deadline_s = before
