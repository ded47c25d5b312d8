"""Exit status of a run: one exit code and at most one reason, the same on every node, from the ends of all workers.

Pure: the head collects how the workers ended, in order, and `judge` finds the root cause. A launcher that has lost its
head judges the ends that it has seen itself.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetseq.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED
from hetseq.system.task_failure import FAILED

#: signals that the program itself causes; they would recur after a restart
_OWN_FAULTS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)

TOO_EARLY = "before the first step"  # words of a launcher that was stopped
_LAST_WORDS = re.compile(r"; its last words are in log/rank-\d+\.txt|\nfull traceback: log/rank-\d+\.txt\b.*")
_NOTHING_SAVED = "nothing had been saved yet"


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker ended: its own report, if it still could send one, and the kernel's exit status."""

    rank: int
    exit_code: int  # negative: killed by this signal
    code: int | None = None  # as reported by the worker
    message: str = ""
    is_secondary: bool = False  # it ended because another rank did
    has_left: bool = False  # it was asked to leave, and the others continue
    has_lost_device: bool = False  # after this error the process can no longer use its device
    server: int | None = None  # pid of its fork server, if the worker ended because that was killed or crashed

    @property
    def is_own_fault(self) -> bool:
        """Whether it crashed, or exited without a report: another worker may well fail on the same work."""
        has_crashed = self.code is None and (self.exit_code >= 0 or -self.exit_code in _OWN_FAULTS)
        return has_crashed or self.has_lost_device

    @property
    def is_peaceful(self) -> bool:
        """Whether it finished all its work, or stopped together with all other ranks."""
        return self.code == EXIT_DONE or (self.code == EXIT_STOPPED and not self.is_secondary and not self.has_left)

    @property
    def is_loss(self) -> bool:
        """Whether only its process was lost, or it was asked to leave: the same work can continue elsewhere."""
        return self.code is None or self.is_secondary or self.has_left or self.has_lost_device


@dataclass(frozen=True)
class Ending:
    """How the run ended, on every node."""

    code: int
    message: str = ""


def judge(
    ends: Sequence[WorkerEnd],
    *,
    has_commit: bool,
    cut_short: str = "",
    silent: Sequence[int] = (),
    hosts: Mapping[int, str] | None = None,
) -> Ending:
    """One exit code and one reason for the ends of all workers, in the order in which they ended.

    The root cause is the first failure other than the loss of a peer. The loss of a machine gives 75 if there is a
    commit to resume from; a failure that would recur never gives 75. `cut_short`: why a launcher ended the workers
    itself, if it did. `silent`: ranks that still ran long after the others noticed that a rank was missing. `hosts`:
    the host of each rank, in a run with several nodes.
    """
    called = _Names(hosts or {})
    if cut_short:
        return stopped(cut_short, has_commit)
    killed = [end for end in ends if end.code is None]
    failed = [end for end in ends if end.code not in (None, EXIT_DONE, EXIT_STOPPED) and not end.is_secondary]
    # A rank that the launcher ended because another one failed is not the root cause.
    first = next((end for end in ends if end in killed or end in failed), None)
    if first is None:
        bereaved = next((end for end in ends if end.is_secondary), None)
        if bereaved is not None:
            return lost(called.who_fell_silent(silent, bereaved), has_commit)
        code = max((end.code or 0 for end in ends), default=EXIT_DONE)
        return Ending(code, next((end.message for end in ends if end.message), ""))
    if first.code is not None:
        return Ending(first.code, called.reason(first, ends))
    number, who = -first.exit_code, called.rank(first.rank)
    if first.exit_code >= 0 or number in _OWN_FAULTS:
        return Ending(EXIT_FAILED, _of_process(first, who))
    return lost(_of_process(first, who), has_commit)


def how_it_ended(end: WorkerEnd, hosts: Mapping[int, str]) -> str:
    """The end of one worker as a sentence, for a run that continues without it."""
    who = _Names(hosts).rank(end.rank)
    if end.code is None:
        return _of_process(end, who)
    return f"{who} has left" if end.has_left else f"{who}: {end.message}"


def _of_process(end: WorkerEnd, who: str) -> str:
    number = -end.exit_code
    if end.server is not None:
        return (
            f"{who} ended with the fork server of its node (pid {end.server}), from which all workers there are forked:"
            " the server was killed, by the kernel when memory ran out or by a person, or it crashed; `dmesg` on that"
            " node shows which, and if memory ran out, give it fewer workers or a smaller --max-sentences [worker-died]"
        )
    if number <= 0:
        return f"{who} exited with code {end.exit_code} without a reason [worker-died]"
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number in _OWN_FAULTS:
        return f"{who} crashed ({name}); its last words are in log/rank-{end.rank}.txt [worker-died]"
    hint = ", as the kernel does when memory runs out" if number == signal.SIGKILL else ""
    return f"{who} was killed ({name}{hint}) [worker-died]"


def with_trace(message: str, rank: int) -> str:
    """The message; a failure of the user's code, of which it shows only a part, also names the file with the rest."""
    if not message.startswith(FAILED):
        return message
    return f"{message}\nfull traceback: log/rank-{rank}.txt in the run directory"


def lost(reason: str, has_commit: bool) -> Ending:
    """The end of a run that was interrupted, not one that failed."""
    if has_commit:
        return Ending(EXIT_STOPPED, f"{reason}; the same command resumes from the newest checkpoint")
    return Ending(EXIT_FAILED, f"{reason}; {_NOTHING_SAVED}")


def stopped(reason: str, has_commit: bool) -> Ending:
    """The end of a run that a person or a queue stopped immediately."""
    ending = lost(reason, has_commit)
    return ending if has_commit else Ending(EXIT_INTERRUPTED, ending.message)


def of_errand(ending: Ending) -> Ending:
    """The same end for a command that trains and saves nothing: it can simply be run again."""
    words = ending.message.replace(f" {TOO_EARLY}", "").replace(_NOTHING_SAVED, "run the command again")
    return Ending(ending.code, _LAST_WORDS.sub("", words))


class _Names:
    """Names of ranks in messages, with the host if the run has several nodes."""

    def __init__(self, hosts: Mapping[int, str]) -> None:
        self._hosts = hosts

    def rank(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}" if rank in self._hosts else f"rank {rank}"

    def reason(self, end: WorkerEnd, ends: Sequence[WorkerEnd]) -> str:
        """The reason for a failure, with the rank if only one rank failed."""
        # Rank zero's message reaches the others in a row of fixed size, so their copies may be truncated.
        same = [other for other in ends if other is end or _is_cut_from(end.message, other.message)]
        message = with_trace(max((other.message for other in same), key=len), end.rank)
        if self._hosts:
            is_shared = {self._hosts.get(other.rank) for other in same} == set(self._hosts.values())
        else:
            is_shared = len(same) > 1 or len(ends) == 1
        return message if is_shared else f"{self.rank(end.rank)}: {message}"

    def who_fell_silent(self, silent: Sequence[int], bereaved: WorkerEnd) -> str:
        if not silent:
            return bereaved.message if not self._hosts else f"{self.rank(bereaved.rank)} {bereaved.message}"
        who = self.rank(silent[0]) if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
        return f"{who} fell silent [worker-silent]; {self.rank(bereaved.rank)} {bereaved.message}"


def _is_cut_from(one: str, other: str) -> bool:
    return bool(one and other) and (one.startswith(other) or other.startswith(one))
