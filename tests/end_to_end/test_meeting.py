"""What goes wrong before nodes have met, as a user meets it: the cause and what to type, within ten seconds.

A fault that waiting may mend (nobody listens yet, a node is missing) is told while the launcher waits; any other ends
it at once. All nodes are launchers on this machine. Names and directories that mean something else on another host are
in `test_hosts`; that versions, code, options or data differ is told in `test_disagreement`.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hetseq.errors import EXIT_DISAGREE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE
from tests.support.nightly import nightly
from tests.support.nodes import Ended, Node, Nodes
from tests.support.places import PLACES, Place, directory, fresh_name, tcp

pytestmark = pytest.mark.slow

PROMISE_S = 10.0
HERE = socket.gethostname()
DIGITS = shlex.split(
    "--cpu --task mnist --global-batch-size 16 --max-update 2 --optimizer sgd --lr 0.001 --lr-scheduler constant"
    " --disable-validation --no-save --ranks 1"
)


def words(place: Place | str, *, rank: int, world: int = 2, timeout_s: int = 60) -> list[object]:
    """A node of one worker, as 2020 wrote it."""
    url = place if isinstance(place, str) else place.url
    return [
        *DIGITS, "--distributed-init-method", url, "--distributed-world-size", world, "--distributed-rank", rank,
        "--join-timeout", timeout_s,
    ]  # fmt: skip


def joining(place: Place | str, *, ranks: int = 2, timeout_s: int = 60) -> list[object]:
    url = place if isinstance(place, str) else place.url
    return [*DIGITS, "--join", url, "--min-ranks", ranks, "--join-timeout", timeout_s]


def check_end(nodes: Nodes, ended: Ended, code: int, *says: str, within_s: float = PROMISE_S) -> None:
    assert ended.code == code, nodes.story()
    assert "Traceback" not in ended.out + ended.err, nodes.story()
    assert len(ended.reasons) == 1, nodes.story()
    missing = [word for word in says if word not in ended.message]
    assert not missing, f"{missing} not in: {ended.message}\n{nodes.story()}"
    assert ended.since_last_start <= within_s, nodes.story()


def check_start(nodes: Nodes, *started: Node) -> None:
    for ended in nodes.finish(*started):
        assert ended.code == 0, nodes.story()


def stop(nodes: Nodes, node: Node) -> None:
    """What waits is stopped by one signal, at once."""
    node.signal(signal.SIGTERM)
    (ended,) = nodes.finish(node, timeout_s=5)
    assert ended.code == EXIT_INTERRUPTED, nodes.story()
    assert "SIGTERM" in ended.message
    assert "Traceback" not in ended.err


# ------------------------------------------------------------------------------------ 1, 13: the head's address


def test_nobody_listens_at_the_address_of_the_head(nodes: Nodes) -> None:
    place = tcp()
    node = nodes.start(*words(place, rank=1))
    where = place.url.removeprefix("tcp://")
    nodes.wait_until_said(node, HERE, where, "connection refused", "Is it started?", within_s=PROMISE_S)
    line = next(line for line in (node.out + node.err).splitlines() if "Start it with: " in line)
    assert "--distributed-rank 0" in line, "what to type on the head is not what was typed here"
    assert f"--distributed-init-method {place.url}" in line
    head = nodes.start(*words(place, rank=0))
    check_start(nodes, node, head)


def test_nobody_listens_until_the_patience_is_over(nodes: Nodes) -> None:
    nodes.start(*words(tcp(), rank=1, timeout_s=2))
    (ended,) = nodes.finish()
    check_end(nodes, ended, EXIT_FAILED, "connection refused", "gave up after 2 s", "--join-timeout")


def test_a_launcher_that_waits_for_the_head_is_stopped_by_one_signal(nodes: Nodes) -> None:
    node = nodes.start(*words(tcp(), rank=1))
    nodes.wait_until_said(node, "Is it started?")
    stop(nodes, node)


def test_a_name_that_nobody_knows(nodes: Nodes) -> None:
    nodes.start(*words("tcp://no-such-head.invalid:29400", rank=1))
    (ended,) = nodes.finish()
    assert ended.code in (EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE)
    check_end(nodes, ended, ended.code, f"no-such-head.invalid is not known on {HERE}", "IP address")


# ------------------------------------------------------------------------------------------- 2: peers are missing


@pytest.mark.parametrize("where", PLACES)
def test_missing_ranks_are_named_with_what_to_type_there(nodes: Nodes, where: str) -> None:
    place = PLACES[where](nodes.folder)
    head = nodes.start(*words(place, rank=0, world=3))
    nodes.wait_until_said(head, f"1 of 3 ranks are here: {HERE} (1)", "ranks 1-2 are not claimed yet")
    second = nodes.start(*words(place, rank=1, world=3))
    nodes.wait_until_said(head, "2 of 3 ranks", "rank 2 is not claimed yet")
    nodes.wait_until_said(second, "2 of 3 ranks", "rank 2 is not claimed yet")
    for node in (head, second):
        line = [line for line in (node.out + node.err).splitlines() if "rank 2 is not claimed" in line][-1]
        pasted = shlex.split(line.partition("paste there: ")[2])
        assert pasted[pasted.index("--distributed-rank") + 1] == "2"
        assert pasted[pasted.index("--distributed-init-method") + 1] == place.url
        assert "deadline in 01:00" in line or "deadline in 00:5" in line
    third = nodes.start(*words(place, rank=2, world=3))
    check_start(nodes, head, second, third)
    assert place.leftovers() == []


def test_a_missing_node_of_a_join_is_told_with_the_same_line(nodes: Nodes) -> None:
    place = directory(nodes.folder)
    node = nodes.start(*joining(place, ranks=3))
    nodes.wait_until_said(node, "1 of 3 ranks are here", "2 missing", f"--join {place.url}")
    stop(nodes, node)
    assert place.leftovers() == []


def test_a_head_that_nobody_joins_gives_up(nodes: Nodes) -> None:
    place = fresh_name(nodes.folder)
    nodes.start(*words(place, rank=0, timeout_s=2))
    (ended,) = nodes.finish()
    check_end(nodes, ended, EXIT_FAILED, "rank 1")
    assert place.leftovers() == []


def test_a_node_that_leaves_while_others_are_awaited_is_no_loss(nodes: Nodes) -> None:
    place = tcp()
    head, leaver = (nodes.start(*words(place, rank=rank, world=3)) for rank in (0, 1))
    nodes.wait_until_said(head, "2 of 3 ranks")
    stop(nodes, leaver)
    others = [nodes.start(*words(place, rank=rank, world=3)) for rank in (1, 2)]
    check_start(nodes, head, *others)


# ---------------------------------------------------------------------------------------- 3: somebody else's port


@contextmanager
def foreign_program(answer: bytes) -> Iterator[int]:
    """A program that is not HetSeq on a port of this machine: it answers whatever comes with `answer`, or nothing."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, suppress(OSError):
                    connection.settimeout(20)
                    connection.recv(1024)
                    connection.sendall(answer)
                    if not answer:
                        connection.recv(1024)  # until the other end loses patience

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield int(server.getsockname()[1])
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", *nightly(b"")], ids=["http", "silent"])
def test_a_port_that_another_program_uses_is_no_head(nodes: Nodes, answer: bytes) -> None:
    with foreign_program(answer) as port:
        nodes.start(*words(f"tcp://127.0.0.1:{port}", rank=1))
        (ended,) = nodes.finish()
    assert ended.code in (EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE)
    check_end(nodes, ended, ended.code, str(port), f"pid {os.getpid()}", "HetSeq", "another port")


@pytest.mark.parametrize("is_join", [False, True], ids=["given ranks", "join"])
def test_a_head_whose_port_is_taken_names_who_has_it(nodes: Nodes, is_join: bool) -> None:
    with foreign_program(b"SSH-2.0-OpenSSH_9.6\r\n") as port:
        place = f"tcp://127.0.0.1:{port}"
        nodes.start(*(joining(place) if is_join else words(place, rank=0)))
        (ended,) = nodes.finish()
    check_end(nodes, ended, EXIT_USAGE, str(port), f"pid {os.getpid()}", "another port")


# ----------------------------------------------------------------------------------------- 4, 5, 6, 7: the ranks


@pytest.mark.parametrize("where", ["tcp", "directory"])
def test_two_nodes_that_are_rank_zero(nodes: Nodes, where: str) -> None:
    place = PLACES[where](nodes.folder)
    started = [nodes.start(*words(place, rank=0)) for _ in range(2)]
    for ended in nodes.finish():
        pids = [f"pid {node.pid}" for node in started]
        check_end(nodes, ended, EXIT_DISAGREE, "rank 0 is claimed twice", HERE, *pids, "--join", "--distributed-rank")
    assert place.leftovers() == []


def test_a_rank_that_two_nodes_claim_and_one_that_nobody_does(nodes: Nodes) -> None:
    place = directory(nodes.folder)
    for rank in (0, 1, 1):
        nodes.start(*words(place, rank=rank, world=3))
    for ended in nodes.finish():
        check_end(nodes, ended, EXIT_DISAGREE, "rank 1 is claimed twice", HERE)
    assert place.leftovers() == []


def test_two_world_sizes(nodes: Nodes) -> None:
    place = tcp()
    nodes.start(*words(place, rank=0, world=2))
    nodes.start(*words(place, rank=1, world=3))
    for ended in nodes.finish():
        check_end(nodes, ended, EXIT_DISAGREE, "was told world size", " 2", " 3", HERE)


def test_a_rank_beyond_the_world_needs_no_peer_to_be_refused(nodes: Nodes) -> None:
    node = nodes.start(*words(tcp(), rank=2))
    assert nodes.wait_until_said(node, "2 ranks are 0 to 1", within_s=2)
    (ended,) = nodes.finish()
    check_end(nodes, ended, EXIT_USAGE, "--distributed-rank 2", "2 ranks are 0 to 1", within_s=5)


# ------------------------------------------------------------------------------ 8, 9: the directory where they meet


@pytest.mark.fault("FT-16")
@pytest.mark.parametrize("where", ["directory", *nightly("fresh name", "old file")])
def test_a_start_goes_past_what_killed_launchers_have_left(nodes: Nodes, where: str) -> None:
    place = PLACES[where](nodes.folder)
    for rank in (0, 1):
        nodes.start(*words(place, rank=rank, world=3), cold=True)
    nodes.wait_until_said(nodes.started[0], "2 of 3 ranks", within_s=60)
    for node in nodes.started:
        node.signal(signal.SIGKILL)
    nodes.finish()
    assert place.leftovers(), "there is something to go past"
    started = [nodes.start(*words(place, rank=rank)) for rank in (1, 0)]
    for ended in nodes.finish(*started):
        assert ended.code == 0, nodes.story()
        assert ended.since_last_start <= PROMISE_S, nodes.story()
    # a directory that others have made is not this run's to remove
    assert [path for path in map(Path, place.leftovers()) if not path.is_dir() or list(path.iterdir())] == []


def test_a_parent_that_is_missing(nodes: Nodes) -> None:
    path = nodes.folder / "not-mounted" / "meeting"
    for rank in (0, 1):
        nodes.start(*words(f"file://{path}", rank=rank))
    for ended in nodes.finish():
        check_end(nodes, ended, EXIT_USAGE, str(path.parent), "does not exist", HERE, "tcp://HOST:PORT")
    assert not path.parent.exists()


def test_a_place_that_is_no_place(nodes: Nodes) -> None:
    (nodes.folder / "file").write_text("")
    (nodes.folder / "file.hetseq").write_text("")
    nodes.start(*words(f"file://{nodes.folder / 'file'}", rank=0))
    nodes.start(*words(f"file://{nodes.folder / 'file' / 'below'}", rank=0))
    for ended in nodes.finish():
        check_end(nodes, ended, EXIT_USAGE, str(nodes.folder / "file"), "name another path")


# ------------------------------------------------------------------------------- 10, 11: the address of a node


def test_an_interface_that_does_not_exist(nodes: Nodes) -> None:
    nodes.start(*words(tcp(), rank=0), environment={"GLOO_SOCKET_IFNAME": "eth9"})
    (ended,) = nodes.finish()
    check_end(nodes, ended, EXIT_USAGE, "GLOO_SOCKET_IFNAME eth9", HERE, "lo 127.0.0.1", within_s=5)


def test_a_list_in_the_manner_of_nccl_is_explained_and_the_run_goes_on(nodes: Nodes) -> None:
    place = tcp()
    started = [
        nodes.start(*words(place, rank=rank), environment={"GLOO_SOCKET_IFNAME": "^docker0,eth7"}) for rank in (0, 1)
    ]
    check_start(nodes, *started)
    for node in started:
        assert "GLOO_SOCKET_IFNAME ^docker0,eth7" in node.err, nodes.story()
        assert "NCCL" in node.err
        assert "lo (127.0.0.1)" in node.err, "what is used instead: the way to the head"
