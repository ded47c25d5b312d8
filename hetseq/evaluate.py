"""`hetseq evaluate RUN` and `hetseq predict RUN`: a checkpoint of a run on splits, by all ranks of this node.

The run's own `config.yaml` says what task, data and model it is; options on the command line win. Nothing in the run
directory is changed, so a run may be evaluated while it goes on.

Responsible for the two command lines, for a folder in which the ranks keep their logs as long as the command lasts, and
for the file of predictions, which is complete under its name or not there. The one idea: such a command is a run that
trains nothing. `launch` starts and watches its ranks as those of any run, and they do their errand (`sweep`).
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hetseq import options
from hetseq.checkpoint.files import sync_directory
from hetseq.cluster.directories import has_commits
from hetseq.config import Config, DistributedConfig
from hetseq.ending import Ending, of_errand
from hetseq.errand import Errand
from hetseq.errors import EXIT_DONE, CheckpointError, ConfigError
from hetseq.launch import launch, run_here
from hetseq.run_directory import RunDirectory

_EXAMPLES = {
    "evaluate": "hetseq evaluate runs/mnist --subset test",
    "predict": "hetseq predict runs/mnist --subset test --output digits.txt",
}
#: what takes a value, and what takes none; everything else is an option of `hetseq train`
_WITH_VALUE = {"evaluate": ("--subset",), "predict": ("--subset", "--output")}
_WITHOUT = {"evaluate": ("--json",), "predict": ("--overwrite",)}
#: what the run says of its own cluster and start, and nothing of this command's
_OF_THE_RUN = frozenset(field.name for field in dataclasses.fields(DistributedConfig)) - {"cpu"} | {
    "restore_file", "disable_validation", "local_copy", "compile",
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What was asked for: of a run, with these options, numbers or a file of predictions."""

    run: Path
    config: Config
    output: Path | None = None
    is_overwriting: bool = False
    wants_json: bool = False


def parse(command: str, argv: Sequence[str]) -> Request:
    """The words after `hetseq evaluate` or `hetseq predict`. Raises ConfigError, and CheckpointError without any."""
    if not argv or argv[0].startswith("-"):
        raise ConfigError(
            f"expected `hetseq {command} RUN [options]`, with RUN the --save-dir of a run, as in: {_EXAMPLES[command]}"
        )
    run = Path(os.path.abspath(argv[0]))
    config_file = run / "config.yaml"
    if not config_file.is_file():
        raise ConfigError(f"{argv[0]} is no run directory: it has no config.yaml; as in: {_EXAMPLES[command]}")
    own, rest = _split(command, argv[1:])
    if "--subset" in own:
        rest = ["--valid-subset", own["--subset"], *rest]
    names_devices = any(word.partition("=")[0] == "--devices" for word in rest)
    leave_out = _OF_THE_RUN | {"cpu"} if names_devices else _OF_THE_RUN
    config = options.parse(["--config", str(config_file), *rest, "--save-dir", str(run)], leave_out=leave_out)
    if config.distributed.meeting_url is not None:
        raise ConfigError(
            f"hetseq {command} uses the ranks of this node alone: leave {config.distributed.meeting_url} out"
        )
    if config.validation.disable_validation:
        raise ConfigError(f"hetseq {command} --disable-validation: leave it out, there would be nothing to do")
    if config.checkpoint.restore_file == type(config.checkpoint).restore_file and not has_commits(RunDirectory(run)):
        raise CheckpointError(f"{run} holds no checkpoint: train it first")
    output = _output(own, config) if command == "predict" else None
    return Request(run, config, output, "--overwrite" in own, "--json" in own)


def _split(command: str, argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The command's own words with their values, and the options of `hetseq train`."""
    own, rest, words = {}, [], list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag in _WITH_VALUE[command]:
            if not equals and (not words or words[0].startswith("--")):
                raise ConfigError(f"hetseq {command}: {flag} stands without a value, as in: {_EXAMPLES[command]}")
            own[flag] = value if equals else words.pop(0)
        elif word in _WITHOUT[command]:
            own[word] = ""
        else:
            rest.append(word)
    return own, rest


def _output(own: dict[str, str], config: Config) -> Path:
    """The file to write, if it can be. Raises ConfigError."""
    if not own.get("--output"):
        raise ConfigError(f"hetseq predict needs --output FILE, as in: {_EXAMPLES['predict']}")
    if len(config.data.valid_subsets) != 1:
        raise ConfigError(
            f"hetseq predict writes one split, and found {config.data.valid_subset!r}: name one with --subset"
        )
    output = Path(os.path.abspath(own["--output"]))
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}; make it first")
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder: name a file in it")
    if os.path.lexists(output) and "--overwrite" not in own:
        raise _exists(output)
    if not os.access(output.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {output}: you may not write into {output.parent}; choose another --output")
    return output


def _exists(output: Path) -> ConfigError:
    return ConfigError(f"--output {output} exists: choose another --output, or add --overwrite")


def run(request: Request) -> Ending:
    """Do it, on as many ranks as the configuration asks for; the message is what to print. Raises HetSeqError."""
    with tempfile.TemporaryDirectory(prefix="hetseq-") as folder, _written_beside(request.output) as beside:
        config = dataclasses.replace(
            request.config, checkpoint=dataclasses.replace(request.config.checkpoint, save_dir=f"{folder}/ranks")
        )
        errand = Errand(str(request.run), None if beside is None else str(beside), request.wants_json)
        start = run_here if config.distributed.distributed_no_spawn else launch
        ending = of_errand(start(config, errand))
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
