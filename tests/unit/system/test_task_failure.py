"""What is said of an exception of the user's code: place, sample or step, and only the user's own lines."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from hetseq import registry
from hetseq.data.fetch import Collate, Fetcher, Request
from hetseq.errors import codes_in, text_of
from hetseq.system.task_failure import TaskRaised, note, noting, summary, trace_of
from hetseq.training import task_checks

TASK = """
import torch

class Rows:
    def __len__(self):
        return 20

    def __getitem__(self, index):
        row = {"x": torch.zeros(2 + (index == 4))}
        return row["label" if index == 13 else "x"]

def loss(layer, x):
    return layer(x).sum()

def deep(depth):
    return deep(depth - 1) if depth else {}["bottom"]

def chained():
    try:
        {}["inner"]
    except KeyError as error:
        raise RuntimeError("outer") from error
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A user's file, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TASK)
    spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def caught(function: Callable[..., Any], *arguments: Any) -> Exception:
    """The exception, without the frame of this function."""
    try:
        function(*arguments)
    except Exception as error:
        trace = error.__traceback__
        return error.with_traceback(trace.tb_next if trace is not None else None)
    raise AssertionError("nothing was raised")


def request(*indices: int) -> Request:
    return Request(1, torch.tensor(indices).numpy())


def test_the_first_line_names_file_line_function_and_sample_and_the_users_frames_follow(mine: ModuleType) -> None:
    error = caught(Fetcher(mine.Rows(), 1, split="train").samples, request(3, 13))
    assert summary(error) == (
        "your task failed: mine.py:10 in __getitem__, sample 13 of train: KeyError: 'label' [worker-raised]\n"
        "  mine.py:10 in __getitem__\n"
        '    return row["label" if index == 13 else "x"]'
    )
    assert "fetch.py" in trace_of(error)


def test_frames_of_torch_are_left_out_and_the_step_is_named(mine: ModuleType) -> None:
    error = caught(mine.loss, torch.nn.Linear(5, 2), torch.zeros(1, 4))
    note(error, "step 3")
    first, *frames = (summary(error) or "").splitlines()
    assert first.startswith("your task failed: mine.py:13 in loss, step 3: RuntimeError: mat1 and mat2 shapes cannot")
    assert frames == ["  mine.py:13 in loss", "    return layer(x).sum()"]
    assert codes_in(first) == ["worker-raised"]


def test_an_error_without_a_line_of_the_user_has_no_summary() -> None:
    error = caught(torch.nn.Linear(5, 2), torch.zeros(1, 4))
    note(error, "step 3")
    assert summary(error) is None


def test_samples_that_torch_cannot_collate_are_named_although_no_line_is_the_users(mine: ModuleType) -> None:
    fetcher, collate = Fetcher(mine.Rows(), 1, split="train"), Collate(torch.utils.data.default_collate, "train")
    error = caught(collate, fetcher.__getitems__(request(2, 4, 5, 6, 7)))
    told = summary(error)
    assert told is not None
    assert told.startswith("your task failed: samples 2, 4, 5 and 2 more of train: RuntimeError: stack expects each")


def test_an_error_in_a_loader_process_arrives_as_text_with_its_whole_traceback(
    mine: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: object())
    refused = pickle.loads(pickle.dumps(Fetcher(mine.Rows(), 1, split="train").__getitems__(request(13))))
    assert isinstance(refused.error, TaskRaised)
    assert summary(refused.error) == str(refused.error) == text_of(refused.error)
    assert str(refused.error).startswith("your task failed: mine.py:10 in __getitem__, sample 13 of train: KeyError")
    assert trace_of(refused.error).startswith("Traceback (most recent call last):")


def test_memory_that_runs_out_in_a_loader_process_keeps_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Greedy:
        def __getitem__(self, index: int) -> object:
            raise MemoryError

    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: object())
    assert type(caught(Fetcher(Greedy(), 1).__getitems__, request(1))) is MemoryError


def test_the_inner_note_stays_and_only_the_last_frames_of_a_recursion_are_shown(mine: ModuleType) -> None:
    def step() -> None:
        with noting("step 3"), noting("validation after step 2"):
            mine.deep(30)

    error = caught(step)
    first, more, *frames = (summary(error) or "").splitlines()
    assert first == "your task failed: mine.py:16 in deep, validation after step 2: KeyError: 'bottom' [worker-raised]"
    assert "24 more" in more
    assert len(frames) == 2 * 8


def test_the_frames_are_those_of_the_error_itself_and_its_text_is_one_line(mine: ModuleType) -> None:
    error = caught(mine.chained)
    assert (summary(error) or "").splitlines()[:2] == [
        "your task failed: mine.py:22 in chained: RuntimeError: outer [worker-raised]",
        "  mine.py:22 in chained",
    ]
    assert "The above exception was the direct cause" in trace_of(error)
    long = RuntimeError("first\nsecond")
    long.__traceback__ = error.__traceback__
    assert "RuntimeError: first ... [worker-raised]" in (summary(long) or "")


def test_a_sample_of_the_trial_before_the_first_step_is_named(mine: ModuleType) -> None:
    error = caught(task_checks._samples, mine.Rows(), [13])
    first = "your task failed: mine.py:10 in __getitem__, sample 13 of the training data: KeyError: 'label' "
    assert (summary(error) or "").startswith(first)


def test_an_error_of_the_users_own_class_has_the_name_that_its_file_gives_it(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text("import hetseq\nclass Bad(Exception): pass\nclass Late(hetseq.Task): Bad = Bad\n")
    error = registry.find_task(str(path)).Bad("too late")
    note(error, "step 3", is_of_task=True)
    assert summary(error) == "your task failed: step 3: late.Bad: too late [worker-raised]"
