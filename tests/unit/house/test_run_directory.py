"""Run directories that cannot be used are refused in words, and ours are kept apart, private and recognisable."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetseq import run_directory
from hetseq.errors import RunDirectoryError
from hetseq.run_directory import MARKER, RunDirectory, StatusFile, check_unused, json_line

HOLD_THE_LOCK = """
import sys
from pathlib import Path
from hetseq.run_directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Starts processes that hold the lock of a run directory; none of them outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def hold(path: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD_THE_LOCK, str(path)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(run_directory.__file__).parents[1],
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def refusal(path: Path) -> str:
    """What `prepare` says against `path`."""
    with pytest.raises(RunDirectoryError) as caught:
        RunDirectory.prepare(path, config_yaml="seed: 1\n")
    assert str(path) in str(caught.value)
    return str(caught.value)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_new_directory_is_private_and_complete(tmp_path: Path) -> None:
    directory = RunDirectory.prepare(tmp_path / "a" / "b", config_yaml="seed: 1\n")
    folders = (directory.path, directory.checkpoints, directory.logs, directory.status, directory.tensorboard)
    assert [mode(folder) for folder in folders] == [0o700] * 5
    assert mode(directory.config_file) == 0o600
    assert directory.config_file.read_text().startswith(MARKER)
    assert directory.config_file.read_text().endswith("\nseed: 1\n")
    assert sorted(os.listdir(directory.path)) == [".lock", "checkpoints", "config.yaml", "log", "status", "tensorboard"]


def test_an_existing_directory_keeps_its_mode_and_its_other_files(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir(mode=0o755)
    (root / "slurm-1.out").write_text("hello")
    (root / "log").mkdir()  # an empty folder is nobody's work
    RunDirectory.prepare(root, config_yaml="")
    assert mode(root) == 0o755
    assert (root / "slurm-1.out").read_text() == "hello"


def test_a_second_start_keeps_the_run_id_and_takes_the_new_configuration(tmp_path: Path) -> None:
    first = RunDirectory.prepare(tmp_path / "run", config_yaml=MARKER + " of some form\nseed: 1\n")
    run_id = first.run_id
    second = RunDirectory.prepare(tmp_path / "run", config_yaml="seed: 2\n")
    assert len(run_id) == 16
    assert second.run_id == run_id
    assert second.config_file.read_text().splitlines()[1:] == ["seed: 1"]  # this start may still be refused
    with second.lock():
        second.adopt_config()
    assert second.run_id == run_id
    assert second.config_file.read_text().splitlines()[1:] == ["seed: 2"]
    assert RunDirectory.prepare(tmp_path / "other", config_yaml="").run_id != run_id


def test_an_unprepared_directory_has_no_run_id(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no run id"):
        _ = RunDirectory(tmp_path).run_id


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunDirectory.prepare("run", config_yaml="").path == tmp_path / "run"


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    assert "is a file: choose a directory" in refusal(tmp_path / "run")


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "one of the parents in this path is a file" in refusal(tmp_path / "file" / "run")


def test_a_broken_link(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    assert "broken link" in refusal(tmp_path / "run")


def test_a_parent_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "makedirs", failing(errno.EACCES))
    said = refusal(tmp_path / "a" / "b")
    assert f"it would have to be made in {tmp_path}" in said
    assert "you may not write there" in said
    assert "owner" in said
    assert "mode" in said


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "you may not write there"),
        (errno.EROFS, "its file system is read-only"),
        (errno.ENOSPC, "no space is left"),
        (errno.EDQUOT, "your disk quota is used up"),
        (errno.EIO, "its disk or network mount fails"),
        (errno.ENOLINK, os.strerror(errno.ENOLINK)),
    ],
)
@pytest.mark.parametrize("call", ["open", "write", "fsync"])
def test_a_probe_that_fails_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, words: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(run_directory.os, call, failing(number))
        said = refusal(tmp_path)
    assert words in said
    assert "Please " in said
    assert os.listdir(tmp_path) == []  # the probe is gone
    RunDirectory.prepare(tmp_path, config_yaml="")  # the twin: without the fault it is accepted


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
def test_a_full_disk(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this container may not mount")
    try:
        (tmp_path / "ballast").write_bytes(bytes(65536))
        assert "no space is left on its file system" in refusal(tmp_path)
        assert os.listdir(tmp_path) == ["ballast"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_the_directory_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.chown(tmp_path / "run", 54321, 54321)
    assert "belongs to user id 54321, not to you" in refusal(tmp_path / "run")


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "checkpoints/model.bin", "log/rank-0.txt", "status"])
def test_files_of_somebody_else_under_our_names(tmp_path: Path, name: str) -> None:
    foreign = tmp_path / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("mine\n")
    assert "files of another program would be overwritten" in refusal(tmp_path)
    assert foreign.read_text() == "mine\n"
    assert os.listdir(tmp_path) == [name.split("/")[0]]


def test_a_lock_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("mine\n")
    assert "a .lock that is not HetSeq's" in refusal(tmp_path)
    assert (tmp_path / ".lock").read_text() == "mine\n"


def test_checkpoints_of_2020_are_refused_in_words_unless_the_run_begins_anew(tmp_path: Path) -> None:
    for name in ("checkpoint1.pt", "checkpoint_best.pt", "checkpoint_last.pt", "checkpoint2.pt"):
        (tmp_path / name).write_bytes(b"\x80\x02")
    with pytest.raises(RunDirectoryError) as caught:
        check_unused(tmp_path, begins_anew=False)
    said = str(caught.value)
    assert "checkpoint1.pt, checkpoint2.pt, checkpoint_best.pt and 1 more" in said
    assert "pickles" in said
    assert "Choose another --save-dir, or begin anew beside them with --resume none" in said
    check_unused(tmp_path, begins_anew=True)
    RunDirectory.prepare(tmp_path, config_yaml="")  # a folder of 2020 is not that of another program
    check_unused(tmp_path, begins_anew=False)  # from now on the run resumes from its own checkpoints
    assert len(list(tmp_path.glob("checkpoint*.pt"))) == 4


CHECKOUT = (".git/HEAD", "README.md", "docs/index.md", "src/model.py", "tests/test_model.py")


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (CHECKOUT, ".git/, README.md, docs/ and 2 more"),
        ((".git/HEAD",), ".git/"),
        (("train-images.idx3-ubyte",), "train-images.idx3-ubyte"),
        (("slurm-1.out", "thesis.tex"), "thesis.tex"),
        (("data/part-0.bin",), "data/"),
        ((".bashrc",), ".bashrc"),
    ],
)
def test_a_folder_with_another_purpose_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], shown: str
) -> None:
    write_files(tmp_path, names)
    before = sorted(tmp_path.rglob("*"))
    assert f"is no run directory, and holds {shown}: a run needs a folder of its own. Choose another" in refusal(
        tmp_path
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunDirectoryError, match=f"--save-dir {tmp_path} is no run .* such as {tmp_path}/runs/first"):
        check_unused(".", begins_anew=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "names",
    [
        ("slurm-4711.out", "slurm-4711_3.err", "digits.o123", "digits.e123", "digits.po123", "digits.pe123"),
        ("123.server.OU", "123.server.ER", "lsf.o12", "job.log", "nohup.out", "core.712"),
        ("job.sh", "job.sbatch", "job.slurm", "job.pbs", "job.sub", "run.yaml"),
        (".nfs000000001", ".snapshot/hourly/old.txt", "lost+found/x", ".DS_Store"),
        ("log/slurm-1.out", "logs/anything.txt", "data/", "checkpoints/"),
        (".probe-12", ".mark-34", ".config.yaml.56"),  # of a launcher that makes the directory right now
    ],
)
def test_what_queues_and_file_systems_leave_is_no_other_purpose(tmp_path: Path, names: tuple[str, ...]) -> None:
    write_files(tmp_path, names)
    check_unused(tmp_path, begins_anew=False)
    RunDirectory.prepare(tmp_path, config_yaml="")
    assert all((tmp_path / name).exists() for name in names)


def test_a_run_directory_may_hold_other_files_later(tmp_path: Path) -> None:
    RunDirectory.prepare(tmp_path, config_yaml="")
    write_files(tmp_path, CHECKOUT)
    check_unused(tmp_path, begins_anew=False)
    RunDirectory.prepare(tmp_path, config_yaml="")


def write_files(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        path = folder / name
        if name.endswith("/"):
            path.mkdir()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("theirs\n")


def test_a_checkpoint_of_2020_in_a_directory_of_ours_is_just_a_file(tmp_path: Path) -> None:
    RunDirectory.prepare(tmp_path, config_yaml="")
    (tmp_path / "checkpoint_old.pt").write_bytes(b"")
    RunDirectory.prepare(tmp_path, config_yaml="")


def test_two_runs_on_one_directory(tmp_path: Path, holder: Callable[[Path], subprocess.Popen[str]]) -> None:
    directory = RunDirectory.prepare(tmp_path, config_yaml="seed: 1\n")
    before = directory.config_file.read_bytes()
    first = holder(tmp_path)
    with pytest.raises(RunDirectoryError, match=f"in use by another run .pid {first.pid} on {os.uname().nodename}, "):
        directory.lock().__enter__()
    assert "in use by another run" in refusal(tmp_path)
    assert directory.config_file.read_bytes() == before  # the refused run changed nothing
    first.send_signal(signal.SIGKILL)
    first.wait()
    with directory.lock():
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
        assert mode(tmp_path / ".lock") == 0o600
    assert (tmp_path / ".lock").read_text() == ""


def test_two_runs_that_prepare_in_the_same_moment(tmp_path: Path) -> None:
    first = RunDirectory.prepare(tmp_path, config_yaml="seed: 1\n")
    second = RunDirectory.prepare(tmp_path, config_yaml="seed: 2\n")
    with second.lock():
        second.adopt_config()
    with pytest.raises(RunDirectoryError, match="taken by another run in the same moment"):
        first.lock().__enter__()
    assert first.config_file.read_text().splitlines()[1:] == ["seed: 2"]


def test_the_lock_is_freed_by_an_exception(tmp_path: Path) -> None:
    directory = RunDirectory.prepare(tmp_path, config_yaml="")
    with pytest.raises(ZeroDivisionError), directory.lock():
        _ = 1 / 0
    with directory.lock():
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    directory = RunDirectory.prepare(tmp_path, config_yaml="")
    monkeypatch.setattr(run_directory.fcntl, "flock", failing(number))
    with directory.lock():
        assert "make sure yourself that no other run uses this directory" in caplog.text


def test_a_status_is_replaced_at_most_once_a_second(tmp_path: Path) -> None:
    status = StatusFile(tmp_path / "rank-0.json")

    def step() -> int:
        return int(json.loads(status.path.read_text())["step"])

    status.write(100.0, step=1, share=0.5)
    status.write(100.5, step=2)
    assert step() == 1
    status.write(100.6, force=True, step=3)
    assert step() == 3
    status.write(101.5, step=4)
    assert step() == 3  # the forced one counts, too
    status.write(101.7, step=5)
    assert step() == 5
    assert mode(status.path) == 0o600
    assert os.listdir(tmp_path) == ["rank-0.json"]


def test_a_status_that_cannot_be_written_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    status = StatusFile(tmp_path / "gone" / "rank-0.json")
    with caplog.at_level(logging.WARNING):
        status.write(1.0, step=1)
        status.write(3.0, step=2)
    assert len(caplog.records) == 1
    (tmp_path / "gone").mkdir()
    status.write(5.0, step=3)
    assert json.loads(status.path.read_text()) == {"step": 3}


def test_a_status_that_fails_half_way_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = StatusFile(tmp_path / "rank-0.json")
    status.write(1.0, step=1)
    with monkeypatch.context() as patch:
        patch.setattr(run_directory.os, "write", failing(errno.ENOSPC))
        status.write(3.0, step=2)
    assert json.loads(status.path.read_text()) == {"step": 1}
    assert os.listdir(tmp_path) == ["rank-0.json"]


def test_json_lines_hold_no_nan_and_every_digit() -> None:
    row = {
        "a": float("nan"),
        "b": [float("inf"), -float("inf")],
        "c": {1: 0.1 + 0.2},
        "d": (True, None),
        "e": Path("x"),
    }
    line = json_line(row)
    assert line == b'{"a": null, "b": [null, null], "c": {"1": 0.30000000000000004}, "d": [true, null], "e": "x"}\n'


def test_json_lines_take_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    row = {"a": numpy.float64("nan"), "b": numpy.float32(0.5), "c": numpy.arange(3), "d": numpy.bool_(True)}
    assert json.loads(json_line(row)) == {"a": None, "b": 0.5, "c": [0, 1, 2], "d": True}


def test_the_module_does_not_import_torch() -> None:
    modules = "hetseq.run_directory, hetseq.monitor.metrics"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    root = Path(run_directory.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
