"""The benchmarks of pre-training and fine-tuning without their runs: figures, tables and the picture of the curves."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
HELD_OUT = {"most_frequent": {"token": ",", "share": 0.06}, "unigram_entropy": 6.5}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`script(name)`: one of them, which finds the others as it does when Python runs it."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


def step(number: int, loss: float, *shares: int) -> dict[str, Any]:
    together = {"shares": list(shares), "efficiency": 0.9} if len(shares) > 1 else {}
    return {"step": number, "loss": loss, "seconds": 30.0, **together}


def validation(accuracy: float, mlm: float) -> dict[str, Any]:
    return {
        "step": 2, "valid_mlm_accuracy": accuracy, "valid_hidden_accuracy": accuracy / 2, "valid_mlm": mlm,
        "valid_nsp_accuracy": 0.75,
    }  # fmt: skip


TWO = [step(1, 9.0, 16, 8), validation(0.1, 6.0), step(2, 7.0, 20, 4), validation(0.18, 5.0)]
ONE = [step(1, 9.0), step(2, 7.25), validation(0.17, 5.5)]


def test_what_both_runs_have_shown(script: Any) -> None:
    found = script("pretrain").judged(TWO, ONE, HELD_OUT)
    assert found["minutes"] == 1.0
    assert found["share_of_first"] == 36 / 48
    assert found["times_the_most_frequent"] == pytest.approx(3.0)  # by the last validation
    assert (found["largest_apart"], found["median_apart"], found["validation_apart"]) == (0.25, 0.125, 0.5)
    cells = {cell[0]: cell[1] for cell in script("pretrain").cells(found)}
    assert (cells["times as often"], cells["pairs of passages told right"]) == ("3.00", "75.0%")


def test_runs_of_different_lengths_are_not_compared(script: Any) -> None:
    with pytest.raises(ValueError, match="shorter"):
        script("pretrain").judged(TWO, ONE[:1], HELD_OUT)


def test_the_picture_has_both_curves_their_difference_and_the_shares(script: Any) -> None:
    text = script("pretrain").drawn(TWO, ONE)
    root = ElementTree.fromstring(text)
    lines = [line.get("points", "") for line in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [len(line.split()) for line in lines] == [2, 2, 1, 2, 2]  # a logarithm has no place for a difference of 0
    assert "nan" not in text
    names = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"two unequal workers", "one process", "worker 0", "worker 1", "step"} <= set(names)
    assert "difference of the two, nats" in names


def test_curves_that_are_equal_need_no_picture_of_their_difference(script: Any) -> None:
    text = script("pretrain").drawn(TWO, TWO)
    names = [element.text for element in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")]
    assert "difference of the two, nats" not in names
    assert any(name and name.endswith("the two are equal in every step") for name in names)


def test_points_lie_where_their_values_are(script: Any) -> None:
    chart = script("line_chart")
    text = chart.picture([chart.Panel("a < b", [chart.Curve("", [(0, 1.0), (5, 3.0), (10, 2.0)])])], "x")
    line = next(ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}polyline"))
    (x0, low), (x1, high), (x2, middle) = (map(float, point.split(",")) for point in line.get("points", "").split())
    assert (x1 - x0, low - middle) == (x2 - x1, middle - high)
    assert high < middle < low  # pixels count from the top
    with pytest.raises(ValueError, match="no point"):
        chart.picture([chart.Panel("", [chart.Curve("", [])])], "x")


def test_a_curve_of_many_points_keeps_its_peaks(script: Any) -> None:
    points = [(x, math.sin(x / 50)) for x in range(10_000)]
    points[5_432], points[777] = (5_432, 9.0), (777, -9.0)
    kept = script("line_chart").thinned(points, 100)
    assert len(kept) <= 200
    assert {(5_432, 9.0), (777, -9.0)} <= set(kept)
    assert kept == sorted(kept)
    assert script("line_chart").thinned(points[:200], 100) == points[:200]


RUNS = {
    (start, lr, seed): {"f1": value}
    for start, lr, values in (
        ("pre-trained", 0.1, (0.5, 0.6, 0.7)),
        ("pre-trained", 0.2, (0.1, 0.9, 0.1)),
        ("from scratch", 0.1, (0.0, 0.1, 0.0)),
        ("from scratch", 0.2, (0.2, 0.3, 0.4)),
    )
    for seed, value in enumerate(values)
}


def test_each_way_to_begin_has_the_rate_that_suits_it(script: Any) -> None:
    finetune = script("finetune")
    (row,) = finetune.compared(finetune.Kind("bert_ner", "dev", ("f1",), 16, 1), RUNS)
    assert (row["pre-trained"]["lr"], row["from scratch"]["lr"]) == (0.1, 0.2)
    assert row["pre-trained"]["values"] == (0.5, 0.6, 0.7)
    assert row["better"] == pytest.approx(0.3)
    assert row["spread"] == pytest.approx(0.2)
    assert row["met"]
    assert finetune.line(row)[2:] == [
        "0.600 (0.500-0.700) at 0.1",
        "0.300 (0.200-0.400) at 0.2",
        "+0.300",
        "0.200",
        "yes",
    ]


def test_a_difference_within_the_spread_is_none(script: Any) -> None:
    finetune = script("finetune")
    runs = {key: {"f1": value["f1"] + (0.15 if key[0] == "from scratch" else 0)} for key, value in RUNS.items()}
    (row,) = finetune.compared(finetune.Kind("bert_ner", "dev", ("f1",), 16, 1), runs)
    assert not row["met"]
    assert finetune.line(row)[-1] == "no"
