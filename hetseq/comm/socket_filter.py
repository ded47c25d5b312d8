"""Socket filters for listening sockets that other code has opened: the kernel decides who may connect.

gloo opens a port in every rank and never closes it: it accepts every connection, keeps each stranger's descriptor for
the life of the rank, and aborts the process when it runs out of descriptors. It has no option to prevent that.

The one idea: a small socket filter on a listening socket drops unwanted packets, as a firewall does, unnoticed by gloo
and by existing connections. It needs no privilege, and exists on Linux only; elsewhere these functions return that
there is no filter.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

_OPEN_FILES = Path("/proc/self/fd")
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h
# linux/filter.h: struct sock_filter {code, jump if true, jump if false, k}, and the start of the IP header
_INSTRUCTION = struct.Struct("=HBBI")
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_IP_HEADER = 0xFFF00000
_SOURCE = {4: 12, 6: 8}  # offset of the sender's address in the header
_DROP, _PASS = 0, 0xFFFFFFFF
_LONGEST_FILTER = 4096  # BPF_MAXINSNS


def listening() -> dict[int, tuple[str, int]]:
    """Descriptors of this process that are listening TCP sockets, each with its address and port."""
    found = {}
    for descriptor, open_socket in _sockets():
        with open_socket, contextlib.suppress(OSError):
            if open_socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[descriptor] = _name(open_socket)
    return found


def admit(descriptor: int, addresses: Collection[str]) -> bool:
    """From now on let only these addresses connect to a listening socket (none: no one); open connections stay.

    Returns whether the filter is set: other kernels have none, and this one takes several hundred addresses.
    """
    if not sys.platform.startswith("linux"):
        return False
    program = _program(addresses)
    if len(program) > _LONGEST_FILTER * _INSTRUCTION.size:
        return False
    kept = ctypes.create_string_buffer(program, len(program))
    pointer = struct.pack("HP", len(program) // _INSTRUCTION.size, ctypes.addressof(kept))
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)
        except OSError:
            return False
    return True


def free_connections(port: int) -> None:
    """Remove the filter from the connections accepted at `port`: they inherit it, and it would slow every packet."""
    for _, connection in _sockets():
        with connection, contextlib.suppress(OSError):  # some have no filter
            if _name(connection)[1] == port and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def cut(doors: Collection[tuple[str, int]]) -> bool:
    """Shut the connections of this process that came in at one of these doors (address, port), or that lead to one.

    Readers at either end then see the end of the connection. Returns whether this is possible here.
    """
    for _, connection in _sockets():
        with connection, contextlib.suppress(OSError):
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            if _name(connection) in doors or _name(connection, of_peer=True) in doors:
                connection.shutdown(socket.SHUT_RDWR)
    return sys.platform.startswith("linux")


def _program(addresses: Collection[str]) -> bytes:
    """A filter that passes packets from these addresses; all addresses of one socket are of one IP version."""
    program = []
    for address in map(ipaddress.ip_address, sorted(set(addresses))):
        words = [int.from_bytes(address.packed[at : at + 4], "big") for at in range(0, len(address.packed), 4)]
        for position, word in enumerate(words):
            past = 2 * (len(words) - position) - 1  # to the next address: over the other words and the return
            program.append((_LOAD_WORD, 0, 0, _IP_HEADER + _SOURCE[address.version] + 4 * position))
            program.append((_JUMP_IF_EQUAL, 0, past, word))
        program.append((_RETURN, 0, 0, _PASS))
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in [*program, (_RETURN, 0, 0, _DROP)])


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """TCP sockets of this process: the descriptor, and another handle on it for the caller to close."""
    if not sys.platform.startswith("linux"):
        return
    for link in list(_OPEN_FILES.iterdir()):
        try:
            if not os.readlink(link).startswith("socket:"):
                continue
            handle = socket.socket(fileno=os.dup(int(link.name)))
        except OSError:  # just closed
            continue
        if handle.family in (socket.AF_INET, socket.AF_INET6) and handle.type == socket.SOCK_STREAM:
            yield int(link.name), handle
        else:
            handle.close()


def _name(open_socket: socket.socket, *, of_peer: bool = False) -> tuple[str, int]:
    address, port = (open_socket.getpeername() if of_peer else open_socket.getsockname())[:2]
    return str(address), int(port)
