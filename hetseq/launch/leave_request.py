"""Leave request: a file in the run's `status/` folder that asks a node to leave the run.

`hetseq drop` writes it, and the node's launcher polls for it. It needs no address and no port: any user who can write
into the run directory can ask.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from hetseq.run_directory import RunDirectory, open_private


def ask(directory: RunDirectory, node: str) -> None:
    """Ask a node to leave. Raises OSError if the file cannot be written."""
    os.close(open_private(_path(directory, node), os.O_WRONLY | os.O_CREAT))


def is_asked(directory: RunDirectory, node: str) -> bool:
    """Whether this node is asked to leave; True only once per request."""
    try:
        os.unlink(_path(directory, node))
    except OSError:
        return False
    return True


def _path(directory: RunDirectory, node: str) -> Path:
    return directory.status / f"drop-{re.sub(r'[^A-Za-z0-9._-]', '_', node)[:200]}"
