"""The benchmark of BERT on a GPU, without one: what is useful, steps, memory, devices, figures, and a run on a CPU."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hetseq.tasks.bert.model import BertConfig
from hetseq.tasks.bert.task import BertTask
from tests.support import cuda_errors

BENCH = Path(__file__).resolve().parents[3] / "bench"
SMALL = ["--device", "cpu", "--model", "tiny", "--length", "16", "--words", "2000", "--steps", "2"]


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts find each other as they do when Python runs one of them."""
    monkeypatch.syspath_prepend(BENCH)


def script(name: str) -> Any:
    return importlib.import_module(name)


def batch_of(rows: int, share: float, seed: int = 0) -> Any:
    return script("made_up").made_up(rows, share, seed, length=16, words=2000, masked_share=5 / 32)


def training_on(device: str, *, dropout: float = 0.1, words: list[str] | None = None) -> tuple[Any, BertConfig]:
    """A training of 2 layers of 64, and its configuration."""
    bench = script("bert_gpu")
    network = BertConfig(2000, 64, 2, 1, 256).with_dropout(dropout)
    return bench.Training(
        network, bench.parse([*SMALL, "--micro-batch", "4", *(words or [])]), torch.device(device)
    ), network


# What is useful.


@pytest.mark.parametrize(
    ("layers", "hidden", "length", "gflops"),
    [(12, 768, 128, 67), (12, 768, 512, 288), (24, 1024, 128, 235), (24, 1024, 512, 996)],
)
def test_a_sequence_of_the_usual_networks_takes_what_the_documentation_says(
    layers: int, hidden: int, length: int, gflops: int
) -> None:
    network = BertConfig(30522, hidden, layers, hidden // 64, 4 * hidden)
    flops = script("bert_gpu").useful_flops(network, [length], round(length * script("bert_gpu").MASKED_SHARE))
    assert round(flops / 1e9) == gflops


def counted(training: Any, batch: Any, *, is_packed: bool) -> int:
    """The operations of a step by torch's own counter."""
    with FlopCounterMode(display=False) as counter:
        training.step(training.data(batch, is_packed=is_packed))
    return counter.get_total_flops()


def test_what_is_useful_is_what_torch_counts_where_nothing_is_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetseq.tasks.nn.vocabulary_loss._function_for", lambda hidden: None)  # as on a GPU
    monkeypatch.setattr("hetseq.tasks.bert.attention._LARGEST_PART", 0.0)  # with queries of all tokens, as there
    for name in ("attention._MULTIPLE_APART", "packing._MULTIPLE"):
        monkeypatch.setattr(f"hetseq.tasks.bert.{name}", 1)  # nothing is padded
    training, network = training_on("cpu")
    for share in (1.0, 0.68):
        batch = batch_of(4, share)
        lengths = batch["attention_mask"].sum(dim=1).tolist()
        useful = script("bert_gpu").useful_flops(network, lengths, len(batch["masked_ids"]))
        assert counted(training, batch, is_packed=True) == useful  # of forward, backward and the optimizer
    assert counted(training, batch, is_packed=False) > useful  # the twin: padding is computed, and of no use
    training.close()


def test_what_flash_attention_computes_anew_is_not_useful() -> None:
    length, hidden = 128, 64
    one, two = BertConfig(2000, hidden, 1, 1, 256), BertConfig(2000, hidden, 2, 1, 256)
    layer = [script("bert_gpu").useful_flops(network, [length], 0) for network in (one, two)]
    dense = 3 * length * (8 * hidden**2 + 4 * hidden * 256)
    attention = layer[1] - layer[0] - dense
    shape = (1, 1, length, hidden)
    by_torch = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    assert by_torch == attention + 2 * length**2 * hidden  # its counter counts the scores of backward once more


# Steps.


def test_made_up_rows_differ_in_their_words_and_not_in_their_work() -> None:
    one, other = (batch_of(8, 0.68, seed) for seed in (0, 1))
    assert not torch.equal(one["input_ids"], other["input_ids"])
    for batch in (one, other):
        lengths = batch["attention_mask"].sum(dim=1)
        assert lengths.sort().values.equal(one["attention_mask"].sum(dim=1).sort().values)
        assert len(batch["masked_ids"]) == len(one["masked_ids"])
        assert batch["attention_mask"].flatten()[batch["masked_positions"]].all()
        assert (batch["masked_positions"] % 16).all()  # [CLS] is not masked


def test_all_that_a_step_reads_is_on_the_device() -> None:
    training, _ = training_on("meta")  # which mixes with a CPU as little as a GPU does
    model = training.model
    for is_packed in (True, False):
        sample = training.data(batch_of(4, 0.68), is_packed=is_packed).micro_batches[0].sample
        sums = BertTask.loss(training.task, model, sample)
        torch.stack(list(sums.values())).sum().backward()
        assert {total.device.type for total in sums.values()} == {"meta"}
    with pytest.raises(RuntimeError, match="device"):
        BertTask.loss(training.task, model, batch_of(4, 0.68))
    training.close()


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_a_step_clips_and_updates(optimizer: str) -> None:
    training, _ = training_on("cpu", dropout=0.0, words=["--optimizer", optimizer])
    data = training.data(batch_of(4, 1.0), is_packed=True)
    training.clip_norm = 0.01
    types: set[torch.dtype] = set()
    training.model.register_forward_hook(lambda _, __, outputs: types.add(outputs[1].dtype))
    losses = [training.step(data) for _ in range(4)]
    assert types == {torch.bfloat16}
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 4
    gradients = [parameter.grad for parameter in training.model.parameters()]
    norm = torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])
    assert norm.item() == pytest.approx(0.01, rel=1e-5)  # float32, a hundred thousand elements
    assert {float(state["step"]) for state in training.optimizer.state.values()} == {4.0}
    training.close()


def test_forms_take_turns_and_only_counted_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = script("bert_gpu")
    done: list[str] = []
    training = SimpleNamespace(step=lambda data: done.append(data) or 1.0)
    clock = SimpleNamespace(start=lambda: done.append("|"), mark=lambda: None, laps=lambda: [1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(bench, "MicroBatchClock", lambda device: clock)
    forms = {"padded": ["a", "b"], "packed": ["A", "B"]}
    found = bench.time_steps(training, forms, torch.device("cpu"), warm_up=1, steps=2)
    assert "".join(done) == "aaAA" + "Aa" + "|" + "bB" + "Aa"
    assert found.seconds == {"padded": [1.0, 4.0], "packed": [2.0, 3.0]}


def test_steps_whose_loss_is_not_finite_are_none() -> None:
    training = SimpleNamespace(step=lambda data: float("nan"))
    with pytest.raises(SystemExit, match="not finite"):
        script("bert_gpu").time_steps(training, {"full": [0]}, torch.device("cpu"), warm_up=0, steps=1)


# Memory.


def test_sizes_double_until_memory_is_short() -> None:
    grow = script("bert_gpu").grow
    assert grow(lambda rows: float(rows) if rows <= 32 else None, first=8, most=2048) == {8: 8, 16: 16, 32: 32}
    assert list(grow(lambda rows: 1.0, first=8, most=100)) == [8, 16, 32, 64]
    assert list(grow(lambda rows: 1.0, first=8, most=5)) == [5]
    assert grow(lambda rows: None, first=8, most=100) == {}


def no_more_than(rows: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes memory run out in the forward of larger micro-batches; what was tried is added to the list."""
    loss, seen = BertTask.loss, []

    def limited(self: BertTask, model: torch.nn.Module, sample: Any) -> Any:
        seen.append(len(sample["next_sentence_labels"]))
        if seen[-1] > rows:
            raise cuda_errors.out_of_memory()
        return loss(self, model, sample)

    monkeypatch.setattr(BertTask, "loss", limited)
    return seen


def test_what_memory_refuses_is_tried_in_halves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = no_more_than(2, monkeypatch)
    released: list[int] = []
    monkeypatch.setattr(script("bert_gpu").memory, "release", lambda device: released.append(seen[-1]))
    assert script("bert_gpu").main([*SMALL, "--forms", "full", "--micro-batch", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "fit in memory" in line] == [
        "(8 rows do not fit in memory: trying 4)",
        "(4 rows do not fit in memory: trying 2)",
    ]
    assert json.loads(lines[-1])["rows"][0]["micro_batch"] == 2
    assert released == [8, 4, 2]  # twice before fewer are tried, and for the next model


def test_where_no_row_fits_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    no_more_than(0, monkeypatch)
    with pytest.raises(SystemExit, match="not even one row fits"):
        script("bert_gpu").main([*SMALL, "--forms", "full", "--micro-batch", "2"])


def test_the_fastest_size_that_memory_holds_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = script("bert_gpu")
    monkeypatch.setattr(bench, "FIRST_ROWS", 1)
    seen = no_more_than(2, monkeypatch)
    arguments = bench.parse([*SMALL, "--micro-batch", "1"])
    arguments.micro_batch = None  # which a CPU refuses
    device = script("gpus").open_device("cpu", without="")
    rows = bench.measure("tiny", 16, "mix", arguments, device, None)
    assert [row["rows"] for row in rows] == ["padded", "packed"]
    assert list(rows[0]["tried"]) == [1, 2]
    assert rows[0]["micro_batch"] == max(rows[0]["tried"], key=rows[0]["tried"].get)
    assert seen.count(4) == 1


def test_memory_that_runs_out_in_the_update_is_refused_and_other_errors_are_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training, _ = training_on("cpu")
    data = training.data(batch_of(2, 1.0), is_packed=True)
    for error, expected in (
        (cuda_errors.out_of_memory(), script("bert_gpu").Refused),
        (RuntimeError("another one"), RuntimeError),
    ):

        def fail(error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(training.optimizer, "step", fail)
        with pytest.raises(expected):
            training.step(data)
    training.close()


# Devices.


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835), ("NVIDIA GH200 480GB", 989), ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L40S", 362),
        ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA L4", 121), ("NVIDIA B200", 2250), ("NVIDIA L40", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("Tesla V100-SXM2-32GB", None), ("CPU", None),
    ],
)  # fmt: skip
def test_a_device_is_known_by_its_name(name: str, tflops: float | None) -> None:
    peak = script("gpus").peak_of(name)
    assert (peak and peak.tflops) == tflops
    assert (peak is script("gpus").H200) == (name == "NVIDIA H200")


def pretend(monkeypatch: pytest.MonkeyPatch, *, major: int = 9, free: float = 0.99) -> list[Any]:
    """Makes torch see two H200; gives the devices that become the current one."""
    current: list[Any] = []
    facts = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "set_device": current.append,
        "get_device_properties": lambda device: SimpleNamespace(name="NVIDIA H200", major=major),
        "is_bf16_supported": lambda including_emulation: major >= 8 or including_emulation,
        "mem_get_info": lambda device: (int(free * 141e9), int(141e9)),
    }
    for name, fact in facts.items():
        monkeypatch.setattr(torch.cuda, name, fact)
    return current


def test_a_gpu_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    current = pretend(monkeypatch)
    device = script("gpus").open_device("cuda:1", without="")
    assert (device.torch, device.name, device.is_shared) == (torch.device("cuda:1"), "NVIDIA H200", False)
    assert script("gpus").open_device("cuda", without="").torch == torch.device("cuda:0")
    assert current == [torch.device("cuda:1"), torch.device("cuda:0")]
    pretend(monkeypatch, free=0.5)
    assert script("gpus").open_device("cuda", without="").is_shared


def test_a_gpu_that_is_not_there_or_too_old_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, major=7)
    with pytest.raises(SystemExit, match=r"cuda:2: expected cuda:0 to cuda:1"):
        script("gpus").open_device("cuda:2", without="")
    with pytest.raises(SystemExit, match="no products of bf16: choose another --device, or do"):
        script("gpus").open_device("cuda:0", without="or do")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"no GPU to measure: .*--device cpu --model tiny"):
        script("bert_gpu").main([])


# From seconds to figures.


def test_figures_are_those_of_real_tokens_and_useful_operations() -> None:
    bench, gpus = script("bert_gpu"), script("gpus")
    seconds = {"padded": [3.0, 6.0, 3.0], "packed": [2.0, 4.0, 2.0]}  # the second pair was slow
    work = bench.Work(sequences=10, tokens=60, padded_tokens=100, flops=int(4e14))
    padded, packed = bench.evaluate(seconds, work, gpus.Peak(1000, "nobody"), None)
    assert (packed["sequences_per_s"].median, packed["tokens_per_s"].median) == (5, 30)
    assert (packed["useful_tflops"].median, packed["mfu"].median) == (200, 0.2)
    assert (packed["x_padded"].low, packed["x_padded"].high) == (1.5, 1.5)
    assert packed["of_ideal"].median == pytest.approx(0.9)
    assert "x_padded" not in padded
    assert [len(bench.cells({"model": "base", "length": 128, "bytes": 1, **row})) for row in (padded, packed)] == [
        len(bench.HEADS)
    ] * 2
    assert bench.evaluate(seconds, work, None, None)[0]["mfu"] is None


@pytest.mark.parametrize(
    ("sequences", "tflops", "verdict"),
    [(1849, 960, "NOT met"), (1850, 960, "met"), (2200, 989, "met, the better one too"), (1850, 989, "NOT met")],
)
def test_a_bar_is_of_sequences_and_of_the_share_of_the_peak(sequences: float, tflops: float, verdict: str) -> None:
    bench, gpus = script("bert_gpu"), script("gpus")
    network = BertConfig(30522, 1024, 24, 16, 4096)
    work = bench.Work(1, 128, 128, bench.useful_flops(network, [128], 20))
    bar = bench.BARS["large", 128]
    row = bench.evaluate({"full": [1 / sequences]}, work, gpus.Peak(tflops, ""), bar)[0]
    assert (row["verdict"], row["bar"]) == (verdict, ">= 1,850 and 45% (better 2,200)")


def test_a_run_ends_in_a_table_and_a_line_and_a_missed_bar_in_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, gpus = script("bert_gpu"), script("gpus")
    assert bench.main([*SMALL, "--micro-batch", "4", "--forms", "full"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = json.loads(lines[-1])["rows"][0]
    assert (row["rows"], row["n"], row["step_s"]["n"], row["mfu"], row["verdict"]) == ("full", 2, 2, None, None)
    assert any("fewer than 15" in line for line in lines)
    # the same where the device is called an H200, of which something is expected
    device = gpus.Device(torch.device("cpu"), "NVIDIA H200", 10**9, 10**9)
    monkeypatch.setattr(bench, "open_device", lambda text, without: device)
    monkeypatch.setitem(bench.BARS, ("tiny", 16), bench.Bar(1e12))
    assert bench.main([*SMALL, "--micro-batch", "4"]) == 1
    lines = capsys.readouterr().out.splitlines()
    rows = json.loads(lines[-1])["rows"]
    assert [(row["rows"], row["verdict"]) for row in rows] == [("full", "NOT met"), ("padded", None), ("packed", None)]
    assert rows[1]["real"] == pytest.approx(0.68, abs=0.02)
    assert rows[0]["mfu"]["median"] > 0
    assert any("others held" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cpu"], "expected --micro-batch N too"),
        (["--device", "tpu"], "expected cuda, cuda:N or cpu"),
        (["--steps", "0"], "at least 1"),
        (["--micro-batch", "-1"], "at least 1"),
        (["--length", "513"], "from 8 to 512"),
        (["--real", "0.5"], "from 0.52 to 1"),
        (["--dropout", "1"], "from 0 to below 1"),
        (["--peak", "nan"], "above 0"),
        (["--words", "1000"], "at least 2000"),
        (["--compile", "--forms", "full", "mix"], "expected --forms full"),
        (["--model", "huge"], "invalid choice"),
    ],
)
def test_arguments_that_cannot_be_meant_end_in_words(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script("bert_gpu").parse(words)
    assert message in capsys.readouterr().err


def test_what_is_compiled_has_full_rows() -> None:
    parse = script("bert_gpu").parse
    assert (parse(["--compile"]).forms, parse([]).forms) == (["full"], ["full", "mix"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bench = script("bert_gpu")
    monkeypatch.setattr(bench, "MOST_LOGITS", 32 * 20 * 30522)
    assert bench.main(["--model", "tiny", "--length", "128", "--steps", "15", "--peak", "1000"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["rows"] for row in rows] == ["full", "padded", "packed"]
    assert list(rows[0]["tried"]) == ["8", "16", "32"]
    assert all(0 < row["mfu"]["median"] < 1 and row["bytes"] > 0 for row in rows)
