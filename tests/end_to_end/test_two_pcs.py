"""The guide "Two PCs", typed as it is on two PCs that share nothing, and what it says is on their screens.

labB is switched off and comes back on the way, and the curve is that of one device. Figures on the screens may differ
from those of the page, words may not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetseq.errors import EXIT_STOPPED
from tests.support.docs import Block
from tests.support.guide import install, prepare, section, typed, where
from tests.support.two_pcs import PATIENCE_S, Pc, two_pcs

pytestmark = [pytest.mark.slow, pytest.mark.netns]

TOLERANCE = 1e-12
_FIGURE = re.compile(r"\d[\d.,]*(?:e[-+]?\d+)?")


def pattern(line: str) -> str:
    """A line of a screen, whatever its figures, their units and the spaces between them are."""
    return r" +".join(map(_pattern_of_word, line.removeprefix(">").split()))


def _pattern_of_word(word: str) -> str:
    if word in ("ms", "s"):
        return "m?s"
    if word == "now":  # of a busy machine
        return rf"(?:now|{_FIGURE.pattern} s)"
    return _FIGURE.sub("FIGURE", re.escape(word).replace(r"\.", ".")).replace("FIGURE", _FIGURE.pattern)


def shows(pc: Pc, block: Block) -> None:
    """Wait until all lines of a block are on the screen."""
    for line in block.lines:
        pc.shows(lambda screen, line=line: re.search(pattern(line), screen), line)


@pytest.fixture
def pcs(tmp_path: Path) -> Iterator[tuple[Pc, Pc]]:
    with two_pcs(tmp_path) as pcs:
        yield pcs


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_two_pcs_train_by_the_commands_of_the_page(pcs: tuple[Pc, Pc], tmp_path: Path) -> None:
    lab_a, lab_b = pcs
    install(pcs, tmp_path)
    prepare(pcs)

    on_a, on_b, b_joins, b_is_new = section("Start")
    running_a = lab_a.starts(typed(on_a))
    lab_a.shows(lambda screen: "step 1/" in screen, "the first step")
    lab_b.starts(typed(on_b))
    shows(lab_b, b_joins)
    shows(lab_a, b_is_new)
    top, once, table = section("Watch")
    lab_b.starts(typed(top))
    shows(lab_b, table)
    lab_b.types(typed(once))

    b_is_gone, b_is_back = section("Switch labB off")
    lab_b.loses_power()
    shows(lab_a, b_is_gone)
    lab_b.has_power_again()
    running_b = lab_b.starts(typed(on_b))
    shows(lab_a, b_is_back)
    seen = lab_a.read("runs/digits/metrics.jsonl").count("\n")
    more = "a step of both"
    lab_a.shows(lambda _: lab_a.read("runs/digits/metrics.jsonl").count("\n") > seen + 3, more)

    stopped, again, difference = section("Stop, resume, compare")
    ends = [lab_a.presses_ctrl_c(running_a), running_b.finish(timeout_s=PATIENCE_S)]
    assert [ended.code for ended in ends] == [EXIT_STOPPED] * 2, ends
    for pc in pcs:
        shows(pc, stopped)
    (step,) = set(re.findall(r"the same command resumes from step (\d+)", ends[0].out))
    (said,) = set(re.findall(r"the same command resumes from step (\d+)", "\n".join(stopped.lines)))
    assert f"--max-update {said} " in typed(again)
    lab_a.types(typed(again).replace(f"--max-update {said} ", f"--max-update {step} "))
    shows(lab_a, difference)
    check_curves(lab_a, int(step))


def check_curves(lab_a: Pc, steps: int) -> None:
    """Both PCs trained, twice, and the losses are those of one device."""
    both, one = (
        {row["step"]: row for row in map(json.loads, lab_a.read(f"runs/{run}/metrics.jsonl").splitlines())}
        for run in ("digits", "one")
    )
    assert sorted(both) == sorted(one) == [*range(1, steps + 1)]
    assert max(abs(both[step]["loss"] - one[step]["loss"]) for step in one) <= TOLERANCE
    sizes = [both[step]["world_size"] for step in sorted(both)]
    changes = [size for size, before in zip(sizes, [0, *sizes]) if size != before]
    assert changes == [1, 2, 1, 2]
    assert all(min(row["shares"]) > 0 for row in both.values() if row["world_size"] == 2)


@pytest.mark.nightly  # test_ssh has two hosts, test_hosts a node that leaves and returns
@pytest.mark.timeout(600)
def test_one_command_over_ssh_trains_on_both(pcs: tuple[Pc, Pc], tmp_path: Path) -> None:
    install(pcs, tmp_path)
    lab_a, _ = pcs
    (options, _), (over_ssh,) = section("Say what to train"), section("One command over ssh")
    for pc in pcs:
        pc.writes(where(options), "\n".join(options.lines) + "\n")
    printed = lab_a.types(typed(over_ssh))
    assert "workers: labA 1, labB 1; they meet at tcp://labA:" in printed
    assert {row["world_size"] for row in map(json.loads, lab_a.read("runs/ssh/metrics.jsonl").splitlines())} == {2}
