"""Trains a causal language model of transformers on a text, without a trainer."""

import argparse
import json
import math
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config, default_data_collator, get_scheduler, set_seed


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file", required=True)
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--block_size", type=int, default=16)
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--lr_scheduler_type", default="linear")
    parser.add_argument("--num_warmup_steps", type=int, default=2)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--digits", type=int, default=4, help="of the numbers in the log")
    return parser.parse_args()


def blocks_of(path, letters, size):
    """The text in blocks of equal length, without its rest."""
    with open(path) as file:
        codes = [letters.index(letter) for letter in file.read()]
    blocks = [codes[start : start + size] for start in range(0, len(codes) - size + 1, size)]
    return [{"input_ids": block, "labels": block.copy()} for block in blocks]


def loss_of(model, batch):
    """The mean over all tokens but the first ones; that of transformers is always in single precision."""
    logits, labels = model(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)

    with open(args.train_file) as file:
        letters = sorted(set(file.read()))
    blocks = blocks_of(args.train_file, letters, args.block_size)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(args.seed))
    train_dataset = [blocks[i] for i in order]
    eval_dataset = blocks_of(args.validation_file, letters, args.block_size)
    config = GPT2Config(
        vocab_size=len(letters), n_positions=args.block_size, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_config(config)
    model.to(getattr(torch, args.dtype))

    train_dataloader = DataLoader(
        train_dataset, collate_fn=default_data_collator, batch_size=args.per_device_train_batch_size
    )
    eval_dataloader = DataLoader(
        eval_dataset, collate_fn=default_data_collator, batch_size=args.per_device_eval_batch_size
    )

    # biases and norms do not decay
    no_decay = ["bias", "ln_1.weight", "ln_2.weight", "ln_f.weight"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": args.weight_decay},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    lr_scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps,
        num_training_steps=steps_per_epoch * args.num_train_epochs,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    completed_steps = 0
    for epoch in range(1, args.num_train_epochs + 1):
        model.train()
        total_loss = 0.0
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                total_loss += loss.item() / args.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
                accelerator.print(f"step {completed_steps}: loss {total_loss:.{args.digits}f}")
                total_loss = 0.0

        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                loss = loss_of(model, batch)
            losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["labels"]))))
        eval_loss = torch.cat(losses).mean().item()
        accelerator.print(f"epoch {epoch}: perplexity {math.exp(eval_loss):.{args.digits}f}")

    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
        accelerator.unwrap_model(model).save_pretrained(args.output_dir)
        with open(os.path.join(args.output_dir, "all_results.json"), "w") as file:
            json.dump({"perplexity": math.exp(eval_loss)}, file)


if __name__ == "__main__":
    main()
