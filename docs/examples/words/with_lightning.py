"""The speller by Lightning: `python with_lightning.py --save-dir runs/lightning`."""

import json
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader
from words import LR, NOTHING, Speller, Words, arguments, collate, rate


class Spelling(lightning.LightningModule):
    """Guess the next letter; the loss is a mean over the letters of one batch."""

    def __init__(self):
        super().__init__()
        self.speller = Speller()

    def loss_of(self, batch):
        letters, following = batch
        scores = self.speller(letters).flatten(0, 1)
        return F.cross_entropy(scores, following.flatten(), ignore_index=NOTHING)

    def training_step(self, batch):
        return self.loss_of(batch)

    def validation_step(self, batch):
        loss, size = self.loss_of(batch), len(batch[0])
        self.log("valid_loss", loss, batch_size=size, sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=LR, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        every_step = {"scheduler": schedule, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": every_step}


class Rows(Callback):
    """A row of metrics.jsonl for every step."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        loss = trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")
        if trainer.is_global_zero:
            with Path(trainer.default_root_dir, "metrics.jsonl").open("a") as rows:
                row = {"step": trainer.global_step, "loss": loss.item()}
                rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    args = arguments()
    lightning.seed_everything(1)
    trainer = lightning.Trainer(
        default_root_dir=args.save_dir,
        max_epochs=args.epochs,
        gradient_clip_val=args.clip,
        precision="64-true" if args.double else "32-true",
        callbacks=[Rows(), ModelCheckpoint(args.save_dir, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    batch_size = 32 // trainer.world_size
    train, valid = Words("train"), Words("valid")
    loader = DataLoader(train, batch_size, shuffle=not args.in_order, collate_fn=collate)
    valid_loader = DataLoader(valid, batch_size, collate_fn=collate)
    last = Path(args.save_dir, "last.ckpt")
    Path(args.save_dir).mkdir(parents=True, exist_ok=True)
    begin = last if last.exists() else None
    trainer.fit(Spelling(), loader, valid_loader, ckpt_path=begin)
