"""Heartbeat: a counter in a file that shows launchers on other machines that the head of an attempt is alive.

Writes and reads the counter. `leader_election` decides what an unchanged counter means.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from hetseq.cluster.rendezvous.file_store import load
from hetseq.cluster.rendezvous.leader_election import BEAT_S
from hetseq.run_directory import open_private
from hetseq.system.files import write_all

logger = logging.getLogger(__name__)

_MAC_BYTES = 32
_COUNTER_BYTES = 8


class Heart:
    """The heartbeat counter of a head; the head's launcher calls `beat` in its loop."""

    def __init__(self, path: Path, key: bytes, *, now: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._key = key
        self._now = now
        self._count = 0
        self._next_s = -1.0
        self._written_s = now()
        self._has_warned = False

    def beat(self) -> None:
        """Increment the counter at most once a second; call this more often. Warns only once if the write fails.

        The file is rewritten in place, not renamed: an NFS client that reopens the same file sees the new content at
        once, but may cache for a minute which file has that name.
        """
        if self._count and self._now() < self._next_s:
            return
        self._count += 1
        self._next_s = self._now() + BEAT_S
        counter = self._count.to_bytes(_COUNTER_BYTES, "big")
        try:
            is_new = self._count == 1
            descriptor = open_private(self.path, os.O_WRONLY | (os.O_CREAT | os.O_EXCL if is_new else 0))
            try:
                write_all(descriptor, counter + _pulse_mac(self._key, counter))
            finally:
                os.close(descriptor)
            self._written_s = self._now()
        except OSError as error:
            if not self._has_warned:
                logger.warning("cannot write %s (%s): other nodes may consider this run dead", self.path, error)
            self._has_warned = True

    @property
    def silence_s(self) -> float:
        """Seconds since the last successful increment; valid even while `beat` hangs in another thread."""
        return self._now() - self._written_s


def read_pulse(path: Path, key: bytes) -> int | None:
    """The heartbeat counter in a file; None if it does not exist yet or is just being written."""
    raw = load(path, limit_bytes=_COUNTER_BYTES + _MAC_BYTES)
    if raw is None:
        return None
    counter, mac = raw[:_COUNTER_BYTES], raw[_COUNTER_BYTES:]
    return int.from_bytes(counter, "big") if hmac.compare_digest(mac, _pulse_mac(key, counter)) else None


def _pulse_mac(key: bytes, counter: bytes) -> bytes:
    return hmac.new(key, b"hetseq pulse\0" + counter, hashlib.sha256).digest()
