"""A second process that loads the same task, to find data and weights that depend on the process.

Starts it with the same options, and makes findings if it has other samples or other initial weights. It compares
nothing itself: both processes present the fingerprint that ranks of a run present (`run.fingerprint`), and
`cluster.membership.compatibility` compares them.

The one idea: each Python process has its own order of sets of strings, its own id and time. A list of classes made from
a set is always the same within one process, but differs on the next node, or when the run resumes tomorrow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hetseq.commands.selftest.findings import SelftestFinding
from hetseq.system.processes import die_with_parent

if TYPE_CHECKING:  # it imports torch
    from hetseq.config.sections import Config
    from hetseq.task import Task

_MARK = "hetseq elsewhere: "
_PATIENCE_S = 300.0  # for importing torch from a network mount, and for data that take minutes
_WEIGHTS = ("initial values", "parameters", "buffers")

#: returns the fingerprint of the other process, or the reason why it failed
Answer = Callable[[], Mapping[str, str] | str]


@contextmanager
def another_process(words: Sequence[str]) -> Iterator[Answer]:
    """Start the process at once, with the options of `hetseq train`; it ends with the block."""
    me = os.getpid()
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, preexec_fn=lambda: die_with_parent(me),
    )  # fmt: skip

    def answer() -> Mapping[str, str] | str:
        try:
            said, complained = process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return f"no answer within {_PATIENCE_S:g} s"
        told = [line.removeprefix(_MARK) for line in said.splitlines() if line.startswith(_MARK)]
        return dict(json.loads(told[-1])) if told else _last_line(complained) or f"it ended with {process.returncode}"

    try:
        yield answer
    finally:
        process.kill()
        process.communicate(timeout=_PATIENCE_S)


def presented(config: Config, task: Task, train: Any) -> Mapping[str, str]:
    """The fingerprint that a rank of a run would present for this task, its data and a new model.

    It includes the training data even with --data-by-host, because both processes are on one host.
    """
    from dataclasses import replace
    from types import SimpleNamespace

    from hetseq.data.fetch import seed_everything
    from hetseq.parallel.base_parameters import base_digest
    from hetseq.run.fingerprint import rank_fields
    from hetseq.task import build_model
    from hetseq.training.task_checks import LossTrial

    seed_everything(config.task.seed)
    model = build_model(task)
    config = replace(config, data=replace(config.data, data_by_host=False))
    material = SimpleNamespace(
        described=None,
        task=task,
        train=train,
        valid={},
        model=model,
        trial=LossTrial(),
        own_loop=None,
        base=base_digest(model),
    )
    return rank_fields(config, material)


def of_processes(own: Mapping[str, str], other: Mapping[str, str]) -> Iterator[SelftestFinding]:
    """Findings about the differences between the two."""
    from hetseq.cluster.membership.compatibility import difference

    for name in [name for name in own if name in other]:
        said = difference([("this process", {name: own[name]}), ("the other", {name: other[name]})])
        if said is None:
            continue
        yield SelftestFinding(
            "process", name,
            f"it differs in another process: {said.splitlines()[1].strip().removeprefix(f'{name}: ')}",
            "Draw weights from torch's generator, which HetSeq seeds" if name in _WEIGHTS else
            "Sort lists from a set or a directory, as in sorted(names), use no clock, and seed every shuffle",
        )  # fmt: skip


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


def main() -> int:
    """The other process: takes the options of `hetseq train`, and prints its fingerprint on standard output."""
    from hetseq import config as options
    from hetseq import registry
    from hetseq.task import load_split, make_task

    config = options.complete(options.parse(sys.argv[1:]))
    task = make_task(registry.find_task(config.task.task, user_dir=config.task.user_dir), config)
    fields = presented(config, task, load_split(task, config.data.train_subset))
    sys.stdout.write(f"\n{_MARK}{json.dumps(dict(fields))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
