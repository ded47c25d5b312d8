"""The gain of packing: steps of BERT on packed batches against padded ones, in turn, one process, one thread.

    python bench/pack.py [--layers 4] [--hidden 256] [--rows 16] [--length 128] [--rounds 16] [--real 0.68 0.97 1]
                         [--dropout 0.1]

A step is forward, backward, clipping and AdamW, of one model on one batch, once packed and once padded; ratios are
taken within a pair. The ideal is padded tokens / real tokens: the gain if every token cost the same. Row lengths are
spread evenly from the shortest to the longest, so that hardly two are equal, and the words differ in every batch.
Losses and gradients of both are first compared without dropout. CPU time is listed beside wall time. Ends
with a line of JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import settings
import torch
import torch.nn.functional as F
from bert_step import LENGTH, config
from figures import busy_mark, json_line, paired, spread, stretch, table
from made_up import Batch, made_up

from hetseq.tasks.bert.model import BertForPreTraining
from hetseq.tasks.bert.packing import pack

BATCHES, WARM_UP, CLIP_NORM = 4, 3, 1.0
SHORTEST = 32  # of the longest rows: with the least --real, the shortest row still has a token
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
HEADS = ("real tokens", "precision", "padded, CPU ms", "packed, CPU ms", "x, CPU", "x, wall", "of the ideal", "n")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16, help="rows of a step")
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of the longest row")
    parser.add_argument("--rounds", type=int, default=16, help="counted pairs of steps")
    parser.add_argument("--real", type=float, nargs="+", default=[0.68, 0.97, 1.0], help="share of real tokens")
    parser.add_argument("--dropout", type=float, default=0.1)
    arguments = parser.parse_args(words)
    if min(arguments.layers, arguments.rows, arguments.rounds) < 1:
        parser.error("--layers, --rows and --rounds: expected numbers of at least 1")
    if not SHORTEST <= arguments.length <= LENGTH:
        parser.error(f"--length: expected a number from {SHORTEST} to {LENGTH}")
    if arguments.hidden < 64 or arguments.hidden % 64:
        parser.error("--hidden: expected a multiple of 64, a head's size")
    if not all(0.52 <= share <= 1 for share in arguments.real):
        parser.error("--real: expected shares from 0.52 to 1")
    return arguments


def main() -> None:
    """Measure and print."""
    arguments = parse()
    torch.set_num_threads(1)
    settings.as_a_worker()
    rows = []
    for share in arguments.real:
        batches = [made_up(arguments.rows, share, seed, length=arguments.length) for seed in range(BATCHES)]
        apart = compare(arguments, batches[:2])
        rows += [
            {"asked": share, "precision": precision, **apart, **measure(arguments, batches, precision)}
            for precision in PRECISIONS
        ]
    report(rows, arguments)


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The sum of both mean losses, in nats."""
    layout = batch["sequences"] if "sequences" in batch else batch["attention_mask"]
    masked = batch["masked_positions"], batch["masked_ids"]
    words, pairs = model(batch["input_ids"], batch["token_type_ids"], layout, *masked)
    loss: torch.Tensor = words / len(masked[1]) + F.cross_entropy(pairs, batch["next_sentence_labels"])
    return loss


# The same numbers


def compare(arguments: argparse.Namespace, batches: list[Batch]) -> dict[str, float]:
    """The largest relative difference of the loss, and of the whole gradient, in both precisions; without dropout."""
    torch.manual_seed(0)
    model = BertForPreTraining(config(arguments.layers, arguments.hidden, dropout=0))
    found: dict[str, float] = {}
    for name, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
        model.to(dtype)
        losses, gradients = zip(*(difference(model, batch) for batch in batches))
        found |= {f"loss_apart_{name}": max(losses), f"gradient_apart_{name}": max(gradients)}
    return found


def difference(model: torch.nn.Module, batch: Batch) -> tuple[float, float]:
    """Packed against padded: |l - l0| / |l0| and ||g - g0|| / ||g0||."""
    losses, gradients = [], []
    for each in (pack(batch), batch):
        model.zero_grad()
        loss = loss_of(model, each)
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    apart = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
    return abs(losses[0] - losses[1]) / abs(losses[1]), apart.item()


# Speed


def measure(arguments: argparse.Namespace, batches: list[Batch], precision: str) -> dict[str, Any]:
    """Seconds of steps of both, and their ratios, batch by batch."""
    step = trainer(arguments, PRECISIONS[precision])
    both = [{"padded": batch, "packed": pack(batch)} for batch in batches]
    seconds: dict[str, list[float]] = {f"{name} {kind}": [] for name in both[0] for kind in ("cpu", "wall")}
    for number in range(WARM_UP + arguments.rounds):
        pair = list(both[number % len(both)].items())
        for name, batch in pair[:: 1 if number % 2 else -1]:
            cpu, wall = time.process_time(), time.perf_counter()
            step(batch)
            if number >= WARM_UP:
                seconds[f"{name} cpu"].append(time.process_time() - cpu)
                seconds[f"{name} wall"].append(time.perf_counter() - wall)
    real = [float(batch["attention_mask"].float().mean()) for batch in batches]
    return evaluate(seconds, sum(real) / len(real))


def trainer(arguments: argparse.Namespace, dtype: torch.dtype | None) -> Callable[[Batch], None]:
    """A step of training on a batch; `dtype` is for autocast, if any."""
    torch.manual_seed(0)
    model = BertForPreTraining(config(arguments.layers, arguments.hidden, arguments.dropout)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()

    return step


def evaluate(seconds: dict[str, list[float]], real: float) -> dict[str, Any]:
    """The figures of paired steps: ratios above 1 where packing is faster; the ideal is 1 / `real`."""
    ratios = paired(seconds["padded cpu"], seconds["packed cpu"])
    return {
        "real": real,
        "padded_s": spread(seconds["padded cpu"]),
        "packed_s": spread(seconds["packed cpu"]),
        "ratio_cpu": spread(ratios),
        "ratio_wall": spread(paired(seconds["padded wall"], seconds["packed wall"])),
        "of_ideal": spread([ratio * real for ratio in ratios]),
        "wall_to_cpu": stretch(
            sum(seconds["padded wall"] + seconds["packed wall"]), sum(seconds["padded cpu"] + seconds["packed cpu"])
        ),
    }


def report(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print a table, caveats, and the same as one line of JSON."""
    print(
        f"{arguments.layers} layers of {arguments.hidden}, {arguments.rows} rows of up to {arguments.length} tokens a"
        f" step, dropout {arguments.dropout:g}, AdamW, one thread, torch {torch.__version__}; quartiles"
    )
    cells = [
        [
            f"{row['real']:.1%}", row["precision"], f"{row['padded_s'].median * 1e3:.0f}",
            f"{row['packed_s'].median * 1e3:.0f}", row["ratio_cpu"].shown(".3f"), row["ratio_wall"].shown(".3f"),
            row["of_ideal"].shown(".2f"), str(row["ratio_cpu"].n),
        ]
        for row in rows
    ]  # fmt: skip
    print(table(HEADS, cells))
    apart = {name: max(row[name] for row in rows) for name in rows[0] if "_apart_" in name}
    print(
        f"without dropout the losses of both are at most {apart['loss_apart_fp32']:.1e} of themselves apart in fp32 and"
        f" {apart['loss_apart_fp64']:.1e} in fp64, the gradients {apart['gradient_apart_fp32']:.1e} and"
        f" {apart['gradient_apart_fp64']:.1e}"
    )
    if mark := busy_mark(max(row["wall_to_cpu"] for row in rows)):
        print(f"({mark}; CPU time suffers less)")
    print(json_line("pack", vars(arguments), rows))


if __name__ == "__main__":
    main()
