"""Tiny models as published: transformers opens them, and equal arguments give equal bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.tiny_models import CONFIGS, VOCABULARY, publish

pytest.importorskip("transformers")


@pytest.mark.parametrize("kind", CONFIGS)
def test_transformers_opens_a_tiny_model_with_its_tokenizer(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exact = publish(tmp_path / "exact", kind)
    rounded = publish(tmp_path / "rounded", kind, dtype=torch.bfloat16, shard_size="20KB")
    assert len(list(rounded.glob("model-*.safetensors"))) > 1
    wide, narrow = (AutoModelForCausalLM.from_pretrained(folder) for folder in (exact, rounded))
    assert (wide.dtype, narrow.dtype) == (torch.float64, torch.bfloat16)
    weights = narrow.state_dict()
    assert all(torch.equal(weight.bfloat16(), weights[name]) for name, weight in wide.state_dict().items())

    tokenizer = AutoTokenizer.from_pretrained(exact)
    assert len(tokenizer) == VOCABULARY == wide.config.vocab_size
    config = wide.config
    assert (config.bos_token_id, config.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    turns = [{"role": "user", "content": "Wie weit ist 你?"}, {"role": "assistant", "content": "It is wide."}]
    ids = tokenizer.apply_chat_template(turns, return_dict=False)
    shown = "<|im_start|>user\nWie weit ist 你?<|im_end|>\n<|im_start|>assistant\nIt is wide.<|im_end|>\n"
    assert tokenizer.decode(ids) == shown
    logits = wide(torch.tensor([ids, ids[::-1]])).logits
    assert logits.std() > 0.3, "far from an even guess"


def test_equal_arguments_give_equal_bytes(tmp_path: Path) -> None:
    def content(name: str, seed: int) -> dict[str, bytes]:
        folder = publish(tmp_path / name, seed=seed)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    one = content("one", 1)
    assert content("again", 1) == one
    assert {name for name, data in content("other", 2).items() if data != one[name]} == {"model.safetensors"}


def test_a_directory_may_lack_weights_and_a_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = publish(tmp_path / "bare", has_weights=False, template=None)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert AutoTokenizer.from_pretrained(folder).chat_template is None
