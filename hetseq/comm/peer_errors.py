"""What a failed transfer means: a lost peer, unless this rank's own device or memory has failed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hetseq.errors import PeerLostError
from hetseq.system import rank_phase as whereabouts
from hetseq.system.device_memory import is_exhausted


class Work:
    """A pending collective as `Pending`, with the errors of `PeerErrors`."""

    def __init__(self, wait: Callable[[], None], what: str, deadline_s: float) -> None:
        self._wait, self._what, self._deadline_s = wait, what, deadline_s

    def wait(self) -> None:
        with PeerErrors(self._what, self._deadline_s):
            self._wait()


class PeerErrors:
    """Turns errors in the block into PeerLostError, unless this rank's own device or memory has failed."""

    def __init__(self, what: str, deadline_s: float) -> None:
        self._what, self._deadline_s = what, deadline_s

    def __enter__(self) -> None:
        whereabouts.wait_for_others(True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        whereabouts.wait_for_others(False)
        if not isinstance(error, RuntimeError):
            return
        if is_exhausted(error):
            # the frames are dropped: they would keep the group's sockets open, and peers would wait
            try:
                raise error.with_traceback(None)
            finally:  # or the error would keep this frame, which keeps the error and all its frames
                del error, trace
        if isinstance(error, torch.AcceleratorError):
            return  # this process ends, and its frames must not be released before (gpu.never_release)
        reason = str(error).splitlines()[0]
        raise PeerLostError(
            f"lost a peer while waiting up to {self._deadline_s:.0f} s for {self._what} ({reason})"
        ) from None
