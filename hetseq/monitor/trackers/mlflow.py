"""MLflow as a tracker: a folder, a database or a server."""

from __future__ import annotations

import re
import time
from typing import Any

from hetseq.monitor.curves import numbers_of
from hetseq.monitor.trackers.protocol import Adapter


class MlflowTracker(Adapter):
    """One MLflow run, found by its tag `hetseq.run_id`. The tag `hetseq.rows` counts rows; it is set behind each."""

    def begin(self, run_id: str, config: dict[str, Any], is_resumed: bool) -> int:
        import mlflow.entities

        self._metric, self._client = mlflow.entities.Metric, mlflow.MlflowClient(self.keys.get("uri"))
        named = self._client.get_experiment_by_name(self.keys["experiment"])
        experiment = named.experiment_id if named else self._client.create_experiment(self.keys["experiment"])
        found = self._client.search_runs([experiment], f"tags.`hetseq.run_id` = '{run_id}'")
        tags = {"hetseq.run_id": run_id, "hetseq.rows": "0"}
        run = found[0] if found else self._client.create_run(experiment, tags=tags, run_name=self.keys.get("name"))
        self._id, self._rows = run.info.run_id, int(run.data.tags["hetseq.rows"])
        params = [
            mlflow.entities.Param(name, str(value)[:500])
            for name, value in config.items()
            if name not in run.data.params
        ]
        for first in range(0, len(params), 100):  # the most that MLflow takes at a time
            self._client.log_batch(self._id, params=params[first : first + 100])
        self._client.update_run(self._id, status="RUNNING")
        return self._rows

    def row(self, row: dict[str, Any]) -> None:
        numbers = {re.sub(r"[^\w./ -]", "_", name): number for name, number in numbers_of(row).items()}
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(name, number, now_ms, row["step"]) for name, number in numbers.items()]
        for first in range(0, len(metrics), 1000):  # as above
            self._client.log_batch(self._id, metrics=metrics[first : first + 1000])
        self._client.set_tag(self._id, "hetseq.rows", str(self._rows + 1))
        self._rows += 1

    def end(self, code: int) -> None:
        self._client.set_terminated(self._id, {0: "FINISHED", 75: "KILLED"}.get(code, "FAILED"))
