"""A loop of one's own makes no pass that `hetseq train` would not make, except for the check in its first step."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.own_loops import run_script

pytestmark = pytest.mark.slow

SIZE, STEPS = 24, 5
SCRIPT = f"""
import json, os, pathlib
import torch
import torch.nn.functional as F
import hetseq

run = hetseq.start(seed=3)
data = [(torch.randn(4), torch.tensor(i % 3)) for i in range(48)]
model = torch.nn.Linear(4, 3)
run.own(model, torch.optim.SGD(model.parameters(), lr=0.1))
seen = []
model.register_forward_pre_hook(lambda _, given: seen.append(["forward", len(given[0])]))
model.weight.register_hook(lambda gradient: seen.append(["backward", 0]))

for step in run.steps(data, global_batch_size={SIZE}, max_steps={STEPS}):
    for x, y in step:
        step.backward(F.cross_entropy(model(x), y, reduction="sum"), count=len(y))
    with open(f"seen-{{os.getpid()}}", "a") as file:
        file.write(json.dumps([step.shares[run.rank], seen]) + "\\n")
    seen.clear()
"""


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    forked.warm_up()


@pytest.mark.parametrize("words", [("--ranks", 1), ("--ranks", 3, "--balance", "5,2,1", "--batch-size", 4)])
def test_each_sample_passes_once_after_the_step_that_is_checked(words: tuple[object, ...], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    finished = run_script(["--cpu", *words, "--save-dir", tmp_path / "run", script], cwd=tmp_path)
    assert finished.code == 0, finished.err
    ranks = [[json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("seen-*")]
    assert len(ranks) == words[1]
    assert [sum(rank[step][0] for rank in ranks) for step in range(STEPS)] == [SIZE] * STEPS
    for first, *later in ranks:
        share, seen = first
        sizes = [size for kind, size in seen if kind == "forward"]
        # the check: its first micro-batch whole three times, and its halves
        assert sizes[:3] == [sizes[0]] * 3
        assert sum(sizes[3:5]) == sizes[0]
        assert sum(sizes[5:]) == share
        for share, seen in later:
            calls = Counter(kind for kind, _ in seen)
            assert sum(size for _, size in seen) == share
            assert calls["backward"] == calls["forward"]
            assert calls["forward"] == (1 if "--batch-size" not in words else -(-share // 4))
