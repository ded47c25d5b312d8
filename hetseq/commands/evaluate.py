"""`hetseq evaluate RUN` and `hetseq predict RUN`: a checkpoint of a run on splits, by all ranks of this node.

The run's own `config.yaml` says what task, data and model it is; options on the command line win. Nothing in the run
directory is changed, so a run may be evaluated while it goes on.

Responsible for the two command lines, for a folder in which the ranks keep their logs as long as the command lasts, and
for the file of predictions, which is complete under its name or not there. The one idea: such a command is a run that
trains nothing. `launch` starts and watches its ranks as those of any run, and they do their errand (`run.inference`).
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

_RUN = Argument("RUN", "the --save-dir of a run, under way or not; nothing in it is changed")
_RESTORE_FILE = CommandOption(
    "--restore-file", "latest (the default), best, the number of a step, or the path of a checkpoint", "WHICH",
    is_passed_on=True,
)  # fmt: skip
_NOTES = (
    "One rank per visible GPU, else one on the CPU; --distributed-world-size N or --devices D,D for others, on this"
    " node. The results are the same on any number. Options of `hetseq train`, such as --data, win over those of the"
    " run.",
)

COMMANDS = {
    "evaluate": Command(
        "evaluate",
        "What a checkpoint of a run is worth on a split.",
        usage=("RUN [options] [options of hetseq train]",),
        words=(
            _RUN,
            CommandOption(
                "--subset",
                "splits, separated by commas; default: those that the run validates (also --valid-subset)",
                "NAMES",
            ),
            _RESTORE_FILE,
            CommandOption("--json", "a line of JSON per split, in full precision, named as in metrics.jsonl"),
        ),
        examples=("hetseq evaluate runs/mnist --subset test", "hetseq evaluate runs/mnist --restore-file best --json"),
        notes=_NOTES,
        train="among",
    ),
    "predict": Command(
        "predict",
        "What a checkpoint of a run says of each sample of a split, as a file of lines.",
        usage=("RUN --subset NAME --output FILE [options]",),
        words=(
            _RUN,
            CommandOption("--subset", "the split (also --valid-subset)", "NAME"),
            CommandOption(
                "--output", "where to: one line per sample, in the order of the split; there once it is complete",
                "FILE", is_needed=True,
            ),
            CommandOption("--overwrite", "replace FILE if it exists"),
            _RESTORE_FILE,
        ),
        examples=("hetseq predict runs/mnist --subset test --output digits.txt",),
        notes=_NOTES,
        train="among",
    ),
}  # fmt: skip

#: what the run says of its own cluster and start, and nothing of this command's
_OF_THE_RUN = frozenset(field.name for field in dataclasses.fields(DistributedConfig)) - {"cpu"} | {
    "restore_file", "disable_validation", "local_copy", "compile",
}  # fmt: skip


@dataclass(frozen=True)
class EvaluationRequest:
    """What was asked for: of a run, with these options, numbers or a file of predictions."""

    run: Path
    config: Config
    output: Path | None = None
    is_overwriting: bool = False
    wants_json: bool = False


def run_evaluate(words: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq evaluate RUN`: say the numbers of each split; gives the exit code. Raises HetSeqError."""
    return _do("evaluate", words, say)


def run_predict(words: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq predict RUN`: write a line per sample of a split; gives the exit code. Raises HetSeqError."""
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
    """The words after `hetseq evaluate` or `hetseq predict`.

    Raises ConfigError, CheckpointError where there is no checkpoint, HelpRequested.
    """
    line = COMMANDS[command]
    given = line.read(argv)
    directory = existing_run(Path(os.path.abspath(given["RUN"])))
    if not directory.config_file.is_file():
        raise ConfigError(f"{directory.path} has no config.yaml, which says what was trained: name another run")
    named = [] if given["--subset"] is None else ["--valid-subset", given["--subset"]]
    rest = [*named, *given.rest]
    names_devices = any(word.partition("=")[0] == "--devices" for word in rest)
    leave_out = _OF_THE_RUN | {"cpu"} if names_devices else _OF_THE_RUN
    words = ["--config", str(directory.config_file), *rest, "--save-dir", str(directory.path)]
    config = options.parse(words, leave_out=leave_out, also=line.flags)
    if config.distributed.meeting_url is not None:
        raise ConfigError(f"the ranks of this node alone are used: leave {config.distributed.meeting_url} out")
    if config.validation.disable_validation:
        raise ConfigError("--disable-validation: leave it out, there would be nothing to do")
    if config.checkpoint.restore_file == type(config.checkpoint).restore_file and not has_commits(directory):
        raise CheckpointError(f"{directory.path} holds no checkpoint: train it first")
    if command == "evaluate":
        return EvaluationRequest(directory.path, config, wants_json=given["--json"])
    return EvaluationRequest(directory.path, config, _output(given, config), given["--overwrite"])


def _output(given: Given, config: Config) -> Path:
    """The file to write, if it can be. Raises ConfigError."""
    if len(config.data.valid_subsets) != 1:
        raise ConfigError(f"one split is written, and found {config.data.valid_subset!r}: name one with --subset")
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
    """Do it, on as many ranks as the configuration asks for; the message is what to print. Raises HetSeqError."""
    with tempfile.TemporaryDirectory(prefix="hetseq-") as folder, _written_beside(request.output) as beside:
        config = dataclasses.replace(
            request.config, checkpoint=dataclasses.replace(request.config.checkpoint, save_dir=f"{folder}/ranks")
        )
        errand = InferenceJob(str(request.run), None if beside is None else str(beside), request.wants_json)
        start = run_here if config.distributed.distributed_no_spawn else launch
        with interrupting_on_signals():
            try:
                ending = of_errand(start(config, errand))
            except KeyboardInterrupt as signal:  # the launcher does not listen yet, or there is none
                ending = of_errand(stopped_early(str(signal), None))
        if ending.code == EXIT_DONE and beside is not None and request.output is not None:
            _publish(beside, request.output, is_overwriting=request.is_overwriting)
    return ending


@contextmanager
def _written_beside(output: Path | None) -> Iterator[Path | None]:
    """A name beside a file for what will become it; nothing stays there, however the block is left."""
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
    """Give a file that is complete and on the disk its name. Raises ConfigError where there is one by now."""
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
    with suppress(OSError):  # some file systems refuse to; the content is safe already
        sync_directory(output.parent)
