"""Command lines without their imports: forks of one process that has imported the modules of a HetSeq command.

`start(command...)` returns a process that is `python ARGS` from its first statement on: with its own session,
environment, working folder and streams, and with the same contents of `/proc` as a real one. Its children are real too,
with one exception: the server that multiprocessing forks workers from is also a fork, not a new interpreter. Importing
torch and its compiler takes 3 s of computing for each such server, and 1.5 s for a launcher of several ranks; a fork
takes 0.02 s.

Such a command cannot show interpreter start and exit: use a cold one for that. All of
them share one seed of Python's hashes, so compare with a cold one where an order of sets might matter.

The processes are children of the caller (who must adopt orphans, see tests/support/police.py), which waits for them
as for any other.
"""

from __future__ import annotations

import ast
import atexit
import ctypes
import fcntl
import functools
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

from tests.support.police import adopt_orphans

ROOT = Path(__file__).resolve().parents[2]
IS_POSSIBLE = sys.platform == "linux"
#: beyond what launcher and server import: what every worker does
WARM = (
    "torch._dynamo",
    "hetseq.cli",
    "hetseq.launch.launch",
    "hetseq.launch.worker",
    "hetseq.tasks.mnist",
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.compat.proto.summary_pb2",
    "tensorboard.summary.writer.record_writer",
)
_ROOM = 1 << 15  # for the arguments and the environment of a command, where /proc looks for them
_LONGEST = 1 << 20
_OUT_OF_THE_WAY = 500  # numbers of descriptors from here on are free while others change places


def warm_up() -> None:
    """Start the process that is forked, unless it runs; returns at once, it imports in the background."""
    if IS_POSSIBLE:
        _server()


def start(args: Sequence[str], *, cwd: str, env: Mapping[str, str], streams: Sequence[int]) -> int:
    """The process id of `python ARGS`, whose standard streams are those three descriptors."""
    request = json.dumps({"args": list(args), "cwd": cwd, "env": dict(env)}).encode()
    control = _server()
    socket.send_fds(control, [struct.pack("!I", len(request))], list(streams))
    control.sendall(request)
    reply = control.recv(4)
    if not reply:
        raise RuntimeError("the process to be forked has died; its output is above")
    return int(struct.unpack("!I", reply)[0])


@functools.lru_cache(maxsize=1)
def _server() -> socket.socket:
    """The connection to the process that is forked, which ends when this side closes, at our exit at the latest."""
    adopt_orphans()
    ours, theirs = socket.socketpair()
    with theirs:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HETSEQ_TEST_ROOM": "." * _ROOM}
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked", str(theirs.fileno()), "." * _ROOM], cwd=ROOT,
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, start_new_session=True,
        ).returncode = 0  # it ends when we do, so we do not wait for it  # fmt: skip
    atexit.register(ours.close)
    return ours


def _serve(control: socket.socket) -> None:
    """The process that is forked: a request comes with three streams, the reply is a process id."""
    for name in WARM:
        __import__(name)
    while True:
        head, streams, _, _ = socket.recv_fds(control, 4, 3)
        if not head:
            return
        request = json.loads(_exactly(control, struct.unpack("!I", head)[0]))
        told, tell = os.pipe()
        between = os.fork()
        if not between:  # its child becomes the caller's when it ends
            if not os.fork():
                _live(request, streams, tell)
            os._exit(0)
        os.close(tell)
        for stream in streams:
            os.close(stream)
        os.waitpid(between, 0)
        control.sendall(os.read(told, 4))
        os.close(told)


def _live(request: dict[str, Any], streams: list[int], tell: int) -> None:
    """A command from its first statement to its end; never returns."""
    code = 1
    try:
        os.setsid()
        os.write(tell, struct.pack("!I", os.getpid()))
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, _OUT_OF_THE_WAY)
        args = request["args"]
        _look_like(args, request["env"])
        os.chdir(request["cwd"])
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # as of a process that has just begun
        _lend_a_server()
        code = _run(args[1:])
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(words: list[str]) -> int:
    """`python WORDS`, where the words begin with a script or with `-m` and a module."""
    try:
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], os.getcwd()
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return int(end.code or 0) if not isinstance(end.code, str) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _look_like(args: Sequence[str], environment: Mapping[str, str]) -> None:
    """Take over environment and arguments, also where /proc shows them; children inherit both."""
    os.environ.clear()  # from now on nothing points into the memory that held it
    os.environ.update(environment)
    _write_where_proc_looks("arguments", args)
    _write_where_proc_looks("environment", [f"{name}={value}" for name, value in environment.items()])


def _write_where_proc_looks(what: str, words: Sequence[str]) -> None:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    at = {"arguments": 48, "environment": 50}[what] - 3  # proc(5) counts from 1, and two fields come before
    begin, end = int(fields[at]), int(fields[at + 1])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))


# ------------------------------------------------------------------------------------- the server that forks workers


def _lend_a_server() -> None:
    """Have the server of multiprocessing, should this process start it, be a fork that is made now."""
    ours, theirs = socket.socketpair()
    spare = os.fork()
    if not spare:
        ours.close()
        _wait_to_be_server(theirs)
    theirs.close()
    start_for_real = util.spawnv_passfds

    def start_server(path: Any, args: Any, passfds: Any) -> int:
        nonlocal spare
        if not spare or "multiprocessing.forkserver import main" not in os.fsdecode(args[-1]):
            return start_for_real(path, args, passfds)
        server, spare, numbers = spare, 0, sorted(passfds)
        mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
        words = [os.fsdecode(word) for word in args]
        request = json.dumps({"args": words, "mask": mask, "numbers": numbers}).encode()
        socket.send_fds(ours, [request], numbers)
        ours.close()
        return server

    util.spawnv_passfds = start_server


def _wait_to_be_server(line: socket.socket) -> None:
    """The server: idle until it is called or its callers are gone; never returns."""
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        message, passed, _, _ = socket.recv_fds(line, _LONGEST, 16)
        if not message:
            return
        request = json.loads(message)
        away = [fcntl.fcntl(number, fcntl.F_DUPFD, _OUT_OF_THE_WAY) for number in passed]
        os.closerange(3, _OUT_OF_THE_WAY)
        for number, descriptor in zip(request["numbers"], away):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _write_where_proc_looks("arguments", request["args"])
        # "from multiprocessing.forkserver import main; main(3, 5, ['module'], **{...})"
        call = ast.parse(request["args"][-1]).body[-1].value
        positional = [ast.literal_eval(node) for node in call.args]
        named: dict[str, Any] = {}
        for keyword in call.keywords:
            value = ast.literal_eval(keyword.value)
            named.update({keyword.arg: value} if keyword.arg else value)
        signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
        forkserver.main(*positional, **named)
    except SystemExit:
        pass
    finally:
        os._exit(0)


def _exactly(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        found += line.recv(size - len(found))
    return found


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
