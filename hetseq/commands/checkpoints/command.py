"""`hetseq checkpoints ACTION RUN`: list, show, verify, prune and export the checkpoints of a run.

Parses the command line of the five actions, chooses the checkpoints that `prune` removes, and words the output. The
package `checkpoint/` reads, verifies and removes the files; it imports torch, so it is imported only after the command
line has been checked.

The one idea: every action yields its lines as it finds them, and raises at the end if a script must notice a failure by
the exit code. Only `prune` changes a run, under the lock that keeps other runs out. The other actions may read a run in
progress, whose old checkpoints may disappear meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hetseq.config import HelpRequested
from hetseq.config.command_line import Argument, Command, CommandOption
from hetseq.errors import CheckpointError, CheckpointRefused, ConfigError, RunDirectoryError
from hetseq.monitor.progress_bar import bar
from hetseq.registry import nearest
from hetseq.run_directory import RunDirectory
from hetseq.which_run import existing_run

if TYPE_CHECKING:
    from hetseq.checkpoint import Commit, Inspected, Scan, Skipped

#: the last one is written by the run's own task
FORMS = ("safetensors", "torch", "dcp", "hf")


# the command line


@dataclass(frozen=True)
class CheckpointArguments:
    """One action on the checkpoints of one run; `which` is "latest", "best" or a step, None if none was given."""

    action: str
    run: Path
    which: str | None = None
    keep: int = 1
    drops_best: bool = False
    is_dry_run: bool = False
    is_shallow: bool = False
    wants_tensors: bool = False
    wants_json: bool = False
    form: str = ""
    target: Path = Path()
    merges: bool = False


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq checkpoints ACTION RUN`: print the result line by line; returns 0. Raises as `answer` does."""
    for line in answer(parse(words)):
        say(line)  # at once, because reading every byte takes long
    return 0


def parse(argv: Sequence[str]) -> CheckpointArguments:
    """Parse the command line of `hetseq checkpoints`. Raises ConfigError, HelpRequested."""
    if not argv or argv[0] not in ACTIONS:
        raise _no_action(argv)
    command = ACTIONS[argv[0]]
    given = command.read(argv[1:])
    values = dict(given.values)
    if values.pop("--keep-best", False) and values["--drop-best"]:
        raise command.refusal("--keep-best and --drop-best exclude each other: leave one out")
    if values.get("--merge") and values["--format"] != "hf":
        raise command.refusal(
            f"--merge goes with --format hf: {values['--format']} holds the tensors as they were saved"
        )
    return CheckpointArguments(
        action=argv[0], run=Path(values.pop("RUN")), **{_FIELDS[name]: value for name, value in values.items()}
    )


def _no_action(argv: Sequence[str]) -> Exception:
    if not {"-h", "--help"}.isdisjoint(argv):
        return HelpRequested(COMMAND.help())
    found = f"unknown action {argv[0]}" if argv else "the action is missing"
    later = next((word for word in argv[1:] if word in ACTIONS), None)
    guess = later or (nearest(argv[0], ACTIONS) if argv else None)
    hint = f"did you mean {guess}?" if guess else f"expected {', '.join(ACTIONS)}"
    hint = f"{later} comes before RUN" if later else hint
    return COMMAND.refusal(f"{found}: {hint}; as in: {ACTIONS[guess or 'list'].examples[0]}")


def _which(text: str) -> str:
    if text in ("latest", "best"):
        return text
    if not re.fullmatch(r"[0-9]{1,19}", text):
        raise ValueError("expected a step number, latest or best, as in --step 500")
    return str(int(text))


def _keep(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) == 0:
        raise ValueError("expected the number of newest checkpoints to keep, at least 1; the newest is never removed")
    return int(text)


_RUN = Argument("RUN", "the --save-dir of a run, in progress or not; nothing in it is changed")
_STEP = CommandOption("--step", "a step number, latest or best; default: latest", "STEP", read=_which)
_JSON = CommandOption("--json", "print one line of JSON, for scripts")

#: option -> field of `CheckpointArguments`
_FIELDS = {
    "--step": "which", "--json": "wants_json", "--tensors": "wants_tensors", "--shallow": "is_shallow",
    "--keep": "keep", "--drop-best": "drops_best", "--dry-run": "is_dry_run", "--format": "form", "--to": "target",
    "--merge": "merges",
}  # fmt: skip

ACTIONS = {
    "list": Command(
        "checkpoints list",
        "List the checkpoints of a run, the newest first.",
        usage=("RUN [--json]",),
        words=(_RUN, _JSON),
        examples=("hetseq checkpoints list runs/mnist",),
    ),
    "show": Command(
        "checkpoints show",
        "Show a checkpoint: its step, its files, its largest tensors.",
        usage=("RUN [--step STEP] [--tensors] [--json]",),
        words=(_RUN, _STEP, CommandOption("--tensors", "all tensors with type and shape, not only the largest"), _JSON),
        examples=("hetseq checkpoints show runs/mnist --step best",),
    ),
    "verify": Command(
        "checkpoints verify",
        "Verify that checkpoints are as they were written; ends with 1 if one is damaged.",
        usage=("RUN [--step STEP] [--shallow]",),
        words=(
            _RUN,
            CommandOption(
                "--step", "a step number, latest or best; default: all checkpoints", "STEP", read=_which
            ),
            CommandOption("--shallow", "check the small files and all sizes, without reading the tensors"),
        ),
        examples=("hetseq checkpoints verify runs/mnist", "hetseq checkpoints verify runs/mnist --step latest"),
    ),
    "prune": Command(
        "checkpoints prune",
        "Remove old checkpoints of a run that is not in use.",
        usage=("RUN --keep N [--drop-best] [--dry-run]",),
        words=(
            Argument("RUN", "the --save-dir of a run; refused while a run is using it"),
            CommandOption(
                "--keep", "keep the newest N, the newest that verifies, and the best", "N", read=_keep, is_needed=True
            ),
            CommandOption("--drop-best", "treat the best like any other"),
            CommandOption("--keep-best", "keep the best; this is the default"),
            CommandOption("--dry-run", "only print what would be removed"),
        ),
        examples=("hetseq checkpoints prune runs/mnist --keep 3 --dry-run",),
    ),
    "export": Command(
        "checkpoints export",
        "Export a checkpoint in a format for other programs.",
        usage=("RUN --format FORM --to PATH [--step STEP]", "RUN --format hf --merge --to PATH [--step STEP]"),
        words=(
            _RUN,
            CommandOption(
                "--format",
                "safetensors (a folder), torch (a .pt file), dcp (a folder of torch.distributed.checkpoint) or hf (a"
                " folder that transformers opens, with a model card, if the run's task writes one, as bert does)",
                "FORM",
                among=FORMS,
                is_needed=True,
            ),
            CommandOption(
                "--to", "path to write (--output is the same); nothing is overwritten", "PATH", read=Path,
                also=("--output",), is_needed=True,
            ),
            _STEP,
            CommandOption("--merge", "hf: merge adapters (LoRA) into the base model, if the run's task trains them"),
        ),
        examples=("hetseq checkpoints export runs/mnist --format torch --to mnist.pt",),
    ),
}  # fmt: skip

COMMAND = Command(
    "checkpoints",
    "The checkpoints of a run: list, show, verify, prune or export them.",
    usage=("ACTION RUN [options]",),
    words=tuple(Argument(name, f"{action.about[:1].lower()}{action.about[1:-1]}") for name, action in ACTIONS.items()),
    examples=tuple(action.examples[0] for action in ACTIONS.values()),
    notes=("`hetseq checkpoints ACTION --help` lists the options of each. Only prune changes anything in a run.",),
)

# the actions


def answer(arguments: CheckpointArguments) -> Iterator[str]:
    """The lines of one action, as they are found.

    Raises ConfigError, RunDirectoryError or CheckpointRefused if there is nothing to act on, and CheckpointError at
    the end if something is damaged or could not be removed.
    """
    existing_run(arguments.run)
    try:
        for line in _ACTIONS[arguments.action](arguments):
            # text from other people's files must not control the terminal
            yield "".join(letter if letter.isprintable() else "?" for letter in line)
    except OSError as error:
        raise CheckpointError(f"{error.filename or arguments.run}: {error.strerror or error}") from error


def _list(arguments: CheckpointArguments) -> Iterator[str]:
    from hetseq.commands.checkpoints.listing import list_json, list_text, read_contents

    contents = read_contents(arguments.run)
    yield from [list_json(contents)] if arguments.wants_json else list_text(contents)


def _show(arguments: CheckpointArguments) -> Iterator[str]:
    from hetseq.commands.checkpoints.listing import show_json, show_text

    inspected, passed_over = _inspected(arguments.run, arguments.which or "latest")
    if arguments.wants_json:
        yield show_json(inspected, [one.sentence for one in passed_over])
    else:
        yield from _instead(passed_over, inspected)
        yield from show_text(inspected, every_tensor=arguments.wants_tensors)


def _verify(arguments: CheckpointArguments) -> Iterator[str]:
    from hetseq.checkpoint import TooNewError, is_committed, verify
    from hetseq.commands.checkpoints.listing import counted, size_text

    found = _wanted(arguments)
    damaged = []
    for commit in found.commits:
        with bar(commit.path.name, commit.size_bytes, in_bytes=True) as advance:
            problems = verify(commit, deep=not arguments.is_shallow, advance=advance)
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
            f"{len(damaged)} of {counted(count, 'checkpoint')} of {arguments.run} cannot be trusted"
            f" ({', '.join(damaged)}): a run skips them; restore them from a copy, or remove them"
        )


def _prune(arguments: CheckpointArguments) -> Iterator[str]:
    if arguments.is_dry_run:
        yield from _pruned(arguments)
        return
    try:
        with RunDirectory(arguments.run).lock():
            yield from _pruned(arguments)
    except RunDirectoryError as error:
        raise RunDirectoryError(f"nothing was removed: {error}") from error


def _pruned(arguments: CheckpointArguments) -> Iterator[str]:
    from hetseq.checkpoint import remove_all
    from hetseq.commands.checkpoints.listing import counted, size_text

    commits = _committed(arguments.run).commits
    whole = None
    if len(commits) > arguments.keep:  # only then, because reading every byte of a checkpoint takes long
        whole = next((at for at, commit in enumerate(commits) if _is_whole(commit)), None)
        if whole is None:
            raise CheckpointError(
                f"nothing was removed: no checkpoint of {arguments.run} verifies, and you may still need an older one;"
                " `hetseq checkpoints verify` says what is wrong"
            )
    stays = kept([commit.kinds for commit in commits], arguments.keep, whole=whole, keeps_best=not arguments.drops_best)
    freed, remaining, stuck = [], [], []
    for index, commit in reversed(list(enumerate(commits))):
        described = f"step {commit.identity.step} ({', '.join(commit.kinds)}), {size_text(commit.size_bytes)}"
        if index in stays:
            remaining.append(commit)
            yield f"kept: {described}: {stays[index]}"
        elif arguments.is_dry_run or remove_all([commit.path]) or not commit.path.exists():
            freed.append(commit.size_bytes)
            yield f"{'would be removed' if arguments.is_dry_run else 'removed'}: {described}"
        else:
            stuck.append(commit.path.name)
    done = "would be removed" if arguments.is_dry_run else "removed"
    yield (
        f"{counted(len(freed), 'checkpoint')}, {size_text(sum(freed))} {done}; {len(remaining)} kept,"
        f" {size_text(sum(commit.size_bytes for commit in remaining))}"
    )
    if stuck:
        raise CheckpointError(f"could not be removed: {', '.join(stuck)}")


def _is_whole(commit: Commit) -> bool:
    from hetseq.checkpoint import verify

    with bar(f"verifying {commit.path.name}", commit.size_bytes, in_bytes=True) as advance:
        return not verify(commit, deep=True, advance=advance)


def kept(
    kinds: Sequence[Sequence[str]], keep: int, *, whole: int | None = None, keeps_best: bool = True
) -> dict[int, str]:
    """The checkpoints to keep, by position in `kinds` (newest first), each with the reason.

    Keeps the newest `keep`, the one at `whole` (the newest of which every byte verifies), and the newest of kind best.
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


def _export(arguments: CheckpointArguments) -> Iterator[str]:
    target = arguments.target
    if target.exists() or target.is_symlink():
        raise ConfigError(f"--to {target} exists: nothing is overwritten; name a path that does not exist yet")
    if not target.parent.is_dir():
        raise ConfigError(f"--to {target}: there is no folder {target.parent}: make it first")
    inspected, passed_over = _inspected(arguments.run, arguments.which or "latest")
    yield from _instead(passed_over, inspected)
    with bar(f"reading {inspected.commit.path.name}", inspected.commit.size_bytes, in_bytes=True) as advance:
        if arguments.form == "hf":
            from hetseq.commands.checkpoints.export_model import export_model

            path = export_model(arguments.run, inspected.commit, target, merge=arguments.merges, advance=advance)
        else:
            from hetseq.checkpoint.export import export

            path = export(inspected.commit, target, form=arguments.form, advance=advance)
    yield f"step {inspected.commit.identity.step} of {arguments.run} is in {path} ({arguments.form})"


def _instead(passed_over: Sequence[Skipped], inspected: Inspected) -> list[str]:
    from hetseq.checkpoint import used_instead

    return [used_instead(passed_over, f"step {inspected.commit.identity.step}")] if passed_over else []


_ACTIONS: dict[str, Callable[[CheckpointArguments], Iterator[str]]] = {
    "list": _list,
    "show": _show,
    "verify": _verify,
    "prune": _prune,
    "export": _export,
}


# choice of the checkpoints


def _committed(run: Path) -> Scan:
    from hetseq.checkpoint import scan

    found = scan(RunDirectory(run).checkpoints)
    if not found.commits and not found.refused:
        raise CheckpointRefused(f"{run} has no checkpoints: train it first, or name another run")
    return found


def _wanted(arguments: CheckpointArguments) -> Scan:
    """The checkpoints that `verify` reads: all of them, or one step."""
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


def _inspected(run: Path, which: str) -> tuple[Inspected, list[Skipped]]:
    """The chosen checkpoint, with its small files checked, and the newer ones that were skipped."""
    from hetseq.checkpoint import Skipped, choose, inspect

    _committed(run)
    choice = choose(which, run)
    passed_over = list(choice.skipped)
    for commit in choice.commits:
        try:
            return inspect(commit), passed_over
        except (CheckpointError, OSError) as error:
            passed_over.append(Skipped.of(commit.path, error))
    raise CheckpointRefused("; ".join(one.sentence for one in passed_over))
