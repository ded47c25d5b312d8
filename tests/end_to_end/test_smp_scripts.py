"""The scripts of examples/sagemaker: the curves of plain FSDP2, and of other groups; what FSDP refuses."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, run_command
from tests.support.nightly import nightly

pytestmark = pytest.mark.slow

SCRIPTS = ROOT / "examples" / "sagemaker"
SUPPORT = ROOT / "tests" / "support"
NAMES = ("fsdp", *nightly("collectives", "offload_activations", "tensor_parallel"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.fixture
def transformers_where_needed(request: pytest.FixtureRequest) -> None:
    if "tensor_parallel" in request.node.name:
        pytest.importorskip("transformers")


def output(ranks: int, *words: Path) -> str:
    """What a script prints, of all ranks and the launcher."""
    done = run_command([str(ranks), *map(str, words)], program=TORCHRUN, timeout_s=100, is_cold=True)
    return done.out + done.err


def curve(ranks: int, *words: Path) -> list[float]:
    return losses_in(output(ranks, *words))


def losses_in(said: str) -> list[float]:
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", said, re.MULTILINE)]
    assert len(losses) == 6, said
    return losses


def farthest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def script(folder: Path, name: str, **configuration: object) -> Path:
    """A copy of a script with another configuration."""
    shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(configuration))
    return folder / f"{name}.py"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("transformers_where_needed")
def test_a_script_has_the_curve_of_fully_shard(name: str) -> None:
    path = SCRIPTS / f"{name}.py"
    plain = curve(2, SUPPORT / "fully_sharded.py", path)
    said = output(2, SUPPORT / "gloo_threads_at_exit.py", path)
    assert farthest(losses_in(said), plain) <= 1e-12
    assert farthest(plain, plain[1:] + plain[:1]) > 1e-3
    # a thread that is left may let go of a tensor while the interpreter ends, and the process aborts
    assert "threads of gloo at exit: 0\n" in said


@pytest.mark.nightly
def test_hybrid_groups_of_two_among_four_ranks_have_the_curve_of_one_replica_and_of_four(tmp_path: Path) -> None:
    hybrid = curve(4, SCRIPTS / "fsdp.py")
    assert farthest(hybrid, curve(2, SCRIPTS / "fsdp.py")) <= 1e-12
    assert farthest(hybrid, curve(4, script(tmp_path, "fsdp", hybrid_shard_degree=1))) <= 1e-12


@pytest.mark.nightly
def test_two_groups_that_share_tensors_have_the_curve_of_one() -> None:
    pytest.importorskip("transformers")
    path = SCRIPTS / "tensor_parallel.py"
    assert farthest(curve(4, path), curve(2, path)) <= 1e-12


def test_a_model_with_tied_words_is_refused_beside_tensor_parallelism(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = script(tmp_path, "tensor_parallel", tensor_parallel_degree=2)
    config = tmp_path / "tiny_llama" / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    assert "are tied and divided, and FSDP would train them apart" in output(2, path)


@pytest.mark.nightly
def test_offload_leaves_gathered_parameters_where_they_are_and_changes_no_bit() -> None:
    said = output(2, SUPPORT / "offloaded_units.py")
    # the input of the model, and the result of each of the three units
    assert "gradients equal, tensors that left: [(True, 4), (True, 4)]\n" in said
