"""The speller by DDP: `torchrun --nproc-per-node 2 with_ddp.py --save-dir runs/ddp`."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from words import LR, NOTHING, Speller, Words, arguments, collate, rate

args = arguments()
dist.init_process_group()
rank, world_size = dist.get_rank(), dist.get_world_size()
has_gpu = torch.cuda.is_available()
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if has_gpu else "cpu")
torch.manual_seed(1)

train, valid = Words("train"), Words("valid")
sampler = DistributedSampler(train, shuffle=not args.in_order)
loader = DataLoader(train, 32 // world_size, sampler=sampler, collate_fn=collate)
valid_sampler = DistributedSampler(valid, shuffle=False)
valid_loader = DataLoader(valid, 32, sampler=valid_sampler, collate_fn=collate)
speller = Speller().to(device, torch.float64 if args.double else torch.float32)
model = DistributedDataParallel(speller)
optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
checkpoint, step, first = Path(args.save_dir, "last.pt"), 0, 0
checkpoint.parent.mkdir(parents=True, exist_ok=True)
if checkpoint.exists():
    state = torch.load(checkpoint, map_location=device)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    step, first = state["step"], state["epoch"]


def loss_of(batch):
    """The mean over the letters of one batch."""
    letters, following = (part.to(device) for part in batch)
    scores = model(letters).flatten(0, 1)
    return F.cross_entropy(scores, following.flatten(), ignore_index=NOTHING)


for epoch in range(first, args.epochs):
    sampler.set_epoch(epoch)
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()  # and the mean of the gradients of all processes
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        schedule.step()
        step += 1
        shown = loss.detach() / world_size
        dist.all_reduce(shown)
        if rank == 0:
            with Path(args.save_dir, "metrics.jsonl").open("a") as rows:
                rows.write(json.dumps({"step": step, "loss": shown.item()}) + "\n")
    model.eval()
    with torch.no_grad():
        total = sum(loss_of(batch) for batch in valid_loader)
        total /= len(valid_loader) * world_size
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch + 1} valid loss {total.item():.4f}")
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"schedule": schedule.state_dict(), "step": step, "epoch": epoch + 1}
        torch.save(state, checkpoint)
dist.destroy_process_group()
os._exit(0)  # an orderly end now and then aborts: DDP leaves gloo's threads, which free tensors of Python
