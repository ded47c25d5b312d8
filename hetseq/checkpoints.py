"""`hetseq checkpoints ACTION RUN`: what checkpoints a run has, what is in them, whether they are whole, and their end.

Responsible for the command line of the five actions, for the choice of what `prune` removes, and for the words. What
the files mean, whether they can be believed and how they are removed is `checkpoint/`'s affair; that package imports
torch, so it is imported once the command line is known to be right.

The one idea: every action gives its lines as it finds them out, and ends with an exception where a script is to notice
it by the exit code. Only `prune` changes a run, under the lock that keeps other runs out; the others may look at a run
that goes on, whose old checkpoints may vanish under their eyes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetseq.errors import CheckpointError, CheckpointRefused, ConfigError, RunDirectoryError
from hetseq.registry import nearest
from hetseq.run_directory import RunDirectory

if TYPE_CHECKING:
    from hetseq.checkpoint import Inspected, Scan

_EXAMPLES = {
    "list": "hetseq checkpoints list runs/mnist",
    "show": "hetseq checkpoints show runs/mnist --step best",
    "verify": "hetseq checkpoints verify runs/mnist",
    "prune": "hetseq checkpoints prune runs/mnist --keep 3 --dry-run",
    "export": "hetseq checkpoints export runs/mnist --format torch --to mnist.pt",
}
#: the flags of each action, and whether they take a value
_FLAGS: dict[str, dict[str, bool]] = {
    "list": {"--json": False},
    "show": {"--step": True, "--tensors": False, "--json": False},
    "verify": {"--step": True, "--shallow": False},
    "prune": {"--keep": True, "--keep-best": False, "--drop-best": False, "--dry-run": False},
    "export": {"--format": True, "--to": True, "--step": True},
}
_ALSO = {"--output": "--to"}
#: the last one is written by the run's own task
FORMS = ("safetensors", "torch", "dcp", "hf")


# the command line


@dataclass(frozen=True)
class Arguments:
    """One action on the checkpoints of one run; `which` is "latest", "best" or a step, None where none was named."""

    action: str
    run: Path
    which: str | None = None
    keep: int = 1
    keeps_best: bool = True
    is_dry_run: bool = False
    is_shallow: bool = False
    wants_tensors: bool = False
    wants_json: bool = False
    form: str = ""
    target: Path = Path()


def parse(argv: Sequence[str]) -> Arguments:
    """The command line of `hetseq checkpoints`. Raises ConfigError."""
    if not argv or argv[0] not in _FLAGS:
        found = f"unknown action {argv[0]}" if argv else "the action is missing"
        later = next((word for word in argv[1:] if word in _FLAGS), None)
        guess = later or (nearest(argv[0], _FLAGS) if argv else None)
        hint = f"did you mean {guess}?" if guess else f"expected {', '.join(_FLAGS)}"
        hint = f"{later} comes before RUN" if later else hint
        raise ConfigError(f"hetseq checkpoints: {found}: {hint}; as in: {_EXAMPLES[guess or 'list']}")
    action = argv[0]
    run, given = _split(action, argv[1:])
    if "--keep-best" in given and "--drop-best" in given:
        raise ConfigError("hetseq checkpoints prune: --keep-best and --drop-best exclude each other: leave one out")
    return Arguments(
        action=action,
        run=Path(run),
        which=_which(given.get("--step")),
        keep=_keep(_needed(action, given, "--keep")) if action == "prune" else 1,
        keeps_best="--drop-best" not in given,
        is_dry_run="--dry-run" in given,
        is_shallow="--shallow" in given,
        wants_tensors="--tensors" in given,
        wants_json="--json" in given,
        form=_form(_needed(action, given, "--format")) if action == "export" else "",
        target=Path(_needed(action, given, "--to")) if action == "export" else Path(),
    )


def _split(action: str, argv: Sequence[str]) -> tuple[str, dict[str, str]]:
    """RUN, and the flags with their values ("" for those that take none)."""
    command, flags, example = f"hetseq checkpoints {action}", _FLAGS[action], f"as in: {_EXAMPLES[action]}"
    targets, given, words = [], {}, list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if _ALSO.get(flag) in flags:
            flag = _ALSO[flag]
        if not word.startswith("-"):
            targets.append(word)
            continue
        if flag not in flags:
            guess = nearest(flag, flags)
            hint = f"did you mean {guess}?" if guess else f"expected {', '.join(flags)}"
            raise ConfigError(f"{command}: unknown option {flag}: {hint}")
        if flag in given:
            raise ConfigError(f"{command}: {flag} stands there twice, {example}")
        if flags[flag] and not equals:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"{command}: {flag} stands without a value, {example}")
            value = words.pop(0)
        elif equals and not flags[flag]:
            raise ConfigError(f"{command}: {word}: {flag} takes no value")
        given[flag] = value
    if len(targets) != 1:
        found = f"found {' '.join(targets)}" if targets else "found none"
        raise ConfigError(f"{command}: expected one RUN, {found}; {example}")
    return targets[0], given


def _needed(action: str, given: Mapping[str, str], flag: str) -> str:
    if not given.get(flag):
        raise ConfigError(f"hetseq checkpoints {action}: {flag} is missing, as in: {_EXAMPLES[action]}")
    return given[flag]


def _which(text: str | None) -> str | None:
    if text is None or text in ("latest", "best"):
        return text
    if not re.fullmatch(r"[0-9]{1,19}", text):
        raise ConfigError(f"--step {text}: expected the number of a step, latest or best, as in --step 500")
    return str(int(text))


def _keep(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) == 0:
        raise ConfigError(
            f"--keep {text}: expected how many of the newest checkpoints stay, 1 or more; the newest is never removed"
        )
    return int(text)


def _form(text: str) -> str:
    if text not in FORMS:
        guess = nearest(text, FORMS)
        hint = f"did you mean {guess}?" if guess else f"expected {', '.join(FORMS)}"
        raise ConfigError(f"--format {text}: {hint}")
    return text


# the actions


def answer(arguments: Arguments) -> Iterator[str]:
    """The lines of one action, as they are found out.

    Raises ConfigError, RunDirectoryError or CheckpointRefused where there is nothing to act on, and CheckpointError at
    the end where something is damaged or could not be removed.
    """
    _check_run(arguments.run)
    try:
        for line in _ACTIONS[arguments.action](arguments):
            # what stands in the files of others must not steer a terminal
            yield "".join(letter if letter.isprintable() else "?" for letter in line)
    except OSError as error:
        raise CheckpointError(f"{error.filename or arguments.run}: {error.strerror or error}") from error


def _list(arguments: Arguments) -> Iterator[str]:
    from hetseq.inventory import list_json, list_text, read_contents

    contents = read_contents(arguments.run)
    yield from [list_json(contents)] if arguments.wants_json else list_text(contents)


def _show(arguments: Arguments) -> Iterator[str]:
    from hetseq.inventory import show_json, show_text

    inspected, passed_over = _inspected(arguments.run, arguments.which or "latest")
    if arguments.wants_json:
        yield show_json(inspected, passed_over)
    else:
        yield from show_text(inspected, passed_over, every_tensor=arguments.wants_tensors)


def _verify(arguments: Arguments) -> Iterator[str]:
    from hetseq.checkpoint import TooNewError, is_committed, verify
    from hetseq.inventory import counted, size_text

    found = _wanted(arguments)
    damaged = []
    for commit in found.commits:
        problems = verify(commit, deep=not arguments.is_shallow)
        if problems and not is_committed(commit.path):
            yield f"{commit.path.name}: removed in the meantime"
            continue
        damaged += [commit.path.name] if problems else []
        done = "small files and sizes agree" if arguments.is_shallow else "every byte is as it was written"
        result = f"damaged: {'; '.join(problems)}" if problems else f"ok, {size_text(commit.size_bytes)}, {done}"
        yield f"{commit.path.name}: {result}"
    for path, error in found.refused.items():
        damaged.append(path.name)
        yield f"{path.name}: {'not checked' if isinstance(error, TooNewError) else 'damaged'}: {error}"
    if damaged:
        count = len(found.commits) + len(found.refused)
        raise CheckpointError(
            f"{len(damaged)} of {counted(count, 'checkpoint')} of {arguments.run} cannot be believed"
            f" ({', '.join(damaged)}): a run passes over them; restore them from a copy, or remove them"
        )


def _prune(arguments: Arguments) -> Iterator[str]:
    if arguments.is_dry_run:
        yield from _pruned(arguments)
        return
    try:
        with RunDirectory(arguments.run).lock():
            yield from _pruned(arguments)
    except RunDirectoryError as error:
        raise RunDirectoryError(f"nothing was removed: {error}") from error


def _pruned(arguments: Arguments) -> Iterator[str]:
    from hetseq.checkpoint import remove_all, verify
    from hetseq.inventory import counted, size_text

    commits = _committed(arguments.run).commits
    whole = None
    if len(commits) > arguments.keep:  # reading every byte of a checkpoint takes its time
        whole = next((at for at, commit in enumerate(commits) if not verify(commit, deep=True)), None)
        if whole is None:
            raise CheckpointError(
                f"nothing was removed: no checkpoint of {arguments.run} verifies, and an older one may be the only"
                " help; `hetseq checkpoints verify` says what is wrong"
            )
    stays = kept([commit.kinds for commit in commits], arguments.keep, whole=whole, keeps_best=arguments.keeps_best)
    freed, remaining, stuck = [], [], []
    for index, commit in reversed(list(enumerate(commits))):
        described = f"step {commit.identity.step} ({', '.join(commit.kinds)}), {size_text(commit.size_bytes)}"
        if index in stays:
            remaining.append(commit)
            yield f"stays: {described}: {stays[index]}"
        elif arguments.is_dry_run or remove_all([commit.path]) or not commit.path.exists():
            freed.append(commit.size_bytes)
            yield f"{'would go' if arguments.is_dry_run else 'removed'}: {described}"
        else:
            stuck.append(commit.path.name)
    done = "would be removed" if arguments.is_dry_run else "removed"
    yield (
        f"{counted(len(freed), 'checkpoint')}, {size_text(sum(freed))} {done}; {len(remaining)} stay,"
        f" {size_text(sum(commit.size_bytes for commit in remaining))}"
    )
    if stuck:
        raise CheckpointError(f"could not be removed: {', '.join(stuck)}")


def kept(
    kinds: Sequence[Sequence[str]], keep: int, *, whole: int | None = None, keeps_best: bool = True
) -> dict[int, str]:
    """Which checkpoints stay, and why: positions in `kinds`, which is newest first.

    The newest `keep` stay, the one at `whole` (the newest every byte of which verifies), and the newest of kind best.
    """
    best = next((at for at, names in enumerate(kinds) if "best" in names), None) if keeps_best else None
    stays = {}
    if best is not None:
        stays[best] = "the best"
    if whole is not None:
        stays[whole] = "the newest that verifies"
    newest = "the newest" if keep == 1 else f"one of the newest {keep}"
    stays.update((at, newest) for at in range(min(keep, len(kinds))))
    return stays


def _export(arguments: Arguments) -> Iterator[str]:
    target = arguments.target
    if target.exists() or target.is_symlink():
        raise ConfigError(f"--to {target} exists: nothing is overwritten; name a path that does not exist yet")
    if not target.parent.is_dir():
        raise ConfigError(f"--to {target}: there is no folder {target.parent}: make it first")
    inspected, passed_over = _inspected(arguments.run, arguments.which or "latest")
    yield from passed_over
    if arguments.form == "hf":
        from hetseq.model_export import export_model

        path = export_model(arguments.run, inspected.commit, target)
    else:
        from hetseq.checkpoint.exporting import export

        path = export(inspected.commit, target, form=arguments.form)
    yield f"step {inspected.commit.identity.step} of {arguments.run} is in {path} ({arguments.form})"


_ACTIONS: dict[str, Callable[[Arguments], Iterator[str]]] = {
    "list": _list,
    "show": _show,
    "verify": _verify,
    "prune": _prune,
    "export": _export,
}


# which run, which checkpoints


def _check_run(run: Path) -> None:
    if not run.is_dir():
        raise ConfigError(
            f"{run} {'is a file' if run.exists() else 'does not exist'}: expected the --save-dir of a run"
        )
    if _is_run(run):
        return
    above = next((folder for folder in list(run.parents)[:2] if _is_run(folder)), None)
    hint = f"did you mean {above}?" if above else "name the --save-dir of a run"
    raise ConfigError(f"{run} is no run directory, as it has neither the config.yaml of a run nor checkpoints: {hint}")


def _is_run(folder: Path) -> bool:
    try:
        return bool(RunDirectory(folder).run_id)
    except RunDirectoryError:
        from hetseq.checkpoint import attempts  # only here: it brings torch

    try:
        return bool(attempts(RunDirectory(folder).checkpoints))
    except OSError:
        return False


def _committed(run: Path) -> Scan:
    from hetseq.checkpoint import scan

    found = scan(RunDirectory(run).checkpoints)
    if not found.commits and not found.refused:
        raise CheckpointRefused(f"{run} has no checkpoints: train it first, or name another run")
    return found


def _wanted(arguments: Arguments) -> Scan:
    """The checkpoints that `verify` reads: all, or those of one step."""
    from hetseq.checkpoint import Scan, choose, step_of

    found = _committed(arguments.run)
    if arguments.which is None:
        return found
    if arguments.which == "latest":
        newest = found.commits[:1]
        return Scan(newest, found.refused_from(newest[0].identity.step if newest else 0))
    if arguments.which.isdigit():
        step = int(arguments.which)
        found = Scan(
            [commit for commit in found.commits if commit.identity.step == step],
            {path: error for path, error in found.refused.items() if step_of(path) == step},
        )
        if found.commits or found.refused:
            return found
    return Scan(choose(arguments.which, arguments.run).commits[:1], {})


def _inspected(run: Path, which: str) -> tuple[Inspected, list[str]]:
    """The checkpoint that is meant, its small files checked; and what was passed over on the way to the newest."""
    from hetseq.checkpoint import choose, inspect

    _committed(run)
    choice = choose(which, run)
    passed_over = list(choice.skipped)
    for commit in choice.commits:
        try:
            return inspect(commit), passed_over
        except (CheckpointError, OSError) as error:
            passed_over.append(f"checkpoint {commit.path} cannot be used: {error}")
    raise CheckpointRefused("; ".join(passed_over))
