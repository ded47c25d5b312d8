"""Fields of dataclasses as options: the flags of a field, and the value that a text has for it.

Knows types, and not the source of a text: flags and YAML are read by the same `Option.read`. A value keeps its place,
so that an error of a section's own checks can name it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hetseq.config.sections import Config, RetiredConfig, flag, spelt
from hetseq.errors import ConfigError

_EXPECTED = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_EXPECTED_LIST = {
    int: "whole numbers separated by commas, as in 1,2,4",
    float: "numbers separated by commas, as in 0.1,0.05",
    str: "entries separated by commas, as in a,b",
}


@dataclass(frozen=True)
class Option:
    """A field as the command line sees it: `flags` are its spellings, the one to show first."""

    name: str
    section: type
    kind: type  # int, float, str or bool; for a list, the kind of its entries
    is_list: bool
    may_be_none: bool
    default: Any
    flags: tuple[str, ...]
    help: str
    metavar: str
    choices: tuple[str, ...]
    is_basic: bool
    is_many: bool = False

    def expected(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return _EXPECTED_LIST[self.kind] if self.is_list else _EXPECTED[self.kind]

    def read(self, text: str, where: str) -> Any:
        """The value of `text`. Raises a ConfigError that begins with `where`."""
        parts = _split_list(text) if self.is_list else [text]
        values = [] if parts is None else [_read_scalar(part, self.kind) for part in parts]
        wrong = parts is None or None in values or any(self.choices and value not in self.choices for value in values)
        if wrong:
            raise ConfigError(f"{where}: expected {self.expected()}")
        if any(isinstance(value, float) and not math.isfinite(value) for value in values):
            raise ConfigError(f"{where}: expected a finite number")
        return tuple(values) if self.is_list else values[0]

    def spellings(self) -> list[str]:
        """The flags as a help text shows them, the first with its value."""
        value = self.metavar or "|".join(self.choices) or ("" if self.kind is bool and not self.is_list else "VALUE")
        return [f"{self.flags[0]} {value}".rstrip(), *self.flags[1:]]

    def shown_default(self) -> str:
        """The default as one would type it, or "" if there is none to show, or the help states it."""
        if "default: " in self.help:
            return ""
        if self.default is dataclasses.MISSING or self.default is None or self.default is False or self.default == ():
            return ""
        if isinstance(self.default, tuple):
            return ",".join(_shown(value) for value in self.default)
        return _shown(self.default)

    def default_cell(self) -> str:
        """The default as a cell of a table; "" if the meaning states it."""
        shown = self.shown_default()
        if not shown and self.kind is bool and not self.is_list:
            shown = "off"
        return f"`{shown}`" if shown and shown != "off" else shown

    def meaning(self, *, with_default: bool = True) -> str:
        shown = self.shown_default()
        return f"{self.help} (default: {shown})".lstrip() if with_default and shown else self.help


@dataclass(frozen=True)
class Found:
    """A value, and its place in the user's words: `--batch-size`, or `run.yaml, line 3`."""

    value: Any
    where: str


@dataclass(frozen=True)
class Reading:
    """The content of one source: values by field name, and the unknown words or keys with their places."""

    found: dict[str, Found]
    unknown: list[Found]
    config_file: str | None = None
    wants_help: bool = False
    wants_all: bool = False  # of the help


def catalogue_of(sections: Iterable[type]) -> dict[str, Option]:
    """The options of the sections by field name. Raises ConfigError if two of them claim one flag."""
    catalogue: dict[str, Option] = {}
    owners: dict[str, type] = {"--config": Config, "--help": Config, "--help-all": Config}
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
def _options_of_section(section: type) -> tuple[Option, ...]:
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
        spellings = (flag(field.name), *map(spelt, names))
        options.append(
            Option(
                name=field.name,
                section=section,
                kind=kind,
                is_list=is_list,
                may_be_none=may_be_none,
                default=default,
                flags=tuple(dict.fromkeys(spellings)),
                help=field.metadata.get("help", ""),
                metavar=field.metadata.get("metavar", ""),
                choices=field.metadata.get("choices", ()),
                is_basic=field.metadata.get("basic", False),
                is_many=field.metadata.get("many", False),
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


def build(section: type, found: Mapping[str, Found]) -> Any:
    """The section with the values found for it; an error of its checks names the places that it concerns."""
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


def given_retired(section: RetiredConfig) -> dict[str, Any]:
    """The retired options that were given, with their values."""
    return {
        field.name: getattr(section, field.name)
        for field in dataclasses.fields(section)
        if getattr(section, field.name) != field.default
    }


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _read_scalar(text: str, kind: type) -> Any:
    """The value of one word, None if it is not of this kind."""
    if kind is str:
        return text
    if kind is bool:
        return {"true": True, "false": False}.get(text.strip().lower())
    try:
        return kind(text)
    except ValueError:
        return None


def _split_list(text: str) -> list[str] | None:
    """The words of `1,2,4`, `(0.9, 0.999)`, `[0.1]` or `['a', "b"]`; None if brackets or commas do not match."""
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
