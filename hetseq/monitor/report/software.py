"""Software versions of the ranks of a run as a table, with the versions that differ marked. Pure.

The one idea: a run refuses other versions of HetSeq or torch, so they never appear in a report. It accepts another
Python, numpy, build of torch or driver, and people look there when numbers or speeds differ between nodes.
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
    """The heads and rows of the table, and a sentence for each column in which the ranks differ."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    unequal: tuple[str, ...]


def software(versions: Mapping[int, Mapping[str, str]]) -> Software | None:
    """The table of `RecordedRun.versions`; None if there are none.

    Software that only some devices have (CUDA, its libraries, the driver) is compared among the ranks that have it.
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
