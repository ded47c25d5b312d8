"""What TensorBoard's own readers find in the log of a run besides its curves: hyperparameters and words."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetseq.config import parse
from hetseq.config.sections import LogConfig
from hetseq.monitor import tensorboard
from hetseq.monitor.metrics import Display, Metrics, Recording
from hetseq.monitor.tensorboard import Hyperparameters, hyperparameters
from hetseq.run_directory import RunDirectory

pytest.importorskip("tensorboard")


@contextmanager
def metrics_of(run: Path, hparams: Hyperparameters | None = None) -> Iterator[Metrics]:
    with Metrics(
        Recording(RunDirectory.prepare(run, config_yaml=""), hparams=hparams),
        Display(LogConfig(log_format="none"), stream=io.StringIO()),
        is_writer=True,
    ) as metrics:
        yield metrics


def row(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "epoch": 1, "loss": loss, "samples": 64, "seconds": 0.5}


def words_of(run: Path) -> dict[str, list[tuple[int, str]]]:
    """What the TEXT tab has: tag -> (step, text)."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard"))
    read.Reload()
    tags = read.PluginTagToContent("text")
    return {tag: [(one.step, one.tensor_proto.string_val[0].decode()) for one in read.Tensors(tag)] for tag in tags}


class Tab:
    """The HPARAMS tab of `tensorboard --logdir FOLDER`, asked as its page asks it."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
        from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
        from tensorboard.context import RequestContext
        from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment, list_session_groups

        multiplexer = EventMultiplexer()
        multiplexer.AddRunsFromDirectory(str(folder))
        multiplexer.Reload()
        provider = MultiplexerDataProvider(multiplexer, str(folder))
        backend = backend_context.Context(SimpleNamespace(data_provider=provider))
        context = RequestContext()
        self.experiment = get_experiment.Handler(context, backend, "", api_pb2.GetExperimentRequest()).run()
        names = [info.name for info in self.experiment.metric_infos]
        columns = [api_pb2.ColParams(metric=name) for name in names]
        columns += [api_pb2.ColParams(hparam=info.name) for info in self.experiment.hparam_infos]
        asked = api_pb2.ListSessionGroupsRequest(
            col_params=columns, slice_size=10, allowed_statuses=[api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_RUNNING]
        )
        self.groups = list_session_groups.Handler(context, backend, "", asked).run().session_groups

    @property
    def metrics(self) -> list[str]:
        return [info.name.tag for info in self.experiment.metric_infos]


def test_runs_stand_side_by_side_with_their_options_and_two_figures(tmp_path: Path) -> None:
    for run, lr, loss in (("a", "0.5", 1.0), ("b", "0.25", 2.0)):
        config = parse(["--task", "mnist", "--optimizer", "adamw", "--lr", lr, "--compile"])
        with metrics_of(tmp_path / run, hyperparameters(config)) as metrics:
            metrics.step(row(1, 3.0))
            metrics.step(row(2, loss))
            metrics.validation({"step": 2, "epoch": 1, "valid_loss": 4.0, "valid_accuracy": 0.5})
    tab = Tab(tmp_path)
    assert tab.metrics == ["train/loss", "valid/loss"]
    found = sorted(
        (group.hparams["lr"].number_value, {one.name.tag: one.value for one in group.metric_values})
        for group in tab.groups
    )
    assert found == [
        (0.25, {"train/loss": 2.0, "valid/loss": 4.0}),
        (0.5, {"train/loss": 1.0, "valid/loss": 4.0}),
    ]
    first = tab.groups[0].hparams
    assert (first["optimizer"].string_value, first["compile"].bool_value) == ("adamw", True)
    assert first["clip_norm"].number_value == 25.0
    names = {info.name for info in tab.experiment.hparam_infos}
    assert {"lr", "seed", "global_batch_size"} <= names  # one that was not given is a column, too
    assert not {"save_dir", "join", "log_format"} & names  # where it ran and was kept
    assert {info.type for info in tab.experiment.hparam_infos if info.name == "global_batch_size"} == {0}  # unset


def test_options_of_a_task_of_ones_own_are_hyperparameters() -> None:
    @dataclass(frozen=True)
    class Own:
        depth: int = 3

    config = replace(parse(["--task", "mnist"]), extras={"task": Own()})
    assert hyperparameters(config).options["depth"] == 3


def test_a_run_that_goes_on_keeps_its_hyperparameters(tmp_path: Path) -> None:
    config = parse(["--task", "mnist"])
    for first in (1, 3):
        with metrics_of(tmp_path / "a", hyperparameters(config)) as metrics:
            metrics.step(row(first, 1.0))
    [group] = Tab(tmp_path).groups
    assert group.hparams["task"].string_value == "mnist"


@pytest.mark.parametrize(
    ("flags", "metrics"),
    [
        (["--disable-validation"], ("train/loss",)),
        (
            ["--valid-subset", "dev,test", "--best-checkpoint-metric", "accuracy"],
            ("train/loss", "valid/dev/accuracy"),
        ),
    ],
)
def test_the_second_figure_is_what_makes_a_checkpoint_the_best(flags: list[str], metrics: tuple[str, ...]) -> None:
    assert hyperparameters(parse(["--task", "mnist", *flags])).metrics() == metrics


def validated(run: Path, step: int, subset: str = "valid") -> None:
    with metrics_of(run, hyperparameters(parse(["--task", "mnist"]))) as metrics:
        metrics.step(row(step, 1.0))
        metrics.event("resume", step=step, path="runs/valid/valid/3", refused=[])
        metrics.validation({"step": step, "epoch": 1, "subset": subset, "valid_loss": 4.0})


def scalars(run: Path) -> dict[str, list[int]]:
    """What the SCALARS tab has of validations: tag -> steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard"))
    read.Reload()
    return {tag: [one.step for one in read.Scalars(tag)] for tag in read.Tags()["scalars"] if tag[:5] == "valid"}


def test_a_split_that_is_called_valid_is_not_named_twice(tmp_path: Path) -> None:
    for step, subset in ((1, "valid"), (2, "valid"), (3, "dev")):
        validated(tmp_path, step, subset)
    assert scalars(tmp_path) == {"valid/loss": [1, 2], "valid/dev/loss": [3]}


def test_a_run_with_doubled_tags_keeps_them_when_it_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        before.setattr(tensorboard, "has_doubled_tags", lambda _: True)
        validated(tmp_path, 1)
    assert scalars(tmp_path) == {"valid/valid/loss": [1]}
    monkeypatch.setattr(tensorboard, "_PART_BYTES", 5)  # a tag may lie in two parts of a file
    validated(tmp_path, 2)
    assert scalars(tmp_path) == {"valid/valid/loss": [1, 2]}
    assert Tab(tmp_path).metrics == ["train/loss", "valid/valid/loss"]


def test_what_happened_to_a_run_stands_at_its_step(tmp_path: Path) -> None:
    with metrics_of(tmp_path) as metrics:
        metrics.event("resume", step=2, path="runs/a/3", refused=[], received=False)
        metrics.step(row(3, 1.0))
        metrics.event(
            "rebalance", step=3, first_step=5, shares_before=[4, 4], shares=[6, 2],
            predicted_seconds_before=0.5, predicted_seconds=0.25,
        )  # fmt: skip
        metrics.event("save", step=3, path="runs/a/3")
        metrics.event("save_failed", step=4, error="No space left on device")
        metrics.event("advice", step=4, about="x", text="raise --num-workers")
        metrics.event("generation", generation=1, step=4, ranks=[0, 2], story="rank 1 (b) is gone", seconds=None)
        metrics.event("replicas_differ", step=4, ranks=[1], cause="fault")
    assert words_of(tmp_path) == {
        "events/resume": [(2, "resumed after step 2 from `runs/a/3`")],
        "events/rebalance": [
            (3, "shares 6, 2 from step 5 on, before: 4, 4; predicted step time: 0.25 s, before: 0.5 s")
        ],
        "events/save_failed": [(4, "the checkpoint of step 4 could not be saved: No space left on device")],
        "events/advice": [(4, "raise --num-workers")],
        "events/generation": [(4, "rank 1 (b) is gone: ranks 0, 2 continue (generation 1)")],
        "events/replicas_differ": [(4, '* ranks: [1]\n* cause: "fault"')],
    }


def test_words_of_steps_that_are_repeated_are_forgotten(tmp_path: Path) -> None:
    for first, text in ((1, "first"), (3, "second")):
        with metrics_of(tmp_path) as metrics:
            for step in range(first, first + 3):
                metrics.step(row(step, 1.0))
                metrics.event("advice", step=step, about="x", text=text)
    told = [(1, "first"), (2, "first"), (3, "second"), (4, "second"), (5, "second")]
    assert words_of(tmp_path) == {"events/advice": told}
