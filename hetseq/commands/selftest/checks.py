"""Checks of a self-test besides the loss terms: data, repeated forward, metrics, predictions, saved weights.

Each function answers one question with findings. `examine` compares the cuts of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hetseq.commands.selftest.findings import SelftestFinding
from hetseq.commands.selftest.fixed_randomness import difference, held_still
from hetseq.commands.selftest.measure import Bench, MeasuredStep, Reader
from hetseq.data.fetch import seed_everything
from hetseq.data.plan import derive_seed
from hetseq.errors import few as first_few
from hetseq.parallel.base_parameters import base_parameters
from hetseq.task import build_model, is_overridden

_FEW = 8  # samples that are read twice
_PAGE = "docs/concepts/exactness.md"


def of_reading(reader: Reader, samples: int) -> SelftestFinding | None:
    """A finding if samples change when they are read again, or after others."""
    few = range(min(samples, _FEW))
    first = [reader.samples([position]) for position in few]
    again = {position: reader.samples([position]) for position in reversed(few)}
    for position in few:
        at = difference(first[position], again[position])
        if at is None:
            continue
        pair = [reader.samples([position]) for _ in range(2)]
        name = type(reader.dataset).__name__
        if difference(*pair) is None:
            return SelftestFinding(
                "data order", name,
                f"the sample for an index ({at}) depends on the samples read before",
                "Let __getitem__(index) depend on the index alone: every rank reads other samples in another order",
            )  # fmt: skip
        return SelftestFinding(
            "random data", name,
            f"a sample changes when it is read again with the same seed ({at})",
            "Draw from torch's, NumPy's or Python's generator, which HetSeq seeds by sample, not from your own",
        )  # fmt: skip
    return None


def of_batches(reader: Reader, samples: int, *, unit: int | None) -> SelftestFinding | str | None:
    """A finding if random numbers are drawn for a whole micro-batch, a note if they are drawn for each sample."""
    few = range(min(samples, _FEW))
    seeds = reader.seed, derive_seed(reader.seed, 1)
    if (at := difference(*(reader.batch(few) for _ in range(2)))) is not None:
        return SelftestFinding(
            "random batches", "collater",
            f"the same samples give a different micro-batch the second time, with the same seed ({at})",
            "Draw in __getitem__ from torch's, NumPy's or Python's generator, which HetSeq seeds by sample",
        )  # fmt: skip
    if (at := difference(*(reader.batch(few, seed=seed) for seed in seeds))) is None:
        return None
    if not reader.reads_together:
        kept = reader.samples(few)
        batches = []
        for seed in seeds:
            seed_everything(seed)
            batches.append(reader.collate(list(kept)))
        if difference(*batches) is None:
            return f"samples are random ({at}), seeded by sample: the same on any shares"
    who = f"{type(reader.dataset).__name__}.__getitems__" if reader.reads_together else "collater"
    if unit:
        return f"{who} draws random numbers for a micro-batch ({at}); with --unit-size {unit} the same on any shares"
    return SelftestFinding(
        "random batches", who,
        f"it draws random numbers for a whole micro-batch ({at}), so a sample depends on how the step is cut",
        f"Draw in __getitem__, seed each sample by its index, or give --unit-size N ({_PAGE})",
    )  # fmt: skip


def of_one_sample(bench: Bench) -> SelftestFinding | None:
    """A finding if the collater or the loss fails for a single sample."""
    for hook, ask in (("collater", bench.reader.batch), ("loss", bench.piece)):
        try:
            ask([0])
        except Exception as error:  # the user's code may raise anything
            try:
                ask([0, 1])
            except Exception:  # it does not work at all: the measurement reports that
                return None
            return SelftestFinding(
                "one sample", hook,
                f"works for two samples but not for one ({type(error).__name__}: {error})",
                "A share, or the rest of one, may be one sample: keep the first dimension, avoid squeeze()",
            )  # fmt: skip
    return None


def of_repeating(bench: Bench, samples: int, *, tolerance: float, mode: str = "") -> Iterator[SelftestFinding]:
    """Findings if two forwards of a micro-batch differ in the model's present mode; `mode` names it in the text."""
    few = range(min(samples, _FEW))
    before = {name: buffer.clone() for name, buffer in bench.model.named_buffers()}
    first, again = (bench.piece(few) for _ in range(2))
    # not bitwise: parallel sums may be added in another order
    changed = next((name for name, buffer in bench.model.named_buffers() if difference(before[name], buffer)), None)
    for term in bench.terms:
        a, b = first.sums[term], again.sums[term]
        if not first.counts[term] or abs(a - b) <= tolerance * max(abs(a), abs(b)) or not math.isfinite(a - b):
            continue
        what = f"buffer {changed} of the model" if changed else "an attribute of task or model, or its own generator"
        yield SelftestFinding(
            "state", term,
            f"{mode}the same micro-batch gives {a:.6g} and then {b:.6g}: forward changes {what}",
            "Compute the task's state in update_step(num_updates), from num_updates; draw from torch's generator",
            b, a,
        )  # fmt: skip


def of_finite(bench: Bench, step: MeasuredStep, positions: range) -> Iterator[SelftestFinding]:
    """Terms of a step in one piece whose sum or gradient is not finite, with the first sample that causes it."""
    for term in bench.terms:
        total = step.sum(term)
        if not step.count(term) or (math.isfinite(total) and bool(step.gradients[term].isfinite().all())):
            continue
        broken = next((place for place in positions if not _is_finite(bench, term, place)), None)
        who = "only together" if broken is None else f"first with sample {bench.reader.index(broken)} of the data"
        what = f"its sum over {len(positions)} samples is {total}" if not math.isfinite(total) else (
            f"its sum over {len(positions)} samples is {total:.6g}, but their gradient is not finite"
        )  # fmt: skip
        yield SelftestFinding(
            "not finite", term,
            f"{what}, with count {step.count(term):g}; {who}",
            "Look for a logarithm, a quotient or a root of 0, or an input that is not finite",
            total,
        )  # fmt: skip


def _is_finite(bench: Bench, term: str, position: int) -> bool:
    done = MeasuredStep()
    try:
        bench.add_(done, [position], has_gradients=True)
    except Exception:  # a single sample may be refused, which has its own finding
        return True
    return not done.count(term) or bool(math.isfinite(done.sum(term)) and done.gradients[term].isfinite().all())


def of_nothing(bench: Bench, steps: Sequence[MeasuredStep]) -> Iterator[SelftestFinding]:
    """Terms whose count is always 0, and a loss without any gradient."""
    for term in bench.terms:
        if not any(step.count(term) for step in steps):
            yield SelftestFinding(
                "count", term,
                f"count gives 0 in all {len(steps)} steps: nothing is learned from the term",
                "Count the items that the loss sums over: samples, or labels that are not ignored",
            )  # fmt: skip
    live = [gradient for step in steps for gradient in step.gradients.values()]
    if live and not any(bool(gradient.any()) for gradient in live):
        yield SelftestFinding(
            "no gradient", ", ".join(bench.terms),
            "no parameter has a gradient: nothing is learned",
            "Look for detach(), item(), torch.no_grad() or requires_grad = False before the loss",
        )  # fmt: skip


def of_drift(bench: Bench, samples: int) -> Iterator[SelftestFinding]:
    """Buffers that affect the loss and that each forward changes a little: they advance once per micro-batch."""
    few, buffers = range(min(samples, _FEW)), _Buffers(bench)
    first = bench.forward(few, seed=1)[1]
    changed = buffers.first_changed()
    after = bench.forward(few, seed=1)[1]
    buffers.restore_()
    again = bench.forward(few, seed=1)[1]
    buffers.restore_()
    for term in bench.terms:
        has_drifted = torch.equal(first[term], again[term]) and not torch.equal(first[term], after[term])
        if changed and has_drifted and first[term].isfinite():
            a, b = first[term].item(), after[term].item()
            yield SelftestFinding(
                "state", term,
                f"in training the same micro-batch gives {a:.6g}, and differs by {abs(a - b):.1e} the next time:"
                f" forward changes buffer {changed} of the model, once per micro-batch",
                "The curve depends on shares, --batch-size and --unit-size. Change the buffer in update_step, or"
                " remove it: a parametrization such as spectral_norm moves only a little, so the difference is small",
                b, a,
            )  # fmt: skip


def draws_random(bench: Bench, samples: int) -> bool:
    """Whether two forwards of the same micro-batch, from the same buffers, differ with the seed."""
    return _seeds_differ(bench, samples, is_still=False)


def draws_although_still(bench: Bench, samples: int) -> bool:
    """Whether two forwards differ with the seed although torch's draws are constant: another generator draws."""
    return _seeds_differ(bench, samples, is_still=True)


def _seeds_differ(bench: Bench, samples: int, *, is_still: bool) -> bool:
    few, buffers = range(min(samples, _FEW)), _Buffers(bench)
    totals = []
    for seed in (1, 2):
        totals.append(bench.forward(few, seed=seed, is_still=is_still)[1])
        buffers.restore_()
    return any(not torch.equal(totals[0][term], totals[1][term]) for term in bench.terms if totals[0][term].isfinite())


class _Buffers:
    """A copy of the model's present buffers."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._before = {name: buffer.clone() for name, buffer in bench.model.named_buffers()}

    def first_changed(self) -> str | None:
        """The name of the first buffer that has changed since."""
        named = self._bench.model.named_buffers()
        return next((name for name, buffer in named if not torch.equal(self._before[name], buffer)), None)

    def restore_(self) -> None:
        """Restore the values of all buffers."""
        with torch.no_grad():
            for name, buffer in self._bench.model.named_buffers():
                buffer.copy_(self._before[name])


def of_metrics(bench: Bench, samples: int, *, tolerance: float, has_singles: bool) -> Iterator[SelftestFinding]:
    """Findings about metrics whose sums or counts do not add up; `has_singles`: single samples work."""
    if not is_overridden(bench.task, "metrics"):
        return
    half = max(samples // 3, 1)
    pieces = [range(samples), range(half), range(half, samples)]
    measured = []
    for positions in pieces:
        found = _metrics(bench, positions)
        wrong = next((name for name, pair in found.items() if not _is_pair(pair)), None)
        if wrong is not None:
            yield SelftestFinding(
                "metric", wrong,
                f"metrics gives {found[wrong]!r}: expected (sum, count)",
                'Give two numbers, as in {"accuracy": (right, samples)}',
            )  # fmt: skip
            return
        measured.append({name: (float(pair[0]), float(pair[1])) for name, pair in found.items()})
    whole, *parts = measured
    for name, pair in whole.items():
        if not all(map(math.isfinite, pair)):
            yield SelftestFinding(
                "metric", name,
                f"metrics gives {pair} for {samples} samples, and one number that is not finite spoils a whole split",
                "Leave out the samples without a value, and do not count them",
            )  # fmt: skip
            return
    if any(part.keys() != whole.keys() for part in parts):
        yield SelftestFinding(
            "metric", "metrics",
            f"the names depend on the samples: {sorted(whole)} and {sorted(set(parts[0]) ^ set(whole))}",
            "Give the same names for every micro-batch, with count 0 if there is nothing to count",
        )  # fmt: skip
        return
    for name, pair in whole.items():
        for place, what in enumerate(("sum", "count")):
            added, scale = sum(part[name][place] for part in parts), sum(abs(part[name][place]) for part in parts)
            # the tolerance of a sum is that of the parameters, since an argmax adds no rounding
            if abs(added - pair[place]) > tolerance * max(scale, abs(pair[place])):
                yield SelftestFinding(
                    "metric", name,
                    f"its {what} does not add up: {pair[place]:.6g} for {samples} samples, {added:.6g} for their two"
                    " parts",
                    "metrics must give (sum, count) over the samples of the micro-batch, not a mean; summarise divides",
                    added, pair[place],
                )  # fmt: skip
                break

    singles = range(min(samples, _FEW)) if has_singles else ()
    yield from _of_summary(bench, [whole, *(_metrics(bench, range(at, at + 1)) for at in singles)])


def _of_summary(bench: Bench, sums: Sequence[dict[str, tuple[float, float]]]) -> Iterator[SelftestFinding]:
    """Findings about `summarise`, also for the sums of a single sample, in which some counts are 0."""
    for given in sums:
        try:
            figures: Any = bench.task.summarise(given)
            is_sound = isinstance(figures, dict) and all(isinstance(one, int | float) for one in figures.values())
            said = f"it gives {figures!r}"
        except Exception as error:  # the user's code may raise anything
            is_sound, said = False, f"it raises {type(error).__name__}: {error}"
        if not is_sound:
            yield SelftestFinding(
                "metric", "summarise",
                f"{said} for {given}",
                "Give a dict of name to number from the sums of `metrics`; a count may be 0",
            )  # fmt: skip
            return


def _metrics(bench: Bench, positions: range) -> dict[str, Any]:
    batch = bench.place(bench.reader.batch(positions))
    seed_everything(0)
    with held_still(), torch.set_grad_enabled(bench.task.needs_gradients_in_validation):
        return dict(bench.task.metrics(bench.model, batch))


def _is_pair(pair: Any) -> bool:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        return False
    try:
        return all(isinstance(float(number), float) for number in pair)
    except (TypeError, ValueError, RuntimeError):
        return False


def of_predictions(bench: Bench, samples: int) -> SelftestFinding | None:
    """A finding unless `predictions` gives one line of text per sample, in order."""
    if not is_overridden(bench.task, "predictions"):
        return None
    few, given = min(samples, _FEW), list[list[str]]()
    remedy = "Give a list of str, one line for each sample of the micro-batch, in its order"
    for positions in (range(few), *(range(place, place + 1) for place in range(few))):
        batch = bench.place(bench.reader.batch(positions))
        with held_still(), torch.no_grad():
            lines: Any = bench.task.predictions(bench.model, batch)
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            return SelftestFinding("predictions", "predictions", "it does not give a list of str", remedy)
        if len(lines) != len(positions) or any("\n" in line for line in lines):
            text = f"{len(lines)} lines for {len(positions)} samples, or lines with line breaks"
            return SelftestFinding("predictions", "predictions", text, remedy, float(len(lines)), float(len(positions)))
        given.append(lines)
    if sorted(given[0]) == sorted(singly := [line for lines in given[1:] for line in lines]) and given[0] != singly:
        return SelftestFinding(
            "predictions", "predictions",
            "the lines of a micro-batch are in another order than its samples, for example sorted by a collater",
            remedy,
        )  # fmt: skip
    return None


@torch.no_grad()
def _stir_(model: torch.nn.Module) -> None:
    """Change the weights from those of `build_model`, as training does; but not the base, which stays as it is."""
    seed_everything(1)
    base = {id(parameter) for parameter in base_parameters(model).values()}
    for parameter in model.parameters():
        if parameter.is_floating_point() and id(parameter) not in base:
            parameter.mul_(1 + 0.01 * torch.rand_like(parameter)).add_(0.001)


def of_saved_weights(bench: Bench, samples: int, *, seed: int, tolerance: float) -> Iterator[SelftestFinding]:
    """Findings unless a new model with these weights has the same losses. Changes the weights of the bench."""
    few = range(min(samples, _FEW))
    model = bench.model
    _stir_(model)
    expected = bench.piece(few)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    seed_everything(seed)
    fresh = build_model(bench.task).to(bench.device, bench.dtype)
    fresh.train(model.training)
    try:
        lacking = fresh.load_state_dict(saved, strict=False)
        names = [name for name in lacking.missing_keys if name in fresh.state_dict()]  # the base is not there
        if names or lacking.unexpected_keys:
            raise RuntimeError(f"it lacks {first_few(names)} and also has {first_few(lacking.unexpected_keys)}")
    except RuntimeError as error:
        yield SelftestFinding(
            "state_dict", "the model",
            f"a newly built model does not load its weights: {str(error).splitlines()[-1].strip()}",
            "Create all parameters and buffers in build_model, with the same names and shapes each time",
        )  # fmt: skip
        return
    bench.model = fresh
    try:
        found = bench.piece(few)
    finally:
        bench.model = model
    for term in bench.terms:
        a, b = expected.sums[term], found.sums[term]
        if expected.counts[term] and abs(a - b) > tolerance * max(abs(a), abs(b)):
            yield SelftestFinding(
                "state_dict", term,
                f"a model with the same state_dict gives {b:.6g} instead of {a:.6g}: a checkpoint lacks part of the"
                " state that the loss needs",
                "Register every tensor as parameter or buffer, and cache nothing that is computed from weights",
                b, a,
            )  # fmt: skip
