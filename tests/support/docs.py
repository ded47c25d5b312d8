"""README and manual for tests: pages, their fenced blocks, and the commands in those.

A test runs each shell block (```console or ```bash) unless it has a title, which tells the reader where or when it
applies: on another machine, in another terminal. In a `console` block lines with `$ ` are commands and the rest is
their output; in a `bash` block every line is a command. A command that ends in `&` keeps running beside the next ones,
like the nodes of a run, until `wait`. A block whose title is a file of
`docs/examples/` shows that file; `python -m tests.manual --write` puts it there.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELLS = ("console", "bash", "sh", "shell")
#: what a test knows how to run
PROGRAMS = ("hetseq", "python", "wait")
#: placeholder in commands for the folder of real data
DATA = "DIR"
#: placeholder in commands for the reader's current folder
HERE = "$PWD"
#: where the nodes of this machine meet in commands; a test takes a port that is free
MEETING = "127.0.0.1:29400"

_FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}) *(?P<language>\w*)(?P<info>.*?)$")
_SHOWN = re.compile(r'title="(?P<path>docs/examples/[^":]+)(?:: (?P<name>\w+))?"')


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the rest of its first line, and its lines."""

    language: str
    info: str
    lines: tuple[str, ...]
    line: int  # of the fence, from 1

    @property
    def is_excused(self) -> bool:
        """It says why no test runs it."""
        return re.search(r'title="[^"]+"', self.info) is not None

    def commands(self) -> list[str]:
        """The commands of a shell block, without comments; a line that ends in a backslash continues in the next."""
        found, goes_on = [], False
        for line in self.lines:
            if goes_on:
                found[-1] += line
            elif self.language != "console":
                found.append(line)
            elif line.startswith("$ "):
                found.append(line[2:])
            else:
                continue
            goes_on = found[-1].endswith("\\")
            found[-1] = found[-1].rstrip("\\")
        return [command for command in found if command.strip() and not command.lstrip().startswith("#")]


def pages() -> list[Path]:
    """README.md, every page of the manual, and the page of the examples."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page in order; blocks in a list are returned without their indentation."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        opening = _FENCE.match(lines[at])
        if opening is None:
            at += 1
            continue
        end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == opening["fence"]), len(lines))
        inside = tuple(line.removeprefix(opening["indent"]) for line in lines[at + 1 : end])
        yield Block(opening["language"], opening["info"], inside, at + 1)
        at = end + 1


def shell_blocks(page: Path) -> list[Block]:
    """The blocks of a page that are commands."""
    return [block for block in blocks(page.read_text(encoding="utf-8")) if block.language in SHELLS]


def neither_run_nor_excused(text: str) -> list[str]:
    """The commands of a page that no test can run, in blocks that do not say why."""
    found = []
    for block in blocks(text):
        if block.language in SHELLS and not block.is_excused:
            commands = block.commands()
            found += [f"line {block.line}: {command}" for command in commands if program_of(command) not in PROGRAMS]
            found += [] if commands else [f"line {block.line}: a block without a command"]
            kinds = ["wait" if command == "wait" else goes_on_beside(command) for command in commands]
            if True in kinds and "wait" not in kinds[kinds.index(True) :]:
                found.append(f"line {block.line}: a command keeps running beside the others, and nothing waits for it")
    return found


def goes_on_beside(command: str) -> bool:
    """Whether the next command does not wait for this one."""
    return command.rstrip().endswith("&")


def program_of(command: str) -> str:
    """The first word of a command; "" for one that is more than a program and its arguments."""
    words = list(shlex.shlex(command, posix=True, punctuation_chars="|&;<>"))
    if words[-1] == "&":
        words.pop()
    return "" if any(set(word) <= set("|&;<>") for word in words) else shlex.split(command)[0]


def file_of(block: Block) -> str | None:
    """The file that a block shows, by its title, `docs/examples/FILE` or `docs/examples/FILE: NAME`."""
    titled = _SHOWN.search(block.info)
    return titled["path"] if titled else None


def content_of(block: Block) -> list[str]:
    """The lines of the file that a block shows: all, or those of the class or function that its title names."""
    titled = _SHOWN.search(block.info)
    assert titled is not None, block
    text = (ROOT / titled["path"]).read_text(encoding="utf-8")
    lines = text.splitlines()
    if not titled["name"]:
        return lines
    (node,) = (one for one in ast.parse(text).body if getattr(one, "name", None) == titled["name"])
    return lines[node.lineno - 1 : node.end_lineno]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as MkDocs and GitHub both make them from plain ones."""
    fenced = {number for block in blocks(text) for number in range(block.line, block.line + len(block.lines) + 2)}
    headings = [
        line for number, line in enumerate(text.splitlines(), 1) if line.startswith("#") and number not in fenced
    ]
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", h.lstrip("#").strip().lower())) for h in headings}


def links(text: str) -> Iterator[tuple[str, str]]:
    """Path and anchor of each link of a page that stays within the repository."""
    fenced = {number for block in blocks(text) for number in range(block.line, block.line + len(block.lines) + 2)}
    prose = "\n".join(line for number, line in enumerate(text.splitlines(), 1) if number not in fenced)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield path, anchor
