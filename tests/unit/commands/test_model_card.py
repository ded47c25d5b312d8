"""The `README.md` of an exported model: what it says of a run until a step, and that odd names stay text."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from hetseq import config as options
from hetseq import load_run
from hetseq.commands.checkpoints.model_card import Exported, model_card
from hetseq.errors import TaskFileError
from hetseq.task import ModelCard
from tests.support.recorded import Row, step_row, validation_row, write_run

ODD = ("it's \"so\"", "a: b", "a | b", "two\nlines", "größe 模型 🤗", "---", "no", "1.0", "# a", "\u2028\x07",
       "`x` <b> [y](z)", "*a* _b_ \\ ~~c~~ &lt; $d$", "{}")  # fmt: skip
STATE = {
    "epoch": 2, "consumed": 0, "samples": 300, "samples_consumed": 270, "split": "train", "optimizer": "SGD", "seed": 7,
    "precision": "bf16", "global_batch": {"samples": 60, "tokens": None}, "train_seconds": 65.0,
    "recipe": {"lr": [0.1], "lr_scheduler": "constant", "clip_norm": 1.0},
}  # fmt: skip


def versions(step: int, node: str, *ranks: int, torch: str = "2.13.0") -> Row:
    devices = ["NVIDIA H100"] * len(ranks)
    entry = {"node": node, "ranks": list(ranks), "devices": devices, "hetseq": "2.0", "python": "3.11", "torch": torch}
    return {"event": "versions", "step": step, "nodes": [entry]}


EVENTS = (
    versions(0, "labA.example.org", 0, 1), versions(0, "labB.example.org", 2),
    {"event": "generation", "step": 4, "story": "rank 1 on labA.example.org crashed"},
    {"event": "resume", "step": 8, "path": "/data/jane/run"}, versions(8, "labC.example.org", 0, torch="2.14.0"),
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Twelve steps, of which the last four came after a checkpoint; a rank was away for two."""
    rows = [step_row(step, 9.0 - step / 2, slots=(0, 2) if step in (5, 6) else (0, 1, 2)) for step in range(1, 13)]
    valid = [validation_row(step, loss, valid_accuracy=step / 16) for step, loss in ((4, 5.0), (7, 5.5), (12, 3.125))]
    return write_run(tmp_path / "run", [*rows, *valid], events=EVENTS)


def card_of(
    run: Path, *words: str, card: ModelCard | None = None, state: dict[str, Any] | None = None, **more: Any
) -> str:  # fmt: skip
    config = options.parse(["--task", "gpt", "--data", "/data/jane/books", *words])
    facts = {"step": 8, "created": "2026-01-31T12:00:00Z", "parameters": 1000, "trained": 1000, **more}
    return model_card(
        card or ModelCard(), Exported("mine", config, STATE if state is None else state, run=load_run(run), **facts)
    )


def front_matter(text: str) -> dict[str, Any]:
    """What the Hub reads of a card."""
    found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    assert found is not None
    read: dict[str, Any] = yaml.safe_load(found.group(1))
    return read


def shown(text: str) -> tuple[list[str], list[list[str]]]:
    """What a reader sees: the text of each heading and paragraph, and the cells of each row of a table."""
    lines, rows = [], []
    tokens = MarkdownIt("commonmark").enable("table").parse(text.partition("\n---\n")[2])
    for before, token in pairwise(tokens):
        if before.type == "tr_open":
            rows.append([])
        if token.type == "inline":
            kinds = {child.type for child in token.children or ()}
            assert kinds <= {"text", "text_special", "link_open", "link_close", "code_inline"}
            said = "".join(child.content for child in token.children or ())
            (rows[-1] if before.type in ("td_open", "th_open") else lines).append(said)
    return lines, rows


# front matter and odd names


@pytest.mark.parametrize("name", ODD)
def test_the_hub_reads_an_odd_name_as_it_is(run: Path, name: str) -> None:
    card = ModelCard(library_name=name, pipeline_tag=name, base_model=name, tags=(name, "lora", "hetseq"))
    assert front_matter(card_of(run, card=card)) == {
        "library_name": name, "pipeline_tag": name, "base_model": name, "tags": ["hetseq", name, "lora"],
    }  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_an_odd_name_is_text_and_breaks_no_table(run: Path, name: str) -> None:
    state = {**STATE, "split": name, "optimizer": name}
    lines, rows = shown(card_of(run, "--data", f"/data/jane/{name}", card=ModelCard(title=name), state=state))
    said = " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())
    assert lines[0] == said
    assert {("data", said), ("training split", f"{said}, 300 samples"), ("optimizer", said)} <= set(map(tuple, rows))
    assert [len(row) for row in rows] == [2] * 4 + [2] * 13 + [4] * 5 + [6] * 2


def test_a_base_model_is_linked_if_the_hub_has_it(run: Path) -> None:
    cached = Path("/data/jane/.cache/huggingface/hub/models--org--tiny-1B/snapshots/0f")
    for base in ("org/tiny-1B", cached):
        text = card_of(run, card=ModelCard(base_model=base))
        assert front_matter(text)["base_model"] == "org/tiny-1B"
        assert "Base model: [org/tiny-1B](https://huggingface.co/org/tiny-1B)." in text
    text = card_of(run, card=ModelCard(base_model=Path("/data/jane/tiny_1B")))
    assert front_matter(text) == {"tags": ["hetseq"]}  # a local directory is no page of the Hub
    assert "Base model: tiny_1B." in text


# what it says of a run


def test_a_card_says_what_was_true_at_its_step(run: Path) -> None:
    lines, rows = shown(card_of(run, "--lr", "0.5", "--optimizer", "adam"))
    assert lines[:2] == ["mine", "Trained with HetSeq: the checkpoint of step 8, 2026-01-31."]
    told = {row[0]: row[1] for row in rows if len(row) == 2}
    assert told == {
        "": "", "data": "books", "training split": "train, 300 samples", "validation splits": "valid",
        "parameters": "1,000", "steps": "8", "epoch": "1", "samples in all steps": "270", "global batch": "60 samples",
        "time in steps": "65.0 s", "optimizer": "SGD", "learning rate": "0.1", "learning-rate schedule": "constant",
        "precision": "bf16", "seed": "7", "--clip-norm": "1",
    }  # fmt: skip
    assert [row for row in rows if len(row) == 4][1:] == [
        ["loss", "train", "8", "5"], ["accuracy", "valid", "7", "0.4375"], ["loss", "valid", "7", "5.5"],
        ["loss, best", "valid", "4", "5"],
    ]  # fmt: skip
    assert lines[-1] == (
        "3 ranks in steps 1 to 4; 2 ranks in steps 5 to 6; 3 ranks in steps 7 to 8. Ranks left or joined once, and"
        " the others repeated the step."
    )
    assert rows[-1] == ["2", "3", "NVIDIA H100", "2.0", "3.11", "2.13.0"]
    newest = card_of(run, step=12)
    assert "resumed from a checkpoint once" in newest
    assert "2.14.0" in newest
    assert "3.125" in newest


def test_a_card_names_no_node_and_no_folder_of_its_author(run: Path) -> None:
    text = card_of(run, "--data", "/data/jane/books/a.txt,/data/jane/more/b.txt", "--user-dir", "/data/jane/own")
    assert "a.txt,b.txt" in text
    assert not re.search(r"jane|/data|lab[ABC]|example\.org", text)


def test_the_best_figure_is_the_largest_if_larger_is_better(run: Path) -> None:
    words = ["--best-checkpoint-metric", "accuracy", "--maximize-best-checkpoint-metric"]
    _, rows = shown(card_of(run, *words))
    assert [row[:3] for row in rows if "best" in row[0]] == []  # the last is the best
    _, rows = shown(card_of(run, *words[:2]))
    assert [row for row in rows if "best" in row[0]] == [["accuracy, best", "valid", "4", "0.25"]]


def test_own_options_are_told_and_those_of_a_node_are_not(run: Path) -> None:
    words = ["--init-from", "/data/jane/base", "--num-workers", "3", "--batch-size", "4", "--weight-decay", "0.01"]
    _, rows = shown(card_of(run, *words, "--adam-betas", "0.9,0.95", "--unit-size", "2"))
    assert [row for row in rows if row[0].startswith("--")] == [
        ["--unit-size", "2"], ["--clip-norm", "1"], ["--weight-decay", "0.01"], ["--adam-betas", "0.9, 0.95"],
    ]  # fmt: skip


def test_what_a_run_did_not_record_is_left_out(tmp_path: Path) -> None:
    lines, rows = shown(card_of(write_run(tmp_path / "run", []), state={}, trained=10))
    assert lines == ["mine", "Trained with HetSeq: the checkpoint of step 8, 2026-01-31.", "Training data", "Training"]
    assert {row[0]: row[1] for row in rows} == {
        "": "", "data": "books", "training split": "train", "parameters": "1,000, 10 of them trained", "steps": "8",
        "optimizer": "adam", "learning-rate schedule": "PolynomialDecayScheduler", "precision": "fp32",
        "seed": "19940802",
    }  # fmt: skip


def test_ranks_that_come_and_go_often_are_told_in_short(tmp_path: Path) -> None:
    rows = [step_row(step, slots=range(1 + step % 2)) for step in range(1, 9)] + [step_row(9, None, slots=[0])]
    run = write_run(tmp_path / "run", rows)
    assert "2 ranks in step 1; 1 rank in step 2; 2 ranks" in card_of(run, step=9)  # eight spans
    other = write_run(tmp_path / "other", [*rows, step_row(10)])
    text = card_of(other, step=10)
    assert "Between 1 and 2 ranks, changed 8 times." in text
    assert "| steps skipped | 1, whose gradient was not finite |" in text


def test_tags_are_no_text() -> None:
    with pytest.raises(TaskFileError, match=r"ModelCard\(tags='lora'\): expected a tuple, as in \('lora',\)"):
        ModelCard(tags="lora")  # type: ignore[arg-type]
