"""Processes that something else starts once per device: each is launcher and only worker, and they train as one run."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from hetseq.monitor.metrics import read_rows
from tests.support.nodes import Nodes

pytestmark = pytest.mark.slow

DIGITS = shlex.split(
    "--cpu --task mnist --global-batch-size 50 --max-update 3 --optimizer sgd --lr 0.1 --lr-scheduler constant"
    " --dropout 0 --precision fp64 --disable-validation --no-save"
)
TOLERANCE = 1e-12


def losses(save_dir: Path) -> list[float]:
    return [row["loss"] for row in read_rows(save_dir / "metrics.jsonl") if "loss" in row]


def test_three_processes_of_torchrun_give_the_curve_of_one(nodes: Nodes, tmp_path: Path) -> None:
    calm, joined = tmp_path / "calm", tmp_path / "joined"
    nodes.start(*DIGITS, "--save-dir", calm)
    (ended,) = nodes.finish()
    assert ended.code == 0, nodes.story()
    # as torchrun --standalone --nproc-per-node 3 sets them; the port is that of its own store, which nobody calls here
    common = {"TORCHELASTIC_RUN_ID": str(tmp_path), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(os.getpid())}
    common |= {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    started = [
        nodes.start(*DIGITS, "--save-dir", joined, environment=common | {"RANK": rank, "LOCAL_RANK": rank})
        for rank in ("2", "0", "1")
    ]
    for ended in nodes.finish(*started):
        assert ended.code == 0, nodes.story()
    assert [node.err.count("torchrun (TORCHELASTIC_RUN_ID=") for node in started] == [0, 1, 0], nodes.story()
    assert sorted(path.name for path in (joined / "status").iterdir()) == [f"rank-{rank}.json" for rank in range(3)]
    assert len(losses(joined)) == 3
    assert max(abs(mine - right) for mine, right in zip(losses(joined), losses(calm), strict=True)) <= TOLERANCE
