"""Goodput of a run whose nodes fail: what several ways to survive make of the same failures. Pure.

Responsible for the law of failures, for a run that is simulated from event to event, and for the closed form where
there is one. It refuses to know files, options and the seconds of a step, which a caller supplies as a function of the
nodes that are left. Goodput is the fraction of the time that trains steps which stay: useful steps x the step time of
the whole cluster / wall time.

The one idea: ways to survive differ in a few numbers. A failure takes the run back to the newest state that survives
it, which is every so many steps old, and all ranks halt for some seconds. Replicas keep such a state in every step.

The closed form is by J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
Future Generation Computer Systems 22 (2006) 303-312, after J. W. Young, "A first order approximation to the optimum
checkpoint interval", Communications of the ACM 17 (1974) 530-531.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hetseq.balance.simulation import Cluster, best_step_s

DAY_S = 86_400.0
_MOST_EXPONENT = 700.0  # e to more than that is infinite

#: seconds of a step with so many nodes of each group; infinite if they cannot compute one
StepTime = Callable[[tuple[int, ...]], float]

# what happens


@dataclass(frozen=True)
class NodeGroup:
    """A number of equal nodes, how often each is preempted, and for how long it is away then."""

    nodes: int
    preemptions_per_s: float = 0.0
    absence_s: float = 0.0


@dataclass(frozen=True)
class FailureLaw:
    """Each node fails independently of the others, at a constant rate, and takes part again after its repair."""

    failures_per_s: float
    repair_s: float

    def interruptions_per_s(self, groups: Sequence[NodeGroup]) -> float:
        """Failures and preemptions of all nodes while none is away."""
        return math.fsum(group.nodes * (self.failures_per_s + group.preemptions_per_s) for group in groups)


@dataclass(frozen=True)
class Absence:
    """A node that is away for some time; nodes are numbered group by group. A preemption is announced."""

    begin_s: float
    end_s: float
    node: int
    is_announced: bool = False


def draw(
    groups: Sequence[NodeGroup], law: FailureLaw, *, horizon_s: float, generator: np.random.Generator
) -> list[Absence]:
    """The absences that begin within `horizon_s`, in order of time. A node that is away does not fail."""
    kinds, first = list[tuple[float, float, int, int, bool]](), 0  # rate, length, first node, nodes, is announced
    for group in groups:
        kinds.append((law.failures_per_s, law.repair_s, first, group.nodes, False))
        kinds.append((group.preemptions_per_s, group.absence_s, first, group.nodes, True))
        first += group.nodes
    drawn: list[Absence] = []
    for rate, length_s, begin, nodes, is_announced in kinds:
        count = int(generator.poisson(rate * nodes * horizon_s))
        times = generator.uniform(0.0, horizon_s, count).tolist()
        places = generator.integers(begin, begin + nodes, count).tolist()
        drawn += [Absence(at_s, at_s + length_s, node, is_announced) for at_s, node in zip(times, places)]
    back_s: dict[int, float] = {}
    absences = []
    for absence in sorted(drawn, key=lambda absence: absence.begin_s):
        if absence.begin_s >= back_s.get(absence.node, 0.0):
            back_s[absence.node] = absence.end_s
            absences.append(absence)
    return absences


def step_time(cluster: Cluster, total: int, *, ranks_per_node: Sequence[int], stretch: float = 1.0) -> StepTime:
    """The step time of a cluster by the nodes that are left in each group, with the best shares; remembered.

    `stretch` multiplies the computing, as noise does.
    """
    known: dict[tuple[int, ...], float] = {}

    def seconds(nodes: tuple[int, ...]) -> float:
        if nodes not in known:
            left = cluster.left([count * ranks for count, ranks in zip(nodes, ranks_per_node)])
            known[nodes] = (
                stretch * best_step_s(left.groups, total) + left.communication_s() if left.groups else math.inf
            )
        return known[nodes]

    return seconds


# ways to survive it


@dataclass(frozen=True)
class Disk:
    """Checkpoints: one every `steps` steps, for which training halts `save_s`; a start from one takes `restart_s`."""

    steps: int
    save_s: float
    restart_s: float


@dataclass(frozen=True)
class Way:
    """A way to survive failures. `restart`, `retry` and `images` make them.

    `detect_s` passes until a failure is noticed. With `live_steps` the others continue in their processes, after
    `regroup_s` seconds, from a state that is at most so many steps old and that costs `live_s` each time. They finish
    computing the step under way first, since they miss a rank only when they exchange gradients. `live_steps` None: all
    ranks restart from the disk, at once. `has_neighbours`: the part of a node is in the memory of one other node, the
    next one. A node that takes part again halts the others for `join_s`.
    """

    name: str
    disk: Disk
    detect_s: float = 0.0
    regroup_s: float = 0.0
    join_s: float = 0.0
    live_steps: int | None = None
    live_s: float = 0.0
    has_neighbours: bool = False

    @property
    def kept_steps(self) -> int:
        """Steps between two states of which one survives a failure."""
        return self.disk.steps if self.live_steps is None else self.live_steps

    @property
    def keeping_s(self) -> float:
        """What saves and images add to each step."""
        live_s = 0.0 if self.live_steps is None else self.live_s / self.live_steps
        return self.disk.save_s / self.disk.steps + live_s

    @property
    def halt_s(self) -> float:
        """From a failure until training continues, without the rest of the step under way."""
        return self.detect_s + (self.disk.restart_s if self.live_steps is None else self.regroup_s)


def restart(disk: Disk, *, detect_s: float = 0.0) -> Way:
    """All ranks stop, start again, and load the newest checkpoint. A node that is preempted lets them save first."""
    return Way("restart", disk, detect_s)


def retry(disk: Disk, *, regroup_s: float, detect_s: float = 0.0, join_s: float | None = None) -> Way:
    """Replicas, or two places for each part of the state: the others do one step again, without the lost node."""
    return Way("retry", disk, detect_s, regroup_s, regroup_s if join_s is None else join_s, live_steps=1)


def images(
    disk: Disk, *, regroup_s: float, every: int, image_s: float, detect_s: float = 0.0, join_s: float | None = None
) -> Way:
    """Owners, whose parts are copied to the memory of another node every so many steps."""
    join_s = regroup_s if join_s is None else join_s
    return Way("images", disk, detect_s, regroup_s, join_s, every, image_s, has_neighbours=True)


@dataclass(frozen=True)
class Goodput:
    """A run of `wall_s` seconds: its useful steps, and where the rest of the time has gone."""

    wall_s: float
    calm_step_s: float
    steps: float
    again_steps: int  # a step that was interrupted counts
    halted_s: float
    again_s: float
    saving_s: float
    slower_s: float  # with fewer nodes

    @property
    def fraction(self) -> float:
        """The part of the time that trains steps which stay; 1 without failures and saves."""
        return self.steps * self.calm_step_s / self.wall_s


# a run, from event to event


def live(way: Way, absences: Sequence[Absence], *, nodes: Sequence[int], step_s: StepTime, wall_s: float) -> Goodput:
    """What a run makes of these absences in `wall_s` seconds; `nodes`: how many there are in each group."""
    simulated = _Run(way, nodes, step_s, mean_gap_s=wall_s / max(1, len(absences)))
    events = [(absence.begin_s, True, absence) for absence in absences]
    events += [(absence.end_s, False, absence) for absence in absences]
    # in the same moment a node is back before another one is lost, but no node before it is lost itself
    for at_s, is_loss, absence in sorted(events, key=lambda event: (event[0], event[2].begin_s, not event[1])):
        if at_s >= wall_s:
            break
        simulated.advance(at_s)
        (simulated.lose if is_loss else simulated.give_back)(absence)
    simulated.advance(wall_s)
    return simulated.goodput()


class _Run:
    """A simulated run. `nodes_left` are those that take part; nodes that wait for a restart do not."""

    def __init__(self, way: Way, nodes: Sequence[int], step_s: StepTime, *, mean_gap_s: float) -> None:
        self._way, self._step_s, self._mean_gap_s = way, step_s, mean_gap_s
        self._group_of = np.repeat(np.arange(len(nodes)), nodes).tolist()  # (nodes,)
        self._calm_s = step_s(tuple(nodes))
        self._nodes_left = list(nodes)
        self._now_s = self._halted_until_s = 0.0
        self._progress = 0.0  # steps
        self._away: set[int] = set()
        self._waiting: set[int] = set()
        self._exposed: dict[int, float] = {}  # lost nodes whose part has one place until the run has made this progress
        self._again_steps = 0
        self._halted_s = self._again_s = self._saving_s = self._slower_s = 0.0

    def advance(self, to_s: float) -> None:
        """Halt or train until then."""
        halted_s = min(to_s, max(self._now_s, self._halted_until_s)) - self._now_s
        trained_s, step_s = to_s - self._now_s - halted_s, self._step_s(tuple(self._nodes_left))
        if step_s == math.inf:
            halted_s, trained_s = to_s - self._now_s, 0.0
        made = trained_s / (step_s + self._way.keeping_s)
        self._progress += made
        self._halted_s += halted_s
        self._saving_s += made * self._way.keeping_s
        self._slower_s += made * (step_s - self._calm_s) if made else 0.0
        self._now_s = to_s

    def lose(self, absence: Absence) -> None:
        """A node is away from now on."""
        node = absence.node
        if node in self._waiting:
            self._waiting.remove(node)
            self._away.add(node)
            return
        self._away.add(node)
        rest_s = self._rest_of_step_s()
        self._nodes_left[self._group_of[node]] -= 1
        if self._way.live_steps is None:
            self._restart(is_announced=absence.is_announced)
        elif absence.is_announced:
            self._halt(self._way.regroup_s)
        elif self._is_state_lost(node):
            self._exposed.clear()
            self._go_back(self._way.disk.steps)
            self._halt(rest_s + self._way.detect_s + self._way.disk.restart_s)
        else:
            self._go_back(self._way.kept_steps)
            self._exposed[node] = self._progress + self._way.kept_steps
            self._halt(rest_s + self._way.halt_s)

    def give_back(self, absence: Absence) -> None:
        """A node is back. With `restart` it takes part when all ranks start again, at once if that gains time."""
        self._away.remove(absence.node)
        if self._way.live_steps is not None:
            self._nodes_left[self._group_of[absence.node]] += 1
            self._halt(self._way.join_s)
            return
        self._waiting.add(absence.node)
        if self._now_s < self._halted_until_s:
            self._admit()
        elif self._gain_s() > self._way.disk.restart_s + self._way.disk.save_s:
            self._restart(is_announced=True)

    def goodput(self) -> Goodput:
        return Goodput(
            self._now_s, self._calm_s, self._progress, self._again_steps, self._halted_s, self._again_s, self._saving_s,
            self._slower_s,
        )  # fmt: skip

    def _restart(self, *, is_announced: bool) -> None:
        disk = self._way.disk
        if is_announced:
            self._halt(disk.save_s + disk.restart_s)
        else:
            self._go_back(disk.steps)
            self._halt(self._way.halt_s)
        self._admit()

    def _admit(self) -> None:
        for node in self._waiting:
            self._nodes_left[self._group_of[node]] += 1
        self._waiting.clear()

    def _gain_s(self) -> float:
        """How much sooner the others are at the next interruption if the waiting nodes take part from now on."""
        more = list(self._nodes_left)
        for node in self._waiting:
            more[self._group_of[node]] += 1
        return self._mean_gap_s * (1 - self._step_s(tuple(more)) / self._step_s(tuple(self._nodes_left)))

    def _go_back(self, kept_steps: int) -> None:
        """To the newest state that is kept every so many steps."""
        kept = math.floor(self._progress / kept_steps) * kept_steps
        self._again_steps += math.ceil(self._progress) - kept
        self._again_s += (self._progress - kept) * self._calm_s
        self._progress = float(kept)

    def _rest_of_step_s(self) -> float:
        """How long the ranks still compute the step under way; 0 between two steps, as after a halt."""
        part = self._progress - math.floor(self._progress)
        return (1 - part) * self._step_s(tuple(self._nodes_left)) if part else 0.0

    def _halt(self, for_s: float) -> None:
        self._halted_until_s = max(self._halted_until_s, self._now_s + for_s)

    def _is_state_lost(self, node: int) -> bool:
        """Whether a part of the state has been on this node alone; both neighbours of a node count."""
        if not sum(self._nodes_left):
            return True
        self._exposed = {one: safe for one, safe in self._exposed.items() if self._progress < safe}
        around = ((node + by) % len(self._group_of) for by in (-1, 1))
        return self._way.has_neighbours and any(one in self._exposed for one in around)


# in closed form


def expected_fraction(way: Way, *, step_s: float, mtbf_s: float) -> float:
    """The goodput of a way if lost nodes are replaced at once and the kept state is never lost: Daly's equation.

    `mtbf_s`: mean time between two failures of the whole cluster. Failures may hit a halt and steps done again. It is
    exact for restarts; where ranks continue in place, the rest of the step under way counts by its mean.
    """
    work_s, rest_s = way.kept_steps * step_s, 0.0 if way.live_steps is None else step_s / 2
    halts = (rest_s + way.halt_s) / mtbf_s
    passes = way.kept_steps * (step_s + way.keeping_s) / mtbf_s
    if halts + passes > _MOST_EXPONENT:
        return 0.0
    return work_s / (mtbf_s * math.exp(halts) * math.expm1(passes))


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """The time between two saves with the most goodput, in Daly's higher order; Young's is its first term."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    root = math.sqrt(save_s / (2 * mtbf_s))
    return math.sqrt(2 * save_s * mtbf_s) * (1 + root / 3 + root**2 / 9) - save_s
