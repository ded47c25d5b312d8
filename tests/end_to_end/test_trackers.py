"""Trackers of a run whose writer and launcher are killed: one run each, every row once, as their own libraries read."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetseq.monitor.curves import numbers_of
from hetseq.monitor.metrics import read_rows
from hetseq.run_directory import RunDirectory
from tests.support import forked
from tests.support.commands import HETSEQ, ROOT, run_command, start_command
from tests.support.nightly import nightly
from tests.support.own_loops import run_script
from tests.support.trials import until

pytestmark = pytest.mark.slow

LOOPS = ROOT / "tests" / "support" / "loops"
#: the rows of one run by its name: (step, tags and numbers)
Runs = dict[str, list[tuple[int, dict[str, float]]]]


def of_wandb(folder: Path) -> Runs:
    found: Runs = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", file]
        records = list(map(json.loads, subprocess.run(command, capture_output=True, text=True).stdout.splitlines()))
        for name in (record["run"]["run_id"] for record in records if record["type"] == "run"):
            rows = [record["history"]["item"] for record in records if record["type"] == "history"]
            found.setdefault(name, []).extend((row["step"], row) for row in rows)
    return found


def of_mlflow(folder: Path) -> Runs:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(str(folder / "mlruns"))
    runs = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    found: Runs = {}
    for run in runs:
        numbers: dict[int, dict[str, float]] = {}
        for tag in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, tag)
            assert len({one.step for one in history}) == len(history), f"{tag} has a step twice"
            for one in history:
                numbers.setdefault(one.step, {})[tag] = one.value
        assert run.info.status == "FINISHED"
        found[run.data.tags["hetseq.run_id"]] = sorted(numbers.items())
    return found


def of_trackio(folder: Path) -> Runs:
    from trackio.sqlite_storage import SQLiteStorage

    logs = {run: SQLiteStorage.get_logs("digits", run) for run in SQLiteStorage.get_runs("digits")}
    own = ("step", "timestamp", "epoch")
    return {
        run: [(row["step"], {tag: number for tag, number in row.items() if tag not in own}) for row in rows]
        for run, rows in logs.items()
    }


def of_own(folder: Path) -> Runs:
    rows = {file.name: map(json.loads, file.read_text().splitlines()) for file in (folder / "lines").iterdir()}
    return {name: [(row["step"], numbers_of(row)) for row in of_run] for name, of_run in rows.items()}


TRACKERS: dict[str, tuple[str, str, Callable[[Path], Runs]]] = {
    "wandb": ("wandb", "wandb:project=digits", of_wandb),
    "mlflow": ("mlflow", "mlflow:experiment=digits,uri={folder}/mlruns", of_mlflow),
    "trackio": ("trackio", "trackio:project=digits", of_trackio),
    "own": ("json", f"{LOOPS / 'line_tracker.py'}:LineTracker", of_own),
}


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    forked.warm_up()


@pytest.mark.parametrize("name", [*nightly("wandb", "mlflow", "trackio"), "own"])
def test_the_writer_and_then_the_launcher_are_killed_and_each_row_arrives_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, spec, read = TRACKERS[name]
    settings = {"WANDB_MODE": "offline", "WANDB_DIR": tmp_path, "TRACKIO_DIR": tmp_path / "trackio",
                "MLFLOW_ALLOW_FILE_STORE": "true", "LINE_TRACKER": tmp_path / "lines"}  # fmt: skip
    env = {key: str(value) for key, value in settings.items()}
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    pytest.importorskip(package)
    run = tmp_path / "run"
    words = ["--cpu", "--balance", "2,1", "--save-dir", run, "--save-interval-updates", 5, "--precision", "fp64",
             "--tracker", spec.format(folder=tmp_path), LOOPS / "logged.py", tmp_path, 7]  # fmt: skip
    with start_command(["run", "--ranks", "2", *map(str, words)], program=HETSEQ, env=env) as command:
        until((tmp_path / "twelve").exists, "twelve steps")
        os.killpg(command.pid, signal.SIGKILL)
        command.wait()
    (tmp_path / "go on").touch()
    finished = run_script(["--ranks", 2, *words], env=env)
    assert finished.code == 0, finished.err
    assert "resuming after step" in finished.err
    rows = read_rows(run / "metrics.jsonl")
    assert [(row["step"], row["log"]["square"]) for row in rows] == [(step, step**2) for step in range(1, 17)]
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert len(lines) > len(rows), "the resumed run repeats steps"
    (found,) = read(tmp_path).items()
    assert found[0] == RunDirectory(run).run_id
    assert [step for step, _ in found[1]] == list(range(1, 17))
    for row, (_, numbers) in zip(rows, found[1], strict=True):
        for tag in ("train/loss", "train/lr", "log/square", "log/norm"):
            assert numbers[tag] == pytest.approx(numbers_of(row)[tag], rel=1e-12)


def test_a_task_sends_its_validations_and_with_other_options_its_steps_again(tmp_path: Path) -> None:
    words = ["--task", f"{ROOT / 'docs' / 'examples' / 'spirals.py'}:Spirals", "--global-batch-size", "200", "--cpu",
             "--ranks", "2", "--save-dir", str(tmp_path / "run"), "--tracker", TRACKERS["own"][1]]  # fmt: skip
    env = {"LINE_TRACKER": str(tmp_path / "lines")}
    seen = []
    for more in (["--max-epoch", "2"], ["--max-epoch", "2"], ["--max-epoch", "3", "--lr", "0.01"]):
        with start_command(["train", *words, *more], program=HETSEQ, env=env, is_cold=False) as command:
            finished = command.finish(timeout_s=60)
        assert finished.code == 0, finished.err
        (rows,) = of_own(tmp_path).values()
        seen.append([(step, "valid/accuracy" in numbers) for step, numbers in rows])
        newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
        shutil.rmtree(newest)  # as if the run had been killed before
    first, second, third = ([(step, False) for step in (k, k + 1, k + 2)] + [(k + 2, True)] for k in (1, 4, 7))
    assert seen == [first + second, first + second, first + second + second + third]


def test_a_missing_package_is_an_error_before_anything_is_started(tmp_path: Path) -> None:
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'wandb' else find(name, *rest)\n"
    )
    finished = run_command(
        ["train", "--tracker", "wandb:project=x", "--cpu", "--save-dir", str(tmp_path / "run")], program=HETSEQ,
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert finished.code == 2
    assert "install it with pip install 'wandb>=0.31'" in finished.err
    assert not (tmp_path / "run").exists()


SCRIPT = """
import torch
import hetseq

class Mine:
    def begin(self, run_id, config, is_resumed): print("began with", config["global_batch_size"])
    def row(self, row): print("row", row["step"], row["log"])
    def event(self, kind, fields): pass
    def end(self, code): print("ended with", code)

run = hetseq.start({start})
model = torch.nn.Linear(1, 1)
run.own(model, torch.optim.SGD(model.parameters(), lr=0.001))
{before}
for step in run.steps([torch.ones(1)] * 8, global_batch_size=4, max_epoch=1):
    for x in step:
        step.backward(model(x).sum())
        {inner}
    run.log(a=step.number, b=torch.tensor(0.5), a_b=2)
    {after}
"""


def run_text(tmp_path: Path, **parts: str) -> Any:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(**{"start": "", "before": "", "inner": "pass", "after": "pass", **parts}))
    return run_script(["--cpu", "--ranks", 2, "--save-dir", tmp_path / "run", script])


def test_a_script_brings_a_tracker_of_its_own(tmp_path: Path) -> None:
    finished = run_text(tmp_path, start="trackers=[Mine()]", after="run.log(a=0) if step.number == 2 else None")
    assert finished.code == 0, finished.err
    assert [line for line in finished.out.splitlines() if line.startswith(("row", "began", "ended"))] == [
        "began with 4", "row 1 {'a': 1, 'b': 0.5, 'a_b': 2}", "row 2 {'a': 0, 'b': 0.5, 'a_b': 2}", "ended with 0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"before": "run.log(a=1)"}, r"run.log belongs behind the inner loop"),
        ({"inner": "run.log(a=1)"}, r"run.log belongs behind the inner loop"),
        ({"after": "run.log(c='much')"}, r"run.log(c=...) got str: expected a number, or a tensor without dimensions"),
        ({"after": "run.log(c=torch.ones(1))"}, r"run.log(c=...) got Tensor: expected a number, or a tensor without"),
        ({"start": "trackers=[3]"}, r"builtins:int is no tracker: expected the methods begin(run_id, config,"),
        ({"start": "trackers=['wand:project=x']"}, r"there is no tracker wand (did you mean wandb?)"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(parts: dict[str, str], told: str, tmp_path: Path) -> None:
    finished = run_text(tmp_path, **parts)
    assert finished.code in (1, 2)
    assert told in finished.err
