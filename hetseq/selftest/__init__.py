"""`hetseq selftest [options of hetseq train]`: whether the user's own task is exact on any shares, before a run.

Responsible for the command line and for the exit code. Refuses to know what is measured (`examination`) and how a
result is said (`findings`). The one idea: on one machine a rank is only a piece of a step, so unequal ranks can be
played by one process, and a task that depends on them is found in seconds, with the name of the term.

No torch is imported until the task is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from hetseq import options
from hetseq.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from hetseq.selftest.elsewhere import another_process

USAGE = """usage: hetseq selftest --task TASK [--rounds N] [--samples N] [--json] [options of hetseq train]

  --rounds N    steps that are tried, each with other samples and other random shares; default 8
  --samples N   samples of each of them; default 32
  --json        one line for scripts

Builds task, data and model as `hetseq train` would with the same options, and writes nothing. Each step is computed as
one micro-batch, and cut over two and three emulated ranks with random unequal shares; sums, counts and gradients of
each loss term must be the same. On the CPU, or on the first of --devices; in fp64 where the task can, else in fp32.

Ends with 0 if the task is exact, 1 if it is not, 2 for a mistake in the command. For example:

  hetseq selftest --task my_task.py:MyTask --data my_data
"""

_WITH_NUMBER = {"--rounds": 8, "--samples": 32}
_LEAST = {"--rounds": 1, "--samples": 4}  # three ranks, of which one has a sample more


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """`hetseq selftest`: examine a task and say what was found; gives the exit code. Raises HetSeqError."""
    numbers, wants_json, rest = split(words)
    config = options.complete(options.parse(rest))
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with another_process(rest) as other:
        from hetseq.selftest.examination import examine  # both import torch at the same time

        report = examine(config, rounds=numbers["--rounds"], samples=numbers["--samples"], other=other)
    for line in [report.json()] if wants_json else report.lines():
        say(line)
    return EXIT_DONE if report.is_exact else EXIT_FAILED


def split(words: Sequence[str]) -> tuple[dict[str, int], bool, list[str]]:
    """The command's own numbers, whether JSON is wanted, and the options of `hetseq train`. Raises ConfigError."""
    numbers, wants_json, rest, left = dict(_WITH_NUMBER), False, [], list(words)
    while left:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if word == "--json":
            wants_json = True
        elif flag in numbers:
            given = value if equals else left.pop(0) if left else ""
            if not (given.isascii() and given.isdigit() and int(given) >= _LEAST[flag]):
                raise ConfigError(
                    f"hetseq selftest: {flag} {given or 'stands without a value'}: expected a whole number, at least"
                    f" {_LEAST[flag]}, as in {flag} {_WITH_NUMBER[flag]}"
                )
            numbers[flag] = int(given)
        else:
            rest.append(word)
    return numbers, wants_json, rest
