"""Which lines have a colour, and where there is none."""

from __future__ import annotations

import io
import logging

import pytest

from hetseq.monitor.colour import Tone, tone_of, toned


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "level", "tone"),
    [
        ("step 3 skipped", logging.INFO, Tone.PLAIN),
        ("step 3 skipped", logging.WARNING, Tone.WARNING),
        ("warning: there is no report", logging.NOTSET, Tone.WARNING),
        ("rank 1 was killed (SIGKILL) [worker-died]: 2 ranks continue", logging.WARNING, Tone.ERROR),
        ("this rank is over", logging.ERROR, Tone.ERROR),
    ],
)
def test_a_lost_rank_is_red_and_a_warning_yellow(text: str, level: int, tone: Tone) -> None:
    assert tone_of(text, level) is tone


def test_only_the_first_line_has_the_colour() -> None:
    assert toned("first\nsecond", Tone.ERROR, Terminal()) == "\x1b[31mfirst\x1b[39m\nsecond"
    assert toned("first", Tone.WARNING, Terminal()) == "\x1b[33mfirst\x1b[39m"
    assert toned("first", Tone.PLAIN, Terminal()) == "first"


def test_a_file_has_no_colours_and_neither_has_a_terminal_of_which_none_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert toned("first", Tone.ERROR, io.StringIO()) == "first"
    monkeypatch.setenv("TERM", "dumb")
    assert toned("first", Tone.ERROR, Terminal()) == "first"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert toned("first", Tone.ERROR, Terminal()) == "first"
