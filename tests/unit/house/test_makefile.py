"""`make demo` from nothing: what make would call, and nothing is installed."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.docs import ROOT

INDEX = "https://download.pytorch.org/whl"


def calls_of_pip(folder: Path, *words: str, output: int = subprocess.PIPE) -> list[str]:
    """The arguments of pip with which `make` would install the core into an empty folder."""
    command = ["make", "--dry-run", f"VENV={folder / 'venv'}", *words, f"{folder / 'venv'}/.installed-core"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, timeout=60, check=True)
    return arguments(done.stdout) if output == subprocess.PIPE else []


def arguments(said: bytes) -> list[str]:
    found = re.findall(r"^\S+/venv/bin/python -m pip (.*)$", said.decode(), re.M)
    return [" ".join(words.split()) for words in found]


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ((), ""),
        ((f"TORCH_INDEX={INDEX}/cpu",), f"--index-url {INDEX}/cpu --no-deps "),
        ((f"TORCH_INDEX={INDEX}/rocm7.2",), f"--index-url {INDEX}/rocm7.2 "),
    ],
)
def test_the_index_of_torch_is_for_torch_alone(tmp_path: Path, words: tuple[str, ...], options: str) -> None:
    torch, rest = calls_of_pip(tmp_path, *words)
    assert torch.endswith(f"install {options}\"$(grep '^torch==' requirements.txt)\"")
    assert rest.endswith("install -r requirements.txt")
    assert INDEX not in rest


def test_pip_shows_its_progress_where_there_is_a_terminal_and_only_there(tmp_path: Path) -> None:
    assert ["--quiet" in call for call in calls_of_pip(tmp_path)] == [True, True]
    ours, theirs = pty.openpty()
    calls_of_pip(tmp_path, output=theirs)
    os.close(theirs)
    said = b""
    with suppress(OSError), open(ours, "rb", buffering=0) as terminal:  # EIO at the end of a terminal
        while data := terminal.read(65536):
            said += data
    assert ["--quiet" in call for call in arguments(said)] == [False, False]
