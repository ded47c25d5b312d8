"""What software the ranks of a run had, as rows of a table, and in which of it they were not alike. Pure.

The one idea: what a run refuses (other versions of HetSeq or torch) never comes to a report; what it bears, as another
Python, numpy, build of torch or driver, is where people look when numbers or speeds differ between nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetseq.errors import few

_HEADS = {
    "hetseq": "HetSeq", "commit": "commit", "python": "Python", "torch": "torch", "numpy": "numpy", "cuda": "CUDA",
    "rocm": "ROCm", "cudnn": "cuDNN", "nccl": "NCCL", "driver": "driver",
}  # fmt: skip
_NONE = "-"
_MARK = " (unequal)"
_MOST = 8  # nodes named for one version


@dataclass(frozen=True)
class Software:
    """The heads and rows of the table, and a sentence for each column in which the ranks are not alike."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    unequal: tuple[str, ...]


def software(versions: Mapping[int, Mapping[str, str]]) -> Software | None:
    """From what `RecordedRun.versions` has; None where there is nothing.

    What only some devices have (CUDA, its libraries, the driver) is compared among those that have it.
    """
    names = [name for name in _HEADS if any(name in told for told in versions.values())]
    if not names:
        return None
    groups: dict[tuple[str, ...], list[int]] = {}
    for slot, told in versions.items():
        key = (told.get("node", "?"), told.get("device", "?"), *(told.get(name, _NONE) for name in names))
        groups.setdefault(key, []).append(slot)
    unequal, marks = [], []
    for at, name in enumerate(names):
        nodes: dict[str, list[str]] = {}
        for node, _, *values in groups:
            nodes.setdefault(values[at], []).append(node)
        if name not in _OF_EVERY_RANK:
            nodes.pop(_NONE, None)
        marks.append(len(nodes) > 1)
        if len(nodes) > 1:
            texts = [f"{value} on {few(list(dict.fromkeys(where)), most=_MOST)}" for value, where in nodes.items()]
            unequal.append(f"{_HEADS[name]} is {'; '.join(texts)}")
    rows = [
        (node, ", ".join(map(str, slots)), device,
         *(f"{value}{_MARK}" if mark and value != _NONE else value for value, mark in zip(values, marks)))
        for (node, device, *values), slots in groups.items()
    ]  # fmt: skip
    heads = ("node", "ranks", "device", *(_HEADS[name] for name in names))
    return Software(heads, tuple(rows), tuple(unequal))


_OF_EVERY_RANK = ("hetseq", "python", "torch", "numpy")
