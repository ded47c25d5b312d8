"""The connections of `hetseq ssh` to its hosts: lines of JSON to a host, lines of output back, and exit codes.

Uses the user's own `ssh`, which knows their keys and jump hosts. It knows no message of the programs on the hosts.

The one idea: one loop serves all hosts, in both directions, so that a host that hangs delays no other host.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shlex
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hetseq.errors import EXIT_FAILED, EXIT_USAGE, ConfigError

#: the exit code of ssh itself
SSH_FAILED = 255
_SHELL_FAILED = (126, 127)  # codes of a shell that cannot start a program
_HOST = re.compile(r"(?P<name>(?:[\w.-]+@)?(?:[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:]+\]))(?::(?P<count>\d+))?")
_LOOK_S = 0.5
_HANG_UP_S = 5.0  # for ssh to end after its pipes are closed
_CONNECT_S = 20  # ConnectTimeout of ssh
_PIECE = 65536


def hosts_of(text: str) -> tuple[tuple[str, int | None], ...]:
    """The hosts of `--hosts` with their workers. Raises ConfigError."""
    hosts = tuple(_host(word) for word in text.split(","))
    if len({name for name, _ in hosts}) < len(hosts):
        raise ConfigError(f"--hosts {text} names a host twice: give it once, with all its workers")
    return hosts


def _host(text: str) -> tuple[str, int | None]:
    found = _HOST.fullmatch(text)
    if found is None or found["count"] == "0":
        raise ConfigError(f"--hosts: {text!r} is not a host; expected NAME, USER@NAME or NAME:WORKERS, such as labA:2")
    return found["name"], int(found["count"]) if found["count"] else None


def ssh_words(ssh: Sequence[str], name: str, steps: Sequence[str]) -> list[str]:
    """The command that runs these shell commands on a host, each if the one before has succeeded."""
    # sh, because the user's login shell there may be a different one
    remote = f"exec sh -c {shlex.quote(' && '.join(steps))}"
    flags = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", "-o", "ServerAliveInterval=15"]
    return [*ssh, *flags, name.strip("[]"), remote]


def shell_path(path: str) -> str:
    """A path for a shell of the host; a leading ~/ is the home there."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def trial(ssh: Sequence[str], name: str) -> str:
    """A command that tests ssh itself."""
    return shlex.join([*ssh, "-o", "BatchMode=yes", name, "true"])


def unreachable(ssh: Sequence[str], name: str) -> str:
    """The remedy for a host to which ssh does not connect."""
    return (
        f"`{trial(ssh, name)}` must work without a prompt: check the name, that the machine is on, and your key there"
    )


def own_code(code: int) -> int:
    """The exit code for a host that ended with `code`: ssh and the shell have codes that mean nothing in HetSeq."""
    return EXIT_FAILED if code == SSH_FAILED else EXIT_USAGE if code in _SHELL_FAILED else code


class Connection:
    """One host: its connection, the facts it has reported, and its exit code."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.facts: dict[str, Any] | None = None
        self.code: int | None = None
        self.last_words = ""  # on standard error
        self.rest = {"out": b"", "err": b""}
        self.unsent = b""
        try:
            # its own session: this command forwards Ctrl-C itself, once
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"--ssh {command[0]} cannot be started: {error.strerror}") from error
        assert self.process.stdin is not None
        os.set_blocking(self.process.stdin.fileno(), False)


class Connections:
    """The hosts of one command. `hear(host, kind, line)` gets each line of output, of kind `out` or `err`."""

    def __init__(self, bell: int, hear: Callable[[Connection, str, str], None]) -> None:
        self.hosts: list[Connection] = []
        self._bell, self._hear = bell, hear
        self._selector = selectors.DefaultSelector()
        self._selector.register(bell, selectors.EVENT_READ)

    def open(self, name: str, command: Sequence[str]) -> Connection:
        """Start the connection to a host. Raises ConfigError if the command cannot be started."""
        host = Connection(name, command)
        self.hosts.append(host)
        for kind, stream in (("out", host.process.stdout), ("err", host.process.stderr)):
            assert stream is not None
            self._selector.register(stream, selectors.EVENT_READ, (host, kind))
        return host

    def tell(self, host: Connection, **word: Any) -> None:
        """Send a message to the host, during this call or the next turns; ignored if the connection is gone."""
        self.send(host, json.dumps(word).encode() + b"\n")

    def send(self, host: Connection, data: bytes) -> None:
        """Send these bytes, as `tell`."""
        host.unsent += data
        self._send(host)

    def turn(self) -> bytes:
        """Forward messages and output in both directions, for half a second at most; returns signals that came."""
        was_heard, signals = set(), b""
        for key, _ in self._selector.select(_LOOK_S):
            if key.data is None:
                signals = os.read(self._bell, 64)
                continue
            host, kind = key.data
            if kind == "in":
                self._send(host)
                continue
            was_heard.add(host.name)
            self._receive(key, host, kind)
        for host in self.hosts:
            if host.code is None and host.name not in was_heard:
                code = host.process.poll()
                host.code = code if code is None or code >= 0 else 128 - code  # like a shell after a signal
        return signals

    def _receive(self, key: selectors.SelectorKey, host: Connection, kind: str) -> None:
        data = os.read(key.fd, _PIECE)
        *lines, host.rest[kind] = (host.rest[kind] + data).split(b"\n")
        if not data:
            self._selector.unregister(key.fileobj)
            lines = [host.rest[kind]] if host.rest[kind] else []
            host.rest[kind] = b""
        for line in lines:
            self._hear(host, kind, line.decode(errors="replace").rstrip("\r"))

    def _send(self, host: Connection) -> None:
        stream = host.process.stdin
        assert stream is not None
        try:
            while host.unsent:
                host.unsent = host.unsent[os.write(stream.fileno(), host.unsent[:_PIECE]) :]
        except BlockingIOError:
            pass
        except (OSError, ValueError):  # gone, or closed
            host.unsent = b""
        is_waiting = not stream.closed and stream in self._selector.get_map()
        if host.unsent and not is_waiting:
            self._selector.register(stream, selectors.EVENT_WRITE, (host, "in"))
        elif not host.unsent and is_waiting:
            self._selector.unregister(stream)

    def cut(self) -> None:
        """End the connections that are still there, at once."""
        for host in self.hosts:
            if host.code is None:
                host.process.kill()

    def close(self) -> None:
        """Close the connections, which asks every program on the hosts to stop."""
        for host in self.hosts:
            self.hang_up(host)
        self._selector.close()

    def hang_up(self, host: Connection) -> None:
        """Close one connection."""
        for stream in (host.process.stdin, host.process.stdout, host.process.stderr):
            assert stream is not None
            with suppress(OSError, KeyError, ValueError):
                self._selector.unregister(stream)
            with suppress(OSError):
                stream.close()
        try:
            host.process.wait(timeout=_HANG_UP_S)
        except subprocess.TimeoutExpired:
            host.process.kill()
            host.process.wait(timeout=_HANG_UP_S)
        if host.code is None:
            host.code = host.process.returncode
