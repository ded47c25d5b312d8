"""A worker's answer to the first SIGTERM, SIGINT or SIGUSR1: it ends after its step."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from hetseq.cluster.membership.step_commit import Wish
from hetseq.launch.launcher_link import LauncherLink, NoLauncher
from hetseq.system.processes import ECHO_S, STOP_SIGNALS


class StopRequest:
    """Set by the first SIGTERM, SIGINT or SIGUSR1. The launcher, if there is one, handles a second signal."""

    def __init__(self, *, has_launcher: bool = True) -> None:
        self.is_set = False
        self._has_launcher = has_launcher
        self._first_s = 0.0
        self._has_told = False

    def install(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # the fork server blocks them, see `warm_forkserver`

    def wish(self, line: LauncherLink | NoLauncher) -> Wish:
        """The wish of this rank. Also tells the launcher, which knows whether other ranks were asked to stop too."""
        if isinstance(line, NoLauncher):
            return Wish.LEAVE if self.is_set else Wish.NONE
        if self.is_set and not self._has_told:
            self._has_told = True
            line.send("leave")
        return line.wish()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_set and not self._has_launcher and time.monotonic() - self._first_s > ECHO_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._first_s = self._first_s or time.monotonic()
        self.is_set = True
