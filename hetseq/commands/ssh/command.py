"""`hetseq ssh`: start a run on several hosts with one command, show their output, and stop them together.

Parses the command line, chooses the port and secret for the nodes, and forwards stop signals. `connections` talks to
the hosts, and `remote` runs on each of them. With `--install` the command is another one: `install`.

The one idea: no host trains before every host has answered. Each host reads the options with its own parser, and
reports its number of workers; only then all hosts get the rendezvous URL. So a host that is off, or a missing folder,
ends the command at once and leaves nothing running.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hetseq import config as options
from hetseq.cluster.rendezvous.secret import load_secret
from hetseq.commands.run_script import Program, program_of
from hetseq.commands.ssh.connections import (
    SSH_FAILED,
    Connection,
    Connections,
    hosts_of,
    own_code,
    shell_path,
    ssh_words,
    trial,
    unreachable,
)
from hetseq.commands.ssh.install import DEFAULT_ENV, InstallRequest, install
from hetseq.commands.ssh.remote import MARK, tag_of
from hetseq.config.command_line import Command, CommandOption, Given, whole_number
from hetseq.config.sections import DistributedConfig
from hetseq.errors import EXIT_DISAGREE, EXIT_DONE, EXIT_STOPPED, EXIT_USAGE, ConfigError, RendezvousError
from hetseq.system.processes import ECHO_S, first_stop_signal, ringing_on_signals

_ANSWER_S = 120.0  # for a connection, and for a cold import of torch from a network mount
_SAID_S = 10.0  # without an answer, until the silent hosts are named
_LAST_S = 10.0  # after a second signal, for the hosts to end
#: codes that stop the others: a host that ends with them never starts, and a run that has not begun would wait for it
_FAILED = (EXIT_USAGE, EXIT_DISAGREE)


COMMAND = Command(
    "ssh",
    "Start a run on several hosts with one command, over ssh.",
    usage=(
        "--hosts LIST [options] -- OPTIONS OF hetseq train",
        "--hosts LIST [options] -- run [options] SCRIPT.py [arguments]",
        "--install --hosts LIST [options]",
    ),
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
            "--python",
            "Python on the hosts that has hetseq; default: the path of the one that runs this command. With --install:"
            " the one that makes the environment; default: this one's version, or python3",
            "PY",
        ),
        CommandOption("--env-setup", "shell command before it, such as 'module load cuda'", "LINE"),
        CommandOption("--address", "address of the first host for the others; default: its name in --hosts", "ADDR"),
        CommandOption(
            "--port", "port of the first host at which they meet; default: a free one", "P",
            read=whole_number(1, 65535),
        ),
        CommandOption(
            "--own-memory",
            "--own-memory of one host, as in server:stable,64G; give it once per host. Behind -- it is for all hosts",
            "HOST:VALUE",
            is_many=True,
        ),
        CommandOption(
            "--install",
            "run nothing, and install on each host this HetSeq, and this node's versions of torch and the other"
            " packages, with the build of torch for its cards; what is there already stays",
        ),
        CommandOption(
            "--env",
            "environment on each host, which --install makes, in place of --python; with --install the default is"
            f" {DEFAULT_ENV}, in the home there",
            "DIR",
        ),
        CommandOption(
            "--packages",
            "with --install, for hosts without internet: where all packages come from, torch too: the URL of an index,"
            " or a folder of wheels on the host; default: pytorch.org for torch, and what pip is configured with",
            "PLACE",
        ),
        CommandOption("--dry-run", "with --install: print the commands for each host, and change nothing"),
    ),
    examples=(
        "hetseq ssh --hosts labA:2,labB:4 -- --task mnist --global-batch-size 64 --save-dir runs/digits",
        "hetseq ssh --install --hosts labA,labB",
    ),
    notes=(
        "Every line of output begins with its host. Ctrl-C stops all hosts after their step, a second Ctrl-C at once."
        " The exit code is the first nonzero one in the order of the hosts, and 1 for a host that ssh does not reach.",
    ),
    train="behind",
    alone="--install",
)  # fmt: skip
_OF_INSTALL = ("--packages", "--dry-run")
_OF_RUN = ("--directory", "--address", "--port", "--own-memory")


@dataclass(frozen=True)
class SshRequest:
    """The request: `hosts` with their workers (None: as many as the host reports), and the command for each of them."""

    hosts: tuple[tuple[str, int | None], ...]
    program: Program
    ssh: tuple[str, ...]
    directory: str
    python: str
    env_setup: str | None
    address: str
    port: int | None
    has_min_ranks: bool
    secret_file: str
    own_memory: Mapping[str, str]  # by host


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """Run on all hosts until all have ended, or install; returns the exit code. Raises ConfigError, RendezvousError."""
    asked = COMMAND.read(words)
    if asked["--install"]:
        return install(parse_install(asked), say)
    request = parse(asked)
    with ringing_on_signals() as bell:
        hosts = FanOut(request, bell, say)
        try:
            return hosts.run()
        finally:
            hosts.close()


def parse_install(asked: Given) -> InstallRequest:
    """The request for `--install`. Raises ConfigError for options of a run."""
    for flag in _OF_RUN:
        if asked[flag]:
            raise COMMAND.refusal(f"{flag} belongs to a run: leave it out beside --install")
    if asked.rest:
        raise COMMAND.refusal("--install runs nothing: leave out -- and what follows, and run them afterwards")
    env = asked["--env"] or DEFAULT_ENV
    if not env.startswith(("/", "~/")):
        raise COMMAND.refusal(f"--env {env}: expected a path that begins with / or ~/, as in {DEFAULT_ENV}")
    return InstallRequest(
        tuple(name for name, _ in hosts_of(asked["--hosts"])), tuple(shlex.split(asked["--ssh"])), env.rstrip("/"),
        asked["--python"], asked["--env-setup"], asked["--packages"], asked["--dry-run"],
    )  # fmt: skip


def parse(asked: Given) -> SshRequest:
    """The request for a run. Raises ConfigError, also for invalid options of the run."""
    for flag in _OF_INSTALL:
        if asked[flag]:
            raise COMMAND.refusal(f"{flag} belongs to --install: leave it out, or add --install")
    if asked["--env"] and asked["--python"]:
        raise COMMAND.refusal("--env and --python are both given: leave one out")
    program, hosts = program_of(asked.rest), hosts_of(asked["--hosts"])
    address = asked["--address"] or hosts[0][0].rpartition("@")[2]
    has_min_ranks = any(word.partition("=")[0] == "--min-ranks" for word in program.options)
    meeting = ["--join", f"tcp://{address}:{asked['--port'] or 1}", *([] if has_min_ranks else ["--min-ranks", "1"])]
    config = options.parse([*program.options, *meeting])  # the script is on the hosts
    if config.distributed.join != meeting[1]:
        raise ConfigError("this command sets --join itself: leave it out (--address and --port change it)")
    if config.distributed.distributed_gpus is not None or config.distributed.devices:
        raise ConfigError("--hosts sets the workers of each host, as in labA:2: leave out --ranks and --devices")
    if config.data.global_batch_size is None and not program.script:  # a script says it
        raise ConfigError("several nodes need --global-batch-size N after -- (samples per step over all ranks)")
    return SshRequest(
        hosts, program, tuple(shlex.split(asked["--ssh"])), asked["--directory"] or os.getcwd(),
        f"{asked['--env'].rstrip('/')}/bin/python" if asked["--env"] else asked["--python"] or sys.executable,
        asked["--env-setup"], address, asked["--port"], has_min_ranks, config.distributed.secret_file,
        _own_memory_of(asked["--own-memory"], [name for name, _ in hosts], [*program.options, *meeting]),
    )  # fmt: skip


def _own_memory_of(entries: Sequence[str], names: Sequence[str], words: Sequence[str]) -> dict[str, str]:
    """The values of `--own-memory HOST:VALUE` by host. Raises ConfigError for unknown hosts and invalid values."""
    found: dict[str, str] = {}
    for entry in entries:
        name, _, value = entry.rpartition(":")
        if name not in names or name in found:
            raise COMMAND.refusal(
                f"--own-memory {entry}: expected HOST:VALUE with a host of --hosts ({', '.join(names)}), each once"
            )
        options.parse([*words, "--own-memory", value])
        found[name] = value
    return found


class FanOut:
    """The hosts of one run, from the first connection to the last exit code."""

    def __init__(
        self, request: SshRequest, bell: int, say: Callable[[str], None], *, answer_s: float = _ANSWER_S,
        said_s: float = _SAID_S, last_s: float = _LAST_S,
    ) -> None:  # fmt: skip
        self._request, self._say = request, say
        self._answer_s, self._said_s, self._patience_s = answer_s, said_s, last_s
        self._links = Connections(bell, self._hear)
        self._hosts = self._links.hosts
        self._asked_s: float | None = None  # when the first stop was forwarded
        self._last_s: float | None = None  # when the connections will be cut

    def run(self) -> int:
        """Connect, agree, begin, wait. Raises RendezvousError for secrets that differ."""
        for name, count in self._request.hosts:
            host = self._links.open(name, self._command(name))
            program, own = self._request.program, ["--ranks", str(count)] if count else []
            if (memory := self._request.own_memory.get(name)) is not None:
                own += ["--own-memory", memory]
            self._links.tell(host, words=[*program.options, *own], script=list(program.script))
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
                here = trial(self._request.ssh, silent[0].name)
                raise RendezvousError(
                    f"{names} did not answer within {self._answer_s:g} s over ssh; the other hosts are stopped. Try"
                    f" `{here}`: the machine or a network disk may hang, or its shell may prompt"
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
        return next((own_code(host.code) for host in self._hosts if host.code), EXIT_DONE)

    def _tell_of_lost_(self, told: set[str]) -> None:
        """Report each host that has ended too early, once."""
        for host in self._hosts:
            if host.code not in (None, EXIT_DONE, *_FAILED) and host.name not in told and self._asked_s is None:
                told.add(host.name)
                why = (
                    "the connection is lost, and its launcher stops" if host.code == SSH_FAILED else
                    f"it ended with {host.code}"
                )  # fmt: skip
                rest = "continue if --min-ranks are left" if self._request.has_min_ranks else "wait for it"
                self._tell(f"{host.name}: {why}; the others {rest}. Ctrl-C ends the run")

    def close(self) -> None:
        """Close the connections, which asks every launcher that still runs to stop."""
        self._links.close()

    def _command(self, name: str) -> list[str]:
        request = self._request
        steps = [f"cd {shlex.quote(request.directory)}", *([request.env_setup] if request.env_setup else [])]
        steps.append(f"exec {shell_path(request.python)} -m hetseq.commands.ssh.remote")
        return ssh_words(request.ssh, name, steps)

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
            self._links.tell(host, words=words, secret=secret if is_lacking else None)

    def _refuse(self, host: Connection) -> int:
        """Report why a host cannot take part; closing the connections ends the others."""
        if host.code == SSH_FAILED:
            remedy = unreachable(self._request.ssh, host.name)
        elif host.code == EXIT_USAGE and host.last_words.startswith("hetseq: "):
            remedy = "the message is about that host"
        else:
            remedy = (
                f"it needs the folder {self._request.directory} (--directory) and {self._request.python} with hetseq"
                " (--python, --env-setup)"
            )
        words = f" ({host.last_words})" if host.last_words else ""
        others = ". The other hosts are stopped" if len(self._hosts) > 1 else ""
        self._tell(f"{host.name} cannot take part: it ended with {host.code}{words}; {remedy}{others}")
        return own_code(host.code or EXIT_STOPPED)

    def _turn(self) -> None:
        """Forward messages and output in both directions."""
        if signals := self._links.turn():
            self._heed(signals)
        if self._last_s is not None and time.monotonic() > self._last_s:
            self._links.cut()

    def _hear(self, host: Connection, kind: str, line: str) -> None:
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
            self._links.tell(host, stop=int(number))

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
