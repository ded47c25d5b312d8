"""Network interfaces of this machine, and the address that it announces to other nodes.

Asks the kernel, and explains in words why an interface named by the user cannot be used. It sends no packets and asks
no name server: the kernel's routing table knows which local address the head will see, while the host's own name often
does not (Debian maps it to 127.0.1.1).
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import ipaddress
import logging
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hetseq.cluster.rendezvous.sockets import AddressError, UnreachableError

logger = logging.getLogger(__name__)

#: the environment variable that gloo reads; NCCL has a similar one
VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFCONF, _IFREQ_BYTES, _NAME_BYTES = 0x8912, 40, 16
#: addresses reserved for documentation (RFC 5737, RFC 3849): the route to them is the default route
_OUTSIDE = ("192.0.2.1", "2001:db8::1")


@dataclass(frozen=True)
class Interface:
    """One address of one interface; an interface with two addresses is listed twice."""

    name: str
    address: str


def interfaces() -> list[Interface]:
    """The addresses of this machine, IPv4 first, without IPv6 link-local ones; empty if the kernel lists none."""
    return [*_with_ipv4(), *_with_ipv6()]


def is_loopback(address: str) -> bool:
    """Whether a numeric address is loopback, so that only this machine reaches it; False for a name."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def route_address(host: str, port: int = 9) -> str:
    """The local address on the route to `host`, an address or a name; sends nothing. Raises UnreachableError."""
    here = socket.gethostname()
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise UnreachableError(
            f"{host} is not known on {here} ({error.strerror or error}): use its IP address [head-unknown]",
            reason="name",
        ) from error
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect(address)  # on a datagram socket this only looks up the route
            return str(asking.getsockname()[0])
    except OSError as error:
        raise UnreachableError(f"{here} has no route to {host}: {error.strerror or error}", reason="route") from error


def outward_address() -> str:
    """The address that other machines most likely reach: on the default route, else any; 127.0.0.1 if there is none."""
    for outside in _OUTSIDE:
        with contextlib.suppress(UnreachableError):
            return route_address(outside)
    return next((one.address for one in interfaces() if not is_loopback(one.address)), "127.0.0.1")


def chosen_address(default: str, wish: str | None = None, *, tell: Callable[[str], None] = logger.warning) -> str:
    """The address of the interface named by `wish` (the value of GLOO_SOCKET_IFNAME), else `default`.

    `default` is the address on the route to the head. Gloo does not support lists in NCCL's style (`^lo,docker0`): then
    `default` is used, and `tell` says so. The first of several names counts. Raises AddressError for an unknown name.
    """
    names = [name.strip() for name in (wish or "").split(",") if name.strip()]
    if wish is None or not names:
        return default
    found = interfaces()
    if names[0].startswith("^"):
        way = next((f"{one.name} ({default})" for one in found if one.address == default), default)
        tell(
            f"{VARIABLE} {wish}: it takes one name, and only NCCL supports lists with ^; {way} is used instead"
            " [interface-list]"
        )
        return default
    for name in names:
        if name not in (one.name for one in found):
            raise AddressError(_unknown(name, found, default))
    address = _address_of(names[0], found, default)
    if len(names) > 1:
        tell(f"{VARIABLE} {wish}: HetSeq uses one interface, {names[0]} ({address})")
    return address


def _address_of(name: str, found: list[Interface], default: str) -> str:
    """The default address if the interface has it, else one of the same IP version, else the first."""
    addresses = [one.address for one in found if one.name == name]
    return min(addresses, key=lambda address: (address != default, (":" in address) != (":" in default)))


def _unknown(name: str, found: list[Interface], default: str) -> str:
    listed = ", ".join(
        f"{one.name} {one.address}" + (" (the way to the head)" if one.address == default else "") for one in found
    )
    way = next((one.name for one in found if one.address == default), "")
    remedy = f"set it to {way}, or leave it out" if way else "set it to one of these, or leave it out"
    return (
        f"{VARIABLE} {name}: {socket.gethostname()} has no such interface with an address. It has {listed}: {remedy}"
        " [interface-unknown]"
    )


def _with_ipv4() -> list[Interface]:
    buffer = array.array("B", bytes(_IFREQ_BYTES * 256))
    request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            size, _ = struct.unpack("iP", fcntl.ioctl(asking.fileno(), _SIOCGIFCONF, request))
    except OSError:
        return []
    rows = [buffer[at : at + _IFREQ_BYTES].tobytes() for at in range(0, size, _IFREQ_BYTES)]
    # struct ifreq: the name, then a sockaddr_in (family, port, address); for an alias such as eth0:1 gloo expects eth0
    return [
        Interface(row[:_NAME_BYTES].split(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(row[20:24]))
        for row in rows
    ]


def _with_ipv6() -> list[Interface]:
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, _, _, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if not address.is_link_local:  # such an address needs a zone, which other machines do not know
                found.append(Interface(name, str(address)))
    return found
