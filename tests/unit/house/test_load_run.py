"""`hetseq.load_run`: a run directory as arrays, whatever state it is in."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import hetseq
from tests.support.recorded import HISTORY, step_row, validation_row, write_run


def test_steps_terms_and_ranks_come_in_arrays_of_their_shapes(tmp_path: Path) -> None:
    rows = [step_row(1, 2.0), step_row(2, 1.5, terms={"loss": 1.0, "other": 0.5})]
    run = hetseq.load_run(write_run(tmp_path / "run", rows, states={0: "done", 1: "gone"}))
    assert run.steps.tolist() == [1, 2]
    assert run.loss.tolist() == [2.0, 1.5]
    assert run.terms["loss"].tolist() == [2.0, 1.0]
    assert np.array_equal(run.terms["other"], [math.nan, 0.5], equal_nan=True)
    assert (run.lr.tolist(), run.grad_norm.tolist(), run.samples.tolist()) == ([0.5] * 2, [2.0] * 2, [60.0] * 2)
    assert run.elapsed_s.tolist() == [0.5, 1.0]
    assert run.shares.tolist() == [[30, 30], [30, 30]]
    assert run.compute_s[0] == pytest.approx([0.3, 0.301])
    assert run.wait_s[0] == pytest.approx([0.1, 0.101])
    assert run.data_s[0] == pytest.approx([0.05, 0.051])
    assert run.communication_s.tolist() == [0.04] * 2
    assert run.efficiency.tolist() == [0.9] * 2
    assert run.names == ("lab0/cpu", "lab1/cpu")
    assert (run.run_id, run.config["task"]) == ("0123456789abcdef", "mnist")
    assert run.states == {0: "done", 1: "gone"}


def test_a_slot_that_is_absent_is_nan_in_its_own_column(tmp_path: Path) -> None:
    rows = [step_row(1, slots=(0, 1, 2)), step_row(2, slots=(0, 2), shares=[40, 20]), step_row(3, slots=(0, 1, 2))]
    run = hetseq.load_run(write_run(tmp_path / "run", rows))
    assert run.slots.tolist() == [0, 1, 2]
    assert np.array_equal(run.shares[1], [40, math.nan, 20], equal_nan=True)
    assert run.world_size.tolist() == [3, 2, 3]
    assert run.compute_s[1, 2] == pytest.approx(0.302)  # of slot 2, which is rank 1 in this step


def test_of_two_rows_of_a_step_the_later_counts(tmp_path: Path) -> None:
    rows = [step_row(1, 9.0), step_row(2, 8.0), step_row(3, 7.0), step_row(2, 1.0, shares=[50, 10]), step_row(3, 0.5)]
    rows += [validation_row(3, 4.0), validation_row(3, 2.0)]
    run = hetseq.load_run(write_run(tmp_path / "run", rows))
    assert run.steps.tolist() == [1, 2, 3]
    assert run.loss.tolist() == [9.0, 1.0, 0.5]
    assert run.terms["loss"].tolist() == [9.0, 1.0, 0.5]
    assert run.shares[1].tolist() == [50, 10]
    assert run.validation["valid"]["loss"].tolist() == [2.0]


def test_a_run_under_way_may_end_in_half_a_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_run(tmp_path / "run", [step_row(1)], events=[{"event": "resume"}], history=HISTORY)
    for name in ("metrics.jsonl", "events.jsonl", "checkpointHistories.csv"):
        with (path / name).open("a") as file:
            file.write('{"step": 2, "lo')
    run = hetseq.load_run(path)
    assert (run.steps.tolist(), len(run.events), len(run.checkpoints)) == ([1], 1, 2)
    assert caplog.text == ""


def test_a_line_that_is_no_row_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_run(tmp_path / "run", [step_row(1)])
    with (path / "metrics.jsonl").open("a") as file:
        file.write("\0\0\0\n[1]\n" + '{"step": "x"}\n{"step": 2, "loss": 0.5, "shares": [1, 2], "slots": [1]}\n')
    run = hetseq.load_run(path)
    assert run.loss.tolist() == [1.0, 0.5]
    assert "metrics.jsonl: 2 lines are not rows" in caplog.text


def test_a_skipped_step_has_no_loss_but_its_place(tmp_path: Path) -> None:
    rows = [step_row(1), step_row(2, None, terms=None, skipped=True, grad_norm=None), step_row(3)]
    run = hetseq.load_run(write_run(tmp_path / "run", rows))
    assert np.isnan(run.loss).tolist() == [False, True, False]
    assert run.elapsed_s.tolist() == [0.5, 1.0, 1.5]


def test_a_run_of_one_rank_computes_all_the_time(tmp_path: Path) -> None:
    run = hetseq.load_run(write_run(tmp_path / "run", [step_row(1, slots=(0,))]))
    assert (run.shares.tolist(), run.compute_s.tolist(), run.names) == ([[30]], [[0.5]], ("",))
    assert np.isnan(run.efficiency).all()


def test_rows_of_very_many_ranks_may_lack_what_each_did(tmp_path: Path) -> None:
    thin = step_row(2)
    del thin["ranks"]
    run = hetseq.load_run(write_run(tmp_path / "run", [step_row(1), thin, step_row(3)]))
    assert np.isnan(run.compute_s).any(axis=1).tolist() == [False, True, False]
    assert run.shares[1].tolist() == [30, 30]


def test_a_directory_without_rows_is_a_run_of_no_steps(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [])
    (path / "metrics.jsonl").unlink()
    run = hetseq.load_run(path)
    assert (run.steps.shape, run.shares.shape, run.validation, run.events, run.checkpoints) == (
        (0,),
        (0, 0),
        {},
        (),
        (),
    )
    assert "no step yet" in run._repr_html_()


def test_checkpoints_have_numbers_and_words(tmp_path: Path) -> None:
    good, bad = hetseq.load_run(write_run(tmp_path / "run", [step_row(1)], history=HISTORY)).checkpoints
    assert (good["step"], good["bytes"], good["kinds"], good["result"]) == (4.0, 648620.0, "epoch+best", "ok")
    assert (bad["result"], bad["error"], math.isnan(bad["bytes"])) == ("failed", "disk full", True)


def test_a_notebook_shows_the_loss(tmp_path: Path) -> None:
    shown = hetseq.load_run(write_run(tmp_path / "run", [step_row(step, 1 / step) for step in (1, 2)]))._repr_html_()
    assert "<svg" in shown
    assert ":root" not in shown  # the colours are for this picture alone
    assert "2 steps, last loss 0.5" in shown


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(hetseq.ConfigError, match=r"nowhere does not exist: expected the --save-dir of a run"):
        hetseq.load_run(tmp_path / "nowhere")
    with pytest.raises(hetseq.ConfigError, match=r"is no run directory, as no file in it was written by a run"):
        hetseq.load_run(tmp_path)
