"""From a configuration to one rank that is ready to train: the only place where all components meet.

Read `build_session` downwards: material (task, data, model), what a step consists of, what was saved before, and the
controller over it all. Every rank runs it, in the same order, since some of it is collective.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hetseq import probe, registry
from hetseq.boundary import RunBoundary
from hetseq.capacity import assign_shares
from hetseq.checkpoint import CheckpointManager, Loaded, Retention
from hetseq.comm import AnyGroup
from hetseq.commit import Wish
from hetseq.config import CheckpointConfig, Config, DataConfig, ValidationConfig
from hetseq.controller import Controller, TrainingState
from hetseq.errors import CheckpointMismatch, CheckpointRefused, ConfigError, MissingSplitError
from hetseq.loader import Source, StepLoader, base_order, place_on, seed_everything
from hetseq.metrics import Metrics
from hetseq.optim import parameter_groups
from hetseq.plan import GlobalBatch, Lengths, MicroBatchCap, Planner, steps_in_epoch
from hetseq.reduction import GradientReducer
from hetseq.replica import Replica, trained_parameters
from hetseq.run_directory import RunDirectory, StatusFile
from hetseq.saving import Provenance, Saver, choose_batch, parse_overrides, restore
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
    status: StatusFile
    about: dict[str, Any]

    @property
    def last_step(self) -> int:
        return self.controller.state.position.step - 1

    def train(self) -> bool:
        """To the end (True), or until a rank was asked to stop (False). Collective."""
        has_ended = self.controller.fit()
        self.status.write(0.0, force=True, step=self.last_step, state="done" if has_ended else "stopped", **self.about)
        return has_ended

    def close(self) -> None:
        self.controller.loader.close()
        self.controller.replica.reducer.close()


def build_session(
    config: Config,
    directory: RunDirectory,
    group: AnyGroup,
    *,
    device: torch.device,
    metrics: Metrics,
    wish: Callable[[], Wish] = lambda: Wish.NONE,
    task: Task | None = None,
) -> Session:
    """Build what one rank needs; collective. Raises HetSeqError for whatever cannot be meant or read."""
    with _patience(group):
        material = load_material(config, device, task)
        replica = _build_replica(config, material, group)
        assign = _assigner(config, group.world_size)
        validators = make_validators(config, material)
        _check_best_metric(config.validation, validators, material)

        manager = _open_checkpoints(config.checkpoint, directory, group)
        provenance = _provenance(config, material, replica, global_batch(config.data, group))
        loaded = _choose_checkpoint(manager, config.checkpoint, group)
        state, provenance = _resume(loaded, config, replica, provenance)
        saver = Saver(manager, config.checkpoint, provenance, replica, generation=group.generation)

        cap = MicroBatchCap(config.data.max_sentences, config.data.max_tokens, config.data.required_batch_size_multiple)
        planner = Planner(
            len(material.train), config.task.seed, provenance.batch, assign, config.data.curriculum,
            _needed_lengths(material.train, config.data, provenance.batch),
        )  # fmt: skip
        loader = StepLoader(
            material.source(material.train), planner, state.position, rank=group.rank, cap=cap,
            num_workers=_num_workers(config.data.num_workers, device),
        )  # fmt: skip
        status = StatusFile(directory.status / f"rank-{group.rank}.json")
        about = {"pid": os.getpid(), "node": socket.gethostname(), "device": str(device)}
        boundary = RunBoundary(
            config=config.validation, validators=validators, saver=saver, metrics=metrics, status=status, about=about
        )  # fmt: skip
        controller = Controller(
            task=material.task, replica=replica, group=group, planner=planner, loader=loader,
            schedule=_schedule(config), config=config.optimization, boundary=boundary, terms=material.terms,
            seed=config.task.seed, state=state, wish=wish, step_deadline_s=config.distributed.step_deadline,
            throttle=Throttle(config.distributed.throttle_factors().get(group.rank, 1.0)),
        )  # fmt: skip
    # Only now, when nothing is left to refuse, does the run directory learn of this start.
    if loaded is not None:
        saver.last_step = loaded.identity.step
        metrics.event("resume", step=loaded.identity.step, path=str(loaded.path), refused=loaded.skipped)
    metrics.set_total(_total_steps(config, len(material.train), provenance.batch))
    status.write(0.0, force=True, step=state.position.step - 1, state="start", **about)
    _say_what_runs(controller, material, device)
    return Session(controller, saver, status, about)


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
    pin_memory: bool

    def source(self, dataset: Any) -> Source:
        def count(sample: Any, size: int) -> tuple[float, ...]:
            counts = counts_of(self.task, sample, size)
            if set(counts) != set(self.terms):
                raise probe.changed_terms(self.task, counts, self.terms)
            return tuple(counts[term] for term in self.terms)

        collate = collater_of(self.task, dataset)
        return Source(dataset, collate, count, self.place, len(self.terms), self.seed, self.pin_memory)


def load_material(config: Config, device: torch.device, task: Task | None) -> Material:
    """The task, its data and its model for this rank; every rank calls it, without a collective. Raises HetSeqError."""
    dtype, seed = _DTYPES[config.optimization.precision], config.task.seed
    task = task or make_task(registry.find_task(config.task.task, user_dir=config.task.user_dir), config)
    train = load_split(task, config.data.train_subset)
    valid = {} if config.validation.disable_validation else _validation_splits(task, config.data)
    place = place_on(device, dtype)
    collate = collater_of(task, train)
    terms = probe.find_terms(task, train, collate)
    seed_everything(seed)
    model = build_model(task).to(device, dtype)
    probe.check_loss(task, model, train, collate=collate, place=place, terms=terms, seed=seed)
    return Material(task, train, valid, model, terms, place, seed, pin_memory=device.type == "cuda")


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
    return Replica(material.model, optimizer, GradientReducer(parameters, group, bucket_bytes=bucket_bytes))


def _assigner(config: Config, world_size: int) -> Callable[[int], tuple[int, ...]]:
    """Samples of a step -> shares by rank; remembered, since most steps have the same size."""
    weights = config.distributed.balance_weights() or (1.0,) * world_size
    config.distributed.check_world(world_size)
    return functools.lru_cache(maxsize=64)(functools.partial(assign_shares, weights=weights))


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


def _provenance(config: Config, material: Material, replica: Replica, batch: GlobalBatch) -> Provenance:
    return Provenance(
        task=type(material.task).__name__,
        optimizer=type(replica.optimizer).__name__,
        seed=config.task.seed,
        samples=len(material.train),
        precision=config.optimization.precision,
        batch=batch,
    )


def _open_checkpoints(config: CheckpointConfig, directory: RunDirectory, group: AnyGroup) -> CheckpointManager:
    retention = Retention(config.keep_interval_updates, config.keep_last_epochs)
    manager = CheckpointManager(directory.path, run_id=directory.run_id, group=group, retention=retention)
    manager.recover()
    return manager


def _choose_checkpoint(manager: CheckpointManager, config: CheckpointConfig, group: AnyGroup) -> Loaded | None:
    """What --restore-file means here. Going back within one run directory is refused: `latest` would be ambiguous."""
    which, newest_step = config.restore_file, _newest_step(manager, group)
    if which == "none":
        if newest_step:
            raise CheckpointMismatch(
                f"--restore-file none, but {config.save_dir} holds checkpoints up to step {newest_step}:"
                " begin anew in another --save-dir"
            )
        return None
    if which == CheckpointConfig.restore_file:
        return manager.load("latest")
    is_word = which in ("latest", "best") or which.isdigit()
    if newest_step and not is_word and os.path.isdir(which) and not _is_below(which, config.save_dir):
        logger.info("--restore-file %s was the beginning of this run, which has gone on since", which)
        return manager.load("latest")
    try:
        loaded = manager.load(which)
    except CheckpointRefused as error:
        raise CheckpointMismatch(f"--restore-file {which}: {error}") from None
    if loaded is not None and loaded.identity.step < newest_step:
        raise CheckpointMismatch(
            f"--restore-file {which} is step {loaded.identity.step}, but {config.save_dir} has gone on to step"
            f" {newest_step}: go back in another directory, --save-dir NEW --restore-file {loaded.path}"
        )
    return loaded


def _newest_step(manager: CheckpointManager, group: AnyGroup) -> int:
    """Step of the newest checkpoint, 0 if there is none, as rank zero sees it: others may see an older list."""
    newest = manager.latest() if group.rank == 0 else None
    row = np.array([newest.identity.step if newest is not None else 0], np.int64)
    return int(group.all_gather_rows(row)[0, 0])


def _is_below(path: str, folder: str) -> bool:
    inner, outer = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath([inner, outer]) == outer


def _has_begun(loaded: Loaded, config: CheckpointConfig) -> bool:
    """Whether this run once began from another one's checkpoint and now goes on from its own."""
    began_elsewhere = os.path.isdir(config.restore_file) and not _is_below(config.restore_file, config.save_dir)
    return began_elsewhere and _is_below(str(loaded.path), config.save_dir)


def _without_resets(config: CheckpointConfig) -> CheckpointConfig:
    """--reset-* were for the beginning: a job that is killed and put into the queue again must not begin twice."""
    return dataclasses.replace(
        config, reset_dataloader=False, reset_lr_scheduler=False, reset_meters=False, reset_optimizer=False
    )


def _resume(
    loaded: Loaded | None, config: Config, replica: Replica, provenance: Provenance
) -> tuple[TrainingState, Provenance]:
    """The state to train from, and the provenance with the global batch that holds from now on."""
    state = TrainingState()
    if loaded is not None:
        settings = _without_resets(config.checkpoint) if _has_begun(loaded, config.checkpoint) else config.checkpoint
        batch = choose_batch(
            loaded.state,
            provenance.batch,
            is_explicit=config.data.global_batch_size is not None,
            resets_data=settings.reset_dataloader,
        )
        provenance = dataclasses.replace(provenance, batch=batch)
        state = restore(loaded, replica, provenance, settings)
        logger.info("going on after step %d (%s)", loaded.identity.step, loaded.path)
    overrides = parse_overrides(config.checkpoint.optimizer_overrides)
    for group in replica.optimizer.param_groups:
        group.update(overrides)
    return state, provenance


def _needed_lengths(dataset: Any, config: DataConfig, batch: GlobalBatch) -> Lengths | None:
    if not config.max_tokens and not batch.tokens:
        return None
    lengths = _lengths_by_place(dataset)
    if lengths is None:
        raise ConfigError(
            f"--max-tokens needs the length of every sample, but {type(dataset).__name__} has neither `lengths` nor"
            " `num_tokens(index)`: give it one of them, or use --max-sentences"
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
    return [
        Validator(
            split=name,
            source=material.source(dataset),
            cap=MicroBatchCap(samples, tokens),
            lengths=_lengths_by_place(dataset) if tokens else None,
            terms=material.terms,
            weights=weights,
        )
        for name, dataset in material.valid.items()
    ]


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


def _say_what_runs(controller: Controller, material: Material, device: torch.device) -> None:
    parameters = sum(parameter.numel() for parameter in material.model.parameters())
    plan = controller.planner.plan(controller.state.position)
    logger.info(
        "task %s: %s training samples, %s parameters", type(material.task).__name__, f"{len(material.train):,}",
        f"{parameters:,}",
    )  # fmt: skip
    logger.info(
        "%d rank%s (%s); the next step has %d samples, shares %s", controller.group.world_size,
        "" if controller.group.world_size == 1 else "s", device.type, plan.size, "+".join(map(str, plan.shares)),
    )  # fmt: skip


@contextmanager
def _patience(group: AnyGroup) -> Iterator[None]:
    before, group.deadline_s = group.deadline_s, _START_DEADLINE_S
    yield
    group.deadline_s = before
