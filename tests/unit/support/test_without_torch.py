"""Tests of what needs no torch import none: they begin at once, and say at once what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
#: folders of tests/unit in which no module of tests imports torch
WITHOUT_TORCH = ("balance", "config")
PROGRAM = """
import sys, pytest
folders, one = sys.argv[1:-1], sys.argv[-1]
codes = [pytest.main(["-q", "-p", "no:cacheprovider", *words]) for words in ([*folders, "--collect-only"], [one])]
print("codes", [int(code) for code in codes], "torch" in sys.modules)
"""


def said_of(folders: tuple[str, ...], one: str) -> str:
    """The last line: the exit codes of collecting these folders and of running one file, and whether torch came."""
    words = [f"tests/unit/{name}" for name in (*folders, one)]
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_pure_packages_are_collected_and_tested_without_torch() -> None:
    assert said_of(WITHOUT_TORCH, "balance/test_capacity.py") == "codes [0, 0] False"


@pytest.mark.slow
def test_torch_would_be_seen() -> None:
    """The twin."""
    assert said_of(("training",), "training/test_micro_batches.py").endswith("True")
