"""Steps with several updates, as of a GAN, and losses over the whole global batch, as of CLIP."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from hetseq.data.fetch import seed_everything
from hetseq.data.plan import epoch_order
from hetseq.monitor.metrics import read_rows
from tests.support import forked
from tests.support.commands import ROOT
from tests.support.loops import clip, gan
from tests.support.nightly import nightly
from tests.support.own_loops import LOOPS, Course, courses, farthest, run_lines, run_script

pytestmark = pytest.mark.slow

THREE = ("--cpu", "--ranks", 3, "--balance", "5,2,1")
EXAMPLES = ROOT / "docs" / "examples"
SCRIPTS = {"gan": gan, "clip": clip}


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    forked.warm_up()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Course]:
    """The course of each script on one rank."""
    found = {}
    for name, script in SCRIPTS.items():
        folder = tmp_path_factory.mktemp(name)
        finished = run_lines(folder, "--cpu", "--ranks", 1, script=LOOPS / f"{name}.py")
        assert finished.code == 0, finished.err
        (found[name],) = courses(folder)
        assert list(found[name]) == list(range(1, script.STEPS + 1))
    return found


def batches(script: Any, data: Any, seed: int) -> Any:
    """The global batches of a run, in their order."""
    steps = 0
    for epoch in range(1, 100):
        order = epoch_order(len(data), seed=seed, epoch=epoch).take(0, len(data)).tolist()
        for start in range(0, len(data), script.BATCH):
            if steps == script.STEPS:
                return
            steps += 1
            yield [x.double() for x in default_collate([data[index] for index in order[start : start + script.BATCH]])]


def test_a_gan_is_plain_pytorch_to_the_last_bit(alone: dict[str, Course]) -> None:
    seed_everything(5)
    generator, critic, adam, rmsprop = gan.parts()
    generator.double(), critic.double()
    rows = []
    for real, noise in batches(gan, gan.Points(), seed=5):
        rmsprop.zero_grad()
        of_critic = (gan.score(critic(real), 1.0) + gan.score(critic(generator(noise).detach()), 0.0)) / len(real)
        of_critic.backward()
        rmsprop.step()
        adam.zero_grad()
        of_generator = gan.score(critic(generator(noise)), 1.0) / len(real)
        of_generator.backward()
        adam.step()
        weights = [float(value.detach().abs().sum()) for model in (generator, critic) for value in model.parameters()]
        rows.append((float(of_critic.detach()), float(of_generator.detach()), sum(weights)))
    assert rows == [(row["critic"], row["generator"], row["weights"]) for row in alone["gan"].values()]


def test_a_loss_over_the_whole_batch_is_plain_pytorch(alone: dict[str, Course]) -> None:
    seed_everything(3)
    model = clip.TwoTowers().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for row, (image, text) in zip(alone["clip"].values(), batches(clip, clip.Pairs(), seed=3), strict=True):
        loss = model.loss(*model.embed(image, text))
        optimizer.zero_grad()
        loss.backward()
        gradients = [value.grad for value in model.parameters() if value.grad is not None]
        norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
        for gradient in gradients:
            gradient.mul_(min(1.0, 0.5 / norm))
        optimizer.step()
        assert abs(float(loss.detach()) - row["loss"]) <= 1e-13
        assert abs(norm - row["grad_norm"]) <= 1e-13
        assert abs(float(model.scale.detach()) - row["scale"]) <= 1e-13


@pytest.mark.parametrize(("name", "lines"), [("gan", 3), ("clip", 3), ("early_stopping_loop", 14)])
def test_an_example_prints_the_same_on_unequal_ranks(name: str, lines: int, tmp_path: Path) -> None:
    printed = []
    for options in (("--ranks", 1), ("--ranks", 3, "--balance", "5,2,1")):
        words = ["--cpu", *options, "--save-dir", tmp_path / f"{options[1]}", EXAMPLES / f"{name}.py"]
        finished = run_script(words)
        assert finished.code == 0, finished.err
        assert "warning" not in finished.err
        printed.append(re.findall(r"(?m)^(?:step \d+: |epoch \d+: ).*", finished.out))
    assert printed[0] == printed[1]
    assert len(printed[0]) == lines


@pytest.mark.parametrize("name", SCRIPTS)
def test_unequal_ranks_with_small_micro_batches_give_the_course_of_one(
    name: str, alone: dict[str, Course], tmp_path: Path
) -> None:
    finished = run_lines(tmp_path, *THREE, "--batch-size", 3, script=LOOPS / f"{name}.py")
    assert finished.code == 0, finished.err
    found = courses(tmp_path)
    assert [len(course) for course in found] == [SCRIPTS[name].STEPS] * 3
    assert all(farthest(alone[name], course) <= 1e-12 for course in found)
    rates = [row["lr"] for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert rates == {"gan": [1e-3, 2e-3] * gan.STEPS, "clip": [3e-3] * clip.STEPS}[name], "of whose turn it was"


@pytest.mark.parametrize(
    ("name", "event"),
    [("gan", "kill:between:1:4"), ("clip", "kill:body:1:4"),
     *nightly(*((name, f"kill:{place}:{rank}:{step}") for name, places in (("gan", ("first", "between", "second")),
                                                                        ("clip", ("body", "loss")))
                for place in places for rank, step in ((0, 5), (2, 3))), is_many=True)],
)  # fmt: skip
def test_a_rank_that_is_killed_changes_nothing(name: str, event: str, alone: dict[str, Course], tmp_path: Path) -> None:
    finished = run_lines(tmp_path, *THREE, "--batch-size", 3, event=event, script=LOOPS / f"{name}.py")
    assert finished.code == 0, finished.err
    assert re.search(r"ranks? continues? after step", finished.err), "a rank was lost"
    found = courses(tmp_path)
    assert sum(len(course) == SCRIPTS[name].STEPS for course in found) >= 1
    assert all(farthest(alone[name], course) <= 1e-12 for course in found)
