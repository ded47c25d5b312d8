"""A step of HetSeq against a bare loop, in turn in one process, by `bench/step.py`."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_sections.facts import is_large_card
from gpu_sections.runs import measured
from gpu_sections.section import Check, Place

ALONE = ("--peers", "none", "--rounds", "10")
LEAST = 0.97  # the time of a bare step, divided by the time of a HetSeq step


def checks(place: Place) -> Iterator[Check]:
    """BERT-base with few rows, and with many, of which a share is expected; on a CPU the small network of images."""
    if not place.is_gpu:
        row = measured(place, "step.py", "--model", "mnist", *ALONE)
        yield Check("images", f"a bare step takes {ratio(row):.3f} of one of HetSeq")
        return
    many = 256 if is_large_card(place) else 64
    for rows in (16, many):
        words = ("--model", "bert-base", "--batch", str(rows), "--precision", "bf16", *ALONE)
        value = ratio(measured(place, "step.py", *words))
        name, figure = f"BERT-base, {rows} rows", f"a bare step takes {value:.3f} of one of HetSeq"
        yield Check(name, figure) if rows < many else Check(name, figure, f"at least {LEAST}", value >= LEAST)


def ratio(row: dict[str, dict[str, float]]) -> float:
    """The median over pairs of neighbouring steps."""
    return row["wall of HetSeq"]["median"]
