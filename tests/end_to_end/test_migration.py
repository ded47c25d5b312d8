"""The programs of docs/concepts/compared.md: HetSeq gives the losses of torchrun, Accelerate and Lightning.

All begin with the same parameters and see the same samples in the same order, in float64, so that nothing differs but
the order of sums: measured are 8.9e-16 nats over 24 steps. With plain SGD a wrong scale of the gradient would show.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import hetseq
from hetseq.monitor.report.compare import compare
from tests.support import forked
from tests.support.commands import HETSEQ, ROOT, run_command
from tests.support.places import free_port

pytestmark = pytest.mark.slow
WORDS = ROOT / "docs" / "examples" / "words"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
EXACT = 1e-12  # the house's limit for curves in float64
STEPS = 24  # 244 names, 32 in a step, three epochs: the last step of each is shorter


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    forked.warm_up()


def there(folder: Path, *program: str, more: tuple[str, ...] = ()) -> Path:
    """A run of a program of the manual; without torchrun it is alone."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = [*program, "--save-dir", str(folder), "--in-order", "--double", *more]
    done = run_command(words, program=(sys.executable,), is_cold=False, env={} if program[0] == "-m" else alone)
    assert done.code == 0, done.err
    return folder


def here(folder: Path, *more: str) -> Path:
    """The task that takes the place of the programs."""
    words = f"train --cpu --task {WORDS / 'with_hetseq.py'} --global-batch-size 32 --max-epoch 3 --curriculum 3"
    words += " --optimizer sgd --momentum 0.9 --lr 0.5 --warmup-updates 6 --total-num-update 40 --clip-norm 5"
    words += f" --seed 1 --precision fp64 --no-save --save-dir {folder}"
    done = run_command([*words.split(), *more], program=HETSEQ, is_cold=False)
    assert done.code == 0, done.err
    return folder


def difference(one: Path, other: Path) -> float:
    """The largest one of the loss, in nats, over all steps."""
    found = compare(hetseq.load_run(one), hetseq.load_run(other))
    assert [len(hetseq.load_run(run).steps) for run in (one, other)] == [STEPS, STEPS]
    assert len(found.steps) == STEPS
    assert found.largest is not None
    return found.largest[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return here(tmp_path_factory.mktemp("alone") / "run")


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return there(tmp_path_factory.mktemp("there") / "run", *TORCHRUN, "1", str(WORDS / "with_ddp.py"))


def test_torchrun_and_hetseq_have_the_same_losses(by_torchrun: Path, alone: Path) -> None:
    assert difference(by_torchrun, alone) <= EXACT


@pytest.mark.parametrize("package", ["accelerate", "lightning"])
def test_other_trainers_and_hetseq_have_the_same_losses(package: str, alone: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:  # imported here, it would change the environment
        pytest.skip(f"needs {package}")
    assert difference(there(tmp_path / "there", str(WORDS / f"with_{package}.py")), alone) <= EXACT


@pytest.mark.parametrize("name", ["ddp", "accelerate"])
def test_the_programs_go_on_from_their_checkpoints(name: str, alone: Path, tmp_path: Path) -> None:
    if name != "ddp" and importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}")
    for epochs in ("1", "3"):
        there(tmp_path / "there", str(WORDS / f"with_{name}.py"), more=("--epochs", epochs))
    assert difference(tmp_path / "there", alone) <= EXACT


def test_two_unequal_ranks_have_the_losses_of_one_process_of_torchrun(by_torchrun: Path, tmp_path: Path) -> None:
    two = here(tmp_path / "two", "--distributed-world-size", "2", "--balance", "3,1")
    assert hetseq.load_run(two).shares[0].tolist() == [24, 8]
    assert difference(by_torchrun, two) <= EXACT


def test_two_processes_of_torchrun_have_other_losses_than_one(by_torchrun: Path, tmp_path: Path) -> None:
    """The twin: the same samples in every step, but a mean of two means over different numbers of letters."""
    two = there(tmp_path / "two", *TORCHRUN, "2", str(WORDS / "with_ddp.py"))
    assert difference(by_torchrun, two) > 1e-3  # measured: 9.2e-3


def test_a_gradient_is_clipped_at_the_same_norm(alone: Path, tmp_path: Path) -> None:
    """torch divides by the norm + 1e-6, which at norms of 0.3 and a limit of 0.2 moves the losses by 8.9e-7."""
    program = there(tmp_path / "there", str(WORDS / "with_ddp.py"), more=("--clip", "0.2"))
    clipped = here(tmp_path / "here", "--clip-norm", "0.2")
    assert difference(program, clipped) <= 3e-6
    assert difference(alone, clipped) > 0.1  # it does clip
