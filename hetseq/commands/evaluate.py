"""`hetseq evaluate RUN` and `hetseq predict RUN`: apply a checkpoint of a run to splits, on all ranks of this node.

The run's own `config.yaml` defines task, data and model; options on the command line override it. Nothing in the run
directory is changed, so a run may be evaluated while it trains.

Parses the two command lines, makes a temporary folder for the logs of the ranks, and publishes the file of predictions
complete or not at all. The one idea: such a command is a run that trains nothing. `launch` starts and watches its ranks
like the ranks of any run, and `run.inference` is their job.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hetseq import config as options
from hetseq.cluster.membership.assignment import InferenceJob
from hetseq.cluster.membership.exit_status import Ending, of_errand
from hetseq.cluster.membership.run_directory_discovery import has_commits
from hetseq.config.command_line import Argument, Command, CommandOption, Given
from hetseq.config.sections import Config, DistributedConfig
from hetseq.errors import EXIT_DONE, CheckpointError, ConfigError
from hetseq.launch.launch import launch, run_here, stopped_early
from hetseq.launch.worker_processes import ending_server
from hetseq.system.files import sync_directory
from hetseq.system.processes import interrupting_on_signals
from hetseq.which_run import existing_run

_RUN = Argument("RUN", "the --save-dir of a run, in progress or not; nothing in it is changed")
_RESUME = CommandOption(
    "--resume", "latest (the default), best, a step number, or the path of a checkpoint", "WHICH",
    is_passed_on=True,
)  # fmt: skip
_NOTES = (
    "Runs one rank per visible GPU, else one on the CPU; change that with --ranks N or --devices D,D, on this"
    " node. The results are the same for any number of ranks. Options of `hetseq train`, such as --data,"
    " override those of the run.",
)

COMMANDS = {
    "evaluate": Command(
        "evaluate",
        "Evaluate a checkpoint of a run on a split.",
        usage=("RUN [options] [options of hetseq train]",),
        words=(
            _RUN,
            CommandOption(
                "--subset",
                "splits, separated by commas; default: the validation splits of the run (also --valid-subset)",
                "NAMES",
            ),
            _RESUME,
            CommandOption("--json", "print a line of JSON per split, in full precision, named as in metrics.jsonl"),
        ),
        examples=("hetseq evaluate runs/mnist --subset test", "hetseq evaluate runs/mnist --resume best --json"),
        notes=_NOTES,
        train="among",
    ),
    "predict": Command(
        "predict",
        "Write the predictions of a checkpoint for a split, one line per sample.",
        usage=("RUN --subset NAME --output FILE [options]",),
        words=(
            _RUN,
            CommandOption("--subset", "the split (also --valid-subset)", "NAME"),
            CommandOption(
                "--output", "file to write: one line per sample, in the order of the split; it appears when complete",
                "FILE", is_needed=True,
            ),
            CommandOption("--overwrite", "replace FILE if it exists"),
            _RESUME,
        ),
        examples=("hetseq predict runs/mnist --subset test --output digits.txt",),
        notes=_NOTES,
        train="among",
    ),
}  # fmt: skip

#: options about the run's own cluster and start, which do not apply to this command
_OF_THE_RUN = frozenset(field.name for field in dataclasses.fields(DistributedConfig)) - {"cpu"} | {
    "restore_file", "disable_validation", "local_copy", "compile", "tracker",
}  # fmt: skip


@dataclass(frozen=True)
class EvaluationRequest:
    """A request for the numbers of a run with these options, or for a file of predictions."""

    run: Path
    config: Config
    output: Path | None = None
    is_overwriting: bool = False
    wants_json: bool = False


def run_evaluate(words: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq evaluate RUN`: print the numbers of each split; returns the exit code. Raises HetSeqError."""
    return _do("evaluate", words, say)


def run_predict(words: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq predict RUN`: write a line per sample of a split; returns the exit code. Raises HetSeqError."""
    return _do("predict", words, say)


def _do(command: str, words: Sequence[str], say: Callable[[str], None]) -> int:
    request = parse(command, words)
    if not request.config.distributed.distributed_no_spawn:
        logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with ending_server():
        ending = run(request)
    if ending.message and ending.code == EXIT_DONE:
        say(ending.message)
    elif ending.message:
        sys.stderr.write(f"hetseq {command}: {ending.message}\n")
    return ending.code


def parse(command: str, argv: Sequence[str]) -> EvaluationRequest:
    """Parse the words after `hetseq evaluate` or `hetseq predict`.

    Raises ConfigError, CheckpointError if there is no checkpoint, HelpRequested.
    """
    line = COMMANDS[command]
    given = line.read(argv)
    directory = existing_run(Path(os.path.abspath(given["RUN"])))
    if not directory.config_file.is_file():
        raise ConfigError(f"{directory.path} has no config.yaml, which defines what was trained: name another run")
    named = [] if given["--subset"] is None else ["--valid-subset", given["--subset"]]
    rest = [*named, *given.rest]
    names_devices = any(word.partition("=")[0] == "--devices" for word in rest)
    leave_out = _OF_THE_RUN | {"cpu"} if names_devices else _OF_THE_RUN
    words = ["--config", str(directory.config_file), *rest, "--save-dir", str(directory.path)]
    config = options.parse(words, leave_out=leave_out, also=line.flags)
    if config.distributed.meeting_url is not None:
        raise ConfigError(f"this command uses only the ranks of this node: leave out {config.distributed.meeting_url}")
    if config.validation.disable_validation:
        raise ConfigError("--disable-validation: leave it out, otherwise there is nothing to do")
    if config.checkpoint.which_checkpoint == "latest" and not has_commits(directory):
        raise CheckpointError(f"{directory.path} has no checkpoint: train it first")
    if command == "evaluate":
        return EvaluationRequest(directory.path, config, wants_json=given["--json"])
    return EvaluationRequest(directory.path, config, _output(given, config), given["--overwrite"])


def _output(given: Given, config: Config) -> Path:
    """The file to write. Raises ConfigError if it cannot be written."""
    if len(config.data.valid_subsets) != 1:
        raise ConfigError(f"expected one split, found {config.data.valid_subset!r}: name one with --subset")
    output = Path(os.path.abspath(given["--output"]))
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}; make it first")
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder: name a file in it")
    if os.path.lexists(output) and not given["--overwrite"]:
        raise _exists(output)
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {output}: you may not write into {output.parent}; choose another --output")
    return output


def _exists(output: Path) -> ConfigError:
    return ConfigError(f"--output {output} exists: choose another --output, or add --overwrite")


def run(request: EvaluationRequest) -> Ending:
    """Run the request on the ranks of the configuration; the caller prints the message. Raises HetSeqError."""
    with tempfile.TemporaryDirectory(prefix="hetseq-") as folder, _written_beside(request.output) as beside:
        config = dataclasses.replace(
            request.config, checkpoint=dataclasses.replace(request.config.checkpoint, save_dir=f"{folder}/ranks")
        )
        errand = InferenceJob(str(request.run), None if beside is None else str(beside), request.wants_json)
        start = run_here if config.distributed.distributed_no_spawn else launch
        with interrupting_on_signals():
            try:
                ending = of_errand(start(config, errand))
            except KeyboardInterrupt as signal:  # before the launcher listens, or without a launcher
                ending = of_errand(stopped_early(str(signal), None))
        if ending.code == EXIT_DONE and beside is not None and request.output is not None:
            _publish(beside, request.output, is_overwriting=request.is_overwriting)
    return ending


@contextmanager
def _written_beside(output: Path | None) -> Iterator[Path | None]:
    """A temporary name beside a file; nothing is left there when the block ends or raises."""
    if output is None:
        yield None
        return
    beside = output.with_name(f".{output.name[:200]}.{secrets.token_hex(8)}")
    try:
        yield beside
    finally:
        with suppress(FileNotFoundError):
            os.unlink(beside)


def _publish(beside: Path, output: Path, *, is_overwriting: bool) -> None:
    """Rename a file that is complete and on the disk. Raises ConfigError if the name has been taken meanwhile."""
    if is_overwriting:
        os.replace(beside, output)
    else:
        try:
            os.link(beside, output)
        except FileExistsError:
            raise _exists(output) from None
        except OSError:  # some file systems have no links
            if os.path.lexists(output):
                raise _exists(output) from None
            os.replace(beside, output)
    with suppress(OSError):  # some file systems refuse it; the content is safe already
        sync_directory(output.parent)
