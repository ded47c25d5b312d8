"""Which build of torch fits which cards: the table of docs/start/install.md."""

from __future__ import annotations

import pytest

from hetseq.system.torch_builds import build_for, capability_of, pip_line, release_for
from tests.support.docs import ROOT


@pytest.mark.parametrize(
    ("capabilities", "driver", "build"),
    [
        ((), None, "cpu"),
        (((8, 6),), 580, "cu130"),
        (((8, 6),), 550, "cu126"),  # the driver is older than CUDA 13
        (((7, 5), (12, 0)), 590, "cu130"),
        (((6, 1),), 580, "cu126"),
        (((6, 1), (9, 0)), 580, "cu126"),
        (((3, 7),), 470, "cpu"),
        (((3, 7), (8, 0)), None, "cu130"),
    ],
)
def test_the_build_follows_from_the_oldest_card_and_the_driver(
    capabilities: tuple[tuple[int, int], ...], driver: int | None, build: str
) -> None:
    assert build_for(capabilities, "2.13.0", driver=driver).build == build
    assert build in (ROOT / "docs" / "start" / "install.md").read_text()


def test_a_machine_with_amd_cards_alone_gets_rocm() -> None:
    assert build_for((), "2.13.0", has_amd=True).build == "rocm7.2"
    assert build_for([(8, 0)], "2.13.0", has_amd=True).build == "cu130"


@pytest.mark.parametrize(
    ("capabilities", "driver", "release", "why"),
    [
        (((8, 6),), 515, "2.13.0", "driver 515 is too old: update it to 525 or newer"),
        (((12, 0),), 570, "2.13.0", "driver of 580 or newer, and it has 570"),
        (((6, 1), (12, 0)), 580, "2.13.0", "for capability 6.1 and for 12.0: start two launchers"),
        (((6, 1),), 580, "2.15.0", "torch 2.15.0 has no build for capability 6.1: use torch 2.14 or older on all"),
    ],
)
def test_where_no_build_fits_it_is_said_why(
    capabilities: tuple[tuple[int, int], ...], driver: int, release: str, why: str
) -> None:
    choice = build_for(capabilities, release, driver=driver)
    assert choice.build == ""
    assert why in choice.trouble


def test_few_nodes_change_their_torch_and_none_to_one_without_code_for_its_card() -> None:
    assert release_for(["2.14.1+cpu", "2.13.0+cpu", "2.14.1+cu130"]) == "2.14.1"
    assert release_for(["2.14.1+cpu", "2.13.0+cu130"]) == "2.13.0"
    assert release_for(["2.15.0+cpu", "2.13.0+cu126", "2.15.0+cu130"]) == "2.13.0"
    assert release_for(["not installed", "2.13.0"]) == "2.13.0"
    assert release_for(["not installed"]) == ""


def test_a_build_that_no_index_has_is_not_part_of_the_command() -> None:
    assert pip_line("2.13.0", "cpu") == "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
    assert pip_line("2.13.0", "git1a2b") == "pip install torch==2.13.0"
    assert [capability_of(text) for text in ("8.6", "[N/A]", "")] == [(8, 6), (0, 0), (0, 0)]
