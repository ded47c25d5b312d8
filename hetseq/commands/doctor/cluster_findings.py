"""Findings about several nodes: version differences, the network between them, their shared directory. Pure.

It talks to no node. The one idea: a sentence has a placeholder for a node, `<node2>`; the terminal fills in its name.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hetseq.commands.doctor.facts import Facts
from hetseq.commands.doctor.forecast import Candidate, candidates_of
from hetseq.commands.doctor.network_results import AllReduce, Way, corrected, judge_all_reduce, slowest_ways
from hetseq.commands.doctor.node_findings import Finding, install_torch, size
from hetseq.monitor.tables import table
from hetseq.system.torch_builds import release_for

_UNEVEN = 0.5  # of the median stream
_SLOW_BYTES_PER_S = 100e6  # somewhat less than gigabit Ethernet
_LATE_S = 1.0
_COLUMNS = 8  # of the table of links


@dataclass(frozen=True)
class Examination:
    """The results of the common examination; nodes by number from 0, `ways` (links) and delays by (from, to)."""

    names: tuple[str, ...]
    facts: tuple[Facts, ...]
    fields: tuple[Mapping[str, str], ...]  # a run refuses nodes that differ in these
    ways: Mapping[tuple[int, int], Way] = field(default_factory=dict)
    delays_s: Mapping[tuple[int, int], float | None] = field(default_factory=dict)  # None: never seen
    lost: Mapping[int, str] = field(default_factory=dict)  # nodes that left, and the reason
    all_reduce: AllReduce | None = None
    addresses: tuple[str, ...] = ()  # at which the nodes were reached; may differ from the one a node chooses alone

    @property
    def places(self) -> dict[str, str]:
        """The values of the placeholders: node1 is the first name."""
        return {f"node{number}": name for number, name in enumerate(self.names, 1)}

    def candidates(self) -> list[Candidate]:
        """The devices of all nodes, each with the slowest link from its node, corrected by the all-reduce."""
        links = slowest_ways(self.ways)
        burns = [burn for facts in self.facts for burn in facts.torch.burns]
        if self.all_reduce is not None and burns:
            links = corrected(links, self.all_reduce, max(burn.gradient_bytes for burn in burns))
        return [
            candidate
            for number, (name, facts) in enumerate(zip(self.names, self.facts))
            for candidate in candidates_of(name, facts, links.get(number))
        ]


def compare(examined: Examination) -> Iterator[Finding]:
    """All findings about the nodes together."""
    yield from _lost(examined)
    yield from _contract(examined)
    yield from _builds(examined)
    yield from _ways(examined)
    if examined.all_reduce is not None:
        yield from judge_all_reduce(examined.all_reduce, examined.ways, examined.lost, examined.places)
    yield from _directory(examined)


def side_by_side(examined: Examination) -> Iterator[str]:
    """A line per node, then tables of megabytes per second between all nodes, eight columns each."""
    rows = [("", "node", "devices", "cores", "memory", "torch", "address")]
    addresses = examined.addresses or [facts.network.chosen for facts in examined.facts]
    for number, (name, facts, address) in enumerate(zip(examined.names, examined.facts, addresses), 1):
        kinds = [device.name for device in facts.torch.devices]
        devices = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "-"
        cores, memory = f"{facts.usable_cores:g}", size(facts.limits.available_bytes)
        versions = (facts.torch.version[:14], address[:26])
        rows.append((f"node{number}", name[:16], devices[:24], cores, memory, *versions))
    yield from table(rows, left=(0, 1, 2, 5, 6))
    nodes = range(len(examined.names))
    for first in nodes[::_COLUMNS] if examined.ways else ():
        targets = nodes[first : first + _COLUMNS]
        matrix = [("MB/s", *(f"to node{target + 1}" for target in targets))]
        for source in nodes:
            cells = (_cell(examined.ways.get((source, target))) for target in targets)
            matrix.append((f"node{source + 1}", *cells))
        yield from table(matrix, left=(0,))


def _cell(way: Way | None) -> str:
    return "-" if way is None else "none" if way.trouble else f"{way.bytes_per_s / 1e6:,.0f}"


def _lost(examined: Examination) -> Iterator[Finding]:
    for number, trouble in examined.lost.items():
        yield Finding(
            "problem", "nodes", f"<node{number + 1}> left the examination: <trouble>",
            f"read the terminal of <node{number + 1}>, and start all doctors again",
            {**examined.places, "trouble": trouble},
        )  # fmt: skip


def _contract(examined: Examination) -> Iterator[Finding]:
    names = dict.fromkeys(name for fields in examined.fields for name in fields)
    is_equal = True
    for name in names:
        values = [fields.get(name, "nothing") for fields in examined.fields]
        if len(set(values)) > 1:
            is_equal = False
            listed = ", ".join(f"<node{number}> {value}" for number, value in enumerate(values, 1))
            remedy = _same_torch(examined, values) if name == "torch" else "install the same HetSeq on all nodes"
            yield Finding(
                "problem", "contract", f"{name} differs: {listed}; a run refuses that",
                f"{remedy}; or use hetseq ssh --install for all", examined.places,
            )  # fmt: skip
    if is_equal:
        yield Finding("ok", "contract", f"{', '.join(names)}: equal on {len(examined.names)} nodes")


def _same_torch(examined: Examination, versions: list[str]) -> str:
    """The command for each node whose torch has to change."""
    builds = [facts.torch_build(version).build for facts, version in zip(examined.facts, versions)]
    wanted = release_for([f"{version}+{build}" for version, build in zip(versions, builds)])
    commands = [
        f"on <node{number}>: {install_torch(facts, wanted)}"
        for number, (facts, version) in enumerate(zip(examined.facts, versions), 1)
        if wanted and version != wanted
    ]
    return "; ".join(commands) or "install the same torch on all nodes"


def _builds(examined: Examination) -> Iterator[Finding]:
    builds = {
        "Python": [facts.python for facts in examined.facts],
        "numpy": [facts.numpy for facts in examined.facts],
        "the build of torch": [facts.torch.version for facts in examined.facts],
    }
    for name, values in builds.items():
        if len(set(values)) > 1:
            listed = ", ".join(f"<node{number}> {value}" for number, value in enumerate(values, 1))
            yield Finding(
                "note", "contract", f"{name} differs: {listed}", "nothing to do: a run accepts that", examined.places
            )


def _ways(examined: Examination) -> Iterator[Finding]:
    open_ways = [way for way in examined.ways.values() if not way.trouble]
    for (source, target), way in examined.ways.items():
        if way.trouble:
            yield Finding(
                "problem", "network", f"<node{source + 1}> does not reach <node{target + 1}>: <trouble>",
                f"open the TCP ports of /proc/sys/net/ipv4/ip_local_port_range on <node{target + 1}>, or set"
                " GLOO_SOCKET_IFNAME there to an interface of their common network",
                {**examined.places, "trouble": way.trouble},
            )  # fmt: skip
    if not open_ways:
        return
    median = statistics.median(way.bytes_per_s for way in open_ways)
    latency_ms = 1000 * statistics.median(way.latency_s for way in open_ways)
    yield Finding(
        "ok", "network", f"{len(open_ways)} of {len(examined.ways)} links open, median {median / 1e6:,.0f} MB/s"
        f" and {latency_ms:.2f} ms, all sending at once"
    )  # fmt: skip
    for (source, target), way in examined.ways.items():
        is_slow = way.bytes_per_s < _SLOW_BYTES_PER_S or way.bytes_per_s < _UNEVEN * median
        if not way.trouble and is_slow:
            yield Finding(
                "warning", "network",
                f"<node{source + 1}> sends {way.bytes_per_s / 1e6:,.0f} MB/s to <node{target + 1}>",
                "check the cables and the interface chosen there; the slowest link sets the pace of every step",
                examined.places,
            )  # fmt: skip


def _directory(examined: Examination) -> Iterator[Finding]:
    for (source, target), delay_s in examined.delays_s.items():
        if delay_s is None:
            yield Finding(
                "problem", "directory", f"<node{target + 1}> does not see files of <node{source + 1}> in --dir",
                "name a directory on a network mount that all nodes have, or let them meet at tcp://HOST:PORT",
                examined.places,
            )  # fmt: skip
    seen = [delay_s for delay_s in examined.delays_s.values() if delay_s is not None]
    if seen and max(seen) > _LATE_S:
        yield Finding(
            "note", "directory", f"a new file is visible on another node after up to {max(seen):.1f} s",
            "nothing to do: a rendezvous at file:// takes that much longer, and heartbeats use the network",
        )  # fmt: skip
    elif seen:
        yield Finding("ok", "directory", f"a new file is visible on another node after {max(seen):.2f} s at most")
