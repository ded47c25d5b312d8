"""Walls before listening sockets that somebody else's code has opened: who may connect, decided by the kernel.

gloo opens a port in every rank and never closes it: it takes in whoever comes, keeps each stranger's descriptor for the
life of the rank, and aborts the process when there are no more descriptors. It offers no way to stop that.

The one idea: a socket filter of one instruction before a listening socket drops whatever is sent to it, as a firewall
does, and neither gloo nor the connections that exist notice. It needs no privilege, and Linux alone has it; elsewhere
these functions say that there is no wall.
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
_SOURCE = {4: 12, 6: 8}  # where the sender's address stands in the header
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
    """From now on let only these addresses connect to a listening socket, or nobody; connections that exist live on.

    Whether there is such a wall: other kernels have none, and this one takes several hundred addresses.
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
    """Take the wall from the connections that came in through it at `port`: they inherit it, and every packet pays."""
    for _, connection in _sockets():
        with connection, contextlib.suppress(OSError):  # some have none
            if _name(connection)[1] == port and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def cut(doors: Collection[tuple[str, int]]) -> bool:
    """Shut the connections of this process that came in at one of these doors (address, port), or that lead to one.

    Whoever reads from them, here or at the other end, sees their end. Whether this can be done here.
    """
    for _, connection in _sockets():
        with connection, contextlib.suppress(OSError):
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                continue
            if _name(connection) in doors or _name(connection, of_peer=True) in doors:
                connection.shutdown(socket.SHUT_RDWR)
    return sys.platform.startswith("linux")


def _program(addresses: Collection[str]) -> bytes:
    """A filter that passes what one of the addresses has sent; of one socket all are of one kind."""
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
