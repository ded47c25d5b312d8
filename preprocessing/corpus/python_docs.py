"""Built-in English text: the language reference and the docstrings that ship with Python.

The only import is `pydoc_data.topics`, a dictionary; docstrings come from the syntax trees of the standard library's
source files, in the order of the file names. The same Python gives the same text and another version another text, so
record version and hash. Modules that distributions omit or package separately (tests, idlelib, tkinter, ...) are never
read, so that distributions agree.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from hetseq import DataError

from .sentences import Document, split_sentences
from .text_chunks import Source

_SKIPPED = frozenset((
    "test", "tests", "idlelib", "lib2to3", "distutils", "ensurepip", "venv", "tkinter", "turtle.py",
    "turtledemo", "pydoc_data", "site-packages", "dist-packages", "lib-dynload", "__pycache__", "__phello__",
))  # fmt: skip
# prose is mostly letters; tables, grammars and sessions are not
_LETTERS = 0.78
_WORDS = 5


def python_documents(stdlib: Path | None = None) -> tuple[list[Document], Source]:
    """A document for each manual topic and each standard library module with some prose in it.

    `stdlib` is the folder of the library, by default this Python's. A repeated paragraph is left out: topics repeat
    each other, and a repetition could be in both training and test data. Raises DataError if this Python ships no text.
    """
    seen: set[str] = set()
    documents = []
    for name, text in (*_topics(), *_docstrings(stdlib or Path(sysconfig.get_path("stdlib")))):
        sentences = []
        for paragraph in _prose(text):
            if paragraph not in seen:
                seen.add(paragraph)
                sentences += split_sentences(paragraph)
        if len(sentences) > 1:
            documents.append(Document(name, sentences))
    if not documents:
        raise DataError(
            f"Python {platform.python_version()} ships no text here (no pydoc_data, no source files of the"
            " standard library); give your own text files with --input"
        )
    content = "\n\n".join("\n".join([document.name, *document.sentences]) for document in documents).encode()
    name = f"text of Python {platform.python_version()}"
    return documents, Source(name, len(content), hashlib.sha256(content).hexdigest())


def _topics() -> Iterator[tuple[str, str]]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        return  # some minimal distributions
    for name in sorted(topics):
        yield f"topic {name}", topics[name]


def _docstrings(stdlib: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(stdlib.rglob("*.py"), key=lambda path: path.relative_to(stdlib).parts):
        parts = path.relative_to(stdlib).parts
        if _SKIPPED.intersection(parts) or parts[0].startswith("config-") or parts[-1].startswith("_sysconfigdata"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escapes in third-party code
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue  # not the library's own file
        holders = [node for node in ast.walk(tree) if isinstance(node, _WITH_DOCSTRING)]
        holders.sort(key=lambda node: getattr(node, "lineno", 0))
        found = [text for node in holders if (text := ast.get_docstring(node))]
        yield f"module {'.'.join(parts)[: -len('.py')]}", "\n\n".join(found)


_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _prose(text: str) -> Iterator[str]:
    """The paragraphs that are English, each on one line."""
    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in block.split("\n")]
        # "* an item" and underlined titles: drop the star and the line
        lines = [re.sub(r"^[*+-] ", "", line) for line in lines if any(map(str.isalnum, line))]
        paragraph = " ".join(" ".join(lines).split())
        letters = sum(character.isalpha() or character == " " for character in paragraph)
        if paragraph.count(" ") + 1 >= _WORDS and letters >= _LETTERS * len(paragraph) and ">>>" not in paragraph:
            yield paragraph
