"""The soak comparison without its processes: uses that the state counts, turns and kills, figures of a run."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, which finds the others as it does when Python runs it."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("soak")


@pytest.fixture
def settings(soak: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of two ranks with 4 samples each, which take no time; this process has them too."""
    made = soak.toy.Settings(str(tmp_path), str(tmp_path / "steps"), 2, 4, 0.0)
    monkeypatch.setenv(soak.toy.SETTINGS, json.dumps(vars(made)))
    return made


def train(soak: Any, batches: list[list[int]], global_batch: int) -> Any:
    """The model after steps with these samples."""
    toy = soak.toy
    model = toy.build()
    optimizer = toy.optimizer_of(model.parameters())
    for batch in batches:
        optimizer.zero_grad()
        squares, uses = toy.computed(model, toy.data()[batch])
        marked = toy.losses(squares, uses, global_batch)
        assert torch.equal(marked, squares)  # the second term has no value
        (marked.sum() / global_batch).backward()
        optimizer.step()
    return model


# What the state says.


def test_the_state_counts_the_uses_of_each_sample(soak: Any, settings: Any) -> None:
    model = train(soak, [[0, 1, 2, 3], [2, 3, 4, 5], [3, 9]], settings.global_batch)
    assert model.uses[:6].tolist() == [1, 1, 2, 3, 1, 1]
    assert soak.in_state(soak.Final(3, model.state_dict())) == 10
    lines = soak.recover.read_lines(Path(settings.steps_file))
    assert [(line.step, line.pid) for line in lines] == [(4, os.getpid()), (8, os.getpid()), (10, os.getpid())]
    assert Path(settings.folder, "computed").read_text().split() == ["4", "4", "2"]


def test_a_count_that_is_not_whole_has_no_figures(soak: Any, settings: Any) -> None:
    model = train(soak, [[0, 1]], settings.global_batch + 1)
    assert soak.in_state(soak.Final(1, model.state_dict())) == 2
    with pytest.raises(SystemExit, match="a part of its weight"):
        soak.in_state(soak.Final(1, {"uses": model.uses.detach() * 0.75}))


def test_the_count_does_not_change_the_training(soak: Any, settings: Any) -> None:
    batches = [[0, 1, 2, 3], [2, 3, 4, 5], [0, 7]]
    layers = soak.toy.build().layers
    optimizer = torch.optim.SGD(layers.parameters(), lr=2.0**-7, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        x, y, _ = soak.toy.data()[batch]
        (((layers(x).squeeze(1) - y) ** 2).sum() / 8).backward()
        optimizer.step()
    counted = train(soak, batches, 8).layers
    for one, other in zip(layers.parameters(), counted.parameters()):
        assert torch.equal(one, other)


def test_shards_have_the_order_of_the_sampler_over_epochs(soak: Any) -> None:
    toy, batch = soak.toy, 8
    shards = [toy.Shard(number, 2, batch) for number in (0, 1)]
    batches = toy.SAMPLES // 2 // batch
    for epoch in (0, 1):
        for number, shard in enumerate(shards):
            sampler = DistributedSampler(toy.data(), 2, number, shuffle=True, seed=toy.SEED)
            sampler.set_epoch(epoch)
            places = range(epoch * batches, (epoch + 1) * batches)
            assert [index for place in places for index in shard.indices(place)] == list(sampler)
    assert toy.uses_after([batches, batches], batch).eq(1).all()
    uses = toy.uses_after([batches + 1, batches - 2], batch)
    assert uses.sum() == 2 * batches * batch - batch
    assert sorted(uses.unique().tolist()) == [0, 1, 2]


# Turns and kills.


def test_all_systems_get_the_same_kills_which_leave_time_to_recover(soak: Any) -> None:
    arguments = soak.parse(["--kill-every", "10"])
    kills = soak.kills_of(0, 35.0, arguments)
    assert [at_s // 10 for at_s, _ in kills] == [0, 1, 2]
    assert all(4 <= at_s % 10 <= 6 for at_s, _ in kills)
    assert kills == soak.kills_of(0, 35.0, arguments)
    assert kills != soak.kills_of(1, 35.0, arguments)
    assert {victim for _, victim in soak.kills_of(0, 1000.0, arguments)} == {0, 1}
    assert soak.kills_of(0, 35.0, soak.parse(["--kill-every", "0"])) == []


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--minutes", "0"], "more than 0"),
        (["--ranks", "1"], "at least 2"),
        (["--ranks", "7"], "no whole number"),
        (["--kill-every", "1"], "at least 2 s"),
        (["--systems", "hetseq,horovod"], "no horovod"),
    ],
)
def test_arguments_that_cannot_be_meant_end_in_words(
    soak: Any, words: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        soak.parse(words)
    assert what in capsys.readouterr().err


def test_a_system_that_fails_costs_the_figures_of_no_other_one(
    soak: Any, settings: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [soak.Run(name, soak.sides("")[name], settings) for name in ("torchrun", "torchft")]
    turns = []

    def take_turn(run: Any, turn: int, turn_s: float, kills: Any) -> None:
        turns.append((run.name, turn, turn_s, len(kills)))
        if run.name == "torchrun" and turn == 1:
            raise SystemExit("it hangs")
        run.rates.append(1.0)
        run.starts_s.append(1.0)

    monkeypatch.setattr(soak, "take_turn", take_turn)
    going = list(both)
    soak.take_turns(going, soak.parse(["--minutes", "9"]))
    names = ["torchrun", "torchft", "torchrun", "torchft", "torchft"]
    assert turns == [(name, turn, 180.0, 12) for name, turn in zip(names, [0, 0, 1, 1, 2])]
    assert going == both[1:]
    assert capsys.readouterr().out == "torchrun --max-restarts is left out: it hangs\n"


def test_only_living_processes_that_have_made_a_step_are_killed(soak: Any, tmp_path: Path) -> None:
    path = tmp_path / "steps"
    assert soak.training(path) == []
    path.write_text(f"8 {os.getpid()} 30 20 20\n8 {2**22 + 1} 31 10 10\n16 {os.getppid()} 32 11 11\n")
    assert soak.training(path) == [os.getppid(), os.getpid()]  # the oldest first


def test_each_start_of_torchrun_gets_its_own_store_and_a_group_of_torchft_that_of_its_agent(
    soak: Any, settings: Any
) -> None:
    found = {name: soak.environment_of(side, settings) for name, side in soak.sides("python").items()}
    own_store = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    assert {name for name, environment in found.items() if environment.get(own_store) == "1"} == {"torchrun"}
    assert {environment["HOME"] for environment in found.values()} == {settings.folder}


def test_torchft_that_is_not_there_is_left_out_with_the_reason(soak: Any, tmp_path: Path) -> None:
    python = tmp_path / "python"
    assert "No such file" in soak.torchft_python(tmp_path, python)[1]
    for said, why_not in (("echo 2.0.0 torchft 1", "its torch is 2.0.0"), ("echo no module; exit 1", "no module")):
        python.write_text(f"#!/bin/sh\n{said}\n")
        python.chmod(0o700)
        assert why_not in soak.torchft_python(tmp_path, python)[1]


# The figures.


def test_lost_missing_and_doubled_samples_are_told_apart(soak: Any, settings: Any, monkeypatch: Any) -> None:
    folder = Path(settings.folder)
    right, found = ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2, 3], [4, 5, 6, 6]])

    def keep(folder: Path, batches: list[list[int]], losses: str) -> None:
        folder.mkdir(exist_ok=True)
        torch.save({"model": train(soak, batches, 8).state_dict(), "step": 2}, folder / "state.pt")
        (folder / "losses").write_text(losses)

    def alone(run: Any, one: Any) -> None:
        assert (one.last_step, one.sample_s) == (2, 0.0)
        before = (folder / "computed").read_text()
        keep(Path(one.folder), right, "1 0.5\n2 0.25\n")
        (folder / "computed").write_text(before)

    monkeypatch.setattr(soak, "train_alone", alone)
    keep(folder, found, "1 0.5\n2 0.75\n2 0.5\n")
    with (folder / "computed").open("a") as file:
        file.write("4\n3\n")  # what was killed before its step
    run = soak.Run("torchrun", soak.sides("")["torchrun"], settings, [2.0, 4.0], 10.0, 30, 1, [1.0, 1.0])
    row = soak.row_of(run)
    assert (row["samples"], row["computed"], row["done_again"]) == (8, 15, 7)
    assert (row["missing"], row["doubled"]) == (1, 1)
    assert (row["off_the_curve"], row["steps_without_loss"]) == (0.25, 0)
    assert row["final_loss_off"] > 0
    assert row["samples_per_s"] == 3.0
    (folder / "position-0").write_text("1")
    (folder / "position-1").write_text("1")
    expected = soak.toy.uses_after([1, 1], 4)
    row = soak.row_of(run)
    assert (row["missing"], row["doubled"]) == (
        int((expected - torch.load(folder / "state.pt")["model"]["uses"]).clamp(min=0).sum()),
        int((torch.load(folder / "state.pt")["model"]["uses"] - expected).clamp(min=0).sum()),
    )


def test_the_table_has_a_row_for_each_system(soak: Any, capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "what": "HetSeq", "samples_per_s": 150.0, "turns": soak.figures.spread([150.0]), "kills": 3, "done_again": 10,
        "computed": 1000, "missing": 0, "doubled": 0, "steps": 60, "samples": 990, "off_the_curve": 1e-15,
        "final_loss_off": 0.0, "steps_without_loss": 1, "save_every_s": 0.5,
    }  # fmt: skip
    arguments = argparse.Namespace(ranks=2, minutes=1.0, kill_every=10.0, sample_ms=10.0)
    soak.report([row, row], arguments)
    head, *table, one, two, three, four, figures = capsys.readouterr().out.splitlines()
    assert "at most 200.0 samples/s" in head
    assert len({line.count("|") for line in table}) == 1
    assert "10 (1.00%)" in table[2]
    assert (one, three) == (two.replace("a save every 0.50 s", "no loss was logged for 1 steps"), one)
    assert two == four
    assert len(json.loads(figures)["rows"]) == 2
