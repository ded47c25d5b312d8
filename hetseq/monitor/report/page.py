"""The report of one run as one HTML file that needs no server, no script and no other file.

Arranges the charts, tables and sentences. Pure: a `RecordedRun` goes in, text comes out; every word from a file passes
`html.escape`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from hetseq.monitor.report.charts import COLOURS, COLUMNS, STYLE, Band, Bar, Curve, bar_chart, line_chart, number
from hetseq.monitor.report.event_text import ROUTINE, incident_of, skipped_steps
from hetseq.monitor.report.recorded import Floats, RecordedRun, names_of
from hetseq.monitor.report.software import software

_MOST_ROWS = 60  # of a table: the first ones and the last ones
_MOST_BARS = 64
_GIB, _MIB = 2**30, 2**20
_LONGEST_NAME = 48  # characters beside a bar
_MOST_BANDS = 400
_MANY_STEPS = 50  # a curve of this many has a smoothed one in front of it
_POINTS_OF_RANKS = 12_800  # of all curves of a chart by rank together
_KINDS = (("compute", 0), ("data", 4), ("overhead", 7), ("wait", 1), ("communication", 3), ("other", 5))
_PAGE_STYLE = """
:root{color-scheme:light dark}*{box-sizing:border-box}
body{margin:0 auto;max-width:960px;padding:1.2em 16px 3em;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:1.5em;margin:.2em 0;overflow-wrap:anywhere}h2{font-size:1.15em;margin:2em 0 .8em;padding-bottom:.25em;
border-bottom:1px solid var(--rule);break-after:avoid}p{margin:.5em 0}.soft{color:var(--soft)}code,pre{
font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}pre{background:var(--tile);padding:.7em .9em;
border-radius:6px;white-space:pre-wrap;overflow-wrap:anywhere;margin:.6em 0}.config{columns:2 300px;column-gap:2em;
font-size:12px}.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(128px,1fr));gap:8px;margin:1em 0}
.tile{background:var(--tile);border-radius:6px;padding:.5em .7em;break-inside:avoid}
.tile b{display:block;font-size:1.15em;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tile span{color:var(--soft);font-size:.86em}
.wide{overflow-x:auto;margin:.6em 0}table{border-collapse:collapse;width:100%;font-size:13px;
font-variant-numeric:tabular-nums}th{text-align:left;font-weight:600;color:var(--soft)}th,td{padding:.3em .6em .3em 0;
border-bottom:1px solid var(--rule);vertical-align:top}td.n,th.n{text-align:right;white-space:nowrap}td.t{white-space:
nowrap}td.w{min-width:190px;overflow-wrap:anywhere}.pair{display:grid;grid-template-columns:repeat(auto-fit,
minmax(min(100%,380px),1fr));gap:0 28px}tr{break-inside:avoid}
section p.soft{margin-bottom:1.2em}.headline{font-size:1.25em;font-weight:600;margin:.8em 0 .3em}
@media(max-width:640px){thead{display:none}tr{display:flex;flex-wrap:wrap;gap:0 1em;padding:.4em 0;
border-bottom:1px solid var(--rule)}td,td.n,td.t,td.w{border:0;padding:0;text-align:left;white-space:normal;min-width:0}
td::before{content:attr(data-head) " ";color:var(--soft)}}
@media print{body{max-width:none;font-size:11pt}.wide{overflow:visible}}
"""


def report_page(run: RecordedRun, *, facts: Sequence[tuple[str, str]] = (), has_ended: bool = False) -> str:
    """The report as the text of an HTML file; `facts` are lines of its footer, such as the versions of its writer.

    `has_ended`: the launcher of the run writes it, so the run is over.
    """
    parts = [
        f'<h1>{escape(run.path.name)}</h1><p class="soft">{escape(str(run.path))}'
        + (f" &middot; run id <code>{escape(run.run_id)}</code>" if run.run_id else "")
        + f"</p><p>{escape(state_of(run, has_ended=has_ended))}</p>",
        _tiles(run),
    ]
    if not len(run.steps):
        parts.append("<p>No step is recorded yet.</p>")
    else:
        parts += [
            section("The result", _curves(run)),
            section("Where the time goes", _ranks(run)),
            section("Where the state is", _owners(run)),
            section("Further curves", _further(run)),
        ]
    parts += [
        section("Checkpoints", _checkpoints(run)),
        section("Incidents", _incidents(run)),
        section("Versions", versions_table(run.versions)),
        section("The same on one device", _repeat(run)),
        section("Configuration", f'<pre class="config">{escape(run.config_text)}</pre>' if run.config_text else ""),
        section("This report", "".join(f"<p>{escape(name)}: {escape(text)}</p>" for name, text in facts)),
    ]
    return document(f"{run.path.name}: report", "".join(parts))


def document(title: str, body: str) -> str:
    """A whole HTML file."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}{_PAGE_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def notebook_view(run: RecordedRun) -> str:
    """The loss curve and one line about the run, for a notebook; its styles apply only inside its own box."""
    scoped = STYLE.replace(":root", ".hetseq-run")
    last = f"{len(run.steps):,} steps, last loss {number(_last(run.loss))}" if len(run.steps) else "no step yet"
    return (
        f'<div class="hetseq-run" style="max-width:760px"><style>{scoped}</style>'
        f"<p>{escape(str(run.path))}: {last}</p>{loss_chart(run, 'loss')}</div>"
    )


def state_of(run: RecordedRun, *, has_ended: bool = False) -> str:
    """The state of the run in a sentence, as far as its files show it."""
    states = set(run.states.values()) - {"gone"}
    if states == {"done"}:
        return "Finished: all steps are done."
    if states == {"stopped"}:
        return "Stopped before its end; the same command resumes from the newest checkpoint."
    if has_ended:
        return (
            "Ended before all steps were done; log/rank-N.txt says why. If there is a checkpoint, the same command"
            " resumes from it."
        )
    if not states and not len(run.steps):
        return "It has not started."
    return "In progress, or it ended without recording it; log/rank-N.txt says which."


def section(title: str, content: str) -> str:
    """A part of the page under its heading; "" if there is no content."""
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>\n" if content else ""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a head that begins with `>` is over numbers, and one with `*` over text that wraps."""
    kinds = ["n" if head[:1] == ">" else "w" if head[:1] == "*" else "t" for head in heads]
    top = "".join(f'<th class="{kind}">{escape(head.lstrip(">*"))}</th>' for kind, head in zip(kinds, heads))
    lines = [
        "<tr>"
        + "".join(
            f'<td class="{kind}" data-head="{escape(head.lstrip(">*"))}">{escape(cell)}</td>'
            for kind, head, cell in zip(kinds, heads, row)
        )
        + "</tr>"
        for row in rows
    ]
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>\n'


def aligned(values: Floats) -> list[str]:
    """The cells of a column of numbers: all with the same decimals, enough for three digits of the largest."""
    known = np.abs(values[np.isfinite(values)])
    most = float(known.max()) if len(known) else 0.0
    is_whole = bool((known == np.round(known)).all())
    decimals = 0 if is_whole or not most else min(6, max(0, 2 - math.floor(math.log10(most))))
    return [f"{value:,.{decimals}f}" if math.isfinite(value) else "-" for value in values.tolist()]


def duration(seconds: float) -> str:
    """Seconds in readable units: `1 d 3 h`, `4 min 10 s`, `12.3 s`, `8.1 ms`."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    words = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    begin = next(place for place, (amount, _) in enumerate(words) if amount)
    return " ".join(f"{amount} {unit}" for amount, unit in words[begin : begin + 2] if amount)


def loss_chart(run: RecordedRun, title: str, *, by_time: bool = False) -> str:
    """The loss of every step and the validations, with bands where ranks were missing."""
    x = run.elapsed_s if by_time else run.steps.astype(np.float64)
    scale, x_title = time_axis(float(x[-1]) if len(x) else 0.0) if by_time else (1.0, "step")
    curves = [Curve("each step", x / scale, run.loss, is_pale=True)]
    if len(run.steps) >= _MANY_STEPS:
        curves.append(Curve("mean of its neighbours", x / scale, _smooth(run.loss)))
    else:
        curves = [Curve("each step", x / scale, run.loss)]
    for place, (subset, figures) in enumerate(run.validation.items()):
        if "loss" in figures:
            at = np.searchsorted(run.steps, figures["step"]).clip(max=max(len(x) - 1, 0))
            colour = 1 + place % (COLOURS - 1)
            curves.append(Curve(subset, (x[at] if len(x) else figures["step"]) / scale, figures["loss"], colour, True))
    bands = [
        Band(_at(run, band.first, x) / scale, _at(run, band.last, x) / scale, band.title) for band in bands_of(run)
    ]
    marks = [
        Band(_at(run, event["step"], x) / scale, 0.0, f"resumed from step {event['step']}")
        for event in run.events
        if event.get("event") == "resume" and isinstance(event.get("step"), int)
    ][:_MOST_BANDS]
    name = f"fewer than {int(run.world_size.max())} ranks" if bands else ""
    return line_chart(title, curves, unit="nats", x_title=x_title, bands=bands, band_name=name, marks=marks)


def bands_of(run: RecordedRun) -> list[Band]:
    """The ranges of steps with fewer ranks than the largest world, and the missing ranks."""
    if not run.slots.size or not len(run.steps):
        return []
    is_there, most = np.isfinite(run.shares), int(run.world_size.max())
    begins = np.flatnonzero(np.append(True, (is_there[1:] != is_there[:-1]).any(axis=1)))
    found = []
    for begin, end in zip(begins, [*begins[1:], len(run.steps)]):
        size = int(is_there[begin].sum())
        if size and size < most:
            missing = ", ".join(str(slot) for slot in run.slots[~is_there[begin]][:10])
            first, last = int(run.steps[begin]), int(run.steps[end - 1])
            found.append(Band(first, last, f"steps {first:,} to {last:,}: {size} of {most} ranks (without {missing})"))
    return found[:_MOST_BANDS]


def _at(run: RecordedRun, step: float, x: Floats) -> float:
    """The place of a step on the x axis."""
    return float(x[min(int(np.searchsorted(run.steps, step)), len(x) - 1)]) if len(x) else float(step)


def _tiles(run: RecordedRun) -> str:
    tiles = [("steps", f"{int(run.steps[-1]):,}" if len(run.steps) else "0")]
    if len(run.steps):
        tiles.append(("last loss", number(_last(run.loss))))
        for subset, figures in run.validation.items():
            for name, values in figures.items():
                if name != "step" and np.isfinite(values).any():
                    tiles.append((f"{subset} {name}, last", number(_last(values))))
        speed = run.samples / np.where(run.seconds > 0, run.seconds, np.nan)
        tiles += [
            ("time in steps", duration(float(run.elapsed_s[-1]))),
            ("samples/s, median", number(float(f"{_median(speed):.4g}"))),
            ("ranks", _span(run.world_size)),
        ]
        if np.isfinite(run.efficiency).any():
            tiles.append(("efficiency, median", f"{_median(run.efficiency):.0%}"))
    if run.checkpoints:
        tiles.append(("checkpoints", f"{len(run.checkpoints):,}"))
    cells = "".join(
        f"<div class=tile><b>{escape(text)}</b><span>{escape(name)}</span></div>" for name, text in tiles[:12]
    )
    return f'<div class="tiles">{cells}</div>\n'


def _curves(run: RecordedRun) -> str:
    return loss_chart(run, "Loss") + loss_chart(run, "Loss by time", by_time=True) + _validation(run)


def _validation(run: RecordedRun) -> str:
    charts = []
    for subset, figures in run.validation.items():
        for name in sorted(figures.keys() - {"step", "loss"}):
            charts.append(line_chart(f"{subset}: {name}", [Curve(name, figures["step"], figures[name], 2, True)]))
    return f'<div class="pair">{"".join(charts)}</div>' if any(charts) else ""


def _ranks(run: RecordedRun) -> str:
    if len(run.slots) < 2:
        return "<p>One rank: it shares with no other rank and waits for none.</p>"
    names = names_of(run)
    is_few = len(run.slots) <= COLOURS
    nodes = sorted({name.rpartition("/")[0] for name in run.names})
    columns = max(50, min(COLUMNS, _POINTS_OF_RANKS // len(run.slots) // 2))
    part = _per_cent(run)
    curves = [
        Curve(
            names[at], run.steps, part[:, at],
            at if is_few else nodes.index(run.names[at].rpartition("/")[0]) % COLOURS, is_named=is_few,
        )
        for at in range(len(run.slots))
    ]  # fmt: skip
    coloured = "" if is_few else f"<p class=soft>{len(run.slots)} ranks, one colour per node.</p>"
    moved = sum(event.get("event") == "rebalance" for event in run.events)
    told = f"<p class=soft>The shares were moved {moved:,} times.</p>" if moved else ""
    shares = line_chart("Shares", curves, unit="per cent of a step", bands=bands_of(run), columns=columns,
                        band_name=f"fewer than {int(run.world_size.max())} ranks")  # fmt: skip
    return _times(run, names) + shares + coloured + told


def _per_cent(run: RecordedRun) -> Floats:
    """(n, m) the share of each slot in per cent of its step, NaN where it did not take part."""
    shares = run.shares.astype(np.float64)
    total = np.nansum(shares, axis=1, keepdims=True)  # (n, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        parts: Floats = np.where(np.isfinite(total) & (total > 0), shares / total * 100, np.nan)
    return parts


def _times(run: RecordedRun, names: Sequence[str]) -> str:
    """Mean seconds of a step by rank and kind."""
    is_there = np.isfinite(run.compute_s)
    if not is_there.any():
        return ""
    communication = np.where(is_there, run.communication_s[:, None], np.nan)
    kinds = [run.compute_s, run.data_s, run.overhead_s, run.wait_s, communication]
    step_s = _mean_of_columns(np.where(is_there, run.seconds[:, None], np.nan))  # (m,)
    means = np.array([_mean_of_columns(np.where(is_there, kind, np.nan)) for kind in kinds]).T
    other = np.maximum(step_s - means.sum(axis=1), 0.0)  # what is left of the step
    means = np.column_stack([means, other])  # (m, kinds)
    part = _mean_of_columns(_per_cent(run))
    share, busy = _mean_of_columns(run.shares), means[:, :3].sum(axis=1)
    chosen = np.arange(len(means))
    left = ""
    if len(means) > _MOST_BARS:
        by_wait = np.argsort(means[:, 3])
        chosen = np.sort(np.concatenate([by_wait[: _MOST_BARS // 2], by_wait[-(_MOST_BARS // 2) :]]))
        left = f"<p class=soft>{_MOST_BARS} of {len(means):,} ranks: those that wait least and most.</p>"
    with np.errstate(divide="ignore", invalid="ignore"):  # clocks differ: parts may be longer than their step
        drawn = means * np.fmin(step_s / means.sum(axis=1), 1.0)[:, None]
    bars = [
        Bar(_shortened(names[int(at)]), [float(value) * 1000 for value in drawn[at]], duration(step_s[at]))
        for at in chosen
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        speeds = np.where(busy > 0, share / busy, np.nan)
    columns = [aligned(numbers[chosen]) for numbers in (part, share, speeds)]
    columns += [aligned(kind[chosen] * 1000) for kind in means.T]
    rows = [
        [str(run.slots[at]), run.names[int(at)] or "-", *cells] for at, cells in zip(chosen, zip(*columns))
    ]  # fmt: skip
    heads = [">rank", "where", ">share %", ">samples", ">samples/s", *(f">{kind} ms" for kind, _ in _KINDS)]
    explained = (
        "<p class=soft>Means over the steps in which the rank took part. Wait: for slower ranks; a better split would"
        " save it. Data: for the loader; more --num-workers may help. Other: what is left of the step.</p>"
    )
    chart = bar_chart("A step, rank by rank", _KINDS, bars, unit="ms")
    return chart + table(heads, rows) + left + explained


def _owners(run: RecordedRun) -> str:
    """What each rank owned last, its memory against the plan, and its mean bytes of a step; "" without owners."""
    found = run.sharding
    if "owned_bytes" not in found:
        return ""
    is_there = np.isfinite(run.shares)
    last = {key: _last_of_columns(found[key]) for key in found}  # (m,)
    # a rank that has left owns nothing
    owned = np.where(is_there[-1], last["owned_bytes"], np.nan)
    part = owned / (np.nansum(owned) or 1.0) * 100
    columns = [("owns %", part), ("state GiB", owned / _GIB), ("memory GiB", last["memory_bytes"] / _GIB)]
    if "planned_bytes" in last:
        planned = np.where(last["planned_bytes"] > 0, last["planned_bytes"], np.nan)
        columns += [("plan GiB", planned / _GIB), ("memory % of plan", last["memory_bytes"] / planned * 100)]
    columns += [(f"{kind} MiB", _means(found[f"{kind}_bytes"]) / _MIB) for kind in ("sent", "received")]
    chosen = _ends(range(len(run.slots)))
    cells = zip(*(aligned(numbers[list(chosen)]) for _, numbers in columns))
    rows = [[str(run.slots[at]), run.names[at] or "-", *texts] for at, texts in zip(chosen, cells)]
    explained = (
        "<p class=soft>What each rank owns of the optimizer state, and the memory that it used, at the end; what it"
        " sent and received in a step, as means over the steps in which it took part.</p>"
    )
    heads = [">rank", "where", *(f">{head}" for head, _ in columns)]
    return table(heads, rows) + _left_out(len(run.slots)) + explained + _course_of_owners(run)


def _course_of_owners(run: RecordedRun) -> str:
    """The parts of the ranks by step, if they have changed."""
    owned = run.sharding["owned_bytes"]
    known = owned[np.isfinite(owned).any(axis=1)]
    if len(run.slots) > COLOURS or not len(known) or (np.nan_to_num(known) == np.nan_to_num(known[0])).all():
        return ""
    with np.errstate(invalid="ignore"):
        parts = owned / np.nansum(owned, axis=1, keepdims=True) * 100
    curves = [Curve(name, run.steps, parts[:, at], at) for at, name in enumerate(names_of(run))]
    return line_chart("Owned state", curves, unit="per cent", bands=bands_of(run),
                      band_name=f"fewer than {int(run.world_size.max())} ranks")  # fmt: skip


def _further(run: RecordedRun) -> str:
    speed = run.samples / np.where(run.seconds > 0, run.seconds, np.nan)
    speeds = [Curve("each step", run.steps, speed, 5, is_pale=len(speed) >= _MANY_STEPS)]
    if len(speed) >= _MANY_STEPS:
        speeds.append(Curve("mean of its neighbours", run.steps, _smooth(speed), 5))
    charts = [line_chart("Speed", speeds, unit="samples/s")]
    if np.isfinite(run.efficiency).any():
        charts.append(line_chart("Efficiency", [Curve("efficiency", run.steps, run.efficiency, 2)]))
    if len(run.terms) > 1:
        for place, (name, values) in enumerate(run.terms.items()):
            charts.append(line_chart(f"Term {name}", [Curve(name, run.steps, values, place % COLOURS)], unit="nats"))
    charts.append(line_chart("Gradient norm", [Curve("gradient norm", run.steps, run.grad_norm, 3)]))
    charts.append(line_chart("Learning rate", [Curve("learning rate", run.steps, run.lr, 4)]))
    return f'<div class="pair">{"".join(charts)}</div>'


def _checkpoints(run: RecordedRun) -> str:
    if not run.checkpoints:
        return "<p>Nothing was saved.</p>"
    saves = run.checkpoints
    failed = sum(save.get("result") != "ok" for save in saves)
    stall = sum(value for save in saves if math.isfinite(value := _figure(save, "stall_s")))
    steps = np.array([_figure(save, "step") for save in saves])
    seconds = np.array([_figure(save, "duration_s") for save in saves])
    by_step = np.argsort(steps, kind="stable")
    chart = line_chart(
        "Duration of a save", [Curve("seconds", steps[by_step], seconds[by_step], 0, True)], unit="s"
    ) if len(saves) > 2 else ""  # fmt: skip
    shown = _ends(saves)
    figures = [
        aligned(np.array([_figure(save, key) / size for save in shown]))
        for key, size in (("step", 1), ("bytes", 1e6), ("duration_s", 1), ("stall_s", 1), ("throughput_MBps", 1))
    ]
    rows = [
        [str(save["time_utc"])[:19].replace("T", " "), step, str(save["kinds"]), *cells,
         str(save["result"]) + (f": {save['error']}" if save["error"] else "")]
        for save, step, *cells in zip(shown, *figures)
    ]  # fmt: skip
    heads = ["time (UTC)", ">step", "why", ">MB", ">duration s", ">stall s", ">MB/s", "*result"]
    told = f"<p>{len(saves):,} saves, {failed} of them failed; they stalled training for {duration(stall)} in all.</p>"
    return told + chart + table(heads, rows) + _left_out(len(saves))


def _incidents(run: RecordedRun) -> str:
    found = [incident_of(event) for event in run.events if event.get("event") not in ROUTINE]
    is_skipped = ~np.isfinite(run.loss)
    if is_skipped.any():
        found.append(skipped_steps([int(step) for step in run.steps[is_skipped]]))
    if not found:
        return "<p>None.</p>"
    rows = [[one.time_utc, one.step, one.what, one.remedy] for one in _ends(found)]
    return table(["time (UTC)", ">step", "*what happened", "*what to do"], rows) + _left_out(len(found))


def versions_table(versions: Mapping[int, Mapping[str, str]]) -> str:
    """The software of the ranks, one row for ranks of a node with the same versions; "" if none was recorded."""
    found = software(versions)
    if found is None:
        return ""
    said = "".join(f"<p>Unequal: {escape(line)}</p>" for line in found.unequal)
    return said + table(found.heads, _ends(found.rows)) + _left_out(len(found.rows))


def _repeat(run: RecordedRun) -> str:
    lines = "\n".join(repeat_lines(run))
    return (
        "<p>The curve does not depend on the cluster: one device takes the same samples in the same steps and gets the"
        " same losses up to rounding. With dropout, both runs need --unit-size N, or --dropout 0. To check it, repeat"
        " the run on one device and compare:</p>"
        f"<pre>{escape(lines)}</pre>"
    )


def repeat_lines(run: RecordedRun) -> Iterator[str]:
    """The commands that repeat the run on one device and compare both."""
    path, config = str(run.path), run.config
    other, file = shlex.quote(f"{path}-one"), shlex.quote(f"{path}/config.yaml")
    if config.get("join") or config.get("distributed_init_method"):
        # no flag can undo the options for the rendezvous of nodes
        keys = "join|distributed_init_method|distributed_rank|distributed_gpus|min_ranks|max_ranks"
        yield f"grep -vE '^({keys}):' {file} > one-device.yaml"
        file = "one-device.yaml"
    words, has_world = (
        [f"hetseq train --config {file}", f"--save-dir {other}"],
        bool(config.get("distributed_world_size")),
    )
    words += ["--ranks 1"] * (bool(config.get("distributed_gpus")) or not has_world)
    words += ["--distributed-world-size 1"] * has_world
    words += ["--devices ''"] * bool(config.get("devices"))
    words += ["--throttle ''"] * bool(config.get("throttle"))
    words += ["--balance equal"] * (config.get("balance") not in ("auto", "equal", None))
    world = int(run.world_size[0]) if len(run.steps) and len(run.slots) else 1
    factors = config.get("update_freq")
    if not config.get("global_batch_size") and world > 1 and isinstance(factors, list):
        # without --global-batch-size a step is --batch-size, or tokens, times workers times this
        words.append(f"--update-freq {','.join(str(factor * world) for factor in factors)}")
    yield " ".join(words)
    yield f"hetseq report {shlex.quote(path)} {other}"


def _ends(rows: Sequence[Any]) -> Sequence[Any]:
    half = _MOST_ROWS // 2
    return rows if len(rows) <= _MOST_ROWS else [*rows[:half], *rows[-half:]]


def _left_out(size: int) -> str:
    return f"<p class=soft>The first and the last {_MOST_ROWS // 2} of {size:,}.</p>" if size > _MOST_ROWS else ""


def _figure(save: Any, key: str) -> float:
    value = save.get(key)
    return value if isinstance(value, float) else math.nan


def _shortened(name: str) -> str:
    """A name that leaves room for a number beside it, on the narrowest paper."""
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[:half]}\u2026{name[-half:]}"


def time_axis(most: float) -> tuple[float, str]:
    """The seconds of a unit in which `most` seconds are read easily, and the title of its axis."""
    unit = next(((size, name) for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
                 if most > 3 * size), (1.0, "seconds"))  # fmt: skip
    return unit[0], f"{unit[1]} in steps"


def _smooth(values: Floats) -> Floats:
    """The mean of each value and its neighbours, in a window of 2 % of all values; NaN where the value is NaN."""
    half = max(1, len(values) // 100)
    is_there = np.isfinite(values)
    total = np.cumsum(np.append(0.0, np.where(is_there, values, 0.0)))
    count = np.cumsum(np.append(0, is_there))
    at = np.arange(len(values))
    begin, end = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (total[end] - total[begin]) / (count[end] - count[begin])
    return np.where(is_there, means, np.nan)


def _last(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else math.nan


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan


def _mean_of_columns(values: Any) -> Floats:
    """(m,) the mean of the known values in each column of (n, m), 0 if none is known."""
    is_there = np.isfinite(values)
    means: Floats = np.where(is_there, values, 0.0).sum(axis=0, dtype=np.float64) / np.maximum(is_there.sum(axis=0), 1)
    return means


def _means(values: Floats) -> Floats:
    """(m,) as `_mean_of_columns`, but NaN if none is known."""
    return np.where(np.isfinite(values).any(axis=0), _mean_of_columns(values), np.nan)


def _last_of_columns(values: Floats) -> Floats:
    """(m,) the last known value in each column of (n, m), NaN if none is known."""
    return np.array([_last(values[:, at]) for at in range(values.shape[1])])


def _span(values: Any) -> str:
    low, high = int(values.min()), int(values.max())
    return str(high) if low == high else f"{low} to {high}"
