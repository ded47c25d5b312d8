"""`--task hf_causal_lm` from the command line: LoRA over a published model, from the first step to the export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetseq.errors import EXIT_DISAGREE
from hetseq.monitor.metrics import read_rows
from tests.support import causal_runs, forked
from tests.support.commands import HETSEQ, TRAIN, Finished, run_command
from tests.support.nodes import Nodes
from tests.support.places import tcp
from tests.support.refusals import check_refusal
from tests.support.tiny_models import publish

pytestmark = pytest.mark.slow

STEPS = 8
LIMIT = 1e-11


@pytest.fixture(scope="module", autouse=True)
def no_imports() -> None:
    forked.warm_up()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and conversations to train on and to validate with."""
    folder = tmp_path_factory.mktemp("lora")
    causal_runs.make_model(folder / "model", "llama")
    causal_runs.write_chats(folder / "data", causal_runs.make_chats())
    causal_runs.write_chats(folder / "data", causal_runs.make_chats(5, seed=8), "valid")
    return folder


def words(folder: Path, run: str, *more: object) -> list[str]:
    return [
        "--task", "hf_causal_lm", "--cpu", "--model", str(folder / "model"), "--data", str(folder / "data"),
        "--precision", "fp64", "--lora-rank", "4", "--global-batch-size", "10", "--lr", "0.01",
        "--lr-scheduler", "constant", "--seed", "5",
        "--max-update", str(STEPS), "--save-dir", str(folder / run), *map(str, more),
    ]  # fmt: skip


def hetseq(*more: object) -> Finished:
    done = run_command(list(map(str, more)), program=HETSEQ, is_cold=False)
    assert done.code == 0, done.err
    return done


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_rows(run / "metrics.jsonl") if "loss" in row]


@pytest.fixture(scope="module")
def runs(folder: Path) -> tuple[Path, Path]:
    """One rank without a break; and three unequal ranks that end after three steps, of which two go on."""
    hetseq("train", *words(folder, "calm"))
    hetseq("train", *words(folder, "hurt", "--ranks", 3, "--balance", "1,5,2", "--max-update", 3))
    hetseq("train", *words(folder, "hurt", "--ranks", 2, "--balance", "3,1"))
    return folder / "calm", folder / "hurt"


def test_unequal_ranks_and_a_resume_have_the_curve_and_the_adapters_of_one(runs: tuple[Path, Path]) -> None:
    one, other = (losses(run) for run in runs)
    assert len(one) == STEPS
    assert other == pytest.approx(one, rel=LIMIT)
    figures = [[row for row in read_rows(run / "metrics.jsonl") if "valid_perplexity" in row] for run in runs]
    perplexities = [rows[-1]["valid_perplexity"] for rows in figures]
    assert perplexities[1] == pytest.approx(perplexities[0], rel=LIMIT)


def test_a_checkpoint_holds_adapters_alone(runs: tuple[Path, Path], folder: Path, tmp_path: Path) -> None:
    hetseq("checkpoints", "export", runs[0], "--format", "safetensors", "--to", tmp_path / "whole")
    names = load_file(tmp_path / "whole" / "model.safetensors")
    assert names
    assert all(".lora_" in name for name in names)
    saved = sum(path.stat().st_size for path in (runs[0] / "checkpoints").glob("*/*.safetensors"))
    assert 0 < saved < (folder / "model" / "model.safetensors").stat().st_size


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, by peft
@pytest.mark.nightly
def test_evaluate_predict_and_both_exports(runs: tuple[Path, Path], folder: Path, tmp_path: Path) -> None:
    said = hetseq("evaluate", runs[0], "--json").out
    assert json.loads(said.splitlines()[-1])["valid_perplexity"] > 1
    hetseq("predict", runs[0], "--subset", "valid", "--output", tmp_path / "lines", "--max-new-tokens", "5")
    lines = (tmp_path / "lines").read_text().splitlines()
    assert [type(json.loads(line)) for line in lines] == [str] * 5
    hetseq("checkpoints", "export", runs[0], "--format", "hf", "--to", tmp_path / "adapter")
    hetseq("checkpoints", "export", runs[0], "--format", "hf", "--merge", "--to", tmp_path / "merged")

    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids=ids).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(input_ids=ids).logits
    assert torch.allclose(merged, adapted, rtol=0, atol=1e-13)
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert "library_name: peft" in card


def other_model(folder: Path, target: Path) -> Path:
    """The same model but for one weight."""
    shutil.copytree(folder / "model", target)
    weights = load_file(target / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] += 1e-9
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def test_nodes_with_different_base_models_are_refused(folder: Path, nodes: Nodes) -> None:
    place, other = tcp(), other_model(folder, nodes.folder / "other")
    for rank, model in enumerate((folder / "model", other)):
        nodes.start(
            *words(folder, "run"), "--distributed-init-method", place.url, "--distributed-world-size", 2, "--ranks", 1,
            "--distributed-rank", rank, "--model", model, "--save-dir", nodes.folder / "run",
        )  # fmt: skip
    for ended in nodes.finish():
        assert ended.code == EXIT_DISAGREE, nodes.story()
        assert "frozen weights: " in ended.message, nodes.story()
        assert "give all nodes the same files of the model, such as those of --model" in ended.message


@pytest.mark.parametrize("command", ["train", "evaluate", "export"])
def test_an_adapter_does_not_fit_another_base(
    command: str, runs: tuple[Path, Path], folder: Path, tmp_path: Path
) -> None:
    other = other_model(folder, tmp_path / "other")
    copy = shutil.copytree(runs[0], tmp_path / "run")
    if command == "export":
        config = copy / "config.yaml"
        config.write_text(config.read_text().replace(str(folder / "model"), str(other)))
    program = {
        "train": ["train", *words(folder, "calm"), "--model", other, "--save-dir", copy, "--max-update", 9],
        "evaluate": ["evaluate", copy, "--model", other],
        "export": ["checkpoints", "export", copy, "--format", "hf", "--to", tmp_path / "adapter"],
    }[command]
    done = run_command(list(map(str, program)), program=HETSEQ, is_cold=False)
    assert done.code != 0
    assert "name the files that the run began with, such as --model DIR" in done.err
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("more", [["--lora-alpha", "9"], ["--lora-targets", "v_proj"]], ids=["alpha", "targets"])
def test_a_resume_with_other_adapters_is_refused(
    more: list[str], runs: tuple[Path, Path], folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(runs[0], tmp_path / "run")
    arguments = [*words(folder, "calm"), *more, "--save-dir", str(copy), "--max-update", "9"]
    done = run_command(["train", *arguments], program=HETSEQ, is_cold=False)
    assert done.code != 0
    assert len(losses(copy)) == STEPS


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--lora-targets", "query"], "no module of LlamaForCausalLM is called query; it has q_proj"),
        (["--model", "{folder}/none"], "--model {folder}/none is not a directory"),
        (["--model", "{folder}/bare"], "the tokenizer in {folder}/bare has no chat template"),
    ],
    ids=["targets", "no directory", "no template"],
)
def test_bad_input_is_one_sentence(more: list[str], says: str, folder: Path, tmp_path: Path) -> None:
    bare = folder / "bare"
    if not bare.exists():
        publish(bare, template=None)
    given = [word.format(folder=folder) for word in more]
    arguments = [*words(folder, "bad"), *given, "--save-dir", str(tmp_path / "run")]
    done = run_command(arguments, program=TRAIN, is_cold=False)
    check_refusal(done, says.format(folder=folder))
