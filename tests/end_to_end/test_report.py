"""The report of real runs, as their launcher leaves it, and as a browser shows it."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tempfile
import zlib
from pathlib import Path

import pytest

import hetseq
from hetseq.monitor.report.command import run
from hetseq.monitor.report.compare import compare
from hetseq.monitor.report.page import repeat_lines
from tests.support import forked
from tests.support.commands import HETSEQ, run_command
from tests.support.recorded import HISTORY, step_row, validation_row, write_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TRAIN = (
    "train --cpu --task mnist --dropout 0 --global-batch-size 60 --lr 0.003 --distributed-world-size 2 --throttle 1:3"
)
_LEAST = 500  # no window of a browser is narrower; a frame in it may be
#: what a browser tells: how wide the page is, and which words leave it or lie on other words of the same picture
MEASURE = """<script>
const boxes = [...document.querySelectorAll("text")].map(word => [word, word.getBoundingClientRect()]);
const lost = boxes.filter(([, box]) => box.left < 0 || box.right > innerWidth).map(([word]) => word.textContent);
const pairs = boxes.flatMap(([word, box], at) => boxes.slice(at + 1).filter(([other, room]) => other.ownerSVGElement ==
  word.ownerSVGElement && box.left < room.right && room.left < box.right && box.top < room.bottom && room.top <
  box.bottom).map(([other]) => word.textContent + " and " + other.textContent));
const ink = getComputedStyle(document.body);
console.log("MEASURED " + JSON.stringify({wide: document.documentElement.scrollWidth, inner: innerWidth, lost, pairs,
  words: boxes.length, paper: ink.backgroundColor}) + " END");
</script>"""


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    forked.warm_up()


@pytest.mark.slow
def test_a_run_leaves_its_report_and_its_own_command_gives_the_same_curve(tmp_path: Path) -> None:
    path = tmp_path / "run"
    done = run_command(
        [*TRAIN.split(), "--max-update", "12", "--save-dir", str(path)], program=HETSEQ, timeout_s=100, is_cold=False
    )
    assert (done.code, done.err.splitlines()[-1]) == (0, f"report: {path}/report.html")
    assert "Finished: all steps are done." in (path / "report.html").read_text()
    again = next(repeat_lines(hetseq.load_run(path)))
    assert again.startswith("hetseq train ")
    words = [word.strip("'") for word in again.split()[1:]]
    assert run_command(words, program=HETSEQ, timeout_s=100, is_cold=False).code == 0
    found = compare(hetseq.load_run(path), hetseq.load_run(f"{path}-one"))
    assert [key for key, _, _ in found.options] == ["distributed_world_size", "throttle"]
    assert len(found.steps) == 12
    assert found.largest is not None
    assert found.largest[0] < 1e-3  # fp32, as measured 3e-7


@pytest.mark.slow
def test_a_run_that_failed_leaves_its_report_too(tmp_path: Path) -> None:
    task = tmp_path / "broken.py"
    task.write_text(
        "import torch\nfrom hetseq import Task\n\n\nclass Broken(Task):\n"
        "    def load_dataset(self, split):\n        return torch.utils.data.TensorDataset(torch.ones(64, 1))\n"
        "    def build_model(self):\n        self.calls = 0\n        return torch.nn.Linear(1, 1)\n"
        "    def count(self, sample):\n        return {'loss': len(sample[0])}\n"
        "    def loss(self, model, sample):\n        self.calls += 1\n"
        "        if self.calls > 6:\n            raise ValueError('as was to be shown')\n"
        "        return {'loss': model(sample[0]).sum()}\n"
    )
    words = f"train --cpu --task {task}:Broken --global-batch-size 8 --lr 0.1 --max-update 50 --disable-validation"
    path = tmp_path / "run"
    done = run_command([*words.split(), "--save-dir", str(path)], program=HETSEQ, timeout_s=100, is_cold=False)
    assert done.code == 1
    assert f"report: {path}/report.html\n" in done.err
    assert "Ended before all steps were done" in (path / "report.html").read_text()


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The report of a run of three ranks with long names, one of which is lost for a while."""
    rows = [
        step_row(step, 5 / step, slots=(0, 2) if 40 <= step < 60 else (0, 1, 2), lr=3e-5 * (1 - step / 1e4),
                 samples=123_456) for step in range(1, 20_000, 20)
    ]  # fmt: skip
    for row in rows:
        row["ranks"]["names"] = [
            f"{name.partition('/')[0]}.a-cluster-with-a-long-name.department.university.example/cpu"
            for name in row["ranks"]["names"]
        ]
    rows += [validation_row(step, 4 / step, valid_accuracy=step / 20_000) for step in (5_000, 10_000, 15_000)]
    events = [
        {"event": "generation", "step": 39, "ranks": [0, 2], "story": "rank 1 on labB was killed", "seconds": 0.1}
    ]
    path = write_run(tmp_path / "a-run-with-a-rather-long-name", rows, events=events, history=HISTORY)
    assert run([str(path)], lambda _: None) == 0
    return path / "report.html"


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium on this machine")
@pytest.mark.parametrize(("width", "theme", "paper"), [(1280, 1, "rgb(255, 255, 255)"), (480, 0, "rgb(21, 24, 28)")])
def test_a_browser_shows_it_whole_at_any_width_in_both_themes(page: Path, width: int, theme: int, paper: str) -> None:
    folder = page.parent
    plain = shown(page, folder, width=width, theme=theme)
    assert "CONSOLE" not in plain, plain
    assert (folder / "shot.png").stat().st_size > 20_000  # an empty one has 6 kB
    page.write_text(page.read_text().replace("</body>", f"{MEASURE}</body>"))
    said = shown(page, folder, width=width, theme=theme)
    found = re.search(r"MEASURED (\{.*\}) END", said)
    assert found is not None, said
    measured = found.group(1)
    assert f'"wide":{width},"inner":{width},"lost":[],"pairs":[]' in measured, measured
    assert f'"paper":"{paper}"' in measured


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium on this machine")
def test_on_paper_it_is_light_whatever_the_theme(page: Path) -> None:
    paper = page.parent / "paper.pdf"
    browse(page, page.parent, 0, f"--print-to-pdf={paper}", "--no-pdf-header-footer")
    fills = set[str]()
    for content in re.findall(rb"stream\r?\n(.*?)\r?\nendstream", paper.read_bytes(), re.DOTALL):
        with contextlib.suppress(zlib.error):  # a font among them
            fills |= set(re.findall(r"([\d.]+ [\d.]+ [\d.]+) rg", zlib.decompress(content).decode("latin1")))
    # paper, words of less importance as they are on paper alone, and the first of the light colours
    assert {"1 1 1", ".2667 .2667 .2667", ".1216 .4353 .7059"} <= fills
    assert not [fill for fill in fills if fill.startswith((".0823", ".0824", ".4235"))]  # dark paper, its first colour


def shown(page: Path, folder: Path, *, width: int, theme: int) -> str:
    """What a browser says while it makes a picture of the page."""
    frame = folder / "frame.html"
    frame.write_text(
        f'<body style="margin:0"><iframe src="{page.name}" width="{width}" height="4000" style="border:0">'
    )
    size = f"--window-size={max(width, _LEAST)},4000"
    return browse(frame, folder, theme, size, "--hide-scrollbars", f"--screenshot={folder / 'shot.png'}")


def browse(page: Path, folder: Path, theme: int, *more: str) -> str:
    """What a browser says of a page, in the light theme (1) or the dark one (0)."""
    words = [
        str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
        "--disable-background-networking", "--disable-crash-reporter", f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={theme}", "--enable-logging=stderr", *more, page.as_uri(),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(
        prefix="b"
    ) as short:  # a socket of the browser's is in it, and its path has a limit
        environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin", "TMPDIR": short}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr
