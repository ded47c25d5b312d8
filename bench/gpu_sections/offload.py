"""Activations that leave for host memory and come back: the same gradients, by `bench/offload.py`, and what it costs.

The script ends if a gradient differs in a bit from the gradient of a step whose activations stay.
"""

from __future__ import annotations

from collections.abc import Iterator

from offload import CUDA_BAR, LIVE_BAR, SPEED_BAR

from gpu_sections.facts import is_large_card
from gpu_sections.runs import all_measured
from gpu_sections.section import Check, Place, Skipped, holds


def checks(place: Place) -> Iterator[Check]:
    """A GPT of 1.3 billion parameters on a GPU; on a CPU the played link of the script."""
    if not place.is_gpu:
        (_, row) = all_measured(place, "offload.py", "--rounds", "1", "--horizons", "2")
        yield holds("horizon 2", row["live"] < 0.3, seen=f"{row['live']:.0%} of the bytes", expected="below 30%")
        return
    if not is_large_card(place):
        raise Skipped("the model of 1.3 billion parameters needs a card with at least 40 GiB")
    none, torch_own, *ways = all_measured(place, "offload.py", "--rounds", "3")
    for row in ways:
        seen = f"backward {row['backward']:.2f}, {row['live']:.0%} on the card, {row['peak_bytes'] / 2**30:.1f} GiB"
        yield Check(row["way"], f"{seen} of {none['peak_bytes'] / 2**30:.1f}")
    small = [row for row in ways if row["live"] <= LIVE_BAR and row["backward"] <= CUDA_BAR]
    best = max((torch_own["step"] / row["step"] for row in small), default=0.0)
    yield holds(
        "a horizon that hides", bool(small), seen=", ".join(row["way"] for row in small) or "none",
        expected=f"backward at most {CUDA_BAR} with at most {LIVE_BAR:.0%}",
    )  # fmt: skip
    yield holds(
        "against save_on_cpu", best >= SPEED_BAR, seen=f"{best:.2f} times", expected=f"at least {SPEED_BAR} times"
    )  # fmt: skip
