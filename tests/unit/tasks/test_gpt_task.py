"""What `--task gpt` makes of a folder of records, what it measures, where it begins and what it exports."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hetseq import ConfigError, DataError, MissingSplitError, TaskError, registry
from hetseq import config as options
from hetseq.commands.checkpoints.command import answer, parse
from hetseq.run_directory import RunDirectory
from hetseq.task import collater_of, lengths_of, make_task
from hetseq.tasks.bert.task import BertTask
from hetseq.tasks.gpt.dataset import GptRecords
from hetseq.tasks.gpt.task import GptTask
from hetseq.tasks.gpt.tokenizer import read_tokens
from hetseq.tasks.nn.huggingface import read_gpt, write_pretrained
from tests.support import bert_records
from tests.support.bert_records import change_index, change_numbers
from tests.support.elsewhere import save_state
from tests.support.gpt import GPT2, LAYOUTS, make_model, theirs_of
from tests.support.gpt_records import LENGTH, TOKENS, VOCAB, L, make_rows, tokenizer_json, write_folder
from tests.support.parity import import_transformers

ROWS = make_rows(50)
#: a row of the first file that has with the next one no more tokens than the longest
SHORT = next(row for row in range(19) if len(ROWS[row]) + len(ROWS[row + 1]) <= LENGTH)


def task_of(folder: Path, *words: object) -> Any:
    return make_task(
        registry.find_task("gpt"), options.parse(["--task", "gpt", "--data", str(folder), *map(str, words)])
    )


def load(folder: Path, split: str = "train", *words: object) -> GptRecords:
    dataset: GptRecords = task_of(folder, *words).load_dataset(split)
    return dataset


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "data", train=ROWS, test=make_rows(9, seed=1), rows_per_file=20)


@pytest.fixture(scope="module")
def transformers() -> Iterator[ModuleType]:
    library = import_transformers()
    library.utils.logging.disable_progress_bar()  # it leaves a thread behind
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        yield library


# Batches


def test_a_batch_predicts_every_token_of_a_row_but_its_first(folder: Path) -> None:
    dataset = load(folder)
    wanted = [49, 3, 3, 20, 0]
    batch = dataset.__getitems__(wanted)
    assert {name: (tensor.dtype, tensor.ndim) for name, tensor in batch.items()} == {
        "input_ids": (torch.int64, 2), "target_positions": (torch.int64, 1),
    }  # fmt: skip
    assert batch["input_ids"].tolist() == [ROWS[row] + [0] * (L - len(ROWS[row])) for row in wanted]
    at = batch["target_positions"]
    assert batch["input_ids"].flatten()[at + 1].tolist() == [token for row in wanted for token in ROWS[row][1:]]
    assert (at // L).tolist() == [n for n, row in enumerate(wanted) for _ in ROWS[row][1:]]
    assert task_of(folder).count(batch) == {"loss": sum(len(ROWS[row]) - 1 for row in wanted)}
    assert lengths_of(dataset)(np.arange(3)).tolist() == [L] * 3


def test_samples_one_by_one_are_the_same_batch(folder: Path) -> None:
    dataset = load(folder)
    order = np.random.default_rng(0).permutation(50).tolist()
    together = dataset.__getitems__(order)
    one_by_one = dataset.collater([dataset[index] for index in order])
    assert together.keys() == one_by_one.keys()
    assert all(torch.equal(tensor, one_by_one[name]) for name, tensor in together.items())
    assert collater_of(object(), dataset)(together) is together
    assert len(dataset.collater([])["input_ids"]) == 0
    again = pickle.loads(pickle.dumps(dataset)).__getitems__(order)
    assert torch.equal(again["input_ids"], together["input_ids"])
    with pytest.raises(IndexError, match="samples 50 to 50 of 50"):
        dataset[50]


@pytest.mark.parametrize("dtype", ["U8", "U16", "U32"])
def test_rows_of_one_length_need_no_offsets(tmp_path: Path, dtype: str) -> None:
    rows = [row for row in make_rows(300) if len(row) == LENGTH][:10]
    kept = write_folder(tmp_path / "fixed", train=rows, is_ragged=False, dtype=dtype, rows_per_file=4)
    other = write_folder(tmp_path / "ragged", train=rows)
    fixed, ragged = (load(data).__getitems__(range(10)) for data in (kept, other))
    assert all(torch.equal(tensor, ragged[name]) for name, tensor in fixed.items())
    assert len(fixed["target_positions"]) == 10 * (LENGTH - 1)


def test_the_length_is_no_more_than_the_model_has_positions(folder: Path) -> None:
    assert load(folder).length == L
    config = GPT2.to_hugging_face()
    (folder / "config.json").write_text(json.dumps(config | {"n_positions": LENGTH + 1}))
    assert load(folder).length == LENGTH + 1
    (folder / "config.json").write_text(json.dumps(config | {"n_positions": LENGTH - 1}))
    with pytest.raises(DataError, match=r"rows of up to 14 tokens in train, more than the 13 positions of .*config.js"):
        load(folder)


def test_the_first_files_alone_may_be_taken(folder: Path) -> None:
    dataset = load(folder, "train", "--num-file", 2)
    assert len(dataset) == 40
    names = ["corpus.json", "train_00000.safetensors", "train_00001.safetensors", "config.json", "tokenizer.json"]
    assert [path.name for path in dataset.files] == names
    named = ["--config-file", folder / "config.json", "--dict", folder / "tokenizer.json"]
    assert [path.name for path in load(folder, "test", *named).files] == ["corpus.json", "test_00000.safetensors"]


def test_the_rows_say_which_vocabulary_is_theirs(folder: Path) -> None:
    stated = json.loads((folder / "corpus.json").read_text())["vocabulary"]["sha256"]
    assert load(folder, "train").vocabulary_digest == stated


# What is measured


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_sum_is_the_mean_loss_of_transformers_times_its_count(
    transformers: ModuleType, tmp_path: Path, layout: str
) -> None:
    task = task_of(write_folder(tmp_path / "data", train=ROWS, config=LAYOUTS[layout]))
    batch = task.load_dataset("train").__getitems__(range(50))
    ours = make_model(LAYOUTS[layout])  # in fp64
    mask = torch.arange(L) < torch.tensor([len(row) for row in ROWS])[:, None]
    labels = torch.where(mask, batch["input_ids"], -100)
    theirs = theirs_of(transformers, ours)(batch["input_ids"], attention_mask=mask.long(), labels=labels)
    expected = theirs.loss.item() * task.count(batch)["loss"]
    # their RMSNorm and their loss round to fp32
    assert task.loss(ours, batch)["loss"].item() == pytest.approx(expected, rel=1e-6)


def test_loss_and_accuracy_are_of_what_follows(folder: Path) -> None:
    task = task_of(folder)
    batch = task.load_dataset("train").__getitems__([3, 7])
    model = make_model()
    targets = torch.tensor([*ROWS[3][1:], *ROWS[7][1:]])
    logits = model(batch["input_ids"], batch["target_positions"])
    assert task.loss(model, batch)["loss"].item() == F.cross_entropy(logits, targets, reduction="sum").item()
    correct, count = task.metrics(model, batch)["token_accuracy"]
    assert (correct, count) == (int((logits.argmax(1) == targets).sum()), len(targets))
    assert task.metrics(lambda *_: F.one_hot(targets, VOCAB), batch)["token_accuracy"] == (count, count)


def test_a_row_of_one_token_counts_nothing_and_has_no_gradient(tmp_path: Path) -> None:
    task = task_of(write_folder(tmp_path / "data", train=[[5], [7, 8]]))
    batch = task.load_dataset("train").__getitems__([0])
    assert task.count(batch) == {"loss": 0}
    model = make_model()
    loss = task.loss(model, batch)["loss"]
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert task.metrics(model, batch) == {"token_accuracy": (0.0, 0.0)}


def test_dropout_stands_for_all_rates(folder: Path) -> None:
    config = task_of(folder, "--dropout", "0.3").build_model().config
    assert (config.embedding_dropout, config.residual_dropout, config.attention_dropout) == (0.3, 0.3, 0.3)
    assert task_of(folder).build_model().config == GPT2


# A directory of Hugging Face


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_begins_with_the_weights_of_a_directory(folder: Path, tmp_path: Path, layout: str) -> None:
    published = make_model(LAYOUTS[layout], torch.float32)
    write_pretrained(published, tmp_path / "gpt", tokenizer_file=folder / "tokenizer.json")
    task = task_of(folder, "--init-from", tmp_path / "gpt", "--dropout", "0.25")
    batch = task.load_dataset("train").__getitems__(range(9))
    found = task.build_model()
    assert found.training
    assert found.config == LAYOUTS[layout].with_dropout(0.25)
    assert torch.equal(found.eval()(*batch.values()), published(*batch.values()))
    fresh = task_of(folder).build_model().eval()
    assert layout == "llama" or not torch.equal(fresh(*batch.values()), published(*batch.values()))  # the twin


def test_a_directory_and_a_configuration_are_one_too_many(folder: Path) -> None:
    for make in (lambda task: task.build_model(), lambda task: task.load_dataset("train")):
        with pytest.raises(ConfigError, match=r"--config-file c\.json and --init-from gpt both define the network"):
            make(task_of(folder, "--init-from", "gpt", "--config-file", "c.json"))


def test_a_directory_of_another_architecture_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert", "vocab_size": 53}')
    for make in (lambda task: task.build_model(), lambda task: task.load_dataset("train")):
        with pytest.raises(DataError, match=r'bert/config\.json: model_type is "bert": expected gpt2 or llama'):
            make(task_of(folder, "--init-from", tmp_path / "bert"))
    with pytest.raises(DataError, match="nowhere is not a directory: expected a Hugging Face directory"):
        task_of(folder, "--init-from", tmp_path / "nowhere").build_model()


def test_a_directory_with_other_tokens_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs.json").write_text(json.dumps(tokenizer_json([TOKENS[0], *TOKENS[:0:-1]])))
    write_pretrained(make_model(), tmp_path / "gpt", tokenizer_file=tmp_path / "theirs.json")
    with pytest.raises(DataError, match=r"another vocabulary \(sha256 .*gpt/tokenizer.json.*give the --dict FILE"):
        load(folder, "train", "--init-from", tmp_path / "gpt")
    assert len(load(folder, "train", "--init-from", tmp_path / "gpt", "--dict", folder / "tokenizer.json")) == 50


def run_of(folder: Path, run: Path) -> Path:
    """A run with a checkpoint of `make_model()`, as `hetseq train` leaves it."""
    words = ["--task", "gpt", "--data", str(folder), "--save-dir", str(run), "--cpu"]
    RunDirectory.prepare(run, config_yaml=options.dump_yaml(options.parse(words)))
    weights = make_model(dtype=torch.float32).state_dict()
    save_state(run, 1, {f"model.{name}": tensor for name, tensor in weights.items()}, [1, 0.5])
    return run


def export(run: Path, target: Path, *words: str) -> list[str]:
    return list(answer(parse(["export", str(run), "--format", "hf", "--to", str(target), *words])))


def test_a_run_is_exported_with_its_tokenizer_and_a_card(folder: Path, tmp_path: Path) -> None:
    run, target = run_of(folder, tmp_path / "run"), tmp_path / "out"
    export(run, target)
    names = ["README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in target.iterdir()) == names
    assert (target / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    found, expected = read_gpt(target).state_dict(), make_model(dtype=torch.float32).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    card = (target / "README.md").read_text()
    assert card.startswith(
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- hetseq\n---\n\n# out\n"
    )
    weights = sum(parameter.numel() for parameter in make_model().parameters())
    assert f"| data | {folder.name} |" in card
    assert f"| parameters | {weights:,} |\n| steps | 1 |" in card
    assert str(tmp_path) not in card


def test_adapters_are_merged_by_tasks_that_have_some(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(folder, tmp_path / "run")
    with pytest.raises(ConfigError, match="--merge: the task gpt has nothing to merge: its export is the whole model"):
        export(run, tmp_path / "out", "--merge")
    asked = []

    def write(task: GptTask, model: Any, folder: Path, *, merge: bool = False) -> None:
        asked.append(merge)
        (folder / "README.md").write_text("by peft")

    monkeypatch.setattr(GptTask, "export", write)
    export(run, tmp_path / "whole", "--merge")
    export(run, tmp_path / "adapter")
    assert asked == [True, False]
    assert (
        (tmp_path / "whole" / "README.md").read_text().endswith("| seed | 19940802 |\n")
    )  # ours, of a run without rows
    monkeypatch.setattr(GptTask, "model_card", lambda task: {"title": "x"})
    with pytest.raises(TaskError, match=r"GptTask\.model_card returned dict, expected a ModelCard"):
        export(run, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
def test_an_exported_run_is_opened_by_transformers(transformers: ModuleType, folder: Path, tmp_path: Path) -> None:
    config = GPT2.to_hugging_face() | {"eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    run, target = run_of(folder, tmp_path / "run"), tmp_path / "out"
    export(run, target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    ids = tokenizer("w3 w51 w9 <|endoftext|>", return_tensors="pt")["input_ids"]
    assert ids.tolist() == [[3, 51, 9, 0]]
    assert tokenizer.eos_token == "<|endoftext|>"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    with torch.no_grad():
        ours = make_model(dtype=torch.float32)(ids, torch.arange(4))
        assert (theirs(ids).logits[0] - ours).abs().max() <= 1e-5


def test_what_a_published_directory_says_of_its_tokenizer_is_kept(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    write_pretrained(make_model(), tmp_path / "out", tokenizer_file=folder / "tokenizer.json")
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"chat_template": "x"}'
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json([*TOKENS, "more"])))
    with pytest.raises(DataError, match=r"tokenizer.json has 54 tokens, but the model has 53: expected as many or few"):
        write_pretrained(make_model(), tmp_path / "more", tokenizer_file=folder / "tokenizer.json")
    assert not (tmp_path / "more").exists()


# What is refused


def cut(folder: Path) -> None:
    path = folder / "train_00001.safetensors"
    path.write_bytes(path.read_bytes()[:-6])


def beyond(folder: Path) -> None:
    change_numbers(folder / "train_00001.safetensors", "ids", lambda ids: ids.__setitem__(0, VOCAB))


def fewer_words(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(GPT2.to_hugging_face() | {"vocab_size": VOCAB - 1}))


def other_tokens(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json([*TOKENS, "more"])))


def empty_row(folder: Path) -> None:
    change_numbers(
        folder / "train_00000.safetensors",
        "ids.offsets",
        lambda offsets: offsets.__setitem__(SHORT + 1, offsets[SHORT]),
    )


def signed(folder: Path) -> None:
    change_index(folder, lambda facts: facts["columns"]["ids"].update(dtype="I16"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, r"train_00001.safetensors has [\d,]+ bytes, expected [\d,]+ as in the index"),
        (beyond, r"train_00001.safetensors, row 0: ids holds 53, expected 0 to 52, as corpus.json states; the file is"),
        (
            fewer_words,
            r"corpus.json has ids of 53 tokens, but .*config.json has vocab_size 52: expected as many or more",
        ),
        (other_tokens, r"a vocabulary of 53 tokens, but .*tokenizer.json has 54: expected the same; give the --dict"),
        (empty_row, f"train_00000.safetensors, row {SHORT}: ids holds nothing, expected at least one token"),
        (signed, r"has the columns ids \(I16, ragged\), expected the column of a causal language model: only ids"),
        (lambda folder: (folder / "corpus.json").unlink(), r"has no corpus.json: expected the index .*gpt_corpus"),
        (lambda folder: (folder / "config.json").unlink(), r"give --config-file a config.json of GPT-2 or Llama"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json: has no model with a vocab"),
    ],
)
def test_a_folder_that_cannot_be_meant_is_refused(folder: Path, change: Callable[[Path], object], message: str) -> None:
    change(folder)
    with pytest.raises(DataError, match=message) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


def test_what_stands_between_the_ends_is_refused_when_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetseq.tasks.gpt.dataset._CHECKED_ROWS", 2)
    place = sum(map(len, ROWS[20:25]))
    change_numbers(folder / "train_00001.safetensors", "ids", lambda ids: ids.__setitem__(place, VOCAB))
    dataset = load(folder)
    assert len(dataset.__getitems__([24, 26])["input_ids"]) == 2
    with pytest.raises(DataError, match=r"train_00001.safetensors, row 5: ids holds 53"):
        dataset.__getitems__([24, 25])
    change_numbers(folder / "train_00001.safetensors", "ids", lambda ids: ids.__setitem__(-1, VOCAB))
    with pytest.raises(DataError, match=r"train_00001.safetensors, row 19: ids holds 53"):
        load(folder)


def test_records_of_bert_and_of_a_causal_model_are_told_apart(folder: Path, tmp_path: Path) -> None:
    theirs = bert_records.write_folder(tmp_path / "bert", train=bert_records.make_rows(5))
    (theirs / "config.json").write_text(json.dumps(GPT2.to_hugging_face()))
    with pytest.raises(DataError, match=r"has the columns ids \(U16, ragged\), first_lengths \(U16\), .*: only ids"):
        load(theirs)
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in ["[PAD]", *bert_records.VOCAB[1:]]))
    config = {"vocab_size": 45, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    (folder / "bert_config.json").write_text(json.dumps(config | {"intermediate_size": 24}))
    with pytest.raises(DataError, match=re.escape(str(folder / "corpus.json"))):
        make_task(BertTask, options.parse(["--task", "bert", "--data", str(folder)])).load_dataset("train")


def test_other_splits_and_what_is_no_folder_are_refused(folder: Path) -> None:
    with pytest.raises(MissingSplitError, match=r"has no split 'valid': expected one of train, test"):
        load(folder, "valid")
    with pytest.raises(DataError, match="is one file of a folder of records: give the folder"):
        load(folder / "train_00000.safetensors")
    with pytest.raises(DataError, match=r"nowhere does not exist, and so has no corpus.json"):
        load(folder / "nowhere")
    with pytest.raises(DataError, match="the task gpt needs --data, a folder of records"):
        make_task(GptTask, options.parse(["--task", "gpt"])).load_dataset("train")


def test_tokens_are_read_by_their_ids(tmp_path: Path) -> None:
    def tokens_of(content: object) -> list[str]:
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        return read_tokens(tmp_path / "tokenizer.json")

    added = [{"id": 3, "content": "<end>"}]
    assert tokens_of({"model": {"vocab": {"b": 1, "a": 0}}, "added_tokens": added}) == ["a", "b", "", "<end>"]
    assert tokens_of({"model": {"vocab": [["<unk>", 0.0], ["x", -1.5]]}}) == ["<unk>", "x"]
    for wrong in (-1, 1 << 24, "1", None, True):
        with pytest.raises(DataError, match=r"tokenizer.json: the id of the token 'a' is"):
            tokens_of({"model": {"vocab": {"a": wrong}}})
    with pytest.raises(DataError, match="an entry of added_tokens without content"):
        tokens_of({"model": {"vocab": {"a": 0}}, "added_tokens": ["x"]})
