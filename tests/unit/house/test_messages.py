"""The page `Errors` quotes messages as the code has them.

On the page what stands in ‹ › is an example; everything else has to stand in one string of the source, in that order.
A message that the source puts together of several strings is quoted in several lines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.docs import ROOT, Block, blocks

PAGE = ROOT / "docs" / "reference" / "errors.md"
#: of the page what comes after the sections of codes, which test_catalogue.py compares
WITHOUT_CODES = "\n## Messages of several nodes\n"
#: the commands whose every refusal stands on the page, and what they have in common
COMMANDS = (
    "config/command_line.py", "which_run.py", "commands/doctor/__init__.py", "commands/drop.py",
    "commands/ssh/remote.py", "monitor/report/recorded.py", "monitor/report/command.py", "commands/script/command.py",
    "commands/selftest/__init__.py", "commands/ssh/command.py", "commands/top.py",
)  # fmt: skip
#: between the fixed parts of a string
GAP = "\0"
#: what may stand around a part of a message on the page and not in the source, where strings are put together
_AROUND = " .,;:()"
_TELLING = 12  # letters without which a quotation says nothing of where it is from


def quotations() -> list[Block]:
    return quotations_of(PAGE.read_text(encoding="utf-8").partition(WITHOUT_CODES)[2])


def quotations_of(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language == "text"]


def parts(line: str) -> list[str]:
    """The fixed parts of a line of a quotation, in order."""
    fixed = (part.strip(_AROUND) for part in re.split("‹[^›]*›", line))
    return [part for part in fixed if part]


@cache
def templates() -> tuple[str, ...]:
    """Every string of the framework, with gaps where something is put in."""
    found: set[str] = set()
    for path in sorted((ROOT / "hetseq").rglob("*.py")):
        found.update(strings(path))
    return tuple(sorted(found))


def strings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%[-.\d]*[sdrf]", GAP, node.value)


def holds(template: str, wanted: list[str]) -> bool:
    """Whether the parts stand in the template, in order, none across a gap."""
    at = 0
    for part in wanted:
        at = template.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def unknown_lines(block: Block) -> list[str]:
    """The lines of a quotation that no string of the source has; all of them if it has hardly a fixed part."""
    if max((len(part) for line in block.lines for part in parts(line)), default=0) < _TELLING:
        return list(block.lines)
    return [line for line in block.lines if not any(holds(template, parts(line)) for template in templates())]


def messages(block: Block) -> Iterator[str]:
    """The messages of a quotation: a line that begins with a space goes on with the one before."""
    text = "\n".join(block.lines)
    yield from (" ".join(message.split()) for message in re.split(r"\n(?! )", text))


def error_texts(source: str) -> list[str]:
    """The texts of the errors that a source raises, with gaps; those that are hardly more than gaps are left out."""
    raised = [node.exc for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
    calls = [node for node in raised if isinstance(node, ast.Call) and node.args]
    texts = {text for call in calls for text in outer_strings(call.args[-1])}
    return sorted(text for text in texts if max(map(len, text.split(GAP))) >= _TELLING)


def outer_strings(node: ast.AST) -> Iterator[str]:
    """The strings of an expression, with gaps, without those that are put into another one."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values)  # type: ignore[misc]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for part in ast.iter_child_nodes(node):
            yield from outer_strings(part)


def is_quoted(text: str, page: str) -> bool:
    """Whether a message of the page has at least half of the fixed letters of a text."""
    found = [message for block in quotations_of(page) for message in messages(block) if holds(text, parts(message))]
    letters = len(text.replace(GAP, ""))
    return any(2 * sum(map(len, parts(message))) >= letters for message in found)


@pytest.mark.parametrize("block", quotations(), ids=lambda block: f"line {block.line}")
def test_a_message_of_the_page_is_one_of_the_code(block: Block) -> None:
    assert unknown_lines(block) == []


def test_a_message_that_the_code_does_not_have_is_seen() -> None:
    def look(*lines: str) -> list[str]:
        return unknown_lines(Block("text", "", lines, 1))

    assert look("Node ‹labB› cannot reach the head ‹labA:29400› (‹no route›). Is it started?") == []
    assert look("Node ‹labB› cannot reach the boss ‹labA:29400› (‹no route›). Is it started?") != []
    assert look("cannot reach the head ‹labA:29400› Node ‹labB›. Is it started?") != []  # in another order
    assert look("‹everything is an example›", "‹and so is this›") != []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_refusal_of_a_command_is_on_the_page(name: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    texts = error_texts((ROOT / "hetseq" / name).read_text(encoding="utf-8"))
    assert [text.replace(GAP, "{}") for text in texts if not is_quoted(text, page)] == []


def test_a_refusal_that_the_page_lacks_is_seen() -> None:
    source = 'raise ConfigError(f"the rank {rank} of " f"{run} is no rank: leave {it} out")\nraise Short(f"{a}: {b}")'
    (text,) = error_texts(source)
    assert text == f"the rank {GAP} of {GAP} is no rank: leave {GAP} out"
    assert is_quoted(text, "```text\nthe rank ‹3› of\n    ‹runs/a› is no rank: leave ‹it›\n    out\n```\n")
    assert not is_quoted(text, "```text\nthe rank ‹3›\nof ‹runs/a› is no rank: leave it out\n```\n")
    assert not is_quoted(text, "```text\n‹the rank 3 of runs/a is no rank: leave it out›\n```\n")
    assert not is_quoted(text, "```text\nthe rank ‹3 of runs/a is no rank: leave it out›\n```\n")


def test_the_table_of_causes_quotes_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    begin = page.index("| in brackets |")
    rows = [line for line in page[begin : page.index("\n\n", begin)].splitlines() if line.startswith("| `")]
    assert len(rows) == 3
    for row in rows:
        quoted = parts(row.split("`")[1])
        assert any(holds(template, quoted) for template in templates()), row


def test_every_field_of_the_contract_has_a_remedy_on_the_page() -> None:
    from hetseq.cluster.membership.compatibility import _KINDS

    page = PAGE.read_text(encoding="utf-8")
    begin = page.index("| what differs |")
    table = page[begin : page.index("\n\n", begin)]
    names = [name.strip() for kind in _KINDS for name in kind.names if not name.startswith("--")]
    lacking = [name for name in names if f"`{name}" not in table and name not in ("own order of", "file of", "task")]
    assert lacking == []
    assert "`length of`" in table
