"""A shadow whose head node is gone: where the nodes meet in a directory it becomes the head, over TCP it saves."""

from __future__ import annotations

import pytest

from hetseq.errors import EXIT_DONE, EXIT_STOPPED
from tests.end_to_end.test_shadow_nodes import NO_STATE, Course, calm, check_curve, takeovers
from tests.support.nodes import Nodes
from tests.support.places import directory

__all__ = ["calm"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.mark.nightly
def test_where_the_nodes_meet_in_a_directory_a_shadow_becomes_the_head(nodes: Nodes, calm: dict[int, float]) -> None:
    course = Course(nodes, *NO_STATE, place=directory(nodes.folder).url)
    head = course.start("--ranks", 2, cold=True)
    shadow = course.follow()
    course.wait_for(course.step() + 3)
    head.process.kill()  # and its workers end with it
    assert [ended.code for ended in nodes.finish(shadow)] == [EXIT_DONE], nodes.story()
    check_curve(course, calm)
    assert len(takeovers(course)) == 1


def test_over_tcp_a_shadow_saves_the_state_and_stops(nodes: Nodes, calm: dict[int, float]) -> None:
    course = Course(nodes, "--no-epoch-checkpoints")
    head = course.start("--ranks", 2, cold=True)
    shadow = course.follow()
    course.wait_for(course.step() + 3)
    last = course.step()
    head.process.kill()
    (ended,) = nodes.finish(shadow)
    assert ended.code == EXIT_STOPPED, nodes.story()
    assert f"resumes from step {last}" in ended.err or f"resumes from step {last + 1}" in ended.err, nodes.story()
