"""The pages of "Get started" for a newcomer, who installs HetSeq by the commands of "Install".

From the wheel, the commands of the quickstart run in a folder that has no checkout. The tour is run by `make tour`.
"""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

import hetseq
from tests.support.checkout import bare_environment, checkout
from tests.support.docs import DATA, ROOT, Block, blocks, content_of, file_of, shell_blocks

pytestmark = pytest.mark.slow

START = ROOT / "docs" / "start"
#: a run of real data
DATA_RUN = "runs/mnist"
PATIENCE_S = 240


@dataclass(frozen=True)
class Newcomer:
    """Types commands into bash, without the variables of the tests."""

    home: Path
    environment: dict[str, str]

    def types(self, *commands: str, folder: str) -> str:
        """Run the commands in a folder below the home folder; all must succeed. Returns what they print."""
        activate = ["set -e", "if [ -e ~/env ]; then . ~/env/bin/activate; fi", f"cd ~/{folder}"]
        ended = subprocess.run(
            ["bash", "-c", "\n".join([*activate, *commands])], env={**self.environment, "HOME": str(self.home)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert ended.returncode == 0, f"{commands}\nended with {ended.returncode}:\n{ended.stdout}"
        return ended.stdout


@pytest.fixture
def newcomer(tmp_path: Path) -> Newcomer:
    """With a checkout, and with an environment that has no HetSeq."""
    newcomer = Newcomer(tmp_path / "home", bare_environment(tmp_path / "packages"))
    newcomer.home.mkdir()
    checkout(newcomer.home / "checkout")
    newcomer.types("python3 -m venv env", folder=".")
    return newcomer


def titled(page: str, title: str) -> list[str]:
    """The commands of the block with this title."""
    (block,) = (block for block in shell_blocks(START / page) if f'title="{title}"' in block.info)
    return block.commands()


def run_of(block: Block) -> list[str]:
    """The commands of a block that need no data of the reader's own."""
    return [command for command in block.commands() if not {DATA, DATA_RUN} & set(shlex.split(command))]


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_quickstart_needs_a_wheel_and_no_checkout(newcomer: Newcomer) -> None:
    newcomer.types(*titled("install.md", "a wheel file, for nodes without the checkout"), folder="checkout")
    (newcomer.home / "checkout").rename(newcomer.home.parent / "nowhere")
    here = newcomer.home / "first"
    here.mkdir()
    for block in blocks((START / "quickstart.md").read_text(encoding="utf-8")):
        if (name := file_of(block)) is not None:  # the reader copies it from the page
            (here / name).parent.mkdir(parents=True)
            (here / name).write_text("\n".join(content_of(block)) + "\n")
    typed = [
        command for block in shell_blocks(START / "quickstart.md") if not block.is_excused for command in run_of(block)
    ]
    assert len(typed) == 6
    newcomer.types(*typed, folder="first")
    assert sorted(run.name for run in (here / "runs").iterdir()) == ["again", "digits-yaml", "first", "unequal-workers"]


@pytest.mark.nightly  # `.ci/run` itself begins with a fresh checkout
@pytest.mark.timeout(400)
def test_a_fresh_checkout_is_installed_and_trains(newcomer: Newcomer) -> None:
    newcomer.types(*titled("install.md", "in an environment that has torch: a checkout"), folder="checkout")
    said = newcomer.types(*titled("install.md", "on each node"), folder="checkout")
    assert said.startswith(f"hetseq {hetseq.__version__}")
    assert str(newcomer.home / "checkout" / "hetseq") in newcomer.types(
        "python -c 'import hetseq; print(hetseq.__file__)'", folder="."
    )
    first, *_ = (block for block in shell_blocks(START / "quickstart.md") if not block.is_excused)
    said = newcomer.types(*first.commands(), folder="checkout")
    printed = [line for line in first.lines if not line.startswith(("$ ", "    "))]
    assert len(printed) == 5
    for line in printed[:3]:  # the rest are figures
        assert line in said
