"""Connectivity check: whether every node can reach every other one at an ephemeral port, as gloo will need to.

Opens a port that peers probe, probes theirs, and returns one sentence for each peer that cannot be reached. Both ends
prove the run's key as on the control channel, so only that node can answer, and no other program.

The one idea: gloo connects every pair of ranks at ports of the ephemeral range. With a firewall that passes only the
control port, the rendezvous succeeds and training ends in a timeout that names no node. A probe in that range detects
the firewall first.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetseq.cluster.rendezvous.channel import ChannelClosed, ChannelTimeout, Listener, connect
from hetseq.cluster.rendezvous.interfaces import is_loopback
from hetseq.cluster.rendezvous.sockets import UnreachableError, host_text
from hetseq.errors import RendezvousError

_AT_ONCE = 64
_TURN_S = 60.0
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True)
class Peer:
    """Another node, and the port to probe."""

    host: str
    address: str
    port: int


class Doorstep:
    """Listens at `address` for the probes of peers until `close`, in its own thread, and answers each.

    Raises AddressError if the address is not this machine's.
    """

    def __init__(self, address: str, key: bytes, secret_file: Path) -> None:
        self._listener = Listener(address, 0, key=key, secret_file=secret_file)
        self.address, self.port = str(self._listener.host), int(self._listener.port)
        self._thread = threading.Thread(target=self._answer, name="doorstep", daemon=True)
        self._thread.start()

    @property
    def visitors(self) -> set[str]:
        """Addresses from which peers have probed; complete once their `probe` has returned."""
        return self._listener.admitted_from

    def close(self) -> None:
        """Stop listening; may be called twice."""
        if self._thread.is_alive():
            self._listener.close()
            self._thread.join()

    def _answer(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while True:
                with contextlib.suppress(ChannelTimeout):
                    # the handshake has answered the probe
                    self._listener.accept(_TURN_S).close()

    def __enter__(self) -> Doorstep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def probe(peers: Sequence[Peer], key: bytes, *, secret_file: Path, timeout_s: float = 8.0) -> list[str]:
    """Probe all peers at once; returns one sentence for each unreachable peer, in the order of `peers`.

    Blocks up to `timeout_s` per 64 peers; a launcher that must stay interruptible calls it from a thread.
    """
    if not peers:
        return []
    with concurrent.futures.ThreadPoolExecutor(min(len(peers), _AT_ONCE), thread_name_prefix="knock") as pool:
        answers = pool.map(lambda peer: _knock(peer, key, secret_file, timeout_s), peers)
        return [sentence for sentence in answers if sentence is not None]


def _knock(peer: Peer, key: bytes, secret_file: Path, timeout_s: float) -> str | None:
    """None if the peer answered, else why not."""
    here = socket.gethostname()
    way = f"{here} cannot reach {peer.host} at {host_text(peer.address)}:{peer.port}"
    try:
        connect(peer.address, peer.port, key, deadline=time.monotonic() + timeout_s, secret_file=secret_file).close()
        return None
    except UnreachableError as error:
        return f"{way} ({_CAUSES.get(error.reason, str(error))}): {_remedy(peer, here)}"
    except RendezvousError as error:
        return f"{way}, where its launcher listens: {error}"


_CAUSES = {
    "refused": "connection refused, although its launcher listens there",
    "timeout": "no answer, packets to it are dropped",
    "route": "no route leads there, or a firewall refuses",
}


def _remedy(peer: Peer, here: str) -> str:
    if is_loopback(peer.address) and peer.host != here:
        return (
            f"only {peer.host} itself reaches {peer.address}; let the nodes meet at an address of its network, or set"
            " GLOO_SOCKET_IFNAME there to the interface that leads to the others [link-blocked]"
        )
    return (
        f"the control connection works and this one does not, so a firewall on {peer.host} or between the two lets only"
        f" some ports pass; open TCP{_ports()} between the nodes, or set GLOO_SOCKET_IFNAME on {peer.host} to another"
        " interface [link-blocked]"
    )


def _ports() -> str:
    """The ephemeral port range of this node; a peer rarely has another one."""
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, _PORT_RANGE.read_text().split())
        return f" ports {first}-{last}"
    return ""
