"""`hetseq ssh` with a stand-in for ssh, which runs the command of a host on this machine, in a home of its own."""

from __future__ import annotations

import os
import shlex
import signal
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import hetseq
from hetseq.cluster.membership.compatibility import source_below
from hetseq.commands.ssh.wheels import pinned
from hetseq.monitor.metrics import read_rows
from tests.support.commands import HETSEQ, ROOT, Finished, run_command, start_command
from tests.support.nightly import nightly
from tests.unit.commands.test_script import program

pytestmark = pytest.mark.slow

SOURCE = Path(hetseq.__file__).parent
RUN = shlex.split("--task mnist --cpu --global-batch-size 50 --disable-validation --save-dir run")
SSH = """
while [[ "$1" == -* ]]; do [ "$1" = -o ] && shift; shift; done
host=$1; shift
[ "$host" = off ] && { echo "ssh: connect to host off port 22: No route to host" >&2; exit 255; }
[ "$host" = odd ] && export GLOO_SOCKET_IFNAME=nowhere0
export HOME=FOLDER/$host
mkdir -p "$HOME"
exec sh -c "$*"
"""


@pytest.fixture
def words(tmp_path: Path) -> Callable[..., list[str]]:
    """The words of the command, from a machine whose own home is tmp_path/home."""
    (tmp_path / "home").mkdir()
    program(tmp_path / "bin" / "ssh", SSH.replace("FOLDER", str(tmp_path)))

    def words_of(hosts: str, *run: str) -> list[str]:
        ssh = ["--ssh", str(tmp_path / "bin" / "ssh"), "--directory", str(tmp_path), "--address", "127.0.0.1"]
        return ["ssh", "--hosts", hosts, *ssh, "--", *RUN, *run]

    return words_of


def environment(folder: Path) -> dict[str, str]:
    return {"HOME": str(folder / "home"), "GLOO_SOCKET_IFNAME": "lo"}


def finish(folder: Path, words: list[str], **more: str) -> Finished:
    return run_command(words, cwd=folder, env={**environment(folder), **more}, program=HETSEQ, timeout_s=90)


def left_running(folder: Path) -> list[str]:
    """Command lines of processes of this test that are still there."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line, state = (path / "cmdline").read_bytes(), (path / "stat").read_text().rpartition(")")[2].split()[0]
            is_ours = os.readlink(path / "cwd") == str(folder)
        except OSError:
            continue
        if is_ours and state != "Z":
            found.append(line.replace(b"\0", b" ").decode())
    return found


@pytest.mark.nightly
def test_two_hosts_run_a_script_together(tmp_path: Path, words: Callable[..., list[str]]) -> None:
    example = ROOT / "docs" / "examples" / "own_loop.py"
    line = words("labA:2,labB:1")
    line = [*line[: line.index("--") + 1], "run", "--cpu", "--save-dir", "run", str(example)]
    done = finish(tmp_path, line)
    assert done.code == 0, done.err
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert [(row["step"], row["world_size"]) for row in rows] == [(step, 3) for step in range(1, 61)]
    assert sum(": loss " in text for text in done.out.splitlines()) == 3


def test_two_hosts_train_together_and_the_second_is_given_the_secret(
    tmp_path: Path, words: Callable[..., list[str]]
) -> None:
    done = finish(tmp_path, words("labA:2,labB:1", "--max-update", "3", "--no-save", "--log-interval", "1"))
    assert done.code == 0, done.err
    rows = list(read_rows(tmp_path / "run" / "metrics.jsonl"))
    assert [(row["step"], row["world_size"]) for row in rows] == [(1, 3), (2, 3), (3, 3)]
    assert "workers: labA 2, labB 1; they meet at tcp://127.0.0.1:" in done.err
    assert "paste there" not in done.err
    assert "waiting: " not in done.err
    assert {line.split("]")[0] for line in done.out.splitlines()} <= {"[labA", "[labB"}
    assert "step 3/3" in done.out
    files = [tmp_path / home / ".hetseq" / "secret" for home in ("home", "labA", "labB")]
    assert len({file.read_text() for file in files}) == 1
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert files[0].read_text().strip() not in done.out + done.err
    assert left_running(tmp_path) == []


def test_a_host_that_is_off_is_named_and_nobody_trains(tmp_path: Path, words: Callable[..., list[str]]) -> None:
    done = finish(tmp_path, words("labA:1,off:1"))
    assert done.code == 1
    assert "off cannot take part: it ended with 255 (ssh: connect to host off port 22: No route to host)" in done.err
    assert "must work without a prompt" in done.err
    assert "?." not in done.err
    assert not (tmp_path / "run").exists()
    assert left_running(tmp_path) == []


def test_a_host_with_another_secret_is_named(tmp_path: Path, words: Callable[..., list[str]]) -> None:
    for home, digit in (("labA", "a"), ("labB", "b")):
        (tmp_path / home / ".hetseq").mkdir(parents=True, mode=0o700)
        file = tmp_path / home / ".hetseq" / "secret"
        file.write_text(digit * 64)
        file.chmod(0o600)
    done = finish(tmp_path, words("labA:1,labB:1"))
    assert done.code == 1
    assert "labA has another secret than this machine" in done.err
    assert "aaaa" not in done.out + done.err


def test_a_node_that_refuses_to_begin_takes_the_others_along(tmp_path: Path, words: Callable[..., list[str]]) -> None:
    done = finish(tmp_path, words("odd:1,labA:1"))
    assert done.code == 2, done.err
    assert "odd ended with 2: the other hosts are stopped" in done.err
    assert left_running(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, *nightly(signal.SIGKILL)])
def test_whatever_ends_the_command_ends_all_hosts(
    tmp_path: Path, words: Callable[..., list[str]], number: signal.Signals
) -> None:
    """Ctrl-C politely, with a checkpoint; and also a kill, which hangs up."""
    endless = words("labA:1,labB:1", "--max-update", "100000", "--no-epoch-checkpoints")
    with start_command(endless, cwd=tmp_path, env=environment(tmp_path), program=HETSEQ) as command:
        command.wait_for_step(tmp_path / "run", 3)
        os.kill(command.pid, number)
        done = command.finish(timeout_s=60)
        assert done.code == (75 if number == signal.SIGINT else -number), done.err
        deadline = time.monotonic() + 60
        while left := left_running(tmp_path):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
    assert list((tmp_path / "run" / "checkpoints").glob("step-*/COMMIT.json"))


def empty_wheels(folder: Path) -> Path:
    """A folder of wheels that pip installs, and that hold nothing: of all packages that HetSeq needs here."""
    folder.mkdir()
    for name, version in pinned().items():
        name, version = name.replace("-", "_"), version.partition("+")[0]
        info = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.mark.nightly
def test_hetseq_and_its_packages_are_installed_on_each_host_once(
    tmp_path: Path, words: Callable[..., list[str]]
) -> None:
    ssh = words("-")[3:5]
    packages = empty_wheels(tmp_path / "packages")
    install = ["ssh", "--install", "--hosts", "labA,off,labB", *ssh, "--packages", str(packages), "--env", "~/env"]
    own_pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    done = finish(tmp_path, install, **own_pip)
    assert done.code == 1
    assert "2 of 3 hosts are ready; failed: off" in done.err
    for host in ("labA", "labB"):
        assert source_below(next((tmp_path / host).glob("env/lib/*/site-packages/hetseq"))) == source_below(SOURCE)
        assert [
            line for line in done.out.splitlines() if line.startswith(f"[{host}] hetseq {hetseq.__version__} (torch")
        ]
        assert list((tmp_path / host).glob(".hetseq*")) == []
    install[3] = "labA,labB"
    again = finish(tmp_path, install, **own_pip)
    assert again.code == 0, again.err
    assert again.out == ""
    assert again.err.count("nothing to do") == 2
    assert again.err.endswith(
        "2 of 2 hosts are ready: hetseq ssh --hosts labA,labB --env '~/env' -- OPTIONS OF hetseq train\n"
    )
