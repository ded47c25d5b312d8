"""Parses the words of a command line into values by option, and reports unknown words.

argparse only divides the words; values and messages are ours.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hetseq import registry
from hetseq.config.fields import Found, Option, Reading
from hetseq.config.sagemaker_keys import ELSEWHERE
from hetseq.errors import ConfigError, UnknownOptionError


def read_flags(argv: Sequence[str], catalogue: Mapping[str, Option]) -> Reading:
    """The parsed words. Raises ConfigError for an invalid value, unless `--help` is among the words."""
    words, typed = _same_dashes(argv)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    # Every value is optional to argparse, so that a missing one is reported in our words.
    kept: dict[str, Any] = {"action": _Remember, "nargs": "?", "default": argparse.SUPPRESS}
    parser.add_argument("--config", dest="config", **kept)
    parser.add_argument("--help", "-h", dest="help", **{**kept, "nargs": 0})
    parser.add_argument("--help-all", dest="help_all", **{**kept, "nargs": 0})
    groups: dict[type, Any] = {}
    for item in catalogue.values():
        if item.section not in groups:
            groups[item.section] = parser.add_argument_group(item.section.__name__)
        groups[item.section].add_argument(*item.flags, dest=item.name, **kept)
    try:
        values, unknown = parser.parse_known_args(_join_negative(words))
    except argparse.ArgumentError as error:
        raise ConfigError(_no_value_wanted(words, error.argument_name or "")) from None
    given = dict(vars(values))
    wants_all = given.pop("help_all", None) is not None
    wants_help = given.pop("help", None) is not None or wants_all
    config_flag, config_file = given.pop("config", [("--config", "")])[-1]
    if config_file is None and not wants_help:
        raise ConfigError(f"{config_flag} has no value: expected --config FILE")
    found: dict[str, Found] = {}
    refused: list[str] = []
    for name, uses in given.items():
        refused += _contradictions(uses, typed)
        spelling, text = uses[-1]
        item, spelling = catalogue[name], typed.get(spelling, spelling)
        if item.is_many and None not in (texts := [text for _, text in uses]):
            text = ",".join(map(str, texts))
        if text is None and item.kind is bool and not item.is_list:
            text = "true"
        try:
            found[name] = Found(_read_flag(item, spelling, text), spelling)
        except ConfigError as error:
            refused.append(str(error))
    if refused and not wants_help:  # with --help, a wrong value is no error
        raise ConfigError("; ".join(refused))
    leftovers = [Found(typed.get(word.partition("=")[0], word), "") for word in unknown]
    return Reading(found, leftovers, config_file or None, wants_help, wants_all)


def refuse_unknown(line: Reading, file: Reading, catalogue: Mapping[str, Option], also: Collection[str] = ()) -> None:
    """Raise ConfigError for unknown words and keys, each with the nearest name; `also`: further flags."""
    flags = [name for item in catalogue.values() for name in item.flags] + ["--config", "--help", "--help-all", *also]
    refused, words = [], []
    for word in [entry.value for entry in line.unknown]:
        if word.startswith("-") and word.strip("-"):
            guess = registry.nearest(word.replace("_", "-"), flags)
            hint = f"did you mean {guess}?" if guess else "`hetseq train --help-all` lists them"
            hint = ELSEWHERE.get(word.strip("-").replace("-", "_"), hint)
            refused.append(f"unknown option {word}: {hint}")
            words.append(word)
    if refused:
        raise UnknownOptionError("; ".join(refused), words)
    for entry in line.unknown:
        meant = _meant_by(entry.value) if "task" not in line.found else None
        hint = f": did you mean {meant}?" if meant else ", and a list is written with commas, as in 1,2,4"
        raise ConfigError(f"unexpected argument {entry.value!r}: a value comes after its flag{hint}")
    keys = [name.lstrip("-").replace("-", "_") for item in catalogue.values() for name in item.flags]
    for entry in file.unknown:
        guess = registry.nearest(entry.value, keys)
        hint = f"did you mean {guess}?" if guess else "`hetseq train --help-all` lists the options"
        hint = ELSEWHERE.get(entry.value, hint)
        raise ConfigError(f"{entry.where}: unknown option {entry.value}: {hint}")


def _meant_by(word: str) -> str | None:
    """The flag and value that a word without a flag probably means."""
    if word.endswith((".yaml", ".yml")):
        return f"--config {word}"
    task = word if registry.is_address(word) else registry.nearest(word, registry.included_names("task"))
    return f"--task {task}" if task else None


class _Remember(argparse.Action):
    """Keep every use of a flag with its value: errors use the user's spelling."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        if self.dest == "config" and hasattr(namespace, "config"):
            raise ConfigError("--config is given twice: HetSeq reads one file, put the options together")
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), (option_string, values)])


def _contradictions(uses: Sequence[tuple[str, str | None]], typed: Mapping[str, str]) -> list[str]:
    """The refusal of two spellings of one option with different values; of one spelling the last value counts."""
    last = dict(uses)
    if len(set(last.values())) < 2:
        return []
    said = " and ".join(f"{typed.get(spelling, spelling)} {text or ''}".rstrip() for spelling, text in last.items())
    return [f"{said} are one option with two values: keep one of them"]


def _no_value_wanted(words: Sequence[str], flags: str) -> str:
    """The refusal of a word that argparse reads as a flag with a value that it does not take, as in -h-all."""
    word = next((word for word in words if re.match(r"-h.", word)), None)
    if word is None:
        return f"{flags} takes no value"
    return f"unknown option {word}: did you mean {registry.nearest(f'-{word}', ['--help', '--help-all']) or '--help'}?"


def _read_flag(item: Option, spelling: str, text: str | None) -> Any:
    if text is None:
        raise ConfigError(f"{spelling} has no value: expected {item.expected()}")
    return item.read(text, f"{spelling} {text}".rstrip())


def _same_dashes(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words with `_` in names of flags turned into `-`, and the typed name by each new one."""
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
