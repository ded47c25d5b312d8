"""The names that a Python file binds at its top level, by its syntax alone: nothing is run.

The one idea: what may be wrong is not told. A file that may bind names in a way that its syntax does not show
(`import *`, `globals()`, a module's `__getattr__`) says so, and then no name is known to be missing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

#: begins the name under which a user's file is imported, `<prefix><name of the file>_<12 digits of its path>`
USER_PREFIX = "hetseq_user_"
#: what a file may bind names with that stand nowhere in it
_HIDDEN_WAYS = {"globals", "locals", "vars", "exec", "eval", "setattr", "__dict__", "modules", "__getattr__"}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True)
class BoundNames:
    """What a file binds at its top level."""

    names: frozenset[str]
    classes: tuple[str, ...]  # of these, by a class statement or by an import
    plain_classes: tuple[str, ...]  # of these, classes without a base or decorator, which nothing else binds
    may_have_more: bool  # names that its syntax does not show


def as_its_user_knows_it(module: str) -> str:
    """The name of a module; of a user's file that of the file."""
    return re.sub(rf"^{USER_PREFIX}(.+)_[0-9a-f]{{12}}$", r"\1", module)


def bound_names(module: ast.Module) -> BoundNames:
    """The names that importing the module would bind, also those that a branch may or may not bind."""
    top = list(_top_level(module))
    defined = [node.name for node in top if isinstance(node, ast.ClassDef)]
    functions = [node for node in top if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    aliases = [alias for node in top if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names]
    imported = [(alias.asname or alias.name).partition(".")[0] for alias in aliases]
    everywhere = list(ast.walk(module))
    made_global = [name for node in everywhere if isinstance(node, ast.Global) for name in node.names]
    bound = [*defined, *imported, *(function.name for function in functions), *_names_in(top), *made_global]
    plain = [
        node.name
        for node in top
        if isinstance(node, ast.ClassDef) and not (node.bases or node.keywords or node.decorator_list)
    ]
    return BoundNames(
        frozenset(bound),
        (*defined, *(name for name in imported if name[:1].isupper())),
        tuple(name for name in plain if bound.count(name) == 1),
        may_have_more=any(alias.name == "*" for alias in aliases) or any(map(_is_hidden_way, everywhere)),
    )


def _top_level(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when the module is imported: not the bodies of functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _SCOPES):
            yield from _top_level(child)


def _names_in(nodes: list[ast.AST]) -> Iterator[str]:
    """Those of assignments, loops, `with`, `except` and patterns."""
    for node in nodes:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest


def _is_hidden_way(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _HIDDEN_WAYS
    if isinstance(node, ast.Attribute):
        return node.attr in _HIDDEN_WAYS
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in _HIDDEN_WAYS
