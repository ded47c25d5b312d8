"""What software the ranks of a run have: asked, gathered, kept, and shown where it is not the same everywhere."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hetseq
from hetseq.comm.group import LocalGroup
from hetseq.monitor import versions
from hetseq.monitor.report.page import report_page
from hetseq.monitor.report.recorded import load_run
from hetseq.monitor.report.software import software
from hetseq.monitor.versions import by_node, commit_of, driver_version, gather_versions, versions_of
from tests.support.recorded import step_row, write_run

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ALIKE = {"hetseq": "2.0", "python": "3.11.7", "torch": "2.6.0", "numpy": "2.1.0"}


def test_a_process_tells_its_own_versions_and_leaves_out_what_it_has_not() -> None:
    found = versions_of(torch.device("cpu"))
    assert found["hetseq"] == hetseq.__version__
    assert found["python"] == platform.python_version()
    assert (found["torch"], found["numpy"]) == (str(torch.__version__), np.__version__)
    assert "cudnn" not in found
    assert all(found.values())


def test_one_rank_is_one_node_with_its_device() -> None:
    (node,) = gather_versions(LocalGroup(), torch.device("cpu"), (4,))
    assert (node["ranks"], len(node["devices"])) == ([4], 1)
    assert {name: node[name] for name in versions_of(torch.device("cpu"))} == versions_of(torch.device("cpu"))


def test_a_text_that_is_too_long_is_cut_and_the_row_has_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.platform, "python_version", lambda: "3" * 5000)
    monkeypatch.setattr(versions.socket, "gethostname", lambda: "h" * 5000)
    (node,) = gather_versions(LocalGroup(), torch.device("cpu"), (0,))
    assert set(node["python"]) == {"3"}


def test_names_of_any_alphabet_and_length_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = dict.fromkeys(versions.NAMES, "ä" * 64)
    monkeypatch.setattr(versions, "versions_of", lambda device: everything)
    monkeypatch.setattr(versions, "_name_of", lambda device: "ö" * 5000)
    monkeypatch.setattr(versions.socket, "gethostname", lambda: "ü" * 5000)
    (node,) = gather_versions(LocalGroup(), torch.device("cpu"), (0,))
    assert (node["node"], node["devices"]) == ("ü" * 200, ["ö" * 100])
    assert {name: node[name] for name in versions.NAMES} == everything


def test_ranks_that_have_the_same_on_one_node_are_one_entry() -> None:
    told = [{"node": node, "device": f"gpu{slot}", "versions": ALIKE} for slot, node in enumerate("aab")]
    told.append({"node": "b", "device": "cpu", "versions": {**ALIKE, "torch": "2.6.0+cpu"}})
    found = by_node(told, (0, 1, 2, 5))
    assert [(one["node"], one["ranks"], one["devices"]) for one in found] == [
        ("a", [0, 1], ["gpu0", "gpu1"]), ("b", [2], ["gpu2"]), ("b", [5], ["cpu"]),
    ]  # fmt: skip
    assert found[2]["torch"] == "2.6.0+cpu"


# the commit of a checkout


def checkout(folder: Path, head: str, **files: str) -> Path:
    git = folder / ".git"
    git.mkdir(parents=True)
    (git / "HEAD").write_text(head)
    for name, text in files.items():
        path = git / name.replace("__", "/").replace("_", "-")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_commit_is_found_however_git_keeps_it(tmp_path: Path) -> None:
    branch = "ref: refs/heads/main\n"
    assert commit_of(checkout(tmp_path / "loose", branch, refs__heads__main=f"{COMMIT}\n")) == COMMIT[:12]
    packed = f"# pack-refs\n{'f' * 40} refs/heads/other\n{COMMIT} refs/heads/main\n"
    assert commit_of(checkout(tmp_path / "packed", branch, packed_refs=packed)) == COMMIT[:12]
    assert commit_of(checkout(tmp_path / "detached", f"{COMMIT}\n")) == COMMIT[:12]
    main = checkout(tmp_path / "main", branch, refs__heads__main="f" * 40, refs__heads__side=f"{COMMIT}\n")
    tree = main / ".git" / "worktrees" / "side"
    tree.mkdir(parents=True)
    (tree / "HEAD").write_text("ref: refs/heads/side\n")
    (tree / "commondir").write_text("../..\n")
    (tmp_path / "side").mkdir()
    (tmp_path / "side" / ".git").write_text(f"gitdir: {tree}\n")
    assert commit_of(tmp_path / "side") == COMMIT[:12]


def test_what_is_no_checkout_has_no_commit(tmp_path: Path) -> None:
    assert commit_of(tmp_path) == ""
    assert commit_of(checkout(tmp_path / "empty", "ref: refs/heads/main\n", packed_refs="")) == ""
    assert commit_of(checkout(tmp_path / "odd", "rm -rf /")) == ""


def test_the_driver_is_that_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_DRIVER", tmp_path / "version")
    assert driver_version() == ""
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 2023\n")
    assert driver_version() == "535.54.03"


# what is recorded and shown


def recorded(tmp_path: Path, *nodes: dict[str, Any]) -> Path:
    events = [{"event": "versions", "step": 0, "nodes": [node]} for node in nodes]
    return write_run(tmp_path / "run", [step_row(1)], events=events)


NODE_A = {"node": "labA", "ranks": [0, 1], "devices": ["A6000", "A6000"], **ALIKE, "driver": "535.54.03"}
NODE_B = {"node": "labB", "ranks": [2], "devices": ["CPU"], **ALIKE, "python": "3.12.1"}


def test_a_run_tells_by_slot_what_came_last(tmp_path: Path) -> None:
    again = {**NODE_B, "node": "labC"}
    run = load_run(recorded(tmp_path, NODE_A, NODE_B, {"ranks": 7}, again))
    assert list(run.versions) == [0, 1, 2]
    assert run.versions[0]["driver"] == "535.54.03"
    assert run.versions[2] == {"node": "labC", "device": "CPU", **ALIKE, "python": "3.12.1"}


def test_the_report_has_a_table_of_versions_and_marks_those_that_are_not_equal(tmp_path: Path) -> None:
    page = report_page(load_run(recorded(tmp_path, NODE_A, NODE_B)))
    assert "<h2>Versions</h2>" in page
    assert "Unequal: Python is 3.11.7 on labA; 3.12.1 on labB" in page
    assert "3.12.1 (unequal)" in page
    assert page.count("Unequal: ") == 1, "only one of them has a driver"
    assert "A6000" in page


def test_equal_versions_are_not_marked_and_a_run_without_them_has_no_section(tmp_path: Path) -> None:
    found = software({0: {"node": "a", **ALIKE}, 1: {"node": "b", **ALIKE}})
    assert found is not None
    assert found.unequal == ()
    assert not any("unequal" in cell for row in found.rows for cell in row)
    assert "<h2>Versions</h2>" not in report_page(load_run(recorded(tmp_path)))


def test_a_version_that_one_rank_does_not_tell_is_unequal() -> None:
    found = software({0: {"node": "a", **ALIKE}, 1: {"node": "b", "hetseq": "2.0"}})
    assert found is not None
    assert "numpy is 2.1.0 on a; - on b" in found.unequal


def test_ranks_of_one_node_with_the_same_device_are_one_row() -> None:
    about = {"node": "a", "device": "A6000", **ALIKE}
    found = software({0: about, 1: about, 3: {**about, "device": "CPU"}})
    assert found is not None
    assert [row[:3] for row in found.rows] == [("a", "0, 1", "A6000"), ("a", "3", "CPU")]
