"""Compatibility check: the fields that must be equal on all nodes, their comparison, and the message on a difference.

`node_fields` collects what a node knows before it has a model: versions, HetSeq's source, options, and the content of
files whose paths may differ. `difference` compares these and the fields that each rank adds (`hetseq.run.fingerprint`).
Imports no torch and does not know how the fields travel.

The one idea: the fields are a flat table of texts, such as `--lr` to `0.1`, sent as JSON and shown unchanged. Two
fields are equal if their texts are equal, unless the *name* of the field selects another comparison (`_KINDS`). For
several lines, the first entry that differs is shown. For a file, written `NAME: DIGEST`, only the digest counts, since
paths differ between nodes. For a sample, trailing numbers may differ within a tolerance, since CPUs round differently.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hetseq
from hetseq.cluster.membership.assignment import Errand, ScriptJob
from hetseq.config.sections import (
    SECTIONS,
    CheckpointConfig,
    Config,
    DataConfig,
    DistributedConfig,
    OptimizationConfig,
    flag,
)
from hetseq.errors import few
from hetseq.system.torch_builds import pip_line, release_for

#: name of each compared field, and its text
Fields = dict[str, str]

#: version of the field names and formats; nodes with different versions cannot be compared
PROTOCOL = "1"
#: prefix of a value that this party could not determine; it matches any value
NOT_COMPARED = "not compared"
PART = "part of the training data"  # which part this rank reads; this field may differ, see `data_by_host`
BUILD = "build of torch"  # such as cu126; it may differ, and tells where this node finds another torch
TENSORS = "ranks that divide the model"  # the sizes of their groups, as in 2+1; only where there are such ranks
BASE = "frozen weights"  # that no checkpoint holds, by their content
SCRIPT = "sha256 of the script"
LOSS = "loss of the first two samples"  # the mean of each term, with its tolerances
DIGEST_DIGITS = 12

_NOT_GIVEN, _ABSENT = "(not given)", "(nothing)"
_MOST_FIELDS, _MOST_NAMES, _LONGEST_SHOWN = 8, 3, 160
_MOST_FILES = 1000
_SMALLEST = 1e-30  # when comparing two numbers, a smaller difference counts as zero


def node_fields(config: Config, errand: Errand | None = None) -> Fields:
    """The fields that a launcher presents for its node; needs no task, no data and no torch.

    An unreadable file is a value here, not an error: it differs from the other nodes' value, or the task reports it.
    """
    fields = {
        "protocol": PROTOCOL,
        "hetseq": hetseq.__version__,
        "torch": _torch_version().partition("+")[0],
        BUILD: build_tag().removeprefix("+"),
        "source of hetseq": source_below(Path(__file__).resolve().parent.parent.parent),
        **option_fields(section for section in config.sections() if isinstance(section, SECTIONS)),
        "file of --vocab-file": _file_or_folder(config.task.vocab_file),
        "file of --config-file": _file_or_folder(config.task.config_file),
        "modules of --user-dir": _modules_in(config.task.user_dir),
    }
    if isinstance(errand, ScriptJob):
        fields["arguments of the script"] = printable(" ".join(map(_without_path, errand.arguments))) or "(none)"
        return fields if errand.is_module else {**fields, SCRIPT: _file_or_folder(errand.script)}  # else a rank says it
    place = config.task.task if config.task.task.endswith(".py") else config.task.task.rpartition(":")[0]
    if place.endswith(".py"):
        fields["file of --task"] = _file_or_folder(place)
    return fields


def option_fields(sections: Iterable[Any]) -> Fields:
    """The options of these dataclasses, by flag. An omitted option equals its default given explicitly.

    Leaves out options that each node sets for itself, retired ones, and `--lr` at its default, which depends on the
    optimizer: the ranks add it.
    """
    fields = {}
    for section in sections:
        for field in dataclasses.fields(section):
            if field.init and not (field.metadata.get("per_node") or field.metadata.get("retired")):
                meant = _MEANINGS.get((type(section), field.name), _plain)(section, getattr(section, field.name))
                if meant is not None:
                    fields[flag(field.name)] = meant
    return fields


def build_tag() -> str:
    """The local version of torch on this node, such as `+cpu` or `+cu126`, or ""; it may differ between nodes."""
    _, plus, tag = _torch_version().partition("+")
    return plus + tag


def difference(parties: Sequence[tuple[str, Mapping[str, str]]]) -> str | None:
    """How the parties, each a name and its fields, differ, with a remedy; None if they agree.

    Parties are in rank order. The first party that has a field is the reference for the others.
    """
    names = dict.fromkeys(name for _, fields in parties for name in fields)
    found = [(_kind_of(name), line) for name in names if (line := _compare(name, parties)) is not None]
    if not found:
        return None
    found.sort(key=lambda entry: _KINDS.index(entry[0]))  # stable: keeps the parties' order within a kind
    lines = [f"  {line}" for _, line in found[:_MOST_FIELDS]]
    if len(found) > _MOST_FIELDS:
        lines.append(f"  and {len(found) - _MOST_FIELDS} more")
    remedies = list(dict.fromkeys(kind.remedy for kind, _ in found))[:2]
    lines.append(f"To fix this: {'; '.join(remedies)} [{found[0][0].code}]")
    lines += [f"  {line}" for line in _torch_commands(parties)[:_MOST_FIELDS]]
    return "\n".join(["the nodes do not agree, so nothing was trained:", *lines])


def _torch_commands(parties: Sequence[tuple[str, Mapping[str, str]]]) -> list[str]:
    """For each build of the parties that have the wrong torch: who they are, and the command for them."""
    told = [(who, fields["torch"], fields.get(BUILD, "")) for who, fields in parties if "torch" in fields]
    if len({release for _, release, _ in told}) < 2:
        return []
    wanted = release_for([f"{release}+{build}" for _, release, build in told])
    asked: dict[str, list[str]] = {}
    for who, release, build in told:
        if wanted and release != wanted:
            asked.setdefault(pip_line(wanted, build), []).append(who)
    return [f"{few(who, most=_MOST_NAMES)}: {line}" for line, who in asked.items()]


def digest(content: bytes) -> str:
    """12 hexadecimal digits of SHA-256."""
    return hashlib.sha256(content).hexdigest()[:DIGEST_DIGITS]


def listed(entries: Iterable[str]) -> str:
    """The value of a list field: one entry per line."""
    return "\n".join(map(printable, entries))


def file_state(path: Path) -> str:
    """The digest of a regular file's content, or why it cannot be read."""
    try:
        if not path.is_file():
            return "cannot be read (no such file)"
        whole = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                whole.update(piece)
    except OSError as error:
        return f"cannot be read ({error.strerror or type(error).__name__})"
    return whole.hexdigest()[:DIGEST_DIGITS]


def listed_files(states: Iterable[tuple[str, str]]) -> str:
    """The value of a field that lists files as (name, state); files with the same name are numbered."""
    entries: list[str] = []
    seen: dict[str, int] = {}
    for name, state in sorted(states):
        seen[name] = seen.get(name, 0) + 1
        entries.append(f"{name}{f' ({seen[name]})' if seen[name] > 1 else ''}: {state}")
    return listed(entries)


def printable(text: str) -> str:
    """The text with unprintable characters replaced, so that it cannot move the cursor or start another entry."""
    return "".join(character if character.isprintable() else "?" for character in text)


# Fields that a node knows


def _torch_version() -> str:
    """The version of torch, without importing it. The build tag is in version.py, but not in PyPI wheel metadata."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        try:
            found = re.search(
                r"^__version__\s*(?::.*)?=\s*['\"](.+?)['\"]", Path(folder, "version.py").read_text(), re.M
            )
        except OSError:
            continue
        if found:
            return found[1]
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def source_below(folder: Path) -> str:
    """All Python files of a package, with their digests; follows links to folders."""
    found = (Path(place, name) for place, _, names in os.walk(folder, followlinks=True) for name in names)
    files = [path for path in found if path.suffix == ".py" and not path.name.startswith(".")]
    return listed_files((path.relative_to(folder).as_posix(), file_state(path)) for path in files)


def _modules_in(user_dir: str | None) -> str:
    """The files that `registry.import_user_dir` imports."""
    if user_dir is None:
        return _NOT_GIVEN
    files = [path for path in Path(user_dir).expanduser().glob("*.py") if not path.name.startswith(".")]
    return listed_files((path.name, file_state(path)) for path in files) or "no Python files"


def _file_or_folder(name: str | None) -> str:
    if name is None:
        return _NOT_GIVEN
    path = Path(name).expanduser()
    if not path.is_dir():
        return listed_files([(path.name, file_state(path))])
    files = sorted(file for file in path.rglob("*") if file.is_file())[:_MOST_FILES]
    return listed_files((file.relative_to(path).as_posix(), file_state(file)) for file in files) or "an empty folder"


def _without_path(word: str) -> str:
    """An argument of a script; a path, alone or behind a flag and `=`, may differ between nodes."""
    flag_, equals, value = word.rpartition("=") if word.startswith("-") else ("", "", word)
    return f"{flag_}{equals}(a path)" if os.sep in value else word


# Normalized option values


def _plain(section: Any, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (int, float)):
        return repr(value + 0.0).removesuffix(".0") if isinstance(value, float) else str(value)
    if isinstance(value, (tuple, list)):
        return ",".join(_plain(section, entry) for entry in value) or "(none)"
    return "(default)" if value is None else str(value)


def _given(section: Any, value: Any) -> str | None:
    return None if value is None else _plain(section, value)


def _adadelta_decay(section: Any, value: Any) -> str:
    return _plain(section, section.weight_decay if value is None else value)


def _schedule(section: Any, value: str) -> str:
    return "polynomial" if value == "PolynomialDecayScheduler" else value


def _balance(section: Any, value: str) -> str:
    return "/".join(_plain(section, weights) for weights in section.balance_turns()) or value


def _own(section: Any, value: str) -> str:
    weights = section.own_weights()
    return _plain(section, weights) if weights else value


def _overrides(section: Any, value: str) -> str:
    return (
        ", ".join(f"{name}={value!r}" for name, value in sorted(section.optimizer_override_values().items()))
        or "(none)"
    )


def _splits(section: Any, value: str) -> str:
    return ",".join(section.valid_subsets)


def _which_checkpoint(section: Any, value: str) -> str:
    """The keyword, or `a path` for any path: checkpoints are compared by content elsewhere."""
    value = section.which_checkpoint
    if value.isascii() and value.isdigit():
        return f"step {int(value)}"
    return value if value in ("latest", "best", "none") else "a path"


#: options whose text is not simply their value; a function returns None if the ranks add the field
_MEANINGS: dict[tuple[type, str], Callable[[Any, Any], str | None]] = {
    (DataConfig, "valid_subset"): _splits,
    (OptimizationConfig, "lr"): _given,
    (OptimizationConfig, "adadelta_weight_decay"): _adadelta_decay,
    (OptimizationConfig, "lr_scheduler"): _schedule,
    (DistributedConfig, "balance"): _balance,
    (DistributedConfig, "own"): _own,
    (CheckpointConfig, "optimizer_overrides"): _overrides,
    (CheckpointConfig, "restore_file"): _which_checkpoint,
}


# Comparisons of two values: None if equal, else the text to show for each

Shown = tuple[str, str] | None


def _texts(one: str, other: str) -> Shown:
    return None if one == other else (one, other)


def _anything(one: str, other: str) -> Shown:
    return None


def _lists(one: str, other: str) -> Shown:
    """The first position where they differ."""
    if one == other:
        return None
    mine, theirs = one.split("\n"), other.split("\n")
    if len(mine) == len(theirs) == 1:
        return one, other
    both = min(len(mine), len(theirs))
    at = next((at for at in range(both) if mine[at] != theirs[at]), both)
    return _entry(mine, at), _entry(theirs, at)


def _entry(entries: list[str], at: int) -> str:
    return f"number {at + 1} of {len(entries)}: {entries[at]}" if at < len(entries) else f"only {len(entries)} of them"


def _files(one: str, other: str) -> Shown:
    """Compare files by content: a different name alone does not count."""
    mine, theirs = _states(one), _states(other)
    return None if sorted(mine.values()) == sorted(theirs.values()) else _named_files(one, other)


def _named_files(one: str, other: str) -> Shown:
    mine, theirs = _states(one), _states(other)
    names = [name for name in dict.fromkeys([*mine, *theirs]) if mine.get(name) != theirs.get(name)]
    if not names:
        return None
    # a changed file that both have says more than a file that one of them lacks
    name = next((name for name in names if name in mine and name in theirs), next(filter(None, names), ""))
    more = f" (and {len(names) - 1} more)" if len(names) > 1 and len(mine) + len(theirs) > 2 else ""
    return _state(mine, name, names, more), _state(theirs, name, names, more)


def _state(states: dict[str, str], name: str, differing: list[str], more: str) -> str:
    only = next(iter(states)) if len(states) == 1 else name
    if name not in states and only in differing:  # the file has another name, or no name but the reason it is missing
        name = only
    return f"{name} {states[name]}{more if name else ''}".strip() if name in states else f"no {name}"


def _common_files(one: str, other: str) -> Shown:
    """Compare the files that both have, by name: imports may depend on a node's devices."""
    mine, theirs = _states(one), _states(other)
    names = [name for name in mine if name in theirs]
    pick = [listed_files((name, states[name]) for name in names) for states in (mine, theirs)]
    return _named_files(*pick) if names else None


def _states(value: str) -> dict[str, str]:
    parts = [entry.rpartition(": ") for entry in value.split("\n")]
    return {name: state for name, _, state in parts}


def _samples(one: str, other: str) -> Shown:
    """Compare entries `NAME: DIGEST | TOLERANCE NUMBER NUMBER NORM | ...` that both have, by name."""
    if one == other:
        return None
    mine, theirs = _states(one), _states(other)
    for name in mine:
        if name in theirs and (shown := _measured(mine[name], theirs[name])) is not None:
            return f"{name}: {shown[0]}", f"{name}: {shown[1]}"
    return None


def _measured(one: str, other: str) -> Shown:
    mine, theirs = one.split(" | "), other.split(" | ")
    if mine[0] != theirs[0] or len(mine) != len(theirs):
        return f"content {mine[0]}", f"content {theirs[0]}"
    for left, right in zip(mine[1:], theirs[1:]):
        if left != right and not _is_close(left, right):
            return f"checksums {left.partition(' ')[2]}", f"checksums {right.partition(' ')[2]}"
    return None


def _is_close(one: str, other: str) -> bool:
    try:
        mine, theirs = [float(word) for word in one.split()], [float(word) for word in other.split()]
    except ValueError:
        return False
    if len(mine) != 4 or len(theirs) != 4:
        return False
    # the norm sets the scale for all numbers: a sum whose terms cancel has no scale of its own
    limit = max(mine[0], theirs[0]) * max(mine[3], theirs[3]) + _SMALLEST
    return all(not abs(left - right) > limit for left, right in zip(mine[1:], theirs[1:]))


def is_same_sample(one: str, other: str) -> bool:
    """Whether two entries of `samples of ...` agree, numbers within their tolerance."""
    return _samples(one, other) is None


def _losses(one: str, other: str) -> Shown:
    """Compare entries `TERM: RELATIVE ABSOLUTE MEAN` that both have, by term; the first line describes the buffers.

    Losses may differ if the buffers do: rank zero sends its buffers to all ranks before the first step.
    """
    (mine, _, my_terms), (theirs, _, their_terms) = one.partition("\n"), other.partition("\n")
    if _measured(mine, theirs) is not None:
        return None
    first, second = _states(my_terms), _states(their_terms)
    for term in first:
        if term in second and first[term] != second[term] and not _is_near(first[term], second[term]):
            return f"{term} {first[term].split()[-1]}", f"{term} {second[term].split()[-1]}"
    return None


def _is_near(one: str, other: str) -> bool:
    try:
        (*mine, left), (*theirs, right) = ([float(word) for word in text.split()] for text in (one, other))
        relative, absolute = (max(pair) for pair in zip(mine, theirs, strict=True))
    except ValueError:
        return False
    return abs(left - right) <= relative * max(abs(left), abs(right)) + absolute


@dataclass(frozen=True)
class _Kind:
    """Fields with these names; a name that ends in a space or is `--` is a prefix.

    `is_optional`: a party without this field agrees with all others.
    """

    names: tuple[str, ...]
    compare: Callable[[str, str], Shown]
    remedy: str
    code: str
    is_optional: bool = False


_COPY_TASK = "copy the same task files to all nodes"
_COPY_SCRIPT = "copy the same script, and the modules beside it, to all nodes"
_SAME_ARGUMENTS = (
    "give the script the same arguments on all nodes; paths may differ, and an environment variable can hold what one"
    " node has for itself"
)
_COPY_DATA = (
    "use the same data on all nodes (copy the files from one of them), or give --data-by-host if each host is to have"
    " its own part of the training data"
)
_SAME_COMMIT = "install the same HetSeq on all nodes (the same commit, without local changes)"
_SAME_MODEL = "build the same model, with the same settings and in the same order, on all nodes"
_SAME_BASE = "give all nodes the same files of the model, such as those of --model; copy them from one node"
_SAME_VOCABULARY = "use data made with the same vocabulary on all nodes"
_SAME_ORDER = "make the data set list its samples in the same order on all nodes"
_INSTALL = (
    "install the same versions on all nodes (only torch's build tag, as in +cpu, may differ), by hand or with"
    " hetseq ssh --install"
)

#: the most telling kinds first: a later difference may be the consequence of an earlier one
_KINDS = (
    _Kind(("protocol", "hetseq", "torch"), _texts, _INSTALL, "versions-differ"),
    _Kind(("source of hetseq",), _files, _SAME_COMMIT, "code-differs"),
    _Kind(("--lr",), _texts, "give all nodes the same options", "options-differ", is_optional=True),
    _Kind(("--",), _texts, "give all nodes the same options", "options-differ"),
    _Kind((SCRIPT,), _files, _COPY_SCRIPT, "code-differs", is_optional=True),
    _Kind(("arguments of the script",), _texts, _SAME_ARGUMENTS, "options-differ", is_optional=True),
    _Kind(("modules of the script",), _common_files, _COPY_SCRIPT, "code-differs", is_optional=True),
    _Kind(("file of --task",), _files, _COPY_TASK, "code-differs", is_optional=True),
    _Kind(("file of ", "modules of --user-dir"), _files, "use files of the same content on all nodes", "code-differs"),
    _Kind(("task",), _texts, "name the same --task on all nodes", "options-differ"),
    _Kind(("source of the task",), _files, _COPY_TASK, "code-differs"),
    _Kind(("modules of the task",), _common_files, _COPY_TASK, "code-differs"),
    _Kind(("packages of the task", "packages of the script"), _common_files, _INSTALL, "versions-differ"),
    _Kind(("parameters", "buffers", "modules"), _lists, _SAME_MODEL, "model-differs"),
    _Kind((BASE,), _texts, _SAME_BASE, "model-differs"),
    _Kind((PART, BUILD), _anything, "", "data-differ"),
    _Kind(("vocabulary of ",), _texts, _SAME_VOCABULARY, "data-differ"),
    _Kind(("length of ",), _texts, _COPY_DATA, "data-differ"),
    _Kind(("files of ",), _named_files, _COPY_DATA, "data-differ"),
    _Kind(("samples of ",), _samples, _COPY_DATA, "data-differ"),
    _Kind(("own order of ",), _texts, _SAME_ORDER, "data-differ"),
    _Kind(("order of ", "lengths of "), _lists, _SAME_ORDER, "data-differ"),
    _Kind(
        ("initial values",),
        _samples,
        "start from the same model on all nodes: the same weights file, and no randomness besides --seed",
        "model-differs",
    ),
    _Kind(
        (LOSS,),
        _losses,
        "make the other inputs of the loss equal on all nodes, such as a factor in forward, environment variables, or"
        " files that the task reads itself",
        "loss-differs",
        is_optional=True,
    ),
    _Kind((), _texts, "make these equal on all nodes", "options-differ"),
)


def _kind_of(name: str) -> _Kind:
    for kind in _KINDS[:-1]:
        if name in kind.names or name.startswith(tuple(part for part in kind.names if part.endswith((" ", "--")))):
            return kind
    return _KINDS[-1]


def _compare(name: str, parties: Sequence[tuple[str, Mapping[str, str]]]) -> str | None:
    """One line on this field, or None where all agree."""
    kind = _kind_of(name)
    missing = NOT_COMPARED if kind.is_optional else _ABSENT
    told = [(who, fields.get(name, missing)) for who, fields in parties]
    telling = [(who, value) for who, value in told if not value.startswith(NOT_COMPARED)]
    if not telling:
        return None
    reference, holders = telling[0][1], [telling[0][0]]
    groups: dict[str, list[str]] = {}
    first: str | None = None
    for who, value in telling[1:]:
        shown = kind.compare(reference, value)
        if shown is None:
            holders.append(who)
        else:
            first = shown[0] if first is None else first
            groups.setdefault(shown[1], []).append(who)
    if first is None:
        return None
    values = [(first, holders), *groups.items()]
    texts = [f"{_short(value)} on {few(who, most=_MOST_NAMES)}" for value, who in values[: 1 + _MOST_NAMES]]
    return f"{name}: {'; '.join(texts)}" + (" and others" if len(values) > 1 + _MOST_NAMES else "")


def _short(value: str) -> str:
    text = printable(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
