"""Loader processes are killed while ranks train: others replace them, and the result is unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.chaos.killers import Killer
from tests.chaos.runs import Chaos, Outcome, verdict
from tests.support.nodes import living_under

STEPS = 600  # enough for six kills on an idle machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class LoaderKiller(Killer):
    """Kills loader processes, sometimes two of one rank or of two."""

    def _kill(self, living: Mapping[int, int]) -> None:
        loaders = sorted(pid for member in living.values() for pid in living_under(member) if is_forked(pid, member))
        if len(loaders) >= 2:
            super()._kill(dict(enumerate(loaders)))


def is_forked(pid: int, member: int) -> bool:
    """Whether it is a copy of its parent, as no writer of checkpoints is."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() == Path(f"/proc/{member}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.mark.fault("FT-19")
def test_killed_loader_processes_are_replaced_and_change_nothing(chaos: Chaos, calm: Outcome) -> None:
    killer = LoaderKiller(0, 6)
    found = chaos.run(killer, ranks=3, steps=STEPS, num_workers=2, balance="1,2,1")
    assert verdict(found, calm) == ""
    assert killer.kills >= 6
    assert "new ones take over at step" in found.said
    assert not [event for event in found.events if event["event"] == "generation" and event["generation"]]
