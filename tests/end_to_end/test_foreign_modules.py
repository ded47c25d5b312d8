"""Modules in the current folder that have the names of HetSeq's own: workers import the HetSeq of their launcher."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.commands import run_command
from tests.support.nightly import nightly

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is of Python 3.11"),
    pytest.mark.skipif(not Path(sys.executable).with_name("hetseq").exists(), reason="hetseq is not installed"),
]
WORDS = [
    "train",
    "--cpu",
    "--batch-size",
    "64",
    "--max-update",
    "1",
    "--no-save",
    "--disable-validation",
    "--save-dir",
    "run",
]
#: the command as it is installed: `python -m` asks for the current folder first
HETSEQ = [str(Path(sys.executable).with_name("hetseq"))]
FOREIGN = 'raise SystemExit("this is another program")\n'


@pytest.mark.parametrize("name", ["hetseq/__init__.py", *nightly("tasks.py", "tasks/__init__.py", "preprocessing.py")])
def test_a_run_heeds_no_module_of_its_names_in_the_current_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(FOREIGN)
    finished = run_command(WORDS, cwd=tmp_path, program=HETSEQ)
    assert finished.code == 0, finished.err
    assert "another program" not in finished.out + finished.err


def test_what_a_task_starts_sees_the_current_folder_as_ever(tmp_path: Path) -> None:
    """The variable that keeps the folder out of the workers' way does not go on to their children."""
    (tmp_path / "beside.py").write_text('print("found beside")\n')
    (tmp_path / "mine.py").write_text(
        "import subprocess, sys\n"
        "from hetseq import Task\n"
        "from tasks.mnist import MNISTTask\n"
        "class Mine(MNISTTask):\n"
        "    def build_model(self):\n"
        '        command = [sys.executable, "-c", "import beside"]\n'
        "        print(subprocess.run(command, capture_output=True, text=True).stdout)\n"
        "        return super().build_model()\n"
    )
    finished = run_command([*WORDS, "--task", "mine:Mine"], cwd=tmp_path, program=HETSEQ)
    assert finished.code == 0, finished.err
    assert "found beside" in finished.out
