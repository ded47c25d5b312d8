"""The code of each kind of trouble: the word in brackets behind a message, and what it stands for.

Responsible for the list of codes. Refuses to know where a message is made and who reads it. The one idea: a code is
part of the text of a message (`... choose another port [port-taken]`), because messages travel as texts, from a worker
to its launcher and from node to node; so it stands once in the source, where the message is made, and arrives as it is.
It stands at the end, but before a command that is to be pasted.

`docs/errors.md` has a section per code; a test holds page, list and messages to each other.
"""

from __future__ import annotations

import re

from hetseq.errors import HetSeqError

#: code -> what has happened; in the order of docs/errors.md
CODES = {
    # the nodes do not meet
    "head-unreachable": "Nobody answers at the address where the nodes are to meet.",
    "head-unknown": "This node knows no machine of that name.",
    "ranks-missing": "Not all ranks came within `--join-timeout`.",
    "port-taken": "Another program uses the port.",
    "link-blocked": "Two nodes reach the head, and one of them does not reach the other.",
    "directory-missing": "The shared directory does not exist on this node.",
    "old-file": "A file of an earlier run stands where the nodes are to meet, so they meet beside it.",
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
    # a node cannot begin
    "option-refused": "An option, or several together, cannot be meant.",
    "device-missing": "This node does not show the GPU that was asked for.",
    "device-unusable": "A GPU of this node cannot be used by this torch, or by this process.",
    "run-in-use": "Another run uses the run directory.",
    "save-dir-unusable": "The run directory cannot be made, or cannot be written.",
    "data-unreadable": "A file of the data is missing, empty, cut short or something else.",
    "task-broken": "The task breaks its contract.",
    "checkpoint-refused": "A checkpoint is missing, damaged, or of another run.",
    # while it trains
    "worker-died": "The process of a rank was killed or has crashed.",
    "worker-silent": "A rank did not answer within `--step-deadline`.",
    "worker-raised": "Code of the task has raised an exception on a rank.",
    "memory-exhausted": "The memory of a device does not hold the smallest piece of work.",
    "batch-halved": "The memory of a device did not hold a micro-batch, so smaller ones are used there.",
    "memory-for-saves": "There is no shared memory for a copy of the state, so training waits for each save.",
    "save-failed": "The last save of a run failed.",
    "loss-not-finite": "Too many steps in a row had a gradient that was not finite.",
}

_IN_TEXT = re.compile(rf" \[({'|'.join(CODES)})\]")


def codes_in(message: str) -> list[str]:
    """The codes that stand in a message, in order."""
    return _IN_TEXT.findall(message)


def plain(message: str) -> str:
    """The message without its codes, to be part of another one."""
    return _IN_TEXT.sub("", message)


def text_of(error: Exception) -> str:
    """What an error says, with a code: that of the message, else that of its kind, where HetSeq has raised it."""
    text = str(error)
    return f"{text} [{error.slug}]" if isinstance(error, HetSeqError) and error.slug and not codes_in(text) else text
