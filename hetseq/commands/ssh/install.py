"""`hetseq ssh --install`: this HetSeq, and this node's versions of torch and the rest, in an environment on each host.

Carries messages between the hosts, where `host_agent` runs, and `install_plan`, which decides. A host that fails is
named with a remedy, and does not stop the others.

The one idea: HetSeq itself travels over the connection as a wheel (`wheels`), so a host needs Python, and an index for
the other packages alone.
"""

from __future__ import annotations

import base64
import json
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetseq.commands.ssh import host_agent
from hetseq.commands.ssh.connections import (
    SSH_FAILED,
    Connection,
    Connections,
    shell_path,
    ssh_words,
    trial,
    unreachable,
)
from hetseq.commands.ssh.install_plan import Plan, Wanted, plan_all
from hetseq.commands.ssh.wheels import Wheel, hetseq_wheel, pinned, pip_wheel
from hetseq.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from hetseq.system.processes import first_stop_signal, ringing_on_signals

DEFAULT_ENV = "~/.hetseq/env"
_ANSWER_S = 120.0  # for a connection, and for Python from a network mount
_INSTALL_S = 3600.0  # for gigabytes over a slow line
_OTHER_PYTHONS = ("python3", "python3.14", "python3.13", "python3.12", "python3.11", "python3.10")
_NOISE = ("Requirement already satisfied", "Collecting", "Using cached", "Looking in")  # of pip
_NO_PYTHON = 3  # the exit code of the shell's search for one


@dataclass(frozen=True)
class InstallRequest:
    """The request; see the options of `hetseq ssh`."""

    hosts: tuple[str, ...]
    ssh: tuple[str, ...]
    env: str = DEFAULT_ENV
    python: str | None = None
    env_setup: str | None = None
    packages: str | None = None
    is_dry: bool = False


def install(request: InstallRequest, say: Callable[[str], None]) -> int:
    """Install on all hosts; returns 0 if all have everything, 1 if one failed. Raises ConfigError."""
    ours, pip = hetseq_wheel(), pip_wheel()
    wanted = Wanted(pinned(), ours.name, ours.digest, pip.name, request.packages)
    with ringing_on_signals() as bell:
        installation = Installation(request, wanted, (ours, pip), bell=bell, say=say)
        try:
            return installation.run()
        finally:
            installation.close()


class Installation:
    """The hosts of one `hetseq ssh --install`."""

    def __init__(
        self, request: InstallRequest, wanted: Wanted, wheels: Sequence[Wheel], *, bell: int,
        say: Callable[[str], None], answer_s: float = _ANSWER_S, install_s: float = _INSTALL_S,
    ) -> None:  # fmt: skip
        self._request, self._wanted, self._wheels, self._say = request, wanted, wheels, say
        self._answer_s, self._install_s = answer_s, install_s
        self._links = Connections(bell, self._hear)
        self._failures: dict[str, str] = {}

    def run(self) -> int:
        """Ask all hosts, plan, install, and report."""
        program, token = Path(host_agent.__file__).read_bytes(), secrets.token_hex(8)
        for name in self._request.hosts:
            host = self._links.open(name, ssh_words(self._request.ssh, name, self._steps()))
            self._links.send(host, base64.b64encode(program) + b"\n")
            self._links.tell(host, env=self._request.env, token=token, name=name)
        if not self._wait(lambda host: host.facts is None, self._answer_s, self._silent):
            return self._interrupted()
        for host in self._links.hosts:
            if host.facts is None and host.name not in self._failures:
                self._fail(host, self._why_not(host))
        plans = plan_all(self._wanted, {host.name: host.facts for host in self._links.hosts if host.facts is not None})
        for host in self._links.hosts:
            if host.name in plans:
                self._begin(host, plans[host.name])
        if not self._wait(lambda host: host.name not in self._failures, self._install_s, self._late):
            return self._interrupted()
        for host in self._links.hosts:
            if host.code and host.name not in self._failures:
                self._fail(host, self._why_failed(host))
        return self._report(plans)

    def close(self) -> None:
        """Close the connections, which ends what still runs on the hosts."""
        self._links.close()

    def _steps(self) -> list[str]:
        """The shell commands on a host: read the program, find a Python, and run it.

        It comes as the first line of standard input, since some login shells take no line break in a command.
        """
        ours = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        names = [self._request.python] if self._request.python else [ours, *_OTHER_PYTHONS]
        search = (
            f"for python in {' '.join(map(shell_path, names))}; do"
            ' "$python" -c "import sys, venv; sys.exit(sys.version_info < (3, 10))" 2>/dev/null'
            ' && exec "$python" -c "$(printf %s "$program" | base64 -d)";'
            f" done; exit {_NO_PYTHON}"
        )
        setup = [self._request.env_setup] if self._request.env_setup else []
        return [*setup, "read -r program", f"{{ {search}; }}"]

    def _begin(self, host: Connection, plan: Plan) -> None:
        """Send its commands to a host, or close its connection if it has nothing to do."""
        if plan.refusal:
            self._fail(host, plan.refusal)
            return
        self._tell(f"{host.name}: {plan.about}")
        if plan.commands and self._request.is_dry:
            for words in plan.commands:
                self._say(f"[{host.name}] {shlex.join(words)}")
        if not plan.commands or self._request.is_dry:
            self._links.hang_up(host)
            host.code = 0  # it has told its facts, and that was all
            return
        files = {wheel.name: base64.b64encode(wheel.content).decode() for wheel in self._wheels}
        self._links.tell(host, files=files, commands=plan.commands, marker=plan.marker)

    def _wait(
        self, is_awaited: Callable[[Connection], bool], limit_s: float, give_up: Callable[[Connection], str]
    ) -> bool:
        """Forward messages until no host is awaited; False after a signal. Hosts that are late have failed."""
        end_s = time.monotonic() + limit_s
        while late := [host for host in self._links.hosts if host.code is None and is_awaited(host)]:
            if first_stop_signal(self._links.turn()) is not None:
                return False
            if time.monotonic() > end_s:
                for host in late:
                    self._fail(host, give_up(host))
        return True

    def _silent(self, host: Connection) -> str:
        return (
            f"it did not answer within {self._answer_s:g} s over ssh: try `{trial(self._request.ssh, host.name)}`; the"
            " machine or a network disk may hang, or its shell may prompt"
        )

    def _late(self, host: Connection) -> str:
        return (
            f"it was not done within {self._install_s / 60:g} minutes, and was stopped: the same command continues,"
            " with what pip has fetched"
        )

    def _why_not(self, host: Connection) -> str:
        """Why a host told no facts, and the remedy."""
        words = f" ({host.last_words})" if host.last_words else ""
        if host.code == SSH_FAILED:
            return f"ssh ended with {SSH_FAILED}{words}: {unreachable(self._request.ssh, host.name)}"
        if host.code == _NO_PYTHON:
            named = f"{self._request.python} is" if self._request.python else "it has"
            return (
                f"{named} no Python of 3.10 or newer with the module venv: name one with --python PATH, or load one"
                " with --env-setup 'module load python'; without root, uv python install or conda gives one"
            )
        return f"its shell ended with {host.code}{words}: --env-setup and --python must work there"

    def _why_failed(self, host: Connection) -> str:
        """Why the commands of a host failed, and the remedy."""
        if host.code == SSH_FAILED:
            return f"the connection is lost ({host.last_words}): the same command continues"
        place = self._request.packages or "the package indexes of PyPI and pytorch.org"
        return (
            f"a command there ended with {host.code} ({host.last_words}): does it reach {place}, and is there room in"
            " its temporary folder? --packages names another index or a folder of wheels, --env-setup 'export"
            " TMPDIR=DIR' another folder; the same command continues"
        )

    def _fail(self, host: Connection, why: str) -> None:
        self._failures[host.name] = why
        self._tell(f"{host.name} failed: {why}")
        if host.code is None:
            self._links.hang_up(host)

    def _report(self, plans: dict[str, Plan]) -> int:
        """The summary; returns the exit code."""
        for name, plan in plans.items():
            if plan.owner in self._failures:
                self._failures[name] = f"{plan.owner} failed"
        count, names = len(self._request.hosts), ", ".join(self._failures)
        if self._failures:
            state = "can be made ready" if self._request.is_dry else "are ready"
            self._tell(f"{count - len(self._failures)} of {count} hosts {state}; failed: {names}")
            return EXIT_FAILED
        if self._request.is_dry:
            return EXIT_DONE
        again = shlex.join(["--hosts", ",".join(self._request.hosts), "--env", self._request.env])
        self._tell(f"{count} of {count} hosts are ready: hetseq ssh {again} -- OPTIONS OF hetseq train")
        return EXIT_DONE

    def _interrupted(self) -> int:
        self._tell("stopped: the same command continues with what is there")
        return EXIT_INTERRUPTED

    def _hear(self, host: Connection, kind: str, line: str) -> None:
        if kind == "out" and host.facts is None and line.startswith(host_agent.MARK):
            host.facts = json.loads(line.removeprefix(host_agent.MARK))
            return
        is_reason = line.startswith("ERROR") or not host.last_words.startswith("ERROR")  # of pip, before its notices
        if kind == "err" and line.strip() and is_reason:
            host.last_words = line.strip()
        if not line.lstrip().startswith(_NOISE):
            self._say(f"[{host.name}] {line}")

    @staticmethod
    def _tell(text: str) -> None:
        with suppress(OSError):  # a closed terminal must not stop the hosts
            sys.stderr.write(f"{text}\n")
