"""The texts about options: `--help`, `--help-all`, `docs/reference/options.md`, and notes on retired ones.

All text follows from the fields; only the list of changes since 2020 is written here.
"""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from hetseq import registry
from hetseq.config.fields import Option, catalogue_of, given_retired
from hetseq.config.sagemaker_keys import SageMakerConfig
from hetseq.config.sections import SECTIONS, Config, RetiredConfig, flag

_EXAMPLE = "hetseq train --task mnist --global-batch-size 64 --max-epoch 1 --save-dir runs/digits"
_CONFIG_HELP = "read options from a YAML file; flags win over it"
_NARROWEST, _WIDEST = 40, 120  # columns of the short page
_MEANING_AT = 28  # the column at which the meanings begin there

_HEAD = f"usage: hetseq train [--config FILE.yaml] [options]\n\nfor example:\n  {_EXAMPLE}\n"
_BASIC = "Basic: the options that most runs need"
_KEPT = tuple(section for section in SECTIONS if section is not RetiredConfig)

_CHANGED_SINCE_2020 = (
    "Without `--task` the task is `mnist` (it was `bert`): it needs no data.",
    "The default of `--lr` depends on the optimizer (it was 0.25, which no adam survives).",
    "Without `--save-dir` the run directory is `runs/` and the name of the task, as in `runs/mnist`; `python train.py`"
    " keeps `checkpoints`.",
    "`--weight-decay` leaves biases and norms alone; `--decay-all` decays them too, as in 2020.",
    "`--optimizer adam` decouples weight decay from the gradient (AdamW), as it did in 2020.",
    "`--num-workers -1`, which ended in an error, chooses the number of loader processes.",
    "`--batch-size`, `--ranks` and `--resume` are plainer spellings of `--max-sentences`, `--distributed-gpus` and"
    " `--restore-file`, which stay. `config.yaml` and `args` of a task keep the names `max_sentences`,"
    " `distributed_gpus` and `restore_file`.",
    "`--resume latest` means what `--restore-file checkpoint_last.pt` meant, which is still accepted.",
    "`--ranks` is detected (`--distributed-gpus` was 4); `--distributed-backend` (it was nccl) has no effect so far.",
    "Under `--warmup-updates` the first step has learning rate 0, as in 2020.",
    "`--log-interval` (it was 1) defaults to a live line on a terminal and to a line every 10 s elsewhere.",
    "Lists (`--lr`, `--update-freq`, `--adam-betas`) are read as literals; no text is evaluated as Python.",
    "Flags cannot be abbreviated; `-` and `_` in them are the same, as in `--config_file`.",
)


def help_page(own: Iterable[type] = (), note: str = "") -> str:
    """The page of `--help`: the basic options and the user's own, one or two lines each, then a note."""
    parts = [_HEAD]
    for section in [*_KEPT, *own]:
        items = catalogue_of([section]).values()
        shown = [item for item in items if item.is_basic or section not in SECTIONS]
        if shown:
            parts.append(
                f"{_name(section)}\n" + "".join(_short_entry(item.spellings()[0], _in_short(item)) for item in shown)
            )
    asked = {"--config FILE": _CONFIG_HELP, "--help, -h": "show this page", "--help-all": "show every option"}
    parts.append("Help\n" + "".join(_short_entry(flags, text) for flags, text in asked.items()))
    return "\n".join(parts) + note


def full_help_page(own: Iterable[type] = (), note: str = "") -> str:
    """The page of `--help-all`: every option, the basic ones first, and in the last section those without effect."""
    parts = [_HEAD, _help_entry("--config FILE", _CONFIG_HELP) + _help_entry("--help, -h", "show the basic options")]
    parts[-1] += _help_entry("--help-all", "show this page")
    basic, others = _basic_and_others()
    blocks = [(_BASIC, basic), *((title_of(section), others[section]) for section in _KEPT)]
    blocks += [(title_of(section), list(catalogue_of([section]).values())) for section in (SageMakerConfig, *own)]
    for title, items in blocks:
        entries = "".join(_help_entry(", ".join(item.spellings()), item.meaning()) for item in items)
        parts.append(f"{title}\n{entries}")
    retired = "".join(_help_entry(", ".join(flags), why) for why, flags in _retired().items())
    parts.append(f"{title_of(RetiredConfig)}\n{retired}")
    return "\n".join(parts) + note


def markdown() -> str:
    """The page `docs/reference/options.md`."""
    lines = [
        "---\nsearch:\n  boost: 3\n---",
        "",
        "<!-- from hetseq/config/sections.py by `make docs/reference/options.md` -->",
        "",
        "# Options",
        "",
        "Options are given as flags (`--batch-size 32`), or in a YAML file named with `--config FILE` as"
        " `batch_size: 32`. Flags win over the file, the file over the defaults. In names `-` and `_` are the same;"
        " a switch may be written `--cpu`, `--cpu true` or `--cpu=false`; lists are written `1,2,4`."
        " `hetseq train --help` shows the basic options, `hetseq train --help-all` every option.",
    ]
    basic, others = _basic_and_others()
    blocks = [("Basic", "The options that most runs need.", basic)]
    blocks += [(_name(section), _sentence(section), others[section]) for section in _KEPT]
    for section in (SageMakerConfig, *registry.included_options().values()):
        blocks.append((_name(section), _sentence(section), list(catalogue_of([section]).values())))
    for title, sentence, items in blocks:
        lines += ["", f"## {title}", "", sentence, "", "| flag | default | meaning |", "|---|---|---|"]
        for item in items:
            flags = ", ".join(f"`{spelling}`" for spelling in item.spellings())
            lines.append(_row(flags, item.default_cell(), item.meaning(with_default=False)))
    lines += ["", f"## {_name(RetiredConfig)}", "", _sentence(RetiredConfig), ""]
    lines += ["| flag | why it has no effect |", "|---|---|"]
    lines += [_row(", ".join(f"`{name}`" for name in flags), why) for why, flags in _retired().items()]
    lines += ["", "## What changed since 2020", "", *(f"* {change}" for change in _CHANGED_SINCE_2020)]
    return "\n".join(lines) + "\n"


def write_page(path: str | Path) -> None:
    """Write `docs/reference/options.md` anew: `make docs/reference/options.md`."""
    Path(path).write_text(markdown(), encoding="utf-8")


def retired_notes(config: Config) -> list[str]:
    """A line for each given option that has no effect."""
    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(RetiredConfig)}
    return [f"{flag(name)} has no effect ({helps[name]})" for name in given_retired(config.retired)]


def all_flags() -> list[str]:
    """Every spelling of every flag, sorted: frozen in `tests/golden/flags.txt`."""
    spellings = {name for item in catalogue_of([*SECTIONS, SageMakerConfig]).values() for name in item.flags}
    return sorted({*spellings, "--config", "--help", "--help-all"})


def all_options(sections: Sequence[type] | None = None) -> list[Option]:
    """The options of these dataclasses; without them those of `hetseq train` that have an effect, basic ones first."""
    if sections is not None:
        return list(catalogue_of(sections).values())
    basic, others = _basic_and_others()
    return [*basic, *(item for items in others.values() for item in items)]


def title_of(section: type) -> str:
    """The heading of a section: its name and its subject."""
    sentence = _sentence(section).rstrip(".")
    return f"{_name(section)}: {sentence[:1].lower()}{sentence[1:]}"


def _name(section: type) -> str:
    if section in (*SECTIONS, SageMakerConfig):
        return section.__name__.removesuffix("Config")
    return _tasks().get(section, "Your own options")


def _tasks() -> dict[type, str]:
    """The headings of the options of included tasks."""
    return {section: f"--task {name}" for name, section in registry.included_options().items()}


def _sentence(section: type) -> str:
    """The subject of a section: the first paragraph of its docstring, unless dataclass wrote that."""
    doc = section.__doc__ or ""
    if doc.startswith(f"{section.__name__}("):
        return f"Options of {section.__module__}."
    return " ".join(doc.strip().partition("\n\n")[0].split())


def _basic_and_others() -> tuple[list[Option], dict[type, list[Option]]]:
    """The basic options in order, and the others of each section."""
    items = {section: list(catalogue_of([section]).values()) for section in _KEPT}
    basic = [item for section in _KEPT for item in items[section] if item.is_basic]
    return basic, {section: [item for item in items[section] if not item.is_basic] for section in _KEPT}


def _retired() -> dict[str, list[str]]:
    """The flags of options without effect, by the reason."""
    flags: dict[str, list[str]] = {}
    for item in catalogue_of([RetiredConfig]).values():
        flags.setdefault(item.help, []).append(item.spellings()[0])
    return flags


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _in_short(item: Option) -> str:
    """The first clause of the meaning, and the default."""
    first, *more = item.help.split("; ")
    default = item.shown_default()
    said = [clause for clause in more if clause.startswith("default:")]
    return "; ".join([first, *said]) + (f" (default: {default})" if default not in ("", "0") else "")


def _short_entry(flags: str, text: str) -> str:
    width = max(min(shutil.get_terminal_size().columns - 1, _WIDEST), _NARROWEST)
    indent = " " * _MEANING_AT
    begin = f"  {flags}".ljust(_MEANING_AT)
    lines = textwrap.wrap(text, width - _MEANING_AT, break_on_hyphens=False) or [""]
    head = [f"  {flags}"] if len(begin) > _MEANING_AT or begin[-1] != " " else []
    lines = (
        [*head, *(indent + line for line in lines)] if head else [begin + lines[0], *(indent + x for x in lines[1:])]
    )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _help_entry(flags: str, text: str) -> str:
    indent = " " * 8
    wrapped = textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent) if text else ""
    return f"  {flags}\n{wrapped}\n" if wrapped else f"  {flags}\n"
