"""`hetseq checkpoints`: what it tells of a run, what it finds damaged, what it removes and what it never removes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import hetseq.checkpoint
from hetseq.checkpoint import Commit, Identity, inspect, scan
from hetseq.checkpoint.directory import attempt_name
from hetseq.checkpoint.history import append_history
from hetseq.checkpoint.records import seal, unseal
from hetseq.cli import main
from hetseq.commands.checkpoints import listing as inventory
from hetseq.commands.checkpoints.command import CheckpointArguments, answer, kept, parse
from hetseq.errors import CheckpointError, CheckpointRefused, ConfigError, RunDirectoryError
from hetseq.run_directory import RunDirectory
from tests.support.checkpoints import LINEAGE, contents, folder, loaded_step, manager, save, tensors_of


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose steps 1 to 4 were saved, the second of them as the best."""
    for step in (1, 2, 3, 4):
        save(tmp_path / "run", step, kinds=("epoch", "best") if step == 2 else ("epoch",))
    return tmp_path / "run"


def ask(*words: object) -> list[str]:
    """The lines of a command."""
    return list(answer(parse([str(word) for word in words])))


def asked_json(*words: object) -> Any:
    (line,) = ask(*words, "--json")
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def steps(run: Path) -> list[int]:
    """The steps of the committed checkpoints, newest first."""
    return [commit.identity.step for commit in scan(run / "checkpoints").commits]


def flip(path: Path) -> None:
    """Change the last bit of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def damage(run: Path, step: int) -> None:
    """Change a byte of a tensor: the small files do not tell."""
    flip(folder(run, step) / "part-00000.safetensors")


def fail_a_save(run: Path, step: int, error: str) -> None:
    append_history(run / "checkpointHistories.csv", {"step": step, "result": "failed", "error": error})


# the command line


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "the action is missing: expected list, show, verify, prune, export"),
        ("lst RUN", "unknown action lst: did you mean list?; as in: hetseq checkpoints list"),
        ("mnist verify", "unknown action mnist: verify comes before RUN; as in: hetseq checkpoints verify"),
        ("runs/a", "unknown action runs/a: expected list, show"),
        ("list", "expected one RUN, found none; as in: hetseq checkpoints list"),
        ("list a b", "expected one RUN, found a b"),
        ("list RUN --step 3", "unknown option --step: expected --json"),
        ("prune RUN --keep 2 --dryrun", "unknown option --dryrun: did you mean --dry-run?"),
        ("prune RUN", "hetseq checkpoints prune: --keep N is missing, as in: hetseq checkpoints prune"),
        ("prune RUN --keep", "--keep has no value: expected --keep N, as in: hetseq checkpoints prune"),
        ("prune RUN --keep --dry-run", "--keep has no value"),
        ("prune RUN --keep 0", "--keep 0: expected the number"),
        ("prune RUN --keep -1", "--keep -1: expected the number"),
        ("prune RUN --keep some", "--keep some: expected the number"),
        ("prune RUN --keep 1 --keep 2", "--keep is given twice: give it once"),
        ("prune RUN --keep 1 --drop-best --keep-best", "exclude each other"),
        ("prune RUN --keep 1 --dry-run=yes", "--dry-run takes no value"),
        ("show RUN --step first", "--step first: expected a step number, latest or best"),
        ("show RUN --step -3", "--step -3: expected a step number"),
        ("export RUN --to x", "--format FORM is missing"),
        ("export RUN --format torch", "--to PATH is missing"),
        ("export RUN --format torch --to=", "--to has no value"),
        ("export RUN --format torch --to x --output y", "--to is given twice"),
        ("list RUN --output y", "unknown option --output"),
        ("export RUN --format tensors --to x", "--format tensors: did you mean safetensors?"),
        ("export RUN --format onnx --to x", "--format onnx: expected safetensors, torch, dcp, hf"),
        ("export RUN --format dcp --to x --merge", "--merge goes with --format hf: dcp holds the tensors as they were"),
        ("show RUN --merge", "unknown option --merge"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_answered_with_a_remedy(words: str, told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(words.split())
    assert told in str(refusal.value)


def test_a_command_line_says_it_all() -> None:
    assert parse(["show", "--step", "0040", "RUN", "--tensors", "--json"]) == CheckpointArguments(
        "show", Path("RUN"), "40", wants_tensors=True, wants_json=True
    )
    assert parse(["verify", "RUN", "--step=best", "--shallow"]) == CheckpointArguments(
        "verify", Path("RUN"), "best", is_shallow=True
    )
    assert parse(["prune", "RUN", "--keep", "3", "--keep-best"]) == CheckpointArguments("prune", Path("RUN"), keep=3)
    for to in (["--to", "DIR"], ["--output", "DIR"], ["--output=DIR"]):
        assert parse(["export", "RUN", "--format", "hf", *to]) == CheckpointArguments(
            "export", Path("RUN"), form="hf", target=Path("DIR")
        )
    assert parse(["prune", "RUN", "--keep", "3", "--drop-best", "--dry-run"]) == CheckpointArguments(
        "prune", Path("RUN"), keep=3, drops_best=True, is_dry_run=True
    )
    assert parse(["export", "RUN", "--format", "hf", "--to", "x", "--merge"]) == CheckpointArguments(
        "export", Path("RUN"), form="hf", target=Path("x"), merges=True
    )
    assert parse(["export", "RUN", "--format", "dcp", "--to", "x"]) == CheckpointArguments(
        "export", Path("RUN"), form="dcp", target=Path("x")
    )


def test_help_names_every_action(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"hetseq checkpoints {action} runs/" in told for action in ("list", "show", "verify", "prune", "export"))
    assert main(["checkpoints", "prune", "--help"]) == 0
    told = capsys.readouterr().out
    assert "--keep N" in told
    assert "--format" not in told
    assert main(["checkpoints", "lst"]) == 2
    assert "did you mean list?" in capsys.readouterr().err


# which run


@pytest.mark.parametrize("action", ["list", "show", "verify", "prune --keep 1", "export --format torch --to x.pt"])
def test_a_folder_that_is_no_run_is_refused_by_every_action(tmp_path: Path, action: str) -> None:
    (tmp_path / "config.yaml").write_text("lr: 1\n")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="is no run directory"):
        ask(*action.split(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "config.yaml"]


def test_a_run_that_is_not_there_or_a_file_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        ask("list", run / "nowhere")
    with pytest.raises(ConfigError, match="is a file"):
        ask("list", run / "checkpointHistories.csv")


def test_the_folder_of_a_checkpoint_leads_to_its_run(run: Path) -> None:
    for inside in (run / "checkpoints", folder(run, 3)):
        with pytest.raises(ConfigError) as refusal:
            ask("show", inside)
        assert f"did you mean {run}?" in str(refusal.value)


@pytest.mark.parametrize("action", ["show", "verify", "prune --keep 1", "export --format torch --to x.pt"])
def test_a_run_without_checkpoints_has_nothing_but_a_list(tmp_path: Path, action: str) -> None:
    RunDirectory.prepare(tmp_path, config_yaml="")
    assert ask("list", tmp_path) == [f"{tmp_path} has no checkpoints"]
    with pytest.raises(CheckpointRefused, match="has no checkpoints"):
        ask(*action.split(), tmp_path)


# list


def test_a_list_begins_with_the_newest_and_marks_the_best(run: Path) -> None:
    head, *rows, total = ask("list", run)
    assert head.split() == ["step", "epoch", "kinds", "size", "created", "(UTC)", "parts"]
    assert [row.split()[0] for row in rows] == ["4", "3", "2", "1"]
    assert [row.split()[-1] for row in rows] == ["newest", "1", "best", "1"]
    assert rows[2].split()[2:8] == ["epoch,", "best", "4.7", "kB", "2023-11-14", "22:13:20"]
    assert total == f"4 checkpoints, 18.8 kB in {run / 'checkpoints'}"


def test_only_the_newest_best_is_the_best(run: Path) -> None:
    save(run, 5, kinds=("best",))
    listed = asked_json("list", run)["checkpoints"]
    assert [row["step"] for row in listed if row["is_best"]] == [5]
    assert [row["step"] for row in listed if row["is_newest"]] == [5]
    assert [row["step"] for row in listed if "best" in row["kinds"]] == [5, 2]


def test_epoch_and_generation_are_told_where_there_are_any(run: Path) -> None:
    assert "generation" not in ask("list", run)[0]
    identity = Identity(5, 3, LINEAGE)
    manager(run).save(tensors_of(5), {"epoch": 12}, identity=identity, nonce=1, kinds=["time"])
    head, newest, *_ = ask("list", run)
    assert head.split()[-1] == "generation"
    assert (newest.split()[:2], newest.split()[-1]) == (["5", "12"], "3")
    assert asked_json("list", run)["checkpoints"][0]["generation"] == 3


def test_what_is_no_checkpoint_is_told_below_with_its_reason(run: Path) -> None:
    (folder(run, 4) / "COMMIT.json").write_text("{}")
    (folder(run, 3) / "part-00000.json").unlink()
    (run / "checkpoints" / attempt_name(9, 1)).mkdir()
    lines = ask("list", run)
    assert [line.split()[0] for line in lines[1:3]] == ["2", "1"]
    assert lines[1].endswith("newest and best")
    told = [line.split(": ")[:3] for line in lines[4:]]
    assert told == [
        ["cannot be used", folder(run, 4).name, "COMMIT.json"],
        ["cannot be used", folder(run, 3).name, "part-00000.json"],
        [
            "never committed",
            attempt_name(9, 1),
            "it is being written, or its run was killed; the next start cleans up",
        ],
    ]
    record = asked_json("list", run)
    assert [row["step"] for row in record["checkpoints"]] == [2, 1]
    assert [Path(row["path"]) for row in record["refused"]] == [folder(run, 4), folder(run, 3)]
    assert record["uncommitted"] == [str(run / "checkpoints" / attempt_name(9, 1))]


def test_a_run_whose_checkpoints_are_all_bad_is_no_run_without_checkpoints(run: Path) -> None:
    for path in (run / "checkpoints").glob("step-*/state.json"):
        path.unlink()
    first, *others = ask("list", run)
    assert first == f"{run} has no checkpoints that can be used"
    assert len(others) == 4


def test_a_save_that_failed_is_told_until_one_succeeds(run: Path) -> None:
    assert "save failed" not in "".join(ask("list", run))
    fail_a_save(run, 5, "rank 1: disk full")
    assert ask("list", run)[-1] == "last save failed at step 5: rank 1: disk full"
    fail_a_save(run, 6, "rank 0: disk full")
    assert ask("list", run)[-1] == "last save failed at step 6 (2 saves in a row): rank 0: disk full"
    assert [row["step"] for row in asked_json("list", run)["failed_saves"]] == ["5", "6"]
    save(run, 7)
    assert "save failed" not in "".join(ask("list", run))
    assert asked_json("list", run)["failed_saves"] == []


def test_a_history_that_cannot_be_read_hides_no_checkpoint(run: Path) -> None:
    before = ask("list", run)
    (run / "checkpointHistories.csv").unlink()
    (run / "checkpointHistories.csv").mkdir()
    assert ask("list", run) == before


def test_a_checkpoint_that_a_run_retires_meanwhile_is_not_called_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def retired(commit: Commit) -> Any:
        if commit.identity.step == 1:
            (commit.path / "COMMIT.json").unlink()
            (commit.path / "part-00000.json").unlink()
        return inspect(commit)

    monkeypatch.setattr(inventory, "inspect", retired)
    found = inventory.read_contents(run)
    assert [usable.commit.identity.step for usable in found.usable] == [4, 3, 2]
    assert found.refused == {}


def test_names_in_a_file_do_not_steer_the_terminal(run: Path) -> None:
    tensors = {"model.\x1b[2J": tensors_of(1)["model.a"]}
    manager(run).save(tensors, {"task": "\x1b]0;me\x07"}, identity=Identity(5, 0, LINEAGE), nonce=1, kinds=["time"])
    told = "".join(ask("show", run))
    assert "model.?[2J" in told
    assert "?]0;me?" in told
    assert told.isprintable()


# show


def test_a_checkpoint_is_shown_with_its_facts_and_its_tensors(run: Path) -> None:
    state = {"epoch": 2, "best": math.nan, "seed": 7, "task": "Toy", "resets": {}, "global_batch": {"tokens": 512}}
    manager(run).save(tensors_of(5), state, identity=Identity(5, 0, LINEAGE), nonce=1, kinds=["time"])
    words = [line.split() for line in ask("show", run)]
    for expected in (
        ["step", "5"],
        ["epoch", "2"],
        ["best", "metric", "so", "far", "nan"],
        ["seed", "7"],
        ["task", "Toy"],
        ["global", "batch", "512", "tokens"],
        ["lineage", LINEAGE],
        ["model", "2", "1,021", "4.2", "kB"],
        ["optimizer", "1", "1", "4", "B"],
        ["model.a", "F32", "1000", "4.0", "kB"],
        ["optim.a.step", "F32", "-", "4", "B"],
    ):
        assert expected in words, expected
    assert not any(line[:1] in (["resets"], ["updates"]) for line in words)  # nothing was reset; nothing is known
    record = asked_json("show", run)
    assert record["state"] == {**state, "best": None}
    assert [tensor["shape"] for tensor in record["tensors"]] == [[7, 3], [1000], []]
    assert sum(record["part_bytes"]) < record["bytes"]


def test_only_the_largest_tensors_are_shown_unless_all_are_asked_for(run: Path) -> None:
    whole = tensors_of(5, elements=7)["model.a"]
    tensors = {f"model.layer{index}": whole[: index + 1] for index in range(7)}
    manager(run).save(tensors, {}, identity=Identity(5, 0, LINEAGE), nonce=1, kinds=["time"])

    def shown(*words: str) -> list[str]:
        lines = (line.split()[:1] for line in ask("show", run, *words))
        return [line[0] for line in lines if line and line[0].startswith("model.layer")]

    assert shown() == [f"model.layer{index}" for index in (6, 5, 4, 3, 2)]
    assert shown("--tensors") == [f"model.layer{index}" for index in range(7)]


def test_the_step_that_is_named_is_the_step_that_is_shown(run: Path) -> None:
    assert asked_json("show", run)["step"] == 4
    assert asked_json("show", run, "--step", "latest")["step"] == 4
    assert asked_json("show", run, "--step", "best")["step"] == 2
    assert asked_json("show", run, "--step", "3")["step"] == 3
    with pytest.raises(CheckpointRefused, match=r"of step 7: the newest steps are 1, 2, 3, 4"):
        ask("show", run, "--step", "7")


def test_a_bad_latest_is_passed_over_aloud_and_a_bad_named_one_is_refused(run: Path) -> None:
    (folder(run, 4) / "state.json").unlink()
    first, *_ = ask("show", run)
    assert first.startswith("step 4 is damaged (state.json: ")
    assert first.endswith("): step 3 is used instead")
    record = asked_json("show", run)
    assert (record["step"], len(record["passed_over"])) == (3, 1)
    with pytest.raises(CheckpointRefused, match=r"state\.json"):
        ask("show", run, "--step", "4")


# verify


def test_one_flipped_bit_is_found_and_only_by_who_reads_every_byte(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoints", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count(": ok, ") == 4
    damage(run, 3)
    assert main(["checkpoints", "verify", str(run)]) == 1
    told = capsys.readouterr()
    assert [": ok, " in line for line in told.out.splitlines()] == [True, False, True, True]
    assert "part-00000.safetensors" in told.out.splitlines()[1]
    assert f"1 of 4 checkpoints of {run} cannot be trusted ({folder(run, 3).name})" in told.err
    assert main(["checkpoints", "verify", str(run), "--shallow"]) == 0
    assert main(["checkpoints", "verify", str(run), "--step", "3"]) == 1
    assert main(["checkpoints", "verify", str(run), "--step", "4"]) == 0
    assert main(["checkpoints", "verify", str(run), "--step", "best"]) == 0


def test_a_commit_that_cannot_be_read_is_damage_too(run: Path) -> None:
    flip(folder(run, 2) / "COMMIT.json")
    for words in ((), ("--step", "2")):
        with pytest.raises(CheckpointError) as found:
            ask("verify", run, *words)
        assert found.value.exit_code == 1
        assert folder(run, 2).name in str(found.value)
    assert len(ask("verify", run, "--step", "3")) == 1


def test_the_latest_is_not_whole_while_a_later_one_cannot_be_read(run: Path) -> None:
    assert [line.split(":")[0] for line in ask("verify", run, "--step", "latest")] == [folder(run, 4).name]
    flip(folder(run, 1) / "COMMIT.json")
    assert len(ask("verify", run, "--step", "latest")) == 1
    flip(folder(run, 4) / "COMMIT.json")
    with pytest.raises(CheckpointError, match="1 of 2 checkpoints"):
        ask("verify", run, "--step", "latest")


def test_a_checkpoint_of_a_newer_format_is_called_neither_damaged_nor_whole(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(run, 4) / "COMMIT.json"
    path.write_bytes(seal({**unseal(path.read_bytes(), source=path), "version": 99}))
    assert main(["checkpoints", "verify", str(run)]) == 1
    told = capsys.readouterr()
    assert told.out.splitlines()[-1].startswith(f"{folder(run, 4).name}: not checked: ")
    assert "1 of 4 checkpoints" in told.err
    with pytest.raises(CheckpointRefused, match="format version 99"):
        ask("show", run)


def test_a_step_that_is_not_there_is_refused_with_those_that_are(run: Path) -> None:
    with pytest.raises(CheckpointRefused, match=r"of step 7: the newest steps are 1, 2, 3, 4"):
        ask("verify", run, "--step", "7")


def test_a_checkpoint_that_goes_while_it_is_read_is_no_damage(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(commit: Commit, *, deep: bool, **_: Any) -> list[str]:
        if commit.identity.step == 1:
            (commit.path / "COMMIT.json").unlink()
        return ["part-00000.safetensors: No such file"] * (commit.identity.step == 1)

    monkeypatch.setattr(hetseq.checkpoint, "verify", gone)
    assert [line.split(": ")[1][:7] for line in ask("verify", run)] == ["ok, 4.7", "ok, 4.7", "ok, 4.7", "removed"]


# prune


def test_the_newest_the_best_and_the_newest_that_verifies_stay() -> None:
    kinds = [["time"], ["epoch"], ["epoch", "best"], ["epoch"], ["best"]]
    assert kept(kinds, 1) == {0: "the newest", 2: "the best"}
    assert kept(kinds, 1, keeps_best=False) == {0: "the newest"}
    assert set(kept(kinds, 2, whole=3)) == {0, 1, 2, 3}
    assert set(kept(kinds, 2, whole=0, keeps_best=False)) == {0, 1}
    assert set(kept(kinds, 9)) == {0, 1, 2, 3, 4}
    assert kept([], 1) == {}


def test_older_checkpoints_go_and_the_best_stays_unless_it_may_go(run: Path) -> None:
    lines = ask("prune", run, "--keep", "1")
    assert [line.split(" (")[0] for line in lines[:-1]] == [
        "removed: step 1", "kept: step 2", "removed: step 3", "kept: step 4"
    ]  # fmt: skip
    assert lines[-1] == "2 checkpoints, 9.4 kB removed; 2 kept, 9.4 kB"
    assert contents(run) == {folder(run, step).name for step in (2, 4)}
    assert (loaded_step(run), loaded_step(run, "best")) == (4, 2)
    ask("prune", run, "--keep", "1", "--drop-best")
    assert steps(run) == [4]


def test_a_dry_run_says_the_same_and_removes_nothing(run: Path) -> None:
    would = ask("prune", run, "--keep", "2", "--dry-run")
    assert steps(run) == [4, 3, 2, 1]
    done = ask("prune", run, "--keep", "2")
    assert steps(run) == [4, 3, 2]
    said = [line.replace("would be removed", "removed").replace("would go", "removed") for line in would]
    assert said == done


def test_the_newest_that_verifies_stays_though_newer_ones_count(run: Path) -> None:
    damage(run, 4)
    lines = ask("prune", run, "--keep", "1", "--drop-best")
    assert steps(run) == [4, 3]
    assert any(line.startswith("kept: step 3") and "the newest that verifies" in line for line in lines)
    assert loaded_step(run) == 3


def test_where_nothing_verifies_nothing_goes(run: Path) -> None:
    for step in (1, 2, 3, 4):
        damage(run, step)
    with pytest.raises(CheckpointError, match="nothing was removed: no checkpoint"):
        ask("prune", run, "--keep", "1")
    assert steps(run) == [4, 3, 2, 1]


def test_where_nothing_is_to_go_nothing_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(commit: Commit, *, deep: bool, **_: Any) -> list[str]:
        raise AssertionError("read for nothing")

    monkeypatch.setattr(hetseq.checkpoint, "verify", never)
    assert ask("prune", run, "--keep", "4")[-1].startswith("0 checkpoints, 0 B removed; 4 kept")
    with pytest.raises(AssertionError, match="read for nothing"):
        ask("prune", run, "--keep", "3")


def test_a_run_that_is_going_on_keeps_its_checkpoints(run: Path) -> None:
    with RunDirectory(run).lock():
        with pytest.raises(
            RunDirectoryError, match=rf"nothing was removed: .*in use by another run \(pid {os.getpid()} "
        ):
            ask("prune", run, "--keep", "1")
        assert steps(run) == [4, 3, 2, 1]
        assert len(ask("prune", run, "--keep", "1", "--dry-run")) == 5  # looking is allowed
    ask("prune", run, "--keep", "1")
    assert steps(run) == [4, 2]


def test_a_folder_that_the_disk_does_not_let_go_is_named(run: Path) -> None:
    name = folder(run, 1).name
    (folder(run, 1) / "notes").mkdir()
    with pytest.raises(CheckpointError, match=f"could not be removed: {name}"):
        ask("prune", run, "--keep", "1")
    assert steps(run) == [4, 2]  # the others went all the same, and this one is no checkpoint any more


# export


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Path, str]]:
    """Step, target and form of each export; the exporter has tests of its own."""
    calls: list[tuple[int, Path, str]] = []

    def export(commit: Commit, target: Path, *, form: str, **_: Any) -> Path:
        calls.append((commit.identity.step, target, form))
        return target

    stand_in = types.ModuleType("hetseq.checkpoint.export")
    stand_in.export = export  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hetseq.checkpoint.export", stand_in)
    return calls


def test_the_checkpoint_that_is_meant_is_exported(run: Path, exported: list[tuple[int, Path, str]]) -> None:
    target = run.parent / "out"
    assert ask("export", run, "--format", "torch", "--to", target) == [f"step 4 of {run} is in {target} (torch)"]
    ask("export", run, "--format", "dcp", "--to", target, "--step", "best")
    assert exported == [(4, target, "torch"), (2, target, "dcp")]


def test_an_exported_checkpoint_is_the_one_that_was_named(run: Path) -> None:
    ask("export", run, "--format", "torch", "--to", run.parent / "out.pt", "--step", "3")
    model = torch.load(run.parent / "out.pt", weights_only=True)["model"]
    assert torch.equal(model["a"], tensors_of(3)["model.a"])
    assert not torch.equal(model["a"], tensors_of(4)["model.a"])


def test_an_export_replaces_nothing_and_makes_no_folders(run: Path, exported: list[tuple[int, Path, str]]) -> None:
    dangling = run.parent / "link"
    dangling.symlink_to(run.parent / "nowhere")
    for target in (run, dangling):
        with pytest.raises(ConfigError, match="exists: nothing is overwritten"):
            ask("export", run, "--format", "torch", "--to", target)
    with pytest.raises(ConfigError, match="there is no folder"):
        ask("export", run, "--format", "torch", "--to", run / "no" / "x.pt")
    with pytest.raises(CheckpointRefused, match="of step 7"):
        ask("export", run, "--format", "torch", "--to", run.parent / "out", "--step", "7")
    assert exported == []


# in a pipe


@pytest.mark.slow
@pytest.mark.parametrize("action", [["list"], ["prune", "--keep", "1"]])
def test_a_reader_who_goes_away_changes_neither_the_action_nor_the_exit_code(run: Path, action: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        words = [sys.executable, "-m", "hetseq", "checkpoints", *action, str(run)]
        ended = subprocess.run(words, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writes)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert steps(run) == ([4, 2] if action[0] == "prune" else [4, 3, 2, 1])


def test_an_epoch_is_that_of_the_last_step_and_list_show_and_commit_agree_on_kinds(tmp_path: Path) -> None:
    """A state after the last step of an epoch stands at the begin of the next one."""
    for step, epoch, consumed in ((23, 2, 0), (30, 2, 448), (46, 3, 0)):
        manager(tmp_path / "run").save(
            tensors_of(step), {"step": step, "epoch": epoch, "consumed": consumed}, identity=Identity(step, 0, LINEAGE),
            nonce=step, kinds=("epoch", "final"),
        )  # fmt: skip
    found = [(one["step"], one["epoch"], one["kinds"]) for one in asked_json("list", tmp_path / "run")["checkpoints"]]
    kinds = ["epoch", "final"]  # of each end of a run that was continued: retention counts all of them
    assert found == [(46, 2, kinds), (30, 2, kinds), (23, 1, kinds)]
    assert [line.count("epoch, final") for line in ask("list", tmp_path / "run")[1:4]] == [1, 1, 1]
    assert [asked_json("show", tmp_path / "run", "--step", step)["kinds"] for step in ("23", "30", "46")] == [kinds] * 3
    assert any(line.split() == ["epoch", "2"] for line in ask("show", tmp_path / "run", "--step", 46))
