"""Two compiled ranks with unequal shares have the curve of one that is not compiled."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

import pytest

from hetseq.comm.group import Group
from tests.support.ranks import run_ranks
from tests.support.training import Facts, prepared, toy_words, train


def train_with(group: Group, save_dir: str, words: list[str], cache: str) -> Facts:
    warnings.filterwarnings("ignore", message=".* is deprecated", category=DeprecationWarning)  # torch within itself
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # nothing that another test has compiled
    return train(group, save_dir, words)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler for a CPU")
def test_two_compiled_ranks_have_the_curve_of_one_plain_rank(tmp_path: Path) -> None:
    words = toy_words("Integers", global_batch_size=12, max_sentences=5, max_update=6, precision="fp64")
    (plain,) = run_ranks(train_with, 1, prepared(tmp_path / "one"), words, str(tmp_path / "cache"))
    words += ["--balance", "3,1", "--compile"]
    # a C++ compiler has some twenty runs before the first step
    ranks = run_ranks(train_with, 2, prepared(tmp_path / "two"), words, str(tmp_path / "cache"), timeout_s=300.0)
    assert len(plain.losses) == 6
    for facts in ranks:
        assert facts.shares[0] == (9, 3)
        assert facts.losses == pytest.approx(plain.losses, rel=1e-12)
    assert any((tmp_path / "cache").rglob("*.so")), "something was compiled"
