"""The benchmarks of LoRA without their processes: windows of steps, what counts as missed, and the bar of memory."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
EXACT = {"kind": "gpt2", "steps": 9, "steps_of_all": 6, "loss": 1e-15, "state": 2e-13, "learnt": 0.5}
CAST = {**EXACT, "kind": "llama", "loss": 9e-11, "state": 1e-8}


@pytest.fixture
def lora_nodes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, which finds the others as it does when Python runs it."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("lora_nodes")


@pytest.fixture
def lora_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same of the other one."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("lora_memory")


def report(lora_nodes: Any, *, joint: float, others_s: float, exact: Any = EXACT) -> int:
    """One round in which the nodes reach 40, 20 and 10 samples/s alone."""

    def window(speed: float) -> Any:
        return lora_nodes.Window(samples=int(speed * 10), seconds=10.0, steps=5, others_s=others_s)

    alone = [window(speed) for speed in (40, 20, 10)]
    arguments = argparse.Namespace(factors=(1.0, 2.0, 4.0), mbit=20.0, rank=8)
    rounds = [{"busy": alone, "idle": alone, "joint": [window(joint)]}]
    code: int = lora_nodes.report(rounds, {"gpt2": exact, "llama": CAST}, arguments)
    return code


def test_the_first_step_of_a_window_is_not_counted(lora_nodes: Any) -> None:
    rows = [{"samples": samples, "seconds": 2.0, "efficiency": 0.9} for samples in (100, 6, 8)]
    seen = [lora_nodes.Seen(at_s, row) for at_s, row in zip((5.0, 7.0, 9.0), rows)]
    window = lora_nodes.window_of(seen, 500, others_s=0.5)
    assert (window.samples, window.seconds, window.steps, window.sent_bytes) == (14, 4.0, 2, 500)
    assert window.speed == 3.5
    both = window + window
    assert (both.samples, both.seconds, both.speed, both.others_s) == (28, 8.0, 3.5, 1.0)


def test_newest_steps_of_a_world_are_counted_back_to_another_world(lora_nodes: Any) -> None:
    seen = [lora_nodes.Seen(0.0, {"world_size": size}) for size in (3, 3, 2, 3, 3, 3)]
    run = lora_nodes.Run(Path("nowhere"), seen=seen)
    assert (run.steps_of(3), run.steps_of(2)) == (3, 0)


@pytest.mark.parametrize(
    ("joint", "others_s", "exact", "code", "words"),
    [
        (64.0, 0.0, EXACT, 0, "91.4 (91.4-91.4) % of the summed speeds (bar: 90%: yes)"),
        (62.0, 0.0, EXACT, 1, "88.6 (88.6-88.6) % of the summed speeds (bar: 90%: NO)"),
        (64.0, 90.0, EXACT, 1, "these speeds say little, and count as missed"),
        (64.0, 0.0, {**EXACT, "state": 2e-11}, 1, "adapters and moments 2.0e-11 (bar: 1e-11: NO)"),
    ],
)
def test_a_bar_is_missed_by_speed_by_other_programs_or_by_a_difference(
    lora_nodes: Any,
    capsys: pytest.CaptureFixture[str],
    joint: float,
    others_s: float,
    exact: Any,
    code: int,
    words: str,
) -> None:
    assert report(lora_nodes, joint=joint, others_s=others_s, exact=exact) == code
    printed = capsys.readouterr().out
    assert words in printed
    assert "llama" in printed
    assert "no bar: its norms are in fp32" in printed
    assert json.loads(printed.splitlines()[-1])["bench"] == "lora_nodes"


def test_the_bar_of_memory_is_that_of_its_parts(lora_memory: Any) -> None:
    found = {"base": 1000, "adapters": 10, "saved_bytes": 300, "logits_bytes": 40}
    assert sum(lora_memory.bound(found).values()) == pytest.approx(1.05 * (2 * 1000 + 16 * 10) + 340 + 100 * 2**20)
