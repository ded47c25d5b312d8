"""What all commands have in common: their `--help`, and how they answer to a directory that is no run.

Each question is asked of `hetseq.cli.main` in one process that has not imported torch, and is not to.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hetseq.cli import COMMANDS
from hetseq.commands import evaluate
from hetseq.commands.checkpoints import command as checkpoints
from hetseq.commands.plan import command as whatif
from hetseq.config.command_line import Command, CommandOption, CommandRefused
from hetseq.run_directory import MARKER
from tests.support.docs import ROOT, pages, shell_blocks
from tests.support.without_torch import Answer
from tests.unit.house.test_messages import GAP, error_texts

#: words behind each command that looks at a run, with RUN for the directory
OF_A_RUN = {
    "top": "RUN --once",
    "report": "RUN --output report.html",
    "report of two": "RUN RUN --output report.html",
    "drop": "RUN labA",
    "plan": "RUN --json",
    "simulate": "RUN",
    "evaluate": "RUN --subset test",
    "predict": "--subset test --output out.txt RUN",
    "checkpoints list": "RUN",
    "checkpoints show": "RUN",
    "checkpoints verify": "RUN",
    "checkpoints prune": "RUN --keep 1",
    "checkpoints export": "RUN --format torch --to x.pt",
}
KINDS = ("absent", "file", "empty", "other", "binary")
WIDTHS = (80, 120, 200)
#: each command, and each action of checkpoints
ALL = ["", *COMMANDS, *(f"checkpoints {action}" for action in checkpoints.ACTIONS)]

ASKER = """
import contextlib, io, json, os, sys
from hetseq.cli import main
asked, answers = json.load(sys.stdin), []
for columns, words in asked:
    os.environ["COLUMNS"] = str(columns)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    answers.append([code, out.getvalue(), err.getvalue(), "torch" in sys.modules])
print(json.dumps(answers))
"""


def described() -> dict[str, Command]:
    """The description of each command that has one."""
    found = {}
    for name, (place, _) in COMMANDS.items():
        module = importlib.import_module(place.partition(":")[0])
        if hasattr(module, "COMMAND"):
            found[name] = module.COMMAND
    actions = {f"checkpoints {name}": action for name, action in checkpoints.ACTIONS.items()}
    return {**found, **actions, **evaluate.COMMANDS, "plan": whatif.PLAN, "simulate": whatif.SIMULATE}


def ask(folder: Path, questions: list[tuple[int, list[str]]]) -> list[Answer]:
    done = subprocess.run(
        [sys.executable, "-c", ASKER], input=json.dumps(questions), cwd=folder, env={"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    return [Answer(*answer) for answer in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Paths that are no run: named as KINDS, each but the first one there."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "file").write_text("some text\n")
    for kind in ("empty", "other", "binary"):
        (folder / kind).mkdir()
    (folder / "other" / "config.yaml").write_text("model: resnet\nepochs: 3\n")
    (folder / "other" / "metrics.jsonl").write_text('{"iteration": 3, "loss": 1.0}\n')
    (folder / "other" / "checkpoints").mkdir()
    (folder / "other" / "checkpoints" / "last.ckpt").write_text("x")
    for name in ("config.yaml", "metrics.jsonl", "status"):
        (folder / "binary" / name).write_bytes(b"\x80\x02\xff\x00\n" * 100)
    return folder


@pytest.fixture(scope="module")
def refusals(folder: Path) -> dict[tuple[str, str], Answer]:
    """The answer of each command of a run to each kind of path."""
    asked = {
        (name, kind): shlex.split(f"{name.removesuffix(' of two')} {words}".replace("RUN", kind))
        for name, words in OF_A_RUN.items()
        for kind in KINDS
    }
    before = contents(folder)
    answers = dict(zip(asked, ask(folder, [(80, words) for words in asked.values()])))
    assert contents(folder) == before, "a command has written something"
    return answers


@pytest.fixture(scope="module")
def helps(folder: Path) -> dict[tuple[str, int], Answer]:
    """The `--help` of each command on terminals of two widths."""
    asked = {(name, width): (width, [*name.split(), "--help"]) for name in ALL for width in WIDTHS}
    return dict(zip(asked, ask(folder, list(asked.values()))))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_path_that_is_no_run_is_refused_in_one_line(
    refusals: dict[tuple[str, str], Answer], name: str, kind: str
) -> None:
    answer = refusals[name, kind]
    assert (answer.code, answer.out, answer.has_torch) == (2, "", False)
    (line,) = answer.err.splitlines()
    assert line.startswith(f"hetseq {name.split()[0]}: ")
    assert line.count("hetseq") == 1
    assert kind in line
    assert "expected" in line


def test_a_run_near_the_path_is_named(tmp_path: Path) -> None:
    for name in ("mnist", "runs/bert", "runs/gpt"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1}\n')
    questions = {
        "mnits": "mnits does not exist: expected the --save-dir of a run; did you mean mnist? [run-missing]",
        "brt": "brt does not exist: expected the --save-dir of a run; did you mean runs/bert? [run-missing]",
        "zz": "zz does not exist: expected the --save-dir of a run; runs near it are mnist, runs/bert, runs/gpt"
        " [run-missing]",
        "runs": "runs is no run directory, as no file in it was written by a run: expected the --save-dir of a run;"
        " runs near it are mnist, runs/bert, runs/gpt [run-missing]",
        "mnist/log": "mnist/log does not exist: expected the --save-dir of a run; did you mean mnist? [run-missing]",
    }
    answers = ask(tmp_path, [(80, ["top", path]) for path in questions])
    assert [answer.err for answer in answers] == [f"hetseq top: {line}\n" for line in questions.values()]


def test_a_run_that_does_not_train_and_a_node_that_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"{MARKER}\n")
    questions = [["top", ".", "--once"], ["drop", ".", "labA"]]
    begun = ask(tmp_path, [(80, words) for words in questions])
    (tmp_path / "status").mkdir()
    rank = {"step": 3, "state": "done", "pid": 7, "node": "labA", "device": "cpu", "run": {}}
    (tmp_path / "status" / "rank-0.json").write_text(json.dumps(rank))
    (ended,) = ask(tmp_path, [(80, ["drop", ".", "labA"])])
    (tmp_path / "status" / "rank-0.json").write_text(json.dumps({**rank, "state": "train"}))
    (lacking,) = ask(tmp_path, [(80, ["drop", ".", "laba"])])
    assert [answer.err for answer in (*begun, ended, lacking)] == [
        "hetseq top: . has not started, as its status/ has no rank and no launcher uses it: expected a run that has;"
        " start it with `hetseq train --config config.yaml` [run-not-training]\n",
        "hetseq drop: . has not started, as its status/ has no living rank: expected a run in progress; `hetseq top .`"
        " shows its state [run-not-training]\n",
        "hetseq drop: . has ended, as its status/ has no living rank: expected a run in progress; `hetseq top .` shows"
        " its state [run-not-training]\n",
        "hetseq drop: no rank of this run is on laba: its nodes are labA; did you mean labA? [node-missing]\n",
    ]
    assert {answer.code for answer in (*begun, ended, lacking)} == {2}


def test_no_command_that_is_given_a_run_is_left_out() -> None:
    given = {name for name, command in described().items() if re.search(r"\bRUN\b|\bFILE\b", command.usage[0])}
    assert given - {"checkpoints"} <= {name.removesuffix(" of two") for name in OF_A_RUN}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ALL)
def test_help_is_of_one_style_and_fits_the_terminal(
    helps: dict[tuple[str, int], Answer], name: str, width: int
) -> None:
    answer = helps[name, width]
    assert (answer.code, answer.err, answer.has_torch) == (0, "", False)
    assert answer.out.startswith(f"usage: hetseq {name or 'COMMAND'} ")
    assert answer.out.endswith("\n")
    lines = answer.out.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    assert "for example:" in lines
    if name == "train":  # a page of its own making
        width, columns = 120, {0}
    else:
        # what each argument means begins in one column
        columns = {found.end() for line in lines if (found := re.match(r"  \S+(?: \S+)* {2,}(?=\S)", line))}
    assert [line for line in lines if len(line) > min(width, 120)] == []
    assert len(columns) == 1
    assert name == "" or lines[lines.index("for example:") + 1].startswith(f"  hetseq {name}")


@pytest.mark.parametrize("name", described())
def test_help_has_every_option_and_examples_that_can_be_meant(name: str) -> None:
    command = described()[name]
    text = command.help()
    assert [
        word.help for word in command.words if isinstance(word, CommandOption) and f"\n  {word.flag}" not in text
    ] == []
    for example in command.examples:
        words = shlex.split(example.partition(" > ")[0])
        assert words[: 1 + len(command.name.split())] == ["hetseq", *command.name.split()]
        if name != "checkpoints":  # whose examples are those of its actions
            command.read(words[1 + len(command.name.split()) :])


def documented() -> list[tuple[str, list[str]]]:
    """Each command of the manual that is described here, with its words, also where it is not run by a test."""
    found = []
    for line in (line for page in pages() for block in shell_blocks(page) for line in block.commands()):
        words = shlex.split(line, comments=True)
        for _, group in itertools.groupby(words, lambda word: word in (">", "|", "||", "&", "&&")):
            program, *rest = group
            if program == "hetseq":
                length = 2 if rest[0] == "checkpoints" else 1
                found.append((" ".join(rest[:length]), rest[length:]))
    return [(name, words) for name, words in found if name not in ("train", "--version")]


def test_every_spelling_of_the_manual_is_understood() -> None:
    lines = documented()
    assert {name for name, _ in lines} >= {"doctor", "top", "report", "selftest", "script", "ssh", "drop", "plan"}
    for name, words in lines:
        described()[name].read(words)


def test_no_message_names_its_command_which_the_command_line_does() -> None:
    known = "|".join(COMMANDS)
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in sorted((ROOT / "hetseq").rglob("*.py"))
        for text in error_texts(path.read_text(encoding="utf-8"))
        if re.match(rf"hetseq({GAP}|:| ({known})\b)", text)
    ]
    assert found == []
    (seen,) = error_texts('raise ConfigError(f"hetseq top: {run} is no run that has begun")')
    assert re.match(rf"hetseq({GAP}|:| ({known})\b)", seen)


def test_an_example_that_cannot_be_meant_is_seen() -> None:
    command = Command("toy", "About.", ("RUN",), (), ("hetseq toy --help-me",))
    with pytest.raises(CommandRefused):
        command.read(shlex.split(command.examples[0])[2:])


def test_every_command_is_described_and_in_the_overview(helps: dict[tuple[str, int], Answer]) -> None:
    assert COMMANDS.keys() - described().keys() == {"train"}
    assert re.findall(r"^  (\w+)  ", helps["", 80].out, re.MULTILINE) == list(COMMANDS)
