"""Who does not hold the secret: at every port of a run, in every phase of it, and in its files.

A run of two nodes on loopback, 2 + 1 workers. Strangers come while it waits for the second node, while it starts and
while it trains; afterwards its curve has to be that of a run that nobody has disturbed, to the bit.
"""

from __future__ import annotations

import base64
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from hetseq.cluster.rendezvous.channel import ChannelClosed, Listener
from hetseq.cluster.rendezvous.secret import derive_key, load_secret
from hetseq.monitor.metrics import read_rows
from tests.support.nightly import nightly
from tests.support.nodes import Node, Nodes, Stock, living_under
from tests.support.places import PLACES, Place
from tests.support.strangers import (
    Attempt,
    Socket,
    admitted,
    attempts,
    denied,
    forged,
    hello,
    knock,
    overhear,
    sockets,
    unix_listeners,
)
from tests.support.trials import until

pytestmark = pytest.mark.slow

HAZARDS = Path(__file__).parents[1] / "support" / "hazards.py"
STEPS = 60
WORDS = (
    f"--cpu --task {HAZARDS}:Hazard --curriculum 9 --global-batch-size 12 --max-update {STEPS} --optimizer sgd --lr 0.1"
    " --dropout 0 --precision fp64 --disable-validation --balance equal"
).split()
GATE = "30"  # the sample at which a rank waits, in the third step
LOOPBACK, ELSEWHERE = "127.0.0.1", "127.0.0.2"
ATTEMPTS = 1000


class Run:
    """Two nodes that train until the gate, and go on when it is opened."""

    def __init__(self, nodes: Nodes, place: Place, *words: object) -> None:
        self.nodes, self.place = nodes, place
        self.plan = nodes.folder / "plan"
        self.plan.mkdir()
        (self.plan / "plan.json").write_text(f'{{"{GATE}": "wait"}}')
        self.save_dir = nodes.folder / "run"
        self._words = [*WORDS, "--data", self.plan, "--save-dir", self.save_dir, *words]
        self.marker = nodes.folder / "unpickled"

    def start(self, workers: int, **how: object) -> Node:
        words = ["--join", self.place.url, "--min-ranks", 3, "--ranks", workers]
        return self.nodes.start(*self._words, *words, **how)  # type: ignore[arg-type]

    def wait_at_the_gate(self) -> None:
        self.nodes.wait_until(lambda: bool(list(self.plan.glob(f"reached-{GATE}-*"))), "the third step")

    def open_the_gate(self) -> None:
        (self.plan / "open").touch()

    def pids(self) -> frozenset[int]:
        """The launchers, their servers and their workers."""
        launchers = [node.pid for node in self.nodes.started]
        return frozenset(launchers).union(*map(living_under, launchers))

    def strangers(self, seed: int = 0) -> list[Attempt]:
        """A thousand attempts, by people who have also listened to an honest node."""
        secret = load_secret(self.nodes.secret, create=False)
        return attempts(ATTEMPTS, overhear(derive_key(secret, "control"), self.nodes.secret), self.marker, seed=seed)

    def losses(self) -> list[tuple[int, float]]:
        return [(row["step"], row["loss"]) for row in read_rows(self.save_dir / "metrics.jsonl")]


def ports(found: list[Socket]) -> list[int]:
    """Their ports, once it is sure that each listens on the chosen interface alone."""
    assert {one.address for one in found} == {LOOPBACK}, found
    return [one.port for one in found]


def descriptors(pids: frozenset[int]) -> dict[int, int]:
    """How many open files each process has."""
    return {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in pids}


def check_undisturbed(run: Run, calm: list[tuple[int, float]]) -> None:
    for ended in run.nodes.finish():
        assert ended.code == 0, run.nodes.story()
        assert "Traceback" not in ended.err
    assert run.losses() == calm
    assert not run.marker.exists()
    assert run.place.leftovers() == []


@pytest.fixture(scope="module")
def calm(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """The curve of a run that nobody disturbs."""
    nodes = Nodes(stock, tmp_path_factory.mktemp("calm"))
    try:
        run = Run(nodes, PLACES["tcp"](nodes.folder), "--no-save")
        run.open_the_gate()
        run.start(2)
        run.start(1)
        assert [ended.code for ended in nodes.finish()] == [0, 0], nodes.story()
        assert len(run.losses()) == STEPS
        return run.losses()
    finally:
        nodes.close()


def test_another_seed_has_another_curve(nodes: Nodes, calm: list[tuple[int, float]]) -> None:
    """The twin of the equality below."""
    run = Run(nodes, PLACES["tcp"](nodes.folder), "--no-save", "--seed", 2)
    run.open_the_gate()
    run.start(2)
    run.start(1)
    with pytest.raises(AssertionError, match="At index 0 diff"):
        check_undisturbed(run, calm)


@contextmanager
def crowding(run: Run) -> Iterator[list[Attempt]]:
    """Strangers at all ports there are, again and again while the block runs; gives those that have been there.

    They come from another address than the nodes. Who is on a machine of the run may take a rank's place in the moment
    in which the ranks connect to each other; nothing is sent to him, but the start fails.
    """
    is_over, mixture = threading.Event(), run.strangers()
    seen: list[Attempt] = []

    def come() -> None:
        while not is_over.is_set():
            for one in sockets(run.pids()):
                crowd = [Attempt(other.kind, other.first, other.answer, other.leaves) for other in mixture[:200]]
                seen.extend(crowd)
                knock(LOOPBACK, one.port, crowd, source=ELSEWHERE)

    thread = threading.Thread(target=come, name="strangers")
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


def test_each_of_a_thousand_is_counted_as_refused_and_an_honest_one_as_admitted(tmp_path: Path) -> None:
    key, inside = bytes(range(32)), []
    with Listener(LOOPBACK, key=key, secret_file=tmp_path) as listener:

        def accept() -> None:
            with suppress(ChannelClosed):
                while True:
                    inside.append(listener.accept(60))

        thread = threading.Thread(target=accept, name="door")
        thread.start()
        crowd = attempts(ATTEMPTS, overhear(key, tmp_path), tmp_path / "unpickled")
        knock(LOOPBACK, listener.port, crowd)
        until(lambda: sum(listener.refused.values()) == ATTEMPTS, f"{ATTEMPTS} refusals: {listener.refused}")
        assert set(listener.refused) >= {"secret", "foreign", "version", "closed"}
        assert admitted(crowd) == []
        assert inside == []
        first = hello()
        honest = [Attempt("honest", first, forged(first, b"client", key))]
        knock(LOOPBACK, listener.port, honest)
        assert [line.partition(":")[0] for line in admitted(honest)] == ["honest"]
        until(lambda: len(inside) == 1, "the honest one")
    thread.join()
    inside.pop().close()
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.figure("unauthorised joins")
@pytest.mark.parametrize("where", ["tcp", *nightly("directory")])
def test_a_thousand_strangers_at_every_port_change_nothing(
    nodes: Nodes, calm: list[tuple[int, float]], where: str
) -> None:
    run = Run(nodes, PLACES[where](nodes.folder), "--no-save")
    head = run.start(2)
    nodes.wait_until_said(head, "waiting")

    # the control port, and the door at which the nodes try each other
    waiting = ports(sockets(run.pids()))
    assert len(waiting) == 2
    crowds = {port: run.strangers(port) for port in waiting}
    with ThreadPoolExecutor(len(waiting)) as pool:
        list(pool.map(lambda port: knock(LOOPBACK, port, crowds[port]), waiting))
    for port in waiting:
        assert sum(one.is_in for one in crowds[port]) == ATTEMPTS
        assert admitted(crowds[port]) == []
        assert denied(crowds[port]) >= {"wrong secret", "empty secret", "reflection", "replay", "lies"}
    assert sockets(run.pids(), "established") == []  # nobody is still in
    assert "have different secrets" in head.err

    # an honest node finds its way through a crowd, and the ranks connect in the middle of it
    with crowding(run) as crowd:
        follower = run.start(1)
        run.wait_at_the_gate()
    assert admitted(crowd) == []

    # the control port, and gloo's in each rank
    training = ports(sockets(run.pids()))
    assert len(training) == 1 + 3
    inner = [one for one in sockets(run.pids(), "established") if one.port in training]
    before = descriptors(run.pids())
    crowds = {port: run.strangers(port) for port in training}
    with ThreadPoolExecutor(len(training)) as pool:
        list(pool.map(lambda port: knock(LOOPBACK, port, crowds[port]), training))
    for port in training:
        assert admitted(crowds[port]) == []
        # gloo would keep each of them for ever; nobody gets as far as to say something
        assert sum(one.is_in for one in crowds[port]) == (ATTEMPTS if port in waiting else 0)
    assert [one for one in sockets(run.pids(), "established") if one.port in training] == inner
    nodes.wait_until(lambda: descriptors(run.pids()) == before, f"{before} open files again")
    check_no_store(training)
    run.open_the_gate()
    check_undisturbed(run, calm)
    assert all("Traceback" not in node.out for node in (head, follower))


def ask_a_store(port: int) -> bytes:
    store = dist.TCPStore(LOOPBACK, port, None, False, timedelta(seconds=0.3), wait_for_workers=False)
    store.set("key", "value")
    return bytes(store.get("key"))


def check_no_store(port_numbers: list[int]) -> None:
    """No port is a store of torch: its own client can neither write nor read a key."""
    for port in port_numbers:
        with pytest.raises(dist.DistError):
            ask_a_store(port)


def test_a_store_of_torch_would_be_seen() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(LOOPBACK, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_no_store([port])
    assert store.get("key") == b"value"


def test_no_socket_of_a_run_is_open_to_other_users(nodes: Nodes) -> None:
    """An abstract socket has no mode: whoever is on the machine could send a pickle to a server of workers."""
    run = Run(nodes, PLACES["tcp"](nodes.folder), "--no-save")
    run.start(2)
    run.start(1)
    run.wait_at_the_gate()
    names = unix_listeners(run.pids())
    assert names
    for name in names:
        assert name.startswith("/"), names
        assert stat.S_IMODE(os.stat(name).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(Path(name).parent).st_mode) == 0o700
    run.open_the_gate()
    assert [ended.code for ended in nodes.finish()] == [0, 0], nodes.story()


def loose(folder: Path) -> list[str]:
    """What lies in a folder, itself included, that others than its owner may use."""
    wrong = []
    for path in [folder, *folder.rglob("*")]:
        mode = path.lstat().st_mode
        expected = 0o700 if stat.S_ISDIR(mode) else 0o600
        if stat.S_ISLNK(mode) or stat.S_IMODE(mode) != expected:
            wrong.append(f"{path.relative_to(folder.parent)} {stat.filemode(mode)}")
    return wrong


@pytest.mark.figure("files open to others")
@pytest.mark.parametrize("masks", [(0o000, 0o077), *nightly((0o077, 0o000))], ids=str)
def test_files_are_for_their_owner_alone_whatever_the_umask(
    nodes: Nodes, masks: tuple[int, int], record_property: Callable[[str, object], None]
) -> None:
    run = Run(nodes, PLACES["fresh name"](nodes.folder))
    meeting = run.place.path
    assert meeting is not None
    for mask, workers in zip(masks, (2, 1), strict=True):
        previous = os.umask(mask)
        try:
            run.start(workers, cold=True)
        finally:
            os.umask(previous)
    run.wait_at_the_gate()
    assert len(list(meeting.rglob("*"))) > 2
    found = loose(meeting)
    run.open_the_gate()
    assert [ended.code for ended in nodes.finish()] == [0, 0], nodes.story()
    assert list(run.save_dir.glob("checkpoints/*/COMMIT.json"))
    found += loose(run.save_dir) + loose(nodes.secret)
    record_property("files open to others", f"{len(found)} of {len(list(run.save_dir.rglob('*')))} in a run directory")
    assert found == []


def test_a_file_that_others_may_read_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "log").mkdir(mode=0o755)
    (tmp_path / "run" / "status").touch(mode=0o600)
    (tmp_path / "run" / "metrics").touch(mode=0o644)
    assert sorted(loose(tmp_path / "run")) == ["run/log drwxr-xr-x", "run/metrics -rw-r--r--"]


def writings(key: bytes) -> list[bytes]:
    """A key in the ways in which one would print it."""
    return [key, key.hex().encode(), key.hex().upper().encode(), base64.b64encode(key).rstrip(b"="), repr(key).encode()]


@pytest.mark.figure("secrets to be read")
def test_no_key_stands_in_arguments_environments_or_logs(
    nodes: Nodes, record_property: Callable[[str, object], None]
) -> None:
    run = Run(nodes, PLACES["directory"](nodes.folder))
    run.start(2)
    run.start(1)
    run.wait_at_the_gate()
    secret = load_secret(nodes.secret, create=False)
    keys = [secret, *(derive_key(secret, label) for label in ("control", "directory", "ranks"))]
    public = [Path(f"/proc/{pid}/{name}") for pid in run.pids() for name in ("cmdline", "environ")]
    assert len(public) >= 2 * (2 + 3)
    texts = {str(path): path.read_bytes() for path in public}
    run.open_the_gate()
    texts |= {f"{end.code} {number}": (end.out + end.err).encode() for number, end in enumerate(nodes.finish())}
    assert run.place.path is not None
    for folder in (run.save_dir, run.place.path):
        texts |= {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert any("rank-2.txt" in name for name in texts)
    forms = [form for key in keys for form in writings(key)]
    found = [name for name, text in texts.items() if any(form in text for form in forms)]
    record_property("secrets to be read", f"{len(found)} in {len(texts)} texts")
    assert found == []
    assert any(form in nodes.secret.read_bytes() for form in forms)  # the twin
