"""Run directory guard: recreates a run directory that is deleted during the run, so that the run can continue.

Restores the launcher's own files: the folder, `config.yaml` with the run id, the lock, subdirectories. Other writers
use the path, and so write into the new directory. The one idea: a separate thread checks the path, because a hanging
file system may block that thread, but must not block the launcher.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from hetseq.errors import RunDirectoryError
from hetseq.monitor.report.command import report_if_nobody_does, reporting, written
from hetseq.run_directory import RunDirectory

_LOOK_S = 1.0
_PATIENCE_S = 2.0


@contextmanager
def in_use(directory: RunDirectory, tell: Callable[[str], None]) -> Iterator[None]:
    """A run directory while a launcher uses it: locked, recreated if deleted, and with a report at the end.

    Raises RunDirectoryError if another run uses it; otherwise as `upkeep`.
    """
    with directory.lock(), reporting(directory, tell), upkeep(directory, tell):
        yield


@contextmanager
def taken_over(directory: RunDirectory, tell: Callable[[str], None]) -> Iterator[None]:
    """A run directory whose launcher is gone, for the launcher that now leads the run: like `in_use`, if possible.

    Never raises. If a file server still holds the lock of a machine that is off, only the report is written.
    """
    with ExitStack() as closing:
        closing.enter_context(reporting(directory, tell))
        with suppress(RunDirectoryError, OSError), ExitStack() as keeping:
            keeping.enter_context(directory.lock())
            keeping.enter_context(upkeep(directory, tell))
            closing.push(keeping.pop_all())
        yield


@contextmanager
def looked_after(
    directory: RunDirectory, tell: Callable[[str], None], *, is_over: Callable[[], bool]
) -> Iterator[None]:  # fmt: skip
    """A run directory that another launcher made: if that launcher ended before the run, this one writes the report.

    `is_over` is called when the block ends: it returns whether the run is over, not just this launcher's part in it.
    """
    before = written(directory)
    try:
        yield
    finally:
        if is_over():
            report_if_nobody_does(directory, tell, before=before)


def adopt_config(directory: RunDirectory, tell: Callable[[str], None]) -> None:
    """Like `RunDirectory.adopt_config`, but only warns if the file cannot be written."""
    try:
        directory.adopt_config()
    except RunDirectoryError as error:
        tell(f"warning: {error}; it keeps the options of an earlier start, and the run continues")


@contextmanager
def upkeep(directory: RunDirectory, tell: Callable[[str], None]) -> Iterator[None]:
    """Recreate a run directory that is deleted during the block; `tell` prints a line for the user.

    For the launcher that has just prepared and locked it. Later damage to the directory raises nothing here.
    """
    is_over, config_yaml = threading.Event(), directory.config_file.read_bytes()
    arguments = (directory, config_yaml, _lock_of(directory), tell, is_over)
    looking = threading.Thread(target=_look, args=arguments, name="upkeep", daemon=True)
    looking.start()
    try:
        yield
    finally:
        is_over.set()
        looking.join(_PATIENCE_S)


def _lock_of(directory: RunDirectory) -> tuple[int, int]:
    """Device and inode of the lock file. While it is open no other file gets its inode, so it identifies our file."""
    about = (directory.path / ".lock").stat()
    return about.st_dev, about.st_ino


def _look(
    directory: RunDirectory, config_yaml: bytes, ours: tuple[int, int], tell: Callable[[str], None],
    is_over: threading.Event,
) -> None:  # fmt: skip
    is_known = False
    with ExitStack() as closing:
        while not is_over.wait(_LOOK_S):
            try:
                found = directory.config_file.read_bytes()
                if _lock_of(directory) == ours:  # the content may be new: the id of a run that began elsewhere
                    config_yaml, is_known = found, False
                    continue
            except FileNotFoundError:
                pass
            except OSError:
                continue  # it exists, or this thread cannot see it
            try:
                closing.enter_context(directory.restore(config_yaml))
                ours = _lock_of(directory)
            except RunDirectoryError as error:
                if not is_known:
                    tell(f"warning: --save-dir {directory.path} was deleted under this run, and now: {error}")
                is_known = True
                continue
            tell(
                f"warning: --save-dir {directory.path} was deleted under this run: it was recreated and the run"
                " continues, but rows and checkpoints so far are lost"
            )
