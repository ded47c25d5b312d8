"""The page `What each message means` quotes messages as the code has them.

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

PAGE = ROOT / "docs" / "messages.md"
#: between the fixed parts of a string
GAP = "\0"
#: what may stand around a part of a message on the page and not in the source, where strings are put together
_AROUND = " .,;:()"
_TELLING = 12  # letters without which a quotation says nothing of where it is from


def quotations() -> list[Block]:
    return [block for block in blocks(PAGE.read_text(encoding="utf-8")) if block.language == "text"]


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


def test_the_table_of_causes_quotes_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    begin = page.index("| in brackets |")
    rows = [line for line in page[begin : page.index("\n\n", begin)].splitlines() if line.startswith("| `")]
    assert len(rows) == 3
    for row in rows:
        quoted = parts(row.split("`")[1])
        assert any(holds(template, quoted) for template in templates()), row


def test_every_field_of_the_contract_has_a_remedy_on_the_page() -> None:
    from hetseq.cluster.contract import _KINDS

    page = PAGE.read_text(encoding="utf-8")
    begin = page.index("| what differs |")
    table = page[begin : page.index("\n\n", begin)]
    names = [name.strip() for kind in _KINDS for name in kind.names if not name.startswith("--")]
    lacking = [name for name in names if f"`{name}" not in table and name not in ("own order of", "file of", "task")]
    assert lacking == []
    assert "`length of`" in table
