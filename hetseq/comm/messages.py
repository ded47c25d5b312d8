"""Messages between two ranks, from threads of their own, beside the collectives of the training thread.

Responsible for sending bytes from memory to memory over connections that no collective uses, so that no step waits
behind them. Knows nothing of their content. The one idea: the messages from one rank to another are numbered on both
sides, so that two threads of different ranks need no agreement but the order of their own messages.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from hetseq.errors import PeerLostError

_TAGS = 1 << 30


class Messages:
    """Messages among the ranks of a group. Messages of one channel from one rank to another arrive in their order.

    `transport` gives a process group that nothing else uses; `sever` cuts its connections, `close` releases it.
    """

    def __init__(
        self, transport: Callable[[], dist.ProcessGroup], *, sever: Callable[[], None], close: Callable[[], None]
    ) -> None:
        self._transport, self._sever, self._close = transport, sever, close
        self._lock = threading.Lock()
        self._sent, self._received = Counter[tuple[int, int]](), Counter[tuple[int, int]]()

    def send(self, content: memoryview, target: int, *, channel: int, channels: int, timeout_s: float) -> None:
        """Send bytes to rank `target`; returns once they may change. From any thread, of a channel from one at a time.

        Channels are numbered from 0 to `channels` - 1, a number that is the same on all ranks. Raises PeerLostError.
        """
        tag = self._next(self._sent, target, channel, channels)
        self._do(lambda gloo: gloo.send([_tensor(content)], target, tag), timeout_s)

    def receive(self, content: memoryview, source: int, *, channel: int, channels: int, timeout_s: float) -> None:
        """Receive the next bytes from rank `source`, as many as `content` has. As `send`."""
        tag = self._next(self._received, source, channel, channels)
        self._do(lambda gloo: gloo.recv([_tensor(content)], source, tag), timeout_s)

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

    def _do(self, post: Callable[[dist.ProcessGroup], dist.Work], timeout_s: float) -> None:
        try:
            post(self._transport()).wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise PeerLostError(f"lost a peer while waiting up to {timeout_s:.0f} s for a message ({reason})") from None


def _tensor(content: memoryview) -> torch.Tensor:
    return torch.frombuffer(content, dtype=torch.uint8)
