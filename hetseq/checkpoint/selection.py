"""Resolves `latest`, `best`, a step number or a path to a checkpoint.

Responsible for: turning such a word into commits to try, with a clear refusal of checkpoints that do not exist or are
never opened. Reads no tensors. The one idea: `latest` (and the path of a run, which means that run's latest) may fall
back to an older checkpoint and says so; a request for one checkpoint gets that one or an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetseq.checkpoint.directory import attempt_name, is_committed, parse_attempt_name, read_commit, scan, step_of
from hetseq.checkpoint.publish import CHECKPOINTS_NAME
from hetseq.checkpoint.records import Commit
from hetseq.errors import CheckpointError, CheckpointRefused
from hetseq.system.files import read_into, reading

# where the folder of a checkpoint is, relative to the run directory or to the given path
NOWHERE, IN_CHECKPOINTS, INSIDE, ITSELF, IN_MEMORY = range(5)


@dataclass(frozen=True)
class Skipped:
    """Why a checkpoint, or a state in memory, is not used."""

    sentence: str  # with its folder, for errors and records
    line: str  # with its step, for the terminal

    @staticmethod
    def of(path: Path, reason: object) -> Skipped:
        """The checkpoint in a folder; the reason is an error or a sentence."""
        fault = "cannot be read" if isinstance(reason, OSError) else "is damaged"
        return Skipped(describe(path, reason), f"step {step_of(path)} {fault} ({reason})")


def used_instead(skipped: Sequence[Skipped], title: str) -> str:
    """One line about what was skipped and what is used."""
    return f"{'; '.join(one.line for one in skipped)}: {title} is used instead"


@dataclass(frozen=True)
class Choice:
    """Commits in the order in which to try them; whether a bad one ends the search; the checkpoints skipped so far."""

    commits: list[Commit]
    place: int
    is_explicit: bool
    skipped: list[Skipped] = field(default_factory=list)


def choose(which: str, run_directory: Path) -> Choice:
    """The commits that `which` may mean, newest first; CheckpointRefused if none of them can be loaded."""
    base = _base(which, run_directory)
    if which == "latest":
        return _newest(base / CHECKPOINTS_NAME, base, place=IN_CHECKPOINTS, needed=False)
    if which == "best":
        return _best(base / CHECKPOINTS_NAME)
    if _is_step(which):
        return _of_step(int(which), base / CHECKPOINTS_NAME)
    return _of_path(base)


def locate(which: str, run_directory: Path, *, place: int, step: int, nonce: int) -> Path:
    """The folder that rank zero chose, as this rank sees it."""
    base = _base(which, run_directory)
    name = attempt_name(step, nonce)
    return {IN_CHECKPOINTS: base / CHECKPOINTS_NAME / name, INSIDE: base / name, ITSELF: base}[place]


def describe(path: Path, reason: object) -> str:
    """One sentence about a checkpoint that was skipped or refused."""
    return f"checkpoint {path} cannot be used: {reason}"


def _base(which: str, run_directory: Path) -> Path:
    return run_directory if which in ("latest", "best") or _is_step(which) else Path(which)


def _is_step(which: str) -> bool:
    return which.isascii() and which.isdigit()


def _newest(root: Path, base: Path, *, place: int, needed: bool) -> Choice:
    found = scan(root)
    newest_step = found.commits[0].identity.step if found.commits else 0
    newer = found.refused_from(newest_step)
    for error in newer.values():
        if isinstance(error, CheckpointRefused):  # a newer format: an older state would lose work without notice
            raise error
    skipped = [Skipped.of(path, error) for path, error in newer.items()]
    if not found.commits:
        _refuse_pickles(base)
        _refuse_pickles(root)
        if skipped:
            raise CheckpointRefused(none_verifies(root, skipped))
        if needed:
            raise CheckpointRefused(f"{root} holds no committed checkpoint: name another run or checkpoint")
    return Choice(found.commits, place, is_explicit=False, skipped=skipped)


def none_verifies(root: Path, skipped: Sequence[Skipped]) -> str:
    """The sentence for a folder whose checkpoints are all bad."""
    return (
        f"no checkpoint in {root} can be used, and starting anew would hide that:"
        f" {'; '.join(one.sentence for one in skipped)}. Restore the"
        " files from a copy, or start anew with --resume none"
    )


def _best(root: Path) -> Choice:
    found = scan(root)
    best = [commit for commit in found.commits if "best" in commit.kinds][:1]
    if not best:
        raise CheckpointRefused(
            f"{root} holds no checkpoint of the kind best{_also(found.refused)}: validation has not marked one yet; use"
            " latest, or a step number"
        )
    return Choice(best, IN_CHECKPOINTS, is_explicit=True)


def _of_step(step: int, root: Path) -> Choice:
    found = scan(root)
    commits = [commit for commit in found.commits if commit.identity.step == step]
    refused = {path: error for path, error in found.refused.items() if step_of(path) == step}
    if not commits:
        steps = sorted({commit.identity.step for commit in found.commits})
        known = ", ".join(str(number) for number in steps[-10:]) or "none"
        raise CheckpointRefused(
            f"{root} holds no usable checkpoint of step {step}{_also(refused)}: the newest steps are {known}; `hetseq"
            f" checkpoints list {root.parent}` lists all"
        )
    return Choice(commits[:1], IN_CHECKPOINTS, is_explicit=True)


def _of_path(path: Path) -> Choice:
    if not path.exists():
        raise CheckpointRefused(
            f"checkpoint {path} does not exist: name latest, best, a step number, the folder of a checkpoint"
            " (checkpoints/step-...), or the folder of a run"
        )
    if not path.is_dir():
        if _looks_like_a_pickle(path):
            raise CheckpointRefused(_pickle_sentence(path))
        raise CheckpointRefused(f"{path} is a file: a checkpoint is a folder (checkpoints/step-...); name that folder")
    if is_committed(path):
        try:
            return Choice([read_commit(path)], ITSELF, is_explicit=True)
        except CheckpointRefused:
            raise
        except (CheckpointError, OSError) as error:
            raise CheckpointRefused(describe(path, error)) from None
    if parse_attempt_name(path.name) is not None:
        raise CheckpointRefused(f"{path} was never committed (it has no COMMIT.json): name another checkpoint")
    if (path / CHECKPOINTS_NAME).is_dir():
        return _newest(path / CHECKPOINTS_NAME, path, place=IN_CHECKPOINTS, needed=True)
    return _newest(path, path, place=INSIDE, needed=True)


def _also(refused: Mapping[Path, CheckpointError]) -> str:
    return f" ({'; '.join(describe(path, error) for path, error in refused.items())})" if refused else ""


def _refuse_pickles(directory: Path) -> None:
    found = sorted(directory.glob("checkpoint*.pt")) if directory.is_dir() else []
    if found:
        raise CheckpointRefused(_pickle_sentence(found[0]))


def _looks_like_a_pickle(path: Path) -> bool:
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt", ".pkl"):
        return True
    start = bytearray(2)
    try:
        with reading(path.resolve()) as (descriptor, _):
            read_into(descriptor, memoryview(start))
    except (OSError, EOFError):
        return False
    return bytes(start) in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def _pickle_sentence(path: Path) -> str:
    return (
        f"{path} is a pickle, the checkpoint format of the 2020 HetSeq: opening a pickle can run any code, so it cannot"
        " be loaded. Resume from a checkpoint of this HetSeq (a folder checkpoints/step-...), or start anew with"
        " --resume none, or with another --save-dir"
    )
