"""`--delayed-init` on unequal ranks: the numbers of one device, in no more memory than a rank owns and one layer."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hetseq import config as options
from hetseq.comm.group import Group, LocalGroup
from hetseq.errors import TaskError
from hetseq.run import loaded_task
from hetseq.run.build import RankJob, build_replica
from hetseq.run.loaded_task import load_material
from hetseq.run_directory import RunDirectory
from hetseq.system.processes import return_freed_memory
from hetseq.tasks.gpt.task import GptTask
from tests.support import causal_runs, gpt_records, toys
from tests.support.gpt import LAYOUTS as NETWORKS
from tests.support.nightly import nightly
from tests.support.owned import session_of, whole_parameters
from tests.support.ranks import run_ranks
from tests.support.training import Recorder, prepared, toy_words

#: what has owners, and how much each rank owns
LAYOUTS = [
    ("all", "3,1"), ("state", "3,1"), ("all", "6,2,1"),
    *nightly(("state", "6,2,1"), ("all", "1"), ("all", "0,1"), is_many=True),
]  # fmt: skip
#: by precision: the largest distance of a loss from the one that a single rank has; measured were 3e-16, 4e-8, 5e-5
TOLERANCES = {"fp64": 1e-14, "fp32": 1e-6, "bf16": 1e-3}
PRECISIONS = list(TOLERANCES)


class TiedAndFrozen(GptTask):
    """A network whose head is tied, with some parameters that are not trained."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for name, parameter in model.named_parameters():
            if "mlp_norm" in name or "1.attention.output" in name:
                parameter.requires_grad_(False)
        return model


@dataclass
class Begun:
    """What one rank had before the first step, and its losses."""

    parameters: dict[str, torch.Tensor]
    losses: list[float]
    names: list[str]  # under which the embeddings are in the model
    kernel: Any  # of the optimizer


def begin(group: Group, save_dir: str, words: list[str]) -> Begun:
    recorder = Recorder()
    session = session_of(group, save_dir, words, recorder)
    replica = session.controller.replica
    try:
        model = replica.model
        found = whole_parameters(replica, with_frozen=True) if replica.owned is not None else {}
        for name, parameter in model.named_parameters() if replica.owned is None else ():
            found[name] = parameter.detach().clone()
        session.train()
        shared = [name for name, one in model.named_parameters(remove_duplicate=False) if "tokens" in name]
        kernel = replica.optimizer.param_groups[0].get("fused")
        return Begun(found, [row["loss"] for row in recorder.rows], shared, kernel)
    finally:
        session.close()


def begin_all(group: Group, save_dir: str, words: list[str]) -> dict[str, Begun]:
    """By precision."""
    return {precision: begin(group, save_dir, [*words, "--precision", precision]) for precision in PRECISIONS}


def gpt_words(data: Path, *more: str) -> list[str]:
    return [
        "--task", f"{__file__}:TiedAndFrozen", "--data", str(data), "--dropout", "0", "--max-update", "2",
        "--global-batch-size", "12", "--batch-size", "4", "--seed", "7", "--no-save", "--disable-validation",
        "--delayed-init", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt_records.write_folder(
        tmp_path_factory.mktemp("delayed") / "data", train=gpt_records.make_rows(60), config=NETWORKS["gpt2"]
    )


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Begun]:
    """One rank with whole parameters."""
    (found,) = run_ranks(begin_all, 1, prepared(tmp_path_factory.mktemp("alone")), gpt_words(data))
    return found  # type: ignore[no-any-return]


def test_all_precisions_begin_with_the_same_numbers(alone: dict[str, Begun]) -> None:
    for name, right in alone["fp32"].parameters.items():
        assert right.dtype == torch.float32
        assert torch.equal(alone["bf16"].parameters[name], right), name
        assert torch.equal(alone["fp64"].parameters[name], right.double()), name


@pytest.mark.parametrize(("shard_model", "own"), LAYOUTS)
def test_any_layout_begins_with_the_bits_of_one_rank(
    shard_model: str, own: str, data: Path, alone: dict[str, Begun], tmp_path: Path
) -> None:
    words = gpt_words(data, "--shard-model", shard_model, "--own", own)
    for of_rank in run_ranks(begin_all, own.count(",") + 1, prepared(tmp_path), words):
        for precision, begun in of_rank.items():
            right = alone[precision]
            assert begun.parameters.keys() == right.parameters.keys()
            for name, value in right.parameters.items():
                assert torch.equal(begun.parameters[name], value), (precision, name)
            assert begun.losses == pytest.approx(right.losses, rel=TOLERANCES[precision])
            assert begun.names == right.names
            assert begun.kernel == right.kernel  # of the optimizer: others round in another way


def test_without_the_option_the_numbers_are_others(data: Path, alone: dict[str, Begun], tmp_path: Path) -> None:
    words = [word for word in gpt_words(data) if word != "--delayed-init"]
    plain, name = begin(LocalGroup(), prepared(tmp_path), words), "layers.0.attention.qkv.weight"
    assert not torch.equal(plain.parameters[name], alone["fp32"].parameters[name])


def begin_beside_the_host(group: Group, save_dir: str, words: list[str]) -> Begun:
    """As `begin`, with the CPU in the place of a GPU, whose memory may not hold the model."""
    with mock.patch.object(loaded_task, "_is_beside_host", return_value=True):
        return begin(group, save_dir, words)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_that_stays_on_the_host_until_it_is_divided_begins_with_the_same_bits(
    precision: str, data: Path, tmp_path: Path
) -> None:
    words = [word for word in gpt_words(data, "--shard-model", "all", "--own", "3,1") if word != "--delayed-init"]
    words += ["--precision", precision]
    plain = run_ranks(begin, 2, prepared(tmp_path / "plain"), words)
    for right, begun in zip(plain, run_ranks(begin_beside_the_host, 2, prepared(tmp_path / "host"), words)):
        assert begun.losses == right.losses
        assert begun.kernel == right.kernel
        assert all(torch.equal(begun.parameters[name], value) for name, value in right.parameters.items())


def test_a_shadow_of_such_a_run_has_the_whole_model(data: Path, alone: dict[str, Begun], tmp_path: Path) -> None:
    config = options.complete(
        options.parse([*gpt_words(data, "--shard-model", "all"), "--save-dir", prepared(tmp_path)])
    )
    material = load_material(config, torch.device("cpu"))
    whole = replace(config, distributed=replace(config.distributed, shard_model="none"))
    with ExitStack() as closing:
        job = RankJob(whole, RunDirectory(Path(config.checkpoint.save_dir)), LocalGroup(), material, Recorder())
        model = build_replica(job, closing).model
        found = dict(model.named_parameters())
        assert all(torch.equal(found[name], value) for name, value in alone["fp32"].parameters.items())


@pytest.mark.parametrize("kind", ["llama", *nightly("gpt2", "qwen2")])
def test_a_published_architecture_begins_with_the_same_bits_and_no_weights_are_read(kind: str, tmp_path: Path) -> None:
    model = causal_runs.make_model(tmp_path / "model", kind)
    data = causal_runs.write_chats(tmp_path / "data", causal_runs.make_chats())
    words = [*causal_runs.words_of(model, data, steps=2), "--delayed-init"]
    with pytest.raises(TaskError, match=r"gets its numbers at model.py:\d+, when it has no memory"):
        begin(LocalGroup(), prepared(tmp_path / "read"), words)
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    right = begin(LocalGroup(), prepared(tmp_path / "alone"), words)
    assert len(right.losses) == 2
    owners = [*words, "--shard-model", "all", "--own", "3,1"]
    for begun in run_ranks(begin, 2, prepared(tmp_path / "owners"), owners):
        for name, value in right.parameters.items():
            assert torch.equal(begun.parameters[name], value), name
        assert begun.losses == pytest.approx(right.losses, rel=1e-12)


# memory

LAYERS, WIDTH = 6, 2048
LAYER_BYTES = (2 * WIDTH * WIDTH + 2 * WIDTH) * 4


class Wide(toys.TwoTerms):
    """A network of wide layers."""

    def build_model(self) -> nn.Module:
        model = nn.ModuleDict({"body": nn.Linear(6, WIDTH), "cls": nn.Linear(WIDTH, 3), "reg": nn.Linear(WIDTH, 4)})
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)]
        model["layers"] = nn.ModuleList(layers)
        return model

    @staticmethod
    def outputs(model: Any, sample: toys.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = model["body"](sample["x"])
        for layer in model["layers"]:
            hidden = torch.tanh(layer(hidden))
        cls = torch.nn.functional.cross_entropy(model["cls"](hidden), sample["y"], reduction="sum")
        return cls, (model["reg"](hidden) - sample["z"]) ** 2


@dataclass
class Memory:
    grown: int  # bytes at most, until the rank had what it owns
    owned: int  # bytes of parameters and of sums of gradients


def begin_in_little_memory(group: Group, save_dir: str, words: list[str]) -> Memory:
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    before = memory_bytes("VmRSS")
    config = options.complete(options.parse([*words, "--save-dir", save_dir]))
    job = RankJob(config, RunDirectory(Path(save_dir)), group, load_material(config, torch.device("cpu")), Recorder())
    with ExitStack() as undo:
        owned = build_replica(job, undo).owned
        assert owned is not None
        parts = sum(one.owned.nbytes for one in owned.fragments.values())
        return Memory(memory_bytes("VmHWM") - before, 2 * parts)


def memory_bytes(key: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[key].split()[0]) * 1024


@pytest.mark.parametrize("is_delayed", [True, False])
def test_a_rank_begins_with_what_it_owns_and_one_layer(is_delayed: bool, tmp_path: Path) -> None:
    words = toy_words("TwoTerms", max_sentences=2, balance="equal", max_update=1)
    words[words.index("--task") + 1] = f"{__file__}:Wide"
    words += ["--shard-model", "all", "--shard-modules", "layers.*", "--own", "3,1"]
    words += ["--delayed-init"] if is_delayed else []
    ranks = run_ranks(begin_in_little_memory, 2, prepared(tmp_path), words)
    assert sum(rank.owned for rank in ranks) >= 2 * LAYERS * LAYER_BYTES
    is_small = [rank.grown <= rank.owned + 1.2 * LAYER_BYTES for rank in ranks]
    assert all(is_small) == is_delayed, ranks


# resuming


def train_on(group: Group, save_dir: str, words: list[str]) -> list[float]:
    recorder = Recorder()
    session = session_of(group, save_dir, words, recorder)
    try:
        session.train()
        return [row["loss"] for row in recorder.rows]
    finally:
        session.close()


@pytest.mark.parametrize(("shard_model", "own"), [("all", "3,1"), *nightly(("state", "1,3"), is_many=True)])
def test_a_run_resumes_on_any_layout(shard_model: str, own: str, data: Path, tmp_path: Path) -> None:
    words = [word for word in gpt_words(data, "--precision", "fp64") if word != "--no-save"]
    at = words.index("--max-update") + 1
    longer = [*words[:at], "4", *words[at + 1 :]]
    owners = ["--shard-model", "all", "--own", "1,3"]
    whole = train_on(LocalGroup(), prepared(tmp_path / "whole"), longer)
    run_ranks(train_on, 2, prepared(tmp_path / "run"), [*words, "--total-num-update", "4", *owners])
    others = ["--shard-model", shard_model, "--own", own]
    losses = run_ranks(train_on, 2, str(tmp_path / "run"), [*longer, *others])[0]
    assert losses == pytest.approx(whole[2:], rel=1e-12)
