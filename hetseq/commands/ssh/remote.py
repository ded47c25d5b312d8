"""The program that `hetseq ssh` starts on each host; it starts the launcher there and listens to `hetseq ssh`.

Reports facts about the node (number of workers, a free port, whether it has the secret), starts `hetseq train` or
`hetseq run` with the options it gets back, and stops it. It chooses no option of the run. Messages call `hetseq ssh`
the near end.

The one idea: the launcher stops when the connection closes. Messages are lines of JSON on standard input, which ssh
closes however the near end ends: killed, disconnected, suspended for good. Then the launcher is asked to stop, as by a
signal. A terminal (`ssh -tt`) would also hang up, but mixes the two outputs, turns on the live display, and cannot ask.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from hetseq.cluster.rendezvous.secret import SECRET_BYTES, derive_key, load_secret, secret_file
from hetseq.commands.run_script import Program
from hetseq.config.sections import Config
from hetseq.errors import EXIT_STOPPED, HetSeqError, RendezvousError
from hetseq.run_directory import open_private
from hetseq.system.files import write_all
from hetseq.system.processes import die_with_parent, first_stop_signal, ringing_on_signals
from hetseq.system.started_by import SSH, environment_of_child

#: prefix of the one line on standard output that is for the near end
MARK = "hetseq far end: "
_LOOK_S = 0.2
_IMPATIENT_S = 120.0  # after the near end is gone, for the current step and its checkpoint


def main() -> int:
    """Report facts, wait for the start, train, stop on request or disconnection; returns the launcher's exit code."""
    with ringing_on_signals() as bell:
        near = _Near(bell)
        try:
            request = near.next()
            if request is None:
                return EXIT_STOPPED
            program = Program(tuple(request["words"]), tuple(request["script"]))
            sys.stdout.write(f"{MARK}{json.dumps(_facts(program))}\n")
            sys.stdout.flush()
            begin = near.next()
            if begin is None or "stop" in begin:
                return EXIT_STOPPED
            if begin["secret"] is not None:
                _keep(begin["secret"], _parsed(program).distributed.secret_file)
        except HetSeqError as error:
            sys.stderr.write(f"hetseq: {error}\n")
            return error.exit_code
        me = os.getpid()
        child = subprocess.Popen(
            [sys.executable, "-m", "hetseq", *program.words(begin["words"])],
            stdin=subprocess.DEVNULL,
            env=environment_of_child(SSH),
            preexec_fn=lambda: die_with_parent(me),
        )
        return _look_after(child, near)


def tag_of(secret: bytes) -> str:
    """A tag that tells whether two nodes have the same secret, and reveals nothing else about it."""
    return derive_key(secret, "hetseq ssh", "the same?").hex()


class _Near:
    """Messages from the near end as lines on standard input; None once it is gone, and a stop for a local signal."""

    def __init__(self, bell: int) -> None:
        self._bell, self._rest, self._is_gone = bell, b"", False

    def look(self, timeout_s: float) -> list[dict[str, Any] | None]:
        """The messages that arrive within that time."""
        sources = [self._bell] if self._is_gone else [self._bell, 0]
        readable, _, _ = select.select(sources, [], [], timeout_s)
        found: list[dict[str, Any] | None] = []
        if self._bell in readable and (number := first_stop_signal(os.read(self._bell, 64))) is not None:
            found.append({"stop": number})
        if 0 in readable:
            data = os.read(0, 65536)
            *lines, self._rest = (self._rest + data).split(b"\n")
            found += [json.loads(line) for line in lines]
            if not data:
                self._is_gone = True
                found.append(None)
        return found

    def next(self) -> dict[str, Any] | None:
        """The next message; the near end has its own deadline, at which it closes the connection."""
        while True:
            for word in self.look(_LOOK_S):
                return word


def _facts(program: Program) -> dict[str, Any]:
    """The facts about this host for the near end. Raises ConfigError for options, SecretError for a bad secret."""
    from hetseq.launch.launch import local_devices

    config = _parsed(program)
    tag = None
    file = config.distributed.secret_file
    if os.path.lexists(secret_file(file)):
        tag = tag_of(load_secret(file, create=False))
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    return {"workers": len(local_devices(config.distributed)), "port": port, "secret": tag}


def _parsed(program: Program) -> Config:
    """The options of the run, with a placeholder for the unknown rendezvous URL. Raises ConfigError."""
    has_min_ranks = any(word.partition("=")[0] == "--min-ranks" for word in program.options)
    return program.config(["--join", "tcp://127.0.0.1:1", *([] if has_min_ranks else ["--min-ranks", "1"])])


def _keep(digits: str, path: str) -> None:
    """Write the secret that came over the connection, unless another launcher was faster."""
    if len(bytes.fromhex(digits)) != SECRET_BYTES:
        raise RendezvousError(f"the secret from the near end has {len(digits)} digits, not {2 * SECRET_BYTES}")
    file = secret_file(path)
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = open_private(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return
    except OSError as error:
        raise RendezvousError(
            f"{file} cannot be created on {socket.gethostname()}: {error.strerror}; copy the secret by hand and name it"
            " with --secret-file"
        ) from error
    try:
        write_all(descriptor, digits.encode() + b"\n")
    finally:
        os.close(descriptor)


def _look_after(child: subprocess.Popen[bytes], near: _Near) -> int:
    """Forward stops until the launcher has ended."""
    alone_s: float | None = None
    while child.poll() is None:
        for word in near.look(_LOOK_S):
            if word is None:
                alone_s = time.monotonic()
                child.send_signal(signal.SIGTERM)
            elif "stop" in word:
                child.send_signal(word["stop"])
        if alone_s is not None and time.monotonic() - alone_s > _IMPATIENT_S:
            alone_s = None
            child.send_signal(signal.SIGTERM)  # the second signal stops it at once
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main())
