"""The plan of the training steps, and the validators, made from options and the lengths of the data sets.

It does not communicate with other ranks, and decides nothing that the options do not say.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from hetseq.config.sections import Config, DataConfig, DistributedConfig, ValidationConfig
from hetseq.data.fetch import base_order
from hetseq.data.lanes import lanes_of
from hetseq.data.plan import Assign, GlobalBatch, Lengths, MicroBatchCap, Planner
from hetseq.data.shards import Shards
from hetseq.errors import ConfigError
from hetseq.parallel.gradient_sync import Rounds
from hetseq.run.loaded_task import LoadedTask
from hetseq.run_directory import RunDirectory
from hetseq.task import lengths_of, weights_of
from hetseq.training.device_memo import DeviceMemo
from hetseq.training.micro_batch_size import MicroBatchSizes
from hetseq.training.validation import Validator

_NEVER = 10**9  # the epoch from which on samples are shuffled


def planner_of(
    config: Config, material: LoadedTask, batch: GlobalBatch, assign: Assign, shards: Shards | None = None
) -> Planner:
    """The plan of a run over its training data; this rank may have one shard of several.

    Raises ConfigError if lengths are needed and the data set has none, and for options that lanes do not have.
    """
    dataset, loop = material.train, material.own_loop
    lanes, curriculum = lanes_of(dataset), config.data.curriculum
    if lanes is not None:
        if config.data.shuffle_block is not None:
            raise ConfigError(
                f"--shuffle-block {config.data.shuffle_block}: the training data are Lanes, which keep an order of"
                " their own: leave it out, and give Lanes a window to shuffle in"
            )
        if config.data.max_tokens is not None:
            raise ConfigError(
                f"--max-tokens {config.data.max_tokens}: the training data are Lanes, which have no index, and so no"
                " length for each record: use --batch-size"
            )
        curriculum = _NEVER
    counts_tokens = config.data.max_tokens or batch.tokens
    lengths = _needed_lengths(dataset, "use --batch-size") if counts_tokens else None
    _check_longest(dataset, config.data.max_tokens)
    if lanes is not None:
        lanes.bind(batch.sample_limit)
    return Planner(
        len(dataset) if shards is None else shards.total,
        config.task.seed,
        batch,
        assign,
        curriculum,
        lengths,
        config.data.unit_size or 1,
        config.data.shuffle_block,
        shards,
        1 if loop is None else loop.phases,
    )


def weights_by_slot(
    config: DistributedConfig, slots: Sequence[int], *, idle: Collection[int] = ()
) -> list[tuple[float, ...]]:
    """The weights of the shares: the fixed weights of these slots, or the equal ones that `auto` begins with.

    One tuple for each of the weights that take turns. A slot that the options do not name gets the mean of the others;
    the slots at the places `idle` get 0.
    """
    equal = tuple(float(place not in idle) for place in range(len(slots)))
    turns = []
    for named in config.balance_turns() or (equal,):
        given = [named[slot] if slot < len(named) else math.fsum(named) / len(named) for slot in slots]
        weights = equal if named is equal else tuple(one * weight for one, weight in zip(equal, given))
        turns.append(weights if sum(weights) > 0 else equal)
    return turns


def micro_batch_sizes(config: DataConfig, material: LoadedTask, directory: RunDirectory) -> MicroBatchSizes:
    """The micro-batch sizes that the options and earlier starts of this run allow on this rank."""
    if material.divided is not None:  # its ranks cut their common share alike, so none may learn by itself
        cap = MicroBatchCap(config.max_sentences, config.max_tokens, config.required_batch_size_multiple)
        is_fixed = config.unit_size is not None
        return MicroBatchSizes(MicroBatchCap(config.unit_size) if is_fixed else cap, is_fixed=is_fixed)
    memo = DeviceMemo(directory, material.device)
    if config.unit_size is not None:
        return MicroBatchSizes(MicroBatchCap(config.unit_size), is_fixed=True)  # this node's own cap already allows it
    is_free = config.max_sentences is None and config.max_tokens is None
    most = memo.micro_batch() if is_free else config.max_sentences
    cap = MicroBatchCap(most, config.max_tokens, config.required_batch_size_multiple)
    is_learning = is_free and most is None and material.device.type == "cuda"
    return MicroBatchSizes(cap, is_learning=is_learning, remember=memo.remember if is_free else None)


def _check_longest(dataset: Any, max_tokens: int | None) -> None:
    """Raise ConfigError for a sample that is longer than a micro-batch of this node may be.

    Checked only if the lengths are at hand; computing each would take as long as reading the data.
    """
    if max_tokens is None or not hasattr(dataset, "lengths"):
        return
    lengths = np.asarray(dataset.lengths)
    longest = int(lengths.argmax())
    if lengths[longest] > max_tokens:
        raise ConfigError(
            f"--max-tokens {max_tokens} does not hold sample {longest} of the training data, which has"
            f" {lengths[longest]} tokens: give at least that many, or shorten the samples"
        )


def _needed_lengths(dataset: Any, remedy: str) -> Lengths:
    """The lengths of a data set whose batches are counted in tokens. Raises ConfigError if it has none."""
    lengths = _lengths_by_place(dataset)
    if lengths is None:
        raise ConfigError(
            f"--max-tokens needs the length of every sample, but {type(dataset).__name__} has neither `lengths` nor"
            f" `num_tokens(index)`: give it one of them, or {remedy}"
        )
    return lengths


def _lengths_by_place(dataset: Any) -> Lengths | None:
    """Tokens of samples by their place in the data set's listed order, as a plan identifies them."""
    lengths, base = lengths_of(dataset), base_order(dataset)
    if lengths is None or base is None:
        return lengths
    return lambda places: lengths(base[places])


def make_validators(config: Config, material: LoadedTask, sizes: MicroBatchSizes | None = None) -> list[Validator]:
    """One validator per validation split, in the order of --valid-subset.

    Without an option for its size, a forward of validation is no larger than `sizes`, the current sizes in training.
    """
    samples = config.validation.max_sentences_valid or config.data.max_sentences
    tokens = config.validation.max_tokens_valid or config.data.max_tokens
    if not samples and not tokens:
        samples = config.data.global_batch_size
    learned: Callable[[], MicroBatchCap] = MicroBatchCap
    if sizes is not None and not (config.validation.max_sentences_valid or config.validation.max_tokens_valid):
        learned = functools.partial(_learned, sizes)
    weights = weights_of(material.task, material.terms)
    computing = functools.partial(material.precision.computing, material.device)
    validators = []
    for name, dataset in material.valid.items():
        lengths = _lengths_by_place(dataset) if tokens and samples else None
        if tokens and not samples:
            lengths = _needed_lengths(dataset, "use --batch-size, or add --max-sentences-valid")
        cap = MicroBatchCap(samples, tokens if lengths is not None else None)
        validators.append(
            Validator(
                name, material.source(dataset), cap, lengths, material.terms, weights, computing,
                material.device, learned,
            )
        )  # fmt: skip
    return validators


def _learned(sizes: MicroBatchSizes) -> MicroBatchCap:
    """The present cap of training; a unit of --unit-size says nothing about memory."""
    return MicroBatchCap() if sizes.is_fixed else sizes.cap


def check_best_metric(
    config: ValidationConfig, validators: list[Validator], material: LoadedTask, rounds: Rounds
) -> None:
    """Raise ConfigError for a --best-checkpoint-metric that validation does not give, before training begins."""
    name = config.best_checkpoint_metric
    if not validators or name == "loss":
        return
    names = validators[0].names(material.task, material.model, rounds)
    if name not in names:
        raise ConfigError(f"--best-checkpoint-metric {name}: validation gives {', '.join(names)}; name one of them")
