"""Seconds of a start after a kill -9, from memory or from the disk: the part `restart` of checkpoint.py.

Responsible for: a process that saves a state to the disk, also keeps it in memory, and is killed; and fresh processes
that each load it once. Knows no ratios. The one idea: a start is a new process with fresh page tables, threads and
files, so every load is the first of its process, which reports its own time.

A load from memory includes the search for it (`recover`); a load from the disk skips the search, so it finds none.
In both cases the checkpoint's files are first dropped from the page cache, which is checked. The target is memory that
the process already has and has written to, like a model's, or new memory, which the kernel supplies page by page
meanwhile. The loaded state is compared with the original bit by bit; creation, comparison and imports are not timed.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from checkpoint_load import State, cool, give_back_freed_memory, make_state, order_of
from saving import Shape

from hetseq.checkpoint import CheckpointManager, Identity, Retention
from hetseq.checkpoint.arena import SHARED_MEMORY, Arena
from hetseq.comm.group import LocalGroup

SCRIPT = Path(__file__)
IDENTITY = Identity(1, 0, "00112233445566aa")
CHILD_S = 300.0  # seconds that a child may take
SEALED_S = 60.0
#: by name: where a start loads from, and whether into memory of its own
STARTS = {
    "memory": ("memory", False),
    "disk": ("disk", False),
    "memory, new": ("memory", True),
    "disk, new": ("disk", True),
}


@dataclass(frozen=True)
class Start:
    """Seconds of one process for its load: wall time, its part in `recover`, and CPU time of all threads."""

    wall_s: float
    recover_s: float
    cpu_s: float
    state_bytes: int


# The process that asks for the figures.


def measure(shape: Shape, rounds: int, folder: Path, *, uncounted: int = 1) -> list[dict[str, Start]]:
    """Times of each kind of start, round by round, after uncounted rounds.

    Nothing stays in memory, whatever happens.
    """
    run_id = f"bench-restart-{folder.parent.name}"
    size = ["--layers", str(shape.layers), "--width", str(shape.width)]
    try:
        with _child("make", folder, run_id, *size) as child:
            assert child.stdout is not None
            said = child.stdout.readline()
            child.kill()
            if child.wait(CHILD_S) != -signal.SIGKILL or said != "kept\n":
                raise SystemExit(f"the process that was to be killed ended with {child.returncode}")
        seen = []
        for number in range(uncounted + rounds):
            names = order_of(list(STARTS), number)
            taken = {name: _start(folder, run_id, [*size, "--start", name]) for name in names}
            if number >= uncounted:
                seen.append(taken)
        return seen
    finally:
        remove_states(run_id)


def _start(folder: Path, run_id: str, words: Sequence[str]) -> Start:
    with _child("load", folder, run_id, *words) as child:
        said, _ = child.communicate(timeout=CHILD_S)
    if child.returncode:
        raise SystemExit(f"a start ended with {child.returncode}: {' '.join(words)}")
    return Start(**json.loads(said))


@contextmanager
def _child(*words: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A fresh interpreter with this script; gone at the end."""
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def remove_states(run_id: str) -> None:
    """Free this run's shared memory, and only that."""
    for path in SHARED_MEMORY.glob(f"{Arena.prefix(run_id)}*"):
        path.unlink(missing_ok=True)


# Its children.


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of a child."""
    parser = argparse.ArgumentParser(description="one process of the part `restart` of checkpoint.py")
    parser.add_argument("task", choices=["make", "load"])
    parser.add_argument("folder", type=Path, help="the run directory")
    parser.add_argument("run_id")
    parser.add_argument("--layers", type=int, required=True, help="of the transformer")
    parser.add_argument("--width", type=int, required=True, help="of the transformer")
    parser.add_argument("--start", choices=STARTS, help="source and target of the load")
    return parser.parse_args(words)


def main() -> None:
    """Make and keep a state and wait to be killed, or load one and print the time."""
    arguments = parse()
    torch.set_num_threads(1)
    made = make_state(arguments.layers, arguments.width)
    if arguments.task == "make":
        keep(manager_of(arguments.folder, arguments.run_id), made)
        print("kept", flush=True)
        signal.pause()
    print(json.dumps(asdict(load(arguments.folder, arguments.run_id, made, arguments.start))))


def manager_of(folder: Path, run_id: str) -> CheckpointManager:
    """As a trainer has it."""
    return CheckpointManager(folder, run_id=run_id, group=LocalGroup(), retention=Retention(), keeps_states=True)


def keep(manager: CheckpointManager, made: State) -> None:
    """The same state on the disk and in memory; on return it is sealed there."""
    result = manager.save(made, {"step": 1}, identity=IDENTITY, nonce=1, kinds=["final"])
    if not result.ok:
        raise SystemExit(f"the save failed: {result.error}")
    refusal = manager.prepare(made)
    if refusal is not None or not manager.keeps_states:
        raise SystemExit(f"no memory for states that stay there: {refusal or 'only one fits'}")
    if not manager.keep(made, {"step": 1}, identity=IDENTITY, nonce=2, at_once=[]):
        raise SystemExit("the state did not stay in memory")
    deadline = time.monotonic() + SEALED_S
    while not manager.is_sealed:
        if time.monotonic() > deadline:
            raise SystemExit("the state in memory was not sealed")
        time.sleep(0.01)


def load(folder: Path, run_id: str, made: State, start: str) -> Start:
    """Load the state once, in this process; SystemExit if it came from elsewhere or differs from the original.

    A state in memory stays there.
    """
    source, is_new = STARTS[start]
    into = {} if is_new else {name: torch.empty_like(tensor).fill_(-1.0) for name, tensor in made.items()}
    cool(folder / "checkpoints")
    give_back_freed_memory()
    manager = manager_of(folder, run_id)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    if source == "memory":
        manager.recover()
    recover_s = time.perf_counter() - wall_s
    loaded = manager.load("latest", into=into)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    try:
        if loaded is None or loaded.is_from_memory != (source == "memory"):
            raise SystemExit(f"the state did not come from the {source}")
        if loaded.identity != IDENTITY or not is_equal(loaded.tensors, made):
            raise SystemExit("the loaded state differs from the original")
        if any(loaded.tensors[name] is not tensor for name, tensor in into.items()):
            raise SystemExit("the state was not loaded into the given memory")
    finally:
        manager.close(has_failed=True)
    return Start(wall_s, recover_s, cpu_s, sum(tensor.nbytes for tensor in made.values()))


def is_equal(ones: State, others: State) -> bool:
    """Whether all tensors have the same names and bits."""
    return ones.keys() == others.keys() and all(
        torch.equal(tensor.view(torch.int32), others[name].view(torch.int32)) for name, tensor in ones.items()
    )


if __name__ == "__main__":
    main()
