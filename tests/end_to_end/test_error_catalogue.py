"""Situations of docs/reference/errors.md, provoked on this machine: code, words and exit code of each, in ten seconds.

One test and one table: `python -m pytest -s tests/end_to_end/test_error_catalogue.py`. A situation is a `Case`: the
commands of its nodes, and what comes of them. Its seconds count from the start of the last node, or from the moment in
which a worker is killed or stopped, until everybody who has to tell it has told it.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from hetseq.errors import EXIT_DISAGREE, EXIT_DONE, EXIT_FAILED, EXIT_USAGE, codes_in
from hetseq.testing import Faults
from tests.support import cuda_errors
from tests.support.commands import ROOT
from tests.support.differing import write_other_torch, write_what
from tests.support.nodes import Ended, Nodes, Process, Stock
from tests.support.places import directory, free_port, old_file
from tests.support.refusals import SQUARES, write_task

pytestmark = pytest.mark.slow

PROMISE_S = 10.0
HERE = socket.gethostname()
DIFFERING = Path(__file__).parents[1] / "support" / "differing.py"
Words = list[object]
BASE: Words = [
    *shlex.split(
        "--cpu --global-batch-size 16 --max-update 2 --optimizer sgd --lr 0.001 --lr-scheduler constant"
        " --disable-validation --ranks 1 --join-timeout 3 --max-restarts 0"
    )
]
SAVING = [*BASE, "--task", "mnist"]
DIGITS = [*SAVING, "--no-save"]


class OddHost:
    """A host whose name is 127.0.1.1 to itself, with 64 kB of shared memory, and as much disk in `disk`."""

    def __init__(self, stock: Stock, folder: Path, closing: ExitStack) -> None:
        self._stock, self._closing = stock, closing
        self._process: Process | None = None
        folder.mkdir()
        self.disk, hosts = folder / "disk", folder / "hosts"
        self.disk.mkdir()
        hosts.write_text("127.0.0.1 localhost\n127.0.1.1 labA\n")
        script = (
            "ip link set lo up && ip address add 10.77.0.1/24 dev lo && hostname labA"
            f" && mount --bind {hosts} /etc/hosts && mount -t tmpfs -o size=64k none /dev/shm"
            f' && mount -t tmpfs -o size=64k none {self.disk} && exec "$@"'
        )
        self._prefix = ["unshare", "-rmnu", "sh", "-c", script, "sh"]

    def process(self) -> Process:
        """A warm process on that host; the case is skipped where there are no namespaces."""
        if self._process is None:
            if subprocess.run([*self._prefix, "true"], capture_output=True).returncode:
                pytest.skip("no namespaces here")
            self._process = self._stock.start(prefix=self._prefix)
            self._closing.callback(self._process.close)
        return self._process


@dataclass
class Ground:
    """What the nodes of a case stand on; all of it goes with `closing`."""

    nodes: Nodes
    stock: Stock
    odd_host: OddHost
    closing: ExitStack
    processes: dict[int, Process] = field(default_factory=dict)  # of nodes that do not run in one of the stock

    @property
    def folder(self) -> Path:
        return self.nodes.folder


Commands = Callable[[Ground], list[Words]]


@dataclass(frozen=True)
class Case:
    """A row of the table: what each node is given, and what has to be said."""

    number: str
    code: str  # of the catalogue; "" where it simply works
    exits: tuple[int, ...]  # of the nodes, in any order
    says: tuple[str, ...]  # all of these, by everybody who tells the code
    commands: Commands
    interface: str | None = "lo"
    tellers: int = 0  # how many nodes have to tell it; 0: all
    faults: Faults | None = None
    culprit: str = ""  # stands in the file of stacks that the message names


# --------------------------------------------------------------------------------------------------------- commands


def at(url: str, rank: int, world: int = 2, base: Words = DIGITS) -> Words:
    """A node of one worker with a given rank."""
    return [*base, "--distributed-init-method", url, "--distributed-world-size", world, "--distributed-rank", rank]


def alone(*words: object, base: Words = DIGITS) -> Commands:
    return lambda _: [[*base, *words]]


def given(*ranks: tuple[int, int], more: Sequence[Sequence[object]] = ()) -> Commands:
    """Nodes of (rank, world size) that meet at one address; `more` are words of each."""

    def commands(_: Ground) -> list[Words]:
        url = f"tcp://127.0.0.1:{free_port()}"
        own = more or [[] for _ in ranks]
        return [[*at(url, rank, world), *words] for (rank, world), words in zip(ranks, own, strict=True)]

    return commands


def taken(ground: Ground) -> list[Words]:
    server = ground.closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    return [at(f"tcp://127.0.0.1:{server.getsockname()[1]}", 0)]


def again(ground: Ground) -> list[Words]:
    """The commands of two nodes that have met in this directory before, in a run that has ended well."""
    url = directory(ground.folder).url
    commands = [at(url, rank) for rank in (0, 1)]
    for words in commands:
        ground.nodes.start(*words)
    assert [ended.code for ended in ground.nodes.finish()] == [EXIT_DONE] * 2, ground.nodes.story()
    ground.nodes.forget(*ground.nodes.started)
    return commands


def other_torch(ground: Ground) -> list[Words]:
    """The second node finds another torch."""
    path = f"{write_other_torch(ground.folder / 'other')}:{ROOT}"
    ground.processes[1] = ground.stock.start({"PYTHONPATH": path})
    ground.closing.callback(ground.processes[1].close)
    return given((0, 2), (1, 2))(ground)


def material(**difference: object) -> Commands:
    def commands(ground: Ground) -> list[Words]:
        url, base = f"tcp://127.0.0.1:{free_port()}", [*BASE, "--no-save", "--task", f"{DIFFERING}:Differing"]
        folders = [write_what(ground.folder / "one"), write_what(ground.folder / "other", **difference)]
        return [[*at(url, rank, base=base), "--data", folder] for rank, folder in enumerate(folders)]

    return commands


def sticking(where: str) -> Commands:
    """Two nodes with a task that hangs once, in the first step or the next one, in a function called `stick`."""

    def commands(ground: Ground) -> list[Words]:
        task = ground.folder / "sticking.py"
        task.write_text(STICKING.format(where=where, mark=str(ground.folder / "mark"), squares=SQUARES))
        words: Words = [*BASE, "--no-save", "--task", f"{task}:Sticking", *MORE_STEPS[0]]
        url = f"tcp://127.0.0.1:{free_port()}"
        return [at(url, rank, base=words) for rank in (0, 1)]

    return commands


def raising(what: str, when: str = 'sample["index"] == 20') -> Commands:
    """A task that raises this when its loss sees a certain sample; 20 is in the second step."""
    loss = f'if ({when}).any(): raise {what}\n        return {{"loss": {SQUARES}.sum()}}'
    return lambda ground: [[*BASE, "--no-save", "--curriculum", 9, "--task", write_task(ground.folder, loss=loss)]]


def odd(*words: object) -> Commands:
    """A node on the odd host."""

    def commands(ground: Ground) -> list[Words]:
        ground.processes[0] = ground.odd_host.process()
        names = {"folder": ground.folder, "disk": ground.odd_host.disk, "port": free_port()}
        return [[*SAVING, *(str(word).format(**names) for word in words)]]

    return commands


# ------------------------------------------------------------------------------------------------------------- rows

OUT_OF_MEMORY = f"torch.OutOfMemoryError({cuda_errors.OUT_OF_MEMORY!r})"
STICKING = """
import os, time, torch
from hetseq import Task

READS = []  # the first ones are those of a look at the data before the start


def stick(where):
    if where == "{where}":
        try:
            os.close(os.open("{mark}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return  # it was somebody else's turn
        time.sleep(60)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        READS.append(index)
        if len(READS) > 80:
            stick("loader")
        return {{"x": torch.ones(3), "y": torch.ones(())}}


class Sticking(Task):
    def load_dataset(self, split):
        return Data()

    def build_model(self):
        return torch.nn.Linear(3, 1)

    def loss(self, model, sample):
        if model.training:
            stick("forward")
        return {{"loss": {squares}.sum()}}
"""
MORE_STEPS: list[Words] = [["--max-update", 6, "--step-deadline", 2]] * 2
NO_HEAD = "tcp://no-such-head.invalid:29400"
CASES = [
    Case("1", "head-unreachable", (EXIT_FAILED,), (HERE, "refused", "Start it with: ", "gave up"), given((1, 2))),
    Case("2", "ranks-missing", (EXIT_FAILED,), (HERE, "rank 1 is not claimed yet", "paste there"), given((0, 2))),
    Case("3", "port-taken", (EXIT_USAGE,), (HERE, f"pid {os.getpid()}", "another port"), taken),
    Case("4", "rank-claimed-twice", (EXIT_DISAGREE,) * 2, (HERE, "rank 0", "use --join"), given((0, 2), (0, 2))),
    Case("5", "rank-claimed-twice", (EXIT_DISAGREE,) * 3, (HERE, "rank 1"), given((0, 3), (1, 3), (1, 3))),
    Case("6", "world-size-differs", (EXIT_DISAGREE,) * 2, (HERE, "give all nodes the same"), given((0, 2), (1, 3))),
    Case("7", "rank-outside-world", (EXIT_USAGE,), ("2 ranks are 0 to 1", "correct one"), given((2, 2))),
    Case("8", "old-file", (EXIT_DONE,) * 2, ("stays as it is", "meet in"),
         lambda ground: [at(old_file(ground.folder).url, 0),
                         at(f"file://{ground.folder}/meeting/communicate.txt", 1)]),
    Case("8b", "", (EXIT_DONE,) * 2, (), again),
    Case("9", "directory-missing", (EXIT_USAGE,), (HERE, "does not exist", "mount it"),
         lambda ground: [at(f"file://{ground.folder}/none/meeting", 0)]),
    Case("10", "interface-unknown", (EXIT_USAGE,), (HERE, "eth9", "lo 127.0.0.1", "leave it"), given((0, 2)), "eth9"),
    Case("11", "interface-list", (EXIT_DONE,) * 2, ("NCCL", "lo (127.0.0.1) is used"),
         given((0, 2), (1, 2)), "^docker0"),
    Case("12", "loopback-name", (EXIT_DONE,), ("labA means 127.0.1.1 on labA", "10.77.0.1 is used", "IP address"),
         odd("--no-save", "--ranks", 2, "--distributed-world-size", 2, "--distributed-rank", 0,
             "--distributed-init-method", "tcp://labA:{port}"), None),
    Case("13", "head-unknown", (EXIT_FAILED,), (HERE, "not known", "IP address"), lambda _: [at(NO_HEAD, 1)]),
    Case("14", "model-differs", (EXIT_DISAGREE,) * 2, (HERE, "left", "right", "same model"),
         material(names=["right", "left"])),
    Case("14b", "loss-differs", (EXIT_DISAGREE,) * 2, (HERE, "loss of the first two samples", "factor in forward"),
         material(factor=1.1)),
    Case("15", "worker-died", (EXIT_DONE,) * 2,
         (f"rank 1 on {HERE} was killed (SIGKILL", "memory runs out", "rank 0 continues"),
         given((0, 2), (1, 2), more=MORE_STEPS), tellers=1, faults=Faults().kill(rank=1).at(step=3, phase="reduce")),
    Case("16", "worker-silent", (EXIT_DONE,) * 2,
         (f"rank 1 on {HERE} fell silent, last seen on cpu in step 3, forward and backward", "is stopped (SIGSTOP",
          "rank 0 continues"), given((0, 2), (1, 2), more=MORE_STEPS), tellers=1,
         faults=Faults().stop(rank=1, seconds=math.inf).at(step=3, phase="forward_backward")),
    Case("16b", "worker-silent", (EXIT_DONE,) * 2, ("fell silent, last seen on cpu", "reading data (loader) for"),
         sticking("loader"), tellers=1, culprit="in stick"),
    Case("16c", "worker-silent", (EXIT_DONE,) * 2, ("fell silent, last seen on cpu", "forward and backward for"),
         sticking("forward"), tellers=1, culprit="in stick"),
    Case("17", "worker-raised", (EXIT_FAILED,), ("ValueError: rotten",), raising('ValueError("rotten")')),
    Case("18", "device-missing", (EXIT_USAGE,), ("cuda:9", "this node shows"),
         alone("--devices", "cuda:9", base=DIGITS[1:])),
    Case("19", "versions-differ", (EXIT_DISAGREE,) * 2, (HERE, "torch", "9.9.9", torch.__version__.partition("+")[0]),
         other_torch),
    Case("20", "options-differ", (EXIT_DISAGREE,) * 2, (HERE, "--seed", "same options"),
         given((0, 2), (1, 2), more=[["--seed", 1], ["--seed", 2]])),
    Case("20b", "data-differ", (EXIT_DISAGREE,) * 2, (HERE, "64", "63", "same data"), material(rows=63)),
    Case("20c", "data-unreadable", (EXIT_USAGE,) * 2, ("--data /none does not exist", "give --data the folder"),
         given((0, 2), (1, 2), more=[[], ["--data", "/none"]])),
    Case("21", "ranks-missing", (EXIT_FAILED,), (HERE, "1 of 2 ranks"),
         lambda ground: [at(directory(ground.folder).url, 0)]),
    Case("22", "run-in-use", (EXIT_DONE, EXIT_USAGE), ("--save-dir", HERE, "pid ", "wait for it"),
         lambda ground: [[*DIGITS, "--save-dir", ground.folder / "run"]] * 2,
         tellers=1, faults=Faults().sleep(rank=0, seconds=2).at(step=1, phase="count")),
    Case("23", "save-dir-unusable", (EXIT_USAGE,), ("--save-dir", "choose another"),
         alone("--save-dir", "/proc/hetseq-run")),
    Case("23b", "memory-for-saves", (EXIT_DONE,), ("/dev/shm", "--memory-buffer-size 0"),
         odd("--save-interval-updates", 1, "--save-dir", "{folder}/run")),
    Case("23c", "save-failed", (EXIT_FAILED,), ("the final save failed", "--save-dir"),
         odd("--save-dir", "{disk}/run")),
    Case("24", "memory-exhausted", (EXIT_FAILED,), (HERE, "even one sample", "smaller"), raising(OUT_OF_MEMORY)),
    Case("24b", "memory-exhausted", (EXIT_FAILED,), (HERE, "before the first step", "smaller"),
         raising(OUT_OF_MEMORY, 'sample["index"] == 0')),
    Case("24c", "batch-halved", (EXIT_DONE,), (HERE, "did not hold a micro-batch", "takes smaller ones"),
         raising(OUT_OF_MEMORY, 'torch.tensor(len(sample["index"]) > 4)')),
]  # fmt: skip


# --------------------------------------------------------------------------------------------------------- the test


@dataclass(frozen=True)
class Outcome:
    """What came of a case."""

    ends: list[Ended]
    told: list[str]  # by each node that told the code; where it works, by all
    seconds: float


@pytest.mark.nightly
@pytest.mark.timeout(10 * len(CASES))  # what each of them is allowed
def test_every_situation_is_answered_with_its_code_in_time(stock: Stock, tmp_path: Path) -> None:
    answers: dict[str, Outcome | str] = {}
    failures: list[str] = []
    Nodes(stock, tmp_path).prepare(3)  # a node that has to be made first comes too late for the others
    with ExitStack() as closing:
        odd_host = OddHost(stock, tmp_path / "odd", closing)

        def provoke_all(cases: list[Case]) -> None:
            for case in cases:
                try:
                    answers[case.number] = provoke(case, stock, odd_host, tmp_path / case.number)
                except pytest.skip.Exception as skipped:
                    answers[case.number] = f"not tried: {skipped}"
                except AssertionError as error:  # the other rows are of interest all the same
                    answers[case.number] = "see below"
                    failures.append(f"{case.number}: {error}")

        # the stock has three processes: while two of them are the nodes of one case, the third is that of another
        single, several, many = ([case for case in CASES if len(case.exits) == count] for count in (1, 2, 3))
        with ThreadPoolExecutor(2) as lanes:
            for lane in [lanes.submit(provoke_all, cases) for cases in (single, several)]:
                lane.result()
        provoke_all(many)
    print(f"\n{'row':>4} {'code':20} {'exit':>12} {'s':>5}  message")
    for case in CASES:
        answer, name = answers[case.number], case.code or "(works)"
        if isinstance(answer, str):
            print(f"{case.number:>4} {name:20} {'':18}  {answer}")
            continue
        exits = tuple(ended.code for ended in answer.ends)
        shown = " ".join(" ".join(answer.told[-1:]).split())
        print(f"{case.number:>4} {name:20} {exits!s:>12} {answer.seconds:5.1f}  {shown[:200]}")
        failures += [f"{case.number}: {wrong}" for wrong in complaints(case, answer)]
    assert not failures, "\n".join(failures)


def provoke(case: Case, stock: Stock, odd_host: OddHost, folder: Path) -> Outcome:
    """Start the nodes of the case, and wait until they have told it and have ended."""
    folder.mkdir()
    diary = folder / "diary"
    environment = {"GLOO_SOCKET_IFNAME": case.interface}
    if case.faults is not None:
        environment |= case.faults.diary(diary).environment()
    nodes = Nodes(stock, folder)

    def is_told() -> bool:
        tellers = [node for node in nodes.started if case.code in codes_in(node.err)]
        has_ended = all(node.poll() is not None for node in nodes.started)
        return has_ended or len(tellers) >= (case.tellers or len(case.exits))

    with ExitStack() as closing:
        try:
            ground = Ground(nodes, stock, odd_host, closing)
            for number, words in enumerate(case.commands(ground)):
                nodes.start(*words, process=ground.processes.get(number), environment=environment)
            nodes.wait_until(is_told, "it is told")
            told_s = time.monotonic()
            ends = nodes.finish(timeout_s=30)
            begin_s = max(node.begin for node in nodes.started)
        finally:
            nodes.close()  # before their processes
    notes = [json.loads(line) for line in diary.read_text().splitlines()] if diary.exists() else []
    begin_s = max(begin_s, *(note["monotonic_s"] for note in notes if note["kind"] in ("kill", "stop")), 0.0)
    told = [text for ended in ends if (text := message_with(case.code, ended))]
    return Outcome(ends, told, told_s - begin_s)


def message_with(code: str, ended: Ended) -> str:
    """The reason that has the code, or the line; all that was said where no code is expected."""
    texts = [*ended.reasons, *ended.err.splitlines()] if code else [ended.err]
    return next((text for text in texts if not code or code in codes_in(text)), "")


def _stands_in(words: str, match: re.Match[str] | None) -> bool:
    return match is not None and words in Path(match.group(1)).read_text()


def complaints(case: Case, outcome: Outcome) -> list[str]:
    """What is not as it should be."""
    story = "\n".join(f"{ended.code}: {ended.err}" for ended in outcome.ends)
    missing = [word for word in case.says for text in outcome.told if word not in text]
    others = {code for ended in outcome.ends for code in codes_in(ended.message)} - {case.code}
    found = []
    if sorted(ended.code for ended in outcome.ends) != sorted(case.exits):
        found.append(f"other exit codes than {case.exits}: {story}")
    if missing or len(outcome.told) < (case.tellers or len(case.exits)) or others:
        found.append(f"lacks {missing}, told by {len(outcome.told)} nodes, beside {others}: {story}")
    if case.culprit:
        named = [re.search(r"what its threads do: (\S+)", text) for text in outcome.told]
        found += [
            f"no {case.culprit!r} in the stacks: {story}" for match in named if not _stands_in(case.culprit, match)
        ]
    if outcome.seconds > PROMISE_S:
        found.append(f"{outcome.seconds:.1f} s: {story}")
    if ("Traceback" in story) > (case.code == "worker-raised"):
        found.append(f"a traceback: {story}")
    return found
