"""Sizes of memory as people write them: 200000000, 200MB, 190MiB. Knows nothing else."""

from __future__ import annotations

import re

from hetseq.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", re.IGNORECASE)


def parse_size(text: int | str, source: str) -> int:
    """Bytes: 200000000, "200MB" (10^6) or "200MiB" (2^20); ConfigError names `source`."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{source} is {text!r}: expected bytes, as in 200000000, 200MB or 190MiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])
