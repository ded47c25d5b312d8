"""The benchmarks without their clocks: what they are asked, how timings become figures, and what they print."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import mmap
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts find each other as they do when Python runs one of them."""
    monkeypatch.syspath_prepend(BENCH)


def script(name: str) -> Any:
    return importlib.import_module(name)


# From timings to figures.


def test_a_busy_round_leaves_the_median_of_ratios_alone() -> None:
    figures = script("figures")
    calm, busy = [1.0, 1.0, 3.0], [2.0, 6.0, 6.0]  # the second loop always takes twice as long; two rounds were busy
    ours, theirs = [1.0, 3.0, 3.0], [2.0, 6.0, 6.0]
    assert figures.spread(figures.paired(theirs, ours)).median == 2
    assert figures.spread(figures.paired(busy, calm)).median != 6 / 1  # the twin: a ratio of medians would say 6
    with pytest.raises(ValueError):
        figures.paired([1.0], [1.0, 2.0])


def test_quartiles_are_values_that_were_seen() -> None:
    figures = script("figures")
    five = figures.spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (five.n, five.median, five.low, five.high) == (5, 3, 2, 4)
    assert five.shown(".0f", 100) == "300 (200-400)"
    one = figures.spread([7.0])
    assert (one.median, one.low, one.high) == (7, 7, 7)
    assert figures.spread([1.0, 2.0, 9.0, 10.0]).median == 5.5


def test_an_equal_split_is_held_up_by_the_slowest() -> None:
    figures = script("figures")
    reached = [figures.equal_split_share((1, k)) for k in (1, 2, 3, 4)]
    assert reached == pytest.approx([1, 2 / 3, 1 / 2, 2 / 5])
    # 4 ranks, a quarter of 12 samples each: the slowest takes 3 * 4, all together could do 12 in 12 / 2.75
    assert figures.equal_split_share((1, 1, 2, 4)) == pytest.approx((12 / 12) / (1 + 1 + 1 / 2 + 1 / 4))


def test_shares_of_speeds_and_efficiency() -> None:
    figures = script("figures")
    assert figures.share_of_sum(285.0, [200.0, 100.0]) == pytest.approx(0.95)
    assert figures.efficiency(8.0, 1.0, 8) == 1
    assert figures.efficiency(8.0, 2.0, 8) == 0.5


def test_a_throttled_rank_is_busy_only_beyond_its_sleep() -> None:
    figures = script("figures")
    assert figures.busy_mark(figures.stretch(3.0, 1.0, factor=3)) == ""
    assert "1.50 x" in figures.busy_mark(figures.stretch(4.5, 1.0, factor=3))
    assert figures.busy_mark(figures.stretch(3.0, 1.0)) != ""


def test_shares_have_settled_when_they_stay() -> None:
    figures = script("figures")
    assert figures.settled_after([[50, 50], [76, 24], [75, 25], [75, 25]]) == 1
    assert figures.settled_after([[75, 25], [75, 25]]) == 0
    assert figures.settled_after([[75, 25], [50, 50], [75, 25]]) == 2  # it left again
    assert figures.settled_after([[750, 250], [720, 280], [750, 250]]) == 2  # 30 of 250 are more than a twentieth
    assert figures.settled_after([[9, 11], [10, 10]]) == 0  # one sample more or less is as near as shares come
    assert figures.settled_after([[750, 250], [738, 262], [750, 250]]) == 0  # 12 of 250 are less


def test_slow_steps_are_counted_up_to_the_last_one() -> None:
    figures = script("figures")
    assert figures.slow_steps([6.0, 6.0, 2.5, 2.5, 2.5, 2.5, 2.5]) == 2
    assert figures.slow_steps([2.5, 6.0, 2.5, 2.5, 2.5, 2.5, 2.5]) == 2  # a change is seen a step late
    assert figures.slow_steps([6.0] * 4 + [2.5] * 5) == 4
    assert figures.slow_steps([2.5] * 7) == 0


def test_curves_that_part_are_seen() -> None:
    figures = script("figures")
    assert figures.largest_gap([[2.0, 1.0], [2.0, 1.0]]) == 0
    assert figures.largest_gap([[2.0, 1.0], [2.0, 1.25], [2.5, 1.0]]) == 0.5
    assert math.isnan(figures.largest_gap([[2.0, 1.0], [2.0, math.nan]]))
    with pytest.raises(ValueError):
        figures.largest_gap([[2.0, 1.0], [2.0]])


def test_a_table_is_aligned() -> None:
    lines = script("figures").table(["", "step"], [["ours", "1.0"], ["bare loop", "1.25"]]).splitlines()
    assert lines == [
        "|           | step |",
        "| --------- | ---- |",
        "| ours      | 1.0  |",
        "| bare loop | 1.25 |",
    ]


def test_all_figures_are_one_line_of_json() -> None:
    figures = script("figures")
    row = {"speed": figures.spread([1.0, 2.0, 4.0]), "gap": math.nan, "shares": (3, 1), "path": Path("data")}
    text = figures.json_line("het", {"ratios": [(1.0, 3.0)], "change": False}, [row])
    assert "\n" not in text
    assert json.loads(text) == {
        "bench": "het",
        "settings": {"ratios": [[1, 3]], "change": False},
        "rows": [
            {"speed": {"n": 3, "median": 2, "quartiles": [1, 4]}, "gap": None, "shares": [3, 1], "path": "data"},
        ],
    }


# What the scripts are asked.


def test_ratios_are_how_many_times_ranks_are_slowed_down() -> None:
    het = script("het")
    assert het.factors("1,3") == (1.0, 3.0)
    assert het.factors("1,1,2,4") == (1.0, 1.0, 2.0, 4.0)
    assert het.parse(["1,2", "1,3"]).ratios == [(1.0, 2.0), (1.0, 3.0)]


def test_both_ways_of_a_round_count_as_one() -> None:
    het = script("het")
    order = []

    class Ranks:
        world_size = 2

        def together(self, name: str, *, settle: int, steps: int) -> list[Any]:
            return self.timings(name, steps)

        def side_by_side(self, name: str, *, settle: int, least_s: float) -> list[Any]:
            assert least_s == 1.5
            return self.timings("busy", 3)

        def alone(self, name: str, rank: int, *, settle: int, least_s: float) -> Any:
            return self.timings("idle", 3)[rank] if rank == 0 else het.Timing(1.0, 1.0, 4, [{}], [])

        def timings(self, name: str, steps: int) -> list[Any]:
            order.append(name)
            wall_s = float(len(order))
            return [het.Timing(wall_s * (1 + rank), 0.5, 8, [{"loss": wall_s}] * steps, []) for rank in range(2)]

    one = het.one_round(Ranks(), 1, het.parse(["1,2", "--steps", "4", "--seconds", "3"]))
    assert order == ["busy", "equal", "idle", "auto", "auto", "idle", "equal", "busy"]
    assert [(rank.wall_s, rank.samples, len(rank.steps), rank.cpu_s) for rank in one.auto] == [
        (9.0, 16, 4, 1.0), (18.0, 16, 4, 1.0)
    ]  # fmt: skip
    assert [rank.speed for rank in one.busy] == [16 / 9, 16 / 18]
    assert [rank.wall_s for rank in one.idle] == [9.0, 2.0]
    assert [step["loss"] for step in one.equal[0].steps] == [2.0, 2.0, 7.0, 7.0]


@pytest.mark.parametrize("text", ["3", "1,", "1,x", "1,0.5", "1,nan", "1,inf", ""])
def test_other_ratios_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="as in 1,3"):
        script("het").factors(text)


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("het", ["1,2", "--batch", "1000"], "expected a divisor of 15360"),
        ("het", ["1,2", "--rounds", "0"], "at least 1"),
        ("het", [], "RATIO"),
        ("scale", ["--emulate", "3"], "expected 2, 4, 8, 16 or 32"),
        ("scale", ["--emulate", "8", "--batch", "1000"], "expected a divisor"),
        ("scale", ["--ranks", "1"], "expected 2 or more"),
        ("scale", ["--rounds", "-1"], "at least 1"),
        ("step", ["--batch", "-8"], "at least 1"),
        ("step", ["--peers", "Horovod"], "invalid choice"),
        ("step", ["--network", "transformers"], "expected a BERT, and --model mnist is none"),
        ("floor", ["--size", "0"], "at least 1"),
        ("pack", ["--rounds", "0"], "at least 1"),
        ("pack", ["--hidden", "96"], "a multiple of 64"),
        ("pack", ["--real", "0.4"], "shares from 0.52 to 1"),
        ("checkpoint_load", ["--rounds", "0"], "at least 1"),
        ("checkpoint_load", ["--directory", "/dev/null"], "--directory /dev/null: expected a directory"),
        ("cold_read", ["--size", "0"], "at least 1"),
        ("cold_read", ["--directory", "/dev/null"], "--directory /dev/null: expected a directory"),
        ("checkpoint", ["--rounds", "-1"], "at least 1"),
        ("checkpoint", ["--only", "speed"], "invalid choice"),
        ("checkpoint", ["--steps", "4"], "at least 5"),
        ("checkpoint", ["--tokens", "600"], "this shape has 512 positions"),
    ],
)
def test_arguments_that_cannot_be_meant_end_in_words(
    name: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script(name).parse(words)
    assert message in capsys.readouterr().err


def test_a_larger_step_still_ends_with_the_epoch() -> None:
    larger = script("workloads").larger_batch
    assert [larger("mnist", batch) for batch in (1280, 2560, 5120, 15360)] == [2560, 5120, 15360, None]
    assert larger("bert-tiny", 192) == 384


def test_defaults_follow_what_is_asked() -> None:
    scale, step = script("scale"), script("step")
    assert (scale.parse([]).steps, scale.parse([]).batch) == (10, 16)
    assert (scale.parse(["--emulate", "8"]).steps, scale.parse(["--emulate", "8"]).batch) == (2, 3072)
    assert step.parse([]).peers == list(step.PEERS)
    assert step.parse(["--peers", "none"]).peers == []
    assert step.parse(["--peers", "HF Trainer"]).peers == ["HF Trainer"]


def test_a_step_of_ours_is_multiplied_as_in_a_worker_and_those_beside_it_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = script("settings")
    monkeypatch.setattr(settings, "_of_a_worker", lambda: "medium")
    ours = settings.products_of_a_worker()(torch.get_float32_matmul_precision)
    assert [ours(), torch.get_float32_matmul_precision(), ours()] == ["medium", "highest", "medium"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_sizes_of_steps_divide_the_images() -> None:
    images, het, scale = script("random_images").SAMPLES, script("het"), script("scale")
    sizes = [
        het.SIZES["mnist"][0],
        2 * scale.LOCAL_BATCH["mnist"],
        scale.EMULATED_BATCH,
        script("step").BATCHES["mnist"],
    ]
    assert [size for size in sizes if images % size] == []
    assert images % 1000  # the twin


# From rounds to rows.


def timing(wall_s: float, samples: int, *, cpu_s: float = 1.0, shares: tuple[int, ...] = (), loss: float = 1.0) -> Any:
    step = {"seconds": wall_s, "shares": list(shares), "loss": loss, "samples": samples}
    return script("ranks").Timing(wall_s=wall_s, cpu_s=cpu_s, samples=samples, steps=[step], settling=[])


def test_a_run_is_as_fast_as_its_slowest_rank_and_solo_speeds_add_up() -> None:
    het = script("het")
    one = het.Round(
        auto=[timing(1.0, 280, shares=(225, 75)), timing(1.12, 280, shares=(225, 75))],
        equal=[timing(2.0, 280), timing(1.9, 280)],
        busy=[timing(1.0, 200), timing(3.0, 225, cpu_s=1.0)],  # 200 + 75 samples a second
        idle=[timing(0.8, 200), timing(2.4, 225)],
    )
    row = het.evaluate(het.Case("mnist", (1.0, 3.0), 280, first=one.auto[0].steps, rounds=[one]))
    assert row["auto_of_busy"].median == pytest.approx(250 / 275)
    assert row["equal_of_busy"].median == pytest.approx(140 / 275)
    assert row["auto_of_idle"].median == pytest.approx(250 / (275 / 0.8))
    assert row["gain"].median == pytest.approx(250 / 140)
    assert row["wall_to_cpu"].median == pytest.approx(1)
    assert row["equal_at_most"] == pytest.approx(0.5)
    assert len(het.cells(row)) == len(het.HEADS)


def test_a_change_in_mid_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    het = script("het")
    one = het.Round(**{turn: [timing(1.0, 8, shares=(6, 2))] * 2 for turn in ("auto", "equal", "busy", "idle")})
    change = [{"seconds": seconds, "shares": [7, 1]} for seconds in (0.5, 1.5, 1.5, 0.6, 0.6, 0.6, 0.6, 0.6)]
    case = het.Case("mnist", (1.0, 3.0), 8, first=one.auto[0].steps, rounds=[one], change=change)
    het.say(het.evaluate(case))
    assert "3 slow steps" in capsys.readouterr().out


def test_two_ranks_are_compared_round_by_round() -> None:
    scale = script("scale")
    rounds = []
    for noise in (1.0, 5.0, 1.0):  # the second round was busy from end to end
        solo = [timing(2.0 * noise, 8), timing(2.0 * noise, 8)]
        rounds.append(
            {
                "alone": [timing(1.9 * noise, 8), timing(1.9 * noise, 8)],
                "both busy": solo,
                "ours": [timing(2.1 * noise, 16), timing(2.0 * noise, 16)],
                "gloo": [timing(2.3 * noise, 16), timing(2.2 * noise, 16)],
                "ddp": [timing(2.4 * noise, 16), timing(2.4 * noise, 16)],
                "ddp, alike": [timing(2.2 * noise, 16), timing(2.2 * noise, 16)],
            }
        )
    rows = {row["what"]: row for row in scale.evaluate(rounds, 8)}
    assert rows["ours"]["of_busy"].low == rows["ours"]["of_busy"].high == pytest.approx(2.0 / 2.1)
    assert rows["ours"]["of_ddp"].median == pytest.approx(2.4 / 2.1)
    assert rows["ours"]["of_ddp_alike"].median == pytest.approx(2.2 / 2.1)
    assert rows["both busy"]["of_busy"].median == 1
    assert rows["alone"]["step_s"].median == pytest.approx(1.9)


def test_efficiency_counts_only_for_equal_curves(capsys: pytest.CaptureFixture[str]) -> None:
    scale = script("scale")
    arguments = scale.parse(["--emulate", "2"])
    seen = {1: [[timing(8.0, 64, cpu_s=4.0)]], 2: [[timing(5.0, 64), timing(4.0, 64)]]}
    rows = scale.evaluate_worlds(seen, {1: [2.0, 1.0], 2: [2.0, 1.000005]}, factor=2)
    assert [row["efficiency"].median for row in rows] == [1, 0.8]
    assert scale.report_worlds(rows, arguments) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][1]["loss"] == pytest.approx(1, abs=1e-5)
    parted = scale.evaluate_worlds(seen, {1: [2.0, 1.0], 2: [2.1, 1.0]}, factor=2)
    assert scale.report_worlds(parted, arguments) == 1
    assert "the curves differ" in capsys.readouterr().out


def test_rivals_do_a_step_after_each_of_the_peers_in_changing_order() -> None:
    step = script("step")
    arguments = argparse.Namespace(rounds=3, batch=1, warm_up=2)
    steps: list[str] = []
    rivals = {"HetSeq": lambda: steps.append("ours"), "bare loop": lambda: steps.append("bare")}
    times = step.beside(rivals, step.alone(lambda: steps.append("peer")), None, arguments)
    assert steps[:6] == ["peer", "ours", "bare", "peer", "bare", "ours"]
    assert {name: len(seconds) for name, seconds in times.items()} == {"peer": 3, "HetSeq": 3, "bare loop": 3}
    assert len(steps) == 3 * (2 + 3)


def test_the_row_of_a_peer_is_its_time_over_that_of_its_neighbours() -> None:
    step = script("step")
    times = {"peer": [(2.0, 4.0), (6.0, 6.0)], "HetSeq": [(1.0, 4.0), (3.0, 6.0)]}
    row = step.evaluate("Accelerate", times, of=["HetSeq"])
    assert (row["cpu of HetSeq"].median, row["wall of HetSeq"].median) == (2, 1)
    assert row["wall_to_cpu"] == pytest.approx(20 / 12)


# Loads of a checkpoint.


def loads_of(script: Any, **seconds: list[float]) -> Any:
    """Times by format: cold as given, warm half of it."""
    names = {"ours": script.OURS, "plain": script.PLAIN, "torch": script.TORCH, "dcp": script.DCP}
    return {
        names[name]: {kind: [script.Taken(s * f, s * f) for s in values] for kind, f in (("cold", 1.0), ("warm", 0.5))}
        for name, values in seconds.items()
    }


def test_loads_are_compared_round_by_round_and_a_bar_that_is_missed_is_an_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = script("checkpoint_load")
    arguments = load.parse(["--rounds", "3"])
    ours = [1.0, 9.0, 1.0]  # the second round was busy from end to end
    for torch_s, dcp_s, code in (([2.2, 20.0, 2.2], ours, 0), ([1.9, 17.0, 1.9], ours, 1), ([3.0] * 3, [0.9] * 3, 1)):
        times = loads_of(load, ours=ours, plain=[0.5, 4.0, 0.5], torch=torch_s, dcp=dcp_s)
        rows = load.evaluate(times, dict.fromkeys(times, 500), 1000)
        by_name = {row["what"]: row for row in rows}
        assert by_name[load.TORCH]["cold x"].median == pytest.approx(torch_s[0])
        assert by_name[load.OURS]["cold x"].low == by_name[load.OURS]["warm x"].high == 1
        assert by_name[load.PLAIN]["warm_gb_per_s"].median == pytest.approx(1000 / 0.25 / 1e9)
        assert load.report(rows, 3, 1000, arguments) == code
        lines = capsys.readouterr().out.splitlines()
        assert json.loads(lines[-1])["rows"][0]["memory"] == 0.5
        assert sum(": NO)" in line for line in lines) == code


def test_somebody_else_begins_each_round() -> None:
    order_of = script("checkpoint_load").order_of
    names = ["a", "b", "c", "d"]
    orders = ["".join(order_of(names, number)) for number in range(8)]
    assert orders == ["abcd", "dcba", "bcda", "adcb", "cdab", "badc", "dabc", "cbad"]


def test_pages_in_the_cache_are_counted_and_a_cooled_file_has_none(tmp_path: Path) -> None:
    load = script("checkpoint_load")
    path = tmp_path / "state"
    path.write_bytes(bytes(10 * load.PAGE_BYTES + 1))
    assert load.cached_pages(path) == (11, 11)
    (tmp_path / "empty").touch()
    assert load.cached_pages(tmp_path / "empty") == (0, 0)
    refusal = ""
    try:
        load.cool(tmp_path)
    except SystemExit as told:  # a file system in memory
        refusal = str(told)
    assert load.cached_pages(path) == ((11, 11) if "11 of 11 pages" in refusal else (11, 0))


def test_each_way_to_read_a_cold_file_fills_the_memory(tmp_path: Path) -> None:
    read = script("cold_read")
    content = random.Random(1).randbytes(9 * read.MB + 4096)
    path = tmp_path / "file"
    path.write_bytes(content)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:  # the file system does not know it
        ways = {name: way for name, way in read.WAYS.items() if not name.startswith("O_DIRECT")}
    else:
        ways = read.WAYS
    for name, way in ways.items():
        memory = memoryview(mmap.mmap(-1, len(content)))
        way(path, memory)
        assert memory == content, name


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_file_that_ends_early_ends_the_reading_in_words(tmp_path: Path, threads: int) -> None:
    read = script("cold_read")
    (tmp_path / "file").write_bytes(bytes(4 * read.MB))
    memory = memoryview(mmap.mmap(-1, 8 * read.MB))
    for way in (read.in_turn, read.by_region):
        with pytest.raises(EOFError, match="ends before its data"):
            way(tmp_path / "file", memory, threads=threads, call=read.MB)


def test_ways_to_read_are_compared_within_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    read = script("cold_read")
    times = {read.PLAIN: [1.0, 8.0, 9.0], "another": [2.0, 4.0, 3.0]}  # seconds; medians alone would say 2.67
    taken = {name: [read.Taken(wall_s, 0.5) for wall_s in walls] for name, walls in times.items()}
    read.report(taken, read.parse(["--size", "100"]))
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["x"]["median"] for row in rows] == [1, 2]
    assert rows[1]["x"]["quartiles"] == [0.5, 3]
    assert rows[1]["gb_per_s"]["median"] == pytest.approx(100 * read.MB / 3 / 1e9)


@pytest.mark.parametrize("format", ["OURS", "PLAIN", "TORCH", "MAPPED", "DCP", "SAFETENSORS"])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_each_format_loads_what_it_saved_into_the_tensors(tmp_path: Path, format: str) -> None:
    load = script("checkpoint_load")
    saved = load.make_state(1, 2)
    assert len(saved) == 3 * 16
    assert load.FORMATS.keys() >= load.BARS.keys() | {getattr(load, format)}
    state = {name: tensor.clone().fill_(-1.0) for name, tensor in saved.items()}
    places = {name: tensor.data_ptr() for name, tensor in state.items()}
    load.FORMATS[getattr(load, format)](tmp_path / "folder", saved)(state)
    assert all(tensor.equal(saved[name]) for name, tensor in state.items())
    assert {name: tensor.data_ptr() for name, tensor in state.items()} == places


# What is trained, and how ranks meet.


def test_made_up_rows_are_full_and_read_by_the_task(tmp_path: Path) -> None:
    workloads = script("workloads")
    work = workloads.prepare("bert-tiny", tmp_path / "data", 6)
    dataset, shape = work.load(), workloads.BERTS["bert-tiny"]
    batch = dataset.collater(dataset.__getitems__([5, 0]))
    assert len(dataset) == 6
    assert batch["attention_mask"].all()
    assert batch["input_ids"].shape == (2, shape.length)
    assert len(batch["masked_ids"]) == 2 * shape.predictions


def test_packed_steps_are_compared_pair_by_pair_and_with_what_a_token_is_worth() -> None:
    seconds = {"padded cpu": [3.0, 6.0, 3.0], "packed cpu": [2.0, 4.0, 2.0]}  # the second pair was busy
    seconds |= {"padded wall": [3.0, 9.0, 3.0], "packed wall": [2.0, 9.0, 2.0]}
    row = script("pack").evaluate(seconds, 0.5)
    assert (row["ratio_cpu"].median, row["ratio_cpu"].low, row["ratio_cpu"].high) == (1.5, 1.5, 1.5)
    assert row["of_ideal"].median == 0.75  # half the tokens could take half the time
    assert row["wall_to_cpu"] == pytest.approx(28 / 20)


def test_rows_to_be_packed_have_the_share_of_real_tokens_that_is_asked() -> None:
    pack = script("pack")
    for share in (0.68, 1.0):
        batch = pack.made_up(16, share, 3)
        mask = batch["attention_mask"]
        assert mask.float().mean().item() == pytest.approx(share, abs=0.005)
        assert mask.flatten()[batch["masked_positions"]].all()
        assert len(batch["masked_ids"]) == pytest.approx(0.15 * mask.sum().item(), rel=0.05)
    assert not torch.equal(pack.made_up(16, 0.68, 0)["input_ids"], pack.made_up(16, 0.68, 1)["input_ids"])


def test_the_rows_to_be_packed_may_be_so_short_that_each_has_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    pack = script("pack")
    for length in (31, 129):
        with pytest.raises(SystemExit):
            pack.parse(["--length", str(length)])
        assert "--length: expected a number from 32 to 128" in capsys.readouterr().err
    least = pack.parse(["--length", "32", "--real", "0.52"])
    mask = pack.made_up(16, *least.real, 0, length=least.length)["attention_mask"]
    assert mask.shape == (16, 32)
    assert mask.any(dim=1).all()


def test_ranks_meet_in_a_folder(tmp_path: Path) -> None:
    ranks = script("ranks")
    ranks.FolderStore(tmp_path / "store").set("ours/0", b"here")
    assert ranks.FolderStore(tmp_path / "store").get("ours/0", 0) == b"here"
    with pytest.raises(SystemExit, match="ours/1"):
        ranks.FolderStore(tmp_path / "store").get("ours/1", 0)
