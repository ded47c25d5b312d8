"""The protocol of a tracker, and the trackers that `--tracker` and `hetseq.start` name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from hetseq import registry
from hetseq.config.tracker_specs import TrackerSpec
from hetseq.errors import ConfigError


@runtime_checkable
class Tracker(Protocol):
    """Takes the rows of `metrics.jsonl` and the events of `events.jsonl`, to show them elsewhere.

    It is called on one rank, in a thread of its own, one call at a time. A call that is slow or hangs holds up no step,
    only the rows behind it. What a call raises is warned of once, and the call is made again later, at the latest by
    the next start: an exception means that nothing was taken.
    """

    def begin(self, run_id: str, config: dict[str, Any], is_resumed: bool) -> int | None:
        """Before the first row of this process. Returns how many rows the store holds of this run; None: unknown.

        `run_id` stays the same over lost ranks and resumes. `config` has the options by name. `is_resumed`: the tracker
        had begun this run before, perhaps in a process that was killed. With the number of rows the call can be exact
        where rows were taken and lost, or taken and not noted: the rows that follow are sent. Without it they are
        sent from the one after the last call that returned.
        """
        ...

    def row(self, row: dict[str, Any]) -> None:
        """A step or a validation, as in `metrics.jsonl`; with `run.log`, its numbers by name in `log`.

        Steps ascend, until the run goes back to a checkpoint and continues in another way: with other options, or since
        its ranks had come to differ.
        """
        ...

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """An event, as in `events.jsonl`; after a kill the last one may come twice."""
        ...

    def end(self, code: int) -> None:
        """The last call in this process: 0 the run is over, 75 it was stopped or another rank writes, else a failure.

        It is not called in a process that is killed.
        """
        ...


class Adapter:
    """The base of the trackers with a name: `keys` are the settings of its words. They take no events."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self.keys: Any = dict(keys)

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Events are in `events.jsonl`, and in TensorBoard as text."""


@dataclass(frozen=True)
class Tracked:
    """A tracker with its name in messages, and a label by which the next start knows it."""

    tracker: Tracker
    name: str
    label: str


def trackers_of(specs: Sequence[TrackerSpec], own: Sequence[Tracker] = ()) -> tuple[Tracked, ...]:
    """The trackers of these names and addresses, then `own`. Imports no package of theirs. Raises HetSeqError."""
    made = [(_made(spec), spec.text) for spec in specs]
    made += [(tracker, f"{type(tracker).__module__}:{type(tracker).__qualname__}") for tracker in own]
    found: list[Tracked] = []
    for tracker, text in made:
        if not isinstance(tracker, Tracker):
            raise ConfigError(
                f"{text} is no tracker: expected the methods begin(run_id, config, is_resumed), row(row),"
                " event(kind, fields) and end(code)"
            )
        number = sum(other.name == text for other in found)
        digest = hashlib.sha256(f"{text}#{number}".encode()).hexdigest()[:12]
        found.append(Tracked(tracker, text, digest))
    return tuple(found)


def _made(spec: TrackerSpec) -> Any:
    if not spec.name:
        return registry.find_tracker(spec.text)()
    return _KINDS[spec.name](spec.keys)


def _wandb(keys: Mapping[str, str]) -> Tracker:
    from hetseq.monitor.trackers.wandb import WandbTracker

    return WandbTracker(keys)


def _mlflow(keys: Mapping[str, str]) -> Tracker:
    from hetseq.monitor.trackers.mlflow import MlflowTracker

    return MlflowTracker(keys)


def _trackio(keys: Mapping[str, str]) -> Tracker:
    from hetseq.monitor.trackers.trackio import TrackioTracker

    return TrackioTracker(keys)


_KINDS = {"wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}
