"""Forward and backward of BERT here and in transformers: the same weights and rows, in turn, in one process.

    python bench/bert_step.py [--layers 4] [--hidden 256] [--rows 16] [--rounds 20]
        [--activation-checkpointing | --memory]

The script first checks that both compute the same losses and gradients. Here only the masked words, 20 of 128 tokens,
go through the vocabulary head; there every token does. CPU time is listed beside wall time, which a busy machine
stretches; ratios are taken within pairs. `--activation-checkpointing` replaces theirs by our own network with layers
recomputed in backward. `--memory` prints instead the memory that a row of a micro-batch keeps for backward, with
layers kept and recomputed, for networks of the usual sizes. Ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import copy
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from figures import busy_mark, json_line, paired, spread, stretch, table
from workloads import their_bert_loss

from hetseq.system.processes import keep_freed_memory
from hetseq.tasks.bert.model import TIED_NAMES, BertConfig, BertForPreTraining
from hetseq.tasks.nn.activation_checkpointing import checkpoint_activations_

WORDS, LENGTH, MASKED, WARM_UP = 30522, 128, 20, 3
SIZES = {
    "tiny": (2, 128), "mini": (4, 256), "small": (4, 512), "medium": (8, 512), "base": (12, 768), "large": (24, 1024),
}  # fmt: skip

Batch = dict[str, torch.Tensor]
LossOf = Callable[[torch.nn.Module, Batch], torch.Tensor]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16, help="rows of a step")
    parser.add_argument("--rounds", type=int, default=20, help="counted pairs of steps")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--activation-checkpointing", action="store_true", help="against ours with layers computed again")
    way.add_argument("--memory", action="store_true", help="measure memory that a row keeps for backward, not speed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        report_memory()
    else:
        keep_freed_memory()
        report_speed(options)


def config(layers: int, hidden: int, dropout: float = 0.1) -> BertConfig:
    """A network of a published size: heads of 64, and four times as wide between."""
    sizes = BertConfig(WORDS, hidden, layers, hidden // 64, 4 * hidden)
    return sizes.with_dropout(dropout)


def made_up(rows: int) -> Batch:
    """A batch of full rows, as the task makes it."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.stack([torch.randperm(LENGTH - 1, generator=generator)[:MASKED] + 1 for _ in range(rows)])
    places = columns.sort(dim=1).values + torch.arange(rows)[:, None] * LENGTH  # (rows, MASKED)
    return {
        "input_ids": torch.randint(1000, WORDS, (rows, LENGTH), generator=generator),
        "token_type_ids": (torch.arange(LENGTH) >= LENGTH // 2).long().expand(rows, LENGTH),
        "attention_mask": torch.ones(rows, LENGTH, dtype=torch.bool),
        "masked_positions": places.flatten(),
        "masked_ids": torch.randint(1000, WORDS, (rows * MASKED,), generator=generator),
        "next_sentence_labels": torch.arange(rows) % 2,
    }


def our_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The sum of both mean losses, in nats."""
    names = ("input_ids", "token_type_ids", "attention_mask", "masked_positions", "masked_ids")
    words, pairs = model(*(batch[name] for name in names))
    loss: torch.Tensor = words / len(batch["masked_ids"]) + F.cross_entropy(pairs, batch["next_sentence_labels"])
    return loss


# Speed


def report_speed(options: argparse.Namespace) -> None:
    """A table of both, and the ratios."""
    ours = BertForPreTraining(config(options.layers, options.hidden, dropout=0)).train()
    loss_of: LossOf = their_bert_loss
    batch, name = made_up(options.rows), "transformers"
    if options.activation_checkpointing:
        other: torch.nn.Module = copy.deepcopy(ours)
        checkpoint_activations_(other)
        name, loss_of = "again", our_loss
    else:
        other = theirs_like(ours, config(options.layers, options.hidden, dropout=0))
    check_same(ours, other, batch, loss_of)
    times = in_turn(
        {"here": lambda: step(ours, our_loss, batch), name: lambda: step(other, loss_of, batch)}, options.rounds
    )
    found: dict[str, Any] = {}
    rows = []
    for kind in ("cpu", "wall"):
        here, there = times[f"here {kind}"], times[f"{name} {kind}"]
        found[kind] = {"here_s": spread(here), f"{name}_s": spread(there), "ratio": spread(paired(there, here))}
        seconds = [found[kind][f"{each}_s"].shown(".0f", 1e3) + " ms" for each in ("here", name)]
        rows.append([kind, *seconds, found[kind]["ratio"].shown()])
    print(f"{options.layers} layers of {options.hidden}, {options.rows} rows of {LENGTH} tokens, one thread; quartiles")
    print(table(("time", "here", name, "ratio"), rows))
    wall, cpu = (sum(times[f"here {kind}"]) for kind in ("wall", "cpu"))
    if mark := busy_mark(stretch(wall, cpu)):
        print(mark)
    print(json_line("bert_step", vars(options), [found]))


def theirs_like(ours: BertForPreTraining, sizes: BertConfig) -> torch.nn.Module:
    """The network of transformers with the same weights."""
    import transformers

    logging.disable()  # it warns about its choice of attention
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    theirs: torch.nn.Module = transformers.BertForPreTraining(
        transformers.BertConfig(**{key: getattr(sizes, key) for key in keys}, **rates)
    )
    weights = ours.state_dict()
    weights |= {name: weights[same] for name, same in TIED_NAMES.items()}
    theirs.load_state_dict(weights)
    return theirs.train()


def check_same(ours: torch.nn.Module, theirs: torch.nn.Module, batch: Batch, their_loss: LossOf) -> None:
    """Raises ValueError unless both have the same loss and gradients, in single precision."""
    losses = [step(ours, our_loss, batch), step(theirs, their_loss, batch)]
    own, gradients = (
        {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        for model in (ours, theirs)
    )
    apart = max(float((own[name] - gradients[name]).norm() / own[name].norm().clamp(min=1e-3)) for name in own)
    if abs(losses[0] - losses[1]) > 1e-4 or apart > 1e-3:
        raise ValueError(f"losses {losses}, and gradients {apart:.1e} apart: these are two models")


def step(model: torch.nn.Module, loss_of: LossOf, batch: Batch) -> float:
    """Forward and backward; the loss in nats."""
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    return loss.item()


def in_turn(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, CPU and wall, each pair in alternating order."""
    times: dict[str, list[float]] = {f"{name} {kind}": [] for name in steps for kind in ("cpu", "wall")}
    for number in range(WARM_UP + rounds):
        for name, take in list(steps.items())[:: 1 if number % 2 else -1]:
            cpu, wall = time.process_time(), time.perf_counter()
            take()
            if number >= WARM_UP:
                times[f"{name} cpu"].append(time.process_time() - cpu)
                times[f"{name} wall"].append(time.perf_counter() - wall)
    return times


# Memory


def report_memory() -> None:
    """A table of what the weights take, and a row."""
    found: list[dict[str, Any]] = []
    for name, (layers, hidden) in SIZES.items():
        sizes = config(layers, hidden)
        model = BertForPreTraining(sizes).train()
        row_bytes = kept_bytes(model, made_up(2)) - kept_bytes(model, made_up(1))
        checkpoint_activations_(model)
        again_bytes = kept_bytes(model, made_up(2)) - kept_bytes(model, made_up(1))
        found.append({"size": name, "layers": layers, "hidden": hidden, "parameters": sizes.parameters,
                      "adam_bytes": 16 * sizes.parameters, "row_bytes": row_bytes,
                      "checkpointed_row_bytes": again_bytes})  # fmt: skip
    heads = ("", "layers x hidden", "parameters", "fp32 with Adam", f"and per row of {LENGTH} tokens",
             "layers computed again")  # fmt: skip
    rows = [
        [each["size"], f"{each['layers']} x {each['hidden']}", f"{each['parameters']:,}",
         f"{each['adam_bytes'] / 1e9:.2f} GB", f"{each['row_bytes'] / 1e6:.0f} MB",
         f"{each['checkpointed_row_bytes'] / 1e6:.1f} MB"]
        for each in found
    ]  # fmt: skip
    print(table(heads, rows))
    print(json_line("bert_step --memory", {"masked": MASKED, "dropout": 0.1}, found))


def kept_bytes(model: torch.nn.Module, batch: Batch) -> int:
    """Tensors kept for backward, besides the weights: each block of memory once."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held, so that no block comes twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        our_loss(model, batch)
    return sum(storage.nbytes() for storage in kept.values())


if __name__ == "__main__":
    main()
