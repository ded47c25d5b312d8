"""transformers and peft, which are an extra: imported on demand, with a message of ours where they are absent.

Responsible for the import, for their chatter, and for the words of their errors.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hetseq import ConfigError

_LONGEST = 200  # characters of another program's message


def library(name: str) -> Any:
    """A module of transformers or peft, by its full name. Raises ConfigError where it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"--task hf_causal_lm needs {name.partition('.')[0]}, which cannot be imported ({error}): pip install"
            " 'hetseq[hf]'"
        ) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside, transformers logs errors alone: our own line tells the rest."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def first_line(error: BaseException) -> str:
    """The first line with text of an error of theirs; the name of its class if it has none."""
    found = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return found[:_LONGEST].rstrip(".:")
