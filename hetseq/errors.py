"""The exceptions a caller may catch, the exit code of each, and the codes at the end of messages.

Every message says what was found, what was expected and what to do next; nothing here logs. The exit codes of the
command line: 1 failed, 2 refused by one node before the first step, 75 stopped with a commit to resume from, 78 the
nodes disagree, 130 stopped at once with nothing saved.

A code in brackets is part of the text of a message (`... choose another port [port-taken]`), because messages travel as
text, from a worker to its launcher and from node to node. It is at the end of the message, but before a command to
paste. `docs/reference/errors.md` has a section per code; a test compares page, list and messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_STOPPED = 75
EXIT_DISAGREE = 78
EXIT_INTERRUPTED = 130


class HetSeqError(Exception):
    """Base of the errors that HetSeq raises; the process ends with `exit_code`.

    `slug`: the code (one of `CODES`) for messages of this kind without one of their own.
    """

    exit_code = EXIT_FAILED
    slug: ClassVar[str] = ""


class ConfigError(HetSeqError):
    """An invalid option, YAML file or combination of them."""

    exit_code = EXIT_USAGE
    slug = "option-refused"


class UnknownOptionError(ConfigError):
    """Options that do not exist; `words` are these as they were typed."""

    def __init__(self, message: str, words: Sequence[str]) -> None:
        super().__init__(message)
        self.words = words


class DataError(HetSeqError):
    """A data file that is missing, empty, truncated or of another kind."""

    exit_code = EXIT_USAGE
    slug = "data-unreadable"


class MissingSplitError(DataError):
    """A split that the data do not have; a run that did not ask for it continues."""


class TaskError(HetSeqError):
    """A task that breaks its contract: a wrong term, a mean in place of a sum, a file that does not import."""

    exit_code = EXIT_FAILED
    slug = "task-broken"


class TaskFileError(TaskError):
    """A task that cannot be found or imported, found before the first step."""

    exit_code = EXIT_USAGE


class RunDirectoryError(HetSeqError):
    """A `--save-dir` that cannot be used: not writable, full, in use by another run, or not yours."""

    exit_code = EXIT_USAGE
    slug = "save-dir-unusable"


class CheckpointError(HetSeqError):
    """A checkpoint that cannot be written, or none that verifies."""

    slug = "checkpoint-refused"


class CheckpointRefused(CheckpointError):
    """A checkpoint that was asked for and is missing, damaged, too new, or in a format that is never opened."""

    exit_code = EXIT_USAGE


class CheckpointMismatch(CheckpointError):
    """A checkpoint of another model, seed, batch, optimizer or task than the command asks for."""

    exit_code = EXIT_USAGE


class RendezvousError(HetSeqError):
    """Peers that were not found in time."""


class DisagreementError(HetSeqError):
    """Ranks that should hold the same configuration, plan or state but do not."""

    exit_code = EXIT_DISAGREE


class PeerLostError(HetSeqError):
    """A collective that failed because another rank ended or fell silent; never the root cause of a failure."""

    exit_code = EXIT_STOPPED


class NonFiniteError(HetSeqError):
    """Too many steps in a row whose gradient was not finite."""

    slug = "loss-not-finite"


class DeviceMemoryError(HetSeqError):
    """A device whose memory does not hold the smallest piece of work."""

    slug = "memory-exhausted"


# Codes of messages.

#: code -> the error in one sentence; in the order of docs/reference/errors.md
CODES = {
    # the nodes do not meet
    "head-unreachable": "No launcher answers at the address where the nodes meet.",
    "head-unknown": "This node knows no machine of that name.",
    "ranks-missing": "Not all ranks came within `--join-timeout`.",
    "port-taken": "Another program uses the port.",
    "link-blocked": "Two nodes reach the head, and one of them does not reach the other.",
    "directory-missing": "The shared directory does not exist on this node.",
    "old-file": "A file of an earlier run is at the meeting place, so the nodes meet beside it.",
    "interface-unknown": "`GLOO_SOCKET_IFNAME` names an interface that this node does not have.",
    "interface-list": "`GLOO_SOCKET_IFNAME` holds a list in NCCL's manner, so another interface is used.",
    "loopback-name": "A name means 127.0.1.1 on its own machine, so another address of it is used.",
    "secret-differs": "Two nodes hold different secrets.",
    # the ranks do not fit
    "rank-claimed-twice": "Two nodes claim the same rank.",
    "world-size-differs": "Two nodes were told different numbers of ranks.",
    "rank-outside-world": "A node claims a rank that the world size does not have.",
    # the nodes disagree
    "versions-differ": "The nodes have different versions of HetSeq, of torch or of a package of the task.",
    "code-differs": "The nodes have different source files.",
    "options-differ": "The nodes were given different options.",
    "model-differs": "The nodes build models with different parameters.",
    "data-differ": "The nodes read different data.",
    "loss-differs": "The nodes compute different losses for the same samples.",
    # a node cannot begin
    "command-unknown": "HetSeq has no command of that name.",
    "option-refused": "An option, or several together, cannot be meant.",
    "file-missing": "A file that the command names does not exist.",
    "device-missing": "This node does not show the GPU that was asked for.",
    "device-unusable": "A GPU of this node cannot be used by this torch, or by this process.",
    "run-in-use": "Another run uses the run directory.",
    "save-dir-unusable": "The run directory cannot be made, or cannot be written.",
    "data-unreadable": "A file of the data is missing, empty, cut short or something else.",
    "task-broken": "The task breaks its contract.",
    "checkpoint-refused": "A checkpoint is missing, damaged, or of another run.",
    # a command looks at a run
    "run-missing": "The path is not the directory of a run.",
    "run-not-training": "The run has not started, or it has ended.",
    "node-missing": "No rank of the run is on that node.",
    # while it trains
    "worker-died": "The process of a rank was killed or has crashed.",
    "worker-silent": "A rank did not answer within `--step-deadline`.",
    "worker-raised": "Code of the task has raised an exception on a rank.",
    "memory-exhausted": "The memory of a device does not hold the smallest piece of work.",
    "batch-halved": "The memory of a device did not hold a micro-batch, so smaller ones are used there.",
    "state-lost": "A rank that owned a part of the state is gone, and all ranks continue from the newest state.",
    "went-back": "A rank that owned a part of the state is gone, and all ranks went back to an image in memory.",
    "no-second-place": "Images of the state in memory have no second copy on another node.",
    "no-owner": "None of the ranks that --own lets own a part of the state is there, so all ranks own as much.",
    "memory-for-saves": "There is no shared memory for a copy of the state, so training waits for each save.",
    "save-failed": "The last save of a run failed.",
    "loss-not-finite": "Too many steps in a row had a gradient that was not finite.",
}

_IN_TEXT = re.compile(rf" \[({'|'.join(CODES)})\]")


def codes_in(message: str) -> list[str]:
    """The codes in a message, in order."""
    return _IN_TEXT.findall(message)


def plain(message: str) -> str:
    """The message without its codes, to be part of another one."""
    return _IN_TEXT.sub("", message)


def text_of(error: Exception) -> str:
    """The text of an error, with a code: the message's own, else its kind's, if HetSeq raised it."""
    text = str(error)
    return f"{text} [{error.slug}]" if isinstance(error, HetSeqError) and error.slug and not codes_in(text) else text


def few(names: Sequence[str], *, most: int = 3) -> str:
    """The first names of a list for a message, and the number of the others."""
    more = len(names) - most
    return (", ".join(names[:most]) or "nothing") + (f" and {more} more" if more > 0 else "")
