"""Real command lines as tests run them: each in its own session, with a time limit, and never left behind.

`run_command(["--task", "mnist", ...])` is `python train.py --task mnist ...` from start to end; `program=HETSEQ` makes
it `hetseq ...`. `start_command(...)` returns the running command, to be watched, signalled and waited for; at the end
of its block it is killed by its process id, with its children (workers end with their launcher).

A command takes seconds to import its modules. `is_cold=False` begins it after its imports, as a fork of a process
that has done them (tests/support/forked.py); everything else about it is real. `WarmLauncher` is one
launcher process that runs one command line after another, each with fresh workers.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import forked

ROOT = Path(__file__).resolve().parents[2]
TRAIN = (sys.executable, str(ROOT / "train.py"))
HETSEQ = (sys.executable, "-m", "hetseq")
_LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class Finished:
    """A command that has ended; a negative code is the signal that killed it."""

    code: int
    out: str
    err: str
    seconds: float


class Command(subprocess.Popen[bytes]):
    """A running command; its output goes to files, so nothing ever waits for a reader."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = TRAIN,
        is_one_stream: bool = False,
    ) -> None:
        self._out = _output()
        self._err = self._out if is_one_stream else _output()
        self._begin = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
        super().__init__(
            [*program, *map(str, args)], stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err, cwd=cwd,
            env=environment, start_new_session=True,
        )  # fmt: skip

    def wait_for_step(self, save_dir: str | os.PathLike[str], step: int, *, timeout_s: float = 60.0) -> None:
        """Return once `metrics.jsonl` has `step` whole rows; AssertionError if the command ends before, or is late."""
        rows, deadline = Path(save_dir, "metrics.jsonl"), time.monotonic() + timeout_s
        while not (rows.exists() and rows.read_bytes().count(b"\n") >= step):
            assert time.monotonic() < deadline, f"no step {step} within {timeout_s:g} s: {self.said()}"
            with suppress(subprocess.TimeoutExpired):
                self.wait(_LOOK_EVERY_S)
                break
        found = rows.read_bytes().count(b"\n") if rows.exists() else 0
        assert found >= step, f"ended with {self.returncode} after {found} rows, before step {step}: {self.said()}"

    def finish(self, *, timeout_s: float = 60.0) -> Finished:
        """Wait for the end; an AssertionError with its output if that takes longer than `timeout_s`."""
        try:
            code = self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"still running after {timeout_s:g} s: {self.said()}") from None
        seconds = time.monotonic() - self._begin
        return Finished(code, _text(self._out), "" if self._err is self._out else _text(self._err), seconds)

    def said(self) -> str:
        """Its output so far, for a failing test."""
        return f"{self.args}\n--- stdout\n{_text(self._out)}\n--- stderr\n{_text(self._err)}"

    def end(self) -> None:
        """Kill it and the helpers of its session, if they still run; its workers end with it."""
        if self.poll() is None:
            self.kill()
            self.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # its own session: no other process is in this group

    def close(self) -> None:
        """End it and give its output back."""
        self.end()
        self._out.close()
        self._err.close()


class ForkedCommand(Command):
    """A running command that did not have to import anything."""

    def _execute_child(self, args: Any, *more: Any) -> None:
        cwd, env, streams = more[4], more[5], more[9:15]  # as Popen has resolved them
        place, (stdin, _, _, stdout, _, stderr) = os.fspath(cwd or os.getcwd()), streams
        self.pid = forked.start(args, cwd=place, env=env, streams=(stdin, stdout, stderr))
        self._child_created = True
        os.close(stdin)  # the null device; the other two are files of the test's own


def run_command(
    args: Sequence[str],
    *,
    cwd: str | os.PathLike[str] | None = None,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = TRAIN,
    is_cold: bool = True,
) -> Finished:
    """`python train.py ARGS` (or another program) from start to end, with at most `timeout_s` seconds."""
    with start_command(args, cwd=cwd, env=env, program=program, is_cold=is_cold) as command:
        return command.finish(timeout_s=timeout_s)


@contextmanager
def start_command(
    args: Sequence[str],
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = TRAIN,
    is_cold: bool = True,
    is_one_stream: bool = False,
) -> Iterator[Command]:
    """The running command; killed, if it still runs, when the block is left.

    With `is_one_stream` all that it writes is its `out`, in order, as a terminal has it.
    """
    kind = Command if is_cold or not forked.IS_POSSIBLE else ForkedCommand
    command = kind(args, cwd=cwd, env=env, program=program, is_one_stream=is_one_stream)
    try:
        yield command
    finally:
        command.close()


class WarmLauncher:
    """`hetseq ARGS`, again and again in one process; every worker is a fresh process all the same.

    What workers write to their terminal and what the launcher does are in `out` and `err` alike. The commands share
    the launcher's environment and what it has imported, so give each its own task file.
    """

    def __init__(self) -> None:
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._out, self._err = _output(), _output()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.commands", str(requests), str(replies)], cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err, pass_fds=(requests, replies),
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
        os.close(requests)
        os.close(replies)

    def run(
        self, args: Sequence[str], *, cwd: str | os.PathLike[str] = ROOT, timeout_s: float = 60.0
    ) -> Finished:  # fmt: skip
        """`hetseq ARGS` in the folder `cwd`; an AssertionError with what it said if it takes longer than allowed."""
        begin, seen_out, seen_err = time.monotonic(), _size(self._out), _size(self._err)
        os.write(self._requests, json.dumps({"args": [*map(str, args)], "cwd": str(cwd)}).encode() + b"\n")
        ready, _, _ = select.select([self._replies], [], [], timeout_s)
        reply = os.read(self._replies, 4096) if ready else b""
        out, err = _text(self._out, seen_out), _text(self._err, seen_err)
        if not reply:
            why = "the launcher has died" if ready else f"still running after {timeout_s:g} s"
            raise AssertionError(f"{why}: {list(args)}\n--- stdout\n{out}\n--- stderr\n{err}")
        return Finished(json.loads(reply), out, err, time.monotonic() - begin)

    def close(self) -> None:
        """Kill it; its workers and their server end with it."""
        self._process.kill()
        self._process.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for descriptor in (self._requests, self._replies):
            os.close(descriptor)
        self._out.close()
        self._err.close()


def _serve(requests: int, replies: int) -> None:
    """The process of a WarmLauncher: a request is a line of JSON, the reply an exit code."""
    from hetseq.cli import main
    from hetseq.launch.worker_processes import warm_forkserver

    warm_forkserver()  # a command ends the server that it started, and leaves this one alone
    with os.fdopen(requests) as lines:
        for line in lines:
            request = json.loads(line)
            os.chdir(request["cwd"])
            try:
                code = main(request["args"])
            except Exception:  # as the interpreter would end a command of its own
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(replies, json.dumps(code).encode())


def _output() -> Any:
    return tempfile.TemporaryFile()


def _size(file: Any) -> int:
    return os.fstat(file.fileno()).st_size


def _text(file: Any, start: int = 0) -> str:
    return os.pread(file.fileno(), _size(file) - start, start).decode(errors="replace")


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
