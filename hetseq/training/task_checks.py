"""Checks of the user's task before the first step: which terms it has, and whether its losses are sums.

Every rank calls the task on the same two samples and so gets the same answers, also a rank that will have no samples of
its own. A loss that is secretly a mean trains without complaint and wrongly; it is found here, at the start. So is
state that forward carries from batch to batch. The losses are compared between ranks elsewhere.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hetseq.data.fetch import TRAINING_DATA, samples_in_words, seed_everything
from hetseq.errors import TaskError
from hetseq.system.task_failure import noted
from hetseq.task import Sums, Task, check_sums, counts_of, is_overridden
from hetseq.training.carried_state import CarriedState
from hetseq.training.precision import PRECISIONS, Precision

_TOLERANCE = 1e-2  # a sum and a mean of two samples differ by a factor near two
_ROUNDING = 1e-5  # losses that add up to within this do not depend on the forward before


@dataclass(frozen=True)
class LossTrial:
    """The results of the trial of the loss.

    `means`: of each term over the first two samples, if they were the same alone and together and no random number was
    drawn, so that another rank gets the same; `tolerance`: how far another rank may differ, relative and absolute;
    `carried`: the state that forward carries from one batch to the next, in words.
    """

    means: Mapping[str, float] = field(default_factory=dict)
    tolerance: tuple[float, float] = PRECISIONS["fp32"].loss_tolerance
    carried: tuple[str, ...] = ()


def find_terms(task: Task, dataset: Any, collate: Any) -> tuple[str, ...]:
    """The names of the loss terms, in the order of `count`."""
    counts = counts_of(task, collate(_samples(dataset, [0])), 1)
    unknown = set(task.term_weights) - set(counts)
    if unknown:
        raise TaskError(f"{type(task).__name__}.term_weights names {sorted(unknown)}, but count gives {sorted(counts)}")
    return tuple(counts)


def changed_terms(task: Task, counts: dict[str, float], terms: tuple[str, ...]) -> TaskError:
    """The error for a batch whose terms differ from the first sample's."""
    return TaskError(
        f"{type(task).__name__}.count gave the terms {sorted(counts)}, but {sorted(terms)} for the first sample: give"
        " the same terms for every batch, with count 0 if there is nothing to count"
    )


def check_loss(
    task: Task, model: torch.nn.Module, dataset: Any, *, collate: Any, place: Any, terms: tuple[str, ...], seed: int,
    precision: Precision = PRECISIONS["fp32"],
) -> LossTrial:  # fmt: skip
    """Raise TaskError if `loss` has other terms than `count`, or returns means; otherwise return the results.

    A sum over two samples is the sum of the two sums; a mean is the mean of the two means. A collater that draws random
    numbers makes another batch of the same samples each time, so then both are collated together once, and the batch
    is cut in two; a batch that cannot be cut shows nothing about sums.
    """
    if not is_overridden(task, "loss"):
        return LossTrial()
    was_training = model.training
    model.eval()
    try:
        batches, samples, is_random = [], [], False
        for indices in _probes(dataset):
            samples = _samples(dataset, indices)
            batches.append(collate(samples))
        if len(batches) == 3 and not _is_repeatable(collate, samples, batches[2]):
            batches, is_random = _halves(batches[2]), True
        results, state = [], CarriedState(task, model)
        for batch, size in zip(batches, (1, 1, 2) if len(batches) == 3 else (len(_probes(dataset)[-1]),)):
            seed_everything(seed)
            placed, before = place(batch), _generators()
            with state.during(placed):
                # gradients stay on: a loss may be made of derivatives
                sums = check_sums(task, task.loss(model, placed), terms)
            is_random = is_random or _generators() != before
            results.append((counts_of(task, batch, size), {term: total.detach() for term, total in sums.items()}))
    finally:
        model.train(was_training)
    if len(results) != 3:
        return LossTrial()
    for term in terms:
        _check_additive(task, term, *results)
    pairs = {term: _mean_and_gap(term, *results) for term in terms if results[2][0][term]}
    relative, absolute = precision.loss_tolerance
    means = {term: mean for term, (mean, gap) in pairs.items() if gap <= relative * abs(mean) + absolute}
    does_matter = any(not gap <= _ROUNDING * abs(mean) for mean, gap in pairs.values())  # so does NaN
    return LossTrial({} if is_random else means, (relative, absolute), tuple(state.found) if does_matter else ())


def _generators() -> tuple[object, ...]:
    """The states of torch's, NumPy's and Python's random numbers: equal if none was drawn in between."""
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else torch.empty(0)
    of_torch = [state.numpy().tobytes() for state in (torch.get_rng_state(), on_gpu)]
    of_numpy = np.random.get_state(legacy=False)
    place = of_numpy["state"]
    return *of_torch, place["key"].tobytes(), place["pos"], of_numpy["has_gauss"], random.getstate()


def _is_repeatable(collate: Any, samples: Any, batch: Any) -> bool:
    """Whether the same samples become the same batch with other random numbers; tried twice, as draws may be equal."""
    for seed in (1, 2):
        seed_everything(seed)
        if not is_alike(collate(samples), batch):
            return False
    return True


def is_alike(one: Any, other: Any) -> bool:
    """Whether two batches hold the same numbers; anything but tensors, lists and mappings is not comparable."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_alike, one, other))
    return True


def _halves(batch: Any) -> list[Any]:
    """The first sample of a batch of two, the second, and both; the batch alone if it cannot be cut."""
    try:
        return [_cut(batch, 0), _cut(batch, 1), batch]
    except ValueError:
        return [batch]


def _cut(batch: Any, index: int) -> Any:
    """One of two samples; ValueError if a part of the batch does not have one entry for each."""
    if isinstance(batch, torch.Tensor):
        if batch.dim() == 0 or len(batch) != 2:
            raise ValueError
        return batch[index : index + 1]
    if isinstance(batch, MutableMapping):
        part = copy.copy(batch)  # of its own class, which may offer its entries as attributes
        for key in list(batch):
            part[key] = _cut(batch[key], index)
        return part
    if isinstance(batch, (list, tuple)) and any(isinstance(entry, torch.Tensor) for entry in batch):
        entries = [_cut(entry, index) for entry in batch]
        return type(batch)(*entries) if hasattr(batch, "_fields") else type(batch)(entries)
    if isinstance(batch, list) and len(batch) == 2:
        return batch[index : index + 1]
    raise ValueError


def first_samples(dataset: Any, counts: Sequence[int]) -> list[Any]:
    """For each of the counts, that many first samples; fewer from a small data set."""
    return [_samples(dataset, list(range(min(count, len(dataset))))) for count in counts]


def _probes(dataset: Any) -> list[list[int]]:
    return [[0], [1], [0, 1]] if len(dataset) > 1 else [[0]]


def _samples(dataset: Any, indices: list[int]) -> Any:
    if hasattr(dataset, "__getitems__"):
        seed_everything(0)
        return noted(dataset.__getitems__, samples_in_words(indices, TRAINING_DATA))(indices)
    return [_sample(dataset, index) for index in indices]


def _sample(dataset: Any, index: int) -> Any:
    seed_everything(index)  # a random sample is the same alone, in a batch, and on every rank
    return noted(dataset.__getitem__, samples_in_words([index], TRAINING_DATA))(index)


Result = tuple[dict[str, float], Sums]


def _mean_and_gap(term: str, first: Result, second: Result, both: Result) -> tuple[float, float]:
    """The mean loss of two samples, and its distance from the mean of the two alone."""
    (_, sums_a), (_, sums_b), (counts, sums_ab) = first, second, both
    a, b, together = (float(sums[term]) for sums in (sums_a, sums_b, sums_ab))
    return together / counts[term], abs(together - (a + b)) / counts[term]


def _check_additive(task: Task, term: str, first: Result, second: Result, both: Result) -> None:
    (count_a, sums_a), (count_b, sums_b), (_, sums_ab) = first, second, both
    a, b, together = (float(sums[term]) for sums in (sums_a, sums_b, sums_ab))
    weight = count_a[term] + count_b[term]
    if weight <= 0 or min(count_a[term], count_b[term]) <= 0:
        return
    mean = (a * count_a[term] + b * count_b[term]) / weight
    scale = max(abs(a + b), abs(mean))
    is_sum = abs(together - (a + b)) <= _TOLERANCE * scale
    is_mean = abs(together - mean) <= _TOLERANCE * scale
    if is_mean and not is_sum:
        raise TaskError(
            f"{type(task).__name__}.loss returns the mean of {term!r}, not its sum: the first two samples give {a:.6g}"
            f" and {b:.6g} alone but {together:.6g} together, expected {a + b:.6g}. Use reduction='sum'; HetSeq divides"
            f" by the count of all ranks"
        )
