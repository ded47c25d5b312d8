"""The YAML of a run: read for `--config`, and written beside the checkpoints so that the run can be repeated.

Types decide, not YAML's guesses: a file is read as nodes, which know their lines and still hold the text. pyyaml is
imported with the first file, so flags alone do not need it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetseq.config.docs_page import title_of
from hetseq.config.fields import Found, Option, Reading, given_retired
from hetseq.config.sections import Config, RetiredConfig, flag
from hetseq.errors import ConfigError
from hetseq.registry import nearest

if TYPE_CHECKING:
    import yaml

    Entry = tuple[yaml.Node, yaml.Node]

FIRST_LINE = "# HetSeq run configuration; repeat the run with: hetseq train --config THIS_FILE"

_EXPECTED = "expected one `option: value` per line"
_TAG = "tag:yaml.org,2002:"  # of YAML's own types
_NULL = f"{_TAG}null"


def read_file(path: str | None, entries: Iterable[Entry], catalogue: Mapping[str, Option]) -> Reading:
    """The values of a YAML file: a flat mapping of option names, in any of their spellings, to scalars and lists."""
    found: dict[str, Found] = {}
    unknown: list[Found] = []
    lines: dict[str, str] = {}  # place of each option's first line
    by_flag = {name: item for item in catalogue.values() for name in item.flags}
    for key, node in entries:
        where = f"{path}, line {key.start_mark.line + 1}"
        if not isinstance(key.value, str):
            raise ConfigError(f"{where}: expected the name of an option before the colon")
        item = by_flag.get(flag(key.value))
        name = item.name if item is not None else key.value
        if name in lines:
            raise ConfigError(f"{where}: {key.value} is set already in {lines[name]}: keep one of them")
        lines[name] = where
        if item is None:
            unknown.append(Found(key.value, where))
        else:
            found[name] = Found(_read_node(item, key.value, node, where), f"{where}")
    return Reading(found, unknown)


def compose(path: str | None) -> list[Entry]:
    """The keys and values of the file as nodes, which know their lines; read once, since it may be a pipe."""
    if path is None:
        return []
    text = _read_text(path)
    yaml = _import_yaml()
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(
            f"{path}{line}: not YAML: {error.problem or error.context}; {_EXPECTED}, with text that holds a colon in"
            " quotes"
        ) from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"{path}: not a text file: character U+{error.character:04X} at position {error.position}; --config"
            " expects YAML"
        ) from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; {_EXPECTED}") from None
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == _NULL):  # an empty file, or `---` alone
        return []
    if not isinstance(root, yaml.MappingNode):
        found = "a list" if isinstance(root, yaml.SequenceNode) else "text without a colon"
        raise ConfigError(
            f"{path}, line {root.start_mark.line + 1}: found {found}; {_EXPECTED}, as in `batch_size: 32`"
        )
    return list(root.value)


def dump_yaml(config: Config) -> str:
    """The configuration as the YAML that `--config` reads back into an equal one.

    Flat, one plain scalar or list per option, grouped by comments. Retired options appear if they were given.
    """
    yaml = _import_yaml()
    lines = [FIRST_LINE]
    for section in config.sections():
        values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
        if isinstance(section, RetiredConfig):
            values = given_retired(section)
        if values:
            lines += ["", f"# {title_of(type(section))}"]
        for name, value in values.items():
            lines.append(_dump_line(yaml, name, value))
    return "\n".join(lines) + "\n"


def _read_text(path: str) -> str:
    try:
        content = Path(path).expanduser().read_bytes()
    except FileNotFoundError:
        beside = (file.name for file in Path(path).expanduser().parent.glob("*.y*ml"))
        guess = nearest(Path(path).name, beside)
        hint = f"; did you mean {Path(path).with_name(guess)}?" if guess else ""
        raise ConfigError(
            f"--config {path}: there is no such file, seen from {Path.cwd()}; expected a YAML file of options{hint}"
            " [file-missing]"
        ) from None
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


def _read_node(item: Option, key: str, node: yaml.Node, where: str) -> Any:
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


def _read_entry(item: Option, key: str, node: yaml.Node, where: str) -> Any:
    """One entry of a YAML list, as a tuple of one."""
    single = dataclasses.replace(item, is_list=False, may_be_none=False)
    place = f"{where.rpartition(' ')[0]} {node.start_mark.line + 1}"
    return (_read_node(single, key, node, place),)


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


def _import_yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError("YAML files need pyyaml: install it with `pip install pyyaml`, or use flags only") from None
    return yaml
