"""From a command line to a `Config` and back: defaults < the YAML file of `--config` < flags.

Everything follows from the dataclasses of `hetseq.config`: flags, YAML keys, the help text, `docs/options.md`. This
module knows no option by its meaning, prints nothing and imports no torch; a task of the user's is imported only for
flags that nobody else knows, and for `--help`.

The one idea: a value is *text with a place* (`--lr 0.1`, or line 3 of a file) until the type of its field reads it.
Types decide, not YAML's guesses: `lr: 1e-4`, text to YAML 1.1, is a number here, `save_dir: 2024` is a name, and
`lr: fast` is refused with its place. Flags and YAML are therefore read by the same function.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hetseq import registry
from hetseq.config import SECTIONS, Config, OptimizationConfig, RetiredConfig, TaskConfig, flag
from hetseq.errors import ConfigError, HetSeqError

if TYPE_CHECKING:
    import yaml

FIRST_LINE = "# HetSeq run configuration; repeat the run with: hetseq train --config THIS_FILE"

_TAG = "tag:yaml.org,2002:"  # of YAML's own types
_NULL = f"{_TAG}null"
_EXTRA_KINDS = ("task", "optimizer", "lr_scheduler")
_EXPECTED = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_EXPECTED_LIST = {
    int: "whole numbers separated by commas, as in 1,2,4",
    float: "numbers separated by commas, as in 0.1,0.05",
    str: "entries separated by commas, as in a,b",
}
_CONFIG_HELP = "read options from a YAML file; flags win over it"

_CHANGED_SINCE_2020 = (
    "Without `--task` the task is `mnist` (it was `bert`): it needs no data.",
    "The default of `--lr` depends on the optimizer (it was 0.25, which no adam survives).",
    "`--weight-decay` leaves biases and norms alone; `--decay-all` decays them too, as in 2020.",
    "`--optimizer adam` decouples weight decay from the gradient (AdamW), as it did in 2020.",
    "`--num-workers -1`, which ended in an error, chooses the number of loader processes.",
    "`--distributed-gpus` is detected (it was 4), and so is `--distributed-backend` (it was nccl).",
    "Under `--warmup-updates` the first step has learning rate 0, as in 2020.",
    "`--log-interval` (it was 1) defaults to a live line on a terminal and to a line every 10 s elsewhere.",
    "Lists (`--lr`, `--update-freq`, `--adam-betas`) are read as literals; no text is evaluated as Python.",
    "Flags cannot be abbreviated; `-` and `_` in them are the same, as in `--config_file`.",
)


class HelpRequested(Exception):
    """`--help` stood on the command line; `text` is what to print."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def parse(argv: Sequence[str]) -> Config:
    """The configuration that `argv` (without the program and its subcommand) describes.

    `extras` holds the options of the user's task, optimizer and schedule if any of them was given; `complete` adds
    the rest. Raises HelpRequested for `--help`, ConfigError for whatever cannot be meant, and TaskFileError where a
    task has to be imported to know its flags and cannot be.
    """
    catalogue = _catalogue(SECTIONS)
    line = _read_flags(argv, catalogue)
    if line.wants_help:
        raise HelpRequested(help_text(argv))
    file = _read_yaml(line.config_file, catalogue)
    own: dict[str, type] = {}
    if line.unknown or file.unknown:
        found = {**file.found, **line.found}
        own = _own_sections(_build(TaskConfig, found), _build(OptimizationConfig, found))
        if own:
            catalogue = _catalogue([*SECTIONS, *own.values()])
            line, file = _read_flags(argv, catalogue), _read_yaml(line.config_file, catalogue)
        _refuse_unknown(line, file, catalogue)
    found = {**file.found, **line.found}
    names = [field.name for field in dataclasses.fields(Config) if field.name != "extras"]
    sections = {name: _build(section, found) for name, section in zip(names, SECTIONS, strict=True)}
    config = Config(**sections, extras={kind: _build(cls, found) for kind, cls in own.items()})
    _check_names(config)
    return config


def complete(config: Config) -> Config:
    """The same configuration with the options of the user's components that were not given, at their defaults.

    Imports the task if it is the user's own. Raises ConfigError for an option that has no default, and what
    `registry.find_task` raises.
    """
    own = _own_sections(config.task, config.optimization)
    missing = {kind: _build(cls, {}) for kind, cls in own.items() if kind not in config.extras}
    return dataclasses.replace(config, extras={**config.extras, **missing})


def with_own_options(config: Config, values: Mapping[str, Mapping[str, Any]]) -> Config:
    """`complete`, for a process that has the values of own options by kind but not yet the classes they belong to."""
    own = _own_sections(config.task, config.optimization)
    given = {kind: cls(**values[kind]) for kind, cls in own.items() if kind in values}
    return complete(dataclasses.replace(config, extras={**config.extras, **given}))


def help_text(argv: Sequence[str] = ()) -> str:
    """The page of `--help`: options by section with their defaults, those of the user's own task if argv names it."""
    line = _read_flags(argv, _catalogue(SECTIONS))
    own: dict[str, type] = {}
    note = ""
    try:
        found = {**_read_yaml(line.config_file, _catalogue(SECTIONS)).found, **line.found}
        own = _own_sections(_build(TaskConfig, found), _build(OptimizationConfig, found))
    except HetSeqError as error:
        note = f"\nThe options of your own modules are missing here: {error}\n"
    kept = [section for section in SECTIONS if section is not RetiredConfig]
    parts = ["usage: hetseq train [--config FILE.yaml] [options]\n"]
    parts += [_help_entry("--config FILE", _CONFIG_HELP) + _help_entry("--help, -h", "show this page")]
    for section in [*kept, *own.values(), RetiredConfig]:
        entries = "".join(
            _help_entry(", ".join(item.spellings()), item.meaning()) for item in _catalogue([section]).values()
        )
        parts.append(f"{_title(section)}\n{entries}")
    return "\n".join(parts) + note


def markdown() -> str:
    """The page `docs/options.md`."""
    lines = [
        "# Options",
        "",
        "Generated from `hetseq/config.py`; do not edit.",
        "",
        "Options are given as flags (`--max-sentences 32`), or in a YAML file named with `--config FILE` as"
        " `max_sentences: 32`. Flags win over the file, the file over the defaults. In names `-` and `_` are the same;"
        " a switch may be written `--cpu`, `--cpu true` or `--cpu=false`; lists are written `1,2,4`.",
    ]
    for section in SECTIONS:
        is_retired = section is RetiredConfig
        lines += ["", f"## {_name(section)}", "", _sentence(section), ""]
        lines += ["| flag | what became of it |", "|---|---|"] if is_retired else []
        lines += [] if is_retired else ["| flag | default | meaning |", "|---|---|---|"]
        for item in _catalogue([section]).values():
            flags = ", ".join(f"`{spelling}`" for spelling in item.spellings())
            cells = (flags, item.help) if is_retired else (flags, item.default_cell(), item.meaning(with_default=False))
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    lines += ["", "## What changed since 2020", "", *(f"* {change}" for change in _CHANGED_SINCE_2020)]
    return "\n".join(lines) + "\n"


def dump_yaml(config: Config) -> str:
    """The configuration as the YAML that `--config` reads back into an equal one.

    Flat, one plain scalar or list per option, grouped by comments. Retired options appear where they were given.
    """
    yaml = _import_yaml()
    lines = [FIRST_LINE]
    for section in config.sections():
        values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
        if isinstance(section, RetiredConfig):
            values = _given_retired(section)
        if values:
            lines += ["", f"# {_title(type(section))}"]
        for name, value in values.items():
            lines.append(_dump_line(yaml, name, value))
    return "\n".join(lines) + "\n"


def _dump_line(yaml: Any, name: str, value: Any) -> str:
    is_list = isinstance(value, tuple)
    plain = {name: list(value) if is_list else value}
    texts = [text for text in (value if is_list else (value,)) if isinstance(text, str)]
    is_printable = all(text.isprintable() for text in texts)
    dumped: str = yaml.safe_dump(
        plain,
        default_flow_style=None if is_list else False,  # None writes lists as [1, 2], but one scalar in braces
        default_style=None if is_printable else '"',  # with escapes: YAML makes a line break of some characters
        allow_unicode=is_printable,
        width=math.inf,
    )
    return dumped.rstrip("\n")


def retired_notes(config: Config) -> list[str]:
    """A line for each option that was given and has no effect any more."""
    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(RetiredConfig)}
    return [f"{flag(name)} has no effect any more ({helps[name]})" for name in _given_retired(config.retired)]


def all_flags() -> list[str]:
    """Every spelling of every flag, sorted: what `tests/golden/flags.txt` freezes."""
    spellings = {name for item in _catalogue(SECTIONS).values() for name in item.flags}
    return sorted({*spellings, "--config", "--help"})


def _given_retired(section: RetiredConfig) -> dict[str, Any]:
    return {
        field.name: getattr(section, field.name)
        for field in dataclasses.fields(section)
        if getattr(section, field.name) != field.default
    }


# ----------------------------------------------------------------------------------------------- fields as options


@dataclass(frozen=True)
class _Option:
    """A field as the command line sees it: `flags` are its spellings, the first from its name."""

    name: str
    section: type
    kind: type  # int, float, str or bool; of the entries, if it is a list
    is_list: bool
    may_be_none: bool
    default: Any
    flags: tuple[str, ...]
    help: str
    metavar: str
    choices: tuple[str, ...]

    def expected(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return _EXPECTED_LIST[self.kind] if self.is_list else _EXPECTED[self.kind]

    def read(self, text: str, where: str) -> Any:
        """The value that `text` stands for. Raises ConfigError that begins with `where`."""
        parts = _split_list(text) if self.is_list else [text]
        values = [] if parts is None else [_read_scalar(part, self.kind) for part in parts]
        wrong = parts is None or None in values or any(self.choices and value not in self.choices for value in values)
        if wrong:
            raise ConfigError(f"{where}: expected {self.expected()}")
        if any(isinstance(value, float) and not math.isfinite(value) for value in values):
            raise ConfigError(f"{where}: expected a finite number")
        return tuple(values) if self.is_list else values[0]

    def spellings(self) -> list[str]:
        """The flags as a help text shows them, the first with what follows it."""
        value = self.metavar or "|".join(self.choices) or ("" if self.kind is bool and not self.is_list else "VALUE")
        return [f"{self.flags[0]} {value}".rstrip(), *self.flags[1:]]

    def shown_default(self) -> str:
        """The default as one would type it, or "" where there is none worth a word."""
        if self.default is dataclasses.MISSING or self.default is None or self.default is False or self.default == ():
            return ""
        if isinstance(self.default, tuple):
            return ",".join(_shown(value) for value in self.default)
        return _shown(self.default)

    def default_cell(self) -> str:
        """The default as a cell of a table; "" where the meaning tells it."""
        shown = self.shown_default()
        if not shown and self.kind is bool and not self.is_list:
            shown = "off"
        return f"`{shown}`" if shown and shown != "off" else shown

    def meaning(self, *, with_default: bool = True) -> str:
        shown = self.shown_default()
        return f"{self.help} (default: {shown})".lstrip() if with_default and shown else self.help


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _catalogue(sections: Iterable[type]) -> dict[str, _Option]:
    """The options of the sections by field name. Raises ConfigError where two of them claim one flag."""
    catalogue: dict[str, _Option] = {}
    owners: dict[str, type] = {"--config": Config, "--help": Config}
    for section in sections:
        for item in _options_of_section(section):
            for name in item.flags:
                if name in owners:
                    raise ConfigError(
                        f"{section.__qualname__}.{item.name} of {section.__module__} gives the option {name}, which"
                        f" {owners[name].__qualname__} of {owners[name].__module__} has already: give it another name"
                    )
                owners[name] = section
            catalogue[item.name] = item
    return catalogue


@functools.cache
def _options_of_section(section: type) -> tuple[_Option, ...]:
    try:
        hints = typing.get_type_hints(section)
    except (NameError, TypeError, AttributeError) as error:
        name = f"{section.__qualname__} of {section.__module__}"
        raise ConfigError(f"the types of {name} cannot be read: {error}") from None
    options = []
    for field in dataclasses.fields(section):
        if not field.init:
            continue
        kind, is_list, may_be_none = _read_type(hints[field.name], section, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        names = (field.name, *field.metadata.get("also", ()))
        options.append(
            _Option(
                name=field.name,
                section=section,
                kind=kind,
                is_list=is_list,
                may_be_none=may_be_none,
                default=default,
                flags=tuple(dict.fromkeys(flag(name) for name in names)),
                help=field.metadata.get("help", ""),
                metavar=field.metadata.get("metavar", ""),
                choices=field.metadata.get("choices", ()),
            )
        )
    return tuple(options)


def _read_type(hint: Any, section: type, name: str) -> tuple[type, bool, bool]:
    """`tuple[int, ...] | None` gives (int, a list, may be None)."""
    inner, may_be_none = hint, False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        may_be_none = len(members) < len(typing.get_args(hint))
        inner = members[0] if len(members) == 1 else hint
    is_list = typing.get_origin(inner) is tuple and typing.get_args(inner)[1:] == (Ellipsis,)
    kind = typing.get_args(inner)[0] if is_list else inner
    if kind not in _EXPECTED or (is_list and kind not in _EXPECTED_LIST):
        raise ConfigError(
            f"{section.__qualname__}.{name} of {section.__module__} has the type {hint}: an option is an int, float,"
            " str or bool, or tuple[int, ...], tuple[float, ...] or tuple[str, ...], each perhaps with `| None`"
        )
    return kind, is_list, may_be_none


def _name(section: type) -> str:
    return section.__name__.removesuffix("Config") if section in SECTIONS else "Your own options"


def _sentence(section: type) -> str:
    """What the section is about: the first paragraph of its docstring, unless dataclass wrote that."""
    doc = section.__doc__ or ""
    if doc.startswith(f"{section.__name__}("):
        return f"Options of {section.__module__}."
    return " ".join(doc.strip().partition("\n\n")[0].split())


def _title(section: type) -> str:
    sentence = _sentence(section).rstrip(".")
    return f"{_name(section)}: {sentence[:1].lower()}{sentence[1:]}"


def _help_entry(flags: str, text: str) -> str:
    indent = " " * 8
    wrapped = textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent) if text else ""
    return f"  {flags}\n{wrapped}\n" if wrapped else f"  {flags}\n"


# -------------------------------------------------------------------------------------------------- text to values


def _read_scalar(text: str, kind: type) -> Any:
    """The value of one word, None where it is no such value."""
    if kind is str:
        return text
    if kind is bool:
        return {"true": True, "false": False}.get(text.strip().lower())
    try:
        return kind(text)
    except ValueError:
        return None


def _split_list(text: str) -> list[str] | None:
    """The words of `1,2,4`, `(0.9, 0.999)`, `[0.1]` or `['a', "b"]`; None where brackets or commas do not fit."""
    text = text.strip()
    if text[:1] in ("(", "["):
        if text[-1:] != {"(": ")", "[": "]"}[text[0]] or len(text) < 2:
            return None
        text = text[1:-1].strip()
        text = text.removesuffix(",")  # as Python writes a tuple of one
    if not text:
        return []
    words = [word.strip() for word in text.split(",")]
    words = [word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word for word in words]
    return words if all(words) else None


@dataclass(frozen=True)
class _Found:
    """A value, and where the user wrote it, as he knows it: `--batch-size`, or `run.yaml, line 3`."""

    value: Any
    where: str


def _build(section: type, found: Mapping[str, _Found]) -> Any:
    """The section with the values found for it; an error of its checks is told with the places that it concerns."""
    options = _options_of_section(section)
    for item in options:
        if item.default is dataclasses.MISSING and item.name not in found:
            raise ConfigError(f"{item.flags[0]} is missing: expected {item.expected()}, it has no default")
    given = {item.name: found[item.name] for item in options if item.name in found}
    try:
        return section(**{name: entry.value for name, entry in given.items()})
    except (ConfigError, ValueError) as error:  # a user's own dataclass may well raise ValueError
        concerned = [name for name in given if re.search(rf"{flag(name)}(?![\w-])", str(error))]
        places = [
            f"{flag(name)} is from {given[name].where}"
            for name in concerned
            if given[name].where.replace("_", "-") != flag(name)
        ]
        raise ConfigError(f"{error} ({'; '.join(places)})" if places else str(error)) from None


def _own_sections(task: TaskConfig, optimization: OptimizationConfig) -> dict[str, type]:
    """The dataclasses that the components of the user's bring along, by kind; none are imported for included names."""
    # The task first: importing its file may register the optimizer and the schedule.
    names = {"task": task.task, "optimizer": optimization.optimizer, "lr_scheduler": optimization.lr_scheduler}
    sections = {kind: registry.options_of(kind, names[kind], user_dir=task.user_dir) for kind in _EXTRA_KINDS}
    return {kind: section for kind, section in sections.items() if section is not None}


def _check_names(config: Config) -> None:
    """Refuse an unknown optimizer or schedule at once, if nothing of the user's is still to be imported."""
    if config.task.user_dir is None and not registry.is_address(config.task.task):
        registry.check_name("optimizer", config.optimization.optimizer)
        registry.check_name("lr_scheduler", config.optimization.lr_scheduler)


# --------------------------------------------------------------------------------------------------------- flags


@dataclass(frozen=True)
class _Read:
    """What one source gave: values by field name, and the unknown words or keys with their places."""

    found: dict[str, _Found]
    unknown: list[_Found]
    config_file: str | None = None
    wants_help: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class _Remember(argparse.Action):
    """Keep the flag together with its value: errors are told in the user's spelling."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        if self.dest == "config" and hasattr(namespace, "config"):
            raise ConfigError("--config is given twice: HetSeq reads one file, put the options together")
        setattr(namespace, self.dest, (option_string, values))


def _read_flags(argv: Sequence[str], catalogue: Mapping[str, _Option]) -> _Read:
    words, typed = _same_dashes(argv)
    parser = _Parser(add_help=False, allow_abbrev=False)
    # Every value is optional to argparse, so that a missing one is told in our words.
    kept: dict[str, Any] = {"action": _Remember, "nargs": "?", "default": argparse.SUPPRESS}
    parser.add_argument("--config", dest="config", **kept)
    parser.add_argument("--help", "-h", dest="help", **{**kept, "nargs": 0})
    groups: dict[type, Any] = {}
    for item in catalogue.values():
        if item.section not in groups:
            groups[item.section] = parser.add_argument_group(item.section.__name__)
        groups[item.section].add_argument(*item.flags, dest=item.name, **kept)
    values, unknown = parser.parse_known_args(_join_negative(words))
    given = dict(vars(values))
    wants_help = given.pop("help", None) is not None
    config_flag, config_file = given.pop("config", ("--config", ""))
    if config_file is None and not wants_help:
        raise ConfigError(f"{config_flag} stands without a value: expected --config FILE")
    found: dict[str, _Found] = {}
    for name, (spelling, text) in given.items():
        item, spelling = catalogue[name], typed.get(spelling, spelling)
        if text is None and item.kind is bool and not item.is_list:
            text = "true"
        try:
            found[name] = _Found(_read_flag(item, spelling, text), spelling)
        except ConfigError:
            if not wants_help:  # who asks for help may well have the value wrong
                raise
    leftovers = [_Found(typed.get(word.partition("=")[0], word), "") for word in unknown]
    return _Read(found, leftovers, config_file or None, wants_help)


def _read_flag(item: _Option, spelling: str, text: str | None) -> Any:
    if text is None:
        raise ConfigError(f"{spelling} stands without a value: expected {item.expected()}")
    return item.read(text, f"{spelling} {text}".rstrip())


def _same_dashes(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words with `_` in names of flags turned into `-`, and the names as they were typed by the new ones."""
    words, typed = [], {}
    for word in argv:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            plain = name.replace("_", "-")
            typed[plain] = name
            word = plain + equals + value
        words.append(word)
    return words, typed


def _join_negative(words: Sequence[str]) -> list[str]:
    """`--min-lr -1e-5` as `--min-lr=-1e-5`: argparse before Python 3.12 takes such a number for a flag."""
    joined: list[str] = []
    for word in words:
        follows_flag = bool(joined) and joined[-1].startswith("--") and "=" not in joined[-1]
        if follows_flag and re.match(r"-(\d|\.\d|inf|nan)", word):
            joined[-1] = f"{joined[-1]}={word}"
        else:
            joined.append(word)
    return joined


def _refuse_unknown(line: _Read, file: _Read, catalogue: Mapping[str, _Option]) -> None:
    """Raise ConfigError for the words and keys that nobody knows, each with the nearest name."""
    flags = [name for item in catalogue.values() for name in item.flags] + ["--config", "--help"]
    for word in [entry.value for entry in line.unknown]:
        if word.startswith("-") and word.strip("-"):
            guess = registry.nearest(word.replace("_", "-"), flags)
            hint = f"did you mean {guess}?" if guess else "`hetseq train --help` lists them"
            raise ConfigError(f"unknown option {word}: {hint}")
    for entry in line.unknown:
        raise ConfigError(
            f"unexpected argument {entry.value!r}: a value stands after its flag, and a list is written with commas,"
            " as in 1,2,4"
        )
    keys = [name.lstrip("-").replace("-", "_") for item in catalogue.values() for name in item.flags]
    for entry in file.unknown:
        guess = registry.nearest(entry.value, keys)
        hint = f"did you mean {guess}?" if guess else "`hetseq train --help` lists the options"
        raise ConfigError(f"{entry.where}: unknown option {entry.value}: {hint}")


# --------------------------------------------------------------------------------------------------------- YAML


def _read_yaml(path: str | None, catalogue: Mapping[str, _Option]) -> _Read:
    """The values of a YAML file: a flat mapping of option names, in any of their spellings, to scalars and lists."""
    if path is None:
        return _Read({}, [])
    found: dict[str, _Found] = {}
    unknown: list[_Found] = []
    lines: dict[str, str] = {}  # where each option was seen first
    by_flag = {name: item for item in catalogue.values() for name in item.flags}
    root = _compose(path)
    for key, node in root.value if root is not None else ():
        where = f"{path}, line {key.start_mark.line + 1}"
        if not isinstance(key.value, str):
            raise ConfigError(f"{where}: expected the name of an option before the colon")
        item = by_flag.get(flag(key.value))
        name = item.name if item is not None else key.value
        if name in lines:
            raise ConfigError(f"{where}: {key.value} is set already in {lines[name]}: keep one of them")
        lines[name] = where
        if item is None:
            unknown.append(_Found(key.value, where))
        else:
            found[name] = _Found(_read_node(item, key.value, node, where), f"{where}")
    return _Read(found, unknown)


def _compose(path: str) -> yaml.MappingNode | None:
    """The mapping that the file holds as nodes, which know their lines; None for an empty file."""
    text = _read_text(path)
    yaml = _import_yaml()
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{line}: not YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"{path}: not a text file: character U+{error.character:04X} at position {error.position}; --config"
            " expects YAML"
        ) from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; expected one `option: value` per line") from None
    if isinstance(root, yaml.ScalarNode) and root.tag == _NULL:  # a document without content, as `---` alone is
        return None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{path}, line {root.start_mark.line + 1}: expected one `option: value` per line, as in `max_sentences: 32`"
        )
    return root


def _read_text(path: str) -> str:
    try:
        content = Path(path).expanduser().read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: there is no such file, seen from {Path.cwd()}") from None
    except IsADirectoryError:
        inside = Path(path) / "config.yaml"
        raise ConfigError(f"--config {path}: is a folder; expected a file, as in {inside}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--config {path}: not UTF-8 text (byte {error.start}); expected a YAML file, save it as UTF-8"
        ) from None


def _read_node(item: _Option, key: str, node: yaml.Node, where: str) -> Any:
    """The value of one YAML node, by the type of its field."""
    yaml = _import_yaml()
    tag = node.tag.removeprefix(_TAG)
    if node.tag == _NULL:
        if item.may_be_none:
            return None
        raise ConfigError(f"{where}: {key} has no value: expected {item.expected()}")
    if isinstance(node, yaml.ScalarNode) and tag in ("str", "int", "float", "bool", "timestamp", "merge", "value"):
        text = node.value
        if tag == "bool" and item.kind is bool:  # YAML 1.1 also has yes, no, on and off
            text = str(text.lower() in ("true", "yes", "on"))
        return item.read(text, f"{where}: {key}: {text}")
    if isinstance(node, yaml.SequenceNode) and item.is_list and tag == "seq":
        return tuple(value for part in node.value for value in _read_entry(item, key, part, where))
    shape = {"seq": "a list", "map": "a mapping"}.get(tag, f"a value of the type {node.tag}")
    quote = "; put it in quotes" if item.kind is str and not item.is_list else ""
    raise ConfigError(f"{where}: {key} is {shape}: expected {item.expected()}{quote}")


def _read_entry(item: _Option, key: str, node: yaml.Node, where: str) -> Any:
    """One entry of a YAML list, as a tuple of one."""
    single = dataclasses.replace(item, is_list=False, may_be_none=False)
    place = f"{where.rpartition(' ')[0]} {node.start_mark.line + 1}"
    return (_read_node(single, key, node, place),)


def _import_yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError("YAML files need pyyaml: install it with `pip install pyyaml`, or use flags only") from None
    return yaml
