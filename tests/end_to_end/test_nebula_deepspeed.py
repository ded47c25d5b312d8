"""DeepSpeed itself saves and goes on through `hetseq.nebula`; without DeepSpeed these tests are skipped."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, start_command
from tests.support.nightly import nightly

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
BUFFERS = "deepspeed_allreduce_buffer_*"
SCRIPT = str(ROOT / "tests/support/nebula_deepspeed.py")


@pytest.fixture(autouse=True)
def no_buffers() -> Iterator[None]:
    """DeepSpeed leaves the shared memory of its ranks behind, 69 MB each."""
    folder = Path("/dev/shm")
    before = set(folder.glob(BUFFERS))
    yield
    for path in set(folder.glob(BUFFERS)) - before:
        path.unlink(missing_ok=True)


def facts_of(folder: Path, stage: int, world_size: int) -> list[dict[str, Any]]:
    """What each rank of the script says."""
    with ExitStack() as stack:
        commands = [
            stack.enter_context(
                start_command([SCRIPT, str(folder), str(stage), str(rank), str(world_size)], program=(sys.executable,))
            )
            for rank in range(world_size)
        ]
        ended = [command.finish(timeout_s=240) for command in commands]
    assert [end.code for end in ended] == [0] * world_size, "\n".join(end.err[-3000:] for end in ended)
    return [json.loads(end.out.strip().splitlines()[-1]) for end in ended]


@pytest.mark.parametrize("stage", nightly(0, 2, 3))
def test_a_run_goes_on_from_a_tag_as_if_it_had_never_stopped(tmp_path: Path, stage: int) -> None:
    (facts,) = facts_of(tmp_path, stage, 1)
    expected = {
        "loaded": True,
        "went_on": True,
        "newest": True,
        "moved": True,
        "steps": 5,
        "client": "{'a': (1, None)}",
    }
    assert {key: facts[key] for key in expected} == expected
    assert facts["tags"] == ["global_step5", "global_step3"]


@pytest.mark.nightly
def test_two_ranks_save_their_parts_of_the_optimizer_into_one_tag(tmp_path: Path) -> None:
    both = facts_of(tmp_path, 2, 2)
    for facts in both:
        assert facts["loaded"]
        assert facts["went_on"]
        assert facts["newest"]
        assert facts["names"] == both[0]["names"]
    assert len(both[0]["names"]) == 3  # the model, and each rank's part of the optimizer
    assert len(list((tmp_path / "saved").glob("global_step5.*"))) == 1
