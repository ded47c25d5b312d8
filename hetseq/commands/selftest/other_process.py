"""Another process that loads the same task: what of it depends on the process.

Responsible for starting it with the same options, and for findings where it sees other samples or other first weights.
Refuses to judge what differs: both present what the ranks of a run present to each other (`fingerprint`), and
`cluster.contract` compares it.

The one idea: each process of Python has another order of its sets of strings, another id and another time. A list of
classes that comes from a set is the same list all day within one process, and another one on the next node, or when the
run goes on tomorrow.
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
_PATIENCE_S = 300.0  # for an import of torch over a network mount, and data that take minutes
_WEIGHTS = ("initial values", "parameters", "buffers")

#: gives what the other process presents, or in words why it could not
Answer = Callable[[], Mapping[str, str] | str]


@contextmanager
def another_process(words: Sequence[str]) -> Iterator[Answer]:
    """Starts it with the options of `hetseq train`, at once; it ends with the block."""
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
    """What a rank of a run would present of this task, its data and a model that is built for it.

    Of the training data too where each host would have a part of its own: both processes are on one.
    """
    from dataclasses import replace
    from types import SimpleNamespace

    from hetseq.data.fetch import seed_everything
    from hetseq.run.fingerprint import rank_fields
    from hetseq.task import build_model
    from hetseq.training.task_checks import LossTrial

    seed_everything(config.task.seed)
    model = build_model(task)
    config = replace(config, data=replace(config.data, data_by_host=False))
    return rank_fields(config, SimpleNamespace(task=task, train=train, valid={}, model=model, trial=LossTrial()))


def of_processes(own: Mapping[str, str], other: Mapping[str, str]) -> Iterator[SelftestFinding]:
    """What the two do not have in common."""
    from hetseq.cluster.membership.compatibility import difference

    for name in [name for name in own if name in other]:
        said = difference([("this process", {name: own[name]}), ("the other", {name: other[name]})])
        if said is None:
            continue
        yield SelftestFinding(
            "process", name,
            f"it is another one in another process: {said.splitlines()[1].strip().removeprefix(f'{name}: ')}",
            "Draw weights from torch's generator, which HetSeq seeds" if name in _WEIGHTS else
            "Sort what comes from a set, a directory or a clock, and give what is shuffled a seed: sorted(names)",
        )  # fmt: skip


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


def main() -> int:
    """The other process: the options of `hetseq train` as its words, what it presents on standard output."""
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
