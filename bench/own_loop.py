"""A script that trains the net of `random_images` in a loop of its own; `own_loop_cost.py` times its steps.

hetseq run --cpu --ranks 1 bench/own_loop.py STEPS BATCH FILE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import random_images
import torch
import torch.nn.functional as F
import workloads

import hetseq

steps, batch, file = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
run = hetseq.start(seed=1)
model = random_images.build_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=workloads.LEARNING_RATE, weight_decay=0.0, fused=True)
run.own(model, optimizer)
data = random_images.RandomImages()

for step in run.steps(
    data, global_batch_size=batch, max_steps=steps, collate=data.collater, clip_norm=workloads.CLIP_NORM
):
    for images, labels in step:
        step.backward(F.cross_entropy(model(images), labels, reduction="sum"), count=len(labels))
    with file.open("a") as lines:
        lines.write(f"{time.process_time()} {time.perf_counter()} {step.loss!r}\n")
