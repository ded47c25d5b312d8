"""Twenty ways in which two nodes can disagree: each is named on both, with both values, before the first step.

Two launchers on this machine, so both are the same host; the message tells them apart by process id or rank. What can
be seen at once must be said within seconds; a rank that nobody brings may still come, so that is said meanwhile. The
twentieth kind, checkpoints of two runs, needs two file systems: `test_hosts` has it.
"""

from __future__ import annotations

import shlex
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq.errors import EXIT_DISAGREE, EXIT_USAGE
from tests.support.commands import ROOT
from tests.support.differing import write_other_torch, write_what
from tests.support.nightly import nightly
from tests.support.nodes import Ended, Nodes, Stock
from tests.support.places import PLACES, Place, directory, tcp
from tests.unit.tasks.test_mnist_data import write_idx

pytestmark = pytest.mark.slow

PROMISE_S = 5.0
TASK = ROOT / "tests" / "support" / "differing.py"
WORDS = shlex.split(
    "--cpu --global-batch-size 16 --max-update 2 --optimizer sgd --lr 0.001 --lr-scheduler constant"
    " --disable-validation"
)
DIFFERING = [*WORDS, "--task", f"{TASK}:Differing"]
DIGITS = [*WORDS, "--task", "mnist"]
Words = list[object]


def start(nodes: Nodes, place: Place, *each: Words, **second: Any) -> None:
    """One worker per node; `second` is for all nodes but the first."""
    for rank, words in enumerate(each):
        meeting = ["--distributed-init-method", place.url, "--distributed-world-size", len(each)]
        meeting += ["--ranks", 1, "--distributed-rank", rank, "--save-dir", nodes.folder / "run"]
        nodes.start(*meeting, *words, **(second if rank else {}))


def check_refused(nodes: Nodes, *says: str, code: int = EXIT_DISAGREE) -> list[Ended]:
    """All nodes have ended with that code, soon, with the same reason, and no step was made."""
    ends = nodes.finish()
    for ended in ends:
        assert ended.code == code, nodes.story()
        check_message(nodes, ended, *says)
        assert ended.since_last_start <= PROMISE_S, nodes.story()
    assert not list(nodes.folder.rglob("metrics.jsonl")), "a step was made"
    return ends


def names(nodes: Nodes) -> list[str]:
    """What tells the nodes apart before they have ranks."""
    return [socket.gethostname(), *(f"pid {node.pid}" for node in nodes.started)]


def check_message(nodes: Nodes, ended: Ended, *says: str) -> None:
    """It gives one reason, in words, which holds all of `says`."""
    everything = ended.out + ended.err
    assert "Traceback" not in everything, nodes.story()
    assert len(ended.reasons) == 1, nodes.story()
    missing = [word for word in says if word not in ended.message]
    assert not missing, f"{missing} not in: {ended.message}\n{nodes.story()}"


def of(rows: list[tuple[Any, ...]], *often: str) -> list[Any]:
    """The rows as parameters; those that are not named here are nightly."""
    marks = [[] if name in often else [pytest.mark.nightly] for name, *_ in rows]
    return [pytest.param(*rest, id=name, marks=mark) for (name, *rest), mark in zip(rows, marks)]


# ---------------------------------------------------------------------------------------- what the commands tell

OPTIONS = [
    ("learning rate", "--lr", "0.001", "0.002"),
    ("seed", "--seed", "1", "2"),
    ("global batch", "--global-batch-size", "16", "32"),
    ("dropout", "--dropout", "0.25", "0.5"),
    ("precision", "--precision", "fp32", "fp64"),
    ("sampler", "--curriculum", "0", "7"),
]


@pytest.mark.parametrize(("flag", "one", "other"), of(OPTIONS, "learning rate"))
def test_an_option(nodes: Nodes, flag: str, one: str, other: str) -> None:
    start(nodes, tcp(), [*DIGITS, flag, one], [*DIGITS, flag, other])
    check_refused(nodes, flag, one, other, *names(nodes))


def test_nodes_that_meet_in_a_directory(nodes: Nodes) -> None:
    place = directory(nodes.folder)
    start(nodes, place, [*DIGITS, "--seed", 1], [*DIGITS, "--seed", 2])
    check_refused(nodes, "--seed", "1", "2", *names(nodes))
    assert place.leftovers() == []


@pytest.mark.nightly
def test_several_options_are_all_named(nodes: Nodes) -> None:
    start(nodes, tcp(), [*DIGITS, "--seed", 1, "--lr", 0.1], [*DIGITS, "--seed", 2, "--lr", 0.2])
    check_refused(nodes, "--seed", "--lr", "0.1", "0.2", *names(nodes))


@pytest.mark.nightly
def test_one_of_three_nodes(nodes: Nodes) -> None:
    start(nodes, tcp(), DIGITS, DIGITS, [*DIGITS, "--seed", 5])
    check_refused(nodes, "--seed", "5", f"pid {nodes.started[2].pid}")


@pytest.mark.nightly
def test_nodes_that_join(nodes: Nodes) -> None:
    place = tcp()
    for seed in (1, 2):
        join = ["--join", place.url, "--min-ranks", 2, "--ranks", 1]
        nodes.start(*DIGITS, *join, "--seed", seed, "--save-dir", nodes.folder / "run")
    check_refused(nodes, "--seed", "1", "2", *names(nodes))


# ------------------------------------------------------------------------------------- what only the workers can see

MATERIAL = [
    ("dtype of data", {"dtype": "float32"}, {"dtype": "float64"}, ("samples of train", "sample 0")),
    ("dtype of the model", {"buffer": "int32"}, {"buffer": "int64"}, ("int32", "int64")),
    ("order of parameters", {"names": ["left", "right"]}, {"names": ["right", "left"]}, ("left", "right")),
    ("order of data", {}, {"is_reversed": True}, ("samples of train",)),
    ("data length", {"rows": 64}, {"rows": 63}, ("64", "63")),
    ("one changed byte", {}, {"changed": 6}, ("samples of train", "sample 0")),
]


@pytest.mark.parametrize(("one", "other", "says"), of(MATERIAL, "dtype of the model", "one changed byte"))
def test_material(
    nodes: Nodes, one: dict[str, Any], other: dict[str, Any], says: tuple[str, ...]
) -> None:  # fmt: skip
    """The same options and the same source; another data set or model comes of it."""
    each = [
        [*DIFFERING, "--data", write_what(nodes.folder / f"data{i}", **what)] for i, what in enumerate((one, other))
    ]
    nodes.prepare(2, have_imported=True)
    start(nodes, tcp(), *each)
    check_refused(nodes, *says, *(f"rank {rank} on {socket.gethostname()}" for rank in (0, 1)))


@pytest.mark.nightly
def test_one_changed_byte_of_an_image(nodes: Nodes) -> None:
    """A pixel that is darker by 1 of 255."""
    folders = [write_idx(nodes.folder / name, train=20, test=4) for name in ("one", "other")]
    (images,) = folders[1].glob("train-images*")
    content = bytearray(images.read_bytes())
    content[-400] ^= 1
    images.write_bytes(content)
    start(nodes, tcp(), *([*DIGITS, "--data", folder] for folder in folders))
    check_refused(nodes, "of train", *(f"rank {rank} on {socket.gethostname()}" for rank in (0, 1)))


def test_the_same_material_under_another_path_is_no_disagreement(nodes: Nodes) -> None:
    """The twin."""
    shutil.copy(TASK, nodes.folder / "copy.py")
    one = [*DIFFERING, "--data", write_what(nodes.folder / "data0")]
    other = [*DIFFERING, "--task", f"{nodes.folder / 'copy.py'}:Differing"]
    start(nodes, tcp(), one, [*other, "--data", write_what(nodes.folder / "data1")])
    assert [ended.code for ended in nodes.finish()] == [0, 0], nodes.story()


def test_task_source(nodes: Nodes) -> None:
    other = nodes.folder / "copy.py"
    other.write_text(TASK.read_text() + "# one line more\n")
    data = ["--data", write_what(nodes.folder / "data")]
    start(nodes, tcp(), [*DIFFERING, *data], [*DIFFERING, "--task", f"{other}:Differing", *data])
    check_refused(nodes, "file of --task", "copy.py", "differing.py", *names(nodes))


@pytest.mark.nightly
def test_vocabulary(nodes: Nodes) -> None:
    for name, text in (("one", "[PAD]\nthe\n"), ("other", "[PAD]\na\n")):
        (nodes.folder / name).write_text(text)
    start(nodes, tcp(), *([*DIGITS, "--dict", nodes.folder / name] for name in ("one", "other")))
    check_refused(nodes, "file of --vocab-file", *names(nodes))


# ------------------------------------------------------------------------------------------- what is installed there


@pytest.fixture
def elsewhere(nodes: Nodes, stock: Stock) -> Any:
    """`elsewhere(folder)`: a warm process that finds modules in that folder first."""
    started = []

    def start_there(folder: Path) -> Any:
        started.append(stock.start({"PYTHONPATH": f"{folder}:{ROOT}"}))
        return started[-1]

    yield start_there
    nodes.close()
    for process in started:
        process.close()


def test_hetseq_source(nodes: Nodes, elsewhere: Callable[[Path], Any]) -> None:
    shutil.copytree(ROOT / "hetseq", nodes.folder / "copy" / "hetseq", ignore=shutil.ignore_patterns("__pycache__"))
    with (nodes.folder / "copy" / "hetseq" / "data" / "plan.py").open("a") as file:
        file.write("# one line more\n")
    start(nodes, tcp(), DIGITS, DIGITS, process=elsewhere(nodes.folder / "copy"))
    check_refused(nodes, "source of hetseq", "plan.py", *names(nodes))


def test_torch_version(nodes: Nodes, elsewhere: Callable[[Path], Any]) -> None:
    """The second node is told of another torch by the two sources there are: a file of torch's, and pip's record."""
    other = write_other_torch(nodes.folder / "other")
    start(nodes, tcp(), DIGITS, DIGITS, process=elsewhere(other))
    check_refused(nodes, "torch", "9.9.9", torch.__version__.partition("+")[0], *names(nodes))


# ------------------------------------------------------------------------------------------------------- the ranks


def ranks(nodes: Nodes, place: Place, *each: tuple[int, int, int], timeout_s: int = 60) -> None:
    """A node per (world size, first rank, workers)."""
    for world_size, rank, workers in each:
        nodes.start(
            *DIGITS, "--save-dir", nodes.folder / "run", "--join-timeout", timeout_s,
            "--distributed-init-method", place.url, "--distributed-world-size", world_size,
            "--distributed-rank", rank, "--ranks", workers,
        )  # fmt: skip


@pytest.mark.parametrize("where", ["tcp", *nightly("directory")])
def test_world_size(nodes: Nodes, where: str) -> None:
    place = PLACES[where](nodes.folder)
    ranks(nodes, place, (2, 0, 1), (3, 1, 1))
    check_refused(nodes, "world size", "2", "3", *names(nodes))
    assert place.leftovers() == []


@pytest.mark.parametrize("where", ["directory", *nightly("tcp")])
def test_a_rank_claimed_twice(nodes: Nodes, where: str) -> None:
    place = PLACES[where](nodes.folder)
    ranks(nodes, place, (4, 0, 2), (4, 1, 2))
    check_refused(nodes, "rank 1 is claimed twice", "rank 3 is not claimed yet", *names(nodes))
    assert place.leftovers() == []


@pytest.mark.nightly
def test_a_rank_that_nobody_brings_is_named_at_once_and_awaited(nodes: Nodes) -> None:
    """The deadline is that of the node which came first, so it alone has waited for all of it."""
    nodes.prepare(2)
    ranks(nodes, tcp(), (4, 0, 1), (4, 2, 2), timeout_s=10)
    for node in nodes.started:
        assert nodes.wait_until_said(node, "rank 1 is not claimed yet", within_s=PROMISE_S)
    first, second = nodes.finish()
    for ended in (first, second):
        assert ended.code == EXIT_DISAGREE, nodes.story()
        assert ended.seconds <= 10 + PROMISE_S, nodes.story()
        check_message(nodes, ended, "rank 1")
    assert first.seconds >= 10, nodes.story()


@pytest.mark.parametrize(
    ("misplaced", "where"),
    [
        ((2, 1), "tcp"), ((1, 2), "directory"),
        *nightly(((2, 1), "directory"), ((1, 2), "tcp"), ((0, 3), "tcp"), ((0, 3), "directory"), is_many=True),
    ],
)  # fmt: skip
def test_a_rank_beyond_the_world(nodes: Nodes, where: str, misplaced: tuple[int, int]) -> None:
    """The node that was told so ends as after any wrong option, and the others hear why it will not come."""
    rank, workers = misplaced
    place = PLACES[where](nodes.folder)
    ranks(nodes, place, (2, 1 if rank == 0 else 0, 1), (2, rank, workers))
    right, wrong = nodes.finish()
    assert (right.code, wrong.code) == (EXIT_DISAGREE, EXIT_USAGE), nodes.story()
    for ended in (right, wrong):
        check_message(nodes, ended, "rank 2" if workers == 1 else f"ranks {rank}-2", "2 ranks are 0 to 1")
        assert ended.since_last_start <= PROMISE_S, nodes.story()
    check_message(nodes, right, names(nodes)[-1])
    assert place.leftovers() == []


# ------------------------------------------------------------------------------------------- the secret, the runs


@pytest.mark.parametrize("where", ["tcp", *nightly("directory")])
def test_secret(nodes: Nodes, where: str) -> None:
    """Whoever has another secret is a stranger: he is refused, and the head that heard him says so and waits on."""
    place = PLACES[where](nodes.folder)
    timeout = ["--join-timeout", 6]
    start(nodes, place, [*DIGITS, *timeout], [*DIGITS, *timeout], secret=nodes.folder / "another-secret")
    head, stranger = sorted(nodes.finish(), key=lambda ended: ended.seconds, reverse=True)
    assert stranger.code in (EXIT_DISAGREE, EXIT_USAGE), nodes.story()
    assert stranger.since_last_start <= PROMISE_S
    check_message(nodes, stranger, "secret")
    assert head.code == EXIT_DISAGREE, nodes.story()
    # not the --secret-file of the command that it tells others to paste
    assert "different secrets" in head.err or "another secret" in head.err, nodes.story()
    assert place.leftovers() == []
