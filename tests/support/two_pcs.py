"""Two PCs on this machine, as two people's: a name, a network card, a home folder and an environment each.

`two_pcs(folder)` gives labA and labB of tests/support/hosts.py with a home folder, `/dev/shm` and a folder for
temporary files that the other one does not see. pip has nothing to fetch (tests/support/checkout.py). `ssh` and `scp`
are stand-ins that enter the other PC.
Commands are typed into bash, in the home folder.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.support.checkout import bare_environment
from tests.support.commands import Command, Finished, _text
from tests.support.hosts import Host, two_hosts
from tests.support.nodes import living_under
from tests.support.trials import until

#: imports and installations on a busy machine
PATIENCE_S = 240.0
_TEMPORARY = "/var/tmp"  # each PC's own; a long path would be too long for a socket
_ADDRESSES = "127.0.0.1 localhost\n10.77.0.1 labA\n10.77.0.2 labB\n"
_SSH = """#!/bin/bash
while [[ "$1" == -* ]]; do [ "$1" = -o ] && shift; shift; done
host=$1; shift
case $host in
ENTERS
*) echo "ssh: Could not resolve hostname $host" >&2; exit 255 ;;
esac
exec "${enter[@]}" bash -c "cd && $*"
"""
_SCP = """#!/bin/bash
[ "$1" = -p ] && shift
target=${*: -1}
for file in "${@:1:$#-1}"; do
    name=$(basename "$file"); to=${target#*:}
    ssh "${target%%:*}" "to=${to:-.}; [ -d \\$to ] && to=\\$to/$name; cat > \\$to; chmod $(stat -c %a "$file") \\$to" \\
        < "$file" || exit 1
done
"""
#: before what is typed, in a terminal that has been opened anew
_TERMINAL = "set -e; cd; if [ -e ~/hetseq-env/bin/activate ]; then . ~/hetseq-env/bin/activate; fi\n"


class Pc:
    """One PC: what is typed into its terminals, and what all of them have shown."""

    def __init__(self, host: Host, home: Path, environment: dict[str, str], closing: ExitStack) -> None:
        self._host, self.home, self._closing = host, home, closing
        self._words = [
            "env",
            "-i",
            "TERM=xterm-256color",
            *(f"{name}={value}" for name, value in {**environment, "HOME": str(home)}.items()),
        ]
        self._typed: list[Command] = []
        host.run("mkdir", "-p", str(home))
        for place in ("/dev/shm", _TEMPORARY):
            host.run("mount", "-t", "tmpfs", "none", place)

    @property
    def name(self) -> str:
        return self._host.name

    @property
    def enter(self) -> list[str]:
        """What a process of the other PC puts before a command that runs here."""
        prefix = [word for word in self._host.enter if word not in ("-U", "--preserve-credentials")]
        return [*prefix, *self._words]

    def words(self, typed: str) -> list[str]:
        """The words of a command that types this in a new terminal."""
        return [*self._host.enter, *self._words, "bash", "-c", _TERMINAL + typed]

    def starts(self, typed: str) -> Command:
        """Type this; it runs in a terminal of its own."""
        command = Command([], program=self.words(typed), is_one_stream=True, cwd="/")
        self._closing.callback(command.close)
        self._typed.append(command)
        return command

    def types(self, typed: str) -> str:
        """Type this and wait for its end, which must be a good one."""
        ended = self.starts(typed).finish(timeout_s=PATIENCE_S)
        assert ended.code == 0, f"{self.name}: {typed}\nended with {ended.code}:\n{ended.out}"
        return ended.out

    def screen(self) -> str:
        """What all terminals have shown."""
        return "\n".join(_text(command._out) for command in self._typed)

    def shows(self, look: Callable[[str], object], what: str) -> None:
        """Wait until the screen does."""
        newest = self._typed[-1]
        try:
            until(lambda: look(self.screen()) or newest.poll(), what, within_s=PATIENCE_S)
            assert look(self.screen()), f"{what}: its newest command ended with {newest.returncode}"
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.name} shows\n{self.screen()}") from None

    def presses_ctrl_c(self, command: Command) -> Finished:
        """In the terminal of that command, whose processes all get it."""
        os.killpg(command.pid, signal.SIGINT)
        return command.finish(timeout_s=PATIENCE_S)

    def loses_power(self) -> None:
        """Its cable and all its processes are dead at once, and what was in memory is gone; no peer is told."""
        self._host.cut()
        for command in self._typed:
            kill_all(command.pid)
            command.end()
        self._host.run("sh", "-c", f"rm -rf /dev/shm/* {_TEMPORARY}/*")

    def has_power_again(self) -> None:
        self._host.heal()

    def writes(self, name: str, text: str) -> None:
        """A file in its home folder."""
        self._host.run("sh", "-c", f"printf %s {shlex.quote(text)} > {self.home / name}")

    def has(self, source: Path, name: str) -> None:
        """A copy of this folder in its home folder."""
        self._host.run("cp", "-r", str(source), str(self.home / name))

    def read(self, name: str) -> str:
        """A file of its home folder."""
        return self._host.run("cat", str(self.home / name))


def kill_all(pid: int) -> None:
    """A process of the test and all that it started."""
    for process in (pid, *living_under(pid)):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


@contextmanager
def two_pcs(folder: Path) -> Iterator[tuple[Pc, Pc]]:
    """labA and labB, as long as the block lasts."""
    with ExitStack() as closing:
        hosts = closing.enter_context(two_hosts(folder))
        (folder / "hosts").write_text(_ADDRESSES)
        tools, home = folder / "bin", folder / "local" / "home"
        environment = bare_environment(folder / "packages")
        environment |= {"PATH": f"{tools}:{environment['PATH']}", "TMPDIR": _TEMPORARY}
        for host in hosts:
            host.run("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
        one, other = (Pc(host, home, environment, closing) for host in hosts)
        enters = "\n".join(f"{pc.name}) enter=({shlex.join(pc.enter)}) ;;" for pc in (one, other))
        tools.mkdir()
        for name, script in (("ssh", _SSH.replace("ENTERS", enters)), ("scp", _SCP)):
            (tools / name).write_text(script)
            (tools / name).chmod(0o755)
        yield one, other
