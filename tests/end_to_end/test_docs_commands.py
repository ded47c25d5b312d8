"""The commands of README and manual, as a reader would type them: each page from top to bottom in a folder of its own.

Which commands are left out, and that this is said on the page, is the affair of
tests/unit/house/test_docs.py. Trainings with `--data` are cut short; what they reach is measured elsewhere. The first
of the README begins as a reader's does, the others are forked after their imports. The commands of the tour are run by
`make tour`. test_manual.py builds the manual.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import filterfalse
from pathlib import Path

import pytest
import torch

from tests import tour
from tests.support import forked
from tests.support.docs import DATA, PROGRAMS, ROOT, blocks, pages, program_of, shell_blocks
from tests.support.nightly import nightly
from tests.support.reader import Reader
from tests.support.tiny_models import publish

pytestmark = pytest.mark.slow

#: the pages that a newcomer begins with; the others are nightly, and `make tour` is too
FIRST = ("README.md", "docs/start/quickstart.md", "docs/start/own-model.md", "docs/start/own-loop.md")

#: a run directory of real data, by its name in the manual
DATA_RUN = "runs/mnist"


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
    """But for the tour, which is taken by `make tour`."""
    return [
        page for page in pages() if page != tour.PAGE and any(not needs_data(command) for command in commands_of(page))
    ]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """One in a folder where commands find what they name, and leave their runs."""
    with ExitStack() as closing:
        yield Reader(tmp_path, closing)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def is_first(page: Path) -> bool:
    return name_of(page) in FIRST


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "page",
    [
        *filter(is_first, pages_that_need_no_data()),
        *nightly(*filterfalse(is_first, pages_that_need_no_data())),
    ],
    ids=name_of,
)
def test_the_commands_of_a_page_succeed(page: Path, reader: Reader) -> None:
    if page.name == "lora.md":  # in place of the download
        publish(reader.checkout / "base", "qwen2", dtype=torch.bfloat16, max_position_embeddings=256)
    for number, command in enumerate(commands_of(page)):
        if not needs_data(command):
            reader.types(command, is_cold=page == ROOT / "README.md" and number == 0)
    if page.name == "lora.md":
        (opening,) = (block for block in blocks(page.read_text(encoding="utf-8")) if block.language == "python")
        (reader.checkout / "opening.py").write_text("\n".join(opening.lines))
        reader.types("python opening.py")
    if page.name == "own-model.md":
        assert accuracy(reader.checkout / "runs" / "own-model") > 0.95


def accuracy(run: Path) -> float:
    """The last one on the validation split."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["valid_accuracy"] for row in rows if "valid_accuracy" in row][-1]


@pytest.mark.nightly  # test_mnist reads the same files
@pytest.mark.timeout(400)
def test_the_commands_with_real_data_succeed(reader: Reader, mnist_data: Path) -> None:
    # several pages show the same ones: each of them once
    for command in dict.fromkeys(command for page in pages() for command in commands_of(page) if needs_data(command)):
        reader.types(command, mnist_data)
