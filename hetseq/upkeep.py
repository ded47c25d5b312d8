"""A run directory that somebody deletes under the run is made anew, so that the run can go on and end well.

Responsible for what the launcher had put there: the folder, `config.yaml` with the run id, the lock, subdirectories.
What others write they write by its path, and so into the new one. The one idea: a thread of its own looks at the path,
because a file system that hangs may hold a thread, and is not to hold the launcher.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from hetseq.errors import RunDirectoryError
from hetseq.report.writing import reporting
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
def upkeep(directory: RunDirectory, tell: Callable[[str], None]) -> Iterator[None]:
    """Keep a run directory there as long as the block lasts; `tell` is called with what the user is to know.

    For the launcher that has prepared and locked it just now; nothing that happens to the directory later raises here.
    """
    is_over, config_yaml = threading.Event(), directory.config_file.read_bytes()
    looking = threading.Thread(target=_look, args=(directory, config_yaml, tell, is_over), name="upkeep", daemon=True)
    looking.start()
    try:
        yield
    finally:
        is_over.set()
        looking.join(_PATIENCE_S)


def _look(
    directory: RunDirectory, config_yaml: bytes, tell: Callable[[str], None], is_over: threading.Event
) -> None:  # fmt: skip
    is_known = False
    with ExitStack() as closing:
        while not is_over.wait(_LOOK_S):
            try:
                found = directory.config_file.read_bytes()
                (directory.path / ".lock").stat()
                if found.partition(b"\n")[0] == config_yaml.partition(b"\n")[0]:
                    config_yaml, is_known = found, False
                    continue
            except FileNotFoundError:
                pass
            except OSError:
                continue  # there, or nowhere that this thread could see
            try:
                closing.enter_context(directory.restore(config_yaml))
            except RunDirectoryError as error:
                if not is_known:
                    tell(f"warning: --save-dir {directory.path} was deleted under this run, and now: {error}")
                is_known = True
                continue
            tell(
                f"warning: --save-dir {directory.path} was deleted under this run: it is made anew and the run goes on,"
                " but rows and checkpoints so far are lost"
            )
