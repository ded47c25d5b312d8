"""Forecast from the burn-in: shares, step time, efficiency, and which devices are worth using. Pure.

Turns burn-ins into ranks of `hetseq.balance.simulation`, whose arithmetic it uses, and words the findings. It measures
nothing. The numbers are for a small network; your own task has others, in similar proportions.

The one idea: advice is another cluster. Its step is forecast like the present one, and advised if it is shorter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetseq.balance.shares import NEGLIGIBLE_GAIN, Cost
from hetseq.balance.simulation import Link, RankModel, Step, best_shares, predict, ring_seconds
from hetseq.commands.doctor.facts import Burn, Facts
from hetseq.commands.doctor.node_findings import Finding

SAMPLES_PER_RANK = 64
_HALF = 0.5
_MANY, _NOTHING = 3.0, 0.001  # changes beyond these are not given in per cent
_FACTORS = (2, 4, 8, 16, 32, 64)  # of larger batches


@dataclass(frozen=True)
class Candidate:
    """A device that may become a rank: its node, its burn-in, and the link of its node (None: a single node).

    `cores` are the cores of its node, for all of its ranks together; `idle_gpus` are GPUs there that the doctor did not
    see.
    """

    node: str
    burn: Burn
    link: Link | None = None
    cores: float = math.inf
    idle_gpus: int = 0

    @property
    def name(self) -> str:
        """The name in the sentences."""
        return f"{self.node} {self.burn.device}"

    def rank(self, neighbours: int) -> RankModel:
        """The model of this device as one of `neighbours` ranks of its node.

        The fixed cost of a GPU's step is CPU work of its process: with fewer cores than processes, they take turns. A
        CPU was measured with all cores.
        """
        turns = 1.0 if self.burn.device == "cpu" else max(1.0, neighbours / self.cores)
        return RankModel(self.name, Cost(self.burn.fixed_s * turns, self.burn.per_sample_s))


def candidates_of(node: str, facts: Facts, link: Link | None = None) -> list[Candidate]:
    """The devices of one node."""
    return [Candidate(node, burn, link, facts.usable_cores, facts.idle_gpus) for burn in facts.torch.burns]


def forecast(candidates: Sequence[Candidate], total: int) -> Step:
    """The step of `total` samples with the best shares for these devices."""
    counts = Counter(candidate.node for candidate in candidates)
    ranks = [candidate.rank(counts[candidate.node]) for candidate in candidates]
    links = [candidate.link for candidate in candidates if candidate.link is not None]
    is_apart = len(counts) > 1 and links
    size = max(candidate.burn.gradient_bytes for candidate in candidates)
    exchange_s = ring_seconds(links, len(ranks), size) if is_apart else 0.0
    return predict(ranks, best_shares(ranks, total), communication_s=exchange_s)


def foresee(candidates: Sequence[Candidate]) -> Iterator[Finding]:
    """Findings about these devices as ranks of one run; none without devices."""
    if not candidates:
        return
    total = SAMPLES_PER_RANK * len(candidates)
    step = forecast(candidates, total)
    listed = ", ".join(f"<rank{rank}> {share}" for rank, share in enumerate(step.shares))
    exchange = f", of which {_ms(step.communication_s)} exchange over the network" if step.communication_s else ""
    yield Finding(
        "ok",
        "forecast",
        f"shares of {total} samples of the small network: {listed}; step {_ms(step.step_s)}{exchange}, efficiency"
        f" {step.efficiency:.0%}",
        private={f"rank{rank}": candidate.name for rank, candidate in enumerate(candidates)},
    )
    nodes = _nodes(candidates)
    yield from _crowded(nodes, candidates, step, total)
    if len(nodes) == 1:
        for number, candidate in enumerate(candidates if len(candidates) > 1 else ()):
            rest = [*candidates[:number], *candidates[number + 1 :]]
            yield _worth(f"rank{number}", candidate.name, candidates, rest, total, step.step_s)
        return
    own = {node: [candidate for candidate in candidates if candidate.node == node] for node in nodes}
    best = min(nodes, key=lambda node: forecast(own[node], total).step_s)
    is_best_alone = forecast(own[best], total).step_s <= step.step_s * (1 + NEGLIGIBLE_GAIN)
    for number, node in enumerate(nodes, 1):
        if not (is_best_alone and node == best):  # a node that is best alone always stays
            rest = [candidate for candidate in candidates if candidate.node != node]
            yield _worth(f"node{number}", node, candidates, rest, total, step.step_s)
    if len(nodes) > 2:  # with two nodes, the finding above has said it
        yield from _fewer(own, total)
    yield from _idle(own, step, total)
    yield from _in_one_node(f"node{nodes.index(best) + 1}", own[best], candidates, total)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _nodes(candidates: Sequence[Candidate]) -> list[str]:
    return list(dict.fromkeys(candidate.node for candidate in candidates))


def _crowded(nodes: Sequence[str], candidates: Sequence[Candidate], step: Step, total: int) -> Iterator[Finding]:
    """Nodes whose ranks wait for a core."""
    for number, node in enumerate(nodes, 1):
        own = [candidate for candidate in candidates if candidate.node == node]
        if len(own) <= own[0].cores:
            continue
        roomy = [replace(one, cores=math.inf) if one.node == node else one for one in candidates]
        roomy_s = forecast(roomy, total).step_s
        if roomy_s < (1 - NEGLIGIBLE_GAIN) * step.step_s:
            yield Finding(
                "warning", "forecast",
                f"{len(own)} ranks of <node{number}> take turns on {own[0].cores:g} cores: a step takes"
                f" {_ms(step.step_s)}, with a core for each {_ms(roomy_s)}, and data loading needs more cores",
                f"ask the queue for at least {len(own)} cores on <node{number}>, better {2 * len(own)} (in Slurm"
                " --cpus-per-task)",
                {f"node{number}": node},
            )  # fmt: skip


def _least(candidates: Sequence[Candidate]) -> float:
    """The smallest gain, as a fraction of a step, that makes one of these worth using: half an equal part."""
    nodes = len(_nodes(candidates))
    return min(NEGLIGIBLE_GAIN, _HALF / (nodes if nodes > 1 else len(candidates)))


def _worth(
    place: str, name: str, candidates: Sequence[Candidate], rest: Sequence[Candidate], total: int, step_s: float
) -> Finding:
    """The gain from a node, or from a device of the only node."""
    without_s, least = forecast(rest, total).step_s, _least(candidates)
    change, private = step_s / without_s - 1, {place: name}
    times = f"{_ms(step_s)}, without it {_ms(without_s)}"
    if change > least:
        much = f"{change:.0%} longer" if change < _MANY else f"{1 + change:,.0f} times as long"
        remedy = f"leave it out for a task of this size; {_larger(candidates, rest, total)}"
        return Finding("warning", "forecast", f"<{place}> makes a step {much}: {times}", remedy, private)
    if change > -least:
        much = f"{change:+.1%}" if abs(change) >= _NOTHING else f"less than {_NOTHING:.1%}"
        text = f"<{place}> hardly changes a step ({much}): {times}"
        return Finding("note", "forecast", text, f"you may leave it out; {_larger(candidates, rest, total)}", private)
    text = f"<{place}> is worth using, a step is {-change:.0%} shorter: {times}"
    return Finding("ok", "forecast", text, "", private)


def _larger(candidates: Sequence[Candidate], rest: Sequence[Candidate], total: int) -> str:
    """The batch from which on all of them are faster than the rest, or the reason that there is none."""
    least = _least(candidates)

    def is_faster(every: Sequence[Candidate], factor: int) -> bool:
        return forecast(every, factor * total).step_s < (1 - least) * forecast(rest, factor * total).step_s

    if is_faster(candidates, _FACTORS[-1]):
        factor = next(factor for factor in _FACTORS if is_faster(candidates, factor))
        return f"from {factor} times the batch on (--update-freq {factor}) it is worth using"
    unlinked = [replace(candidate, link=None) for candidate in candidates]
    why = "only a faster network would" if is_faster(unlinked, _FACTORS[-1]) else "it is too slow for the others"
    return f"even {_FACTORS[-1]} times the batch would not change that: {why}"


def _fewer(own: Mapping[str, Sequence[Candidate]], total: int) -> Iterator[Finding]:
    """The fewest nodes that are as fast as all: removes the least useful node again and again.

    Of many nodes, an eighth is removed at a time: one by one, 128 nodes took 8 s.
    """

    def step_s(nodes: Sequence[str]) -> float:
        return forecast([candidate for node in nodes for candidate in own[node]], total).step_s

    left = list(own)
    found = [(left, step_s(left))]
    while len(left) > 2:
        without_s = {out: step_s([node for node in left if node != out]) for out in reversed(left)}
        useless = sorted(without_s, key=without_s.__getitem__)[: max(1, len(left) // 8)]
        left = [node for node in left if node not in useless]
        found.append((left, step_s(left)))
    best = min(own, key=lambda node: step_s([node]))
    found.append(([best], step_s([best])))
    least_s = min(seconds for _, seconds in found)
    few, few_s = next(one for one in reversed(found) if one[1] <= (1 + NEGLIGIBLE_GAIN) * least_s)
    if len(few) < len(own):
        place = {f"node{number}": node for number, node in enumerate(own, 1) if node in few}
        listed = " and ".join(f"<{name}>" for name in place)
        together = f"{listed} alone takes" if len(few) == 1 else f"{listed} by themselves take"
        yield Finding(
            "warning", "forecast", f"{together} {_ms(few_s)}, all {len(own)} nodes {_ms(found[0][1])}",
            f"start a task of this size on {listed} alone, and keep the others for a larger batch", place,
        )  # fmt: skip


def _idle(own: Mapping[str, Sequence[Candidate]], step: Step, total: int) -> Iterator[Finding]:
    """A node whose idle GPUs would help more than the other nodes."""
    for number, (node, mine) in enumerate(own.items(), 1):
        fuller = [*mine, *(mine[0] for _ in range(mine[0].idle_gpus))]
        fuller_s = forecast(fuller, total).step_s
        if len(fuller) > len(mine) and fuller_s < (1 - NEGLIGIBLE_GAIN) * step.step_s:
            yield Finding(
                "note", "forecast",
                f"<node{number}> has {mine[0].idle_gpus} more GPUs that the doctor did not see; with all {len(fuller)}"
                f" it would take {_ms(fuller_s)} alone; all nodes as they are take {_ms(step.step_s)}",
                f"use those GPUs of <node{number}> before you add nodes, if they are yours to use"
                " (CUDA_VISIBLE_DEVICES, --gres)",
                {f"node{number}": node},
            )  # fmt: skip


def _in_one_node(
    place: str, own: Sequence[Candidate], candidates: Sequence[Candidate], total: int
) -> Iterator[Finding]:
    """Whether as many devices in one node would be faster, if the network takes most of a step."""
    step = forecast(candidates, total)
    device = min(own, key=lambda candidate: candidate.rank(1).busy_s(total))
    together_s = forecast([device] * len(candidates), total).step_s
    if step.communication_s > _HALF * step.step_s and together_s < (1 - NEGLIGIBLE_GAIN) * step.step_s:
        yield Finding(
            "note", "forecast",
            f"the exchange over the network is {step.communication_s / step.step_s:.0%} of a step; {len(candidates)}"
            f" devices like <{place}> {device.burn.device} in one node would take {_ms(together_s)}, not"
            f" {_ms(step.step_s)}",
            "ask for more devices in one node rather than for more nodes, or for a faster network between them",
            {place: device.node},
        )  # fmt: skip
