"""GPUs are counted by another process, which a stop signal does not wait for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetseq.launch import visible_gpus as counting
from hetseq.launch.visible_gpus import cpu_build, visible_gpus


class Counter:
    """The process that counts: what its answers are in turn, an exception or what it prints."""

    pid, kills = 7, 0

    def __init__(self, *answers: BaseException | bytes) -> None:
        self.answers = list(answers)

    def __call__(self, words: list[str], **_: Any) -> Counter:
        return self

    def __enter__(self) -> Counter:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.kills == 1

    def communicate(self, timeout: float) -> tuple[bytes, None]:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer, None

    def kill(self) -> None:
        self.kills += 1


FOR_CPUS = "__version__ = '2.99.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"


@pytest.fixture(autouse=True)
def version_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of versions of a torch that is built for GPUs, and that nobody has imported."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    file = tmp_path / "torch" / "version.py"
    file.write_text(FOR_CPUS.replace("cuda: Optional[str] = None", "cuda: Optional[str] = '13.0'"))
    return file


def test_what_it_prints_counts_and_its_minutes_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = subprocess.TimeoutExpired("count", 60.0)
    monkeypatch.setattr(counting.subprocess, "Popen", Counter(late, late, b"3\n"))
    assert visible_gpus() == 3
    assert capsys.readouterr().err.count("counting GPUs: importing torch (process 7) has taken") == 2


def test_a_torch_that_is_built_for_cpus_shows_no_gpu_and_is_not_imported(
    monkeypatch: pytest.MonkeyPatch, version_file: Path
) -> None:
    version_file.write_text(FOR_CPUS)
    monkeypatch.setattr(counting.subprocess, "Popen", lambda *_, **__: pytest.fail("asked another process"))
    assert (visible_gpus(), cpu_build()) == (0, "2.99.0+cpu")


@pytest.mark.parametrize(
    "text", ["", "cuda = None\n", "hip = None\ncuda = name()\n", "hip = cuda = '6.4'\n", "cuda = (\n"]
)
def test_a_torch_of_which_that_cannot_be_told_is_asked(
    monkeypatch: pytest.MonkeyPatch, version_file: Path, text: str
) -> None:
    version_file.write_text(text)
    monkeypatch.setattr(counting.subprocess, "Popen", Counter(b"2\n"))
    assert (visible_gpus(), cpu_build()) == (2, None)
    version_file.unlink()
    monkeypatch.setattr(counting.subprocess, "Popen", Counter(b"1\n"))
    assert visible_gpus() == 1


def test_an_interrupted_count_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = Counter(KeyboardInterrupt("SIGTERM"))
    monkeypatch.setattr(counting.subprocess, "Popen", counter)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        visible_gpus()
    assert counter.kills == 1
