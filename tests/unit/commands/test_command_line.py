"""How the words of a command become values, and in which words those are refused that cannot be meant."""

from __future__ import annotations

import platform
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hetseq import __version__
from hetseq.cli import main
from hetseq.config import HelpRequested, parse
from hetseq.config.command_line import Argument, Command, CommandOption, CommandRefused, seconds, whole_number
from hetseq.errors import ConfigError

TOY = Command(
    "toy",
    "What 100 % of a toy does.",
    usage=("RUN [OTHER] [options]",),
    words=(
        Argument("RUN", "a run"),
        Argument("OTHER", "another one", is_optional=True),
        CommandOption("--count", "how many; default 3", "N", read=whole_number(1, 9), default=3),
        CommandOption("--wait", "how long", "S", read=seconds(0)),
        CommandOption("--form", "50 % of it", "FORM", among=("round", "square"), also=("--shape",)),
        CommandOption("--add", "one more", "NAME", is_many=True),
        CommandOption("--quiet", "say nothing"),
    ),
    examples=("hetseq toy runs/a", "hetseq toy runs/a --count 2"),
)
MUST = Command(
    "must", "About.", ("--to PATH",), (CommandOption("--to", "where to", "PATH", is_needed=True),), ("hetseq must",)
)
BEHIND = Command(
    "far", "About.", ("WHO -- ...",), (Argument("WHO", "who"), CommandOption("--deep", "deep")),
    ("hetseq far me --deep", "hetseq far me -- --lr 1"), train="behind",
)  # fmt: skip
AMONG = Command(
    "near", "About.", ("RUN",), (Argument("RUN", "a run"), CommandOption("--to", "to", "PATH", is_needed=True),
    CommandOption("--json", "json"), CommandOption("--lr", "shown", "LR", is_passed_on=True)),
    ("hetseq near a --to b",),
    train="among",
)  # fmt: skip


def values(line: str, command: Command = TOY) -> dict[str, Any]:
    return dict(command.read(shlex.split(line)).values)


def refused(line: str, command: Command = TOY) -> str:
    with pytest.raises(CommandRefused) as refusal:
        command.read(shlex.split(line))
    assert refusal.value.exit_code == 2
    return str(refusal.value)


def test_options_may_stand_before_between_and_behind_the_arguments() -> None:
    wanted = {
        "RUN": "a", "OTHER": "b", "--count": 2, "--wait": 0.5, "--form": "square", "--add": ("x", "y"), "--quiet": True,
    }  # fmt: skip
    for line in (
        "a b --count 2 --wait .5 --form square --add x --add y --quiet",
        "--count=2 --wait=.5 --shape=square --add x --add y --quiet a b",
        "--quiet a --add x --shape square b --add y --count 2 --wait .5",
        "--add x --add y --quiet --form square --count 2 --wait .5 -- a b",
    ):
        assert values(line) == wanted
    assert values("a") == {
        "RUN": "a", "OTHER": None, "--count": 3, "--wait": None, "--form": None, "--add": (), "--quiet": False,
    }  # fmt: skip
    assert values("-- -a")["RUN"] == "-a"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "expected RUN [OTHER], found none; as in: hetseq toy runs/a"),
        ("a b c", "expected RUN [OTHER], found a b c; as in: hetseq toy runs/a"),
        ("''", "expected RUN [OTHER], found ''; as in: hetseq toy runs/a"),
        ("a --coun 3", "unknown option --coun: did you mean --count?"),
        ("a --cou=3", "unknown option --cou: did you mean --count?"),
        ("a -x 3", "unknown option -x: expected --count, --wait, --form, --shape, --add, --quiet"),
        ("a --count", "--count has no value: expected --count N, as in: hetseq toy runs/a --count 2"),
        ("a --count=", "--count has no value: expected --count N, as in: hetseq toy runs/a --count 2"),
        ("a --shape --quiet", "--shape has no value: expected --shape FORM, as in: hetseq toy runs/a"),
        ("a --count 0", "--count 0: expected a whole number from 1 to 9"),
        ("a --count -1", "--count -1: expected a whole number from 1 to 9"),
        ("a --count 1e3", "--count 1e3: expected a whole number from 1 to 9"),
        ("a --count ٣", "--count ٣: expected a whole number from 1 to 9"),
        ("a --wait nan", "--wait nan: expected seconds of 0 or more, as in 5"),
        ("a --wait inf", "--wait inf: expected seconds of 0 or more, as in 5"),
        ("a --shape rounded", "--shape rounded: did you mean round?"),
        ("a --form x", "--form x: expected round, square"),
        ("a --count 2 --count 3", "--count is given twice: give it once, as in: hetseq toy runs/a --count 2"),
        ("a --form round --shape round", "--form is given twice: give it once, as in: hetseq toy runs/a"),
        ("a --quiet=yes", "--quiet takes no value"),
    ],
)
def test_what_cannot_be_meant_is_told_with_the_command_the_argument_and_a_remedy(line: str, told: str) -> None:
    assert refused(line) == f"hetseq toy: {told}"


def test_an_option_that_is_needed_is_missed_also_where_it_stands_misspelt() -> None:
    assert refused("", MUST) == "hetseq must: --to PATH is missing, as in: hetseq must"
    assert refused("x --to y", MUST) == "hetseq must: unexpected argument x: expected options alone, as in: hetseq must"
    assert refused("a --too b", AMONG) == "hetseq near: unknown option --too: did you mean --to?"
    assert refused("a --data b", AMONG) == "hetseq near: --to PATH is missing, as in: hetseq near a --to b"


def test_options_of_train_stand_behind_two_dashes() -> None:
    given = BEHIND.read(["--deep", "me", "--", "--lr", "1", "--", "--help"])
    assert (given["WHO"], given["--deep"], given.rest) == ("me", True, ("--lr", "1", "--", "--help"))
    told = "hetseq far: expected the options of hetseq train after --, as in: hetseq far me -- --lr 1"
    assert refused("me --deep", BEHIND) == told
    assert refused("me --lr 1 --", BEHIND) == "hetseq far: --lr is an option of hetseq train: write it after --"
    assert refused("--", BEHIND) == "hetseq far: expected one WHO, found none; as in: hetseq far me --deep"


@pytest.mark.parametrize(
    "line",
    [
        "RUN --to x --json --lr -1e-5 --data=d",
        "--to x RUN --lr -1e-5 --json --data=d",
        "--lr -1e-5 --to=x --json --data=d RUN",
        "--lr -1e-5 --to=x --json RUN --data=d",
        "--to x --json RUN -- --lr -1e-5 --data=d",
    ],
)
def test_other_options_of_train_may_stand_anywhere(line: str) -> None:
    given = AMONG.read(shlex.split(line))
    assert (given["RUN"], given["--to"], given["--json"]) == ("RUN", "x", True)
    assert given.rest == ("--lr", "-1e-5", "--data=d")


def test_a_word_that_an_option_of_train_may_own_is_not_taken_for_an_argument() -> None:
    assert refused("--to x --cpu RUN", AMONG).startswith("hetseq near: expected one RUN, found none")


@pytest.mark.parametrize("line", ["--help", "-h", "a b c --help", "--count --help", "--nonsense -h", "--count x -h"])
def test_help_is_given_whatever_else_stands_there(line: str) -> None:
    with pytest.raises(HelpRequested) as request:
        TOY.read(shlex.split(line))
    assert request.value.text.startswith("usage: hetseq toy RUN [OTHER] [options]\n\nWhat 100 % of a toy does.\n")
    assert "--form FORM  50 % of it\n" in request.value.text
    assert "--shape" not in request.value.text


def test_help_that_belongs_to_train_is_not_this_command_s() -> None:
    assert TOY.read(["--", "--help"])["RUN"] == "--help"


def test_a_long_example_goes_on_behind_a_backslash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    line = f"hetseq toy {' '.join(f'runs/number-{number}' for number in range(9))}"
    text = Command("toy", "About.", ("RUN",), (), (line,)).help()
    shown = text.partition("for example:\n")[2]
    assert shlex.split(shown.replace("\\\n", "")) == shlex.split(line)
    assert max(map(len, text.splitlines())) <= 60


def test_a_refusal_names_its_command_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, begins in (
        (["top", "--often"], "hetseq top: unknown option --often"),
        (["top", str(tmp_path)], f"hetseq top: {tmp_path} is no run directory"),
        (["checkpoints", "prune", "x"], "hetseq checkpoints prune: --keep N is missing"),
        (["train", "--lrr", "1"], "hetseq: unknown option --lrr"),
        (["bogus"], "hetseq: unknown command 'bogus'; `hetseq --help` lists them [command-unknown]"),
        (["selftst"], "hetseq: unknown command 'selftst'; did you mean 'selftest'? [command-unknown]"),
        (
            ["--verison"],
            "hetseq: unknown command '--verison' (options of a training run come after `hetseq train`); did you mean"
            " '--version'? [command-unknown]",
        ),
    ):
        assert main(words) == 2
        told = capsys.readouterr()
        assert told.err.startswith(begins)
        assert (told.err.count("hetseq top:") + told.err.count("hetseq: "), told.out) in ((1, ""), (0, ""))


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_the_versions_are_one_line(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    python = platform.python_version()
    assert capsys.readouterr().out == f"hetseq {__version__} (torch {version('torch')}, Python {python})\n"


def test_a_misspelt_option_of_a_command_is_found_among_those_of_train() -> None:
    for also, told in ((AMONG.flags, "did you mean --json?"), ((), "did you mean --join?")):
        with pytest.raises(ConfigError) as refusal:
            parse(AMONG.read(["RUN", "--to", "x", "--jason"]).rest, also=also)
        assert str(refusal.value) == f"unknown option --jason: {told}"


def test_help_of_a_command_is_asked_for_in_either_order(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for words in (["help", "top"], ["top", "--help"], ["top", "-h"]):
        assert main(words) == 0
        told.append(capsys.readouterr().out)
    assert told[0].startswith("usage: hetseq top RUN")
    assert len(set(told)) == 1
