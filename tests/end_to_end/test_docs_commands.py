"""The commands of README and manual, as a reader would type them: each page from top to bottom in a folder of its own.

Which commands are left out, and that this is said on the page, is the affair of tests/unit/test_docs.py. Trainings
with `--data` are cut short; what they reach is measured elsewhere. Those of the README begin as a reader's do,
those of the manual are forked after their imports.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.commands import HETSEQ, Command, Finished, run_command, start_command
from tests.support.docs import DATA, HERE, MEETING, PROGRAMS, ROOT, goes_on_beside, pages, program_of, shell_blocks
from tests.support.places import free_port

pytestmark = pytest.mark.slow

#: for trainings with --data, which otherwise take minutes
CUT_SHORT = ["--max-update", "4"]
PATIENCE_S = 110
#: a run directory of real data, by its name in the manual
DATA_RUN = "runs/mnist"
#: a folder of text that a reader brings: some pages of the manual
TEXT, TEXT_PAGES = "text", ("messages", "migrating", "network", "nodes", "running")


@pytest.fixture(scope="module", autouse=True)
def no_imports() -> None:
    """The manual's commands begin after their imports."""
    forked.warm_up()


def commands_of(page: Path) -> list[str]:
    """What is run of a page, in order."""
    run = [block for block in shell_blocks(page) if not block.is_excused]
    return [command for block in run for command in block.commands() if program_of(command) in PROGRAMS]


def needs_data(command: str) -> bool:
    words = shlex.split(command)
    return DATA in words or DATA_RUN in words


def pages_that_need_no_data() -> list[Path]:
    return [page for page in pages() if any(not needs_data(command) for command in commands_of(page))]


class Reader:
    """Somebody who types the commands of a page in a folder of his own, which is also his home."""

    def __init__(self, checkout: Path, closing: ExitStack) -> None:
        self.checkout = checkout
        self._closing = closing
        self._beside: list[tuple[str, Command]] = []
        self._meeting = f"127.0.0.1:{free_port()}"

    def types(self, command: str, data: Path | None = None, *, is_cold: bool = False) -> None:
        """Run one command, which must succeed; of one that goes on beside the next ones, `wait` will tell."""
        if command == "wait":
            for earlier, beside in self._beside:
                check(earlier, beside.finish(timeout_s=PATIENCE_S))
            self._beside.clear()
            return
        words = [self._meant(word, data) for word in shlex.split(command.rstrip().removesuffix("&"))]
        is_long = words[:2] == ["hetseq", "train"] and "--data" in words
        started = start_command(
            [*words[1:], *(CUT_SHORT if is_long else [])],
            cwd=self.checkout,
            program=HETSEQ if words[0] == "hetseq" else (sys.executable,),
            env={"HOME": str(self.checkout), "GLOO_SOCKET_IFNAME": "lo"},
            is_cold=is_cold,
        )
        if goes_on_beside(command):
            self._beside.append((command, self._closing.enter_context(started)))
            return
        with started as alone:
            check(command, alone.finish(timeout_s=PATIENCE_S))

    def _meant(self, word: str, data: Path | None) -> str:
        word = str(data) if word == DATA and data else word
        return word.replace(HERE, str(self.checkout)).replace(MEETING, self._meeting)


def check(command: str, ended: Finished) -> None:
    assert ended.code == 0, f"{command}\nended with {ended.code}: {ended.err}"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """One in a folder where commands find what they name, and leave their runs."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    (tmp_path / TEXT).mkdir()
    for name in TEXT_PAGES:
        (tmp_path / TEXT / f"{name}.txt").symlink_to(ROOT / "docs" / f"{name}.md")
    with ExitStack() as closing:
        yield Reader(tmp_path, closing)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", pages_that_need_no_data(), ids=name_of)
def test_the_commands_of_a_page_succeed(page: Path, reader: Reader) -> None:
    for command in commands_of(page):
        if not needs_data(command):
            reader.types(command, is_cold=page.name == "README.md")
    if page.name == "custom-task.md":
        assert accuracy(reader.checkout / "runs" / "spirals") > 0.95


def accuracy(run: Path) -> float:
    """The last one on the validation split."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["valid_accuracy"] for row in rows if "valid_accuracy" in row][-1]


@pytest.mark.timeout(400)
def test_the_commands_with_real_data_succeed(reader: Reader, mnist_data: Path) -> None:
    # several pages show the same ones: each of them once
    for command in dict.fromkeys(command for page in pages() for command in commands_of(page) if needs_data(command)):
        reader.types(command, mnist_data)


def test_the_manual_builds_strictly_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    words = [
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--config-file",
        ROOT / "mkdocs.yml",
        "--site-dir",
        tmp_path,
    ]
    ended = run_command(list(map(str, words)), cwd=tmp_path, program=(sys.executable,), timeout_s=110)
    assert ended.code == 0, ended.err
    built = "\n".join(page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html"))
    assert re.findall(r'(?:src="|<link[^>]* href=")https?://[^"]+', built) == []
    assert "class Spirals" in re.sub(r"<[^>]+>", "", built)  # the snippet is in its place
