"""`--task hf_causal_lm` has the loss and the gradient of a plain loop over transformers, for any shares of the ranks.

Four architectures, all weights and LoRA, on conversations of very unequal lengths: of 26 samples in steps of ten, with
micro-batches of at most four, packed. Errors are of the whole gradient, ||g - g0|| / ||g0||.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hetseq.comm.group import LocalGroup
from tests.support import causal_runs
from tests.support.nightly import nightly
from tests.support.ranks import run_ranks
from tests.support.training import prepared

KINDS = [*nightly("gpt2", "llama"), "qwen2", *nightly("gemma")]
ADAPTERS = ["--lora-rank", str(causal_runs.RANK)]
ALONE_LIMIT, RANKS_LIMIT = 1e-12, 1e-11


@pytest.mark.parametrize("has_adapters", [False, True], ids=["all weights", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_those_of_transformers_own_loop(kind: str, has_adapters: bool, tmp_path: Path) -> None:
    model, chats = causal_runs.make_model(tmp_path / "model", kind), causal_runs.make_chats()
    data = causal_runs.write_chats(tmp_path / "data", chats)
    curve = causal_runs.plain_loop(model, chats, has_adapters=has_adapters)
    words = causal_runs.words_of(model, data, *(ADAPTERS if has_adapters else []))
    alone = causal_runs.rank(LocalGroup(), prepared(tmp_path / "one"), words)
    unequal = causal_runs.words_of(model, data, *(ADAPTERS if has_adapters else []), balance="6,1,3")
    ranks = run_ranks(causal_runs.rank, 3, prepared(tmp_path / "three"), unequal, timeout_s=300)

    worst = {}
    for facts, limit in [(alone, ALONE_LIMIT), *((facts, RANKS_LIMIT) for facts in ranks)]:
        assert facts.losses == pytest.approx(curve.losses, rel=limit)
        assert len(facts.gradients) == causal_runs.STEPS
        for mine, right in zip(facts.gradients, curve.gradients, strict=True):
            error = ((mine - right).norm() / right.norm()).item()
            worst[limit] = max(worst.get(limit, 0.0), error)
            assert error <= limit
    print(kind, has_adapters, worst)
    assert len({tuple(facts.parameters.tolist()) for facts in ranks}) == 1, "replicas differ"


def test_the_mean_of_the_samples_means_is_another_loss(tmp_path: Path) -> None:
    """The twin that must fail: answers have unequal numbers of tokens."""
    model, chats = causal_runs.make_model(tmp_path / "model", "llama"), causal_runs.make_chats()
    whole = causal_runs.plain_loop(model, chats, has_adapters=False, steps=1).losses[0]
    alone = [causal_runs.plain_loop(model, [chat], has_adapters=False, steps=1).losses[0] for chat in chats[:10]]
    assert abs(sum(alone) / len(alone) - whole) / whole > 1e-3
