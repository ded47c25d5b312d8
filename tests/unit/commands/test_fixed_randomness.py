"""Where two samples differ, as `hetseq selftest` names it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hetseq.commands.selftest.fixed_randomness import difference

ONE, TWO = torch.ones(2), torch.full((2,), 2.0)


@pytest.mark.parametrize(
    ("first", "second", "where"),
    [
        (ONE, TWO, "the sample"),
        (ONE, torch.ones(3), "the sample"),
        (ONE, ONE.double(), "the sample"),
        (ONE, [1.0, 1.0], "the sample"),
        ({"ids": ONE, "rows": TWO}, {"ids": ONE, "rows": ONE}, "['rows']"),
        ({"ids": ONE}, {"rows": ONE}, "the sample"),
        ({"ids": {"a": ONE}}, {"ids": {"b": ONE}}, "['ids']"),
        ((ONE, [ONE, TWO]), (ONE, [ONE, ONE]), "[1][1]"),
        ([ONE, [TWO]], [ONE, [TWO, TWO]], "[1]"),
        ({"text": "a"}, {"text": "b"}, "['text']"),
        ({"rate": 0.5}, {"rate": "0.5"}, "['rate']"),
        ([np.zeros(2)], [np.ones(2)], "[0]"),
        (SimpleNamespace(ids=ONE), SimpleNamespace(ids=TWO), "['ids']"),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), None),
        ({"ids": [ONE, 3, float("nan")]}, {"ids": [ONE.clone(), 3, float("nan")]}, None),
    ],
)
def test_the_first_place_is_named(first: Any, second: Any, where: str | None) -> None:
    assert difference(first, second) == where
