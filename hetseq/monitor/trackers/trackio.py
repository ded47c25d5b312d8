"""Trackio as a tracker: on this machine, or in a space of Hugging Face."""

from __future__ import annotations

from typing import Any

from hetseq.monitor.curves import numbers_of
from hetseq.monitor.trackers.protocol import Adapter


class TrackioTracker(Adapter):
    """One Trackio run, named after the id of the run unless `name` is given.

    Trackio writes twice a second, so a killed process loses rows: `begin` counts those that are there.
    """

    def begin(self, run_id: str, config: dict[str, Any], is_resumed: bool) -> int | None:
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        settings: Any = {"name": run_id, **self.keys}
        self._run: Any = trackio.init(
            config=config, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False, **settings
        )
        held: int = SQLiteStorage.get_log_count(settings["project"], run=settings["name"])
        return None if "space_id" in settings else held

    def row(self, row: dict[str, Any]) -> None:
        self._run.log({"epoch": row.get("epoch"), **numbers_of(row)}, step=row["step"])

    def end(self, code: int) -> None:
        self._run.finish()
