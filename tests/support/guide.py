"""The guide "Two PCs" (docs/guides/two-pcs.md): its blocks by section, and its first sections typed on two PCs."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.checkout import checkout
from tests.support.docs import ROOT, Block, blocks
from tests.support.two_pcs import PATIENCE_S, Pc
from tests.tour import sections

PAGE = ROOT / "docs" / "guides" / "two-pcs.md"


def section(title: str) -> list[Block]:
    """The blocks of a section of the page, in order."""
    return next(
        [*blocks(text)] for found, text in sections(PAGE.read_text(encoding="utf-8")) if found.endswith(title)
    )  # fmt: skip


def typed(block: Block) -> str:
    """The commands of a block, one a line."""
    return "\n".join(block.commands())


def where(block: Block) -> str:
    found = re.search(r'title="([^"]+)"', block.info)
    assert found is not None, block
    return found[1]


def install(pcs: tuple[Pc, Pc], folder: Path) -> None:
    """Section 1."""
    lab_a, lab_b = pcs
    on_a, on_b = section("Install the same versions")
    assert (where(on_a), where(on_b)) == ("on labA, in a checkout of HetSeq", "on labB")
    lab_a.has(checkout(folder / "checkout"), "checkout")
    lab_a.types(f"cd checkout\n{typed(on_a)}")
    lab_b.types(typed(on_b))
    assert lab_a.types("hetseq --version") == lab_b.types("hetseq --version")


def prepare(pcs: tuple[Pc, Pc]) -> None:
    """Sections 2 and 3."""
    lab_a, lab_b = pcs
    secret, look = section("Share a secret")
    assert where(look) == "on labA and on labB, at the same time"
    lab_a.types(typed(secret))
    for ended in [doctor.finish(timeout_s=PATIENCE_S) for doctor in [pc.starts(typed(look)) for pc in pcs]]:
        assert ended.code == 0, ended.out
    options, copy = section("Say what to train")
    lab_a.writes(where(options), "\n".join(options.lines) + "\n")
    lab_a.types(typed(copy))
    assert lab_b.read(where(options)) == lab_a.read(where(options))
