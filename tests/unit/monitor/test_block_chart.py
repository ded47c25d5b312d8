"""Sparklines and bars out of block characters: every value has its place, and a bar its exact width."""

from __future__ import annotations

import math

import pytest

from hetseq.monitor.block_chart import column_means, cut, sparkline, stacked_bar, text_of


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([8.0, 1.0], 8, "█▁"),  # no wider than there are values
        ([1, 3, 5, 7], 2, "▁█"),
        ([1, math.nan, 3], 3, "▁ █"),
        ([1, 1, math.inf, math.nan], 2, "▁ "),  # what is not finite is not known
        ([5, 5, 5], 3, "▁▁▁"),
        ([1000, 100, 10, 1], 4, "█▆▃▁"),  # a loss that falls by orders is shown by orders
        ([math.nan], 5, ""),
        ([], 5, ""),
        ([1, 2], 0, ""),
        ([-1e308, 1e308], 2, "▁▁"),
    ],
)
def test_a_sparkline_shows_the_course(values: list[float], width: int, drawn: str) -> None:
    assert sparkline(values, width) == drawn


def test_every_value_is_in_one_column() -> None:
    means = column_means(list(range(1003)), 60)
    assert len(means) == 60
    sizes = [(at + 1) * 1003 // 60 - at * 1003 // 60 for at in range(60)]
    assert sum(mean * size for mean, size in zip(means, sizes)) == pytest.approx(sum(range(1003)), rel=1e-12)


@pytest.mark.parametrize("width", [1, 7, 40])
@pytest.mark.parametrize("amounts", [(1.0, 0.0, 1.0), (0.1, 0.2, 0.7), (math.nan, 1.0, -3.0), (0.0, 0.0, 0.0)])
def test_a_bar_fills_its_width_exactly(width: int, amounts: tuple[float, ...]) -> None:
    bar = stacked_bar([(amount, mark, mark) for amount, mark in zip(amounts, "abc")], 2.0, width)
    assert len(text_of(bar)) == width
    assert all(set(text) in ({kind}, {" "}) for text, kind in bar)


def test_parts_of_a_bar_are_as_long_as_they_last() -> None:
    parts = [(2.0, "█", "compute"), (1.0, "▓", "data"), (1.0, "░", "wait")]
    assert stacked_bar(parts, 4.0, 8) == (("████", "compute"), ("▓▓", "data"), ("░░", "wait"))
    assert stacked_bar(parts, 8.0, 8) == (("██", "compute"), ("▓", "data"), ("░", "wait"), ("    ", ""))
    assert text_of(stacked_bar(parts, 0.0, 8)) == " " * 8


def test_a_line_is_cut_and_has_no_commands_for_the_terminal() -> None:
    assert cut((("ab\x1b[2J", "bad"), ("cd", "")), 5) == (("ab?[2", "bad"),)
    assert cut((("ab", "bad"), ("cd", "")), 3) == (("ab", "bad"), ("c", ""))
