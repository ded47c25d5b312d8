"""`tasks.X` and `hetseq.tasks.X`: one module, and a `tasks` of the user's own first. Each case is a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
FOREIGN = "print('foreign')\n"


def said(program: str | list[str], folder: Path, **environment: str) -> str:
    """What a program in a folder prints; it has to end with 0. The checkout is in PYTHONPATH, as if installed."""
    words = ["-c", program] if isinstance(program, str) else program
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("first", ["tasks.options", "hetseq.tasks.options"])
@pytest.mark.parametrize("has_hetseq", [False, True])
def test_both_names_are_one_module(tmp_path: Path, first: str, has_hetseq: bool) -> None:
    second = {"tasks.options": "hetseq.tasks.options", "hetseq.tasks.options": "tasks.options"}[first]
    program = (
        f"{'import hetseq' if has_hetseq else 'import sys'}\n"
        f"import {first} as one\nimport {second} as other\nimport tasks, hetseq.tasks\n"
        "print(one is other, tasks is hetseq.tasks, one.__name__, one.__spec__.name, tasks.options is one)"
    )
    assert said(program, tmp_path) == "True True hetseq.tasks.options hetseq.tasks.options True"


@pytest.mark.parametrize("name", ["tasks.py", "tasks/__init__.py"])
def test_a_module_of_the_users_own_comes_first_and_disturbs_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(FOREIGN)
    program = "import hetseq, hetseq.tasks.options\nimport tasks\nprint(tasks is hetseq.tasks)"
    assert said(program, tmp_path) == "foreign\nFalse"


def test_a_short_name_that_does_not_exist_is_told_as_such(tmp_path: Path) -> None:
    program = (
        "import hetseq\ntry:\n    import tasks.no_such\nexcept ModuleNotFoundError as error:\n    print(error.name)"
    )
    assert said(program, tmp_path) == "tasks.no_such"


@pytest.mark.parametrize("module", ["preprocessing.mnist", "hetseq.preprocessing.mnist"])
def test_programs_run_under_both_names(tmp_path: Path, module: str) -> None:
    assert said(["-m", module, "--help"], tmp_path).startswith("usage: python -m hetseq.preprocessing.mnist")


def test_classes_are_of_the_long_name_whichever_imported_them(tmp_path: Path) -> None:
    """What checkpoints and nodes compare does not depend on which was used."""
    program = "from tasks.options import GptOptions\nprint(GptOptions.__module__)"
    assert said(program, tmp_path) == "hetseq.tasks.options"
