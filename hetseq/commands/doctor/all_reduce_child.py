"""One node's rank in the doctors' all-reduce, in its own process because gloo may abort the process it runs in.

Meets the other ranks as in a run, and prints a line of JSON after each piece of work. It judges nothing, and does not
outlive its doctor.

The one idea: it is to its doctor what a worker is to its launcher. The store through which ranks meet, and the news
that a rank is lost, arrive on stdin; its own entries to the store leave on stdout.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

import torch

from hetseq.comm.group import Group, GroupMeeting, connect, gather_floats
from hetseq.commands.doctor.network_results import SIZES
from hetseq.errors import HetSeqError, PeerLostError, RendezvousError
from hetseq.system.processes import die_with_pipe

CONNECT_S, DEADLINE_S = 30.0, 20.0
_LONGEST_S = 8.0  # a size that would take longer is left out
_ENOUGH_S, _MOST = 1.0, 9  # per size: total seconds, or repetitions
_PART_S = 600.0  # the doctor asks sooner, or ends

Record = dict[str, Any]
Say = Callable[..., None]


class ChildPipe:
    """The pipes to the doctor, which carry the store of the ranks; the group is severed when a rank is lost."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._source, self._sink = source, sink
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._is_gone = False
        self._parts: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self.group: Group | None = None
        threading.Thread(target=self._listen, name="doctor-line", daemon=True).start()

    def say(self, kind: str, **facts: object) -> None:
        """Send a record to the doctor."""
        with self._sending:
            self._sink.write(json.dumps({"kind": kind, **facts}).encode() + b"\n")
            self._sink.flush()

    def part(self) -> Record:
        """Wait until the doctor assigns this rank its part, and return it."""
        return self._parts.get(timeout=_PART_S)

    def set(self, key: str, value: bytes) -> None:
        self._keep(key, value)
        self.say("set", key=key, value=base64.b64encode(value).decode())

    def get(self, key: str, timeout_s: float) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._is_gone, timeout_s)
            if key in self._values:
                return self._values[key]
        self.check()
        raise RendezvousError(f"waited {timeout_s:.0f} s for another node")

    def check(self) -> None:
        if self._is_gone:
            raise PeerLostError("another node was lost")

    def begin(self, group: Group) -> None:
        """Sever this group as soon as a rank is lost."""
        self.group = group
        if self._is_gone:
            group.sever()

    def _keep(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def _listen(self) -> None:
        for line in iter(self._source.readline, b""):
            record: Record = json.loads(line)
            if record["kind"] == "value":
                self._keep(record["key"], base64.b64decode(record["value"]))
            elif record["kind"] == "gone":
                self._lose()
            else:
                self._parts.put(record)

    def _lose(self) -> None:
        with self._changed:
            self._is_gone = True
            self._changed.notify_all()
        if self.group is not None:
            self.group.sever()


def main(words: list[str]) -> None:
    """Take part once, then exit. `words[0]` is the descriptor of a pipe whose other end the doctor holds."""
    die_with_pipe(int(words[0]))
    line = ChildPipe(sys.stdin.buffer, sys.stdout.buffer)
    line.say("ready")
    try:
        take_part(line.part(), line)
    except HetSeqError as error:
        line.say("trouble", trouble=str(error), is_secondary=True)
    except Exception as error:
        line.say("trouble", trouble=f"{type(error).__name__}: {error}".partition("\n")[0], is_secondary=False)
    else:
        line.say("end")
    os._exit(0)  # transport threads that still wait for a peer would abort a normal exit


def take_part(part: Record, line: ChildPipe) -> None:
    """Meet the other ranks and measure. Raises PeerLostError and RendezvousError if another rank may be at fault."""
    meeting = GroupMeeting(line, part["name"], bytes.fromhex(part["key"]), part["host"], tuple(part["sources"]))
    group = connect(rank=part["rank"], world_size=part["world_size"], meeting=meeting, timeout_s=CONNECT_S)
    group.deadline_s = DEADLINE_S
    line.begin(group)
    line.say("met")
    measure(group, torch.device(part["device"]), line.say)


def measure(group: Group, device: torch.device, say: Say, sizes: tuple[int, ...] = SIZES) -> None:
    """Report the median seconds of an all-reduce of each size; every rank calls it and reports the same numbers.

    A size that would take too long, judging by the last one, is left out, and so are larger ones.
    """
    per_byte_s = 0.0
    for size in sizes:
        if size * per_byte_s > _LONGEST_S:
            return
        tensor = group.zeros(size // 4, torch.float32, device)
        _timed(group, tensor, say)  # warm-up: touches the memory and opens the connections
        times: list[float] = []
        while not times or (sum(times) < _ENOUGH_S and len(times) < _MOST):
            times.append(_timed(group, tensor, say))
        group.release(tensor)
        per_byte_s = statistics.median(times) / size
        say("measured", bytes=size, seconds=statistics.median(times))


def _timed(group: Group, tensor: torch.Tensor, say: Say) -> float:
    """Seconds of one all-reduce on the slowest rank: the same number on every rank."""
    gather_floats(group, [0.0])  # so that all ranks begin together
    begin = time.perf_counter()
    group.all_reduce_sum(tensor).wait()
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)  # sync: the sum is back on the device
    slowest_s = float(gather_floats(group, [time.perf_counter() - begin]).max())
    say("at work")
    return slowest_s


if __name__ == "__main__":
    main(sys.argv[1:])
