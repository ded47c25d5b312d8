"""Unequal disks: parts in proportion to what each writes in a second, cut anew only where it is worth it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetseq.checkpoint import Identity, bandwidth
from hetseq.checkpoint.bandwidth import better_weights
from tests.support.checkpoints import LINEAGE, folder, loaded_step, manager, tensors_of, together

GB = 10**9


def test_a_disk_of_a_third_of_the_speed_gets_a_third_of_the_bytes() -> None:
    assert better_weights([GB, GB], [1.0, 3.0]) == (750.0, 250.0)


def test_parts_that_take_about_equally_long_stay() -> None:
    assert better_weights([3 * GB, GB], [1.0, 1.1]) is None
    assert better_weights([3 * GB, GB], [1.0, 2.0]) is not None


def test_the_weights_that_follow_need_no_other_ones() -> None:
    weights = better_weights([GB, GB, GB], [1.0, 2.0, 7.0])
    assert weights is not None
    sizes = [int(GB * weight) for weight in weights]
    speeds = [GB / 1.0, GB / 2.0, GB / 7.0]
    assert better_weights(sizes, [size / speed for size, speed in zip(sizes, speeds)]) is None


@pytest.mark.parametrize(("sizes", "seconds"), [([], []), ([GB, 1000], [1.0, 9.0]), ([GB, GB], [1.0, 0.0])])
def test_what_says_nothing_of_a_disk_changes_nothing(sizes: list[int], seconds: list[float]) -> None:
    assert better_weights(sizes, seconds) is None


def test_a_slow_writer_gets_less_of_the_next_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_LEAST_BYTES", 1)

    def live(group: Any) -> list[float]:
        checkpoints = manager(tmp_path, group, patience_s=5.0)
        checkpoints.prepare(tensors_of(0, 100_000))
        if group.rank == 1:
            _slow_down(checkpoints)
        for step in (1, 2):
            identity = Identity(step, 0, LINEAGE)
            checkpoints.begin(
                tensors_of(step, 100_000), {"step": step}, identity=identity, nonce=step, kinds=["time"], at_once=[]
            )  # fmt: skip
            result = checkpoints.finish()
            assert result is not None
            assert result.ok, result.error
        checkpoints.close()
        return []

    for outcome in together(2, live):
        assert outcome == []
    assert loaded_step(tmp_path) == 2
    sizes = [
        [(folder(tmp_path, step) / f"part-0000{rank}.safetensors").stat().st_size for rank in (0, 1)] for step in (1, 2)
    ]
    assert sizes[0][0] < 1.1 * sizes[0][1]
    assert sizes[1][0] > 3 * sizes[1][1]


def _slow_down(checkpoints: Any) -> None:
    """The answers of this rank's writer say that its first part took a hundred seconds."""
    process = checkpoints._background._writer
    answer = process.answer

    def slow(*given: Any) -> Any:
        found = answer(*given)
        return found if found is None else {**found, "writing_s": 100.0}

    process.answer = slow
