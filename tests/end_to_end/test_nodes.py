"""Runs on several nodes: the curve of one process, however the ranks are spread and wherever the nodes meet.

All nodes are launchers on this machine, with loopback between them; what they compute is float64, so that a wrong
factor, sample or order shows beside the rounding of another summation.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise, product
from pathlib import Path

import pytest

from hetseq import load_run
from hetseq.monitor.metrics import read_rows
from tests.support import bert
from tests.support.commands import ROOT
from tests.support.nightly import nightly
from tests.support.nodes import Node, Nodes, Stock, listening
from tests.support.places import PLACES, Place, directory, tcp
from tests.unit.config.test_golden_commands import arguments, published
from tests.unit.tasks.test_mnist_data import write_idx

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
    return [[*flags, "--ranks", count, "--distributed-rank", rank] for count, rank in zip(spread, first, strict=False)]


def by_join(place: Place, spread: Sequence[int]) -> list[list[object]]:
    """What each node's command has of --join: the same line, but for its number of workers."""
    return [["--join", place.url, "--min-ranks", sum(spread), "--ranks", count] for count in spread]


def each_once(shift: int) -> list[object]:
    """Pairs of a spread and a place: each spread once, in places that differ; the other pairs are nightly."""
    near = [(spread, list(PLACES)[(at + shift) % len(PLACES)]) for at, spread in enumerate(SPREADS)]
    return [*near, *nightly(*(pair for pair in product(SPREADS, PLACES) if pair not in near), is_many=True)]


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


@pytest.mark.parametrize(("spread", "where"), each_once(0))
def test_nodes_with_given_ranks_follow_the_curve_of_one_process(
    nodes: Nodes, calm: list[float], spread: tuple[int, ...], where: str
) -> None:
    place = PLACES[where](nodes.folder)
    for words in with_given_ranks(place, spread):
        nodes.start(*DIGITS, "--no-save", "--save-dir", nodes.folder / "run", *words)
    check_curve(nodes, place, spread, calm)


@pytest.mark.parametrize(("spread", "where"), each_once(1))
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


@pytest.mark.parametrize("where", ["tcp", *nightly("fresh name")])
def test_the_head_of_given_ranks_may_start_last(nodes: Nodes, calm: list[float], where: str) -> None:
    place = PLACES[where](nodes.folder)
    for words in reversed(with_given_ranks(place, (1, 2, 1))):
        nodes.start(*DIGITS, "--no-save", "--save-dir", nodes.folder / "run", *words)
    check_curve(nodes, place, (1, 2, 1), calm)


@pytest.mark.nightly
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
    own = [["--batch-size", 3, "--devices", "cpu,cpu,cpu"], ["--batch-size", 20, "--log-format", "none"]]
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
    assert other.poll() is None
    head.signal(signal.SIGTERM)  # the hub goes with it, so all stop
    ends = nodes.finish()
    assert [ended.code for ended in ends] == [75, 75], nodes.story()
    step = max(row["step"] for row in read_rows(rows))
    for ended in ends:
        assert f"resumes from step {step}" in ended.message
    assert place.leftovers() == []


def begin_endless(nodes: Nodes, spread: Sequence[int], *words: object) -> tuple[list[Node], Path]:
    """Nodes that train for ever, in their third step or later, and the rows that they write."""
    endless = [*DIGITS, "--max-update", 100_000, "--no-epoch-checkpoints", "--save-dir", nodes.folder / "run", *words]
    started = [nodes.start(*endless, *given) for given in with_given_ranks(tcp(), spread)]
    rows = nodes.folder / "run" / "metrics.jsonl"
    nodes.wait_until(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 3, "three steps")
    return started, rows


def stop(nodes: Nodes, head: Node, rows: Path) -> None:
    """End a run, once it has made some steps more; each step has its row."""
    steps = max(row["step"] for row in read_rows(rows))
    nodes.wait_until(lambda: max(row["step"] for row in read_rows(rows)) >= steps + 3, "three steps more")
    head.signal(signal.SIGTERM)
    (ended,) = nodes.finish(head, timeout_s=30)
    assert ended.code == 75, nodes.story()
    assert "Traceback" not in ended.err
    made = [row["step"] for row in read_rows(rows)]
    assert made == list(range(1, len(made) + 1))


def test_a_worker_killed_on_one_node_is_named_and_comes_back(nodes: Nodes) -> None:
    (head, other), rows = begin_endless(nodes, (2, 1))
    (worker,) = other.workers()
    other.signal(signal.SIGKILL, worker)
    # it may be back before the two go on, which is then one line
    nodes.wait_until_said(head, "rank 2 on", "was killed (SIGKILL", "ranks continue after step")
    nodes.wait_until_said(head, "is back: 3 ranks continue", within_s=30)
    stop(nodes, head, rows)
    assert head.err.count("was killed (SIGKILL") == 1, nodes.story()


@pytest.mark.fault("FT-10")
def test_a_node_that_is_asked_to_leave_ends_with_75_and_the_others_go_on(nodes: Nodes) -> None:
    (head, other), rows = begin_endless(nodes, (1, 2))
    other.signal(signal.SIGUSR1)
    (left,) = nodes.finish(other, timeout_s=30)
    assert left.code == 75, nodes.story()
    assert "the others continue" in left.message
    nodes.wait_until_said(head, "rank 1 on", "rank 2 on", "has left", "rank 0 continues after step")
    stop(nodes, head, rows)


@pytest.mark.fault("FT-8")
def test_a_node_whose_launcher_is_killed_is_missed_and_the_others_go_on(nodes: Nodes) -> None:
    (head, other), rows = begin_endless(nodes, (2, 1))
    os.kill(other.pid, signal.SIGKILL)
    nodes.wait_until_said(head, "2 ranks continue after step")
    stop(nodes, head, rows)


@pytest.mark.fault("FT-2")
@pytest.mark.parametrize("spread", [(2, 1, 1)])
def test_without_the_head_every_other_node_saves_what_it_has_and_the_same_commands_go_on(
    nodes: Nodes, spread: tuple[int, ...]
) -> None:
    (head, *others), rows = begin_endless(nodes, spread)
    os.kill(head.pid, signal.SIGKILL)
    for ended in nodes.finish(*others, timeout_s=40):
        assert ended.code == 75, nodes.story()
        assert "resumes from step" in ended.message
        assert "Traceback" not in ended.err
    made = [row["step"] for row in read_rows(rows)]
    assert made == list(range(1, len(made) + 1))
    nodes.forget(head)
    again = [nodes.start(*node.args[: node.args.index("--secret-file")]) for node in (head, *others)]
    nodes.wait_until(lambda: read_rows(rows)[-1]["step"] > made[-1] + 3, "going on", within_s=40)
    assert read_rows(rows)[len(made)]["step"] == made[-1] + 1, "nothing that was trained is lost"
    again[0].signal(signal.SIGTERM)
    assert {ended.code for ended in nodes.finish(*again)} == {75}


@pytest.mark.fault("FT-2")
@pytest.mark.parametrize("spread", [(2, 1, 1)])
def test_in_a_directory_the_head_may_die_and_the_others_go_on_with_another_one(
    nodes: Nodes, spread: tuple[int, ...]
) -> None:
    place, run = directory(nodes.folder), nodes.folder / "run"
    words = [*DIGITS, "--max-update", 100_000, "--no-epoch-checkpoints", "--save-dir", run]
    head_words, *other_words = with_given_ranks(place, spread)
    head = nodes.start(*words, *head_words)
    nodes.wait_until_said(head, "waiting: ")
    others = [nodes.start(*words, *those) for those in other_words]
    rows = run / "metrics.jsonl"
    nodes.wait_until(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 3, "three steps")
    os.kill(head.pid, signal.SIGKILL)

    def world_size() -> int:
        return int(read_rows(rows)[-1]["world_size"])

    nodes.wait_until(lambda: world_size() == sum(spread[1:]), "all the others", within_s=60)
    assert json.loads((run / ".lock").read_text())["pid"] in {node.pid for node in others}, "kept from other runs"
    nodes.forget(head)
    again = nodes.start(*head.args[: head.args.index("--secret-file")])
    nodes.wait_until(lambda: world_size() == sum(spread), "the one that was the head", within_s=60)
    made = [row["step"] for row in read_rows(rows)]
    assert made == list(range(1, len(made) + 1))
    for node in (*others, again):
        assert node.poll() is None, nodes.story()
        node.signal(signal.SIGTERM)
    ends = nodes.finish()
    assert {ended.code for ended in ends} == {75}, nodes.story()
    assert not any("Traceback" in ended.err for ended in ends), nodes.story()
    assert place.leftovers() == []
    report = run / "report.html"
    assert report.stat().st_mtime_ns >= rows.stat().st_mtime_ns, "by those who were left"
    assert "fewer than" in report.read_text()
    assert load_run(run).versions.keys() == set(range(sum(spread)))


@pytest.mark.fault("FT-2")
@pytest.mark.parametrize("losses", nightly(2, 10))
def test_in_a_directory_heads_may_die_in_turn_after_a_worker_of_theirs(nodes: Nodes, losses: int) -> None:
    """Two nodes of one rank; the one that goes on alone is the next head."""
    run = nodes.folder / "run"
    words = [*DIGITS, "--max-update", 100_000, "--no-epoch-checkpoints", "--save-dir", run, "--max-restarts", 100]
    head_words, other_words = with_given_ranks(directory(nodes.folder), (1, 1))
    head = nodes.start(*words, *head_words)
    nodes.wait_until_said(head, "waiting: ")
    other, rows = nodes.start(*words, *other_words), run / "metrics.jsonl"

    def wait_for_world(size: int) -> None:
        def look() -> bool:
            return rows.exists() and [row["world_size"] for row in read_rows(rows)][-1:] == [size]

        nodes.wait_until(look, f"{size} ranks")

    def returns() -> int:
        return sum(node.err.count("is back: 2 ranks continue") for node in (head, other))

    wait_for_world(2)
    for _ in range(losses):
        before, (worker,) = returns(), head.workers()
        head.signal(signal.SIGKILL, worker)
        nodes.wait_until(lambda before=before: returns() > before, "the worker's return")
        os.kill(head.pid, signal.SIGKILL)
        nodes.wait_until_said(other, "this node is the new head", within_s=30)
        wait_for_world(1)
        nodes.forget(head)
        head, other = other, nodes.start(*head.args[: head.args.index("--secret-file")])
        wait_for_world(2)
    made = [row["step"] for row in read_rows(rows)]
    assert made == list(range(1, len(made) + 1))
    for node in (head, other):
        node.signal(signal.SIGTERM)
    assert {ended.code for ended in nodes.finish(head, other, timeout_s=30)} == {75}, nodes.story()


@pytest.mark.nightly
def test_the_head_reports_when_the_node_that_had_made_the_run_directory_is_gone(nodes: Nodes) -> None:
    run, words_by_rank = nodes.folder / "run", with_given_ranks(directory(nodes.folder), (1, 1))
    words = [*DIGITS, "--max-update", 100_000, "--no-epoch-checkpoints", "--save-dir", run]
    head = nodes.start(*words, *words_by_rank[1])  # the first that comes leads; the directory is rank zero's
    nodes.wait_until_said(head, "waiting: ")
    owner = nodes.start(*words, *words_by_rank[0])
    nodes.wait_until(lambda: (run / "metrics.jsonl").exists(), "a step")
    os.kill(owner.pid, signal.SIGKILL)
    nodes.wait_until_said(head, "rank 1 continues after step")
    nodes.forget(owner)
    head.signal(signal.SIGTERM)
    (ended,) = nodes.finish(head, timeout_s=30)
    assert ended.code == 75, nodes.story()
    assert f"report: {run / 'report.html'}" in ended.err
    assert (run / "report.html").stat().st_mtime_ns >= (run / "metrics.jsonl").stat().st_mtime_ns


@pytest.mark.nightly
def test_a_node_that_has_left_comes_back_with_the_same_command(nodes: Nodes) -> None:
    (head, other), rows = begin_endless(nodes, (1, 2))
    other.signal(signal.SIGTERM)
    (left,) = nodes.finish(other, timeout_s=30)
    assert left.code == 75, nodes.story()
    nodes.wait_until_said(head, "rank 0 continues after step")
    again = nodes.start(*other.args[: other.args.index("--secret-file")])
    nodes.wait_until_said(head, "rank 1 on", "rank 2 on", "is back: 3 ranks continue", within_s=40)
    nodes.wait_until_said(again, "the run has begun")
    stop(nodes, head, rows)
    (ended,) = nodes.finish(again, timeout_s=30)
    assert ended.code == 75


def test_a_node_whose_launcher_was_killed_comes_back(nodes: Nodes) -> None:
    (head, other), rows = begin_endless(nodes, (1, 1))
    os.kill(other.pid, signal.SIGKILL)
    nodes.wait_until_said(head, "rank 0 continues after step")
    nodes.start(*other.args[: other.args.index("--secret-file")])
    nodes.wait_until_said(head, "is back: 2 ranks continue", within_s=40)
    stop(nodes, head, rows)


@pytest.mark.fault("FT-18")
def test_nodes_join_a_run_that_has_begun(nodes: Nodes, calm: list[float]) -> None:
    """Beside each other, into new slots; the curve is that of one process."""
    place, run = tcp(), nodes.folder / "run"
    words = [*DIGITS, "--max-update", 100_000, "--no-epoch-checkpoints", "--save-dir", run]
    words += ["--join", place.url, "--min-ranks", 1]
    head = nodes.start(*words)
    rows = run / "metrics.jsonl"
    nodes.wait_until(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 3, "three steps")
    nodes.start(*words, "--ranks", 2)
    nodes.wait_until_said(head, "is new", within_s=40)
    nodes.start(*words)
    nodes.wait_until(lambda: read_rows(rows)[-1]["world_size"] == 4, "all four ranks", within_s=40)
    stop(nodes, head, rows)
    assert {row["world_size"] for row in read_rows(rows)} >= {1, 4}
    assert distance([row["loss"] for row in read_rows(rows)][: len(calm)], calm) < TOLERANCE


def test_a_latecomer_that_fits_nowhere_is_sent_away_and_nobody_else_notices(nodes: Nodes) -> None:
    (head, other), rows = begin_endless(nodes, (1, 1))
    words = other.args[: other.args.index("--secret-file")]
    (twin,) = nodes.finish(nodes.start(*words), timeout_s=30)
    assert twin.code == 1, nodes.story()
    assert "claims rank 1, which trains on" in twin.message
    (stranger,) = nodes.finish(nodes.start(*words, "--lr", "0.7"), timeout_s=30)
    assert stranger.code == 78, nodes.story()
    assert "lr" in stranger.message
    stop(nodes, head, rows)


# ---------------------------------------------------------------------------------------- the published commands


def two_nodes_of_mnist() -> list[tuple[str, str]]:
    """The published pairs: first node, second node."""
    found = [line for line in published() if "--task mnist" in line and "--distributed-world-size 8" in line]
    return list(zip(found[::2], found[1::2], strict=True))


@pytest.mark.parametrize(
    "pair",
    [two_nodes_of_mnist()[0], *nightly(*two_nodes_of_mnist()[1:])],
    ids=["second without save-dir", "job script"],
)
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


@pytest.mark.parametrize("where", ["tcp", *nightly("old file")])
@pytest.mark.parametrize(
    "pair", [two_nodes_of_bert()[0], *nightly(two_nodes_of_bert()[1])], ids=["both with save-dir", "second without"]
)
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
