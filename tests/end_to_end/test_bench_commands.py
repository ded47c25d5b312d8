"""The benchmarks run: each in its smallest form, whose figures mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ("scale.py --model bert-tiny --rounds 1 --steps 1 --batch 4 --seconds 0.05", 6),
        ("het.py 1,2 --models bert-tiny --rounds 1 --steps 1 --seconds 0.05 --batch 16", 1),
        ("step.py --model bert-tiny --batch 4 --rounds 1 --peers none", 1),
        ("own_loop_cost.py --rounds 1 --steps 2 --batch 32", 1),
        ("bert_step.py --layers 1 --hidden 64 --rows 2 --rounds 1", 1),
        ("shard.py --only memory --large-model gpt-4m --steps 2", 16),
        ("offload.py --rounds 1 --horizons 2", 2),
        ("pack.py --real 0.68 --layers 1 --hidden 64 --rows 2 --length 32 --rounds 1", 2),
    ],
)
def test_a_benchmark_prints_a_row_for_each_thing_that_it_measures(line: str, rows: int, tmp_path: Path) -> None:
    script, *words = line.split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, ROOT / "bench" / script, *words], env=environment, cwd=tmp_path, capture_output=True, text=True
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["bench"] == Path(script).stem
    assert len(found["rows"]) == rows


def test_the_soak_of_hetseq_has_each_sample_once_after_its_kills() -> None:
    words = [ROOT / "bench" / "soak.py", "--minutes", "0.1", "--kill-every", "2", "--systems", "hetseq"]
    with tempfile.TemporaryDirectory() as folder:  # a socket in it has a short name
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        ended = subprocess.run([sys.executable, *words], env=environment, cwd=folder, capture_output=True, text=True)
        left = os.listdir(folder)
    assert ended.returncode == 0, ended.stderr
    assert left == []
    assert "left behind" not in ended.stderr
    (row,) = json.loads(ended.stdout.splitlines()[-1])["rows"]
    assert (row["kills"], row["missing"], row["doubled"]) == (2, 0, 0)
    assert row["samples"] == 16 * row["steps"]
    # two starts of two ranks and two replacements try 4 samples each; a kill costs its step
    assert 24 <= row["done_again"] <= 24 + 2 * 16
    assert row["off_the_curve"] < 1e-12


@pytest.mark.netns
def test_the_benchmark_of_the_planner_runs_each_layout_of_a_cluster(tmp_path: Path) -> None:
    words = [ROOT / "bench" / "shard_plan.py", "--clusters", "equal", "--steps", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, *words], env=environment, cwd=tmp_path, capture_output=True, text=True)
    if "no namespaces here" in ended.stderr:
        pytest.skip("no namespaces here, or no ip(8)")
    assert ended.returncode in (0, 1), ended.stderr  # its seconds mean nothing
    rows = json.loads(ended.stdout.splitlines()[-1])["rows"]
    assert [row["shard_model"] for row in rows] == ["none", "state", "all"]
    for row in rows:  # a single step: a look may come a little too early or too late
        assert row["shares"] == [8, 8]
        assert all(-0.05 <= one <= 0.15 for ways in row["above_plan"] for one in ways), row["above_plan"]
