"""Trains a causal language model of transformers on a text, without a trainer."""

import argparse
import json
import math
import os

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, GPT2Config, default_data_collator, get_scheduler, set_seed

import hetseq


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
    run = hetseq.start(seed=args.seed)
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

    # biases and norms do not decay
    no_decay = ["bias", "ln_1.weight", "ln_2.weight", "ln_f.weight"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": args.weight_decay},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
    steps_per_epoch = math.ceil(len(train_dataset) / batch_size)
    lr_scheduler = get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps,
        num_training_steps=steps_per_epoch * args.num_train_epochs,
    )
    model, optimizer, lr_scheduler = run.own(model, optimizer, lr_scheduler)

    def measure(batch):
        return {"loss": (loss_of(model, batch) * len(batch["labels"]), len(batch["labels"]))}

    for step in run.steps(
        train_dataset, collate=default_data_collator, global_batch_size=batch_size, max_epoch=args.num_train_epochs,
        clip_norm=args.max_grad_norm, clip_epsilon=1e-6, shuffle=False,
    ):  # fmt: skip
        for batch in step:
            loss, count = loss_of(model, batch), batch["labels"][:, 1:].numel()
            step.backward(loss * count, count=count)
        lr_scheduler.step()
        print(f"step {step.number}: loss {step.loss:.{args.digits}f}")
        if step.ends_epoch:
            batch_size = args.per_device_eval_batch_size
            found = run.evaluate(eval_dataset, measure, batch_size=batch_size, collate=default_data_collator)
            eval_loss = found["loss"]
            print(f"epoch {step.epoch}: perplexity {math.exp(eval_loss):.{args.digits}f}")

    if run.is_first:
        os.makedirs(args.output_dir, exist_ok=True)
        model.save_pretrained(args.output_dir)
        with open(os.path.join(args.output_dir, "all_results.json"), "w") as file:
            json.dump({"perplexity": math.exp(eval_loss)}, file)


if __name__ == "__main__":
    main()
