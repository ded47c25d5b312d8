"""`hetseq top RUN`: live view of a run, from any machine that sees its directory.

Refreshes the view on a terminal, or writes it as plain text at intervals, until the run has ended. `lookout` reads the
files and `run_view` says what they mean; neither is noticed by the run.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetseq.config.command_line import Argument, Command, CommandOption, seconds
from hetseq.errors import ConfigError
from hetseq.monitor.lookout import Lookout
from hetseq.monitor.progress import terminal
from hetseq.monitor.run_view import View, view
from hetseq.system.terminal import ending_once, keys, stepping_aside
from hetseq.which_run import existing_run

if TYPE_CHECKING:
    from rich.text import Text

_LIVE_S, _PLAIN_S, _LEAST_S = 1.0, 10.0, 0.1
#: the look of each kind of text; rich leaves colours out where NO_COLOR is set
_STYLES = {
    "head": "bold", "dim": "bright_black", "good": "green", "slow": "yellow", "bad": "bold red", "pace": "bold",
    "compute": "blue", "data": "magenta", "rest": "bright_black", "wait": "yellow", "loss": "green", "speed": "cyan",
}  # fmt: skip

COMMAND = Command(
    "top",
    "Show the state of a run: its step, its ranks, and which are slow, silent or gone.",
    usage=("RUN [--once] [--interval S]",),
    words=(
        Argument("RUN", "the --save-dir of a run, on any machine that sees it; nothing in it is changed"),
        CommandOption("--once", "show the state once, as plain text"),
        CommandOption(
            "--interval", "refresh every S seconds; default: 1 on a terminal, 10 elsewhere", "S", read=seconds(_LEAST_S)
        ),
    ),
    examples=("hetseq top runs/mnist", "hetseq top runs/mnist --interval 5", "hetseq top runs/mnist --once"),
    notes=("q or Ctrl-C ends the view, never the run; the view ends by itself when the run has ended.",),
)


@dataclass(frozen=True)
class TopArguments:
    """`hetseq top RUN --once --interval S`; the interval is None if not given."""

    run: Path
    is_once: bool = False
    interval_s: float | None = None


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq top RUN`: show a run until it has ended or q is pressed; returns 0. Raises ConfigError."""
    arguments = parse(words)
    existing_run(arguments.run)
    look = Lookout(arguments.run)
    signs = look.signs()
    if not signs and look.start() is None:
        raise ConfigError(
            f"{arguments.run} has not started, as its status/ has no rank and no launcher uses it: expected a run that"
            f" has; start it with `hetseq train {_words_of(arguments.run)}` [run-not-training]"
        )
    with suppress(KeyboardInterrupt):
        if arguments.is_once:
            say("\n".join(view(arguments.run, signs, look, width=_width()).lines))
        elif sys.stdout.isatty() and _can_draw(say):
            _watch_live(arguments, look)
        else:
            _watch_plain(arguments, look, say)
    return 0


def _words_of(run: Path) -> str:
    config_file = run / "config.yaml"  # of a start that was interrupted before its first step
    return shlex.join(["--config", str(config_file)] if config_file.is_file() else ["--save-dir", str(run)])


def parse(words: Sequence[str]) -> TopArguments:
    """Parse the command line. Raises ConfigError, HelpRequested."""
    given = COMMAND.read(words)
    return TopArguments(Path(given["RUN"]), given["--once"], given["--interval"])


# showing


def _watch_plain(arguments: TopArguments, look: Lookout, say: Callable[[str], None]) -> None:
    interval_s = arguments.interval_s or _PLAIN_S
    while True:
        seen = view(arguments.run, look.signs(), look, width=_width())
        say("\n".join((*seen.lines, "")) if seen.ending is None else "\n".join(seen.lines))
        if seen.ending is not None:
            return
        time.sleep(interval_s)


def _can_draw(say: Callable[[str], None]) -> bool:
    """Whether rich can draw on this terminal; if rich is missing, a line says so."""
    try:
        console = terminal(sys.stdout)
    except ImportError as error:
        say(f"hetseq top: no live view, because rich cannot be imported ({error}): pip install rich")
        return False
    return not console.is_dumb_terminal and console.encoding.startswith("utf")


def _watch_live(arguments: TopArguments, look: Lookout) -> None:
    from rich.live import Live

    console = terminal(sys.stdout)
    interval_s, seen = arguments.interval_s or _LIVE_S, None
    live = Live(console=console, auto_refresh=False, screen=True)
    with ending_once() as ending, stepping_aside(sys.stdout.fileno(), live.refresh), keys(ending) as is_quit:
        try:
            with live:
                while seen is None or seen.ending is None:
                    size = console.size
                    seen = view(arguments.run, look.signs(), look, width=size.width, height=size.height, is_drawn=True)
                    live.update(styled(seen), refresh=True)
                    if seen.ending is None and is_quit(interval_s):
                        break
        finally:
            if seen is not None:  # leave the last view readable after the other screen
                console.print(styled(seen))


def styled(seen: View) -> Text:
    """The view in the colours of a terminal."""
    from rich.text import Text

    lines = (Text.assemble(*((text, _STYLES.get(kind, "")) for text, kind in line)) for line in seen.drawn)
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns
