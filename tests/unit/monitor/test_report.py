"""`report.html`: what stands in it, how large it gets, and that nothing in it comes alive."""

from __future__ import annotations

import html.parser
import math
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetseq
from hetseq.errors import ConfigError
from hetseq.monitor.report import command as writing
from hetseq.monitor.report.charts import COLUMNS, Bar, Curve, bar_chart, labelled, line_chart, path_of, thinned, ticks
from hetseq.monitor.report.command import reporting, run
from hetseq.monitor.report.compare import compare, comparison_page
from hetseq.monitor.report.event_text import incident_of
from hetseq.monitor.report.page import aligned, bands_of, duration, repeat_lines, report_page
from hetseq.monitor.report.recorded import RecordedRun
from hetseq.run_directory import RunDirectory
from tests.support.recorded import CONFIG, HISTORY, step_row, validation_row, write_run

EVIL = '<script>alert("x")</script>'
VOID = {"meta", "link", "br", "!doctype"}


class Reading(html.parser.HTMLParser):
    """Every element of a page, its attributes, and whether each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


@pytest.fixture
def lossy(tmp_path: Path) -> RecordedRun:
    """Three ranks, one of which is away for two steps of 80."""
    rows = [step_row(step, 5 / step, slots=(0, 2) if step in (40, 41) else (0, 1, 2)) for step in range(1, 81)]
    rows += [validation_row(step, 4 / step, valid_accuracy=step / 100) for step in (20, 40, 60, 80)]
    story = "rank 1 on labB was killed (SIGKILL, as the kernel does when memory runs out)"
    events = [
        {"time_utc": "2026-01-31T12:00:00.906Z", "event": "generation", "step": 39, "ranks": [0, 2], "story": story,
         "seconds": 0.066},
        {"time_utc": "2026-01-31T12:00:01.906Z", "event": "rebalance", "step": 42},
    ]  # fmt: skip
    return hetseq.load_run(write_run(tmp_path / "lossy", rows, events=events, history=HISTORY, states={0: "done"}))


def test_the_report_tells_of_everything_that_the_files_have(lossy: RecordedRun) -> None:
    page = report_page(lossy, facts=[("Versions there", "torch 9")])
    Reading(page)
    for words in (
        "Finished: all steps are done.", "Loss by time", "fewer than 3 ranks",
        "steps 40 to 41: 2 of 3 ranks (without 1)",
        "valid: accuracy", "A step, rank by rank", "rank 2, lab2/cpu", "Shares", "The shares were moved 1 times",
        "2 saves, 1 of them failed", "failed: disk full", "rank 1 on labB was killed", "a smaller --batch-size",
        "hetseq train --config", "save_dir: there", "torch 9",
    ):  # fmt: skip
        assert words in page, words
    assert "2026-01-31 12:00:01" not in page  # a moved share is no incident


def test_the_report_needs_no_script_no_server_and_no_other_file(lossy: RecordedRun) -> None:
    found = Reading(report_page(lossy))
    assert "script" not in found.elements
    assert not [
        name for name, _ in found.attributes if name.startswith("on") or name in ("src", "xlink:href", "srcset")
    ]
    assert {value for name, value in found.attributes if name == "href"} == {"data:,"}
    assert "url(" not in report_page(lossy)
    assert "@media(prefers-color-scheme:dark)" in report_page(lossy)
    assert "@media print" in report_page(lossy)
    assert "background:currentColor;-webkit-print-color-adjust:exact" in report_page(lossy)  # or legends are blank


def test_nothing_that_comes_from_files_comes_alive(tmp_path: Path) -> None:
    names = {"names": [EVIL, EVIL], "compute_s": [0.1, 0.2]}
    rows = [step_row(1, ranks=names, terms={EVIL: 1.0, "b": 1.0}), step_row(2, slots=(0, 1, 5), ranks=names)]
    rows += [validation_row(1, 1.0, subset=EVIL, **{f"valid_{EVIL}": 1.0})]
    events = [{"event": "generation", "story": EVIL, "time_utc": EVIL, "ranks": [1]}, {"event": EVIL, "more": EVIL},
              {"event": "save_failed", "error": EVIL}, {"event": "resume", "path": EVIL, "refused": [EVIL]},
              {"event": "replicas_differ", "cause": EVIL, "ranks": [EVIL], "source": EVIL}]  # fmt: skip
    history = HISTORY.replace("disk full", EVIL).replace("epoch+best", EVIL)
    path = write_run(
        tmp_path / "<evil>", rows, events=events, history=history, config=CONFIG + f"# {EVIL}\nx: <evil>\n"
    )
    evil, other = hetseq.load_run(path), hetseq.load_run(write_run(tmp_path / "other", rows))
    for page in (report_page(evil, facts=[(EVIL, EVIL)]), comparison_page(compare(evil, other)), evil._repr_html_()):
        assert not {"script", "evil"} & set(Reading(page).elements)
        assert EVIL not in page
    assert "&lt;script&gt;" in report_page(evil)


def test_a_thousand_ranks_make_a_small_page_too() -> None:
    shares = np.random.default_rng(0).random((2000, 1000), np.float32)
    page = report_page(made_up(shares[:, 0].astype(np.float64), shares))
    assert len(page.encode()) <= 2_000_000
    assert "64 of 1,000 ranks: those that wait least and most" in page


@pytest.mark.slow  # 6.4 million numbers
def test_a_long_run_of_many_ranks_makes_a_small_page_that_keeps_its_extremes() -> None:
    steps, ranks = 100_000, 64
    generator = np.random.default_rng(0)
    loss = 2 + generator.random(steps)
    loss[70_123], loss[31_007] = 9.0, -1.0
    run = made_up(loss, generator.random((steps, ranks), np.float32))
    run.shares[55_555, 17] = 99.0
    page = report_page(run)
    assert len(page.encode()) <= 2_000_000
    by_step = page[page.index("Loss <span") : page.index("Loss by time <span")]
    points = places(by_step)
    assert (round(70_123 / 99_999 * 1000, 1), 0.0) in points
    assert (round(31_007 / 99_999 * 1000, 1), 1000.0) in points
    shares = page[page.index("Shares <span") :]
    assert (round(55_555 / 99_999 * 1000, 1), 0.0) in places(shares[: shares.index("</figure>")])


def places(text: str) -> set[tuple[float, float]]:
    paths = re.findall(r' d="([^"]*)"', text)
    return {(float(x), float(y)) for path in paths for x, y in (point.strip("M").split(",") for point in path.split())}


def made_up(loss: Any, shares: Any) -> RecordedRun:
    size, ranks = shares.shape
    ones = np.ones(size)
    return RecordedRun(
        path=Path("/runs/long"), run_id="", config={}, config_text="", steps=np.arange(1, size + 1), epoch=ones,
        loss=loss, terms={"loss": loss}, lr=ones, grad_norm=loss, samples=ones, seconds=ones, elapsed_s=np.cumsum(ones),
        generation=ones, communication_s=ones, efficiency=ones, slots=np.arange(ranks),
        names=tuple(f"node{rank // 8}/cuda:{rank % 8}" for rank in range(ranks)), shares=shares, compute_s=shares,
        wait_s=shares, data_s=shares, overhead_s=shares, sharding={}, validation={}, states={}, events=(),
        checkpoints=(),
    )  # fmt: skip


def test_of_each_column_the_lowest_and_the_highest_point_stay() -> None:
    y = np.random.default_rng(1).random(10_000)
    x = np.arange(10_000.0)
    kept = thinned(x, y, 100)
    assert len(kept) <= 202
    for column in range(100):
        inside = np.flatnonzero((x / x[-1] * 100).astype(int).clip(max=99) == column)
        assert inside[y[inside].argmin()] in kept
        assert inside[y[inside].argmax()] in kept
    assert thinned(x[:800], y[:800], COLUMNS).tolist() == list(range(800))


def test_a_line_stops_where_its_numbers_do() -> None:
    x, y = np.arange(5.0), np.array([0.0, 1.0, np.nan, 1.0, 0.0])
    drawn = path_of(x, y, first=0, last=4, low=0, high=1)
    assert drawn == "M0,1000 250,0 M750,0 1000,1000"
    assert path_of(np.arange(2000.0), np.where(np.arange(2000) == 1000, np.nan, 1.0), first=0, last=1999, low=0, high=1,
                   columns=100).count("M") == 1  # less than a column  # fmt: skip


def test_a_chart_without_points_is_none() -> None:
    assert line_chart("empty", [Curve("none", np.arange(3), np.full(3, np.nan))]) == ""


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.00297, 0.003, ["0.002970", "0.002975", "0.002980", "0.002985", "0.002990", "0.002995", "0.003000"]),
        (1, 100_000, ["20,000", "40,000", "60,000", "80,000", "100,000"]),
        (5.0, 5.0, ["5"]),
    ],
)
def test_ticks_are_round_and_told_apart(low: float, high: float, words: list[str]) -> None:
    assert [text for _, text in labelled(ticks(low, high))] == words


def test_times_are_said_as_people_say_them() -> None:
    said = [duration(seconds) for seconds in (0.0081, 12.34, 250, 7200, 97_200, float("nan"))]
    assert said == ["8.1 ms", "12.3 s", "4 min 10 s", "2 h", "1 d 3 h", "-"]


def test_the_numbers_of_a_column_have_the_same_decimals() -> None:
    assert aligned(np.array([12.345, 1.5, np.nan, 0.0])) == ["12.3", "1.5", "-", "0.0"]
    assert aligned(np.array([1.5, 2345.6])) == ["2", "2,346"]
    assert aligned(np.array([8.0, 1_000_000.0])) == ["8", "1,000,000"]
    assert aligned(np.array([0.0123, 0.5])) == ["0.012", "0.500"]


def test_bands_are_where_ranks_were_missing(lossy: RecordedRun) -> None:
    assert [(band.first, band.last) for band in bands_of(lossy)] == [(40, 41)]


@pytest.mark.parametrize(
    ("states", "has_ended", "words"),
    [
        ({0: "done", 1: "gone"}, True, "Finished"),
        ({0: "stopped"}, True, "the same command resumes"),
        ({0: "train"}, True, "Ended before all steps were done"),
        ({0: "train"}, False, "In progress, or"),
        ({}, False, "It has not started"),
    ],
)
def test_the_report_says_how_far_the_run_is(
    tmp_path: Path, states: dict[int, str], has_ended: bool, words: str
) -> None:
    loaded = hetseq.load_run(write_run(tmp_path / "run", [], states=states))
    assert words in report_page(loaded, has_ended=has_ended)


@pytest.mark.parametrize(
    ("event", "what", "remedy"),
    [
        (
            {"event": "generation", "story": "rank 1 crashed (SIGSEGV)", "ranks": [0]},
            "1 rank continues",
            "log/rank-N.txt",
        ),
        ({"event": "generation", "story": "rank 1 on b is back", "ranks": [0, 1]}, "2 ranks continue", "Nothing"),
        ({"event": "generation", "story": None}, "a step could not be finished in time", "Nothing"),
        ({"event": "save_failed", "error": "No space left on device"}, "could not be saved", "df -h"),
        ({"event": "save_failed", "error": "Input/output error"}, "could not be saved", "file system"),
        ({"event": "resume", "path": "/x", "refused": []}, "resumed from /x", "Nothing"),
        ({"event": "resume", "path": None, "refused": ["/y"]}, "refused: 1", "checkpoints verify"),
        ({"event": "replicas_differ", "cause": "fault", "ranks": [3], "source": 0}, "rank 3", "memory"),
        ({"event": "replicas_differ", "cause": "rounding", "ranks": [3], "source": 0}, "equal to rank 0", "Nothing"),
        (
            {"event": "advice", "about": "data", "text": "rank 1 (vm/cpu) waits 8% of a step: more --num-workers help"},
            "rank 1 (vm/cpu) waits 8% of a step",
            "More --num-workers help.",
        ),
        ({"event": "of the future", "fact": 7}, 'of the future {"fact": 7}', ""),
    ],
)
def test_every_incident_has_words_and_where_it_helps_a_remedy(event: dict[str, Any], what: str, remedy: str) -> None:
    found = incident_of(event)
    assert what in found.what
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, "1 rank continues"),
        ({"state_bytes": 0}, "1 rank continues; no optimizer state was sent"),
        ({"state_bytes": 3 << 19}, "1 rank continues; 1.5 MiB of optimizer state were sent to new owners"),
        ({"state_bytes": 12 << 30}, "1 rank continues; 12 GiB of optimizer state were sent to new owners"),
        ({"state_bytes": 700}, "1 rank continues; 700 bytes of optimizer state were sent to new owners"),
        ({"state_bytes": "x"}, "1 rank continues"),
        ({"lost": "rank 1 owned 25 % of the state, and no other rank holds it"},
         "1 rank continues; rank 1 owned 25 % of the state, and no other rank holds it, so all ranks went back to the"
         " newest state in memory or on disk"),
    ],
)  # fmt: skip
def test_a_generation_says_what_state_was_sent_and_what_was_lost(facts: dict[str, Any], words: str) -> None:
    found = incident_of({"event": "generation", "story": "rank 1 on labB was killed", "ranks": [0], **facts})
    assert found.what == f"rank 1 on labB was killed: {words}"
    assert ("--own" in found.remedy) == ("lost" in facts)


def owners(owned: list[int], sent: list[int], **more: Any) -> dict[str, Any]:
    """What a row says about ranks that own parts of the state; a received byte for each two sent."""
    size = len(owned)
    kinds = {"owned_bytes": owned, "sent_bytes": sent, "received_bytes": [one // 2 for one in sent]}
    seconds = {"compute_s": [0.3] * size, "names": [f"lab{rank}/cpu" for rank in range(size)]}
    return {**seconds, **kinds, "memory_bytes": [3 << 30] * size, **more}


def cells(page: str, head: str) -> list[str]:
    return re.findall(f'data-head="{re.escape(head)}">([^<]*)<', page[page.index("Where the state is") :])


def test_where_the_state_is_and_what_travels_is_told_by_rank(tmp_path: Path) -> None:
    rows = [step_row(step, ranks=owners([3 << 30, 1 << 30], [step << 20, 0])) for step in (1, 3)]
    page = report_page(hetseq.load_run(write_run(tmp_path / "run", rows)))
    Reading(page)
    assert cells(page, "owns %") == ["75", "25"]
    assert cells(page, "state GiB") == ["3", "1"]
    assert cells(page, "memory GiB") == ["3", "3"]
    assert (cells(page, "sent MiB"), cells(page, "received MiB")) == (["2", "0"], ["1", "0"])
    assert "plan GiB" not in page
    assert "Owned state" not in page, "it has not changed"
    planned = [step_row(1, ranks=owners([3, 1], [0, 0], planned_bytes=[4 << 30, 0]))]
    page = report_page(hetseq.load_run(write_run(tmp_path / "planned", planned)))
    assert (cells(page, "plan GiB"), cells(page, "memory % of plan")) == (["4", "-"], ["75", "-"])


def test_an_owner_that_has_left_owns_nothing_any_more(tmp_path: Path) -> None:
    rows = [step_row(1, slots=(0, 1, 2), ranks=owners([2 << 30, 1 << 30, 1 << 30], [0] * 3))]
    rows += [step_row(2, slots=(0, 2), ranks=owners([3 << 30, 1 << 30], [0] * 2))]
    run = hetseq.load_run(write_run(tmp_path / "run", rows))
    page = report_page(run)
    assert cells(page, "owns %") == ["75", "-", "25"]
    assert "Owned state" in page
    assert run.sharding["owned_bytes"].tolist()[0] == [2 << 30, 1 << 30, 1 << 30]
    assert np.isnan(run.sharding["owned_bytes"][1, 1])


def test_a_run_of_replicas_has_nothing_about_owners(lossy: RecordedRun) -> None:
    assert lossy.sharding == {}
    page = report_page(lossy)
    assert "Where the state is" not in page
    assert "owns" not in page


def test_no_event_that_a_run_writes_is_shown_as_json() -> None:
    names = {"generation", "save_failed", "resume", "replicas_differ", "loss_not_finite", "gradient_zero", "advice"}
    assert not [name for name in names if "{" in incident_of({"event": name}).what]


def test_shares_are_in_per_cent_so_that_a_short_last_step_does_not_move_them(tmp_path: Path) -> None:
    rows = [step_row(1, shares=[30, 10]), step_row(2, shares=[30, 10]), step_row(3, shares=[3, 1])]
    page = report_page(hetseq.load_run(write_run(tmp_path / "run", rows)))
    shares = page[page.index("Shares <span") :]
    shares = shares[: shares.index("</figure>")]
    assert "per cent of a step by step" in shares
    assert places(shares) == {(0, 0), (500, 0), (1000, 0), (0, 666.7), (500, 666.7), (1000, 666.7)}  # 75 and 25, from 0
    assert '<td class="n" data-head="share %">75</td>' in page


def test_skipped_steps_are_an_incident(tmp_path: Path) -> None:
    rows = [step_row(1), step_row(2, None), step_row(3)]
    assert "1 steps were skipped" in report_page(hetseq.load_run(write_run(tmp_path / "run", rows)))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("global_batch_size: 60\nthrottle: ['1:3']\ndevices: [cpu, cpu]\n", ["--devices ''", "--throttle ''"]),
        ("global_batch_size: null\nupdate_freq: [1, 2]\nbalance: 5,2,1\n", ["--update-freq 2,4", "--balance equal"]),
        ("global_batch_size: 60\njoin: file:///shared/x\n", ["grep -vE", "--config one-device.yaml"]),
    ],
)
def test_the_command_for_one_device_takes_back_what_is_the_clusters(
    tmp_path: Path, config: str, words: list[str]
) -> None:
    path = write_run(tmp_path / "a run", [step_row(1)], config=CONFIG + config)
    said = "\n".join(repeat_lines(hetseq.load_run(path)))
    assert all(word in said for word in words), said
    assert f"'{tmp_path}/a run-one'" in said
    if "update_freq" not in config:
        assert "--update-freq" not in said


# Two runs.


def test_two_runs_are_compared_step_by_step(tmp_path: Path) -> None:
    rows = [step_row(step, 1.0) for step in (1, 2, 3, 4)]
    rows += [step_row(6, None), step_row(7, 1.0)]
    others = [step_row(2, 1.0), step_row(3, 0.25), step_row(4, 1.5), step_row(5, 9.0), step_row(6, 1.0)]
    others += [step_row(7, None)]
    first = write_run(tmp_path / "a", [*rows, validation_row(4, 1.0)], config=CONFIG + "lr: 0.1\nseed: 1\n")
    second = write_run(
        tmp_path / "b",
        [*others, validation_row(4, 3.0)],
        config="save_dir: here\ntask: mnist\nlr: 0.2\nseed: 1\nnew: 7\n",
    )
    found = compare(hetseq.load_run(first), hetseq.load_run(second))
    assert (found.steps.tolist(), found.difference.tolist(), found.alone) == ([2, 3, 4], [0.0, -0.75, 0.5], (1, 1))
    assert found.options == (("lr", "0.1", "0.2"), ("new", "(absent)", "7"))  # not where each of them lives
    assert found.validations == (("valid", "loss", 4, 1.0, 3.0),)
    assert found.sentence() == "largest loss difference 0.75 at step 3, of 3 common steps; 2 options differ"
    page = comparison_page(found)
    Reading(page)
    assert "Largest loss difference 0.75 at step 3" in page
    assert "1 step only in a, not compared." in page


def timed(path: Path, seconds: float, *, samples: int = 60, steps: int = 4) -> RecordedRun:
    rows = [step_row(step, 1.0, seconds=seconds, samples=samples) for step in range(1, steps + 1)]
    return hetseq.load_run(write_run(path, rows))


@pytest.mark.parametrize(
    ("seconds", "samples", "headline"),
    [
        (0.5, 60, "b is 3.00 times as fast as a: 6.0 s for a and 2.0 s for b"),
        (4.5, 60, "a is 3.00 times as fast as b: 6.0 s for a and 18.0 s for b"),
        (1.51, 60, "a and b are equally fast: 6.0 s for a and 6.0 s for b"),
        (3.0, 120, "a and b are equally fast: 40 samples/s for a and 40 samples/s for b"),
    ],
)
def test_the_headline_of_two_runs_is_which_is_faster(
    tmp_path: Path, seconds: float, samples: int, headline: str
) -> None:
    found = compare(timed(tmp_path / "a", 1.5), timed(tmp_path / "b", seconds, samples=samples, steps=6))
    assert found.headline() == headline
    assert f'<p class="headline">{headline}</p>' in comparison_page(found)


def test_without_a_common_step_no_run_is_faster(tmp_path: Path) -> None:
    one = hetseq.load_run(write_run(tmp_path / "a", [step_row(1)]))
    other = hetseq.load_run(write_run(tmp_path / "b", [step_row(7)]))
    assert compare(one, other).headline() == ""
    assert "headline" not in comparison_page(compare(one, other)).partition("</head>")[2]


def test_equal_curves_are_both_seen_by_step_and_by_time(tmp_path: Path) -> None:
    page = comparison_page(compare(timed(tmp_path / "a", 1.5), timed(tmp_path / "b", 3.0)))
    by_step, by_time = (re.search(f"{title} <span.*?</figure>", page, re.DOTALL) for title in ("Loss", "Loss by time"))
    assert by_step is not None
    assert by_time is not None
    for figure in (by_step.group(), by_time.group()):
        assert '<path class="line c0" ' in figure
        assert '<path class="line c1 dashed d1" ' in figure
    assert "by seconds in steps" in by_time.group()
    assert (1000.0, 500.0) in places(by_time.group())  # the slow one ends last
    assert max(x for x, _ in places(by_time.group().partition('"line c1 dashed d1"')[0])) == 428.6  # of 1.5 to 12 s


def test_equal_runs_are_called_equal_and_strangers_strangers(tmp_path: Path) -> None:
    one = hetseq.load_run(write_run(tmp_path / "a", [step_row(1)]))
    other = hetseq.load_run(write_run(tmp_path / "b", [step_row(7)]))
    assert compare(one, one).sentence() == "all losses are equal in 1 common steps; 0 options differ"
    assert compare(one, other).sentence() == "no step in common: 1 step in the first run, 1 step in the second"
    Reading(comparison_page(compare(one, other)))


def test_runs_whose_steps_took_other_samples_are_not_compared_step_by_step(tmp_path: Path) -> None:
    one, other = (
        hetseq.load_run(write_run(tmp_path / name, [step_row(1, loss)], config=CONFIG + f"seed: {loss:g}\nlr: 0.1\n"))
        for name, loss in (("a", 1.0), ("b", 2.0))
    )
    page = comparison_page(compare(one, other))
    assert "may have taken different samples in the two runs: --seed differs. If so" in page
    assert "more than rounding" not in page


def test_a_run_with_data_in_parts_took_other_samples(tmp_path: Path) -> None:
    one, other = (
        hetseq.load_run(write_run(tmp_path / name, [step_row(1, 1.0)], config=CONFIG + f"data_by_host: {name}\n"))
        for name in ("true", "false")
    )
    assert "different samples in the two runs: --data-by-host differs. If so" in comparison_page(compare(one, other))


def test_options_that_differ_have_the_names_that_are_typed(tmp_path: Path) -> None:
    one, other = (
        hetseq.load_run(write_run(
            tmp_path / number, [step_row(1)], config=CONFIG + f"distributed_gpus: {number}\nweight_decay: 0.{number}\n"
        )) for number in "12"
    )  # fmt: skip
    page = comparison_page(compare(one, other))
    assert re.findall(r"<td[^>]*>(--[a-z-]+)</td>", page) == ["--ranks", "--weight-decay"]


@pytest.mark.parametrize("seconds", [0.6, 0.4])
def test_each_bar_of_an_average_step_is_the_step(tmp_path: Path, seconds: float) -> None:
    rows = [step_row(step, seconds=seconds + step / 100) for step in (1, 3)]
    page = report_page(hetseq.load_run(write_run(tmp_path / "run", rows)))
    chart = page[page.index("A step, rank by rank <span") :].partition("</figure>")[0]
    parts = re.findall(r"<title>(rank \d)[^:]*: (\w+) ([\d.]+) ms</title>", chart)
    for rank in ("rank 0", "rank 1"):
        sizes = {kind: float(size) for name, kind, size in parts if name == rank}
        assert sum(sizes.values()) == pytest.approx(1000 * seconds + 20, abs=1)
        assert ("other" in sizes) == (seconds == 0.6)
    assert chart.count(f">{1000 * seconds + 20:g} ms<") == 2


@pytest.mark.parametrize(("batch", "is_other"), [("60", False), ("null", True)])
def test_micro_batches_make_other_steps_only_without_a_global_batch(
    tmp_path: Path, batch: str, *, is_other: bool
) -> None:
    one, other = (
        hetseq.load_run(write_run(
            tmp_path / size, [step_row(1)], config=CONFIG + f"global_batch_size: {batch}\nmax_sentences: {size}\n"
        )) for size in "12"
    )  # fmt: skip
    assert ("--batch-size differs" in comparison_page(compare(one, other))) == is_other


def test_steps_without_a_loss_are_in_common_all_the_same(tmp_path: Path) -> None:
    one = hetseq.load_run(write_run(tmp_path / "a", [step_row(1), step_row(2, math.inf)]))
    other = hetseq.load_run(write_run(tmp_path / "b", [step_row(1, None), step_row(2, math.inf)]))
    assert compare(one, other).sentence() == "2 steps in common, of which none has a loss in both"


# What no run writes.


def changed(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`row` with each of its values replaced in turn, at any depth."""
    for key, value in row.items():
        for other in (None, -1, 10**30, math.inf, True, "x", [], [None, None], ["x", 2], {"a": 1}):
            yield {**row, key: other}
        if isinstance(value, dict):
            yield from ({**row, key: inner} for inner in changed(value))


def test_whatever_rows_and_events_say_there_is_a_report(tmp_path: Path) -> None:
    rows = [
        {**odd, "step": step} if type(odd.get("step")) is int and odd["step"] in (1, 2) else odd
        for step, odd in enumerate(changed(step_row(2, slots=(0, 2))), start=3)
    ]  # fmt: skip
    rows += changed(validation_row(2, 1.0, valid_accuracy=0.5))
    kinds = {"generation": {"ranks": [0], "story": "x", "seconds": 1.0}, "resume": {"path": "/x", "refused": []},
             "replicas_differ": {"ranks": [0], "source": 1, "cause": "x"}, "save_failed": {"error": "x"}}  # fmt: skip
    events = [odd for kind, told in kinds.items() for odd in changed({"event": kind, "step": 2, **told})]
    loaded = hetseq.load_run(write_run(tmp_path / "run", [step_row(1), *rows, step_row(2)], events=events))
    assert len(loaded.steps) > 100
    Reading(report_page(loaded))
    Reading(comparison_page(compare(loaded, loaded)))


def test_many_bars_are_cut_between_two_of_them() -> None:
    bars = [Bar(f"rank {rank}", [1.0], "1") for rank in range(40)]
    chart = bar_chart("A step", [("compute", 0)], bars, unit="ms")
    Reading(chart)
    assert re.findall(r'<svg class="bars" height="(\d+)"', chart) == ["576", "576", "288"]
    assert 'class="chart long"' in chart
    assert "long" not in bar_chart("A step", [("compute", 0)], bars[:16], unit="ms")


# The command.


def test_the_command_writes_a_page_that_only_its_owner_may_read(tmp_path: Path) -> None:
    said: list[str] = []
    path = write_run(tmp_path / "run", [step_row(1)])
    assert run([str(path)], said.append) == 0
    assert said == [f"report: {path}/report.html"]
    assert (path / "report.html").stat().st_mode & 0o777 == 0o600
    assert "Versions there" in (path / "report.html").read_text()


def test_two_runs_are_told_apart_on_the_terminal_too(tmp_path: Path) -> None:
    said: list[str] = []
    first, second = (str(write_run(tmp_path / name, [step_row(1)])) for name in "ab")
    assert run([first, second, "--output", str(tmp_path / "c.html")], said.append) == 0
    assert said == ["all losses are equal in 1 common steps; 0 options differ", f"comparison: {tmp_path}/c.html"]
    assert run([first, second], said.append) == 0
    assert (tmp_path / "a" / "comparison.html").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected RUN [RUN2] [RUN3] [RUN4], found none"),
        (["a", "b", "c", "d", "e"], "found a b c d e"),
        (["a", "--out", "x"], "unknown option --out"),
        (["a", "--output"], "--output has no value: expected --output FILE"),
        (["a", "--output=/"], "is a folder"),
        (["nowhere"], "does not exist"),
    ],
)
def test_a_command_line_that_says_something_else_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        run(words, print)


def test_a_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [step_row(1)])
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match="are the same directory: expected two runs to compare"):
        run([str(path), str(tmp_path / "link")], print)


def test_several_runs_are_compared_with_the_first(tmp_path: Path) -> None:
    said: list[str] = []
    first, second, third = (
        str(timed(tmp_path / name, seconds).path) for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 0.5))
    )
    assert run([first, second, third], said.append) == 0
    assert said[:2] == [f"{name}: all losses are equal in 4 common steps; 0 options differ" for name in "bc"]
    page = (tmp_path / "a" / "comparison.html").read_text()
    Reading(page)
    assert re.findall('class="headline">([^:]*):', page) == [
        "a is 2.00 times as fast as b", "c is 2.00 times as fast as a",
    ]  # fmt: skip
    by_time = page[page.index("Loss by time <span") :].partition("</figure>")[0]
    assert [by_time.count(f'<path class="line {kind}"') for kind in ("c0", "c1 dashed d1", "c2 dashed d2")] == [1, 1, 1]
    assert "Options that differ: a and c" in page
    with pytest.raises(ConfigError, match="are the same directory"):
        run([first, second, second], print)
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        run([first, second, "nowhere"], print)


def test_a_place_that_cannot_be_written_is_named_with_a_remedy(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [step_row(1)])
    with pytest.raises(ConfigError, match=r"nowhere/x.html cannot be written .*--output FILE"):
        run([str(path), "--output", str(tmp_path / "nowhere" / "x.html")], print)


# At the end of a run.


def end_of_run(path: Path, *, row: str = "") -> list[str]:
    told: list[str] = []
    with reporting(RunDirectory(path), told.append), (path / "metrics.jsonl").open("a") as file:
        file.write(row)
    return told


def test_a_run_that_made_steps_is_reported(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [step_row(1)])
    assert end_of_run(path) == []  # nothing has come
    assert not (path / "report.html").exists()
    assert end_of_run(path, row='{"step": 2, "loss": 0.125}\n') == [f"report: {path}/report.html"]
    assert "0.125" in (path / "report.html").read_text()


def test_a_run_that_failed_is_reported_and_fails_as_it_did(tmp_path: Path) -> None:
    path, told = write_run(tmp_path / "run", [], states={0: "train"}), list[str]()

    def fail() -> None:
        with reporting(RunDirectory(path), told.append):
            (path / "metrics.jsonl").write_text('{"step": 2, "loss": 0.125}\n')
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert told == [f"report: {path}/report.html"]
    assert "Ended before all steps were done" in (path / "report.html").read_text()


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [])
    (path / "report.html").mkdir()
    (told,) = end_of_run(path, row='{"step": 2}\n')
    assert told.startswith(f"warning: there is no report ({path}/report.html: Is a directory)")
    assert f"`hetseq report {path}`" in told


def test_whatever_else_goes_wrong_is_a_warning_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> str:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(writing, "report_page", fail)
    (told,) = end_of_run(write_run(tmp_path / "run", []), row='{"step": 2}\n')
    assert told.startswith("warning: there is no report (ZeroDivisionError: by zero)")


def test_a_file_system_that_hangs_does_not_hold_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    path = write_run(tmp_path / "run", [])

    def hang(_: Path) -> RecordedRun:
        assert is_over.wait(10)
        return made_up(np.ones(3), np.ones((3, 2), np.float32))

    monkeypatch.setattr(writing, "load_run", hang)
    monkeypatch.setattr(writing, "_PATIENCE_S", 0.01)
    (told,) = end_of_run(path, row='{"step": 2}\n')
    is_over.set()
    assert told == f"warning: the report took longer than 0.01 s: `hetseq report {path}` writes it"
    for thread in threading.enumerate():
        if thread.name == "report":
            thread.join(10)
