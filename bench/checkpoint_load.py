"""Loading a checkpoint into existing tensors: HetSeq, which verifies every byte, against others.

    python bench/checkpoint_load.py [--rounds 7] [--layers 6] [--width 512] [--directory FOLDER]

A state like a transformer's under AdamW, fp32, some 230 tensors, is saved once in each format and flushed to the
disk. In every round each format loads it into the same tensors in turn, first from the disk (cold) and then from
the cache (warm); the order changes, and ratios are taken within a round. torch.load and safetensors return their own
tensors, which are then copied into ours; DCP and HetSeq read into ours. Only HetSeq compares checksums. A plain read
of the same bytes into the same tensors gives the practical limit of the disk. Freed memory is returned to the kernel
before each load, since a resuming process has none. torch has one thread, as in a trainer; HetSeq reads with one and
verifies with others.

For a cold load, POSIX_FADV_DONTNEED drops every file from the cache. `mincore` must then find less than a hundredth of
their pages there, or the script ends. The disk's own caches cannot be controlled, and are the same for all. The tensors
are compared with the saved state after each load. Memory is the growth of the peak resident size of the process during
a load, which counts pages of a mapped file.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
import numpy as np
import resident
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from hetseq.checkpoint import CheckpointManager, Identity, Retention
from hetseq.comm.group import LocalGroup

WORDS, POSITIONS = 30522, 512
PAGE_BYTES = mmap.PAGESIZE
COLD_BELOW = 0.01  # of the pages of all files
MEMORY_LOADS = 2
OURS, PLAIN, TORCH, MAPPED, DCP, SAFETENSORS = (
    "HetSeq, verified", "plain read", "torch.load", "torch.load, mmap", "dcp.load", "safetensors"
)  # fmt: skip
#: the least time of another format from the disk, in multiples of HetSeq's
BARS = {TORCH: 2.0, DCP: 1.0}

State = dict[str, Tensor]
Load = Callable[[State], object]


@dataclass(frozen=True)
class Taken:
    """Seconds of one load."""

    wall_s: float
    cpu_s: float  # of all threads of this process


Times = dict[str, dict[str, list[Taken]]]  # by format, by "cold" and "warm"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="counted rounds, after one that is not counted")
    parser.add_argument("--layers", type=int, default=6, help="of the transformer")
    parser.add_argument("--width", type=int, default=512, help="of the transformer")
    parser.add_argument("--directory", type=Path, help="where to save, on a disk (default: this repository)")
    arguments = parser.parse_args(words)
    if min(arguments.rounds, arguments.layers, arguments.width) < 1:
        parser.error("--rounds, --layers and --width: expected numbers of at least 1")
    if arguments.directory is not None and not arguments.directory.is_dir():
        parser.error(f"--directory {arguments.directory}: expected a directory that is there")
    return arguments


def main() -> int:
    """Measure and print; 1 where a bar is missed."""
    arguments = parse()
    torch.set_num_threads(1)  # with two, the copies of torch.load and others took longer here, not shorter
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    saved = make_state(arguments.layers, arguments.width)
    place = arguments.directory or Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory(prefix=".checkpoint-load-", dir=place) as folder:
        loads = {name: save(Path(folder) / str(index), saved) for index, (name, save) in enumerate(FORMATS.items())}
        folders = {name: Path(folder) / str(index) for index, name in enumerate(FORMATS)}
        times = measure(loads, folders, saved, arguments.rounds)
        memory = measure_memory(loads, saved)
    state_bytes = sum(tensor.nbytes for tensor in saved.values())
    return report(evaluate(times, memory, state_bytes), len(saved), state_bytes, arguments)


def make_state(layers: int, width: int) -> State:
    """Parameters of a transformer and two tensors of optimizer state for each, by name."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"words": (WORDS, width), "positions": (POSITIONS, width), "norm.weight": (width,), "norm.bias": (width,)}
    for layer in range(layers):
        for name, outputs, inputs in (("qkv", 3, 1), ("mix", 1, 1), ("up", 4, 1), ("down", 1, 4)):
            shapes[f"{layer}.{name}.weight"] = (outputs * width, inputs * width)
            shapes[f"{layer}.{name}.bias"] = (outputs * width,)
        for name in ("norm1", "norm2"):
            shapes |= {f"{layer}.{name}.weight": (width,), f"{layer}.{name}.bias": (width,)}
    names = {
        f"{kind}.{name}{suffix}": shape
        for kind, suffix in (("model", ""), ("optim", ".exp_avg"), ("optim", ".exp_avg_sq"))
        for name, shape in shapes.items()
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


# The formats: each saves the state into a new folder, and returns a function that loads it into existing tensors.


def save_ours(folder: Path, saved: State) -> Load:
    """As the trainer does."""
    manager = CheckpointManager(folder, run_id="bench", group=LocalGroup(), retention=Retention())
    result = manager.save(saved, {}, identity=Identity(1, 0, "0" * 16), nonce=1, kinds=["final"])
    assert result.ok, result.error
    return lambda state: manager.load(into=state)


def save_plain(folder: Path, saved: State) -> Load:
    """The bytes of all tensors, one after the other."""
    folder.mkdir()
    with (folder / "state").open("xb") as file:
        for tensor in saved.values():
            file.write(_bytes_of(tensor))

    def load(state: State) -> None:
        with (folder / "state").open("rb", buffering=0) as file:
            for tensor in state.values():
                rest = _bytes_of(tensor)
                while rest:
                    rest = rest[file.readinto(rest) :]

    return load


def save_torch(folder: Path, saved: State, *, is_mapped: bool = False) -> Load:
    """One file of torch.save."""
    folder.mkdir()
    torch.save(saved, folder / "state.pt")
    return lambda state: _copy_(state, torch.load(folder / "state.pt", weights_only=True, mmap=is_mapped))


def save_mapped(folder: Path, saved: State) -> Load:
    """The same file, mapped into memory, not read."""
    return save_torch(folder, saved, is_mapped=True)


def save_dcp(folder: Path, saved: State) -> Load:
    """A directory of torch.distributed.checkpoint."""
    dcp.save(saved, checkpoint_id=folder, no_dist=True)
    return lambda state: dcp.load(state, checkpoint_id=folder, no_dist=True)


def save_safetensors(folder: Path, saved: State) -> Load:
    """One file of the safetensors library."""
    folder.mkdir()
    safetensors.torch.save_file(saved, folder / "state.safetensors")
    return lambda state: _copy_(state, safetensors.torch.load_file(folder / "state.safetensors"))


FORMATS: dict[str, Callable[[Path, State], Load]] = {
    OURS: save_ours, PLAIN: save_plain, TORCH: save_torch, MAPPED: save_mapped, DCP: save_dcp,
    SAFETENSORS: save_safetensors,
}  # fmt: skip


def _copy_(state: State, loaded: State) -> None:
    for name, tensor in state.items():
        tensor.copy_(loaded[name])


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)


# Measuring.


def measure(loads: dict[str, Load], folders: dict[str, Path], saved: State, rounds: int) -> Times:
    """Seconds of all loads of all rounds but the first."""
    state = {name: torch.empty_like(tensor) for name, tensor in saved.items()}
    times: Times = {name: {"cold": [], "warm": []} for name in loads}
    for number in range(rounds + 1):
        for name in order_of(list(loads), number):
            cool(folders[name])
            for kind in ("cold", "warm"):
                for tensor in state.values():
                    tensor.fill_(-1.0)  # also has its memory in the same caches for all
                give_back_freed_memory()
                wall_s, cpu_s = time.perf_counter(), time.process_time()
                loads[name](state)
                taken = Taken(time.perf_counter() - wall_s, time.process_time() - cpu_s)
                if number:
                    times[name][kind].append(taken)
                if not all(torch.equal(tensor, saved[key]) for key, tensor in state.items()):
                    raise SystemExit(f"{name}: the loaded state differs from the saved one")
    return times


def order_of(names: list[str], number: int) -> list[str]:
    """The order of the loads in a round: rotated in each, and reversed in every other one."""
    first = number // 2 % len(names)
    order = names[first:] + names[:first]
    return order[::-1] if number % 2 else order


def measure_memory(loads: dict[str, Load], saved: State) -> dict[str, int]:
    """Peak growth of the process during a load, in bytes."""
    state = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    memory = dict.fromkeys(loads, 0)
    for _ in range(MEMORY_LOADS):
        for name, load in loads.items():
            give_back_freed_memory()  # or memory left by an earlier load would hide the growth
            memory[name] = max(memory[name], resident.growth_bytes(lambda load=load: load(state)))  # type: ignore[misc]
    return memory


def give_back_freed_memory() -> None:
    """Return freed memory to the kernel, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def cool(folder: Path) -> None:
    """Drop all files of a folder from the page cache; SystemExit where the kernel does not."""
    files = list(_files(folder))
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # dirty pages are not dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    pages, cached = (sum(counts) for counts in zip(*map(cached_pages, files)))
    if cached >= COLD_BELOW * pages:
        raise SystemExit(f"{cached} of {pages} pages of {folder} stay in the cache: choose a --directory on a disk")


def cached_pages(path: Path) -> tuple[int, int]:
    """The pages of a file, and how many of them are in the cache."""
    size = path.stat().st_size
    pages = -(-size // PAGE_BYTES)
    if not pages:
        return 0, 0
    flags = np.zeros(pages, np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
        content = np.frombuffer(mapped, np.uint8)
        arguments = (
            ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(flags.ctypes.data)
        )  # fmt: skip
        failed = ctypes.CDLL(None, use_errno=True).mincore(*arguments)
        del content  # or the map could not be closed
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    return pages, int((flags & 1).sum())


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


# From seconds to figures.


def evaluate(times: Times, memory: dict[str, int], state_bytes: int) -> list[dict[str, Any]]:
    """A row for each format; `x` is its time over HetSeq's in the same round."""
    rows = []
    for name, kinds in times.items():
        row: dict[str, Any] = {"what": name, "n": len(kinds["cold"]), "memory": memory[name] / state_bytes}
        for kind, taken in kinds.items():
            walls, ours = [one.wall_s for one in taken], [one.wall_s for one in times[OURS][kind]]
            row[f"{kind}_s"] = figures.spread(walls)
            row[f"{kind}_cpu_s"] = figures.spread([one.cpu_s for one in taken])
            row[f"{kind}_gb_per_s"] = figures.spread([state_bytes / wall_s / 1e9 for wall_s in walls])
            row[f"{kind} x"] = figures.spread(figures.paired(walls, ours))
        rows.append(row)
    return rows


def report(rows: Sequence[dict[str, Any]], tensors: int, state_bytes: int, arguments: argparse.Namespace) -> int:
    """A table, the bars, and the same as one line of JSON; returns 1 where a bar is missed."""
    print(
        f"{state_bytes / 1e9:.2f} GB in {tensors} tensors, {len(os.sched_getaffinity(0))} cores,"
        f" torch {torch.__version__}; x: the time of HetSeq"
    )
    heads = ["", "cold, s", "GB/s", "x", "CPU s", "warm, s", "GB/s", "x", "CPU s", "memory, % of state", "n"]
    cells = []
    for row in rows:
        cells.append([row["what"]])
        for kind in ("cold", "warm"):
            speed, cpu_s = row[f"{kind}_gb_per_s"].median, row[f"{kind}_cpu_s"].median
            cells[-1] += [row[f"{kind}_s"].shown(), f"{speed:.2f}", row[f"{kind} x"].shown(), f"{cpu_s:.2f}"]
        cells[-1] += [f"{100 * row['memory']:.1f}", str(row["n"])]
    print(figures.table(heads, cells))
    reached = {row["what"]: row["cold x"].median for row in rows}
    for name, bar in BARS.items():
        holds = "yes" if reached[name] >= bar else "NO"
        limit = f"a plain read {reached[name] / reached[PLAIN]:.2f} x"
        print(f"cold: {reached[name]:.2f} x as fast as {name}, {limit} (at least {bar:g}: {holds})")
    # of one thread and no disk, so they take no longer than their CPU time where the machine is idle
    alone = [row for row in rows if row["what"] in (PLAIN, TORCH)]
    if mark := figures.busy_mark(max(row["warm_s"].median / row["warm_cpu_s"].median for row in alone)):
        print(f"({mark})")
    print(figures.json_line("checkpoint_load", vars(arguments), rows))
    return int(any(reached[name] < bar for name, bar in BARS.items()))


if __name__ == "__main__":
    sys.exit(main())
