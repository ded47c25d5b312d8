"""Situations of docs/errors.md, provoked on loopback: code, words and exit code of each, within ten seconds.

One test and one table: `python -m pytest -s tests/end_to_end/test_error_catalogue.py`. What needs hosts, workers that
die, or files that differ is provoked in `test_hosts`, `test_signals`, `test_disagreement` and `test_bad_task`.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetseq.catalogue import codes_in
from hetseq.errors import EXIT_DISAGREE, EXIT_DONE, EXIT_FAILED, EXIT_USAGE
from tests.support.differing import write_what
from tests.support.nodes import Nodes, Stock
from tests.support.places import directory, free_port, old_file
from tests.support.refusals import SQUARES, write_task

pytestmark = pytest.mark.slow

PROMISE_S = 10.0
HERE = socket.gethostname()
DIFFERING = Path(__file__).parents[1] / "support" / "differing.py"
BASE = shlex.split(
    "--cpu --global-batch-size 16 --max-update 2 --optimizer sgd --lr 0.001 --lr-scheduler constant"
    " --disable-validation --no-save --distributed-gpus 1 --join-timeout 3"
)
DIGITS = [*BASE, "--task", "mnist"]


@dataclass(frozen=True)
class Case:
    """A row of the table: what each node is given, and what each has to say."""

    number: str
    code: str  # of the catalogue; "" where it simply works
    exits: tuple[int, ...]  # of each node
    says: tuple[str, ...]
    commands: Callable[[Nodes, ExitStack], list[list[object]]]
    interface: str = "lo"


def at(url: str, rank: int, world: int = 2, base: list[str] = DIGITS) -> list[object]:
    """A node of one worker with a given rank."""
    return [*base, "--distributed-init-method", url, "--distributed-world-size", world, "--distributed-rank", rank]


def given(*ranks: tuple[int, int]) -> Callable[[Nodes, ExitStack], list[list[object]]]:
    """Nodes of (rank, world size) that meet at one address."""

    def commands(nodes: Nodes, _: ExitStack) -> list[list[object]]:
        url = f"tcp://127.0.0.1:{free_port()}"
        return [at(url, rank, world) for rank, world in ranks]

    return commands


def taken(nodes: Nodes, closing: ExitStack) -> list[list[object]]:
    server = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    return [at(f"tcp://127.0.0.1:{server.getsockname()[1]}", 0)]


def differing(one: list[object], other: list[object]) -> Callable[[Nodes, ExitStack], list[list[object]]]:
    def commands(nodes: Nodes, closing: ExitStack) -> list[list[object]]:
        return [[*words, *more] for words, more in zip(given((0, 2), (1, 2))(nodes, closing), (one, other))]

    return commands


def material(**difference: object) -> Callable[[Nodes, ExitStack], list[list[object]]]:
    def commands(nodes: Nodes, _: ExitStack) -> list[list[object]]:
        url, base = f"tcp://127.0.0.1:{free_port()}", [*BASE, "--task", f"{DIFFERING}:Differing"]
        folders = [write_what(nodes.folder / "one"), write_what(nodes.folder / "other", **difference)]
        return [[*at(url, rank, base=base), "--data", folder] for rank, folder in enumerate(folders)]

    return commands


def raising(what: str) -> Callable[[Nodes, ExitStack], list[list[object]]]:
    """A task that raises this in its second step."""
    loss = f'if (sample["index"] == 20).any(): raise {what}\n        return {{"loss": {SQUARES}.sum()}}'
    words: list[object] = [*BASE, "--curriculum", 9, "--task"]
    return lambda nodes, _: [[*words, write_task(nodes.folder, loss=loss)]]


NO_HEAD = "tcp://no-such-head.invalid:29400"
CASES = [
    Case("1", "head-unreachable", (EXIT_FAILED,), (HERE, "refused", "Start it with: ", "gave up"), given((1, 2))),
    Case("2", "ranks-missing", (EXIT_FAILED,), (HERE, "rank 1 is claimed by nobody", "paste there"), given((0, 2))),
    Case("3", "port-taken", (EXIT_USAGE,), (HERE, f"pid {os.getpid()}", "another port"), taken),
    Case("4", "rank-claimed-twice", (EXIT_DISAGREE,) * 2, (HERE, "rank 0", "use --join"), given((0, 2), (0, 2))),
    Case("5", "rank-claimed-twice", (EXIT_DISAGREE,) * 3, (HERE, "rank 1"), given((0, 3), (1, 3), (1, 3))),
    Case("6", "world-size-differs", (EXIT_DISAGREE,) * 2, (HERE, "give all nodes the same"), given((0, 2), (1, 3))),
    Case("7", "rank-outside-world", (EXIT_USAGE,), ("2 ranks are 0 to 1", "correct one"), given((2, 2))),
    Case("8", "", (EXIT_DONE,) * 2, ("stays as it is", "[old-file]"),
         lambda nodes, _: [at(old_file(nodes.folder).url, 0), at(f"file://{nodes.folder}/meeting/communicate.txt", 1)]),
    Case("9", "directory-missing", (EXIT_USAGE,), (HERE, "does not exist", "mount it"),
         lambda nodes, _: [at(f"file://{nodes.folder}/none/meeting", 0)]),
    Case("10", "interface-unknown", (EXIT_USAGE,), (HERE, "eth9", "lo 127.0.0.1", "leave it"), given((0, 2)), "eth9"),
    Case("11", "", (EXIT_DONE,) * 2, ("NCCL", "[interface-list]"), given((0, 2), (1, 2)), "^docker0"),
    Case("13", "head-unknown", (EXIT_FAILED,), (HERE, "not known", "IP address"), lambda *_: [at(NO_HEAD, 1)]),
    Case("14", "model-differs", (EXIT_DISAGREE,) * 2, (HERE, "left", "right", "same model"),
         material(names=["right", "left"])),
    Case("17", "worker-raised", (EXIT_FAILED,), ("ValueError: rotten",), raising('ValueError("rotten")')),
    Case("18", "device-missing", (EXIT_USAGE,), ("cuda:9", "this node shows"),
         lambda *_: [[*DIGITS[1:], "--devices", "cuda:9"]]),
    Case("20", "options-differ", (EXIT_DISAGREE,) * 2, (HERE, "--seed", "same options"),
         differing(["--seed", 1], ["--seed", 2])),
    Case("20b", "data-differ", (EXIT_DISAGREE,) * 2, (HERE, "64", "63", "same data"), material(rows=63)),
    Case("21", "ranks-missing", (EXIT_FAILED,), (HERE, "1 of 2 ranks"),
         lambda nodes, _: [at(directory(nodes.folder).url, 0)]),
    Case("23", "save-dir-unusable", (EXIT_USAGE,), ("--save-dir", "choose another"),
         lambda *_: [[*DIGITS, "--save-dir", "/proc/hetseq-run"]]),
    Case("24", "memory-exhausted", (EXIT_FAILED,), (HERE, "even one sample", "smaller"),
         raising('torch.OutOfMemoryError("CUDA out of memory.")')),
]  # fmt: skip


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_every_situation_is_answered_with_its_code_in_time(stock: Stock, tmp_path: Path, closing: ExitStack) -> None:
    failures = []
    print(f"\n{'row':>4} {'code':20} {'exit':>12} {'s':>5}  message")
    for case in CASES:
        folder = tmp_path / case.number
        folder.mkdir()
        nodes = Nodes(stock, folder)
        try:
            for words in case.commands(nodes, closing):
                nodes.start(*words, environment={"GLOO_SOCKET_IFNAME": case.interface})
            ends = nodes.finish(timeout_s=30)
        finally:
            nodes.close()
        seconds = max(ended.since_last_start for ended in ends)
        said = [ended.message if case.code else ended.err for ended in ends]
        exits = tuple(ended.code for ended in ends)
        shown = " ".join(said[-1].split())
        print(f"{case.number:>4} {case.code or '(works)':20} {exits!s:>12} {seconds:5.1f}  {shown[:200]}")
        wrong = [word for word in case.says for text in said if word not in text]
        if (
            exits != case.exits
            or wrong
            or seconds > PROMISE_S
            or any("Traceback" in text for text in said) > (case.code == "worker-raised")
        ):
            failures.append(f"{case.number}: {exits}, {seconds:.1f} s, lacks {wrong}: {said}")
        if case.code and any(case.code not in codes_in(text) for text in said):
            failures.append(f"{case.number}: {[codes_in(text) for text in said]} in place of {case.code}")
    assert not failures, "\n".join(failures)
