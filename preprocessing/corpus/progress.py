"""Progress bars on a terminal for the commands that make data; hidden when the output is a log."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int], None]  # number of items done since the last call
Track = Callable[[str, int], Advance]  # title of the work, and its total


def bars(console: Console) -> Progress:
    """A context manager that shows progress bars."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # only on a terminal: in a log the lines are enough
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def bar(progress: Progress, work: str, total: int) -> Advance:
    """Add a bar and return the function that advances it."""
    task = progress.add_task(work, total=total)
    return lambda count: progress.advance(task, count)
