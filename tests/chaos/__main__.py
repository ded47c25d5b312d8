"""The chaos table: faults that runs survived, recovery times, and the bars.

    python -m tests.chaos [--kills 300] [--seed 0] [--only SECTION ...] [--case NAME] [--keep FOLDER]
    python -m tests.chaos --soak SECONDS

kills       runs of 3 to 5 workers with unequal shares, in which workers are killed at random instants, also two at once
phases      a kill in every phase of a step and of a recovery (`test_kills.PHASES`)
kinds       processes that stop, hang, crash, leave, and writers that are killed (`test_kills.KINDS`)
detection   kills and stops one by one: seconds until the others know, continue, and are complete again
faults      the 22 kinds of fault of the failure model, each by the tests that are marked with it (`fault_kinds`)
security    strangers, floods, orphans, open files and secrets, by the tests that are marked with them

Each run is compared with an undisturbed one. Nothing is retried: a failure is printed with the command that repeats
it, and the failed run's files are copied to --keep. Ends with 1 if a bar is missed. With --soak only kills are made,
with new seeds for that many seconds, and the table shows the growth of the launcher's process.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hetseq.testing import Faults
from tests.chaos import fault_kinds, table
from tests.chaos.fault_kinds import FAULTS, FIGURES, Shown, read_shown
from tests.chaos.ground import Ground
from tests.chaos.killers import Killer, OneByOne
from tests.chaos.runs import options_of
from tests.chaos.table import Line, Run
from tests.chaos.test_kills import KINDS, PHASES
from tests.support.commands import ROOT

KILLS_OF_A_RUN = 10
ONE_BY_ONE = 8  # kills, in a run of so many steps
LONG_STEPS = 300
DEADLINE_S, DEFAULT_DEADLINE_S = 2.0, 5.0
#: ranks that fall silent, and how long the others wait for them; the last one uses the default
STOPS = {
    "rank zero stops before the commit": (Faults().stop(rank=0, seconds=math.inf).at(step=8, phase="commit"), 2.0),
    "rank 1 stops in a sum": (Faults().stop(rank=1, seconds=math.inf).at(step=8, phase="reduce"), 2.0),
    "rank 2 stops after the commit": (Faults().stop(rank=2, seconds=math.inf).at(step=8, phase="optimizer"), 2.0),
    "rank 1 stops, no --step-deadline": (Faults().stop(rank=1, seconds=math.inf).at(step=8, phase="reduce"), None),
}


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the command in words."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").partition("\n")[0])
    sections = [*OF_RUNS, *OF_TESTS]
    parser.add_argument("--kills", type=int, default=300, help="of the section `kills`; default 300")
    parser.add_argument("--seed", type=int, default=0, help="of its first run; the next run has the next one")
    parser.add_argument("--only", nargs="+", choices=sections, metavar="SECTION", help=f"of {', '.join(sections)}")
    parser.add_argument("--case", help="this case of `phases`, `kinds`, `detection`, `faults` or `security` alone")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="only kills, for this long")
    parser.add_argument("--keep", type=Path, help="where runs that fail are copied to")
    arguments = parser.parse_args(words)
    if arguments.kills < 1 or (arguments.soak is not None and arguments.soak <= 0):
        parser.error("--kills: expected at least 1; --soak: more than 0")
    if arguments.soak and arguments.only not in (None, ["kills"]):
        parser.error("--soak makes kills alone; leave --only out")
    arguments.only = ["kills"] if arguments.soak else arguments.only or sections
    known = {name for section in arguments.only for name in CASES.get(section, ())}
    if arguments.case is not None and arguments.case not in known:
        parser.error(f"--case {arguments.case!r}: the cases of {', '.join(arguments.only)} are {sorted(known)}")
    arguments.keep = arguments.keep or Path(tempfile.gettempdir(), "hetseq-chaos-failures")
    return arguments


def main() -> int:
    """Run, print, say whether all bars hold."""
    arguments = parse()
    lines, failures = [], []
    for one_part in (runs_among_faults, marked_tests):
        for title, found, failed in one_part(arguments):
            lines += found
            failures += failed
            print(f"\n{title}\n\n{table.text(found)}", flush=True)
    if failures:
        print("\nFailed\n\n" + "\n".join(failures))
    return 1 if failures or any(line.holds is False for line in lines) else 0


Part = tuple[str, list[Line], list[str]]  # a title, a table, and each failure with the command that repeats it


# ---------------------------------------------------------------------------------------------------- sections of runs


def runs_among_faults(arguments: argparse.Namespace) -> Iterator[Part]:
    """One table for all sections that make runs."""
    sections = [section for section in arguments.only if section in OF_RUNS and has_cases(section, arguments.case)]
    if not sections:
        return
    with tempfile.TemporaryDirectory(prefix="hetseq-chaos-") as name:
        ground = Ground(Path(name), arguments.keep)
        try:
            runs = [run for section in sections for run in OF_RUNS[section](ground, arguments)]
        finally:
            ground.close()
    lines = table.table_of(runs)
    if arguments.soak and len(ground.samples) > 1:
        lines += table.grown(ground.samples)
    failed = [
        f"{run.section}, {run.name}: {run.wrong.splitlines()[0]}\n  again: {run.again}" for run in runs if run.wrong
    ]
    yield f"Runs among faults: {', '.join(sections)}", lines, failed


def kills(ground: Ground, arguments: argparse.Namespace) -> Iterator[Run]:
    """As many kills as asked for, or for as long."""
    seed, done, began_s = arguments.seed, 0, time.monotonic()
    while time.monotonic() - began_s < arguments.soak if arguments.soak else done < arguments.kills:
        options = options_of(seed)
        again = f"python -m tests.chaos --only kills --seed {seed} --kills {KILLS_OF_A_RUN}"
        run = Run("kills", f"seed {seed}", again, options["ranks"])
        yield ground.run(run, killer=Killer(seed, KILLS_OF_A_RUN), **options)
        done += max(1, len(run.kills))  # a run may end before its last one
        seed += 1


def phases(ground: Ground, arguments: argparse.Namespace) -> Iterator[Run]:
    """The schedules of kills."""
    return schedules(ground, arguments, "phases", PHASES, ranks=5)


def kinds(ground: Ground, arguments: argparse.Namespace) -> Iterator[Run]:
    """The schedules of other faults."""
    return schedules(ground, arguments, "kinds", KINDS, ranks=3, step_deadline=DEADLINE_S)


def schedules(
    ground: Ground, arguments: argparse.Namespace, section: str, cases: dict[str, Faults], **options: Any
) -> Iterator[Run]:
    """A run for each schedule."""
    for name, faults in cases.items():
        if arguments.case in (None, name):
            run = Run(section, name, repeated(section, name), options["ranks"])
            yield ground.run(run, faults=faults, **options)


def detection(ground: Ground, arguments: argparse.Namespace) -> Iterator[Run]:
    """Kills and stops that have time to be noticed."""
    for name, ranks in KILLED_IN_TURN.items():
        if arguments.case in (None, name):
            killer = OneByOne(arguments.seed, ONE_BY_ONE, ranks=ranks)
            run = Run("detection", name, f"{repeated('detection', name)} --seed {arguments.seed}", ranks)
            yield ground.run(run, killer=killer, ranks=ranks, steps=LONG_STEPS)
    for name, (faults, deadline_s) in STOPS.items():
        if arguments.case in (None, name):
            run = Run("detection", name, repeated("detection", name), 3, deadline_s=deadline_s or DEFAULT_DEADLINE_S)
            options = {} if deadline_s is None else {"step_deadline": deadline_s}
            yield ground.run(run, faults=faults, ranks=3, **options)


# ------------------------------------------------------------------------------------------ sections of marked tests


def marked_tests(arguments: argparse.Namespace) -> Iterator[Part]:
    """A table for each section whose tests are marked; pytest runs once for all of them."""
    sections = [section for section in arguments.only if section in OF_TESTS and has_cases(section, arguments.case)]
    if not sections:
        return
    shown, story = run_marked([OF_TESTS[section][0] for section in sections], arguments.case)
    for section in sections:
        names = [name for name in CASES[section] if arguments.case in (None, name)]
        failed = [
            f"{', '.join(each.shows)}: {each.test}\n  again: {each.again}"
            for each in shown
            if each.outcome == "failed" and set(names) & set(each.shows)
        ]
        yield OF_TESTS[section][1], TABLES[section](shown, names), failed
    if story:
        yield "The tests did not come to their end", [Line("pytest", "ends", story, False)], []


def run_marked(markers: Sequence[str], case: str | None) -> tuple[list[Shown], str]:
    """The tests with these markers, and pytest's output if it did not complete."""
    with tempfile.TemporaryDirectory(prefix="hetseq-chaos-") as name:
        report = Path(name, "shown.jsonl")
        words = [sys.executable, "-m", "pytest", "-q", "-m", " or ".join(markers), "-p", "tests.chaos.reporter"]
        words += ["--shown", str(report), "--basetemp", str(Path(name, "tests"))]
        words += [] if case is None else ["--shows", case]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        code = subprocess.run(words, cwd=ROOT, env=environment, stdout=sys.stderr, check=False).returncode
        shown = read_shown(report.read_text().splitlines()) if report.exists() else []
    has_come_through = code in (0, 1) or (code == 5 and not shown)  # 1: tests failed; 5: there are none
    return shown, "" if has_come_through else f"exit code {code}"


# ---------------------------------------------------------------------------------------------------------- the lists

KILLED_IN_TURN = {"3 ranks": 3, "4 ranks": 4}
OF_RUNS: dict[str, Callable[[Ground, argparse.Namespace], Iterator[Run]]] = {
    "kills": kills, "phases": phases, "kinds": kinds, "detection": detection,
}  # fmt: skip
#: the marker, and the title of the table
OF_TESTS = {"faults": ("fault", "Kinds of fault"), "security": ("figure", "Strangers, and what is left")}
TABLES = {"faults": fault_kinds.of_faults, "security": fault_kinds.of_figures}
CASES: dict[str, Sequence[str]] = {
    "phases": list(PHASES), "kinds": list(KINDS), "detection": [*KILLED_IN_TURN, *STOPS],
    "faults": list(FAULTS), "security": list(FIGURES),
}  # fmt: skip


def has_cases(section: str, case: str | None) -> bool:
    """Whether a section has a case for `--case`."""
    return case is None or case in CASES.get(section, ())


def repeated(section: str, case: str) -> str:
    """The words that repeat a case."""
    return f"python -m tests.chaos --only {section} --case {shlex.quote(case)}"


if __name__ == "__main__":
    sys.exit(main())
