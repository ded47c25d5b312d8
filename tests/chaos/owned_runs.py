"""Runs with owners whose processes are killed on purpose, what they have left, and the undisturbed run beside them.

Three ranks, or more. Each replacement of the victim is killed in the next phase, so that one run shows all of them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetseq.system.faults import ROUND_PHASES
from hetseq.testing import Faults
from tests.chaos.runs import Chaos, Outcome, verdict
from tests.support.watched import LAYERS, Computed, read_computed, write_task

STEPS, CURVE = 100, 1e-12
#: phases of a step, and the steps after which the others may continue, counted from the step of the kill. The dead rank
#: may have seen a verdict that had not reached the others yet; then they lack one step more
PHASES = {
    "count": (-2, -1), "forward_backward": (-1,), "reduce": (-1,), "commit": (-1,),
    "transfer": (-1,), "clip": (-1, 0), "optimizer": (-1, 0), "boundary": (-1, 0), "snapshot": (-1, 0),
}  # fmt: skip
IN_STEPS = [phase for phase in PHASES if phase != "transfer"]
#: the same with --shard-model all
IN_LAYERS = dict.fromkeys(ROUND_PHASES, (-1,))
NO_SAVE = "--no-save with --memory-interval-updates 0 keeps no state: if a rank that owns a part of it is lost"


def one_after_the_other(victim: int, *, nth: int, phases: Iterable[str] = IN_STEPS) -> Faults:
    """Each process in that slot is killed in another phase, the nth time that it passes it."""
    faults = Faults()
    for incarnation, phase in enumerate(phases):
        faults = faults.kill(rank=victim).at(phase=phase, nth=nth, incarnation=incarnation)
    return faults


ONE = Faults()
#: kills in the phases of a recovery, and whether an owner is among the victims
RECOVERIES = {
    "an owner, while it recovers": (ONE.kill(rank=1).at(step=8, phase="reduce").kill(rank=2).at(phase="regroup"), True),
    "an owner that gives parts": (ONE.kill(rank=1).at(step=8, phase="reduce").kill(rank=2).at(phase="transfer"), True),
    "replacements of a rank that owns nothing": (
        ONE.kill(rank=1).at(step=8, phase="reduce")
        .kill(rank=1).at(phase="join", incarnation=1)
        .kill(rank=1).at(phase="form", incarnation=2)
        .kill(rank=1).at(phase="transfer", incarnation=3)
        .kill(rank=1).at(phase="loading", incarnation=4),
        False,
    ),
    "replacements of an owner": (
        ONE.kill(rank=2).at(step=8, phase="reduce")
        .kill(rank=2).at(phase="join", incarnation=1)
        .kill(rank=2).at(phase="form", incarnation=2)
        .kill(rank=2).at(phase="loading", incarnation=3)
        .kill(rank=0).at(phase="form", nth=4),
        True,
    ),
    "both owners in the same instant": (
        ONE.kill(rank=0).at(step=8, phase="commit").kill(rank=2).at(step=8, phase="commit"), True,
    ),
}  # fmt: skip
OFTEN = ["an owner that gives parts", "replacements of an owner"]


class Run:
    """A run with owners and kills, and what it has left."""

    def __init__(
        self, chaos: Chaos, folder: Path, faults: Faults, *, task: dict[str, Any], ranks: int = 3, **options: Any
    ) -> None:
        self.ranks = ranks
        name, diary = write_task(folder / "watched", computing=ranks, **task), folder / "diary"
        told: dict[str, Any] = {"shard_model": "state", "bucket_cap_mb": "0.0001"}
        if task.get("has_layers"):
            told = {"shard_model": "all", "shard_modules": LAYERS}
        told |= {"balance": "5,4,3", "step_deadline": 60, **options}
        self.found = chaos.run(faults=faults.diary(diary).text(), task=name, ranks=ranks, steps=STEPS, **told)
        self.said = self.found.said
        lines = (chaos.newest / "metrics.jsonl").read_text().splitlines()
        self.written = [json.loads(line) for line in lines]  # also rows of steps that were done again
        lines = diary.read_text().splitlines() if diary.exists() else []
        self.kills = [json.loads(line) for line in lines]
        assert len(self.kills) == len(faults.faults), f"not all kills have happened: {self.kills}\n{self.said}"
        self.losses = [event for event in self.found.events if "was killed (SIGKILL" in event.get("story", "")]
        assert ("fell silent" in self.said) == any(fault.kind == "stop" for fault in faults.faults), self.said
        self.computed = read_computed(folder / "watched")

    def check_curve(self, calm: Calm) -> None:
        """The curve and the parameters at the end are those of one device."""
        fault = verdict(self.found, calm.outcome)
        assert not fault, f"{fault}\n{self.said}"
        self.check_losses(calm)
        assert NO_SAVE not in self.said

    def check_losses(self, calm: Calm) -> None:
        """Each step was made once, with the loss of one device."""
        pairs = list(zip(self.found.rows, calm.outcome.rows, strict=True))
        assert all(row["step"] == right["step"] for row, right in pairs)
        worst = max(abs(row["loss"] - right["loss"]) / abs(right["loss"]) for row, right in pairs)
        assert worst <= CURVE, f"{worst:.1e}"


@dataclass(frozen=True)
class Calm:
    """The run of one device, undisturbed."""

    outcome: Outcome
    samples_of: list[set[int]]  # of each step


def calm_run(chaos: Chaos, folder: Path, **kinds: bool) -> Calm:
    """The run of one device, undisturbed; `kinds` as for `write_task`."""
    outcome = chaos.run(ranks=1, steps=STEPS, task=write_task(folder / "watched", computing=1, **kinds))
    assert outcome.code == 0, outcome.said
    (computed,) = read_computed(folder / "watched")
    (forwards,) = computed.lives
    assert len(forwards) == STEPS
    return Calm(outcome, [set(numbers) for numbers in forwards])


def check_survivors(
    computed: list[Computed],
    kills: list[dict[str, Any]],
    samples_of: list[set[int]],
    *,
    back: int = 0,
    ranks: int = 3,
) -> Counter[int]:
    """The processes that no kill has hit have computed in all steps; how often each step was begun, by the process that
    began it most often. They go back by at most `back` steps.
    """
    assert len(computed) == ranks + len(kills)
    lives = [one.steps(samples_of, back=back) for one in computed if one.pid not in {kill["pid"] for kill in kills}]
    survivors = [steps for (steps,) in lives if steps[0] == 1]
    assert len(survivors) == ranks - len({kill["slot"] for kill in kills})
    assert all(sorted(set(steps)) == list(range(1, STEPS + 1)) for steps in survivors)
    begun = Counter[int]()
    for steps in survivors:
        begun |= Counter(steps)
    return begun
