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

#: counts the calls of the group, and what torch copies and waits for, from one step of the loop to the next
COUNTED = """
from collections import Counter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from hetseq.comm.group import GlooGroup, LocalGroup

calls, copies, waits = Counter(), Counter(), Counter()

def noting(verb, call):
    def counted(*args, **kwargs):
        calls[verb] += 1
        return call(*args, **kwargs)
    return counted

for kind in (GlooGroup, LocalGroup):
    for verb in ("zeros", "release", "all_reduce_sum", "all_gather_rows", "broadcast", "subgroup", "slices"):
        if hasattr(kind, verb):
            setattr(kind, verb, noting(verb, getattr(kind, verb)))

class Copying(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        copies[func._schema.name] += 1
        return func(*args, **(kwargs or {}))

class Waiting(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        waits[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))

def told():
    copied = sum(copies[f"aten::{name}"] for name in ("copy_", "clone", "_to_copy", "cat", "stack"))
    awaited = sum(waits[name] for name in ("item", "tolist", "numpy", "cpu", "equal", "__float__"))
    return run.rank, dict(calls), copied, awaited

Copying().__enter__()
Waiting().__enter__()
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


#: by ranks: the gathers of rows from step to step, of which the second and the last end an epoch; and the copies and
#: waits of each rank
EVER = {
    1: ([2, 6, 2, 5], {0: [(20, 2), (20, 2), (20, 2), (8, 2)]}),
    3: (
        [2, 7, 2, 6],
        {
            0: [(18, 1), (23, 3), (18, 1), (15, 3)],
            1: [(13, 2), (18, 4), (13, 2), (14, 4)],
            2: [(10, 2), (15, 4), (10, 2), (13, 4)],
        },
    ),
}


@pytest.mark.parametrize("ranks", EVER)
def test_between_two_steps_it_makes_the_exchanges_that_it_made_before_owners(ranks: int, tmp_path: Path) -> None:
    """The constants were counted once, with this test, at the last commit without ranks that own parts of the state."""
    script = tmp_path / "script.py"
    text = SCRIPT.replace("import hetseq\n", "import hetseq\n" + COUNTED).replace(
        "[step.shares[run.rank], seen]", "told()"
    )
    script.write_text(text.replace("seen.clear()", "seen.clear(), calls.clear(), copies.clear(), waits.clear()"))
    words = ["--cpu", "--ranks", ranks, "--balance", {1: "1", 3: "5,2,1"}[ranks], "--batch-size", 4]
    finished = run_script([*words, "--save-dir", tmp_path / "run", script], cwd=tmp_path)
    assert finished.code == 0, finished.err
    rows, work = EVER[ranks]
    files = [[json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.glob("seen-*")]
    assert {steps[0][0] for steps in files} == set(work)
    for _, *later in files:
        sums = {"all_reduce_sum": 1} if ranks > 1 else {}
        assert [calls for _, calls, _, _ in later] == [{"all_gather_rows": number, **sums} for number in rows]
        assert [(copies, waits) for _, _, copies, waits in later] == work[later[0][0]]
