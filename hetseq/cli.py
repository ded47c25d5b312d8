"""The command line: `hetseq train` and the other commands, and nothing that imports torch before it must.

`python train.py OPTIONS`, `hetseq train OPTIONS` and `python -m hetseq train OPTIONS` are the same. Whatever HetSeq
refuses ends here as one message on standard error and the exit code that its exception stands for.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from hetseq import catalogue, options
from hetseq.errors import EXIT_USAGE, ConfigError, HetSeqError
from hetseq.registry import nearest

_USAGE = """usage: hetseq COMMAND [options]

  train        train a task; `hetseq train --help` lists every option
  evaluate     evaluate a checkpoint of a run on a split
  predict      write what a checkpoint of a run says of each sample of a split
  plan         how fast a run would be with other shares, without a rank, with another one
  simulate     how fast a cluster would be that is described in a YAML file
  checkpoints  list, show, verify, prune or export the checkpoints of a run
  report       write report.html of a run, or compare two runs
  doctor       is this node fit for a training, and what should be done about it
  top          what a run does now: its step, its ranks, who is slow, silent or gone
  drop         take a node out of a run that goes on without it
  script       a batch script for Slurm, Grid Engine, PBS, LSF or HTCondor; nothing is submitted
  ssh          a run on several hosts by one command, over ssh
  selftest     see whether a task of your own is exact on any shares, before a run
  demo         see unequal workers give the result of one machine, in a minute or two: demo mnist, demo bert
"""

_DEMO_USAGE = """usage: hetseq demo [mnist | bert]

  mnist      digits, two unequal workers, with equal and with fitting shares; a minute (the default)
  bert       a corpus of the text that comes with Python, and a small BERT on two unequal workers; two minutes

Everything goes to a new folder in ./runs.
"""


_EVALUATE_USAGE = """usage: hetseq evaluate RUN [--subset NAMES] [--restore-file WHICH] [--json] [options]

  RUN                   the --save-dir of a run, under way or not; nothing in it is changed
  --subset NAMES        splits, separated by commas; default: those that the run validates (also --valid-subset)
  --restore-file WHICH  latest (the default), best, the number of a step, or the path of a checkpoint
  --json                a line of JSON per split, in full precision, named as in metrics.jsonl
"""

_PREDICT_USAGE = """usage: hetseq predict RUN --subset NAME --output FILE [--overwrite] [--restore-file WHICH] [options]

  RUN                   the --save-dir of a run, under way or not; nothing in it is changed
  --subset NAME         the split (also --valid-subset)
  --output FILE         where to: one line per sample, in the order of the split; there once it is complete
  --overwrite           replace FILE if it exists
  --restore-file WHICH  latest (the default), best, the number of a step, or the path of a checkpoint
"""

#: under both of these
_RANKS_USAGE = """
One rank per visible GPU, else one on the CPU; --distributed-world-size N or --devices D,D for others, on this node. The
results are the same on any number. Options of `hetseq train`, such as --data, win over those of the run.
"""

_PLAN_USAGE = """usage: hetseq plan RUN [--without RANK]... [--add NAME:SPEED]... [--json]

  RUN                the --save-dir of a run, finished or not; nothing in it is changed
  --without RANK     predict the step without this rank; give it once per rank
  --add NAME:SPEED   predict the step with one rank more: gpu3:2.0 is twice as fast as the fastest rank of the run,
                     gpu3:120/s makes 120 samples per second alone; give it once per rank
  --json             one line for scripts
"""

_SIMULATE_USAGE = """usage: hetseq simulate FILE [--json]

  FILE       YAML: groups of ranks, their speeds and links, a global batch
  --json     one line for scripts

The keys of the file are in docs/planning.md.
"""


_CHECKPOINTS_USAGE = """usage: hetseq checkpoints list   RUN [--json]
       hetseq checkpoints show   RUN [--step STEP] [--tensors] [--json]
       hetseq checkpoints verify RUN [--step STEP] [--shallow]
       hetseq checkpoints prune  RUN --keep N [--drop-best] [--dry-run]
       hetseq checkpoints export RUN --format FORM --to PATH [--step STEP]

  RUN            the --save-dir of a run; only prune changes anything in it, and not while a run is using it
  --step STEP    the number of a step, latest or best; otherwise verify reads all, and the others take the latest
  --json         one line for scripts
  --tensors      all tensors with type and shape, not only the largest
  --shallow      check the small files and all sizes, do not read the tensors
  --keep N       the newest N stay, the newest that verifies, and the best
  --drop-best    the best may go like any other (--keep-best, the default, says the opposite)
  --dry-run      say what would go, remove nothing
  --format FORM  safetensors (a folder), torch (a .pt file), dcp (a folder of torch.distributed.checkpoint) or
                 hf (a folder that transformers opens, where the run's task writes one, as bert does)
  --to PATH      where to (--output says the same); nothing is overwritten

verify ends with 1 where anything is damaged.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0 if words else EXIT_USAGE
    command = _COMMANDS.get(words[0])
    if command is None:
        hint = nearest(words[0], _COMMANDS)
        options_of_train = " (options of a training run come after `hetseq train`)" if words[0].startswith("-") else ""
        print(
            f"hetseq: unknown command {words[0]!r}{options_of_train}" + (f"; did you mean {hint!r}?" if hint else ""),
            file=sys.stderr,
        )
        return EXIT_USAGE
    try:
        return command(words[1:])
    except options.HelpRequested as request:
        print(request.text, end="" if request.text.endswith("\n") else "\n")
        return 0
    except HetSeqError as error:
        print(f"hetseq: {catalogue.text_of(error)}", file=sys.stderr)
        return error.exit_code


def train(argv: Sequence[str]) -> int:
    """`hetseq train`: the launcher of this node."""
    config = options.parse(argv)
    for note in options.retired_notes(config):
        print(note, file=sys.stderr)
    if config.distributed.distributed_no_spawn:
        from hetseq.launch import run_here

        ending = run_here(config)
    else:
        from hetseq.launch import launch
        from hetseq.workers import ending_server

        logging.basicConfig(format="%(message)s", level=logging.WARNING)
        with ending_server():
            ending = launch(config)
    if ending.message:
        with suppress(OSError):  # whoever read it has gone; the exit code is there all the same
            print(f"hetseq: {ending.message}", file=sys.stderr)
    return ending.code


def evaluate(argv: Sequence[str]) -> int:
    """`hetseq evaluate RUN --subset NAME`: a checkpoint of a run on a split."""
    if not {"-h", "--help"}.isdisjoint(argv):
        raise options.HelpRequested(_EVALUATE_USAGE + _RANKS_USAGE)
    return _do_errand("evaluate", argv)


def predict(argv: Sequence[str]) -> int:
    """`hetseq predict RUN --subset NAME --output FILE`: a line of text per sample of a split."""
    if not {"-h", "--help"}.isdisjoint(argv):
        raise options.HelpRequested(_PREDICT_USAGE + _RANKS_USAGE)
    return _do_errand("predict", argv)


def _do_errand(command: str, argv: Sequence[str]) -> int:
    from hetseq.evaluate import parse, run
    from hetseq.workers import ending_server

    request = parse(command, argv)
    if not request.config.distributed.distributed_no_spawn:
        logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with ending_server():
        ending = run(request)
    if ending.message:
        print(
            ending.message if ending.code == 0 else f"hetseq: {ending.message}",
            file=None if ending.code == 0 else sys.stderr,
        )
    return ending.code


def demo(argv: Sequence[str]) -> int:
    """`hetseq demo [mnist|bert]`: one result for equal and unequal workers; words from text, or digits."""
    if argv and argv[0] in ("-h", "--help"):
        raise options.HelpRequested(_DEMO_USAGE)
    if len(argv) > 1:
        raise ConfigError(f"hetseq demo takes one name, mnist or bert, found {' '.join(argv)}")
    from hetseq.demo import run_demo

    return run_demo(*argv or ["mnist"])


def plan(argv: Sequence[str]) -> int:
    """`hetseq plan RUN [--without RANK] [--add NAME:SPEED]`: a run's speed on another cluster."""
    if not {"-h", "--help"}.isdisjoint(argv):
        raise options.HelpRequested(_PLAN_USAGE)
    from hetseq.whatif import make_plan, parse_plan, plan_json, plan_text

    arguments = parse_plan(argv)
    print((plan_json if arguments.wants_json else plan_text)(make_plan(arguments)))
    return 0


def simulate(argv: Sequence[str]) -> int:
    """`hetseq simulate FILE`: the speed of a cluster that is described in YAML."""
    if not {"-h", "--help"}.isdisjoint(argv):
        raise options.HelpRequested(_SIMULATE_USAGE)
    from hetseq.whatif import compare, parse_simulate, simulation_json, simulation_text

    arguments = parse_simulate(argv)
    print((simulation_json if arguments.wants_json else simulation_text)(compare(arguments)))
    return 0


def checkpoints(argv: Sequence[str]) -> int:
    """`hetseq checkpoints ACTION RUN`: what checkpoints a run has, whether they are whole, and their end."""
    if not {"-h", "--help"}.isdisjoint(argv):
        raise options.HelpRequested(_CHECKPOINTS_USAGE)
    from hetseq.checkpoints import answer, parse

    for line in answer(parse(argv)):
        _say(line)  # reading every byte takes its time, and each line is news
    return 0


def _say(line: str) -> None:
    """One line of a command's answer, at once; a reader that has gone, as with `| head`, ends nothing."""
    try:
        print(line, flush=True)
    except BrokenPipeError:  # what was begun is done all the same
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _in_module(module: str) -> Callable[[Sequence[str]], int]:
    """A command with a module of its own: `USAGE`, and `run(words, say)`, which says lines and gives the exit code."""

    def command(argv: Sequence[str]) -> int:
        found = importlib.import_module(module)
        if not {"-h", "--help"}.isdisjoint(argv):
            raise options.HelpRequested(found.USAGE)
        code: int = found.run(argv, _say)
        return code

    return command


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "evaluate": evaluate,
    "predict": predict,
    "plan": plan,
    "simulate": simulate,
    "checkpoints": checkpoints,
    "report": _in_module("hetseq.report.writing"),
    "doctor": _in_module("hetseq.doctor"),
    "top": _in_module("hetseq.top"),
    "drop": _in_module("hetseq.drop"),
    "script": _in_module("hetseq.script"),
    "ssh": _in_module("hetseq.ssh"),
    "selftest": _in_module("hetseq.selftest"),
    "demo": demo,
}
