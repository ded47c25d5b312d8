"""The police of conftest.py: every kind of leak is seen, and a clean test has none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.police import Scene

ROOT = Path(__file__).resolve().parents[3]
IMPATIENT_S = 0.02


def test_a_clean_test_has_no_leaks() -> None:
    scene = Scene.now()
    threading.Thread(target=int).start()
    subprocess.run([sys.executable, "-S", "-c", "pass"], check=True)
    assert scene.leaks() == []


def test_a_thread_that_runs_on_is_named() -> None:
    scene, stop = Scene.now(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="prefetch")
    thread.start()
    assert scene.leaks(patience_s=IMPATIENT_S) == ["thread 'prefetch' still runs"]
    stop.set()
    thread.join()
    assert scene.leaks() == []


def test_a_grandchild_that_runs_on_is_named_and_killed() -> None:
    scene = Scene.now()
    with subprocess.Popen(["sh", "-c", "cat; true"], stdin=subprocess.PIPE) as shell:
        leaks = scene.leaks(patience_s=0.2)
        scene.restore()
    assert [leak.rpartition(": ")[2] for leak in leaks] == ["sh -c cat; true", "cat"]
    assert shell.returncode == -signal.SIGKILL
    assert scene.leaks() == []


@pytest.mark.parametrize("change", [lambda: os.environ.update(HETSEQ_LEAK="1"), lambda: os.environ.pop("PATH")])
def test_a_changed_environment_is_named_and_restored(change: Callable[[], object]) -> None:
    scene = Scene.now()
    change()
    (leak,) = scene.leaks()
    assert leak.startswith("environment variable ")
    scene.restore()
    assert scene.leaks() == []


def test_a_signal_handler_and_a_folder_that_stay_are_named_and_restored(tmp_path: Path) -> None:
    scene = Scene.now()
    signal.signal(signal.SIGTERM, lambda *_: None)
    os.chdir(tmp_path)
    handler, folder = scene.leaks()
    assert "SIGTERM" in handler
    assert str(tmp_path) in folder
    scene.restore()
    assert scene.leaks() == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_shared_memory_that_stays_is_named() -> None:
    scene, path = Scene.now(), Path(f"/dev/shm/hetseq-test-{os.getpid()}")
    path.write_bytes(b"left")
    leaks = scene.leaks(patience_s=IMPATIENT_S)
    path.unlink()
    assert leaks == [f"/dev/shm/{path.name} is left"]
    assert scene.leaks() == []


def test_an_orphan_comes_to_us_and_is_named() -> None:
    scene = Scene.now()
    with subprocess.Popen(["sh", "-c", "exec 3<&0; cat <&3 & exec true"], stdin=subprocess.PIPE) as shell:
        shell.wait()
        leaks = scene.leaks(patience_s=0.1)
        scene.restore()
    assert [leak.rpartition(": ")[2] for leak in leaks] == ["cat"]
    assert scene.leaks() == []


def test_a_process_group_that_stays_is_named_and_destroyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch replaces it and never puts it back
    scene = Scene.now()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert scene.leaks() == ["torch's default process group is initialised"]
    scene.restore()
    assert scene.leaks() == []


# Prints what it finds in /dev/shm, leaves a file there, and prints the mounts that somebody outside would see.
OTHER_RUN = """
import os, sys
from pathlib import Path
from tests.support.police import own_shared_memory
if not own_shared_memory():
    sys.exit(3)
print(os.listdir("/dev/shm"), os.statvfs("/dev/shm").f_blocks)
Path("/dev/shm/hetseq-of-the-other-run").touch()
print(os.listdir("/dev/shm"))
print([line for line in Path("/proc/self/mountinfo").read_text().splitlines() if " shared:" in line])
"""
SHARING = ("unshare", "--mount", "--propagation", "shared")  # as systemd has it; containers often do not


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount")
def test_two_runs_do_not_see_each_others_shared_memory() -> None:
    if subprocess.run([*SHARING, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("mounting is not allowed here")
    path, words = Path(f"/dev/shm/hetseq-test-{os.getpid()}"), [*SHARING, sys.executable, "-c", OTHER_RUN]
    path.touch()
    try:
        other = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
        here = os.listdir("/dev/shm")
    finally:
        path.unlink()
    blocks = os.statvfs("/dev/shm").f_blocks
    assert other.stdout.splitlines() == [f"[] {blocks}", "['hetseq-of-the-other-run']", "[]"], other.stderr
    assert path.name in here
    assert "hetseq-of-the-other-run" not in here
    assert os.readlink("/proc/self/ns/mnt") != os.readlink(f"/proc/{os.getppid()}/ns/mnt"), "and so has this run"
