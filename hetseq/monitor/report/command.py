"""The file of a report: written at the end of a run by its launcher, and on demand by `hetseq report`.

Responsible for when there is something to report, for the file, and for the command line. Its one promise to the
launcher: whatever goes wrong here is a line of warning, never an exit code, and takes no longer than a deadline.

The one idea: a launcher reports on the run directory that it has made and locked, so of the nodes that share one only
one writes, and only if rows or events have come since it began. If it was lost, the lock is free: whoever comes to the
end of the run writes in its place.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hetseq.config.command_line import Argument, Command, CommandOption
from hetseq.errors import ConfigError, RunDirectoryError
from hetseq.monitor.report.compare import compare, comparison_page
from hetseq.monitor.report.page import report_page
from hetseq.monitor.report.recorded import load_run
from hetseq.run_directory import RunDirectory, replace_file, utc_now

COMMAND = Command(
    "report",
    "What a run was, as one page that any browser opens, without a server; or two runs compared.",
    usage=("RUN [RUN2] [--output FILE]",),
    words=(
        Argument("RUN", "the --save-dir of a run, finished or not; its report.html is written anew"),
        Argument(
            "RUN2", "another run: both curves, their largest difference, and the options that differ", is_optional=True
        ),
        CommandOption("--output", "where to; default: RUN/report.html, and RUN/comparison.html for two runs", "FILE"),
    ),
    examples=("hetseq report runs/mnist", "hetseq report runs/first runs/second --output comparison.html"),
)

_PATIENCE_S = 60.0  # 10,000 steps of 64 ranks, 109 MB, take 2.4 s; a file system may hang
_PACKAGES = ("torch", "numpy")
_NOT_NEEDED = "somebody else reports"


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq report`: write the page, say where it is; gives the exit code. Errors as of `load_run`."""
    runs, output = _parse(words)
    first = load_run(runs[0])
    if len(runs) == 1:
        path = output or RunDirectory(first.path).report
        text = report_page(first, facts=_facts())
    else:
        second = load_run(runs[1])
        if second.path.samefile(first.path):
            raise ConfigError(f"{runs[0]} and {runs[1]} are the same directory: expected two runs to compare")
        found = compare(first, second)
        path = output or first.path / "comparison.html"
        text = comparison_page(found)
        say(found.sentence())
    try:
        replace_file(path, text.encode(), is_durable=False)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}): name another place with --output FILE"
        ) from None
    say(f"{'report' if len(runs) == 1 else 'comparison'}: {path}")
    return 0


@contextmanager
def reporting(directory: RunDirectory, tell: Callable[[str], None]) -> Iterator[None]:
    """Write `report.html` when the block ends, however it ends; `tell` is called with the line that says where it is.

    For the launcher that has made and locked the directory. It raises nothing of its own.
    """
    before = written(directory)
    try:
        yield
    finally:
        if written(directory) != before:
            _report_within(directory, tell, patience_s=_PATIENCE_S)


def report_if_nobody_does(
    directory: RunDirectory, tell: Callable[[str], None], *, before: list[tuple[int, int]]
) -> None:  # fmt: skip
    """Write `report.html` if rows or events have come since they were as `before`, and the launcher whose affair it is
    has gone without: nobody holds the lock, and no report is as new as they are.

    For a launcher that shares the directory of another one, at the end of the run. It raises nothing of its own.
    """
    if written(directory) != before:
        _report_within(directory, tell, patience_s=_PATIENCE_S, report=_report_in_place)


def _report_in_place(directory: RunDirectory, outcome: list[str]) -> None:
    try:
        with directory.lock():
            if not _is_new(directory):
                _report(directory, outcome)
                return
    except RunDirectoryError:  # somebody keeps it, and reports
        pass
    outcome.append(_NOT_NEEDED)


def _is_new(directory: RunDirectory) -> bool:
    try:
        return directory.report.stat().st_mtime_ns >= max(time_ns for _, time_ns in written(directory))
    except OSError:
        return False


def _report_within(
    directory: RunDirectory,
    tell: Callable[[str], None],
    *,
    patience_s: float,
    report: Callable[[RunDirectory, list[str]], None] | None = None,
) -> None:
    # in a thread, since a file system that hangs may hold that, and is not to hold the launcher
    outcome: list[str] = []
    writing = threading.Thread(target=report or _report, args=(directory, outcome), name="report", daemon=True)
    writing.start()
    writing.join(patience_s)
    by_hand = f"`hetseq report {directory.path}` makes it"
    if not outcome:
        tell(f"warning: the report took longer than {patience_s:g} s: {by_hand}")
    elif outcome[0] == _NOT_NEEDED:
        return
    elif outcome[0]:
        tell(f"warning: there is no report ({outcome[0]}): {by_hand}")
    else:
        tell(f"report: {directory.report}")


def _report(directory: RunDirectory, outcome: list[str]) -> None:
    try:
        text = report_page(load_run(directory.path), facts=_facts(), has_ended=True)
        replace_file(directory.report, text.encode(), is_durable=False)
    except OSError as error:
        outcome.append(f"{directory.report}: {error.strerror}")
    except Exception as error:  # the run is over, and how it ended is not for its report to change
        outcome.append(f"{type(error).__name__}: {error}")
    else:
        outcome.append("")


def written(directory: RunDirectory) -> list[tuple[int, int]]:
    """What tells whether a run has written rows or events: size and time of their files."""
    found = []
    for path in (directory.metrics, directory.events):
        try:
            status = path.stat()
            found.append((status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((-1, -1))
    return found


def _facts() -> list[tuple[str, str]]:
    """Who has written the report: the versions are those of this machine."""
    versions = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    from hetseq import __version__

    where = f"{utc_now()[:19].replace('T', ' ')} UTC on {platform.node()}"
    return [("Written", where), ("Versions there", ", ".join([f"hetseq {__version__}", *versions]))]


def _parse(words: Sequence[str]) -> tuple[list[Path], Path | None]:
    given = COMMAND.read(words)
    runs = [Path(given[name]) for name in ("RUN", "RUN2") if given[name] is not None]
    output = Path(os.path.abspath(given["--output"])) if given["--output"] is not None else None
    if output is not None and output.is_dir():
        raise ConfigError(f"--output {output} is a folder: expected a file, such as {output / 'report.html'}")
    return runs, output
