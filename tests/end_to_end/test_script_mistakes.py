"""Mistakes of a script outside its loop, and of the command that starts it: each ends with its reason and remedy."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.commands import HETSEQ, ROOT, run_command
from tests.support.own_loops import run_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    forked.warm_up()


SCRIPT = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader
import hetseq

run = hetseq.start(seed=3)
data = [(torch.full((4,), float(i % 7)), torch.tensor(i % 3)) for i in range(48)]
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{own}
{before}
for step in run.steps({data}, {options}):
    for x, y in step:
        step.backward(F.cross_entropy(model(x), y, reduction="sum"), count=len(y))
"""
GOOD = {
    "own": "run.own(model, optimizer)",
    "before": "",
    "data": "data",
    "options": "global_batch_size=24, max_epoch=1",
}
TERMS = "global_batch_size=24, max_epoch=1, count=lambda batch: {'a': 1, 'b': 1}, weights={'a': 2, 'c': 1, 'd': 3}"
CASES: dict[str, tuple[dict[str, str], str]] = {
    "two starts": ({"before": "hetseq.start()"}, r"hetseq.start was called twice: a run of hetseq run is one for"),
    "a process group": ({"before": 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'},
                        r"torch.distributed is in use by the script: a HetSeq loop has no process group of its own"),
    "a model that sends": ({"before": 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)\n'
                                      "run.own(ddp=torch.nn.parallel.DistributedDataParallel(model))"},
                           r"run.own got a DistributedDataParallel: give it the module inside"),
    "a loader": ({"data": "DataLoader(data, batch_size=24)"}, r"run.steps got a DataLoader: give it the data set"),
    "a stream": ({"data": "iter(data)"}, r"run.steps got a list_iterator, which has no index: wrap it in hetseq.Lanes"),
    "no data": ({"data": "[]"}, r"run.steps got data without a sample"),
    "nothing owned": ({"own": ""}, r"run.steps comes before run.own\(model, optimizer\): nothing would be trained or"),
    "no optimizer": ({"own": "run.own(model)"}, r"run.own got no optimizer: expected"),
    "no end": ({"options": "global_batch_size=24"}, r"run.steps has no end: give it max_epoch or max_steps"),
    "weights without counts": ({"options": GOOD["options"] + ", weights={'a': 2}"},
                               r"run.steps got weights= without count=: several terms need the count of each"),
    "weights of no term": ({"options": TERMS}, r"run.steps got weights for c, d: count= counts a, b"),
    "another size": ({"options": "global_batch_size=25, max_epoch=1"},
                     r"--global-batch-size 24: the script says global_batch_size=25, which holds"),
    "stop outside of the loop": ({"before": "run.stop()"}, r"run.stop belongs into the loop over run.steps"),
    "a value of the first rank outside": ({"before": "run.only_first(int)"}, r"run.only_first belongs between two"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_script_that_cannot_begin_says_why(name: str, tmp_path: Path) -> None:
    parts, told = CASES[name]
    (tmp_path / "script.py").write_text(SCRIPT.format(**{**GOOD, **parts}))
    words = ["--cpu", "--ranks", 1, "--global-batch-size", 24, "--save-dir", "run", "script.py"]
    finished = run_script(words, cwd=tmp_path)
    assert finished.code == 2, finished.err
    last = finished.err[finished.err.rindex("hetseq: ") :]
    assert re.search(told, last), finished.err
    assert "Traceback" not in last
    assert f"{os.sep}hetseq{os.sep}" not in last, "no line of ours"


def test_without_the_mistakes_it_trains(tmp_path: Path) -> None:
    """The twin."""
    (tmp_path / "script.py").write_text(SCRIPT.format(**GOOD))
    words = ["--cpu", "--ranks", 1, "--global-batch-size", 24, "--save-dir", "run", "script.py"]
    assert run_script(words, cwd=tmp_path).code == 0


def test_a_script_that_is_started_several_times_does_not_train_several_times(tmp_path: Path) -> None:
    """By torchrun, whose environment each process finds; `hetseq run` makes ranks of one run of them."""
    (tmp_path / "script.py").write_text(SCRIPT.format(**GOOD))
    environment = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1",
                   "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}  # fmt: skip
    finished = run_command(["script.py"], program=(sys.executable,), cwd=tmp_path, env=environment)
    assert finished.code == 1
    told = (
        "torchrun has started 2 processes of this script (TORCHELASTIC_RUN_ID=none), and each would train alone: start"
        " hetseq run in them, as in torchrun ... -m hetseq run script.py, or hetseq run --env none for one alone"
    )
    assert told in finished.err, finished.err


COMMANDS = {
    "an option of the script's": (
        ["--lr", "0.1", "x.py"],
        "--lr is the script's business: say it in x.py, or behind it if x.py takes it: hetseq run x.py --lr ...",
    ),
    "an option of a module's": (
        ["--clip-norm", "1", "-m", "a.job"],
        "--clip-norm is the script's business: say it in a.job, or behind it if a.job takes it: hetseq run -m a.job"
        " --clip-norm ...",
    ),
    "an unknown option": (
        ["--epochs", "3", "x.py"],
        "unknown option --epochs: did you mean --max-epoch?; an option of x.py stands behind it: hetseq run x.py"
        " --epochs ...",
    ),
    "a syntax error": (["wrong.py"], "wrong.py, line 2: invalid syntax: run = = hetseq.start()"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_whose_options_or_script_are_wrong_says_so_before_torch_is_imported(
    name: str, tmp_path: Path
) -> None:
    words, told = COMMANDS[name]
    (tmp_path / "x.py").write_text("")
    (tmp_path / "wrong.py").write_text("import hetseq\nrun = = hetseq.start()\n")
    finished = run_command(["run", *words], program=HETSEQ, cwd=tmp_path)
    assert finished.code == 2
    assert told in finished.err, finished.err
    assert "--task" not in finished.err


MODULES = {
    "no such module": ("no.such", 2, r"-m no.such: there is no such module, neither in \S+ nor installed"),
    "no such module in a package": ("pack.more", 2, r"-m pack.more: there is no such module, neither in"),
    "a package": ("pack", 2, r"-m pack: a package without __main__.py: name the module in it that trains"),
    "a package that fails": (
        "bad.job",
        1,
        r"__init__.py:1 in <module>: ModuleNotFoundError: No module named 'absent'",
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_cannot_be_run_says_so(name: str, tmp_path: Path) -> None:
    module, code, told = MODULES[name]
    for folder, text in (("pack", ""), ("bad", "import absent\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text(text)
    finished = run_script(["--cpu", "--ranks", 1, "-m", module], cwd=tmp_path)
    assert finished.code == code, finished.err
    assert re.search(told, finished.err), finished.err
