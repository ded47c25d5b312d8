"""`hetseq demo` as a newcomer runs it: it shows the promise, or it is broken."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from hetseq.cli import main
from hetseq.commands import demo
from hetseq.errors import ConfigError
from hetseq.monitor.metrics import read_rows
from tests.support.commands import HETSEQ, run_command


@pytest.mark.slow
@pytest.mark.usefixtures("no_imports")
def test_the_demo_shows_the_curve_of_one_process_for_equal_and_for_fitting_shares(tmp_path: Path) -> None:
    # `make tour` starts it as a newcomer does
    done = run_command(["demo"], program=HETSEQ, cwd=tmp_path, timeout_s=180, is_cold=False)
    assert done.code == 0, done.err
    accuracy = float(re.search(r"accuracy on unseen digits +([0-9.]+)%", done.out)[1])
    difference = float(re.search(r"largest difference of the curves +(\S+) nats", done.out)[1])
    assert accuracy >= 97
    assert difference <= 1e-12
    gain = re.search(r"speed with shares of 3:1 +[0-9,]+ samples/s, ([0-9.]+) times as fast", done.out)
    assert gain or "not measured: this machine is busy (load " in done.out
    assert gain is None or float(gain[1]) > 1
    shared, alone = re.search(r"run directories +(\S+), (\S+)", done.out).groups()
    rows = {row["step"]: row["shares"] for row in read_rows(tmp_path / shared / "metrics.jsonl") if "loss" in row}
    assert [rows[step] for step in (10, 11, 20, 21)] == [[64, 64], [96, 32], [96, 32], [64, 64]]
    assert read_rows(tmp_path / alone / "metrics.jsonl")[0]["shares"] == [128]
    assert "advice" not in done.err
    assert re.findall("^(?:continue|evaluate): .*", done.out + done.err, re.M) == []


def check_the_runs_of_bert(said: str, folder: Path) -> None:
    assert float(re.search(r"largest difference of the curves +(\S+) nats", said)[1]) <= 1e-5
    shared, alone = re.search(r"run directories +(\S+), (\S+)", said).groups()
    for place, shares in ((shared, [12, 4]), (alone, [16])):
        assert read_rows(folder / place / "metrics.jsonl")[0]["shares"] == shares


@pytest.mark.nightly  # README.md's commands and `make tour` run a demo, test_bert the task
@pytest.mark.slow
def test_the_demo_of_bert_is_exact_from_its_first_steps_on(tmp_path: Path) -> None:
    """The whole of it but for 1,160 of its 1,200 steps."""
    short = "import sys; from hetseq.commands import demo; demo._BERT_STEPS = 40; sys.exit(demo.run(['bert'], print))"
    done = run_command([], program=(sys.executable, "-c", short), cwd=tmp_path, timeout_s=180)
    assert done.code == 0, done.err
    for line in ("masked words of unseen text", "guessed right", "by always guessing", "loss per masked word"):
        assert f"\n{line} " in done.out
    check_the_runs_of_bert(done.out, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_demo_of_bert_makes_a_corpus_and_learns_from_it(tmp_path: Path) -> None:
    done = run_command(["demo", "bert"], program=HETSEQ, cwd=tmp_path, timeout_s=380)
    assert done.code == 0, done.err
    right, guess, hidden = (
        float(re.search(rf"{line}.* ([0-9.]+)%", done.out)[1])
        for line in ("guessed right", "by always guessing", "of those the input does not show")
    )
    assert right >= 2 * guess
    assert hidden > guess, "a network that only copies what it sees is no better than the guess"
    loss, entropy = (
        float(re.search(rf"{line} +([0-9.]+) nats", done.out)[1])
        for line in ("loss per masked word", "entropy of the words' frequencies")
    )
    assert loss < entropy
    check_the_runs_of_bert(done.out, tmp_path)


def rows_of(equal_s: list[float], fitting_s: list[float]) -> list[dict[str, float]]:
    """Steps behind the first ones, whose times are those of their blocks; the last of 12 is a small one."""
    blocks = [seconds for pair in zip(equal_s, fitting_s, strict=True) for seconds in pair]
    return [
        {"step": step, "loss": 1.0, "samples": 29 if step % 12 == 0 else 128, "seconds": blocks[(step - 21) // 10]}
        for step in range(21, 21 + 10 * len(blocks))
    ]


def test_the_gain_is_that_of_neighbouring_blocks() -> None:
    busy = [1.0, 3.0, 1.0, 9.0]  # times that the machine changes between pairs
    lines = demo._speeds(rows_of([0.2 * times for times in busy], [0.1 * times for times in busy]))
    assert lines == [
        "speed with equal shares             320 samples/s",
        "speed with shares of 3:1             640 samples/s, 2.00 times as fast",
    ]


def test_no_gain_is_claimed_where_the_machine_is_too_busy() -> None:
    (line,) = demo._speeds(rows_of([0.2, 0.2, 0.2, 0.2], [0.1, 0.4, 0.1, 0.3]))
    assert re.fullmatch(
        r"speed +not measured: this machine is busy \(load [0-9.]+ on \d+ cores?\); the curves above are", line
    )


def test_another_demo_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="hetseq demo: NAME gpt: expected mnist, bert"):
        demo.run(["gpt"], print)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_both_demos_are_in_its_help(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", flag]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: hetseq demo [mnist | bert]")


@pytest.mark.nightly
def test_a_corpus_is_made_where_the_name_has_a_space_and_the_user_has_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "preprocessing").mkdir()
    (tmp_path / "preprocessing" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    demo._make_corpus(Path("a b") / "corpus")
    assert (tmp_path / "a b" / "corpus" / "corpus.json").is_file()
