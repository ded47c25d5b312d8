"""LoRA on three unequal hosts behind slow cables, of which one leaves and returns: the curve of one device.

And the memory of such a run: no second copy of the frozen base.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq.commands.drop import drop
from hetseq.errors import EXIT_DONE, EXIT_STOPPED
from hetseq.monitor.metrics import read_rows
from tests.support.commands import ROOT
from tests.support.hosts import Host, some_hosts
from tests.support.nightly import nightly
from tests.support.nodes import Node, Nodes, Process, Stock
from tests.support.places import free_port
from tests.support.tiny_models import SENTENCES, publish
from tests.support.trials import curve, last_state

pytest.importorskip("peft")
pytestmark = pytest.mark.slow

TOLERANCE = 1e-11  # relative
NAMES = ("labA", "labB", "labC")
#: a node that is 2 times slower than another; all of them sleep most of the time, so that three share two cores
THROTTLE = "0:8,1:16,2:32"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in fp64, and texts of unequal lengths.

    GPT-2, because transformers computes the norms of a Llama in fp32 in an fp64 model too: there the rounding of
    another summation is now and then amplified to 1e-8 of an element, on one device with other micro-batches as well.
    """
    folder = tmp_path_factory.mktemp("published")
    publish(folder / "model", "gpt2", seed=5)
    chance = random.Random(3)
    texts = [" ".join(chance.choices(SENTENCES, k=2))[: chance.randint(12, 90)] for _ in range(90)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def words(published: Path) -> list[object]:
    options = {
        "task": "hf_causal_lm", "model": published / "model", "data": published / "texts.jsonl", "max-length": 48,
        "lora-rank": 4, "precision": "fp64", "global-batch-size": 24, "batch-size": 4, "optimizer": "adamw", "lr": 0.01,
        "lr-scheduler": "constant", "dropout": 0,
    }  # fmt: skip
    flags = ["--cpu", "--disable-validation", "--no-epoch-checkpoints"]
    return [*flags, *(word for key, value in options.items() for word in (f"--{key}", value))]


# Three hosts.


@pytest.fixture(scope="module")
def lab(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sequence[Host], list[Process]]]:
    """The hosts, with cables of 20 Mbit/s, and a warm process in each."""
    with some_hosts(tmp_path_factory.mktemp("lab"), NAMES, mbit_per_s=20) as hosts:
        processes: list[Process] = []
        try:
            for host in hosts:
                processes.append(stock.start({"GLOO_SOCKET_IFNAME": None}, prefix=host.enter))
            yield hosts, processes
        finally:
            for process in processes:
                process.close()


@pytest.mark.netns
@pytest.mark.timeout(300)
# with owners fewer rounds, in each of which the base travels twice
# the leaving and returning of test_hosts with the adapters of test_hf_causal_lm
@pytest.mark.parametrize("owners", nightly([], ["--shard-model", "all", "--own", "2,1,1", "--batch-size", "24"]))
def test_a_node_leaves_and_returns_and_the_curve_and_adapters_are_those_of_one_device(
    nodes: Nodes, lab: tuple[Sequence[Host], list[Process]], published: Path, owners: list[str]
) -> None:
    hosts, processes = lab
    run, port = nodes.folder / "run", free_port()

    def start(rank: int) -> Node:
        place = ["--distributed-init-method", f"tcp://{hosts[0].address}:{port}", "--distributed-world-size", 3]
        mine = ["--distributed-rank", rank, "--ranks", 1, "--throttle", THROTTLE, "--max-update", 100_000]
        return nodes.start(*words(published), *owners, *place, *mine, "--save-dir", run, process=processes[rank])

    def wait_for_steps(count: int, world_size: int) -> None:
        def look() -> bool:
            sizes = [row["world_size"] for row in rows_of(run)]
            return len(sizes) >= count and sizes[-count:] == [world_size] * count

        nodes.wait_until(look, f"{count} steps of {world_size} nodes", within_s=90)

    head, second, leaver = map(start, range(3))
    wait_for_steps(6, 3)
    drop([str(run), "labC"])
    (left,) = nodes.finish(leaver, timeout_s=60)
    assert left.code == EXIT_DONE, nodes.story()
    wait_for_steps(3, 2)
    again = start(2)
    wait_for_steps(6, 3)
    head.signal(signal.SIGTERM)
    ends = nodes.finish(head, second, again, timeout_s=60)
    assert {ended.code for ended in ends} == {EXIT_STOPPED}, nodes.story()

    rows = rows_of(run)
    sizes = [row["world_size"] for row in rows]
    assert [size for size, before in zip(sizes, [0, *sizes]) if size != before] == [3, 2, 3]
    since = rows[len(sizes) - sizes[::-1].index(2) :]
    assert all(any(row["shares"][rank] for row in since) for rank in range(3)), "each has worked after the return"
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    one = one_device(nodes, published, len(rows), "one")
    assert apart(run, one) <= TOLERANCE
    twin = one_device(nodes, published, len(rows), "twin", "--lora-alpha", 8.001)
    assert apart(run, twin) > 1e4 * TOLERANCE, "another factor of the adapters is far away"


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The rows of steps so far."""
    path = run / "metrics.jsonl"
    return [row for row in read_rows(path) if "loss" in row] if path.exists() else []


def one_device(nodes: Nodes, published: Path, steps: int, name: str, *more: object) -> Path:
    """The same training in one process."""
    run = nodes.folder / name
    node = nodes.start(*words(published), *more, "--max-update", steps, "--save-dir", run)
    (ended,) = nodes.finish(node, timeout_s=90)
    assert ended.code == EXIT_DONE, ended.err
    return run


def apart(run: Path, right: Path) -> float:
    """The largest relative difference of a loss, and of a number of the adapters or moments to its tensor's largest."""
    mine, ours = curve(run), curve(right)
    assert mine.keys() == ours.keys()
    losses = [abs(mine[step]["loss"] - ours[step]["loss"]) / ours[step]["loss"] for step in ours]
    tensors, expected = last_state(run).tensors, last_state(right).tensors
    assert tensors.keys() == expected.keys()
    adapters = [name for name in expected if "lora_" in name]
    assert adapters, "the checkpoint has adapters"
    assert not any("embed_tokens" in name or "base_layer" in name for name in expected), "and no base"
    return max([*losses, *(difference(tensors[name], expected[name]) for name in expected)])


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    largest = float(expected.double().abs().max())
    return float((found.double() - expected.double()).abs().max()) / (largest or 1.0)


# Memory.


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_a_lora_run_in_bf16_holds_its_base_once(tmp_path: Path) -> None:
    """As the benchmark measures it, in a size in which a second copy of the base exceeds the bar by far."""
    script = ROOT / "bench" / "lora_memory.py"
    size = ["--layers", "12", "--micro-batch", "1", "--length", "32", "--steps", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, script, *size], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.stdout, ended.stderr
    (found,) = json.loads(ended.stdout.splitlines()[-1])["rows"]
    assert found["base_types"] == ["torch.bfloat16"]
    assert (ended.returncode, found["ratio"] <= 1) == (0, True), ended.stdout
    assert found["added_bytes"] + 2 * found["base"] > 1.2 * found["most_bytes"], "the twin: a second copy is seen"
