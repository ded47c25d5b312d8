"""A terminal for pictures: a command on a pseudo-terminal, what its screen shows at any time, and an SVG that plays it.

`Terminal` runs a command and reads what it writes; `Screen` follows the control sequences that HetSeq's commands use
(carriage return, cursor up, erase, alternate screen). `Film` collects the screens of several terminals over time, and
`drawn` gives them as one SVG, in which a line of a screen is one `<text>` while it does not change.
"""

from __future__ import annotations

import codecs
import fcntl
import html
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

CHARACTER, LINE, EDGE = 8.4, 19, 14  # pixels of a 14 px monospaced font
_STYLE = """
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #d6dbe1; white-space: pre; }
.host { fill: #ffffff; font-weight: bold; } .typed { fill: #7ee787; } .bad { fill: #ff7b72; } .good { fill: #79c0ff; }
.pace { fill: #e3b341; } .t { visibility: hidden; }
@media (prefers-reduced-motion: reduce) { .t { animation: none !important; } .last { visibility: visible; } }
"""
_SEQUENCE = re.compile(r"\x1b\[(?P<numbers>[?\d;]*)(?P<kind>[A-Za-z])|\x1b[()][A-Z0-9]|\x1b[=>78]")
_SETTLED_S = 6.0  # how long the last screen stays
_LOOK_S, _APART_S, _PATIENCE_S = 0.2, 0.4, 400.0


class Screen:
    """The screen of a terminal of this size, after all output so far."""

    def __init__(self, rows: int, columns: int) -> None:
        self._rows, self._columns = rows, columns
        self._lines: list[list[str]] = [[]]
        self._row = self._column = 0
        self._rest = ""
        self._other: tuple[list[list[str]], int, int] | None = None  # the main screen, while the alternate one is shown

    def write(self, text: str) -> None:
        """Characters and control sequences; one that is cut off waits for its rest."""
        text, at = self._rest + text, 0
        self._rest = ""
        while at < len(text):
            if text[at] == "\x1b":
                found = _SEQUENCE.match(text, at)
                if found is None:
                    self._rest = text[at:]
                    return
                if found["kind"]:
                    self._control(found["kind"], found["numbers"])
                at = found.end()
            else:
                self._put(text[at])
                at += 1

    @property
    def lines(self) -> tuple[str, ...]:
        """The newest rows of it."""
        lines = ["".join(line).rstrip() for line in self._lines]
        while lines and not lines[-1]:
            lines.pop()
        return tuple(lines[-self._rows :])

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._row += 1
        elif character >= " ":
            if self._column == self._columns:
                self._row, self._column = self._row + 1, 0
            line = self._line()
            line.extend(" " * (self._column + 1 - len(line)))
            line[self._column] = character
            self._column += 1
        self._line()

    def _line(self) -> list[str]:
        while self._row >= len(self._lines):
            self._lines.append([])
        return self._lines[self._row]

    def _control(self, kind: str, numbers: str) -> None:
        count = int(numbers) if numbers.isdigit() else 0
        if numbers == "?1049":
            self._alternate(is_shown=kind == "h")
        elif kind == "A":
            self._row = max(0, self._row - max(1, count))
        elif kind == "B":
            self._row += max(1, count)
        elif kind == "G":
            self._column = max(0, count - 1)
        elif kind == "H":
            self._row, self._column = max(0, len(self._lines) - self._rows), 0
        elif kind == "K":
            self._line()[0 if count == 2 else self._column :] = []
        elif kind == "J":
            self._line()[self._column if count == 0 else 0 :] = []
            del self._lines[self._row + 1 :]

    def _alternate(self, *, is_shown: bool) -> None:
        if is_shown:
            self._other = self._lines, self._row, self._column
            self._lines, self._row, self._column = [[]], 0, 0
        elif self._other is not None:
            (self._lines, self._row, self._column), self._other = self._other, None


class Terminal:
    """A command on a pseudo-terminal of so many columns; its screen follows what it writes."""

    def __init__(
        self, command: Sequence[str], columns: int, rows: int, *, environment: Mapping[str, str] | None = None,
        folder: str | None = None,
    ) -> None:  # fmt: skip
        self._screen, self._turn = Screen(rows, columns), threading.Lock()
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, cwd=folder,
            env={**os.environ, **(environment or {}), "TERM": "xterm-256color"},
        )  # fmt: skip
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lines(self) -> tuple[str, ...]:
        with self._turn:
            return self._screen.lines

    @property
    def code(self) -> int | None:
        """How the command ended; None while it runs."""
        return self._process.poll()

    def press_ctrl_c(self) -> None:
        os.killpg(self.pid, signal.SIGINT)

    def close(self) -> None:
        """Kill what still runs of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        os.close(self._master)

    def _read(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with suppress(OSError):  # the other end is closed
            while chunk := os.read(self._master, 4096):
                with self._turn:
                    self._screen.write(decoder.decode(chunk))


@dataclass
class Pane:
    """A part of the picture: the terminal of one host, its height in rows, and the typed commands."""

    rows: int
    host: str = ""
    typed: str = ""
    terminal: Terminal | None = None

    def lines(self) -> tuple[str, ...]:
        prompt = f"{self.host}$ {self.typed}".strip() if self.host else f"$ {self.typed}"
        shown = self.terminal.lines[-self.rows :] if self.terminal is not None else ()
        return (prompt, *shown, *[""] * (self.rows - len(shown)))


@dataclass
class Film:
    """The panes over time. Waiting is shortened: each scene has a time in which it is played at most. `home` is shown
    as `~`."""

    panes: list[Pane]
    home: str
    frames: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)
    _played_s: float = 0.0

    def play(self, until: Callable[[str], object], what: str, *, most_s: float) -> None:
        """Record until all that is seen satisfies `until`; raises SystemExit if that takes minutes."""
        scene, begin_s = [(0.0, self._seen())], time.monotonic()
        while not until("\n".join(scene[-1][1])):
            time.sleep(_LOOK_S)
            scene.append((time.monotonic() - begin_s, self._seen()))
            if scene[-1][0] > _PATIENCE_S:
                raise SystemExit(f"not within {_PATIENCE_S:.0f} s: {what}\n" + "\n".join(scene[-1][1]))
        speed = max(1.0, scene[-1][0] / most_s)
        newest_s = -_APART_S
        for at_s, lines in scene:
            is_seen = at_s / speed - newest_s >= _APART_S or at_s == scene[-1][0]
            if is_seen and (not self.frames or self.frames[-1][1] != lines):
                newest_s = at_s / speed
                self.frames.append((self._played_s + newest_s, lines))
        self._played_s += scene[-1][0] / speed

    def hold(self, seconds: float) -> None:
        """Record for so long."""
        end_s = time.monotonic() + seconds
        self.play(lambda _: time.monotonic() >= end_s, "the time", most_s=seconds)

    def _seen(self) -> tuple[str, ...]:
        return tuple(line.replace(self.home, "~") for pane in self.panes for line in pane.lines())


def drawn(film: Film, label: str, columns: int) -> str:
    """An SVG that plays the film, stays at its last screen for a while, and begins again."""
    frames = film.frames
    lasts_s = frames[-1][0] + _SETTLED_S
    rows = len(frames[0][1])
    width, height = round(columns * CHARACTER + 2 * EDGE), rows * LINE + 2 * EDGE
    prompts = {sum(pane.rows + 1 for pane in film.panes[:at]) for at in range(len(film.panes))}
    texts, rules = [], dict[tuple[float, float], str]()
    for row in range(rows):
        for begin_s, end_s, line in _spans([(at_s, lines[row]) for at_s, lines in frames], lasts_s):
            if not line:
                continue
            name = rules.setdefault((begin_s, end_s), f"a{len(rules)}")
            kinds = f"t {name}{' last' * (end_s == lasts_s)} {_kind(line, row in prompts)}".strip()
            place = f'x="{EDGE}" y="{EDGE + LINE * (row + 1) - 5}"'
            texts.append(f'<text {place} class="{kinds}">{html.escape(line[:columns], quote=False)}</text>')
    css = "".join(_rule(name, span, lasts_s) for span, name in rules.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img" aria-label="{html.escape(label)}"><style>{_STYLE}{css}</style>'
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>{"".join(texts)}</svg>\n'
    )


def _spans(seen: Sequence[tuple[float, str]], lasts_s: float) -> Iterator[tuple[float, float, str]]:
    """From when to when each line stood in one row."""
    begin_s, line = 0.0, seen[0][1]
    for at_s, newer in seen[1:]:
        if newer != line:
            yield round(begin_s, 2), round(at_s, 2), line
            begin_s, line = at_s, newer
    yield round(begin_s, 2), lasts_s, line


def _rule(name: str, span: tuple[float, float], lasts_s: float) -> str:
    begin, end = (100 * at_s / lasts_s for at_s in span)
    hidden = f"0%{{visibility:hidden}}{begin:.2f}%{{visibility:visible}}" if begin else "0%{visibility:visible}"
    after = "" if end >= 100 else f"{end:.2f}%{{visibility:hidden}}"
    last = "100%{visibility:visible}" if end >= 100 else "100%{visibility:hidden}"
    return (
        f".{name}{{animation:{name} {lasts_s:.1f}s infinite step-end}}@keyframes {name}{{{hidden}{after}{last}}}\n"
    )  # fmt: skip


def _kind(line: str, is_prompt: bool) -> str:
    """The class of a line, by what it says."""
    if is_prompt:
        return "typed"
    if re.search(r"\b(gone|dead|died|silent|lost)\b", line):
        return "bad"
    if re.search(r"is new|is back|joins|largest|times as fast|accuracy on", line):
        return "good"
    return "pace" if line.startswith(">") else ""
