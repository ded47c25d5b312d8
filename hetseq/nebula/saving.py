"""One tag that is being saved, as the script's process knows it.

Responsible for: the facts about a tag from its `Checkpoint` until it is on disk, given up, or failed. Takes
no action. The one idea: a tag is *open* while names may still be added, *complete* from then on; where its bytes are is
a separate matter: a complete tag may be in memory only, on its way to the disk, or there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hetseq.nebula.slots import Slot
from hetseq.nebula.tags import TagAttempt

OPEN, MEMORY, WRITING, PERSISTED = "open", "memory", "writing", "persisted"
FAILED, SUPERSEDED, ABANDONED = "failed", "superseded", "abandoned"
#: final statuses: the tag does not change any more
OVER = frozenset({PERSISTED, FAILED, SUPERSEDED, ABANDONED})

AT_NEXT, AT_COMMIT = -1, -2  # num_of_files: complete at the next Checkpoint as well, or at `commit` alone


@dataclass
class SavedFile:
    """A name of a tag: in memory while there is a `slot`; on its way to the disk once it `is_asked`."""

    name: str
    slot: Slot | None
    serial: int
    tree: bytes
    is_asked: bool = False
    is_written: bool = False

    @property
    def is_in_memory(self) -> bool:
        """Whether its state can be read from its slot."""
        return self.slot is not None and self.slot.holds(self.serial)


@dataclass(eq=False)
class Saving:
    """A tag; `is_due` if it will be written without a further request."""

    attempt: TagAttempt
    is_due: bool
    began_s: float  # monotonic
    files: dict[str, SavedFile] = field(default_factory=dict)
    status: str = OPEN
    error: str | None = None
    is_abandoned: bool = False  # it will never be complete
    is_awaited: bool = False  # all ranks send it to the disk, so they can wait for its commit
    stall_s: float = 0.0
    write_s: float = 0.0

    @property
    def tag(self) -> str:
        return self.attempt.tag

    @property
    def is_open(self) -> bool:
        return self.status == OPEN

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    @property
    def slots(self) -> Iterator[Slot]:
        """The slots that it holds."""
        return (file.slot for file in self.files.values() if file.slot is not None)

    @property
    def holds_memory(self) -> bool:
        return any(True for _ in self.slots)

    @property
    def is_on_its_way(self) -> bool:
        """Whether a file of it is being written, so that its memory will become free by itself."""
        return any(file.slot is not None and file.is_asked for file in self.files.values())

    @property
    def unasked(self) -> list[SavedFile]:
        """The files in memory that stay there until they are requested."""
        return [file for file in self.files.values() if file.slot is not None and not file.is_asked]

    def commit_request(self) -> dict[str, Any]:
        """The request to the writer once all names are written."""
        row = {
            "tag": self.tag,
            "tier": "persistent",
            "is_best": int(self.attempt.is_best),
            "world_size": self.attempt.world_size,
            "stall_s": f"{self.stall_s:.4f}",
            "write_s": f"{self.write_s:.3f}",
            "began_s": self.began_s,
        }
        names, attempt = list(self.files), self.attempt.to_json()
        return {"do": "commit", "attempt": attempt, "names": names, "error": self.error, "row": row}

    def announcement(self) -> dict[str, Any]:
        """The instructions to the writer in case this process dies."""
        images = [
            [str(file.slot.arena.path), file.serial]
            for file in self.files.values()
            if file.slot is not None and not file.is_written
        ]
        folder, commit = self.attempt.folder_name, self.commit_request()
        return {"do": "announce", "folder": folder, "images": images, "commit": commit}
