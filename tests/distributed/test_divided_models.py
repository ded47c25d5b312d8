"""Ranks that hold one model together have the gradient and the curve of one device, also beside one with all of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetseq.data.fetch import seed_everything
from tests.distributed.test_owned_tasks import KINDS, Case, words_of
from tests.support import divided, gpt
from tests.support.owned import Setting, plain_curve
from tests.support.ranks import run_ranks
from tests.support.training import prepared

STEPS = 8
#: the degree, other options, and the shares of the groups that divide the model
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "2": (2, ["--tensor-parallel-degree", "2"]),
    "2+1": (3, ["--tensor-parallel-degree", "2+1", "--balance", "4,4,2"]),
    "2+2": (4, ["--tensor-parallel-degree", "2", "--balance", "4,4,2,2"]),
    "2+2, state": (4, ["--tensor-parallel-degree", "2", "--shard-model", "state", "--own", "3,1,1,2"]),
    "4": (4, ["--tensor-parallel-degree", "4"]),
}


def words(*more: str) -> list[str]:
    line = ["--curriculum", "1000000", "--clip-norm", "0.5", "--seed", "7", "--no-save", "--disable-validation"]
    line += ["--lr-scheduler", "constant", "--lr", "0.01", "--optimizer", "adamw", "--precision", "fp64"]
    line += ["--weight-decay", "0.01"]
    return [*line, "--global-batch-size", "6", "--max-sentences", "2", "--max-update", str(STEPS), *more]


def alone() -> tuple[list[float], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """The same training in a plain loop: losses, clipped gradients and parameters."""
    seed_everything(7)
    model = divided.NextWord().double()
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for one in named.values() if one.dim() > 1], "weight_decay": 0.01},
            {"params": [one for one in named.values() if one.dim() < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    data, losses, gradients = divided.rows(), [], []
    for step in range(STEPS):
        batch = data[step * 6 % len(data) :][:6]
        optimizer.zero_grad()
        loss = divided.loss_of(model, batch) / 6
        loss.backward()
        norm = torch.cat([one.grad.flatten() for one in named.values() if one.grad is not None]).norm().item()
        for one in named.values() if norm > 0.5 else ():
            assert one.grad is not None
            one.grad *= 0.5 / norm
        gradients.append({name: one.grad.clone() for name, one in named.items() if one.grad is not None})
        losses.append(loss.item())
        optimizer.step()
    return losses, gradients, {name: one.detach() for name, one in named.items()}


def apart(mine: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    difference = torch.cat([(mine[name] - right[name]).flatten() for name in right])
    return float(difference.norm() / torch.cat([one.flatten() for one in right.values()]).norm())


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_divide_a_model_have_the_curve_of_one_device(
    layout: str, shares_memory: bool, tmp_path: Path
) -> None:
    size, more = LAYOUTS[layout]
    ranks: list[Any] = run_ranks(divided.train, size, prepared(tmp_path), words(*more), shares_memory, timeout_s=60)
    losses, gradients, parameters = alone()
    shapes = {name: one.shape for name, one in parameters.items()}
    for facts in ranks:
        assert facts.losses == pytest.approx(losses, rel=1e-12)
    for step, right in enumerate(gradients):
        mine = divided.put_together([facts.gradients[step] for facts in ranks], shapes)
        assert apart(mine, right) <= 1e-14 * 100 ** (step > 0), (step, apart(mine, right))
    assert apart(divided.put_together([facts.parameters for facts in ranks], shapes), parameters) <= 1e-12


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "gloo"])
def test_between_models_travels_what_travels_between_groups_and_within_one_only_what_is_whole(
    shares_memory: bool, tmp_path: Path
) -> None:
    size, more = LAYOUTS["2+1"]
    line = words(*more, "--memory-interval-updates", "0")  # no images
    ranks: list[Any] = run_ranks(divided.train, size, prepared(tmp_path), line, shares_memory, timeout_s=60)
    first, second, alone_ = ranks
    assert first.own_parts == second.own_parts > 0
    assert min(first.own_whole, second.own_whole) > 0
    across = [facts.own_parts + facts.own_whole for facts in ranks]  # own size x 2 (G - 1) / G of two models
    # the first one gives the gradients of both, and each its new parameters to the other
    within = [second.own_whole + first.own_whole, second.own_whole, 0]
    for facts, elements in zip(ranks, np.add(across, within), strict=True):
        sent = np.diff(facts.sent_bytes)
        assert sent.tolist() == pytest.approx([8 * int(elements)] * len(sent), rel=0.05)
    assert alone_.own_parts == 2 * first.own_parts


def test_validation_counts_each_sample_once(tmp_path: Path) -> None:
    line = [one for one in words("--validate-interval-updates", "4") if one != "--disable-validation"]
    size, more = LAYOUTS["2+1"]
    ranks: list[Any] = run_ranks(divided.train, size, prepared(tmp_path / "divided"), [*line, *more], True)
    (one,) = run_ranks(divided.train, 1, prepared(tmp_path / "one"), [*line, "--shard-model", "state"], True)
    assert len(one.validations) >= 2
    for facts in ranks:
        assert facts.validations == pytest.approx(one.validations, rel=1e-12)


def test_a_parameter_between_divided_layers_is_refused_unless_its_gradients_are_added(tmp_path: Path) -> None:
    line = words("--tensor-parallel-degree", "2")
    for text in run_ranks(divided.refuse, 2, prepared(tmp_path / "refused"), line, divided.SlopedTask):
        assert "layers.0.slope.weight has another gradient on each rank that divides the model" in text
    task = divided.SummedSlopesTask
    both = run_ranks(divided.losses, 2, prepared(tmp_path / "both"), line, task)
    (one,) = run_ranks(divided.losses, 1, prepared(tmp_path / "one"), words("--shard-model", "state"), task)
    assert both[0] == both[1] == pytest.approx(one, rel=1e-12)


def test_settings_of_the_optimizer_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    size, more = LAYOUTS["2+1"]
    for text in run_ranks(divided.refuse, size, prepared(tmp_path), words(*more), divided.ByNameTask):
        assert "rank 2 gives the optimizer other settings for some parameter than rank 0" in text


def test_an_optimizer_that_updates_whole_tensors_is_refused(tmp_path: Path) -> None:
    line = words("--tensor-parallel-degree", "2", "--optimizer", "lamb")
    for text in run_ranks(divided.refuse, 2, prepared(tmp_path), line, divided.NextWordTask):
        assert "Lamb updates whole tensors, of which ranks have parts" in text


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("task", "degrees", "most"),
    [
        ("gpt2", "2", 0.75), ("llama", "2", 0.75), ("llama", "2+1", 1.0), ("bert", "2", 0.9),
        pytest.param("causal lm", "2", 0.7, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_an_included_task_is_divided_by_the_plan_of_its_model(
    task: str, degrees: str, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    four_heads = dataclasses.replace(gpt.GPT2, num_attention_heads=4, num_key_value_heads=4, head_dim=6)
    monkeypatch.setitem(gpt.LAYOUTS, "gpt2", four_heads)
    if task == "causal lm":
        pytest.importorskip("transformers")
    case = Case(task, "3,1", "adamw", clip_norm=0.5)
    kind = KINDS[case.task](tmp_path)
    line = [*words_of(kind, case, STEPS), "--shard-model", "none", "--own", "auto", "--balance", "equal"]
    line += ["--tensor-parallel-degree", degrees, "--memory-interval-updates", "0"]
    ranks: list[Any] = run_ranks(
        divided.train_task, 3 if "+" in degrees else 2, prepared(tmp_path / "run"), line,
        Setting(kind.base, case.optimizer), timeout_s=300,
    )  # fmt: skip
    right = plain_curve(
        kind.model(), case.optimizer, kind.loss_of, samples=kind.samples, batch=kind.batch, steps=STEPS, clip_norm=0.5
    )
    for facts in ranks:
        assert facts.losses == pytest.approx(right.losses, rel=1e-12)
    assert ranks[0].elements < most * right.parameters.numel()
