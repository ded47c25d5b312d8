"""The check of a GPU without its processes: judging a section, skipping one, and the names that sections may use."""

from __future__ import annotations

import ast
import importlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
BENCH = ROOT / "bench"
SOURCES = [BENCH / "gpu_check.py", *sorted((BENCH / "gpu_sections").glob("*.py"))]
#: besides `hetseq` itself: named in the manual, and to stay
DOCUMENTED = ("hetseq.checkpoint",)
GOOD = {"check": {"name": "sums", "figure": "4", "expected": "4", "passed": True}}
BAD = {"check": {"name": "bits", "figure": "2 versions", "expected": "1 version", "passed": False}}
OVER = {"is_over": True}


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, which finds the others as it does when Python runs it."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("gpu_check")


# How a section is judged.


@pytest.mark.parametrize(
    ("code", "diary", "left", "result", "cause"),
    [
        (0, [GOOD, OVER], [], "passed", ""),
        (0, [GOOD, BAD, GOOD, OVER], [], "failed", "bits: 2 versions, expected 1 version"),
        (1, [GOOD, {"error": "RunFailed: it ended with 1"}], [], "failed", "RunFailed: it ended with 1"),
        (None, [{"doing": "sums"}, {"doing": "a kill"}], [], "failed", "it did not end within 7 s, in: a kill"),
        (-11, [GOOD, {"doing": "sums"}], [], "failed", "its process was ended by SIGSEGV, in: sums"),
        (3, [], [], "failed", "its process ended with 3"),
        (0, [GOOD], [], "failed", "its process ended with 0"),  # it never said that it was over
        (0, [OVER], [], "failed", "it checked nothing"),
        (0, [GOOD, OVER], ["12 sleep 99"], "failed", "it left processes behind: 12 sleep 99"),
        (0, [{"skipped": "needs a GPU"}, OVER], [], "skipped", "needs a GPU"),
        (0, [GOOD, {"not_built": "NCCL"}, OVER], [], "skipped", "not built: NCCL"),
        (0, [BAD, {"not_built": "NCCL"}, OVER], [], "failed", "bits: 2 versions, expected 1 version"),
        (1, [BAD, {"error": "RunFailed: later"}], [], "failed", "bits: 2 versions, expected 1 version"),
    ],
)
def test_a_section_is_judged_by_what_it_wrote_and_how_it_ended(
    gpu_check: Any, code: int | None, diary: list[Any], left: list[str], result: str, cause: str
) -> None:
    judged = gpu_check.judge(gpu_check.Section("gloo", 7, ""), code, diary, left)
    assert (judged.result, judged.cause) == (result, cause)
    assert len(judged.checks) == sum("check" in entry for entry in diary)


def test_a_cause_is_one_line_that_ends(gpu_check: Any) -> None:
    section = gpu_check.Section("gloo", 7, "")
    judged = gpu_check.judge(section, 1, [{"error": "first\n  second\n" + "x" * 500}], [])
    assert judged.cause.startswith("first second xxx")
    assert len(judged.cause) == 300


def test_a_table_shows_the_cause_of_a_failure_and_the_last_figures_of_a_success(gpu_check: Any) -> None:
    section = gpu_check.Section("gloo", 7, "")
    good, bad = (gpu_check.judge(section, 0, [entry, OVER], []) for entry in (GOOD, BAD))
    rows = [line for line in gpu_check.report([good, bad]).splitlines() if line.startswith("| gloo")]
    assert "passed" in rows[0]
    assert "sums: 4" in rows[0]
    assert "failed" in rows[1]
    assert rows[1].endswith("| 1 version |")


def test_a_value_beyond_its_limit_and_one_that_is_no_number_fail(gpu_check: Any) -> None:
    within = importlib.import_module("gpu_sections.section").within
    assert within("losses", 1e-11, 1e-10).passed
    assert not within("losses", 2e-10, 1e-10).passed
    assert not within("losses", float("nan"), 1e-10).passed


# Skipped sections and refused options.


def results_of(gpu_check: Any, *sections: Any, left_s: float = 100.0, packages: Path | None = None) -> list[Any]:
    arguments = SimpleNamespace(only=[section.name for section in sections], packages=packages)
    return list(gpu_check.run_all(sections, arguments, time.monotonic() + left_s))


def test_a_section_that_does_not_fit_into_the_budget_is_skipped_and_a_shorter_one_after_it_is_not(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(
        gpu_check,
        "run_section",
        lambda section, *_: started.append(section.name) or gpu_check.Result(section.name, "x"),
    )
    sections = [gpu_check.Section("worlds", 60, ""), gpu_check.Section("gloo", 20, "")]
    results = results_of(gpu_check, *sections, left_s=30.5)
    assert started == ["gloo"]
    assert results[0].cause == "it may take 60 s, and 30 s of the budget are left"


def test_a_section_without_its_packages_is_skipped_by_their_names(gpu_check: Any, tmp_path: Path) -> None:
    section = gpu_check.Section("speed", 1, "", ("json", "a_package_of_nobody"))
    (result,) = results_of(gpu_check, section)
    assert (result.result, result.cause) == ("skipped", "needs the packages a_package_of_nobody")
    (tmp_path / "a_package_of_nobody").mkdir()
    assert gpu_check.is_there("a_package_of_nobody", tmp_path)


def test_what_is_not_built_says_so_and_is_not_started(gpu_check: Any) -> None:
    (result,) = results_of(gpu_check, gpu_check.Section("nothing", 99999, "", not_built="flight"))
    assert (result.result, result.cause) == ("skipped", "not built: flight")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "tpu"], "expected cuda, cuda:N or cpu"),
        (["--device", "cpu:1"], "expected cuda, cuda:N or cpu"),
        (["--only", "worlds", "wrolds"], "--only wrolds: expected some of facts, errors,"),
        (["--budget", "0"], "expected seconds above 0"),
        (["--budget", "nan"], "expected seconds above 0"),
        (["--packages", "/nowhere"], "--packages /nowhere: expected a folder"),
        (["--out", "/nowhere/a.jsonl"], "expected a file in a folder that exists"),
    ],
)
def test_arguments_that_cannot_be_meant_end_in_words(
    gpu_check: Any, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu_check.parse(words)
    assert message in capsys.readouterr().err


def test_processes_are_found_by_the_mark_that_they_inherit(gpu_check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={gpu_check.MARK: "a-1"})
    try:
        while b"input" not in Path(f"/proc/{child.pid}/cmdline").read_bytes():
            time.sleep(0.001)  # it is still a copy of this process
        assert list(gpu_check.processes_of("a-1")) == [child.pid]
        assert gpu_check.processes_of("a-2") == {}
        assert [line.split()[0] for line in gpu_check.end_processes("a-1", patience_s=0.0)] == [str(child.pid)]
    finally:
        child.kill()
        child.communicate()


# The names that sections may use, and their page in the manual.


def private_names(source: str) -> Iterator[str]:
    """The modules of HetSeq that a source imports and that may move."""
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            if name.split(".")[0] in ("hetseq", "tasks", "preprocessing") and name not in ("hetseq", *DOCUMENTED):
                yield name


def test_sections_use_the_commands_and_the_public_names_alone() -> None:
    assert [(path.name, name) for path in SOURCES for name in private_names(path.read_text())] == []
    assert list(private_names("from hetseq.comm.group import Group\nimport hetseq.tasks.bert.task")) == [
        "hetseq.comm.group",
        "hetseq.tasks.bert.task",
    ]


def test_the_manual_has_every_section_with_its_limit(gpu_check: Any) -> None:
    page = (ROOT / "docs" / "guides" / "gpu.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `(\w+)` \| (\d+ s)?", page, re.M))
    assert table == {
        section.name: "" if section.not_built else f"{section.limit_s} s" for section in gpu_check.SECTIONS
    }


def test_every_section_has_a_module_unless_it_is_not_built(gpu_check: Any) -> None:
    for section in gpu_check.SECTIONS:
        assert (BENCH / "gpu_sections" / f"{section.name}.py").exists() != bool(section.not_built), section.name


def test_the_longest_budget_of_make_holds_all_sections(gpu_check: Any) -> None:
    budget = re.search(r"gpu_check\.py .*--budget (\d+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert budget is not None
    assert int(budget[1]) >= sum(section.limit_s for section in gpu_check.SECTIONS)


def test_each_place_that_is_broken_on_purpose_is_there_once() -> None:
    """The tests that break them are slow; a module that moves is seen here."""
    from tests.end_to_end.test_gpu_check import BREAKS

    counts = {name: (ROOT / path).read_text(encoding="utf-8").count(old) for name, (path, old, _, _) in BREAKS.items()}
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert len(counts) >= 10
