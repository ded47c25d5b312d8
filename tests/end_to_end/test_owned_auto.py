"""Owners that no option names: `--own auto`, `--own-memory` and `--shard-model auto`, from the command to `status/`.

Ranks of one host share its memory and what `--own-memory` allows there, and all ranks of these tests are on one host.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetseq.errors import EXIT_STOPPED
from hetseq.monitor.metrics import read_rows
from tests.support.commands import WarmLauncher
from tests.support.nodes import Nodes, Stock
from tests.support.places import directory
from tests.support.refusals import check_refusal

pytestmark = pytest.mark.slow

PARAMETERS = 33_088
GRADIENT = 8 * PARAMETERS  # bytes in fp64
STATE = 3 * GRADIENT  # the sums of the gradient and two moments of AdamW
OWNED = STATE + GRADIENT  # in `status/`, with the parameters that their owner counts
TASK = """
import torch
from hetseq import Task

class Rows(torch.utils.data.Dataset):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        return {"x": self.x[index]}

class Copying(Task):
    def load_dataset(self, split):
        return Rows()
    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    def loss(self, model, sample):
        return {"loss": ((model(sample["x"]) - sample["x"]) ** 2).sum()}
"""
WORDS = shlex.split(
    "--cpu --precision fp64 --global-batch-size 16 --max-update 100000 --optimizer adamw --lr 0.001"
    " --lr-scheduler constant --disable-validation --no-epoch-checkpoints --no-progress-bar"
)


@dataclass(frozen=True)
class Seen:
    """A run that was stopped after its ranks had written what they own."""

    owned: list[int | None]  # bytes in `status/`, by rank
    said: list[float]  # percent in the log, by rank
    log: str
    losses: list[float]  # of the first steps

    def fractions(self) -> list[float]:
        return [(of_rank or 0) / OWNED for of_rank in self.owned]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("task") / "copying_owned.py"
    path.write_text(TASK)
    return f"{path}:Copying"


def watch(nodes: Nodes, task: str, ranks: int, *commands: Sequence[object]) -> Seen:
    """Run these nodes, which share a run directory, until `status/` tells of some steps of each rank."""
    run = nodes.folder / "run"
    for words in commands:
        nodes.start(*WORDS, "--task", task, *words, "--save-dir", run)

    def told() -> bool:
        files = [run / "status" / f"rank-{rank}.json" for rank in range(ranks)]
        return all(file.exists() and json.loads(file.read_text()).get("step", 0) >= 8 for file in files)

    nodes.wait_until(told, "steps in status/")
    owned = [json.loads((run / "status" / f"rank-{rank}.json").read_text()).get("owned_bytes") for rank in range(ranks)]
    for node in nodes.started:
        node.signal(signal.SIGTERM)
    assert {ended.code for ended in nodes.finish()} == {EXIT_STOPPED}, nodes.story()
    log = nodes.started[0].err
    divided = re.search(r"optimizer state and gradient sums are divided: (.*)", log)
    said = [float(one) for one in re.findall(r"rank \d+ ([\d.e-]+) %", divided[1])] if divided else []
    rows = [row for row in read_rows(run / "metrics.jsonl") if "loss" in row][:8]
    assert [row["step"] for row in rows] == list(range(1, 9))
    for row in rows:
        assert ("owned_bytes" in row["ranks"]) == bool(said)
    return Seen(owned, said, log, [row["loss"] for row in rows])


@pytest.fixture(scope="module")
def replicas(stock: Stock, task: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """`auto` where a replica fits, which is the simpler layout."""
    nodes = Nodes(stock, tmp_path_factory.mktemp("replicas"))
    try:
        yield watch(nodes, task, 2, ["--ranks", 2, "--shard-model", "auto"])
    finally:
        nodes.close()


def check(seen: Seen, expected: Sequence[float], replicas: Seen) -> None:
    """Each rank owns its fraction to within 2 %, the log says so, and the losses are those of replicas."""
    assert len(seen.owned) == len(expected)
    assert seen.said == pytest.approx([100 * one for one in expected], rel=0.02, abs=0.02)
    assert seen.fractions() == pytest.approx(expected, rel=0.02, abs=2e-4)
    assert sum(seen.fractions()) == pytest.approx(1, abs=1e-3)
    assert seen.losses == pytest.approx(replicas.losses, rel=1e-12)


def test_auto_keeps_replicas_where_they_fit_and_says_what_they_leave(replicas: Seen) -> None:
    assert replicas.owned == [None, None]
    assert replicas.said == []
    size = r"[\d.,]+ (?:GB|MB|TB)"
    line = (
        rf"--shard-model auto: none, which leaves {size} on the fullest rank; state would leave {size} on the fullest"
    )
    assert len(re.findall(line, replicas.log)) == 1, replicas.log


@pytest.mark.parametrize("own", [[], ["--own", "equal"], ["--own-memory", "40M"], ["--own-memory", "stable"]], ids=str)
def test_ranks_of_one_host_own_as_much(own: list[str], nodes: Nodes, task: str, replicas: Seen) -> None:
    seen = watch(nodes, task, 2, ["--ranks", 2, "--shard-model", "state", *own])
    check(seen, [1 / 2, 1 / 2], replicas)
    assert "--shard-model auto" not in seen.log


def test_a_rank_without_samples_owns_by_its_memory_as_others_do(nodes: Nodes, task: str, replicas: Seen) -> None:
    seen = watch(nodes, task, 3, ["--ranks", 3, "--balance", "3,1,0", "--shard-model", "state"])
    check(seen, [1 / 3] * 3, replicas)


def test_auto_divides_the_state_where_a_replica_does_not_fit(nodes: Nodes, task: str, replicas: Seen) -> None:
    """`--own-memory` limits the state of a replica as well, and two ranks of a host divide it."""
    seen = watch(nodes, task, 2, ["--ranks", 2, "--shard-model", "auto", "--own-memory", "1200K"])
    check(seen, [1 / 2, 1 / 2], replicas)
    line = r"--shard-model auto: state, which leaves [\d.,]+ (?:GB|MB|TB) on the fullest rank; none (.*)"
    said = re.findall(line, seen.log)
    assert len(said) == 1, seen.log
    found = re.fullmatch(r"does not fit: rank 0 lacks ([\d.]+) kB, rank 1 lacks \1 kB for a whole replica", said[0])
    assert found is not None, said[0]
    assert float(found[1]) == pytest.approx((STATE - 600_000) / 1000, rel=0.01)


def test_auto_refuses_at_once_what_no_layout_holds(warm: WarmLauncher, task: str, tmp_path: Path) -> None:
    words = [*WORDS, "--task", task, "--ranks", 2, "--shard-model", "auto", "--save-dir", tmp_path / "run"]
    finished = warm.run(["train", *map(str, words), "--own-memory", "700K"])
    check_refusal(finished, "--shard-model state: optimizer state and gradient sums take 794 kB", "--own-memory")
    assert "auto: state, which leaves" not in finished.err


def proportional(first: float, second: float) -> tuple[float, float]:
    return first / (first + second), second / (first + second)


#: what each of two nodes says, and the fraction of the state that its rank owns
TWO_NODES = {
    "in proportion to what is free": (("40M", "10M"), proportional),
    "the stable one owns all": (("stable,4M", "40M"), lambda one, other: (1.0, 0.0)),
    "the stable one has no room for all": (
        ("stable,1200K", "10M"), proportional,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TWO_NODES)
def test_each_node_says_how_much_it_gives(case: str, nodes: Nodes, task: str, replicas: Seen) -> None:
    given, fractions_of = TWO_NODES[case]
    place = directory(nodes.folder)
    commands = [
        ["--ranks", 1, "--shard-model", "state", "--own-memory", memory, "--distributed-init-method", place.url,
         "--distributed-world-size", 2, "--distributed-rank", rank]
        for rank, memory in enumerate(given)
    ]  # fmt: skip
    sizes = [float(memory.rpartition(",")[2].replace("M", "e6").replace("K", "e3")) for memory in given]
    free = [size / 2 for size in sizes]  # two ranks of this host divide what each of them may use
    assert (free[0] < STATE) == (case == "the stable one has no room for all")
    check(watch(nodes, task, 2, *commands), fractions_of(*free), replicas)
