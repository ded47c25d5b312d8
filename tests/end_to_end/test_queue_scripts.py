"""Scripts of `hetseq script`, with stand-ins for Slurm and Grid Engine: two nodes on this machine train together."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hetseq.monitor.metrics import read_rows
from tests.support.commands import ROOT
from tests.support.nightly import nightly
from tests.unit.commands.test_script import program

pytestmark = pytest.mark.slow

RUN = shlex.split(
    "--task mnist --cpu --global-batch-size 50 --max-update 3 --no-save --disable-validation --log-format none"
)


@pytest.mark.parametrize("system", ["slurm", *nightly("sge")])
def test_two_nodes_of_a_queue_train_together(tmp_path: Path, system: str) -> None:
    (tmp_path / "home").mkdir()
    environment = {
        **os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path / "home"), "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    asked = [system, "--nodes", "2"]
    if system == "slurm":
        environment["SLURM_JOB_ID"] = "17"
        program(tmp_path / "bin" / "srun", 'while [ "$1" != bash ]; do shift; done\n"$@" & "$@" && wait')
    else:
        asked += ["--parallel-environment", "mpi"]
        (tmp_path / "hosts").write_text("here 4 q@here <NULL>\nthere 4 q@there <NULL>\n")
        environment |= {"JOB_ID": "17", "PE_HOSTFILE": str(tmp_path / "hosts")}
        program(tmp_path / "bin" / "qrsh", 'shift 3\nexec "$@"')
    command = [sys.executable, "-m", "hetseq", "script", *asked, "--", *RUN, "--save-dir", "runs/queued"]
    written = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert written.returncode == 0, written.stderr
    assert "then submit it: " in written.stderr
    (tmp_path / "queued.sh").write_text(written.stdout)
    done = subprocess.run(
        ["bash", "queued.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    rows = list(read_rows(tmp_path / "runs" / "queued" / "metrics.jsonl"))
    assert [(row["step"], row["world_size"]) for row in rows] == [(1, 2), (2, 2), (3, 2)]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["queued"]
