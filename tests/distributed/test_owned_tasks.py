"""With owners, the product's tasks have the curve of one device: any owners, shares, optimizers and transports.

The losses of 50 steps and the parameters after them are those of a plain loop to 1e-11, the gradient of the first step
to 1e-14, all in fp64. Errors are relative, of whole gradients and of all parameters together.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq import Task
from hetseq import config as options
from hetseq.comm.group import Group
from hetseq.tasks.bert.task import BertTask
from hetseq.tasks.gpt.task import GptTask
from hetseq.tasks.hf_causal_lm.task import HfCausalLmTask
from tests.support import bert, causal_runs, gpt_records, oracle
from tests.support.gpt import LAYOUTS
from tests.support.nightly import nightly
from tests.support.owned import (
    WEIGHT_DECAY,
    OwnedFacts,
    PlainCurve,
    Setting,
    make_optimizer,
    plain_curve,
    train_cases,
    train_owned,
    whole_gradient,
)
from tests.support.ranks import run_ranks
from tests.support.training import prepared, toy_words

STEPS = 50
GRADIENT, CURVE = 1e-14, 1e-11
OWNERS = ["3,1", "6,2,1", "1,1,8", "2,0,1"]
ROWS = {"3,1": "9,3", "1,3": "9,3", "6,2,1": "7,4,1", "1,1,8": "9,3,0", "2,0,1": "5,4,3"}
#: the inputs of layers alone are kept, and all but one of them leave for a file
AWAY = f"--checkpoint-modules auto --offload-activations --loading-horizon 1 --offload-dir {tempfile.gettempdir()}"
OPTIMIZERS = ["adamw", "sgd", "adadelta", "adagrad", "lamb", "muon"]


@dataclass(frozen=True)
class Case:
    """One training: of which task, who owns how much, and how."""

    task: str
    own: str
    optimizer: str
    flags: str = ""
    frozen: str = "-"
    clip_norm: float = 0.5
    compiles: bool = False


@dataclass(frozen=True)
class Kind:
    """A task on data of its own: its words, its class, and how a plain loop computes the loss of samples."""

    base: type[Task]
    words: list[str]
    model: Callable[[], torch.nn.Module]
    loss_of: Callable[[Any, int, int], torch.Tensor]
    samples: int
    batch: int


def make_bert(path: Path) -> Kind:
    data, columns = bert.write_folder(path / "data", 110), bert.columns_of(110)
    words = ["--task", "bert", "--data", str(data), "--dropout", "0"]

    def loss_of(model: Any, first: int, end: int) -> torch.Tensor:
        return bert.loss_of(model, {name: column[first:end] for name, column in columns.items()})

    return Kind(BertTask, words, lambda: build(BertTask, words), loss_of, 110, 48)


def make_gpt(path: Path, layout: str) -> Kind:
    rows = gpt_records.make_rows(110, bare=gpt_records.BARE)
    data = gpt_records.write_folder(path / "data", train=rows, config=LAYOUTS[layout], rows_per_file=40)
    words, columns = ["--task", "gpt", "--data", str(data), "--dropout", "0"], gpt_records.columns_of(rows)

    def loss_of(model: Any, first: int, end: int) -> torch.Tensor:
        return gpt_records.loss_of(model, {name: column[first:end] for name, column in columns.items()})

    return Kind(GptTask, words, lambda: build(GptTask, words), loss_of, 110, 48)


def make_causal_lm(path: Path, *, has_adapters: bool) -> Kind:
    from transformers import AutoTokenizer

    folder, chats = causal_runs.make_model(path / "model", "qwen2"), causal_runs.make_chats()
    data, tokenizer = causal_runs.write_chats(path / "data", chats), AutoTokenizer.from_pretrained(folder)
    tokens = [causal_runs.tokens_of(tokenizer, chat) for chat in chats]

    def loss_of(model: Any, first: int, end: int) -> torch.Tensor:
        total, count = torch.zeros((), dtype=torch.float64), 0
        for ids, is_answer in tokens[first:end]:
            logits, wanted = model(input_ids=ids[None]).logits[0, :-1], is_answer[1:]
            total = total + torch.nn.functional.cross_entropy(logits[wanted], ids[1:][wanted], reduction="sum")
            count += int(wanted.sum())
        return total / count

    words = ["--task", "hf_causal_lm", "--model", str(folder), "--data", str(data)]
    words += ["--lora-rank", str(causal_runs.RANK)] if has_adapters else []

    def model() -> torch.nn.Module:
        found = causal_runs.plain_loop(folder, chats, has_adapters=has_adapters, steps=0).model
        assert isinstance(found, torch.nn.Module)
        return found

    return Kind(HfCausalLmTask, words, model, loss_of, len(chats), 10)


def build(base: type[Task], words: list[str]) -> torch.nn.Module:
    """The model of a task, which is the first to draw random numbers."""
    task = Setting(base, "sgd").task(options.parse(words))
    torch.manual_seed(oracle.SEED)
    model: torch.nn.Module = task.build_model().double()
    return model


KINDS: dict[str, Callable[[Path], Kind]] = {
    "bert": make_bert,
    "gpt2": lambda path: make_gpt(path, "gpt2"),
    "llama": lambda path: make_gpt(path, "llama"),
    "causal lm": lambda path: make_causal_lm(path, has_adapters=False),
    "lora": lambda path: make_causal_lm(path, has_adapters=True),
}


def words_of(kind: Kind, case: Case, steps: int) -> list[str]:
    seed = causal_runs.SEED if kind.base is HfCausalLmTask else oracle.SEED
    return [
        *kind.words, "--curriculum", "1000000", "--seed", str(seed), "--clip-norm", str(case.clip_norm), "--no-save",
        "--lr", str(make_optimizer(case.optimizer, [{"params": [torch.zeros(1, 1)]}]).param_groups[0]["lr"]),
        "--weight-decay", str(WEIGHT_DECAY), "--lr-scheduler", "constant", "--disable-validation",
        "--precision", "fp64", "--max-update", str(steps),
        "--global-batch-size", str(kind.batch), "--batch-size", "5", "--balance", ROWS[case.own],
        "--shard-model", "state", "--own", case.own, "--bucket-cap-mb", "0.01", *case.flags.split(),
    ]  # fmt: skip


def check(path: Path, cases: list[Case], *, shares_memory: bool, steps: int = STEPS) -> None:
    """The cases are of one task and one number of ranks, one after the other in one life."""
    kind, (world_size,) = KINDS[cases[0].task](path), {case.own.count(",") + 1 for case in cases}
    settings = [Setting(kind.base, case.optimizer, case.frozen, case.compiles) for case in cases]
    told = [(words_of(kind, case, steps), setting) for case, setting in zip(cases, settings)]
    ranks = run_ranks(train_cases, world_size, prepared(path / "run"), told, shares_memory, timeout_s=300)
    for number, (case, setting) in enumerate(zip(cases, settings)):
        curve = plain_curve(
            setting.frozen_(kind.model()), case.optimizer, kind.loss_of, samples=kind.samples, batch=kind.batch,
            steps=steps, clip_norm=case.clip_norm,
        )  # fmt: skip
        compare([facts[number] for facts in ranks], curve, case)


def compare(ranks: list[OwnedFacts], curve: PlainCurve, case: Case) -> None:
    for facts in ranks:
        assert facts.losses == ranks[0].losses
        assert all(torch.equal(value, ranks[0].parameters[name]) for name, value in facts.parameters.items())
    errors = errors_of(ranks, curve)
    told = f"{case}: {', '.join(f'{name} {value:.1e}' for name, value in errors.items())}"
    print(told)
    assert errors["gradient"] <= GRADIENT, told
    assert max(errors["losses"], errors["parameters"]) <= CURVE, told


def errors_of(ranks: list[OwnedFacts], curve: PlainCurve) -> dict[str, float]:
    """Of the first gradient, the worst of the losses, and of the parameters at the end; relative."""
    first = ranks[0]
    gradient = whole_gradient([facts.gradients[0] for facts in ranks], first.parameters)
    losses = zip(first.losses, curve.losses, strict=True)
    return {
        "gradient": error_of(gradient, curve.gradient),
        "losses": max(abs((mine or 0.0) - right) / right for mine, right in losses),
        "parameters": error_of(torch.cat([one.flatten() for one in first.parameters.values()]), curve.parameters),
    }


def error_of(mine: torch.Tensor, right: torch.Tensor) -> float:
    return ((mine - right).norm() / right.norm()).item()


CASES = {
    "bert adamw": ([Case("bert", "3,1", "adamw")], True),
    "bert lamb sgd adadelta": (
        [
            Case("bert", "6,2,1", "lamb", "--activation-checkpointing"), Case("bert", "1,1,8", "sgd"),
            Case("bert", "2,0,1", "adadelta", frozen="embeddings"),
        ],
        False,
    ),
    "gpt2 adamw muon": (
        [Case("gpt2", "1,1,8", "adamw", "--activation-checkpointing"), Case("gpt2", "2,0,1", "muon")], True
    ),
    "gpt2 compiled": ([Case("gpt2", "3,1", "adamw", compiles=True)], False),
    "llama adagrad": ([Case("llama", "6,2,1", "adagrad"), Case("llama", "6,2,1", "adamw", AWAY)], False),
    "causal lm adamw": ([Case("causal lm", "2,0,1", "adamw")], False),
    "lora adamw": ([Case("lora", "1,1,8", "adamw")], True),
}  # fmt: skip


IN_CI = ["bert adamw", "llama adagrad", "lora adamw"]


@pytest.mark.slow
@pytest.mark.timeout(400)  # compiling takes long on a busy machine
@pytest.mark.parametrize("name", [*IN_CI, *nightly(*(name for name in CASES if name not in IN_CI))])
def test_the_curve_is_that_of_one_device(name: str, tmp_path: Path) -> None:
    cases, shares_memory = CASES[name]
    check(tmp_path, cases, shares_memory=shares_memory)


@pytest.mark.parametrize("shares_memory", nightly(True, False))
@pytest.mark.parametrize("own", nightly(*OWNERS))
@pytest.mark.parametrize("task", nightly(*KINDS))
def test_the_whole_matrix(task: str, own: str, shares_memory: bool, tmp_path: Path) -> None:
    cases = [Case(task, own, optimizer) for optimizer in OPTIMIZERS]
    cases += [Case(task, own, "adamw", frozen="layers.0"), Case(task, own, "sgd", clip_norm=0.0)]
    cases += [Case(task, own, "adamw", AWAY), Case(task, own, "adamw", AWAY, frozen="layers.0")]
    if task not in ("causal lm", "lora"):
        cases += [Case(task, own, "adamw", AWAY, compiles=True)]
        cases += [Case(task, own, "adamw", "--activation-checkpointing"), Case(task, own, "adamw", compiles=True)]
    check(tmp_path, cases, shares_memory=shares_memory)


def test_another_limit_of_the_norm_is_another_curve(tmp_path: Path) -> None:
    """The twin that must fail, in all three errors."""
    case = Case("llama", "3,1", "sgd")
    kind, setting = KINDS[case.task](tmp_path), Setting(GptTask, case.optimizer)
    words = words_of(kind, case, 4)
    (facts,) = zip(*run_ranks(train_cases, 2, prepared(tmp_path / "run"), [(words, setting)], True))
    for clip_norm, is_right in ((0.5, True), (0.4, False)):
        curve = plain_curve(
            kind.model(), "sgd", kind.loss_of, samples=kind.samples, batch=kind.batch, steps=4, clip_norm=clip_norm
        )  # fmt: skip
        assert [error < 1e-3 for error in errors_of(list(facts), curve).values()] == [is_right] * 3


def train_compiled(group: Group, save_dir: str, words: list[str], cache: str) -> OwnedFacts:
    warnings.filterwarnings("ignore", message=".* is deprecated", category=DeprecationWarning)  # torch within itself
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor", category=UserWarning)  # of Dynamo
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # nothing that another test has compiled
    return train_owned(group, save_dir, words, True)


def check_compiled(words: list[str], tmp_path: Path) -> None:
    """Two ranks train with `--compile` as they do without it."""
    plain, compiled = (
        run_ranks(
            train_compiled, 2, prepared(tmp_path / name), [*words, *more], str(tmp_path / "cache"), timeout_s=300
        )
        for name, more in (("plain", []), ("compiled", ["--compile"]))
    )  # fmt: skip
    assert any((tmp_path / "cache").rglob("*.so")), "something was compiled"
    for facts in compiled:
        assert facts.losses == pytest.approx(plain[0].losses, rel=CURVE)
        assert facts.norms[0] == pytest.approx(plain[0].norms[0], rel=GRADIENT)


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler for a CPU")
def test_two_compiled_ranks_have_the_curve_of_plain_ones(tmp_path: Path) -> None:
    words = toy_words("Integers", global_batch_size=12, max_sentences=5, max_update=STEPS, precision="fp64")
    words += ["--shard-model", "state", "--own", "3,1", "--balance", "9,3", "--bucket-cap-mb", "0.0001"]
    check_compiled(words, tmp_path)
