"""Attention on a CPU: explicit matrix products against torch's kernel.

    python bench/attention.py [--rounds 11] [--dtypes fp32 bf16]

Runs forward and backward of both in turn on the same queries, keys and values: one thread, no dropout, with and
without a causal mask. Above 1 the products are faster; `tasks/nn/attention.py` chooses by it. They keep a weight for
each pair of tokens, which torch's kernel does not: memory is not compared. Ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any
from unittest import mock

import settings
import torch
from figures import json_line, paired, spread, table

from hetseq.tasks.nn import attention

#: (sequences, heads, tokens, size of a head)
SHAPES = ((4, 4, 64, 64), (16, 4, 128, 64), (8, 12, 128, 64), (2, 4, 512, 64), (1, 12, 1024, 64))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_UP = 2
HEADS = ("sequences, heads, tokens, size", "type", "causal", "products, CPU ms", "kernel, CPU ms", "x", "n")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=11, help="counted pairs")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    arguments = parser.parse_args(words)
    if arguments.rounds < 1:
        parser.error("--rounds: expected at least 1")
    return arguments


def main() -> None:
    """Measure and print."""
    arguments = parse()
    torch.set_num_threads(1)
    settings.as_a_worker()
    rows = [
        compared(shape, name, is_causal, arguments.rounds)
        for name in arguments.dtypes
        for shape in SHAPES
        for is_causal in (False, True)
    ]
    cells = [
        [
            " x ".join(map(str, row["shape"])), row["dtype"], "yes" if row["causal"] else "no",
            f"{row['products_s'] * 1e3:.2f}", f"{row['kernel_s'] * 1e3:.2f}", row["x"].shown(), str(row["n"]),
        ]
        for row in rows
    ]  # fmt: skip
    print(table(HEADS, cells))
    print(json_line("attention", vars(arguments), rows))


def compared(shape: tuple[int, ...], name: str, is_causal: bool, rounds: int) -> dict[str, Any]:
    """Measure both ways in turn; a row."""
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(3, *shape, generator=generator).to(DTYPES[name]).requires_grad_()
    gradient = torch.randn(shape, generator=generator).to(DTYPES[name])
    seconds: dict[str, list[float]] = {"products": [], "kernel": []}
    for number in range(WARM_UP + rounds):
        for way, seen in seconds.items():
            with mock.patch.object(attention, "is_written_out", chosen(way)):
                began_s = time.process_time()
                query, key, value = parts.unbind()
                attended = attention.attend(query, key, value, 0.0, is_causal=is_causal)
                attended.backward(gradient)
                taken_s = time.process_time() - began_s
            parts.grad = None
            if number >= WARM_UP:
                seen.append(taken_s)
    return {
        "shape": shape, "dtype": name, "causal": is_causal, "n": rounds,
        "products_s": median(seconds["products"]), "kernel_s": median(seconds["kernel"]),
        "x": spread(paired(seconds["kernel"], seconds["products"])),
    }  # fmt: skip


def chosen(way: str) -> Callable[..., bool]:
    """A stand-in for `is_written_out`."""
    return lambda *_: way == "products"


if __name__ == "__main__":
    main()
