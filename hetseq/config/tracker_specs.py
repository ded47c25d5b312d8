"""Trackers on the command line: `NAME[:KEY=VALUE,...]`, or an address of a class of the user's own.

Knows the names, their keys and the packages they need; imports none of them.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hetseq import registry
from hetseq.errors import ConfigError


@dataclass(frozen=True)
class TrackerKind:
    """A known tracker: its module and package, the keys it takes, and the keys it needs."""

    module: str
    package: str  # for pip, with the oldest version that is known to work
    keys: tuple[str, ...]
    needed: tuple[str, ...] = ()


KINDS: Mapping[str, TrackerKind] = {
    "wandb": TrackerKind("wandb", "wandb>=0.31", ("project", "entity", "name", "group"), ("project",)),
    "mlflow": TrackerKind("mlflow", "mlflow-skinny>=3", ("uri", "experiment", "name"), ("experiment",)),
    "trackio": TrackerKind("trackio", "trackio>=0.40", ("project", "name", "space_id"), ("project",)),
}


@dataclass(frozen=True)
class TrackerSpec:
    """One tracker that was asked for. `name`: of a known one; "" for a class, whose address `text` is."""

    text: str
    name: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)


def read_specs(words: Iterable[str], where: str = "--tracker") -> tuple[TrackerSpec, ...]:
    """The trackers in a list that was split at its commas: KEY=VALUE belongs to the word before it.

    Raises ConfigError for an unknown name or key, a key without a value, and a tracker that is named twice.
    """
    texts: list[str] = []
    for word in words:
        if re.match(r"\w+=", word) and texts:
            texts[-1] += f",{word}"
        else:
            texts.append(word)
    specs = tuple(_read(text, where) for text in texts)
    for spec in specs:
        if specs.count(spec) > 1:
            raise ConfigError(f"{where} {spec.text} was given twice: every row would arrive twice; leave one out")
    return specs


def check_packages(specs: Iterable[TrackerSpec]) -> None:
    """Raise ConfigError if the package of a tracker is not installed."""
    for spec in specs:
        if spec.name and importlib.util.find_spec(KINDS[spec.name].module) is None:
            raise ConfigError(
                f"--tracker {spec.text}: the package {KINDS[spec.name].module} is not installed here; install it with"
                f" pip install '{KINDS[spec.name].package}', or leave the tracker out"
            )


def _read(text: str, where: str) -> TrackerSpec:
    name, _, rest = text.partition(":")
    if not name:
        raise ConfigError(f"{where} {text!r}: expected the name of a tracker, as in wandb:project=digits")
    if name not in KINDS:
        if registry.is_address(text) and "=" not in text:
            return TrackerSpec(text)
        guess = registry.nearest(name, KINDS)
        hint = f" (did you mean {guess}?)" if guess else ""
        raise ConfigError(
            f"{where} {text}: there is no tracker {name}{hint}; expected one of {', '.join(KINDS)}, as in"
            " wandb:project=digits, or a class of your own, as in my_tracker.py:MyTracker (TensorBoard's files are"
            " always written)"
        )
    kind, keys = KINDS[name], dict[str, str]()
    for pair in filter(None, rest.split(",")):
        key, equals, value = pair.partition("=")
        if key not in kind.keys or key in keys or not (equals and value):
            raise ConfigError(
                f"{where} {text}: {pair} is no setting of {name}; expected KEY=VALUE with each key once, of"
                f" {', '.join(kind.keys)}"
            )
        keys[key] = value
    lacking = [key for key in kind.needed if key not in keys]
    if lacking:
        raise ConfigError(f"{where} {text}: {name} needs its {lacking[0]}, as in {name}:{lacking[0]}=digits")
    return TrackerSpec(text, name, keys)
