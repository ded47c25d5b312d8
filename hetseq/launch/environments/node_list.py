"""Slurm's short forms, written out: `n[1-3,7],gpu01` as five hosts, `4(x2),2` as three numbers.

Pure text to tuples. It asks no scontrol, which a container does not have.
"""

from __future__ import annotations

import itertools
import re

from hetseq.launch.environments.detected import UnreadableError

_MOST = 2**20  # hosts or numbers; nobody has more, and a typing error is not to fill the memory


def expand_hosts(text: str) -> tuple[str, ...]:
    """The hosts of a node list in its order: several brackets in a name, ranges and leading zeros.

    Raises UnreadableError, which names the part that is no node list.
    """
    hosts: list[str] = []
    for name in _split(text):
        pieces = re.split(r"\[([^\[\]]*)\]", name)  # text, content of brackets, text, ...
        if any("[" in piece or "]" in piece for piece in pieces) or not name:
            raise UnreadableError(f"node list {text}: {name or 'an empty name'} is none of Slurm's")
        choices = [_range_of(piece, text) if at % 2 else [piece] for at, piece in enumerate(pieces)]
        hosts += ("".join(parts) for parts in itertools.product(*choices))
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """The numbers of `4(x2),2`: (4, 4, 2). Raises UnreadableError for other text."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip(), re.ASCII)
        if found is None or int(found[2] or 1) > _MOST:
            raise UnreadableError(f"tasks per node {text}: {part} is no count, as in 4(x2),2")
        counts += [int(found[1])] * int(found[2] or 1)
    return tuple(counts)


def _split(text: str) -> list[str]:
    """At the commas outside of brackets."""
    return re.split(r",(?![^\[]*\])", text.strip())


def _range_of(inside: str, text: str) -> list[str]:
    """What stands in brackets: `1-3,07` gives 1, 2, 3, 07."""
    names: list[str] = []
    for part in inside.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part, re.ASCII)
        if found is None:
            raise UnreadableError(f"node list {text}: [{inside}] is no range of numbers")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first or last - first >= _MOST:
            raise UnreadableError(f"node list {text}: {part} goes from {first} to {last}")
        names += [str(number).zfill(len(found[1])) for number in range(first, last + 1)]
    return names
