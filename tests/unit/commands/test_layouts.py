"""Layouts of a large model: `hetseq plan RUN --model-parameters N` by rank, `hetseq simulate FILE` by group."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hetseq.balance.memory_plan import Layout, Misfit, ModelMemory
from hetseq.cli import main
from hetseq.commands.plan.cluster_file import read_experiment
from hetseq.commands.plan.command import plan_json, plan_text, simulation_json, simulation_text
from hetseq.commands.plan.layouts import ModelLayouts, model_of
from hetseq.errors import ConfigError
from tests.unit.commands.test_cluster_file import GOOD, ROOT, comparison_of, written
from tests.unit.commands.test_whatif import PAIR, plan_of

GB = 10**9
QUESTION = (
    "--model-parameters",
    "1.3e9",
    "--memory",
    "0:24G,1:11G",
    "--mbit-per-s",
    "10000",
    "--run-parameters",
    "13e6",
)
SERVER = (*QUESTION[:3], "0:24G,1:11G,server:64G", *QUESTION[4:], "--stable", "server", "--activation", "100M")


def layouts_in(folder: Path, *words: str) -> ModelLayouts:
    found = plan_of(folder, PAIR.rows((20, 12)), *words).layouts
    assert found is not None
    return found


# plan


def test_without_a_model_nothing_is_said_of_memory(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, PAIR.rows((20, 12)))
    assert plan.layouts is None
    assert "--shard-model" not in plan_text(plan)
    assert "model" not in json.loads(plan_json(plan))


def test_ranks_of_the_run_own_by_their_memory_and_compute_by_their_speed(tmp_path: Path) -> None:
    none, state, all_ = layouts_in(tmp_path, *QUESTION).found
    assert isinstance(none, Misfit)
    assert none.reason.startswith("rank 1 (node1/cpu) lacks 10.7 GB for a whole replica")
    assert isinstance(state, Layout)
    assert state.shares == (25, 7)
    assert sum(state.fractions) == pytest.approx(1)
    assert state.fractions[0] > 2 * state.fractions[1]
    assert isinstance(all_, Layout)
    assert sum(all_.shares) == sum(state.shares)
    # without whole parameters the small one has room for more of the state
    assert all_.fractions[1] > state.fractions[1]


def test_a_name_that_is_no_rank_is_a_machine_that_computes_nothing(tmp_path: Path) -> None:
    state = layouts_in(tmp_path, *SERVER).found[1]
    assert isinstance(state, Layout)
    assert state.shares[2] == 0
    assert state.fractions == (0, 0, 1)  # it is stable
    added = layouts_in(tmp_path, *SERVER[:3], "0:24G,1:11G,new:64G", *QUESTION[4:], "--add", "new:4").found[1]
    assert isinstance(added, Layout)
    assert added.shares[2] > added.shares[0]
    left = layouts_in(tmp_path, *QUESTION[:3], "1:24G,server:64G", *QUESTION[4:], "--without", "0").found[1]
    assert isinstance(left, Layout)
    assert left.shares == (32, 0)


def test_a_larger_model_than_that_of_the_run_takes_longer_in_proportion(tmp_path: Path) -> None:
    fast = (*QUESTION[:5], "100000", "--run-parameters")  # else few of the ranks would compute the smaller one
    larger, same = (layouts_in(tmp_path, *fast, parameters).found[1] for parameters in ("13e6", "130e6"))
    assert isinstance(same, Layout)
    assert isinstance(larger, Layout)
    assert larger.compute_s == pytest.approx(10 * same.compute_s)
    assert larger.exchange_s == pytest.approx(same.exchange_s)


def test_bytes_of_a_parameter_are_those_of_the_options() -> None:
    assert model_of(10**9, 7, {}) == ModelMemory(10**9, 7, 25 * 2**18, 4, 0, 0, 8, 4)
    assert model_of(10**9, 0, {"optimizer": "sgd"}).state_bytes == 4 * GB
    assert model_of(10**9, 0, {"optimizer": "sgd", "momentum": 0.9}).state_bytes == 8 * GB
    assert model_of(10**9, 0, {"precision": "fp64"}).state_bytes == 24 * GB
    assert model_of(10**9, 0, {"precision": "bf16"}).cast_bytes_per_parameter == 2
    assert model_of(1000, 0, {"bucket_cap_mb": 50}).largest_unit_parameters == 1000


def test_layers_are_counted_computed_again_and_their_activations_leave(tmp_path: Path) -> None:
    plain = layouts_in(tmp_path, *SERVER).model
    assert (plain.layers, plain.checkpoints, plain.offloads) == (24, False, False)
    frozen = layouts_in(tmp_path, *SERVER, "--frozen", "14G").model
    assert frozen == replace(plain, frozen_bytes=14_000_000_000)
    again = layouts_in(tmp_path, *SERVER, "--layers", "48", "--checkpoint", "--offload")
    assert (again.model.layers, again.model.checkpoints, again.model.offloads) == (48, True, True)
    assert again.model.layer * 2 == pytest.approx(plain.layer, rel=0.03)
    (before, after) = (one.found[1] for one in (layouts_in(tmp_path, *SERVER), again))
    assert isinstance(before, Layout)
    assert isinstance(after, Layout)
    assert after.left_bytes[0] > before.left_bytes[0]
    assert after.compute_s > 1.2 * before.compute_s  # layers take 4/3 of the time, and a step's fixed part the same


def test_the_options_of_the_run_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"optimizer": "sgd", "momentum": 0.0}))
    assert layouts_in(tmp_path, *QUESTION).model.state_bytes == 5.2 * GB


#: four ranks, of which two are not there yet, with room for everything in each half
HALVES = (
    "--add", "c:1", "--add", "d:1", "--model-parameters", "1e9", "--memory", "0:40G,1:40G,c:40G,d:40G",
    "--run-parameters", "1e9", "--mbit-per-s", "100", "--node-mbit-per-s", "100000",
)  # fmt: skip


def test_one_group_for_each_node_is_a_row_with_its_command_line(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, PAIR.rows((20, 12)), *HALVES, "--ranks-per-node", "2")
    assert plan.layouts is not None
    assert [one.name for one in plan.layouts.found] == [
        "none", "state", "state --shard-groups node", "all", "all --shard-groups node"
    ]  # fmt: skip
    none, state, by_node, all_, all_by_node = plan.layouts.found
    for one in (none, state, by_node, all_, all_by_node):
        assert isinstance(one, Layout)
        assert one.groups == (((0, 1), (2, 3)) if "node" in one.name else ())
    lines = plan_text(plan).splitlines()
    shown = [" ".join(line.split()) for line in lines]
    assert any(line.startswith("state --shard-groups node ") for line in shown)
    chosen = plan.layouts.chosen
    assert chosen is not None
    assert chosen.groups
    assert f"the best one that fits is --shard-model {chosen.name}, for 32 samples a step" in lines
    facts = json.loads(plan_json(plan))["model"]
    assert [one["shard_groups"] for one in facts["layouts"]] == ["all", "all", "node", "all", "node"]
    assert (facts["chosen"], facts["chosen_groups"]) == (chosen.shard_model, "node")


def test_ranks_of_a_run_are_on_its_nodes_unless_something_else_is_said(tmp_path: Path) -> None:
    together = replace(PAIR, names=("labA/cuda:0", "labA/cuda:1"))

    def names(*words: str) -> tuple[list[str], str]:
        plan = plan_of(tmp_path, together.rows((20, 12)), *HALVES, *words)
        assert plan.layouts is not None
        return [rank.node for rank in plan.layouts.ranks], " ".join(plan.notes)

    nodes, said = names()
    assert nodes == ["labA", "labA", "", ""]
    assert "ranks are taken to be on nodes as in the run (2+1+1); --ranks-per-node N gives another number" in said
    nodes, said = names("--ranks-per-node", "1")
    assert nodes == ["node 0", "node 1", "node 2", "node 3"]
    assert "nodes" not in said
    with pytest.raises(ConfigError, match="--ranks-per-node 3: expected a number that divides the 4 ranks"):
        names("--ranks-per-node", "3")


def test_the_tables_fit_into_80_columns(tmp_path: Path) -> None:
    text = plan_text(plan_of(tmp_path, PAIR.rows((20, 12)), *SERVER))
    assert "note: " not in text
    lines = text[text.index("a model of") :].splitlines()
    assert lines[0] == ("a model of 1,300,000,000 parameters: 5.2 GB, and 15.6 GB of optimizer state and gradient sums")
    assert max(map(len, lines[2:11])) <= 80
    head, none, state, all_, _, ranks, first, second, server = [" ".join(line.split()) for line in lines[2:11]]
    assert (head, none) == ("--shard-model step computing exchange rounds micro-batch", "none does not fit")
    assert state.startswith("state 35.3 s 27 s 16.6 s ")
    assert all_.startswith("all 28.3 s 27 s 16.6 s ")
    assert ranks == "all memory share owns left sends receives"
    assert first.startswith("rank 0 (node0/cpu) 24 GB 25 0.0% ")
    assert second.startswith("rank 1 (node1/cpu) 11 GB 7 0.0% ")
    assert server == "server 64 GB 0 100.0% 36.8 GB 20 GB 10.4 GB"
    assert "the best one that fits is --shard-model all, for 32 samples a step" in lines
    plain = plan_of(tmp_path, PAIR.rows((20, 12)), *QUESTION[:4])
    assert plan_text(plain).splitlines()[-2:] == [
        "note: a sample is taken to cost what it does in the run; --run-parameters N says how much smaller that"
        " model is",
        "note: a link is taken to carry 1,000 Mbit/s; --mbit-per-s N gives another number",
    ]


def test_the_line_for_scripts_holds_the_layouts(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, PAIR.rows((20, 12)), *SERVER)
    facts = json.loads(plan_json(plan))["model"]
    assert (facts["parameter_bytes"], facts["state_bytes"], facts["chosen"]) == (5.2 * GB, 15.6 * GB, "all")
    none, state, all_ = facts["layouts"]
    assert (none["fits"], none["missing_bytes"] > 0, state["fits"]) == (False, True, True)
    assert [row["fraction"] for row in state["groups"]] == [0, 0, 1]
    assert sum(row["samples"] for row in state["groups"]) == 32
    assert (all_["shard_model"], all_["rounds"], all_["micro_batch"] >= 25) == ("all", 1, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--memory", "0:24G"), "--memory belongs to --model-parameters N: add that, or leave --memory out"),
        (("--activation", "1M"), "--activation belongs to --model-parameters N"),
        (("--layers", "12"), "--layers belongs to --model-parameters N: add that, or leave --layers out"),
        (("--checkpoint",), "--checkpoint belongs to --model-parameters N: add that, or leave --checkpoint out"),
        (("--offload",), "--offload belongs to --model-parameters N"),
        (("--ranks-per-node", "2"), "--ranks-per-node belongs to --model-parameters N"),
        (("--node-mbit-per-s", "2"), "--node-mbit-per-s belongs to --model-parameters N"),
        ((*QUESTION, "--ranks-per-node", "0"), "--ranks-per-node 0: expected the number of ranks on each node, as in"),
        ((*QUESTION, "--layers", "0"), "--layers 0: expected the number of layers, as in 24"),
        (QUESTION[:2], "--model-parameters needs the memory of each rank: add --memory 0:24G,1:12G"),
        (("--model-parameters", "many"), "--model-parameters many: expected the number of parameters, as in 3e9"),
        (("--model-parameters", "0"), "--model-parameters 0: expected the number of parameters, as in 3e9"),
        (("--memory", "24G"), "--memory 24G: expected RANK:SIZE with each rank once, as in 0:24G,1:12G"),
        (("--memory", "0:1G,0:2G"), "--memory 0:1G,0:2G: expected RANK:SIZE with each rank once"),
        (("--memory", "0:24X"), "--memory 0:24X: expected RANK:SIZE"),
        (("--mbit-per-s", "0"), "--mbit-per-s 0: expected 10^6 bits per second, as in 1000"),
        (("--activation", "big"), "--activation big: expected a size, as in 500M or 24G"),
        ((*QUESTION[:3], "0:24G"), "--memory lacks rank 1: expected one size per rank, as in 1:24G"),
        ((*QUESTION[:3], "0:24G,1:8G,2:8G"), "rank 2 of the memory options is unknown: expected 0, 1, or a name in"),
        ((*QUESTION, "--stable", "servr"), "rank servr of the memory options is unknown"),
        ((*QUESTION, "--host-memory", "7:1G"), "rank 7 of the memory options is unknown"),
    ],
)  # fmt: skip
def test_a_question_that_cannot_be_meant_is_refused(tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        plan_of(tmp_path, PAIR.rows((20, 12)), *words)
    assert told in str(refusal.value)


# simulate

LARGE = ROOT / "docs" / "examples" / "large-model.yaml"
HEAD = "global_batch: 120\ngradient_bytes: 1e6\n"
SIZED = GOOD.replace(HEAD, "global_batch: 120\nparameters: 1e9\nactivation: 10M\n")
SIZED = SIZED.replace("count: 2,", "count: 2, memory: 24G,").replace("count: 4,", "count: 4, memory: 8e9,")


def test_the_example_of_the_manual_is_a_small_card_a_large_one_and_a_server(tmp_path: Path) -> None:
    found = comparison_of(tmp_path, LARGE.read_text())
    assert found.layouts is not None
    none, state, all_ = found.layouts.found
    assert isinstance(none, Misfit)
    for layout in (state, all_):
        assert isinstance(layout, Layout)
        assert layout.shares == (43, 21, 0)
        assert layout.fractions == (0, 0, 1)
    assert found.experiment.cluster.world_size == 2  # shares are those of ranks that compute
    assert found.experiment.cluster.gradient_bytes == 5.2 * GB
    shown = simulation_text(found)
    assert "cpu-server   64 GB      0  100.0%" in shown
    assert json.loads(simulation_json(found))["model"]["chosen"] == "all"
    manual = (ROOT / "docs" / "guides" / "models-that-do-not-fit.md").read_text(encoding="utf-8")
    assert LARGE.read_text(encoding="utf-8").rstrip() in manual
    assert shown[shown.index("a model of") :].rstrip() in manual  # word for word


def test_ranks_of_a_group_are_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = comparison_of(tmp_path, SIZED)
    assert found.layouts is not None
    assert found.layouts.groups == (("gpu", range(2)), ("cpu", range(2, 6)))
    none, state, _ = found.layouts.found
    assert isinstance(none, Misfit)
    assert "each cpu lacks 8.6" in none.reason  # once, not four times
    assert none.reason.count("cpu") == 1
    assert isinstance(state, Layout)
    assert main(["simulate", str(written(tmp_path, SIZED)), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["model"]["layouts"][1]["groups"]
    assert [(row["name"], row["ranks"]) for row in rows] == [("gpu", 2), ("cpu", 4)]
    assert sum(row["samples"] for row in rows) == 120


def test_host_memory_and_stability_are_read(tmp_path: Path) -> None:
    text = SIZED.replace("memory: 24G", "memory: 24G, host_memory: 500M, stable: true")
    memory = read_experiment(written(tmp_path, text)).memory
    assert memory is not None
    gpu, cpu = memory.ranks[0], memory.ranks[-1]
    assert (gpu.device_bytes, gpu.host_bytes, gpu.is_stable) == (24 * GB, 500_000_000, True)
    assert (cpu.device_bytes, cpu.host_bytes, cpu.is_stable) == (8 * GB, 0, False)
    assert memory.model.activation_bytes_per_sample == 10_000_000


def test_ranks_of_a_node_and_their_link_are_read(tmp_path: Path) -> None:
    text = SIZED.replace("count: 4,", "count: 4, ranks_per_node: 2, node_mbit_per_s: 80000,")
    found = comparison_of(tmp_path, text)
    assert found.layouts is not None
    ranks = found.layouts.ranks
    assert [rank.node for rank in ranks] == ["gpu 0", "gpu 1", "cpu 0", "cpu 0", "cpu 1", "cpu 1"]
    assert [rank.node_bytes_per_s for rank in ranks] == [None] * 2 + [1e10] * 4
    assert [one.name for one in found.layouts.found][2] == "state --shard-groups node"


def test_layers_checkpointing_and_offload_are_read(tmp_path: Path) -> None:
    keys = "layers: 12\ncheckpointing: true\noffload: true\n"
    for text, expected in ((SIZED, (24, False, False)), (keys + SIZED, (12, True, True))):
        memory = read_experiment(written(tmp_path, text)).memory
        assert memory is not None
        assert (memory.model.layers, memory.model.checkpoints, memory.model.offloads) == expected


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory: 24G", "memory: 24X", "line 6: groups[0].memory: found '24X', expected a size, as in 24G or 500M"),
        ("memory: 24G", "memory: [1]", "groups[0].memory: found a list, expected a size, as in 24G or 500M"),
        ("memory: 24G, ", "", "line 6: groups[0].memory is missing: expected a size, as in 24G or 500M"),
        ("memory: 24G", "memory: 24G, stable: yes", "groups[0].stable: found 'yes', expected true or false"),
        ("parameters: 1e9", "parameters: 0", "line 3: parameters: found '0', expected a number from 1"),
        ("parameters: 1e9\nactivation: 10M", "gradient_bytes: 1", "groups[0].memory belongs to parameters: add param"),
        ("parameters: 1e9", "gradient_bytes: 1", "line 4: activation belongs to parameters: add parameters, as in 3e9"),
        ("memory: 24G", "memory: 24G, node_mbit_per_s: 0", "groups[0].node_mbit_per_s: found '0', expected a number"),
        ("activation: 10M", "layers: 1.5", "line 4: layers: found '1.5', expected a whole number from 1 to 100000"),
        ("activation: 10M", "offload: 2", "line 4: offload: found '2', expected true or false"),
        ("parameters: 1e9\nactivation: 10M", "checkpointing: true", "checkpointing belongs to parameters: add para"),
        ("samples_per_s: 10,", "samples_per_s: -1,", "expected a number from 1e-09 to 1e+18, or 0"),
    ],
)  # fmt: skip
def test_memory_that_cannot_be_meant_is_told_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert SIZED.count(old) == 1
    with pytest.raises(ConfigError) as refusal:
        read_experiment(written(tmp_path, SIZED.replace(old, new)))
    assert message in str(refusal.value)


def test_one_group_computes(tmp_path: Path) -> None:
    idle = SIZED.replace("samples_per_s: 100,", "samples_per_s: 0,").replace("samples_per_s: 10,", "samples_per_s: 0,")
    with pytest.raises(ConfigError, match="found none that computes, expected a group with samples_per_s above 0"):
        read_experiment(written(tmp_path, idle))
