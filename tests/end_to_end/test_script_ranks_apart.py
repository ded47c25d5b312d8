"""Ranks whose scripts take different ways: the run ends at once, and names the rank, the step and the cause."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hetseq.errors import EXIT_DISAGREE
from tests.support import forked
from tests.support.own_loops import run_script

pytestmark = pytest.mark.slow

PROMISE_S = 2.0


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    forked.warm_up()


#: at step 3 rank 1 takes another way; each rank writes when that was, and when its script was told
SCRIPT = """
import time
import torch
import torch.nn.functional as F
import hetseq


class Best:
    value, name = 1.0, "none"
    def state_dict(self): return {{"value": self.value, "name": self.name}}
    def load_state_dict(self, state): vars(self).update(state)


def mark(what):
    with open(f"{{what}}-{{me}}", "w") as file:
        file.write(repr(time.monotonic()))


def measure(batch):
    return {{"loss": (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))}}


run = hetseq.start(seed=3)
me = run.rank
data = [(torch.full((4,), float(i % 7)), torch.tensor(i % 3)) for i in range(48)]
model = torch.nn.Linear(4, 3)
best = Best()
model, optimizer = run.own(model, torch.optim.SGD(model.parameters(), lr=0.1))
run.own(best=best)
try:
    for step in run.steps(data, global_batch_size=8, max_epoch=2):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, reduction="sum"), count=len(y))
        if step.number == 3:
            mark("parted")
            if me == 1:
                {one}
            else:
                {others}
except BaseException:
    mark("told")
    raise
print("behind the loop")
"""
EVALUATE = "run.evaluate(data, measure, batch_size=8)"
CASES = {
    "it leaves the loop": ("break", "pass", r"after step 3 rank 1 left the loop, and rank 0 continues"),
    "the others leave it": ("pass", "break", r"after step 3 rank 0 left the loop, and rank 1 continues"),
    "it evaluates": (EVALUATE, "pass",
                     r"rank 0 is at the end of the step after step 3, rank 1 in run.evaluate after step 3"),
    "the others evaluate": ("pass", EVALUATE,
                            r"rank 0 is in run.evaluate after step 3, rank 1 at the end of the step after step 3"),
    "it evaluates twice": (f"{EVALUATE}; {EVALUATE}", EVALUATE, r"after step 3, rank 1 in run.evaluate after step 3"),
    "two calls": ("run.only_first(int)", EVALUATE, r"rank 0 is in run.evaluate after step 3, rank 1 in run.only_first"),
    "a number that it owns": ("best.value = 0.29", "best.value = 0.31",
                              r"after step 3 the state of script.py differs: own.best.value is 0.31 on rank 0, 0.29 on"
                              " rank 1"),
    "a text that it owns": ("best.name = 'mine'", "pass", r"own.best.name is 'none' on rank 0, 'mine' on rank 1"),
    "its learning rate": ("optimizer.param_groups[0]['lr'] = 0.2", "pass",
                          r"optimizer.0.lr is 0.1 on rank 0, 0.2 on rank 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_takes_another_way_is_named_at_once(
    name: str, tmp_path: Path, figure: Callable[[str], None]
) -> None:
    one, others, told = CASES[name]
    (tmp_path / "script.py").write_text(SCRIPT.format(one=one, others=others))
    options = ["--cpu", "--ranks", 3, "--balance", "3,2,1", "--save-dir", "run"]
    finished = run_script([*options, "script.py"], cwd=tmp_path)
    assert finished.code == EXIT_DISAGREE, finished.err
    last = finished.err[finished.err.rindex("hetseq: ") :]
    assert re.search(told, last), finished.err
    assert "behind the loop" not in finished.out
    assert not list((tmp_path / "run").glob("checkpoints/step-000000003*")), "the step is not saved"
    parted = max(float(path.read_text()) for path in tmp_path.glob("parted-*"))
    when = [float(path.read_text()) for path in tmp_path.glob("told-*")]
    assert when
    figure(f"{name}: told {max(when) - parted:.3f} s after it")
    assert max(when) - parted <= PROMISE_S
