"""What all parts of a run must have in common: collected as short texts by name, compared, a difference put into words.

Responsible for the fields that a node can tell before it has a model (versions, HetSeq's source, options, the content
of files whose paths may differ), and for `difference`, which compares these and the fields that each rank adds
(`hetseq.run.fingerprint`). It imports no torch and refuses to know who talks to whom.

The one idea: a contract is a flat table of texts, as in `--lr` to `0.1`, so that it travels as JSON and is shown as it
is. Equal means equal text, except where the *name* of a field says what is in it (`_KINDS`): several lines are a list,
of which the first entry that differs is told; a file is `NAME: DIGEST` and only its digest counts, since paths are each
node's own; a sample may end in numbers, which agree to within a tolerance, because another CPU rounds otherwise.
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

#: what has to be equal, by name
Fields = dict[str, str]

#: of this table's names and forms; nodes of different ones cannot compare
PROTOCOL = "1"
#: how the value of a field begins that this party could not tell; it equals whatever the others say
NOT_COMPARED = "not compared"
PART = "part of the training data"  # which of several a rank reads: the field that may differ, see `data_by_host`
LOSS = "loss of the first two samples"  # the mean of each term, and what may be another one all the same
DIGEST_DIGITS = 12

_NOT_GIVEN, _ABSENT = "(not given)", "(nothing)"
_MOST_FIELDS, _MOST_NAMES, _LONGEST_SHOWN = 8, 3, 160
_MOST_FILES = 1000
_SMALLEST = 1e-30  # of two numbers, what lies below this is zero


def node_fields(config: Config) -> Fields:
    """What a launcher presents for its node; needs no task, no data and no torch.

    A file that cannot be read is no error here but a value: it differs from the others', or the task will say so.
    """
    fields = {
        "protocol": PROTOCOL,
        "hetseq": hetseq.__version__,
        "torch": _torch_version().partition("+")[0],
        "source of hetseq": source_below(Path(__file__).resolve().parent.parent.parent),
        **option_fields(section for section in config.sections() if isinstance(section, SECTIONS)),
        "file of --vocab-file": _file_or_folder(config.task.vocab_file),
        "file of --config-file": _file_or_folder(config.task.config_file),
        "modules of --user-dir": _modules_in(config.task.user_dir),
    }
    place = config.task.task if config.task.task.endswith(".py") else config.task.task.rpartition(":")[0]
    if place.endswith(".py"):
        fields["file of --task"] = _file_or_folder(place)
    return fields


def option_fields(sections: Iterable[Any]) -> Fields:
    """The options of these dataclasses, by flag, as they are meant: an option at its default equals one that says so.

    Left out are those that are each node's own affair, those without effect, and `--lr` at its default, which depends
    on the optimizer: a rank knows it.
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
    """Torch's local version on this node, such as `+cpu` or `+cu126`, or ""; nodes may differ in it."""
    _, plus, tag = _torch_version().partition("+")
    return plus + tag


def difference(parties: Sequence[tuple[str, Mapping[str, str]]]) -> str | None:
    """What the parties, each a name and its fields, do not have in common, with a remedy; None if they agree.

    The parties stand in the order of their ranks; the first one that tells a field is the one others are held against.
    """
    names = dict.fromkeys(name for _, fields in parties for name in fields)
    found = [(_kind_of(name), line) for name in names if (line := _compare(name, parties)) is not None]
    if not found:
        return None
    found.sort(key=lambda entry: _KINDS.index(entry[0]))  # stable: within a kind as the parties list them
    lines = [f"  {line}" for _, line in found[:_MOST_FIELDS]]
    if len(found) > _MOST_FIELDS:
        lines.append(f"  and {len(found) - _MOST_FIELDS} more")
    remedies = list(dict.fromkeys(kind.remedy for kind, _ in found))[:2]
    lines.append(f"To go on: {'; '.join(remedies)} [{found[0][0].code}]")
    return "\n".join(["the nodes do not agree, so nothing was trained:", *lines])


def digest(content: bytes) -> str:
    """12 hexadecimal digits of SHA-256."""
    return hashlib.sha256(content).hexdigest()[:DIGEST_DIGITS]


def listed(entries: Iterable[str]) -> str:
    """The value of a field that is a list: an entry a line."""
    return "\n".join(map(printable, entries))


def file_state(path: Path) -> str:
    """The digest of a regular file's content, or why there is none."""
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
    """The value of a field that is (name, state) of files; files of one name are numbered."""
    entries: list[str] = []
    seen: dict[str, int] = {}
    for name, state in sorted(states):
        seen[name] = seen.get(name, 0) + 1
        entries.append(f"{name}{f' ({seen[name]})' if seen[name] > 1 else ''}: {state}")
    return listed(entries)


def printable(text: str) -> str:
    """The text without what would move a terminal's cursor or begin another entry."""
    return "".join(character if character.isprintable() else "?" for character in text)


# What a node can tell


def _torch_version() -> str:
    """Without importing it. The file knows the build tag, which the metadata of wheels from PyPI lack."""
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
    """All Python files of a package, with their digests; the folders that links in it lead to belong to it."""
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


# What an option means


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


def _overrides(section: Any, value: str) -> str:
    return (
        ", ".join(f"{name}={value!r}" for name, value in sorted(section.optimizer_override_values().items()))
        or "(none)"
    )


def _splits(section: Any, value: str) -> str:
    return ",".join(section.valid_subsets)


def _which_checkpoint(section: Any, value: str) -> str:
    """The word; of a path only that it is one: checkpoints are compared by their content, elsewhere."""
    if value in (CheckpointConfig.restore_file, "latest"):
        return "latest"
    if value.isascii() and value.isdigit():
        return f"step {int(value)}"
    return value if value in ("best", "none") else "a path"


#: options whose text is not simply their value; None: a rank will tell
_MEANINGS: dict[tuple[type, str], Callable[[Any, Any], str | None]] = {
    (DataConfig, "valid_subset"): _splits,
    (OptimizationConfig, "lr"): _given,
    (OptimizationConfig, "adadelta_weight_decay"): _adadelta_decay,
    (OptimizationConfig, "lr_scheduler"): _schedule,
    (DistributedConfig, "balance"): _balance,
    (CheckpointConfig, "optimizer_overrides"): _overrides,
    (CheckpointConfig, "restore_file"): _which_checkpoint,
}


# How two values compare: None, or what to show of each

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
    """By name; differences of names alone do not count."""
    mine, theirs = _states(one), _states(other)
    return None if sorted(mine.values()) == sorted(theirs.values()) else _named_files(one, other)


def _named_files(one: str, other: str) -> Shown:
    mine, theirs = _states(one), _states(other)
    names = [name for name in dict.fromkeys([*mine, *theirs]) if mine.get(name) != theirs.get(name)]
    if not names:
        return None
    # a file that both have and that differs says more than one that only one of them has
    name = next((name for name in names if name in mine and name in theirs), next(filter(None, names), ""))
    more = f" (and {len(names) - 1} more)" if len(names) > 1 and len(mine) + len(theirs) > 2 else ""
    return _state(mine, name, names, more), _state(theirs, name, names, more)


def _state(states: dict[str, str], name: str, differing: list[str], more: str) -> str:
    only = next(iter(states)) if len(states) == 1 else name
    if name not in states and only in differing:  # a file of another name, or, without one, why there is none
        name = only
    return f"{name} {states[name]}{more if name else ''}".strip() if name in states else f"no {name}"


def _common_files(one: str, other: str) -> Shown:
    """By name, where both have one: what is imported may depend on a node's devices."""
    mine, theirs = _states(one), _states(other)
    names = [name for name in mine if name in theirs]
    pick = [listed_files((name, states[name]) for name in names) for states in (mine, theirs)]
    return _named_files(*pick) if names else None


def _states(value: str) -> dict[str, str]:
    parts = [entry.rpartition(": ") for entry in value.split("\n")]
    return {name: state for name, _, state in parts}


def _samples(one: str, other: str) -> Shown:
    """Entries `NAME: DIGEST | TOLERANCE NUMBER NUMBER NORM | ...`, by name, where both have one."""
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
    # the norm is the scale of all of them: a sum of numbers that cancel has none of its own
    limit = max(mine[0], theirs[0]) * max(mine[3], theirs[3]) + _SMALLEST
    return all(not abs(left - right) > limit for left, right in zip(mine[1:], theirs[1:]))


def is_same_sample(one: str, other: str) -> bool:
    """Whether two entries of `samples of ...` agree, numbers within their tolerance."""
    return _samples(one, other) is None


def _losses(one: str, other: str) -> Shown:
    """A line on the buffers, then entries `TERM: RELATIVE ABSOLUTE MEAN`, by term, where both have one.

    With other buffers, losses may be others: rank zero gives its buffers to all before the first step.
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
    """Fields of these names, or that begin so where one ends in a space or is `--`.

    `is_optional`: who does not tell it agrees with everybody.
    """

    names: tuple[str, ...]
    compare: Callable[[str, str], Shown]
    remedy: str
    code: str
    is_optional: bool = False


_COPY_TASK = "have the same files of the task on all nodes"
_COPY_DATA = (
    "have the same data on all nodes (copy the files from one of them), or, where each host is to have a part of the"
    " training data of its own, give --data-by-host"
)
_SAME_COMMIT = "have the same HetSeq on all nodes (the same commit, without changes of one)"
_SAME_MODEL = "build the same model, with the same settings and in the same order, on all nodes"
_SAME_VOCABULARY = "have data on all nodes that were made with one vocabulary"
_SAME_ORDER = "have the data set list its samples in the same order on all nodes"
_INSTALL = "install the same versions on all nodes (only torch's build tag, as in +cpu, may differ)"

#: the most telling first: what stands below may only follow from what stands above
_KINDS = (
    _Kind(("protocol", "hetseq", "torch"), _texts, _INSTALL, "versions-differ"),
    _Kind(("source of hetseq",), _files, _SAME_COMMIT, "code-differs"),
    _Kind(("--lr",), _texts, "give all nodes the same options", "options-differ", is_optional=True),
    _Kind(("--",), _texts, "give all nodes the same options", "options-differ"),
    _Kind(("file of --task",), _files, _COPY_TASK, "code-differs", is_optional=True),
    _Kind(("file of ", "modules of --user-dir"), _files, "have files of the same content on all nodes", "code-differs"),
    _Kind(("task",), _texts, "name the same --task on all nodes", "options-differ"),
    _Kind(("source of the task",), _files, _COPY_TASK, "code-differs"),
    _Kind(("modules of the task",), _common_files, _COPY_TASK, "code-differs"),
    _Kind(("packages of the task",), _common_files, _INSTALL, "versions-differ"),
    _Kind(("parameters", "buffers", "modules"), _lists, _SAME_MODEL, "model-differs"),
    _Kind((PART,), _anything, "", "data-differ"),
    _Kind(("vocabulary of ",), _texts, _SAME_VOCABULARY, "data-differ"),
    _Kind(("length of ",), _texts, _COPY_DATA, "data-differ"),
    _Kind(("files of ",), _named_files, _COPY_DATA, "data-differ"),
    _Kind(("samples of ",), _samples, _COPY_DATA, "data-differ"),
    _Kind(("own order of ",), _texts, _SAME_ORDER, "data-differ"),
    _Kind(("order of ", "lengths of "), _lists, _SAME_ORDER, "data-differ"),
    _Kind(
        ("initial values",),
        _samples,
        "begin with the same model on all nodes: the same file of weights, and no randomness but that of --seed",
        "model-differs",
    ),
    _Kind(
        (LOSS,),
        _losses,
        "make equal on all nodes what the loss depends on besides parameters and data: a factor in forward, environment"
        " variables, files that the task reads itself",
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
