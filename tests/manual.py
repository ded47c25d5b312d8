"""The parts of the manual that follow from the code: `python -m tests.manual [--write]`, also `make docs`.

These are a page for each command below docs/reference/cli/, from its `Command`, their list docs/reference/cli.md, and
on every page the blocks whose title is a file of `docs/examples/`. Without --write it names the pages that are not up
to date and ends with 1; with it they are written. docs/reference/options.md has a rule of its own in the Makefile.
"""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hetseq.cli import COMMANDS
from hetseq.config.command_line import Argument, Command
from tests.support.docs import ROOT, Block, blocks, content_of, file_of, pages

REFERENCE = ROOT / "docs" / "reference"
_WIDEST = 96  # characters of a command on a page
_GENERATED = "<!-- from the code by `make docs`; edit the `Command` in hetseq/ instead -->"
#: command -> the page that shows its use
_GUIDES = {
    "evaluate": ("Evaluating", "guides/running.md#evaluating"),
    "run": ("A loop of your own", "start/own-loop.md"),
    "predict": ("Predictions", "guides/running.md#predictions"),
    "plan": ("Plan and simulate", "guides/plan.md"),
    "simulate": ("Plan and simulate", "guides/plan.md"),
    "checkpoints": ("Checkpoints", "guides/checkpoints.md"),
    "report": ("The report", "guides/monitor.md#the-report"),
    "doctor": ("hetseq doctor", "guides/doctor.md"),
    "top": ("Monitor a run", "guides/monitor.md"),
    "drop": ("Leaving and coming", "guides/multi-node.md#elastic-training-leaving-and-coming"),
    "script": ("Slurm", "guides/slurm.md"),
    "ssh": ("One command for all hosts", "guides/ssh.md"),
    "selftest": ("Is it exact?", "start/own-model.md#is-it-exact"),
    "completion": ("Completion in the shell", "guides/running.md#completion-in-the-shell"),
    "demo": ("A tour", "start/tour.md#a-demo"),
}


def commands_of(name: str) -> list[Command]:
    """The command lines of `hetseq NAME`: its own first, then one for each action."""
    module = importlib.import_module(COMMANDS[name][0].partition(":")[0])
    values = [value for value in vars(module).values() if isinstance(value, (Command, Mapping))]
    found = [one for value in values for one in ([value] if isinstance(value, Command) else value.values())]
    own = {one.name: one for one in found if isinstance(one, Command) and one.name.split()[0] == name}
    return sorted(own.values(), key=lambda one: one.name != name)


def page_of(name: str) -> str:
    """The page of one command."""
    lines = [_GENERATED, "", f"# hetseq {name}", ""]
    for command in commands_of(name):
        lines += [] if command.name == name else [f"## hetseq {command.name}", ""]
        lines += _section(command)
    title, guide = _GUIDES.get(name, ("Command line", "reference/cli.md"))
    return "\n".join([*lines, f"See [{title}](../../{guide})."]) + "\n"


def _section(command: Command) -> Iterator[str]:
    yield from (command.about, "", "```text")
    yield from (f"hetseq {command.name} {form}".rstrip() for form in command.usage)
    yield from ("```", "")
    if command.words:
        yield from ("| argument | meaning |", "|---|---|")
        for word in command.words:
            spelt = word.name if isinstance(word, Argument) else f"{word.flag} {word.value}".rstrip()
            yield f"| `{spelt}` | {_cell(word.help)} |"
        yield ""
    for note in command.notes:
        yield from (_plain(note), "")
    yield from ('```bash title="for example"', *map(_folded, command.examples), "```", "")


def list_of_commands() -> str:
    """The page that lists the commands."""
    lines = [
        _GENERATED,
        "",
        "# Command line",
        "",
        "Each command has a page, and `hetseq COMMAND --help` says the same.",
        "",
    ]
    lines += [
        "| command | purpose |",
        "|---|---|",
        "| [`hetseq train`](options.md) | train a task; the page lists every option |",
    ]
    lines += [
        f"| [`hetseq {name}`](cli/{name}.md) | {_cell(about)} |"
        for name, (_, about) in COMMANDS.items()
        if name != "train"
    ]
    lines += [
        "",
        "`hetseq --version` prints the versions of HetSeq, torch and Python.",
        "[Exit codes](errors.md#exit-codes) are the same for all.",
    ]
    return "\n".join(lines) + "\n"


def _folded(example: str) -> str:
    """A command of several lines where it is longer than one."""
    return " \\\n    ".join(textwrap.wrap(example, _WIDEST, break_long_words=False, break_on_hyphens=False))


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    return re.sub("(`[^`]*`)|<", lambda found: found[1] or "&lt;", " ".join(text.split()))


def with_files(page: str) -> str:
    """A page with the present text of each file that it shows."""
    lines = page.splitlines()
    for block in reversed([*blocks(page)]):
        if file_of(block) is not None:
            lines[block.line : block.line + len(block.lines)] = _indented(block, lines[block.line - 1])
    return "\n".join(lines) + "\n"


def _indented(block: Block, fence: str) -> list[str]:
    indent = fence[: len(fence) - len(fence.lstrip())]
    return [indent + line if line else "" for line in content_of(block)]


def generated() -> dict[Path, str]:
    """Every page that follows from the code, wholly or in part, and its text."""
    made = {REFERENCE / "cli" / f"{name}.md": page_of(name) for name in COMMANDS if name != "train"}
    made[REFERENCE / "cli.md"] = list_of_commands()
    shown = [page for page in pages() if page.is_relative_to(ROOT / "docs") and page not in made]
    return made | {page: with_files(page.read_text(encoding="utf-8")) for page in shown}


def stale() -> dict[Path, str]:
    """The pages that are not up to date, and their text if they were."""
    return {
        path: text
        for path, text in generated().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }


def main(words: Sequence[str]) -> int:
    """Name the pages that are not up to date, or write them; gives the exit code."""
    found = stale()
    for path, text in found.items():
        print(path.relative_to(ROOT))
        if "--write" in words:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return int(bool(found) and "--write" not in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
