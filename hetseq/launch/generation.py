"""The resources that a rank has open in one generation of its run, and what passes from one to the next."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetseq.cluster.membership.assignment import GenerationRanks
from hetseq.cluster.membership.decide import Report
from hetseq.comm.directory_groups import DirectoryGroups
from hetseq.comm.group import Group
from hetseq.run.regroup import Regroup
from hetseq.run.session import Session
from hetseq.training.step_engine import Between, Engine, Settled, ended


@dataclass
class Generation:
    """The resources that a rank has open in one generation."""

    crew: GenerationRanks
    succession: Regroup | None
    story: str = ""  # why the run regrouped
    lost: str = ""  # which part of the state is lost: all ranks begin from the newest one in memory or on disk
    shadows: tuple[str, ...] = ()  # that follow it
    lost_s: float | None = None  # when the generation before it was over
    is_told: bool = False  # whether the story was logged; until then another generation may follow
    group: Group | None = None
    sharing: DirectoryGroups | None = None
    session: Session | None = None
    has_old_copies: bool = False  # a script would look at parameters that ranks have yet to get from their owners
    unsettled: Settled | Between | None = None  # what the driver is asked first, about the last step

    @property
    def image(self) -> str:
        """The image that this generation begins from; empty: from the state that the survivors have, or anew."""
        return "" if self.succession is None else self.succession.record.image

    @property
    def survivors(self) -> list[int]:
        """The ranks that hold the state, in this generation's numbers; all of them in the first one."""
        if self.succession is None:
            return list(range(self.crew.world_size))
        record = self.succession.record
        return [rank for rank, name in enumerate(record.roster) if name not in record.fresh]

    def sever(self) -> None:
        if self.group is not None:
            self.group.sever()

    def close(self) -> None:
        self.sever()
        if self.sharing is not None:
            self.sharing.close()
        if self.group is not None:
            self.group.close()
        self.session = self.sharing = self.group = None


def settle(generation: Generation) -> Engine[None]:
    """Let the driver end what it does after the last step, before a session exists; asked again if interrupted."""
    if generation.unsettled is not None:
        question, generation.unsettled = generation.unsettled, Between()
        yield from ended(question)
        generation.unsettled = None


def unsettled(generation: Generation) -> Settled | Between | None:
    """What the driver of this rank has not ended at the end of a generation."""
    session = generation.session
    if session is None:
        return generation.unsettled
    if session.caught_up is not None:
        return Settled(session.caught_up)
    return Between() if session.controller.is_settling else None


def after(before: Generation, following: Generation, now_s: float) -> Generation:
    """The generation that follows one that ended at `now_s`; it inherits a story that was not logged yet."""
    if before.is_told:
        return replace(following, lost_s=now_s)
    story = "; ".join(filter(None, (before.story, following.story)))
    return replace(following, story=story, lost_s=now_s if before.lost_s is None else before.lost_s)


def report_of(incarnation: str, generation: int, succession: Regroup | None) -> Report:
    """The report of a rank that built no session in this generation: its carried state is unchanged, unless it was to
    go back."""
    carried = None if succession is None or succession.record.image else succession.carried
    if carried is None:
        return Report(incarnation, generation)
    owned = carried.owned
    part, cut = (None, None) if owned is None else (owned.part, owned.cut)
    return Report(incarnation, generation, lineage=carried.state.lineage, part=part, cut=cut)
