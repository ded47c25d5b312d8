"""`hetseq drop RUN NODE`: take a node out of a run that goes on without it.

Responsible for the request, a file in the run's `status/` folder, and for finding out whether it is meant for a
launcher. Leaving is the launcher's affair. A request needs no address and no port: whoever may write into the run
directory may ask.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hetseq.config.command_line import Argument, Command
from hetseq.errors import ConfigError
from hetseq.run_directory import RunDirectory, open_private
from hetseq.which_run import existing_run

COMMAND = Command(
    "drop",
    "Take a node out of a run that goes on without it.",
    usage=("RUN NODE",),
    words=(
        Argument("RUN", "the --save-dir of a run that is under way"),
        Argument("NODE", "the name of a node, as status/rank-N.json and the table of the ranks have it"),
    ),
    examples=("hetseq drop runs/mnist labB",),
    notes=(
        "The node finishes its step, leaves, and ends with exit code 0; the others go on. The node that was first of"
        " all takes the run with it, and so does one without which fewer than --min-ranks would be left: all stop after"
        " a checkpoint. The same command on that node takes part again.",
    ),
)


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq drop RUN NODE`: ask a node of a run to leave; gives the exit code. Errors as of `drop`."""
    say(drop(words))
    return 0


def drop(words: Sequence[str]) -> str:
    """Ask a node to leave; a sentence for the user. Raises ConfigError for a run or a node that is not there."""
    given = COMMAND.read(words)
    directory, node = existing_run(Path(given["RUN"])), given["NODE"]
    nodes = living_nodes(directory)
    if not nodes:
        raise ConfigError(f"{directory.path} is no run that is under way: its status/ names no living rank")
    if node not in nodes:
        raise ConfigError(f"no rank of this run is on {node}: its nodes are {', '.join(sorted(nodes))}")
    os.close(open_private(request_path(directory, node), os.O_WRONLY | os.O_CREAT))
    ranks = ", ".join(map(str, sorted(nodes[node])))
    return f"{node} (rank {ranks}) is asked to leave: it finishes its step and ends with exit code 0"


def living_nodes(directory: RunDirectory) -> dict[str, list[int]]:
    """The nodes that train in a run, each with its ranks, by the files in `status/`."""
    found: dict[str, list[int]] = {}
    for path in directory.status.glob("rank-*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            status = json.loads(path.read_text())
            if status["pid"] is not None and status["state"] in ("start", "train"):
                found.setdefault(str(status["node"]), []).append(int(path.stem.partition("-")[2]))
    return found


def request_path(directory: RunDirectory, node: str) -> Path:
    """The file that asks a node to leave."""
    return directory.status / f"drop-{re.sub(r'[^A-Za-z0-9._-]', '_', node)[:200]}"


def is_asked(directory: RunDirectory, node: str) -> bool:
    """Whether this node is asked to leave; it is told once."""
    try:
        os.unlink(request_path(directory, node))
    except OSError:
        return False
    return True
