"""What the page of the tour shows of the commands it has typed."""

from __future__ import annotations

from pathlib import Path

from tests import tour
from tests.support.docs import blocks

SECTION = """Two words.

```console
$ hetseq train \\
    --cpu &
$ wait
left from the last time
```
"""


def test_lines_that_are_alike_are_the_first_and_the_last() -> None:
    lines = [f"valid epoch {n} loss {n / 3}" for n in range(4)]
    printed = "\n".join([*lines, "rank 1 was killed", "saved /tmp/x/runs/a", "", "  1 cpu", "  2 cpu", "  3 cpu"])
    expected = [
        lines[0],
        "...",
        lines[3],
        "rank 1 was killed",
        "saved ~/hetseq/runs/a",
        "  1 cpu",
        "  2 cpu",
        "  3 cpu",
    ]
    assert tour.shown(printed, Path("/tmp/x")) == expected


def test_output_stands_under_its_command() -> None:
    (block,) = blocks(SECTION)
    assert tour.with_output(block, [[], ["done", "well"]]) == [
        "$ hetseq train \\",
        "    --cpu &",
        "$ wait",
        "done",
        "well",
    ]


def test_what_commands_print_is_not_counted_as_reading() -> None:
    assert tour.words_of(SECTION) == len(["Two", "words.", "hetseq", "train", "--cpu", "&", "wait"])


def test_each_section_has_a_title_and_commands() -> None:
    found = list(tour.sections(tour.PAGE.read_text(encoding="utf-8")))
    assert len(found) >= 6
    assert all(title and "$ hetseq " in text for title, text in found)
