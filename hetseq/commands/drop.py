"""`hetseq drop RUN NODE`: take a node out of a run, which continues without it.

Parses the command line and looks the node up among the nodes that train. The request is a file
(`launch.leave_request`); the launcher of that node handles it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hetseq.config.command_line import Argument, Command
from hetseq.errors import ConfigError
from hetseq.launch import leave_request
from hetseq.registry import nearest
from hetseq.run_directory import RunDirectory
from hetseq.which_run import existing_run

COMMAND = Command(
    "drop",
    "Take a node out of a run, which continues without it.",
    usage=("RUN NODE",),
    words=(
        Argument("RUN", "the --save-dir of a run in progress"),
        Argument("NODE", "the name of a node, as in status/rank-N.json and in the table of ranks"),
    ),
    examples=("hetseq drop runs/mnist labB",),
    notes=(
        "The node finishes its step, leaves, and ends with exit code 0; the others continue. If it is the first node of"
        " the run, or fewer than --min-ranks would be left without it, all nodes stop after a checkpoint. To let the"
        " node join again, run its `hetseq train` command again.",
    ),
)


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq drop RUN NODE`: ask a node of a run to leave; returns the exit code. Raises as `drop` does."""
    say(drop(words))
    return 0


def drop(words: Sequence[str]) -> str:
    """Ask a node to leave; returns a sentence for the user. Raises ConfigError for an unknown run or node."""
    given = COMMAND.read(words)
    directory, node = existing_run(Path(given["RUN"])), given["NODE"]
    nodes = living_nodes(directory)
    if not nodes:
        state = "has ended" if any(directory.status.glob("rank-*.json")) else "has not started"
        raise ConfigError(
            f"{directory.path} {state}, as its status/ has no living rank: expected a run in progress; `hetseq top"
            f" {directory.path}` shows its state [run-not-training]"
        )
    if node not in nodes:
        guess = nearest(node, nodes)
        hint = f"; did you mean {guess}?" if guess else ""
        raise ConfigError(
            f"no rank of this run is on {node}: its nodes are {', '.join(sorted(nodes))}{hint} [node-missing]"
        )
    leave_request.ask(directory, node)
    ranks = ", ".join(map(str, sorted(nodes[node])))
    return f"{node} (rank {ranks}) is asked to leave: it finishes its step and ends with exit code 0"


def living_nodes(directory: RunDirectory) -> dict[str, list[int]]:
    """The nodes that train in a run, each with its ranks, from the files in `status/`."""
    found: dict[str, list[int]] = {}
    for path in directory.status.glob("rank-*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            status = json.loads(path.read_text())
            if status["pid"] is not None and status["state"] in ("start", "train"):
                found.setdefault(str(status["node"]), []).append(int(path.stem.partition("-")[2]))
    return found
