"""`hetseq simulate FILE --failures-per-node-day RATE`: the options about failures, and the table of goodput."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetseq.balance.goodput import DAY_S
from hetseq.cli import main
from hetseq.commands.plan.cluster_file import read_experiment
from hetseq.commands.plan.command import ClusterComparison, compare, parse_simulate, simulation_text
from hetseq.commands.plan.failures import FailureAnswer
from hetseq.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
LINK = "link: {mbit_per_s: 8000, latency_ms: 0.1}"
FILE = f"""
global_batch: 120
gradient_bytes: 1e9
groups:
  - {{name: gpu, count: 8, ranks_per_node: 4, samples_per_s: 1, {LINK}}}
  - {{name: cpu, count: 4, samples_per_s: 1, {LINK}}}
"""
RATE = ("--failures-per-node-day", "2")


def compared(folder: Path, *words: str, text: str = FILE) -> ClusterComparison:
    (folder / "cluster.yaml").write_text(text)
    return compare(parse_simulate([str(folder / "cluster.yaml"), *words]))


def answer(folder: Path, *words: str, text: str = FILE) -> FailureAnswer:
    found = compared(folder, *words, text=text).failures
    assert found is not None
    return found


def test_failures_are_simulated_only_if_asked_for(tmp_path: Path) -> None:
    assert compared(tmp_path).failures is None
    assert "goodput" not in simulation_text(compared(tmp_path))


def test_what_is_not_given_follows_from_the_step_and_from_measured_figures(tmp_path: Path) -> None:
    comparison = compared(tmp_path, *RATE)
    step_s, found = comparison.balanced.step_s, comparison.failures
    assert found is not None
    assert step_s == pytest.approx(10 + 2 * 11 * (1e9 / 12 / 1e9 + 1e-4))
    assert (found.nodes, found.interruptions_per_day) == (6, pytest.approx(12.0))
    restart, retry, images = found.ways
    assert {way.disk.steps for way in found.ways} == {round(600 / step_s)}
    assert restart.disk.save_s == pytest.approx(0.08 * step_s)
    assert restart.halt_s == pytest.approx(10 * step_s + 4.1)
    assert retry.halt_s == images.halt_s == pytest.approx(10 * step_s + 0.1)
    assert (retry.join_s, images.join_s) == (pytest.approx(0.1 + 3.0), 0.1), "a replica is sent, 3e9 bytes"
    assert images.live_s == pytest.approx(3.0 / 12)
    assert images.live_steps == 3, "0.25 s, a hundredth of 25 s, and steps are of 11.8 s"
    assert found.found[0].wall_s == pytest.approx(4000 / 12 * DAY_S)


def test_what_is_given_counts(tmp_path: Path) -> None:
    words = (
        "--detect-seconds", "1", "--restart-seconds", "60", "--regroup-seconds", "2", "--save-minutes", "5",
        "--save-seconds", "3", "--image-steps", "7", "--repair-minutes", "10",
    )  # fmt: skip
    found = answer(tmp_path, *RATE, *words)
    restart, retry, images = found.ways
    assert (restart.halt_s, retry.halt_s, images.live_steps, restart.disk.save_s) == (61.0, 3.0, 7, 3.0)
    assert restart.disk.steps == 25
    assert found.question.repair_minutes == 10
    sooner = answer(tmp_path, *RATE, *words[:-1], "0")
    assert all(one.slower_s < other.slower_s for one, other in zip(sooner.found, found.found))


def test_the_best_interval_is_for_restarts_alone(tmp_path: Path) -> None:
    often = ("--failures-per-node-day", "20", "--detect-seconds", "0")
    plain, best = answer(tmp_path, *often), answer(tmp_path, *often, "--save-minutes", "best")
    steps = [[way.disk.steps for way in found.ways] for found in (plain, best)]
    assert steps == [[51, 51, 51], [3, 51, 51]]
    assert best.found[0].fraction > 1.02 * plain.found[0].fraction
    assert best.found[1:] == plain.found[1:]


def test_preemptions_are_of_a_group_and_announced(tmp_path: Path) -> None:
    found = answer(tmp_path, "--preemptions", "cpu:6:30")
    assert (found.nodes, found.interruptions_per_day) == (6, pytest.approx(24.0))
    assert [one.again_steps for one in found.found] == [0, 0, 0]
    assert all(one.slower_s > 0 for one in found.found)
    both = answer(tmp_path, *RATE, "--preemptions", "cpu:6:30", "--preemptions", "gpu:1:5")
    assert both.interruptions_per_day == pytest.approx(12 + 24 + 2)


def test_noise_is_part_of_the_steps_with_fewer_nodes_too(tmp_path: Path) -> None:
    calm, noisy = (
        answer(tmp_path, *RATE, "--save-seconds", "0", text=FILE + f"noise: {noise}\n") for noise in (0, 0.3)
    )
    assert noisy.found[1].calm_step_s > 1.2 * calm.found[1].calm_step_s
    noisy_s, calm_s = (one.found[1].slower_s / one.found[1].steps for one in (noisy, calm))
    assert noisy_s > 1.2 * calm_s


def test_the_table_fits_a_terminal_and_says_the_same_as_the_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text(FILE)
    words = ["simulate", str(tmp_path / "cluster.yaml"), *RATE, "--preemptions", "cpu:6:30"]
    assert main(words) == 0
    text = capsys.readouterr().out
    (begin,) = (at for at, line in enumerate(text.splitlines()) if line.startswith("6 nodes: "))
    lines = text.splitlines()[begin:]
    assert max(map(len, lines)) <= 80
    assert lines[:2] == [
        "6 nodes: 2 failures of each a day, 6 preemptions of each of cpu a day",
        "36 a day in all; means of 4000 simulated ones",
    ]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["failures"]
    assert (facts["nodes"], facts["interruptions_per_day"]) == (6, pytest.approx(36.0))
    for one, line in zip(facts["ways"], lines[4:7], strict=True):
        name, goodput, again, *hours = line.split()
        assert (name, goodput) == (one["name"], f"{one['goodput']:.1%}")
        assert again == f"{one['steps_again']:,.0f}"
        assert float(hours[0]) == pytest.approx(24 * (1 - one["goodput"]), abs=0.006)
        assert sum(map(float, hours[1:])) == pytest.approx(float(hours[0]), abs=0.03)
    assert [one["name"] for one in facts["ways"]] == ["restart", "retry", "images"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--repair-minutes 5", "--repair-minutes belongs to --failures-per-node-day RATE: add that, or leave"),
        ("--image-steps 5", "--image-steps belongs to --failures-per-node-day RATE: add that, or leave"),
        ("--failures-per-node-day 0", "--failures-per-node-day 0: expected failures of one node in a day, above 0"),
        ("--failures-per-node-day nan", "--failures-per-node-day nan: expected failures of one node in a day"),
        ("--failures-per-node-day often", "--failures-per-node-day often: expected failures of one node in a day"),
        ("--failures-per-node-day", "--failures-per-node-day has no value: expected --failures-per-node-day RATE"),
        ("--failure-per-node-day 1", "unknown option --failure-per-node-day: did you mean --failures-per-node-day?"),
        ("--failures-per-node-day 1 --repair-minutes -1", "--repair-minutes -1: expected minutes of 0 or more"),
        ("--failures-per-node-day 1 --save-minutes 0", "--save-minutes 0: expected minutes above 0, as in 10, or best"),
        ("--failures-per-node-day 1 --save-minutes bst", "--save-minutes bst: expected minutes above 0"),
        ("--failures-per-node-day 1 --image-steps 0", "--image-steps 0: expected a whole number from 1"),
        ("--failures-per-node-day 1 --image-steps 1.5", "--image-steps 1.5: expected a whole number from 1"),
        ("--failures-per-node-day 1 --restart-seconds inf", "--restart-seconds inf: expected seconds from 0"),
        ("--failures-per-node-day 1 --detect-seconds -1", "--detect-seconds -1: expected seconds from 0"),
        ("--preemptions cpu:1", "--preemptions cpu:1: expected GROUP:PER_DAY:MINUTES, as in pool-room:2:30"),
        ("--preemptions cpu:0:5", "--preemptions cpu:0:5: expected GROUP:PER_DAY:MINUTES, as in pool-room:2:30"),
        ("--preemptions cp:1:5", "--preemptions cp:1:5: expected a group that computes: gpu, cpu"),
        ("--preemptions cpu:1:5 --preemptions cpu:1:5", "--preemptions cpu:1:5: cpu is given twice: give each group"),
        ("--preemptions cpu:1:5 --detect-seconds 3", "--detect-seconds is about failures, and --preemptions alone"),
        ("--preemptions cpu:1:5 --save-minutes best", "--save-minutes best is about failures, and --preemptions alone"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_a_sentence(
    tmp_path: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text(FILE)
    assert main(["simulate", str(tmp_path / "cluster.yaml"), *words.split()]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_nodes_are_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"found '3', expected a number that divides count, which is 8"):
        compared(tmp_path, text=FILE.replace("ranks_per_node: 4", "ranks_per_node: 3"))
    (tmp_path / "cluster.yaml").write_text(FILE)
    assert [group.ranks_per_node for group in read_experiment(tmp_path / "cluster.yaml").cluster.groups] == [4, 1]
