"""Failures of the user's code in a few lines: what was raised, where, for which sample or step.

Decides which frames of a traceback are the user's: those outside HetSeq, torch, Python and installed packages, and of
HetSeq those of its included tasks. An error in which no line of the user and no sample took part has no summary, so
errors of HetSeq itself keep their whole traceback. The one idea: the code that knows the sample or the step notes it
on the exception as it passes, and the process that ends because of it reads the note.
"""

from __future__ import annotations

import functools
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from hetseq.errors import HetSeqError
from hetseq.system.module_names import as_its_user_knows_it

#: the first words of a summary
FAILED = "your task failed: "

_NOTE = "_hetseq_note"
_MOST_FRAMES = 8
_MOST_TEXT = 300  # characters of an error's own text in the first line
_HETSEQ = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INCLUDED_TASKS = os.path.join(_HETSEQ, "tasks") + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class TaskRaised(HetSeqError):
    """An error of the user's code in another process, as text: its own class may not survive the journey.

    The message is the summary; `trace` is the whole traceback.
    """

    slug: ClassVar[str] = "worker-raised"

    def __init__(self, message: str, trace: str) -> None:
        super().__init__(message, trace)  # both, because pickle makes the copy of `args`
        self.trace = trace

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class _Note:
    place: str
    is_of_task: bool  # the data set or the collate function of the task was running


def note(error: BaseException, place: str, *, is_of_task: bool = False) -> None:
    """Remember what was done when `error` was raised, unless an inner block has noted it already."""
    if _note_of(error) is None:
        with suppress(AttributeError):  # a class with slots
            setattr(error, _NOTE, _Note(place, is_of_task))


@contextmanager
def noting(place: str) -> Iterator[None]:
    """Note `place` on every exception that leaves the block."""
    try:
        yield
    except Exception as error:
        note(error, place)
        raise


def noted(function: Callable[[Any], Any], place: str) -> Callable[[Any], Any]:
    """The function, with `place` noted on its exceptions as one of the task's data."""

    @functools.wraps(function)
    def noting_function(argument: Any) -> Any:
        try:
            return function(argument)
        except Exception as error:
            note(error, place, is_of_task=True)
            raise

    return noting_function


def trace_of(error: BaseException) -> str:
    """The whole traceback, with the errors that led to this one."""
    if isinstance(error, TaskRaised):
        return error.trace
    return "".join(traceback.format_exception(error)).rstrip()


def summary(error: BaseException) -> str | None:
    """The failure in a few lines: file, line, function, place and error in the first one, then the user's frames.

    None if neither a frame nor the data of the user took part.
    """
    if isinstance(error, TaskRaised):
        return str(error)
    found, frames = _note_of(error), _frames_of(error)
    if not frames and (found is None or not found.is_of_task):
        return None
    last = [f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name}"] if frames else []
    where = ", ".join([*last, *([found.place] if found is not None else [])])
    lines = [f"{FAILED}{where}: {_in_a_line(error)} [worker-raised]"]
    if len(frames) > _MOST_FRAMES:
        lines.append(f"  ... {len(frames) - _MOST_FRAMES} more of your lines called:")
    for frame in frames[-_MOST_FRAMES:]:
        lines.append(f"  {_shown(frame.filename)}:{frame.lineno} in {frame.name}")
        if frame.line:
            lines.append(f"    {frame.line}")
    return "\n".join(lines)


def _note_of(error: BaseException) -> _Note | None:
    found = getattr(error, _NOTE, None)
    return found if isinstance(found, _Note) else None


def _frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """The user's frames of the error, or of the nearest error that led to it and has any; innermost last."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        frames = [frame for frame in traceback.extract_tb(following.__traceback__) if _is_users(frame.filename)]
        if frames:
            return frames
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
    return []


def _is_users(filename: str) -> bool:
    path = os.path.abspath(filename)
    if path.startswith(_HETSEQ):
        return path.startswith(_INCLUDED_TASKS)
    is_installed = any(part in path for part in _INSTALLED)
    return not (filename.startswith("<") or is_installed or path.startswith(_folders_of_python()))


@functools.cache
def _folders_of_python() -> tuple[str, ...]:
    paths = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return tuple(os.path.realpath(path) + os.sep for path in paths) + tuple(path + os.sep for path in paths)


def _shown(filename: str) -> str:
    """The path from the current folder if the file is below it."""
    with suppress(OSError, ValueError):
        below = os.path.relpath(filename)
        if not below.startswith(os.pardir):
            return below
    return filename


def _in_a_line(error: BaseException) -> str:
    """Class and text of an error, shortened to one line."""
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{as_its_user_knows_it(kind.__module__)}."
    name = f"{module}{kind.__qualname__}"
    try:
        text = str(error).strip()
    except Exception:  # the class is the user's
        text = ""
    first, _, rest = text.partition("\n")
    cut = " ..." if rest or len(first) > _MOST_TEXT else ""
    return f"{name}: {first[:_MOST_TEXT]}{cut}" if first else name
