"""Memory budget for saved states on this node: the user's limit and the available memory.

Responsible for: reading HETSEQ_MEMORY_BUFFER_SIZE and NEBULA_MEMORY_BUFFER_SIZE as a limit for one process.
Knows nothing of the states. The one idea: under Nebula's variable a process has a fixed share; under HetSeq's
all processes of the node share one account, so a process with more bytes gets more of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hetseq.checkpoint.arena import SHARED_MEMORY
from hetseq.config.byte_size import parse_size
from hetseq.system import host_memory
from hetseq.system.files import free_bytes

OURS, NEBULAS, LOCAL_WORLD = "HETSEQ_MEMORY_BUFFER_SIZE", "NEBULA_MEMORY_BUFFER_SIZE", "LOCAL_WORLD_SIZE"


@dataclass(frozen=True)
class Budget:
    """`limit_bytes` for this process, or for all processes of this node together (`is_shared`); and its origin."""

    limit_bytes: int
    is_shared: bool
    source: str


def budget(given: int | str | None, environment: Mapping[str, str] | None = None) -> Budget:
    """The memory that this process may use; ConfigError for an invalid size.

    The `given` bytes (or text, as in "200MB") of `init` come first, then HetSeq's variable, then Nebula's: half of that
    limit, divided by the processes of the node. With none of them it is half of the available memory.
    """
    variables = os.environ if environment is None else environment
    if given is not None:
        return Budget(parse_size(given, "memory_buffer_size"), True, "memory_buffer_size")
    if variables.get(OURS):
        return Budget(parse_size(variables[OURS], OURS), True, OURS)
    if variables.get(NEBULAS):
        processes = parse_size(variables.get(LOCAL_WORLD) or "1", LOCAL_WORLD)
        limit = parse_size(variables[NEBULAS], NEBULAS) // 2 // max(processes, 1)
        return Budget(limit, False, f"{NEBULAS} / 2 / {max(processes, 1)}")
    return Budget(_available_bytes(), True, "half of the available memory")


def _available_bytes() -> int:
    """Half of the memory that programs could still get, at most the free space of /dev/shm."""
    try:
        return min(host_memory.available_bytes() // 2, free_bytes(SHARED_MEMORY))
    except OSError:
        return 0
