"""Ranks that own parts of the state (`--shard-model state`) or of parameters too (`all`): step, traffic, memory.

    python bench/shard.py [--rounds 9] [--steps 4] [--batch 4] [--only time unequal memory]

`time`: two ranks train a GPT of 6.8 M parameters in equal shares: as replicas, with owners 1:1 and 3:1 of both kinds,
each through shared memory and through gloo over the loopback, and a bare loop under FSDP2 (`fully_shard` of each layer
and of the rest, fused AdamW, gloo). All of them live in the same processes and take turns; a ratio is taken within a
round. Bars: `state` at most 1.25 times the time of a replica with the same transport, and 0.75 times the time of FSDP2;
`all` at most the time of FSDP2. Bytes of a step, as the rank counts them, are within 1 % of

    sent:      a (1 - f) 4 P + f (C - a) 4 G        received:  f (C - a) 4 P + a (1 - f) 4 G

where the rank owns the fraction f of P parameters, a is 1 if it computes samples, and C ranks do. G are the parameters
that come to a rank that computes: P with `state`; with `all` 2 P less the root and the last layer, which come once in a
round. That holds also for a rank that computes nothing and owns everything, which is not timed.

`unequal`: two ranks that play machines of 3:1 in speed and memory (`slow_layers.py`) train a GPT of 3.2 M parameters
over gloo, with `all` and owners 3:1, and under FSDP2 in equal parts, which it cannot have otherwise. Bar: at least 0.9
of the speeds of both machines together. FSDP2 can reach 0.5 at most.

`memory`: two ranks train a GPT of 40 M parameters in fp32 with AdamW, one micro-batch a step or four, in new processes
that have trained a tiny one before, so that libraries and their pools are there. This script looks at them every 10 ms
while they train, from the third step on. A rank adds resident anonymous memory, and shared memory that it has
made itself, which others only read; pages of files are not counted. Bar: at most

    1.05 x (4 P + 12 f P + gradients) + 100 MiB        with `state`
    1.15 x (16 f P + moving) + 100 MiB                 with `all`

where gradients are 4 P with several micro-batches, else three times the largest unit: those that travel while the next
one is computed. Moving are two layers and the root as parameters, and four times the largest unit: gradients of two
that travel, and what an owner receives of them. A rank that is ahead of the others holds more. Micro-batches have 128
tokens and layers are computed again in backward, so activations are few. What a rank owns is within 2 % of its
fraction.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import figures
import workloads
from ranks import Ranks, Timing, there_and_back

MIB = 2**20
REPLICA_BAR = 1.25
FSDP_BARS = {"state": 0.75, "all": 1.0}
BYTES_APART, OWNED_APART = 0.01, 0.02
SLACKS, ALLOWED_BYTES = {"state": 1.05, "all": 1.15}, 100 * MIB
ITEM_BYTES = 4  # fp32
LOOK_S = 0.01
TRANSPORTS = {"shared memory": True, "gloo": False}
REPLICA, FSDP = "replica", "FSDP2"
OWNERS = ("state 1,1", "state 3,1", "all 1,1", "all 3,1")
SERVERS = ("state 0,1", "all 0,1")  # the second rank owns everything and computes nothing
MICRO_BATCHES, MICRO_BATCH = (1, 4), 2  # of a rank's step, and its rows
PARTS = ("time", "unequal", "memory")
SPEEDS, SPEED_BAR = (30.0, 10.0), 0.9  # rows per second; of their sum
UNEQUAL = "all 3,1"
UNEQUAL_BATCH = 8  # rows of a rank's step under FSDP2, half of the whole batch
_ANONYMOUS_KB = re.compile(r"^Pss_Anon: +(\d+) kB$", re.MULTILINE)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds of `time`")
    parser.add_argument("--steps", type=int, default=4, help="counted steps of each half of a round, and of `memory`")
    parser.add_argument("--batch", type=int, default=4, help="samples of a rank's step in `time`")
    parser.add_argument("--model", choices=("gpt", "gpt-tiny"), default="gpt", help="of `time`")
    parser.add_argument("--large-model", choices=("gpt-40m", "gpt-4m"), default="gpt-40m", help="of `memory`")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="time, unequal or memory"
    )
    arguments = parser.parse_args(words)
    if min(arguments.rounds, arguments.steps, arguments.batch) < 1:
        parser.error("--rounds, --steps and --batch: expected numbers of at least 1")
    return arguments


def main() -> int:
    """Measure and print; 1 if a bar is missed."""
    arguments = parse()
    rows: list[dict[str, Any]] = []
    for part in arguments.only:
        with tempfile.TemporaryDirectory(prefix="hetseq-shard-") as name:
            measure, table = {
                "time": (times, time_table), "unequal": (speeds, speed_table), "memory": (memories, memory_table)
            }[part]  # fmt: skip
            found = measure(arguments, Path(name))
        print(table(found))
        rows += found
    missed = [row["what"] for row in rows if not row["is_met"]]
    print(f"missed: {'; '.join(missed)}" if missed else "all bars are met")
    print(figures.json_line("shard", vars(arguments), rows))
    return 1 if missed else 0


# Time and bytes.


def times(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for each transport and each division among owners."""
    work = workloads.prepare(arguments.model, folder, 0)
    words = [*workloads.hetseq_words(work, 2 * arguments.batch), "--batch-size", str(2 * arguments.batch)]
    with Ranks(2, folder=folder / "ranks", model=arguments.model) as ranks:
        ranks.set_as(is_worker=True)
        for transport, is_shared in TRANSPORTS.items():
            for owners in (REPLICA, *OWNERS, *SERVERS):
                named = [*words, *division(owners)]
                ranks.open(f"{owners}, {transport}", [named] * 2, shares_memory=is_shared)
        ranks.open_fsdp(FSDP, arguments.batch)
        turns = [f"{owners}, {transport}" for transport in TRANSPORTS for owners in (REPLICA, *OWNERS)] + [FSDP]
        for turn in turns:
            ranks.together(turn, settle=3, steps=1)
        rounds = []
        for number in range(arguments.rounds):
            rounds.append(
                there_and_back(turns, number, lambda turn: ranks.together(turn, settle=1, steps=arguments.steps))
            )
        counted = {
            (owners, transport): ranks.together(f"{owners}, {transport}", settle=1, steps=3)
            for transport in TRANSPORTS for owners in (*OWNERS, *SERVERS)
        }  # fmt: skip
    rows = [time_row(f"{owners}, {transport}", f"{REPLICA}, {transport}", rounds)
            for transport in TRANSPORTS for owners in OWNERS]  # fmt: skip
    return rows + [
        byte_row(f"{owners}, {transport}", owners, timings) for (owners, transport), timings in counted.items()
    ]


def division(owners: str) -> list[str]:
    """The options of a training: who owns, and who computes."""
    if owners == REPLICA:
        return ["--balance", "1,1"]
    kind, weights = owners.split()
    return ["--shard-model", kind, "--own", weights, "--balance", "1,0" if owners in SERVERS else "1,1"]


def time_row(turn: str, replica: str, rounds: Sequence[dict[str, list[Timing]]]) -> dict[str, Any]:
    """The ratios of a turn; processor time is the sum over both ranks."""

    def ratios(other: str) -> tuple[figures.Spread, figures.Spread]:
        wall = figures.paired([wall_s(one[turn]) for one in rounds], [wall_s(one[other]) for one in rounds])
        cpu = figures.paired([cpu_s(one[turn]) for one in rounds], [cpu_s(one[other]) for one in rounds])
        return figures.spread(wall), figures.spread(cpu)

    of_replica, of_fsdp = ratios(replica), ratios(FSDP)
    return {
        "what": f"time of {turn}", "turn": turn, "step_s": figures.spread([wall_s(one[turn]) for one in rounds]),
        "wall of replica": of_replica[0], "cpu of replica": of_replica[1],
        "wall of FSDP2": of_fsdp[0], "cpu of FSDP2": of_fsdp[1],
        "is_met": of_fsdp[0].median <= FSDP_BARS[turn.split()[0]]
        and (turn.startswith("all") or of_replica[0].median <= REPLICA_BAR),
    }  # fmt: skip


def wall_s(timings: Sequence[Timing]) -> float:
    """Seconds of a step: of the slower rank."""
    return max(timing.step_s for timing in timings)


def cpu_s(timings: Sequence[Timing]) -> float:
    """Seconds of CPU time of a step, of all ranks."""
    return sum(timing.cpu_s / len(timing.steps) for timing in timings)


def bytes_of(
    fraction: float, *, computes: bool, computing: int, gradient_bytes: float, gathered_bytes: float
) -> tuple[float, float]:
    """Bytes that a rank sends in a step, and that it receives, by the formula above.

    It owns `fraction` of the state and computes samples or not; `computing` ranks do.
    """
    others, served = computes * (1 - fraction), fraction * (computing - computes)
    return others * gradient_bytes + served * gathered_bytes, served * gradient_bytes + others * gathered_bytes


def byte_row(turn: str, owners: str, timings: Sequence[Timing]) -> dict[str, Any]:
    """Bytes of a step, by rank, against the formula; from the end of the first step to the end of the last."""
    computes = [True, owners not in SERVERS]
    row: dict[str, Any] = {"what": f"bytes of {turn}", "turn": turn, "sent_bytes": [], "received_bytes": []}
    ratios = []
    for rank, timing in enumerate(timings):
        first, last = timing.steps[0], timing.steps[-1]
        expected = bytes_of(
            last["owned"] / last["elements"], computes=computes[rank], computing=sum(computes),
            gradient_bytes=ITEM_BYTES * last["elements"],
            gathered_bytes=ITEM_BYTES * last.get("gathered", last["elements"]),
        )  # fmt: skip
        for way, bytes_ in zip(("sent_bytes", "received_bytes"), expected):
            row[way].append((last[way] - first[way]) / (len(timing.steps) - 1))
            ratios.append(row[way][-1] / bytes_)
    return {**row, "of the formula": ratios, "is_met": all(abs(ratio - 1) <= BYTES_APART for ratio in ratios)}


def time_table(rows: Sequence[dict[str, Any]]) -> str:
    """Two tables: times, and bytes."""
    timed = [row for row in rows if "step_s" in row]
    heads = ("owners, transport", "step, ms", "wall x replica", "CPU x replica", "wall x FSDP2", "CPU x FSDP2", "bars")
    ratios = ("wall of replica", "cpu of replica", "wall of FSDP2", "cpu of FSDP2")
    cells = [
        [row["turn"], row["step_s"].shown(".0f", 1e3), *(row[key].shown(".3f") for key in ratios), verdict(row)]
        for row in timed
    ]
    counted = [
        [row["turn"], *(in_mib(row[way]) for way in ("sent_bytes", "received_bytes")),
         " ".join(f"{ratio:.4f}" for ratio in row["of the formula"]), verdict(row)]
        for row in rows if "sent_bytes" in row
    ]  # fmt: skip
    bytes_heads = ("owners, transport", "sent a step, MiB by rank", "received", "of the formula", "bar")
    return figures.table(heads, cells) + "\n\n" + figures.table(bytes_heads, counted) + "\n"


def in_mib(sizes: Sequence[float]) -> str:
    """Bytes of each rank as text."""
    return " ".join(f"{size / MIB:.1f}" for size in sizes)


def verdict(row: dict[str, Any]) -> str:
    """Whether its bars are met."""
    return "yes" if row["is_met"] else "NO"


# Unequal machines.


def speeds(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for HetSeq and one for FSDP2."""
    work = workloads.prepare(workloads.SLOW, folder, 0)
    batch = 2 * UNEQUAL_BATCH
    words = [*workloads.hetseq_words(work, batch), "--batch-size", str(batch)]
    words += ["--shard-model", "all", "--own", "3,1", "--balance", "3,1"]
    with Ranks(2, folder=folder / "ranks", model=workloads.SLOW) as ranks:
        ranks.set_as(is_worker=True)
        ranks.set_speeds(SPEEDS)
        ranks.open(UNEQUAL, [words] * 2)
        ranks.open_fsdp(FSDP, UNEQUAL_BATCH)
        rounds = [
            there_and_back((UNEQUAL, FSDP), number, lambda turn: ranks.together(turn, settle=1, steps=arguments.steps))
            for number in range(arguments.rounds)
        ]
    rows = []
    for turn in (UNEQUAL, FSDP):
        parts = figures.spread([batch / wall_s(one[turn]) / sum(SPEEDS) for one in rounds])
        is_met = turn == FSDP or parts.median >= SPEED_BAR
        rows.append(
            {"what": f"speed of {turn} on machines of 3:1", "turn": turn, "of the sum": parts, "is_met": is_met}
        )
    return rows


def speed_table(rows: Sequence[dict[str, Any]]) -> str:
    """The part of the speeds of both machines that a training reaches."""
    heads = ("machines of 3:1", "rows per second of both together", "bar")
    cells = [[row["turn"], row["of the sum"].shown(".3f"), verdict(row)] for row in rows]
    return figures.table(heads, cells) + "\n"


# Memory.


def memories(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for each rank of each case: transport, owners and micro-batches of a step."""
    rows = []
    cases = itertools.product(TRANSPORTS, OWNERS, MICRO_BATCHES)
    for number, (transport, owners, micro_batches) in enumerate(cases):
        place = folder / str(number)
        place.mkdir()
        with Ranks(2, folder=place / "ranks", model=arguments.large_model) as ranks:
            ranks.set_as(is_worker=True)
            for name in ("gpt-tiny", arguments.large_model):
                work = workloads.prepare(name, place, 0)
                batch = ["--batch-size", str(MICRO_BATCH)]
                words = [*workloads.hetseq_words(work, 2 * MICRO_BATCH * micro_batches), *batch, *division(owners)]
                before = [anonymous_bytes(pid) for pid in ranks.pids]
                ranks.open(name, [words] * 2, shares_memory=TRANSPORTS[transport])
                ranks.together(name, settle=2, steps=1)
            with watched(ranks.pids) as largest:
                timings = ranks.together(arguments.large_model, settle=0, steps=arguments.steps)
        for rank, timing in enumerate(timings):
            case = f"{owners}, {transport}, {micro_batches} micro-batches, rank {rank}"
            facts = timing.steps[-1]
            added_bytes = largest[rank] - before[rank] + facts["shared_bytes"]
            rows.append(memory_row(case, rank, owners, micro_batches, added_bytes, facts))
    return rows


def anonymous_bytes(pid: int) -> int:
    """Resident anonymous memory of a process; 0 if it has ended."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    return 1024 * sum(map(int, _ANONYMOUS_KB.findall(rollup)))


@contextmanager
def watched(pids: Sequence[int]) -> Iterator[list[int]]:
    """The largest `anonymous_bytes` of each process during the block."""
    largest, is_over = [0] * len(pids), threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            for place, pid in enumerate(pids):
                largest[place] = max(largest[place], anonymous_bytes(pid))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield largest
    finally:
        is_over.set()
        watcher.join()


def memory_row(
    case: str, rank: int, owners: str, micro_batches: int, added_bytes: int, facts: dict[str, Any]
) -> dict[str, Any]:
    """What a rank has added, against the bar."""
    elements = facts["elements"]
    kind, text = owners.split()
    weights = [float(word) for word in text.split(",")]
    wanted, fraction = weights[rank] / sum(weights), facts["owned"] / elements
    most = bound(kind, wanted, facts, has_several=micro_batches > 1)
    is_divided = abs(fraction - wanted) <= OWNED_APART * wanted
    return {
        "what": f"memory of {case}", "case": case, "elements": elements, "owned": fraction, "added_bytes": added_bytes,
        "most_bytes": most, "is_met": is_divided and added_bytes <= most,
    }  # fmt: skip


def bound(kind: str, fraction: float, facts: dict[str, Any], *, has_several: bool) -> float:
    """The bar of a rank, in bytes; `has_several`: its step has several micro-batches."""
    elements, largest = int(facts["elements"]), int(facts["largest_unit"])
    if kind == "all":
        kept = 16 * fraction * elements + 4 * (2 * largest + int(facts["root"])) + 4 * 4 * largest
    else:
        kept = 4 * elements + 12 * fraction * elements + 4 * (elements if has_several else min(elements, 3 * largest))
    return SLACKS[kind] * kept + ALLOWED_BYTES


def memory_table(rows: Sequence[dict[str, Any]]) -> str:
    """What each rank added."""
    heads = ("owners, transport, step, rank", "owns", "added, MiB", "at most", "of it", "bar")
    cells = [
        [row["case"], f"{row['owned']:.4f}", f"{row['added_bytes'] / MIB:.0f}", f"{row['most_bytes'] / MIB:.0f}",
         f"{row['added_bytes'] / row['most_bytes']:.3f}", verdict(row)]
        for row in rows
    ]  # fmt: skip
    return f"{rows[0]['elements'] / 1e6:.1f} M parameters\n" + figures.table(heads, cells) + "\n"


if __name__ == "__main__":
    sys.exit(main())
