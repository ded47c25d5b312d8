"""Writing the report: by the launcher at the end of a run, and on demand by `hetseq report`.

Decides whether there is something to report, writes the file, and reads the command line. In a launcher, a failure here
is only ever a warning: it never changes the exit code and never takes longer than a deadline.

The one idea: a launcher reports on the run directory that it has created and locked, so only one of the nodes that
share a directory writes, and only if rows or events are new since it began. If that launcher was lost, the lock is
free, and a launcher that reaches the end of the run writes in its place.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hetseq.config.command_line import Argument, Command, CommandOption
from hetseq.errors import ConfigError, RunDirectoryError
from hetseq.monitor.report.compare import compare, comparison_page, sentences
from hetseq.monitor.report.page import report_page
from hetseq.monitor.report.recorded import load_run
from hetseq.run_directory import RunDirectory, replace_file, utc_now

COMMAND = Command(
    "report",
    "Write a report of a run as one HTML file for any browser, without a server; or compare runs.",
    usage=("RUN [RUN2 ...] [--output FILE]",),
    words=(
        Argument("RUN", "the --save-dir of a run, finished or not; its report.html is overwritten"),
        Argument(
            "RUN2",
            "another run: which is faster, both curves, their largest difference, and the options that differ",
            is_optional=True,
        ),
        *(Argument(name, "a further run, compared with the first", is_optional=True) for name in ("RUN3", "RUN4")),
        CommandOption(
            "--output", "file to write; default: RUN/report.html, or RUN/comparison.html for several runs", "FILE"
        ),
    ),
    examples=("hetseq report runs/mnist", "hetseq report runs/first runs/second --output comparison.html"),
)

_RUNS = ("RUN", "RUN2", "RUN3", "RUN4")
_PATIENCE_S = 60.0  # 10,000 steps of 64 ranks, 109 MB, take 2.4 s; a file system may hang
_PACKAGES = ("torch", "numpy")
_NOT_NEEDED = "another launcher reports"


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq report`: write the page and print its path; returns the exit code. Raises as `load_run` does."""
    runs, output = _parse(words)
    first, *others = map(load_run, runs)
    if not others:
        path = output or RunDirectory(first.path).report
        text = report_page(first, facts=_facts())
    else:
        for (given, one), (given_too, other) in itertools.combinations(zip(runs, [first, *others]), 2):
            if one.path.samefile(other.path):
                raise ConfigError(f"{given} and {given_too} are the same directory: expected two runs to compare")
        found = [compare(first, other) for other in others]
        path = output or first.path / "comparison.html"
        text = comparison_page(*found)
        for line in sentences(*found):
            say(line)
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
    """Write `report.html` when the block ends or raises; `tell` gets a line with its path.

    For the launcher that has created and locked the directory. It raises nothing of its own.
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
    """Write `report.html` if rows or events are new since `before` and the launcher responsible for it is gone without
    writing it: the lock is free, and no report is as new as they are.

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
    except RunDirectoryError:  # another launcher holds the lock, and reports
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
    # in a thread, because a file system that hangs must not block the launcher
    outcome: list[str] = []
    writing = threading.Thread(target=report or _report, args=(directory, outcome), name="report", daemon=True)
    writing.start()
    writing.join(patience_s)
    by_hand = f"`hetseq report {directory.path}` writes it"
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
    except Exception as error:  # the run is over, and its report must not change how it ended
        outcome.append(f"{type(error).__name__}: {error}")
    else:
        outcome.append("")


def written(directory: RunDirectory) -> list[tuple[int, int]]:
    """Size and time of the files of rows and events, to tell whether the run has written any."""
    found = []
    for path in (directory.metrics, directory.events):
        try:
            status = path.stat()
            found.append((status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((-1, -1))
    return found


def _facts() -> list[tuple[str, str]]:
    """Time, host and versions of the process that writes the report."""
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
    runs = [Path(given[name]) for name in _RUNS if given[name] is not None]
    output = Path(os.path.abspath(given["--output"])) if given["--output"] is not None else None
    if output is not None and output.is_dir():
        raise ConfigError(f"--output {output} is a folder: expected a file, such as {output / 'report.html'}")
    return runs, output
