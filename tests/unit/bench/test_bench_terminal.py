"""The terminals of the manual's recordings: what a screen shows after control sequences, and an SVG that plays it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("terminal")


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ("one\r\ntwo\r\n", ("one", "two")),
        ("step 1\rstep 2", ("step 2",)),
        ("step 10\r\x1b[2Kstep 2", ("step 2",)),
        ("a\r\nb\r\n\x1b[2A\x1b[Jc", ("c",)),
        ("\x1b[1;32mgreen\x1b[0m", ("green",)),
        ("main\r\n\x1b[?1049h\x1b[Hother\x1b[H\x1b[2Kview\x1b[?1049lend", ("main", "end")),
        ("1\r\n2\r\n3\r\n4", ("2", "3", "4")),
        ("0123456789\r\nab", ("0123456789", "ab")),
        ("0123456789ab", ("0123456789", "ab")),
    ],
)
def test_a_screen_follows_what_is_written(terminal: Any, written: str, lines: tuple[str, ...]) -> None:
    whole, pieces = terminal.Screen(3, 10), terminal.Screen(3, 10)
    whole.write(written)
    for character in written:  # also where a sequence is cut off
        pieces.write(character)
    assert whole.lines == pieces.lines == lines


def test_a_film_is_an_svg_with_a_text_for_each_line_while_it_stands(terminal: Any) -> None:
    film = terminal.Film([terminal.Pane(2, "labA")], "/folder")
    film.frames += [
        (0.0, ("labA$ run", "", "")),
        (1.0, ("labA$ run", "<step 1>", "")),
        (2.0, ("labA$ run", "step 2", "")),
    ]
    text = terminal.drawn(film, "a run & its end", 40)
    image = ElementTree.fromstring(text)
    assert image.get("aria-label") == "a run & its end"
    assert [line.text for line in image.iter("{http://www.w3.org/2000/svg}text")] == ["labA$ run", "<step 1>", "step 2"]
    assert len(re.findall("@keyframes", text)) == 3
    assert [("last" in (line.get("class") or "")) for line in image.iter("{http://www.w3.org/2000/svg}text")] == [
        True, False, True,
    ]  # fmt: skip
