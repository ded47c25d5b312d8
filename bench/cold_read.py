"""The limits of a disk: ways to read one large uncached file, against a plain read of it.

    python bench/cold_read.py [--rounds 7] [--size 420] [--directory FOLDER]

HetSeq loads a checkpoint by reading each part from front to back with one thread. This script measures the
alternatives on a disk: smaller and larger calls, several threads on alternating pieces or on a region each, advice to
the kernel (POSIX_FADV_WILLNEED), a copied memory map, and no cache at all (O_DIRECT). In every round each way reads the
file into the same memory, after it was dropped from the cache; the order changes, and ratios are taken within a round.
The bytes are compared after the clock has stopped, so a verifying load cannot be faster than the fastest way.
O_DIRECT needs page-aligned memory, which tensors do not have.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import figures
import numpy as np
from checkpoint_load import Taken, cool, order_of

from hetseq.checkpoint.part_io import CHUNKS_AT_ONCE
from hetseq.checkpoint.records import CHUNK_BYTES

MB = 1 << 20
CALL = CHUNKS_AT_ONCE * CHUNK_BYTES  # HetSeq's
PLAIN = f"one thread, calls of {CALL // MB} MB"

Way = Callable[[Path, memoryview], None]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds, after one that is not counted")
    parser.add_argument("--size", type=int, default=420, help="of the file, in MB of 2^20 bytes")
    parser.add_argument("--directory", type=Path, help="where to write the file, on a disk (default: this repository)")
    arguments = parser.parse_args(words)
    if min(arguments.rounds, arguments.size) < 1:
        parser.error("--rounds and --size: expected numbers of at least 1")
    if arguments.directory is not None and not arguments.directory.is_dir():
        parser.error(f"--directory {arguments.directory}: expected a directory that is there")
    return arguments


def main() -> int:
    """Measure and print."""
    arguments = parse()
    place = arguments.directory or Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory(prefix=".cold-read-", dir=place) as folder:
        times = measure(Path(folder), arguments.size * MB, arguments.rounds)
    report(times, arguments)
    return 0


# The ways: each fills the memory, which begins at a page, with the bytes of a file.


def in_turn(path: Path, memory: memoryview, *, threads: int, call: int) -> None:
    """Each thread takes the next free piece."""
    starts = iter(range(0, len(memory), call))  # the threads share it, under the interpreter's lock
    _read(path, memory, [starts] * threads, call)


def by_region(path: Path, memory: memoryview, *, threads: int, call: int) -> None:
    """Each thread has a region of the file, and reads it from front to back through its own descriptor."""
    calls = list(range(0, len(memory), call))
    share = -(-len(calls) // threads)
    _read(path, memory, [calls[at : at + share] for at in range(0, len(calls), share)], call)


def told_ahead(path: Path, memory: memoryview, *, window: int) -> None:
    """One thread reads, after the kernel was told which windows will be needed, all of them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for begin in range(0, len(memory), window):
            os.posix_fadvise(descriptor, begin, window, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)
    in_turn(path, memory, threads=1, call=CALL)


def mapped(path: Path, memory: memoryview) -> None:
    """The file is mapped and copied, one megabyte at a time.

    Not at once: one copy of 64 to 200 MB, by numpy, took a hundred times as long.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        pages.madvise(mmap.MADV_SEQUENTIAL)
        content = np.frombuffer(pages, np.uint8)
        for start in range(0, len(memory), MB):
            np.copyto(np.frombuffer(memory[start : start + MB], np.uint8), content[start : start + MB])
        del content  # or the map could not be closed


def uncached(path: Path, memory: memoryview, *, threads: int, call: int) -> None:
    """Past the cache; OSError where the file system cannot."""
    starts = iter(range(0, len(memory), call))
    _read(path, memory, [starts] * threads, call, flags=os.O_DIRECT)


def _read(path: Path, memory: memoryview, starts: Sequence[Iterable[int]], call: int, *, flags: int = 0) -> None:
    failures: list[OSError | EOFError] = []

    def work(starts: Iterable[int]) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | flags)
            try:
                for start in starts:
                    _fill(descriptor, memory[start : start + call], start)
            finally:
                os.close(descriptor)
        except (OSError, EOFError) as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _fill(descriptor: int, view: memoryview, begin: int) -> None:
    while len(view):
        count = os.preadv(descriptor, [view], begin)
        if count == 0:
            raise EOFError("the file ends before its data")
        view, begin = view[count:], begin + count


WAYS: dict[str, Way] = {
    PLAIN: lambda path, memory: in_turn(path, memory, threads=1, call=CALL),
    "one thread, calls of 1 MB": lambda path, memory: in_turn(path, memory, threads=1, call=MB),
    "one thread, calls of 128 MB": lambda path, memory: in_turn(path, memory, threads=1, call=128 * MB),
    "2 threads in turn, 4 MB": lambda path, memory: in_turn(path, memory, threads=2, call=4 * MB),
    "8 threads in turn, 4 MB": lambda path, memory: in_turn(path, memory, threads=8, call=4 * MB),
    "2 threads, a region each, 4 MB": lambda path, memory: by_region(path, memory, threads=2, call=4 * MB),
    "8 threads, a region each, 4 MB": lambda path, memory: by_region(path, memory, threads=8, call=4 * MB),
    "WILLNEED, windows of 4 MB": lambda path, memory: told_ahead(path, memory, window=4 * MB),
    "WILLNEED, the whole file": lambda path, memory: told_ahead(path, memory, window=len(memory)),
    "mapped, copied": mapped,
    "O_DIRECT, one thread": lambda path, memory: uncached(path, memory, threads=1, call=CALL),
    "O_DIRECT, 8 threads": lambda path, memory: uncached(path, memory, threads=8, call=4 * MB),
}


# Measuring.


def measure(folder: Path, size: int, rounds: int) -> dict[str, list[Taken]]:
    """Seconds of all ways of all rounds but the first; ways that the file system lacks are left out."""
    content = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    path = folder / "file"
    content.tofile(path)
    times: dict[str, list[Taken]] = {name: [] for name in WAYS}
    memory = memoryview(mmap.mmap(-1, size))
    filled = np.frombuffer(memory, np.uint8)
    for number in range(rounds + 1):
        for name in order_of(list(times), number):
            cool(folder)
            filled.fill(0)  # also has it in the same caches for all
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            try:
                WAYS[name](path, memory)
            except OSError as error:
                if name == PLAIN:
                    raise
                print(f"{name}: left out, {error.strerror}", file=sys.stderr)
                del times[name]
                continue
            taken = Taken(time.perf_counter() - wall_s, time.process_time() - cpu_s)
            if number:
                times[name].append(taken)
            if not np.array_equal(filled, content):
                raise SystemExit(f"{name}: the bytes read differ from the bytes written")
    return times


def report(times: dict[str, list[Taken]], arguments: argparse.Namespace) -> None:
    """A table, and the same as one line of JSON; `x` is the plain read's time over each way's, within a round."""
    plain = [one.wall_s for one in times[PLAIN]]
    rows: list[dict[str, Any]] = []
    for name, taken in times.items():
        walls = [one.wall_s for one in taken]
        row = {"what": name, "x": figures.spread(figures.paired(plain, walls)), "n": len(taken)}
        row["gb_per_s"] = figures.spread([arguments.size * MB / wall_s / 1e9 for wall_s in walls])
        row["cpu_s"] = figures.spread([one.cpu_s for one in taken])
        rows.append(row)
    cells = [
        [row["what"], row["x"].shown(), row["gb_per_s"].shown(), f"{row['cpu_s'].median:.2f}", str(row["n"])]
        for row in rows
    ]
    print(f"{arguments.size} MB, {len(os.sched_getaffinity(0))} cores; x: as fast as the first")
    print(figures.table(["", "x", "GB/s", "CPU s", "n"], cells))
    print(figures.json_line("cold_read", vars(arguments), rows))


if __name__ == "__main__":
    sys.exit(main())
