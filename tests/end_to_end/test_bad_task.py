"""A task that breaks its contract is told once, in words: before the first step where that can be known, with its rank.

Exit codes: 2 for what is found before the first step, 1 for what the task does after it.
"""

from __future__ import annotations

import re
import shlex
import socket
from pathlib import Path

import pytest

from tests.support.commands import Finished, WarmLauncher, run_command
from tests.support.cuda_errors import OUT_OF_MEMORY
from tests.support.refusals import (
    BASE,
    COLD_S,
    PROMISE_S,
    SQUARES,
    TWO,
    check_refusal,
    on_one_and_some_on,
    rows,
    train,
    write_task,
)

BAD_FILES = {
    "syntax": ("import torch\ndef f(:\n    pass\n", ("task.py, line 2", "def f(:")),
    "absent module": ("import torch\nimport no_such_thing\n", ("line 2", "no module no_such_thing", "install")),
    "raises": ("x = 1 / 0\n", ("task.py, line 1", "ZeroDivisionError")),
    "no task": ("x = 1\n", ("defines no subclass of Task", "name the class", "task.py:MyTask")),
    "two tasks": (
        "from hetseq import Task\nclass A(Task):\n    pass\nclass B(Task):\n    pass\n",
        ("several tasks (A, B)", "name one", "task.py:A"),
    ),
    "2020": (
        "from hetseq import Task\nclass Old(Task):\n    def train_step(self, *args):\n        pass\n",
        ("Old overrides train_step, the hook of 2020", "def loss(self, model, sample):", "def count(self, sample):"),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "world"), on_one_and_some_on(("--distributed-world-size", "3"), BAD_FILES, "raises"), ids=str
)
def test_a_task_file_that_cannot_be_used(warm: WarmLauncher, tmp_path: Path, name: str, world: tuple[str, ...]) -> None:
    text, says = BAD_FILES[name]
    (tmp_path / "task.py").write_text(text)
    check_refusal(train(warm, tmp_path, "--task", tmp_path / "task.py", *world), *says)


@pytest.mark.slow
def test_a_task_file_that_is_not_there(warm: WarmLauncher, tmp_path: Path) -> None:
    check_refusal(
        train(warm, tmp_path, "--task", tmp_path / "gone.py"), "--task", "gone.py: does not exist", "seen from"
    )
    path = write_task(tmp_path)
    check_refusal(train(warm, tmp_path, "--task", f"{path}:Toi", *TWO), "task.py has no Toi", "did you mean Toy?")
    assert train(warm, tmp_path, "--task", f"{path}:Toy", *TWO).code == 0


BAD_TASKS = {
    "mean": ({"loss": f'return {{"loss": {SQUARES}.mean()}}'}, ("returns the mean of 'loss'", "reduction='sum'")),
    "wrong key": ({"loss": f'return {{"los": {SQUARES}.sum()}}'}, ("['los']", "['loss']", "give both the same terms")),
    "not a dict": ({"loss": f"return {SQUARES}.sum()"}, ("Toy.loss returned Tensor", "expected a dict")),
    "vector": ({"loss": f'return {{"loss": {SQUARES}}}'}, ("Toy.loss gave (1,) for 'loss'", "expected the sum")),
    "float": ({"loss": 'return {"loss": 1.0}'}, ("Toy.loss gave float for 'loss'", "a tensor without dimensions")),
    "negative count": ({"count": 'return {"loss": -1}'}, ("Toy.count gave -1.0 for 'loss'", "expected 0 or more")),
    "nan count": ({"count": 'return {"loss": float("nan")}'}, ("Toy.count gave nan for 'loss'", "expected 0 or more")),
    "count a number": ({"count": "return 3"}, ("Toy.count returned int", "expected a dict")),
    "count of words": ({"count": 'return {"loss": "many"}'}, ("Toy.count gave 'many' for 'loss'", "expected a number")),
    "nothing to train": (
        {"build_model": "return torch.nn.Identity()", "loss": 'return {"loss": model(sample["x"]).sum()}'},
        ("the model of Toy has no parameter to train", "expected at least one"),
    ),
    "no model": ({"build_model": "return 3"}, ("Toy.build_model returned int", "expected a Module")),
    "no samples": ({"load_dataset": "return []"}, ("gave a data set without samples", "expected at least one")),
    "no data set": ({"load_dataset": "return None"}, ("load_dataset('train') gave no data set", "self.datasets")),
    "absent file": (
        {"load_dataset": 'return open("/nowhere/data.csv")'},
        ("Toy.load_dataset('train') found no file /nowhere/data.csv", "--data"),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), on_one_and_some_on(TWO, BAD_TASKS, "wrong key", "no samples"), ids=str)
def test_a_task_that_breaks_its_contract_is_found_before_the_first_step(
    warm: WarmLauncher, tmp_path: Path, name: str, world: tuple[str, ...]
) -> None:
    bodies, says = BAD_TASKS[name]
    check_refusal(train(warm, tmp_path, "--task", write_task(tmp_path, **bodies), *world), *says)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_mean_through_a_real_command_on_two_ranks(tmp_path: Path) -> None:
    bodies, says = BAD_TASKS["mean"]
    args = [*BASE, *TWO, "--save-dir", str(tmp_path / "run"), "--task", str(write_task(tmp_path, **bodies))]
    check_refusal(run_command(args), *says, within_s=COLD_S)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_names_rank_and_term(warm: WarmLauncher, tmp_path: Path) -> None:
    # In the data's own order every step takes 12 samples, so rank 1 has the bad ones: 6 to 11, 18 to 23 and so on.
    task = write_task(
        tmp_path,
        count='return {"good": len(sample["x"]), "bad": len(sample["x"])}',
        loss=f'x = {SQUARES}.sum(); is_bad = bool((sample["index"] % 12 > 6).any());'
        ' return {"good": x, "bad": x * (float("nan") if is_bad else 1.0)}',
    )
    args = ("--task", task, *TWO, "--max-skipped-steps", "2", "--curriculum", "9", "--global-batch-size", "12")
    finished = train(warm, tmp_path, *args)
    message = check_refusal(finished, "step 2 skipped", "rank 1", "loss term 'bad'", "--max-skipped-steps", code=1)
    assert "rank 0" not in message
    assert "'good'" not in message
    assert finished.err.count("step 1 skipped") == 1  # not once per rank
    assert rows(tmp_path / "run")[0]["loss"] is None


RAISES_IN_STEP_3 = {
    # the third step has the samples 24 to 35, and rank 1 of 3 its 28 to 31
    "loss": 'bad = bool((sample["index"] == 30).any()); '
    f'return {{"loss": {SQUARES}.sum() if not bad else [].pop("sample 30 is rotten")}}'
}


def check_root_cause(finished: Finished, save_dir: Path) -> None:
    """The failure of rank 1, told once, with its traceback in a log, and not a word of the peers that lost it."""
    everything = finished.out + finished.err
    assert finished.code == 1, everything
    assert "Traceback (most recent call last)" not in everything
    error = "TypeError: 'str' object cannot be interpreted as an integer"
    told = rf"^hetseq: rank 1: your task failed: task\.py:\d+ in loss, step 3: {error} \[worker-raised\]$"
    assert len(re.findall(told, everything, re.MULTILINE)) == 1, everything
    assert everything.count(error) == 1
    assert finished.err.rstrip().endswith("full traceback: log/rank-1.txt in the run directory")
    log = (save_dir / "log" / "rank-1.txt").read_text()
    assert log.count("Traceback (most recent call last)") == log.count(error) == 1
    for other in ("PeerLostError", "lost a peer", "rank 0:", "rank 2:"):
        assert other not in everything, everything
    assert [row["step"] for row in rows(save_dir)] == [1, 2]


#: the sample that raises lies with rank 1
EQUAL_THREE = shlex.split("--distributed-world-size 3 --balance equal --curriculum 9 --disable-validation")


@pytest.mark.slow
def test_a_task_that_raises_on_one_rank_is_told_once_with_that_rank(warm: WarmLauncher, tmp_path: Path) -> None:
    task = write_task(tmp_path, **RAISES_IN_STEP_3)
    finished = train(warm, tmp_path, "--task", task, *EQUAL_THREE)
    check_root_cause(finished, tmp_path / "run")
    assert finished.seconds < PROMISE_S


@pytest.mark.slow
def test_a_rank_that_holds_not_one_sample_ends_the_run_with_one_message(warm: WarmLauncher, tmp_path: Path) -> None:
    body = f'bad = (sample["index"] == 30).any(); return {{"loss": {SQUARES}.sum() if not bad else exhausted()}}'
    task = write_task(tmp_path, loss=body)
    task.write_text(task.read_text() + f"\ndef exhausted():\n    raise torch.OutOfMemoryError({OUT_OF_MEMORY!r})\n")
    words = (f"rank 1 on {socket.gethostname()}: the memory of cpu does not hold even one sample", "in use", "smaller")
    finished = train(warm, tmp_path, "--task", task, *EQUAL_THREE)
    check_refusal(finished, *words, code=1)
    assert "PeerLostError" not in finished.err + finished.out


@pytest.mark.slow
@pytest.mark.usefixtures("no_imports")
def test_a_task_that_raises_on_one_rank_through_a_real_command(tmp_path: Path) -> None:
    task = write_task(tmp_path, **RAISES_IN_STEP_3)
    finished = run_command([*BASE, "--task", task, *EQUAL_THREE, "--save-dir", tmp_path / "run"], is_cold=False)
    check_root_cause(finished, tmp_path / "run")
    assert finished.seconds < COLD_S


@pytest.mark.slow
def test_a_contract_that_is_broken_after_the_first_step_fails_with_1(warm: WarmLauncher, tmp_path: Path) -> None:
    body = f'bad = bool((sample["index"] == 30).any()); return {{"other" if bad else "loss": {SQUARES}.sum()}}'
    args = (
        "--task",
        write_task(tmp_path, loss=body),
        *TWO,
        "--balance",
        "equal",
        "--curriculum",
        "9",
        "--global-batch-size",
        "12",
    )
    finished = train(warm, tmp_path, *args)
    check_refusal(finished, "rank 1: Toy.loss returned the terms ['other']", "the same terms", code=1)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
