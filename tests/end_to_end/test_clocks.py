"""Two nodes whose clocks of the day are an hour apart: they meet, train, lose a worker and get it back all the same."""

from __future__ import annotations

import datetime
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetseq.monitor.metrics import read_events, read_rows
from tests.support.nightly import nightly
from tests.support.nodes import Nodes, Stock
from tests.support.places import PLACES
from tests.support.shim import compiled, compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiler() is None, reason="needs a C compiler, for a clock that goes wrong"),
]

SOURCE = Path(__file__).parents[1] / "support" / "clock.c"
STEPS = 60
WORDS = shlex.split(
    f"--cpu --task mnist --global-batch-size 50 --max-update {STEPS} --optimizer sgd --lr 0.1 --lr-scheduler constant"
    " --dropout 0 --precision fp64 --disable-validation --save-interval-updates 20 --throttle 0:8"
)
HOUR_S, TOLERANCE = 3600, 1e-12


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes a clock wrong."""
    return compiled(tmp_path_factory.mktemp("clock"), SOURCE)


@pytest.fixture(scope="module")
def calm(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The curve of one process with the right time."""
    nodes = Nodes(stock, tmp_path_factory.mktemp("calm"))
    try:
        nodes.start(*WORDS[: WORDS.index("--throttle")], "--save-dir", nodes.folder / "run")
        (ended,) = nodes.finish()
        assert ended.code == 0, ended.err
        return losses(nodes.folder / "run")
    finally:
        nodes.close()


def losses(save_dir: Path) -> list[float]:
    rows = read_rows(save_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows]


def wrong(clock: Path, by_s: int) -> dict[str, str]:
    """The environment of a process whose clock is wrong."""
    return {"LD_PRELOAD": str(clock), "HETSEQ_TEST_CLOCK_S": str(by_s)}


@pytest.mark.fault("FT-20")
@pytest.mark.parametrize(
    ("where", "of_the_head_s", "of_the_other_s"),
    nightly(("tcp", 0, -HOUR_S), ("directory", HOUR_S, 0), is_many=True),
)
def test_clocks_that_are_an_hour_apart_change_nothing(
    nodes: Nodes, stock: Stock, clock: Path, calm: list[float], where: str, of_the_head_s: int, of_the_other_s: int
) -> None:
    place, run = PLACES[where](nodes.folder), nodes.folder / "run"
    skewed = stock.start(wrong(clock, of_the_head_s or of_the_other_s))
    try:
        words = [*WORDS, "--save-dir", run, "--join", place.url, "--min-ranks", 3]
        head = nodes.start(*words, "--ranks", 2, process=skewed if of_the_head_s else None)
        nodes.wait_until_said(head, "waiting")
        other = nodes.start(*words, process=skewed if of_the_other_s else None)
        rows = run / "metrics.jsonl"
        nodes.wait_until(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 3, "three steps")
        other.signal(signal.SIGKILL, max(other.workers()))
        nodes.wait_until_said(head, "rank 2 on", "was killed", "is back: 3 ranks continue", within_s=30)
        assert [ended.code for ended in nodes.finish()] == [0, 0], nodes.story()
    finally:
        nodes.close()
        skewed.close()
    assert max(abs(mine - right) for mine, right in zip(losses(run), calm, strict=True)) <= TOLERANCE
    assert len(list(run.glob("checkpoints/step-*/COMMIT.json"))) >= 2
    assert place.leftovers() == []
    told = read_events(run / "events.jsonl")[-1]["time_utc"]
    offset_s = datetime.datetime.fromisoformat(told.replace("Z", "+00:00")).timestamp() - time.time()
    assert round(offset_s / HOUR_S) * HOUR_S == of_the_head_s  # the clock was wrong indeed


def test_the_clock_of_a_process_is_wrong(clock: Path) -> None:
    ask = "import time, datetime as d; print(time.time(), d.datetime.now().timestamp(), time.monotonic())"
    said = subprocess.check_output([sys.executable, "-c", ask], env={**os.environ, **wrong(clock, HOUR_S)}, text=True)
    one, other, monotonic = map(float, said.split())
    assert abs(one - time.time() - HOUR_S) < 60
    assert abs(other - time.time() - HOUR_S) < 60
    assert abs(monotonic - time.monotonic()) < 60
