"""With parameters that come and go, the product's tasks have the curve of one device, whatever else a run asks for.

As in `test_owned_tasks`: losses and parameters are those of a plain loop to 1e-11, the gradient of the first step to
1e-14, all in fp64. Activations that leave, or are computed again, change no bit.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq.tasks.gpt.task import GptTask
from tests.distributed import test_owned_tasks as owned
from tests.distributed.test_owned_tasks import (
    OPTIMIZERS,
    Case,
    Kind,
    build,
    check_compiled,
    compare,
    make_gpt,
    words_of,
)
from tests.support.nightly import nightly
from tests.support.owned import OwnedFacts, Setting, plain_curve, train_cases
from tests.support.ranks import run_ranks
from tests.support.training import prepared

STEPS = 8
#: who owns how much, who computes how much
LAYOUTS = [("3,1", "9,3"), ("1,3", "9,3"), ("6,2,1", "7,4,1"), ("1,1,8", "9,3,0"), ("2,0,1", "5,4,3")]
AGAIN = "--checkpoint-modules auto"


def away(horizon: int, *, keeps_inputs_alone: bool = True) -> str:
    words = f"--offload-activations --loading-horizon {horizon} --offload-dir {tempfile.gettempdir()}"
    return f"{AGAIN} {words}" if keeps_inputs_alone else words


AWAY = [away(horizon, keeps_inputs_alone=alone) for horizon in (0, 2, 4) for alone in (True, False)]


def train_all(
    kind: Kind, path: Path, cases: list[tuple[Case, str]], *, shares_memory: bool, steps: int
) -> list[list[OwnedFacts]]:
    """The facts of each case, by rank; cases are of one task, each with the samples of its ranks."""
    (world_size,) = {balance.count(",") + 1 for _, balance in cases}
    told = [
        (
            [*words_of(kind, case, steps), "--shard-model", "all", "--balance", balance],
            Setting(kind.base, case.optimizer, case.frozen, case.compiles),
        )
        for case, balance in cases
    ]
    ranks = run_ranks(train_cases, world_size, prepared(path / "run"), told, shares_memory, timeout_s=500)
    return [list(facts) for facts in zip(*ranks, strict=True)]


def check(path: Path, cases: list[tuple[Case, str]], *, shares_memory: bool, steps: int = STEPS) -> None:
    """The cases are of one task and one number of ranks, one after the other in one life."""
    kind = KINDS[cases[0][0].task](path)
    found = train_all(kind, path, cases, shares_memory=shares_memory, steps=steps)
    for (case, _), ranks in zip(cases, found, strict=True):
        curve = plain_curve(
            Setting(kind.base, case.optimizer, case.frozen).frozen_(kind.model()), case.optimizer, kind.loss_of,
            samples=kind.samples, batch=kind.batch, steps=steps, clip_norm=case.clip_norm,
        )  # fmt: skip
        compare(ranks, curve, case)
        alike = next(
            other for (one, _), other in zip(cases, found) if not one.flags and _plain(one) == _plain(case)
        )  # fmt: skip
        check_same_bits(ranks, alike)


def _plain(case: Case) -> tuple[str, str, str, float]:
    """What decides on the bits of a case: all but what becomes of its activations."""
    return (case.own, case.optimizer, case.frozen, case.clip_norm)


def check_same_bits(ranks: list[OwnedFacts], others: list[OwnedFacts]) -> None:
    for facts, other in zip(ranks, others, strict=True):
        assert (facts.losses, facts.norms) == (other.losses, other.norms)
        assert facts.parameters.keys() == other.parameters.keys()
        assert all(torch.equal(value, other.parameters[name]) for name, value in facts.parameters.items())


class SharedLayersTask(GptTask):
    """GPT whose layers share weights, as those of ALBERT do: one a module, one a single parameter."""

    def build_model(self) -> torch.nn.Module:
        model: Any = super().build_model()
        model.layers[1].mlp = model.layers[0].mlp
        model.layers[1].attention.qkv.weight = model.layers[0].attention.qkv.weight
        assert isinstance(model, torch.nn.Module)
        return model


def make_shared(path: Path) -> Kind:
    kind = make_gpt(path, "gpt2")
    return replace(kind, base=SharedLayersTask, model=lambda: build(SharedLayersTask, kind.words))


KINDS = {**owned.KINDS, "shared layers": make_shared}


CASES = {
    "bert adamw": (0, True, [Case("bert", "", "adamw"), Case("bert", "", "adamw", AGAIN)]),
    "bert lamb": (
        2, False, [Case("bert", "", "lamb"), Case("bert", "", "lamb", "--activation-checkpointing")],
    ),
    "gpt2 away": (4, True, [Case("gpt2", "", "adamw"), *(Case("gpt2", "", "adamw", one) for one in AWAY[:2])]),
    "gpt2 muon": (3, False, [Case("gpt2", "", "muon")]),
    "gpt2 compiled": (1, True, [Case("gpt2", "", "adamw"), Case("gpt2", "", "adamw", compiles=True)]),
    "llama frozen": (3, True, [Case("llama", "", "sgd", frozen="layers.0")]),
    "shared layers": (
        2, True, [Case("shared layers", "", "adamw"), Case("shared layers", "", "adamw", AWAY[2])],
    ),
    "causal lm": (4, False, [Case("causal lm", "", "adamw")]),
    "lora": (0, True, [Case("lora", "", "adamw"), Case("lora", "", "adamw", AGAIN)]),
}  # fmt: skip


def placed(cases: list[Case], layout: tuple[str, str]) -> list[tuple[Case, str]]:
    return [(replace(case, own=layout[0]), layout[1]) for case in cases]


NIGHTLY = ["bert lamb", "causal lm"]


@pytest.mark.slow
@pytest.mark.timeout(400)  # compiling takes long on a busy machine
@pytest.mark.parametrize("name", [*(name for name in CASES if name not in NIGHTLY), *nightly(*NIGHTLY)])
def test_the_curve_is_that_of_one_device(name: str, tmp_path: Path) -> None:
    layout, shares_memory, cases = CASES[name]
    check(tmp_path, placed(cases, LAYOUTS[layout]), shares_memory=shares_memory)


@pytest.mark.parametrize("task", nightly(*KINDS))
def test_so_is_a_long_one(task: str, tmp_path: Path) -> None:
    check(tmp_path, placed([Case(task, "", "adamw"), Case(task, "", "sgd")], LAYOUTS[3]), shares_memory=True, steps=50)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("shares_memory", nightly(True, False))
@pytest.mark.parametrize("layout", nightly(*LAYOUTS))
@pytest.mark.parametrize("task", nightly(*KINDS))
def test_the_whole_matrix(task: str, layout: tuple[str, str], shares_memory: bool, tmp_path: Path) -> None:
    frozen = "q_proj" if task == "lora" else "layers.0"
    cases = [Case(task, "", optimizer) for optimizer in OPTIMIZERS]
    cases += [Case(task, "", "adamw", frozen=frozen), Case(task, "", "sgd", clip_norm=0.0)]
    cases += [Case(task, "", "adamw", one) for one in (AGAIN, *AWAY, "--activation-checkpointing")]
    cases += [Case(task, "", "adamw", AWAY[0], frozen=frozen), Case(task, "", "muon", AWAY[2])]
    if shares_memory and task not in ("causal lm", "lora"):  # the transport makes no difference to compiled layers
        cases += [Case(task, "", "adamw", flags, compiles=True) for flags in ("", AWAY[0])]
    check(tmp_path, placed(cases, layout), shares_memory=shares_memory)


@pytest.mark.timeout(400)
@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler for a CPU")
def test_two_compiled_ranks_have_the_curve_of_plain_ones(tmp_path: Path) -> None:
    words = [*words_of(make_gpt(tmp_path, "gpt2"), Case("gpt2", "3,1", "sgd"), STEPS), "--shard-model", "all"]
    check_compiled(words, tmp_path)
