"""The TensorBoard log of a run: the rows of `metrics.jsonl` as TensorBoard curves.

Writes TensorBoard's files, and does without if TensorBoard is missing; it belongs to one thread.
Events of the run are logged as text, and its options as hyperparameters, by which TensorBoard compares runs.

The split `valid` has the tags `valid/loss` and the like. A run whose files have `valid/valid/loss`, as they were once
called, keeps these names when it is resumed: its curve would be cut in two.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetseq.config.sections import Config
from hetseq.monitor.append_file import AppendFile
from hetseq.monitor.curves import numbers_of, validation_tag
from hetseq.monitor.rank_table import Row
from hetseq.monitor.report.event_text import moved_state

logger = logging.getLogger(__name__)

_UNTOLD = frozenset({"save", "versions"})  # the checkpoint history and the report list them


_DOUBLED = re.compile(rb"\n[\x0d-\x7f]valid/valid/")  # a tag of before, behind its field and its length
_DOUBLED_BYTES = 14
_PART_BYTES = 1 << 20  # of a file that is searched for it


@dataclass(frozen=True)
class Hyperparameters:
    """The content of TensorBoard's HPARAMS tab: the options by name (None: not given), and a figure of validations.

    That is the metric of the best checkpoint, of the first split; None without validations.
    """

    options: Mapping[str, bool | float | str | None]
    validation: tuple[str, str] | None = None  # split, metric

    def metrics(self, *, is_doubled: bool = False) -> tuple[str, ...]:
        """The tags of the curves beside the options."""
        valid = () if self.validation is None else (validation_tag(*self.validation, is_doubled=is_doubled),)
        return ("train/loss", *valid)


def hyperparameters(config: Config) -> Hyperparameters:
    """The options that define the training, without the options for where it runs and where it is saved."""
    sections = (config.task, config.data, config.validation, config.optimization, *config.extras.values())
    options = {name: _plain(value) for section in sections for name, value in asdict(section).items()}
    validation, subsets = config.validation, config.data.valid_subsets
    is_validated = bool(subsets) and not validation.disable_validation
    return Hyperparameters(options, (subsets[0], validation.best_checkpoint_metric) if is_validated else None)


def _plain(value: Any) -> bool | float | str | None:
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]  # one learning rate is a number, by which TensorBoard can sort
    return value if value is None or isinstance(value, (bool, int, float, str)) else json.dumps(value, default=str)


class TensorBoard:
    """TensorBoard's files as a tracker (`trackers.protocol.Tracker`); it warns by itself and never raises."""

    def __init__(self, folder: Path, hparams: Hyperparameters | None = None) -> None:
        self._folder, self._hparams = folder, hparams
        self._board: Board | None = None

    def begin(self, run_id: str, config: Mapping[str, Any], is_resumed: bool) -> None:
        del run_id, config, is_resumed  # its files are in the run directory
        self._board = open_board(self._folder, self._hparams)

    def row(self, row: Row) -> None:
        self._add("step" if "loss" in row else "validation", row)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._add("event", {"event": kind, **fields})

    def end(self, code: int) -> None:
        del code
        if self._board is not None:
            self._board.file.close()

    def _add(self, kind: str, row: Row) -> None:
        if self._board is not None and not add_to_board(self._board, kind, row):
            self._board.file.close()
            self._board = None


def open_board(folder: Path, hparams: Hyperparameters | None = None) -> Board | None:
    """A TensorBoard log, or None after a warning that says why; takes the time of an import."""
    try:
        return Board(folder, hparams)
    except ImportError as error:
        logger.warning("no TensorBoard log: %s (metrics.jsonl holds the same numbers)", error)
    except Exception as error:  # a broken installation fails in many ways, and none of them may end a run
        logger.warning("no TensorBoard log: importing tensorboard failed with %s: %s", type(error).__name__, error)
    return None


def add_to_board(board: Board, kind: str, row: Row) -> bool:
    """Whether the row was taken; a row that TensorBoard cannot show ends its log, not the run."""
    try:
        board.add([(kind, dict(row))])
    except Exception as error:  # as above
        logger.warning("the TensorBoard log ends here: %s: %s", type(error).__name__, error)
        return False
    return True


class Board:
    """One event file in TensorBoard's own record format, written like the rows.

    Not `SummaryWriter`, which starts its own thread that a full disk ends for good. Raises ImportError.
    """

    def __init__(self, folder: Path, hparams: Hyperparameters | None = None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._session, self._records = event_pb2.Event, event_pb2.SessionLog, RecordWriter
        self._summaries, self._tensors, self._types = summary_pb2, tensor_pb2, types_pb2
        self._api, self._plugin_data = api_pb2, plugin_data_pb2
        # TensorBoard looks for names of this form, and reads the files of a run in the order of their names.
        self._is_doubled = has_doubled_tags(folder)
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self.file = AppendFile(folder / name, is_lines=False)
        self._hparams = hparams
        self._is_new = True
        self._has_steps = False
        self._last_step = 0

    def add(self, rows: list[tuple[str, dict[str, Any]]]) -> None:
        """Add `rows`, each with its kind: steps and validations as numbers, events as text."""
        events: list[Any] = []
        rows = [(kind, row) for kind, row in rows if kind != "event" or row["event"] not in _UNTOLD]
        if rows and self._is_new:
            events.append(self._event(wall_time=time.time(), file_version="brain.Event:2"))
            if self._hparams is not None:
                events.append(self._summary_event(0, self._session_values(self._hparams)))
            self._is_new = False
        for kind, row in rows:
            self._last_step = row.get("step", self._last_step)
            if kind == "step" and not self._has_steps:
                # Tells TensorBoard to drop the steps from here on that an earlier start of this run logged.
                session = self._session(status=self._session.START)
                events.append(self._event(wall_time=time.time(), step=row["step"], session_log=session))
                self._has_steps = True
            if kind == "event":
                values = [self._text(f"events/{row['event']}", _words(row))]
            else:
                values = [
                    self._summaries.Summary.Value(tag=tag, simple_value=number)
                    for tag, number in numbers_of(row, is_doubled=self._is_doubled).items()
                ]
            events.append(self._summary_event(self._last_step, values))
        self.file.append(self._record(event) for event in events)

    def _summary_event(self, step: int, values: list[Any]) -> Any:
        return self._event(wall_time=time.time(), step=step, summary=self._summaries.Summary(value=values))

    def _text(self, tag: str, words: str) -> Any:
        """One text; the TEXT tab shows it as Markdown."""
        return self._value(
            tag, self._tensors.TensorProto(dtype=self._types.DT_STRING, string_val=[words.encode()]), "text", b""
        )

    def _session_values(self, hparams: Hyperparameters) -> list[Any]:
        """The two records of the HPARAMS tab: its columns, and the options of this run.

        Without the first, every curve of every rank would be a column.
        """
        kinds = {bool: self._api.DATA_TYPE_BOOL, str: self._api.DATA_TYPE_STRING}
        kinds |= {int: self._api.DATA_TYPE_FLOAT64, float: self._api.DATA_TYPE_FLOAT64}
        infos = [
            self._api.HParamInfo(name=name, type=kinds.get(type(value), self._api.DATA_TYPE_UNSET))
            for name, value in hparams.options.items()
        ]
        metrics = [
            self._api.MetricInfo(name=self._api.MetricName(tag=tag))
            for tag in hparams.metrics(is_doubled=self._is_doubled)
        ]
        started = self._plugin_data.SessionStartInfo(start_time_secs=time.time())
        for name, value in hparams.options.items():
            if isinstance(value, bool):
                started.hparams[name].bool_value = value
            elif isinstance(value, str):
                started.hparams[name].string_value = value
            elif value is not None:
                started.hparams[name].number_value = value
        experiment = self._api.Experiment(hparam_infos=infos, metric_infos=metrics, time_created_secs=time.time())
        nothing = self._tensors.TensorProto(dtype=self._types.DT_FLOAT)
        nothing.tensor_shape.dim.add(size=0)
        return [
            self._value(
                f"_hparams_/{name}", nothing, "hparams", self._plugin_data.HParamsPluginData(**told).SerializeToString()
            )
            for name, told in (
                ("experiment", {"experiment": experiment}),
                ("session_start_info", {"session_start_info": started}),
            )
        ]

    def _value(self, tag: str, tensor: Any, plugin: str, content: bytes) -> Any:
        """A tensor for a plugin of TensorBoard."""
        data = self._summaries.SummaryMetadata.PluginData(plugin_name=plugin, content=content)
        metadata = self._summaries.SummaryMetadata(plugin_data=data)
        return self._summaries.Summary.Value(tag=tag, tensor=tensor, metadata=metadata)

    def _record(self, event: Any) -> bytes:
        buffer = io.BytesIO()
        self._records(buffer).write(event.SerializeToString())
        return buffer.getvalue()


def has_doubled_tags(folder: Path) -> bool:
    """Whether an earlier start of the run has written tags such as `valid/valid/loss` into this folder."""
    return any(map(_is_in, sorted(folder.glob("events.out.tfevents.*"))))


def _is_in(path: Path) -> bool:
    before = b""
    with suppress(OSError), path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            searched = before + part
            if _DOUBLED.search(searched):
                return True
            before = searched[-_DOUBLED_BYTES:]
    return False


def _words(row: Mapping[str, Any]) -> str:
    """An event as Markdown: a sentence, or a list of its fields."""
    event = row["event"]
    if event == "advice":
        return str(row["text"])
    if event == "generation":
        took = "" if row.get("seconds") is None else f", after {row['seconds']:.2f} s"
        story = row.get("story") or "a step could not be finished in time"
        lost = f"; {row['lost']}" if row.get("lost") else ""
        who = f"ranks {_listed(row['ranks'])} continue{took} (generation {row['generation']})"
        return f"{story}: {who}{moved_state(row)}{lost}"
    if event == "rebalance":
        before_s, after_s = row["predicted_seconds_before"], row["predicted_seconds"]
        return (
            f"shares {_listed(row['shares'])} from step {row['first_step']} on, before: {_listed(row['shares_before'])}"
            f"; predicted step time: {after_s:.4g} s, before: {before_s:.4g} s"
        )
    if event == "save_failed":
        return f"the checkpoint of step {row['step']} could not be saved: {row['error']}"
    if event == "resume":
        source = "the memory of the ranks" if row.get("path") is None else f"`{row['path']}`"
        refused = row.get("refused")
        return f"resumed after step {row['step']} from {source}" + (f"; refused: {_listed(refused)}" if refused else "")
    told = {key: value for key, value in row.items() if key not in ("time_utc", "event", "step")}
    return "\n".join(f"* {key}: {json.dumps(value)}" for key, value in told.items())


def _listed(values: Any) -> str:
    return ", ".join(map(str, values))
