"""One style for the command lines of all commands except `train`: their arguments, `--help`, and error messages.

Responsible for dividing the words of a command, for the text of its help, and for the message that names the command,
the argument and the remedy if the words are invalid. Refuses to know what an option does. A command describes its line
with `Command`, `Argument` and `CommandOption`, and receives values by name.

The one idea: argparse divides the words and lays out the help; errors such as a missing, unknown or repeated value are
reported in HetSeq's own words, as for `hetseq train`, with an example that can be pasted.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hetseq.config import HelpRequested, all_flags
from hetseq.errors import ConfigError
from hetseq.registry import nearest

_NARROWEST, _WIDEST = 40, 120  # columns of a help text, on a terminal of any width
_HELP_AT = 28  # the column at which the meanings begin


class CommandRefused(ConfigError):
    """Invalid words of a command. The message begins with the command, as in `hetseq top: ...`."""


@dataclass(frozen=True)
class Argument:
    """A positional argument: RUN. `among`: the allowed words; "" among them allows any."""

    name: str
    help: str
    among: tuple[str, ...] = ()
    is_optional: bool = False


@dataclass(frozen=True)
class CommandOption:
    """`--flag VALUE`, or a switch if `value` is "".

    `read` makes the value from its text, and raises ValueError with the expected form; `among`: the allowed texts.
    `also`: other spellings. An option with `is_many` may be given several times and has a tuple of values. An option
    that `is_passed_on` is only shown here: `hetseq train` reads it.
    """

    flag: str
    help: str
    value: str = ""
    read: Callable[[str], Any] = str
    default: Any = None
    among: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    is_needed: bool = False
    is_many: bool = False
    is_passed_on: bool = False


@dataclass(frozen=True)
class Given:
    """The parsed words: a value for each argument and option by its name, and the words for `hetseq train`."""

    values: Mapping[str, Any]
    rest: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclass(frozen=True)
class Command:
    """One command line. `usage` follows `hetseq NAME`, one line per form; `notes` are paragraphs of its help.

    Options of `hetseq train` are refused, or come after `--` (`train="behind"`), or anywhere (`train="among"`). With
    the switch `alone` they are not expected.
    """

    name: str
    about: str
    usage: tuple[str, ...]
    words: tuple[Argument | CommandOption, ...]
    examples: tuple[str, ...]
    notes: tuple[str, ...] = ()
    train: str = ""
    alone: str = ""

    def read(self, words: Sequence[str]) -> Given:
        """The values. Raises HelpRequested for `--help`, and CommandRefused for invalid words."""
        has_tail = "--" in words
        at = list(words).index("--") if has_tail else len(words)
        tail = tuple(words[at + 1 :])
        kept, left = self._divide(words[:at])
        if "--help" in kept:
            raise HelpRequested(self.help())
        if self.train == "among":
            targets, rest = self._targets(left)
            return Given({**self._options(kept, rest), **self._arguments(targets)}, (*rest, *tail))
        if self.train == "behind" and not has_tail and self.alone not in kept:
            raise self.refusal(f"expected the options of hetseq train after --, as in: {self._example('--')}")
        unknown = [word for word in left if _is_option(word)]
        if unknown:
            raise self._unknown(unknown[0].partition("=")[0])
        targets = left if self.train == "behind" else [*left, *tail]
        arguments = self._arguments(targets)
        return Given({**self._options(kept, []), **arguments}, tail if self.train == "behind" else ())

    def help(self) -> str:
        """The text of `--help`, as wide as the terminal and at most 120 columns."""
        width = max(min(shutil.get_terminal_size().columns, _WIDEST) - 1, _NARROWEST)
        # a line that is too long is continued with a backslash, so that it can be pasted
        examples = "\n".join("  " + " \\\n      ".join(_lines(example, width - 8)) for example in self.examples)
        notes = "".join("\n".join(_lines(note, width)) + "\n\n" for note in self.notes)
        parser = argparse.ArgumentParser(
            usage=_plain("\n       ".join(f"hetseq {self.name} {form}".rstrip() for form in self.usage)),
            description="\n".join(_lines(self.about, width)),
            epilog=f"{notes}for example:\n{examples}",
            formatter_class=partial(argparse.RawTextHelpFormatter, max_help_position=_HELP_AT, width=width),
            add_help=False,
        )
        group = parser.add_argument_group()
        named = [word.name if isinstance(word, Argument) else f"{word.flag} {word.value}" for word in self.words]
        room = width - min(max(map(len, named), default=0) + 4, _HELP_AT)
        for word in self.words:
            meaning = _plain("\n".join(_lines(word.help, room)))
            if isinstance(word, Argument):
                group.add_argument(word.name, help=meaning)
            elif word.value:
                group.add_argument(word.flag, metavar=word.value, help=meaning)
            else:
                group.add_argument(word.flag, action="store_true", help=meaning)
        return parser.format_help()

    def refusal(self, message: str) -> CommandRefused:
        """The error with this message about the command."""
        return CommandRefused(f"hetseq {self.name}: {message}")

    @property
    def flags(self) -> tuple[str, ...]:
        """Every spelling of the command's own options."""
        return tuple(flag for option in self._own() for flag in (option.flag, *option.also))

    def _own(self) -> list[CommandOption]:
        return [word for word in self.words if isinstance(word, CommandOption) and not word.is_passed_on]

    def _divide(self, words: Sequence[str]) -> tuple[dict[str, list[tuple[str, str | None]]], list[str]]:
        """The spellings and texts of each given option, and the words that belong to none."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("--help", "-h", dest="--help", nargs=0, action=_Keep, default=argparse.SUPPRESS)
        for option in self._own():
            # every value is optional to argparse, so that a missing one is reported in our words
            parser.add_argument(
                option.flag, *option.also, dest=option.flag, nargs="?" if option.value else 0, action=_Keep,
                default=argparse.SUPPRESS,
            )  # fmt: skip
        try:
            kept, left = parser.parse_known_args(list(words))
        except argparse.ArgumentError as error:
            raise self.refusal(f"{error.argument_name} takes no value") from None
        return vars(kept), left

    def _options(self, kept: Mapping[str, list[tuple[str, str | None]]], rest: Sequence[str]) -> dict[str, Any]:
        """The values of the options; a missing one may be misspelt among the words in `rest`."""
        values: dict[str, Any] = {}
        for option in self._own():
            given = kept.get(option.flag, [])
            if not option.value:
                values[option.flag] = bool(given)
                continue
            if len(given) > 1 and not option.is_many:
                raise self.refusal(f"{option.flag} is given twice: give it once, as in: {self._example(option)}")
            read = tuple(self._value(option, spelling, text) for spelling, text in given)
            if option.is_needed and not read:
                if typed := nearest(option.flag, {word.partition("=")[0] for word in rest} - {*all_flags()}):
                    raise self._unknown(typed)
                raise self.refusal(f"{option.flag} {option.value} is missing, as in: {self._example(option)}")
            values[option.flag] = read if option.is_many else read[0] if read else option.default
        return values

    def _value(self, option: CommandOption, spelling: str, text: str | None) -> Any:
        if not text:
            raise self.refusal(
                f"{spelling} has no value: expected {spelling} {option.value}, as in: {self._example(option)}"
            )
        try:
            return option.read(_one_of(text, option.among))
        except ValueError as error:
            raise self.refusal(f"{spelling} {text}: {error}") from None

    def _targets(self, left: list[str]) -> tuple[list[str], list[str]]:
        """The command's own arguments among words of `hetseq train`: words that follow no option; and the others."""
        wanted = sum(isinstance(word, Argument) for word in self.words)
        free = [
            at
            for at, word in enumerate(left)
            if not _is_option(word) and (at == 0 or not _is_option(left[at - 1]) or "=" in left[at - 1])
        ][:wanted]
        return [left[at] for at in free], [word for at, word in enumerate(left) if at not in free]

    def _arguments(self, targets: Sequence[str]) -> dict[str, str | None]:
        wanted = [word for word in self.words if isinstance(word, Argument)]
        least = sum(not argument.is_optional for argument in wanted)
        if not wanted and targets:
            raise self.refusal(f"unexpected argument {targets[0]}: expected options alone, as in: {self.examples[0]}")
        if not least <= len(targets) <= len(wanted) or "" in targets:
            found = " ".join(target or "''" for target in targets) or "none"
            raise self.refusal(f"expected {_expected(wanted)}, found {found}; as in: {self.examples[0]}")
        values: dict[str, str | None] = dict.fromkeys(argument.name for argument in wanted)
        for argument, target in zip(wanted, targets):
            try:
                values[argument.name] = _one_of(target, argument.among)
            except ValueError as error:
                raise self.refusal(f"{argument.name} {target}: {error}") from None
        return values

    def _unknown(self, flag: str) -> CommandRefused:
        if self.train == "behind" and flag in all_flags():
            return self.refusal(f"{flag} is an option of hetseq train: write it after --")
        guess = nearest(flag, self.flags)
        hint = f"did you mean {guess}?" if guess else f"expected {', '.join(self.flags) or 'no option'}"
        return self.refusal(f"unknown option {flag}: {hint}")

    def _example(self, wanted: CommandOption | str) -> str:
        """The first example with this option or word, otherwise the first one."""
        word = wanted.flag if isinstance(wanted, CommandOption) else wanted
        return next((example for example in self.examples if word in example.split()), self.examples[0])


class _Keep(argparse.Action):
    """Keep every spelling and text of an option: errors use the user's spelling."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), (option_string, values)])


def number_within(text: str, least: float, most: float, what: str) -> float:
    """The number in a text; ValueError says that `what` is expected if it is none or out of range."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise ValueError(f"expected {what}")
    return value


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """A reader of whole numbers from `least`, to `most` if given."""
    span = f"of {least} or more" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least or (most is not None and int(text) > most):
            raise ValueError(f"expected a whole number {span}")
        return int(text)

    return read


def seconds(least: float, most: float = math.inf) -> Callable[[str], float]:
    """A reader of seconds from `least`, to `most` if given."""
    span = f"of {least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least <= number <= most or number == math.inf:
            raise ValueError(f"expected seconds {span}, as in 5")
        return number

    return read


def _is_option(word: str) -> bool:
    """Whether a word looks like an option; a negative number does not."""
    return re.match(r"--?[A-Za-z_]", word) is not None


def _one_of(text: str, among: Sequence[str]) -> str:
    if among and text not in among:
        guess = nearest(text, among)
        raise ValueError(f"did you mean {guess}?" if guess else f"expected {', '.join(among)}")
    return text


def _expected(arguments: Sequence[Argument]) -> str:
    if len(arguments) == 1:
        only = arguments[0]
        return f"one of {', '.join(only.among)}" if only.among else f"one {only.name}"
    return " ".join(f"[{argument.name}]" if argument.is_optional else argument.name for argument in arguments)


def _lines(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def _plain(text: str) -> str:
    """Text that argparse prints unchanged."""
    return text.replace("%", "%%")
