"""`hetseq top`: what a person sees of a run from its status files alone."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console

from hetseq import run_directory
from hetseq.commands.top import _STYLES, parse, run, styled
from hetseq.errors import ConfigError
from hetseq.monitor.advice import AdviceSetting
from hetseq.monitor.lookout import Lookout
from hetseq.monitor.run_view import View, view
from hetseq.monitor.status import RunStatus, read_facts
from hetseq.run.after_step import StatusFiles
from hetseq.run_directory import RunDirectory
from hetseq.system.rank_phase import Phase, Stand
from tests.support.recorded import step_row

SIZE = 64


def row(step: int, size: int) -> dict[str, Any]:
    kinds = ("compute_s", "data_s", "wait_s", "overhead_s", "fixed_s", "per_sample_s")
    ranks: dict[str, Any] = {kind: [0.1] * size for kind in kinds}
    ranks |= {"names": [f"lab{rank}/cpu" for rank in range(size)], "memory_bytes": [0] * size}
    return {
        "step": step, "epoch": 1, "loss": 0.5, "samples": 4 * size, "seconds": 0.25, "shares": [4] * size,
        "efficiency": 0.9, "communication_s": 0.01, "pace": size - 1, "generation": 0, "ranks": ranks,
    }  # fmt: skip


def told(step: int, size: int) -> RunStatus:
    status = RunStatus(AdviceSetting("runs/a"))
    status.total_steps = 1000
    for number in range(1, step + 1):
        status.step(row(number, size), number / 4, saved_step=0)
    return status


def write(folder: Path, slot: int, **changes: Any) -> Path:
    (folder / "status").mkdir(exist_ok=True)
    path = folder / "status" / f"rank-{slot}.json"
    about = {"pid": 1, "node": f"lab{slot}", "device": "cpu", "step": 8, "state": "train", "share": 4}
    path.write_text(json.dumps({**about, **changes}))
    return path


def shown(run: Path, look: Lookout | None = None, **room: Any) -> str:
    look = look or Lookout(run)
    return "\n".join(view(run, look.signs(), look, **{"width": 120, **room}).lines)


def gang(run: Path, size: int) -> None:
    for slot in range(size):
        write(run, slot, **({"run": told(8, size).told(2.0)} if slot == 0 else {}))


def test_sixty_four_ranks_fit_into_a_terminal_with_who_is_in_trouble(tmp_path: Path) -> None:
    gang(tmp_path, SIZE)
    write(tmp_path, 37, pid=None, state="gone")
    lines = shown(tmp_path, width=80, height=24).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "step 8/1,000" in lines[0]
    assert "rank 37 (lab37/cpu) is gone, after step 8" in lines[-1]
    assert any(line.startswith(">  63") for line in lines)  # who sets the pace
    assert any(line.split()[0] == "37" for line in lines)
    assert len(shown(tmp_path).splitlines()) >= SIZE


def test_the_parts_of_owners_reach_the_view_and_are_no_load_for_replicas(tmp_path: Path) -> None:
    own, status = row(1, 3), RunStatus(AdviceSetting("runs/a"))
    own["ranks"] |= {"owned_bytes": [3, 1, 0], "sent_bytes": [5 << 20] * 3, "received_bytes": [7 << 20] * 3}
    status.step(own, 0.0, saved_step=0)
    told_of_owners = status.told(1.0)
    assert told_of_owners["ranks"].keys() - told(1, 3).told(1.0)["ranks"].keys() == (
        {"owned_bytes", "sent_bytes", "received_bytes"}
    )
    for slot in range(3):
        write(tmp_path, slot, **({"run": json.loads(json.dumps(told_of_owners))} if slot == 0 else {}))
    lines = shown(tmp_path, width=160).splitlines()
    [head] = [line for line in lines if "owns" in line]
    assert "plan" not in head
    assert [line.split()[-2:] for line in lines if "MiB" in line] == [["train", "now"]] * 3
    assert ["75%" in line for line in lines if "MiB" in line] == [True, False, False]
    gang(tmp_path, 3)
    assert "owns" not in shown(tmp_path, width=160)


def test_each_shadow_has_a_line_that_stands_out_unless_it_follows(tmp_path: Path) -> None:
    gang(tmp_path, 1)
    status = told(8, 1)
    status.shadows = [
        {"slot": 1, "node": "labS", "state": "follows", "step": 1203},
        {"slot": 2, "node": "", "state": "is out of reach", "step": 0},
    ]
    write(tmp_path, 0, run=json.loads(json.dumps(status.told(2.0))))
    assert shown(tmp_path).splitlines()[-2:] == [
        "the shadow on labS (log/rank-1.txt) follows, and was sent step 1,203",
        "the shadow (log/rank-2.txt) is out of reach",
    ]
    look = Lookout(tmp_path)
    kinds = {text: kind for line in view(tmp_path, look.signs(), look, width=120).drawn for text, kind in line}
    assert [kind for text, kind in kinds.items() if "the shadow" in text] == ["", "slow"]
    write(tmp_path, 0, run=told(8, 1).told(2.0))
    assert "the shadow" not in shown(tmp_path)


def test_a_rank_whose_file_does_not_change_is_silent_by_the_clock_of_the_reader(tmp_path: Path) -> None:
    now = [0.0]
    gang(tmp_path, 2)
    look = Lookout(tmp_path, now=lambda: now[0], wall=lambda: now[0] * 1e9)  # which tells nothing
    assert "sign of life" not in shown(tmp_path, look)
    now[0] = 20.0
    os.utime(write(tmp_path, 0, run=told(8, 2).told(2.0)), ns=(1, 1))
    assert "rank 1 (lab1/cpu) has given no sign of life for 20 s" in shown(tmp_path, look)


def test_a_rank_that_stands_still_is_named_with_what_it_is_at(tmp_path: Path) -> None:
    gang(tmp_path, 3)
    write(tmp_path, 1, phase="reading data (loader)", phase_s=34.2, waits=False)
    write(tmp_path, 2, phase="reduction", phase_s=34.1, waits=True)
    lines = shown(tmp_path)
    assert "rank 1 (lab1/cpu) is stuck: reading data (loader) for 34 s" in lines
    assert lines.count("is stuck") == 1
    write(tmp_path, 1, phase="reading data (loader)", phase_s=5.0, waits=False)
    assert "is stuck" not in shown(tmp_path)


def test_a_silent_rank_of_this_machine_is_told_to_be_stopped(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        os.waitpid(pid, os.WUNTRACED)
        os.utime(write(tmp_path, 1, pid=pid, node=socket.gethostname()[:200]), ns=(1, 1))
        write(tmp_path, 0)
        assert "its process is stopped (SIGSTOP" in " ".join(shown(tmp_path).split())
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_while_a_rank_stands_still_its_file_says_so_once_a_second_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = list[dict[str, Any]]()
    monkeypatch.setattr(run_directory, "replace_file", lambda path, data, **_: writes.append(json.loads(data)))
    whole = SimpleNamespace(rank=0, all_gather_rows=lambda about: np.stack([about]))
    sharing = cast(Any, SimpleNamespace(whole=whole, ranks=(0,), is_writer=True))
    files = StatusFiles(RunDirectory(tmp_path), sharing, device="cpu")
    stand = Stand(Phase.DATA, 7, 0.0, 41.0, False, 60.0, 0.0, True)
    files.renew(stand)
    assert writes == [], "nothing was said yet that could be said again"
    files.write(-1e9, step=6, state="train", shares=[4])
    files.renew(stand)
    files.renew(stand)
    assert [told.get("phase_s") for told in writes] == [None, 41.0]
    assert {**writes[1], "phase": "", "phase_s": 0, "waits": 0} == {**writes[0], "phase": "", "phase_s": 0, "waits": 0}
    assert (writes[1]["phase"], writes[1]["waits"]) == ("reading data (loader)", False)


@pytest.mark.parametrize(("state", "words"), [("done", "finished after step 8"), ("stopped", "stopped after step 8")])
def test_a_run_that_has_ended_says_how(tmp_path: Path, state: str, words: str) -> None:
    for slot in range(2):
        write(tmp_path, slot, state=state)
    look = Lookout(tmp_path)
    assert words in (view(tmp_path, look.signs(), look, width=80).ending or "")


def test_a_run_without_a_launcher_has_ended_once_nobody_lives(tmp_path: Path) -> None:
    now = [0.0]
    gang(tmp_path, 2)
    look = Lookout(tmp_path, now=lambda: now[0], wall=lambda: 0.0)
    look.signs()
    now[0] = 5.0
    assert view(tmp_path, look.signs(), look, width=80).ending is None
    (tmp_path / ".lock").touch()
    assert "ended early, after step 8" in (view(tmp_path, look.signs(), look, width=80).ending or "")


def test_a_process_of_this_machine_that_has_gone_is_dead(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    os.utime(write(tmp_path, 1, pid=pid, node=socket.gethostname()[:200]), ns=(1, 1))
    write(tmp_path, 0)
    assert "has died, after step 8" in shown(tmp_path)


def test_before_the_first_step_and_beside_files_of_others_there_is_a_table(tmp_path: Path) -> None:
    write(tmp_path, 0, state="start", share=0, run={"unheard": "of"})
    (tmp_path / "status" / "rank-x.json").write_text("{")
    (tmp_path / "status" / "rank-7.json").write_text("{")
    assert "no step yet" in shown(tmp_path)


def changed(told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`told` with each of its values replaced in turn, at any depth."""
    for key, value in told.items():
        for other in (
            None,
            -1,
            10**6,
            1.5,
            math.inf,
            math.nan,
            True,
            "x\x1b[2J\n",
            [],
            {"a": 1},
            [None, None],
            ["x", 2],
        ):
            yield {**told, key: other}
        if isinstance(value, dict):
            yield from ({**told, key: inner} for inner in changed(value))


@pytest.mark.parametrize("is_drawn", [True, False])
def test_whatever_a_status_file_says_there_are_lines_without_commands_for_the_terminal(
    tmp_path: Path, *, is_drawn: bool
) -> None:
    gang(tmp_path, 2)
    status = told(8, 2)
    status.saved(7, 1.75)
    path = write(tmp_path, 0, run=status.told(2.0))
    texts = [json.dumps(about) for about in changed(json.loads(path.read_text()))]
    for number, text in enumerate([*texts, "", "{", "null", "[]", "\0", texts[0][:90]]):
        path.write_text(text)
        os.utime(path, ns=(number, number))
        lines = shown(tmp_path, width=60, height=24, is_drawn=is_drawn).split("\n")
        assert len(lines) <= 24, text
        assert max(map(len, lines)) <= 60, text
        assert "".join(lines).isprintable(), text


def test_a_file_of_the_future_is_new(tmp_path: Path) -> None:
    os.utime(write(tmp_path, 0), ns=(2**62, 2**62))
    assert "sign of life" not in shown(tmp_path)


@pytest.mark.parametrize(("width", "height"), [(40, 24), (40, 10), (20, 10)])
def test_on_little_room_who_is_in_trouble_comes_before_advice(tmp_path: Path, width: int, height: int) -> None:
    folder = tmp_path / "digits-7"
    folder.mkdir()
    gang(folder, 3)
    status = told(8, 3).told(2.0)
    write(folder, 0, run={**status, "advice": ["advice " * 12] * 3})
    write(folder, 2, pid=None, state="gone")
    lines = shown(folder, width=width, height=height).splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert "rank 2 (lab2/cpu) is gone" in " ".join(lines).replace("   ", " ").replace("is  gone", "is gone")
    assert (height == 24) == any("advice" in line for line in lines)
    assert width < 40 or lines[0] == "digits-7  step 8/1,000  loss 0.5"


def test_of_many_ranks_that_are_gone_the_first_are_named(tmp_path: Path) -> None:
    gang(tmp_path, SIZE)
    for slot in range(4, SIZE):
        write(tmp_path, slot, pid=None, state="gone")
    lines = shown(tmp_path, width=80, height=24).splitlines()
    assert len(lines) <= 24
    assert lines[-1] == "and 55 more ranks are gone, dead, silent or stuck"
    assert "rank 4 (lab4/cpu) is gone" in lines[-6]


def test_without_rich_the_view_is_plain_and_a_line_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 0, state="done")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for module in [name for name in sys.modules if name.partition(".")[0] == "rich"] or ["rich", "rich.console"]:
        monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]  # which makes its import fail
    said: list[str] = []
    assert run([str(tmp_path)], said.append) == 0
    assert said[0].startswith("hetseq top: no live view, because rich cannot be imported (")
    assert said[0].endswith("): pip install rich")
    assert "finished after step 8" in said[1]


def test_nothing_in_the_run_directory_is_changed(tmp_path: Path) -> None:
    gang(tmp_path, 2)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert run([str(tmp_path), "--once"], lambda line: None) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_table_stands_still_while_numbers_change_their_width(tmp_path: Path) -> None:
    heights, run = set(), tmp_path / "a"
    run.mkdir()
    for width in range(80, 140):
        for loss, age_s in ((0.5, 1.0), (0.06123, 90.0)):
            status = told(8, 2)
            status.saved(7, 1.75)
            write(run, 0, run={**status.told(2.0), "loss": loss, "checkpoint_age_s": age_s})
            heights.add(next(n for n, line in enumerate(shown(run, width=width).splitlines()) if "ranks:" in line))
    assert heights == {2}


def test_sixty_four_ranks_are_a_small_file() -> None:
    status = told(8, SIZE)
    about = row(9, SIZE)
    kinds = {kind: [1 / (3 + rank) for rank in range(SIZE)] for kind in about["ranks"] if kind.endswith("_s")}
    for step in range(9, 30):  # figures without an end
        status.step({**about, "step": step, "ranks": {**about["ranks"], **kinds}}, step / 3, saved_step=0)
    assert len(run_directory.json_line(status.told(10.0))) < 10_000


def test_a_checkpoint_that_is_newer_than_the_step_is_no_second_old() -> None:
    status = told(8, 2)
    status.saved(8, 2.01)
    assert str(status.told(2.0)["checkpoint_age_s"]) == "0.0"


def test_what_is_written_is_what_is_read() -> None:
    status = told(8, 2)
    status.saved(7, 1.75)
    facts = read_facts(json.loads(run_directory.json_line(status.told(2.0))))
    assert facts is not None
    assert facts.summary is not None
    assert (facts.checkpoint, facts.checkpoint_age_s) == (7, 0.2)
    assert facts.eta_s == (248.0, 248.0)  # 992 steps of 0.25 s, all alike
    np.testing.assert_array_equal(facts.summary.compute_s, [0.1, 0.1])
    assert np.isnan(facts.summary.memory_limit_bytes).all()


def test_sixty_four_ranks_write_once_a_second_each_however_many_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = list[str]()
    monkeypatch.setattr(run_directory, "replace_file", lambda path, data, **_: writes.append(path.name))
    files = list[StatusFiles]()
    for rank in range(SIZE):
        gather = lambda about: np.stack([about] * SIZE)  # noqa: E731
        whole = SimpleNamespace(rank=rank, all_gather_rows=gather)
        sharing = cast(Any, SimpleNamespace(whole=whole, ranks=tuple(range(SIZE)), is_writer=rank == 0))
        files.append(StatusFiles(RunDirectory(tmp_path), sharing, device="cpu", run=RunStatus(AdviceSetting("a"))))
    steps, per_s = 200, 20
    for step in range(steps):
        if files[0].run is not None:
            files[0].run.step(row(step, SIZE), step / per_s, saved_step=0)
        for one in files:
            one.write(step / per_s, step=step, state="train", shares=[4] * SIZE)
    assert [files[0].run is not None, files[1].run] == [True, None]
    assert len(writes) == SIZE * steps // per_s
    assert {writes.count(name) for name in writes} == {steps // per_s}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected one RUN, found none"),
        (["a", "b"], "found a b"),
        (["a", "--often"], "unknown option --often"),
        (["a", "--interval"], "has no value"),
        (["a", "--interval", "0"], "expected seconds of 0.1 or more"),
        (["a", "--interval=soon"], "--interval soon"),
    ],
)
def test_a_mistyped_command_is_explained(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(words)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"runs/none does not exist: expected the --save-dir of a run"):
        run([str(tmp_path / "runs" / "none")], print)
    with pytest.raises(ConfigError, match="no file in it was written by a run"):
        run([str(tmp_path)], print)


# On a terminal: bars, curves, incidents, and a run that starts or regroups.


def drawn(run: Path, look: Lookout | None = None, **room: Any) -> View:
    look = look or Lookout(run)
    return view(run, look.signs(), look, **{"width": 120, "height": 30, "is_drawn": True, **room})


def recorded(run: Path, steps: int, *events: dict[str, Any]) -> None:
    """The rows of so many steps of three ranks, whose loss halves in each, and events."""
    rows = [step_row(step, 2.0**-step, slots=(0, 1, 2)) for step in range(1, steps + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (run / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))


KILLED = {
    "event": "generation", "generation": 1, "step": 8, "ranks": [0, 2], "seconds": 0.07,
    "time_utc": "1970-01-01T00:16:40.000Z",
    "story": "rank 1 on labB was killed (SIGKILL, as the kernel does when memory runs out) [worker-died]",
}  # fmt: skip
AFTER = 1002.0  # seconds of the wall clock: 2 s later


def kinds_of(seen: View, words: str) -> set[str]:
    """The kinds of the pieces with these words."""
    return {kind for line in seen.drawn for text, kind in line if words in text}


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (120, "rank where share █ compute ▓ data ░ wait samples/s compute wait data memory GiB state seen"),
        (80, "rank where share █ compute ▓ data ▒ rest ░ wait wait state seen"),
        (60, "rank where share step wait state seen"),
        (40, "rank share █ compute ░ wait state"),
        (24, "rank share state"),
    ],
)
def test_a_terminal_shows_for_each_rank_where_its_step_goes(tmp_path: Path, width: int, heads: str) -> None:
    run = tmp_path / "digits"
    run.mkdir()
    gang(run, 3)
    recorded(run, 8)
    seen = drawn(run, width=width)
    lines = seen.lines
    assert max(map(len, lines)) <= width
    place = next(place for place, line in enumerate(lines) if " share" in line)
    assert " ".join(lines[place].split()) == heads
    first = lines[place + 1]
    bar = "".join(letter for letter in first if letter in "█▓▒░")
    assert (len(bar) > 0) == (width > 24)
    assert "".join(sorted(set(bar), key=bar.index)) in ("█▓▒░", "")
    if width >= 40:
        assert "step 8/1,000" in lines[0]
        assert "loss 0.5" in lines[0]
        assert any("48 samples/s" in line for line in lines[:2])


def test_colours_are_by_state_and_never_needed(tmp_path: Path) -> None:
    gang(tmp_path, 3)
    write(tmp_path, 1, pid=None, state="gone")
    seen = drawn(tmp_path)
    assert [kinds_of(seen, word) for word in ("train", "slow", "gone")] == [{"good"}, {"slow"}, {"bad"}]
    assert any(line.startswith(">") and "slow" in line for line in seen.lines)  # rank 2, for which the others wait
    assert "slow" not in shown(tmp_path)  # plain text is for programs, and has one word for it
    assert {kind for line in seen.drawn for _, kind in line} <= {*_STYLES, ""}


def test_without_a_colour_the_text_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gang(tmp_path, 3)
    recorded(tmp_path, 8)
    seen = drawn(tmp_path)
    texts = {}
    for name, value in (("NO_COLOR", "1"), ("NO_COLOR", "")):
        monkeypatch.setenv(name, value)
        stream = io.StringIO()
        Console(file=stream, force_terminal=True, color_system="truecolor", width=120).print(styled(seen))
        texts[value] = stream.getvalue()
    assert re.findall(r"\x1b\[[0-9;]*3[0-9]", texts["1"]) == []
    assert re.findall(r"\x1b\[[0-9;]*3[0-9]", texts[""]) != []
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", text).split("\n") for text in texts.values()]
    assert [[line.rstrip() for line in lines] for lines in plain] == [[*map(str.rstrip, seen.lines), ""]] * 2


def test_the_course_of_loss_and_speed_is_drawn_where_it_fits(tmp_path: Path) -> None:
    gang(tmp_path, 3)
    recorded(tmp_path, 8)
    wide = [" ".join(line.split()) for line in drawn(tmp_path).lines]
    assert "loss 0.5 █▇▆▅▄▃▂▁ 0.00391 samples/s 180 ▁▁▁▁▁▁▁▁ 180" in wide
    narrow = drawn(tmp_path, width=40).lines
    assert "ranks: medians of 5 steps" in narrow  # and not a part of the words behind it
    assert "loss 0.5 █▇▆▅▄▃▂▁ 0.00391" in narrow
    assert "samples/s 180 ▁▁▁▁▁▁▁▁ 180" in narrow
    assert not any("▁" in line for line in drawn(tmp_path, height=8).lines)
    assert "▁" not in shown(tmp_path)


def test_the_last_three_incidents_are_told_in_words(tmp_path: Path) -> None:
    gang(tmp_path, 3)
    back = {**KILLED, "generation": 2, "story": "rank 1 on labB is back", "ranks": [0, 1, 2]}
    advice = {"event": "advice", "about": "data", "text": "more --num-workers"}
    recorded(tmp_path, 8, {"event": "resume", "step": 1}, KILLED, {"event": "save", "step": 8}, back, advice, KILLED)
    look = Lookout(tmp_path, wall=lambda: AFTER)
    lines = drawn(tmp_path, look, width=160).lines
    told = [line for line in lines if " ago, step 8: " in line]
    killed = (
        "2 s ago, step 8: rank 1 on labB was killed (SIGKILL, as the kernel does when memory runs out): 2 ranks"
        " continue, regrouped in 0.07 s"
    )
    assert told == [
        killed,
        "2 s ago, step 8: rank 1 on labB is back: 3 ranks continue, regrouped in 0.07 s",
        killed,
    ]
    assert not any("{" in line for line in lines)
    assert "ago, step 8" not in shown(tmp_path, look)


def test_many_ranks_leave_room_for_curve_and_incidents(tmp_path: Path) -> None:
    gang(tmp_path, SIZE)
    recorded(tmp_path, 8, KILLED, KILLED)
    for height in range(6, 30):
        lines = drawn(tmp_path, width=80, height=height).lines
        assert len(lines) <= max(height, 7)
        assert any(line.startswith(">  63") for line in lines)
    assert any("▁" in line for line in lines)
    assert any("ago, step 8" in line for line in lines)


@pytest.mark.parametrize("is_drawn", [True, False])
def test_ranks_that_regroup_are_shown_with_what_was_lost_and_never_with_zeros(
    tmp_path: Path, *, is_drawn: bool
) -> None:
    """The rank that told of the run has been killed, and the others have not finished a step without it."""
    recorded(tmp_path, 8, KILLED)
    write(tmp_path, 0, share=None, run={})
    write(tmp_path, 1, pid=None, state="gone", share=0)
    write(tmp_path, 2, share=None)
    look = Lookout(tmp_path, wall=lambda: AFTER)
    lines = view(tmp_path, look.signs(), look, width=120, is_drawn=is_drawn).lines
    assert "step 8  epoch 1  loss 0.003906" in lines[0]
    assert [line.split()[2:4] for line in lines if "/cpu  " in line and "train" in line] == [["30", "33%"]] * 2
    assert "rank 1 on labB was killed 2 s ago; 2 ranks resume from step 8" in lines
    look = Lookout(tmp_path, wall=lambda: AFTER - 2)
    lines = view(tmp_path, look.signs(), look, width=120, is_drawn=is_drawn).lines
    assert "rank 1 on labB was killed just now; 2 ranks resume from step 8" in lines
    assert not any("ago, step 8" in line for line in lines)  # and not twice


def test_the_last_report_is_shown_while_ranks_regroup(tmp_path: Path) -> None:
    gang(tmp_path, 3)
    look = Lookout(tmp_path)
    before = drawn(tmp_path, look).lines[0]
    os.utime(write(tmp_path, 0, run={}), ns=(2**60, 2**60))
    after = drawn(tmp_path, look)
    assert after.lines[0] == before
    assert "the ranks regroup: the next step is not done yet" in after.lines
    assert not any("ETA" in line for line in after.lines)


def launched(run: Path) -> None:
    """A launcher has made the directory, and has started three ranks of which two have loaded."""
    (run / "config.yaml").write_text(f"{run_directory.MARKER}, run id 0123456789abcdef\ndistributed_world_size: 3\n")
    (run / ".lock").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    os.utime(run / ".lock", ns=(10**12, 10**12))
    (run / "log").mkdir()
    for slot in (0, 1):
        (run / "log" / f"rank-{slot}.txt").touch()


def test_a_run_that_starts_is_waited_for(tmp_path: Path) -> None:
    run_ = tmp_path / "digits"
    run_.mkdir()
    launched(run_)
    look = Lookout(run_, wall=lambda: 1012.0)
    for width in (120, 20):
        seen = drawn(run_, look, width=width)
        assert " ".join(" ".join(seen.lines).split()) == "digits starting: 2 of 3 ranks have loaded, 12 s"
        assert seen.ending is None
    for slot in range(3):
        write(run_, slot, state="start", share=None)
    seen = drawn(run_, look)
    assert seen.lines[0] == "digits  starting: 3 of 3 ranks have loaded, 12 s"
    assert [line.split()[2] for line in seen.lines if "/cpu" in line] == ["-"] * 3  # no share yet, which is not 0
    said: list[str] = []
    assert run([str(run_), "--once"], said.append) == 0
    assert "starting: 3 of 3 ranks have loaded" in said[0]


def test_a_start_that_failed_ends_the_view(tmp_path: Path) -> None:
    launched(tmp_path)
    look = Lookout(tmp_path)
    assert drawn(tmp_path, look).ending is None
    (tmp_path / ".lock").write_text("")
    assert drawn(tmp_path, look).ending == (
        "the run ended before its first step: the output of `hetseq train` and log/rank-N.txt say why"
    )


def test_of_a_run_that_has_ended_no_time_is_left(tmp_path: Path) -> None:
    for slot in range(2):
        write(tmp_path, slot, state="done", **({"run": told(8, 2).told(2.0)} if slot == 0 else {}))
    seen = drawn(tmp_path)
    assert seen.lines[-1] == "the run has ended: finished after step 8"
    assert not any("ETA" in line for line in seen.lines)
    assert kinds_of(seen, "finished") == {"good"}


def test_whatever_rows_and_events_say_there_is_a_view(tmp_path: Path) -> None:
    write(tmp_path, 0, run={})
    write(tmp_path, 1)
    rows = [*changed(step_row(2, slots=(0, 2)))]
    events = [
        *changed({**KILLED, "generation": 5}),
        *changed({"event": "resume", "path": "x", "refused": [], "step": 2}),
    ]
    for number in range(max(len(rows), len(events))):
        one, event = rows[number % len(rows)], events[number % len(events)]
        (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(step_row(1))}\n{json.dumps(one)}\n")
        (tmp_path / "events.jsonl").write_text(f"{json.dumps(event)}\n")
        lines = drawn(tmp_path, width=60, height=24).lines
        assert len(lines) <= 24, (one, event)
        assert max(map(len, lines)) <= 60, (one, event)
        assert "".join(lines).isprintable(), (one, event)


def test_a_directory_without_ranks_or_launcher_is_refused(tmp_path: Path) -> None:
    launched(tmp_path)
    (tmp_path / ".lock").write_text("")
    with pytest.raises(ConfigError, match="has not started, as its status/ has no rank and no launcher uses it"):
        run([str(tmp_path), "--once"], print)


def test_a_run_that_was_interrupted_before_its_first_step_is_started_with_its_own_options(tmp_path: Path) -> None:
    launched(tmp_path)
    (tmp_path / ".lock").write_text("")
    with pytest.raises(ConfigError, match=f"start it with `hetseq train --config {tmp_path}/config.yaml` "):
        run([str(tmp_path), "--once"], print)
