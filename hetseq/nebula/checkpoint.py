"""`Checkpoint`: one tag, to save names into or to load them from.

Responsible for: the object that a script holds. Refuses to know where bytes are; the service knows of tags that are
being saved, `reading` of those on the disk. The one idea: whichever of the two it is, a script cannot tell.
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
    """A tag that is begun, after `init`; or one that a function of this package has found.

    `tag` names it; tags are ordered by the integers in them, and the empty tag means none. `num_of_files` says when it
    is complete: -1 at `commit`, the next Checkpoint, `flush_persistence` or the normal end of the script, N when N
    names are saved, -2 at `commit` alone. `is_best` sends it to the disk whatever the interval, and keeps it longer.

    With several ranks every rank begins the same tags in the same order: this is collective then.
    """

    def __init__(self, tag: str = "", num_of_files: int = -1, *, is_best: bool = False) -> None:
        if type(num_of_files) is not int or num_of_files < -2 or num_of_files == 0:
            raise ValueError(f"num_of_files is {num_of_files!r}: expected a number of names, -1 or -2")
        self._tag = tag
        self._commit: TagCommit | None = None
        self._saving: Saving | None = None
        self._service: Service | None = None
        if tag:
            from hetseq.nebula.api import service  # the facade's functions give Checkpoints

            check_name("tag", tag)
            self._service = service()
            self._saving = self._service.begin(tag, num_of_files, is_best=is_best)

    @classmethod
    def found(cls, commit: TagCommit) -> Checkpoint:
        """A complete tag on the disk."""
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
        """Its directory: None while it is in memory only, and for the empty tag."""
        if self._commit is not None:
            return self._commit.path
        if self._saving is None or self._service is None or not self._saving.is_due:
            return None
        return self._service.place.root / self._saving.attempt.folder_name

    @property
    def status(self) -> str:
        """What has become of it.

        "open" while names may come; "memory" or "writing" once it is complete; "persisted" on the disk; "failed"; a tag
        that was in memory only and is replaced by a newer one is "superseded"; one that never was complete "abandoned".
        """
        if self._saving is None:
            return PERSISTED if self._commit is not None else "none"
        if self._saving.status == OPEN and self.path is not None and (self.path / COMMIT_NAME).exists():
            return PERSISTED  # with several ranks whoever writes the last name completes the tag
        return self._saving.status

    @property
    def names(self) -> list[str]:
        """The names that it holds; with several ranks those of this rank until the tag is on the disk."""
        commit = self.commit_on_disk
        if commit is not None:
            return [file.name for file in commit.files]
        return list(self._saving.files) if self._saving is not None else []

    def save(self, name: str, state: Any) -> None:
        """Save a state under a name; it is copied when this returns, so it may change.

        `state` is a tensor, number, string or None, or a dictionary, list, tuple or set of such, nested as you like,
        or something with `state_dict()`. TypeError names the path of anything else. Waits while the two tags before
        are not on the disk, if they have to go there. With several ranks every rank saves names of its own.
        """
        check_name("name", name)
        saving, owner = self._begun("save")
        owner.save(saving, name, state)

    def commit(self) -> None:
        """No more names will come: the tag is complete. Does not wait for the disk. Every rank calls it."""
        saving, owner = self._begun("commit")
        if saving.is_open and not saving.files and saving.attempt.world_size == 1:
            raise ValueError(f"the tag {self._tag!r} has no names: save something before commit")
        owner.complete(saving)

    def wait(self, timeout: float | None = None) -> str:
        """Wait until a complete tag is where it belongs, at most `timeout` seconds; its status.

        CheckpointError says why it could not be saved, TimeoutError that it takes longer.
        """
        if self._saving is not None and self._service is not None:
            self._service.wait(self._saving, timeout)
        return self.status

    def load(self, name: str, map_location: MapLocation = None) -> Any:
        """The state that was saved under a name, with the types it had; tensors on the CPU unless told otherwise.

        From a file every byte is verified: CheckpointError names the file that is damaged. KeyError for no such name.
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
            what = "the empty tag" if not self._tag else f"the tag {self._tag!r}, which is on the disk"
            raise ValueError(f"{action} does not go with {what}: begin one with Checkpoint(tag)")
        return self._saving, self._service

    @property
    def commit_on_disk(self) -> TagCommit | None:
        """What its COMMIT.json says; None while there is none."""
        if self._commit is None and self.status == PERSISTED and self.path is not None:
            self._commit = read_commit(self.path)
        return self._commit
