"""What ranks agree on between two steps, in the script's own code: an evaluation, a value of the first rank.

Each such call is collective. A peer may be lost in the middle of one, when some ranks have its result already and are
further on in the script, and others have not. So every rank keeps the results of the calls after its last step, and
after a loss the ranks first share these: a rank that lacks one takes it from another.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from hetseq.comm.group import RowTransport
from hetseq.errors import DisagreementError, PeerLostError
from hetseq.run.task_hooks import Call, meet

T = TypeVar("T")


class Results:
    """The results of the collective calls after one step, in the order of the calls."""

    def __init__(self) -> None:
        self.step, self._results, self._calls = 0, list[Any](), 0

    def begin(self, step: int) -> None:
        """The script now follows step `step`."""
        self.step, self._results, self._calls = step, [], 0

    def next(self, call: Call, work: Callable[[], T], recover: Callable[[str], None]) -> T:
        """The result of the next call: by `work`, again after a lost peer, or from a rank that has it already.

        Raises DisagreementError if the ranks are in different calls.
        """
        number, self._calls = self._calls, self._calls + 1
        while number >= len(self._results):
            try:
                self._results.append([int(call), work()])
            except PeerLostError as error:
                recover(str(error))  # may bring the result
        found, result = self._results[number]
        if found != call:
            raise DisagreementError(
                f"this rank is {call.words} after step {self.step}, another was {Call(found).words}"
            )
        value: T = result
        return value

    def share(self, group: RowTransport) -> None:
        """Take from the others what this rank lacks. Collective over the ranks that hold the state."""
        told = together(group, Call.END_OF_STEP, 0, [self.step, self._results])
        longest = max((results for step, results in told if step == self.step), key=len)
        self._results = [*self._results, *longest[len(self._results) :]]


def together(group: RowTransport, call: Call, step: int, value: Any) -> list[Any]:
    """The values of all ranks, in rank order, as JSON carries them. Collective.

    Raises DisagreementError on every rank if they are in different calls, and PeerLostError.
    """
    text = json.dumps(value).encode()
    lengths = meet(group, call, step, (len(text), 0, 0))[:, 0].tolist()
    width = -(-max(lengths) // 8) * 8
    rows = group.all_gather_rows(np.frombuffer(text.ljust(width), np.int64))
    return [json.loads(row.tobytes()[:length]) for row, length in zip(rows, lengths)]
