"""Workloads of the benchmarks: a model and synthetic data, as options for HetSeq and as objects for any other loop.

Every loop of a comparison gets the same model, the same data set with its own batching, and the same optimizer; only
the loop differs. `MODELS` lists the workloads, and `random_tokens.GPTS` some for `bench/shard.py`; a BERT's data are
written once into a folder.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import random_images
import random_tokens
import slow_layers
import torch
import torch.nn.functional as F

from hetseq.data.loader import place_on
from hetseq.tasks.bert.hdf5_dataset import load_bert
from hetseq.tasks.bert.model import BertConfig, BertForPreTraining
from hetseq.training.precision import PRECISIONS

TASK = Path(random_images.__file__)
TOKENS_TASK = Path(random_tokens.__file__)
SLOW = "gpt-slow"  # on a machine of a given speed, see `slow_layers`
LEARNING_RATE, CLIP_NORM = 1e-3, 25.0


@dataclass(frozen=True)
class Rows:
    """The shape of a BERT and of its rows, all of them full."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    predictions: int


#: bert-tiny is the one of `bench/het.py`: small enough for steps of many samples; bert is the smallest one of use
BERTS = {
    "bert-tiny": Rows(3, 128, 2, 4096, 64, 10), "bert": Rows(4, 256, 4, 30522, 128, 20),
    "bert-base": Rows(12, 768, 12, 30522, 128, 20),
}  # fmt: skip
MODELS = ("mnist", *BERTS)


@dataclass(frozen=True)
class Workload:
    """Something to train."""

    name: str
    #: of `hetseq train`: task, data and network
    words: tuple[str, ...]
    #: samples by index, with `__getitems__` and `collater`
    load: Callable[[], Any]
    build: Callable[[], torch.nn.Module]
    #: model, batch -> mean loss in nats, as a loop on one device has it
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]
    #: of `hetseq train`; every loop computes in it
    precision: str = "fp32"
    #: "cpu" or "cuda:N"
    device: str = "cpu"

    def computing(self) -> AbstractContextManager[object]:
        """A context in which a plain loop computes in that precision."""
        return PRECISIONS[self.precision].computing(torch.device(self.device))

    def place(self, sample: Any) -> Any:
        """A batch on the device, floating tensors in fp32."""
        return place_on(torch.device(self.device), torch.float32)(sample)


def prepare(name: str, folder: Path, rows: int) -> Workload:
    """Write the data of a workload into `folder` if it needs any, at least `rows` of them; gives the workload."""
    if name in BERTS:
        write_rows(folder, BERTS[name], rows)
    return workload(name, folder)


def larger_batch(name: str, batch: int) -> int | None:
    """The next number of samples of a step, at least twice as many; None where an epoch holds no more of them."""
    if name in BERTS:
        return 2 * batch
    samples = random_images.SAMPLES
    return next((size for size in range(2 * batch, samples + 1) if samples % size == 0), None)


def workload(name: str, folder: Path) -> Workload:
    """The workload `name`, whose data `prepare` has written into `folder`."""
    if name == "mnist":
        return Workload(
            name,
            ("--task", f"{TASK}:RandomImageTask"),
            random_images.RandomImages,
            random_images.build_model,
            _image_loss,
        )
    if name == SLOW:
        slow = slow_layers.SlowTokens
        named = ("--task", f"{slow_layers.__file__}:{slow.__name__}")
        return Workload(name, named, slow.rows, lambda: slow_layers.paced(slow.network()), _token_loss)
    if name in random_tokens.GPTS:
        task = random_tokens.GPTS[name]
        return Workload(name, ("--task", f"{TOKENS_TASK}:{task.__name__}"), task.rows, task.network, _token_loss)
    shape = BERTS[name]
    words = ("--task", "bert", "--data", str(folder))

    def load() -> Any:
        return load_bert(
            folder, "train", vocab_size=shape.vocabulary, max_positions=shape.length, type_vocab_size=2, num_file=0
        )

    def build() -> torch.nn.Module:
        return BertForPreTraining(BertConfig.from_json_file(folder / "bert_config.json"))

    return Workload(name, words, load, build, _bert_loss)


def with_transformers(work: Workload) -> Workload:
    """The same with transformers' BERT, for loops other than HetSeq."""

    def build() -> torch.nn.Module:
        from transformers import BertConfig as TheirConfig
        from transformers import BertForPreTraining as Theirs

        ours = work.build()
        assert isinstance(ours, BertForPreTraining), f"{work.name} is no BERT"
        theirs: torch.nn.Module = Theirs(TheirConfig(**dataclasses.asdict(ours.config)))
        return theirs

    return dataclasses.replace(work, build=build, loss=their_bert_loss)


def their_bert_loss(model: torch.nn.Module, sample: Any) -> torch.Tensor:
    """The same mean loss as transformers computes it: a label for every token, -100 for unpredicted ones."""
    labels = torch.full((sample["input_ids"].numel(),), -100)
    labels[sample["masked_positions"]] = sample["masked_ids"]
    loss: torch.Tensor = model(
        input_ids=sample["input_ids"],
        token_type_ids=sample["token_type_ids"],
        attention_mask=sample["attention_mask"].long(),
        labels=labels.view_as(sample["input_ids"]),
        next_sentence_label=sample["next_sentence_labels"],
    ).loss
    return loss


def _image_loss(model: torch.nn.Module, sample: Any) -> torch.Tensor:
    images, labels = sample
    return F.cross_entropy(model(images), labels)


def _token_loss(model: torch.nn.Module, sample: Any) -> torch.Tensor:
    rows: torch.Tensor = sample
    return random_tokens.summed_loss(model, rows) / (rows.numel() - len(rows))


def _bert_loss(model: torch.nn.Module, sample: Any) -> torch.Tensor:
    words, pairs = model(
        sample["input_ids"], sample["token_type_ids"], sample["attention_mask"], sample["masked_positions"]
    )
    return F.cross_entropy(words, sample["masked_ids"]) + F.cross_entropy(pairs, sample["next_sentence_labels"])


def write_rows(folder: Path, shape: Rows, rows: int) -> None:
    """A folder as `--task bert` reads it, of `rows` made-up rows without padding."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "intermediate_size": 4 * shape.hidden,
        "max_position_embeddings": shape.length,
    }  # fmt: skip
    (folder / "bert_config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = np.random.default_rng(0)
    order = np.argsort(generator.random((rows, shape.length - 1)), axis=1)[:, : shape.predictions]
    columns = {
        "input_ids": generator.integers(5, shape.vocabulary, (rows, shape.length), np.int32),
        "input_mask": np.ones((rows, shape.length), np.int8),
        "segment_ids": np.repeat(np.arange(shape.length)[None] >= shape.length // 2, rows, axis=0).astype(np.int8),
        "masked_lm_positions": np.sort(order + 1, axis=1).astype(np.int32),  # never 0, which would end the list
        "masked_lm_ids": generator.integers(5, shape.vocabulary, (rows, shape.predictions), np.int32),
        "next_sentence_labels": generator.integers(0, 2, rows, np.int8),
    }
    with h5py.File(folder / "train.hdf5", "w") as file:
        for name, values in columns.items():
            file.create_dataset(name, data=values)


def build_optimizer(model: torch.nn.Module, *, is_fused: bool = True) -> torch.optim.Optimizer:
    """The optimizer of every loop but ours, which makes the same one from its options."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=is_fused)


def hetseq_words(work: Workload, batch: int) -> list[str]:
    """The options of a `hetseq train` that does the same, without saves and validation."""
    words = [
        *work.words,
        "--devices",
        work.device,
        "--precision",
        work.precision,
        "--global-batch-size",
        str(batch),
        "--lr",
        str(LEARNING_RATE),
    ]
    words += [
        "--lr-scheduler",
        "constant",
        "--clip-norm",
        str(CLIP_NORM),
        "--disable-validation",
        "--no-save",
        "--memory-interval-updates",
        "0",
    ]  # no images in memory either: nothing would clear them away
    return [*words, "--persistent-time-interval", "0", "--log-format", "none"]


def batches(work: Workload, batch: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
    """Batches of `batch` samples in random order without end; each rank has its own."""
    dataset = work.load()
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(1)).tolist()
    position = rank * batch
    while True:
        yield dataset.collater(dataset.__getitems__(order[position : position + batch]))
        position += world_size * batch
        if position + batch > len(order):
            position = rank * batch


def bare_loop(
    work: Workload,
    batch: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    wrap: Callable[[torch.nn.Module], torch.nn.Module] = lambda model: model,
) -> Callable[[], float]:
    """A step of a plain training loop, which returns its loss; `wrap` may put DDP around the model."""
    torch.manual_seed(0)
    model = wrap(work.build().train().to(work.device))
    optimizer, samples = build_optimizer(model), batches(work, batch, rank=rank, world_size=world_size)

    def step() -> float:
        sample = work.place(next(samples))
        optimizer.zero_grad()
        with work.computing():
            loss = work.loss(model, sample)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        return loss.item()

    return step
