"""Next generation: its roster and the state it starts from, decided from the reports of the surviving ranks.

A generation is one fixed membership. When a member is lost, or the membership is to change, the members freeze: the
generation is over for them, and none of its later results count. Each member then reports which state it holds, and
`decide` turns the reports into the record of the next generation. Pure: no clock, no network, no torch.

The one idea: a report gives the updates in a state (its lineage) and the complete gradient next to it, never "how far"
a rank has got. Members are at most one update apart, because committing the next step needs a row from every rank. So
the longest lineage is the base. A rank that is one update behind and holds exactly that gradient applies the update
too; any other rank receives the state from a survivor. If no rank saw the commit, no rank is behind, and the step is
computed again from the same samples. With `--shard-model state` the base also needs all its parts. If the parts of one
cut that its holders have are not the whole state, the base is lost, and all ranks go back to the newest image in memory
of which the members' nodes have all parts, or else to the newest checkpoint. If they are, every holder keeps its part,
whatever cut it is of. These rules, and a counterexample for each protocol that lacks one of them, come from a search
over all interleavings of a model; see docs/design/membership.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hetseq.balance.shares import Cost
from hetseq.cluster.membership.step_commit import Lineage, Verdict
from hetseq.errors import HetSeqError

_ALL_GONE = "all ranks that held the state are gone"


class SplitBrainError(HetSeqError):
    """Reports that contradict each other: two states of equal length with different histories, or parts that cannot
    belong to one state. No protocol can repair this, so the run stops."""


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
class Image:
    """The parts of one image of the state that are whole in the memory of a member's node."""

    plan: str  # identifies the image, and how it is divided into parts
    lineage: Lineage
    generation: int  # that made it
    parts: tuple[int, ...]
    number_of_parts: int

    @property
    def order(self) -> tuple[int, int]:
        """Later images are greater. A step of an older generation may be of a course that was given up since."""
        return self.generation, self.lineage.step

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Image:
        """The inverse of `asdict`. Raises KeyError, TypeError or ValueError if the record is not valid."""
        lineage, number = _lineage(record["lineage"]), _whole(record["number_of_parts"])
        parts = tuple(sorted(map(_whole, record["parts"])))
        if lineage is None or not parts or not 0 <= parts[0] <= parts[-1] < number:
            raise ValueError(f"no parts of an image: {parts} of {number}")
        if not (plan := str(record["plan"])):
            raise ValueError("an image without a plan: a record could not name it")
        return cls(plan, lineage, _whole(record["generation"]), parts, number)


@dataclass(frozen=True)
class Report:
    """The state of a frozen worker; an incarnation is one start of one process."""

    incarnation: str
    generation: int  # the newest record it has adopted
    lineage: Lineage | None = None  # None: it holds no state, or an incomplete one
    gradient: Tag | None = None  # complete in its memory, of a step whose end it has not seen
    last: Update | None = None  # the update that led to its lineage; None: it applied none itself
    cost: Cost | None = None  # of its shares
    #: (elements of the trained parameters that it owns in its lineage, elements in all); None: a replica, which holds
    #: everything. A member that owns nothing reports (0, all)
    part: tuple[int, int] | None = None
    cut: int | None = None  # the generation that cut the state into such parts; None: the one that it reports for
    images: tuple[Image, ...] = ()  # in the memory of its node
    saved: int = 0  # the step of the newest checkpoint that it knows of

    @property
    def cut_by(self) -> int:
        """The generation that cut the state into the parts of which this is one."""
        return self.generation if self.cut is None else self.cut

    def to_record(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Report:
        """The inverse of `to_record`. Raises KeyError, TypeError or ValueError if the record is not valid."""
        return cls(
            str(record["incarnation"]), _whole(record["generation"]), _lineage(record["lineage"]),
            _tag(record["gradient"]), _update(record["last"]),
            _cost(record["cost"]), _part(record.get("part")), _optional(record.get("cut")),
            tuple(map(Image.from_record, record.get("images", ()))), _whole(record.get("saved", 0)),
        )  # fmt: skip


@dataclass(frozen=True)
class Record:
    """One generation, agreed before it begins; never changed."""

    generation: int
    roster: tuple[str, ...]  # incarnations, in rank order
    base: Lineage | None = None  # the state it starts from; None: the newest state in memory or on disk, or the first
    last: Update | None = None  # the update that led to the base, for members that have yet to apply it
    fresh: frozenset[str] = frozenset()  # the members that receive the state
    costs: tuple[Cost | None, ...] = ()  # by rank, where known; they determine the shares
    is_last: bool = False  # too few ranks are left: save the state, and stop
    lost: str = ""  # which ranks owned a part of the state that no member holds any more, in words
    shadows: tuple[str, ...] = ()  # processes that follow this generation without computing
    image: str = ""  # the plan of the image that the base is read from; all members are fresh

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
            bool(record["is_last"]), str(record.get("lost", "")), tuple(map(str, record.get("shadows", ()))),
            str(record.get("image", "")),
        )  # fmt: skip


def decide(
    newest: Record,
    reports: Mapping[str, Report],
    newcomers: Collection[str] = (),
    *,
    order: Mapping[str, int],
    shadows: Mapping[str, Report] | None = None,
) -> Record:
    """The generation after `newest`, from the reports of its surviving members and the newcomers.

    `shadows` are the reports of the processes that followed the newest generation: where the members do not hold a
    state together, the shadow that has followed furthest becomes a member, and all others receive its state.

    `order` gives the slot of each incarnation; ranks follow it. A member that has not reported for exactly this
    generation has no place in the next, except as a newcomer. Raises SplitBrainError if two states are equally long but
    differ or if the reported parts contradict each other, ValueError if no member would be left.
    """
    voters = {name: reports[name] for name in newest.roster if name in reports}
    voters = {name: report for name, report in voters.items() if report.generation == newest.generation}
    roster = sorted({*voters, *newcomers}, key=lambda name: order[name])
    record = Record(newest.generation + 1, tuple(roster), costs=_costs(roster, reports))
    shadow = _furthest(shadows or {}, [*voters.values(), *(shadows or {}).values()], order)
    if not (roster or shadow):
        raise ValueError(f"no member is left after generation {newest.generation}")
    holders = [name for name, report in voters.items() if report.lineage is not None]
    if not holders:  # a generation that went back or began anew may have ended before any of its members did so
        # a member may have received a part of the state, so it must not begin with what it has
        lost = newest.lost or (_ALL_GONE if voters and newest.base is not None else "")
        return _led_by(record, shadow, reports, order) or _gone_back(newest, record, voters.values(), lost)
    base, last = _longest([voters[name] for name in holders])
    survivors = {name for name in holders if _reaches(voters[name], base, last)}
    _check_parts([voters[name] for name in holders])
    fit, missing = _whole_state({name: voters[name] for name in survivors})
    if missing:
        gone = [order[name] for name in newest.roster if name not in fit]
        back = _led_by(record, shadow, reports, order)
        return back or _gone_back(newest, record, voters.values(), _in_words(gone, missing))
    return replace(record, base=base, last=last, fresh=frozenset(roster) - survivors)


def hold_base(record: Record, reports: Collection[Report]) -> bool:
    """Whether some of a record's members, by what they reported for it, hold all of the state together.

    A replica does so alone.
    """
    if record.image:
        return any(image.plan == record.image for image in _whole_images(reports))
    donors = {report.incarnation: report for report in reports if report.incarnation in record.donors}
    return bool(donors) and not _whole_state(donors)[1]


def _furthest(shadows: Mapping[str, Report], reports: Collection[Report], order: Mapping[str, int]) -> Report | None:
    """The shadow with the longest lineage; None if there is a newer image or checkpoint, or no shadow with a state."""
    saved = max((report.saved for report in reports), default=0)
    kept = max((image.lineage.step for image in _whole_images(reports)), default=0)
    held = {name: report.lineage.step for name, report in shadows.items() if report.lineage is not None}
    name = max(held, key=lambda one: (held[one], -order[one]), default=None)
    return None if name is None or held[name] < max(saved, kept) else shadows[name]


def _led_by(
    record: Record, shadow: Report | None, reports: Mapping[str, Report], order: Mapping[str, int]
) -> Record | None:
    """The record with a shadow as a member, from which all others receive the state; None without a shadow."""
    if shadow is None:
        return None
    name = shadow.incarnation
    roster = sorted({*record.roster, name}, key=lambda one: order[one])
    return replace(
        record, roster=tuple(roster), base=shadow.lineage, fresh=frozenset(roster) - {name},
        costs=_costs(roster, reports),
    )  # fmt: skip


def _gone_back(before: Record, record: Record, reports: Collection[Report], lost: str) -> Record:
    """The record of members that have lost a part of their state: from the newest image of which their nodes have all
    parts, unless a checkpoint is newer."""
    saved = max((report.saved for report in reports), default=0)
    images = _whole_images(reports)
    holders = [report for report in reports if report.lineage is not None]
    if holders and before.base is not None and not before.image:
        # the node of a member that never began may have an image of a course that was given up; the others freed theirs
        known = {image.plan for report in holders for image in report.images}
        images = [image for image in images if image.plan in known]
    newest = max(images, key=lambda image: image.order, default=None)
    back = replace(record, fresh=frozenset(record.roster), lost=lost)
    if newest is None or newest.lineage.step < saved:
        return back
    return replace(back, base=newest.lineage, image=newest.plan)


def _whole_images(reports: Collection[Report]) -> list[Image]:
    """The images of which these members' nodes have all parts together."""
    found: dict[str, Image] = {}
    for image in (image for report in reports for image in report.images):
        before = found.get(image.plan, image).parts
        found[image.plan] = replace(image, parts=tuple(sorted({*before, *image.parts})))
    return [image for image in found.values() if len(image.parts) == image.number_of_parts]


def _whole_state(reports: Mapping[str, Report]) -> tuple[set[str], float]:
    """Of members with the same lineage: those whose parts are of one cut, and the fraction of the state that they lack.

    The parts of one cut are disjoint, so they can be added up. Parts of two cuts overlap, and so cannot: while a
    generation forms, some members may have exchanged their parts already and others not. Then one cut has to be whole.
    A member that owns nothing fits any cut.
    """
    total = next((report.part[1] for report in reports.values() if report.part is not None), None)
    if total is None:
        return set(reports), 0.0
    owned = _owned_by_cut(reports.values())
    best = max(owned, key=lambda cut: (owned[cut], cut))
    fit = {name for name, one in reports.items() if one.cut_by == best or (one.part is not None and not one.part[0])}
    return fit, (total - owned[best]) / total


def _owned_by_cut(reports: Collection[Report]) -> Counter[int]:
    """The elements that these members own together, by the generation that cut the state."""
    owned = Counter[int]()
    for report in reports:
        owned[report.cut_by] += 0 if report.part is None else report.part[0]
    return owned


def _check_parts(reports: Sequence[Report]) -> None:
    """Raise SplitBrainError if one state cannot have these parts."""
    totals = {None if report.part is None else report.part[1] for report in reports}
    most = max(_owned_by_cut(reports).values())
    if len(totals) > 1 or any(total is not None and most > total for total in totals):
        sides = ", ".join(f"{report.incarnation}: {report.part} of cut {report.cut_by}" for report in reports)
        raise SplitBrainError(
            f"the ranks contradict each other about who owns which part of the state ({sides}), so none can be trusted:"
            " restart from the newest checkpoint, and report this"
        )


def _in_words(ranks: Sequence[int], missing: float) -> str:
    """The sentence about a lost part of the state; `missing`: as a fraction of the whole."""
    if not ranks:
        return f"{100 * missing:.3g} % of the state was on its way to a new owner, and no rank holds it"
    first = ", ".join(map(str, ranks[:-1]))
    who = f"ranks {first} and {ranks[-1]}" if first else f"rank {ranks[-1]}"
    return f"{who} owned {100 * missing:.3g} % of the state, and no other rank holds it"


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


def _optional(number: Any) -> int | None:
    return None if number is None else _whole(number)


def _part(record: Any) -> tuple[int, int] | None:
    if record is None:
        return None
    owned, total = map(_whole, record)
    if not 0 <= owned <= total or total < 1:
        raise ValueError(f"no part of a state: {owned} of {total} elements")
    return owned, total


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
