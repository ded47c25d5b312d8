"""A script with Hugging Face's Trainer, and the same with one import changed; `hf_trainer` has what tests say about it.

The words: a folder for what it writes, `Trainer` or `HetSeqTrainer`, settings as JSON, one thing to happen:
`kill:PLACE:RANK:STEP`, once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = filter(None, [os.environ.get("HETSEQ_TEST_TRANSFORMERS")])  # a folder with another version

import transformers  # noqa: E402
from transformers import (  # noqa: E402
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

FOLDER, KIND, SETTINGS = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
WRONG = SETTINGS.pop("wrong", "")
EVENT = sys.argv[4] if len(sys.argv) > 4 else ""
if KIND == "HetSeqTrainer":
    from hetseq import HetSeqTrainer as Trainer


class Sentences(torch.utils.data.Dataset[Any]):
    """Rows of numbers that count upwards, with labels left out here and there; one row has none."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        first = torch.randint(20, (count, 1), generator=draw)
        self.words = (first + torch.arange(12) * (1 + first % 3)) % 23
        self.labels = self.words.masked_fill(torch.rand(count, 12, generator=draw) < 0.3, -100)
        self.labels[0] = -100

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples without numbers."""

    def __iter__(self) -> Any:
        return iter(())


def happen(place: str, step: int) -> None:
    """Kill this process here, if it is the one that is meant and it has not happened yet."""
    mark = FOLDER / "happened"
    rank = trainer._run.rank if KIND == "HetSeqTrainer" else 0
    if f"kill:{place}:{rank}:{step}" == EVENT and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Notes(TrainerCallback):
    """Writes down every event, and the weights after each step."""

    def note(self, event: str, state: Any, **more: Any) -> None:
        row = {"event": event, "step": state.global_step, "epoch": state.epoch, **more}
        with (FOLDER / f"course-{os.getpid()}").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("train begin", state)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("epoch begin", state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("step begin", state)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("pre optimizer step", state)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("optimizer step", state)

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, lr_scheduler: Any, **_: Any) -> None:
        weights = [
            float((value.detach().double() * (1 + place % 7)).sum()) for place, value in enumerate(model.parameters())
        ]
        self.note("step end", state, weights=sum(weights), lr=lr_scheduler.get_last_lr()[0])
        happen("after", state.global_step)
        if (FOLDER / "happened").exists() and len(list(FOLDER.glob("course-*"))) < 4:
            time.sleep(pace_s)  # the run is to last until the lost rank is back

    if WRONG == "on_substep_end":

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.note("substep end", state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        self.note("log", state)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        self.note("evaluate", state, loss=metrics.get("eval_loss"))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("save", state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("epoch end", state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note("train end", state)


def loss_function(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Any:
    """transformers' ForCausalLMLoss, without its conversion to fp32."""
    flat = logits[:, :-1].reshape(-1, vocab_size)
    if num_items_in_batch is None:
        return torch.nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1))
    return torch.nn.functional.cross_entropy(flat, labels[:, 1:].reshape(-1), reduction="sum") / num_items_in_batch


class Watched(Trainer):  # type: ignore[misc]
    """Writes down the losses of micro-batches, and kills itself in one."""

    losses: list[float]

    if KIND == "Trainer":

        def training_step(self, *args: Any, **named: Any) -> Any:
            loss = super().training_step(*args, **named)
            self.losses.append(float(loss.detach()))
            return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        happen("body" if model.training else "evaluate", self.state.global_step + model.training)
        return super().compute_loss(model, inputs, *args, **named)

    if WRONG == "count_items":

        def count_items(self, inputs: Any) -> None:
            """Samples, though the loss is a mean over labels."""

    if WRONG == "get_batch_samples":

        def get_batch_samples(self, *args: Any) -> Any:
            return super().get_batch_samples(*args)


class Tagger(torch.nn.Module):
    """A model whose forward takes nothing of the Trainer; its loss is the mean over the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(23, 16), torch.nn.Linear(16, 23)

    def forward(self, input_ids: Any, labels: Any) -> dict[str, Any]:
        logits = self.head(self.embedding(input_ids).tanh())
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Quiet(Tagger):
    """A model without labels; its loss is the mean over the samples."""

    def forward(self, input_ids: Any) -> dict[str, Any]:  # type: ignore[override]
        apart = self.head(self.embedding(input_ids).tanh()).logsumexp(2) - 3
        return {"loss": apart.square().sum(1).mean()}


def gpt2() -> Any:
    size = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16, "vocab_size": 23}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    made = GPT2LMHeadModel(GPT2Config(**size, **dropout, bos_token_id=0, eos_token_id=0))
    if "label_smoothing_factor" not in SETTINGS:
        made.loss_function = loss_function
    return made


def by_function(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A compute_loss_func: squares of the logits beside the loss of the labels."""
    loss = loss_function(outputs["logits"], labels, 23, num_items_in_batch)
    kept = labels[:, 1:] != -100
    return loss + 0.01 * (outputs["logits"][:, :-1].square().mean(2) * kept).sum() / num_items_in_batch


def accuracy(found: Any) -> dict[str, Any]:
    """A compute_metrics, in numbers of NumPy."""
    right = (found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:])[found.label_ids[:, 1:] != -100]
    return {"accuracy": right.mean()}


set_seed(3)
kind, precision = SETTINGS.pop("model", "gpt2"), SETTINGS.pop("precision", "float64")
model = {"gpt2": gpt2, "tagger": Tagger, "quiet": Quiet}[kind]().to(getattr(torch, precision))
patience, threshold = SETTINGS.pop("patience", None), SETTINGS.pop("threshold", 0.0)
resume, pace_s = SETTINGS.pop("resume", None), SETTINGS.pop("pace_s", 0.0)
more: dict[str, Any] = {"compute_loss_func": by_function} if SETTINGS.pop("by_function", False) else {}
more |= {"compute_metrics": accuracy} if SETTINGS.pop("metrics", False) else {}
train, valid = (Stream() if WRONG == "stream" else Sentences(75, 1)), Sentences(22, 2)
args = TrainingArguments(
    output_dir=str(FOLDER / KIND), report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
    **{"per_device_train_batch_size": 10, "num_train_epochs": 3, "learning_rate": 0.01, "seed": 7, "logging_steps": 2,
       "save_steps": 4, **SETTINGS},
)  # fmt: skip
trainer = Watched(
    model=model, args=args, train_dataset=train, eval_dataset=valid, **more,
    callbacks=[Notes(), *([EarlyStoppingCallback(patience, threshold)] if patience else [])],
)  # fmt: skip
trainer.losses = []
output = trainer.train(resume_from_checkpoint=resume)
found = trainer.evaluate().get("eval_loss")
if trainer.is_world_process_zero():
    (FOLDER / f"{KIND}.json").write_text(
        json.dumps({"losses": trainer.losses, "history": trainer.state.log_history, "steps": output.global_step,
                    "version": transformers.__version__, "eval_loss": found, "best": trainer.state.best_metric,
                    "weights": [float(value.detach().double().sum()) for value in model.parameters()]})
    )  # fmt: skip
trainer.save_model(str(FOLDER / f"saved-{KIND}"))
