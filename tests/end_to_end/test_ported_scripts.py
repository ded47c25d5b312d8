"""Two scripts as users write them, before and after their move to `hetseq run`: few new lines, the same losses.

`gpt_*` is a plain loop with settings as globals, windows of a file of tokens, and micro-batches; `clm_*` is a loop on
accelerate with loaders, a schedule of transformers and perplexity after each epoch. Before and after take the same
samples in the same order.
"""

from __future__ import annotations

import difflib
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support import forked
from tests.support.commands import ROOT
from tests.support.nightly import nightly
from tests.support.own_loops import run_script

pytestmark = pytest.mark.slow

PORTED = ROOT / "tests" / "support" / "loops" / "ported"
MOST_LINES = 25
FIGURES = {"gpt": 2 * 12 + 2 * 3, "clm": 12 + 2}  # a loss and a rate for each of 12 steps, and evaluations


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    forked.warm_up()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of both scripts."""
    path, draw = tmp_path_factory.mktemp("data"), random.Random(1)
    for name, length in (("train", 3000), ("val", 900)):
        code, codes = 0, []
        for _ in range(length):
            code = (5 * code + draw.choice([1, 1, 1, 2, 7])) % 50
            codes.append(code)
        np.array(codes, np.uint16).tofile(path / f"{name}.bin")
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "old", "red", "dog", "by", "its", "barn"]
    text = " ".join(draw.choice(words) for _ in range(420))
    (path / "train.txt").write_text(text[: 48 * 16])
    (path / "val.txt").write_text(text[1000 : 1000 + 10 * 16])
    return path


def words_of(name: str, folder: Path) -> list[str]:
    """The script's own arguments, for numbers to the last digit."""
    if name == "gpt":
        return [f"--data_dir={folder}", "--digits=16", "--dtype=float64"]
    files = ["--train_file", str(folder / "train.txt"), "--validation_file", str(folder / "val.txt")]
    return [*files, "--digits", "16", "--dtype", "float64"]


def figures(name: str, out: str) -> list[float]:
    """All numbers that the script has printed about its losses."""
    lines = re.findall(r"^(?:iter|step|epoch) \d+: .*", out, flags=re.MULTILINE)
    found = [float(number) for line in lines for number in re.findall(r"\d+\.\d+(?:e-\d+)?", line)]
    assert len(found) == FIGURES[name], out
    return found


@pytest.fixture(scope="module", params=FIGURES)
def before(request: pytest.FixtureRequest, folder: Path) -> tuple[str, list[float]]:
    """A script, and what it says without HetSeq."""
    name = request.param
    if name == "clm":
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    return name, plain(name, folder)


def plain(name: str, folder: Path, *words: str) -> list[float]:
    finished = subprocess.run(
        [sys.executable, str(PORTED / f"{name}_before.py"), *words_of(name, folder), *words],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    (folder / "out" / "ckpt.pt").unlink(missing_ok=True)  # a second start would resume
    return figures(name, finished.stdout)


def moved(name: str, folder: Path, place: Path, *words: str, ranks: tuple[str, ...]) -> list[float]:
    options = ["--cpu", "--ranks", *ranks, "--precision", "fp64", "--save-dir", "run"]
    script = [PORTED / f"{name}_after.py", *words_of(name, folder), *words]
    finished = run_script([*options, *script], cwd=place, timeout_s=120)
    assert finished.code == 0, finished.err
    assert any((place / "out").iterdir()), "the file that it writes itself"
    return figures(name, finished.out)


def apart(one: list[float], other: list[float]) -> float:
    """The largest difference, as a share of the number."""
    return max(abs(mine - theirs) / max(1.0, abs(theirs)) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("ranks", [*nightly(("1",)), ("3", "--balance", "5,2,1")], ids=["1 rank", "3 ranks"])
def test_a_script_that_was_moved_has_the_losses_of_the_old_one(
    ranks: tuple[str, ...], before: tuple[str, list[float]], folder: Path, tmp_path: Path,
    figure: Callable[[str], None],
) -> None:  # fmt: skip
    name, old = before
    difference = apart(moved(name, folder, tmp_path, ranks=ranks), old)
    figure(f"{name}, moved to {ranks[0]} rank(s): {difference:.1e} from itself")
    assert difference <= 1e-12


@pytest.mark.parametrize(("name", "lines"), [("gpt", (22, 24)), ("clm", (24, 42))])
def test_the_lines_that_the_user_writes_are_few(name: str, lines: tuple[int, int]) -> None:
    """And those that fall away: sampling, accumulation, clipping and resuming by hand."""
    old, new = ((PORTED / f"{name}_{when}.py").read_text().splitlines() for when in ("before", "after"))
    parts = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changed = [part for part in parts if part[0] != "equal"]
    written, deleted = (sum(part[end] - part[end - 1] for part in changed) for end in (4, 2))
    assert (written, deleted) == lines
    assert written <= MOST_LINES
