"""For tests of command lines: a launcher that stays warm, so that many commands cost little more than their steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.commands import WarmLauncher
from tests.support.refusals import TWO, train


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmLauncher]:
    """A launcher that has imported everything, and whose server of workers runs."""
    launcher = WarmLauncher()
    try:
        train(launcher, tmp_path_factory.mktemp("warm"), "--data", "/nowhere", *TWO)
        yield launcher
    finally:
        launcher.close()
