"""Activation checkpointing: the same numbers to the bit, and of a layer only its input kept for backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hetseq import registry
from hetseq.cluster.membership.compatibility import option_fields
from hetseq.comm.group import LocalGroup
from hetseq.parallel.activation_checkpointing import is_checkpointed
from hetseq.system import device_memory as memory
from hetseq.tasks.bert.packing import pack
from hetseq.tasks.nn.activation_checkpointing import LayerStack, checkpoint_activations_
from hetseq.tasks.nn.huggingface import write_pretrained
from hetseq.training.precision import PRECISIONS
from tests.support import bert, cuda_errors, gpt, gpt_records, labelled
from tests.support.gpt import LAYOUTS
from tests.support.training import prepared, train
from tests.unit.tasks import test_bert_model, test_bert_packing
from tests.unit.tasks.test_bert_packing import MIXED

FLAG = "--activation-checkpointing"
CPU = torch.device("cpu")
Loss = Callable[[nn.Module], Tensor]


def bert_of(**changes: Any) -> nn.Module:
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    config = dataclasses.replace(test_bert_model.TINY, **(rates | changes))
    return test_bert_model.make_model(config, torch.float32).train()


def gpt_of(layout: str, **changes: Any) -> nn.Module:
    config = dataclasses.replace(LAYOUTS[layout].with_dropout(0.1), **changes)
    return gpt.make_model(config, torch.float32).train()


def bert_loss(batch: dict[str, Any]) -> Loss:
    def loss(model: nn.Module) -> Tensor:
        words, pairs = test_bert_packing.logits_of(model, batch)
        terms = ((words, batch["masked_ids"]), (pairs, batch["next_sentence_labels"]))
        return torch.stack([F.cross_entropy(logits, ids, reduction="sum") for logits, ids in terms]).sum()

    return loss


def gpt_loss(model: nn.Module) -> Tensor:
    batch = gpt.make_batch([12, 7, 3, 1])
    return F.cross_entropy(gpt.our_logits(model, batch), batch["target_ids"], reduction="sum")


PADDED, PACKED = bert_loss(test_bert_model.make_batch(MIXED)), bert_loss(pack(test_bert_model.make_batch(MIXED)))
#: what makes a network of so many layers, and its loss
CASES: dict[str, tuple[Callable[..., nn.Module], Loss]] = {
    "bert, padded": (bert_of, PADDED),
    "bert, packed": (bert_of, PACKED),
    "gpt2": (lambda **changes: gpt_of("gpt2", **changes), gpt_loss),
    "llama": (lambda **changes: gpt_of("llama", **changes), gpt_loss),
}


def facts_of(model: nn.Module, loss_of: Loss, precision: str, seed: int = 5) -> list[Tensor]:
    """The loss, all gradients and the random number that comes next, computed as a rank does."""
    torch.manual_seed(seed)
    with PRECISIONS[precision].computing(CPU):
        loss = loss_of(model)
    model.zero_grad()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [loss.detach(), *gradients, torch.rand(1)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def checkpointed(model: nn.Module) -> nn.Module:
    checkpoint_activations_(model)
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_all_gradients_are_the_same_to_the_bit(case: str, precision: str) -> None:
    make, loss_of = CASES[case]
    expected = facts_of(make(), loss_of, precision)
    assert all(fact.isfinite().all() for fact in expected)
    assert equal(facts_of(checkpointed(make()), loss_of, precision), expected)
    assert not equal(facts_of(make(), loss_of, precision, seed=6), expected), "nothing is dropped"


def test_so_they_are_where_a_packed_batch_is_padded_for_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetseq.tasks.bert.attention._LENGTHS_APART", frozenset())
    assert equal(facts_of(checkpointed(bert_of()), PACKED, "bf16"), facts_of(bert_of(), PACKED, "bf16"))


# What is kept


def kept_bytes(model: nn.Module, loss_of: Loss) -> int:
    """What backward will need again, besides the weights: each block of memory once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no block comes twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss_of(model)
    return sum(storage.nbytes() for storage in kept.values())


TOKENS = {"bert, padded": 6 * 9, "bert, packed": 48, "gpt2": 4 * 12, "llama": 4 * 12}
#: hidden states that a layer keeps otherwise, at least: queries, keys, values and what they attend to, the inputs and
#: outputs of two norms, and what is 5/3 as wide before and behind the activation
OTHERWISE = 11


@pytest.mark.parametrize("case", CASES)
def test_of_a_layer_only_its_input_is_kept(case: str) -> None:
    make, loss_of = CASES[case]

    def of_a_layer(change: Callable[[nn.Module], nn.Module]) -> int:
        few, many = (change(make(num_hidden_layers=layers)) for layers in (2, 5))
        return (kept_bytes(many, loss_of) - kept_bytes(few, loss_of)) // 3

    input_bytes = TOKENS[case] * make().config.hidden_size * 4
    assert of_a_layer(checkpointed) == input_bytes
    assert of_a_layer(lambda model: model) > OTHERWISE * input_bytes


@pytest.mark.parametrize("case", CASES)
def test_only_what_is_trained_is_computed_again(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, loss_of = CASES[case]
    model, ways = checkpointed(make()), []
    monkeypatch.setattr(
        "hetseq.parallel.activation_checkpointing.checkpoint",
        lambda forward, *inputs, **_: ways.append(forward) or forward(*inputs),
    )
    with torch.no_grad():
        loss_of(model)
    loss_of(model.eval())
    assert ways == []
    loss_of(model.train())
    assert len(ways) == model.config.num_hidden_layers


def test_memory_that_runs_out_in_backward_is_known_as_such_and_harms_no_second_attempt() -> None:
    expected = facts_of(bert_of(), PADDED, "fp32")
    model, fails = checkpointed(bert_of()), [False, False, True]  # two layers in forward, then the last one again

    def refuse(*_: object) -> None:
        if fails and fails.pop(0):
            raise cuda_errors.out_of_memory()

    for layer in model.bert.encoder.layer:
        layer.attention.register_forward_pre_hook(refuse)
    with pytest.raises(RuntimeError) as raised:
        facts_of(model, PADDED, "fp32")
    assert memory.is_exhausted(raised.value)
    assert fails == []
    assert equal(facts_of(model, PADDED, "fp32"), expected)


# The option


def data_of(name: str, folder: Path) -> tuple[Path, list[str]]:
    """Data for a task, and what else its command line needs."""
    if name == "bert":
        return bert.write_folder(folder, 60), []
    if name == "gpt":
        return gpt_records.write_folder(folder, train=gpt_records.make_rows(60)), []
    folder.mkdir()
    (folder / "train.txt").write_text(labelled.TAGGED)
    (folder / "train.csv").write_text(labelled.TEXTS)
    return folder, labelled.write_network(folder)


@pytest.mark.parametrize("name", sorted(registry.included_options().keys() - {"hf_causal_lm"}))  # transformers' own
def test_every_task_with_layers_has_it_and_nodes_may_differ_in_it(name: str, tmp_path: Path) -> None:
    data, words = data_of(name, tmp_path / "data")

    def stacks(*more: str) -> set[bool]:
        model = labelled.make(name, data, [*words, *more]).build_model()
        stacks = [module for module in model.modules() if isinstance(module, LayerStack)]
        return {is_checkpointed(layer) for stack in stacks for layer in stack}

    assert (stacks(), stacks(FLAG)) == ({False}, {True})
    if not words:  # the others have one way to their network
        write_pretrained(labelled.make(name, data, []).build_model(), tmp_path / "start")
        assert stacks("--init-from", str(tmp_path / "start"), FLAG) == {True}
    section = registry.options_of("task", name)
    assert section is not None
    assert option_fields([section()]) == option_fields([section(activation_checkpointing=True)])


@pytest.mark.parametrize("name", ["bert", "gpt"])
def test_a_run_with_it_has_the_curve_of_one_without(name: str, tmp_path: Path) -> None:
    data, _ = data_of(name, tmp_path / "data")
    words = ["--task", name, "--data", str(data), "--global-batch-size", "16", "--batch-size", "6", "--max-update"]
    words += ["3", "--dropout", "0.1", "--disable-validation", "--no-save", "--lr", "0.01"]
    kept, again = (
        train(LocalGroup(), prepared(tmp_path / f"run{number}"), [*words, *more])
        for number, more in enumerate([[], [FLAG]])
    )
    assert len(kept.losses) == 3
    assert again.losses == kept.losses
    assert torch.equal(again.parameters, kept.parameters)
