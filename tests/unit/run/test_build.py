"""The lines that a run logs before its first step."""

from __future__ import annotations

import pytest

from hetseq.run.announcements import devices_in_words


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["labA/cpu"], "cpu"),
        (["labA/cuda:0", "labA/cuda:1"], "cuda"),
        (["labA/cuda:0", "labA/cpu", "lab/B/cpu"], "1 cuda, 2 cpu"),
    ],
)
def test_devices_of_all_ranks_are_named(names: list[str], expected: str) -> None:
    assert devices_in_words(names) == expected
