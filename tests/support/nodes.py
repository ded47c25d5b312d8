"""Several launchers on this one machine, each like a separate node: started, watched, ended.

`Nodes` are the nodes of one test. `nodes.start("--lr", 0.1, ...)` is `hetseq train --lr 0.1 ...` in its own folder and
home, with the test's secret, and on loopback only; with `script=[...]` it is `hetseq run`. `nodes.finish()` waits for
all of them and returns the output and end time of each. Nothing waits without a deadline, and processes that remain
when the test ends are killed by their process id.

A start takes seconds to import torch, so nodes run in warm processes (`Stock`), but still with a fresh worker process
per rank. `cold=True` is a command line from its first instruction: for tests that kill a launcher. A test's own
`Process` may have another environment from its start, or separate namespaces (`prefix`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tests.support.commands import ROOT, TRAIN, Command, _output, _size, _text
from tests.support.trials import until

T = TypeVar("T")
Environment = Mapping[str, str | None]  # None: not set
LOOPBACK: dict[str, str] = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
IMPORTS_S = 90.0  # 4 s alone; on two cores with six jobs beside it much more
_LEFT_S = 2.0


# --------------------------------------------------------------------------------------------------- warm processes


class Process:
    """A process that runs one command line after another; everything is imported and its fork server is warm.

    `environment` counts from its start, so it reaches the workers too. `prefix` are words before the interpreter, as
    in `unshare --mount`; they must not fork.
    """

    def __init__(self, environment: Environment | None = None, *, prefix: Sequence[str] = ()) -> None:
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self.out, self.err = _output(), _output()
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.support.nodes", str(requests), str(replies)], cwd="/",
            stdin=subprocess.DEVNULL, stdout=self.out, stderr=self.err, pass_fds=(requests, replies),
            env=_environment(environment), start_new_session=True,
        )  # fmt: skip
        os.close(requests)
        os.close(replies)

    @property
    def pid(self) -> int:
        return self._process.pid

    def request(self, args: Sequence[str], *, cwd: Path, environment: Environment) -> None:
        """Begin `hetseq ARGS`."""
        line = json.dumps({"args": list(args), "cwd": str(cwd), "environment": dict(environment)})
        os.write(self._requests, line.encode() + b"\n")

    def await_imports(self) -> None:
        """Return when the server of its workers has imported torch: a worker then starts at once."""
        self.request([], cwd=ROOT, environment={})
        until(lambda: _once(self.reply()), "a server that has imported torch", within_s=IMPORTS_S)

    def reply(self) -> int | None:
        """The exit code of the command, None while it runs; one that took the process with it has its code."""
        if select.select([self._replies], [], [], 0)[0] and (reply := os.read(self._replies, 4096)):
            return int(json.loads(reply))
        return self._process.poll()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Its workers and their server end with it."""
        self._process.kill()
        self._process.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own session: no other process is in this group

    def close(self) -> None:
        """Kill it and give its output back."""
        self.kill()
        for descriptor in (self._requests, self._replies):
            os.close(descriptor)
        self.out.close()
        self.err.close()


def _serve(requests: int, replies: int) -> None:
    """The main function of a `Process`: a request is a line of JSON, the reply an exit code.

    A request without arguments is answered when a worker can start at once.
    """
    from hetseq.cli import main
    from hetseq.launch.worker_processes import warm_forkserver

    context = warm_forkserver()  # a command ends the server that it started, and leaves this one alone
    home = Path.cwd()
    with os.fdopen(requests) as lines:
        for line in lines:
            request = json.loads(line)
            if not request["args"]:
                worker = context.Process(target=os.getpid)  # begins when the server has imported everything
                worker.start()
                worker.join()
                os.write(replies, json.dumps(0).encode())
                continue
            with _environment_of_a_command(request["environment"]):
                os.chdir(request["cwd"])
                sys.argv = [str(ROOT / "train.py"), *request["args"][1:]]
                try:
                    code = main(request["args"], save_dir="checkpoints")  # as train.py does
                except Exception:  # as the interpreter would end a command of its own
                    traceback.print_exc()
                    code = 1
                except SystemExit as end:
                    code = end.code if isinstance(end.code, int) else 1
            os.chdir(home)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            for handler in logging.getLogger().handlers[:]:
                logging.getLogger().removeHandler(handler)
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(replies, json.dumps(code).encode())


@contextmanager
def _environment_of_a_command(changes: Environment) -> Iterator[None]:
    before = dict(os.environ)
    for name, value in changes.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Stock:
    """Warm processes for the tests of a session; started on the first demand, all of them."""

    def __init__(self, size: int = 3) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hetseq-test-home-")
        self._idle = [Process({"HOME": self._folder.name}) for _ in range(size)]
        self._all = list(self._idle)
        try:
            for process in self._idle:
                self._warm_up(process)
        except BaseException:
            self.close()
            raise

    def take(self) -> Process | None:
        """A warm process, or None if all are in use or have died."""
        while self._idle:
            process = self._idle.pop()
            if process.is_alive():
                return process
        return None

    def mend(self) -> None:
        """Between two tests: replace what the last one has killed, or each later one would start its own."""
        for process in [process for process in self._all if not process.is_alive()]:
            process.close()
            self._all.remove(process)
            self._idle = [idle for idle in self._idle if idle is not process]
            self._all.append(self.start())
            self._idle.append(self._all[-1])

    def give_back(self, process: Process) -> None:
        self._idle.append(process)

    def start(self, environment: Environment | None = None, *, prefix: Sequence[str] = ()) -> Process:
        """One more, for one test; the caller closes it."""
        process = Process({"HOME": self._folder.name, **(environment or {})}, prefix=prefix)
        try:
            self._warm_up(process)
        except BaseException:
            process.close()
            raise
        return process

    def close(self) -> None:
        for process in self._all:
            process.close()
        self._folder.cleanup()

    def _warm_up(self, process: Process) -> None:
        """A command that starts a worker, so that the process has everything it will ever import."""
        path = Path(self._folder.name)
        words = ["train", "--cpu", "--data", "/nowhere", "--save-dir", str(path / f"run-{process.pid}")]
        process.request([*words, "--distributed-world-size", "2", "--max-update", "1"], cwd=path, environment={})
        code = until(lambda: _once(process.reply()), "a warm process", within_s=IMPORTS_S)
        assert code == [2], f"{code}: {_text(process.err)}"


# ------------------------------------------------------------------------------------------------ the nodes of a test


@dataclass
class Ended:
    """How a node ended."""

    code: int
    out: str
    err: str
    seconds: float  # from its own start
    since_last_start: float  # from the start of the node that was started last

    @property
    def reasons(self) -> list[str]:
        """The reasons it printed for its end; none for a good end, one for a bad one."""
        return re.split(r"^hetseq: ", self.err, flags=re.MULTILINE)[1:]

    @property
    def message(self) -> str:
        """The last reason it gave."""
        return self.reasons[-1] if self.reasons else ""


@dataclass(eq=False)
class Node:
    """One launcher."""

    name: str
    folder: Path
    args: list[str]
    process: Process | Command
    begin: float
    is_lent: bool = False  # of the stock
    seen: tuple[int, int] = (0, 0)  # of a warm process's output, before this command
    before: frozenset[int] = frozenset()  # processes under it
    code: int | None = None
    end: float = 0.0
    _said: tuple[str, str] = field(default=("", ""))

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if self.code is None:
            code = self.process.poll() if isinstance(self.process, Command) else self.process.reply()
            if code is not None:
                self.end, self._said = time.monotonic(), (self.out, self.err)
                self.code = code
        return self.code

    @property
    def out(self) -> str:
        """Its standard output so far."""
        return self._said[0] if self.code is not None else self._text(0)

    @property
    def err(self) -> str:
        """Its standard error so far."""
        return self._said[1] if self.code is not None else self._text(1)

    @property
    def pid(self) -> int:
        return self.process.pid

    def _text(self, which: int) -> str:
        if isinstance(self.process, Command):
            return _text((self.process._out, self.process._err)[which])
        return _text((self.process.out, self.process.err)[which], self.seen[which])

    def story(self) -> str:
        """All about it, for a failing test."""
        state = "still runs" if self.code is None else f"ended with {self.code} after {self.end - self.begin:.1f} s"
        return f"=== {self.name} {state}: {' '.join(self.args)}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"

    def workers(self) -> frozenset[int]:
        """Processes that this command has started and that live: workers, and of a cold one its servers too."""
        return living_under(self.pid) - self.before

    def signal(self, number: int, pid: int | None = None) -> None:
        """Signal the launcher alone, or one of its processes."""
        os.kill(self.pid if pid is None else pid, number)


class Nodes:
    """The nodes of one test."""

    def __init__(self, stock: Stock, folder: Path) -> None:
        self._stock, self.folder, self.secret = stock, folder, folder / "secret"
        self.started: list[Node] = []
        self._count = 0
        self._extra: list[Process] = []  # of this test alone
        self._idle: list[Process] = []

    def start(
        self,
        *words: object,
        script: Sequence[object] = (),
        cold: bool = False,
        program: Sequence[str] = TRAIN,
        process: Process | None = None,
        environment: Environment | None = None,
        cwd: Path | None = None,
        secret: Path | None = None,
    ) -> Node:
        """`hetseq train WORDS` as one more node: `cold` (with `program`), in a test's own process, or in a warm one.

        With a script, and its arguments, it is `hetseq run WORDS SCRIPT`, not cold.
        """
        name = f"node{self._count}"
        self._count += 1
        cwd = cwd or self._new_folder(name)
        args = [*map(str, words), "--secret-file", str(secret or self.secret), *map(str, script)]
        own = environment or {}
        if cold:
            command = Command(args, cwd=cwd, env=_environment({"HOME": str(cwd), **own}), program=program)
            node = Node(name, cwd, args, command, time.monotonic())
        else:
            warm, is_lent = process or self._take(), process is None
            seen, before = (_size(warm.out), _size(warm.err)), living_under(warm.pid)
            warm.request(["run" if script else "train", *args], cwd=cwd, environment=own)
            node = Node(name, cwd, args, warm, time.monotonic(), is_lent, seen, before)
        self.started.append(node)
        return node

    def prepare(self, count: int, *, have_imported: bool = False) -> None:
        """Have so many warm processes at hand, so that as many nodes can start in the same instant.

        With `have_imported` their workers can, too.
        """
        taken = [self._take() for _ in range(count)]
        for process in taken:
            if have_imported:
                process.await_imports()
            self._put_back(process)

    def finish(self, *nodes: Node, timeout_s: float = 60.0) -> list[Ended]:
        """Wait until those nodes (all) have ended, and check that no process of theirs is left. In order of start."""
        awaited = nodes or tuple(self.started)
        deadline = time.monotonic() + timeout_s
        while sum(node.poll() is None for node in awaited):  # all are asked each time: that dates their ends
            if time.monotonic() > deadline:
                raise AssertionError(f"not all have ended within {timeout_s:g} s\n{self.story()}")
            time.sleep(0.005)  # between two looks
        for node in awaited:
            left = isinstance(node.process, Process) and _patient(node.workers)
            assert not left, f"processes {left} are left\n{self.story()}"
            self._release(node)
        last = max(node.begin for node in self.started)
        return [
            Ended(node.poll() or 0, node.out, node.err, node.end - node.begin, node.end - last) for node in awaited
        ]  # fmt: skip

    def wait_until_said(self, node: Node, *words: str, within_s: float = 10.0) -> float:
        """Seconds since the node's start until its output holds all these words; it may have ended by then."""

        def look() -> bool:
            node.poll()
            everything = node.out + node.err
            return all(word in everything for word in words)

        self.wait_until(look, f"{node.name} says {words}", within_s=within_s)
        return time.monotonic() - node.begin

    def wait_until(self, look: Callable[[], bool], what: str, *, within_s: float = 30.0) -> None:
        """Return once `look` gives true; AssertionError with all output if all have ended, or the time is over."""
        deadline = time.monotonic() + within_s
        while not look():
            has_ended = all(node.poll() is not None for node in self.started)
            assert not has_ended or look(), f"all have ended before: {what}\n{self.story()}"
            assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}\n{self.story()}"
            time.sleep(0.005)  # between two looks

    def forget(self, *ended: Node) -> None:
        """Leave those out of reports from now on."""
        self.started = [node for node in self.started if node not in ended]

    def story(self) -> str:
        """The output of all nodes, for a failing test."""
        for node in self.started:
            node.poll()
        return "\n".join(node.story() for node in self.started)

    def close(self) -> None:
        """End all running nodes, by a signal if that suffices; give the warm processes back."""
        for node in self.started:
            if node.poll() is None:
                node.signal(signal.SIGTERM)
        for node in self.started:
            process = node.process
            if isinstance(process, Command):
                process.close()
            elif _patient(lambda node=node: node.poll() is None):  # type: ignore[misc]
                process.kill()  # the stock closes it, or the test whose own it is
            else:
                self._release(node)
        for process in self._extra:
            process.close()
        self.started, self._extra, self._idle = [], [], []

    def _take(self) -> Process:
        """A warm process: of the stock, or one more if all are in use (or dead, after a test that has failed)."""
        if (warm := self._stock.take()) is not None:
            return warm
        if not self._idle:
            self._extra.append(self._stock.start())
            self._idle.append(self._extra[-1])
        return self._idle.pop()

    def _release(self, node: Node) -> None:
        """The process of an ended node may serve another one."""
        if node.is_lent and isinstance(node.process, Process):
            node.is_lent = False
            self._put_back(node.process)

    def _put_back(self, process: Process) -> None:
        if process in self._extra:
            self._idle.append(process)
        else:
            self._stock.give_back(process)

    def _new_folder(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir()
        return path


# ------------------------------------------------------------------------------------------------------------- looks


def living_under(pid: int) -> frozenset[int]:
    """Living processes that descend from `pid`."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):  # it has just ended
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found: set[int] = set()
    to_visit = [pid]
    while to_visit:
        below = children.get(to_visit.pop(), [])
        found.update(below)
        to_visit += below
    return frozenset(found)


def listening(pids: frozenset[int]) -> list[tuple[str, int]]:
    """Addresses and ports at which these processes listen (IPv4)."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(os.readlink(descriptor))
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
            address, port = words[1].split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def _patient(look: Callable[[], T]) -> T:
    """The first false result of `look`, or its result after a while."""
    deadline = time.monotonic() + _LEFT_S
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.01)  # between two looks
    return found


def _once(code: int | None) -> list[int]:
    return [] if code is None else [code]


def _environment(changes: Environment | None) -> dict[str, str]:
    """The environment of a node: this one's, loopback only, and the changes."""
    merged: dict[str, str | None] = {**os.environ, **LOOPBACK, **(changes or {})}
    return {name: value for name, value in merged.items() if value is not None}


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
