"""Whether each node reaches each other one as gloo will: at a port that the kernel chooses, not only at the head's.

Responsible for a door at which peers knock, for knocking at theirs, and for one sentence about each that stays shut.
Whoever knocks proves the run's key as on the control channel, so that an answer is that node's and no other program's.

The one idea: gloo connects every pair of ranks, at ports of the ephemeral range. A firewall that lets only the control
port pass looks like a healthy meeting and ends in a timeout that names nobody; a door in that range finds it before.
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
    """Another node, and its door."""

    host: str
    address: str
    port: int


class Doorstep:
    """Listens at `address` for the knocks of peers until `close`, in a thread of its own; each learns that it came.

    Raises AddressError for an address that is not this machine's.
    """

    def __init__(self, address: str, key: bytes, secret_file: Path) -> None:
        self._listener = Listener(address, 0, key=key, secret_file=secret_file)
        self.address, self.port = str(self._listener.host), int(self._listener.port)
        self._thread = threading.Thread(target=self._answer, name="doorstep", daemon=True)
        self._thread.start()

    @property
    def visitors(self) -> set[str]:
        """Addresses from which peers have knocked; complete once their `probe` has returned."""
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
                    # the knock was answered by the handshake
                    self._listener.accept(_TURN_S).close()

    def __enter__(self) -> Doorstep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def probe(peers: Sequence[Peer], key: bytes, *, secret_file: Path, timeout_s: float = 8.0) -> list[str]:
    """Knock at all doors at once; one sentence for each peer that is not reached, in the order of `peers`.

    Blocks up to `timeout_s` (for each 64 peers); a launcher that has to be stoppable calls it from a thread.
    """
    if not peers:
        return []
    with concurrent.futures.ThreadPoolExecutor(min(len(peers), _AT_ONCE), thread_name_prefix="knock") as pool:
        answers = pool.map(lambda peer: _knock(peer, key, secret_file, timeout_s), peers)
        return [sentence for sentence in answers if sentence is not None]


def _knock(peer: Peer, key: bytes, secret_file: Path, timeout_s: float) -> str | None:
    """None if the door opened, else why not."""
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
    "timeout": "no answer, what is sent there is dropped",
    "route": "no route leads there, or a firewall refuses",
}


def _remedy(peer: Peer, here: str) -> str:
    if is_loopback(peer.address) and peer.host != here:
        return (
            f"{peer.address} is an address that only {peer.host} itself reaches; let the nodes meet at an address of"
            " its network, or set GLOO_SOCKET_IFNAME there to the interface that leads to the others [link-blocked]"
        )
    return (
        f"the control connection works and this one does not, so a firewall on {peer.host} or between the two lets only"
        f" some ports pass; open TCP{_ports()} between the nodes, or set GLOO_SOCKET_IFNAME on {peer.host} to another"
        " interface [link-blocked]"
    )


def _ports() -> str:
    """The ports that the kernel gives out; those of a peer are hardly ever others."""
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, _PORT_RANGE.read_text().split())
        return f" ports {first}-{last}"
    return ""
