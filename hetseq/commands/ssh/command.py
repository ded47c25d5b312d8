"""`hetseq ssh`: start a run on several hosts with one command, show their output, and stop them together.

Parses the command line, opens the connections (with the user's own `ssh`, which knows their keys and jump hosts),
chooses the port and secret for the nodes, and forwards stop signals. `remote` runs on each host.

The one idea: no host trains before every host has answered. Each host reads the options with its own parser, and
reports its number of workers; only then all hosts get the rendezvous URL. So a host that is off, or a missing folder,
ends the command at once and leaves nothing running.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hetseq import config as options
from hetseq.cluster.rendezvous.secret import load_secret
from hetseq.commands.ssh.remote import MARK, tag_of
from hetseq.config.command_line import Command, CommandOption, whole_number
from hetseq.config.sections import DistributedConfig
from hetseq.errors import EXIT_DISAGREE, EXIT_DONE, EXIT_STOPPED, EXIT_USAGE, ConfigError, RendezvousError
from hetseq.system.processes import ECHO_S, first_stop_signal, ringing_on_signals

_HOST = re.compile(r"(?P<name>(?:[\w.-]+@)?(?:[A-Za-z0-9_][\w.-]*|\[[0-9A-Fa-f:]+\]))(?::(?P<count>\d+))?")
_ANSWER_S = 120.0  # for a connection, and for a cold import of torch from a network mount
_SAID_S = 10.0  # without an answer, until the silent hosts are named
_LOOK_S = 0.5
_LAST_S = 10.0  # after a second signal, for the hosts to end
_HANG_UP_S = 5.0  # for ssh to end after its pipes are closed
_CONNECT_S = 20  # ConnectTimeout of ssh
_SSH_FAILED = 255
#: codes that stop the others: a host that ends with them never starts, and a run that has not begun would wait for it
_FAILED = (EXIT_USAGE, EXIT_DISAGREE)


COMMAND = Command(
    "ssh",
    "Start a run on several hosts with one command, over ssh.",
    usage=("--hosts LIST [options] -- OPTIONS OF hetseq train",),
    words=(
        CommandOption(
            "--hosts",
            "hosts as ssh knows them, each with its number of workers, as in labA:2,ada@labB; default: one per GPU",
            "LIST",
            is_needed=True,
        ),
        CommandOption("--ssh", "default ssh; with options as in 'ssh -p 2222'", "COMMAND", default="ssh"),
        CommandOption(
            "--directory", "working directory on each host; default: the path of the current directory", "DIR"
        ),
        CommandOption(
            "--python", "Python on the hosts that has hetseq; default: the path of the one that runs this command", "PY"
        ),
        CommandOption("--env-setup", "shell command before it, such as 'module load cuda'", "LINE"),
        CommandOption("--address", "address of the first host for the others; default: its name in --hosts", "ADDR"),
        CommandOption(
            "--port", "port of the first host at which they meet; default: a free one", "P",
            read=whole_number(1, 65535),
        ),
    ),
    examples=(
        "hetseq ssh --hosts labA:2,labB:4 -- --task mnist --global-batch-size 64 --save-dir runs/digits",
    ),
    notes=(
        "Every line of output begins with its host. Ctrl-C stops all hosts after their step, a second Ctrl-C at once."
        " The exit code is the first nonzero one in the order of the hosts; 255 comes from ssh itself.",
    ),
    train="behind",
)  # fmt: skip


@dataclass(frozen=True)
class SshRequest:
    """The request: `hosts` with their workers (None: as many as the host reports), and the command for each of them."""

    hosts: tuple[tuple[str, int | None], ...]
    words: tuple[str, ...]
    ssh: tuple[str, ...]
    directory: str
    python: str
    env_setup: str | None
    address: str
    port: int | None
    has_min_ranks: bool
    secret_file: str


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """Run on all hosts until all have ended; returns the exit code. Raises ConfigError as `parse`, RendezvousError."""
    request = parse(words)
    with ringing_on_signals() as bell:
        hosts = FanOut(request, bell, say)
        try:
            return hosts.run()
        finally:
            hosts.close()


def parse(words: Sequence[str]) -> SshRequest:
    """Parse the words after `hetseq ssh`. Raises ConfigError, also for invalid options of the run."""
    asked = COMMAND.read(words)
    train, hosts = asked.rest, tuple(_host(text) for text in asked["--hosts"].split(","))
    if len({name for name, _ in hosts}) < len(hosts):
        raise ConfigError(f"--hosts {asked['--hosts']} names a host twice: give it once, with all its workers")
    address = asked["--address"] or hosts[0][0].rpartition("@")[2]
    has_min_ranks = any(word.partition("=")[0] == "--min-ranks" for word in train)
    meeting = ["--join", f"tcp://{address}:{asked['--port'] or 1}", *([] if has_min_ranks else ["--min-ranks", "1"])]
    config = options.parse([*train, *meeting])
    if config.distributed.join != meeting[1]:
        raise ConfigError("this command sets --join itself: leave it out (--address and --port change it)")
    if config.distributed.distributed_gpus is not None or config.distributed.devices:
        raise ConfigError("--hosts sets the workers of each host, as in labA:2: leave out --ranks and --devices")
    if config.data.global_batch_size is None:
        raise ConfigError("several nodes need --global-batch-size N after -- (samples per step over all ranks)")
    return SshRequest(
        hosts, train, tuple(shlex.split(asked["--ssh"])), asked["--directory"] or os.getcwd(),
        asked["--python"] or sys.executable,
        asked["--env-setup"], address, asked["--port"], has_min_ranks, config.distributed.secret_file,
    )  # fmt: skip


def _host(text: str) -> tuple[str, int | None]:
    found = _HOST.fullmatch(text)
    if found is None or found["count"] == "0":
        raise ConfigError(f"--hosts: {text!r} is not a host; expected NAME, USER@NAME or NAME:WORKERS, such as labA:2")
    return found["name"], int(found["count"]) if found["count"] else None


class _Host:
    """One host: its connection, the facts it has reported, and its exit code."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.facts: dict[str, Any] | None = None
        self.code: int | None = None
        self.last_words = ""  # on standard error
        self.rest = {"out": b"", "err": b""}
        try:
            # its own session: this command forwards Ctrl-C itself, once
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"--ssh {command[0]} cannot be started: {error.strerror}") from error

    def tell(self, **word: Any) -> None:
        """Send a message to the host; ignored if the connection is gone."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):
            self.process.stdin.write(json.dumps(word).encode() + b"\n")


class FanOut:
    """The hosts of one run, from the first connection to the last exit code."""

    def __init__(
        self, request: SshRequest, bell: int, say: Callable[[str], None], *, answer_s: float = _ANSWER_S,
        said_s: float = _SAID_S, last_s: float = _LAST_S,
    ) -> None:  # fmt: skip
        self._request, self._bell, self._say = request, bell, say
        self._answer_s, self._said_s, self._patience_s = answer_s, said_s, last_s
        self._hosts: list[_Host] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(bell, selectors.EVENT_READ)
        self._asked_s: float | None = None  # when the first stop was forwarded
        self._last_s: float | None = None  # when the connections will be cut

    def run(self) -> int:
        """Connect, agree, begin, wait. Raises RendezvousError for secrets that differ."""
        for name, count in self._request.hosts:
            host = _Host(name, self._command(name))
            self._hosts.append(host)
            for kind, stream in (("out", host.process.stdout), ("err", host.process.stderr)):
                assert stream is not None
                self._selector.register(stream, selectors.EVENT_READ, (host, kind))
            host.tell(words=[*self._request.words, *(["--ranks", str(count)] if count else [])])
        begun_s, is_said = time.monotonic(), False
        while any(host.facts is None for host in self._hosts):
            self._turn()
            silent = [host for host in self._hosts if host.facts is None]
            if self._asked_s is not None:
                return EXIT_STOPPED
            if ended := [host for host in silent if host.code is not None]:
                return self._refuse(ended[0])
            waited_s, names = time.monotonic() - begun_s, ", ".join(host.name for host in silent)
            if silent and waited_s > self._answer_s:
                raise RendezvousError(
                    f"{names} did not answer within {self._answer_s:g} s over ssh; the other hosts are stopped. Try"
                    f" `{self._trial(silent[0])}`: the machine or a network disk may hang, or its shell may prompt"
                )
            if silent and waited_s > self._said_s and not is_said:
                is_said = True
                self._tell(f"no answer from {names} yet; the time limit is {self._answer_s:g} s")
        self._begin()
        told: set[str] = set()
        while any(host.code is None for host in self._hosts):
            self._turn()
            self._tell_of_lost_(told)
            failed = [host for host in self._hosts if host.code in _FAILED]
            if failed and self._asked_s is None:
                self._tell(f"{failed[0].name} ended with {failed[0].code}: the other hosts are stopped")
                self._stop(signal.SIGTERM)
        return next((host.code for host in self._hosts if host.code), EXIT_DONE)

    def _tell_of_lost_(self, told: set[str]) -> None:
        """Report each host that has ended too early, once."""
        for host in self._hosts:
            if host.code not in (None, EXIT_DONE, *_FAILED) and host.name not in told and self._asked_s is None:
                told.add(host.name)
                why = (
                    "the connection is lost, and its launcher stops" if host.code == _SSH_FAILED else
                    f"it ended with {host.code}"
                )  # fmt: skip
                rest = "continue if --min-ranks are left" if self._request.has_min_ranks else "wait for it"
                self._tell(f"{host.name}: {why}; the others {rest}. Ctrl-C ends the run")

    def close(self) -> None:
        """Close the connections, which asks every launcher that still runs to stop."""
        for host in self._hosts:
            for stream in (host.process.stdin, host.process.stdout, host.process.stderr):
                assert stream is not None
                with suppress(OSError):
                    stream.close()
            try:
                host.process.wait(timeout=_HANG_UP_S)
            except subprocess.TimeoutExpired:
                host.process.kill()
                host.process.wait(timeout=_HANG_UP_S)
        self._selector.close()

    def _command(self, name: str) -> list[str]:
        request = self._request
        steps = [f"cd {shlex.quote(request.directory)}", *([request.env_setup] if request.env_setup else [])]
        steps.append(f"exec {shlex.quote(request.python)} -m hetseq.commands.ssh.remote")
        # sh, because the user's login shell there may be a different one
        remote = f"exec sh -c {shlex.quote(' && '.join(steps))}"
        flags = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_S}", "-o", "ServerAliveInterval=15"]
        return [*request.ssh, *flags, name.strip("[]"), remote]

    def _begin(self) -> None:
        """Send the rendezvous URL to all hosts, and the secret to the hosts without it."""
        facts = {host.name: host.facts or {} for host in self._hosts}
        total = sum(fact["workers"] for fact in facts.values())
        url = f"tcp://{self._request.address}:{self._request.port or facts[self._hosts[0].name]['port']}"
        words = ["--join", url, *([] if self._request.has_min_ranks else ["--min-ranks", str(total)])]
        secret = _secret_for({name: fact["secret"] for name, fact in facts.items()}, self._request.secret_file)
        crew = ", ".join(f"{name} {fact['workers']}" for name, fact in facts.items())
        self._tell(f"workers: {crew}; they meet at {url}")
        for host in self._hosts:
            is_lacking = secret is not None and facts[host.name]["secret"] is None
            host.tell(words=words, secret=secret if is_lacking else None)

    def _trial(self, host: _Host) -> str:
        """A command that tests ssh itself."""
        return shlex.join([*self._request.ssh, "-o", "BatchMode=yes", host.name, "true"])

    def _refuse(self, host: _Host) -> int:
        """Report why a host cannot take part; closing the connections ends the others."""
        here = f"`{self._trial(host)}`"
        if host.code == _SSH_FAILED:
            remedy = f"{here} must work without a prompt: check the name, that the machine is on, and your key there"
        elif host.code == EXIT_USAGE and host.last_words.startswith("hetseq: "):
            remedy = "the message is about that host"
        else:
            remedy = (
                f"it needs the folder {self._request.directory} (--directory) and {self._request.python} with hetseq"
                " (--python, --env-setup)"
            )
        words = f" ({host.last_words})" if host.last_words else ""
        self._tell(
            f"{host.name} cannot take part: it ended with {host.code}{words}; {remedy}. The other hosts are stopped"
        )
        return host.code or EXIT_STOPPED

    def _turn(self) -> None:
        """Forward messages and output in both directions."""
        was_heard = set()
        for key, _ in self._selector.select(_LOOK_S):
            if key.data is None:
                self._heed(os.read(self._bell, 64))
                continue
            host, kind = key.data
            data = os.read(key.fd, 65536)
            was_heard.add(host.name)
            *lines, host.rest[kind] = (host.rest[kind] + data).split(b"\n")
            if not data:
                self._selector.unregister(key.fileobj)
                lines = [host.rest[kind]] if host.rest[kind] else []
                host.rest[kind] = b""
            for line in lines:
                self._hear(host, kind, line.decode(errors="replace").rstrip("\r"))
        for host in self._hosts:
            if host.code is None and host.name not in was_heard:
                code = host.process.poll()
                host.code = code if code is None or code >= 0 else 128 - code  # like a shell after a signal
        if self._last_s is not None and time.monotonic() > self._last_s:
            for host in self._hosts:
                if host.code is None:
                    host.process.kill()

    def _hear(self, host: _Host, kind: str, line: str) -> None:
        if kind == "out" and host.facts is None and line.startswith(MARK):
            host.facts = json.loads(line.removeprefix(MARK))
        elif kind == "out":
            self._say(f"[{host.name}] {line}")
        else:
            host.last_words = line.strip() or host.last_words
            self._tell(f"[{host.name}] {line}")

    def _heed(self, signals: bytes) -> None:
        number = first_stop_signal(signals)
        if number is None:
            return
        now_s = time.monotonic()
        if self._asked_s is None:
            self._tell(
                f"{signal.Signals(number).name}: all hosts finish their step; a second signal stops them at once"
            )
        elif now_s - self._asked_s <= ECHO_S:
            return
        else:
            self._last_s = self._last_s or now_s + self._patience_s
        self._stop(number)

    def _stop(self, number: int) -> None:
        self._asked_s = self._asked_s or time.monotonic()
        for host in self._hosts:
            host.tell(stop=int(number))

    @staticmethod
    def _tell(text: str) -> None:
        with suppress(OSError):  # a closed terminal must not stop the run
            sys.stderr.write(f"{text}\n")


def _secret_for(tags: dict[str, str | None], path: str) -> str | None:
    """This machine's secret as digits if a host lacks it, else None. Raises RendezvousError if two secrets differ."""
    held = {tag for tag in tags.values() if tag is not None}
    if None not in tags.values() and len(held) == 1:
        return None
    # only the default file's folder is created if missing
    secret = load_secret(None if path == DistributedConfig.secret_file else path)
    for name, tag in tags.items():
        if tag not in (None, tag_of(secret)):
            raise RendezvousError(
                f"{name} has another secret than this machine, in {path}: copy the file of one host to the others, or"
                " remove it there to use the one of this machine"
            )
    return secret.hex()
