"""Start-up time: from two launchers on this machine to their first step, imports excluded.

    python bench/start.py [--rounds 15] [--workers 1] [--url tcp|file]

Each launcher is a process that has imported everything, as has its fork server. So the script measures only the
start itself: meeting, roster, connections, run directory, worker processes, data, model, contract, process group. The
clock starts when both receive the command over a pipe, and ends when the row of step 1 appears in metrics.jsonl (this
includes the step, some milliseconds here, and the writing). Every round is a new run in a new run directory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
TASK = Path(__file__).with_name("random_images.py")
WARM_UP, PATIENCE_S = 2, 60.0


class Launcher:
    """A warm process that runs one command line after another."""

    def __init__(self, home: Path) -> None:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HOME": str(home)}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._log = _output()
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            env=environment, cwd=home,
        )  # fmt: skip
        self.expect("warm")

    def expect(self, word: str) -> None:
        """Wait for its answer."""
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().decode().strip()
        if answer != word:
            raise SystemExit(f"a launcher said {answer!r} instead of {word!r}:\n{self.said()}")

    def said(self) -> str:
        """All it has written so far."""
        log = self._log.fileno()
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")

    def begin(self, words: list[str]) -> None:
        """Run `hetseq train WORDS`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()
        self._log.close()


def serve() -> None:
    """The main function of a launcher: import, start the fork server, answer; then a command per line."""
    from hetseq.cli import main
    from hetseq.launch.worker_processes import warm_forkserver

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # the output of a run must not be read as an answer
    warm_forkserver()
    print("warm", file=answers)
    for line in sys.stdin:
        words = json.loads(line)
        sys.argv = ["train.py", *words]
        print(main(["train", *words]), file=answers)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="counted starts")
    parser.add_argument("--workers", type=int, default=1, help="of each launcher")
    parser.add_argument("--url", choices=("tcp", "file"), default="tcp", help="where they meet")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launchers = [Launcher(folder) for _ in range(2)]
        try:
            times = [one_start(launchers, folder, number, arguments) for number in range(WARM_UP + arguments.rounds)]
        finally:
            for launcher in launchers:
                launcher.close()
    report(sorted(times[WARM_UP:]), arguments)


def one_start(launchers: list[Launcher], folder: Path, number: int, arguments: argparse.Namespace) -> float:
    """Seconds from the command to the first step; both launchers have ended when this returns."""
    run = folder / f"run-{number}"
    url = f"tcp://127.0.0.1:{free_port()}" if arguments.url == "tcp" else f"file://{folder / f'meeting-{number}'}"
    words = ["--task", str(TASK), "--cpu", "--global-batch-size", "16", "--max-update", "1", "--lr", "1e-3"]
    words += ["--disable-validation", "--no-save", "--log-format", "none", "--save-dir", str(run)]
    words += ["--secret-file", str(folder / "secret"), "--distributed-init-method", url]
    words += ["--distributed-world-size", str(2 * arguments.workers), "--distributed-gpus", str(arguments.workers)]
    begin = time.monotonic()
    for place, launcher in enumerate(launchers):
        launcher.begin([*words, "--distributed-rank", str(place * arguments.workers)])
    rows = run / "metrics.jsonl"
    while not (rows.exists() and rows.read_bytes().endswith(b"\n")):
        if time.monotonic() > begin + PATIENCE_S:
            said = "\n---\n".join(launcher.said()[-2000:] for launcher in launchers)
            raise SystemExit(f"no first step within {PATIENCE_S:g} s:\n{said}")
        time.sleep(0.001)
    seconds = time.monotonic() - begin
    for launcher in launchers:
        launcher.expect("0")
    return seconds


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _output() -> IO[bytes]:
    return tempfile.TemporaryFile()


def report(times: list[float], arguments: argparse.Namespace) -> None:
    """A line for people, and the same as one line of JSON."""
    quarter = len(times) // 4
    figures = {
        "url": arguments.url,
        "workers": arguments.workers,
        "n": len(times),
        "median_s": statistics.median(times),
        "quartiles_s": [times[quarter], times[-1 - quarter]],
        "slowest_s": times[-1],
    }
    print(
        f"two launchers of {arguments.workers} worker(s), {arguments.url}, loopback, {len(times)} starts: first step"
        f" after {statistics.median(times):.2f} s (quartiles {times[quarter]:.2f} to {times[-1 - quarter]:.2f} s)"
    )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
