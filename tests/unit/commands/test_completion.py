"""Completion in a shell: what a press of Tab offers, asked of a real bash; of zsh and fish where they are installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hetseq.cli import COMMANDS, main
from hetseq.commands.completion import SHELLS, bash, fish, lines, zsh
from hetseq.config import all_flags
from tests.support.commands import ROOT
from tests.unit.commands.test_commands import described

TAB = """\
source completion.bash
complete -p hetseq
_hetseq
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell, script in SHELLS.items():
        (folder / f"completion.{shell}").write_text(script(lines()))
    for name in ("data", "runs", "my runs"):
        (folder / name).mkdir()
    (folder / "task.py").write_text("")
    return folder


def offered(folder: Path, *words: str, at: int = -1) -> list[str]:
    """What bash offers for the last of the words, divided as bash divides them."""
    divided = ["hetseq"]
    for word in words:
        flag, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        divided += [flag, *([equals, *([value] if value else [])] if equals else [])]
    quoted = " ".join(f"'{word}'" for word in divided)
    program = f"COMP_WORDS=({quoted})\nCOMP_CWORD={len(divided) - 1}\n{TAB}"
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-u", "-c", program], cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    registered, *answers = done.stdout.splitlines()
    assert registered == "complete -F _hetseq hetseq"
    return [answer for answer in answers if answer]


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (["tr"], ["train"]),
        (["s"], ["script", "ssh", "selftest", "simulate"]),
        (["help", "comp"], ["completion"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["train", "--glo"], ["--global-batch-size"]),
        (["train", "--max-s"], ["--max-sentences-valid", "--max-skipped-steps"]),  # --batch-size is the name to learn
        (["train", "--precision", "f"], ["fp32", "fp64", "fp16"]),
        (["train", "--precision=f"], ["fp32", "fp64", "fp16"]),
        (["train", "--precision="], ["fp32", "tf32", "fp64", "bf16", "fp16"]),
        (["train", "--balance", ""], ["auto", "equal"]),
        (["train", "--resume", "b"], ["best"]),
        (["train", "--restore-file", "l"], ["latest"]),
        (["train", "--task", "bert_"], ["bert_classify", "bert_ner"]),
        (["train", "--task", "ta"], ["task.py"]),
        (["train", "--optimizer", "ad"], ["adam", "adamw", "adadelta"]),
        (["train", "--lr", ""], []),  # a number
        (["train", "--cpu", "--sav"], ["--save-dir", "--save-interval-updates", "--save-interval"]),
        (["train", "--save-dir", "r"], ["runs"]),
        (["train", "--save-dir=r"], ["runs"]),
        (["train", "--save-dir", "my"], ["my runs"]),
        (["train", "--whole"], []),
        (["train", "--task", "bert", "--whole"], ["--whole-words"]),
        (["train", "--task", "bert", "--init-from", "d"], ["data"]),
        (["checkpoints", ""], ["list", "show", "verify", "prune", "export"]),
        (["checkpoints", "export", "runs", "--format", "t"], ["torch"]),
        (["checkpoints", "prune", "r"], ["runs"]),
        (["checkpoints", "prune", "runs", "--d"], ["--drop-best", "--dry-run"]),
        (["top", "r"], ["runs"]),
        (["report", "runs", "d"], ["data"]),
        (["script", "s"], ["slurm", "sge"]),
        (["script", "slurm", "--n"], ["--nodes", "--name"]),
        (["script", "slurm", "--global"], []),
        (["script", "slurm", "--", "--global"], ["--global-batch-size"]),
        (["script", "slurm", "--", "--precision", "b"], ["bf16"]),
        (["evaluate", "runs", "--global"], ["--global-batch-size"]),
        (["evaluate", "runs", "--precision", "b"], ["bf16"]),
        (["evaluate", "runs", "--sub"], ["--subset"]),
        (["nonsense", "--"], []),
    ],
)  # fmt: skip
def test_a_press_of_tab_in_bash(folder: Path, words: list[str], answers: list[str]) -> None:
    assert offered(folder, *words) == answers


def test_every_command_and_every_option_is_offered(folder: Path) -> None:
    assert sorted(offered(folder, "")) == sorted([*COMMANDS, "help"])
    whole = {flag.spellings for flag in lines()["train"].flags}
    assert {name for spellings in whole for name in spellings} - {"-h"} <= set(all_flags())
    assert offered(folder, "train", "--") == [flag.spellings[0] for flag in lines()["train"].flags]
    assert offered(folder, "train", "--")[3:5] == ["--task", "--seed"]  # the basic ones first
    for name, command in described().items():
        assert set(command.flags) <= {spelling for flag in lines()[name].flags for spelling in flag.spellings}
        assert lines()[name].train == command.train


def test_the_scripts_take_no_torch() -> None:
    program = (
        "import sys\nfrom hetseq.cli import main\n"
        "assert [main(['completion', name]) for name in ('bash', 'zsh', 'fish')] == [0, 0, 0]\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "".join(script(lines()) for script in (bash, zsh, fish))


def test_a_shell_without_a_script_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "csh"]) == 2
    assert capsys.readouterr().err.startswith("hetseq completion: SHELL csh: ")


def test_every_line_for_fish_is_a_whole_one(folder: Path) -> None:
    written = (folder / "completion.fish").read_text().splitlines()
    assert all(line.startswith(("complete -c hetseq ", "# ")) for line in written)
    assert all(line.replace("\\'", "").count("'") % 2 == 0 for line in written)
    assert (
        "complete -c hetseq -n '__fish_seen_subcommand_from train' -l save-dir -r -F -d 'the run directory'" in written
    )


@pytest.mark.parametrize(("shell", "program"), [("bash", "bash -n"), ("zsh", "zsh -n"), ("fish", "fish -n")])
def test_the_script_is_understood_by_its_shell(folder: Path, shell: str, program: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    words = [*program.split(), f"completion.{shell}"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("typed", "answers"),
    [
        ("hetseq train --precision f", ["fp16", "fp32", "fp64"]),
        ("hetseq comp", ["completion"]),
        ("hetseq train --glo", ["--global-batch-size"]),
        ("hetseq checkpoints ex", ["export"]),
        ("hetseq script slurm -- --precision b", ["bf16"]),
        ("hetseq script slurm -- --global", ["--global-batch-size"]),
        ("hetseq top r", ["runs/"]),
        ("hetseq train --save-dir r", ["runs/"]),
    ],
)
def test_a_press_of_tab_in_fish(folder: Path, typed: str, answers: list[str]) -> None:
    if shutil.which("fish") is None:
        pytest.skip("needs fish")
    program = f"source completion.fish; complete -C '{typed}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", program], cwd=folder, capture_output=True, text=True, check=True
    )
    assert sorted(line.split("\t")[0] for line in done.stdout.splitlines()) == answers
