"""The recordings of the manual, of real runs: `hetseq demo`, and the guide "Two PCs".

    python bench/recording.py demo
    python bench/recording.py two-pcs

Each writes an animated SVG into docs/. Waiting is shortened, all else is as it was. The two PCs are those of the test
of that guide (tests/support/two_pcs.py), so namespaces are needed; its commands are taken from the page.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from terminal import Film, Pane, Terminal, drawn

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 96


def main(words: Sequence[str] | None = None) -> int:
    """Record, write, and say how large it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["demo", "two-pcs"])
    parser.add_argument("--output", type=Path, help="default: docs/WHAT.svg")
    arguments = parser.parse_args(words)
    output = arguments.output or ROOT / "docs" / f"{arguments.what}.svg"
    with tempfile.TemporaryDirectory() as folder:
        record = {"demo": demo, "two-pcs": two_pcs}[arguments.what]
        film, label = record(Path(folder))
    text = drawn(film, label, COLUMNS)
    output.write_text(text, encoding="utf-8")
    print(f"{output}: {len(film.frames)} frames of {film.frames[-1][0]:.0f} s, {len(text) / 1000:.0f} kB")
    return 0


def demo(folder: Path) -> tuple[Film, str]:
    """`hetseq demo`, from its first line to its last."""
    words = [sys.executable, "-m", "hetseq", "demo"]
    pane = Pane(29, typed="hetseq demo")
    film = Film([pane], str(folder))
    film.hold(1)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pane.terminal = Terminal(words, COLUMNS, pane.rows, environment=environment, folder=str(folder))
    try:
        film.play(lambda seen: "run directories" in seen, "the end of the demo", most_s=20)
        film.hold(0.5)
    finally:
        pane.terminal.close()
    return (
        film,
        "hetseq demo: two workers, one of them three times slower, train with equal and with fitting shares; one"
        " process repeats the run, and the curves are the same",
    )


def two_pcs(folder: Path) -> tuple[Film, str]:
    """labA trains, labB joins, loses its power and comes back, with `hetseq top` below."""
    sys.path.insert(0, str(ROOT))
    from tests.support import guide
    from tests.support.docs import Block
    from tests.support.two_pcs import Pc, kill_all
    from tests.support.two_pcs import two_pcs as pcs

    with pcs(folder) as (lab_a, lab_b):
        guide.install((lab_a, lab_b), folder)
        guide.prepare((lab_a, lab_b))
        on_a, on_b, *_ = guide.section("Start")
        top, *_ = guide.section("Watch")
        panes = [Pane(6, "labA"), Pane(4, "labB"), Pane(11, "labA, another terminal")]
        film, terminals = Film(panes, str(lab_a.home)), list[Terminal]()

        def types(pane: Pane, block: Block, pc: Pc) -> Terminal:
            pane.typed = guide.typed(block)
            pane.terminal = Terminal(pc.words(pane.typed), COLUMNS, pane.rows)
            terminals.append(pane.terminal)
            return pane.terminal

        try:
            film.hold(1)
            running = types(panes[0], on_a, lab_a)
            film.play(lambda seen: "step " in seen, "the first step", most_s=3)
            types(panes[2], top, lab_a)
            film.play(lambda seen: "labA/cpu" in seen, "the table", most_s=2)
            joined = types(panes[1], on_b, lab_b)
            film.play(lambda seen: "rank 1 on labB is new" in seen, "labB takes part", most_s=5)
            film.hold(5)
            lab_b.loses_power()
            kill_all(joined.pid)
            panes[1].typed, panes[1].terminal = "", None
            film.play(lambda seen: "rank 0 continues after step" in seen, "labB is missed", most_s=4)
            film.hold(3)
            lab_b.has_power_again()
            types(panes[1], on_b, lab_b)
            film.play(lambda seen: "rank 1 on labB is back" in seen, "labB is back", most_s=5)
            film.hold(5)
            running.press_ctrl_c()
            film.play(lambda seen: seen.count("the same command resumes from") == 2, "the end", most_s=3)
            film.hold(0.5)
        finally:
            for terminal in terminals:
                terminal.close()
    return film, (
        "Three terminals: labA trains alone, labB joins, is switched off and comes back; hetseq top shows the shares of"
        " both; Ctrl-C stops both with a checkpoint"
    )


if __name__ == "__main__":
    sys.exit(main())
