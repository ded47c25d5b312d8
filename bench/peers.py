"""Other libraries' training loops on the same model, data and optimizer: Accelerate, Lightning Fabric, Trainers.

A peer is a function that trains and calls `between` after each of its steps, until that returns False. The caller
decides what `between` does: in a comparison the rivals do a step each, so neighbours in time are compared,
although a Trainer owns its loop. Every peer keeps its own way of training; features that only cost time and that no
other has (progress bars, checkpoints, logs) are off. A peer raises ImportError where it is not installed.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from workloads import CLIP_NORM, Workload, build_optimizer

Between = Callable[[], bool]
Peer = Callable[[Workload, int, Between], None]
MOST_STEPS = 1_000_000
#: what Lightning calls a precision
LIGHTNINGS: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed"}


class Rows(torch.utils.data.Dataset[Any]):
    """The data set of a workload with only what a DataLoader needs: whole batches at once."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        return self._dataset.collater(self._dataset.__getitems__(indices))


def _as_it_is(batch: Any) -> Any:
    return batch


def _loader(work: Workload, batch: int) -> DataLoader[Any]:
    return DataLoader(Rows(work.load()), batch_size=batch, shuffle=True, drop_last=True, collate_fn=_as_it_is)


class WithLoss(nn.Module):
    """A model that takes a batch and gives its loss, as Trainers want it."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.model, self._loss = work.build(), work.loss

    def forward(self, sample: Any) -> dict[str, torch.Tensor]:
        return {"loss": self._loss(self.model, sample)}


def accelerate(work: Workload, batch: int, between: Between) -> None:
    """A loop with Accelerate, as its manual shows it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if work.precision == "bf16" else "no")
    model = work.build().train()
    model, optimizer, loader = accelerator.prepare(model, build_optimizer(model), _loader(work, batch))
    while True:
        for sample in loader:
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = work.loss(model, sample)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                optimizer.zero_grad()
            loss.item()
            if not between():
                return


def fabric(work: Workload, batch: int, between: Between) -> None:
    """A loop with Lightning Fabric."""
    from lightning.fabric import Fabric

    launched = Fabric(accelerator="cpu", devices=1, precision=LIGHTNINGS[work.precision])
    plain = work.build().train()
    model, optimizer = launched.setup(plain, build_optimizer(plain))
    loader: Any = launched.setup_dataloaders(_loader(work, batch))
    while True:
        for sample in loader:
            optimizer.zero_grad()
            with launched.autocast():
                loss = work.loss(model, sample)
            launched.backward(loss)
            launched.clip_gradients(model, optimizer, max_norm=CLIP_NORM, error_if_nonfinite=False)
            optimizer.step()
            loss.item()
            if not between():
                return


def hf_trainer(work: Workload, batch: int, between: Between) -> None:
    """transformers.Trainer; `between` runs in its callback at the end of a step."""
    import accelerate as _needed_by_it  # noqa: F401
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Hook(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = not between()

    model = WithLoss(work)
    optimizer = build_optimizer(model)
    with tempfile.TemporaryDirectory(prefix="hetseq-trainer-") as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=MOST_STEPS, per_device_train_batch_size=batch, max_grad_norm=CLIP_NORM,
            use_cpu=True, bf16=work.precision == "bf16", report_to=[], logging_strategy="no", save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False, dataloader_drop_last=True, dataloader_pin_memory=False,
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        trainer = Trainer(
            model=model, args=arguments, train_dataset=Rows(work.load()), optimizers=(optimizer, schedule),
            data_collator=lambda sample: {"sample": sample}, callbacks=[Hook()],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def lightning(work: Workload, batch: int, between: Between) -> None:
    """Lightning's Trainer; `between` runs in its hook at the end of a batch."""
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.build()

        def training_step(self, sample: Any, number: int) -> torch.Tensor:
            return work.loss(self.model, sample)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            # with bf16 it refuses to clip for a fused optimizer
            return build_optimizer(self, is_fused=work.precision == "fp32")

    class Hook(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
            trainer.should_stop = not between()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, precision=LIGHTNINGS[work.precision],
        max_steps=MOST_STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=CLIP_NORM, callbacks=[Hook()],
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about loader processes, which no loop here uses
        trainer.fit(Module(), _loader(work, batch))


PEERS: dict[str, Peer] = {
    "Accelerate": accelerate,
    "Lightning Fabric": fabric,
    "HF Trainer": hf_trainer,
    "Lightning Trainer": lightning,
}
