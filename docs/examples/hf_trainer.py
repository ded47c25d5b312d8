"""A small GPT-2 that learns to count: Hugging Face's Trainer, with one import changed."""

import torch
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from hetseq import HetSeqTrainer as Trainer

WORDS, LENGTH = 40, 16


class Counting(Dataset):
    """Rows that count upwards from a number, by one, two or three; the first words are no labels."""

    def __init__(self, count, seed):
        draw = torch.Generator().manual_seed(seed)
        self.first = torch.randint(WORDS, (count,), generator=draw)
        self.by = torch.randint(1, 4, (count,), generator=draw)

    def __len__(self):
        return len(self.first)

    def __getitem__(self, i):
        words = (self.first[i] + self.by[i] * torch.arange(LENGTH)) % WORDS
        labels = words.clone()
        labels[:2] = -100
        return {"input_ids": words, "labels": labels}


set_seed(1)
shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": LENGTH, "vocab_size": WORDS}
config = GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
args = TrainingArguments(
    output_dir="counting",
    per_device_train_batch_size=16,  # times gradient_accumulation_steps: 32 samples in a step, on any devices
    gradient_accumulation_steps=2,
    num_train_epochs=6,
    learning_rate=0.01,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=1,
    load_best_model_at_end=True,
    report_to="none",
)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=args,
    train_dataset=Counting(400, 1),
    eval_dataset=Counting(100, 2),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
)
trainer.train()
trainer.save_model()
