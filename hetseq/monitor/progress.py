"""Progress display of the training steps, on a terminal or in the output of a batch job.

Draws one live line on a terminal with the table of ranks below it, writes a few plain lines everywhere else, and keeps
log records from garbling the live line. It knows nothing of files, and nothing of training beyond the keys of a row
(see `metrics`); `rank_table` makes the table.

The one idea: the line shows the numbers of one step, never running means, so that it agrees with the row of that step
in `metrics.jsonl`. The clock is passed in; a stream that breaks (a closed terminal, `| head`) ends the display, never
the run, and the display does not wait for a terminal that takes no text (Ctrl-S).
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import errno
import logging
import math
import os
import select
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol, TextIO

from hetseq.config.sections import LogConfig
from hetseq.monitor.colour import Tone, tone_of, toned
from hetseq.monitor.rank_table import (
    MEDIAN_STEPS,
    OVERHEAD_LINES,
    RankSummary,
    Row,
    ranks_that_matter,
    summarise,
    table_lines,
)

if TYPE_CHECKING:  # rich is imported only if there is a terminal to draw on
    from rich.console import Console, RenderableType
    from rich.live import Live

logger = logging.getLogger(__name__)

_PLAIN_INTERVAL_S = 10.0
_PATIENCE_S = 1.0  # with a stalled reader; less than any deadline of a step
_REFRESH_INTERVAL_S = 0.1
_TABLE_INTERVAL_S = 0.5  # numbers in columns are read more slowly than a line
_CHOICE_INTERVAL_S = 5.0  # how long a table without room for all ranks keeps the same ones
_PART_ABOVE = 6  # one line in six of the terminal stays free for log records above a long table
_ADVICE_PART = 4  # one line in four may be advice
_PLAIN_WIDTH, _PLAIN_RANKS = 100, 16  # of the table at the end of a batch job's output
_ETA_STEPS = 50  # the time left is predicted from the pace of this many steps
_BAR_WIDTH = 20
_BEST = "(best)"  # the end of the line of a validation
#: what a narrow terminal does without, first to last; step, loss and the time left stay
_LEAST_NEEDED = ("efficiency", "grad_norm", "lr", "saving", "samples/s", "epoch")


class Progress(Protocol):
    """Shows rows; used by rank zero."""

    def step(self, row: Row) -> None:
        """Show a training step if it is due."""

    def validation(self, row: Row) -> None:
        """Show the result of a validation."""

    def close(self) -> None:
        """Show the last step and restore the terminal."""


class PlainProgress:
    """Lines for pipes, files and batch jobs: never a carriage return, and few enough to read.

    A line every `every_steps` steps (`math.inf`: none); without it at most one every 10 s, and the first and the last
    step. Every validation has its line. With several ranks, their table is written once, at the end.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        total_steps: int | None,
        every_steps: float | None,
        now: Callable[[], float],
    ) -> None:
        self._stream = stream
        self._total_steps = total_steps
        self._every_steps = every_steps
        self._now = now
        self._next_s = -math.inf
        self._unshown: Row | None = None
        self._recent: deque[Row] = deque(maxlen=MEDIAN_STEPS)
        self._guard = _StreamGuard()
        self.saving: tuple[int, float] | None = None  # shown on a terminal only
        self.advice: tuple[str, ...] = ()  # likewise; the log has it once

    def set_total(self, steps: int | None) -> None:
        """How many steps the run has; None if that is not known."""
        self._total_steps = steps

    def step(self, row: Row) -> None:
        """Write the step's line if it is due."""
        self._recent.append(row)
        if self._every_steps is not None:
            if _is_due(row, self._every_steps):
                self._write(step_text(row, self._total_steps))
            return
        now_s = self._now()
        if now_s < self._next_s and row.get("step") != self._total_steps:
            self._unshown = row
            return
        self._next_s = now_s + _PLAIN_INTERVAL_S
        self._unshown = None
        self._write(step_text(row, self._total_steps))

    def validation(self, row: Row) -> None:
        """Write the validation's line."""
        self._write(validation_text(row))

    def close(self) -> None:
        """Write the line of the last step, if it has not been written, and the table of the ranks."""
        if self._unshown is not None:
            self._write(step_text(self._unshown, self._total_steps))
        self._unshown = None
        summary = summarise(self._recent) if self._every_steps != math.inf else None
        self._recent.clear()
        if summary is not None:
            chosen = ranks_that_matter(summary, _PLAIN_RANKS)
            self._write("\n".join(table_lines(summary, chosen, width=_PLAIN_WIDTH)))

    def _write(self, text: str) -> None:
        with self._guard.watch():
            if takes_text(self._stream, patience_s=_PATIENCE_S):
                self._stream.write(text + "\n")
                self._stream.flush()


class LiveProgress:
    """A line at the bottom of a terminal that follows the steps; all other output scrolls above it.

    With several ranks their table is below it, with as many ranks as fit. `every_steps` (`--log-interval`) also leaves
    a plain line above it every so many steps. The cursor is hidden from the first step to `close`, which also runs at
    the interpreter's exit.
    """

    def __init__(
        self,
        console: Console,
        *,
        total_steps: int | None,
        every_steps: int | None,
        now: Callable[[], float],
    ) -> None:
        self._console = console
        self._total_steps = total_steps
        self._every_steps = every_steps
        self._now = now
        self._next_s = -math.inf
        self._recent: deque[Row] = deque(maxlen=MEDIAN_STEPS)
        self._times_s: deque[float] = deque(maxlen=_ETA_STEPS + 1)
        self._chosen: list[int] = []  # the ranks of the table
        self._next_choice_s = -math.inf
        self._live: Live | None = None
        self._guard = _StreamGuard()
        self.saving: tuple[int, float] | None = None  # the step that is being saved, and how much of it is written
        self.advice: tuple[str, ...] = ()  # sentences below the table

    @property
    def is_live(self) -> bool:
        """Whether the terminal has a live line that other output must not run into."""
        return self._live is not None and not self._guard.is_broken

    def set_total(self, steps: int | None) -> None:
        """How many steps the run has; None if that is not known."""
        self._total_steps = steps

    def step(self, row: Row) -> None:
        """Redraw the line, at most ten times a second; a table, at most twice."""
        if self._guard.is_broken:
            return
        now_s = self._now()
        self._recent.append(row)
        self._times_s.append(now_s)
        if self._every_steps is not None and _is_due(row, self._every_steps):
            self.message(step_text(row, self._total_steps))
        is_last = row.get("step") == self._total_steps
        if (now_s < self._next_s and not is_last) or not takes_text(self._console.file):
            return
        self._next_s = now_s + (_TABLE_INTERVAL_S if row.get("ranks") else _REFRESH_INTERVAL_S)
        with self._guard.watch():
            self._draw(self._live or self._start())

    def validation(self, row: Row) -> None:
        """Leave the validation's line above the live one."""
        self.message(validation_text(row))

    def message(self, text: str, tone: Tone = Tone.PLAIN) -> None:
        """Leave `text` above the live line; may be called from any thread."""
        from rich.text import Text

        shown = Text(text, style=tone.value)
        shown.highlight_words([_BEST], "green")
        with self._guard.watch():
            if takes_text(self._console.file, patience_s=_PATIENCE_S):
                self._console.print(shown, soft_wrap=True)

    def close(self) -> None:
        """Draw the last step, end the live line and show the cursor again."""
        live = self._live
        if live is None:
            return
        atexit.unregister(self.close)
        try:
            if self.is_live:
                with self._guard.watch():
                    self._draw(live)
        finally:
            self._live = None
            with contextlib.suppress(OSError, ValueError):
                live.stop()

    def _start(self) -> Live:
        from rich.live import Live

        # No refresh thread: the step redraws. A user's print goes above the line, unless it is redirected to a file.
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        atexit.register(self.close)  # a hidden cursor would outlive a process that forgets to close
        self._live.start()
        return self._live

    def _draw(self, live: Live) -> None:
        from rich.console import Group

        table = self._table()
        line = self._line(self._recent[-1], with_efficiency=table is None)
        live.update(line if table is None else Group(line, table), refresh=True)

    def _table(self) -> RenderableType | None:
        """The table of as many ranks as fit on the terminal; None for a single rank, or if none fits."""
        from rich.text import Text

        height = self._console.height
        width = self._console.width
        advice = [line for text in self.advice for line in textwrap.wrap(text, width, subsequent_indent="  ")]
        advice = advice[: height // _ADVICE_PART]
        room = height - height // _PART_ABOVE - 1 - OVERHEAD_LINES - len(advice)
        summary = summarise(self._recent) if room > 0 else None
        if summary is None:
            return None
        lines = [*table_lines(summary, self._choose(summary, room), width=width), *advice]
        styled = [Text(line, style="bold" if line.startswith(">") else "") for line in lines]
        return Text("\n", no_wrap=True, overflow="crop").join(styled)

    def _choose(self, summary: RankSummary, room: int) -> Sequence[int]:
        """The ranks of the table, kept for a while: lines that come and go cannot be read."""
        size = len(summary.share)
        is_stale = len(self._chosen) != min(room, size) or self._chosen[-1] >= size
        is_pace_missing = summary.pace is not None and summary.pace not in self._chosen
        if is_stale or is_pace_missing or self._now() >= self._next_choice_s:
            self._chosen = ranks_that_matter(summary, room)
            self._next_choice_s = self._now() + _CHOICE_INTERVAL_S
        return self._chosen

    def _line(self, row: Row, *, with_efficiency: bool) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        words = _step_words(row, self._total_steps, with_efficiency=with_efficiency)
        left_s = self._left_s(row)
        if left_s is not None:
            words.append(f"ETA {datetime.timedelta(seconds=round(left_s))}")
        if self.saving is not None:
            words.append(f"saving step {self.saving[0]} ({self.saving[1]:.0%})")
        text = _within(words, self._console.width)
        shown = Text(text, no_wrap=True, overflow="ellipsis")
        if self._total_steps is None or self._console.width < len(text) + 1 + _BAR_WIDTH:
            return shown
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(shown, ProgressBar(total=self._total_steps, completed=row.get("step", 0), width=_BAR_WIDTH))
        return line

    def _left_s(self, row: Row) -> float | None:
        """Seconds to the last step at the pace of the latest steps, pauses included; None if unknown."""
        if self._total_steps is None or len(self._times_s) < 2:
            return None
        pace_s = (self._times_s[-1] - self._times_s[0]) / (len(self._times_s) - 1)
        return max(self._total_steps - int(row.get("step", 0)), 0) * pace_s


class ProgressHandler(logging.Handler):
    """Writes log records above the live line while there is one, else to standard error.

    The worker installs it when it sets up logging; `progress` is None on ranks without a display, and may change.
    """

    def __init__(self, progress: Progress | None) -> None:
        super().__init__()
        self.progress = progress
        self._pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record; errors go to `handleError`, as in every handler."""
        try:
            text = self.format(record)
            live = self.progress
            # A forked loader process has a copy of the line, and of locks that are never released.
            is_here = os.getpid() == self._pid
            if isinstance(live, LiveProgress) and live.is_live and is_here and sys.stderr.isatty():
                live.message(text, tone_of(text, record.levelno))
            elif takes_text(sys.stderr, patience_s=_PATIENCE_S):
                sys.stderr.write(toned(text, tone_of(text, record.levelno), sys.stderr) + "\n")
                sys.stderr.flush()
        except Exception:  # the contract of logging.Handler
            self.handleError(record)


def progress_for(
    config: LogConfig, stream: TextIO, *, total_steps: int | None, now: Callable[[], float]
) -> PlainProgress | LiveProgress:
    """The display for these options and this stream: a live line needs a terminal that can move its cursor."""
    if config.log_format == "none":
        return PlainProgress(stream, total_steps=total_steps, every_steps=math.inf, now=now)
    if stream.isatty() and not config.no_progress_bar:
        console = terminal(stream)
        if not console.is_dumb_terminal:
            return LiveProgress(console, total_steps=total_steps, every_steps=config.log_interval, now=now)
    return PlainProgress(stream, total_steps=total_steps, every_steps=config.log_interval, now=now)


def terminal(stream: TextIO, **settings: Any) -> Console:
    """A rich console that raises BrokenPipeError if its reader is gone; rich's own ends the process."""
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    return Terminal(file=stream, **settings)


def step_text(row: Row, total_steps: int | None, *, with_efficiency: bool = True) -> str:
    """`step 120/938 epoch 1 loss 0.2134 lr 0.01 grad_norm 1.2 samples/s 5321`; the loss is the step's own, in nats.

    Several ranks add ` efficiency 0.93`.
    """
    return " ".join(_step_words(row, total_steps, with_efficiency=with_efficiency))


def _within(words: Sequence[str], width: int) -> str:
    """The words in a line, without those that are needed least if the line is wider than `width`."""
    kept = list(words)
    for least in _LEAST_NEEDED:
        if len(" ".join(kept)) <= width:
            break
        kept = [word for word in kept if word.partition(" ")[0] != least]
    return " ".join(kept)


def _step_words(row: Row, total_steps: int | None, *, with_efficiency: bool) -> list[str]:
    words = [f"step {row.get('step')}" + (f"/{total_steps}" if total_steps is not None else "")]
    if "epoch" in row:
        words.append(f"epoch {row['epoch']}")
    if row.get("skipped"):
        words.append("skipped (gradient not finite)")
    elif row.get("loss") is not None:
        words.append(f"loss {_number(row['loss'], 4)}")
    if row.get("lr") is not None:
        words.append(f"lr {_number(row['lr'], 4)}")
    if row.get("grad_norm") is not None:
        words.append(f"grad_norm {_number(row['grad_norm'], 3)}")
    samples_per_s = samples_per_second(row)
    if samples_per_s is not None:
        words.append(f"samples/s {samples_per_s:.0f}" if samples_per_s >= 100 else f"samples/s {samples_per_s:.3g}")
    if with_efficiency and row.get("efficiency") is not None:
        words.append(f"efficiency {row['efficiency']:.2f}")
    return words


def validation_text(row: Row) -> str:
    """`valid epoch 3 step 1200 loss 0.0312 accuracy 0.9901 (best)`; the keys of the row begin with `valid_`."""
    words = [str(row.get("subset", "valid"))]
    words += [f"{key} {row[key]}" for key in ("epoch", "step") if key in row]
    words += [f"{name} {_number(value, 4)}" for name, value in validation_numbers(row)]
    if row.get("best"):
        words.append(_BEST)
    return " ".join(words)


def validation_numbers(row: Row) -> Iterator[tuple[str, Any]]:
    """The metrics of a validation row in order, by name without `valid_`."""
    for key, value in row.items():
        if key.startswith("valid_"):
            yield key[len("valid_") :], value


def samples_per_second(row: Row) -> float | None:
    """The speed of this one step, or None if the row lacks it."""
    samples, seconds = row.get("samples"), row.get("seconds")
    return float(samples) / float(seconds) if samples is not None and seconds else None


def _is_due(row: Row, every_steps: float) -> bool:
    return int(row.get("step", 0)) % every_steps == 0


def _number(value: Any, digits: int) -> str:
    return f"{value:.{digits}g}" if isinstance(value, (int, float)) else str(value)


_STUCK: set[int] = set()  # descriptors that had no room for the last text


def takes_text(stream: IO[str], *, patience_s: float = 0.0) -> bool:
    """Whether a write would not block, now or within `patience_s`, as far as that is known.

    A write blocks if the terminal (Ctrl-S) or its reader is stopped. Files hold the text that is not shown, so a run
    does not wait: the first text that finds no room waits `patience_s`, later ones do not, until there is room again.
    """
    poller = select.poll()
    try:
        poller.register(stream, select.POLLOUT)
        descriptor = stream.fileno()
        has_room = bool(poller.poll(0 if descriptor in _STUCK else 1000 * patience_s))
    except (OSError, ValueError):  # no descriptor, or a closed one: the write itself will raise
        return True
    (_STUCK.discard if has_room else _STUCK.add)(descriptor)
    return has_room


class _StreamGuard:
    """Ends a display whose stream is gone (EPIPE, EIO, closed), and logs that once."""

    def __init__(self) -> None:
        self.is_broken = False

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            if not self.is_broken:
                self.is_broken = True
                logger.warning("the progress display ended (%s): training continues", error)
