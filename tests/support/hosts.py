"""Two hosts on this machine: namespaces with a name, a network and a folder of their own, joined by a cable.

`two_hosts(folder)` gives labA (10.77.0.1) and labB (10.77.0.2). What lies under `folder / "local"` each of them has to
itself; everything else they share, as over a network file system. Needs no root where user namespaces are allowed;
where they are not, the test is skipped.
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
    """One of the two; `enter` is the prefix of a command that runs there."""

    name: str
    address: str
    enter: tuple[str, ...]

    def run(self, *command: str) -> str:
        """What a command says there; AssertionError if it fails."""
        done = subprocess.run([*self.enter, *command], capture_output=True, text=True, timeout=_WITHIN_S)
        assert done.returncode == 0, f"{self.name}: {command}: {done.stderr}"
        return done.stdout


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """labA and labB, as long as the block lasts."""
    if subprocess.run(["unshare", "-rmnu", "ip", "link", "add", "v0", "type", "veth"], capture_output=True).returncode:
        pytest.skip("no namespaces here, or no ip(8)")
    (folder / "local").mkdir()
    holders: list[subprocess.Popen[bytes]] = []
    try:
        _hold(holders, ["unshare", "-rmnu"], os.getpid())
        inside = ["nsenter", "-t", str(holders[0].pid), "-U", "--preserve-credentials"]
        _hold(holders, [*inside, "unshare", "-mnu"], holders[0].pid)
        hosts = []
        for number, (name, holder) in enumerate(zip(("labA", "labB"), holders, strict=True), start=1):
            enter = ("nsenter", "-t", str(holder.pid), "-U", "-m", "-n", "-u", "--preserve-credentials")
            hosts.append(Host(name, f"10.77.0.{number}", enter))
        hosts[0].run("ip", "link", "add", "cable", "type", "veth", "peer", "name", "other")
        hosts[0].run("ip", "link", "set", "other", "netns", str(holders[1].pid))
        hosts[1].run("ip", "link", "set", "other", "name", "cable")
        for host in hosts:
            host.run("hostname", host.name)
            host.run("mount", "-t", "tmpfs", "none", str(folder / "local"))
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "cable")
            host.run("ip", "link", "set", "cable", "up")
        yield hosts[0], hosts[1]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


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
