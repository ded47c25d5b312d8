"""Network measurements between nodes: streams from one node to another, and an all-reduce of all. Pure.

Holds the measurements, the findings about the all-reduce, and the links for a forecast. It measures nothing.

The one idea: a `Way` shows what the network can do, the all-reduce what a step gets of it. Time beyond the slowest link
is lost in the nodes, and leaving a node out does not win it back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hetseq.balance.simulation import Link, ring_factor, ring_seconds
from hetseq.commands.doctor.facts import Facts
from hetseq.commands.doctor.node_findings import MIB, Finding

SIZES = (1 << 20, 16 << 20, 64 << 20)  # bytes
_FAR = 3.0  # times as long as the slowest link explains
_PLENTY = 1e9  # bytes per second of bus bandwidth; beyond it cores are usually the limit


@dataclass(frozen=True)
class Way:
    """The link from one node to another: the measurement of a stream, or why there is none."""

    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    trouble: str = ""


@dataclass(frozen=True)
class Trouble:
    """Why a node did not finish the all-reduce; `is_secondary`: it only lost the others."""

    text: str
    is_secondary: bool = False


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce over one rank of each of these nodes: seconds by bytes, or why there are none."""

    nodes: tuple[int, ...] = ()
    seconds: Mapping[int, float] = field(default_factory=dict)
    troubles: Mapping[int, Trouble] = field(default_factory=dict)  # by node, in the order of arrival
    reason: str = ""  # why it was not tried

    @staticmethod
    def of(nodes: tuple[int, ...], answers: Mapping[int, Mapping[str, Any]]) -> AllReduce:
        """The result from the answers of these nodes; if one node reports a size, all have done it."""
        troubles = {
            number: Trouble(str(answer["trouble"]), bool(answer["is_secondary"]))
            for number, answer in answers.items()
            if "trouble" in answer
        }
        told = {size: float(seconds) for answer in answers.values() for size, seconds in answer["measured"].items()}
        return AllReduce(nodes, {size: told[str(size)] for size in SIZES if str(size) in told}, troubles)

    def bus_bytes_per_s(self, size: int) -> float:
        """Bytes per second over each link of a ring: bytes of the tensor / seconds * 2 (n - 1) / n.

        Source: nccl-tests, doc/PERFORMANCE.md, "Bus Bandwidth".
        """
        return size / self.seconds[size] * ring_factor(len(self.nodes))

    def seconds_of(self, size: float) -> float:
        """Seconds for a tensor of `size` bytes, interpolated between the two measured sizes next to it."""
        known = sorted(self.seconds.items())
        if len(known) == 1:
            return known[0][1] * size / known[0][0]
        (low, low_s), (high, high_s) = next(
            (pair for pair in pairwise(known) if size <= pair[1][0]), (known[-2], known[-1])
        )
        line_s = low_s + (size - low) * (high_s - low_s) / (high - low)
        return max(line_s, low_s * min(1.0, size / low), 1e-9)

    def link(self, size: float) -> Link:
        """The link for each rank of a ring with which a tensor of `size` bytes would take as long as measured."""
        count, whole_s = len(self.nodes), self.seconds_of(size)
        slope = (self.seconds_of(2 * size) - whole_s) / size
        start_s = whole_s - slope * size
        if slope <= 0 or start_s < 0:
            slope, start_s = whole_s / size, 0.0
        return Link(ring_factor(count) / slope, start_s / (2 * (count - 1)))


def why_not(facts: Sequence[Facts], ways: Mapping[tuple[int, int], Way], lost: Mapping[int, str]) -> str:
    """Why an all-reduce cannot be tried, with placeholders; empty if it can."""
    left = [number for number in range(len(facts)) if number not in lost]
    if len(left) < 2:
        return "only one node is left"
    for number in left:
        if facts[number].torch.trouble or not facts[number].torch.has_gloo:
            return f"torch or gloo does not work on <node{number + 1}>"
    for (source, target), way in ways.items():
        if way.trouble and source in left and target in left:
            return f"<node{source + 1}> does not reach <node{target + 1}>"
    return ""


def slowest_ways(ways: Mapping[tuple[int, int], Way]) -> dict[int, Link]:
    """The slowest outgoing link of each node."""
    found: dict[int, Link] = {}
    for (source, _), way in ways.items():
        if not way.trouble and (source not in found or way.bytes_per_s < found[source].bytes_per_s):
            found[source] = Link(way.bytes_per_s, way.latency_s)
    return found


def corrected(links: Mapping[int, Link], all_reduce: AllReduce, size: float) -> dict[int, Link]:
    """The same links, corrected so that a ring over all of them takes as long for `size` bytes as the all-reduce.

    If it took longer than the slowest link explains, the excess is added to each link; if less, each link is sped up.
    """
    if not all_reduce.seconds or not links:
        return dict(links)
    seen = all_reduce.link(size)
    worst_s = max(1 / link.bytes_per_s for link in links.values())  # per byte

    def per_byte_s(link: Link) -> float:
        own_s, seen_s = 1 / link.bytes_per_s, 1 / seen.bytes_per_s
        return own_s + seen_s - worst_s if seen_s > worst_s else own_s * seen_s / worst_s

    return {number: Link(1 / per_byte_s(link), seen.latency_s) for number, link in links.items()}


def judge_all_reduce(
    all_reduce: AllReduce, ways: Mapping[tuple[int, int], Way], lost: Collection[int], places: Mapping[str, str]
) -> Iterator[Finding]:
    """Findings about the all-reduce: a line for each size, whether the links explain it, or which node broke it off.

    `lost` are nodes that left the examination, each of which has its own finding.
    """
    if all_reduce.reason:
        yield Finding(
            "note", "all-reduce", f"not tried: {all_reduce.reason}", "fix that, and start all doctors again",
            places,
        )  # fmt: skip
        return
    for size in all_reduce.seconds:
        milliseconds, bus = 1000 * all_reduce.seconds[size], all_reduce.bus_bytes_per_s(size)
        yield Finding(
            "ok", "all-reduce",
            f"{size // MIB} MiB over {len(all_reduce.nodes)} nodes (gloo): {milliseconds:,.1f} ms,"
            f" bus bandwidth {bus / 1e6:,.0f} MB/s",
        )  # fmt: skip
    if set(lost) & set(all_reduce.nodes):
        listed = " and ".join(f"<node{number + 1}>" for number in sorted(set(lost) & set(all_reduce.nodes)))
        yield Finding(
            "problem",
            "all-reduce",
            f"it broke off because {listed} left",
            "see above, and start all doctors again: it needs all nodes",
            places,
        )
    elif all_reduce.troubles:
        yield from _broken(all_reduce, places)
    elif all_reduce.seconds:
        yield from _left_out(all_reduce)
        yield from _explained(all_reduce, ways, places)


def _broken(all_reduce: AllReduce, places: Mapping[str, str]) -> Iterator[Finding]:
    guilty = {number: trouble for number, trouble in all_reduce.troubles.items() if not trouble.is_secondary}
    for number, trouble in guilty.items():
        yield Finding(
            "problem", "all-reduce", f"it broke off because of <node{number + 1}>: <trouble>",
            f"check on <node{number + 1}> what ends or stops processes (memory, limits of the queue), and start all"
            " doctors again",
            {**places, "trouble": trouble.text},
        )  # fmt: skip
    if not guilty:
        number, trouble = next(iter(all_reduce.troubles.items()))
        yield Finding(
            "problem", "all-reduce", f"it broke off: <node{number + 1}> lost the others: <trouble>",
            "look for a firewall or a tunnel that allows new connections and then blocks them; a run would lose its"
            " nodes the same way",
            {**places, "trouble": trouble.text},
        )  # fmt: skip


def _left_out(all_reduce: AllReduce) -> Iterator[Finding]:
    missing = [f"{size // MIB} MiB" for size in SIZES if size not in all_reduce.seconds]
    if missing:
        yield Finding("ok", "all-reduce", f"{' and '.join(missing)} left out: it would take too long here")


def _explained(
    all_reduce: AllReduce, ways: Mapping[tuple[int, int], Way], places: Mapping[str, str]
) -> Iterator[Finding]:
    """Whether the slowest link explains the time."""
    among = {pair: way for pair, way in ways.items() if set(pair) <= set(all_reduce.nodes)}
    links, size = slowest_ways(among), max(all_reduce.seconds)
    if not links:
        return
    (source, target), slowest = min(among.items(), key=lambda item: item[1].bytes_per_s)
    explained_s = ring_seconds(links.values(), len(all_reduce.nodes), size)
    factor, bus = all_reduce.seconds[size] / explained_s, all_reduce.bus_bytes_per_s(size)
    way = f"<node{source + 1}> to <node{target + 1}>, {slowest.bytes_per_s / 1e6:,.0f} MB/s"
    long = f"{factor:.1f} times as long as" if factor > 1 else "no longer than"
    said = f"{size // MIB} MiB take {long} the slowest link explains ({way})"
    if factor < _FAR:
        yield Finding("ok", "all-reduce", said, private=places)
    elif bus > _PLENTY:
        yield Finding(
            "note", "all-reduce", said,
            "nothing to fix in the network: gloo copies and adds on the CPU, and cores are the limit here", places,
        )  # fmt: skip
    else:
        yield Finding(
            "warning", "all-reduce", said,
            "check with top what else runs on the nodes, and whether each has a free core: gloo copies and adds on the"
            " CPU; if they are idle, check the switch, which carries both directions of all nodes at once",
            places,
        )  # fmt: skip
