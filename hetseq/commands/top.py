"""`hetseq top RUN`: live view of a run, from any machine that sees its directory.

Reads `status/`, decides which ranks are gone or silent and whether the run has ended, and refreshes the view. It opens
nothing for writing, takes no lock and asks no rank: a run does not notice that it is watched.

The one idea: clocks of machines differ, so the silence of a rank is measured here, from the moment at which a look
found its file changed. Only at the first look the file's own time must serve.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hetseq.config.command_line import Argument, Command, CommandOption, seconds
from hetseq.errors import ConfigError
from hetseq.monitor.progress import terminal
from hetseq.monitor.rank_table import (
    OVERHEAD_LINES,
    RankSummary,
    Signs,
    ranks_that_matter,
    summarise,
    table_lines,
    with_slots,
)
from hetseq.monitor.status import RunFacts, read_facts
from hetseq.system.rank_phase import state_of_process
from hetseq.system.terminal import ending_once, keys, stepping_aside
from hetseq.which_run import existing_run

_LIVE_S, _PLAIN_S, _LEAST_S = 1.0, 10.0, 0.1
_SILENT_S, _SILENT_STEPS = 10.0, 5  # a rank writes once a second, and at the end of a step
_ENDED_S = 3.0  # age of the last sign of life after which a run without a launcher counts as over
_PLAIN_RANKS = 64
_MOST_NOTES = 6

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


@dataclass(frozen=True)
class RankSign:
    """The content of one status file, and its age."""

    slot: int
    told: dict[str, Any]
    age_s: float

    @property
    def name(self) -> str:
        """`node/device`."""
        return f"{self.told.get('node', '?')}/{self.told.get('device', '?')}"

    @property
    def is_living(self) -> bool:
        """Whether the rank was still running according to its last report."""
        return self.told.get("pid") is not None and self.told.get("state") in ("start", "train")


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq top RUN`: show a run until it has ended or q is pressed; returns 0. Raises ConfigError."""
    arguments = parse(words)
    existing_run(arguments.run)
    look = Lookout(arguments.run)
    signs = look.signs()
    if not signs:
        raise ConfigError(
            f"{arguments.run} has not started, as its status/ has no rank: expected a run whose workers are up; wait a"
            f" few seconds for them, or start it with `hetseq train --save-dir {arguments.run}` [run-not-training]"
        )
    with suppress(KeyboardInterrupt):
        if arguments.is_once:
            say("\n".join(view(arguments.run, signs, look, width=_width()).lines))
        elif sys.stdout.isatty() and _can_draw(say):
            _watch_live(arguments, look, say)
        else:
            _watch_plain(arguments, look, say)
    return 0


def parse(words: Sequence[str]) -> TopArguments:
    """Parse the command line. Raises ConfigError, HelpRequested."""
    given = COMMAND.read(words)
    return TopArguments(Path(given["RUN"]), given["--once"], given["--interval"])


# reading


class Lookout:
    """Reads the files again and again, and remembers when each one changed."""

    def __init__(
        self,
        path: Path,
        *,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._now, self._wall = path, now, wall
        self._seen: dict[int, tuple[int, dict[str, Any], float]] = {}  # by slot: its time, content, when it changed

    def signs(self) -> list[RankSign]:
        """The reports of all ranks, by slot; a file that cannot be read keeps its last content."""
        now_s = self._now()
        for path in self._path.glob("status/rank-*.json"):
            number = path.stem.partition("-")[2]
            with suppress(OSError, ValueError):
                slot, written_ns = int(number), path.stat().st_mtime_ns
                before = self._seen.get(slot)
                if before is not None and before[0] == written_ns:
                    continue
                told = json.loads(path.read_text())
                if isinstance(told, dict):
                    age_s = 0.0 if before is not None else max(0.0, self._wall() - written_ns / 1e9)
                    self._seen[slot] = (written_ns, _sound(told), now_s - age_s)
        return [RankSign(slot, told, now_s - since_s) for slot, (_, told, since_s) in sorted(self._seen.items())]

    def has_launcher(self) -> bool:
        """Whether `.lock` names a launcher of this directory: it is emptied when a run ends."""
        try:
            return (self._path / ".lock").stat().st_size > 0
        except OSError:
            return True  # unknown

    def is_dead(self, sign: RankSign) -> bool:
        """Whether the process of a rank is gone, as far as this machine can tell."""
        pid = sign.told.get("pid")
        if sign.age_s < _ENDED_S or sign.told.get("node") != socket.gethostname()[:200] or not isinstance(pid, int):
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # the process of another user
            return False
        return False


def _sound(told: Mapping[str, Any]) -> dict[str, Any]:
    """A status file without values of the wrong type: another program or version may have written it."""
    kinds = {"pid": int, "step": int, "share": int, "state": str, "node": str, "device": str}
    return {key: value for key, value in told.items() if key not in kinds or type(value) is kinds[key] or value is None}


# judging


@dataclass(frozen=True)
class View:
    """The lines of one look, and how the run has ended; None while it runs."""

    lines: tuple[str, ...]
    ending: str | None


def view(run: Path, signs: Sequence[RankSign], look: Lookout, *, width: int, height: int | None = None) -> View:
    """The view of these reports, with as many ranks as fit into `height` lines (None: 64)."""
    teller, facts = _teller(signs)
    step_s = facts.summary.step_s if facts is not None and facts.summary is not None else None
    silent_s = max(_SILENT_S, _SILENT_STEPS * (step_s or 0.0))
    states = {sign.slot: _state(sign, look, silent_s) for sign in signs}
    ending = _ending(signs, states, look, facts)
    head = _run_lines(run, facts, teller, width)
    foot = _wrapped([*_notes(signs, states, silent_s), *([] if ending is None else [ending])], width)
    tail = [*_wrapped([] if facts is None or ending is not None else facts.advice, width), *foot]
    if height is not None:  # keep one rank; notes about ranks in trouble come before advice
        most = max(1, height - len(head) - OVERHEAD_LINES)
        tail = (tail if len(tail) <= most else foot)[-most:]
    summary = with_slots(_summary(signs, facts), {sign.slot: sign.name for sign in signs})
    room = _PLAIN_RANKS if height is None else max(1, height - len(head) - len(tail) - OVERHEAD_LINES)
    lines = [*head, *_table(summary, signs, states, room, width), *tail]
    # names come from other machines: none of their bytes may control the terminal
    return View(tuple("".join(c if c.isprintable() else "?" for c in line)[:width] for line in lines), ending)


def _wrapped(texts: Sequence[str], width: int) -> list[str]:
    indent = "  " if width > len("  ") else ""
    return [line for text in texts for line in textwrap.wrap(text, max(width, 1), subsequent_indent=indent)]


def _teller(signs: Sequence[RankSign]) -> tuple[RankSign | None, RunFacts | None]:
    """The rank that reports for the whole run, and its report; the newest if several do, as after a death."""
    found = [(sign, facts) for sign in signs if (facts := read_facts(sign.told.get("run"))) is not None]
    if not found:
        return None, None
    return max(found, key=lambda pair: (pair[1].row.get("generation") or 0, pair[1].row["step"], -pair[0].age_s))


def _state(sign: RankSign, look: Lookout, silent_s: float) -> str:
    if sign.told.get("pid") is None:
        return "gone"
    if not sign.is_living:
        return str(sign.told.get("state", "?"))
    if look.is_dead(sign):
        return "dead"
    return "silent" if sign.age_s > silent_s else str(sign.told["state"])


def _ending(signs: Sequence[RankSign], states: dict[int, str], look: Lookout, facts: RunFacts | None) -> str | None:
    """How the run has ended, or None."""
    here = [sign for sign in signs if states[sign.slot] != "gone"]
    step = max((int(sign.told.get("step") or 0) for sign in signs), default=0)
    goes_on = [sign for sign in here if sign.is_living and states[sign.slot] != "dead"]
    if not goes_on and "done" in states.values():
        return f"the run has ended: finished after step {step}"
    if not goes_on and "stopped" in states.values():
        return f"the run was stopped after step {step}: the same command resumes it"
    is_left = not look.has_launcher() and all(sign.age_s > _ENDED_S for sign in goes_on)
    if goes_on and not is_left:
        return None
    saved = facts.checkpoint if facts is not None else None
    back = f"; its last checkpoint is of step {saved}" if saved else ""
    return f"the run ended early, after step {step}: the last lines of log/rank-N.txt say why{back}"


def _notes(signs: Sequence[RankSign], states: dict[int, str], silent_s: float) -> list[str]:
    """Notes about ranks that hang, or are gone, dead or silent; only the first few of many."""
    notes = [note for sign in signs if states[sign.slot] in ("start", "train") and (note := _standing(sign, silent_s))]
    living = [sign for sign in signs if states[sign.slot] in ("start", "train", "silent")]
    silent = [sign for sign in living if states[sign.slot] == "silent"]
    if silent and len(silent) == len(living):
        age = _lasting(min(sign.age_s for sign in silent))
        notes.append(f"no rank has given a sign of life for {age}: a validation, a long step, or a run that was lost")
    else:
        notes += [f"{_who(sign)} has given no sign of life for {_lasting(sign.age_s)}{_why(sign)}" for sign in silent]
    for sign in signs:
        if states[sign.slot] in ("gone", "dead"):
            word = "is gone" if states[sign.slot] == "gone" else "has died"
            notes.append(f"{_who(sign)} {word}, after step {sign.told.get('step') or 0}, {_lasting(sign.age_s)} ago")
    if len(notes) <= _MOST_NOTES:
        return notes
    return [
        *notes[: _MOST_NOTES - 1],
        f"and {len(notes) - _MOST_NOTES + 1} more ranks are gone, dead, silent or stuck",
    ]


def _standing(sign: RankSign, silent_s: float) -> str:
    """The phase in which a living rank has been stuck for long; empty if it makes progress."""
    phase, seconds = sign.told.get("phase"), sign.told.get("phase_s")
    if not isinstance(phase, str) or not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        return ""
    if sign.told.get("waits"):
        return ""
    lasts_s = seconds + sign.age_s
    return f"{_who(sign)} is stuck: {phase[:80]} for {_lasting(lasts_s)}" if lasts_s > silent_s else ""


def _why(sign: RankSign) -> str:
    """The state of a silent rank's process, if it runs on this machine."""
    pid = sign.told.get("pid")
    if sign.told.get("node") != socket.gethostname()[:200] or not isinstance(pid, int):
        return ""
    state = state_of_process(pid)
    return f": {state}" if state else ""


def _who(sign: RankSign) -> str:
    return f"rank {sign.slot} ({sign.name})"


# words


def _summary(signs: Sequence[RankSign], facts: RunFacts | None) -> RankSummary:
    """The medians, or before the first step only the shares."""
    if facts is not None and facts.summary is not None:
        return facts.summary
    here = [sign for sign in signs if sign.told.get("pid") is not None] or signs
    row = {
        "shares": [sign.told.get("share") or 0 for sign in here],
        "slots": [sign.slot for sign in here],
        "ranks": {"names": [sign.name for sign in here]},
    }
    summary = summarise([row])
    assert summary is not None  # it has ranks
    return summary


def _table(summary: RankSummary, signs: Sequence[RankSign], states: dict[int, str], room: int, width: int) -> list[str]:
    """The table; ranks in trouble are chosen first."""
    ages = {sign.slot: sign.age_s for sign in signs}
    told = Signs(
        tuple(states.get(slot, "?") for slot in summary.slots),
        np.array([ages.get(slot, math.nan) for slot in summary.slots]),
    )
    odd = [rank for rank, state in enumerate(told.states) if state in ("silent", "dead", "gone")][: max(1, room // 2)]
    size = len(summary.slots)
    matter = ranks_that_matter(summary, room - len(odd))
    chosen = list(range(size)) if size <= room else sorted({*odd, *matter})
    return table_lines(summary, chosen, width=width, signs=told)


def _run_lines(run: Path, facts: RunFacts | None, teller: RankSign | None, width: int) -> list[str]:
    """Step, speed, time left and last checkpoint, in as many lines as needed."""
    name = run.resolve().name
    if facts is None or teller is None:
        return [f"{name}  no step yet"]
    row, summary = facts.row, facts.summary
    total = "" if facts.total_steps is None else f"/{facts.total_steps:,}"
    first = [f"{name}  step {row['step']:,}{total}"]
    first += [f"epoch {row['epoch']}"] if "epoch" in row else []
    loss = row.get("loss")
    first += ["skipped"] if row.get("skipped") else [f"loss {loss:.4g}"] if isinstance(loss, (int, float)) else []
    # on a narrow terminal the loss matters more than the name
    fitting = (kept for kept in (first, [first[0], *first[-1:]], [first[0].removeprefix(name).strip(), *first[-1:]])
               if len("  ".join(kept)) <= width)  # fmt: skip
    now, later = ["  ".join(next(fitting, first[:1]))], list[str]()
    if summary is not None and summary.step_s:
        speed = float(np.nansum(summary.share)) / summary.step_s
        words = f"{speed:,.0f} samples/s" if speed >= 100 else f"{speed:.3g} samples/s"
        if len(summary.share) > 1:
            words += "" if summary.efficiency is None else f"  efficiency {summary.efficiency:.0%}"
        now.append(words)
    if facts.eta_s is not None:
        least, most = (_lasting(max(0.0, seconds - teller.age_s)) for seconds in facts.eta_s)
        later.append(f"ETA {least}" + ("" if least == most else f" - {most}"))
    if facts.checkpoint:
        age_s = facts.checkpoint_age_s
        later.append(
            f"checkpoint {facts.checkpoint:,}" + ("" if age_s is None else f", {_lasting(age_s + teller.age_s)} ago")
        )
    lines = list[str]()
    for parts in (now, later):  # never on one line: the table would move whenever a number gains or loses a digit
        for place, part in enumerate(parts):
            if place and len(lines[-1]) + len(part) + 5 <= width:
                lines[-1] += f"  |  {part}"
            else:
                lines.append(part)
    return [line[:width] for line in lines]


def _lasting(seconds: float) -> str:
    """A duration in readable units: `45 s`, `12 min`, `3 h 20 min`, `1 d 3 h`."""
    minutes = round(seconds / 60)
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


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
        return not terminal(sys.stdout).is_dumb_terminal
    except ImportError as error:
        say(f"hetseq top: no live view, because rich cannot be imported ({error}): pip install rich")
        return False


def _watch_live(arguments: TopArguments, look: Lookout, say: Callable[[str], None]) -> None:
    from rich.live import Live
    from rich.text import Text

    console = terminal(sys.stdout)
    interval_s, seen = arguments.interval_s or _LIVE_S, None
    live = Live(console=console, auto_refresh=False, screen=True)
    with ending_once() as ending, stepping_aside(sys.stdout.fileno(), live.refresh), keys(ending) as is_quit:
        try:
            with live:
                while seen is None or seen.ending is None:
                    size = console.size
                    seen = view(arguments.run, look.signs(), look, width=size.width, height=size.height)
                    styled = [Text(line, style="bold" if line.startswith(">") else "") for line in seen.lines]
                    live.update(Text("\n", no_wrap=True, overflow="crop").join(styled), refresh=True)
                    if seen.ending is None and is_quit(interval_s):
                        break
        finally:
            if seen is not None:  # leave the last view readable after the other screen
                say("\n".join(seen.lines))


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns
