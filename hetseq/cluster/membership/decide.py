"""Who makes up the run, and what it goes on from: makes the next generation from the reports of those who are left.

A generation is one fixed membership. When it has lost somebody, or is to change, its members freeze: for each of them
it is over, and no later result of it counts. Each then reports what it holds, and `decide` turns the reports into the
record of the next generation. Pure: no clock, no network, no torch.

The one idea: a report says which updates a state contains (its lineage) and which complete gradient lies beside it, and
never "how far" a rank is. Members are never more than one update apart, as the commit of the next step needs a row of
everybody. So the longest lineage is the base; who is one update behind and holds exactly that gradient makes the update
too; whoever else is given the state by a survivor. If nobody saw the commit, nobody is behind, and the step is computed
anew from the same samples. The rules, and a counterexample to each protocol that lacks one of them, were found by
searching all interleavings of a model of it; docs/design/membership.md tells.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hetseq.balance.shares import Cost
from hetseq.cluster.membership.step_commit import Lineage, Verdict
from hetseq.errors import HetSeqError


class SplitBrainError(HetSeqError):
    """Two states of equal length and different history: no protocol can mend that, so nobody goes on."""


@dataclass(frozen=True)
class Tag:
    """Which all-reduces a gradient, or an outcome, comes from."""

    step: int
    generation: int
    attempt: int


@dataclass(frozen=True)
class Update:
    """The outcome of a step that ended: `rows` are the commit's, as all ranks saw them, in the form their controllers
    read. They are all that somebody who holds the gradient needs to make the update as well."""

    tag: Tag
    verdict: Verdict
    rows: str = ""


@dataclass(frozen=True)
class Report:
    """What a frozen worker holds; an incarnation is one start of one process."""

    incarnation: str
    generation: int  # the newest record that it has adopted
    lineage: Lineage | None = None  # None: it holds no state, or not a whole one
    gradient: Tag | None = None  # complete in its memory, and of a step that it has not seen the end of
    last: Update | None = None  # the update by which it came to its lineage; None: it has made none itself
    cost: Cost | None = None  # of its shares

    def to_record(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Report:
        """The inverse of `to_record`. Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            str(record["incarnation"]), _whole(record["generation"]), _lineage(record["lineage"]),
            _tag(record["gradient"]), _update(record["last"]),
            _cost(record["cost"]),
        )  # fmt: skip


@dataclass(frozen=True)
class Record:
    """One generation, as it is agreed upon before it begins; never changed."""

    generation: int
    roster: tuple[str, ...]  # incarnations in the order of their ranks
    base: Lineage | None = None  # the state it begins with; None: the newest checkpoint, or nothing
    last: Update | None = None  # the update that made the base, for those who have yet to make it
    fresh: frozenset[str] = frozenset()  # who is given the state
    costs: tuple[Cost | None, ...] = ()  # by rank, as far as they are known; the shares follow
    is_last: bool = False  # too few are left: save the state, and stop

    @property
    def donors(self) -> tuple[str, ...]:
        """Who holds the state, in the order of their ranks."""
        return tuple(member for member in self.roster if member not in self.fresh)

    def to_record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "fresh": sorted(self.fresh)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Record:
        """The inverse of `to_record`. Raises KeyError, TypeError or ValueError for anything else."""
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
    """The generation after `newest`, from the reports of its members that are left and from those who wish to join.

    `order` gives a sort key for each incarnation: ranks follow it. No report, no place: whoever has not reported for
    exactly this generation is a newcomer at best, whatever else is known of it. Raises SplitBrainError where two
    states are equally long and differ, ValueError where nobody would be left.
    """
    voters = {name: reports[name] for name in newest.roster if name in reports}
    voters = {name: report for name, report in voters.items() if report.generation == newest.generation}
    roster = sorted({*voters, *newcomers}, key=lambda name: order[name])
    if not roster:
        raise ValueError(f"nobody is left after generation {newest.generation}")
    record = Record(newest.generation + 1, tuple(roster), costs=_costs(roster, reports))
    holders = [name for name, report in voters.items() if report.lineage is not None]
    if not holders:
        return replace(record, fresh=frozenset(roster))
    base, last = _longest([voters[name] for name in holders])
    survivors = {name for name in holders if _reaches(voters[name], base, last)}
    return replace(record, base=base, last=last, fresh=frozenset(roster) - survivors)


def _longest(reports: Sequence[Report]) -> tuple[Lineage, Update | None]:
    """The longest lineage, and the update that made it, if one of those who hold it has made that itself."""
    held = [report for report in reports if report.lineage is not None]
    base = max((report.lineage for report in held if report.lineage is not None), key=lambda lineage: lineage.step)
    those = [report for report in held if report.lineage is not None and report.lineage.step == base.step]
    if any(report.lineage != base for report in those):
        sides = ", ".join(f"{report.incarnation}: {report.lineage}" for report in those)
        raise SplitBrainError(
            f"the ranks hold different histories of step {base.step} ({sides}), so none can be believed: start again"
            " from the newest checkpoint, and report this"
        )
    return base, next((report.last for report in those if report.last is not None), None)


def _reaches(report: Report, base: Lineage, last: Update | None) -> bool:
    """Whether a voter holds the base, or all that it takes to make the one update that it lacks."""
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
