"""`hetseq selftest [options of hetseq train]`: whether the user's own task is exact on any shares, before a run.

Responsible for the command line and for the exit code. Refuses to know what is measured (`examine`) and how a
result is said (`findings`). The one idea: on one machine a rank is only a piece of a step, so unequal ranks can be
played by one process, and a task that depends on them is found in seconds, with the name of the term.

No torch is imported until the task is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from hetseq import config as options
from hetseq.commands.selftest.other_process import another_process
from hetseq.config.command_line import Command, CommandOption, whole_number
from hetseq.errors import EXIT_DONE, EXIT_FAILED

COMMAND = Command(
    "selftest",
    "Whether a task of your own is exact on any shares, before a run.",
    usage=("--task TASK [options] [options of hetseq train]",),
    words=(
        CommandOption("--task", "the task, as `hetseq train` takes it", "TASK", is_passed_on=True),
        CommandOption(
            "--rounds", "steps that are tried, each with other samples and other random shares; default 8", "N",
            read=whole_number(1), default=8,
        ),
        # three ranks, of which one has a sample more
        CommandOption("--samples", "samples of each of them; default 32", "N", read=whole_number(4), default=32),
        CommandOption("--json", "one line for scripts"),
    ),
    examples=("hetseq selftest --task my_task.py:MyTask --data my_data", "hetseq selftest --task mnist --rounds 2"),
    notes=(
        "Builds task, data and model as `hetseq train` would with the same options, and writes nothing. Each step is"
        " computed as one micro-batch, and cut over two and three emulated ranks with random unequal shares; sums,"
        " counts and gradients of each loss term must be the same. Another process loads task and data too, to see what"
        " of them depends on the process. On the CPU, or on the first of --devices; in fp64 where the task can, else in"
        " fp32.",
        "Ends with 0 if the task is exact, 1 if it is not, 2 for a mistake in the command.",
    ),
    train="among",
)  # fmt: skip


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq selftest`: examine a task and say what was found; gives the exit code. Raises HetSeqError."""
    given = COMMAND.read(words)
    config = options.complete(options.parse(given.rest, also=COMMAND.flags))
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with another_process(given.rest) as other:
        from hetseq.commands.selftest.examine import examine  # both import torch at the same time

        report = examine(config, rounds=given["--rounds"], samples=given["--samples"], other=other)
    for line in [report.json()] if given["--json"] else report.lines():
        say(line)
    return EXIT_DONE if report.is_exact else EXIT_FAILED
