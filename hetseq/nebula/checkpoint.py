"""`Checkpoint`: one tag, to save names into or to load them from.

Responsible for: the object that a script holds. Does not know where bytes are: the service knows the tags that are
being saved, `reading` those on disk. The one idea: a script sees no difference between the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetseq.errors import CheckpointError
from hetseq.nebula.reading import MapLocation, load_file, load_slot
from hetseq.nebula.saving import MEMORY, OPEN, PERSISTED, WRITING, Saving
from hetseq.nebula.tags import TagCommit, check_name, read_commit
from hetseq.system.files import COMMIT_NAME

if TYPE_CHECKING:
    from hetseq.nebula.service import Service


class Checkpoint:
    """A new tag, after `init`; or one that a function of this package has found.

    `tag` names it; tags are ordered by the integers in them, and the empty tag means none. `num_of_files` says when it
    is complete: -1 at `commit`, the next Checkpoint, `flush_persistence` or the normal end of the script, N when N
    names are saved, -2 at `commit` alone. `is_best` sends it to the disk whatever the interval, and keeps it longer.

    With several ranks every rank creates the same tags in the same order: it is then collective.
    """

    def __init__(self, tag: str = "", num_of_files: int = -1, *, is_best: bool = False) -> None:
        if type(num_of_files) is not int or num_of_files < -2 or num_of_files == 0:
            raise ValueError(f"num_of_files is {num_of_files!r}: expected a number of names, -1 or -2")
        self._tag = tag
        self._commit: TagCommit | None = None
        self._saving: Saving | None = None
        self._service: Service | None = None
        if tag:
            from hetseq.nebula.api import service  # the facade's functions return Checkpoints

            check_name("tag", tag)
            self._service = service()
            self._saving = self._service.begin(tag, num_of_files, is_best=is_best)

    @classmethod
    def found(cls, commit: TagCommit) -> Checkpoint:
        """A complete tag on disk."""
        checkpoint = cls()
        checkpoint._tag, checkpoint._commit = commit.tag, commit
        return checkpoint

    @classmethod
    def under_way(cls, saving: Saving, owner: Service) -> Checkpoint:
        """A tag that this process saves."""
        checkpoint = cls()
        checkpoint._tag, checkpoint._saving, checkpoint._service = saving.tag, saving, owner
        return checkpoint

    def __repr__(self) -> str:
        return f"Checkpoint({self._tag!r}, {self.status})"

    @property
    def tag(self) -> str:
        """Its name; empty for none."""
        return self._tag

    @property
    def path(self) -> Path | None:
        """Its directory; None while it is in memory only, and for the empty tag."""
        if self._commit is not None:
            return self._commit.path
        if self._saving is None or self._service is None or not self._saving.is_due:
            return None
        return self._service.place.root / self._saving.attempt.folder_name

    @property
    def status(self) -> str:
        """The state of the tag.

        "open" while names may be added; "memory" or "writing" once it is complete; "persisted" on disk; "failed";
        "superseded" if it was in memory only and a newer one replaced it; "abandoned" if it was never complete.
        """
        if self._saving is None:
            return PERSISTED if self._commit is not None else "none"
        if self._saving.status == OPEN and self.path is not None and (self.path / COMMIT_NAME).exists():
            return PERSISTED  # with several ranks, the writer of the last name completes the tag
        return self._saving.status

    @property
    def names(self) -> list[str]:
        """The names in the tag; with several ranks, those of this rank until the tag is on disk."""
        commit = self.commit_on_disk
        if commit is not None:
            return [file.name for file in commit.files]
        return list(self._saving.files) if self._saving is not None else []

    def save(self, name: str, state: Any) -> None:
        """Save a state under a name; the copy is made before this returns, so the state may then change.

        `state` is a tensor, number, string or None, or a dictionary, list, tuple or set of such, nested to any depth,
        or an object with `state_dict()`. TypeError names the path of anything else. Waits if the two previous tags
        are still being written to disk. With several ranks every rank saves names of its own.
        """
        check_name("name", name)
        saving, owner = self._begun("save")
        owner.save(saving, name, state)

    def commit(self) -> None:
        """Complete the tag: no more names can be added. Does not wait for the disk. Every rank calls it."""
        saving, owner = self._begun("commit")
        if saving.is_open and not saving.files and saving.attempt.world_size == 1:
            raise ValueError(f"the tag {self._tag!r} has no names: save something before commit")
        owner.complete(saving)

    def wait(self, timeout: float | None = None) -> str:
        """Wait until a complete tag is in its final place, at most `timeout` seconds; returns its status.

        CheckpointError if it could not be saved, with the reason; TimeoutError if it takes longer.
        """
        if self._saving is not None and self._service is not None:
            self._service.wait(self._saving, timeout)
        return self.status

    def load(self, name: str, map_location: MapLocation = None) -> Any:
        """The state that was saved under a name, with its original types; tensors on the CPU by default.

        A file is verified to the last byte: CheckpointError names a damaged file. KeyError for an unknown name.
        """
        if not self._tag:
            raise CheckpointError("there is no checkpoint to load from: its tag is empty")
        if self._saving is not None and self._service is not None:
            with self._service.held():
                file = self._saving.files.get(name)
                if file is not None and file.is_in_memory and file.slot is not None:
                    file.slot.settle()
                    return load_slot(file.slot, file.tree, map_location)
                if self._saving.status in (MEMORY, WRITING):
                    self._service.wait(self._saving, None)
        commit = self.commit_on_disk
        if commit is None:
            raise CheckpointError(f"the tag {self._tag!r} is {self.status}: there is nothing to load")
        return load_file(commit, name, map_location)

    def _begun(self, action: str) -> tuple[Saving, Service]:
        if self._saving is None or self._service is None:
            what = "the empty tag" if not self._tag else f"the tag {self._tag!r}, which is on disk"
            raise ValueError(f"{action} is not possible with {what}: create one with Checkpoint(tag)")
        return self._saving, self._service

    @property
    def commit_on_disk(self) -> TagCommit | None:
        """The content of its COMMIT.json; None while there is none."""
        if self._commit is None and self.status == PERSISTED and self.path is not None:
            self._commit = read_commit(self.path)
        return self._commit
