"""The loss over labelled words has the gradient of the global batch, and F1 that of all sentences, on unequal ranks.

Sentences have from 1 to 9 words, so ranks and micro-batches of as many sentences have unequal numbers of words and are
padded to unequal lengths. Errors are of the whole gradient, ||g - g0|| / ||g0||.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hetseq import config as options
from hetseq.comm.group import Group
from hetseq.task import make_task
from hetseq.tasks.bert.ner import BertNerTask
from tests.support import labelled, oracle, tagging
from tests.support.ranks import run_ranks
from tests.support.training import Facts, prepared, train

SENTENCES, BATCH, STEPS = 40, 12, 4  # an epoch ends with 4 sentences


def write_data(folder: Path) -> Path:
    draw, words = random.Random(5), [piece for piece in [*labelled.PIECES, "unwalked"] if "#" not in piece]
    folder.mkdir()
    for split in ("train", "dev"):
        sentences = [
            "".join(f"{draw.choice(words)}\t{draw.choice(['O', 'B-X', 'I-X'])}\n" for _ in range(draw.randint(1, 9)))
            for _ in range(SENTENCES)
        ]
        (folder / f"{split}.conll").write_text("\n".join(sentences))
    return folder


def words_of(folder: Path, balance: str) -> list[str]:
    return [
        "--task", f"{tagging.__file__}:RecordingNer", "--data", str(folder / "data"), "--dropout", "0",
        *labelled.write_network(folder, initializer_range=0.1, max_position_embeddings=32),
        "--curriculum", "1000000", "--seed", str(oracle.SEED), "--clip-norm", "0",
        "--lr", "0.1", "--lr-scheduler", "constant", "--no-save", "--global-batch-size", str(BATCH), "--batch-size",
        "5", "--balance", balance, "--max-update", str(STEPS), "--precision", "fp64",
    ]  # fmt: skip


def train_words(group: Group, save_dir: str, words: list[str]) -> Facts:
    return train(group, save_dir, words)


def reference(words: list[str]) -> tuple[list[torch.Tensor], list[dict[str, float]]]:
    """Gradients by a loop over whole batches, each sentence by itself and without padding."""
    task = make_task(BertNerTask, options.parse(["--task", "bert_ner", *words[2:]]))
    torch.manual_seed(oracle.SEED)
    model, dataset = task.build_model().double(), task.load_dataset("train")
    optimizer = torch.optim.SGD(sorted(model.parameters(), key=lambda p: p.dim() < 2), lr=0.1)
    gradients, at = [], 0
    for _ in range(STEPS):
        stop = min(at + BATCH, SENTENCES)
        optimizer.zero_grad()
        losses = []
        for sample in (dataset[index] for index in range(at, stop)):
            ids = sample["pieces"][None]
            logits = model(ids, torch.zeros_like(ids), torch.ones_like(ids).bool(), sample["columns"])
            losses.append(F.cross_entropy(logits, sample["tags"], reduction="none"))
        torch.cat(losses).mean().backward()
        at = 0 if stop == SENTENCES else stop
        gradients.append(torch.cat([p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]))
        optimizer.step()
    batch = labelled.batch_of(task.load_dataset("valid"))
    with torch.no_grad():
        pairs = task.metrics(model.eval(), batch)
    return gradients, {name: total / count for name, (total, count) in pairs.items()}


def test_the_mean_of_the_ranks_means_is_wrong(tmp_path: Path) -> None:
    """The twin that must fail: averaged over two ranks of as many sentences, with unequal numbers of words."""
    write_data(tmp_path / "data")
    task = make_task(BertNerTask, options.parse(["--task", "bert_ner", *words_of(tmp_path, "equal")[2:]]))
    torch.manual_seed(oracle.SEED)
    model, dataset = task.build_model().double().eval(), task.load_dataset("train")

    def gradient(*indices: int) -> torch.Tensor:
        model.zero_grad()
        batch = labelled.batch_of(dataset, *indices)
        (task.loss(model, batch)["loss"] / task.count(batch)["loss"]).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    right = gradient(*range(BATCH))
    halves = gradient(*range(BATCH // 2)), gradient(*range(BATCH // 2, BATCH))
    assert (sum(halves) / 2 - right).norm() / right.norm() > 0.01


@pytest.mark.parametrize(("world_size", "balance"), [(1, "equal"), (3, "9,2,1"), (3, "0,11,1")])
def test_words_have_the_gradient_of_the_global_batch(world_size: int, balance: str, tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    words = words_of(tmp_path, balance)
    expected, figures = reference(words)
    ranks = run_ranks(train_words, world_size, prepared(tmp_path / "run"), words, timeout_s=120)
    for facts in ranks:
        for mine, right in zip(facts.gradients, expected, strict=True):
            error = ((mine - right).norm() / right.norm()).item()
            assert error <= 1e-14, f"{error:.1e}"
        found = facts.validations[-1]
        assert {name: found[f"valid_{name}"] for name in figures} == pytest.approx(figures, abs=1e-12)
    assert figures["f1"] > 0.05
    assert len({tuple(facts.parameters.tolist()) for facts in ranks}) == 1, "replicas differ"
