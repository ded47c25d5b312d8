"""Failures of a cluster on paper: the options of `hetseq simulate` about them, and the answer as text and JSON.

Responsible for three things: it reads how often nodes fail and how long a recovery takes, fills in options that were
not given, and writes the result of `balance.goodput` as text. It simulates nothing itself.

Defaults are figures of this repository. A restart takes 4.1 s and a regroup 0.1 s, as bench/recover.py measured for
three ranks of one machine under torchrun and under HetSeq (docs/concepts/benchmarks.md). A save costs 8 % of a step:
40 steps with four saves took 1.008 times as long in bench/checkpoint.py. The rest are defaults of `hetseq train`:
--persistent-time-interval, --step-deadline, --memory-interval-updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetseq.balance.goodput import (
    DAY_S,
    Disk,
    FailureLaw,
    Goodput,
    NodeGroup,
    Way,
    best_interval_s,
    draw,
    images,
    live,
    restart,
    retry,
    step_time,
)
from hetseq.balance.simulation import Cluster, Step, best_step_s
from hetseq.commands.plan.cells import seconds_text
from hetseq.config.command_line import CommandOption, Given, number_within, seconds, whole_number
from hetseq.errors import ConfigError
from hetseq.monitor.tables import Cells, table

BEST = "best"
_INTERRUPTIONS = 4000  # simulated ones: the lost time is within 2 % of its mean
_REPAIR_MINUTES = 60.0
_SAVE_MINUTES = 10.0  # --persistent-time-interval
_SAVE_STEPS = 0.08  # bench/checkpoint.py, `run`: 0.8 % of 40 steps for four saves
_RESTART_S, _REGROUP_S = 4.1, 0.1  # bench/recover.py
_DEADLINE_STEPS, _LEAST_DEADLINE_S = 10, 5.0  # --step-deadline
_IMAGE_SHARE, _LEAST_IMAGE_S = 100, 1.0  # --memory-interval-updates: a hundredth of the time, at most once a second
_STATE = 3  # parameters and two moments, in bytes of the gradient
_MOST_PER_DAY, _MOST_MINUTES, _MOST_SECONDS, _MOST_STEPS = 1e6, 1e6, 1e6, 10**9
_HOUR_S = 3600.0

# the question


@dataclass(frozen=True)
class Preemption:
    """Each node of a group is preempted so often a day, and is away for so long."""

    group: str
    per_day: float
    minutes: float

    def __str__(self) -> str:
        return f"{self.group}:{self.per_day:g}:{self.minutes:g}"


@dataclass(frozen=True)
class FailureQuestion:
    """The options about failures. None: chosen for the cluster; `save_minutes` may be `best`."""

    per_node_day: float
    repair_minutes: float
    preemptions: tuple[Preemption, ...]
    save_minutes: float | str
    save_s: float | None
    detect_s: float | None
    restart_s: float
    regroup_s: float
    image_steps: int | None


def _per_day(text: str) -> float:
    return number_within(text, 1e-9, _MOST_PER_DAY, "failures of one node in a day, above 0, as in 0.01")


def _minutes(text: str) -> float:
    return number_within(text, 0, _MOST_MINUTES, "minutes of 0 or more, as in 60")


def _save_minutes(text: str) -> float | str:
    what = "minutes above 0, as in 10, or best for the interval with the most goodput"
    return BEST if text == BEST else number_within(text, 1e-6, _MOST_MINUTES, what)


def _preemption(text: str) -> Preemption:
    group, *numbers = text.rsplit(":", 2)
    try:
        if not group or len(numbers) != 2:
            raise ValueError
        return Preemption(
            group, number_within(numbers[0], 1e-9, _MOST_PER_DAY, ""), number_within(numbers[1], 0, _MOST_MINUTES, "")
        )
    except ValueError:
        raise ValueError(
            "expected GROUP:PER_DAY:MINUTES, as in pool-room:2:30 for nodes that are away twice a day for 30 minutes"
        ) from None


_RATE, _PREEMPTIONS = "--failures-per-node-day", "--preemptions"
FAILURE_OPTIONS = (
    CommandOption(
        _RATE,
        "also print the goodput if each node fails so often a day, as in 0.01: with restarts from checkpoints, with"
        " retry in place, and with images in the memory of other nodes",
        "RATE",
        read=_per_day,
    ),
    CommandOption(
        _PREEMPTIONS,
        "also print the goodput if each node of a group is preempted PER_DAY times a day and away for MINUTES; give it"
        " once per group",
        "GROUP:PER_DAY:MINUTES",
        read=_preemption,
        is_many=True,
    ),
    CommandOption(
        "--repair-minutes", f"until a failed node takes part again; default: {_REPAIR_MINUTES:g}", "M", read=_minutes
    ),
    CommandOption(
        "--save-minutes",
        f"between two checkpoints on disk; best: for restarts, the interval with the most goodput, and"
        f" {_SAVE_MINUTES:g} for the others; default: {_SAVE_MINUTES:g}",
        "M",
        read=_save_minutes,
    ),
    CommandOption(
        "--save-seconds",
        f"how long training halts for a checkpoint; default: {_SAVE_STEPS:.0%} of a step",
        "S",
        read=seconds(0, _MOST_SECONDS),
    ),
    CommandOption(
        "--detect-seconds",
        f"until a failure is noticed; 0 for processes that end; default, for nodes that fall silent: {_DEADLINE_STEPS}"
        f" steps and at least {_LEAST_DEADLINE_S:g} s, as --step-deadline",
        "S",
        read=seconds(0, _MOST_SECONDS),
    ),
    CommandOption(
        "--restart-seconds",
        "to start all processes again and load a checkpoint; default:"
        f" {_RESTART_S:g}, as measured for three ranks and a tiny model",
        "S",
        read=seconds(0, _MOST_SECONDS),
    ),
    CommandOption(
        "--regroup-seconds",
        f"until the others continue in their processes; default: {_REGROUP_S:g}, as measured for three ranks",
        "S",
        read=seconds(0, _MOST_SECONDS),
    ),
    CommandOption(
        "--image-steps",
        "steps between two images of the state in the memory of other nodes; default: as often as they take a hundredth"
        " of the time, at most once a second",
        "K",
        read=whole_number(1, _MOST_STEPS),
    ),
)


def failures_of(given: Given) -> FailureQuestion | None:
    """The question in these words; None without one. Raises ConfigError for options that lack a rate."""
    values = {option.flag: given[option.flag] for option in FAILURE_OPTIONS}
    rate, preemptions = values[_RATE], values[_PREEMPTIONS]
    if rate is None and not preemptions:
        for flag, value in values.items():
            if value not in (None, ()):
                raise ConfigError(f"{flag} belongs to {_RATE} RATE: add that, or leave {flag} out")
        return None
    if rate is None and (flag := _given_beside_preemptions(values)):
        raise ConfigError(f"{flag} is about failures, and {_PREEMPTIONS} alone has none: add {_RATE} RATE")

    def chosen(flag: str, default: float) -> float:
        return default if values[flag] is None else float(values[flag])

    save = values["--save-minutes"]
    return FailureQuestion(
        per_node_day=rate or 0.0,
        repair_minutes=chosen("--repair-minutes", _REPAIR_MINUTES),
        preemptions=preemptions,
        save_minutes=_SAVE_MINUTES if save is None else save,
        save_s=values["--save-seconds"],
        detect_s=values["--detect-seconds"],
        restart_s=chosen("--restart-seconds", _RESTART_S),
        regroup_s=chosen("--regroup-seconds", _REGROUP_S),
        image_steps=values["--image-steps"],
    )


def _given_beside_preemptions(values: Mapping[str, Any]) -> str:
    """An option that says nothing where nodes are preempted but do not fail; "" if there is none."""
    idle = [flag for flag in ("--repair-minutes", "--detect-seconds") if values[flag] is not None]
    return next(iter(idle), f"--save-minutes {BEST}" if values["--save-minutes"] == BEST else "")


# the answer


@dataclass(frozen=True)
class FailureAnswer:
    """The ways to survive failures, and the goodput of each with the same failures."""

    question: FailureQuestion
    nodes: int
    interruptions_per_day: float
    ways: tuple[Way, ...]
    found: tuple[Goodput, ...]


def survive(question: FailureQuestion, cluster: Cluster, *, calm: Step, seed: int) -> FailureAnswer:
    """Simulate each way with the same failures; `calm` is a step with all nodes. Raises ConfigError."""
    groups = _node_groups(question, cluster)
    law = FailureLaw(question.per_node_day / DAY_S, question.repair_minutes * 60)
    ways = _ways(question, cluster, calm, law.failures_per_s * sum(group.nodes for group in groups))
    rate = law.interruptions_per_s(groups)
    wall_s = _INTERRUPTIONS / rate
    absences = draw(groups, law, horizon_s=wall_s, generator=np.random.default_rng(seed))
    total = sum(calm.shares)
    step_s = step_time(
        cluster, total, ranks_per_node=[group.ranks_per_node for group in cluster.groups],
        stretch=(calm.computing_s + calm.waiting_s) / best_step_s(cluster.groups, total),
    )  # fmt: skip
    nodes = [group.nodes for group in groups]
    found = tuple(live(way, absences, nodes=nodes, step_s=step_s, wall_s=wall_s) for way in ways)
    return FailureAnswer(question, sum(nodes), rate * DAY_S, ways, found)


def _node_groups(question: FailureQuestion, cluster: Cluster) -> list[NodeGroup]:
    names = [group.name for group in cluster.groups]
    taken: dict[str, Preemption] = {}
    for preemption in question.preemptions:
        if preemption.group not in names:
            raise ConfigError(f"{_PREEMPTIONS} {preemption}: expected a group that computes: {', '.join(names)}")
        if preemption.group in taken:
            raise ConfigError(f"{_PREEMPTIONS} {preemption}: {preemption.group} is given twice: give each group once")
        taken[preemption.group] = preemption
    groups = []
    for group in cluster.groups:
        preempted, nodes = taken.get(group.name), group.count // group.ranks_per_node
        if preempted is None:
            groups.append(NodeGroup(nodes))
        else:
            groups.append(NodeGroup(nodes, preempted.per_day / DAY_S, preempted.minutes * 60))
    return groups


def _ways(question: FailureQuestion, cluster: Cluster, calm: Step, failures_per_s: float) -> tuple[Way, ...]:
    step_s, state_bytes = calm.step_s, _STATE * cluster.gradient_bytes
    slowest = min(group.link.bytes_per_s for group in cluster.groups)
    save_s = _SAVE_STEPS * step_s if question.save_s is None else question.save_s
    detect_s = question.detect_s
    if detect_s is None:
        detect_s = max(_LEAST_DEADLINE_S, _DEADLINE_STEPS * step_s)
    is_best = isinstance(question.save_minutes, str)
    between_s = 60 * (_SAVE_MINUTES if is_best else float(question.save_minutes))
    often_s = best_interval_s(save_s, 1 / failures_per_s) if is_best else between_s
    often, disk = (Disk(max(1, round(each_s / step_s)), save_s, question.restart_s) for each_s in (often_s, between_s))
    regroup_s = question.regroup_s
    image_s = state_bytes / cluster.world_size / slowest
    every = question.image_steps or math.ceil(max(_LEAST_IMAGE_S, _IMAGE_SHARE * image_s) / step_s)
    return (
        restart(often, detect_s=detect_s),
        retry(disk, regroup_s=regroup_s, detect_s=detect_s, join_s=regroup_s + state_bytes / slowest),
        images(disk, regroup_s=regroup_s, detect_s=detect_s, every=every, image_s=image_s),
    )


# text and JSON


def failure_lines(answer: FailureAnswer) -> list[str]:
    """The answer as text, for a terminal of 80 columns."""
    way, imaged = answer.ways[0], answer.ways[-1]
    rows: list[Cells] = [("per day", "goodput", "steps again", "hours lost", "halted", "again", "saves", "fewer nodes")]
    for one, found in zip(answer.ways, answer.found):
        facts = _facts(found)
        hours = (
            f"{round(facts[name], 2) + 0.0:.2f}"
            for name in ("hours_lost", "halted_h", "again_h", "saving_h", "slower_h")
        )
        rows.append((one.name, f"{found.fraction:.1%}", f"{facts['steps_again']:,.0f}", *hours))
    every = "in every step" if imaged.live_steps == 1 else f"every {imaged.live_steps} steps"
    kinds = [f"{answer.question.per_node_day:g} failures of each a day"] if answer.question.per_node_day else []
    kinds += [f"{one.per_day:g} preemptions of each of {one.group} a day" for one in answer.question.preemptions]
    return [
        f"{answer.nodes} nodes: {', '.join(kinds)}",
        f"{answer.interruptions_per_day:,.4g} a day in all; means of {_INTERRUPTIONS} simulated ones",
        "",
        *table(rows, left=(0,)),
        "",
        f"restart: a save every {way.disk.steps} steps; all ranks start again in {seconds_text(way.disk.restart_s)}",
        f"retry: replicas; the others continue after {seconds_text(imaged.regroup_s)} and do one step again",
        f"images: owners; each part is copied to another node {every}",
        f"a failure is noticed after {seconds_text(way.detect_s)}, a save halts {seconds_text(way.disk.save_s)}",
    ]


def failure_facts(answer: FailureAnswer) -> dict[str, Any]:
    """The answer for JSON."""
    ways: Sequence[tuple[Way, Goodput]] = list(zip(answer.ways, answer.found))
    return {
        "nodes": answer.nodes,
        "interruptions_per_day": answer.interruptions_per_day,
        "simulated_days": answer.found[0].wall_s / DAY_S,
        "ways": [
            {
                "name": way.name, "goodput": found.fraction, **_facts(found), "detect_s": way.detect_s,
                "halt_s": way.halt_s, "join_s": way.join_s, "kept_steps": way.kept_steps,
                "save_steps": way.disk.steps, "save_s": way.disk.save_s, "image_s": way.live_s,
            }
            for way, found in ways
        ],
    }  # fmt: skip


def _facts(found: Goodput) -> dict[str, float]:
    """Per day: steps done again, and hours lost in all and by kind."""
    days = found.wall_s / DAY_S
    return {
        "steps_again": found.again_steps / days,
        "hours_lost": (1 - found.fraction) * DAY_S / _HOUR_S,
        "halted_h": found.halted_s / days / _HOUR_S,
        "again_h": found.again_s / days / _HOUR_S,
        "saving_h": found.saving_s / days / _HOUR_S,
        "slower_h": found.slower_s / days / _HOUR_S,
    }
