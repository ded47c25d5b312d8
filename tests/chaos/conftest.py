"""Fixtures of the chaos tests of one module: warm processes for whole runs, and the undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos import runs
from tests.chaos.owned_runs import Calm, calm_run
from tests.chaos.runs import Chaos, Outcome
from tests.support.nodes import Stock


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    """Warm processes for runs on this node."""
    chaos = Chaos(tmp_path_factory.mktemp("chaos"))
    yield chaos
    chaos.close()


@pytest.fixture(scope="module")
def calm(chaos: Chaos, request: pytest.FixtureRequest) -> Outcome:
    """The run of one process, undisturbed, as long as the runs of the module: its STEPS, if it has some."""
    calm = chaos.run(ranks=1, steps=getattr(request.module, "STEPS", runs.STEPS))
    assert calm.code == 0, calm.said
    return calm


@pytest.fixture(scope="module")
def stock() -> Iterator[Stock]:
    """Warm processes for the launchers of several nodes; none is started before it is asked for."""
    stock = Stock(0)
    yield stock
    stock.close()


@pytest.fixture(scope="module")
def undisturbed(chaos: Chaos, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The run of one device, for runs with owners."""
    return calm_run(chaos, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def undisturbed_layers(chaos: Chaos, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The run of one device with the model of `--shard-model all`."""
    return calm_run(chaos, tmp_path_factory.mktemp("undisturbed-layers"), has_layers=True)


@pytest.fixture(scope="module")
def undisturbed_base(chaos: Chaos, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The same with a layer that is frozen, whose weights no checkpoint holds."""
    return calm_run(chaos, tmp_path_factory.mktemp("undisturbed-base"), has_layers=True, has_base=True)
