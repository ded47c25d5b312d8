"""Whether `make quick` notices a wrong line: `python -m tests.mutations [--seed 31] [--count 20] [--seconds 150]`.

Single lines of the product are changed one after the other, as mutation testing does (DeMillo, Lipton, Sayward
1978): a comparison or a sum is turned, a constant is off by one, a `not` is lost. Half of them lie in `cluster`,
`checkpoint` and `training`. A change is killed if `tests.quick` fails, and the tests that failed pass without it. The
working tree must have no changes; each mutation is undone, also when the script is interrupted.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: a compiled file is taken for that of any source of the same second and size, and so for one that was put back
UNCACHED = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
HALF = ("hetseq/cluster", "hetseq/checkpoint", "hetseq/training")
FOLDERS = ("hetseq", "tasks", "preprocessing")
TURNED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.And: "or", ast.Or: "and", ast.Add: "-", ast.Sub: "+",
    ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "+",
}  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """A line of a file, and what it becomes."""

    path: str
    line: int
    before: str
    after: str


def mutations_of(path: str, source: str) -> Iterator[Mutation]:
    """All mutations of a file; those of annotations, docstrings and text are left out."""
    lines = source.splitlines()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in function.body:
                for node in _within(statement):
                    yield from _turned(path, lines, node)


def _within(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, child in ast.iter_fields(node):
        if name in ("annotation", "returns") or isinstance(node, (ast.JoinedStr, ast.FunctionDef, ast.ClassDef)):
            continue  # functions within functions have their own turn
        for each in child if isinstance(child, list) else [child]:
            if isinstance(each, ast.AST):
                yield from _within(each)


def _turned(path: str, lines: Sequence[str], node: ast.AST) -> Iterator[Mutation]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from _between(path, lines, node.left, node.comparators[0], TURNED.get(type(node.ops[0])))
    elif isinstance(node, ast.BinOp) and not _is_text(node.left) and not _is_text(node.right):
        yield from _between(path, lines, node.left, node.right, TURNED.get(type(node.op)))
    elif isinstance(node, ast.BoolOp):
        yield from _between(path, lines, node.values[0], node.values[1], TURNED.get(type(node.op)))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield _replaced(path, lines, node.lineno, node.col_offset, node.col_offset + len("not "), "")
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield _replaced(path, lines, node.lineno, node.col_offset, node.end_col_offset or 0, str(node.value + 1))
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield _replaced(path, lines, node.lineno, node.col_offset, node.end_col_offset or 0, str(not node.value))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _between(path: str, lines: Sequence[str], left: ast.expr, right: ast.expr, word: str | None) -> Iterator[Mutation]:
    """The operator between two expressions of one line is another one; what brackets it has stay."""
    if word is None or left.end_lineno != right.lineno:
        return
    begin, end = left.end_col_offset or 0, right.col_offset
    between = lines[right.lineno - 1].encode()[begin:end].decode()
    found = re.fullmatch(r"(\)*) (\S+|is not|not in) (\(*)", between)
    if found:
        yield _replaced(path, lines, right.lineno, begin, end, f"{found[1]} {word} {found[3]}")


def _replaced(path: str, lines: Sequence[str], number: int, begin: int, end: int, text: str) -> Mutation:
    line = lines[number - 1].encode()
    return Mutation(path, number, lines[number - 1], (line[:begin] + text.encode() + line[end:]).decode())


def draw(seed: int, count: int) -> list[Mutation]:
    """`count` mutations, the first half of HALF's folders; each line of a folder with the same chance."""
    drawing = random.Random(seed)
    found = []
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        found += sorted(mutations_of(name, path.read_text(encoding="utf-8")), key=lambda m: (m.line, m.after))
    inside = [mutation for mutation in found if mutation.path.startswith(HALF)]
    outside = [mutation for mutation in found if not mutation.path.startswith(HALF)]
    return drawing.sample(inside, count // 2) + drawing.sample(outside, count - count // 2)


def main(words: Sequence[str] | None = None) -> int:
    """Try each; 1 where more than three of twenty live."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=150.0, help="for each, as `tests.quick` has it")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="these alone, from 1")
    arguments = parser.parse_args(words)
    if _git("status", "--porcelain"):
        parser.error("the working tree has changes: commit or undo them first")
    alive = tried = 0
    for number, mutation in enumerate(draw(arguments.seed, arguments.count), start=1):
        if arguments.only is None or number in arguments.only:
            tried += 1
            alive += not is_killed(number, mutation, arguments.seconds)
    print(f"{tried - alive} of {tried} killed")
    return int(alive > tried * 3 // 20)


def is_killed(number: int, mutation: Mutation, seconds: float) -> bool:
    """Whether `tests.quick` notices; prints by what."""
    path, began_s = ROOT / mutation.path, time.monotonic()
    source = path.read_text(encoding="utf-8")
    lines = source.split("\n")
    assert lines[mutation.line - 1] == mutation.before
    lines[mutation.line - 1] = mutation.after
    try:
        path.write_text("\n".join(lines), encoding="utf-8")
        quick = [sys.executable, "-m", "tests.quick", "--seconds", str(seconds)]
        done = subprocess.run(quick, cwd=ROOT, env=UNCACHED, capture_output=True, text=True, check=False)
    finally:
        path.write_text(source, encoding="utf-8")
    took_s = time.monotonic() - began_s
    failed = re.findall(r"^FAILED (tests/.+?)(?: - .*)?$", done.stdout, re.M)[:5]
    by = failed[0] if failed else ", ".join(re.findall(r"^FAILED ([a-z ]+) \(", done.stdout, re.M))
    if failed:
        clean = [sys.executable, "-m", "pytest", "-q", "-x", *failed]
        if subprocess.run(clean, cwd=ROOT, env=UNCACHED, capture_output=True, check=False).returncode != 0:
            by = ""
            print(f"{failed} fail without the mutation too")
    verdict = f"killed by {by}" if by else f"LIVES (rc {done.returncode})"
    print(f"{number}. {mutation.path}:{mutation.line} {verdict} ({took_s:.0f} s)")
    print(f"    - {mutation.before.strip()}\n    + {mutation.after.strip()}", flush=True)
    return bool(by)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
