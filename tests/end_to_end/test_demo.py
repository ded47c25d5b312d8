"""`hetseq demo` as a newcomer runs it: it shows the promise, or it is broken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetseq.metrics import read_rows
from tests.support.commands import HETSEQ, run_command


@pytest.mark.slow
def test_the_demo_shows_one_curve_for_equal_and_for_fitting_shares(tmp_path: Path) -> None:
    done = run_command(["demo"], program=HETSEQ, cwd=tmp_path, timeout_s=180)
    assert done.code == 0, done.err
    accuracy = float(re.search(r"accuracy on unseen digits +([0-9.]+)%", done.out)[1])
    difference = float(re.search(r"largest difference of the curves +(\S+) nats", done.out)[1])
    assert accuracy >= 97
    assert difference <= 1e-12
    assert len(re.findall(r"([0-9,]+) samples/s", done.out)) >= 2  # both speeds
    equal, fitting = re.search(r"run directories +(\S+), (\S+)", done.out).groups()
    for folder, shares in ((equal, [64, 64]), (fitting, [96, 32])):
        assert read_rows(tmp_path / folder / "metrics.jsonl")[0]["shares"] == shares
