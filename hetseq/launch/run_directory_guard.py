"""A run directory that somebody deletes under the run is made anew, so that the run can go on and end well.

Responsible for what the launcher had put there: the folder, `config.yaml` with the run id, the lock, subdirectories.
What others write they write by its path, and so into the new one. The one idea: a thread of its own looks at the path,
because a file system that hangs may hold a thread, and is not to hold the launcher.
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
    """A run directory while a launcher uses it: locked, kept there, and with a report at the end.

    Raises RunDirectoryError where another run uses it; otherwise as `upkeep`.
    """
    with directory.lock(), reporting(directory, tell), upkeep(directory, tell):
        yield


@contextmanager
def taken_over(directory: RunDirectory, tell: Callable[[str], None]) -> Iterator[None]:
    """A run directory whose launcher is gone, for the one that leads the run now: as `in_use`, as far as it can be.

    It raises nothing. A file server may keep the lock of a machine that is off: then there is only the report.
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
    """A run directory that another launcher has made: if that ended before the run, the report is made all the same.

    `is_over` is asked when the block ends: whether the run is over then, and not only this launcher's part in it.
    """
    before = written(directory)
    try:
        yield
    finally:
        if is_over():
            report_if_nobody_does(directory, tell, before=before)


def adopt_config(directory: RunDirectory, tell: Callable[[str], None]) -> None:
    """As `RunDirectory.adopt_config`; a file that cannot be written is a warning."""
    try:
        directory.adopt_config()
    except RunDirectoryError as error:
        tell(f"warning: {error}; it says what an earlier start said, and the run goes on")


@contextmanager
def upkeep(directory: RunDirectory, tell: Callable[[str], None]) -> Iterator[None]:
    """Keep a run directory there as long as the block lasts; `tell` is called with what the user is to know.

    For the launcher that has prepared and locked it just now; nothing that happens to the directory later raises here.
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
    """The file of the lock. As long as it is held open no other file is given its number, so it tells ours apart."""
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
                if _lock_of(directory) == ours:  # what the file says may be new: a run that began elsewhere has its id
                    config_yaml, is_known = found, False
                    continue
            except FileNotFoundError:
                pass
            except OSError:
                continue  # there, or nowhere that this thread could see
            try:
                closing.enter_context(directory.restore(config_yaml))
                ours = _lock_of(directory)
            except RunDirectoryError as error:
                if not is_known:
                    tell(f"warning: --save-dir {directory.path} was deleted under this run, and now: {error}")
                is_known = True
                continue
            tell(
                f"warning: --save-dir {directory.path} was deleted under this run: it is made anew and the run goes on,"
                " but rows and checkpoints so far are lost"
            )
