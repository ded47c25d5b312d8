"""The exceptions a caller may catch, and the exit code each one stands for.

Every message says what was found, what was expected and what to do next; nothing here formats or logs. The exit
codes are those of the command line: 1 failed, 2 found by one node before the first step, 75 stopped with a commit to
go on from, 78 the nodes disagree.
"""

from __future__ import annotations

from typing import ClassVar

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_STOPPED = 75
EXIT_DISAGREE = 78


class HetSeqError(Exception):
    """Anything HetSeq refuses or gives up on; `exit_code` is what the process ends with.

    `slug`: the code (`hetseq.catalogue`) of messages of this kind that have none of their own.
    """

    exit_code = EXIT_FAILED
    slug: ClassVar[str] = ""


class ConfigError(HetSeqError):
    """An option, a YAML file or a combination of them that cannot be meant."""

    exit_code = EXIT_USAGE
    slug = "option-refused"


class DataError(HetSeqError):
    """A data file that is missing, empty, truncated or something else than it should be."""

    exit_code = EXIT_USAGE
    slug = "data-unreadable"


class MissingSplitError(DataError):
    """A split that the data do not have; without it a run that did not ask for it goes on."""


class TaskError(HetSeqError):
    """A task that breaks its contract: a wrong term, a mean in place of a sum, a file that does not import."""

    exit_code = EXIT_FAILED
    slug = "task-broken"


class TaskFileError(TaskError):
    """A task that cannot be found or imported, known before the first step."""

    exit_code = EXIT_USAGE


class RunDirectoryError(HetSeqError):
    """A `--save-dir` that cannot be used: not writable, full, in use by another run, or somebody else's."""

    exit_code = EXIT_USAGE
    slug = "save-dir-unusable"


class CheckpointError(HetSeqError):
    """A checkpoint that cannot be written, or none that verifies."""

    slug = "checkpoint-refused"


class CheckpointRefused(CheckpointError):
    """A checkpoint that was asked for and is missing, damaged, too new, or of a kind that is never opened."""

    exit_code = EXIT_USAGE


class CheckpointMismatch(CheckpointError):
    """A checkpoint of another model, seed, batch, optimizer or task than the command asks for."""

    exit_code = EXIT_USAGE


class RendezvousError(HetSeqError):
    """Peers that were never found."""


class DisagreementError(HetSeqError):
    """Ranks that should hold the same configuration, plan or state and do not."""

    exit_code = EXIT_DISAGREE


class PeerLostError(HetSeqError):
    """A collective that failed because another rank ended or fell silent; never the root cause of a failure."""

    exit_code = EXIT_STOPPED


class NonFiniteError(HetSeqError):
    """Too many steps in a row whose gradient was not finite."""

    slug = "loss-not-finite"


class DeviceMemoryError(HetSeqError):
    """A device whose memory does not hold the smallest piece of work there is."""

    slug = "memory-exhausted"
