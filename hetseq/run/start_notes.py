"""Log records about the weights that a run begins with: kept back until it is known that it begins with them.

A task marks such a record with `extra={"is_about_start": True}`. Where a checkpoint replaces the weights, as for a
resumed run or `hetseq evaluate`, it says nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_MARK = "is_about_start"


@contextmanager
def kept_back() -> Iterator[list[logging.LogRecord]]:
    """Keep marked records from the handlers; gives the list in which they are."""
    kept: list[logging.LogRecord] = []

    def passes(record: logging.LogRecord) -> bool:
        is_marked = getattr(record, _MARK, False)
        if is_marked and record not in kept:  # with several handlers it comes here several times
            kept.append(record)
        return not is_marked

    handlers = [*logging.getLogger().handlers, *([logging.lastResort] if logging.lastResort else [])]
    for handler in handlers:
        handler.addFilter(passes)
    try:
        yield kept
    finally:
        for handler in handlers:
            handler.removeFilter(passes)


def log_again(kept: Sequence[logging.LogRecord]) -> None:
    """Give records that were kept back to the handlers."""
    for record in kept:
        logging.getLogger(record.name).handle(record)
