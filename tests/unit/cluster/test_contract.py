"""What two nodes were told differently is named, with both values and both hosts; what means the same is let be."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hetseq
from hetseq.cluster.membership import compatibility as contract
from hetseq.cluster.membership.compatibility import (
    Fields,
    build_tag,
    difference,
    listed,
    node_fields,
    option_fields,
    source_below,
)
from hetseq.config import parse
from hetseq.config.sections import Config, flag, option


def told(*words: str) -> Fields:
    """What a node presents that was started with these words."""
    return node_fields(parse(["--optimizer", "sgd", *words]))


def lines(one: Fields, other: Fields) -> list[str]:
    """What is said of labA and labB, a line per field; [] if they agree."""
    text = difference([("labA", one), ("labB", other)])
    return [] if text is None else [line.strip() for line in text.partition("\nTo fix this:")[0].splitlines()[1:]]


# The options, as they were given on two nodes, and the line that names them

DIFFERENT_OPTIONS = {
    "learning rate": (["--lr", "0.1"], ["--lr", "0.2"], "--lr: 0.1 on labA; 0.2 on labB"),
    "seed": ([], ["--seed", "1"], "--seed: 19940802 on labA; 1 on labB"),
    "global batch": (
        ["--global-batch-size", "64"], ["--global-batch-size", "32"], "--global-batch-size: 64 on labA; 32 on labB",
    ),
    "dropout": ([], ["--dropout", "0.5"], "--dropout: (default) on labA; 0.5 on labB"),
    "precision": ([], ["--precision", "fp64"], "--precision: fp32 on labA; fp64 on labB"),
    "sampler": ([], ["--curriculum", "2"], "--curriculum: 0 on labA; 2 on labB"),
    "update freq": ([], ["--update-freq", "1,2"], "--update-freq: 1 on labA; 1,2 on labB"),
    "a switch": ([], ["--decay-all"], "--decay-all: off on labA; on on labB"),
    "a schedule": ([], ["--lr-scheduler", "constant"], "--lr-scheduler: polynomial on labA; constant on labB"),
    "checkpoint": ([], ["--resume", "best"], "--resume: latest on labA; best on labB"),
    "a path": (["--resume", "7"], ["--resume", "/run"], "--resume: step 7 on labA; a path on labB"),
    "balance": (["--balance", "equal"], ["--balance", "5,2"], "--balance: equal on labA; 5,2 on labB"),
    "owners": (
        ["--shard-model", "state", "--own", "3,1"], ["--shard-model", "state", "--own", "1,1"],
        "--own: 3,1 on labA; 1,1 on labB",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT_OPTIONS)
def test_another_option_on_one_node_is_named(case: str) -> None:
    one, other, line = DIFFERENT_OPTIONS[case]
    assert lines(told(*one), told(*other)) == [line]
    assert lines(told(*one), told(*one)) == []


ALIKE = {
    "a default said aloud": ([], ["--seed", "19940802", "--momentum", "0.0", "--update-freq", "1", "--power", "1"]),
    "other spellings": (["--batch-size", "8", "--lr", "1e-1"], ["--max-sentences", "8", "--learning-rate", "0.10"]),
    "a rate that its optimizer has anyway": ([], ["--lr", "0.1"]),  # a rank tells which
    "two names of one schedule": ([], ["--lr-scheduler", "polynomial"]),
    "adadelta's own decay": (["--wd", "0.5", "--adadelta-weight-decay", "0.5"], ["--wd", "0.5"]),
    "weights": (["--balance", "5,2.0"], ["--balance", "5.0, 2"]),
    "weights of owners": (
        ["--shard-model", "state", "--own", "3,1.0"], ["--shard-model", "state", "--own", "3.0, 1"],
    ),
    "memory for state": (
        ["--shard-model", "state", "--own-memory", "24G"], ["--shard-model", "state", "--own-memory", "stable"],
    ),
    "overrides": (
        ["--optimizer-overrides", "{'lr': 1, 'eps': 1e-6}"], ["--optimizer-overrides", '{"eps":0.000001, "lr":1}'],
    ),
    "two words for the newest": (["--resume", "latest"], ["--restore-file", "checkpoint_last.pt"]),
    "two paths": (["--restore-file", "/a/run"], ["--restore-file", "/b/run"]),
    "splits": (["--valid-subset", "valid,test"], ["--valid-subset", "valid, test"]),
    "what is each node's own": (
        ["--data", "/a", "--save-dir", "/a", "--cpu", "--max-sentences", "8", "--num-workers", "2"],
        ["--data", "/b", "--save-dir", "/b", "--devices", "cpu,cpu", "--max-sentences", "4", "--log-format", "none"],
    ),
    "what has no effect": ([], ["--ddp-backend", "c10d", "--fast-stat-sync", "--distributed-backend", "gloo"]),
}  # fmt: skip


@pytest.mark.parametrize("case", ALIKE)
def test_two_ways_to_say_the_same_agree(case: str) -> None:
    one, other = ALIKE[case]
    assert lines(told(*one), told(*other)) == []


def test_every_option_that_shapes_the_result_is_compared_and_no_other() -> None:
    expected = {
        flag(field.name)
        for section in Config().sections()
        for field in dataclasses.fields(section)
        if not field.metadata["per_node"] and not field.metadata["retired"]
    }
    assert {name for name in told("--lr", "1") if name.startswith("--")} == expected
    assert {"--seed", "--precision", "--bucket-cap-mb"} <= expected
    assert not {"--data", "--cpu", "--batch-size"} & expected


@dataclasses.dataclass(frozen=True)
class Options:
    depth: int = 3
    scratch: str = option("/tmp", "where this node keeps its things", per_node=True)


def test_options_of_the_users_own_are_compared_as_well() -> None:
    assert lines(option_fields([Options()]), option_fields([Options(depth=4)])) == ["--depth: 3 on labA; 4 on labB"]
    assert lines(option_fields([Options()]), option_fields([Options(depth=3, scratch="/fast")])) == []


# Files whose paths are each node's own


def written(path: Path, content: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return str(path)


def test_another_vocabulary_is_named_with_both_digests_and_another_path_is_not(tmp_path: Path) -> None:
    first = told("--dict", written(tmp_path / "a/vocab.txt", "the\nof\n"))
    second = told("--dict", written(tmp_path / "b/words.txt", "the\nof\n"))
    third = told("--dict", written(tmp_path / "c/vocab.txt", "the\nOf\n"))
    assert lines(first, second) == []
    (line,) = lines(first, third)
    one, other = (fields["file of --vocab-file"].split()[-1] for fields in (first, third))
    assert line == f"file of --vocab-file: vocab.txt {one} on labA; vocab.txt {other} on labB"
    assert one != other
    assert len(one) == 12


def test_a_file_that_one_node_lacks_is_named(tmp_path: Path) -> None:
    there = written(tmp_path / "bert.json", "{}")
    missing = told("--config-file", str(tmp_path / "gone.json"))
    (line,) = lines(told("--config-file", there), missing)
    assert line.endswith("on labA; gone.json cannot be read (no such file) on labB")
    (line,) = lines(told(), told("--config-file", there))
    assert line.startswith("file of --config-file: (not given) on labA; bert.json ")
    assert lines(missing, missing) == [], "the task will say so"


def test_a_folder_as_a_vocabulary_is_its_files(tmp_path: Path) -> None:
    written(tmp_path / "a/sub/vocab.txt", "the")
    written(tmp_path / "b/sub/vocab.txt", "The")
    (line,) = lines(told("--dict", str(tmp_path / "a")), told("--dict", str(tmp_path / "b")))
    assert "sub/vocab.txt" in line


def test_a_module_of_user_dir_that_differs_is_named(tmp_path: Path) -> None:
    for node, rate in (("a", "1"), ("b", "2"), ("c", "1")):
        written(tmp_path / node / "same.py", "")
        written(tmp_path / node / "rates.py", f"RATE = {rate}\n")
    one, other, third = (told("--user-dir", str(tmp_path / node)) for node in "abc")
    (line,) = lines(one, other)
    assert line.startswith("modules of --user-dir: rates.py ")
    assert lines(one, third) == []
    written(tmp_path / "c/more.py", "")
    (line,) = lines(one, told("--user-dir", str(tmp_path / "c")))
    assert line.startswith("modules of --user-dir: no more.py on labA; more.py ")
    (line,) = lines(told(), one)
    assert line.startswith("modules of --user-dir: (not given) on labA; rates.py ")


def test_a_task_file_that_differs_is_named_and_a_task_by_name_is_left_to_the_ranks(tmp_path: Path) -> None:
    one = told("--task", written(tmp_path / "a/spirals.py", "x = 1") + ":Spirals")
    other = told("--task", written(tmp_path / "b/spirals.py", "x = 2") + ":Spirals")
    (line,) = lines(one, other)
    assert line.startswith("file of --task: spirals.py ")
    assert lines(one, told()) == []


# Source and versions


def test_one_changed_byte_of_hetseq_is_named_with_its_file(tmp_path: Path) -> None:
    shutil.copytree(Path(hetseq.__file__).parent, tmp_path / "hetseq", ignore=shutil.ignore_patterns("__pycache__"))
    ours, theirs = told(), told()
    theirs["source of hetseq"] = source_below(tmp_path / "hetseq")
    assert lines(ours, theirs) == []
    plan = tmp_path / "hetseq/data/plan.py"
    plan.write_text(plan.read_text().replace("_ROUNDS = 6", "_ROUNDS = 4"))
    theirs["source of hetseq"] = source_below(tmp_path / "hetseq")
    (line,) = lines(ours, theirs)
    one, other = (source["source of hetseq"].split("data/plan.py: ")[1][:12] for source in (ours, theirs))
    assert line == f"source of hetseq: data/plan.py {one} on labA; data/plan.py {other} on labB"
    (tmp_path / "hetseq/.plan.py.swp.py").write_text("an editor's")
    assert lines(theirs, {**theirs, "source of hetseq": source_below(tmp_path / "hetseq")}) == []


def test_another_version_of_torch_is_named_and_another_build_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    presented = []
    for version in ("2.13.0+cpu", "2.13.0+cu126", "2.12.1+cpu"):
        monkeypatch.setattr(contract, "_torch_version", lambda version=version: version)
        presented.append((told(), build_tag()))
    assert [tag for _, tag in presented] == ["+cpu", "+cu126", "+cpu"]
    assert lines(presented[0][0], presented[1][0]) == []
    assert lines(presented[0][0], presented[2][0]) == ["torch: 2.13.0 on labA; 2.12.1 on labB"]


def test_the_version_of_torch_is_told_without_importing_it() -> None:
    code = (
        "import sys; from hetseq.cluster.membership.compatibility import build_tag, node_fields\n"
        "from hetseq.config.sections import Config\n"
        "print(node_fields(Config())['torch'] + build_tag()); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, torch.__version__)


# What is said, and to whom


def test_the_fields_travel_as_json_and_are_small() -> None:
    fields = told()
    text = json.dumps(fields)
    assert json.loads(text) == fields
    assert len(text) < 25_000  # about 100 for each option


def test_the_whole_message() -> None:
    one, other = told("--lr", "0.1"), told("--lr", "0.2", "--seed", "1")
    other["torch"], other["build of torch"] = "1.0", "cu126"
    assert difference([("rank 0 on labA", one), ("rank 1 on labB", other)]) == "\n".join(
        [
            "the nodes do not agree, so nothing was trained:",
            f"  torch: {one['torch']} on rank 0 on labA; 1.0 on rank 1 on labB",
            "  --lr: 0.1 on rank 0 on labA; 0.2 on rank 1 on labB",
            "  --seed: 19940802 on rank 0 on labA; 1 on rank 1 on labB",
            "To fix this: install the same versions on all nodes (only torch's build tag, as in +cpu, may differ), by"
            " hand or with hetseq ssh --install; give all nodes the same options [versions-differ]",
            f"  rank 0 on labA: pip install torch==1.0 --index-url https://download.pytorch.org/whl/{build_tag()[1:]}",
        ]
    )
    assert difference([("rank 0 on labA", one)]) is None
    assert difference([]) is None


def test_each_node_with_another_torch_gets_the_command_for_its_build() -> None:
    nodes = [("a", "2.14.1", "cu130"), ("b", "2.13.0", "cu126"), ("c", "2.14.1", "cpu"), ("d", "2.13.0", "rocm7.2")]
    nodes += [("e", "2.13.0", "cpu"), ("f", "2.12.0", "cpu"), ("g", "2.12.0", "x; rm"), ("h", "not installed", "")]
    text = difference([(who, {"torch": torch, "build of torch": build}) for who, torch, build in nodes]) or ""
    index = "https://download.pytorch.org/whl"
    assert text.partition("[versions-differ]\n")[2].split("\n") == [
        f"  a: pip install torch==2.13.0 --index-url {index}/cu130",
        f"  c, f: pip install torch==2.13.0 --index-url {index}/cpu",
        "  g, h: pip install torch==2.13.0",
    ]


def test_who_agrees_with_whom_is_said_of_many() -> None:
    def of(value: str) -> Fields:
        return {"--lr": value}

    parties = [(f"n{at}", of(value)) for at, value in enumerate(["1", "1", "2", "1", "1", "3", "2"])]
    text = difference(parties) or ""
    assert "--lr: 1 on n0, n1, n3 and 1 more; 2 on n2, n6; 3 on n5" in text


def test_of_many_fields_the_most_telling_are_named_first_and_the_others_counted() -> None:
    one = {"order of train": "1\n2", "length of train": "9", **{f"--o{at}": "1" for at in range(12)}, "torch": "2"}
    other = dict.fromkeys(one, "other")
    said = lines(one, other)
    assert said[0].startswith("torch: ")
    assert said[1].startswith("--o0: ")
    assert said[8:] == ["and 7 more"]


def test_a_field_that_only_one_tells_is_a_difference() -> None:
    assert lines({"--own": "1"}, {}) == ["--own: 1 on labA; (nothing) on labB"]
    assert lines({"length of valid": "5 samples"}, {}) == ["length of valid: 5 samples on labA; (nothing) on labB"]


def test_a_rate_that_a_node_left_out_is_held_against_those_who_said_one() -> None:
    fields: list[Any] = [{}, {"--lr": "0.1"}, {"--lr": "0.2"}]
    text = difference(list(zip(["labA", "labB", "labC"], fields))) or ""
    assert "--lr: 0.1 on labB; 0.2 on labC" in text


@pytest.mark.parametrize("name", ["parameters", "buffers", "order of train"])
def test_of_a_list_the_first_position_that_differs_is_named(name: str) -> None:
    one, swapped = listed(["a", "b", "c"]), listed(["a", "c", "b"])
    assert lines({name: one}, {name: swapped}) == [f"{name}: number 2 of 3: b on labA; number 2 of 3: c on labB"]
    assert lines({name: one}, {name: listed("abcd")}) == [f"{name}: only 3 of them on labA; number 4 of 4: d on labB"]
    assert lines({name: one}, {name: one}) == []


SAMPLE = "sample 0: aaaa | 1e-06 10 -20 100\nsample 5: bbbb"


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("sample 0: aaaa | 1e-06 10.00009 -20.00009 100.00009\nsample 5: bbbb", []),
        ("sample 0: aaaa | 1e-06 10 -20 100", []),  # a slow node told fewer
        ("not compared: random", []),
        ("sample 0: aaaa | 1e-06 10 -20.0002 100\nsample 5: bbbb", ["sample 0: checksums 10 -20"]),
        ("sample 0: aaaa | 1e-06 10 -20 100.0002\nsample 5: bbbb", ["sample 0: checksums 10 -20"]),
        ("sample 0: aaab | 1e-06 10 -20 100\nsample 5: bbbb", ["sample 0: content aaaa on labA"]),
        ("sample 0: aaaa\nsample 5: bbbb", ["sample 0: content aaaa on labA"]),
        ("sample 0: aaaa | rubbish\nsample 5: bbbb", ["sample 0: checksums 10"]),
        ("sample 0: aaaa | 1e-06 10 -20 100\nsample 5: bbbc", ["sample 5: content bbbb on labA"]),
    ],
)
def test_samples_agree_up_to_the_last_bits_of_their_numbers(other: str, expected: list[str]) -> None:
    said = lines({"samples of train": SAMPLE}, {"samples of train": other})
    assert len(said) == len(expected)
    assert all(part in line for part, line in zip(expected, said))


def test_who_cannot_compare_does_not_stand_between_those_who_can() -> None:
    parties = [("labA", "not compared: random"), ("labB", "sample 0: aaaa"), ("labC", "sample 0: bbbb")]
    text = difference([(host, {"samples of train": value}) for host, value in parties]) or ""
    assert "sample 0: content aaaa on labB; sample 0: content bbbb on labC" in text


def test_modules_and_packages_are_compared_where_both_have_them() -> None:
    one, other = {"modules of the task": "a.py: 11\ngpu.py: 22"}, {"modules of the task": "a.py: 11"}
    assert lines(one, other) == []
    other = {"modules of the task": "a.py: 12\nb.py: 33"}
    assert lines(one, other) == ["modules of the task: a.py 11 on labA; a.py 12 on labB"]


def test_what_another_node_says_cannot_move_the_cursor_or_fill_the_screen() -> None:
    text = difference([("labA", {"--x": "1"}), ("labB", {"--x": "\x1b[2J\r\n" + "9" * 100_000})]) or ""
    assert "\x1b" not in text
    assert "\r" not in text
    assert len(text) < 600


def test_a_name_that_begins_like_another_is_its_own() -> None:
    assert lines({"--lr": "1", "--lr-scheduler": "cosine"}, {"--lr": "1"}) == [
        "--lr-scheduler: cosine on labA; (nothing) on labB"
    ]
