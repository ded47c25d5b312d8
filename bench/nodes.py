"""Nodes that train together on this machine: each is a network namespace with a cable of a given rate.

Responsible for the namespaces, for the launchers of `hetseq train` in them, for the rows of their steps by the clock of
the script, and for their end. It judges nothing. Root or user namespaces, ip(8) and tc(8) are needed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recover import end
from resident import tree

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PATIENCE_S = 600.0
PORT = 29411
HEADER_BYTES = 14 + 20 + 32  # of a packet: Ethernet, IPv4, and TCP with its timestamps


@dataclass(frozen=True)
class Seen:
    """A step of a run: when this script saw its row, and the row."""

    at_s: float
    row: Mapping[str, Any]


@dataclass
class Run:
    """A run in progress: its launchers by the number of the node, and the rows that were seen."""

    folder: Path
    launchers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    _read: int = 0

    def look(self) -> None:
        """Take the rows that have appeared. Raises SystemExit with its last words if a launcher has ended."""
        path, now_s = self.folder / "metrics.jsonl", time.monotonic()
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                *lines, torn = file.read().split(b"\n")
                self._read = file.tell() - len(torn)
            rows = (json.loads(line) for line in lines)
            self.seen += [Seen(now_s, row) for row in rows if "loss" in row]
        for number, launcher in self.launchers.items():
            if launcher.poll() is not None:
                said = self.folder.with_suffix(f".{number}.txt").read_text(errors="replace")[-3000:]
                raise SystemExit(f"node {number} of {self.folder.name} ended with {launcher.returncode}:\n{said}")

    def steps_of(self, world_size: int) -> int:
        """How many of the newest steps in a row had so many ranks."""
        count = 0
        for seen in reversed(self.seen):
            if seen.row["world_size"] != world_size:
                break
            count += 1
        return count


@dataclass
class Lab:
    """The hosts, and the command line of a training by the numbers of the nodes that take part in it.

    `throttles` and `variables`, more of its environment, are by node.
    """

    hosts: Sequence[Any]
    throttles: Sequence[float]
    folder: Path
    variables: Sequence[Mapping[str, str]] = ()
    running: list[Run] = field(default_factory=list)

    def begin(self, name: str, words: Sequence[str], nodes: Sequence[int]) -> Run:
        """Start a training on these nodes together."""
        run = Run(self.folder / name)
        self.running.append(run)
        for number in nodes:
            self.start(run, words, number, is_alone=len(nodes) == 1)
        return run

    def start(self, run: Run, words: Sequence[str], number: int, *, is_alone: bool = False) -> None:
        """Start one node of a training: for the first time, or again."""
        host, cores = self.hosts[number], sorted(os.sched_getaffinity(0))
        throttles = [self.throttles[number]] if is_alone else self.throttles
        place = [] if is_alone else [
            "--distributed-init-method", f"tcp://{self.hosts[0].address}:{PORT}", "--distributed-world-size",
            str(len(self.hosts)), "--distributed-rank", str(number),
        ]  # fmt: skip
        core = str(cores[min(number, len(cores) - 1)])
        command = [
            *host.enter, "taskset", "-c", core, sys.executable, "-m", "hetseq", "train", *words, "--ranks", "1",
            "--throttle", ",".join(f"{at}:{factor:g}" for at, factor in enumerate(throttles)), *place,
            "--save-dir", str(run.folder),
        ]  # fmt: skip
        with run.folder.with_suffix(f".{number}.txt").open("ab") as said:
            run.launchers[number] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=self.folder,
                env={**environment(self.folder), **(self.variables[number] if self.variables else {})},
                start_new_session=True,
            )  # fmt: skip

    def finish(self, run: Run) -> None:
        """End a training; a checkpoint of its last step is saved if its words ask for one."""
        launchers = list(run.launchers.values())
        run.launchers = {}
        for launcher in launchers:
            launcher.terminate()
        for launcher in launchers:
            end(launcher)
        self.running.remove(run)

    def cable_bytes(self) -> list[tuple[int, int]]:
        """What each node has received by its cable so far, and what it has sent, all protocols included."""
        return [(received, sent) for received, _, sent, _ in self._cable_counts()]

    def payload_bytes(self) -> list[tuple[int, int]]:
        """What each node has received by its cable so far, and what it has sent, without the headers of packets."""
        return [
            (received - packets * HEADER_BYTES, sent - sent_packets * HEADER_BYTES)
            for received, packets, sent, sent_packets in self._cable_counts()
        ]

    def _cable_counts(self) -> list[tuple[int, int, int, int]]:
        """Of each node: bytes and packets received by its cable so far, bytes and packets sent."""
        # of a process in the namespace: read at once, where a command inside would take tens of milliseconds
        pids = [host.enter[host.enter.index("-t") + 1] for host in self.hosts]
        tables = [Path(f"/proc/{pid}/net/dev").read_text() for pid in pids]
        fields = [line.split() for table in tables for line in table.splitlines() if "cable:" in line]
        return [(int(line[1]), int(line[2]), int(line[9]), int(line[10])) for line in fields]

    def sent_bytes(self) -> int:
        """What has left all nodes by their cables so far."""
        return sum(sent for _, sent in self.cable_bytes())


def environment(folder: Path) -> dict[str, str]:
    """Of a node: one thread, a home folder for the secret, and no interface prescribed."""
    found = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    found.pop("GLOO_SOCKET_IFNAME", None)
    found["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return found


@contextmanager
def lab_of(
    folder: Path, throttles: Sequence[float], mbit_per_s: float, variables: Sequence[Mapping[str, str]] = (),
    *, mtu: int = 1500,
) -> Iterator[Lab]:  # fmt: skip
    """Namespaces and cables; whatever still runs in them is ended. `mtu`: bytes of a cable's largest packet."""
    import pytest

    from tests.support.hosts import some_hosts

    names = [f"lab{chr(ord('A') + number)}" for number in range(len(throttles))]
    try:
        with some_hosts(folder, names, mbit_per_s=mbit_per_s, mtu=mtu) as hosts:
            lab = Lab(hosts, throttles, folder, variables)
            try:
                yield lab
            finally:
                for run in list(lab.running):
                    lab.finish(run)
    except pytest.skip.Exception as reason:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {reason}") from None


def await_(runs: Sequence[Run], look: Callable[[], bool], what: str) -> None:
    """Return once `look` is true; end the script in words if a node ends before, or it takes too long."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        for run in runs:
            run.look()
        if look():
            return
        if time.monotonic() > deadline_s:
            said = "\n".join(path.read_text(errors="replace")[-1500:] for path in runs[0].folder.parent.glob("*.txt"))
            raise SystemExit(f"not within {PATIENCE_S:g} s: {what}\n{said}")
        time.sleep(0.005)


def cpu_seconds_of_others() -> float:
    """CPU seconds of this machine so far, without this script and the processes below it that live now.

    So a difference is right where they all live from the first look to the second.
    """
    ticks = os.sysconf("SC_CLK_TCK")
    ours = 0
    for pid in tree(os.getpid()):
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ours += int(fields[11]) + int(fields[12])
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    user, nice, system, _idle, _wait, *interrupts = map(int, words)
    return (user + nice + system + sum(interrupts) - ours) / ticks
