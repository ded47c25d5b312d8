"""Examination of a task by a self-test: from a configuration to a report.

Builds task, data and model as a run does, and makes two passes over random cuts: in evaluation mode, which shows the
task's own faults, and in training mode, which also shows layers that mix samples. The one idea: a step in one
micro-batch is the reference, and every cut of it must agree with it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hetseq import registry
from hetseq.commands.selftest import checks
from hetseq.commands.selftest.diagnosis import Diagnosis, mixing_module
from hetseq.commands.selftest.findings import SelftestFinding, SelftestReport, TermRow
from hetseq.commands.selftest.fixed_randomness import Narrowing
from hetseq.commands.selftest.measure import Bench, MeasuredStep, Reader, gradient_difference, loss_difference
from hetseq.commands.selftest.other_process import Answer, of_processes, presented
from hetseq.commands.selftest.splits import Cut, random_cut, singles, whole
from hetseq.config.sections import Config
from hetseq.data.fetch import seed_everything
from hetseq.data.lanes import lanes_of
from hetseq.data.plan import epoch_order
from hetseq.errors import TaskError
from hetseq.monitor.progress_bar import bar
from hetseq.parallel.replica import check_model
from hetseq.task import Task, build_model, collater_of, load_split, make_task
from hetseq.training import task_checks as probe

logger = logging.getLogger(__name__)

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


def tolerance_of(dtype: torch.dtype) -> float:
    """The largest relative difference that counts as equal: half of the digits of the type.

    The other half allows for sums in another order; faults of a task show in the first digits.
    """
    return float(torch.finfo(dtype).eps ** 0.5)


def examine(config: Config, *, rounds: int, samples: int, other: Answer | None = None) -> SelftestReport:
    """Run all checks of a self-test; `other` gives the answer of another process that has loaded the task.

    Raises HetSeqError if the task cannot be built, as a run would.
    """
    device = torch.device(config.distributed.devices[0] if config.distributed.devices else "cpu")
    task = make_task(registry.find_task(config.task.task, user_dir=config.task.user_dir), config)
    dataset = load_split(task, config.data.train_subset)
    collate, seed = collater_of(task, dataset), config.task.seed
    is_shuffled = config.data.curriculum < 1 and lanes_of(dataset) is None
    order = epoch_order(len(dataset), seed=seed, epoch=1, shuffle=is_shuffled, block=config.data.shuffle_block)
    reader = Reader(dataset, collate, order, seed=seed)
    report = SelftestReport(
        type(task).__name__, min(samples, len(dataset)), len(dataset), rounds, "fp64", 0.0, str(device)
    )  # fmt: skip
    with _raising_into(report, task):
        own = presented(config, task, dataset) if other is not None else {}  # before any data are read again
        _examine_data(report, reader, unit=config.data.unit_size)
        terms = probe.find_terms(task, dataset, collate)
        task.update_step(0)
        bench = _bench(report, task, reader, terms, device=device, seed=seed)
        report.tolerance = tolerance_of(_DTYPES[report.precision])
        if report.samples < 2:
            report.add(
                SelftestFinding(
                    "too few samples", config.data.train_subset,
                    "the data set has one sample, so no step can be cut: nothing was compared",
                    "Use more data; 4 samples show whether a layer mixes samples, 32 are the default of --samples",
                )
            )  # fmt: skip
            return report
        _Examination(report, bench, config, rounds=rounds).run()
        if other is not None:
            _compare_processes(report, own, other())
    if config.data.max_tokens:
        report.note("--max-tokens makes no difference here: cuts of all sizes were tried")
    return report


def _compare_processes(report: SelftestReport, own: Mapping[str, str], others: Mapping[str, str] | str) -> None:
    if isinstance(others, str):
        report.note(f"the data were not compared with another process, which could not load the task ({others})")
    else:
        report.add(*of_processes(own, others))


@contextmanager
def _raising_into(report: SelftestReport, task: Task) -> Iterator[None]:
    """An exception of the task ends the examination as a finding, with the line that raised it."""
    try:
        yield
    except TaskError as error:
        report.add(
            SelftestFinding("refused", type(task).__name__, str(error), "A run would refuse it with the same message")
        )
    except Exception as error:  # the user's code may raise anything
        place = _own_line(error)
        logger.debug("the task raised", exc_info=True)
        report.add(
            SelftestFinding(
                "raised", type(task).__name__,
                f"it raised {type(error).__name__}: {error}",
                f"See {place}; `hetseq train` would fail there too" if place else "`hetseq train` would fail there too",
            )
        )  # fmt: skip


def _own_line(error: Exception) -> str | None:
    """The last line of the traceback that is neither in HetSeq nor in an installed library."""
    here = str(Path(__file__).resolve().parents[2])
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((here, "<")) and "site-packages" not in frame.filename
    ]  # fmt: skip
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def _examine_data(report: SelftestReport, reader: Reader, *, unit: int | None) -> None:
    """Check that samples do not depend on when, and with which others, they are read."""
    finding = checks.of_reading(reader, report.samples)
    if finding is not None:
        report.add(finding)
        if reader.reads_together:
            report.note("the terms are compared on samples that differ each time they are read")
        else:
            reader.keep()  # so that the terms can still be examined
    elif (batches := checks.of_batches(reader, report.samples, unit=unit)) is not None:
        report.note(batches) if isinstance(batches, str) else report.add(batches)


def _bench(
    report: SelftestReport, task: Task, reader: Reader, terms: tuple[str, ...], *, device: torch.device, seed: int
) -> Bench:
    """A bench in fp64 if forward and backward of two samples work in it, else in fp32."""

    def build(dtype: torch.dtype) -> Bench:
        seed_everything(seed)
        model = build_model(task)
        check_model(model)
        model.to(device, dtype)
        return Bench(task, model.eval(), reader, terms=terms, device=device, dtype=dtype)

    bench = build(torch.float64)
    try:
        bench.measure(whole(min(2, report.samples)))
    except TaskError:
        raise
    except Exception as error:  # the user's code may raise anything, also in fp64 only
        report.precision, bench = "fp32", build(torch.float32)
        bench.measure(whole(min(2, report.samples)))
        report.note(f"compared in fp32, because in fp64 the task raised {type(error).__name__}: {error}")
        return bench
    with Narrowing() as narrowing:
        bench.piece(range(min(2, report.samples)))
    if narrowing.is_seen:
        report.precision = "fp32"
        report.note("compared with the tolerance of fp32, because forward converts fp64 to fp32 or less")
    return bench


class _Examination:
    """The checks of the terms, in order."""

    def __init__(self, report: SelftestReport, bench: Bench, config: Config, *, rounds: int) -> None:
        self.report, self.bench, self.rounds = report, bench, rounds
        self.seed, self.unit = config.task.seed, config.data.unit_size
        self._generator = np.random.default_rng(self.seed)
        self._worst: dict[str, tuple[float, float]] = {}
        self._least = 1  # samples of a micro-batch

    def run(self) -> None:
        """Run all checks; findings and rows go into the report."""
        report, bench = self.report, self.bench
        if (alone := checks.of_one_sample(bench)) is not None:
            report.add(alone)
            self._least = 2
        report.add(*checks.of_repeating(bench, report.samples, tolerance=report.tolerance))
        is_repeatable = not any(finding.kind == "state" for finding in report.findings)
        truths = self._pass()
        self._add_rows(truths[0])
        report.add(*checks.of_nothing(bench, truths))
        self._training_mode()
        alone_works = self._least == 1
        report.add(
            *checks.of_metrics(bench, report.samples, tolerance=report.tolerance, has_singles=alone_works)
        )  # fmt: skip
        if alone_works and (lines := checks.of_predictions(bench, report.samples)) is not None:
            report.add(lines)
        if is_repeatable:  # else the weights would be blamed for it
            report.add(*checks.of_saved_weights(bench, report.samples, seed=self.seed, tolerance=report.tolerance))

    def _pass(self) -> list[MeasuredStep]:
        """Compare all rounds in the model's present mode; returns the steps in one piece."""
        truths = []
        with bar("steps tried", self.rounds) as advance:
            for number in range(self.rounds):
                first = self._first_of(number)
                truth = self.bench.measure(whole(self.report.samples, unit=self.unit), first)
                truths.append(truth)
                self.report.add(*checks.of_finite(self.bench, truth, range(first, first + self.report.samples)))
                for cut in self._cuts(number, least=self._least):
                    self._compare(truth, self.bench.measure(cut, first), first)
                advance(1)
        return truths

    def _first_of(self, number: int) -> int:
        """The first position of a round's step in the epoch; small data sets start over."""
        steps = max(self.report.of // self.report.samples, 1)
        return (number % steps) * self.report.samples

    def _cuts(self, number: int, *, least: int) -> Iterator[Cut]:
        samples = self.report.samples
        if number == 0 and self.unit is None:
            yield singles(samples, size=least)
        for ranks in (2, 3):
            yield random_cut(samples, ranks, self._generator, unit=self.unit, least=least)

    def _compare(self, truth: MeasuredStep, cut: MeasuredStep, first: int) -> None:
        tolerance = self.report.tolerance
        for term in self.bench.terms:
            gaps = loss_difference(truth, cut, term), gradient_difference(truth, cut, term)
            counts = truth.count(term), cut.count(term)
            worst = self._worst.get(term, (0.0, 0.0))
            self._worst[term] = max(worst[0], gaps[0]), max(worst[1], gaps[1])
            if max(gaps) > tolerance or abs(counts[0] - counts[1]) > tolerance * max(counts):
                self._explain(term, truth, cut, first)

    def _explain(self, term: str, truth: MeasuredStep, cut: MeasuredStep, first: int) -> None:
        """Add one reason for each term, the first that is found."""
        report = self.report
        if any(finding.name == term or finding.kind.startswith("random") for finding in report.findings):
            return
        if checks.draws_although_still(self.bench, report.samples):
            report.add(
                SelftestFinding(
                    "random loss", term,
                    "it draws for a whole micro-batch from NumPy's or Python's generator, or within an operator, and"
                    " cannot be made constant",
                    "Draw with torch, one number per sample, or give --unit-size N (docs/concepts/exactness.md)",
                )
            )  # fmt: skip
            return
        diagnosis = Diagnosis(self.bench, first, report.samples, tolerance=report.tolerance, least=self._least)
        report.add(diagnosis.of_term(term, truth, cut))

    def _add_rows(self, first: MeasuredStep) -> None:
        blamed = {finding.name for finding in self.report.findings}
        for term in self.bench.terms:
            gaps = self._worst.get(term, (0.0, 0.0))
            is_exact = max(gaps) <= self.report.tolerance and term not in blamed
            self.report.terms.append(TermRow(term, first.count(term), first.loss(term), *gaps, is_exact=is_exact))

    def _training_mode(self) -> None:
        """The same in training mode, to find layers that mix samples only there."""
        report, bench = self.report, self.bench
        if report.findings:
            return  # only for a task without other findings
        if report.samples < 4:
            report.leave_out("that takes at least 4 samples")
            return
        bench.model.train()
        try:
            forgetful = [*checks.of_repeating(bench, report.samples, tolerance=report.tolerance, mode="in training ")]
            if forgetful:
                report.add(*forgetful)
                return
            if drift := [*checks.of_drift(bench, report.samples)]:
                report.add(*drift)
                blamed = {finding.name for finding in drift}
                report.terms[:] = [
                    replace(row, is_exact=row.is_exact and row.name not in blamed) for row in report.terms
                ]
                return
            if checks.draws_random(bench, report.samples):
                report.note(
                    "the loss is random in training (dropout, noise), made constant here; a run draws per micro-batch,"
                    " so other shares give a different, equally good curve, unless --unit-size is given"
                )
            if checks.draws_although_still(bench, report.samples):
                report.leave_out("random draws of NumPy, Python or an operator cannot be made constant")
                return
            before = dict(self._worst)
            norms = [name for name, module in bench.model.named_modules() if isinstance(module, _BatchNorm)]
            self._compare_training(norms)
            self._worst = before
        finally:
            bench.model.eval()

    def _compare_training(self, norms: list[str]) -> None:
        report, bench = self.report, self.bench
        for number in range(min(self.rounds, 2)):
            first = self._first_of(number)
            truth = bench.measure(whole(report.samples, unit=self.unit), first)
            for cut in self._cuts(number, least=2):
                measured = bench.measure(cut, first)
                for term in bench.terms:
                    gaps = loss_difference(truth, measured, term), gradient_difference(truth, measured, term)
                    if max(gaps) > report.tolerance:
                        self._blame_layer(term, truth, measured, first, norms)
                        return

    def _blame_layer(self, term: str, truth: MeasuredStep, cut: MeasuredStep, first: int, norms: list[str]) -> None:
        report, bench = self.report, self.bench
        positions = range(first, first + report.samples)
        module = mixing_module(bench, positions, tolerance=report.tolerance)
        if norms and (module is None or module.partition(" ")[0] not in norms):
            kind = type(bench.model.get_submodule(norms[0])).__name__
            module = f"{norms[0] or 'the model'} ({kind})"
        found, expected = cut.loss(term), truth.loss(term)
        report.add(
            SelftestFinding(
                "batch statistics", module or term,
                f"in training it mixes the samples of a micro-batch: {term} is {expected:.6g} for the step in one piece"
                f" and {found:.6g} split over ranks",
                "Use GroupNorm or LayerNorm, or give --unit-size N: see `Batch normalisation` in"
                " docs/concepts/exactness.md",
                found, expected,
            )
        )  # fmt: skip
        for row in [row for row in report.terms if row.name == term]:
            report.terms[report.terms.index(row)] = TermRow(
                term, row.count, row.loss, loss_difference(truth, cut, term), gradient_difference(truth, cut, term),
                is_exact=False,
            )  # fmt: skip
