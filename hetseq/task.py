"""The base class of a user's task: data, model, and a loss as sums with their counts.

A loss term is a *sum* over the samples (or tokens, or pixels) of a micro-batch, and its count is known from the
collated batch before forward. HetSeq divides by the global count, so the gradient of a step equals the gradient of its
global batch for any shares of the ranks. A task knows no ranks, devices or steps.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from hetseq.config.sections import Config
from hetseq.data.lanes import check_is_indexed
from hetseq.data.plan import Indices, Lengths
from hetseq.errors import ConfigError, MissingSplitError, TaskError, TaskFileError
from hetseq.registry import nearest

#: a term's sum over one micro-batch, by term
Sums = dict[str, torch.Tensor]

_NEW_HOOK = """{name} overrides train_step, the hook of 2020, which HetSeq no longer calls. Write instead

    def loss(self, model, sample):        # the SUM over the micro-batch of each term, never a mean
        return {{"loss": ...}}

    def count(self, sample):              # what each sum is divided by, over all ranks; default: the samples
        return {{"loss": ...}}

or leave both out where model(*sample) returns the mean loss of its samples."""


_NO_PREDICTIONS = """{name} has no predictions(model, sample), which `hetseq predict` calls. Write

    def predictions(self, model, sample):  # one line of text for each sample of the batch, in its order
        return [...]"""


class TaskArguments(SimpleNamespace):
    """Every option by its field name, flat, as `args` was in 2020; `config` is the structured form."""

    config: Config


def task_arguments(config: Config) -> TaskArguments:
    """The arguments of a task's constructor."""
    return TaskArguments(**config.flat(), dict=config.task.vocab_file, config=config)


@dataclass(frozen=True)
class TrainedStep:
    """A step that all ranks have committed, for `Task.after_step`. All but tensors and optimizer is equal on all ranks.

    With `--shard-model state` the model is whole, while the optimizer has what this rank owns: fragments in its groups.
    """

    number: int  # from 1
    epoch: int
    ends_epoch: bool
    loss: float | None  # weighted mean over the global batch, in nats, before the update; None: the step was skipped
    terms: Mapping[str, float] | None  # the mean of each term; None: the step was skipped
    grad_norm: float  # before clipping
    lr: float
    valid: Mapping[str, Mapping[str, float]]  # split -> figure -> value; empty if not validated now
    model: torch.nn.Module  # of this rank, after the update
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class ModelCard:
    """What only the task knows about its exported model, for the `README.md` of `--format hf`."""

    title: str = ""  # "": the name of the exported folder
    about: str = ""  # a paragraph in Markdown: what the model is, and how to open it
    library_name: str | None = None  # the library that opens the folder, such as transformers or peft
    pipeline_tag: str | None = None  # what it is for, in the Hub's words, such as text-generation
    base_model: str | Path | None = None  # where its weights began: a name on the Hub, or a local directory
    tags: tuple[str, ...] = ()  # besides `hetseq`

    def __post_init__(self) -> None:
        tags: object = self.tags
        if isinstance(tags, str):
            raise TaskFileError(f"ModelCard(tags={tags!r}): expected a tuple, as in ({tags!r},)")


class Task:
    """Base class of tasks. `load_dataset` and `build_model` are required; `loss` nearly always.

    Tasks of 2020 still work: `load_dataset` may fill `self.datasets`, `build_model` may take `args`, `collater`,
    `num_tokens` and `set_epoch` may sit on the data set, and a model that returns its mean loss needs no `loss`.
    """

    #: weight of each loss term; terms that are not named here have weight 1
    term_weights: ClassVar[Mapping[str, float]] = {}
    #: set it for losses made of derivatives (forces, gradient penalties), which need gradients in validation too
    needs_gradients_in_validation: ClassVar[bool] = False
    #: a dataclass of the task's own options; its fields become flags and attributes of `self.args`
    Options: ClassVar[type | None] = None
    #: set by `after_step` on any rank: all ranks end the run after this step
    wants_to_stop: bool = False
    #: numbers of the step in progress for its row in `metrics.jsonl`, under `log`: `run.log` of an own loop sets them
    numbers_of_run_log: ClassVar[Mapping[str, float]] = {}
    #: whether a run that `after_step` has ended is over for the command that resumes it
    stays_ended: bool = True
    #: the factor on the learning rate of the coming steps; `after_step` may change it, and checkpoints hold it
    learning_rate_factor: float = 1.0

    def __init__(self, args: TaskArguments) -> None:
        self.args = args
        self.config = args.config
        given = args.config.extras.get("task")
        self.options: Any = self.Options() if given is None and self.Options is not None else given
        self.datasets: dict[str, Any] = {}

    @classmethod
    def setup_task(cls, args: TaskArguments, **kwargs: Any) -> Task:
        """Make the task of a run; override to read vocabularies and the like."""
        return cls(args)

    def load_dataset(self, split: str) -> Dataset[Any] | None:
        """The samples of `split`, a map-style data set or `Lanes`; None or MissingSplitError if there is no such split.

        On several nodes HetSeq compares a few samples before the first step. A data set may have an attribute `files`,
        a list of the paths that it reads: then names, sizes and blocks of these files are compared as well. With
        `vocabulary_digest`, a text that identifies its vocabulary, it resumes from no checkpoint with another one.
        """
        raise _missing(self, "load_dataset", "(split)", "the samples of a split")

    def build_model(self) -> torch.nn.Module:
        """The model, on the CPU; the seed is set before."""
        raise _missing(self, "build_model", "()", "the model")

    def initialise(self, module: torch.nn.Module) -> bool:
        """With `--delayed-init`: set the parameters that `module` itself has, in place; True if it has set them all.

        It is called for each module of the model, by itself, when its parameters have memory, and before that on
        torch's device "meta", to see which it sets. For others HetSeq takes `_init_weights(module)` of the model,
        where `build_model` has called it, or `reset_parameters()` of the module.
        """
        return False

    def tensor_plan(self) -> Mapping[str, Any]:
        """With `--tensor-parallel-degree`: how ranks divide the model, as in {"layers.*.up": "colwise",
        "layers.*.down": "rowwise"}; keys are names of modules, with * for any one part of a name. A tuple instead of
        a word: the widths of `colwise` layers that lie side by side in one, as query, key and value often do.

        By default the plan that the model brings, as most models of transformers do.
        """
        return {}

    def count(self, sample: Any) -> dict[str, float] | None:
        """The denominator of each term, from the collated micro-batch alone; None: its samples, as "loss"."""
        return None

    def loss(self, model: torch.nn.Module, sample: Any) -> Sums:
        """The SUM of each term over the micro-batch, a scalar tensor each; never a mean."""
        raise NotImplementedError

    def micro_step(self, model: torch.nn.Module, sample: Any, counts: Mapping[str, float]) -> Sums:
        """The sums of one micro-batch whose own counts are `counts`.

        By default `loss(model, sample)`. The model of a task without `loss` returns the mean of its samples, and mean
        times count is their sum: exact for one term.
        """
        if not is_overridden(self, "loss"):
            return {"loss": _call_model(model, sample) * counts["loss"]}
        return self.loss(model, sample)

    def metrics(self, model: torch.nn.Module, sample: Any) -> dict[str, tuple[float, float]]:
        """For validation: name -> (sum, count) over the micro-batch, such as {"accuracy": (correct, samples)}."""
        return {}

    def summarise(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """The figures of a split, by name, from the sums of `metrics` over all samples and ranks.

        By default each sum divided by its count, 0 if nothing was counted. Override it for a figure that is not a
        quotient of sums, such as the mean of the F1 of several labels: `metrics` then gives the sums that it is made
        of. Every rank calls it with the same sums. The names must not depend on them.
        """
        return {name: total / count if count else 0.0 for name, (total, count) in sums.items()}

    def predictions(self, model: torch.nn.Module, sample: Any) -> list[str]:
        """The prediction for each sample of the micro-batch, in its order: one line of text each.

        `hetseq predict` calls it, in evaluation mode, and writes the lines; it does not use labels, which `sample` may
        lack.
        """
        raise no_predictions(self)

    def update_step(self, num_updates: int) -> None:
        """Called on every rank after each optimizer step, and before the first one of a run or of a resumed run.

        What it sets must follow from `num_updates`: checkpoints hold only the values that `state_dict` gives.
        """

    def after_step(self, step: TrainedStep) -> bool | None:
        """Called on every rank once after each step, after its validation and before anything is saved.

        Return True to end the run with this step: early stopping. It may change the model's untrained tensors, such as
        an average of the weights, its own attributes, and `learning_rate_factor`. Other ranks see the same numbers and
        must decide alike; HetSeq compares the answers and the numbers of `state_dict` after each step.
        """
        return None

    def different_answers(self, answer: bool, rank: int) -> str:
        """What the error says if `after_step` gave `answer` on rank 0 and the other answer on `rank`."""
        return f"{type(self).__name__}.after_step returned {answer} on rank 0 and {not answer} on rank {rank}"

    def state_dict(self) -> dict[str, Any]:
        """The values that `after_step` derives: numbers, text, None, tensors, and lists and dicts of them, by name.

        Each checkpoint holds them, and a rank that joins receives them. It is called before the first step too.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave, at a resume and on a rank that joins; tensors are on the CPU."""
        raise TaskError(
            f"the checkpoint holds {', '.join(state)} of the task, and {type(self).__name__} has no"
            " load_state_dict(state)"
        )

    def export(self, model: torch.nn.Module, folder: Path) -> None:
        """Write the trained model into `folder`, an empty directory, in a format that other programs open.

        `hetseq checkpoints export RUN --format hf --to DIR` calls it, in one process, with the model of `build_model`,
        in evaluation mode, on the CPU, with the weights of the checkpoint. DIR appears when it returns. No data set is
        loaded before.

        A task whose model is a frozen base with adapters may take a keyword too, `export(model, folder, *,
        merge=False)`: with `--merge` it is True, and the adapters are merged into the base. `--merge` is refused for a
        task without it.
        """
        raise TaskFileError(f"{type(self).__name__} has no export(model, folder)")

    def model_card(self) -> ModelCard:
        """What the `README.md` of an exported model says of it, besides the facts of the run.

        It is called after `export`, on the same task, and replaces a `README.md` that `export` wrote.
        """
        return ModelCard()

    def build_optimizer(self, parameter_groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
        """An optimizer of the task's own; None: the one that --optimizer names."""
        return None


def weights_of(task: Task, terms: Sequence[str]) -> tuple[float, ...]:
    """The weight of each term in the loss."""
    return tuple(float(task.term_weights.get(term, 1.0)) for term in terms)


def is_overridden(task: Task, name: str) -> bool:
    """Whether the task has its own method `name`."""
    return getattr(type(task), name) is not getattr(Task, name)


def can_merge(task: Task) -> bool:
    """Whether the task's `export` takes `merge`."""
    return "merge" in inspect.signature(task.export).parameters


def card_of(task: Task) -> ModelCard:
    """The task's model card. Raises TaskFileError if it is none."""
    card = task.model_card()
    if not isinstance(card, ModelCard):
        raise TaskFileError(f"{type(task).__name__}.model_card returned {type(card).__name__}, expected a ModelCard")
    return card


def _missing(task: Task, name: str, arguments: str, what: str) -> TaskFileError:
    """The error for a task without a method that it needs; the method may be there with its name misspelt."""
    own = [word for word in dir(type(task)) if not hasattr(Task, word)]
    guess = nearest(name, own)
    remedy = f"it has {guess}: rename that to {name}" if guess else "write one"
    return TaskFileError(
        f"{type(task).__name__} has no {name}{arguments}: expected a method that returns {what}; {remedy}"
    )


def no_predictions(task: Task) -> TaskFileError:
    """The error for a task that cannot predict."""
    return TaskFileError(_NO_PREDICTIONS.format(name=type(task).__name__))


def make_task(task_class: type[Task], config: Config) -> Task:
    """The task of a run. Raises TaskFileError for a hook of 2020 that HetSeq cannot call."""
    if hasattr(task_class, "train_step"):
        raise TaskFileError(_NEW_HOOK.format(name=task_class.__name__))
    task = task_class.setup_task(task_arguments(config))
    if not isinstance(task, Task):
        raise TaskFileError(f"{task_class.__name__}.setup_task returned {type(task).__name__}, expected the task")
    return task


def build_model(task: Task) -> torch.nn.Module:
    """The task's model; its `build_model` may take `args`, as in 2020."""
    takes_args = bool(inspect.signature(task.build_model).parameters)
    model = task.build_model(task.args) if takes_args else task.build_model()  # type: ignore[call-arg]
    if not isinstance(model, torch.nn.Module):
        raise TaskFileError(f"{type(task).__name__}.build_model returned {type(model).__name__}, expected a Module")
    return model


def load_split(task: Task, split: str) -> Any:
    """The data set of a split. Raises MissingSplitError if there is none, TaskFileError if it is no data set."""
    name = f"{type(task).__name__}.load_dataset({split!r})"
    try:
        loaded: Any = task.load_dataset(split)
    except FileNotFoundError as error:
        raise MissingSplitError(f"{name} found no file {error.filename}: set --data as the task expects") from error
    dataset = loaded if loaded is not None else task.datasets.get(split)
    if dataset is None:
        raise MissingSplitError(f"{name} gave no data set, neither returned nor in self.datasets[{split!r}]")
    check_is_indexed(dataset, f"{name} gave", error=TaskFileError)
    if len(dataset) == 0:
        raise MissingSplitError(f"{name} gave a data set without samples: expected at least one")
    return dataset


def collater_of(task: Task, dataset: Any) -> Any:
    """The function that turns samples into a batch: the task's `collater`, else the data set's, else torch's."""
    return getattr(task, "collater", None) or getattr(dataset, "collater", None) or default_collate


def lengths_of(dataset: Any) -> Lengths | None:
    """Tokens of samples by index, from `dataset.lengths` or `dataset.num_tokens(i)`; None if it has neither."""
    if hasattr(dataset, "lengths"):
        table = np.asarray(dataset.lengths, np.int64)  # (samples,)
        if table.shape != (len(dataset),):
            raise ConfigError(f"the data set has {len(dataset)} samples but {table.shape} lengths")
        return lambda indices: table[indices]
    if hasattr(dataset, "num_tokens"):
        return lambda indices: _num_tokens(dataset, indices)
    return None


def _num_tokens(dataset: Any, indices: Indices) -> Indices:
    return np.fromiter((dataset.num_tokens(int(index)) for index in indices), np.int64, len(indices))


def counts_of(task: Task, sample: Any, samples: int) -> dict[str, float]:
    """The counts of one collated micro-batch of `samples` samples, checked."""
    counts = task.count(sample)
    if counts is None:
        return {"loss": float(samples)}
    if not isinstance(counts, Mapping):
        raise TaskError(
            f"{type(task).__name__}.count returned {type(counts).__name__}: expected a dict of term to count"
        )
    checked = {}
    for term, value in counts.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise TaskError(f"{type(task).__name__}.count gave {value!r} for {term!r}: expected a number") from None
        if not math.isfinite(number) or number < 0:
            raise TaskError(f"{type(task).__name__}.count gave {number} for {term!r}: expected 0 or more")
        checked[term] = number
    if not checked:
        raise TaskError(f"{type(task).__name__}.count gave no terms: expected a dict of term to count")
    return checked


def check_sums(task: Task, sums: Any, terms: Sequence[str]) -> Sums:
    """The result of `loss`, if it has the terms of `count`, each a scalar tensor; else raises TaskError."""
    name = type(task).__name__
    if not isinstance(sums, dict):
        raise TaskError(f"{name}.loss returned {type(sums).__name__}: expected a dict of term to summed loss")
    if set(sums) != set(terms):
        raise TaskError(
            f"{name}.loss returned the terms {sorted(sums)}, but {name}.count counts {sorted(terms)}:"
            " give both the same terms"
        )
    for term, value in sums.items():
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise TaskError(
                f"{name}.loss gave {shape} for {term!r}: expected the sum, a tensor without dimensions, as from .sum()"
                " without .item()"
            )
    return sums


def _call_model(model: torch.nn.Module, sample: Any) -> torch.Tensor:
    if isinstance(sample, Mapping):
        output = model(**sample)
    elif isinstance(sample, (tuple, list)):
        output = model(*sample)
    else:
        output = model(sample)
    if not isinstance(output, torch.Tensor) or output.dim() != 0:
        raise TaskError(
            f"the model returned {type(output).__name__}, expected its mean loss, a tensor without dimensions;"
            " or give the task a loss(model, sample)"
        )
    return output
