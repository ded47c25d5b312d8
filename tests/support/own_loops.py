"""Runs of scripts with a loop of their own, and what their course was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.commands import HETSEQ, ROOT, Finished, start_command

LOOPS = ROOT / "tests" / "support" / "loops"
LINES = LOOPS / "lines.py"
Course = dict[int, dict[str, Any]]


def run_lines(
    folder: Path, *options: object, event: str = "", env: Mapping[str, str] | None = None, timeout_s: float = 90.0,
    script: Path = LINES,
) -> Finished:  # fmt: skip
    """`hetseq run` of the regression, or of another of these scripts, in fp64, from start to end."""
    words = [*options, "--precision", "fp64", "--save-dir", folder / "run", script, folder, event]
    return run_script(words, env=env, timeout_s=timeout_s)


def run_script(
    words: Sequence[object], *, env: Mapping[str, str] | None = None, timeout_s: float = 90.0, cwd: Path | None = None
) -> Finished:
    """`hetseq run` with these words, from start to end."""
    with start_command(["run", *map(str, words)], env=env, program=HETSEQ, is_cold=False, cwd=cwd) as command:
        return command.finish(timeout_s=timeout_s)


def courses(folder: Path) -> list[Course]:
    """The steps that each process has seen, by number; no process sees one twice."""
    found = []
    for path in sorted(folder.glob("course-*")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len({row["step"] for row in rows}) == len(rows), f"{path.name} saw a step twice"
        found.append({row["step"]: row for row in rows})
    return found


def course_of_one(folder: Path, steps: int) -> Course:
    """The course on one rank, which sees the steps from 1 to `steps`."""
    finished = run_lines(folder, "--cpu", "--ranks", 1)
    assert finished.code == 0, finished.err
    assert "behind the loop" in finished.out
    (course,) = courses(folder)
    assert list(course) == list(range(1, steps + 1))
    return course


def farthest(one: Course, other: Course) -> float:
    """The largest difference of two courses, in the steps and figures of the second, as a share of the number."""
    return max(_apart(one[step], row) for step, row in other.items())


def _apart(one: Any, other: Any) -> float:
    if isinstance(one, dict):
        assert one.keys() >= other.keys()
        return max(_apart(value, other[key]) for key, value in one.items())
    return abs(one - other) / max(1.0, abs(one))
