"""Comparison of a run with others: the difference of their curves and of their configurations.

Pure: two `RecordedRun`s go in, facts and a page come out. The one idea: runs are compared step by step, because step k
of both took the same samples if they had the same data, seed and global batch. Steps that only one run has are counted
and not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from hetseq.config.sections import flag
from hetseq.monitor.report.charts import Curve, line_chart, number
from hetseq.monitor.report.page import document, duration, section, table, time_axis
from hetseq.monitor.report.recorded import Floats, Integers, RecordedRun

#: keys for the place of a run, which do not change its numbers
_OWN_PLACE = ("save_dir",)
#: keys that decide which samples a step takes, and more of them without --global-batch-size
_OF_THE_SAMPLES = (
    "task", "data", "train_subset", "seed", "global_batch_size", "max_tokens", "shuffle_block", "curriculum",
    "data_by_host",
)  # fmt: skip
_OF_THE_BATCH = ("max_sentences", "update_freq", "distributed_world_size", "distributed_gpus")
_ALIKE = 0.02  # of a speed: less is noise
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
    #: in the common steps with a time in both: seconds of the first run and of the second, samples of both
    _common: tuple[float, float, float, float] | None = None

    @property
    def largest(self) -> tuple[float, int] | None:
        """The largest absolute difference of the losses, and its step; None without a common step."""
        if not len(self.steps):
            return None
        place = int(np.argmax(np.abs(self.difference)))
        return abs(float(self.difference[place])), int(self.steps[place])

    @property
    def speed_up(self) -> float | None:
        """The samples per second of the second run over those of the first, in the common steps."""
        if self._common is None:
            return None
        one_s, other_s, samples, others = self._common
        return others / other_s / (samples / one_s)

    def headline(self) -> str:
        """Which run is faster, and how much; empty if that is unknown."""
        if self.speed_up is None or self._common is None:
            return ""
        names, ratio = names_of(self.first, self.second), self.speed_up
        one_s, other_s, samples, others = self._common
        measured = [duration(one_s), duration(other_s)]
        if samples != others:  # the same steps of other sizes: their times say nothing
            measured = [f"{number(float(f'{speed:.4g}'))} samples/s" for speed in (samples / one_s, others / other_s)]
        times = " and ".join(f"{text} for {name}" for text, name in zip(measured, names))
        if abs(ratio - 1) < _ALIKE:
            return f"{names[0]} and {names[1]} are equally fast: {times}"
        fast, slow = reversed(names) if ratio > 1 else names
        return f"{fast} is {max(ratio, 1 / ratio):.2f} times as fast as {slow}: {times}"

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
        _common_times(first, second, at, other),
    )  # fmt: skip


def _common_times(
    first: RecordedRun, second: RecordedRun, at: Integers, other: Integers
) -> tuple[float, float, float, float] | None:  # fmt: skip
    """Seconds and samples of the steps at these places, as far as both runs have both."""
    numbers = np.array([first.seconds[at], second.seconds[other], first.samples[at], second.samples[other]])
    is_known = (np.isfinite(numbers) & (numbers > 0)).all(axis=0)
    if not is_known.any():
        return None
    one_s, other_s, samples, others = numbers[:, is_known].sum(axis=1).tolist()
    return one_s, other_s, samples, others


def comparison_page(*found: Comparison) -> str:
    """The comparison as the text of an HTML file; several are of the same first run with others."""
    runs = (found[0].first, *(one.second for one in found))
    names = names_of(*runs)
    scale, time_title = time_axis(max(float(run.elapsed_s[-1]) if len(run.steps) else 0.0 for run in runs))
    by_step, by_time = (
        [Curve(name, x, run.loss, place, dash=place) for place, (name, run, x) in enumerate(zip(names, runs, places))]
        for places in ([run.steps for run in runs], [run.elapsed_s / scale for run in runs])
    )
    title = f"{', '.join(names[:-1])} and {names[-1]}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{"<br>".join(escape(str(run.path)) for run in runs)}</p>',
        *(f'<p class="headline">{escape(line)}</p>' for one in found if (line := one.headline())),
        *(f"<p><b>{escape(line if len(found) > 1 else _capital(line))}.</b></p>" for line in sentences(*found)),
        *(f"<p>{escape(line)}</p>" for line in _all_remarks(found, names[1:])),
        line_chart("Loss", by_step, unit="nats"),
        line_chart("Loss by time", by_time, unit="nats", x_title=time_title),
        *(
            line_chart(
                f"Difference of the losses, {name} minus {names[0]}",
                [Curve("difference", one.steps, one.difference, 3)], unit="nats",
            )
            for name, one in zip(names[1:], found)
        ),
    ]  # fmt: skip
    for name, one in zip(names[1:], found):
        parts += _tables(one, names[0], name, of_whom=f": {names[0]} and {name}" if len(found) > 1 else "")
    return document(title, "".join(parts))


def sentences(*found: Comparison) -> list[str]:
    """The result of each comparison as one line, with the name of the second run if there are several."""
    names = names_of(found[0].first, *(one.second for one in found))[1:]
    return [f"{name}: {one.sentence()}" if len(found) > 1 else one.sentence() for name, one in zip(names, found)]


def _tables(found: Comparison, first: str, second: str, *, of_whom: str) -> list[str]:
    """The last validations, and the options that differ."""
    rows = [
        [subset, name, f"{step:,}", f"{one:.6g}", f"{other:.6g}", f"{other - one:.3g}"]
        for subset, name, step, one, other in found.validations
    ]
    heads = ["subset", "figure", ">step", f">{first}", f">{second}", ">difference"]
    options = [[flag(key), *values] for key, *values in found.options]
    differing = table(["option", f"*{first}", f"*{second}"], options) if options else "<p>None.</p>"
    return [
        section(f"The last validation that both have{of_whom}", table(heads, rows) if rows else ""),
        section(f"Options that differ{of_whom}", differing),
    ]


def _all_remarks(found: Sequence[Comparison], names: Sequence[str]) -> list[str]:
    """The remarks on each comparison, with the name of the second run if there are several."""
    if len(found) == 1:
        return _remarks(found[0])
    return [f"{name}: {line}" for name, one in zip(names, found) for line in _remarks(one)]


def _remarks(found: Comparison) -> list[str]:
    remarks = []
    for run, alone in zip((found.first, found.second), found.alone):
        if alone:
            remarks.append(f"{_counted(alone, 'step', 'steps')} only in {run.path.name}, not compared.")
    if found.speed_up is not None:
        remarks.append("Times are those of the common steps, without validations and pauses.")
    has_batch = all(run.config.get("global_batch_size") for run in (found.first, found.second))
    deciding = _OF_THE_SAMPLES if has_batch else (*_OF_THE_SAMPLES, *_OF_THE_BATCH)
    others = [key for key, _, _ in found.options if key in deciding]
    if others and found.largest is not None:
        remarks.append(
            f"The same step may have taken different samples in the two runs: {', '.join(map(flag, others))}"
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


def names_of(*runs: RecordedRun) -> list[str]:
    """The names of the runs: the last folder, or the whole path if two have the same."""
    names = [run.path.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.path) for run in runs]


def _size(run: RecordedRun) -> str:
    return _counted(len(run.steps), "step", "steps")


def _counted(size: int, one: str, many: str) -> str:
    return f"{size:,} {one if size == 1 else many}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
