"""The model card: the `README.md` of an exported model, as the Hugging Face Hub shows it.

Arranges what a run has recorded, until the step of the exported checkpoint, in YAML front matter and Markdown tables.
Pure: records, options and the task's own words go in, text comes out.

The one idea: a card is published, and a run directory is not. Of a path only the last name appears, of a node only its
number, and no option that may differ between nodes; every text from a file or an option is escaped.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from hetseq.commands.checkpoints.listing import batch_text, epoch_of
from hetseq.config.sections import Config, flag
from hetseq.monitor.report.charts import number
from hetseq.monitor.report.page import duration
from hetseq.monitor.report.recorded import Floats, RecordedRun, until
from hetseq.monitor.report.software import software

if TYPE_CHECKING:
    from hetseq.task import ModelCard

Row = Sequence[object]

_PAPER = "https://arxiv.org/abs/2009.14783"
_HUB = "https://huggingface.co"
_MOST_SPANS = 8  # of steps with the same number of ranks
#: options that have rows of their own, or say only how long a run was to be
_TOLD = (
    "task", "seed", "data", "train_subset", "valid_subset", "global_batch_size", "max_epoch", "max_update", "optimizer",
    "lr", "lr_scheduler", "precision",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Exported:
    """The facts of an export. Of `run` only the steps until the checkpoint count."""

    name: str  # of the exported folder
    config: Config
    state: Mapping[str, Any]  # of the checkpoint
    step: int
    created: str  # when the checkpoint was saved: "2026-01-31T12:00:00Z"
    run: RecordedRun
    parameters: int  # elements of all of them, frozen ones too
    trained: int  # elements of those with gradients


def model_card(card: ModelCard, exported: Exported) -> str:
    """The text of the `README.md`."""
    facts = dataclasses.replace(exported, run=until(exported.run, exported.step))
    base, paragraphs = _base_model(card), [card.about.strip()]
    if card.base_model is not None:
        name = _plain(base or Path(card.base_model).name)
        paragraphs.append(f"Base model: {f'[{name}]({_HUB}/{quote(base)})' if base else name}.")
    paragraphs.append(f"Trained with [HetSeq]({_PAPER}): the checkpoint of step {facts.step:,}, {facts.created[:10]}.")
    sections = [
        ("Training data", _table(("", ""), _data(facts))),
        ("Training", _table(("", ""), [*_training(facts), *_other_options(facts)])),
        ("Results", _table(("figure", "split", "step", "value"), list(_results(facts)))),
        ("Machines", _machines(facts.run)),
    ]
    parts = [_front_matter(card, base), f"# {_plain(card.title or facts.name)}", *filter(None, paragraphs)]
    parts += [f"## {title}\n\n{text}" for title, text in sections if text]
    return "\n\n".join(parts) + "\n"


def _front_matter(card: ModelCard, base: str | None) -> str:
    """What the Hub reads: YAML between two lines of dashes."""
    import yaml

    found = {"library_name": card.library_name, "pipeline_tag": card.pipeline_tag, "base_model": base}
    told = {key: value for key, value in found.items() if value is not None}
    tags = list(dict.fromkeys(["hetseq", *card.tags]))
    is_printable = all(text.isprintable() for text in (*told.values(), *tags))
    dumped: str = yaml.safe_dump(
        {**told, "tags": tags}, sort_keys=False, width=math.inf, allow_unicode=is_printable,
        default_style=None if is_printable else '"',  # with escapes: YAML makes a line break of some characters
    )  # fmt: skip
    return f"---\n{dumped}---"


def _base_model(card: ModelCard) -> str | None:
    """The base model's name on the Hub, which a local directory has only in the cache of downloads."""
    if not isinstance(card.base_model, Path):
        return card.base_model
    cached = next((part for part in card.base_model.parts if part.startswith("models--")), None)
    return None if cached is None else cached.removeprefix("models--").replace("--", "/")


def _data(facts: Exported) -> Iterator[Row]:
    data, samples = facts.config.data, facts.state.get("samples")
    if data.data is not None:
        yield "data", _value(data.data)
    many = f", {samples:,} samples" if isinstance(samples, int) else ""
    yield "training split", f"{facts.state.get('split', data.train_subset)}{many}"
    if facts.run.validation:
        yield "validation splits", ", ".join(facts.run.validation)


def _training(facts: Exported) -> Iterator[Row]:
    config, state, run = facts.config, facts.state, facts.run
    frozen = facts.parameters - facts.trained
    yield "parameters", f"{facts.parameters:,}" + (f", {facts.trained:,} of them trained" if frozen else "")
    yield "steps", f"{facts.step:,}"
    if (epoch := epoch_of(state)) is not None:
        yield "epoch", f"{epoch:,}"
    if isinstance(samples := state.get("samples_consumed"), int):
        yield "samples in all steps", f"{samples:,}"
    if "global_batch" in state:
        yield "global batch", batch_text(state["global_batch"])
    elif len(run.samples):
        yield "global batch", f"{run.samples[-1]:,.0f} samples"
    if isinstance(seconds := state.get("train_seconds"), (int, float)):
        yield "time in steps", duration(seconds)
    yield "optimizer", state.get("optimizer") or config.optimization.optimizer
    recipe = _recipe(facts)
    if recipe.get("lr"):
        yield "learning rate", _value(recipe["lr"])
    yield "learning-rate schedule", _value(recipe.get("lr_scheduler") or config.optimization.lr_scheduler)
    yield "precision", state.get("precision") or config.optimization.precision
    yield "seed", state.get("seed", config.task.seed)
    if skipped := int((~np.isfinite(run.loss)).sum()):
        yield "steps skipped", f"{skipped:,}, whose gradient was not finite"


def _recipe(facts: Exported) -> dict[str, Any]:
    """The options that a later start may change, as they were at the step."""
    return {**dataclasses.asdict(facts.config.optimization), **(facts.state.get("recipe") or {})}


def _other_options(facts: Exported) -> Iterator[Row]:
    """The options that decide the result and differ from their defaults."""
    config, recipe = facts.config, _recipe(facts)
    sections = (config.task, config.data, config.optimization, *config.extras.values())
    for section in sections:
        for field in dataclasses.fields(section):
            if field.metadata.get("per_node") or field.name in _TOLD:
                continue
            value = recipe[field.name] if section is config.optimization else getattr(section, field.name)
            made = field.default_factory
            default = made() if made is not dataclasses.MISSING else field.default
            if _value(value) != _value(default):
                yield flag(field.name), _value(value)


def _results(facts: Exported) -> Iterator[Row]:
    """The loss and the validation figures at the step, and the best ones if those are others."""
    run, asked = facts.run, facts.config.validation
    yield from _figure("loss", facts.config.data.train_subset, run.steps.astype(np.float64), run.loss)
    for subset, figures in run.validation.items():
        for name, values in figures.items():
            if name != "step":
                is_decisive = name == asked.best_checkpoint_metric
                sign = 0 if not is_decisive else 1 if asked.maximize_best_checkpoint_metric else -1
                yield from _figure(name, subset, figures["step"], values, better=sign)


def _figure(name: str, split: str, steps: Floats, values: Floats, *, better: int = 0) -> Iterator[Row]:
    """The last value; and if `better` (1: more is better, -1: less is) the best one, if it is another."""
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return
    last = known[-1]
    best = known[np.argmax(better * values[known])] if better else last
    said, best_said = number(float(values[last])), number(float(values[best]))
    yield name, split, f"{steps[last]:,.0f}", said
    if best_said != said:
        yield f"{name}, best", split, f"{steps[best]:,.0f}", best_said


def _machines(run: RecordedRun) -> str:
    """The number of ranks over time, and a table of devices and software, which counts nodes and names none."""
    parts, versions = [" ".join(_ranks(run))], run.versions
    found = software({slot: {**told, "node": ""} for slot, told in versions.items()})
    if found is not None:
        rows = []
        for _, slots, *told in found.rows:
            nodes = [versions[int(slot)].get("node") for slot in slots.split(", ")]
            rows.append((len(set(nodes)), len(nodes), *told))
        parts.append(_table(("nodes", "ranks", *found.heads[2:]), rows))
    return "\n\n".join(filter(None, parts))


def _ranks(run: RecordedRun) -> Iterator[str]:
    sizes = run.world_size  # (n,)
    if len(run.steps) and sizes.max():
        begins = np.flatnonzero(np.append(True, sizes[1:] != sizes[:-1]))
        spans = [
            f"{_counted(int(sizes[begin]), 'rank')} in {_span(run.steps[begin], run.steps[end - 1])}"
            for begin, end in zip(begins, [*begins[1:], len(run.steps)])
        ]
        many = f"between {sizes.min()} and {_counted(int(sizes.max()), 'rank')}"
        told = "; ".join(spans) if len(spans) <= _MOST_SPANS else f"{many}, changed {len(spans) - 1:,} times"
        yield f"{told[:1].upper()}{told[1:]}."
    kinds = [event.get("event") for event in run.events]
    for kind, said in (
        ("generation", "Ranks left or joined {}, and the others repeated the step."),
        ("resume", "It resumed from a checkpoint {}."),
    ):
        if times := kinds.count(kind):
            yield said.format("once" if times == 1 else f"{times:,} times")


def _span(first: int, last: int) -> str:
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _value(value: Any) -> str:
    """The value of an option, with the last name of each path."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_value, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return ",".join(part.rstrip("/").rpartition("/")[2] for part in value.split(","))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _table(heads: Sequence[str], rows: Iterator[Row] | Sequence[Row]) -> str:
    """A table of Markdown; "" without rows."""
    lines = ["| " + " | ".join(_plain(cell) for cell in row) + " |" for row in rows]
    top = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*top, *lines]) if lines else ""


def _plain(text: object) -> str:
    """Text of one line in which no character is Markdown or HTML."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in str(text)).split())
    return re.sub(r"[\\`*\[\]<>|#~$!&]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", line)
