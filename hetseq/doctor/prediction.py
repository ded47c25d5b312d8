"""What the burn-in says of a training: shares, step time, efficiency, and who is worth having. Pure.

Responsible for turning burns into ranks of `hetseq.simulation`, whose arithmetic it uses, and for sentences. It refuses
to measure. The figures are those of a small network: a task of one's own has others, in like proportions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetseq.capacity import NEGLIGIBLE_GAIN, Cost
from hetseq.doctor.facts import Burn
from hetseq.doctor.findings import Finding
from hetseq.simulation import Link, RankModel, Step, best_shares, predict, ring_seconds

SAMPLES_PER_RANK = 64
_HALF = 0.5


@dataclass(frozen=True)
class Candidate:
    """A device that may be a rank: its node, what it did, and the link of its node (None: to nobody but itself)."""

    node: str
    burn: Burn
    link: Link | None = None

    @property
    def rank(self) -> RankModel:
        """In the model's words."""
        return RankModel(f"{self.node} {self.burn.device}", Cost(self.burn.fixed_s, self.burn.per_sample_s))


def forecast(candidates: Sequence[Candidate], total: int) -> Step:
    """The step of `total` samples that these would share in the best way."""
    ranks = [candidate.rank for candidate in candidates]
    links = [candidate.link for candidate in candidates if candidate.link is not None]
    is_apart = len({candidate.node for candidate in candidates}) > 1 and links
    size = max(candidate.burn.gradient_bytes for candidate in candidates)
    exchange_s = ring_seconds(links, len(ranks), size) if is_apart else 0.0
    return predict(ranks, best_shares(ranks, total), communication_s=exchange_s)


def foresee(candidates: Sequence[Candidate]) -> Iterator[Finding]:
    """Findings on these devices as the ranks of one run; nothing for none."""
    if not candidates:
        return
    total = SAMPLES_PER_RANK * len(candidates)
    step = forecast(candidates, total)
    listed = ", ".join(f"<rank{rank}> {share}" for rank, share in enumerate(step.shares))
    yield Finding(
        "ok",
        "forecast",
        f"shares of {total} samples of the small network: {listed}; step {step.step_s * 1000:.1f} ms, efficiency"
        f" {step.efficiency:.0%}",
        private={f"rank{rank}": candidate.rank.name for rank, candidate in enumerate(candidates)},
    )
    if step.communication_s > _HALF * step.step_s:
        yield Finding(
            "note",
            "forecast",
            f"the exchange over the network takes {step.communication_s / step.step_s:.0%} of such a step",
            "more devices in one node would serve better than more nodes, or a larger batch with --update-freq",
        )
    yield from _worth(candidates, step, total)


def _worth(candidates: Sequence[Candidate], step: Step, total: int) -> Iterator[Finding]:
    """Who could be left out, one at a time: a node where there are several, else a device."""
    nodes = list(dict.fromkeys(candidate.node for candidate in candidates))
    by_node = len(nodes) > 1
    parts = nodes if by_node else [candidate.rank.name for candidate in candidates]
    for number, part in enumerate(parts if len(parts) > 1 else (), 1):
        rest = [candidate for candidate in candidates if part != (candidate.node if by_node else candidate.rank.name)]
        gain = forecast(rest, total).step_s / step.step_s - 1
        place = {f"{'node' if by_node else 'rank'}{number}": part}
        (name,) = place
        if gain < -NEGLIGIBLE_GAIN:
            yield Finding(
                "warning",
                "forecast",
                f"<{name}> makes the step {-gain:.0%} slower than it would be without it",
                "leave it out for a task of this size, or bring it nearer: a faster link, a larger batch",
                place,
            )
        elif gain < NEGLIGIBLE_GAIN:
            yield Finding(
                "note", "forecast", f"<{name}> makes the step hardly faster",
                "it is worth adding for a larger batch only",
                place,
            )  # fmt: skip
        else:
            yield Finding(
                "ok", "forecast", f"<{name}> is worth having: without it a step takes {gain:.0%} longer", "", place
            )
