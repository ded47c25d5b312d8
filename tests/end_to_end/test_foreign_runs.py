"""A run directory from somebody else: what looks at it runs nothing of it, what evaluates it runs the task it names.

Both are told in docs/guides/security.md.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from tests.support.commands import WarmLauncher

pytestmark = pytest.mark.slow
PLANTED = """
import pathlib
from hetseq.tasks.mnist import MNISTTask

pathlib.Path(__file__).with_suffix(".ran").touch()


class Planted(MNISTTask):
    pass
"""


@pytest.fixture(scope="module")
def honest(warm: WarmLauncher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps."""
    folder = tmp_path_factory.mktemp("honest") / "run"
    words = f"train --cpu --task mnist --global-batch-size 64 --max-update 3 --save-dir {folder}"
    ended = warm.run(words.split())
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture
def planted(honest: Path, tmp_path: Path) -> Path:
    """The same, with another task in its configuration; the task makes `planted.ran` beside itself."""
    run = shutil.copytree(honest, tmp_path / "run")
    (tmp_path / "planted.py").write_text(PLANTED)
    config = (run / "config.yaml").read_text()
    assert "\ntask: mnist\n" in config
    (run / "config.yaml").write_text(config.replace("\ntask: mnist\n", f"\ntask: {tmp_path}/planted.py:Planted\n"))
    return run


@pytest.mark.parametrize(
    "words",
    [
        "report RUN --output OUT", "report RUN OTHER --output OUT", "top RUN --once", "plan RUN",
        "checkpoints list RUN", "checkpoints show RUN", "checkpoints verify RUN",
        "checkpoints export RUN --format torch --to OUT",
    ],
)  # fmt: skip
def test_looking_at_a_run_runs_nothing_of_it(words: str, warm: WarmLauncher, planted: Path) -> None:
    other = shutil.copytree(planted, planted.parent / "other")
    names = {"RUN": str(planted), "OTHER": str(other), "OUT": str(planted.parent / "out")}
    ended = warm.run([names.get(word, word) for word in words.split()])
    assert ended.code == 0, ended.err
    assert not (planted.parent / "planted.ran").exists()


def test_going_on_with_a_run_takes_the_task_from_the_command_alone(warm: WarmLauncher, planted: Path) -> None:
    words = f"train --cpu --task mnist --global-batch-size 64 --max-update 4 --save-dir {planted}"
    ended = warm.run(words.split())
    assert ended.code == 0, ended.err
    assert not (planted.parent / "planted.ran").exists()


@pytest.mark.parametrize("command", ["evaluate", "predict"])
def test_evaluating_a_run_runs_the_task_that_it_names(command: str, warm: WarmLauncher, planted: Path) -> None:
    """The twin: nobody should evaluate the run of somebody whom he does not trust."""
    out = planted.parent / "out.txt"
    words = [command, str(planted), "--cpu", "--subset", "test"]
    ended = warm.run([*words, "--output", str(out)] if command == "predict" else words)
    assert ended.code == 0, ended.err
    assert (planted.parent / "planted.ran").exists()
    if command == "predict":  # the one file that is not for its owner alone: it is nobody's run
        assert stat.S_IMODE(out.stat().st_mode) == 0o666 & ~umask()


def umask() -> int:
    """That of this process, which the launcher has from it."""
    found = os.umask(0o077)
    os.umask(found)
    return found


def test_a_run_directory_that_others_may_write_to_is_used_as_it_is(
    warm: WarmLauncher, honest: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(honest, tmp_path / "run")
    run.chmod(0o770)
    words = f"train --cpu --task mnist --global-batch-size 64 --max-update 4 --save-dir {run}"
    assert warm.run(words.split()).code == 0
    assert stat.S_IMODE(run.stat().st_mode) == 0o770
    assert {stat.S_IMODE(path.stat().st_mode) for path in run.iterdir()} == {0o600, 0o700}
