"""Commands of HetSeq, each in a fork of one process that has imported the command line and not torch.

`Commands().run(["top", "nope"], cwd=folder)` is `hetseq top nope` in that folder: its exit code, what it wrote, and
whether it imported torch. A fork takes 0.02 s, and what one command imports the next one does not have. A command that
does not end in time is killed, and its code is that of the signal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.support.commands import ROOT, _output, _text


@dataclass(frozen=True)
class Answer:
    """A command that has ended; a negative code is the signal that killed it."""

    code: int
    out: str
    err: str
    has_torch: bool


class Commands:
    """The process that is forked; `environment` is that of every command."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.without_torch"], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip

    def run(self, words: Sequence[str], *, cwd: Path, timeout_s: int = 60) -> Answer:
        """`hetseq WORDS` in that folder, from start to end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with _output() as out, _output() as err:
            streams = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, err)]
            request = {"words": list(words), "cwd": str(cwd), "streams": streams, "timeout_s": timeout_s}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            code, has_torch = json.loads(self._process.stdout.readline())
            return Answer(code, _text(out), _text(err), has_torch)

    def close(self) -> None:
        """End the process; no command runs any more."""
        self._process.communicate()


def _serve() -> None:
    import hetseq.cli

    for line in sys.stdin:
        request = json.loads(line)
        told, tell = os.pipe()
        pid = os.fork()
        if not pid:
            _live(hetseq.cli.main, request, tell)
        os.close(tell)
        _, status = os.waitpid(pid, 0)
        has_torch = os.read(told, 1) == b"1"
        os.close(told)
        print(json.dumps([os.waitstatus_to_exitcode(status), has_torch]), flush=True)


def _live(main: Callable[[list[str]], int], request: dict[str, Any], tell: int) -> NoReturn:
    """A command from its first word to its end."""
    code = 1
    try:
        os.setsid()
        signal.alarm(request["timeout_s"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in enumerate(request["streams"], start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
        os.chdir(request["cwd"])
        sys.argv = ["hetseq", *request["words"]]
        code = main(request["words"])
    except BaseException:  # as the interpreter would end a command of its own
        traceback.print_exc()
    finally:
        os.write(tell, b"1" if "torch" in sys.modules else b"0")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
