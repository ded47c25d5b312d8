"""Values of `parametrize` for `make nightly` alone: `["tcp", *nightly("directory", "old file")]`."""

from __future__ import annotations

from typing import Any

import pytest


def nightly(*values: Any, is_many: bool = False) -> list[Any]:
    """Each value as a parameter that is marked; with `is_many` each is a tuple of several parameters."""
    return [pytest.param(*(value if is_many else (value,)), marks=pytest.mark.nightly) for value in values]
