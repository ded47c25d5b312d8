"""README and manual are kept to the code: names, links, examples, and no command that nobody has run.

The commands themselves are run by tests/end_to_end/test_docs_commands.py.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import runpy
import shlex
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Mapping
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
import yaml

import hetseq
import hetseq.nebula
import hetseq.sagemaker
from hetseq.config import parse
from hetseq.config.sections import SECTIONS, flag
from hetseq.errors import ConfigError
from tests.manual import stale
from tests.support.docs import (
    HERE,
    ROOT,
    SHELLS,
    Block,
    anchors,
    blocks,
    content_of,
    file_of,
    links,
    neither_run_nor_excused,
    pages,
    program_of,
    shell_blocks,
)

SPIRALS = ROOT / "docs" / "examples" / "spirals.py"
DISCS = ROOT / "examples" / "discs.py"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_command_is_run_or_says_why_not(page: Path) -> None:
    assert neither_run_nor_excused(page.read_text(encoding="utf-8")) == []


def trainings(page: str) -> list[list[str]]:
    """What each `hetseq train` of a page that a test runs is given."""
    commands = [command for block in blocks(page) if block.language in SHELLS for command in runs_of(block)]
    words = [shlex.split(command.replace(HERE, "/here").rstrip().removesuffix("&")) for command in commands]
    return [some[2:] for some in words if some[:2] == ["hetseq", "train"]]


def runs_of(block: Block) -> list[str]:
    return [] if block.is_excused else block.commands()


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_training_of_a_page_is_understood(page: Path) -> None:
    """In CI for all pages; tests/end_to_end/test_docs_commands.py runs some of them there, and all of them nightly."""
    for words in trainings(page.read_text(encoding="utf-8")):
        if not any(word.startswith("runs/") and word.endswith("config.yaml") for word in words):  # of a run before it
            parse(words)


def test_a_training_that_is_not_understood_is_seen() -> None:
    (words,) = trainings("```bash\nhetseq train --batch-siez 3 --join file://$PWD/here &\nwait\n```")
    with pytest.raises(ConfigError, match="did you mean --batch-size"):
        parse(words)


#: flags that name what a command makes
MADE_BY = ("--save-dir", "--to", "--output")


def made_twice(pages: Mapping[str, str]) -> list[str]:
    """What the commands of two pages make under one name. The same trainings may: the second finds nothing to do."""
    makers: dict[tuple[str, str], dict[str, list[str]]] = {}
    for page, text in pages.items():
        for block in blocks(text):
            for command in runs_of(block) if block.language in SHELLS else []:
                words = [*takewhile("--".__ne__, shlex.split(command.rstrip().removesuffix("&")))]
                for of, name in pairwise(words):
                    if of in MADE_BY:
                        makers.setdefault((of, name), {}).setdefault(page, []).append(shlex.join(words))
    return [
        f"{name}: {', '.join(by)}"
        for (of, name), by in makers.items()
        if len(by) > 1 and (of != "--save-dir" or len({tuple(commands) for commands in by.values()}) > 1)
    ]


def test_a_reader_of_several_pages_is_not_refused_as_two_of_them_make_the_same_directory() -> None:
    assert made_twice({name_of(page): page.read_text(encoding="utf-8") for page in pages()}) == []


def test_two_pages_that_make_the_same_directory_are_seen() -> None:
    one = "```console\n$ hetseq train --cpu --save-dir runs/a\n$ hetseq train --save-dir runs/a\n```"
    assert made_twice({"one.md": one, "other.md": one.replace("runs/a", "runs/b")}) == []
    assert made_twice({"one.md": one, "other.md": one}) == []
    assert made_twice({"one.md": one, "other.md": one.replace("--cpu", "--seed 2")}) == ["runs/a: one.md, other.md"]
    export = "```bash\nhetseq checkpoints export runs/a --to digits\n```"
    assert made_twice({"one.md": export, "other.md": export}) == ["digits: one.md, other.md"]
    assert made_twice({"one.md": export, "other.md": export.replace("bash", 'bash title="on labA"')}) == []


def test_a_command_that_is_neither_is_seen() -> None:
    unknown = "```bash\ncurl example.org\n```"
    assert neither_run_nor_excused(unknown) == ["line 1: curl example.org"]
    assert neither_run_nor_excused(unknown.replace("bash", 'bash title="needs the network"')) == []
    assert neither_run_nor_excused("```bash\nhetseq train | tee log\n```") == ["line 1: hetseq train | tee log"]
    assert neither_run_nor_excused("```console\nhetseq train\n```") == ["line 1: a block without a command"]
    beside = "```bash\nhetseq train &\nhetseq train\nwait\n```"
    assert neither_run_nor_excused(beside) == []
    assert len(neither_run_nor_excused(beside.replace("wait\n", ""))) == 1


def test_commands_are_told_from_output_and_comments() -> None:
    lines = ("$ hetseq train \\", "    --cpu", "two workers", "$ python a.py")
    assert Block("console", "", lines, 1).commands() == ["hetseq train     --cpu", "python a.py"]
    assert Block("bash", "", ("# first", "hetseq train \\", "  --cpu", ""), 1).commands() == ["hetseq train   --cpu"]
    assert program_of("hetseq train &") == "hetseq"
    assert program_of("hetseq train & hetseq train") == ""
    assert program_of("hetseq train --optimizer-overrides \"{'eps': 1e-6}\"") == "hetseq"


def test_a_block_in_a_list_is_a_block() -> None:
    inside = "1. first:\n\n    ```console\n    $ hetseq train \\\n        --cpu\n    two workers\n    ```\n"
    (block,) = blocks(inside)
    assert (block.line, block.commands()) == (3, ["hetseq train     --cpu"])
    assert neither_run_nor_excused(inside.replace("hetseq", "curl")) == ["line 3: curl train     --cpu"]


def test_every_public_name_is_on_the_page_of_the_python_interface() -> None:
    shown = re.findall(
        r"^::: ([\w.]+)$", (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    public = [f"hetseq.{name}" for name in (*hetseq.__all__, "HetSeqTrainer") if name != "__version__"]
    public += [f"hetseq.nebula.{name}" for name in hetseq.nebula.__all__]
    public += [f"hetseq.sagemaker.{name}" for name in hetseq.sagemaker.__all__ if name != "FSDP"]  # a second name
    assert sorted(shown) == sorted(public)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for path, anchor in links(text):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(f"{path}#{anchor}" if anchor else path)
    return broken


def test_a_broken_link_is_seen() -> None:
    text = "[a](docs/index.md) [b](docs/nowhere.md) [c](docs/index.md#where-to-go) [d](docs/index.md#nowhere) `[e](f)`"
    assert broken_links(ROOT / "README.md", text) == ["docs/nowhere.md", "docs/index.md#nowhere"]


def test_every_public_name_is_in_the_manual() -> None:
    assert missing(hetseq.__all__, everything()) == []
    assert missing(["Task", "NoSuchName"], everything()) == ["NoSuchName"]


def everything() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in pages())


def missing(names: Iterable[str], text: str) -> list[str]:
    return [name for name in names if re.search(rf"`(hetseq\.)?{re.escape(name)}`", text) is None]


#: packages whose modules are described in their own docstring, or on a page of their own
DESCRIBED_THEMSELVES = (
    "checkpoint",
    "nebula",
    "sagemaker",
    "commands/doctor",
    "commands/selftest",
    "launch/environments",
    "monitor/report",
)


def test_every_module_is_in_the_house() -> None:
    page = (ROOT / "docs" / "design" / "house.md").read_text(encoding="utf-8")
    top = ROOT / "hetseq"
    modules = [path for path in top.iterdir() if path.suffix == ".py" and path.stem != "__init__"]
    packages = [path for path in top.iterdir() if (path / "__init__.py").is_file()]
    assert missing([path.stem for path in modules] + [f"{path.name}/" for path in packages], page) == []
    tables = dict(re.findall(r"^\| module of `([\w/]+)/` .*\n\|---.*\n((?:\|.*\n)+)", page, re.M))
    for folder in sorted({path.parent for path in top.rglob("*.py")} - {top}):
        name = folder.relative_to(top).as_posix()
        inside = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        listed = set(re.findall(r"^\| `(\w+)` \|", tables.get(name, ""), re.M))
        assert listed == (set() if name in DESCRIBED_THEMSELVES else inside), name


def test_the_words_are_few_and_each_has_one_meaning() -> None:
    page = (ROOT / "docs" / "design" / "words.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", page, re.M)[1:]
    assert 20 < len(words) <= 40
    assert len(set(words)) == len(words)


def test_the_options_that_may_differ_between_nodes_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "guides" / "multi-node.md").read_text(encoding="utf-8")
    begin = page.index("## What may differ between nodes")
    table = [line for line in page[begin : page.index("\n## ", begin + 1)].splitlines() if line.startswith("|")]
    fields = [field for section in SECTIONS for field in dataclasses.fields(section)]
    own = {flag(field.name) for field in fields if field.metadata.get("per_node")}
    others = {flag(other) for field in fields for other in field.metadata.get("also", ())}
    assert set(re.findall(r"`(--[\w-]+)`", "\n".join(table))) - others == own
    assert "--lr" not in own


def test_every_dependency_has_its_reason() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(r'^\s*"([A-Za-z][\w-]*)(?:[><=].*?)?",?$', project, re.M)
    lists += re.findall(r'= \["([\w-]+)>=', project)
    names = {name for name in lists if name not in ("E", "W", "F", "setuptools")} & pinned()
    assert {"torch", "rich", "h5py", "ruff"} <= names
    page = (ROOT / "docs" / "reference" / "dependencies.md").read_text(encoding="utf-8")
    assert [name for name in sorted(names) if re.search(rf"^\|.*\b{name}\b.*\|.*\|", page, re.M) is None] == []


def pinned() -> set[str]:
    files = [ROOT / "requirements.txt", ROOT / "requirements-dev.txt"]
    return {match for file in files for match in re.findall(r"^([\w-]+)==", file.read_text(), re.M)}


FOREIGN = re.compile(r"(?:pip3? install(?: -\S+)*|uvx|uv (?:add|pip install)|conda install) [\"']?hetseq\b(?![-_.]2)")


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_nobody_is_sent_to_the_package_index_where_the_name_is_that_of_2020(page: Path) -> None:
    assert FOREIGN.findall(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("line", "is_foreign"),
    [
        ("pip install hetseq", True),
        ("pip install -U 'hetseq[demo]'", True),
        ("uvx hetseq demo", True),
        ("pip install ./hetseq-2.0.0-py3-none-any.whl", False),
        ("pip install -e '.[demo]'", False),
    ],
)
def test_an_install_from_the_package_index_is_seen(line: str, is_foreign: bool) -> None:
    assert bool(FOREIGN.search(line)) is is_foreign


def test_the_citation_is_of_this_version_and_names_the_paper_of_2020() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == hetseq.__version__
    (paper,) = cited["references"]
    assert [author["family-names"] for author in paper["authors"]] == ["Ding", "Botzer", "Weninger"]


def test_continuous_integration_is_the_script_of_the_repository() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    ran = [step["run"] for step in workflow["jobs"]["ci"]["steps"] if "run" in step]
    assert ran == [".ci/run"]
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        fields = yaml.safe_load(form.read_text(encoding="utf-8"))["body"]
        assert len({field["id"] for field in fields}) == len(fields)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_python_on_a_page_is_python(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "python":
            compile("\n".join(block.lines), f"{name_of(page)}, line {block.line}", "exec", ast.PyCF_ONLY_AST)


@pytest.mark.parametrize("page", [page for page in pages() if page.is_relative_to(ROOT / "docs")], ids=name_of)
def test_a_file_that_a_page_shows_is_on_the_page_as_it_is(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "--8<--" not in text, "a code host shows the line, not the file"
    differing = [file_of(block) for block in blocks(text) if file_of(block) and list(block.lines) != content_of(block)]
    assert differing == [], "run `make docs`"


def test_the_pages_that_follow_from_the_code_are_up_to_date() -> None:
    assert [name_of(page) for page in stale()] == [], "run `make docs`"


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_a_reader_is_not_told_how_a_page_is_made(page: Path) -> None:
    shown = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.findall(r"(?i)generated from|do not edit", shown) == []


def test_a_block_shows_a_whole_file_or_one_class_of_it() -> None:
    whole = Block("python", ' title="docs/examples/readings.py"', (), 1)
    (page,) = blocks('```python title="docs/examples/readings.py: Series"\n```')
    assert content_of(whole) == (ROOT / "docs/examples/readings.py").read_text(encoding="utf-8").splitlines()
    assert content_of(page)[0].startswith("class Series(")
    assert content_of(page)[-1].startswith("    ")
    assert file_of(Block("python", ' title="your own file"', (), 1)) is None


def test_the_manual_shows_the_files_that_are_tested() -> None:
    shown = {file_of(block) for page in pages() for block in blocks(page.read_text(encoding="utf-8"))} - {None}
    there = {name_of(path) for path in (ROOT / "docs" / "examples").rglob("*") if path.suffix in (".py", ".yaml")}
    only_used = {"docs/examples/compare.py", "docs/examples/kill_worker.py"}
    assert shown == there - only_used


def test_readme_shows_its_task_as_it_is() -> None:
    (block,) = (one for one in blocks((ROOT / "README.md").read_text(encoding="utf-8")) if one.language == "python")
    code = (ROOT / "docs" / "examples" / "circle.py").read_text(encoding="utf-8")
    assert code.endswith("\n".join(block.lines) + "\n")
    assert len([line for line in block.lines if line.strip()]) <= 15


@pytest.mark.parametrize("file", ["docs/examples/circle.py", "docs/examples/early_stopping.py", SPIRALS, DISCS])
def test_an_example_does_not_validate_on_its_training_samples(file: str | Path) -> None:
    made = runpy.run_path(str(ROOT / file)).values()
    (task,) = (one for one in made if isinstance(one, type) and issubclass(one, hetseq.Task) and one != hetseq.Task)
    train, valid = (task.__new__(task).load_dataset(split) for split in ("train", "valid"))
    assert str(train[0]) != str(valid[0])


def test_each_example_has_its_command_in_its_file_and_on_their_page() -> None:
    folder = ROOT / "examples"
    page = (folder / "README.md").read_text(encoding="utf-8")
    shown = [" ".join(line.split()) for block in shell_blocks(folder / "README.md") for line in block.commands()]
    for path in sorted(folder.glob("*.py")):
        assert f"]({path.name})" in page
        told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        indented = re.search(r"\n\n((?: {4}.*(?:\n|$))+)", told)
        assert indented is not None, path.name
        assert " ".join(indented[1].replace("\\\n", " ").split()) in shown, path.name


def code_lines(path: Path) -> int:
    """Lines with code on them: no comments, docstrings or blanks."""
    quiet = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in (*quiet, tokenize.ENCODING)]
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None
    }
    for token in tokens:
        if not (token.type == tokenize.STRING and token.start[0] in docstrings):
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def test_thirty_lines_are_thirty_lines(tmp_path: Path) -> None:
    assert max(code_lines(SPIRALS), code_lines(DISCS)) <= 30
    (tmp_path / "four.py").write_text('"""Doc\nstring."""\n\n# comment\nx = (\n    1,\n)  # three\n\ny = "text"\n')
    assert code_lines(tmp_path / "four.py") == 4


def compared(folder: Path, *losses: float, limit: str = "1e-12") -> subprocess.CompletedProcess[str]:
    """What compare.py says of a run of two steps with losses 0.5 and 0.25, and a run with these losses."""
    for name, values in (("one", (0.5, 0.25)), ("other", losses)):
        (folder / name).mkdir(exist_ok=True)
        rows = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(values, 1)]
        rows.append(json.dumps({"step": len(values), "valid_loss": 9.0}))
        (folder / name / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    words = [sys.executable, str(ROOT / "docs" / "examples" / "compare.py"), "one", "other", limit]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)


def test_the_comparison_of_curves_tells_equal_from_different(tmp_path: Path) -> None:
    assert compared(tmp_path, 0.5, 0.25, limit="0").returncode == 0
    assert "1.0e-13 nats over 2 steps" in compared(tmp_path, 0.5, 0.25 + 1e-13).stdout
    assert compared(tmp_path, 0.5, 0.25 + 1e-9).returncode == 1
    assert compared(tmp_path, 0.5).returncode == 1
