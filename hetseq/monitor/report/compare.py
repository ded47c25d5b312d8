"""Comparison of two runs: the difference of their curves and of their configurations.

Pure: two `RecordedRun`s go in, facts and a page come out. The one idea: runs are compared step by step, because step k
of both took the same samples if they had the same data, seed and global batch. Steps that only one run has are counted
and not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from hetseq.monitor.report.charts import Curve, line_chart, number
from hetseq.monitor.report.page import document, section, table
from hetseq.monitor.report.recorded import Floats, Integers, RecordedRun

#: keys for the place of a run, which do not change its numbers
_OWN_PLACE = ("save_dir",)
#: keys that decide which samples a step takes, and more of them without --global-batch-size
_OF_THE_SAMPLES = (
    "task", "data", "train_subset", "seed", "global_batch_size", "max_tokens", "shuffle_block", "curriculum",
    "data_by_host",
)  # fmt: skip
_OF_THE_BATCH = ("max_sentences", "update_freq", "distributed_world_size", "distributed_gpus")
_ROUNDING = 1e-3  # of a loss; equal curves in fp32 have been seen 6e-4 apart for some steps


@dataclass(frozen=True, eq=False)
class Comparison:
    """What two runs have in common, and where they differ."""

    first: RecordedRun
    second: RecordedRun
    #: (k,) the steps that both have, with a loss in both
    steps: Integers
    #: (k,) the loss of the second run minus the loss of the first
    difference: Floats
    #: number of steps that only the first run has, and only the second
    alone: tuple[int, int]
    #: (subset, figure, step, of the first, of the second): the last validation that both have
    validations: tuple[tuple[str, str, int, float, float], ...]
    #: (key, of the first, of the second)
    options: tuple[tuple[str, str, str], ...]

    @property
    def largest(self) -> tuple[float, int] | None:
        """The largest absolute difference of the losses, and its step; None without a common step."""
        if not len(self.steps):
            return None
        place = int(np.argmax(np.abs(self.difference)))
        return abs(float(self.difference[place])), int(self.steps[place])

    def sentence(self) -> str:
        """The result as one line."""
        if self.largest is None:
            unknown = len(self.first.steps) - self.alone[0]
            if unknown:
                return f"{_counted(unknown, 'step', 'steps')} in common, of which none has a loss in both"
            return f"no step in common: {_size(self.first)} in the first run, {_size(self.second)} in the second"
        most, step = self.largest
        found = (
            f"all losses are equal in {len(self.steps):,} common steps" if most == 0 else
            f"largest loss difference {most:.3g} at step {step:,}, of {len(self.steps):,} common steps"
        )  # fmt: skip
        return f"{found}; {_counted(len(self.options), 'option differs', 'options differ')}"


def compare(first: RecordedRun, second: RecordedRun) -> Comparison:
    """Compare the records of two runs."""
    common, at, other = np.intersect1d(first.steps, second.steps, assume_unique=True, return_indices=True)
    with np.errstate(invalid="ignore"):  # of two that are infinite
        difference = second.loss[other] - first.loss[at]
    is_known = np.isfinite(difference)
    return Comparison(
        first, second, common[is_known], difference[is_known],
        (len(first.steps) - len(common), len(second.steps) - len(common)),
        tuple(_validations(first, second)), tuple(_options(first.config, second.config)),
    )  # fmt: skip


def comparison_page(found: Comparison) -> str:
    """The comparison as the text of an HTML file."""
    names = _names(found)
    curves = [
        Curve(name, run.steps, run.loss, place)
        for place, (name, run) in enumerate(zip(names, (found.first, found.second)))
    ]
    parts = [
        f"<h1>{escape(names[0])} and {escape(names[1])}</h1>",
        f'<p class="soft">{escape(str(found.first.path))}<br>{escape(str(found.second.path))}</p>',
        f"<p><b>{escape(_capital(found.sentence()))}.</b></p>",
        "".join(f"<p>{escape(line)}</p>" for line in _remarks(found)),
        line_chart("Loss", curves, unit="nats"),
        line_chart(
            f"Difference of the losses, {names[1]} minus {names[0]}",
            [Curve("difference", found.steps, found.difference, 3)], unit="nats",
        ),
    ]  # fmt: skip
    rows = [
        [subset, name, f"{step:,}", f"{one:.6g}", f"{other:.6g}", f"{other - one:.3g}"]
        for subset, name, step, one, other in found.validations
    ]
    heads = ["subset", "figure", ">step", f">{names[0]}", f">{names[1]}", ">difference"]
    parts.append(section("The last validation that both have", table(heads, rows) if rows else ""))
    rows = [list(row) for row in found.options]
    options = table(["option", f"*{names[0]}", f"*{names[1]}"], rows) if rows else "<p>None.</p>"
    parts.append(section("Options that differ", options))
    return document(f"{names[0]} and {names[1]}", "".join(parts))


def _remarks(found: Comparison) -> list[str]:
    remarks = []
    for run, alone in zip((found.first, found.second), found.alone):
        if alone:
            remarks.append(f"{_counted(alone, 'step', 'steps')} only in {run.path.name}, not compared.")
    seconds = [float(run.elapsed_s[-1]) if len(run.steps) else math.nan for run in (found.first, found.second)]
    if all(second > 0 for second in seconds):
        remarks.append(f"Time in steps: {number(round(seconds[0], 3))} s and {number(round(seconds[1], 3))} s.")
    has_batch = all(run.config.get("global_batch_size") for run in (found.first, found.second))
    deciding = _OF_THE_SAMPLES if has_batch else (*_OF_THE_SAMPLES, *_OF_THE_BATCH)
    others = [key for key, _, _ in found.options if key in deciding]
    if others and found.largest is not None:
        remarks.append(
            f"The same step may have taken different samples in the two runs: {', '.join(others)}"
            f" {'differs' if len(others) == 1 else 'differ'}. If so, compare the curves as a whole, not single steps."
        )
        return remarks
    has_units = all(run.config.get("unit_size") for run in (found.first, found.second))
    if found.largest is not None and found.largest[0] > _ROUNDING and not has_units:
        remarks.append(
            "This is more than rounding in fp32. With dropout, masks depend on the micro-batches unless both runs have"
            " the same --unit-size; other causes are among the options that differ."
        )
    return remarks


def _validations(first: RecordedRun, second: RecordedRun) -> list[tuple[str, str, int, float, float]]:
    found = []
    for subset in sorted(first.validation.keys() & second.validation.keys()):
        one, other = first.validation[subset], second.validation[subset]
        common, at, there = np.intersect1d(one["step"], other["step"], return_indices=True)
        for name in sorted((one.keys() & other.keys()) - {"step"}) if len(common) else ():
            found.append((subset, name, int(common[-1]), float(one[name][at[-1]]), float(other[name][there[-1]])))
    return found


def _options(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    keys = [key for key in [*first, *(key for key in second if key not in first)] if key not in _OWN_PLACE]
    return [
        (key, _text(first, key), _text(second, key))
        for key in keys
        if key not in first or key not in second or first[key] != second[key]
    ]


def _text(options: Mapping[str, Any], key: str) -> str:
    return "(absent)" if key not in options else "null" if options[key] is None else str(options[key])


def _names(found: Comparison) -> tuple[str, str]:
    """The names of the runs: the last folder, or the whole path if both have the same."""
    one, other = found.first.path, found.second.path
    return (one.name, other.name) if one.name != other.name else (str(one), str(other))


def _size(run: RecordedRun) -> str:
    return _counted(len(run.steps), "step", "steps")


def _counted(size: int, one: str, many: str) -> str:
    return f"{size:,} {one if size == 1 else many}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
