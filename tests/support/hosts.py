"""Hosts on this machine: namespaces, each with a name, a network and a folder, and a switch between them.

`two_hosts(folder)` gives labA (10.77.0.1) and labB (10.77.0.2), `some_hosts` any number, with slow cables if asked.
Files under `folder / "local"` and in `/dev/shm` are private to each host; everything else they share, as over a
network file system. The switch can stop forwarding: no host notices, since all cables stay plugged in. Needs no root
where user namespaces are allowed; where they are not, the test is skipped.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.trials import until

_SLEEP = ["sleep", "100000"]
_WITHIN_S = 10.0


@dataclass(frozen=True)
class Host:
    """One of them; `enter` is the prefix of a command that runs there."""

    name: str
    address: str
    enter: tuple[str, ...]
    switch: tuple[str, ...]  # the prefix of a command that runs in the switch

    def run(self, *command: str) -> str:
        """Output of a command there; AssertionError if it fails."""
        done = subprocess.run([*self.enter, *command], capture_output=True, text=True, timeout=_WITHIN_S)
        assert done.returncode == 0, f"{self.name}: {command}: {done.stderr}"
        return done.stdout

    def cut(self) -> None:
        """From now on nothing arrives that it sends or is sent, and no end of a connection notices."""
        self._port("0")  # disabled

    def mute(self, other: Host) -> None:
        """From now on it receives from `other`, but its packets to it go to an unused network card."""
        self.run("ip", "neigh", "replace", other.address, "lladdr", "02:00:00:00:00:99", "dev", "cable")

    def heal(self) -> None:
        """Restore the connection."""
        self._port("3")  # forwarding
        self.run("ip", "neigh", "flush", "dev", "cable", "nud", "permanent")

    def _port(self, state: str) -> None:
        command = [*self.switch, "bridge", "link", "set", "dev", self.name, "state", state]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WITHIN_S)
        assert done.returncode == 0, done.stderr


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """labA and labB, as long as the block lasts."""
    with some_hosts(folder, ("labA", "labB")) as (one, other):
        yield one, other


@contextmanager
def some_hosts(
    folder: Path, names: Sequence[str], *, mbit_per_s: float | None = None, mtu: int = 1500
) -> Iterator[tuple[Host, ...]]:
    """A host for each name, at 10.77.0.1 and the following, as long as the block lasts.

    `mbit_per_s` (10^6 bits) is what each cable carries in either direction; None: no limit. `mtu`: bytes of its largest
    packet.
    """
    if subprocess.run(["unshare", "-rmnu", "ip", "link", "add", "v0", "type", "veth"], capture_output=True).returncode:
        pytest.skip("no namespaces here, or no ip(8)")
    (folder / "local").mkdir()
    holders: list[subprocess.Popen[bytes]] = []
    try:
        _hold(holders, ["unshare", "-rmnu"], os.getpid())
        inside = ["nsenter", "-t", str(holders[0].pid), "-U", "--preserve-credentials"]
        for flags in [*["-mnu"] * (len(names) - 1), "-nu"]:
            _hold(holders, [*inside, "unshare", flags], holders[0].pid)
        *enters, switch = (
            ("nsenter", "-t", str(holder.pid), "-U", "--preserve-credentials", "-n", "-u") for holder in holders
        )
        hosts = tuple(
            Host(name, f"10.77.0.{number}", (*enter, "-m"), switch)
            for number, (name, enter) in enumerate(zip(names, enters, strict=True), start=1)
        )
        _wire([(host, holder.pid) for host, holder in zip(hosts, holders)], folder / "local", mbit_per_s, mtu)
        yield hosts
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _wire(hosts: Sequence[tuple[Host, int]], local: Path, mbit_per_s: float | None, mtu: int) -> None:
    """Give each host its name, its folder and its cable; the pids are of processes in them."""
    switch = Host("switch", "", hosts[0][0].switch, ())
    switch.run("ip", "link", "add", "switch", "type", "bridge")
    switch.run("ip", "link", "set", "switch", "up")
    for host, pid in hosts:
        host.run("hostname", host.name)
        host.run("mount", "-t", "tmpfs", "none", str(local))
        host.run("mount", "-t", "tmpfs", "none", "/dev/shm")
        host.run("ip", "link", "set", "lo", "up")
        ends = f"{host.name} mtu {mtu} type veth peer name cable mtu {mtu}".split()
        switch.run("ip", "link", "add", *ends)
        switch.run("ip", "link", "set", host.name, "master", "switch", "up")
        switch.run("ip", "link", "set", "cable", "netns", str(pid))
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "cable")
        host.run("ip", "link", "set", "cable", "up")
        if mbit_per_s is not None:
            # what leaves an end is limited there: the way up at the host, the way down at the switch. With a burst
            # below 64 kB, the most that the kernel hands over at once, a fast cable would keep a core busy
            for end, device in ((host, "cable"), (switch, host.name)):
                limit = f"tbf rate {mbit_per_s:g}mbit burst {max(32, mbit_per_s / 8):g}kb latency 400ms".split()
                end.run("tc", "qdisc", "add", "dev", device, "root", *limit)


def _hold(holders: list[subprocess.Popen[bytes]], prefix: Sequence[str], outside: int) -> None:
    """A process that keeps new namespaces alive; returns once it is in them."""
    holder = subprocess.Popen([*prefix, *_SLEEP], stdin=subprocess.DEVNULL)
    holders.append(holder)
    until(
        lambda: _namespace(holder.pid) != _namespace(outside) and _is_asleep(holder.pid),
        "namespaces",
        within_s=_WITHIN_S,
    )


def _namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/uts")


def _is_asleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")
