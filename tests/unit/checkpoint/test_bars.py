"""Bars of long work: on a terminal, after a second, gone when it is over; nowhere else a byte."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from hetseq.checkpoint import verify
from hetseq.checkpoint.export import export
from hetseq.monitor.progress_bar import bar
from tests.support.elsewhere import save_state


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Screen(io.StringIO):
    """A terminal that remembers."""

    def isatty(self) -> bool:
        return True


def drawn(stream: io.StringIO, *, after_s: float) -> str:
    clock = Clock()
    with bar("step-7", 4_000_000, in_bytes=True, stream=stream, now=clock) as advance:
        clock.now_s = after_s
        advance(1_000_000)
    return stream.getvalue()


def test_on_a_terminal_work_that_lasts_has_a_bar_with_its_share() -> None:
    text = drawn(Screen(), after_s=1.0)
    assert "step-7" in text
    assert "1.0/4.0 MB" in text


def test_short_work_and_files_see_nothing_of_it() -> None:
    assert drawn(Screen(), after_s=0.9) == ""
    assert drawn(io.StringIO(), after_s=100.0) == ""


def test_without_rich_there_is_no_bar_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rich.progress", None)
    assert drawn(Screen(), after_s=2.0) == ""


def test_a_terminal_that_has_gone_ends_no_work() -> None:
    class Gone(Screen):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    drawn(Gone(), after_s=2.0)


def test_every_byte_that_is_read_moves_the_bar(tmp_path: Path) -> None:
    commit = save_state(tmp_path / "run", 1, {"model.weight": torch.arange(3_000_000)}, (1.0, 2.0))
    read: list[int] = []
    assert verify(commit, deep=True, advance=read.append) == []
    assert sum(read) == sum(part.size_bytes for part in commit.parts)
    assert verify(commit, deep=False, advance=read.append) == []
    assert sum(read) == sum(part.size_bytes for part in commit.parts), "the small files alone are not counted"
    read.clear()
    export(commit, tmp_path / "out", form="safetensors", advance=read.append)
    assert sum(read) >= sum(part.size_bytes for part in commit.parts)
