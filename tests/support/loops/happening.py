"""What the scripts of tests have in common: a thing that happens once in a run, and the course that they write down."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

FOLDER, EVENT = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""


def happen(place: str, rank: int, step: int) -> None:
    """End or halt this process here, if it is the one that is meant (`kill:PLACE:RANK:STEP` or `stop:...`), once."""
    mark, (kind, _, where) = FOLDER / "happened", EVENT.partition(":")
    if f"{place}:{rank}:{step}" == where and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])


def note(row: dict[str, Any]) -> None:
    """Write one step of this process down."""
    with (FOLDER / f"course-{os.getpid()}").open("a") as file:
        file.write(json.dumps(row) + "\n")
