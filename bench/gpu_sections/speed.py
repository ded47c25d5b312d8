"""Sequences a second of BERT on this device, by `bench/bert_gpu.py` with fixed sizes, and the share of its peak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gpu_sections.facts import is_large_card
from gpu_sections.runs import measured
from gpu_sections.section import Check, Place, Skipped

#: model, tokens of a row, rows of a step on a card with at least 40 GiB and on a smaller one
SHAPES = (("base", 128, 256, 64), ("base", 512, 64, 16), ("large", 128, 128, 32), ("large", 512, 32, 8))


def checks(place: Place) -> Iterator[Check]:
    """Each shape with full rows; on a CPU a tiny one, to see that the script works."""
    if not place.is_gpu:
        words = ("--model", "tiny", "--length", "32", "--micro-batch", "4", "--steps", "2")
        yield judged("tiny, 32 tokens", measured(place, "bert_gpu.py", *words))
        return
    properties = torch.cuda.get_device_properties(torch.device(place.device))
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise Skipped(f"{properties.name} has no products of bf16")
    for model, length, many, few in SHAPES:
        shape = ("--model", model, "--length", str(length), "--micro-batch", str(many if is_large_card(place) else few))
        row = measured(place, "bert_gpu.py", *shape, "--steps", "15", "--forms", "full")
        yield judged(f"{model}, {length} tokens", row)


def judged(name: str, row: dict[str, Any]) -> Check:
    """A row of the script's figures, with the bar that it has for this card, if any."""
    figure = f"{row['sequences_per_s']['median']:,.1f} sequences/s at {row['micro_batch']} rows"
    if row["mfu"] is not None:
        figure += f", {row['mfu']['median']:.1%} of the peak"
    return Check(name, figure, row["bar"] or "", not (row["verdict"] or "").startswith("NOT"))
