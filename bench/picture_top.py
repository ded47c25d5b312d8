"""README's picture: `hetseq top` while a node is killed and comes back, as an animated SVG of a real run.

    python bench/picture_top.py [--output docs/top.svg]

Two nodes on this machine, with two workers and one, all of unequal speed (`--throttle`), train in a temporary folder.
The script watches the run as `hetseq top` does, kills all processes of the second node, restarts it, and continues
until its worker takes part. Each view that differs from the one before is a frame. The nodes have their own host names
where namespaces are allowed (`unshare -ru`).
"""

from __future__ import annotations

import argparse
import html
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from terminal import CHARACTER, EDGE, LINE

from hetseq.monitor.block_chart import Line, text_of
from hetseq.monitor.lookout import Lookout
from hetseq.monitor.run_view import view

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, ROWS = 92, 15
LOOK_S, BEFORE_S, GONE_S, AFTER_S, MOST_S = 0.5, 4.0, 4.0, 4.0, 90.0
WORDS = shlex.split(
    "--task mnist --cpu --throttle 0:2,1:3,2:6 --global-batch-size 479 --max-update 100000 --optimizer sgd --lr 0.02"
    " --lr-scheduler constant --dropout 0 --disable-validation --no-save --no-progress-bar --distributed-world-size 3"
)
OWN = {"labA": ["--distributed-rank", "0", "--ranks", "2"], "labB": ["--distributed-rank", "2"]}
STYLE = """
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #d6dbe1; white-space: pre; }
.head, .pace { fill: #ffffff; font-weight: bold; } .dim, .rest { fill: #8b949e; } .bad { fill: #ff7b72; }
.typed, .good, .loss { fill: #7ee787; } .slow, .wait { fill: #e3b341; } .compute { fill: #58a6ff; }
.data { fill: #d2a8ff; } .speed { fill: #56d4dd; }
"""


@dataclass(frozen=True)
class Frame:
    """The screen from a moment on."""

    at_s: float
    typed: str
    lines: tuple[Line, ...]


def main(words: Sequence[str] | None = None) -> int:
    """Record, write, and print the size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "top.svg")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        frames = record(Path(folder) / "runs" / "digits")
    text = drawn(frames)
    arguments.output.write_text(text, encoding="utf-8")
    print(f"{arguments.output}: {len(frames)} frames of {frames[-1].at_s:.0f} s, {len(text) / 1000:.0f} kB")
    return 0


# The run


class Nodes:
    """The two launchers, each in its own session, so that all its processes can be killed at once."""

    def __init__(self, run: Path) -> None:
        self._words = [*WORDS, "--distributed-init-method", f"file://{run.parent / 'meeting'}", "--save-dir", str(run)]
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """One more node."""
        words = [sys.executable, str(ROOT / "train.py"), *self._words, *OWN[name]]
        if subprocess.run(["unshare", "-ru", "true"], check=False, capture_output=True).returncode == 0:
            words = ["unshare", "-ru", "sh", "-c", f'hostname {name} && exec "$@"', "sh", *words]
        process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._started.append(process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """As if its power was cut: every process under it, and it."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """End the remaining processes."""
        for process in self._started:
            self.kill(process)


def record(run: Path) -> list[Frame]:
    """Frames from the time when shares fit until a while after the killed node is back."""
    run.parent.mkdir(parents=True)
    nodes = Nodes(run)
    try:
        nodes.start("labA")
        second = nodes.start("labB")
        until(lambda: newest(run) >= 150, "steps, after which the shares fit")
        frames = Frames(run)
        frames.watch_for(BEFORE_S)
        nodes.kill(second)
        frames.typed = "kill -9 labB"
        frames.watch_for(GONE_S)
        nodes.start("labB")
        frames.typed = "hetseq train ...    # labB again"
        deadline_s = time.monotonic() + MOST_S
        while generations(run) < 2:
            frames.watch_for(LOOK_S)
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the killed node was not back within {MOST_S:.0f} s")
        frames.watch_for(AFTER_S)
        return frames.all()
    finally:
        nodes.close()


class Frames:
    """The successive screens of `hetseq top`; `typed` is the command typed in another terminal."""

    def __init__(self, run: Path) -> None:
        self._run, self._look, self._begin_s = run, Lookout(run), time.monotonic()
        self.typed, self._frames = "", list[Frame]()

    def watch_for(self, seconds: float) -> None:
        """Refresh twice a second."""
        for _ in range(round(seconds / LOOK_S)):
            seen = view(self._run, self._look.signs(), self._look, width=COLUMNS, height=ROWS, is_drawn=True)
            lines = seen.drawn
            if not self._frames or (self._frames[-1].typed, self._frames[-1].lines) != (self.typed, lines):
                self._frames.append(Frame(time.monotonic() - self._begin_s, self.typed, lines))
            time.sleep(LOOK_S)

    def all(self) -> list[Frame]:
        """The frames, and when the last one ends."""
        last = self._frames[-1]
        return [*self._frames, Frame(time.monotonic() - self._begin_s, last.typed, last.lines)]


def until(look: Callable[[], object], what: str) -> None:
    """Wait for it, a minute at most."""
    deadline = time.monotonic() + MOST_S
    while not look():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {MOST_S:.0f} s: {what}")
        time.sleep(0.1)


def newest(run: Path) -> int:
    """The newest step."""
    rows = run / "metrics.jsonl"
    return rows.read_bytes().count(b"\n") if rows.exists() else 0


def generations(run: Path) -> int:
    """The number of membership changes so far."""
    events = run / "events.jsonl"
    rows = map(json.loads, events.read_text().splitlines()) if events.exists() else ()
    return sum(row["event"] == "generation" for row in rows)


# The picture


def drawn(frames: Sequence[Frame]) -> str:
    """An SVG that shows each frame for its duration, in a loop."""
    width, height = round(COLUMNS * CHARACTER + 2 * EDGE), (ROWS + 3) * LINE + 2 * EDGE
    lasts_s = frames[-1].at_s
    parts, rules = [], []
    for number, (frame, following) in enumerate(itertools.pairwise(frames)):
        from_, to = 100 * frame.at_s / lasts_s, 100 * following.at_s / lasts_s
        rules.append(
            f"#f{number} {{ animation: k{number} {lasts_s:.1f}s infinite step-end; visibility: hidden; }}"
            f"@keyframes k{number} {{ 0% {{ visibility: {'visible' if number == 0 else 'hidden'}; }}"
            f" {from_:.2f}% {{ visibility: visible; }} {to:.2f}% {{ visibility: hidden; }} }}"
        )
        typed: Line = ((f"$ {frame.typed}" if frame.typed else "", "typed"),)
        empty: list[Line] = [()] * (ROWS - len(frame.lines))
        lines: list[Line] = [(("$ hetseq top runs/digits", "typed"),), *frame.lines, *empty, typed]
        texts = "".join(
            f'<text x="{EDGE}" y="{EDGE + LINE * (row + 1)}">{coloured(line)}</text>'
            for row, line in enumerate(lines)
            if text_of(line).strip()
        )
        parts.append(f'<g id="f{number}">{texts}</g>')
    still = "@media (prefers-reduced-motion: reduce) { g { animation: none !important; } #f0 { visibility: visible; } }"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' role="img" aria-label="hetseq top: a worker is killed, the others continue, and it comes back">'
        f"<style>{STYLE}{''.join(rules)}{still}</style>"
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>{"".join(parts)}</svg>\n'
    )


def coloured(line: Line) -> str:
    """The pieces of a line, each in its place: blocks of a font are not as wide as its letters everywhere."""
    spans, column = list[str](), 0
    for text, kind in line:
        if text.strip():
            place = f'x="{EDGE + CHARACTER * column:.1f}" textLength="{CHARACTER * len(text):.1f}"'
            spans.append(f'<tspan {place} class="{kind}">{html.escape(text)}</tspan>')
        column += len(text)
    return "".join(spans)


if __name__ == "__main__":
    sys.exit(main())
