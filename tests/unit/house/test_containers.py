"""The recipes of `containers/`, which nothing here builds: they are read as their builders read them."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.support.docs import ROOT

FOLDER = ROOT / "containers"
#: what the build of HetSeq needs; a wheel is made of it in tests/end_to_end/test_wheel.py
SOURCE = {"hetseq", "pyproject.toml", "setup.py", "README.md", "LICENSE"}
LINKED = {"tasks", "preprocessing"}  # hetseq/ has links to them, which COPY keeps and %files follows
LISTS = {"requirements.txt", "requirements-dev.txt"}


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their words, without comments; a line may be continued."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in whole.splitlines())]


def sections(text: str) -> dict[str, list[str]]:
    """The sections of a definition file with their lines; its head is the section ''."""
    found: dict[str, list[str]] = {"": []}
    here = ""
    for line in text.splitlines():
        if line.startswith("%"):
            here = line.strip()
            assert here not in found
            found[here] = []
        elif line.strip() and not line.lstrip().startswith("#"):
            found[here].append(line.strip())
    return found


def dockerfile() -> list[tuple[str, str]]:
    return instructions((FOLDER / "Dockerfile").read_text())


def definition() -> dict[str, list[str]]:
    return sections((FOLDER / "hetseq.def").read_text())


def assert_shell(script: str) -> None:
    done = subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_the_dockerfile_has_known_instructions_and_its_shell_is_shell() -> None:
    known = {"ARG", "FROM", "WORKDIR", "RUN", "ENV", "COPY", "USER", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in dockerfile()} <= known
    for name, rest in dockerfile():
        if name == "RUN":
            assert_shell(rest)


def test_the_images_are_small_ones_of_one_version_and_nothing_runs_as_root() -> None:
    bases = [rest.split()[0] for name, rest in dockerfile() if name == "FROM"]
    assert set(bases) == {"python:${PYTHON}-slim-bookworm"}
    assert definition()[""] == ["Bootstrap: docker", "From: python:3.11-slim-bookworm"]
    last = [name for name, _ in dockerfile()]
    assert last.index("USER") > max(at for at, name in enumerate(last) if name == "RUN")
    assert dict(dockerfile())["USER"] == "1000:1000"
    pip = [rest for name, rest in dockerfile() if name == "RUN" and "pip install" in rest]
    assert all(rest.count("pip install") == rest.count("pip install --no-cache-dir") for rest in pip)


def test_both_copy_what_the_build_needs_and_no_more() -> None:
    copied = [rest.split()[:-1] for name, rest in dockerfile() if name == "COPY" and "--from" not in rest]
    assert {file for files in copied for file in files} == SOURCE | LINKED | LISTS
    files = [line.split()[0] for line in definition()["%files"]]
    assert set(files) == SOURCE | LISTS
    assert all((ROOT / file).exists() for file in [*files, *LINKED])
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    assert {line[1:] for line in ignored if line.startswith("!")} == SOURCE | LINKED | LISTS


def test_torch_comes_from_the_index_of_the_argument_which_the_manual_has() -> None:
    page = next(path for path in (ROOT / "docs").rglob("install.md")).read_text()
    assert ("ARG", "BUILD=cu130") in dockerfile()
    assert definition()["%arguments"] == ["build=cu130"]
    for text, place in (("Dockerfile", "${BUILD}"), ("hetseq.def", "{{ build }}")):
        assert f"https://download.pytorch.org/whl/{place}" in (FOLDER / text).read_text()
    for build in ("cu130", "cu126", "cpu"):
        assert f"https://download.pytorch.org/whl/{build}" in page
    assert "containers/Dockerfile" in page
    assert "containers/hetseq.def" in page


def test_the_definition_has_known_sections_and_its_shell_is_shell() -> None:
    found = definition()
    assert set(found) == {"", "%arguments", "%files", "%post", "%environment", "%runscript", "%test", "%help"}
    for name in ("%post", "%environment", "%runscript", "%test"):
        assert_shell("\n".join(found[name]))
    assert found["%post"][0] == "set -e"


@pytest.mark.parametrize("script", ["pip install 'x", "if true; then"])
def test_shell_that_is_none_is_seen(script: str) -> None:
    with pytest.raises(AssertionError):
        assert_shell(script)


def test_a_continued_line_is_one_instruction() -> None:
    assert instructions("# a\nRUN one \\\n    && two\nUSER x\n") == [("RUN", "one && two"), ("USER", "x")]
