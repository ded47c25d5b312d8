"""A script in one process without a launcher: cells of a notebook that run again, and `hetseq run --check`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import HETSEQ, ROOT, run_command
from tests.support.nightly import nightly
from tests.support.own_loops import LOOPS

pytestmark = pytest.mark.slow

SETUP = """
import json, signal, torch
import torch.nn.functional as F
import hetseq
data = [(torch.full((4,), float(i % 7)), torch.tensor(i % 3)) for i in range(48)]
rows = []
def begin(**options):
    global run, model, optimizer, scheduler
    run = hetseq.start(seed=3, precision="fp64", **options)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run.own(model, optimizer, scheduler)
"""
LOOP = """
for step in run.steps(data, global_batch_size=20, max_steps=7):
    for x, y in step:
        if (step.number, PLACE) == (3, "body"): PLACE = ""; signal.raise_signal(signal.SIGINT)
        step.backward(F.cross_entropy(model(x), y, reduction="sum"), count=len(y))
    scheduler.step()
    rows.append([step.number, step.loss, step.grad_norm])
    if (step.number, PLACE) == (3, "behind"): PLACE = ""; signal.raise_signal(signal.SIGINT)
"""
ROWS = "print('@', json.dumps(rows))"
DRIVER = """
import sys
def cell(text):
    try:
        exec(compile(text, "<cell>", "exec"), globals())
    except BaseException as error:
        sys.last_traceback = error.__traceback__  # as a notebook keeps it, with all frames
        return f"{type(error).__name__}: {error}"
    return ""
"""


def notebook(folder: Path, *lines: str) -> list[object]:
    """What a process prints that is no file's, as a notebook is none."""
    text = "\n".join([DRIVER, f"cell({SETUP!r})", *lines])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("@ ")]


def test_a_cell_that_was_interrupted_continues_when_it_runs_again(tmp_path: Path) -> None:
    text = repr(LOOP)
    cases = [f"begin(); PLACE = {place!r}; rows = []" for place in ("body", "behind", "")]
    run_cell = f"print('@', json.dumps(cell({text}).partition(':')[0]))"
    said = notebook(
        tmp_path, cases[0], run_cell, run_cell, ROWS, cases[1], run_cell, run_cell, ROWS, cases[2], run_cell, ROWS
    )
    first, again, body, other, further, behind, whole, plain = said
    assert (first, again, other, further, whole) == ("KeyboardInterrupt", "", "KeyboardInterrupt", "", "")
    assert isinstance(plain, list)
    assert [row[0] for row in plain] == list(range(1, 8))
    assert body == plain
    assert behind == plain
    assert list(tmp_path.iterdir()) == []


def test_a_cell_with_other_arguments_and_a_run_that_is_over_are_refused(tmp_path: Path) -> None:
    other = LOOP.replace("global_batch_size=20", "global_batch_size=24")
    fresh = "data = list(data)" + LOOP
    said = notebook(
        tmp_path, "begin(save_dir='run'); PLACE = 'body'", f"cell({LOOP!r})",
        *(f"print('@', json.dumps(cell({text!r})))" for text in (other, fresh, LOOP, LOOP)),
        "begin(save_dir='run'); PLACE = ''; rows = []", f"print('@', json.dumps(cell({LOOP!r})))", ROWS,
    )  # fmt: skip
    changed, copied, done, over, resumed, rows = said
    told = "TaskError: run.steps continues a loop that was interrupted, and was given another {}: run.close() and"
    assert str(changed).startswith(told.format("global_batch_size"))
    assert str(copied).startswith("TaskError: run.steps continues"), "data that were made anew"
    assert str(done) == str(copied), "data is that of the cell before"
    assert str(over) == str(copied)
    assert resumed == ""
    assert isinstance(rows, list)


def test_a_run_that_was_interrupted_continues_after_another_start(tmp_path: Path) -> None:
    made = LOOP.replace("max_steps=7)", "max_steps=7, collate=collater(WIDTH))")
    collater = """def collater(width):
    def collate(samples):
        return width * torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
    return collate
"""
    said = notebook(
        tmp_path, f"cell({collater!r})", "begin(save_dir='run'); PLACE = 'body'; rows = []; WIDTH = 1",
        f"cell({made!r})", "WIDTH = 2", f"print('@', json.dumps(cell({made!r})))",
        "begin(save_dir='run'); PLACE = ''; WIDTH = 1",
        f"print('@', json.dumps(cell({made!r})))", ROWS,
    )  # fmt: skip
    other, resumed, rows = said
    assert "was given another collate: run.close() and hetseq.start() begin" in str(other)
    assert resumed == ""
    assert isinstance(rows, list)
    assert [row[0] for row in rows] == list(range(1, 8)), "no step is lost, none is done twice"


def test_a_program_ends_one_run_before_the_next(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(
        f"{SETUP}\nPLACE = ''\nbegin()\n{LOOP}\nrun.close()\nbegin()\n{LOOP}\nassert rows[:7] == rows[7:]\nbegin()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1
    assert "TaskError: hetseq.start was called twice: end the run before it with run.close()" in done.stderr


@pytest.mark.parametrize(
    ("script", "told"),
    [("gan", ["check: the gradient of 16 samples is the same in 2, 3, 16 pieces"] * 2),
     *nightly(("clip", ["check: the gradient of 24 samples is the same in 2, 3, 24 pieces"]), is_many=True)],
)  # fmt: skip
def test_a_loop_is_checked_without_an_update(script: str, told: list[str], tmp_path: Path) -> None:
    finished = run_command(
        ["run", "--check", "--cpu", "--precision", "fp64", str(LOOPS / f"{script}.py"), str(tmp_path)],
        program=HETSEQ, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert finished.code == 0, finished.err
    assert [line.partition(":  ")[0].partition(": the largest")[0] for line in finished.out.splitlines()] == told
    assert list(tmp_path.iterdir()) == [], "no step, and no run directory"


def test_a_loop_that_is_not_exact_fails_its_check(tmp_path: Path) -> None:
    script = tmp_path / "mean.py"
    script.write_text(f"{SETUP}\nPLACE = ''\nbegin()\n{LOOP.replace(', reduction=' + chr(34) + 'sum' + chr(34), '')}")
    finished = run_command(["run", "--check", "--cpu", str(script)], program=HETSEQ, cwd=tmp_path)
    assert finished.code == 2
    assert "step.backward got a mean" in finished.err
    assert [path.name for path in tmp_path.iterdir()] == ["mean.py"]
