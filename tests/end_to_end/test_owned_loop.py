"""A loop of one's own with owners: the parameters of one device after every step, with a scheduler and clipping.

The loop's code is the same for any layout. Three things of it need more than a rank owns, and this file shows that
they are right: the scheduler sets the rate of the optimizer's groups, which hold only the parts that the rank owns;
`clip_norm` needs the norm of the whole gradient; and between two steps the script reads whole parameters.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import forked
from tests.support.commands import ROOT
from tests.support.own_loops import courses, farthest, run_lines, run_script

pytestmark = pytest.mark.slow

STEPS, TOLERANCE = 12, 1e-12
CLIP = 20.0
Row = dict[str, Any]
OWNERS = {
    "3:1": ("--ranks", 2, "--balance", "1,2", "--shard-model", "state", "--own", "3,1"),
    "server": ("--ranks", 3, "--balance", "2,1,0", "--shard-model", "state", "--own", "0,0,1"),
}
SCRIPT = f"""
import json, os, sys
import torch
import hetseq

run = hetseq.start(seed=5)
draw = torch.Generator().manual_seed(1)
x = torch.randn(70, 6, generator=draw)
data = [(one, one.square().sum()) for one in x]
model = torch.nn.Sequential(torch.nn.Linear(6, 48), torch.nn.Tanh(), torch.nn.Linear(48, 12), torch.nn.Linear(12, 1))
model[2].bias.requires_grad_(False)
optimizer = torch.optim.AdamW([
    {{"params": [model[0].weight, model[2].weight, model[3].weight], "weight_decay": 0.1}},
    {{"params": [model[0].bias, model[3].bias], "weight_decay": 0.0, "lr": 0.005}},
], lr=0.02)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 4) * 0.8**k)
run.own(model, optimizer, scheduler)

for step in run.steps(data, global_batch_size=24, max_steps={STEPS}, clip_norm={CLIP}):
    for x, y in step:
        step.backward(((model(x)[:, 0] - y) ** 2).sum(), count=len(y))
    scheduler.step()
    held = sum(one.numel() for group in optimizer.param_groups for one in group["params"])
    row = {{"step": step.number, "norm": step.grad_norm, "held": held, "rank": run.rank,
           "rates": scheduler.get_last_lr(), "model": [one.tolist() for one in model.state_dict().values()]}}
    with open(os.path.join(sys.argv[1], f"seen-{{os.getpid()}}"), "a") as file:
        file.write(json.dumps(row) + "\\n")
"""


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    forked.warm_up()


def run_it(folder: Path, *options: object) -> list[list[Row]]:
    """The rows of all ranks, in rank order."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    words = ["--cpu", *options, "--precision", "fp64", "--bucket-cap-mb", "0.002", "--save-dir", folder / "run"]
    finished = run_script([*words, script, folder])
    assert finished.code == 0, finished.err
    found = [[json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("seen-*")]
    return sorted(found, key=lambda rows: rows[0]["rank"])


def flat(row: Row) -> torch.Tensor:
    """All parameters after a step."""
    return torch.cat([torch.tensor(one, dtype=torch.float64).flatten() for one in row["model"]])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """The rows of one device."""
    (rows,) = run_it(tmp_path_factory.mktemp("alone") / "loop", "--ranks", 1)
    assert len(rows) == STEPS
    assert any(row["norm"] > CLIP for row in rows), "some steps are clipped"
    assert any(row["norm"] < CLIP for row in rows), "and others are not"
    return rows


@pytest.mark.parametrize("owner", OWNERS)
def test_after_every_step_each_rank_has_the_parameters_of_one_device(
    owner: str, alone: list[Row], tmp_path: Path
) -> None:
    ranks = run_it(tmp_path / "loop", *OWNERS[owner])
    assert len(ranks) == OWNERS[owner][1]
    worst = 0.0
    for rows in ranks:
        assert [row["step"] for row in rows] == [row["step"] for row in alone]
        assert [row["rates"] for row in rows] == [row["rates"] for row in alone]
        for mine, right in zip(rows, alone):
            assert mine["norm"] == pytest.approx(right["norm"], rel=TOLERANCE)
            worst = max(worst, float((flat(mine) - flat(right)).norm() / flat(right).norm()))
    print(f"{owner}: largest relative error of the parameters {worst:.1e}")
    assert worst <= TOLERANCE
    assert [row["model"] for row in ranks[0]] == [row["model"] for row in ranks[1]], "bit for bit"
    total = alone[0]["held"]
    held = [rows[0]["held"] for rows in ranks]
    assert sum(held) == total
    assert held == pytest.approx([0.75 * total, 0.25 * total] if owner == "3:1" else [0, 0, total], abs=0.05 * total)


@pytest.mark.parametrize("owner", OWNERS)
def test_an_average_and_an_evaluation_between_two_steps_see_whole_parameters(owner: str, tmp_path: Path) -> None:
    folders = [tmp_path / "alone", tmp_path / "owners"]
    for folder, options in zip(folders, (("--cpu", "--ranks", 1), ("--cpu", *OWNERS[owner]))):
        folder.mkdir()
        finished = run_lines(folder, *options)
        assert finished.code == 0, finished.err
    (right,), found = (courses(folder) for folder in folders)
    assert {"average", "valid"} <= set().union(*right.values())
    assert len(found) == OWNERS[owner][1]
    for course in found:
        assert course.keys() == right.keys()
        assert farthest(right, course) <= TOLERANCE


def test_the_example_of_the_manual_prints_the_same_lines(tmp_path: Path) -> None:
    example, lines = ROOT / "docs" / "examples" / "own_loop.py", []
    for number, options in enumerate((("--ranks", 1), OWNERS["3:1"])):
        finished = run_script(
            ["--cpu", *options, "--precision", "fp64", "--save-dir", tmp_path / str(number), example]
        )  # fmt: skip
        assert finished.code == 0, finished.err
        lines.append(re.findall(r"step \d+: loss .*", finished.out))
    assert lines[0] == lines[1]
    assert len(lines[0]) == 3
