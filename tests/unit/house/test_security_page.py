"""docs/guides/security.md rests on tests: each one that it names is there."""

from __future__ import annotations

import ast
import re

from tests.support.docs import ROOT

PAGE = ROOT / "docs" / "guides" / "security.md"


def named(text: str) -> list[tuple[str, str]]:
    """File and function of each test that a text names."""
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)


def missing(text: str) -> list[str]:
    found = []
    for file, name in named(text):
        path = ROOT / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            found.append(f"{file}::{name}")
    return found


def test_each_claim_is_shown_by_a_test_that_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    claims = [line for line in text[text.index("## Shown by") :].splitlines() if line.startswith("| ")][1:]
    assert len(claims) > 20
    assert [line for line in claims if not named(line)] == []
    assert missing(text) == []


def test_a_test_that_is_gone_is_seen() -> None:
    here = "tests/unit/house/test_security_page.py"
    assert missing(f"`{here}::test_a_test_that_is_gone_is_seen`") == []
    assert missing(f"`{here}::test_gone` `tests/unit/gone.py::test_a`") == [
        f"{here}::test_gone",
        "tests/unit/gone.py::test_a",
    ]
