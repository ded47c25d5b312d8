"""Results of a self-test as facts, as text, and as a line of JSON.

Words the table and the verdict, and measures nothing. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from hetseq.monitor.tables import table


@dataclass(frozen=True)
class SelftestFinding:
    """One fault: its kind, the name of the term, metric or module, the observation, and the remedy.

    `found` and `expected` are the two contradicting numbers, if there are two.
    """

    kind: str
    name: str
    text: str
    remedy: str
    found: float | None = None
    expected: float | None = None


@dataclass(frozen=True)
class TermRow:
    """Measurements of one term: its count and mean loss in the first step, and the largest relative differences of
    loss and gradient between a step in one piece and the same step split over ranks."""

    name: str
    count: float
    loss: float
    loss_difference: float
    gradient_difference: float
    is_exact: bool


@dataclass
class SelftestReport:
    """The result of a self-test."""

    task: str
    samples: int
    of: int  # the samples of the data set
    rounds: int
    precision: str
    tolerance: float
    device: str
    terms: list[TermRow] = field(default_factory=list)
    findings: list[SelftestFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    not_compared: str = ""  # why training mode was not compared

    @property
    def is_exact(self) -> bool:
        return not self.findings

    def add(self, *findings: SelftestFinding) -> None:
        """Add findings; of each kind and name only the first."""
        known = {(finding.kind, finding.name) for finding in self.findings}
        for finding in findings:
            if (finding.kind, finding.name) not in known:
                known.add((finding.kind, finding.name))
                self.findings.append(finding)

    def note(self, text: str) -> None:
        """Add a remark that is not a fault, once."""
        if text not in self.notes:
            self.notes.append(text)

    def leave_out(self, why: str) -> None:
        """Note why training mode cannot be compared; the verdict is then only about evaluation mode."""
        self.not_compared = why

    def verdict(self) -> str:
        """One sentence."""
        if self.is_exact:
            terms = ", ".join(row.name for row in self.terms)
            if self.not_compared:
                return f"exact in evaluation mode ({terms}); not compared in training: {self.not_compared}"
            return f"exact: {self.task} gives the same sums and gradients on any shares ({terms})"
        names = ", ".join(dict.fromkeys(finding.name for finding in self.findings))
        return f"not exact: {self.task} depends on how a step is split, or is incomplete ({names})"

    def lines(self) -> Iterator[str]:
        """Table, findings, notes and verdict."""
        yield (
            f"{self.task}: {self.rounds} steps of {self.samples} of {self.of} samples, on 1, 2 and 3 emulated ranks,"
            f" {self.device}, {self.precision}"
        )
        yield f"equal: relative difference up to {self.tolerance:.1e}, half the digits of {self.precision}"
        yield ""
        if self.terms:
            head = ("term", "count", "loss", "difference", "of gradient", "")
            rows = [
                (row.name, f"{row.count:g}", f"{row.loss:.6g}", f"{row.loss_difference:.1e}",
                 f"{row.gradient_difference:.1e}", "exact" if row.is_exact else "NOT EXACT")
                for row in self.terms
            ]  # fmt: skip
            yield from table([head, *rows], left=(0, 5))
            yield ""
        for finding in self.findings:
            yield f"{finding.name}: {finding.text}"
            yield f"  {finding.remedy}"
        for note in self.notes:
            yield f"note: {note}"
        if self.findings or self.notes:
            yield ""
        yield self.verdict()

    def json(self) -> str:
        """One line of JSON; numbers that are not finite are null."""
        exact = "exact in evaluation" if self.not_compared else "exact"
        facts = {"verdict": exact if self.is_exact else "not exact", **asdict(self)}
        return json.dumps(_plain(facts))


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
