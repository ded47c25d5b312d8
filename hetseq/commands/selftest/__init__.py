"""`hetseq selftest [options of hetseq train]`: check before a run that a task is exact on any shares.

Parses the command line and sets the exit code; `examine` measures, and `findings` words the result. The one idea: a
rank is only a piece of a step, so one process can emulate unequal ranks, and finds a task that depends on them in
seconds, with the name of the term.

torch is imported only with the task.
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
    "Check before a run that your task is exact on any shares.",
    usage=("--task TASK [options] [options of hetseq train]",),
    words=(
        CommandOption("--task", "the task, as `hetseq train` takes it", "TASK", is_passed_on=True),
        CommandOption(
            "--rounds", "number of steps to try, each with other samples and other random shares; default 8", "N",
            read=whole_number(1), default=8,
        ),
        # at least 4: three ranks, one of them with one more sample
        CommandOption("--samples", "samples per step; default 32", "N", read=whole_number(4), default=32),
        CommandOption("--json", "print one line of JSON, for scripts"),
    ),
    examples=("hetseq selftest --task my_task.py:MyTask --data my_data", "hetseq selftest --task mnist --rounds 2"),
    notes=(
        "Builds task, data and model as `hetseq train` would with the same options, and writes nothing. Each step is"
        " computed as one micro-batch, and split over two and three emulated ranks with random unequal shares; sums,"
        " counts and gradients of each loss term must be the same. Another process loads task and data too, to detect"
        " differences between processes. Runs on the CPU, or on the first of --devices; in fp64 if the task can, else"
        " in fp32.",
        "Ends with 0 if the task is exact, 1 if it is not, 2 for a mistake in the command.",
    ),
    train="among",
)  # fmt: skip


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq selftest`: examine a task and print the findings; returns the exit code. Raises HetSeqError."""
    given = COMMAND.read(words)
    config = options.complete(options.parse(given.rest, also=COMMAND.flags))
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with another_process(given.rest) as other:
        from hetseq.commands.selftest.examine import examine  # both import torch at the same time

        report = examine(config, rounds=given["--rounds"], samples=given["--samples"], other=other)
    for line in [report.json()] if given["--json"] else report.lines():
        say(line)
    return EXIT_DONE if report.is_exact else EXIT_FAILED
