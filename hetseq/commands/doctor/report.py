"""Findings as text of at most 100 columns, and as a JSON file that is safe to publish.

It judges nothing. The one idea of the file: instead of removing private facts, it includes only a few: numbers,
versions, kinds, and findings with their placeholders unfilled. Nodes are node1, node2.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from hetseq.commands.doctor.cluster_findings import Examination
from hetseq.commands.doctor.facts import Facts
from hetseq.commands.doctor.network_results import AllReduce
from hetseq.commands.doctor.node_findings import LEVELS, Finding

COLUMNS = 100
FORMAT_VERSION = 1
_MARGIN = 20
# no line break there
_GLUE, _BEFORE_UNIT = "\xa0", re.compile(r"(?<=\d) (?=(?:ms|s|MB/s|GiB|MiB|Mbit/s)\b)")
_COMMAND = re.compile(r"pip install \S+(?: --index-url \S+)?")  # a line to paste


def text(findings: Sequence[Finding]) -> Iterator[str]:
    """One or more lines per finding, and a summary as the last line."""
    topic = ""
    for finding in findings:
        said, remedy = finding.filled()
        head = f"{finding.level:8} {finding.topic if finding.topic != topic else '':10} "
        topic = finding.topic
        yield from _wrapped(said, head)
        if remedy:
            yield from _wrapped(f"-> {remedy}", " " * _MARGIN)
    yield summary(findings)


def summary(findings: Sequence[Finding]) -> str:
    """The verdict, and the numbers of problems, warnings and notes."""
    counted = Counter(finding.level for finding in findings)
    parts = [f"{counted[level]} {level}{'s' if counted[level] != 1 else ''}" for level in reversed(LEVELS[1:])]
    verdict = "not ready" if counted["problem"] else "ready"
    return f"{verdict}: {', '.join(parts)}"


def _wrapped(said: str, head: str) -> Iterator[str]:
    printable = "".join(letter if letter.isprintable() else "?" for letter in said)
    lines = textwrap.wrap(
        _COMMAND.sub(lambda found: found[0].replace(" ", _GLUE), _BEFORE_UNIT.sub(_GLUE, printable)),
        COLUMNS,
        initial_indent=head,
        subsequent_indent=" " * _MARGIN,
        break_on_hyphens=False,
    )
    yield from (line.replace(_GLUE, " ") for line in lines or [head.rstrip()])


def document(nodes: Sequence[Facts], findings: Sequence[Sequence[Finding]]) -> dict[str, Any]:
    """The content of doctor.json; `findings` node by node."""
    return {
        "version": FORMAT_VERSION,
        "nodes": [
            {"node": f"node{number}", **_public(facts), "findings": [_public_finding(one) for one in found]}
            for number, (facts, found) in enumerate(zip(nodes, findings, strict=True), 1)
        ],
    }


def cluster_document(
    examined: Examination, each: Sequence[Sequence[Finding]], common: Sequence[Finding]
) -> dict[str, Any]:
    """The same for several nodes, with the findings about them together."""
    return {
        **document(examined.facts, each),
        "together": [_public_finding(finding) for finding in common],
        "ways": [
            {
                "from": f"node{source + 1}",
                "to": f"node{target + 1}",
                "is_open": not way.trouble,
                "bytes_per_s": way.bytes_per_s,
                "latency_s": way.latency_s,
            }
            for (source, target), way in examined.ways.items()
        ],
        "all_reduce": None if examined.all_reduce is None else _public_all_reduce(examined.all_reduce),
    }


def _public_all_reduce(all_reduce: AllReduce) -> dict[str, Any]:
    return {
        "backend": "gloo",
        "nodes": [f"node{number + 1}" for number in all_reduce.nodes],
        "sizes": [
            {"bytes": size, "seconds": seconds, "bus_bytes_per_s": all_reduce.bus_bytes_per_s(size)}
            for size, seconds in all_reduce.seconds.items()
        ],
        "reason": all_reduce.reason,
    }


def _public_finding(finding: Finding) -> dict[str, str]:
    return {name: getattr(finding, name) for name in ("level", "topic", "text", "remedy")}


def _public(facts: Facts) -> dict[str, Any]:
    torch, network, directory = facts.torch, facts.network, facts.directory
    chosen = [one for one in network.addresses if one.address == network.chosen]
    shown: dict[str, Any] = {
        "versions": {
            "hetseq": facts.hetseq,
            "python": facts.python,
            "numpy": facts.numpy,
            **{name: getattr(torch, name) for name in ("version", "cuda", "rocm", "nccl")},
        },
        "gloo": torch.has_gloo,
        "devices": [dataclasses.asdict(device) for device in torch.devices],
        "burn_in": [dataclasses.asdict(burn) for burn in torch.burns],
        "limits": dataclasses.asdict(facts.limits),
        "threads": facts.threads,
        "interfaces": sorted(one.kind for one in network.addresses),
        "chosen_interface": [{"kind": one.kind, "mbit_per_s": one.mbit_per_s} for one in chosen],
        "secret": facts.secret if facts.secret in ("usable", "missing") else "refused",
        "clock_kept": facts.is_clock_kept,
    }
    if directory is not None:
        kept = dataclasses.asdict(directory)
        shown["directory"] = {name: value for name, value in kept.items() if name not in ("path", "trouble")}
    shown["versions"]["torch"] = shown["versions"].pop("version")
    return shown
