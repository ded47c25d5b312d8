"""`hetseq plan RUN` and `hetseq simulate FILE`: predict the speed of a training on another cluster.

Parses the two command lines, chooses the clusters to compare, and words the output. `measured_run` reads the
measurements of a run, `cluster_file` a hypothetical cluster; `simulation` computes a step. Nothing is started, and
nothing in a run directory is changed.

The one idea of `plan`: a run has measured the cost of each of its ranks, so the model can remove or add a rank. The
error of the model for the measured step is assumed to be the same factor elsewhere.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hetseq.balance.shares import NEGLIGIBLE_GAIN
from hetseq.balance.simulation import RankModel, Step, best_shares, equal_shares, learn, predict, run
from hetseq.commands.plan.cells import seconds_text, shares_text, speed_text
from hetseq.commands.plan.cluster_file import Experiment, read_experiment
from hetseq.commands.plan.failures import (
    FAILURE_OPTIONS,
    FailureAnswer,
    FailureQuestion,
    failure_facts,
    failure_lines,
    failures_of,
    survive,
)
from hetseq.commands.plan.layouts import (
    OPTIONS,
    ModelLayouts,
    ModelQuestion,
    layout_facts,
    layout_lines,
    layouts_of,
    model_in,
    question_of,
    ranks_of,
)
from hetseq.commands.plan.measured_run import MeasuredRun, named, read_measured
from hetseq.config.command_line import Argument, Command, CommandOption
from hetseq.errors import ConfigError
from hetseq.monitor.tables import Cells, table
from hetseq.run_directory import RunDirectory

_MOST_TIMES = 1e6
_LEARNED, _LEAST_LEARNED = 60_000, 10
_LATER = 7  # steps by which the noise of an added rank is shifted against the rank it copies

# the command lines


@dataclass(frozen=True)
class Addition:
    """A hypothetical rank: its speed alone, in samples per second or as a multiple of the fastest rank's."""

    name: str
    speed: float
    is_per_s: bool = False

    def __str__(self) -> str:
        return f"{self.name}:{self.speed:g}{'/s' if self.is_per_s else ''}"


@dataclass(frozen=True)
class PlanArguments:
    """`hetseq plan RUN --without RANK --add NAME:SPEED --model-parameters N --memory RANK:SIZE,... --json`."""

    run: Path
    without: tuple[int, ...] = ()
    add: tuple[Addition, ...] = ()
    model: ModelQuestion | None = None
    wants_json: bool = False


@dataclass(frozen=True)
class SimulateArguments:
    """`hetseq simulate FILE --failures-per-node-day RATE --json`."""

    file: Path
    failures: FailureQuestion | None = None
    wants_json: bool = False


def run_plan(words: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq plan RUN`: print how fast it would be on another cluster; returns 0. Raises ConfigError."""
    arguments = parse_plan(words)
    say((plan_json if arguments.wants_json else plan_text)(make_plan(arguments)))
    return 0


def run_simulate(words: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq simulate FILE`: print how fast a hypothetical cluster would be; returns 0. Raises ConfigError."""
    arguments = parse_simulate(words)
    say((simulation_json if arguments.wants_json else simulation_text)(compare(arguments)))
    return 0


def parse_plan(argv: Sequence[str]) -> PlanArguments:
    """Parse the command line of `hetseq plan`. Raises ConfigError, HelpRequested."""
    given = PLAN.read(argv)
    return PlanArguments(
        run=Path(given["RUN"]),
        without=tuple(dict.fromkeys(given["--without"])),
        add=given["--add"],
        model=question_of(given),
        wants_json=given["--json"],
    )


def parse_simulate(argv: Sequence[str]) -> SimulateArguments:
    """Parse the command line of `hetseq simulate`. Raises ConfigError, HelpRequested."""
    given = SIMULATE.read(argv)
    return SimulateArguments(Path(given["FILE"]), failures_of(given), wants_json=given["--json"])


def _rank_number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError("expected a rank number, as in --without 1; give the flag once per rank")
    return int(text)


def _addition(text: str) -> Addition:
    name, _, speed = text.rpartition(":")
    number = speed.removesuffix("/s")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not name or not 0 < value < math.inf:
        raise ValueError(
            "expected NAME:SPEED, with SPEED above 0: gpu3:2.0 is twice as fast as the fastest rank of the run,"
            " gpu3:120/s makes 120 samples per second"
        )
    return Addition(name, value, is_per_s=number != speed)


PLAN = Command(
    "plan",
    "Predict how fast a run would be with the best shares, without a rank, or with another one.",
    usage=(
        "RUN [--without RANK]... [--add NAME:SPEED]... [--json]",
        "RUN --model-parameters N --memory RANK:SIZE,... [options]",
    ),
    words=(
        Argument("RUN", "the --save-dir of a run, finished or not; nothing in it is changed"),
        CommandOption(
            "--without", "predict the step without this rank; give it once per rank", "RANK", read=_rank_number,
            is_many=True,
        ),
        CommandOption(
            "--add",
            "predict the step with one more rank: gpu3:2.0 is twice as fast as the fastest rank of the run, gpu3:120/s"
            " makes 120 samples per second alone; give it once per rank",
            "NAME:SPEED",
            read=_addition,
            is_many=True,
        ),
        *OPTIONS,
        CommandOption("--json", "print one line of JSON, for scripts"),
    ),
    examples=(
        "hetseq plan runs/mnist",
        "hetseq plan runs/mnist --without 1 --add gpu3:2.0",
        "hetseq plan runs/pair --model-parameters 1.3e9 --memory 0:24G,1:11G,server:64G --stable server",
    ),
)  # fmt: skip

SIMULATE = Command(
    "simulate",
    "Predict how fast a cluster described in a YAML file would be, also while nodes fail.",
    usage=("FILE [--json]", "FILE --failures-per-node-day RATE [options]"),
    words=(
        Argument("FILE", "YAML: groups of ranks, their speeds and links, a global batch"),
        *FAILURE_OPTIONS,
        CommandOption("--json", "print one line of JSON, for scripts"),
    ),
    examples=(
        "hetseq simulate cluster.yaml",
        "hetseq simulate cluster.yaml --failures-per-node-day 0.01 --repair-minutes 60",
    ),
    notes=("The keys of the file are in docs/guides/plan.md.",),
)


# plan


@dataclass(frozen=True)
class Scenario:
    """One cluster and its step. `ranks` are the run's own rank numbers, None for an added rank."""

    title: str
    ranks: tuple[int | None, ...]
    names: tuple[str, ...]
    step: Step


@dataclass(frozen=True)
class ClusterPlan:
    """The result of `hetseq plan`: the run as it is, with the best shares, with other ranks; and advice."""

    measured: MeasuredRun
    now: Scenario
    best: Scenario
    others: tuple[Scenario, ...]
    advice: tuple[str, ...]
    layouts: ModelLayouts | None = None
    notes: tuple[str, ...] = ()


def make_plan(arguments: PlanArguments) -> ClusterPlan:
    """The answer to `hetseq plan`. Raises ConfigError for a run without measurements, or an unknown rank."""
    options = _options_of(arguments.run)
    if options.get("data_by_host"):
        raise ConfigError(
            f"{arguments.run} trains with --data-by-host: the data on each host decide its share, but hetseq plan"
            " predicts for ranks that can do each other's work"
        )
    unit = options.get("unit_size")
    measured = replace(read_measured(arguments.run), unit=unit if isinstance(unit, int) and unit > 0 else 1)
    world_size = len(measured.ranks)
    for rank in arguments.without:
        if rank >= world_size:
            raise ConfigError(f"--without {rank}: expected a rank of {measured.run}, which has 0 to {world_size - 1}")
    added = tuple(_added_rank(measured, addition, at) for at, addition in enumerate(arguments.add))
    changes: list[tuple[str, tuple[int, ...], tuple[RankModel, ...]]]
    changes = [(f"without {_named(measured, [rank])}", (rank,), ()) for rank in arguments.without]
    changes += [(f"with {addition}", (), (rank,)) for addition, rank in zip(arguments.add, added)]
    if len(changes) > 1:
        changes = [change for change in changes if len(change[1]) < world_size] + [
            ("with all these changes", arguments.without, added)
        ]
    best = _scenario(measured, "with the best shares")
    step = predict(measured.ranks, measured.shares, communication_s=measured.communication_s, scale=measured.scale)
    now = replace(best, title="now, as measured", step=step)
    if best.step.step_s > now.step.step_s:  # noise is part of the step, but not of the choice of shares
        best = replace(best, step=step)
    layouts, notes = None, list(measured.notes)
    if arguments.model is not None:
        staying = [rank for rank in range(world_size) if rank not in arguments.without]
        ranks, assumed = ranks_of(arguments.model, measured, staying, added)
        notes += assumed
        layouts = layouts_of(ranks, model_in(arguments.model, options), measured.total)
    return ClusterPlan(
        layouts=layouts,
        notes=tuple(notes),
        measured=measured,
        now=now,
        best=best,
        others=tuple(_scenario(measured, title, without, added) for title, without, added in changes),
        advice=tuple(_advice(measured, now.step, best.step)),
    )


def _options_of(run: Path) -> dict[str, Any]:
    """The options of the run by name; empty if they cannot be read, because the measurements are enough."""
    try:
        options = yaml.safe_load(RunDirectory(run).config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return options if isinstance(options, dict) else {}


def _added_rank(measured: MeasuredRun, addition: Addition, at: int) -> RankModel:
    """A rank with all costs of the fastest rank times a factor; `at`: the number of ranks added before it.

    It is as noisy as the fastest rank, but at other times.
    """
    fastest = max(measured.ranks, key=lambda rank: rank.alone_per_s(measured.total))
    factor = addition.speed
    if addition.is_per_s:
        factor *= measured.scale / fastest.alone_per_s(measured.total)
    if not 1 / _MOST_TIMES <= factor <= _MOST_TIMES:
        raise ConfigError(
            f"--add {addition}: {factor:.2g} times as fast as the fastest rank of {measured.run}; expected from"
            f" {1 / _MOST_TIMES:g} to {_MOST_TIMES:g} times"
        )
    cost = replace(fastest.cost, limit=None).scaled(1 / factor)
    later = (at + 1) * _LATER % max(1, len(fastest.noise))
    return RankModel(addition.name, cost, fastest.overhead_s / factor, fastest.noise[later:] + fastest.noise[:later])


def _scenario(
    measured: MeasuredRun, title: str, without: Sequence[int] = (), added: Sequence[RankModel] = ()
) -> Scenario:
    staying = [rank for rank in range(len(measured.ranks)) if rank not in without]
    ranks = [*(measured.ranks[rank] for rank in staying), *added]
    if all(rank.cost.limit == 0 for rank in ranks):
        raise ConfigError(
            f"{title}: no rank with a known speed is left; expected at least one rank of {measured.run} that has had"
            " samples, or one from --add"
        )
    step = predict(
        ranks,
        best_shares(ranks, measured.total, measured.unit),
        communication_s=measured.communication_of(len(ranks)),
        scale=measured.scale,
    )
    return Scenario(title, (*staying, *(None for _ in added)), tuple(rank.name for rank in ranks), step)


def _advice(measured: MeasuredRun, now: Step, best: Step) -> list[str]:
    """Advice from the prediction for this run, one sentence each."""
    busy = [rank.busy_s(share) for rank, share in zip(measured.ranks, measured.shares)]
    lines = [f"{_named(measured, [busy.index(max(busy))])} sets the pace"] if len(busy) > 1 else []
    if best.step_s < (1 - NEGLIGIBLE_GAIN) * now.step_s:
        lines.append(
            f"other shares make this run faster: a step takes {seconds_text(best.step_s)} instead of"
            f" {seconds_text(now.step_s)} (--balance auto finds them)"
        )
    names = [rank.name.rpartition("/")[2].partition(":")[0] for rank in measured.ranks]
    beside_gpu = [rank for rank, device in enumerate(names) if device == "cpu" and set(names) != {"cpu"}]
    # A rank with work can only slow the exchange, and one rank of nine accounts for less than 2 % of that.
    single = [rank for rank, share in enumerate(best.shares) if len(names) <= 8 or share == 0 or rank in beside_gpu]
    judged = [[rank] for rank in single] + [beside_gpu] * (len(beside_gpu) > 1)
    for group in judged:
        others = [rank for rank in range(len(names)) if rank not in group]
        if all(measured.ranks[rank].cost.limit == 0 for rank in others):
            continue
        without = _scenario(measured, "", group).step
        one = len(group) == 1
        who = "it" if one else "them"
        times = f"without {who} a step takes {seconds_text(without.step_s)} instead of {seconds_text(best.step_s)}"
        if without.step_s < (1 - NEGLIGIBLE_GAIN) * best.step_s:
            lines.append(f"{_named(measured, group)} slow{'s' * one} this run: {times}")
        elif set(group) <= set(beside_gpu) and without.step_s > (1 + NEGLIGIBLE_GAIN) * best.step_s:
            lines.append(f"{_named(measured, group)} help{'s' * one}: {times}")
        elif set(group) <= set(beside_gpu):
            lines.append(f"{_named(measured, group)} make{'s' * one} no difference: {times}")
    return lines


def _named(measured: MeasuredRun, ranks: Sequence[int]) -> str:
    """`rank 2 (labB/cpu)`, or `ranks 1, 2` for several."""
    if len(ranks) > 1:
        return f"ranks {', '.join(map(str, ranks))}"
    return named(ranks[0], measured.ranks[ranks[0]].name)


# simulate


@dataclass(frozen=True)
class Trial:
    """One way to run a cluster, and its mean step."""

    title: str
    step: Step


@dataclass(frozen=True)
class ClusterComparison:
    """The result of `hetseq simulate`: equal shares, the best shares, also for other global batches; and advice."""

    experiment: Experiment
    trials: tuple[Trial, ...]
    advice: tuple[str, ...]
    layouts: ModelLayouts | None = None
    failures: FailureAnswer | None = None

    @property
    def balanced(self) -> Step:
        """The step of the main global batch with the best shares."""
        return self.trials[1].step


def compare(arguments: SimulateArguments) -> ClusterComparison:
    """The answer to `hetseq simulate`. Raises ConfigError for an invalid file."""
    experiment = read_experiment(arguments.file)
    cluster, clock, total = experiment.cluster, experiment.clock, experiment.global_batches[0]
    trials = [
        Trial("equal shares", run(cluster, equal_shares(cluster, total), clock)),
        *(
            Trial("best shares", run(cluster, best_shares(cluster.ranks, batch), clock))
            for batch in experiment.global_batches
        ),
    ]
    balanced = trials[1].step
    # learning is plain Python: about two seconds for `_LEARNED` micro-batches
    computed = sum(max(1, rank.cost.batches(share)) for share, rank in zip(balanced.shares, cluster.ranks))
    watched = min(clock.steps, _LEARNED // computed)
    if watched >= _LEAST_LEARNED:
        shares = learn(cluster, total, replace(clock, steps=watched))
        trials.insert(2, Trial(f"learned in {watched} steps", run(cluster, shares, clock)))
    advice = [f"the best shares make a step {trials[0].step.step_s / balanced.step_s:.3g} times as fast as equal ones"]
    for group in cluster.groups[: len(cluster.groups) if len(cluster.groups) > 1 else 0]:
        others = cluster.without(group.name)
        without = run(others, best_shares(others.ranks, total), clock)
        if without.step_s < (1 - NEGLIGIBLE_GAIN) * balanced.step_s:
            times = f"without it a step takes {seconds_text(without.step_s)} instead of {seconds_text(balanced.step_s)}"
            advice.append(f"{group.name} slows this cluster: {times}")
    memory, layouts = experiment.memory, None
    if memory is not None:
        layouts = layouts_of(memory.ranks, memory.model, total, memory.groups)
    failures = None
    if arguments.failures is not None:
        failures = survive(arguments.failures, cluster, calm=balanced, seed=clock.seed)
    return ClusterComparison(experiment, tuple(trials), tuple(advice), layouts, failures)


# text and JSON


def plan_text(plan: ClusterPlan) -> str:
    """The plan as text."""
    measured = plan.measured
    has_stairs = any(model.cost.batch for model in measured.ranks)
    heads = ("fixed", "per sample", *(("per micro-batch",) if has_stairs else ()), "alone, samples/s")
    ranks: list[Cells] = [("rank", "where", "share", "best", *heads)]
    for rank, model in enumerate(measured.ranks):
        shares = str(measured.shares[rank]), str(plan.best.step.shares[rank])
        ranks.append((str(rank), model.name, *shares, *_cost_cells(model, measured, has_stairs)))
    scenarios: list[Cells] = [("", "step", "of it exchange", "samples/s", "efficiency", "shares")]
    for scenario in (plan.now, plan.best, *plan.others):
        times = seconds_text(scenario.step.step_s), seconds_text(scenario.step.communication_s)
        shown = shares_text(scenario.step.shares)
        scenarios.append((scenario.title, *times, *_speed_cells(scenario.step), shown))
    lines = [
        f"{measured.run}: {measured.total} samples a step; medians of {measured.steps} steps up to step"
        f" {measured.last_step}",
        "",
        *table(ranks, left=(1,)),
        "",
        *table(scenarios, left=(0, 5)),
        "",
        *plan.advice,
        *(["", *layout_lines(plan.layouts)] if plan.layouts else []),
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def plan_json(plan: ClusterPlan) -> str:
    """The plan as one line of JSON."""
    measured = plan.measured
    return json.dumps(
        {
            "run": str(measured.run),
            "steps": measured.steps,
            "last_step": measured.last_step,
            "global_batch": measured.total,
            "scale": measured.scale,
            "scenarios": [
                {"title": scenario.title, "ranks": scenario.ranks, "names": scenario.names,
                 "shares": scenario.step.shares, **_step_facts(scenario.step)}
                for scenario in (plan.now, plan.best, *plan.others)
            ],
            "advice": plan.advice,
            "notes": plan.notes,
            **({"model": layout_facts(plan.layouts)} if plan.layouts else {}),
        }
    )  # fmt: skip


def simulation_text(comparison: ClusterComparison) -> str:
    """The comparison as text."""
    cluster, clock = comparison.experiment.cluster, comparison.experiment.clock
    trials: list[Cells] = [
        ("", "samples a step", "step", "computing", "waiting", "exchange", "samples/s", "efficiency")
    ]
    for trial in comparison.trials:
        times = map(seconds_text, _times(trial.step))
        trials.append((trial.title, str(sum(trial.step.shares)), *times, *_speed_cells(trial.step)))
    groups: list[Cells] = [("group", "ranks", "samples each", "of the step")]
    for group, shares in cluster.by_group(comparison.balanced.shares):
        part = sum(shares) / sum(comparison.balanced.shares)
        groups.append((group.name, str(group.count), shares_text(shares, shown=1), f"{part:.1%}"))
    lines = [
        f"{cluster.world_size} ranks, gradients of {cluster.gradient_bytes / 1e6:,.4g} MB; means of {clock.steps}"
        f" steps, noise {clock.noise:g}, seed {clock.seed}",
        "",
        *table(trials, left=(0,)),
        "",
        *table(groups, left=(0,)),
        "",
        *comparison.advice,
        *(["", *layout_lines(comparison.layouts)] if comparison.layouts else []),
        *(["", *failure_lines(comparison.failures)] if comparison.failures else []),
    ]
    return "\n".join(lines)


def simulation_json(comparison: ClusterComparison) -> str:
    """The comparison as one line of JSON."""
    cluster = comparison.experiment.cluster
    return json.dumps(
        {
            "ranks": cluster.world_size,
            "steps": comparison.experiment.clock.steps,
            "trials": [
                {
                    "title": trial.title,
                    "global_batch": sum(trial.step.shares),
                    **_step_facts(trial.step),
                    "groups": [
                        {"name": group.name, "ranks": group.count, "samples": sum(shares), "least": min(shares),
                         "most": max(shares)}
                        for group, shares in cluster.by_group(trial.step.shares)
                    ],
                }
                for trial in comparison.trials
            ],
            "advice": comparison.advice,
            **({"model": layout_facts(comparison.layouts)} if comparison.layouts else {}),
            **({"failures": failure_facts(comparison.failures)} if comparison.failures else {}),
        }
    )  # fmt: skip


def _times(step: Step) -> tuple[float, float, float, float]:
    return step.step_s, step.computing_s, step.waiting_s, step.communication_s


def _step_facts(step: Step) -> dict[str, float]:
    names = ("step_s", "computing_s", "waiting_s", "communication_s")
    return {**dict(zip(names, _times(step))), "samples_per_s": step.samples_per_s, "efficiency": step.efficiency}


def _cost_cells(rank: RankModel, measured: MeasuredRun, has_stairs: bool) -> Cells:
    cost = rank.cost
    if cost.limit == 0:
        return ("?",) * (4 if has_stairs else 3)
    stairs = f"{seconds_text(cost.per_batch_s)} of {cost.batch}" if cost.batch else "-"
    alone = speed_text(rank.alone_per_s(measured.total) / measured.scale)
    return (seconds_text(cost.fixed_s), seconds_text(cost.per_unit_s), *((stairs,) if has_stairs else ()), alone)


def _speed_cells(step: Step) -> tuple[str, str]:
    return speed_text(step.samples_per_s), f"{step.efficiency:.0%}"
