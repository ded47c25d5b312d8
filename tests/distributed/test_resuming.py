"""A checkpoint that comes from another run directory goes straight into the model, if it is of this model and run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq.comm.directory_groups import share
from hetseq.comm.group import Group
from hetseq.errors import CheckpointMismatch
from hetseq.run_directory import RunDirectory
from tests.support.ranks import run_ranks
from tests.support.replicas import HERE, Net, begun, everything, replica_of, resumed, saved_run


def go_on(group: Group, places: list[str], seed: int, words: str) -> tuple[bool, str, dict[str, torch.Tensor]]:
    """Whether the checkpoint was put into the model by the loading; what was refused; and the replica at the end."""
    sharing, directory = share(group, ((0,), (1,))), RunDirectory(Path(places[group.rank]))
    replica, here, refusal = replica_of(Net()), dataclasses.replace(HERE, seed=seed), ""
    beginning = begun(directory, replica, here=here, words=words, sharing=sharing)
    in_place = beginning.loaded.tensors["model.plain"].data_ptr() == replica.model.plain.data_ptr()
    try:
        resumed(directory, replica, beginning, here=here, words=words)
    except CheckpointMismatch as error:
        refusal = str(error)
    sharing.close()
    return in_place, refusal, {name: tensor.clone() for name, tensor in everything(replica).items()}


def two_places(tmp_path: Path, **settings: Any) -> list[str]:
    """Of two run directories of a run only the second has a checkpoint."""
    _, full = saved_run(tmp_path / "full", **settings)
    empty = RunDirectory.prepare(tmp_path / "empty", config_yaml="").adopt_run_id(full.run_id)
    return [str(empty.path), str(full.path)]


def test_what_a_directory_lacks_is_received_into_the_model(tmp_path: Path) -> None:
    expected = everything(saved_run(tmp_path / "again")[0])
    for in_place, refusal, found in run_ranks(go_on, 2, two_places(tmp_path), 7, ""):
        assert (in_place, refusal) == (True, "")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("words", "resets"),
    # its own run's, wherever it is received: so the reset has been done and is not repeated
    [("", {}), ("--reset-dataloader", {"dataloader": 1})],
)
def test_what_will_be_refused_is_received_beside_the_model(tmp_path: Path, words: str, resets: dict[str, int]) -> None:
    for in_place, refusal, found in run_ranks(go_on, 2, two_places(tmp_path, resets=resets), 8, words):
        assert not in_place
        assert "seed 7, this command says 8" in refusal
        assert torch.equal(found["model.plain"], Net().plain)


def test_what_a_reset_allows_is_received_into_the_model(tmp_path: Path) -> None:
    for in_place, refusal, _ in run_ranks(go_on, 2, two_places(tmp_path), 8, "--reset-dataloader"):
        assert (in_place, refusal) == (True, "")
