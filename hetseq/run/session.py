"""From a configuration to one rank that is ready to train: the only place where all components meet.

Read `build_session` downwards: material (task, data, model), what a step consists of, what was saved before, and the
controller over it all. Every rank runs it, in the same order, since some of it is collective.
"""

from __future__ import annotations

import functools
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from hetseq import registry
from hetseq.balance.cost_meter import AtOnce, complete_costs
from hetseq.cluster.membership.decide import Update
from hetseq.cluster.membership.step_commit import Wish
from hetseq.comm.directory_groups import Sharing, everything_shared, send_tensor
from hetseq.comm.group import AnyGroup
from hetseq.config.sections import CheckpointConfig, Config, DataConfig, OptimizationConfig
from hetseq.data.loader import StepLoader
from hetseq.data.plan import GlobalBatch, MicroBatchCap, Planner, steps_in_epoch
from hetseq.errors import CheckpointMismatch, ConfigError, DisagreementError
from hetseq.monitor.advice import Setting
from hetseq.monitor.metrics import Metrics
from hetseq.monitor.status import RunStatus
from hetseq.parallel.buffers import BufferKeeper
from hetseq.parallel.gradient_sync import gradients_of
from hetseq.parallel.replica import Replica, batch_norms, trained_parameters
from hetseq.run.after_step import RunBoundary, StatusFiles
from hetseq.run.build import check_best_metric, make_validators, planner_of, weights_by_slot
from hetseq.run.checkpointing import Provenance, Saver, saved_batch
from hetseq.run.data_by_host import parts_of_ranks, say_what_holds, shards_of, text_of
from hetseq.run.loaded_task import Material
from hetseq.run.regroup import Carried, Due, Inherited, Succession, hand_over
from hetseq.run.resume import Beginning, Target, begin_from, choose_checkpoint, open_checkpoints, resume
from hetseq.run_directory import RunDirectory
from hetseq.system.device_memory import in_use_bytes, limit_bytes
from hetseq.training.controller import Controller, Halt, TrainingState
from hetseq.training.device_memo import DeviceMemo
from hetseq.training.lr_scaling import Course, advice, scale_in_words, scaled
from hetseq.training.micro_batch_size import MicroBatchSizes
from hetseq.training.optim import parameter_groups
from hetseq.training.replica_check import ReplicaCheck, ReplicasDiffer, kind_of
from hetseq.training.share import ShareComputer
from hetseq.training.share_policy import FixedPace, MeasuredPace, Pace, assigner, assigner_by
from hetseq.training.throttle import Throttle

logger = logging.getLogger(__name__)

_START_DEADLINE_S = 1800.0  # data may take minutes to read; a rank that dies meanwhile is seen by its launcher
_NEXT_DEADLINE_S = 120.0  # for ranks that have everything but the state
_SLOWEST_NETWORK = 5e6  # bytes per second
_MIB = 1 << 20


@dataclass
class Session:
    """A rank that is ready to train in one generation of its run."""

    controller: Controller
    saver: Saver
    status: StatusFiles
    boundary: RunBoundary
    _provenance: Provenance
    _metrics: Metrics
    _is_last: bool = False  # nothing is trained in this generation
    _due: Due | None = None  # left over from the generation before
    _is_trusted: bool = True  # all ranks hold the same state
    _is_open: bool = True

    @property
    def last_step(self) -> int:
        return self.controller.state.position.step - 1

    def train(self) -> Halt:
        """To the end, or until a rank wishes for something else. Collective; raises what ended it on all ranks.

        Where replicas differ, a checkpoint under way is waited for: it was begun when they were equal.
        """
        try:
            self._make_up()
            halt = self._stop_here() if self._is_last else self.controller.fit()
        except (ReplicasDiffer, DisagreementError) as error:
            self._is_trusted = False
            if isinstance(error, ReplicasDiffer):
                self.boundary.finish()
            raise
        if halt is not Halt.CHANGING:
            word = {Halt.ENDED: "done", Halt.STOPPED: "stopped", Halt.LEAVING: "gone"}[halt]
            self.status.write(0.0, force=True, step=self.last_step, state=word)
        return halt

    def _make_up(self) -> None:
        """Whatever followed from the last step, and was interrupted."""
        if self._due is not None:
            controller = self.controller
            with controller.patience_for(samples=0):
                self.boundary.make_up(controller, self._due, ends_run=controller.has_ended())
            self._due = None

    def _stop_here(self) -> Halt:
        """Save the state as it is: too few ranks are left to go on."""
        if self.controller.has_ended():
            return Halt.ENDED
        self.boundary.save_now(self.controller)
        return Halt.STOPPED

    def carry(self, last: Update | None) -> Carried:
        """What is kept for the next generation, once this one is over; `last` is the update that made its base.

        The session is closed by it.
        """
        controller, unsettled = self.controller, self.controller.unsettled
        controller.catch_up(last)
        due = self._due
        if controller.unsettled is not None:
            due = self.boundary.due(controller, controller.unsettled)
            if controller.unsettled is not unsettled:
                self._metrics.step(due.row)
        carried = Carried(
            controller.replica.optimizer, controller.state, self._provenance, self.saver, controller.pace.meter, due,
            self._metrics.last_rows(),
        )  # fmt: skip
        self.close()
        return carried

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        # else what was trained is in files now; parts of states that differ are nothing to go on from
        self.close(has_failed=self._is_trusted and (kind is not None or self.saver.last_error is not None))

    def suspend(self) -> None:
        """The generation is over: end what works beside the training thread. The model stays as it is."""
        self.saver.close(is_hasty=True)
        self.controller.loader.close()

    def close(self, *, has_failed: bool = False) -> None:
        """Give everything back but model and optimizer; may be called twice."""
        if self._is_open:
            self._is_open = False
            self.saver.close(has_failed=has_failed)
            self.controller.loader.close()
            self.controller.replica.reducer.close()


def build_session(
    config: Config,
    directory: RunDirectory,
    group: AnyGroup,
    material: Material,
    *,
    metrics: Metrics,
    wish: Callable[[], Wish] = lambda: Wish.NONE,
    sharing: Sharing | None = None,
    slots: tuple[int, ...] | None = None,
    succession: Succession | None = None,
) -> Session:
    """Build what one rank needs; collective. Raises HetSeqError for whatever cannot be meant or read.

    `sharing` says which ranks use `directory` together with this one (default: all of them), `slots` what each rank is
    called (default: by its number). With a `succession` the state comes from the generation before, else from the
    newest checkpoint if there is one.
    """
    device, sharing = material.device, sharing or everything_shared(group)
    slots = slots or tuple(range(group.world_size))
    carried, is_first = succession.carried if succession else None, succession is None
    with ExitStack() as undo, _patience(group, is_first, material), _patience(sharing.group, is_first, material):
        replica = _build_replica(config, material, group, carried.optimizer if carried else None)
        undo.callback(replica.reducer.close)
        weights_of_ranks = weights_by_slot(config.distributed, slots)
        sizes = _micro_batch_sizes(config.data, device, DeviceMemo(directory, device))
        validators = make_validators(config, material, sizes)
        check_best_metric(config.validation, validators, material)

        asked = global_batch(config.data, group)
        parts = parts_of_ranks(material, group) if config.data.data_by_host else None
        provenance = carried.provenance if carried else _provenance(config, material, replica, asked, parts)
        inherited: Inherited | None = None
        beginning: Beginning | None = None
        if succession is not None:
            inherited = hand_over(succession, replica, provenance, sharing)
            provenance, state = inherited.provenance, inherited.state
            manager = open_checkpoints(config.checkpoint, directory, sharing.group, known=inherited.known)
        else:
            manager = open_checkpoints(config.checkpoint, directory, sharing.group)
            is_explicit, state = config.data.global_batch_size is not None, TrainingState()
            target = Target(replica, provenance, is_explicit)
            beginning = choose_checkpoint(manager, config.checkpoint, directory, sharing, target)
            if beginning is not None:
                state, provenance = resume(
                    beginning, config.checkpoint, replica, provenance, is_explicit_batch=is_explicit
                )  # fmt: skip
            if beginning is None or (config.checkpoint.reset_dataloader and provenance.batch == asked):
                _check_batch_of_join(config, is_explicit=is_explicit)
            if beginning is None:
                _begin_alike(material.model, group)
            _override(replica.optimizer, config.checkpoint)
        saver = Saver(
            manager, config.checkpoint, provenance, replica, sharing=sharing, generation=group.generation,
            before=carried.saver if carried else None,
        )  # fmt: skip
        undo.callback(saver.close)

        is_balanced = config.distributed.balance == "auto" and group.world_size > 1
        costs = succession.record.costs if succession else ()
        table = complete_costs(costs) if is_balanced else None
        assign = assigner(table) if table is not None else assigner_by(weights_of_ranks)
        shards = shards_of(provenance.parts, parts) if parts and provenance.parts else None
        is_last = succession is not None and (succession.record.is_last or (shards is not None and bool(shards.lost)))
        planner = planner_of(config, material.train, provenance.batch, assign, shards)
        is_first_measured = (is_balanced or sizes.is_learning) and not sizes.is_fixed and carried is None
        if batch_norms(material.model):
            is_first_measured = False  # which fails on a micro-batch of one sample
        loader = StepLoader(
            material.source(material.train), planner, state.position, rank=group.rank, cap=sizes.cap,
            first_cap=sizes.first() if is_first_measured else None,
            # they would begin at once to fetch steps that nobody trains, perhaps of data that are gone
            num_workers=0 if is_last else _num_workers(config.data.num_workers, device),
        )  # fmt: skip
        undo.callback(loader.close)
        unit = 0 if planner.lengths is not None else planner.unit
        told = RunStatus(Setting(str(config.checkpoint.save_dir), config.distributed.balance, unit, shards is not None))
        status = StatusFiles(directory, sharing, device=str(device), slots=slots, run=told)
        replicas = _replica_check(config, replica, group, metrics, device)
        boundary = RunBoundary(
            config=config.validation, validators=validators, saver=saver, metrics=metrics, status=status,
            replicas=replicas,
        )  # fmt: skip
        weights = tuple(float(material.task.term_weights.get(term, 1.0)) for term in material.terms)
        own_slot = slots[group.rank]
        computer = ShareComputer(
            material.task, replica, terms=material.terms, weights=weights, seed=config.task.seed, sizes=sizes,
            device=device, precision=material.precision, name=f"rank {own_slot} on {socket.gethostname()}",
            throttle=Throttle(config.distributed.throttle_factors().get(own_slot, 1.0)),
            noise_scale_every=config.optimization.noise_scale_every,
        )  # fmt: skip
        at_once, meter = functools.partial(_most_work_at_once, planner, sizes), carried.meter if carried else None
        pace: Pace = FixedPace(weights_of_ranks, meter=meter, at_once=at_once)
        if is_balanced:
            pace = MeasuredPace(
                planner, loader, rank=group.rank, world_size=group.world_size, meter=meter, costs=costs,
                at_once=at_once,
            )  # fmt: skip
        controller = Controller(
            computer=computer, group=group, planner=planner, loader=loader, pace=pace,
            schedule=_schedule(config, provenance.batch), config=config.optimization, boundary=boundary,
            terms=material.terms, weights=weights, state=state,
            memory=_memory_of(device), wish=wish, step_deadline_s=config.distributed.step_deadline,
        )  # fmt: skip
        if beginning is not None and not beginning.is_own and controller.has_ended():
            _refuse_to_do_nothing(config.checkpoint, state)
        # Only now, when nothing is left to refuse, does the run directory learn of this start.
        if beginning is not None:
            begin_from(beginning, directory, saver, sharing, metrics=metrics)
        if inherited is not None:
            saver.last_step, saver.is_owing = inherited.last_saved, inherited.owes
            metrics.complete(inherited.rows)
        if replicas is not None and is_first:
            replicas.check(state.position.step - 1, (1,) * group.world_size)
        undo.pop_all()
    told.total_steps = _total_steps(config, planner.n, provenance.batch, state)
    metrics.set_total(told.total_steps)
    status.write(0.0, force=True, step=state.position.step - 1, state="start" if is_first else "train")
    if is_first or carried is None:
        _say_what_runs(controller, material)
    if shards is not None and group.rank == 0:
        say_what_holds(shards, slots, has_begun=not is_first)
    if is_first:
        course = Course(planner.n, state.position, state.updates, told.total_steps)
        _say_what_the_batch_means(config.optimization, provenance.batch, course, beginning)
    if config.data.unit_size is None and is_first:
        _warn_of_batch_norm(controller)
    due = inherited.due if inherited is not None else None
    return Session(controller, saver, status, boundary, provenance, metrics, is_last, due)


def _replica_check(
    config: Config, replica: Replica, group: AnyGroup, metrics: Metrics, device: torch.device
) -> ReplicaCheck | None:
    """What compares the replicas; None where there is one, or with --check-replicas-every 0. Collective."""
    every = config.distributed.check_replicas_every
    if not every or group.world_size == 1:
        return None
    return ReplicaCheck(replica, group, metrics, every=every, kind=kind_of(device))


def _build_replica(
    config: Config, material: Material, group: AnyGroup, optimizer: torch.optim.Optimizer | None = None
) -> Replica:
    """The replica of this rank; with the `optimizer` of the generation before, if this rank has one."""
    parameters = [parameter for _, parameter in trained_parameters(material.model)]
    if not parameters:
        raise ConfigError(
            f"the model of {type(material.task).__name__} has no parameter to train: expected at least one"
        )
    if optimizer is None:
        groups = parameter_groups(material.model, config.optimization)
        optimizer = material.task.build_optimizer(groups)
        if optimizer is None:
            build = registry.find_optimizer(config.optimization.optimizer)
            optimizer = build(groups, config.optimization, config.extras.get("optimizer"))
    bucket_bytes = int(config.distributed.bucket_cap_mb * _MIB)
    is_wide = config.distributed.reduce_dtype is not None
    reducer = gradients_of(parameters, group, bucket_bytes=bucket_bytes, is_wide=is_wide)
    return Replica(material.model, optimizer, reducer, BufferKeeper(material.model, group))


def global_batch(config: DataConfig, group: AnyGroup) -> GlobalBatch:
    """The global batch the options ask for; collective, since --max-sentences may differ from node to node."""
    rows = group.all_gather_rows(np.array([config.max_sentences or 0, config.max_tokens or 0], np.int64))
    if config.global_batch_size is not None:
        return GlobalBatch(config.global_batch_size)
    samples, tokens = (int(total) for total in rows.sum(axis=0))
    if not samples and not tokens:
        raise ConfigError(
            "the size of a step is not given: say --max-sentences N (samples of a rank's micro-batch), --max-tokens N,"
            " or --global-batch-size N (samples of a step over all ranks)"
        )
    return GlobalBatch(samples or None, tokens or None, config.update_freq)


def _micro_batch_sizes(config: DataConfig, device: torch.device, memo: DeviceMemo) -> MicroBatchSizes:
    """The sizes that the options and earlier starts of this run leave to this rank."""
    if config.unit_size is not None:
        return MicroBatchSizes(MicroBatchCap(config.unit_size), is_fixed=True)  # which this node's own cap holds
    is_free = config.max_sentences is None and config.max_tokens is None
    most = memo.micro_batch() if is_free else config.max_sentences
    cap = MicroBatchCap(most, config.max_tokens, config.required_batch_size_multiple)
    is_learning = is_free and most is None and device.type == "cuda"
    return MicroBatchSizes(cap, is_learning=is_learning, remember=memo.remember if is_free else None)


def _memory_of(device: torch.device) -> Callable[[], tuple[int, int]]:
    """Gives the bytes in use, and the limit as it was at the start."""
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


def _provenance(
    config: Config, material: Material, replica: Replica, batch: GlobalBatch, parts: Sequence[tuple[str, int]] | None
) -> Provenance:
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
        parts=None if parts is None else text_of(parts),
    )


def _begin_alike(model: torch.nn.Module, group: AnyGroup) -> None:
    """Give every rank the parameters and buffers of rank zero: another CPU draws and rounds them a little otherwise."""
    if group.world_size == 1:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            carrier = tensor.detach().cpu().contiguous()
            send_tensor(group, carrier, source=0)
            tensor.copy_(carrier)


def _check_batch_of_join(config: Config, *, is_explicit: bool) -> None:
    """Raise ConfigError where the size of a step would depend on who came first, and so the result."""
    if config.distributed.join is not None and not is_explicit:
        raise ConfigError(
            "--join needs --global-batch-size N (samples of a step over all ranks) when a run begins: with"
            " --max-sentences alone a step would be larger the more ranks came in time, and the result another"
        )


def _override(optimizer: torch.optim.Optimizer, config: CheckpointConfig) -> None:
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


def _refuse_to_do_nothing(config: CheckpointConfig, state: TrainingState) -> None:
    """Raise CheckpointMismatch for a run that begins where another one ended, and would end there as well."""
    raise CheckpointMismatch(
        f"--restore-file {config.restore_file} has made {state.updates} updates and is in epoch {state.position.epoch},"
        " where this command would end before its first step: ask for more with --max-update or --max-epoch, or count"
        " updates anew with --reset-lr-scheduler and epochs with --reset-dataloader"
    )


def _num_workers(asked: int, device: torch.device) -> int:
    return asked if asked >= 0 else 2 if device.type == "cuda" else 0


def _schedule(config: Config, batch: GlobalBatch) -> Callable[[int, int], float]:
    build = registry.find_lr_scheduler(config.optimization.lr_scheduler)
    schedule: Callable[[int, int], float] = build(config.optimization, config.extras.get("lr_scheduler"))
    return schedule if config.optimization.scale_lr == "none" else scaled(schedule, config.optimization, batch)


def _total_steps(config: Config, samples: int, batch: GlobalBatch, state: TrainingState) -> int | None:
    """The last step of the run as far as it is known beforehand; updates and epochs may have been counted anew."""
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


def _say_what_runs(controller: Controller, material: Material) -> None:
    parameters = sum(parameter.numel() for parameter in material.model.parameters())
    plan = controller.planner.plan(controller.state.position)
    logger.info(
        "task %s: %s training samples, %s parameters", type(material.task).__name__, f"{controller.planner.n:,}",
        f"{parameters:,}",
    )  # fmt: skip
    logger.info(
        "%d rank%s (%s); the next step has %d samples, shares %s", controller.group.world_size,
        "" if controller.group.world_size == 1 else "s", material.device.type, plan.size,
        "+".join(map(str, plan.shares)),
    )  # fmt: skip
    work = controller.planner.work(plan.epoch, plan.start, plan.stop)
    if work < controller.group.world_size and controller.group.rank == 0:
        logger.warning(
            "a step has %d piece%s of work for %d ranks, so some have nothing to do: make the global batch larger%s",
            work, "" if work == 1 else "s", controller.group.world_size,
            ", or --unit-size smaller" if controller.planner.unit > 1 else "",
        )  # fmt: skip


def _say_what_the_batch_means(
    config: OptimizationConfig, batch: GlobalBatch, course: Course, beginning: Beginning | None
) -> None:
    """For the learning rate: what --scale-lr made of it, or would where steps were of another size before."""
    said = None
    if config.scale_lr != "none":
        said = scale_in_words(config, batch, course.epoch)
    elif beginning is not None:
        saved = beginning.loaded.state
        said = advice(config, batch, course, before=saved_batch(saved), epoch_before=saved["epoch"])
    if said is not None:
        logger.info(said)


def _warn_of_batch_norm(controller: Controller) -> None:
    """The one common layer whose result depends on how a step is cut into micro-batches."""
    kinds = batch_norms(controller.replica.model)
    if kinds and controller.group.rank == 0:
        logger.warning(
            "%s normalises over each micro-batch, so the curve depends on ranks, shares and --max-sentences: LayerNorm"
            " or GroupNorm keep the promise of one curve on any machines, and --unit-size N does for any layer",
            ", ".join(sorted(kinds)),
        )


@contextmanager
def _patience(group: AnyGroup, is_first: bool, material: Material) -> Iterator[None]:
    """Wait for peers that read data, or send the state."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in material.model.parameters())
    deadline_s = _START_DEADLINE_S if is_first else _NEXT_DEADLINE_S + 3 * size / _SLOWEST_NETWORK
    before, group.deadline_s = group.deadline_s, deadline_s
    try:
        yield
    finally:
        group.deadline_s = before
