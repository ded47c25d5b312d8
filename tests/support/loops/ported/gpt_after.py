"""Trains a small GPT on files of tokens. The settings can be changed from the command line, as in --max_iters=20."""

import math
import os
import sys
from functools import partial

import numpy as np
import torch
from small_gpt import GPT, GPTConfig

import hetseq

# settings
out_dir = "out"
data_dir = "."  # with train.bin and val.bin
eval_interval = 4
eval_iters = 3
log_interval = 1
digits = 4
batch_size = 4
gradient_accumulation_steps = 3
block_size = 16
n_layer, n_head, n_embd, dropout = 2, 2, 32, 0.0
learning_rate = 6e-3
min_lr = 6e-4
warmup_iters = 3
lr_decay_iters = 12
max_iters = 12
weight_decay = 0.1
beta1, beta2 = 0.9, 0.95
grad_clip = 1.0
seed = 1337
device = "cpu"
dtype = "float32"
for word in sys.argv[1:]:
    key, value = word.removeprefix("--").split("=")
    globals()[key] = type(globals()[key])(value)

os.makedirs(out_dir, exist_ok=True)
run = hetseq.start(seed=seed)

# the windows of all steps, drawn in advance
data = {split: np.memmap(f"{data_dir}/{split}.bin", dtype=np.uint16, mode="r") for split in ("train", "val")}
draw = np.random.default_rng(seed)
starts = draw.integers(len(data["train"]) - block_size, size=max_iters * gradient_accumulation_steps * batch_size)
eval_starts = {split: draw.integers(len(data[split]) - block_size, size=eval_iters * batch_size) for split in data}


def get_batch(split, starts, device=device):
    x = torch.stack([torch.from_numpy(data[split][i : i + block_size].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[split][i + 1 : i + 1 + block_size].astype(np.int64)) for i in starts])
    return x.to(device), y.to(device)


model = GPT(GPTConfig(int(data["train"].max()) + 1, block_size, n_layer, n_head, n_embd, dropout))
model.to(device, getattr(torch, dtype))
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2))
best_val_loss = 1e9
model, optimizer = run.own(model, optimizer)


def measure(batch):
    logits, loss = model(*batch)
    return {"loss": (loss * len(logits), len(logits))}


def estimate_loss():
    out = {}
    for split in ("train", "val"):
        collate = partial(get_batch, split, device="cpu")
        out[split] = run.evaluate(eval_starts[split], measure, batch_size=batch_size, collate=collate)["loss"]
    return out


def get_lr(it):
    """Linear warm-up, then half a cosine."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


for step in run.steps(
    starts, collate=partial(get_batch, "train", device="cpu"), max_epoch=1, clip_norm=grad_clip, clip_epsilon=1e-6,
    shuffle=False, global_batch_size=gradient_accumulation_steps * batch_size,
):  # fmt: skip
    # the learning rate of this iteration
    iter_num = step.number
    lr = get_lr(iter_num - 1)
    for group in optimizer.param_groups:
        group["lr"] = lr

    # forward and backward, in micro-batches
    for X, Y in step:
        logits, loss = model(X, Y)
        step.backward(loss * Y.numel(), count=Y.numel())
    if iter_num % log_interval == 0:
        print(f"iter {iter_num}: loss {step.loss:.{digits}f}, lr {lr:.{digits}g}")

    # evaluate, and save the best model
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.{digits}f}, val loss {losses['val']:.{digits}f}")
        if losses["val"] < best_val_loss and run.is_first:
            best_val_loss = losses["val"]
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"iter_num": iter_num, "best_val_loss": best_val_loss}, f"{out_dir}/ckpt.pt")
