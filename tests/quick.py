"""An answer to one change in three minutes: `make quick`, or `python -m tests.quick [--since COMMIT] [--seconds 150]`.

Runs ruff, the contract of the packages and mypy, then the unmarked tests whose imports reach a file that has changed
since COMMIT, nearest first. It stops when the time is over and lists the tests that are left; `make test-all` runs all.
COMMIT is the last commit where the working tree has changes, else the one before it.

The distance of a test is the number of imports from the test to a changed file. A string that is the name of a module
counts as an import of it, because the registry, the forkserver and child processes import by name. Tests of whole
commands are left to `make test-all` unless their own file has changed.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("hetseq", "tasks", "preprocessing", "bench", "tests", "examples")
UNMARKED = "not slow and not gpu and not netns and not alone and not nightly"
CHECKS = (
    ("ruff format", (sys.executable, "-m", "ruff", "format", "--check", "-q", ".")),
    ("ruff check", (sys.executable, "-m", "ruff", "check", "-q", ".")),
    ("packages", (str(Path(sys.executable).parent / "lint-imports"), "--no-logo")),
    ("mypy", (sys.executable, "-m", "mypy", "--no-error-summary")),
)
LONGEST_TEST_S = 30  # unmarked tests take a second each
MOST_FILES = 60  # more are never run in the time, and would only be collected


def main(words: Sequence[str] | None = None) -> int:
    """Check and test; 1 where something failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--since", metavar="COMMIT", help="what counts as changed is all since this commit")
    parser.add_argument("--seconds", type=float, default=150.0, help="for checks and tests together (default: 150)")
    arguments = parser.parse_args(words)
    deadline_s = time.monotonic() + arguments.seconds
    changed = changed_since(arguments.since)
    if not changed:
        print("nothing has changed")
        return 0
    print(f"changed: {', '.join(changed[:6])}{' ...' if len(changed) > 6 else ''}")
    failed = [name for name, command in CHECKS if not passes(name, command)]
    tests = nearest(changed, read_tree())
    code = run(tests[:MOST_FILES], deadline_s) if tests else 0
    left = tests[MOST_FILES:]
    if left:
        print(
            f"{len(left)} more files of tests reach the change: {', '.join(left[:8])}{' ...' if len(left) > 8 else ''}"
        )
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed) or code != 0)


def changed_since(commit: str | None) -> list[str]:
    """The paths that differ from a commit, new files included; the working tree's where it has changes."""

    def listed(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    new = listed("ls-files", "--others", "--exclude-standard")
    own = listed("diff", "--name-only", "HEAD") + new
    if commit is None:
        return sorted({*own} or {*listed("diff", "--name-only", "HEAD~1", "HEAD")})
    return sorted({*listed("diff", "--name-only", commit), *new})


def passes(name: str, command: Sequence[str]) -> bool:
    """Whether a check passes; what it printed, where it does not."""
    began_s = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(f"{'ok    ' if done.returncode == 0 else 'FAILED'} {name} ({time.monotonic() - began_s:.0f} s)", flush=True)
    if done.returncode != 0:
        print(done.stdout + done.stderr)
    return done.returncode == 0


# Which tests, and in which order.


def read_tree(root: Path = ROOT) -> dict[str, str]:
    """The Python files of the project: path -> source."""
    paths = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def module_of(path: str) -> str:
    """The name under which a file is imported; scripts of bench/ import each other without folder."""
    parts = path.removesuffix(".py").split("/")
    parts = {"bench": parts[1:], "tasks": ["hetseq", *parts], "preprocessing": ["hetseq", *parts]}.get(parts[0], parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, package: str, known: Collection[str]) -> Iterator[str]:
    """The known modules that a source imports, or names in a string; those for type checkers alone are left out."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
        return
    names: list[str] = []
    if isinstance(tree, ast.Import):
        names = [alias.name for alias in tree.names]
    elif isinstance(tree, ast.ImportFrom):
        base = package.split(".")[: len(package.split(".")) - tree.level + 1] if tree.level else []
        module = ".".join([*base, *([tree.module] if tree.module else [])])
        names = [module, *(f"{module}.{alias.name}" for alias in tree.names)]
    elif isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        names = [tree.value.partition(":")[0]]
        names += [names[0].rpartition(".")[0]]  # a name within a module, as monkeypatch has it
    yield from (name for name in names if name in known)
    for child in ast.iter_child_nodes(tree):
        yield from imported(child, package, known)


def importers(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Path -> the paths that import it."""
    paths = {module_of(path): path for path in sources}
    found: dict[str, set[str]] = {path: set() for path in sources}
    for path, source in sources.items():
        module = module_of(path)
        package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
        for name in imported(ast.parse(source), package, paths):
            found[paths[name]].add(path)
        if Path(path).name.startswith("test_"):
            found.get("tests/conftest.py", set()).add(path)
    return found


def nearest(changed: Sequence[str], sources: Mapping[str, str]) -> list[str]:
    """The files of tests that reach a change, nearest first, and unit tests before those of several ranks."""
    by = importers(sources)
    distances = {path: 0 for path in changed if path in by}
    waiting = deque(distances)
    while waiting:
        path = waiting.popleft()
        for importer in sorted(by[path]):
            if importer not in distances:
                distances[importer] = distances[path] + 1
                waiting.append(importer)
    for path in changed:
        if path not in by:  # no Python, or deleted
            for test, far in naming(path, sources):
                distances[test] = min(far, distances.get(test, far))
    tests = [path for path in distances if Path(path).name.startswith("test_")]
    tests = [path for path in tests if path in changed or path.startswith(("tests/unit/", "tests/distributed/"))]
    return sorted(tests, key=lambda path: (distances[path], not path.startswith("tests/unit/"), path))


def naming(path: str, sources: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """The tests that name a file which is no Python or no longer there, or its folder, and how near they are."""
    name, folder = Path(path).name, Path(path).parts[0]
    name = module_of(path) if path.endswith(".py") else name
    for test, source in sources.items():
        if Path(test).name.startswith("test_"):
            if name in source:
                yield test, 1
            elif folder != name and f'"{folder}"' in source:
                yield test, 2


# Running them.


class Deadline:
    """A plugin of pytest that ends the session when the time is over."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._session: pytest.Session | None = None
        self._done: set[str] = set()
        self.has_stopped = False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._done.add(nodeid)
        if time.monotonic() > self._deadline_s and self._session is not None:
            self._session.shouldstop = "the time is over"
            self.has_stopped = True

    @property
    def has_failed(self) -> bool:
        """Whether a test has failed so far."""
        return self._session is not None and self._session.testsfailed > 0

    def left(self) -> list[str]:
        """The files with tests that were collected and not run."""
        items = self._session.items if self._session is not None else []
        waiting = [item for item in items if item.nodeid not in self._done]
        return list(dict.fromkeys(item.path.relative_to(ROOT).as_posix() for item in waiting))


def run(tests: Sequence[str], deadline_s: float) -> int:
    """Run the tests in this order until the deadline; pytest's exit code, 0 where only time ran out."""
    watch = Deadline(deadline_s)
    words = [
        "-q",
        "--no-header",
        "--timeout",
        str(LONGEST_TEST_S),
        "-m",
        UNMARKED,
        *(str(ROOT / path) for path in tests),
    ]
    code = int(pytest.main(words, plugins=[watch]))
    left = watch.left()
    if left:
        print(f"no time for {len(left)} files of tests: {', '.join(left[:8])}{' ...' if len(left) > 8 else ''}")
    is_fine = watch.has_stopped and not watch.has_failed
    return 0 if is_fine or code == int(pytest.ExitCode.NO_TESTS_COLLECTED) else code


if __name__ == "__main__":
    sys.exit(main())
