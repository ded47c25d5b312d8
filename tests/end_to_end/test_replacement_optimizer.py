"""A rank that takes the place of another trains with the optimizer settings of the others."""

from __future__ import annotations

import json

import pytest

from hetseq.errors import EXIT_DONE
from tests.end_to_end.test_shadow_nodes import NO_STATE, WORDS, Course, check_curve, regroups
from tests.support.nodes import Nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

OVERRIDES = ("--optimizer-overrides", "{'weight_decay': 3.0}")


def test_a_replacement_overrides_the_settings_of_its_new_optimizer_too(nodes: Nodes) -> None:
    course = Course(nodes, *NO_STATE, *OVERRIDES)
    course.start("--ranks", 2)
    course.wait_for(5)
    course.kill(1)
    nodes.wait_until(lambda: regroups(course) == 2, "rank 1 is back")
    assert [ended.code for ended in nodes.finish()] == [EXIT_DONE], nodes.story()
    alone = nodes.folder / "alone"
    nodes.start(*WORDS, *OVERRIDES, "--ranks", 1, "--save-dir", alone, "--no-save")
    nodes.finish()
    rows = map(json.loads, (alone / "metrics.jsonl").read_text().splitlines())
    check_curve(course, {row["step"]: row["loss"] for row in rows if "loss" in row})
