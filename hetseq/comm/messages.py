"""Messages between two ranks, from threads of their own, beside the collectives of the training thread.

Responsible for sending bytes from memory to memory over connections that no collective uses, in the gaps that the
steps leave on the link. Knows nothing of their content. The one idea: the messages from one rank to another are
numbered on both sides, so that two threads of different ranks need no agreement but the order of their own messages.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from hetseq.comm.right_of_way import RightOfWay
from hetseq.errors import PeerLostError

_TAGS = 1 << 30
_PIECE_BYTES = 1 << 18  # a message goes in pieces, each once both ranks have posted it
_POSTED = 2  # pieces at a time: what lies in a link delays the transfers of a step
_PATIENCE = 4  # a piece gives way to a step for at most so many times as long as the fastest one took


class Messages:
    """Messages among the ranks of a group. Messages of one channel from one rank to another arrive in their order.

    `transport` gives a process group that nothing else uses; `sever` cuts its connections, `close` releases it.
    """

    def __init__(
        self,
        transport: Callable[[], dist.ProcessGroup],
        right_of_way: RightOfWay,
        *,
        sever: Callable[[], None],
        end_s: Callable[[], float],
        close: Callable[[], None],
    ) -> None:
        self._transport, self._right_of_way, self._sever, self._close = transport, right_of_way, sever, close
        #: how long to wait for the end of a message: most end once the connections are cut, some at their deadline
        self.end_s = end_s
        self._lock = threading.Lock()
        self._sent, self._received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()

    def send(self, content: memoryview, target: int, *, channel: int, channels: int, timeout_s: float) -> None:
        """Send bytes to rank `target`; returns once they may change. From any thread, of a channel from one at a time.

        Channels are numbered from 0 to `channels` - 1, a number that is the same on all ranks. Raises PeerLostError.
        """
        pieces = _pieces(content)

        def post() -> dist.Work:
            return self._transport().send([next(pieces)], target, self._next(self._sent, target, channel, channels))

        self._move(len(content), post, timeout_s)

    def receive(self, content: memoryview, source: int, *, channel: int, channels: int, timeout_s: float) -> None:
        """Receive the next bytes from rank `source`, as many as `content` has. As `send`."""
        pieces = _pieces(content)

        def post() -> dist.Work:
            return self._transport().recv([next(pieces)], source, self._next(self._received, source, channel, channels))

        self._move(len(content), post, timeout_s)

    def sever(self) -> None:
        """Cut the connections: messages under way fail on all ranks. From any thread."""
        self._sever()

    def close(self) -> None:
        """Release the connections. Any rank, alone."""
        self._close()

    def _next(self, counts: Counter[tuple[int, int]], rank: int, channel: int, channels: int) -> int:
        with self._lock:
            number = counts[rank, channel]
            counts[rank, channel] += 1
        return (number * channels + channel) % (_TAGS - _TAGS % channels)

    def _move(self, size: int, post: Callable[[], dist.Work], timeout_s: float) -> None:
        posted, least_s = deque[tuple[dist.Work, float]](), math.inf

        def await_one() -> None:
            nonlocal least_s
            work, posted_s = posted.popleft()
            work.wait(timedelta(seconds=timeout_s))
            least_s = min(least_s, time.monotonic() - posted_s)

        try:
            for _ in range(0, size, _PIECE_BYTES):
                if least_s < math.inf:
                    # the least: what a piece takes else includes the time for which the other rank gives way
                    self._right_of_way.give_way(_PATIENCE * least_s)
                posted.append((post(), time.monotonic()))
                if len(posted) == _POSTED:
                    await_one()
            while posted:
                await_one()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise PeerLostError(f"lost a peer while waiting up to {timeout_s:.0f} s for a message ({reason})") from None


def _pieces(content: memoryview) -> Iterator[torch.Tensor]:
    """The bytes of a message as tensors, piece by piece."""
    for begin in range(0, len(content), _PIECE_BYTES):
        yield torch.frombuffer(content[begin : begin + _PIECE_BYTES], dtype=torch.uint8)
