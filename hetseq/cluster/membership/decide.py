"""Next generation: its roster and the state it starts from, decided from the reports of the surviving ranks.

A generation is one fixed membership. When a member is lost, or the membership is to change, the members freeze: the
generation is over for them, and none of its later results count. Each member then reports which state it holds, and
`decide` turns the reports into the record of the next generation. Pure: no clock, no network, no torch.

The one idea: a report gives the updates in a state (its lineage) and the complete gradient next to it, never "how far"
a rank has got. Members are at most one update apart, because committing the next step needs a row from every rank. So
the longest lineage is the base. A rank that is one update behind and holds exactly that gradient applies the update
too; any other rank receives the state from a survivor. If no rank saw the commit, no rank is behind, and the step is
computed again from the same samples. These rules, and a counterexample for each protocol that lacks one of them, come
from a search over all interleavings of a model; see docs/design/membership.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hetseq.balance.shares import Cost
from hetseq.cluster.membership.step_commit import Lineage, Verdict
from hetseq.errors import HetSeqError


class SplitBrainError(HetSeqError):
    """Two states of equal length with different histories. No protocol can repair this, so the run stops."""


@dataclass(frozen=True)
class Tag:
    """The all-reduces that produced a gradient or an outcome."""

    step: int
    generation: int
    attempt: int


@dataclass(frozen=True)
class Update:
    """The outcome of a step that ended. `rows` are the rows of the commit, as all ranks saw them, serialized as the
    controllers read them. A rank that holds the gradient needs nothing else to apply the update."""

    tag: Tag
    verdict: Verdict
    rows: str = ""


@dataclass(frozen=True)
class Report:
    """The state of a frozen worker; an incarnation is one start of one process."""

    incarnation: str
    generation: int  # the newest record it has adopted
    lineage: Lineage | None = None  # None: it holds no state, or an incomplete one
    gradient: Tag | None = None  # complete in its memory, of a step whose end it has not seen
    last: Update | None = None  # the update that led to its lineage; None: it applied none itself
    cost: Cost | None = None  # of its shares

    def to_record(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Report:
        """The inverse of `to_record`. Raises KeyError, TypeError or ValueError if the record is not valid."""
        return cls(
            str(record["incarnation"]), _whole(record["generation"]), _lineage(record["lineage"]),
            _tag(record["gradient"]), _update(record["last"]),
            _cost(record["cost"]),
        )  # fmt: skip


@dataclass(frozen=True)
class Record:
    """One generation, agreed before it begins; never changed."""

    generation: int
    roster: tuple[str, ...]  # incarnations, in rank order
    base: Lineage | None = None  # the state it starts from; None: the newest checkpoint, or the initial values
    last: Update | None = None  # the update that led to the base, for members that have yet to apply it
    fresh: frozenset[str] = frozenset()  # the members that receive the state
    costs: tuple[Cost | None, ...] = ()  # by rank, where known; they determine the shares
    is_last: bool = False  # too few ranks are left: save the state, and stop

    @property
    def donors(self) -> tuple[str, ...]:
        """The members that hold the state, in rank order."""
        return tuple(member for member in self.roster if member not in self.fresh)

    def to_record(self) -> dict[str, Any]:
        """The record as a JSON object."""
        return {**asdict(self), "fresh": sorted(self.fresh)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Record:
        """The inverse of `to_record`. Raises KeyError, TypeError or ValueError if the record is not valid."""
        return cls(
            int(record["generation"]), tuple(map(str, record["roster"])), _lineage(record["base"]),
            _update(record["last"]), frozenset(map(str, record["fresh"])),
            tuple(map(_cost, record["costs"])),
            bool(record["is_last"]),
        )  # fmt: skip


def decide(
    newest: Record,
    reports: Mapping[str, Report],
    newcomers: Collection[str] = (),
    *,
    order: Mapping[str, int],
) -> Record:
    """The generation after `newest`, from the reports of its surviving members and the newcomers.

    `order` gives a sort key for each incarnation; ranks follow it. A member that has not reported for exactly this
    generation has no place in the next, except as a newcomer. Raises SplitBrainError if two states are equally long
    but differ, ValueError if no member would be left.
    """
    voters = {name: reports[name] for name in newest.roster if name in reports}
    voters = {name: report for name, report in voters.items() if report.generation == newest.generation}
    roster = sorted({*voters, *newcomers}, key=lambda name: order[name])
    if not roster:
        raise ValueError(f"no member is left after generation {newest.generation}")
    record = Record(newest.generation + 1, tuple(roster), costs=_costs(roster, reports))
    holders = [name for name, report in voters.items() if report.lineage is not None]
    if not holders:
        return replace(record, fresh=frozenset(roster))
    base, last = _longest([voters[name] for name in holders])
    survivors = {name for name in holders if _reaches(voters[name], base, last)}
    return replace(record, base=base, last=last, fresh=frozenset(roster) - survivors)


def _longest(reports: Sequence[Report]) -> tuple[Lineage, Update | None]:
    """The longest lineage, and the update that led to it if a member that holds it applied that update itself."""
    held = [report for report in reports if report.lineage is not None]
    base = max((report.lineage for report in held if report.lineage is not None), key=lambda lineage: lineage.step)
    those = [report for report in held if report.lineage is not None and report.lineage.step == base.step]
    if any(report.lineage != base for report in those):
        sides = ", ".join(f"{report.incarnation}: {report.lineage}" for report in those)
        raise SplitBrainError(
            f"the ranks hold different histories of step {base.step} ({sides}), so none can be trusted: restart from"
            " the newest checkpoint, and report this"
        )
    return base, next((report.last for report in those if report.last is not None), None)


def _reaches(report: Report, base: Lineage, last: Update | None) -> bool:
    """Whether a voter holds the base, or everything needed to apply the one update that it lacks."""
    if report.lineage is None or report.lineage == base:
        return report.lineage == base
    if last is None or last.tag.step != report.lineage.step + 1:
        return False
    tag, verdict = last.tag, last.verdict
    follows = report.lineage.extend(tag.step, generation=tag.generation, attempt=tag.attempt, verdict=verdict)
    return follows == base and (verdict is Verdict.SKIP or report.gradient == tag)


def _costs(roster: Sequence[str], reports: Mapping[str, Report]) -> tuple[Cost | None, ...]:
    return tuple(reports[name].cost if name in reports else None for name in roster)


def _lineage(record: Any) -> Lineage | None:
    if record is None:
        return None
    lineage = Lineage(_whole(record["step"]), _whole(record["chain"]))
    if not -(2**63) <= lineage.chain < 2**63:
        raise ValueError(f"a chain has 64 bits: {lineage.chain}")
    return lineage


def _whole(number: Any) -> int:
    if isinstance(number, float) and not number.is_integer():
        raise ValueError(f"no whole number: {number}")
    return int(number)


def _cost(record: Any) -> Cost | None:
    if record is None:
        return None
    limit, batch = (None if record[key] is None else _whole(record[key]) for key in ("limit", "batch"))
    return Cost(float(record["fixed_s"]), float(record["per_unit_s"]), limit, float(record["per_batch_s"]), batch)


def _tag(record: Any) -> Tag | None:
    return None if record is None else Tag(int(record["step"]), int(record["generation"]), int(record["attempt"]))


def _update(record: Any) -> Update | None:
    if record is None:
        return None
    tag = _tag(record["tag"])
    if tag is None:
        raise ValueError("an update without its tag")
    return Update(tag, Verdict(int(record["verdict"])), str(record["rows"]))
