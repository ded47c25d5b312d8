"""Two networks with the same weights, compared number by number."""

from __future__ import annotations

import math
import warnings
from types import ModuleType

import pytest
from torch import Tensor

Facts = dict[str, Tensor]


def import_transformers() -> ModuleType:
    """The library that ours is compared with, or the test is skipped; its import warnings do not matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library: ModuleType = pytest.importorskip("transformers")
    return library


def distance(found: Facts, expected: Facts) -> float:
    """The largest difference, relative to the largest element of its tensor or to 1 % of the largest of its kind.

    The kind of "gradient: layer.weight" is "gradient". The second because the gradient of a key's bias is zero: softmax
    forgets what all keys have in common.
    """
    assert found.keys() == expected.keys()
    assert [fact.shape for fact in found.values()] == [fact.shape for fact in expected.values()]
    largest: dict[str, float] = {}
    for name, fact in expected.items():
        kind = name.split(":")[0]
        largest[kind] = max(largest.get(kind, 0.0), peak(fact))
    worst = 0.0
    for name, fact in expected.items():
        apart = peak(found[name] - fact)
        if math.isnan(apart):
            return math.inf
        if apart:
            worst = max(worst, apart / max(peak(fact), 0.01 * largest[name.split(":")[0]]))
    return worst


def peak(tensor: Tensor) -> float:
    """The largest magnitude; 0 of a tensor without elements."""
    return tensor.abs().max().item() if tensor.numel() else 0.0
