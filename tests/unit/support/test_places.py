"""The ports that tests give to their nodes: free, not the kernel's to give, and no other test run's."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from tests.support import places
from tests.support.places import PORTS_OF_A_RUN, free_port

ROOT = Path(__file__).resolve().parents[3]
TWO_PORTS = "from tests.support.places import free_port; print(free_port(), free_port())"


def test_a_port_comes_again_only_after_all_others_of_the_run() -> None:
    first = [free_port() for _ in range(PORTS_OF_A_RUN // 2)]
    assert len(set(first)) == len(first)


def test_a_port_at_which_somebody_listens_is_not_given() -> None:
    following = next(places._ports())
    with socket.create_server(("127.0.0.1", following)):
        for _ in range(PORTS_OF_A_RUN):
            assert free_port() != following


def test_two_runs_give_no_port_of_each_other() -> None:
    own = free_port() // PORTS_OF_A_RUN
    other = subprocess.run([sys.executable, "-c", TWO_PORTS], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert other.returncode == 0, other.stderr
    assert own not in {int(port) // PORTS_OF_A_RUN for port in other.stdout.split()}


def test_the_kernel_gives_none_of_them_to_who_names_none() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert first <= server.getsockname()[1] <= last
    assert not first <= free_port() <= last
