"""The view of a run that `hetseq top` shows: its step, its ranks, which of them are in trouble, and how it has ended.

Decides which ranks are gone, dead or silent, whether the run starts, regroups or has ended, and what fits on the
screen. It reads what `lookout` has found and knows no file and no terminal; colours are names of kinds.
"""

from __future__ import annotations

import math
import re
import socket
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetseq.monitor.block_chart import Line, Piece, column_means, cut, sparkline, text_of
from hetseq.monitor.lookout import ENDED_S, Lookout, RankSign, Start, Teller
from hetseq.monitor.rank_table import (
    OVERHEAD_LINES,
    RankSummary,
    Row,
    Signs,
    drawn_table,
    ranks_that_matter,
    summarise,
    table_lines,
    with_slots,
)
from hetseq.monitor.report.event_text import incident_of
from hetseq.monitor.status import FOLLOWS, RunFacts, ShadowFacts
from hetseq.system.rank_phase import state_of_process

_SILENT_S, _SILENT_STEPS = 10.0, 5  # a rank writes once a second, and at the end of a step
_PLAIN_RANKS = 64
_MOST_NOTES = 6
_MOST_INCIDENTS, _LINES_OF_INCIDENT = 3, 2
_MOST_CURVE, _LEAST_CURVE = 60, 8  # characters of a sparkline
_NUMBER = 8  # characters of a number beside it, at most
_PART_OF_EXTRAS = 5  # with more ranks than lines, one line in five is for curves and incidents
_CODE = re.compile(r" \[[a-z-]+\]")  # of a message, for a search in the manual
_ASIDE = re.compile(r" \[[a-z-]+\]| \([^)]*\)")  # the same, and what a message explains in brackets


@dataclass(frozen=True)
class View:
    """One look at a run: its lines in pieces, and how the run has ended; None while it runs."""

    drawn: tuple[Line, ...]
    ending: str | None

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines as plain text."""
        return tuple(map(text_of, self.drawn))


def view(
    run: Path, signs: Sequence[RankSign], look: Lookout, *,
    width: int, height: int | None = None, is_drawn: bool = False,
) -> View:  # fmt: skip
    """The view of these reports, with as many ranks as fit into `height` lines (None: 64).

    `is_drawn`: for a terminal, with bars, curves and the last incidents; else as plain text that programs can read.
    """
    name = run.resolve().name
    start = look.start() if all(sign.told.get("state") == "start" for sign in signs) else None
    if not signs:
        return _starting(name, start, width)
    teller = look.teller(list(signs))
    facts = None if teller is None else teller.facts
    step_s = facts.summary.step_s if facts is not None and facts.summary is not None else None
    silent_s = max(_SILENT_S, _SILENT_STEPS * (step_s or 0.0))
    states = {sign.slot: _state(sign, look, silent_s) for sign in signs}
    ending = _ending(signs, states, look, facts)
    first = _start_line(name, start, len(signs)) if start is not None and ending is None else f"{name}  no step yet"
    head = [first[:width]] if teller is None else _run_lines(name, teller, width, has_ended=ending is not None)
    regrouping, regroup = _regrouping(teller, states, look)
    texts = [*regrouping, *_notes(signs, states, silent_s)]
    notes = _wrapped([(text, _note_kind(text)) for text in texts], width)
    if facts is not None and ending is None:
        notes += _wrapped([(_of_shadow(one), "" if one.state == FOLLOWS else "slow") for one in facts.shadows], width)
    notes += _wrapped([] if ending is None else [(ending, "good" if "finished" in ending else "bad")], width)
    advice = _wrapped([(text, "") for text in facts.advice] if facts is not None and ending is None else [], width)
    tail = [*advice, *notes]
    if height is not None:  # keep one rank; notes about ranks in trouble come before advice
        most = max(1, height - len(head) - OVERHEAD_LINES)
        tail = (tail if len(tail) <= most else notes)[-most:]
    summary = with_slots(_summary(signs, facts), {sign.slot: sign.name for sign in signs})
    drawn: list[Line] = [((line, "head" if place == 0 else ""),) for place, line in enumerate(head)]
    extras = _Extras((), (), 0)
    if is_drawn:
        spare = math.inf if height is None else height - len(head) - len(tail) - OVERHEAD_LINES
        extras = _extras(look, width, spare=spare, ranks=len(summary.share), without=regroup)
    room = _PLAIN_RANKS
    if height is not None:
        room = max(1, height - len(head) - len(tail) - OVERHEAD_LINES - extras.lines)
    blank: list[Line] = [()] * extras.blank
    drawn += [*extras.curves, *blank, *_table(summary, signs, states, room, width, is_drawn=is_drawn)]
    drawn += [*(blank if extras.incidents or tail else []), *extras.incidents, *tail]
    return View(tuple(cut(line, width) for line in drawn), ending)


# starting and regrouping


def _starting(name: str, start: Start | None, width: int) -> View:
    """The view before any rank has reported."""
    if start is None or start.is_lost:
        ending = "the run ended before its first step: the output of `hetseq train` and log/rank-N.txt say why"
        return View(tuple(cut(line, width) for line in _wrapped([(f"{name}  {ending}", "bad")], width)), ending)
    return View(tuple(_wrapped([(_start_line(name, start, start.loaded), "head")], width)), None)


def _start_line(name: str, start: Start, loaded: int) -> str:
    if start.size is None:
        who = f"{loaded} {'rank has' if loaded == 1 else 'ranks have'} loaded"
    else:
        who = f"{min(loaded, start.size)} of {start.size} ranks have loaded"
    return f"{name}  starting: {who}, {_lasting(start.age_s)}"


def _regrouping(teller: Teller | None, states: dict[int, str], look: Lookout) -> tuple[list[str], Row | None]:
    """What was lost and how the run continues, while the remaining ranks have not finished a step; and its event."""
    if teller is None or teller.is_current or "train" not in states.values():
        return [], None
    event = next((event for event in reversed(look.events) if event["event"] == "generation"), None)
    known = teller.facts.row.get("generation") or 0
    if event is None or not isinstance(event.get("generation"), int) or event["generation"] <= known:
        return ["the ranks regroup: the next step is not done yet"], None
    story = _ASIDE.sub("", str(event.get("story") or "a step could not be finished in time"))
    ranks, ago_s = event.get("ranks"), look.since(event)
    who = "the others resume"
    if isinstance(ranks, list):
        who = f"{len(ranks)} {'rank resumes' if len(ranks) == 1 else 'ranks resume'}"
    ago = f" {_ago(ago_s)}" if math.isfinite(ago_s) else ""
    return [f"{story}{ago}; {who} from step {event.get('step')}"], event


# judging


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
    is_left = not look.has_launcher() and all(sign.age_s > ENDED_S for sign in goes_on)
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


def _of_shadow(shadow: ShadowFacts) -> str:
    who = f"the shadow{f' on {shadow.node}' if shadow.node else ''} (log/rank-{shadow.slot}.txt)"
    return f"{who} {shadow.state}" + (f", and was sent step {shadow.step:,}" if shadow.step else "")


def _note_kind(text: str) -> str:
    return "slow" if "sign of life" in text or "is stuck" in text else "bad"


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


# the table


def _summary(signs: Sequence[RankSign], facts: RunFacts | None) -> RankSummary:
    """The medians; without them only the shares, as far as they are known."""
    if facts is not None and facts.summary is not None:
        return facts.summary
    here = [sign for sign in signs if sign.told.get("pid") is not None] or signs
    row = {
        "shares": [math.nan if (share := sign.told.get("share")) is None else share for sign in here],
        "slots": [sign.slot for sign in here],
        "ranks": {"names": [sign.name for sign in here]},
    }
    summary = summarise([row])
    assert summary is not None  # it has ranks
    return summary


def _table(
    summary: RankSummary, signs: Sequence[RankSign], states: dict[int, str], room: int, width: int, *, is_drawn: bool
) -> list[Line]:  # fmt: skip
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
    if is_drawn:
        return drawn_table(summary, chosen, width=width, signs=told)
    return [((line, ""),) for line in table_lines(summary, chosen, width=width, signs=told)]


# the lines above and below it


def _run_lines(name: str, teller: Teller, width: int, *, has_ended: bool) -> list[str]:
    """Step, speed, time left and last checkpoint, in as many lines as needed."""
    facts = teller.facts
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
        words = _speed(speed)
        if len(summary.share) > 1:
            words += "" if summary.efficiency is None else f"  efficiency {summary.efficiency:.0%}"
        now.append(words)
    if facts.eta_s is not None and not has_ended:
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


@dataclass(frozen=True)
class _Extras:
    """What a terminal shows besides, as far as there is room."""

    curves: tuple[Line, ...]
    incidents: tuple[Line, ...]
    blank: int  # lines above the table, and as many below it

    @property
    def lines(self) -> int:
        """How many lines these are."""
        return len(self.curves) + len(self.incidents) + 2 * self.blank


def _extras(look: Lookout, width: int, *, spare: float, ranks: int, without: Row | None) -> _Extras:
    """Curves, incidents and blank lines; `spare` lines are free for them and for the ranks."""
    room = min(max(spare - ranks, spare // _PART_OF_EXTRAS), spare - 1)
    curves = _curves(look, width)
    curves = curves[: int(max(0, min(room, len(curves))))]
    room -= len(curves)
    incidents = list[Line]()
    for lines in _incidents(look, width, without):  # the newest first, and it is shown last
        if len(incidents) + len(lines) > room:
            break
        incidents = [*lines, *incidents]
    return _Extras(tuple(curves), tuple(incidents), int(spare - ranks >= len(curves) + len(incidents) + 2))


def _curves(look: Lookout, width: int) -> list[Line]:
    """Sparklines of the loss and of the speed: on one line if there is room for both."""
    if len(look.steps) < 2:
        return []
    losses, speeds = [loss for _, loss, _ in look.steps], [speed for _, _, speed in look.steps]
    half = (width - 4) // 2
    is_wide = half >= 30
    room = half if is_wide else width
    parts = [
        part
        for name, values, kind in (("loss", losses, "loss"), ("samples/s", speeds, "speed"))
        if (part := _curve(name, values, kind, room))
    ]
    if not is_wide or len(parts) < 2:
        return parts
    gap = " " * (half - len(text_of(parts[0])) + 4)
    return [(*parts[0], (gap, ""), *parts[1])]


def _curve(name: str, values: Sequence[float], kind: str, room: int) -> Line:
    """`loss 2.31 ▇▆▅▃▂▁ 0.43`: the first value, the course and the last one; empty if nothing is known."""
    means = column_means(values, min(_MOST_CURVE, room - len(name) - 2 * _NUMBER - 3))
    known = [mean for mean in means if math.isfinite(mean)]
    if len(known) < min(_LEAST_CURVE, len(values)):
        return ()
    return ((f"{name} {_three(known[0])} ", ""), (sparkline(means, len(means)), kind), (f" {_three(known[-1])}", ""))


def _incidents(look: Lookout, width: int, without: Row | None) -> Iterator[list[Line]]:
    """The lines of each of the last incidents, the newest first."""
    told = [event for event in look.events if event["event"] != "advice" and event is not without]
    for event in reversed(told[-_MOST_INCIDENTS:]):
        found = incident_of(event)
        ago_s = look.since(event)
        when = f"{_ago(ago_s)}, " if math.isfinite(ago_s) else ""
        step = f"step {found.step}: " if found.step else ""
        lines = textwrap.wrap(
            _CODE.sub("", f"{when}{step}{found.what}"), max(width, 1), subsequent_indent="  "[: width - 1]
        )
        if len(lines) > _LINES_OF_INCIDENT:
            lines = [*lines[: _LINES_OF_INCIDENT - 1], lines[_LINES_OF_INCIDENT - 1][: width - 3].rstrip() + "..."]
        yield [((line, "dim"),) for line in lines]


def _wrapped(texts: Sequence[Piece], width: int) -> list[Line]:
    indent = "  " if width > len("  ") else ""
    return [
        ((line, kind),) for text, kind in texts for line in textwrap.wrap(text, max(width, 1), subsequent_indent=indent)
    ]


def _speed(samples_per_s: float) -> str:
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 100 else f"{samples_per_s:.3g} samples/s"


def _three(number: float) -> str:
    return f"{number:,.0f}" if 100 <= abs(number) < 1e6 else f"{number:.3g}"


def _ago(seconds: float) -> str:
    return "just now" if seconds < 1 else f"{_lasting(seconds)} ago"


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
