"""Runs on several nodes: the curve of one process, however the ranks are spread and wherever the nodes meet.

All nodes are launchers on this machine, with loopback between them; what they compute is float64, so that a wrong
factor, sample or order shows beside the rounding of another summation.
"""

from __future__ import annotations

import json
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from hetseq.metrics import read_rows
from tests.support import bert
from tests.support.commands import ROOT
from tests.support.nodes import Nodes, Stock, listening
from tests.support.places import PLACES, Place, directory, tcp
from tests.unit.test_golden_commands import arguments, published
from tests.unit.test_mnist_data import write_idx

pytestmark = pytest.mark.slow

DIGITS = shlex.split(
    "--cpu --task mnist --global-batch-size 50 --max-update 5 --optimizer sgd --lr 0.1 --lr-scheduler constant"
    " --dropout 0 --precision fp64 --disable-validation"
)
TOLERANCE = 1e-12
SHORT = ["--max-update", 4, "--warmup-updates", 0, "--lr", 0.01]
SPREADS = [(3, 1), (1, 2, 1), (4, 4)]


def losses(save_dir: Path) -> list[float]:
    rows = list(read_rows(save_dir / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    return [row["loss"] for row in rows]


def distance(one: list[float], other: list[float]) -> float:
    return max(abs(mine - right) for mine, right in zip(one, other, strict=True))


def with_given_ranks(place: Place, spread: Sequence[int]) -> list[list[object]]:
    """What each node's command has of 2020, world size and first rank."""
    flags: list[object] = ["--distributed-init-method", place.url, "--distributed-world-size", sum(spread)]
    first = accumulate(spread, initial=0)
    return [
        [*flags, "--distributed-gpus", count, "--distributed-rank", rank]
        for count, rank in zip(spread, first, strict=False)
    ]


def by_join(place: Place, spread: Sequence[int]) -> list[list[object]]:
    """What each node's command has of --join: the same line, but for its number of workers."""
    return [["--join", place.url, "--min-ranks", sum(spread), "--distributed-gpus", count] for count in spread]


@pytest.fixture(scope="module")
def calm(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The curve of one process."""
    nodes = Nodes(stock, tmp_path_factory.mktemp("calm"))
    try:
        nodes.start(*DIGITS, "--no-save", "--save-dir", "run")
        (ended,) = nodes.finish()
        assert ended.code == 0, ended.err
        return losses(nodes.folder / "node0" / "run")
    finally:
        nodes.close()


def check_curve(nodes: Nodes, place: Place, spread: Sequence[int], calm: list[float], *words: object) -> None:
    """All nodes end well, one curve was written, it is that of one process, and nothing is left where they met."""
    for ended in nodes.finish():
        assert ended.code == 0, nodes.story()
        assert "Traceback" not in ended.err
    run = nodes.folder / "run"
    assert [row["world_size"] for row in read_rows(run / "metrics.jsonl")] == [sum(spread)] * 5
    assert all(len(row["shares"]) == sum(spread) for row in read_rows(run / "metrics.jsonl"))
    assert distance(losses(run), calm) <= TOLERANCE
    assert place.leftovers() == []


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("spread", SPREADS, ids=str)
def test_nodes_with_given_ranks_follow_the_curve_of_one_process(
    nodes: Nodes, calm: list[float], spread: tuple[int, ...], where: str
) -> None:
    place = PLACES[where](nodes.folder)
    for words in with_given_ranks(place, spread):
        nodes.start(*DIGITS, "--no-save", "--save-dir", nodes.folder / "run", *words)
    check_curve(nodes, place, spread, calm)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("spread", SPREADS, ids=str)
def test_nodes_that_join_follow_the_curve_of_one_process(
    nodes: Nodes, calm: list[float], spread: tuple[int, ...], where: str
) -> None:
    place = PLACES[where](nodes.folder)
    for words in by_join(place, spread):
        nodes.start(*DIGITS, "--no-save", "--save-dir", nodes.folder / "run", *words)
    check_curve(nodes, place, spread, calm)


def test_another_seed_gives_another_curve(nodes: Nodes, calm: list[float]) -> None:
    """The twin of all equalities here."""
    place = tcp()
    for words in with_given_ranks(place, (3, 1)):
        nodes.start(*DIGITS, "--no-save", "--seed", 2, "--save-dir", nodes.folder / "run", *words)
    with pytest.raises(AssertionError, match="1e-12"):
        check_curve(nodes, place, (3, 1), calm)
    assert distance(losses(nodes.folder / "run"), calm) > 1e-3


@pytest.mark.parametrize("where", ["tcp", "fresh name"])
def test_the_head_of_given_ranks_may_start_last(nodes: Nodes, calm: list[float], where: str) -> None:
    place = PLACES[where](nodes.folder)
    for words in reversed(with_given_ranks(place, (1, 2, 1))):
        nodes.start(*DIGITS, "--no-save", "--save-dir", nodes.folder / "run", *words)
    check_curve(nodes, place, (1, 2, 1), calm)


def test_a_second_run_meets_in_the_place_of_the_first(nodes: Nodes, calm: list[float]) -> None:
    place = PLACES["fresh name"](nodes.folder)
    for turn in ("first", "second"):
        started = [
            nodes.start(*DIGITS, "--no-save", "--save-dir", nodes.folder / turn, *words)
            for words in with_given_ranks(place, (1, 1))
        ]
        assert [ended.code for ended in nodes.finish(*started)] == [0, 0], nodes.story()
        assert distance(losses(nodes.folder / turn), calm) <= TOLERANCE
        assert place.leftovers() == []


def test_unequal_nodes_may_say_of_themselves_what_no_other_needs(nodes: Nodes, calm: list[float]) -> None:
    place = tcp()
    own = [["--max-sentences", 3, "--devices", "cpu,cpu,cpu"], ["--max-sentences", 20, "--log-format", "none"]]
    for words, mine in zip(with_given_ranks(place, (3, 1)), own, strict=True):
        nodes.start(*DIGITS, "--no-save", "--save-dir", nodes.folder / "run", *words, *mine)
    check_curve(nodes, place, (3, 1), calm)


def test_the_second_node_needs_no_save_dir(nodes: Nodes, calm: list[float]) -> None:
    place = tcp()
    first, second = with_given_ranks(place, (1, 1))
    nodes.start(*DIGITS, "--save-dir", nodes.folder / "run", *first)
    other = nodes.start(*DIGITS, *second)
    check_curve(nodes, place, (1, 1), calm)
    assert list((nodes.folder / "run" / "checkpoints").glob("step-*/COMMIT.json"))
    assert list(other.folder.iterdir()) == [], "it shares the folder of the first"


def test_both_nodes_end_with_one_reason_and_listen_on_loopback_alone(nodes: Nodes) -> None:
    place = tcp()
    endless = [*DIGITS, "--max-update", 100_000, "--save-dir", nodes.folder / "run"]
    head, other = (nodes.start(*endless, *words) for words in with_given_ranks(place, (1, 2)))
    rows = nodes.folder / "run" / "metrics.jsonl"
    nodes.wait_until(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 3, "three steps")
    for node in (head, other):
        found = listening(node.workers() | {node.pid})
        assert {address for address, _ in found} <= {"127.0.0.1"}, found
    other.signal(signal.SIGTERM)
    ends = nodes.finish()
    assert [ended.code for ended in ends] == [75, 75], nodes.story()
    step = max(row["step"] for row in read_rows(rows))
    for ended in ends:
        assert f"goes on from step {step}" in ended.message
    assert place.leftovers() == []


def test_a_worker_killed_on_one_node_is_named_on_both(nodes: Nodes) -> None:
    place = directory(nodes.folder)
    endless = [*DIGITS, "--max-update", 100_000, "--no-save", "--save-dir", nodes.folder / "run"]
    _, other = (nodes.start(*endless, *words) for words in with_given_ranks(place, (2, 1)))
    rows = nodes.folder / "run" / "metrics.jsonl"
    nodes.wait_until(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 3, "three steps")
    (worker,) = other.workers()
    other.signal(signal.SIGKILL, worker)
    for ended in nodes.finish(timeout_s=20):
        assert ended.code == 1, nodes.story()
        assert ended.err.count(f"rank 2 on {socket.gethostname()} was killed (SIGKILL") == 1, nodes.story()
        assert "Traceback" not in ended.err
    assert place.leftovers() == []


# ---------------------------------------------------------------------------------------- the published commands


def two_nodes_of_mnist() -> list[tuple[str, str]]:
    """The published pairs: first node, second node."""
    found = [line for line in published() if "--task mnist" in line and "--distributed-world-size 8" in line]
    return list(zip(found[::2], found[1::2], strict=True))


@pytest.mark.parametrize("pair", two_nodes_of_mnist(), ids=["second without save-dir", "job script"])
def test_the_published_mnist_commands_of_two_nodes_run(nodes: Nodes, pair: tuple[str, str]) -> None:
    """As written, but for the address, the folder of the data, and --cpu."""
    place, data = tcp(), write_idx(nodes.folder / "data", train=40, test=8)
    for command in pair:
        words = arguments(command.replace("tcp://10.0.0.1:11111", place.url))
        words[words.index("--data") + 1] = str(data)
        # relative, as published: on a cluster the nodes share their working folder
        nodes.start(*words, "--cpu", cwd=nodes.folder)
    for ended in nodes.finish(timeout_s=100):
        assert ended.code == 0, nodes.story()
    rows = [row for row in read_rows(nodes.folder / "mnist_node2gpu4" / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 21)), "40 images are one step an epoch"
    assert {row["world_size"] for row in rows} == {8}
    assert not (nodes.folder / "checkpoints").exists()


def two_nodes_of_bert() -> list[tuple[str, str]]:
    """The published pairs of BERT: first node, second node."""
    found = [line for line in published() if "--task bert" in line and "--distributed-gpus 4" in line]
    return [pair for pair in pairwise(found) if "--distributed-rank 0" in pair[0] and " 4" in pair[1][-2:]]


@pytest.fixture(scope="module")
def bert_alone(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The curve of the published command for one GPU; as on two nodes, a step takes all rows there are."""
    nodes = Nodes(stock, tmp_path_factory.mktemp("bert"))
    try:
        command = next(line for line in published() if "--task bert" in line)
        nodes.start(*of_bert(nodes, command), *SHORT, cwd=nodes.folder)
        (ended,) = nodes.finish(timeout_s=100)
        assert ended.code == 0, ended.err
        rows = read_rows(nodes.folder / "bert_single_gpu" / "metrics.jsonl")
        assert [row["epoch"] for row in rows if "valid_mlm_accuracy" in row] == [1, 2, 3, 4]
        losses = [row["loss"] for row in rows if "loss" in row]
        assert losses[0] - losses[-1] > 0.05, "a wrong gradient would be seen"
        return losses
    finally:
        nodes.close()


def of_bert(nodes: Nodes, command: str, place: Place | None = None) -> list[str]:
    """The words of a published command, with the files that it names."""
    folder = nodes.folder / "preprocessing"
    if not folder.exists():
        folder.mkdir()
        bert.write_folder(folder / "test_128", 60, train="x_training", valid="x_test")
        settings = folder / "uncased_L-12_H-768_A-12"
        settings.mkdir()
        (settings / "vocab.txt").write_text("\n".join(bert.TOKENS) + "\n")
        # two nodes have other random numbers than one process
        rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        (settings / "bert_config.json").write_text(json.dumps({**bert.CONFIG, **rates}))
        (folder / "test_128" / "bert_config.json").unlink()
    if place is not None:
        command = command.replace("tcp://10.0.0.1:11111", place.url).replace("tcp://10.0.0.1:12345", place.url)
    return [*arguments(command.replace("${DIST}", str(nodes.folder))), "--cpu"]


@pytest.mark.parametrize("where", ["tcp", "old file"])
@pytest.mark.parametrize("pair", two_nodes_of_bert()[:2], ids=["both with save-dir", "second without"])
def test_the_published_bert_commands_of_two_nodes_run(
    nodes: Nodes, bert_alone: list[float], pair: tuple[str, str], where: str
) -> None:
    """As written, but for the address, the checkout, --cpu, and for ending after four steps that move something."""
    place = PLACES[where](nodes.folder)
    for command in pair:
        nodes.start(*of_bert(nodes, command, place), *SHORT, cwd=nodes.folder)
    for ended in nodes.finish(timeout_s=100):
        assert ended.code == 0, nodes.story()
    rows = [row for row in read_rows(nodes.folder / "bert_node2gpu4" / "metrics.jsonl") if "loss" in row]
    assert {row["world_size"] for row in rows} == {8}
    assert distance([row["loss"] for row in rows], bert_alone) <= 1e-5, "in float32"


def test_a_published_bert_command_with_another_rate_on_the_second_node(nodes: Nodes) -> None:
    """The twin: what differs is named before anything is read."""
    place = tcp()
    for command, rate in zip(two_nodes_of_bert()[0], ("0.0001", "0.0002"), strict=True):
        nodes.start(*of_bert(nodes, command, place), "--lr", rate, cwd=nodes.folder)
    for ended in nodes.finish():
        assert ended.code == 78, nodes.story()
        assert all(word in ended.message for word in ("--lr:", "0.0001 on", "0.0002 on")), nodes.story()


def test_the_program_of_the_documentation_runs_on_two_nodes(nodes: Nodes, calm: list[float]) -> None:
    place, program = tcp(), (sys.executable, str(ROOT / "hetseq" / "train.py"))
    for words in with_given_ranks(place, (1, 1)):
        shared = [*DIGITS, "--no-save", "--save-dir", nodes.folder / "run"]
        nodes.start(*shared, *words, cold=True, program=program, environment={"PYTHONPATH": None})
    check_curve(nodes, place, (1, 1), calm)
