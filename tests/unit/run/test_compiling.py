"""`--compile`: what is compiled is compiled before the first step, and computes the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetseq import Task
from hetseq import config as options
from hetseq.comm.group import LocalGroup
from hetseq.commands import evaluate
from hetseq.errors import ConfigError
from hetseq.run.loaded_task import load_material
from hetseq.task import make_task
from hetseq.training import compile as compiling
from tests.distributed.test_bert_phases import folder as bert_folder
from tests.support import gpt_records, toys
from tests.support.lives import begin, flat, words
from tests.support.training import Facts, Recorder, prepared, train

Graphs = list[torch.fx.GraphModule]


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Every graph that is compiled. They run as they are, so no C++ compiler is needed."""
    found: Graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(compiling, "_BACKEND", backend)
    return found


class Normed(Task):
    """A regression with batch normalisation."""

    def load_dataset(self, split: str) -> torch.utils.data.TensorDataset:
        x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(x, x.sum(1))

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.5), nn.Linear(4, 1))

    def count(self, sample: Any) -> dict[str, float]:
        return {"loss": len(sample[0])}

    def loss(self, model: nn.Module, sample: Any) -> dict[str, torch.Tensor]:
        return {"loss": (model(sample[0])[:, 0] - sample[1]).square().sum()}


class Plain(Normed):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def trained(name: str, folder: Path, *more: str) -> Facts:
    """Four steps of micro-batches of 5 rows and of 1, of several words to predict each."""
    data = folder / "data"
    if not data.exists() and name == "bert":
        bert_folder(data, length=64)
    elif not data.exists():
        gpt_records.write_folder(data, train=gpt_records.make_rows(60))
    text = "--global-batch-size 16 --batch-size 5 --max-update 4 --dropout 0 --no-save --lr 0.01"
    arguments = ["--task", name, "--data", str(data), *text.split(), "--valid-subset", "train", *more]
    return train(LocalGroup(), prepared(folder / "-".join(["run", *more])), arguments)


@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_no_step_compiles_anything_and_losses_are_the_same(
    name: str, tmp_path: Path, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_up, before = compiling.warm_up, []

    def watched(*arguments: Any, **others: Any) -> None:
        warm_up(*arguments, **others)
        before.append(len(graphs))

    monkeypatch.setattr(compiling, "warm_up", watched)
    facts = trained(name, tmp_path, "--compile")
    assert before[0] > 0
    assert len(graphs) == before[0]
    plain = trained(name, tmp_path)
    assert len(graphs) == before[0]
    assert facts.losses == pytest.approx(plain.losses, rel=1e-5)
    assert facts.validations[-1]["valid_loss"] == pytest.approx(plain.validations[-1]["valid_loss"], rel=1e-5)


def test_compiling_leaves_buffers_gradients_and_mode_as_they_were(graphs: Graphs) -> None:
    plain, compiled = (
        load_material(config, torch.device("cpu"), make_task(Normed, config)).model
        for config in (options.complete(options.parse(words(text))) for text in ("--seed 3", "--seed 3 --compile"))
    )
    assert graphs
    assert all(torch.equal(one, other) for one, other in zip(plain.buffers(), compiled.buffers(), strict=True))
    assert torch.equal(flat(plain), flat(compiled))
    assert {parameter.grad for parameter in compiled.parameters()} == {None}
    assert compiled.training


def test_a_network_of_which_nothing_is_compiled_is_told(graphs: Graphs, caplog: pytest.LogCaptureFixture) -> None:
    config = options.complete(options.parse(words("--compile")))
    for task, said in ((Plain, "compiled Sequential in"), (toys.TwoTerms, "nothing of ModuleDict was compiled")):
        caplog.clear()
        with caplog.at_level("INFO", "hetseq"):
            load_material(config, torch.device("cpu"), make_task(task, config))
        assert said in caplog.text


def test_what_cannot_be_compiled_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        raise RuntimeError("no compiler found")

    monkeypatch.setattr(compiling, "_BACKEND", backend)
    config = options.complete(options.parse(words("--compile")))
    said = r"--compile: torch.compile fails for Sequential \(.*no compiler found.*leave --compile out"
    with pytest.raises(ConfigError, match=said):
        load_material(config, torch.device("cpu"), make_task(Plain, config))


def test_a_step_may_compile_for_two_minutes(tmp_path: Path, graphs: Graphs) -> None:
    deadlines = {}
    for more in ("", "--compile"):
        text = f"--max-update 8 --no-save {more}"
        with begin(LocalGroup(), prepared(tmp_path / f"run{more}"), words(text), Plain, Recorder()) as session:
            session.train()
            deadlines[more] = session.controller.group.deadline_s
    assert deadlines == {"": 5.0, "--compile": 120.0}


def test_evaluation_is_not_compiled_because_the_run_was(tmp_path: Path) -> None:
    of_the_run = tmp_path / "config.yaml"
    of_the_run.write_text("task: mnist\ncompile: true\n")
    assert options.parse(["--config", str(of_the_run)]).optimization.compile
    assert not options.parse(["--config", str(of_the_run)], leave_out=evaluate._OF_THE_RUN).optimization.compile
