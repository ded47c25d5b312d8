"""Bars of long pieces of work on a terminal, for the commands that make data; in a log nothing of them is seen."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int], None]  # so many more
Track = Callable[[str, int], Advance]  # a piece of work, and how much it is


def bars(console: Console) -> Progress:
    """Bars for as long as its block lasts."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # only where somebody watches: in a log the lines are enough
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def bar(progress: Progress, work: str, total: int) -> Advance:
    """One more bar; what is given moves it."""
    task = progress.add_task(work, total=total)
    return lambda count: progress.advance(task, count)
