"""Two hosts with names, addresses and folders of their own, a cable between them, and a folder that both share.

What launchers on one host cannot show: messages that name both hosts, addresses that are reached from elsewhere, names
that mean something else there, and run directories that nobody else sees.
"""

from __future__ import annotations

import shlex
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetseq.commands.drop import drop
from hetseq.errors import EXIT_DISAGREE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, ConfigError
from hetseq.monitor.metrics import read_rows
from tests.support.hosts import Host, two_hosts
from tests.support.nightly import nightly
from tests.support.nodes import Ended, Node, Nodes, Process, Stock
from tests.support.places import free_port
from tests.support.trials import curve
from tests.unit.tasks.test_mnist_data import write_idx

pytestmark = [pytest.mark.slow, pytest.mark.netns]

DIGITS = shlex.split(
    "--cpu --task mnist --global-batch-size 50 --max-update 6 --optimizer sgd --lr 0.1 --lr-scheduler constant"
    " --dropout 0 --precision fp64 --disable-validation"
)
TOLERANCE = 1e-12


@dataclass
class Lab:
    """The two hosts, a warm process in each, and the folder that each has to itself."""

    hosts: tuple[Host, Host]
    processes: tuple[Process, Process]
    local: Path

    def start(self, nodes: Nodes, place: str, *words: object, gpus: tuple[int, int] = (1, 1)) -> tuple[Node, Node]:
        """Rank zero in labA, the last rank in labB."""
        one, other = (
            self.start_one(nodes, at, place, *words, world=sum(gpus), rank=at * gpus[0], workers=gpus[at])
            for at in (0, 1)
        )
        return one, other

    def start_one(
        self, nodes: Nodes, at: int, place: str, *words: object, world: int = 2, rank: int = 0, workers: int = 1
    ) -> Node:
        meeting = ["--distributed-init-method", place, "--distributed-world-size", world, "--distributed-rank", rank]
        return nodes.start(
            *DIGITS, *meeting, "--ranks", workers, *words, process=self.processes[at]
        )  # fmt: skip

    def listening(self, at: int) -> set[str]:
        """Addresses at which anything listens in that host, IPv4 and IPv6, as the kernel writes them."""
        tables = self.hosts[at].run("cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines()
        rows = [line.split() for line in tables if not line.lstrip().startswith("sl")]
        return {row[1].partition(":")[0] for row in rows if row[3] == "0A"}


@pytest.fixture(scope="module")
def lab(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    with two_hosts(folder) as hosts:
        processes: list[Process] = []
        try:
            for host in hosts:
                processes.append(stock.start({"GLOO_SOCKET_IFNAME": None}, prefix=host.enter))
            yield Lab(hosts, (processes[0], processes[1]), folder / "local")
        finally:
            for process in processes:
                process.close()


@pytest.fixture(scope="module")
def calm(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    nodes = Nodes(stock, tmp_path_factory.mktemp("calm"))
    try:
        nodes.start(*DIGITS, "--no-save", "--save-dir", "run")
        (ended,) = nodes.finish()
        assert ended.code == 0, ended.err
        return nodes.folder / "node0" / "run"
    finally:
        nodes.close()


def read(lab: Lab, at: int, path: Path, folder: Path) -> Path:
    """A folder of that host, copied to where the test can read it; an empty name if it is not there."""
    copy = folder / f"copy-{at}"
    shutil.rmtree(copy, ignore_errors=True)
    lab.hosts[at].run("cp", "-r", str(path), str(copy))
    return copy


def distance(save_dir: Path, calm: Path) -> float:
    mine, right = curve(save_dir), curve(calm)
    assert mine.keys() == right.keys()
    return max(abs(mine[step]["loss"] - right[step]["loss"]) for step in right)


def check_end(nodes: Nodes, ended: Ended, code: int, *says: str) -> None:
    assert ended.code == code, nodes.story()
    assert "Traceback" not in ended.out + ended.err, nodes.story()
    missing = [word for word in says if word not in ended.message]
    assert not missing, f"{missing} not in: {ended.message}\n{nodes.story()}"


# ------------------------------------------------------------------------------------------------- where they meet


@pytest.mark.parametrize("where", ["address", *nightly("directory")])
def test_two_hosts_follow_the_curve_of_one_process(nodes: Nodes, lab: Lab, calm: Path, where: str) -> None:
    place = f"tcp://10.77.0.1:{free_port()}" if where == "address" else f"file://{nodes.folder / 'meeting'}"
    lab.start(nodes, place, "--no-save", "--save-dir", nodes.folder / "run", gpus=(3, 1))
    for ended in nodes.finish():
        check_end(nodes, ended, 0)
    assert distance(nodes.folder / "run", calm) <= TOLERANCE
    assert {row["world_size"] for row in read_rows(nodes.folder / "run" / "metrics.jsonl")} == {4}
    assert not (nodes.folder / "meeting").exists()


def test_a_name_that_is_127_0_1_1_on_its_own_host(nodes: Nodes, lab: Lab, calm: Path) -> None:
    """Debian writes that into /etc/hosts; a head that listened there would be reached by nobody."""
    for at, address in ((0, "127.0.1.1"), (1, "10.77.0.1")):
        hosts = nodes.folder / f"hosts-{at}"
        hosts.write_text(f"127.0.0.1 localhost\n{address} labA\n")
        lab.hosts[at].run("mount", "--bind", str(hosts), "/etc/hosts")
    try:
        # no default route: the first address that is not loopback is taken
        place = f"tcp://labA:{free_port()}"
        one, _ = lab.start(nodes, place, "--no-save", "--save-dir", nodes.folder / "run")
        for ended in nodes.finish():
            check_end(nodes, ended, 0)
        assert one.err.count("labA means 127.0.1.1 on labA") == 1, "said once"
    finally:
        for host in lab.hosts:
            host.run("umount", "/etc/hosts")
    assert distance(nodes.folder / "run", calm) <= TOLERANCE


def test_only_the_interface_between_the_hosts_listens(nodes: Nodes, lab: Lab) -> None:
    place = f"tcp://10.77.0.1:{free_port()}"
    both = lab.start(nodes, place, "--max-update", 100_000, "--no-save", "--save-dir", nodes.folder / "run")
    rows = nodes.folder / "run" / "metrics.jsonl"
    nodes.wait_until(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 3, "three steps")
    assert lab.listening(0) <= {"01004D0A", "0100007F"}
    assert lab.listening(1) <= {"02004D0A", "0100007F"}
    both[0].signal(signal.SIGTERM)
    assert [ended.code for ended in nodes.finish()] == [EXIT_FAILED] * 2, nodes.story()


def test_no_route_to_the_head(nodes: Nodes, lab: Lab) -> None:
    node = lab.start_one(nodes, 1, "tcp://10.99.0.1:29400", "--join-timeout", 2, rank=1)
    nodes.wait_until_said(node, "Node labB cannot reach the head 10.99.0.1:29400", "no route", within_s=10)
    (ended,) = nodes.finish()
    check_end(nodes, ended, EXIT_FAILED, "labB", "no route")


def test_an_address_that_is_another_host_s(nodes: Nodes, lab: Lab) -> None:
    """Rank zero was started on the wrong host."""
    place = f"tcp://10.77.0.1:{free_port()}"
    node = lab.start_one(nodes, 1, place, rank=0)
    (ended,) = nodes.finish(node, timeout_s=20)
    check_end(nodes, ended, EXIT_USAGE, "labB", "10.77.0.1", "10.77.0.2", "--distributed-rank 0")


def test_a_directory_that_each_host_has_to_itself(nodes: Nodes, lab: Lab) -> None:
    """Nobody can know that another node waits elsewhere; but who waits says whom for, and asks whether it is shared."""
    for host in lab.hosts:
        host.run("mkdir", str(lab.local / "meeting"))
    one, other = lab.start(nodes, f"file://{lab.local / 'meeting'}")
    nodes.wait_until_said(one, "1 of 2 ranks are here: labA (1)", "rank 1 is not claimed yet")
    nodes.wait_until_said(other, "1 of 2 ranks are here: labB (1)", "rank 0 is not claimed yet")
    for node in (one, other):
        assert "shared" in node.out + node.err, nodes.story()
        node.signal(signal.SIGTERM)
    assert [ended.code for ended in nodes.finish()] == [EXIT_INTERRUPTED] * 2


# -------------------------------------------------------------------------------------------------- what they say


def test_a_disagreement_names_both_hosts(nodes: Nodes, lab: Lab) -> None:
    place = f"tcp://10.77.0.1:{free_port()}"
    for at, rate in ((0, "0.1"), (1, "0.2")):
        lab.start_one(nodes, at, place, "--lr", rate, rank=at)
    for ended in nodes.finish():
        check_end(nodes, ended, EXIT_DISAGREE, "labA", "labB", "--lr", "0.1", "0.2")
        assert ended.since_last_start <= 5


@pytest.mark.nightly
def test_what_one_host_finds_by_itself_ends_the_other_with_its_words(nodes: Nodes, lab: Lab) -> None:
    place = f"tcp://10.77.0.1:{free_port()}"
    good = write_idx(nodes.folder / "data", train=60, test=4)
    for at, data in ((0, good), (1, nodes.folder / "missing")):
        lab.start_one(nodes, at, place, "--data", data, "--save-dir", nodes.folder / "run", rank=at)
    ends = nodes.finish()
    for ended in ends:
        check_end(nodes, ended, EXIT_USAGE, str(nodes.folder / "missing"))
        assert "labA" not in ended.message
    assert "labB" in ends[0].message, "on the other host"


@pytest.mark.nightly
def test_a_worker_that_is_killed_is_named_with_its_host(nodes: Nodes, lab: Lab) -> None:
    place = f"tcp://10.77.0.1:{free_port()}"
    head, other = lab.start(nodes, place, "--max-update", 100_000, "--no-save", "--save-dir", nodes.folder / "run")
    rows = nodes.folder / "run" / "metrics.jsonl"
    nodes.wait_until(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 3, "three steps")
    (worker,) = other.workers()
    other.signal(signal.SIGKILL, worker)
    nodes.wait_until_said(head, "rank 1 on labB was killed (SIGKILL")
    nodes.wait_until_said(head, "rank 1 on labB is back: 2 ranks continue after step", within_s=30)
    head.signal(signal.SIGTERM)
    for ended in nodes.finish(timeout_s=20):
        check_end(nodes, ended, EXIT_FAILED, "nothing was ever saved")


def test_a_node_is_dropped_by_its_name_and_ends_with_0(nodes: Nodes, lab: Lab) -> None:
    place, run = f"tcp://10.77.0.1:{free_port()}", nodes.folder / "run"
    head, other = lab.start(nodes, place, "--max-update", 100_000, "--no-save", "--save-dir", run)
    rows = run / "metrics.jsonl"
    nodes.wait_until(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 3, "three steps")
    with pytest.raises(ConfigError, match="no rank of this run is on labC: its nodes are labA, labB"):
        drop([str(run), "labC"])
    assert drop([str(run), "labB"]).startswith("labB (rank 1) is asked to leave")
    (dropped,) = nodes.finish(other, timeout_s=30)
    assert dropped.code == 0, nodes.story()
    nodes.wait_until_said(head, "rank 1 on labB has left: rank 0 continues after step")
    head.signal(signal.SIGTERM)
    nodes.finish(head, timeout_s=20)
    assert not list((run / "status").glob("drop-*"))
    with pytest.raises(ConfigError, match="expected a run in progress"):
        drop([str(run), "labA"])


# -------------------------------------------------------------------------------------------- folders of their own


@pytest.mark.parametrize("lost", [0, *nightly(1)], ids=["labA", "labB"])
def test_either_host_s_run_directory_may_be_lost(nodes: Nodes, lab: Lab, calm: Path, lost: int) -> None:
    """Each host keeps a whole run directory, so the other one's is enough to go on from."""
    run = lab.local / f"run-{lost}"
    for steps in (3, 6):
        place = f"tcp://10.77.0.1:{free_port()}"
        ends = nodes.finish(*lab.start(nodes, place, "--max-update", steps, "--save-dir", run, gpus=(2, 1)))
        assert [ended.code for ended in ends] == [0, 0], nodes.story()
        for at, host in enumerate(lab.hosts):
            copy = read(lab, at, run, nodes.folder)
            assert list(copy.glob(f"checkpoints/step-{steps:09}.*/COMMIT.json")), f"{host.name} has no checkpoint"
            assert (copy / "config.yaml").is_file()
        if steps == 3:
            lab.hosts[lost].run("rm", "-r", str(run))
    kept = read(lab, 1 - lost, run, nodes.folder)
    assert distance(kept, calm) <= TOLERANCE
    again = curve(read(lab, lost, run, nodes.folder))
    assert set(again) >= {4, 5, 6}
    assert all(again[step]["loss"] == curve(kept)[step]["loss"] for step in again)


def test_checkpoints_of_two_runs(nodes: Nodes, lab: Lab) -> None:
    """Each host has a folder of that name to itself, with the checkpoint of another run."""
    run = lab.local / "two-runs"
    for at, steps in ((0, 2), (1, 3)):
        nodes.start(*DIGITS, "--save-dir", run, "--max-update", steps, process=lab.processes[at])
    assert [ended.code for ended in nodes.finish()] == [0, 0], nodes.story()
    both = lab.start(nodes, f"tcp://10.77.0.1:{free_port()}", "--save-dir", run, "--max-update", 9)
    for ended in nodes.finish(*both):
        check_end(nodes, ended, EXIT_DISAGREE, "labA", "labB", "step 2", "step 3", str(run))
        assert ended.since_last_start <= 5
    for at, steps in ((0, 2), (1, 3)):
        assert max(curve(read(lab, at, run, nodes.folder))) == steps, "neither was touched"


def test_one_process_with_the_command_of_these_tests_is_what_they_are_compared_with(calm: Path, nodes: Nodes) -> None:
    """The twin: another learning rate is far outside the tolerance."""
    nodes.start(*DIGITS, "--lr", 0.1001, "--no-save", "--save-dir", "run")
    assert nodes.finish()[0].code == 0
    assert distance(nodes.folder / "node0" / "run", calm) > 1e6 * TOLERANCE
