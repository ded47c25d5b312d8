"""The tour of the manual, as a new user takes it: `python -m tests.tour [--write]`, also `make tour`.

Types the commands of docs/start/tour.md section by section, each a process that begins with its imports, in a folder of
their own, and prints a table: seconds of the commands, and minutes with reading them. Ends with 1 where a command fails
or a section takes longer than five minutes. With --write, what the commands printed is put under them on the page.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from hetseq.monitor.tables import table
from tests.support.docs import ROOT, SHELLS, Block, blocks
from tests.support.reader import Reader

PAGE = ROOT / "docs" / "start" / "tour.md"
MOST_MINUTES = 5.0
WORDS_PER_MINUTE = 200  # of somebody who reads with care
_WIDEST = 150  # characters of a line on the page


def sections(page: str) -> Iterator[tuple[str, str]]:
    """Title and text of each section."""
    for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        yield title, text


def words_of(text: str) -> int:
    """What there is to read in a section, its files included, but not what commands print."""
    found = re.sub(r"```.*?```", "", text, flags=re.DOTALL).split()
    for block in blocks(text):
        found += " ".join(block.commands() if block.language in SHELLS else block.lines).split()
    return len(found)


def shown(printed: str, checkout: Path) -> list[str]:
    """What is kept of a command's output: of lines that are alike the first and the last; no folder of today."""
    lines = [line.rstrip() for line in printed.replace(str(checkout), "~/hetseq").splitlines() if line.strip()]
    kinds = [re.sub(r"\W+|\d+", " ", line).split()[:2] for line in lines]
    kept: list[str] = []
    for at, (line, kind) in enumerate(zip(lines, kinds)):
        if kind in kinds[:at] and kind in kinds[at + 1 :] and line[0] not in " >":  # which are rows of a table
            line = "..."
        if line != "..." or kept[-1] != line:
            kept.append(line if len(line) <= _WIDEST else line[: _WIDEST - 3] + "...")
    return kept


def with_output(block: Block, printed: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a console block, each command as it stands there and under it what it printed."""
    lines: list[str] = []
    outputs, goes_on = iter(printed), False
    for line in block.lines:
        if goes_on or line.startswith("$ "):
            lines.append(line)
            goes_on = line.endswith("\\")
            if not goes_on:
                lines += next(outputs)
    return lines


def take(page: str, reader: Reader) -> tuple[str, list[tuple[str, int, float]]]:
    """Type all commands; gives the page with their output, and title, words and seconds of each section."""
    taken = []
    for title, text in sections(page):
        begin = time.monotonic()
        for block in blocks(text):
            if block.language not in SHELLS or block.is_excused:
                continue
            printed = [shown(reader.types(command, is_cold=True), reader.checkout) for command in block.commands()]
            page = page.replace("\n".join(block.lines), "\n".join(with_output(block, printed)), 1)
        taken.append((title, words_of(text), time.monotonic() - begin))
        print(f"{title}: {taken[-1][2]:.0f} s", file=sys.stderr, flush=True)
    return page, taken


def main(words: Sequence[str]) -> int:
    """Take the tour; gives the exit code."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        page, taken = take(PAGE.read_text(encoding="utf-8"), Reader(Path(folder), closing))
    minutes = [count / WORDS_PER_MINUTE + seconds / 60 for _, count, seconds in taken]
    rows = [("section", "words", "commands", "reading and commands")]
    rows += [(title, str(n), f"{s:.0f} s", f"{m:.1f} min") for (title, n, s), m in zip(taken, minutes)]
    print("\n".join(table(rows, left=[0])))
    if "--write" in words:
        PAGE.write_text(page, encoding="utf-8")
    return int(max(minutes) > MOST_MINUTES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
