"""BERT and GPT in fp32, bf16 and fp16 on this device, packed and padded, and with layers computed again."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_sections.corpora import corpus
from gpu_sections.runs import PICTURES, PLAIN, SGD, Wanted, gap, train_all
from gpu_sections.section import Check, Place, holds, within

STEPS = 40
WORDS = (*PLAIN, "--dropout", 0, "--global-batch-size", 32, "--lr", "0.0005")
CLOSE, NEAR = 2e-2, 1e-4  # nats: of 16 bits against fp32, and of fp32 against fp32 of another device
FIRST = 15  # steps that are compared; in later ones AdamW amplifies rounding
#: gradients so large that the first scales of fp16 overflow, which must cost steps and nothing else
OVERFLOWING = (
    "--task", PICTURES, *PLAIN, *SGD, "--global-batch-size", 32, "--max-update", 20, "--precision", "fp16",
    "--factor", 30000, "--lr", "1e-7", "--max-skipped-steps", 20,
)  # fmt: skip
#: convolutions of 48 channels. With factors of TF32 the norms of the gradients differ by 5e-6 to 5e-5, in fp32 by 1e-7
CONVOLUTIONS = (
    "--task", PICTURES, *PLAIN, *SGD, "--side", 16, "--width", 48, "--global-batch-size", 64, "--max-update", 10,
)  # fmt: skip


def checks(place: Place) -> Iterator[Check]:
    """Curves against the one in fp32 on this device. A CPU has no products of fp16: it takes long there."""
    one = place.devices(1)
    wanted = []
    for task in ("bert", "gpt"):
        words = ("--task", task, "--data", corpus(place, task), *WORDS)
        whole = (*words, "--max-update", STEPS)
        wanted += [
            Wanted(f"{task}-fp32", whole, one),
            Wanted(f"{task}-bf16", (*whole, "--precision", "bf16"), one),
        ]
        if place.is_gpu:
            wanted += [
                Wanted(f"{task}-fp16", (*whole, "--precision", "fp16"), one),
                Wanted(f"{task}-cpu", whole, "cpu"),
            ]
    bert = ("--task", "bert", "--data", corpus(place, "bert"), *WORDS, "--max-update", STEPS)
    wanted += [
        Wanted("bert-padded", (*bert, "--no-packing"), one),
        Wanted("bert-again", (*bert, "--activation-checkpointing"), one),
        Wanted("overflow", OVERFLOWING, one),
    ]
    if place.is_gpu:
        wanted += [Wanted("convolutions", CONVOLUTIONS, one), Wanted("convolutions-cpu", CONVOLUTIONS, "cpu")]
    runs = train_all(place, wanted)
    for task in ("bert", "gpt"):
        for kind, most in (("bf16", CLOSE), ("fp16", CLOSE), ("cpu", NEAR)):
            if f"{task}-{kind}" in runs:
                difference = gap(runs[f"{task}-fp32"], runs[f"{task}-{kind}"], first=FIRST)
                yield within(f"{task}: {kind} against fp32, nats", difference, most)
    yield within("bert: padded against packed, nats", gap(runs["bert-fp32"], runs["bert-padded"]), 1e-4)
    again = gap(runs["bert-fp32"], runs["bert-again"])
    yield within("bert: layers computed again, nats", again, 0.0 if not place.is_gpu else 1e-5)
    skipped = [bool(row.get("skipped")) for row in runs["overflow"].rows]
    seen = f"{sum(skipped)} of {len(skipped)} skipped"
    is_right = skipped[0] and not skipped[-1]
    yield holds("fp16: steps that overflow", is_right, seen=seen, expected="the first is skipped, the last is not")
    if place.is_gpu:
        norms = [[row["grad_norm"] for row in runs[name].rows] for name in ("convolutions", "convolutions-cpu")]
        difference = max(abs(one / other - 1) for one, other in zip(*norms, strict=True))
        yield within("fp32 of convolutions: norms of gradients against the CPU's", difference, 2e-6)
