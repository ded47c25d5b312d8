"""The texts about options: the page of `--help`, `docs/reference/options.md`, and notes on retired ones.

All text follows from the fields; only the list of changes since 2020 is written here.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable
from pathlib import Path

from hetseq import registry
from hetseq.config.fields import catalogue_of, given_retired
from hetseq.config.sections import SECTIONS, Config, RetiredConfig, flag

_EXAMPLE = "hetseq train --task mnist --global-batch-size 64 --save-dir runs/digits"
_CONFIG_HELP = "read options from a YAML file; flags win over it"

_CHANGED_SINCE_2020 = (
    "Without `--task` the task is `mnist` (it was `bert`): it needs no data.",
    "The default of `--lr` depends on the optimizer (it was 0.25, which no adam survives).",
    "`--weight-decay` leaves biases and norms alone; `--decay-all` decays them too, as in 2020.",
    "`--optimizer adam` decouples weight decay from the gradient (AdamW), as it did in 2020.",
    "`--num-workers -1`, which ended in an error, chooses the number of loader processes.",
    "`--distributed-gpus` is detected (it was 4); `--distributed-backend` (it was nccl) has no effect so far.",
    "Under `--warmup-updates` the first step has learning rate 0, as in 2020.",
    "`--log-interval` (it was 1) defaults to a live line on a terminal and to a line every 10 s elsewhere.",
    "Lists (`--lr`, `--update-freq`, `--adam-betas`) are read as literals; no text is evaluated as Python.",
    "Flags cannot be abbreviated; `-` and `_` in them are the same, as in `--config_file`.",
)


def help_page(own: Iterable[type] = (), note: str = "") -> str:
    """The page of `--help`: options by section with their defaults, then the user's own sections, then a note."""
    kept = [section for section in SECTIONS if section is not RetiredConfig]
    parts = ["usage: hetseq train [--config FILE.yaml] [options]\n", f"for example:\n  {_EXAMPLE}\n"]
    parts += [_help_entry("--config FILE", _CONFIG_HELP) + _help_entry("--help, -h", "show this page")]
    for section in [*kept, *own, RetiredConfig]:
        entries = "".join(
            _help_entry(", ".join(item.spellings()), item.meaning()) for item in catalogue_of([section]).values()
        )
        parts.append(f"{title_of(section)}\n{entries}")
    return "\n".join(parts) + note


def markdown() -> str:
    """The page `docs/reference/options.md`."""
    lines = [
        "---\nsearch:\n  boost: 2\n---",
        "",
        "<!-- from hetseq/config/sections.py by `make docs/reference/options.md` -->",
        "",
        "# Options",
        "",
        "Options are given as flags (`--max-sentences 32`), or in a YAML file named with `--config FILE` as"
        " `max_sentences: 32`. Flags win over the file, the file over the defaults. In names `-` and `_` are the same;"
        " a switch may be written `--cpu`, `--cpu true` or `--cpu=false`; lists are written `1,2,4`.",
    ]
    kept = [section for section in SECTIONS if section is not RetiredConfig]
    for section in (*kept, *registry.included_options().values(), RetiredConfig):
        is_retired = section is RetiredConfig
        lines += ["", f"## {_name(section)}", "", _sentence(section), ""]
        lines += ["| flag | why it has no effect |", "|---|---|"] if is_retired else []
        lines += [] if is_retired else ["| flag | default | meaning |", "|---|---|---|"]
        for item in catalogue_of([section]).values():
            flags = ", ".join(f"`{spelling}`" for spelling in item.spellings())
            cells = (flags, item.help) if is_retired else (flags, item.default_cell(), item.meaning(with_default=False))
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    lines += ["", "## What changed since 2020", "", *(f"* {change}" for change in _CHANGED_SINCE_2020)]
    return "\n".join(lines) + "\n"


def write_page(path: str | Path) -> None:
    """Write `docs/reference/options.md` anew: `make docs/reference/options.md`."""
    Path(path).write_text(markdown(), encoding="utf-8")


def retired_notes(config: Config) -> list[str]:
    """A line for each given option that has no effect any more."""
    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(RetiredConfig)}
    return [f"{flag(name)} has no effect any more ({helps[name]})" for name in given_retired(config.retired)]


def all_flags() -> list[str]:
    """Every spelling of every flag, sorted: frozen in `tests/golden/flags.txt`."""
    spellings = {name for item in catalogue_of(SECTIONS).values() for name in item.flags}
    return sorted({*spellings, "--config", "--help"})


def title_of(section: type) -> str:
    """The heading of a section: its name and its subject."""
    sentence = _sentence(section).rstrip(".")
    return f"{_name(section)}: {sentence[:1].lower()}{sentence[1:]}"


def _name(section: type) -> str:
    if section in SECTIONS:
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


def _help_entry(flags: str, text: str) -> str:
    indent = " " * 8
    wrapped = textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent) if text else ""
    return f"  {flags}\n{wrapped}\n" if wrapped else f"  {flags}\n"
