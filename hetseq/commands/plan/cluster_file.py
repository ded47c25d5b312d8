"""Cluster file of `hetseq simulate`: a hypothetical cluster in YAML.

Reads the file and reports its mistakes by file, line and key, with the found and the expected value. It simulates
nothing. The one idea: a value is text with a position until its key decides its type, so `440e6` is a number here,
although YAML 1.1 reads it as text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from hetseq.balance.memory_plan import ModelMemory, RankMemory
from hetseq.balance.shares import Cost
from hetseq.balance.simulation import Clock, Cluster, Link, RankGroup
from hetseq.config.byte_size import parse_size
from hetseq.errors import ConfigError
from hetseq.registry import nearest

# Larger numbers are typing errors: they would take minutes, or become infinite.
_MOST_RANKS = 100_000
_MOST_STEPS = 100_000
_MOST_SAMPLES = 10**12
_MOST_LAYERS = 100_000
_LEAST, _MOST = 1e-9, 1e18
_TOP = (
    "global_batch", "other_batches", "gradient_bytes", "groups", "steps", "noise", "seed", "parameters", "activation",
    "layers", "checkpointing", "offload",
)  # fmt: skip
_GROUP = (
    "name", "count", "samples_per_s", "fixed_s", "micro_batch", "per_micro_batch_s", "link", "memory", "host_memory",
    "stable", "ranks_per_node", "node_mbit_per_s",
)  # fmt: skip
_OF_MODEL = ("activation", "frozen", "layers", "checkpointing", "offload")
_OF_MEMORY = ("memory", "host_memory", "stable", "node_mbit_per_s")
_BUCKET = 25 * 2**20 // 4  # elements of the buckets of --bucket-cap-mb
_LINK = ("mbit_per_s", "latency_ms")


@dataclass(frozen=True)
class MemoryOnPaper:
    """A model, and the memory of all ranks; `groups`: the name of each group and its ranks."""

    model: ModelMemory
    ranks: tuple[RankMemory, ...]
    groups: tuple[tuple[str, range], ...]


@dataclass(frozen=True)
class Experiment:
    """The content of a file: a cluster, how long to simulate it, and global batches, the main one first.

    `memory`, if the file has `parameters`, also has the groups that compute nothing, which `cluster` leaves out.
    """

    cluster: Cluster
    clock: Clock
    global_batches: tuple[int, ...]
    memory: MemoryOnPaper | None = None


def read_experiment(file: Path) -> Experiment:
    """Read the experiment from a YAML file. Raises ConfigError with file, line and key."""
    top = _Table(file, "", _compose(file), _TOP)
    tables = [_Table(file, key, node, _GROUP) for key, node in top.entries("groups")]
    groups = [_group(table) for table in tables]
    names = [group.name for group in groups]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ConfigError(
                f"{file}: groups[{place}].name: found {name!r} again, expected a different name for each group"
            )
    computing = tuple(group for group in groups if group.samples_per_s)
    if not computing:
        raise ConfigError(f"{file}: groups: found none that computes, expected a group with samples_per_s above 0")
    memory = _memory(top, tables, groups)
    default = None if memory is None else float(memory.model.gradient_bytes)
    cluster = Cluster(computing, top.number("gradient_bytes", least=0, default=default))
    if (count := sum(group.count for group in groups)) > _MOST_RANKS:
        raise ConfigError(f"{file}: groups: found {count} ranks in all, expected at most {_MOST_RANKS}")
    clock = Clock(
        steps=top.whole("steps", least=1, most=_MOST_STEPS, default=Clock.steps),
        noise=top.number("noise", least=0, most=10, default=Clock.noise),
        seed=top.whole("seed", least=0, most=2**63 - 1, default=Clock.seed),
    )
    batches = [top.whole("global_batch", least=1, most=_MOST_SAMPLES)]
    if top.has("other_batches"):
        batches += [top.read_whole(key, node, 1, _MOST_SAMPLES) for key, node in top.entries("other_batches")]
    return Experiment(cluster, clock, tuple(dict.fromkeys(batches)), memory)


def _group(table: _Table) -> RankGroup:
    link = table.table("link", _LINK)
    count = table.whole("count", least=1, most=_MOST_RANKS)
    return RankGroup(
        name=table.text("name"),
        count=count,
        samples_per_s=table.number("samples_per_s", least=_LEAST, or_none=table.has("memory")),
        fixed_s=table.number("fixed_s", least=0, default=0.0),
        micro_batch=table.whole("micro_batch", least=1, most=_MOST_SAMPLES) if table.has("micro_batch") else None,
        per_micro_batch_s=table.number("per_micro_batch_s", least=0, default=0.0),
        ranks_per_node=table.divisor("ranks_per_node", count, "count"),
        link=Link(
            bytes_per_s=link.number("mbit_per_s", least=_LEAST) * 1e6 / 8,
            latency_s=link.number("latency_ms", least=0, default=0.0) / 1e3,
        ),
    )


def _memory(top: _Table, tables: Sequence[_Table], groups: Sequence[RankGroup]) -> MemoryOnPaper | None:
    """The model and the memory of every rank; None if the file has no `parameters`."""
    if not top.has("parameters"):
        for table, keys in [(top, _OF_MODEL), *((table, _OF_MEMORY) for table in tables)]:
            for key in keys:
                table.refuse_without_parameters(key)
        return None
    parameters = int(top.number("parameters", least=1, most=_MOST))
    ranks, shown = list[RankMemory](), list[tuple[str, range]]()
    for table, group in zip(tables, groups):
        cost = group.rank().cost if group.samples_per_s else Cost(0.0, 1.0, limit=0)
        name = group.name if group.count == 1 else f"each {group.name}"
        mbit_per_s = table.number("node_mbit_per_s", least=_LEAST) if table.has("node_mbit_per_s") else None
        one = RankMemory(
            name, cost, table.size("memory"), group.link.bytes_per_s, table.size("host_memory", default=0),
            is_stable=table.truth("stable", default=False),
            node_bytes_per_s=None if mbit_per_s is None else mbit_per_s * 1e6 / 8,
        )  # fmt: skip
        shown.append((group.name, range(len(ranks), len(ranks) + group.count)))
        nodes = (f"{group.name} {place // group.ranks_per_node}" for place in range(group.count))
        ranks += [replace(one, node=node) for node in nodes]
    model = ModelMemory(
        parameters,
        top.size("activation", default=0),
        min(parameters, _BUCKET),
        layers=top.whole("layers", least=1, most=_MOST_LAYERS, default=ModelMemory.layers),
        checkpoints=top.truth("checkpointing", default=False),
        offloads=top.truth("offload", default=False),
        frozen_bytes=top.size("frozen", default=0),
    )
    return MemoryOnPaper(model, tuple(ranks), tuple(shown))


def _compose(file: Path) -> Any:
    """The root node of the file; nodes know their lines."""
    import yaml

    try:
        return yaml.compose(file.read_text(encoding="utf-8-sig"), Loader=yaml.SafeLoader)
    except FileNotFoundError:
        raise ConfigError(
            f"{file}: there is no such file, relative to {Path.cwd()}; expected the YAML of a cluster"
        ) from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; expected the YAML of a cluster") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start}); expected the YAML of a cluster") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{file}{line}: not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{file}: not YAML: {str(error).splitlines()[0]}") from None


class _Table:
    """A mapping in the file, at `path` (such as `groups[1].link`, "" for the whole file), with known keys only."""

    def __init__(self, file: Path, path: str, node: Any, known: Sequence[str]) -> None:
        self._file, self._path, self._node = file, path, node
        if node is None or node.id != "mapping":
            self._refuse(path or "the file", node, f"a mapping with the keys {', '.join(known)}")
        self._values: dict[str, Any] = {}
        for key, value in node.value:
            name = key.value if key.id == "scalar" else "a key that is not a name"
            if name in self._values:
                raise ConfigError(f"{self._place(key)}: {self._full(name)} is there twice: keep one of them")
            if name not in known:
                guess = nearest(name, known)
                hint = f"did you mean {guess}?" if guess else f"expected {', '.join(known)}"
                raise ConfigError(f"{self._place(key)}: unknown key {self._full(name)}: {hint}")
            self._values[name] = value

    def has(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str) -> str:
        node = self._get(key, "a name")
        if node.id != "scalar" or not node.value.strip():
            self._refuse(self._full(key), node, "a name")
        return str(node.value)

    def number(
        self, key: str, *, least: float, most: float = _MOST, default: float | None = None, or_none: bool = False
    ) -> float:
        """The number of a key, or `default` if the key is absent; None: it is required. `or_none`: 0 is allowed."""
        if default is not None and key not in self._values:
            return default
        expected = f"a number from {least:g} to {most:g}{', or 0' if or_none else ''}"
        node = self._get(key, expected)
        value = _number(node)
        if or_none and value == 0:
            return 0.0
        if not least <= value <= most:
            self._refuse(self._full(key), node, expected)
        return value

    def whole(self, key: str, *, least: int, most: int, default: int | None = None) -> int:
        """The whole number of a key, or `default` if the key is absent; None: it is required."""
        if default is not None and key not in self._values:
            return default
        return self.read_whole(self._full(key), self._get(key, _whole(least, most)), least, most)

    def divisor(self, key: str, of: int, name: str) -> int:
        """A whole number that divides the value `of` of the key `name`; 1 if absent."""
        value = self.whole(key, least=1, most=of, default=1)
        if of % value:
            self._refuse(self._full(key), self._values[key], f"a number that divides {name}, which is {of}")
        return value

    def read_whole(self, key: str, node: Any, least: int, most: int) -> int:
        value = _number(node)
        if not (least <= value <= most and value == int(value)):
            self._refuse(key, node, _whole(least, most))
        return int(value)

    def size(self, key: str, *, default: int | None = None) -> int:
        """The bytes of a key, or `default` if the key is absent; None: it is required."""
        if default is not None and key not in self._values:
            return default
        expected = "a size, as in 24G or 500M"
        node = self._get(key, expected)
        value = _number(node)
        if 0 <= value <= _MOST:
            return int(value)
        try:
            return parse_size(node.value if node.id == "scalar" else "", key)
        except ConfigError:
            self._refuse(self._full(key), node, expected)

    def truth(self, key: str, *, default: bool) -> bool:
        """Whether the key says true, or `default` if it is absent."""
        if key not in self._values:
            return default
        node = self._values[key]
        if node.id != "scalar" or node.value.lower() not in ("true", "false"):
            self._refuse(self._full(key), node, "true or false")
        return bool(node.value.lower() == "true")

    def refuse_without_parameters(self, key: str) -> None:
        """Raise ConfigError if the key is there, as the file has no `parameters`."""
        if key in self._values:
            place, name = self._place(self._values[key]), self._full(key)
            raise ConfigError(f"{place}: {name} belongs to parameters: add parameters, as in 3e9, or leave {name} out")

    def table(self, key: str, known: Sequence[str]) -> _Table:
        return _Table(self._file, self._full(key), self._get(key, f"a mapping with the keys {', '.join(known)}"), known)

    def entries(self, key: str) -> Iterable[tuple[str, Any]]:
        """The entries of a list with their full names; at least one."""
        node = self._get(key, "a list")
        if node.id != "sequence" or not node.value:
            self._refuse(self._full(key), node, "a list with at least one entry")
        return [(f"{self._full(key)}[{place}]", entry) for place, entry in enumerate(node.value)]

    def _get(self, key: str, expected: str) -> Any:
        if key not in self._values:
            raise ConfigError(f"{self._place(self._node)}: {self._full(key)} is missing: expected {expected}")
        return self._values[key]

    def _full(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def _place(self, node: Any) -> str:
        return f"{self._file}, line {node.start_mark.line + 1}" if node is not None else str(self._file)

    def _refuse(self, key: str, node: Any, expected: str) -> NoReturn:
        shapes = {"mapping": "a mapping", "sequence": "a list"}
        found = "nothing" if node is None else shapes.get(node.id) or (repr(node.value) if node.value else "nothing")
        raise ConfigError(f"{self._place(node)}: {key}: found {found}, expected {expected}")


def _number(node: Any) -> float:
    """The number in a node, NaN if it has none."""
    try:
        return float(node.value) if node.id == "scalar" else math.nan
    except ValueError:
        return math.nan


def _whole(least: int, most: int) -> str:
    return f"a whole number from {least} to {most}"
