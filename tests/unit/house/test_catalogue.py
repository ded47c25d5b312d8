"""Codes of messages: each one is in the catalogue, in the code and on the page, and none is anywhere else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

import hetseq.errors
from hetseq.errors import CODES, HetSeqError, codes_in, plain, text_of
from tests.support.docs import ROOT, blocks
from tests.unit.house.test_messages import WITHOUT_CODES, holds, parts, templates

PAGE = ROOT / "docs" / "reference" / "errors.md"
#: of the page the sections of codes; after them it quotes messages without one, by lines
BY_CODE = PAGE.read_text(encoding="utf-8").partition(WITHOUT_CODES)[0]
#: in a string of the source, or behind `slug =`
_CODE = re.compile(r" \[([a-z]+(?:-[a-z]+)+)\]")


def sections() -> dict[str, str]:
    """Of the page, by code."""
    _, *found = re.split(r"^### `(.+)`$", BY_CODE, flags=re.MULTILINE)
    return dict(zip(found[::2], found[1::2], strict=True))


def slugs() -> Iterator[str]:
    """Those of whole kinds of errors."""
    for kind in vars(hetseq.errors).values():
        if isinstance(kind, type) and issubclass(kind, HetSeqError) and "slug" in vars(kind):
            yield kind.slug


def in_the_code() -> set[str]:
    """Every code that a message of the framework can have."""
    written = {code for template in templates() for code in _CODE.findall(template)}
    contract = ast.parse((ROOT / "hetseq" / "cluster" / "membership" / "compatibility.py").read_text(encoding="utf-8"))
    kinds = [node for node in ast.walk(contract) if isinstance(node, ast.Call) and ast.unparse(node.func) == "_Kind"]
    return written | {*filter(None, slugs())} | {ast.literal_eval(kind.args[3]) for kind in kinds}


def test_the_codes_of_messages_are_those_of_the_catalogue() -> None:
    assert in_the_code() == set(CODES)


def test_every_code_has_its_section_in_the_order_of_the_catalogue() -> None:
    assert list(sections()) == list(CODES)


@pytest.mark.parametrize("code", CODES)
def test_a_section_says_what_it_means_and_what_to_do(code: str) -> None:
    words = " ".join(sections()[code].split())
    assert CODES[code].removesuffix(".") in words
    assert "**Do:** " in words


@pytest.mark.parametrize("block", [*blocks(BY_CODE)], ids=lambda block: f"line {block.line}")
def test_what_the_page_quotes_stands_in_the_code(block: object) -> None:
    lines = getattr(block, "lines", ())
    quotation = " ".join(line.strip() for line in lines)
    wanted = parts(quotation)
    assert any(holds(template, wanted) for template in templates()), wanted


def test_an_error_has_the_code_of_its_message_or_else_that_of_its_kind() -> None:
    assert text_of(hetseq.errors.DataError("x is empty")) == "x is empty [data-unreadable]"
    assert text_of(hetseq.errors.DataError("no port [port-taken]; more")) == "no port [port-taken]; more"
    assert text_of(HetSeqError("something else")) == "something else"
    assert text_of(OSError("no space")) == "no space"


def test_codes_are_told_from_other_brackets() -> None:
    message = "a list [lr] of [no-such-code], taken [port-taken] twice [port-taken]"
    assert codes_in(message) == ["port-taken", "port-taken"]
    assert plain(message) == "a list [lr] of [no-such-code], taken twice"
