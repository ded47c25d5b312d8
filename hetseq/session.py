"""From a configuration to one rank that is ready to train: the only place where all components meet.

Read `build_session` downwards: material (task, data, model), what a step consists of, what was saved before, and the
controller over it all. Every rank runs it, in the same order, since some of it is collective.
"""

from __future__ import annotations

import functools
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hetseq import probe, registry
from hetseq.boundary import RunBoundary, StatusFiles
from hetseq.buffers import BufferKeeper
from hetseq.comm import AnyGroup
from hetseq.commit import Wish
from hetseq.config import CheckpointConfig, Config, DataConfig, ValidationConfig
from hetseq.controller import Controller, TrainingState
from hetseq.device_memo import DeviceMemo
from hetseq.errors import ConfigError, MissingSplitError
from hetseq.loader import Source, StepLoader, base_order, place_on, seed_everything
from hetseq.memory import in_use_bytes, limit_bytes
from hetseq.metrics import Metrics
from hetseq.micro_batches import MicroBatchSizes
from hetseq.optim import parameter_groups
from hetseq.pace import FixedPace, MeasuredPace, Pace, assigner_by
from hetseq.plan import Assign, GlobalBatch, Lengths, MicroBatchCap, Planner, steps_in_epoch
from hetseq.reduction import GradientReducer
from hetseq.replica import Replica, check_model, trained_parameters
from hetseq.replica_check import ReplicaCheck, ReplicasDiffer, kind_of
from hetseq.resuming import begin_from, choose_checkpoint, open_checkpoints, resume
from hetseq.run_directory import RunDirectory
from hetseq.saving import Provenance, Saver
from hetseq.share import ShareComputer
from hetseq.sharing import Sharing, everything_shared, send_tensor
from hetseq.task import Task, build_model, collater_of, counts_of, lengths_of, load_split, make_task
from hetseq.throttle import Throttle
from hetseq.validation import Validator

logger = logging.getLogger(__name__)

_START_DEADLINE_S = 1800.0  # data may take minutes to read; a rank that dies meanwhile is seen by its launcher
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_MIB = 1 << 20


@dataclass
class Session:
    """A rank that is ready to train."""

    controller: Controller
    saver: Saver
    status: StatusFiles
    boundary: RunBoundary

    @property
    def last_step(self) -> int:
        return self.controller.state.position.step - 1

    def train(self) -> bool:
        """To the end (True), or until a rank was asked to stop (False). Collective; raises what ended it on all ranks.

        Where replicas differ, a checkpoint under way is waited for: it was begun when they were equal.
        """
        try:
            has_ended = self.controller.fit()
        except ReplicasDiffer:
            self.boundary.finish()
            raise
        self.status.write(0.0, force=True, step=self.last_step, state="done" if has_ended else "stopped")
        return has_ended

    def close(self) -> None:
        self.saver.close()
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
) -> Session:
    """Build what one rank needs; collective. Raises HetSeqError for whatever cannot be meant or read.

    `sharing` says which ranks use `directory` together with this one (default: all of them).
    """
    device, sharing = material.device, sharing or everything_shared(group)
    with _patience(group), _patience(sharing.group):
        replica = _build_replica(config, material, group)
        weights_of_ranks = _weights_of_ranks(config, group.world_size)
        validators = make_validators(config, material)
        _check_best_metric(config.validation, validators, material)

        manager = open_checkpoints(config.checkpoint, directory, sharing.group)
        asked = global_batch(config.data, group)
        provenance = _provenance(config, material, replica, asked)
        beginning, state = choose_checkpoint(manager, config.checkpoint, directory, sharing), TrainingState()
        is_explicit = config.data.global_batch_size is not None
        if beginning is not None:
            state, provenance = resume(beginning, config.checkpoint, replica, provenance, is_explicit_batch=is_explicit)
        if beginning is None or (config.checkpoint.reset_dataloader and provenance.batch == asked):
            _check_batch_of_join(config, is_explicit=is_explicit)
        if beginning is None:
            _begin_alike(material.model, group)
        _override(replica.optimizer, config.checkpoint)
        saver = Saver(
            manager, config.checkpoint, provenance, replica, sharing=sharing, generation=group.generation
        )  # fmt: skip

        planner = _planner(config, material.train, provenance.batch, assigner_by(weights_of_ranks))
        sizes = _micro_batch_sizes(config.data, device, DeviceMemo(directory, device))
        is_balanced = config.distributed.balance == "auto" and group.world_size > 1
        is_first_measured = (is_balanced or sizes.is_learning) and not sizes.is_fixed
        if _batch_norms(material.model):
            is_first_measured = False  # which fails on a micro-batch of one sample
        loader = StepLoader(
            material.source(material.train), planner, state.position, rank=group.rank, cap=sizes.cap,
            first_cap=sizes.first() if is_first_measured else None,
            num_workers=_num_workers(config.data.num_workers, device),
        )  # fmt: skip
        status = StatusFiles(directory, sharing, device=str(device))
        replicas = _replica_check(config, replica, group, metrics, device)
        boundary = RunBoundary(
            config=config.validation, validators=validators, saver=saver, metrics=metrics, status=status,
            replicas=replicas,
        )  # fmt: skip
        weights = tuple(float(material.task.term_weights.get(term, 1.0)) for term in material.terms)
        computer = ShareComputer(
            material.task, replica, terms=material.terms, weights=weights, seed=config.task.seed, sizes=sizes,
            device=device, name=f"rank {group.rank} on {socket.gethostname()}",
            throttle=Throttle(config.distributed.throttle_factors().get(group.rank, 1.0)),
        )  # fmt: skip
        at_once = functools.partial(_most_work_at_once, planner, sizes)
        pace: Pace = FixedPace(weights_of_ranks, micro_batch=at_once)
        if is_balanced:
            pace = MeasuredPace(planner, loader, rank=group.rank, world_size=group.world_size, micro_batch=at_once)
        controller = Controller(
            computer=computer, group=group, planner=planner, loader=loader, pace=pace, schedule=_schedule(config),
            config=config.optimization, boundary=boundary, terms=material.terms, weights=weights, state=state,
            memory=_memory_of(device), wish=wish, step_deadline_s=config.distributed.step_deadline,
        )  # fmt: skip
        # Only now, when nothing is left to refuse, does the run directory learn of this start.
        if beginning is not None:
            begin_from(beginning, directory, saver, sharing, metrics=metrics)
        if replicas is not None:
            replicas.check(state.position.step - 1, (1,) * group.world_size)
    metrics.set_total(_total_steps(config, len(material.train), provenance.batch))
    status.write(0.0, force=True, step=state.position.step - 1, state="start")
    _say_what_runs(controller, material)
    if config.data.unit_size is None:
        _warn_of_batch_norm(controller)
    return Session(controller, saver, status, boundary)


def _replica_check(
    config: Config, replica: Replica, group: AnyGroup, metrics: Metrics, device: torch.device
) -> ReplicaCheck | None:
    """What compares the replicas; None where there is one, or with --check-replicas-every 0. Collective."""
    every = config.distributed.check_replicas_every
    if not every or group.world_size == 1:
        return None
    return ReplicaCheck(replica, group, metrics, every=every, kind=kind_of(device))


@dataclass(frozen=True)
class Material:
    """The user's part of a run on this rank."""

    task: Task
    train: Any
    valid: dict[str, Any]  # by split
    model: torch.nn.Module
    terms: tuple[str, ...]
    place: Callable[[Any], Any]
    seed: int
    device: torch.device

    def source(self, dataset: Any) -> Source:
        def count(sample: Any, size: int) -> tuple[float, ...]:
            counts = counts_of(self.task, sample, size)
            if set(counts) != set(self.terms):
                raise probe.changed_terms(self.task, counts, self.terms)
            return tuple(counts[term] for term in self.terms)

        collate = collater_of(self.task, dataset)
        return Source(dataset, collate, count, self.place, len(self.terms), self.seed, self.device.type == "cuda")


def load_material(config: Config, device: torch.device, task: Task | None = None) -> Material:
    """The task, its data and its model for this rank; every rank calls it, without a collective. Raises HetSeqError."""
    dtype, seed = _DTYPES[config.optimization.precision], config.task.seed
    task = task or make_task(registry.find_task(config.task.task, user_dir=config.task.user_dir), config)
    train = load_split(task, config.data.train_subset)
    valid = {} if config.validation.disable_validation else _validation_splits(task, config.data)
    place = place_on(device, dtype)
    collate = collater_of(task, train)
    terms = probe.find_terms(task, train, collate)
    seed_everything(seed)
    model = build_model(task)
    check_model(model)
    model.to(device, dtype)
    probe.check_loss(task, model, train, collate=collate, place=place, terms=terms, seed=seed)
    return Material(task, train, valid, model, terms, place, seed, device)


def _validation_splits(task: Task, config: DataConfig) -> dict[str, Any]:
    """The splits of --valid-subset; the default one may be absent, a given one may not."""
    splits = {}
    for name in config.valid_subsets:
        try:
            splits[name] = load_split(task, name)
        except MissingSplitError as error:
            if config.valid_subset != DataConfig.valid_subset:
                raise
            logger.info("no validation: the data have no split %r (%s)", name, error)
    return splits


def _build_replica(config: Config, material: Material, group: AnyGroup) -> Replica:
    parameters = [parameter for _, parameter in trained_parameters(material.model)]
    if not parameters:
        raise ConfigError(
            f"the model of {type(material.task).__name__} has no parameter to train: expected at least one"
        )
    groups = parameter_groups(material.model, config.optimization)
    optimizer = material.task.build_optimizer(groups)
    if optimizer is None:
        build = registry.find_optimizer(config.optimization.optimizer)
        optimizer = build(groups, config.optimization, config.extras.get("optimizer"))
    bucket_bytes = int(config.distributed.bucket_cap_mb * _MIB)
    reducer = GradientReducer(parameters, group, bucket_bytes=bucket_bytes)
    return Replica(material.model, optimizer, reducer, BufferKeeper(material.model, group))


def _weights_of_ranks(config: Config, world_size: int) -> tuple[float, ...]:
    """What shares are in proportion to: the fixed weights, or equal ones, which `auto` begins with."""
    config.distributed.check_world(world_size)
    return config.distributed.balance_weights() or (1.0,) * world_size


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


def _most_work_at_once(planner: Planner, sizes: MicroBatchSizes) -> int | None:
    """A micro-batch's cap in the unit in which the work of a step is divided; None for a whole share."""
    if planner.unit > 1:
        return 1
    return sizes.cap.tokens if planner.lengths is not None else sizes.cap.samples


def _provenance(config: Config, material: Material, replica: Replica, batch: GlobalBatch) -> Provenance:
    return Provenance(
        task=type(material.task).__name__,
        optimizer=type(replica.optimizer).__name__,
        seed=config.task.seed,
        split=config.data.train_subset,
        samples=len(material.train),
        curriculum=config.data.curriculum,
        precision=config.optimization.precision,
        batch=batch,
        unit_size=config.data.unit_size,
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


def _planner(config: Config, dataset: Any, batch: GlobalBatch, assign: Assign) -> Planner:
    counts_tokens = config.data.max_tokens or batch.tokens
    lengths = _needed_lengths(dataset, "use --max-sentences") if counts_tokens else None
    _check_longest(dataset, config.data.max_tokens)
    return Planner(
        len(dataset), config.task.seed, batch, assign, config.data.curriculum, lengths, config.data.unit_size or 1
    )


def _check_longest(dataset: Any, max_tokens: int | None) -> None:
    """Raise ConfigError for a sample that is longer than a micro-batch of this node may be.

    Only where the lengths are at hand; asking a data set for each would take as long as reading it.
    """
    if max_tokens is None or not hasattr(dataset, "lengths"):
        return
    lengths = np.asarray(dataset.lengths)
    longest = int(lengths.argmax())
    if lengths[longest] > max_tokens:
        raise ConfigError(
            f"--max-tokens {max_tokens} does not hold sample {longest} of the training data, which has"
            f" {lengths[longest]} tokens: give at least so many, or shorten the samples"
        )


def _needed_lengths(dataset: Any, remedy: str) -> Lengths:
    """The lengths of a data set whose batches are counted in tokens. Raises ConfigError where it has none."""
    lengths = _lengths_by_place(dataset)
    if lengths is None:
        raise ConfigError(
            f"--max-tokens needs the length of every sample, but {type(dataset).__name__} has neither `lengths` nor"
            f" `num_tokens(index)`: give it one of them, or {remedy}"
        )
    return lengths


def _lengths_by_place(dataset: Any) -> Lengths | None:
    """Tokens of samples by their place in the data set's listed order, which is what a plan knows of them."""
    lengths, base = lengths_of(dataset), base_order(dataset)
    if lengths is None or base is None:
        return lengths
    return lambda places: lengths(base[places])


def _num_workers(asked: int, device: torch.device) -> int:
    return asked if asked >= 0 else 2 if device.type == "cuda" else 0


def make_validators(config: Config, material: Material) -> list[Validator]:
    """One validator per validation split, in the order of --valid-subset."""
    samples = config.validation.max_sentences_valid or config.data.max_sentences
    tokens = config.validation.max_tokens_valid or config.data.max_tokens
    if not samples and not tokens:
        samples = config.data.global_batch_size
    weights = tuple(float(material.task.term_weights.get(term, 1.0)) for term in material.terms)
    validators = []
    for name, dataset in material.valid.items():
        lengths = _lengths_by_place(dataset) if tokens and samples else None
        if tokens and not samples:
            lengths = _needed_lengths(dataset, "add --max-sentences-valid")
        cap = MicroBatchCap(samples, tokens if lengths is not None else None)
        validators.append(Validator(name, material.source(dataset), cap, lengths, material.terms, weights))
    return validators


def _check_best_metric(config: ValidationConfig, validators: list[Validator], material: Material) -> None:
    """Raise ConfigError for a --best-checkpoint-metric that validation will not give, rather than after an epoch."""
    name = config.best_checkpoint_metric
    if not validators or name == "loss":
        return
    names = validators[0].names(material.task, material.model)
    if name not in names:
        raise ConfigError(f"--best-checkpoint-metric {name}: validation gives {', '.join(names)}; name one of them")


def _schedule(config: Config) -> Callable[[int, int], float]:
    build = registry.find_lr_scheduler(config.optimization.lr_scheduler)
    schedule: Callable[[int, int], float] = build(config.optimization, config.extras.get("lr_scheduler"))
    return schedule


def _total_steps(config: Config, samples: int, batch: GlobalBatch) -> int | None:
    """Steps of the whole run as far as they are known beforehand."""
    limits = [config.optimization.max_update] if config.optimization.max_update else []
    if config.optimization.max_epoch:
        epochs = [steps_in_epoch(samples, batch, epoch) for epoch in range(1, config.optimization.max_epoch + 1)]
        if None not in epochs:
            limits.append(sum(steps or 0 for steps in epochs))
    return min(limits, default=None)


def _say_what_runs(controller: Controller, material: Material) -> None:
    parameters = sum(parameter.numel() for parameter in material.model.parameters())
    plan = controller.planner.plan(controller.state.position)
    logger.info(
        "task %s: %s training samples, %s parameters", type(material.task).__name__, f"{len(material.train):,}",
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


def _batch_norms(model: torch.nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules() if isinstance(module, _BatchNorm)}


def _warn_of_batch_norm(controller: Controller) -> None:
    """The one common layer whose result depends on how a step is cut into micro-batches."""
    kinds = _batch_norms(controller.replica.model)
    if kinds and controller.group.rank == 0:
        logger.warning(
            "%s normalises over each micro-batch, so the curve depends on ranks, shares and --max-sentences: LayerNorm"
            " or GroupNorm keep the promise of one curve on any machines, and --unit-size N does for any layer",
            ", ".join(sorted(kinds)),
        )


@contextmanager
def _patience(group: AnyGroup) -> Iterator[None]:
    before, group.deadline_s = group.deadline_s, _START_DEADLINE_S
    try:
        yield
    finally:
        group.deadline_s = before
