"""A tracker of a user's own, which keeps rows in memory and writes them four at a time, as real ones do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class LineTracker:
    def __init__(self) -> None:
        self._file, self._rows = Path(os.environ["LINE_TRACKER"]), list[str]()

    def begin(self, run_id: str, config: dict[str, Any], is_resumed: bool) -> int:
        self._file.mkdir(exist_ok=True)
        self._file /= run_id
        return len(self._file.read_text().splitlines()) if self._file.exists() else 0

    def row(self, row: dict[str, Any]) -> None:
        self._rows.append(json.dumps(row) + "\n")
        if len(self._rows) == 4:
            self._write()

    def _write(self) -> None:
        with self._file.open("a") as file:
            file.write("".join(self._rows))
        self._rows.clear()

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        pass

    def end(self, code: int) -> None:
        self._write()
