"""The user's part of a run on one rank: the task, its data sets and its model, loaded and checked.

Responsible for loading them once per process, without communication. Objects built again for each generation of the
run belong to `session`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hetseq import registry
from hetseq.balance.layout import seat_of
from hetseq.config.sections import Config, DataConfig, MemoryConfig
from hetseq.data.fetch import TRAINING_DATA, seed_everything
from hetseq.data.lanes import lanes_of
from hetseq.data.loader import Source, place_on
from hetseq.errors import ConfigError, MissingSplitError
from hetseq.parallel.activation_checkpointing import checkpoint_activations
from hetseq.parallel.activation_offload import ActivationOffload
from hetseq.parallel.base_parameters import base_digest, base_parameters, check_base, move_
from hetseq.parallel.build_record import BuildRecord
from hetseq.parallel.delayed_init import DelayedInit, cast_, make_absent_
from hetseq.parallel.divided_model import DividedModel, divide_
from hetseq.parallel.gradient_sync import NO_ROUNDS, Rounds
from hetseq.parallel.host_numbers import HostNumbers
from hetseq.parallel.model_layers import AUTO, find_layers
from hetseq.parallel.offload_tiers import DiskTier, HostTier
from hetseq.parallel.owned_names import owned_names
from hetseq.parallel.replica import batch_norms, check_model, tied_names
from hetseq.parallel.task_state import TaskState
from hetseq.parallel.tensor_parallel import plan_of
from hetseq.parallel.tensor_ranks import TensorRanks
from hetseq.run.fingerprint import data_digest, model_fields
from hetseq.run.start_notes import kept_back
from hetseq.system import rank_phase as whereabouts
from hetseq.system.processes import return_large_memory
from hetseq.system.rank_phase import Phase
from hetseq.system.task_failure import noted, noting
from hetseq.task import Task, build_model, collater_of, counts_of, is_overridden, load_split, make_task
from hetseq.training import compile as compiling
from hetseq.training import task_checks as probe
from hetseq.training.precision import PRECISIONS, Precision

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OwnLoop:
    """Facts about a script with a training loop of its own, in the place of a task."""

    late_counts: Mapping[int, int]  # term -> the later one whose sums are its count, known only after forward
    deadline_s: float  # how long the script may take between two steps
    phases: int = 1  # steps in a row over the same samples
    clip_epsilon: float = 0.0  # see Recipe


@dataclass(eq=False)
class LoadedTask:
    """The user's part of a run on this rank. Only `trial` and `fill` change, once each."""

    task: Task
    train: Any
    valid: dict[str, Any]  # by split
    model: torch.nn.Module
    terms: tuple[str, ...]
    place: Callable[[Any], Any]
    seed: int
    device: torch.device
    precision: Precision
    trial: probe.LossTrial = field(default_factory=probe.LossTrial)
    split: str = "train"  # name of the training data
    start_notes: Sequence[logging.LogRecord] = ()  # about the weights of `build_model`
    own_loop: OwnLoop | None = None  # None: a task, whose steps HetSeq computes itself
    offload: ActivationOffload | None = None  # of what forward keeps for backward; None: it stays on the device
    #: whose parameters come and go with --shard-model all, by name; none where they must not
    layers: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    #: gives parameters that have no memory yet their numbers, once they have; None afterwards, and for no such model
    fill: Callable[[Sequence[torch.nn.Parameter]], None] | None = None
    #: the name of a base of which no rank has all in memory later; None: there is none
    base_of_parts: str | None = None
    #: the parts of a model that several ranks hold together; None: this rank has the model alone
    divided: DividedModel | None = None
    #: of the model as it was built, for the comparison with other ranks; None: it is as it was built
    described: Mapping[str, str] | None = None

    @property
    def terms_of_no_loss(self) -> tuple[str, ...]:
        """Sums of a step that are counts or metrics of a script."""
        late = {} if self.own_loop is None else self.own_loop.late_counts
        return tuple(
            self.terms[place] for term, count in late.items() for place in ((term, count) if term else (count,))
        )

    def try_out(self, rounds: Rounds = NO_ROUNDS) -> None:
        """Run the trial of the loss; in `rounds` the parameters are here. Raises TaskError. Any rank, alone, or all."""
        whereabouts.enter(Phase.TRIAL)
        collate = noted(collater_of(self.task, self.train), f"the first samples of {TRAINING_DATA}")
        computing = self.precision.computing(self.device)
        with noting("the trial before the first step"), computing, rounds.without_gradients():
            with rounds.round():
                self.trial = probe.check_loss(
                    self.task, self.model, self.train, collate=collate, place=self.place, terms=self.terms,
                    seed=self.seed, precision=self.precision,
                )  # fmt: skip
            rounds.serve()

    @functools.cached_property
    def task_state(self) -> TaskState:
        """The values that the task keeps between steps, for all generations of the run."""
        state = TaskState(self.task, lanes_of(self.train), is_script=self.own_loop is not None)
        state.refuses_tensors = self.divided is not None
        return state

    @functools.cached_property
    def base(self) -> str | None:
        """The name of the model's base, by its content. Computed once: a base does not change."""
        return base_digest(self.model) if self.base_of_parts is None else self.base_of_parts

    @functools.cached_property
    def part(self) -> str:
        """The digest of the training data, by which ranks find others that read the same data. Raises DataError.

        Computed once, before the first step: a later `set_epoch` may give other samples, and a file may grow.
        """
        return data_digest(self.train, self.seed)

    def source(self, dataset: Any) -> Source:
        def count(sample: Any, size: int) -> tuple[float, ...]:
            counts = counts_of(self.task, sample, size)
            if set(counts) != set(self.terms):
                raise probe.changed_terms(self.task, counts, self.terms)
            return tuple(counts[term] for term in self.terms)

        collate, is_pinned = collater_of(self.task, dataset), self.device.type == "cuda"
        split = next((name for name, data in self.valid.items() if data is dataset), self.split)
        return Source(dataset, collate, count, self.place, len(self.terms), self.seed, is_pinned, split)


def load_material(
    config: Config, device: torch.device, task: Task | None = None, *, slot: int | None = None
) -> LoadedTask:
    """The task, its data and its model for this rank; every rank calls it; not collective. Raises HetSeqError.

    `slot` is this rank's in the run, by which it gets a part of a model that ranks divide; None: it gets all of it.
    """
    is_never_whole = config.distributed.delayed_init or _is_beside_host(device)
    if config.optimization.compile and config.distributed.shard_model == "all" and is_never_whole:
        raise ConfigError(
            "--compile runs the whole model before the first step, which no device has with --shard-model all on a GPU"
            " or with --delayed-init: leave one of them out"
        )
    if config.distributed.shard_model in ("all", "auto") and device.type == "cpu":
        return_large_memory()  # before the model is built: gaps that it leaves would stay
    precision, seed = PRECISIONS[config.optimization.precision], config.task.seed
    task = task or make_task(registry.find_task(config.task.task, user_dir=config.task.user_dir), config)
    whereabouts.enter(Phase.LOADING_DATA)
    train = load_split(task, config.data.train_subset)
    valid = {} if config.validation.disable_validation else _validation_splits(task, config.data)
    place = place_on(device, precision.storage)
    collate = noted(collater_of(task, train), f"the first samples of {TRAINING_DATA}")
    terms = probe.find_terms(task, train, collate)
    whereabouts.enter(Phase.MODEL)
    seed_everything(seed)
    drawn: DelayedInit | None = None
    fill: Callable[[Sequence[torch.nn.Parameter]], None] | None = None
    with kept_back() as start_notes:
        if config.distributed.delayed_init:
            model, drawn = built_without_memory(task, seed)
        else:
            model = build_model(task)
    check_model(model)
    check_base(model)
    layers, later, digest = layers_of(model, config), list[torch.nn.Parameter](), None
    if layers:
        later = list(owned_names(model, with_frozen=True).by_parameter)
        digest = base_digest(model, None if drawn is None else drawn.in_turn(list(base_parameters(model).values())))
    if drawn is not None:
        cast_(model, precision.storage)
        kept = {id(one) for one in later}
        drawn.fill([one for one in model.parameters() if id(one) not in kept], device)
        make_absent_(later, device)
        fill = drawn.fill if later else None
    elif later and _is_beside_host(device):
        fill = HostNumbers(later, device, precision.storage, unchanged=base_parameters(model).values()).fill
    divided, described = None, None
    if slot is not None and config.distributed.tensor_degree > 1:
        described = model_fields(model)
        divided = _divided(task, model, config, slot)
    move_(model, device, precision.storage)
    if divided is not None:
        divided.cast_(precision.storage)
    if config.memory.checkpoint_modules:
        names = checkpoint_activations(model, config.memory.checkpoint_modules)
        logger.info("%d modules run again in backward: %s", len(names), _listed(names))
    material = LoadedTask(
        task, train, valid, model, terms, place, seed, device, precision, split=config.data.train_subset,
        start_notes=start_notes, offload=_offload_of(config.memory, model, device), layers=layers, fill=fill,
        base_of_parts=digest, divided=divided, described=described,
    )  # fmt: skip
    # else tried when ranks can get the parameters, or meet each other
    if fill is None and divided is None and config.distributed.shard_model != "all":
        material.try_out()
    if config.optimization.compile:
        whereabouts.enter(Phase.COMPILING)
        compiling.compile_(model)
        sizes = (2, 3) if batch_norms(model) else (1, 2, 3)
        batches = [(place(collate(samples)), len(samples)) for samples in probe.first_samples(train, sizes)]
        compiling.warm_up(
            task, model, batches, validates=bool(valid), computing=functools.partial(precision.computing, device)
        )
    return material


def _divided(task: Task, model: torch.nn.Module, config: Config, slot: int) -> DividedModel:
    """Divide a model by --tensor-parallel-degree, in place. Raises ConfigError where that cannot be exact."""
    section = config.distributed
    if config.data.data_by_host:
        raise ConfigError(
            f"--tensor-parallel-degree {section.tensor_parallel_degree}: the ranks that hold one model compute the same"
            " samples, and with --data-by-host each host has others: leave one of them out"
        )
    if config.optimization.compile:
        raise ConfigError(
            f"--compile cannot compile the sums between the {section.tensor_degree} ranks that divide the model"
            " (--tensor-parallel-degree): leave one of them out"
        )
    seat = seat_of(slot, section.tensor_sizes())
    plan = plan_of(model, task.tensor_plan() if is_overridden(task, "tensor_plan") else None)
    ranks, tied = TensorRanks(seat.size, seat.place), tied_names(model)
    divided = divide_(model, plan, ranks, degree=section.tensor_degree, seed=section.tensor_parallel_seed)
    return replace(divided, tied=tied)


def layers_of(model: torch.nn.Module, config: Config) -> dict[str, torch.nn.Module]:
    """The modules whose parameters may come and go, by name; none where they must not. Raises ConfigError."""
    kind, patterns = config.distributed.shard_model, config.distributed.shard_modules
    if kind not in ("all", "auto") or (kind == "auto" and config.optimization.compile):
        return {}  # to compile a model, a device needs it whole
    try:
        return find_layers(model, patterns, flag="--shard-modules")
    except ConfigError:
        if kind == "auto" and patterns == (AUTO,):
            return {}  # a model without layers
        raise


def _is_beside_host(device: torch.device) -> bool:
    """Whether a device has memory of its own, which may not hold a model that the host holds."""
    return device.type == "cuda"


def built_without_memory(task: Task, seed: int) -> tuple[torch.nn.Module, DelayedInit]:
    """The model with its parameters on "meta", and the functions that draw them. Raises TaskError."""
    record = BuildRecord(task)
    with record.building():
        model = build_model(task)
    initialise = task.initialise if is_overridden(task, "initialise") else None
    return model, DelayedInit(model, record, seed, initialise=initialise)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]}, ..., {names[-1]}"


def _offload_of(config: MemoryConfig, model: torch.nn.Module, device: torch.device) -> ActivationOffload | None:
    """Where what forward keeps goes, by --offload-activations. Raises HetSeqError if there is no such place."""
    if not config.offload_activations:
        return None
    if config.offload_dir is not None:
        return ActivationOffload(model, DiskTier(config.offload_dir, device), horizon=config.loading_horizon)
    if device.type == "cuda":
        return ActivationOffload(model, HostTier(device), horizon=config.loading_horizon)
    logger.warning(
        "--offload-activations has no effect on a CPU, whose activations are in host memory anyway: --offload-dir DIR"
        " sends them to a disk"
    )
    return None


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
