"""`hetseq drop RUN NODE`: take a node out of a run that goes on without it.

Responsible for the command line, and for finding the node among those that train. The request is a file
(`launch.leave_request`); leaving is the launcher's affair.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hetseq.config.command_line import Argument, Command
from hetseq.errors import ConfigError
from hetseq.launch import leave_request
from hetseq.run_directory import RunDirectory
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
    leave_request.ask(directory, node)
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
