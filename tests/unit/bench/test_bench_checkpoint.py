"""The benchmark of checkpoints without its clocks: savers, figures, and what a start finds."""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetseq.checkpoint import CheckpointManager

BENCH = Path(__file__).resolve().parents[3] / "bench"
RUN_ID = f"bench-test-{os.getpid()}"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts find each other as they do when Python runs one of them."""
    monkeypatch.syspath_prepend(BENCH)


def script(name: str) -> Any:
    return importlib.import_module(name)


# What saves cost.


def test_a_stall_is_compared_within_its_round() -> None:
    checkpoint = script("checkpoint")
    rounds = [
        {"HetSeq": 0.002 * noise, "torch.save": 0.4 * noise, "DCP async": 0.01 * noise} for noise in (1.0, 9.0, 1.0)
    ]
    of_plain, of_dcp, dcp = checkpoint.stall_figures(rounds, 4e8)
    assert of_plain.value.low == of_plain.value.high == pytest.approx(0.005)
    assert of_dcp.value.median == pytest.approx(0.2)
    assert dcp.value.median == pytest.approx(0.025)
    assert (of_plain.verdict, of_dcp.verdict, dcp.verdict) == ("yes", "yes", "")
    slow = [{**one, "HetSeq": one["torch.save"] / 50} for one in rounds]
    assert [figure.verdict for figure in checkpoint.stall_figures(slow, 4e8)] == ["NO", "NO", ""]


def test_throughput_is_to_stay_above_its_bar_and_a_copy_below() -> None:
    checkpoint = script("checkpoint")
    (fast,) = checkpoint.throughput_figures([{"HetSeq": 1.0, "plain": 0.95}], 1e9)
    (slow,) = checkpoint.throughput_figures([{"HetSeq": 1.0, "plain": 0.8}], 1e9)
    assert (fast.verdict, slow.verdict) == ("yes", "NO")
    (short,) = checkpoint.copy_figures([{"HetSeq": 1.1, "flat": 1.0}])
    (long,) = checkpoint.copy_figures([{"HetSeq": 1.2, "flat": 1.0}])
    assert (short.verdict, long.verdict) == ("yes", "NO")


def test_added_memory_is_what_the_same_loop_takes_without_saves_subtracted() -> None:
    checkpoint = script("checkpoint")
    seen = {"none": (3000, []), "HetSeq": (4030, [1, 2, 3]), "DCP async": (6000, [500, 500, 500])}
    added, grown = checkpoint.memory_figures([seen, seen], 1000)
    assert added.value.median == pytest.approx(1.03)
    assert grown.value.median == pytest.approx(0.002)
    assert grown.value.n == 6
    assert (added.verdict, grown.verdict) == ("yes", "yes")


def test_steps_beside_a_write_leave_out_the_one_that_copies() -> None:
    checkpoint, costs = script("checkpoint"), script("costs")

    def steps(*thread_s: float) -> list[Any]:
        return [costs.Taken(wall_s=2 * seconds, cpu_s=seconds, thread_s=seconds) for seconds in thread_s]

    ours = costs.Beside(calm=steps(1.0, 1.0), busy=steps(3.0, 1.0, 1.02, 1.04))
    assert ours.thread == pytest.approx(1.02)
    assert ours.cpu == ours.wall == pytest.approx((3 + 1 + 1.02 + 1.04) / 4)
    assert ours.extra_s == pytest.approx(2 * (2 + 0.02 + 0.04))
    assert costs.Beside(calm=steps(1.0), busy=steps(1.5)).thread == pytest.approx(1.5)  # over within one step
    dcp = costs.Beside(calm=steps(1.0, 1.0), busy=steps(4.0, 2.0))
    rows = {figure.what: figure for figure in checkpoint.steps_figures([{"HetSeq": ours, "DCP async": dcp}])}
    assert rows["CPU time of the training thread"].verdict == "yes"
    assert rows["wall time, of DCP's"].value.median == pytest.approx(ours.wall / dcp.wall)
    assert "wall / CPU 2.00" in rows["CPU time of the training thread"].beside


def test_who_begins_changes_from_round_to_round() -> None:
    turns = script("costs").turns
    assert [turns(["a", "b", "c"], number) for number in range(3)] == [list("abc"), list("bca"), list("cab")]


def test_four_saves_are_spread_over_a_run() -> None:
    costs = script("costs")
    events: list[str] = []

    class Recorder:
        waited_s = 0.0

        def __getattr__(self, name: str) -> Any:
            return lambda: events.append(name)

    costs.run(Recorder(), 10, Recorder())
    steps = [len([event for event in events[:index] if event == "step"]) for index in places(events, "begin")]
    assert steps == [2, 4, 6, 8]
    assert events.count("poll") == events.count("step") == 10
    assert events[-1] == "finish"
    assert all(events[index - 1] == "finish" for index in places(events, "begin"))
    events.clear()
    costs.run(Recorder(), 10, None)
    assert events == ["step"] * 10


def test_a_run_with_saves_is_compared_with_the_one_beside_it() -> None:
    checkpoint, costs = script("checkpoint"), script("costs")

    def round_of(noise: float) -> dict[str, Any]:
        walls = {"none": 10 * noise, "HetSeq": 10.1 * noise, "torch.save": 14 * noise}
        return {name: costs.Taken(wall, cpu_s=8.0, thread_s=8.0) for name, wall in walls.items()}

    wall, cpu = checkpoint.run_figures([round_of(1.0), round_of(5.0), round_of(2.0)])
    assert wall.value.low == wall.value.high == pytest.approx(1.01)
    assert cpu.value.median == 1
    assert (wall.verdict, cpu.verdict) == ("yes", "")
    assert "torch.save 1.400" in wall.beside


def places(events: list[str], name: str) -> list[int]:
    return [index for index, event in enumerate(events) if event == name]


def test_a_saver_leaves_nothing_behind(tmp_path: Path) -> None:
    saving, costs = script("saving"), script("costs")
    loop = saving.Loop(saving.Shape(1, 8, 1, 20, 8), rows=1, length=4)
    saver = saving.HetSeq(loop, tmp_path / "ours")
    try:
        costs.save_in_loop(loop, saver)
        assert saver.saves == 1
        assert list((tmp_path / "ours" / "checkpoints").glob("step-*")) == []
        saver.begin()
        saver.finish()
        (folder,) = (tmp_path / "ours" / "checkpoints").glob("step-*")  # the twin
        assert (folder / "COMMIT.json").exists()
        saver.clear()
    finally:
        saver.close()


def test_a_plain_write_is_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saving, write = script("saving"), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3_000_000]))  # as disks may
    data = bytes(range(256)) * 40_000  # more than a chunk
    saving.write_plain(tmp_path / "plain", memoryview(data))
    assert (tmp_path / "plain").read_bytes() == data
    with pytest.raises(FileExistsError):
        saving.write_plain(tmp_path / "plain", memoryview(data))


def test_the_file_system_is_that_of_the_longest_mount(tmp_path: Path) -> None:
    file_system = script("saving").file_system
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(tmp_path) not in ("proc", "unknown")


def test_memory_that_is_taken_is_seen() -> None:
    resident = script("resident")
    assert resident.pss_bytes(os.getpid()) > 1 << 20
    assert os.getpid() in resident.tree(os.getppid())
    assert resident.growth_bytes(lambda: b"x" * (64 << 20)) >= 60 << 20  # given back at once, and seen all the same
    assert resident.growth_bytes(lambda: None) < 30 << 20


# States that stay in memory.


def block(script: Any, wall_s: float, kept: int, *, steps: int = 4) -> Any:
    return script.Block(script.Taken(wall_s, wall_s / 2, wall_s / 2), steps, kept, waited_s=0.008)


def test_steps_that_keep_their_states_are_compared_within_a_round_and_all_states_have_to_be_kept() -> None:
    checkpoint, costs = script("checkpoint"), script("costs")
    rounds = [{"none": block(costs, noise, 0), "in memory": block(costs, 1.04 * noise, 4)} for noise in (1.0, 8.0, 1.0)]
    wall, cpu, kept = checkpoint.every_figures(rounds, 4e8)
    assert wall.value.low == wall.value.high == cpu.value.median == pytest.approx(1.04)
    assert (wall.verdict, cpu.verdict, kept.verdict) == ("yes", "", "yes")
    assert "step 250 ms" in wall.beside
    assert "2.0 ms" in cpu.beside
    assert kept.beside == "12 of 12"
    rounds[1] = {"none": block(costs, 1.0, 0), "in memory": block(costs, 1.04, 3)}
    lacking = checkpoint.every_figures(rounds, 4e8)[2]  # most rounds are whole: the median of shares would not tell
    assert (lacking.verdict, lacking.beside) == ("NO", "11 of 12")
    slow = [{"none": block(costs, 1.0, 0), "in memory": block(costs, 1.06, 4)}]
    assert checkpoint.every_figures(slow, 4e8)[0].verdict == "NO"


def test_a_block_counts_what_was_kept_after_its_own_steps() -> None:
    costs = script("costs")
    events: list[str] = []

    class Recorder:
        waited_s = 0.0
        saves = 0

        def begin(self) -> None:
            self.saves += len(places(events, "step")) != 3  # it passes over one state
            events.append("begin")

        def __getattr__(self, name: str) -> Any:
            return lambda: events.append(name)

    found = costs.run_block(Recorder(), 4, Recorder())
    assert events == ["step", "begin"] * 5 + ["finish"]  # the first step is not counted
    assert (found.steps, found.kept) == (4, 3)
    events.clear()
    assert costs.run_block(Recorder(), 4, None).kept == 0
    assert events == ["step"] * 5


def test_a_state_is_passed_over_where_the_last_one_is_not_sealed_before_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = script("saving")
    loop = saving.Loop(saving.Shape(1, 8, 1, 20, 8), rows=1, length=4)
    saver = saving.InMemory(loop, tmp_path / "ours")
    try:
        saver.begin()
        saver.finish()
        with monkeypatch.context() as patched:
            patched.setattr(CheckpointManager, "is_sealed", False)
            saver.settle()
        saver.begin()  # it is sealed by now, but was not when the ranks told each other
        assert saver.saves == 1
        saver.settle()
        saver.begin()  # the twin
        assert saver.saves == 2
        saver.finish()
        assert not saver.is_underway
    finally:
        saver.close()
    assert list((tmp_path / "ours").glob("checkpoints/*")) == []


def test_blocks_take_turns(tmp_path: Path) -> None:
    saving, costs = script("saving"), script("costs")
    loop = saving.Loop(saving.Shape(1, 8, 1, 20, 8), rows=1, length=4)
    seen = costs.measure_every(loop, 2, tmp_path)
    assert [list(taken) for taken in seen] == [["none", "in memory"], ["in memory", "none"]]
    assert all(taken["none"].kept == 0 < taken["in memory"].kept <= costs.EVERY_STEPS for taken in seen)


# Starts after a kill.


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run directory whose state is on the disk and in memory, as a killed process leaves it."""
    restart = script("checkpoint_restart")
    monkeypatch.setattr(restart, "cool", lambda folder: None)  # a test has no disk, maybe
    manager = restart.manager_of(tmp_path, RUN_ID)
    try:
        restart.keep(manager, restart.make_state(1, 2))
        manager.close(has_failed=True)
        yield tmp_path
    finally:
        manager.close(has_failed=True)
        restart.remove_states(RUN_ID)


def test_each_start_loads_what_was_made_from_where_it_should(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restart, load = script("checkpoint_restart"), CheckpointManager.load
    made = restart.make_state(1, 2)
    events: list[Any] = []

    def spied(manager: CheckpointManager, which: str, *, into: Any) -> Any:
        events.append(len(into))
        return load(manager, which, into=into)

    monkeypatch.setattr(restart, "cool", events.append)
    monkeypatch.setattr(CheckpointManager, "load", spied)
    for name in [*restart.STARTS, *restart.STARTS]:  # whatever came before, the state stays in memory
        events.clear()
        start = restart.load(left, RUN_ID, made, name)
        assert events == [left / "checkpoints", 0 if "new" in name else len(made)]
        assert start.wall_s >= start.recover_s
        assert start.state_bytes == sum(tensor.nbytes for tensor in made.values())
    made["model.words"][0, 0] += 1
    with pytest.raises(SystemExit, match="differs from the original"):
        restart.load(left, RUN_ID, made, "memory")
    restart.remove_states(RUN_ID)
    with pytest.raises(SystemExit, match="did not come from the memory"):
        restart.load(left, RUN_ID, made, "memory")


def test_tensors_are_equal_to_the_bit() -> None:
    is_equal, state = script("checkpoint_restart").is_equal, script("checkpoint_restart").make_state(1, 2)
    other = {name: tensor.clone() for name, tensor in state.items()}
    state["model.norm.bias"][0], other["model.norm.bias"][0] = 0.0, -0.0  # torch takes these for equal
    assert not is_equal(state, other)
    other["model.norm.bias"][0] = 0.0
    assert is_equal(state, other)
    assert not is_equal(state, {name: tensor for name, tensor in other.items() if name != "model.norm.bias"})


def test_starts_are_compared_within_their_round() -> None:
    checkpoint, restart = script("checkpoint"), script("checkpoint_restart")

    def round_of(noise: float, *, memory_s: float) -> dict[str, Any]:
        walls = {"memory": memory_s, "disk": 1.0, "memory, new": 2 * memory_s, "disk, new": 1.6}
        return {name: restart.Start(wall * noise, 0.01, wall, 2 * 10**9) for name, wall in walls.items()}

    lent, new = checkpoint.restart_figures([round_of(noise, memory_s=0.24) for noise in (1.0, 8.0, 1.0)])
    assert lent.value.low == lent.value.high == pytest.approx(0.24)
    assert new.value.median == pytest.approx(0.3)
    assert (lent.verdict, new.verdict) == ("yes", "")
    assert "state 2.00 GB; s: 0.24, 1.00" in lent.beside
    assert checkpoint.restart_figures([round_of(1.0, memory_s=0.26)])[0].verdict == "NO"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_killed_process_leaves_a_state_that_fresh_ones_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if script("saving").file_system(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("files in memory are never cold")
    restart = script("checkpoint_restart")
    monkeypatch.setattr(restart, "measure", functools.partial(restart.measure, uncounted=0))
    words = ["--only", "restart", "every", "--shape", "tiny", "--rounds", "1", "--tokens", "16"]
    monkeypatch.setattr("sys.argv", ["checkpoint.py", *words, "--directory", str(tmp_path)])
    script("checkpoint").main()
    rows = json.loads(capfd.readouterr().out.splitlines()[-1])["rows"]
    assert [row["part"] for row in rows] == ["restart"] * 2 + ["every"] * 3
    assert all(row["value"]["median"] > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []
