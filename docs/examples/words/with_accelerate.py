"""The speller by Accelerate: `accelerate launch with_accelerate.py --save-dir runs/acc`."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from words import LR, NOTHING, Speller, Words, arguments, collate, rate

args = arguments()
is_cpu = not torch.cuda.is_available()
accelerator = Accelerator(cpu=is_cpu, step_scheduler_with_optimizer=False)
set_seed(1)

batch_size = 32 // accelerator.num_processes
train, valid = Words("train"), Words("valid")
loader = DataLoader(train, batch_size, shuffle=not args.in_order, collate_fn=collate)
valid_loader = DataLoader(valid, batch_size, collate_fn=collate)
model = Speller().to(torch.float64 if args.double else torch.float32)
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
loader, valid_loader = accelerator.prepare(loader, valid_loader)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
checkpoint = Path(args.save_dir, "last")
if checkpoint.exists():
    accelerator.load_state(str(checkpoint))
step = schedule.scheduler.last_epoch
first = step // len(loader)
checkpoint.parent.mkdir(parents=True, exist_ok=True)


def loss_of(batch):
    """The mean over the letters of one batch."""
    letters, following = batch
    scores = model(letters).flatten(0, 1)
    return F.cross_entropy(scores, following.flatten(), ignore_index=NOTHING)


for epoch in range(first, args.epochs):
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(batch)
            accelerator.backward(loss)  # and the mean of the gradients of all processes
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        step += 1
        shown = accelerator.reduce(loss.detach(), "mean")
        if accelerator.is_main_process:
            with Path(args.save_dir, "metrics.jsonl").open("a") as rows:
                rows.write(json.dumps({"step": step, "loss": shown.item()}) + "\n")
    model.eval()
    with torch.no_grad():
        losses = torch.cat([loss_of(batch)[None] for batch in valid_loader])
    total = accelerator.reduce(losses.mean(), "mean")
    accelerator.print(f"epoch {epoch + 1} valid loss {total.item():.4f}")
    accelerator.save_state(str(checkpoint))
accelerator.end_training()
