"""Where in `metrics.jsonl` a run has gone back to a checkpoint and on another way: with other options, or because the
ranks had come to differ.

From there on the rows of a step count anew, though a tracker has that step already. A run that resumes with the same
options repeats the steps after its checkpoint, on the same course.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from hetseq.run_directory import replace_file

logger = logging.getLogger(__name__)


class Courses:
    """The courses of a run: at which byte of `metrics.jsonl` each begins, and after which step.

    One thread notes, others ask.
    """

    def __init__(self, status: Path) -> None:
        self._path = status / "courses.json"
        try:
            self._courses = [(int(offset), int(step)) for offset, step in json.loads(self._path.read_bytes())]
        except (OSError, ValueError, TypeError):
            self._courses = []

    def note(self, offset: int, step: int) -> None:
        """The rows from byte `offset` on follow `step`."""
        self._courses = [*self._courses, (offset, step)]
        try:
            replace_file(self._path, json.dumps(self._courses).encode(), is_durable=False)
        except OSError as error:
            logger.warning("cannot write %s (%s): trackers may lack the steps from %d on", self._path, error, step + 1)

    def beginning_at(self, offset: int, *, after: int) -> int | None:
        """The step after which the row at byte `offset` begins a course, the row before it ending at `after`."""
        steps = [step for start, step in self._courses if after <= start <= offset]
        return steps[-1] if steps else None
