"""What reads a checkpoint without training sees a run with owners as it sees any other run: evaluate, predict, export.

All numbers of the task are small multiples of powers of two, so every sum is exact in any order, and a run of replicas
ends with the same bits. Each owner has parts of tensors in its own file; what reads one part alone has other bits.
"""

from __future__ import annotations

import json
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp

from hetseq import config as options
from hetseq.task import make_task
from tests.support.commands import Finished, WarmLauncher

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

STEPS, VALID = 4, 20
TASK = f"""
import torch
from hetseq import Task

def numbers(shape, seed, low, high):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).double()

class Rows(torch.utils.data.Dataset):
    def __init__(self, count, seed):
        self.x, self.y = numbers((count, 24), seed, -3, 4), numbers((count, 16), seed + 1, -5, 6)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        return {{"x": self.x[index], "y": self.y[index]}}

class Exact(Task):
    def load_dataset(self, split):
        return Rows(48, 1) if split == "train" else Rows({VALID}, 3)
    def build_model(self):
        model = torch.nn.ModuleDict({{"one": torch.nn.Linear(24, 16), "two": torch.nn.Linear(24, 16)}})
        for seed, parameter in enumerate(model.parameters()):
            with torch.no_grad():
                parameter.copy_(numbers(parameter.shape, 10 + seed, -2, 3))
        return model
    def build_optimizer(self, parameter_groups):
        groups = [{{**group, "weight_decay": 0.0}} for group in parameter_groups]
        return torch.optim.SGD(groups, lr=0.125, momentum=0.5)
    def loss(self, model, sample):
        return {{"loss": sum((model[name](sample["x"]) - sample["y"]).abs().sum() for name in ("one", "two"))}}
    def predictions(self, model, sample):
        return [str(row.tolist()) for row in model["one"](sample["x"]) + model["two"](sample["x"])]
"""
WORDS = (
    f"--cpu --precision fp64 --global-batch-size 16 --batch-size 4 --max-update {STEPS} --lr 0.125 --clip-norm 0"
    " --lr-scheduler constant --seed 3 --bucket-cap-mb 0.004 --disable-validation --save-interval-updates 2"
    " --no-epoch-checkpoints --no-progress-bar"
)
#: The ranks of the first run own three quarters and one quarter; in the second one a rank without samples owns all.
OWNERS = {
    "3:1": ("--ranks", 2, "--balance", "1,3", "--shard-model", "state", "--own", "3,1"),
    "server": ("--ranks", 3, "--balance", "3,1,0", "--shard-model", "state", "--own", "0,0,1"),
}


@dataclass(frozen=True)
class Runs:
    """A run of replicas, and runs with owners, of the same steps."""

    warm: WarmLauncher
    replicas: Path
    owners: dict[str, Path]

    def say(self, *words: object) -> Finished:
        finished = self.warm.run(list(map(str, words)))
        assert finished.code == 0, finished.err
        return finished

    def both(self, owner: str) -> tuple[Path, Path]:
        return self.owners[owner], self.replicas


@pytest.fixture(scope="module")
def runs(warm: WarmLauncher, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("owned")
    task = folder / "exact_owned.py"
    task.write_text(TASK)
    found = Runs(warm, folder / "replicas", {name: folder / name.replace(":", "-") for name in OWNERS})
    kinds = {found.replicas: ("--ranks", 2, "--balance", "1,1")}
    for run, words in {**kinds, **{found.owners[name]: words for name, words in OWNERS.items()}}.items():
        found.say("train", "--task", f"{task}:Exact", *WORDS.split(), *words, "--save-dir", run)
    return found


def parts_of(run: Path, step: int = STEPS) -> list[dict[str, Tensor]]:
    """The tensors in each file of a checkpoint, by the names that they have there."""
    (folder,) = (run / "checkpoints").glob(f"step-{step:09d}*")
    return [safetensors.torch.load_file(path) for path in sorted(folder.glob("part-*.safetensors"))]


def loss_of(state: dict[str, Tensor], task: Any) -> float:
    """The mean loss of the validation data, in plain PyTorch."""
    data = task["Rows"](VALID, 3)
    outputs = (
        torch.nn.functional.linear(data.x, state[f"{one}.weight"], state[f"{one}.bias"]) for one in ("one", "two")
    )
    return float(sum((output - data.y).abs().sum() for output in outputs)) / VALID


@pytest.fixture(scope="module")
def task(runs: Runs) -> dict[str, Any]:
    """The names of the task's file."""
    return runpy.run_path(str(runs.replicas.parent / "exact_owned.py"))


def exported(runs: Runs, run: Path, form: str, target: Path) -> dict[str, Tensor]:
    runs.say("checkpoints", "export", run, "--format", form, "--to", target)
    if form == "torch":
        content = torch.load(target, weights_only=True)
        return {f"{group}.{name}": one for group in ("model", "optimizer") for name, one in content[group].items()}
    if form == "dcp":
        sizes = dcp.FileSystemReader(target).read_metadata().state_dict_metadata
        tensors = {name: torch.full(each.size, torch.nan, dtype=each.properties.dtype) for name, each in sizes.items()}
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(target), no_dist=True)
        return {name.replace("optim.", "optimizer.", 1): one for name, one in tensors.items()}
    return {
        f"{group}.{name}": one
        for group in ("model", "optimizer")
        for name, one in safetensors.torch.load_file(target / f"{group}.safetensors").items()
    }


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
@pytest.mark.parametrize("owner", OWNERS)
def test_an_export_has_the_bits_of_a_run_of_replicas(owner: str, form: str, runs: Runs, tmp_path: Path) -> None:
    found, expected = (exported(runs, run, form, tmp_path / run.name) for run in runs.both(owner))
    names = {f"{layer}.{kind}" for layer in ("one", "two") for kind in ("weight", "bias")}
    assert found.keys() == expected.keys()
    assert found.keys() == {f"model.{name}" for name in names} | {f"optimizer.{name}.momentum_buffer" for name in names}
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_the_files_of_a_run_with_owners_hold_what_each_rank_owns(
    runs: Runs, task: dict[str, Any], tmp_path: Path
) -> None:
    """Each owner's part matters to the loss: what reads the part of one rank alone evaluates another model."""
    first, second = parts_of(runs.owners["3:1"])
    sizes = [sum(one.numel() for one in part.values()) for part in (first, second)]
    assert sizes[0] / sum(sizes) == pytest.approx(0.75, rel=0.05)
    cut = {name.rpartition("@")[0] for name in first if "@" in name} & {name.rpartition("@")[0] for name in second}
    assert {"model.one.weight", "model.two.weight"} & cut, "a matrix has two owners"
    state = exported(runs, runs.owners["3:1"], "safetensors", tmp_path / "out")
    whole = {name.removeprefix("model."): one for name, one in state.items() if name.startswith("model.")}
    right = loss_of(whole, task)
    untrained = dict(make_task(task["Exact"], options.parse([])).build_model().double().named_parameters())
    for part in (first, second):
        without = {name: one.clone() for name, one in whole.items()}
        for name, values in part.items():
            kind, _, place = name.partition(".")
            bare, _, span = place.partition("@")
            if kind == "model":
                begin, end = map(int, span.split(":")) if span else (0, values.numel())
                without[bare].view(-1)[begin:end] = untrained[bare].detach().reshape(-1)[begin:end]
        assert loss_of(without, task) != right


@pytest.mark.parametrize("owner", OWNERS)
def test_it_is_evaluated_as_the_whole_model_on_any_number_of_ranks(
    owner: str, runs: Runs, task: dict[str, Any], tmp_path: Path
) -> None:
    state = exported(runs, runs.replicas, "safetensors", tmp_path / "out")
    expected = loss_of({name.removeprefix("model."): one for name, one in state.items()}, task)
    said = [
        json.loads(runs.say("evaluate", run, "--json", "--ranks", ranks).out)
        for run, ranks in [(runs.replicas, 1), (runs.owners[owner], 1), (runs.owners[owner], 2)]
    ]
    assert said == [{"step": STEPS, "subset": "valid", "valid_loss": expected}] * 3
    texts = []
    for number, run in enumerate(runs.both(owner)):
        output = tmp_path / f"{number}.txt"
        runs.say("predict", run, "--subset", "valid", "--output", output, "--ranks", 2 - number)
        texts.append(output.read_text())
    assert texts[0] == texts[1]
    assert texts[0].count("\n") == VALID


@pytest.mark.parametrize("owner", OWNERS)
def test_its_checkpoints_are_listed_shown_and_verified_as_others(owner: str, runs: Runs) -> None:
    facts = []
    for run in runs.both(owner):
        listed = json.loads(runs.say("checkpoints", "list", run, "--json").out)
        assert (listed["refused"], listed["uncommitted"], listed["failed_saves"]) == ([], [], [])
        facts.append([(one["step"], one["epoch"], one["kinds"], one["lineage"]) for one in listed["checkpoints"]])
        assert runs.say("checkpoints", "verify", run).out.count("every byte is as it was written") == 2
        shown = json.loads(runs.say("checkpoints", "show", run, "--tensors", "--json").out)
        facts[-1].append(sorted((one["name"], one["dtype"], one["shape"]) for one in shown["tensors"]))
    assert [step for step, *_ in facts[0][:-1]] == [STEPS, 2]
    assert facts[0] == facts[1]
