"""`hetseq simulate`: the file of a cluster, what is said of one that is wrong, and what is compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetseq.balance.simulation import Clock, Cluster, Link, RankGroup
from hetseq.cli import main
from hetseq.commands.plan.cluster_file import Experiment, read_experiment
from hetseq.commands.plan.command import ClusterComparison, compare, parse_simulate, simulation_json, simulation_text
from hetseq.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
LINK = "link: {mbit_per_s: 8000, latency_ms: 0.1}"
GOOD = f"""
global_batch: 120
gradient_bytes: 1e6
groups:
  - {{name: gpu, count: 2, samples_per_s: 100, fixed_s: 0.01, {LINK}}}
  - {{name: cpu, count: 4, samples_per_s: 10, {LINK}}}
"""


def written(folder: Path, text: str) -> Path:
    (folder / "cluster.yaml").write_text(text, encoding="utf-8")
    return folder / "cluster.yaml"


def comparison_of(folder: Path, text: str) -> ClusterComparison:
    return compare(parse_simulate([str(written(folder, text))]))


def test_a_file_says_what_is_simulated(tmp_path: Path) -> None:
    link = Link(bytes_per_s=1e9, latency_s=1e-4)
    groups = (RankGroup("gpu", 2, 100.0, link, 0.01), RankGroup("cpu", 4, 10.0, link))
    plain = read_experiment(written(tmp_path, GOOD))
    assert plain == Experiment(Cluster(groups, 1e6), Clock(), (120,))
    more = GOOD + "steps: 7\nnoise: 5e-2\nseed: 3\nother_batches: [60, 120, 240]\n"
    told = read_experiment(written(tmp_path, more))
    assert (told.clock, told.global_batches) == (Clock(7, 0.05, 3), (120, 60, 240))


def test_a_group_may_have_micro_batches(tmp_path: Path) -> None:
    text = GOOD.replace("fixed_s: 0.01", "fixed_s: 0.01, micro_batch: 8, per_micro_batch_s: 0.04")
    gpu, cpu = read_experiment(written(tmp_path, text)).cluster.groups
    assert gpu.rank().busy_s(17) == pytest.approx(0.01 + 17 / 100 + 3 * 0.04)
    assert cpu.rank().busy_s(17) == pytest.approx(17 / 10)
    one = GOOD.replace("fixed_s: 0.01", "per_micro_batch_s: 0.04")  # of any size
    gpu, _ = read_experiment(written(tmp_path, one)).cluster.groups
    assert gpu.rank().busy_s(17) == pytest.approx(17 / 100 + 0.04)


def test_learning_is_left_out_where_micro_batches_are_too_many_to_count(tmp_path: Path) -> None:
    def titles(micro_batch: int) -> list[str]:
        text = GOOD.replace("count: 2,", f"count: 2, micro_batch: {micro_batch},")
        found = comparison_of(tmp_path, text.replace("global_batch: 120", "global_batch: 12000"))
        return [trial.title for trial in found.trials]

    assert titles(100) == ["equal shares", "best shares", "learned in 100 steps"]
    assert titles(10) == ["equal shares", "best shares", "learned in 59 steps"]
    assert titles(1) == ["equal shares", "best shares"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("fixed_s: 0.01", "micro_batch: 0", "line 5: groups[0].micro_batch: found '0', expected a whole number from 1"),
        ("fixed_s: 0.01", "micro_batch: 1.5", "line 5: groups[0].micro_batch: found '1.5', expected a whole number"),
        ("fixed_s: 0.01", "per_micro_batch_s: -1", "groups[0].per_micro_batch_s: found '-1', expected a number from 0"),
        ("fixed_s: 0.01", "microbatch: 8", "unknown key groups[0].microbatch: did you mean micro_batch?"),
        ("global_batch: 120\n", "", "line 2: global_batch is missing: expected a whole number from 1 to"),
        ("global_batch: 120", "global_batch: many", "line 2: global_batch: found 'many', expected a whole number"),
        ("global_batch: 120", "global_batch: 1.5", "line 2: global_batch: found '1.5', expected a whole number"),
        ("global_batch: 120", "global_batch: 0", "line 2: global_batch: found '0', expected a whole number from 1"),
        ("global_batch: 120", "global_batch:", "line 2: global_batch: found nothing, expected a whole number"),
        ("global_batch: 120", "global_batch: {a: 1}", "line 2: global_batch: found a mapping, expected a whole number"),
        ("1e6", "-1", "line 3: gradient_bytes: found '-1', expected a number from 0 to 1e+18"),
        ("1e6", ".nan", "line 3: gradient_bytes: found '.nan', expected a number from 0 to 1e+18"),
        ("1e6", "inf", "line 3: gradient_bytes: found 'inf', expected a number from 0 to 1e+18"),
        ("count: 4", "count: 0", "line 6: groups[1].count: found '0', expected a whole number from 1"),
        ("count: 4", "count: 99999", "groups: found 100001 ranks in all, expected at most 100000"),
        ("samples_per_s: 10,", "samples_per_s: 0,", "line 6: groups[1].samples_per_s: found '0', expected a number"),
        ("samples_per_s: 10,", "", "line 6: groups[1].samples_per_s is missing: expected a number from 1e-09"),
        ("name: cpu", "name: ''", "line 6: groups[1].name: found nothing, expected a name"),
        ("name: cpu", "name: gpu", "groups[1].name: found 'gpu' again, expected a different name for each group"),
        ("fixed_s", "fixd_s", "line 5: unknown key groups[0].fixd_s: did you mean fixed_s?"),
        ("fixed_s: 0.01", "count: 3", "line 5: groups[0].count is there twice"),
        ("8000, latency_ms: 0.1}}\n  -", "0}}\n  -", "line 5: groups[0].link.mbit_per_s: found '0', expected a"),
        ("8000, latency_ms: 0.1}}\n  -", "}}\n  -", "line 5: groups[0].link.mbit_per_s: found nothing, exp"),
        ("latency_ms: 0.1}}\n  -", "latency: 1}}\n  -", "unknown key groups[0].link.latency: did you mean latency_ms"),
        (f"{LINK}}}\n  -", "link: fast}\n  -", "groups[0].link: found 'fast', expected a mapping with the keys"),
        ("groups:", "groups: []\nnoise:", "line 4: groups: found a list, expected a list with at least one entry"),
        ("groups:", "other_batches: [60, x]\ngroups:", "line 4: other_batches[1]: found 'x', expected a whole number"),
        ("groups:", "steps: 0\ngroups:", "line 4: steps: found '0', expected a whole number from 1 to 100000"),
        ("groups:", "noise: 11\ngroups:", "line 4: noise: found '11', expected a number from 0 to 10"),
        ("groups:", "seed: -1\ngroups:", "line 4: seed: found '-1', expected a whole number from 0"),
        ("groups:", "groups: [", "line 5: not YAML: "),
        (GOOD, "", ": the file: found nothing, expected a mapping with the keys global_batch"),
        (GOOD, "- 1", "line 1: the file: found a list, expected a mapping"),
        (GOOD, "a\tb: \0", "not YAML"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_told_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert GOOD.count(old) == 1 or old == "1e6", old
    file = written(tmp_path, GOOD.replace(old, new))
    with pytest.raises(ConfigError) as refusal:
        read_experiment(file)
    assert message in str(refusal.value)
    assert str(refusal.value).startswith(str(file))


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: there is no such file, relative to" in capsys.readouterr().err
    assert main(["simulate", str(tmp_path)]) == 2
    assert "cannot be read: Is a directory" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert main(["simulate", str(tmp_path / "binary")]) == 2
    assert "not UTF-8 text" in capsys.readouterr().err
    assert main(["simulate"]) == 2
    assert "expected one FILE, found none" in capsys.readouterr().err


# what is compared


def test_equal_shares_are_compared_with_the_best_ones_of_every_batch(tmp_path: Path) -> None:
    found = comparison_of(tmp_path, GOOD + "other_batches: [240]\n")
    assert [(trial.title, sum(trial.step.shares)) for trial in found.trials] == [
        ("equal shares", 120), ("best shares", 120), ("learned in 100 steps", 120), ("best shares", 240),
    ]  # fmt: skip
    equal, best, learned, larger = (trial.step for trial in found.trials)
    exchange = 2 * 5 * (1e6 / 6 / 1e9 + 1e-4)
    assert equal.step_s == pytest.approx(20 / 10 + exchange)
    assert equal.shares == (20,) * 6
    assert best.shares == (50, 50, 5, 5, 5, 5)
    assert best.step_s == pytest.approx(0.51 + exchange)
    assert best.step_s <= learned.step_s < 0.5 * equal.step_s
    assert larger.samples_per_s > best.samples_per_s
    assert found.advice == ("the best shares make a step 3.91 times as fast as equal ones",)


def test_a_group_whose_link_costs_more_than_it_brings_is_named(tmp_path: Path) -> None:
    slow = GOOD.replace(
        "name: cpu, count: 4, samples_per_s: 10, link: {mbit_per_s: 8000",
        "name: cpu, count: 4, samples_per_s: 10, link: {mbit_per_s: 8",
    )
    advice = comparison_of(tmp_path, slow).advice
    assert advice[1] == "cpu slows this cluster: without it a step takes 611 ms instead of 2.18 s"
    assert len(comparison_of(tmp_path, GOOD).advice) == 1


def test_one_group_is_never_told_to_leave(tmp_path: Path) -> None:
    alone = GOOD[: GOOD.index("  - {name: cpu")].replace("count: 2", "count: 1")
    found = comparison_of(tmp_path, alone)
    assert found.balanced.communication_s == 0
    assert len(found.advice) == 1


def test_thousands_of_ranks_are_simulated_with_noise(tmp_path: Path) -> None:
    many = GOOD.replace("count: 2", "count: 2048").replace("count: 4", "count: 2048").replace("120", "65536")
    found = comparison_of(tmp_path, many + "noise: 0.05\nsteps: 9\n")
    assert [trial.title for trial in found.trials] == ["equal shares", "best shares"]  # too few steps to learn in
    equal, best = (trial.step for trial in found.trials)
    assert best.step_s < 0.5 * equal.step_s
    assert best.waiting_s > 0.1 * best.computing_s  # the slowest of thousands is slow by chance
    text = simulation_text(found)
    assert "4096 ranks, gradients of 1 MB; means of 9 steps, noise 0.05, seed 0" in text
    assert "gpu     2048            29        90.6%" in text


def test_with_many_ranks_fewer_steps_are_learned_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetseq.commands.plan.command._LEARNED", 6 * 20)
    assert comparison_of(tmp_path, GOOD).trials[2].title == "learned in 20 steps"
    monkeypatch.setattr("hetseq.commands.plan.command._LEARNED", 6 * 9)
    assert comparison_of(tmp_path, GOOD).trials[-1].title == "best shares"


def test_the_line_for_scripts_holds_the_same_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = comparison_of(tmp_path, GOOD)
    facts = json.loads(simulation_json(found))
    assert [trial["step_s"] for trial in facts["trials"]] == [trial.step.step_s for trial in found.trials]
    assert facts["trials"][1]["groups"][0] == {"name": "gpu", "ranks": 2, "samples": 100, "least": 50, "most": 50}
    assert main(["simulate", str(tmp_path / "cluster.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == facts


def test_the_example_of_the_manual_is_a_cluster() -> None:
    experiment = read_experiment(ROOT / "docs" / "examples" / "cluster.yaml")
    assert [group.name for group in experiment.cluster.groups] == ["h100", "old-gpu", "pool-room"]
    assert experiment.global_batches[0] == 8192
