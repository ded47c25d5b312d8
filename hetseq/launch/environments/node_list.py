"""Slurm node lists: expands `n[1-3,7],gpu01` to five hosts, and `4(x2),2` to three numbers.

Pure, from text to tuples. Does not call scontrol, which is missing in containers.
"""

from __future__ import annotations

import itertools
import re

from hetseq.launch.environments.detected import UnreadableError

_MOST = 2**20  # hosts or numbers; no cluster has more, and a typing error must not fill the memory


def expand_hosts(text: str) -> tuple[str, ...]:
    """The hosts of a node list, in order; handles several brackets in a name, ranges and leading zeros.

    Raises UnreadableError, which names the invalid part.
    """
    hosts: list[str] = []
    for name in _split(text):
        pieces = re.split(r"\[([^\[\]]*)\]", name)  # text, content of brackets, text, ...
        if any("[" in piece or "]" in piece for piece in pieces) or not name:
            raise UnreadableError(f"node list {text}: {name or 'an empty name'} is not a name of Slurm's")
        choices = [_range_of(piece, text) if at % 2 else [piece] for at, piece in enumerate(pieces)]
        hosts += ("".join(parts) for parts in itertools.product(*choices))
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """The numbers of `4(x2),2`: (4, 4, 2). Raises UnreadableError for other text."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip(), re.ASCII)
        if found is None or int(found[2] or 1) > _MOST:
            raise UnreadableError(f"tasks per node {text}: {part} is not a count, as in 4(x2),2")
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    return re.split(r",(?![^\[]*\])", text.strip())


def _range_of(inside: str, text: str) -> list[str]:
    """Expand the content of brackets: `1-3,07` gives 1, 2, 3, 07."""
    names: list[str] = []
    for part in inside.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part, re.ASCII)
        if found is None:
            raise UnreadableError(f"node list {text}: [{inside}] is not a range of numbers")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first or last - first >= _MOST:
            raise UnreadableError(f"node list {text}: {part} goes from {first} to {last}")
        names += [str(number).zfill(len(found[1])) for number in range(first, last + 1)]
    return names
