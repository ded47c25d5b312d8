"""The check of a GPU as a command: broken on purpose in each of its sections, stopped, out of time, and without a GPU.

A copy of the checkout is changed in one place, and the script of that copy runs on the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.nightly import nightly

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
FACTS = "bench/gpu_sections/facts.py"
START = '    """All facts, of which a few must be so."""\n'


@dataclass
class Ended:
    """What the script printed and wrote."""

    code: int
    printed: str
    lines: list[dict[str, Any]]

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """What became of each section."""
        return {section["section"]: section for section in self.lines[-1]["sections"]}


class Checkout:
    """A copy of what the script needs of the checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("hetseq", "tasks", "preprocessing", "bench"):
            shutil.copytree(ROOT / name, folder / name, symlinks=True)  # with compiled modules and their times
        (folder / "docs").mkdir()
        for page in ("guides/running.md", "guides/fault-tolerance.md", "start/gpt.md", "start/bert.md"):
            shutil.copy(ROOT / "docs" / page, folder / "docs")

    def change(self, path: str, old: str, new: str) -> None:
        file = self.folder / path
        source = file.read_text(encoding="utf-8")
        assert source.count(old) == 1, f"{path} has {source.count(old)} places like {old!r}"
        file.write_text(source.replace(old, new), encoding="utf-8")

    def start(self, *words: str) -> subprocess.Popen[str]:
        out = self.folder / "out.jsonl"
        return subprocess.Popen(
            [sys.executable, self.folder / "bench" / "gpu_check.py", "--device", "cpu", "--out", out, *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.folder,
            env={**os.environ, "TMPDIR": str(self.folder)},
        )  # fmt: skip

    def end(self, process: subprocess.Popen[str]) -> Ended:
        printed, _ = process.communicate(timeout=110)
        out = self.folder / "out.jsonl"
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        assert not list(self.folder.glob("hetseq-gpu-check-*")), "it leaves its folder behind"
        return Ended(process.returncode, printed, lines)

    def run(self, *words: str) -> Ended:
        return self.end(self.start(*words))


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    yield Checkout(tmp_path / "checkout")
    shutil.rmtree(tmp_path / "checkout")


#: section: (file, its text, the broken text, words of the cause)
BREAKS = {
    "facts": ("hetseq/__init__.py", '"Controller": "training.controller"', '"Controller": "gone"', "names of hetseq"),
    "errors": ("hetseq/system/device_memory.py", "DefaultCPUAllocator: can't allocate", "no", "exhausted ended with 1"),
    "gloo": ("bench/gpu_sections/gloo.py", "remainder_(1009).mul_(rank +", "remainder_(1009).mul_(2 * rank +", "sums:"),
    # the mean of the ranks' means
    "worlds": (
        "hetseq/training/share.py",
        "[index] / counts[index]",
        "[index] / batch.counts[index]",
        "against one, nats",
    ),
    "kill": (
        "hetseq/launch/launcher.py",
        ">= self._config.distributed.max_restarts",
        ">= 0",
        "before a rank came back",
    ),
    # what has been sent is computed again
    "memory": ("hetseq/training/share.py", "if self.replica.reducer.has_sent:", "if False:", "late ended with 1"),
    "lost_device": ("hetseq/system/gpu.py", '"device-side assert" not in', '"illegal" not in', "hurt ended with 1"),
    "snapshot": (
        "hetseq/checkpoint/snapshot.py",
        "source for _, source in pairs",
        "source + 1 for _, source in pairs",
        "states: 0 of 3",
    ),
    "resume": (
        "hetseq/checkpoint/memory_recovery.py",
        "return whole_states(",
        "return [] and whole_states(",
        "from memory: no",
    ),
    "precision": (
        "tasks/bert/packing.py",
        "[row] + column)",
        "[row] + column - (column > 1))",
        "padded against packed",
    ),
    "speed": (
        "bench/bert_gpu.py",
        "    rows: list[",
        "    raise SystemExit('no device')\n    rows: list[",
        "no device",
    ),
    "overhead": ("bench/step.py", "    arguments = parse()\n", "    return\n    arguments = parse()\n", "step.py"),
    "exchange": ("bench/gpu_sections/exchange.py", "fill_(rank + 1)", "fill_(rank + 2)", "expected right sums"),
    "compiled": ("hetseq/training/compile.py", '= "inductor"', '= "none"', "compiled ended with 1"),
    # the mean of the ranks' means
    "lora": (
        "hetseq/training/share.py",
        "[index] / counts[index]",
        "[index] / batch.counts[index]",
        "both against alone, nats",
    ),
    # an owner counts its own gradient twice and the other one not at all
    "shard": (
        "hetseq/comm/slices.py",
        "torch.add(terms[0], terms[1], out=total)",
        "torch.add(terms[0], terms[0], out=total)",
        "replicas against owners, nats",
    ),
    "offload": (
        "hetseq/parallel/activation_offload.py",
        "tensor = self._waiting(arriving)",
        "tensor = self._waiting(arriving) + 1",
        "horizon 2: the gradients differ",
    ),
    "fake": ("hetseq/system/device_memory.py", "HIP error: out of memory", "nothing", "failed device"),
}


@pytest.mark.parametrize("section", nightly(*BREAKS))
def test_a_section_whose_ground_is_broken_fails_by_name_with_its_cause_and_the_others_run(
    checkout: Checkout, section: str
) -> None:
    path, old, new, cause = BREAKS[section]
    checkout.change(path, old, new)
    other = "nccl" if section == "facts" else "facts"
    ended = checkout.run("--only", section, other)
    told = ended.sections[section]
    assert (ended.code, told["result"]) == (1, "failed"), told
    assert cause in told["cause"]
    assert "\n" not in told["cause"]
    assert ended.sections[other]["result"] == ("skipped" if other == "nccl" else "passed")
    row = next(line for line in ended.printed.splitlines() if line.startswith(f"| {section} "))
    assert "| failed" in row


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("    import os, signal; os.kill(os.getpid(), signal.SIGSEGV)\n", "its process was ended by SIGSEGV"),
        *nightly(
            ("    import subprocess; subprocess.Popen(['sleep', '99'], start_new_session=True)\n",
             "it left processes behind"),
            ("    import os; os._exit(0)\n", "its process ended with 0"),
            ("    raise ValueError('one\\ntwo')\n", "ValueError: one two"),
            ("    place.begin('a nap')\n    import time; time.sleep(60)\n", "it did not end within 4 s, in: a nap"),
            is_many=True,
        ),
    ],
)  # fmt: skip
def test_a_section_that_crashes_hangs_or_leaves_processes_behind_fails_and_the_next_one_runs(
    checkout: Checkout, code: str, cause: str
) -> None:
    checkout.change(FACTS, START, START + code)
    if "a nap" in code:  # the others end by themselves, and have the time that a busy machine needs
        checkout.change("bench/gpu_check.py", 'Section("facts", 20', 'Section("facts", 4')
    ended = checkout.run("--only", "facts", "nccl")
    assert (ended.code, ended.sections["facts"]["result"]) == (1, "failed")
    assert ended.sections["facts"]["cause"].startswith(cause)
    assert ended.sections["nccl"]["result"] == "skipped"
    assert processes_of(checkout) == []


@pytest.mark.nightly
def test_a_budget_is_kept_with_a_whole_table_and_whole_lines(checkout: Checkout) -> None:
    checkout.change("bench/gpu_check.py", 'Section("facts", 20', 'Section("facts", 10')
    began_s = time.monotonic()
    ended = checkout.run("--budget", "18")  # in which no other section fits
    assert time.monotonic() - began_s < 18 + 5
    assert ended.code == 0
    sections = ended.sections
    assert sections["facts"]["result"] == "passed"
    assert "of the budget are left" in sections["worlds"]["cause"]
    assert [line["section"]["section"] for line in ended.lines[1:-1]] == list(sections)
    assert len([line for line in ended.printed.splitlines() if line.startswith("| ")]) == 2 + len(sections)
    counted = [sum(section["result"] == what for section in sections.values()) for what in ("passed", "skipped")]
    assert f"{counted[0]} sections passed, 0 failed, {counted[1]} skipped" in ended.printed


@pytest.mark.nightly
def test_a_stopped_check_ends_its_runs_and_still_shows_what_it_found(checkout: Checkout) -> None:
    process = checkout.start("--only", "facts", "kill")
    deadline_s = time.monotonic() + 60
    while not any("gpu_sections/tasks.py" in words and "hurt" in words for words in processes_of(checkout)):
        assert time.monotonic() < deadline_s, "the run of the section never began"
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    ended = checkout.end(process)
    assert (ended.code, ended.lines[-1]["is_stopped"]) == (130, True)
    assert list(ended.sections) == ["facts"]
    assert "| facts " in ended.printed
    assert processes_of(checkout) == []


def test_without_a_gpu_it_says_what_can_be_checked(checkout: Checkout) -> None:
    ended = checkout.run("--device", "cuda:7")
    assert ended.code == 2
    assert ended.lines == []
    assert ended.printed.startswith("gpu_check.py: ")
    assert "--device cpu checks what needs none" in ended.printed or "torch sees" in ended.printed


def processes_of(checkout: Checkout) -> list[str]:
    """The command lines of living processes that name the copy, or came out of the script."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            is_ours = (
                f"PWD={checkout.folder}".encode() in (path / "environ").read_bytes() or str(checkout.folder) in words
            )
        except OSError:
            continue
        if is_ours and words:
            found.append(words)
    return found
