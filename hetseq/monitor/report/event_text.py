"""Events of a run in words for its report: a sentence about what happened, and one about what to do.

Pure: a row of `events.jsonl` goes in. It does not guess: an unknown event is shown as it was written, and an event that
needs no action says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]

#: events that have their own place in the report and are not incidents
ROUTINE = ("rebalance", "save", "versions")

_NOTHING = "Nothing: the step was repeated with the same samples."
_LOST = (
    "The steps since then were done again. Where only nodes that stay own state (--own), the loss of another node costs"
    " one step; a smaller --save-interval-updates repeats fewer steps."
)
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
#: words of a story -> what to do; the first match counts
_STORIES = (
    (
        "with the fork server of its node",
        "Nothing, if a queue or a person killed it: all workers of that node came back. If memory ran out (check"
        " `dmesg` on that node): fewer workers there, or a smaller --batch-size.",
    ),
    (
        "as the kernel does when memory runs out",
        "Nothing, if a queue or a person killed it. If memory ran out (check `dmesg` on that node): a smaller"
        " --batch-size there, or fewer --num-workers.",
    ),
    ("crashed", "Read log/rank-N.txt of that rank; a second crash in the same step ends the run."),
    (
        "its device failed",
        "Nothing if it comes back; otherwise check the device with nvidia-smi, and the traceback in its log.",
    ),
    (
        "fell silent",
        "Check that node for a stalled disk, a frozen machine or a broken network; a file in stacks/ has the calls"
        " that did not return. --step-deadline S allows longer steps.",
    ),
    (
        "kept the others waiting",
        "Nothing, if it happened once: the step was repeated. Otherwise look in stacks/ for what blocked it;"
        " --step-deadline S allows longer steps.",
    ),
    ("without a reason", "Read log/rank-N.txt of that rank."),
    ("is gone", "To bring it back, run the same command on that node."),
    ("has left", "Nothing: it was asked to leave. To bring it back, run the same command on that node."),
    ("is back", "Nothing."),
    ("has come", "Nothing."),
)


@dataclass(frozen=True)
class Incident:
    """One line of the report."""

    time_utc: str
    step: str
    what: str
    remedy: str


def incident_of(event: Event) -> Incident:
    """An event in words."""
    name = str(event.get("event", "an event without a name"))
    what, remedy = _WORDS.get(name, _unknown)(event)
    step = event.get("step")
    return Incident(_time(event), f"{step:,}" if isinstance(step, int) else "", what, remedy)


def skipped_steps(steps: list[int]) -> Incident:
    """The steps of a run whose gradient was not finite."""
    few = ", ".join(f"{step:,}" for step in steps[:5]) + (", ..." if len(steps) > 5 else "")
    what = f"{len(steps):,} steps were skipped because their gradient was not finite: {few}"
    remedy = (
        "A few at the start of fp16 are usual. Otherwise try a smaller --lr or a longer --warmup-updates, or look at"
        " the samples that the warnings in log/ name."
    )
    return Incident("", f"{steps[0]:,}", what, remedy)


def _generation(event: Event) -> tuple[str, str]:
    story = str(event.get("story") or "a step could not be finished in time")
    ranks = event.get("ranks")
    who = f"{len(ranks)} {'rank continues' if len(ranks) == 1 else 'ranks continue'}" if isinstance(ranks, list) else ""
    seconds = event.get("seconds")
    took = f", regrouped in {seconds:.2f} s" if isinstance(seconds, (int, float)) else ""
    lost, known = event.get("lost"), next((remedy for words, remedy in _STORIES if words in story), "")
    what = f"{story}: {who}{took}{moved_state(event)}"
    if lost:
        return (
            f"{what}; {lost}, so all ranks went back to the newest state in memory or on disk",
            f"{known} {_LOST}".strip(),
        )
    return what, known or _NOTHING


def moved_state(event: Event) -> str:
    """The end of a sentence about the optimizer state that was sent to new owners; "" if every rank holds all of it."""
    sent = event.get("state_bytes")
    if type(sent) is not int:
        return ""
    if sent == 0:
        return "; no optimizer state was sent"
    size, unit = next((size, unit) for size, unit in _UNITS if sent >= size)
    return f"; {sent / size:.3g} {unit} of optimizer state were sent to new owners"


def _save_failed(event: Event) -> tuple[str, str]:
    error = str(event.get("error") or "no reason was recorded")
    if "space" in error or "quota" in error.lower():
        return (
            f"a checkpoint could not be saved: {error}",
            "Free some space: df -h, df -i, quota -s, or `hetseq checkpoints prune`.",
        )
    return f"a checkpoint could not be saved: {error}", "Check the file system of --save-dir; older checkpoints remain."


def _resume(event: Event) -> tuple[str, str]:
    path, refused = event.get("path"), event.get("refused") or ()
    what = f"resumed from {path}" if path else "resumed from the state in memory"
    if not refused:
        return what, "Nothing."
    number = len(refused) if isinstance(refused, (list, tuple)) else 1
    return (
        f"{what}; newer checkpoints that were damaged or incomplete and refused: {number}",
        "`hetseq checkpoints verify RUN` says what is wrong with them. If it happens again, check the disk.",
    )


def _replicas_differ(event: Event) -> tuple[str, str]:
    ranks = event.get("ranks")
    who = f"rank {', '.join(map(str, ranks))}" if ranks and isinstance(ranks, list) else "no rank could be trusted"
    what = f"the copies of the model differed ({event.get('cause', 'cause unknown')}): {who}"
    if event.get("source") is not None:
        what += f"; made equal to rank {event['source']}"
    if event.get("cause") == "rounding":
        return what, "Nothing: devices of different kinds round differently, and the copies were made equal."
    return what, "Test the memory of that node and its device; a task must not change its model by rank."


def _loss_not_finite(event: Event) -> tuple[str, str]:
    more = event.get("steps")
    often = f", {more:,} times so far" if isinstance(more, int) and more > 1 else ""
    what = f"the loss was not finite, though its gradient was{often}: {event.get('what', 'no rank was named')}"
    return what, "Look at these samples, and at the parts of the loss that have no gradient."


def _advice(event: Event) -> tuple[str, str]:
    what, _, remedy = str(event.get("text") or "no words were recorded").partition(": ")
    return what, f"{remedy[:1].upper()}{remedy[1:]}." if remedy else ""


def _gradient_zero(event: Event) -> tuple[str, str]:
    what = "the gradient was exactly 0 on all ranks, so nothing was learned"
    return what, "Look for code that cuts the loss off from the parameters: detach, no_grad, a count of 0."


def _unknown(event: Event) -> tuple[str, str]:
    facts = {key: value for key, value in event.items() if key not in ("time_utc", "event", "step")}
    return f"{event.get('event', 'event')} {json.dumps(facts, default=str)[:300]}", ""


def _time(event: Event) -> str:
    return str(event.get("time_utc", ""))[:19].replace("T", " ")


_WORDS = {
    "generation": _generation,
    "save_failed": _save_failed,
    "resume": _resume,
    "replicas_differ": _replicas_differ,
    "loss_not_finite": _loss_not_finite,
    "gradient_zero": _gradient_zero,
    "advice": _advice,
}
