"""Colours of lines on a terminal: warnings yellow, lost ranks and errors red.

There are none in a file or a pipe, or with NO_COLOR. rich decides whether a terminal has colours, and is imported only
if there is a terminal.
"""

from __future__ import annotations

import enum
import logging
from typing import TextIO

from hetseq.errors import codes_in

_LOST = frozenset({"worker-died", "worker-silent", "worker-raised", "save-failed"})


class Tone(enum.Enum):
    """How a line sounds; `value` is the style in rich's words."""

    PLAIN = ""
    WARNING = "yellow"
    ERROR = "red"

    @property
    def number(self) -> int:
        """The colour of the terminal's control sequence."""
        return {Tone.PLAIN: 39, Tone.WARNING: 33, Tone.ERROR: 31}[self]


def tone_of(text: str, level: int = logging.NOTSET) -> Tone:
    """The tone of a log record, or of a line of the launcher, by its level or its first word, and by its codes."""
    if level >= logging.ERROR or not _LOST.isdisjoint(codes_in(text)):
        return Tone.ERROR
    return Tone.WARNING if level >= logging.WARNING or text.startswith("warning: ") else Tone.PLAIN


def toned(text: str, tone: Tone, stream: TextIO) -> str:
    """The text for `stream`, its first line in the colour of `tone` if `stream` shows colours."""
    if tone is Tone.PLAIN or not has_colours(stream):
        return text
    first, newline, rest = text.partition("\n")
    return f"\x1b[{tone.number}m{first}\x1b[39m{newline}{rest}"


def has_colours(stream: TextIO) -> bool:
    """Whether `stream` is a terminal with colours that the user wants."""
    if not stream.isatty():
        return False
    try:
        from rich.console import Console
    except ImportError:
        return False
    console = Console(file=stream)
    return console.color_system is not None and not console.no_color
