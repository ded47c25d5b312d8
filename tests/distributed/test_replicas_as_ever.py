"""Without `--shard-model`, a run makes the exchanges, copies and synchronisations that it made before owners existed.

The constants were counted once, with this file, at the last commit in which no rank could own a part of the state.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hetseq.comm.group import GlooGroup, Group
from tests.support import lives
from tests.support.ranks import run_ranks
from tests.support.training import prepared

#: collective calls and calls about their memory; only owners call `slices`
VERBS = ("zeros", "release", "all_reduce_sum", "all_gather_rows", "broadcast", "subgroup", "slices")
COPIES = {"aten::copy_", "aten::clone", "aten::_to_copy", "aten::cat", "aten::stack", "aten::index_select"}
#: methods and functions for which the host waits for a device, if the tensor is on one
SYNCS = {"item", "tolist", "numpy", "cpu", "equal", "nonzero", "__float__", "__int__", "__bool__", "__index__"}


class Net(lives.Line):
    """Three matrices and three vectors: five buckets, if they are small."""

    def build_model(self) -> torch.nn.Module:
        layers = [torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
        return torch.nn.Sequential(*layers)


class Copying(TorchDispatchMode):
    """Counts what torch computes, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.done: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.done[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class Waiting(TorchFunctionMode):
    """Counts what Python asks of tensors, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.done: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.done[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Counts:
    """What one rank did: verbs of the group while it was built, and by step; words of its rows; copies and waits."""

    built: dict[str, int] = field(default_factory=dict)
    steps: list[dict[str, int]] = field(default_factory=list)
    words: list[int] = field(default_factory=list)  # of the rows of each step, in all
    copies: list[int] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)


def live(group: Group, save_dir: str, words: list[str], shares_memory: bool) -> Counts:
    if shares_memory and isinstance(group, GlooGroup):
        group.meet_neighbours()
    calls: Counter[str] = Counter()
    sizes: list[int] = []
    for verb in VERBS:
        if (call := getattr(group, verb, None)) is not None:
            setattr(group, verb, noting(verb, call, calls, sizes))
    counts, session = Counts(), lives.begin(group, save_dir, words, Net)
    try:
        counts.built = dict(calls)
        controller = session.controller
        controller.replica.model.train()
        while not controller.has_ended():
            calls.clear()
            sizes.clear()
            with Copying() as copying, Waiting() as waiting:
                controller.train_step()
            counts.steps.append(dict(calls))
            counts.words.append(sum(sizes))
            counts.copies.append(sum(copying.done[name] for name in COPIES))
            counts.waits.append(sum(waiting.done[name] for name in SYNCS))
        return counts
    finally:
        session.close()


def noting(verb: str, call: Any, calls: Counter[str], sizes: list[int]) -> Any:
    """The call, counted, with the words of a row."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[verb] += 1
        if verb == "all_gather_rows":
            sizes.append(args[0].size)
        return call(*args, **kwargs)

    return counted


def run(path: Path, balance: str, shares_memory: bool, *more: str, validate: bool = False) -> list[Counts]:
    text = f"--balance {balance} --max-update 6 --bucket-cap-mb 0.0001 --clip-norm 1 --batch-size 3"
    words = [*lives.words(text, validate=validate), *more]
    counts: list[Counts] = run_ranks(live, balance.count(",") + 1, prepared(path / "run"), words, shares_memory)
    return counts


@dataclass(frozen=True)
class Ever:
    """The constants of a world: copies and waits of each rank in each of six steps."""

    balance: str
    shares_memory: bool
    copies: list[list[int]]  # by rank, of steps in a row
    waits: list[list[int]]
    busy_copies: list[list[int]]  # of a run that also validates, saves and compares its replicas
    busy_waits: list[list[int]]


EVER = [
    Ever("1", False, [[22, 14, 14, 14, 14, 6]], [[2] * 6], [[22, 14, 44, 44, 14, 36]], [[2, 2, 28, 28, 14, 28]]),
    Ever(
        "2,1", False,
        [[29, 20, 20, 20, 20, 14], [19, 14, 14, 14, 14, 12]], [[4, 3, 3, 3, 3, 3]] * 2,
        [[29, 36, 77, 68, 45, 62], [19, 30, 63, 54, 39, 52]], [[4, 6, 28, 25, 15, 25], [4, 6, 26, 23, 17, 23]],
    ),
    Ever(
        "2,1", True,
        [[28, 22, 22, 22, 22, 16], [18, 16, 16, 16, 16, 14]], [[2] * 6] * 2,
        [[28, 35, 55, 55, 35, 49], [18, 29, 41, 41, 29, 39]], [[2, 4, 19, 19, 10, 19], [2, 4, 17, 17, 12, 17]],
    ),
    Ever(
        "3,1,0", False,
        [[31, 21, 21, 21, 21, 15], [21, 15, 15, 15, 15, 13], [9, 5, 5, 5, 5, 5]],
        [[4, 3, 3, 3, 3, 3], [4, 3, 3, 3, 3, 3], [3, 2, 2, 2, 2, 2]],
        [[31, 38, 88, 76, 50, 70], [21, 32, 70, 58, 44, 56], [9, 22, 52, 40, 34, 40]],
        [[4, 6, 27, 24, 13, 24], [4, 6, 19, 16, 11, 16], [3, 5, 20, 17, 16, 17]],
    ),
    Ever(
        "3,1,0", True,
        [[38, 32, 32, 32, 32, 26], [28, 26, 26, 26, 26, 24], [16] * 6], [[2] * 6, [2] * 6, [1] * 6],
        [[38, 45, 67, 67, 45, 61], [28, 39, 49, 49, 39, 47], [16, 29, 31, 31, 29, 31]],
        [[2, 4, 18, 18, 8, 18], [2, 4, 10, 10, 6, 10], [1, 3, 11, 11, 11, 11]],
    ),
]  # fmt: skip
BUCKETS = 5
#: rows of a run, step by step: of one rank, and of several, whose steps 2, 4 and 6 compare replicas
PLAIN_ROWS, BUSY_ROWS = [2, 1, 1, 1, 1, 1], {1: [2, 1, 8, 5, 4, 5], 2: [2, 2, 9, 6, 5, 6]}
PLAIN_WORDS, BUSY_WORDS = [23, 21, 21, 21, 21, 21], {1: [23, 21, 317, 170, 168, 170], 2: [23, 23, 319, 172, 170, 172]}
BUSY = shlex.split(
    "--check-replicas-every 2 --validate-interval-updates 3 --save-interval-updates 5 --no-epoch-checkpoints"
    " --memory-buffer-size 0 --memory-interval-updates 0"
)


def check(ranks: list[Counts], rows: list[int], words: list[int]) -> None:
    """Each rank has made these exchanges, and no other."""
    sums = {"all_reduce_sum": BUCKETS} if len(ranks) > 1 else {}
    built = {"all_gather_rows": 11, "broadcast": 6, "zeros": BUCKETS} if len(ranks) > 1 else {"all_gather_rows": 9}
    for counts in ranks:
        assert counts.built == built
        assert counts.steps == [{"all_gather_rows": number, **sums} for number in rows]
        assert counts.words == words


@pytest.mark.parametrize("ever", EVER, ids=lambda ever: f"{ever.balance}-{'shared' if ever.shares_memory else 'gloo'}")
def test_a_step_of_replicas_costs_what_it_always_has(ever: Ever, tmp_path: Path) -> None:
    ranks = run(tmp_path, ever.balance, ever.shares_memory, "--no-save")
    check(ranks, PLAIN_ROWS, PLAIN_WORDS)
    assert [counts.copies for counts in ranks] == ever.copies
    assert [counts.waits for counts in ranks] == ever.waits


@pytest.mark.parametrize("ever", EVER, ids=lambda ever: f"{ever.balance}-{'shared' if ever.shares_memory else 'gloo'}")
def test_so_does_its_work_between_steps(ever: Ever, tmp_path: Path) -> None:
    ranks = run(tmp_path, ever.balance, ever.shares_memory, *BUSY, validate=True)
    several = min(2, len(ranks))
    check(ranks, BUSY_ROWS[several], BUSY_WORDS[several])
    assert [counts.copies for counts in ranks] == ever.busy_copies
    assert [counts.waits for counts in ranks] == ever.busy_waits


NO_IMAGES = ("--memory-interval-updates", "0")


def test_the_counts_see_owners(tmp_path: Path) -> None:
    """The twin: no bucket is summed on all ranks, and the row of a step says what each rank owns."""
    for counts in run(tmp_path, "2,1", False, "--no-save", "--shard-model", "state", "--own", "3,1", *NO_IMAGES):
        assert counts.built["slices"] == 1
        assert counts.steps == [{"all_gather_rows": number} for number in PLAIN_ROWS]
        assert min(counts.words) > min(PLAIN_WORDS)
