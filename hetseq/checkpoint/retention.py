"""Retention: which checkpoints may be deleted.

Responsible for: deciding which committed checkpoints may be deleted, as a pure function. Deletes nothing. The
one idea: a checkpoint stays as long as any one of its kinds keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hetseq.checkpoint.records import Identity

TIMED_KINDS = frozenset({"time", "final", "signal"})


@dataclass(frozen=True)
class Retention:
    """How many checkpoints of each kind are kept; -1 means all. `keep_every`: a number of steps, see `superseded`.

    With `keep_newest` this many and the best are kept, of any kind, and each new checkpoint is marked as `prunable`.
    Those that are not marked were written by a start that kept more, and stay. The best metric was forgotten after step
    `reset_step`, so the best checkpoint until then stays too: later ones are the best of another count.
    """

    keep_interval_updates: int = -1
    keep_last_epochs: int = -1
    keep_timed: int = 2  # of the kinds time, final and signal together
    keep_every: int = 0
    keep_newest: int | None = None
    reset_step: int = 0

    def __post_init__(self) -> None:
        for name in ("keep_interval_updates", "keep_last_epochs", "keep_timed"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < -1:
                raise ValueError(f"{name} {value!r}: expected -1 (all) or a number of checkpoints")
        if self.keep_every < 0:
            raise ValueError(f"keep_every {self.keep_every!r}: expected a number of steps, or 0 for none")
        if self.keep_newest is not None and self.keep_newest < 1:
            raise ValueError(f"keep_newest {self.keep_newest!r}: expected a number of checkpoints, or None")


class Kept(Protocol):
    """The facts about a checkpoint that the decision needs."""

    @property
    def identity(self) -> Identity: ...

    @property
    def kinds(self) -> tuple[str, ...]: ...

    @property
    def is_prunable(self) -> bool: ...


def superseded(commits: Sequence[Kept], retention: Retention, *, generation: int) -> list[int]:
    """Positions in `commits` (newest first) that may be deleted, oldest first.

    Never the newest, never one of a step that is a multiple of `keep_every`, whatever its kind, and never one of a
    generation newer than `generation`, the caller's own.
    """
    rules: tuple[tuple[frozenset[str], int], ...] = (
        (frozenset({"epoch"}), retention.keep_last_epochs),
        (frozenset({"interval"}), retention.keep_interval_updates),
        (TIMED_KINDS, retention.keep_timed),
        (frozenset({"best"}), 1),
    )
    keep = {index for index, commit in enumerate(commits) if commit.identity.generation > generation}
    keep.add(0)
    if retention.keep_newest is not None:
        rules = ((frozenset({"best"}), 1),)
        keep.update(range(min(retention.keep_newest, len(commits))))
        keep.update(index for index, commit in enumerate(commits) if not commit.is_prunable)
    if retention.keep_every:
        keep.update(index for index, commit in enumerate(commits) if commit.identity.step % retention.keep_every == 0)
    of_before = (
        index
        for index, commit in enumerate(commits)
        if "best" in commit.kinds and commit.identity.step <= retention.reset_step
    )
    keep.update([*of_before][:1])
    for kinds, count in rules:
        matching = [index for index, commit in enumerate(commits) if kinds & set(commit.kinds)]
        keep.update(matching if count == -1 else matching[:count])
    return [index for index in range(len(commits) - 1, -1, -1) if index not in keep]
