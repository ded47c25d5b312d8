"""Command line and YAML to a configuration and back: what is meant is understood, what cannot be meant is refused."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hetseq import registry
from hetseq.config import (
    FIRST_LINE,
    HelpRequested,
    complete,
    dump_yaml,
    help_text,
    markdown,
    parse,
    retired_notes,
    with_own_options,
    write_page,
)
from hetseq.config.sections import SECTIONS, Config, DataConfig, DistributedConfig, flag
from hetseq.errors import ConfigError, TaskFileError

REPOSITORY = Path(__file__).resolve().parents[3]


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    return str(caught.value)


def refused_file(folder: Path, text: str) -> str:
    """What is said about a file with this text, its path shortened to FILE."""
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return refusal("--config", str(file)).replace(str(file), "FILE")


def parse_file(folder: Path, text: str, *argv: str) -> Config:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return parse(["--config", str(file), *argv])


# every option of 2020 in a form that a script may hold, and the field and value it has now
OPTIONS_OF_2020 = [
    ("--task bert", "task", "bert"),
    ("--task mnist", "task", "mnist"),
    ("--optimizer adam", "optimizer", "adam"),
    ("--optimizer adadelta", "optimizer", "adadelta"),
    ("--lr-scheduler PolynomialDecayScheduler", "lr_scheduler", "PolynomialDecayScheduler"),
    ("--lr_scheduler PolynomialDecayScheduler", "lr_scheduler", "PolynomialDecayScheduler"),
    ("--no-progress-bar", "no_progress_bar", True),
    ("--seed 19940802", "seed", 19940802),
    ("--cpu", "cpu", True),
    ("--log-interval 1", "log_interval", 1),
    ("--log-format simple", "log_format", "simple"),
    ("--log-format none", "log_format", "none"),
    ("--num-workers -1", "num_workers", -1),
    ("--num-workers 4", "num_workers", 4),
    ("--max-tokens 4096", "max_tokens", 4096),
    ("--max-sentences 32", "max_sentences", 32),
    ("--batch-size 32", "max_sentences", 32),
    ("--ranks 4", "distributed_gpus", 4),
    ("--resume best", "restore_file", "best"),
    ("--unit-size 8", "unit_size", 8),
    ("--shuffle-block 4096", "shuffle_block", 4096),
    ("--data-by-host", "data_by_host", True),
    ("--required-batch-size-multiple 8", "required_batch_size_multiple", 8),
    ("--train-subset train", "train_subset", "train"),
    ("--valid-subset valid,test", "valid_subset", "valid,test"),
    ("--validate-interval 2", "validate_interval", 2),
    ("--validate-interval-updates 500", "validate_interval_updates", 500),
    ("--disable-validation", "disable_validation", True),
    ("--max-tokens-valid 4096", "max_tokens_valid", 4096),
    ("--max-sentences-valid 64", "max_sentences_valid", 64),
    ("--curriculum 2", "curriculum", 2),
    ("--data /data/test_128/", "data", "/data/test_128/"),
    ("--dict /data/vocab.txt", "vocab_file", "/data/vocab.txt"),
    ("--config_file /data/bert_config.json", "config_file", "/data/bert_config.json"),
    ("--max_pred_length 128", "max_pred_length", 128),
    ("--num_file 3", "num_file", 3),
    ("--distributed-world-size 8", "distributed_world_size", 8),
    ("--distributed-rank 4", "distributed_rank", 4),
    ("--distributed-gpus 4", "distributed_gpus", 4),
    ("--distributed-gpus 0", "distributed_gpus", 0),
    ("--distributed-backend nccl", "distributed_backend", "nccl"),
    ("--distributed-init-method tcp://10.0.0.1:11111", "distributed_init_method", "tcp://10.0.0.1:11111"),
    ("--distributed-init-method file:///share/meet", "distributed_init_method", "file:///share/meet"),
    ("--device-id 1", "device_id", 1),
    ("--local_rank 1", "device_id", 1),
    ("--local_rank=1", "device_id", 1),
    ("--local-rank 1", "device_id", 1),
    ("--distributed-no-spawn", "distributed_no_spawn", True),
    ("--ddp-backend c10d", "ddp_backend", "c10d"),
    ("--bucket-cap-mb 25", "bucket_cap_mb", 25.0),
    ("--memory-buffer-size 2GB", "memory_buffer_size", "2GB"),
    ("--shard-model state", "shard_model", "state"),
    ("--shard-model auto", "shard_model", "auto"),
    ("--memory-interval-updates 100", "memory_interval_updates", 100),
    ("--fix-batches-to-gpus", "fix_batches_to_gpus", True),
    ("--find-unused-parameters", "find_unused_parameters", True),
    ("--fast-stat-sync", "fast_stat_sync", True),
    ("--max-epoch 20", "max_epoch", 20),
    ("--me 20", "max_epoch", 20),
    ("--max-update 900000", "max_update", 900000),
    ("--mu 900000", "max_update", 900000),
    ("--clip-norm 100", "clip_norm", 100.0),
    ("--update-freq 4", "update_freq", (4,)),
    ("--update-freq 1,2,4", "update_freq", (1, 2, 4)),
    ("--lr 0.0001", "lr", (0.0001,)),
    ("--lr 1e-4", "lr", (0.0001,)),
    ("--learning-rate 0.25", "lr", (0.25,)),
    ("--lr 0.1,0.05", "lr", (0.1, 0.05)),
    ("--min-lr -1", "min_lr", -1.0),
    ("--use-bmuf", "use_bmuf", True),
    ("--adam-betas '(0.9, 0.98)'", "adam_betas", (0.9, 0.98)),
    ("--adam-eps 1e-6", "adam_eps", 1e-6),
    ("--weight-decay 0.01", "weight_decay", 0.01),
    ("--wd 0.01", "weight_decay", 0.01),
    ("--adadelta_rho 0.95", "adadelta_rho", 0.95),
    ("--adadelta_eps 1e-5", "adadelta_eps", 1e-5),
    ("--dadelta_weight_decay 0.1", "adadelta_weight_decay", 0.1),
    ("--force-anneal 3", "force_anneal", 3),
    ("--fa 3", "force_anneal", 3),
    ("--warmup-updates 10000", "warmup_updates", 10000),
    ("--end-learning-rate 1e-6", "end_learning_rate", 1e-6),
    ("--power 2", "power", 2.0),
    ("--total-num-update 50000", "total_num_update", 50000),
    ("--save-dir bert_single_gpu", "save_dir", "bert_single_gpu"),
    ("--restore-file checkpoint_last.pt", "restore_file", "checkpoint_last.pt"),
    ("--reset-dataloader", "reset_dataloader", True),
    ("--reset-lr-scheduler", "reset_lr_scheduler", True),
    ("--reset-meters", "reset_meters", True),
    ("--reset-optimizer", "reset_optimizer", True),
    ("--optimizer-overrides '{}'", "optimizer_overrides", "{}"),
    ("--save-interval 2", "save_interval", 2),
    ("--save-interval-updates 1000", "save_interval_updates", 1000),
    ("--keep-interval-updates -1", "keep_interval_updates", -1),
    ("--keep-every-updates 1000", "keep_every_updates", 1000),
    ("--keep-interval-updates 5", "keep_interval_updates", 5),
    ("--keep-last-epochs 5", "keep_last_epochs", 5),
    ("--no-save", "no_save", True),
    ("--no-epoch-checkpoints", "no_epoch_checkpoints", True),
    ("--no-last-checkpoints", "no_last_checkpoints", True),
    ("--no-save-optimizer-state", "no_save_optimizer_state", True),
    ("--best-checkpoint-metric loss", "best_checkpoint_metric", "loss"),
    ("--maximize-best-checkpoint-metric", "maximize_best_checkpoint_metric", True),
    ("--hetseq_state_dict a.pt", "hetseq_state_dict", "a.pt"),
    ("--transformers_state_dict a.bin", "transformers_state_dict", "a.bin"),
    ("--train_file train.txt", "train_file", "train.txt"),
    ("--validation_file valid.txt", "validation_file", "valid.txt"),
    ("--test_file test.txt", "test_file", "test.txt"),
    ("--extension_file more.txt", "extension_file", "more.txt"),
    ("--load_state_dict_strict", "load_state_dict_strict", True),
    ("--load_state_dict_strict True", "load_state_dict_strict", True),
    ("--root_data_dir /data", "root_data_dir", "/data"),
    ("--entities entities", "entities", "entities"),
    ("--ent_vecs_filename vectors", "ent_vecs_filename", "vectors"),
]


@pytest.mark.parametrize(("written", "name", "value"), OPTIONS_OF_2020, ids=[row[0] for row in OPTIONS_OF_2020])
def test_an_option_of_2020_is_accepted_as_written(written: str, name: str, value: object) -> None:
    option, _, rest = written.partition(" ")
    argv = [option, rest.strip("'")] if rest else [option]
    assert parse(argv).flat()[name] == value
    swapped = option.replace("_", "-") if "_" in option else "--" + option[2:].replace("-", "_")
    assert parse([swapped, *argv[1:]]) == parse(argv)


# ------------------------------------------------------------------------------------------------------- flags


def test_without_arguments_everything_has_its_default() -> None:
    assert parse([]) == Config()
    assert parse(["--seed", "1"]) != Config()


@pytest.mark.parametrize("text", ["0.9,0.999", "(0.9, 0.999)", "[0.9, 0.999]", " 0.9 , 0.999 ", "(0.9,0.999,)"])
def test_a_list_is_read_as_a_literal(text: str) -> None:
    assert parse(["--adam-betas", text]).optimization.adam_betas == (0.9, 0.999)


@pytest.mark.parametrize(
    "text",
    ["0.9,,0.99", "(0.9,0.99]", "(0.9,0.99", "[[0.9],[0.99]]", "0.9 0.99", "__import__('os').getpid()", ")", "("],
)
def test_a_list_that_is_none_is_refused_and_never_evaluated(text: str) -> None:
    assert refusal("--adam-betas", text) == (
        f"--adam-betas {text}: expected numbers separated by commas, as in 0.1,0.05"
    )


def test_words_in_lists_may_have_quotes() -> None:
    assert parse(["--devices", "['cuda:0', \"cpu\"]"]).distributed.devices == ("cuda:0", "cpu")
    assert parse(["--devices", ""]).distributed.devices == ()
    assert parse(["--throttle", "1:3,2:1.5"]).distributed.throttle_factors() == {1: 3.0, 2: 1.5}


def test_a_negative_value_is_no_flag() -> None:
    assert parse(["--min-lr", "-1"]).optimization.min_lr == -1
    assert parse(["--min-lr", "-1e-5"]).optimization.min_lr == -1e-5
    assert parse(["--min_lr", "-.5"]).optimization.min_lr == -0.5
    assert parse(["--min-lr=-2"]).optimization.min_lr == -2
    assert refusal("--balance", "-1,2") == "--balance -1,2: expected weights of 0 or more"
    assert refusal("--balance", "1,1/0,0") == "--balance 1,1/0,0: expected at least one weight above 0"
    assert refusal("--balance", "1,1/3") == "--balance 1,1/3: expected as many weights before each / as behind it"


def test_a_rank_may_compute_nothing() -> None:
    assert parse(["--balance", "3,1,0"]).distributed.balance_weights() == (3.0, 1.0, 0.0)
    assert parse(["--balance", "0,0,1"]).distributed.balance_weights() == (0.0, 0.0, 1.0)
    assert parse(["--balance", "1,0/0,1"]).distributed.balance_turns() == ((1.0, 0.0), (0.0, 1.0))
    assert refusal("--balance", "0,0,0") == "--balance 0,0,0: expected at least one weight above 0"


SHARDED = ("--shard-model", "state")


def test_owners_are_given_by_weights_by_their_number_or_by_memory() -> None:
    def owners(*words: str) -> tuple[float, ...] | None:
        return parse([*SHARDED, *words]).distributed.own_weights()

    assert owners() is None
    assert owners("--own", "auto") is None
    assert owners("--own", "equal") == ()
    assert owners("--own", "3,1,0") == (3.0, 1.0, 0.0)
    assert owners("--own", "0,0,1", "--balance", "3,1,0") == (0.0, 0.0, 1.0)  # a memory server


@pytest.mark.parametrize(
    ("text", "size", "is_stable"),
    [
        ("24G", 24_000_000_000, False),
        ("500M", 500_000_000, False),
        ("2GiB", 2**31, False),
        ("0", 0, False),
        ("stable", None, True),
        ("stable,24G", 24_000_000_000, True),
        ("24G, stable", 24_000_000_000, True),
    ],
)
def test_the_memory_for_state_is_a_size_or_a_promise_to_stay(text: str, size: int | None, is_stable: bool) -> None:
    found = parse([*SHARDED, "--own-memory", text]).distributed
    assert (found.own_memory_bytes(), found.is_stable) == (size, is_stable)
    both = parse(["--shard-model", "all", "--own-memory", f"{text},host:40G"]).distributed
    assert (both.own_memory_bytes(), both.own_host_bytes(), both.is_stable) == (size, 40_000_000_000, is_stable)
    nothing = parse([*SHARDED]).distributed
    assert nothing.own_host_bytes() is None
    assert (nothing.own_memory_bytes(), nothing.is_stable) == (None, False)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--shard-model some", "--shard-model some: expected one of none, state, all, auto"),
        ("--shard-modules layer.*", "--shard-modules layer.* names what comes and goes with --shard-model all, but"
         " --shard-model is state: add --shard-model all, or leave it out"),
        ("--shard-model all --shard-modules a+b", "--shard-modules a+b: expected auto, or names with wildcards"),
        ("--own some", "--own some: expected auto, equal, or weights as in 3,1,0"),
        ("--own 3,,1", "--own 3,,1: expected auto, equal, or weights as in 3,1,0"),
        ("--own 3,1/1,3", "--own 3,1/1,3: expected auto, equal, or weights as in 3,1,0"),
        ("--own -1,2", "--own -1,2: expected weights of 0 or more"),
        ("--own 1,nan", "--own 1,nan: expected weights of 0 or more"),
        ("--own 0,0", "--own 0,0: expected at least one weight above 0"),
        ("--own-memory 24X", "--own-memory 24X: expected a size as in 24G or 500M, of the GPUs and the host as in"
         " gpu:8G,host:40G, stable for a node that stays, or both as in stable,24G"),
        ("--own-memory 1G,2G", "--own-memory 1G,2G: expected a size as in 24G"),
        ("--own-memory stable,stable", "--own-memory stable,stable: expected a size as in 24G"),
        ("--own-memory stabel", "--own-memory stabel: expected a size as in 24G"),
        ("--own-memory host:1G,host:2G", "--own-memory host:1G,host:2G: expected a size as in 24G"),
        ("--own-memory tape:1G", "--own-memory tape:1G: expected a size as in 24G"),
        ("--own-memory gpu:8G,host:40G", "--own-memory gpu:8G,host:40G: only with --shard-model all does what a rank"
         " owns lie apart from what it computes with, so that it may be in host memory; --shard-model is state"),
        ("--shard-groups 2+0", "--shard-groups 2+0: expected all, node, auto, the ranks of each group as in 2+1, or N"),
        ("--shard-groups nodes", "--shard-groups nodes: expected all, node, auto, the ranks of each group as in 2+1"),
        ("--shard-groups 0", "--shard-groups 0: expected all, node, auto, the ranks of each group as in 2+1, or N for"),
        ("--shard-groups auto --shard-model none", "--shard-groups auto divides the optimizer state, but"),
        ("--shard-groups node --shard-model none", "--shard-groups node divides the optimizer state, but --shard"),
        ("--own 3,1 --own-memory 24G", "--own-memory 24G is for --own auto, but --own 3,1 divides the state already:"
         " leave one of them out"),
        ("--own equal --shard-model none", "--own equal divides the optimizer state, but --shard-model none keeps all"
         " of it on every rank: add --shard-model state, or leave --own out"),
        ("--own-memory stable --shard-model none", "--own-memory stable divides the optimizer state, but --shard-model"
         " none keeps all of it on every rank: add --shard-model state, or leave --own-memory out"),
    ],
)  # fmt: skip
def test_owners_that_cannot_be_meant_are_refused(words: str, told: str) -> None:
    chosen = () if "--shard-model" in words else SHARDED
    assert refusal(*chosen, *words.split()).startswith(told)


def test_owners_are_one_weight_for_each_rank() -> None:
    found = parse([*SHARDED, "--own", "3,1"]).distributed
    found.check_world(2)
    with pytest.raises(ConfigError, match="--own 3,1 gives 2 weights for 3 ranks: give one weight per rank"):
        found.check_world(3)
    parse([*SHARDED, "--own", "equal"]).distributed.check_world(3)
    groups = parse([*SHARDED, "--shard-groups", "2+1"]).distributed
    assert groups.shard_group_sizes() == (2, 1)
    groups.check_world(3)
    with pytest.raises(ConfigError, match=r"--shard-groups 2\+1 has 3 ranks, and the run has 4: name each rank once"):
        groups.check_world(4)
    in_twos = parse([*SHARDED, "--shard-groups", "2"]).distributed
    assert in_twos.shard_group_sizes() == (2,)
    in_twos.check_world(4)
    for world_size in (1, 3):
        told = f"--shard-groups 2 or hybrid_shard_degree: groups of 2 ranks do not divide the {world_size} ranks of the"
        with pytest.raises(ConfigError, match=told):
            in_twos.check_world(world_size)


def test_a_switch_may_say_false() -> None:
    assert parse(["--cpu"]).distributed.cpu is True
    for words in (["--cpu", "false"], ["--cpu=False"], ["--cpu", "--cpu=false"]):
        assert parse([*words, "--seed", "3"]).distributed.cpu is False
    assert refusal("--cpu", "maybe") == "--cpu maybe: expected true or false"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--batch-size 4 --max-sentences 8", "--batch-size 4 and --max-sentences 8 are one option with two values"),
        ("--max_sentences 8 --batch-size=4", "--max_sentences 8 and --batch-size 4 are one option with two values"),
    ],
)
def test_two_spellings_of_an_option_with_two_values_are_refused(words: str, told: str) -> None:
    assert refusal(*words.split()) == f"{told}: keep one of them"
    assert parse(["--batch-size", "4", "--max-sentences", "4"]).data.max_sentences == 4


@pytest.mark.parametrize(
    ("word", "told"),
    [("-h-all", "unknown option -h-all: did you mean --help-all?"), ("--help=x", "--help/-h takes no value"),
     ("--help-all=x", "--help-all takes no value")],
)  # fmt: skip
def test_a_value_where_none_is_taken_is_answered_in_our_words(word: str, told: str) -> None:
    assert refusal(word) == told


def test_of_a_flag_given_twice_the_last_wins() -> None:
    assert parse(["--batch-size", "8", "--batch_size", "16"]).data.max_sentences == 16


def test_a_value_may_hold_an_equals_sign_and_underscores() -> None:
    assert parse(["--save_dir=a_b=c"]).checkpoint.save_dir == "a_b=c"
    assert parse(["--task", "my_file.py:My_Task"]).task.task == "my_file.py:My_Task"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-sentence", "3"], "unknown option --max-sentence: did you mean --max-sentences?"),
        (["--max_sentnces=3"], "unknown option --max_sentnces: did you mean --max-sentences?"),
        (["-lr", "3"], "unknown option -lr: did you mean --lr?"),
        (["--LR", "3"], "unknown option --LR: did you mean --lr?"),
        (["--qqqq"], "unknown option --qqqq: `hetseq train --help-all` lists them"),
        (["--seed", "1", "--optim", "adam"], "unknown option --optim: did you mean --optimizer?"),
        (["--lr", "fast"], "--lr fast: expected numbers separated by commas, as in 0.1,0.05"),
        (["--learning_rate", "fast"], "--learning_rate fast: expected numbers separated by commas, as in 0.1,0.05"),
        (["--lr"], "--lr has no value: expected numbers separated by commas, as in 0.1,0.05"),
        (["--lr", "--cpu"], "--lr has no value: expected numbers separated by commas, as in 0.1,0.05"),
        (["--seed", "1.5"], "--seed 1.5: expected a whole number"),
        (["--seed="], "--seed: expected a whole number"),
        (["--lr", "inf"], "--lr inf: expected a finite number"),
        (["--min-lr", "-inf"], "--min-lr -inf: expected a finite number"),
        (["--clip-norm", "nan"], "--clip-norm nan: expected a finite number"),
        (["--clip-norm", "1e999"], "--clip-norm 1e999: expected a finite number"),
        (["--precision", "fp8"], "--precision fp8: expected one of fp32, tf32"),
        (["--optimizer-overrides", "{'lr'"], "--optimizer-overrides {'lr': expected a dict of names and plain values"),
        (["--lr", "0.1", "0.05"], "unexpected argument '0.05': a value comes after its flag, and a list is written"),
        (["train"], "unexpected argument 'train': a value comes after its flag"),
        (["--"], "unexpected argument '--'"),
        (["--batch-size", "0"], "--batch-size 0: expected a number above 0"),
        (["--max-sentences", "0"], "--batch-size 0: expected a number above 0 (--batch-size is from --max-sentences)"),
        (["--distributed-gpus", "-1"], "--ranks -1: expected 0 or more (--ranks is from --distributed-gpus)"),
        (["--rank", "2"], "unknown option --rank: did you mean --ranks?"),
        (["--resum", "best"], "unknown option --resum: did you mean --resume?"),
        (["mnist"], "unexpected argument 'mnist': a value comes after its flag: did you mean --task mnist?"),
        (
            ["mine.py:A"],
            "unexpected argument 'mine.py:A': a value comes after its flag: did you mean --task mine.py:A?",
        ),
        (["a.yaml"], "unexpected argument 'a.yaml': a value comes after its flag: did you mean --config a.yaml?"),
        (
            ["--task", "gpt", "mnist"],
            "unexpected argument 'mnist': a value comes after its flag, and a list is written",
        ),
        (
            ["--lr", "a", "--seed", "b"],
            "--lr a: expected numbers separated by commas, as in 0.1,0.05; --seed b: expected",
        ),
        (["--sed", "--lrr"], "unknown option --sed: did you mean --seed?; unknown option --lrr: did you mean --lr?"),
        (["--warmup-updates", "2.5"], "--warmup-updates 2.5: expected a whole number of steps, or a share of"),
        (["--warmup-updates", "9", "--total-num-update", "9"], "--warmup-updates 9 leaves nothing of --total-num-"),
        (
            ["--lr-scheduler", "polynomial_from_zero", "--warmup-updates", "9", "--total-num-update", "9"],
            "--warmup-updates 9 leaves nothing of --total-num-update 9",
        ),
        (["--scale-lr", "cubic"], "--scale-lr cubic: expected one of none, linear"),
        (
            ["--scale-lr", "linear"],
            "--scale-lr linear needs --scale-lr-from N: the global batch, in samples, for which",
        ),
        (["--scale-lr-from", "64"], "--scale-lr-from 64 says for which global batch --lr was chosen, but not what to"),
        (["--scale-lr", "sqrt", "--scale-lr-from", "0"], "--scale-lr-from 0: expected a number above 0"),
        (["--config"], "--config has no value: expected --config FILE"),
        (["--config", "a", "--config", "b"], "--config is given twice"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_the_users_words(argv: list[str], said: str) -> None:
    assert refusal(*argv).startswith(said)


def test_no_flag_can_be_abbreviated() -> None:
    assert "did you mean --warmup-updates?" in refusal("--warmup-update", "3")
    assert refusal("--warm", "3").startswith("unknown option --warm")


def test_a_contradiction_inside_a_section_passes_through() -> None:
    said = refusal("--global-batch-size", "64", "--update-freq", "2")
    assert said.startswith("--update-freq and --global-batch-size contradict each other")


def test_an_unknown_optimizer_is_refused_before_anything_is_imported() -> None:
    assert refusal("--optimizer", "adem").startswith(
        "--optimizer adem: there is no such optimizer (did you mean adam?); expected adam, adamw, sgd, adadelta, lamb,"
        " muon"
    )
    assert refusal("--lr-scheduler", "cosin").startswith(
        "--lr-scheduler cosin: there is no such learning-rate schedule"
    )


def test_a_mistyped_flag_takes_no_torch_and_no_yaml() -> None:
    program = (
        "import sys\n"
        "from hetseq.errors import ConfigError\n"
        "from hetseq.config import parse\n"
        "try:\n"
        "    parse(['--task', 'mnist', '--max-sentence', '3'])\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
        "print(*(name for name in ('torch', 'numpy', 'yaml') if name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout == "unknown option --max-sentence: did you mean --max-sentences?\n\n"


# ----------------------------------------------------------------------------------------------- run directory


@pytest.mark.parametrize(
    ("argv", "place"),
    [
        ([], "runs/mnist"),
        (["--task", "bert_ner"], "runs/bert_ner"),
        (["--task", "some/My_Task.py"], "runs/my_task"),
        (["--task", "some/tasks.py:Spirals"], "runs/spirals"),
        (["--task", "package.module:Spirals"], "runs/spirals"),
        (["--task", "package.module:Outer.Inner"], "runs/outer-inner"),
        (["--task", "../../..:"], "runs/task"),
        (["--task", "bert_ner", "--save-dir", "here"], "here"),
    ],
)
def test_the_run_directory_follows_from_the_task(argv: list[str], place: str, tmp_path: Path) -> None:
    config = parse(argv)
    assert config.checkpoint.save_dir == place
    assert config.has_own_save_dir is (place == "here")
    assert parse_file(tmp_path, dump_yaml(config), "--task", "gpt").checkpoint.save_dir == place  # it stays
    assert parse(argv, save_dir="checkpoints").checkpoint.save_dir == ("here" if place == "here" else "checkpoints")


def test_the_newest_checkpoint_has_two_names() -> None:
    for words in (
        [],
        ["--resume", "latest"],
        ["--restore-file", "checkpoint_last.pt"],
        ["--resume=checkpoint_last.pt"],
    ):
        assert parse(words).checkpoint.which_checkpoint == "latest"
    assert parse(["--resume", "7"]).checkpoint.which_checkpoint == "7"


# -------------------------------------------------------------------------------------------------------- YAML


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    config = parse_file(tmp_path, "seed: 7\nmax-sentences: 8\nwarmup_updates: 9\n", "--batch-size", "16")
    assert (config.task.seed, config.data.max_sentences, config.optimization.warmup_updates) == (7, 16, 9)
    assert config.optimization.max_update == 0


def test_a_switch_of_the_file_is_taken_back_by_a_flag(tmp_path: Path) -> None:
    assert parse_file(tmp_path, "cpu: true").distributed.cpu is True
    assert parse_file(tmp_path, "cpu: true", "--cpu=false").distributed.cpu is False


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("lr: 1e-4", "lr", (1e-4,)),  # text to YAML 1.1
        ("adam_eps: 1e-6", "adam_eps", 1e-6),
        ("clip_norm: 25", "clip_norm", 25.0),
        ("lr: [0.1, 5e-2]", "lr", (0.1, 0.05)),
        ("lr:\n  - 0.1\n  - 0.05\n", "lr", (0.1, 0.05)),
        ("lr: 0.1, 0.05", "lr", (0.1, 0.05)),
        ("adam_betas: (0.9, 0.98)", "adam_betas", (0.9, 0.98)),
        ("update-freq: 4", "update_freq", (4,)),
        ("throttle: [1:3, 2:1.5]", "throttle", ("1:3", "2:1.5")),  # 1:3 is the number 63 to YAML 1.1
        ("devices: []", "devices", ()),
        ("cpu: yes", "cpu", True),
        ("cpu: off", "cpu", False),
        ("save_dir: 2024", "save_dir", "2024"),
        ("save_dir: 2024-01-01", "save_dir", "2024-01-01"),
        ("train_subset: no", "train_subset", "no"),
        ("data: 'null'", "data", "null"),
        ("data: null", "data", None),
        ("data: ~", "data", None),
        ("data:", "data", None),
        ("balance: 5,2,1", "balance", "5,2,1"),
        ("dict: vocab.txt", "vocab_file", "vocab.txt"),
        ("batch-size: 8", "max_sentences", 8),
        ("ranks: 3", "distributed_gpus", 3),
        ("resume: 40", "restore_file", "40"),
        ("restore_file: checkpoint_last.pt", "restore_file", "checkpoint_last.pt"),
        ('seed: "7"', "seed", 7),
        ("seed: &s 7\nmax_update: *s\n", "max_update", 7),
        ("\ufeffseed: 7", "seed", 7),
        ("---\nseed: 7\n...\n", "seed", 7),
        ('{"seed": 7, "lr": [0.5]}', "lr", (0.5,)),
    ],
)
def test_the_type_of_the_field_reads_the_text_of_the_file(tmp_path: Path, text: str, name: str, value: object) -> None:
    assert parse_file(tmp_path, text).flat()[name] == value


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing but a comment\n", "---\n", "{}"])
def test_an_empty_file_changes_nothing(tmp_path: Path, text: str) -> None:
    assert parse_file(tmp_path, text) == Config()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 7\nlr: fast\n", "FILE, line 2: lr: fast: expected numbers separated by commas"),
        ("seed: 1.5", "FILE, line 1: seed: 1.5: expected a whole number"),
        ("seed: true", "FILE, line 1: seed: true: expected a whole number"),
        ("cpu: 1", "FILE, line 1: cpu: 1: expected true or false"),
        ("seed:", "FILE, line 1: seed has no value: expected a whole number"),
        ("seed: [1]", "FILE, line 1: seed is a list: expected a whole number"),
        ("lr: {a: 1}", "FILE, line 1: lr is a mapping: expected numbers separated by commas"),
        ("lr: [0.1, [0.2]]", "FILE, line 1: lr is a list: expected a number"),
        ("lr:\n - 0.1\n - slow\n", "FILE, line 3: lr: slow: expected a number"),
        ("lr: [0.1, null]", "FILE, line 1: lr has no value: expected a number"),
        ("optimizer_overrides: {}", "FILE, line 1: optimizer_overrides is a mapping: expected text; put it in quotes"),
        ("clip_norm: .inf", "FILE, line 1: clip_norm: .inf: expected a number"),
        ("clip_norm: inf", "FILE, line 1: clip_norm: inf: expected a finite number"),
        ("lr: [nan]", "FILE, line 1: lr: nan: expected a finite number"),
        ("precision: fp8", "FILE, line 1: precision: fp8: expected one of fp32, tf32"),
        ("sed: 7", "FILE, line 1: unknown option sed: did you mean seed?"),
        ("max-sentence: 7", "FILE, line 1: unknown option max-sentence: did you mean max_sentences?"),
        ("cpu: true\nzzzz: 7", "FILE, line 2: unknown option zzzz: `hetseq train --help-all` lists the options"),
        ("config: other.yaml", "FILE, line 1: unknown option config: did you mean"),
        ("seed: 7\ncpu: true\nseed: 8\n", "FILE, line 3: seed is set already in FILE, line 1: keep one of them"),
        ("max_sentences: 7\nbatch-size: 8\n", "FILE, line 2: batch-size is set already in FILE, line 1"),
        ("zzzz: 7\nzzzz: 8\n", "FILE, line 2: zzzz is set already in FILE, line 1"),
        ("max_sentences: 0", "--batch-size 0: expected a number above 0 (--batch-size is from FILE, line 1)"),
        ("resume: best\nrestore_file: best\n", "FILE, line 2: restore_file is set already in FILE, line 1"),
        ("data: {max_sentences: 8}", "FILE, line 1: data is a mapping: expected text"),
        ("? [seed]\n: 7", "FILE, line 1: expected the name of an option before the colon"),
        ("<<: {seed: 7}", "FILE, line 1: unknown option <<"),
        ("- seed", "FILE, line 1: found a list; expected one `option: value` per line, as in `batch_size: 32`"),
        ("just words", "FILE, line 1: found text without a colon; expected one `option: value` per line"),
        ("seed: a: b", "FILE, line 1: not YAML: mapping values are not allowed here; expected one `option: value` per"),
        ("seed: 7\n---\nseed: 8\n", "FILE, line 2: not YAML: but found another document"),
        ("seed: 7\ncpu: [1,\n", "FILE, line 3: not YAML: "),
        ("seed: 7\n\tcpu: true\n", "FILE, line 2: not YAML: "),
        ("seed: *nothing", "FILE, line 1: not YAML: found undefined alias 'nothing'"),
        ("save_dir: !!python/object/apply:os.getcwd []", "FILE, line 1: save_dir is a value of the type "),
        ("save_dir: !!python/name:os.getcwd x", "FILE, line 1: save_dir is a value of the type "),
        ("lr: &a [*a]", "FILE, line 1: lr is a list: expected a number"),
        ("seed: 7\x00", "FILE: not a text file: character U+0000 at position 7; --config expects YAML"),
        ("lr: " + "[" * 1500, "FILE: nested too deeply"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    assert refused_file(tmp_path, text).startswith(said)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    assert "there is no such file, seen from" in refusal("--config", str(file))
    (tmp_path / "runs.yaml").write_text("")
    assert refusal("--config", str(file)).endswith(
        f"; expected a YAML file of options; did you mean {tmp_path / 'runs.yaml'}? [file-missing]"
    )
    assert refusal("--config", str(tmp_path)) == (
        f"--config {tmp_path}: is a folder; expected a file, as in {tmp_path / 'config.yaml'}"
    )
    file.write_bytes("save_dir: ü".encode("latin-1"))
    assert "not UTF-8 text (byte 10); expected a YAML file, save it as UTF-8" in refusal("--config", str(file))
    file.write_bytes(bytes(range(256)))
    assert "not UTF-8 text" in refusal("--config", str(file))
    assert "cannot be read" in refusal("--config", f"{file}/deeper")
    assert "cannot be read" in refusal("--config", "a\0b")


# ----------------------------------------------------------------------------------- written down and read back

NASTY_TEXTS = [
    *("null", "true", "no", "1e-4", "7", "2020-01-01", "1:30", "~", "-", "---", "<<", "=", "", " in front", "behind "),
    *(
        "a: b # c",
        "ü 😀",
        "'quoted'",
        '"quoted"',
        "two\nlines",
        "tab\there",
        "[a, b]",
        "{}",
        "*a",
        "&a",
        "!!int 3",
        "%",
    ),
    *("\x7f", "\x85", "\u2028", "\udc80", "\\n", "x" * 300, "many words " * 40),
]


def candidates(hint: Any, choices: tuple[str, ...], draw: random.Random) -> list[Any]:
    """Values of a field's type, plain and nasty ones."""
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        words = candidates(item, (), draw) + (["cpu", "cuda:1", "1:3", "2:1.5", "*.layer.[01]"] if item is str else [])
        return [(word,) for word in words] + [tuple(draw.sample(words, 2)) for _ in range(20)]
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    if members:
        return [None, *candidates(members[0], choices, draw)]
    if hint is bool:
        return [True, False]
    if hint is int:
        return [-1, 0, 1, 2, 2**62, draw.randrange(1, 10**6)]
    if hint is float:
        return [-1.0, 0.0, 1e-300, 1e-08, 0.1 + 0.2, 0.5, 1.0, 3e22, 1e16, draw.random()]
    return [*choices, *NASTY_TEXTS, "5,2,1", "2+1", "{'eps': 1e-6}", "tcp://node-1:29400", "file:///shared/a run"]


#: options that mean something only beside others
COMPANIONS: dict[str, dict[str, Any]] = {
    "join": {"min_ranks": 2},
    "min_ranks": {"join": "tcp://node-1:29400"},
    "max_ranks": {"join": "tcp://node-1:29400", "min_ranks": 1},
    "shadow": {"join": "tcp://node-1:29400", "min_ranks": 1},
    "own": {"shard_model": "state"},
    "own_memory": {"shard_model": "state"},
    "shard_modules": {"shard_model": "all"},
    "shard_groups": {"shard_model": "state"},
    "offload_dir": {"offload_activations": True},
    "scale_lr": {"scale_lr_from": 64},
    "scale_lr_from": {"scale_lr": "linear"},
}


def accepted_sections(section: type, draw: random.Random) -> Iterator[Any]:
    """The section with one field changed, for each field and four of the candidates that its checks let pass."""
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        changes = []
        for value in candidates(hints[field.name], field.metadata["choices"], draw):
            try:
                changes.append(section(**COMPANIONS.get(field.name, {}), **{field.name: value}))
            except ConfigError:
                continue
        changes = [changed for changed in changes if changed != section()]
        assert changes, f"no candidate for {field.name} differs from its default"
        yield from draw.sample(changes, min(len(changes), 4))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_field_survives_being_written_down(section: type, tmp_path: Path) -> None:
    draw = random.Random(20)
    name = next(field.name for field in dataclasses.fields(Config) if field.default_factory is section)
    for changed in accepted_sections(section, draw):
        config = dataclasses.replace(Config(), **{name: changed})
        optimization = config.optimization
        names = {"optimizer": optimization.optimizer, "lr_scheduler": optimization.lr_scheduler}
        if all(registry.is_included(kind, name) for kind, name in names.items()):  # parse refuses invented ones
            assert parse_file(tmp_path, told_of(section, config)) == config


@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_any_text_survives_being_written_down(text: str, tmp_path: Path) -> None:
    config = dataclasses.replace(Config(), data=DataConfig(data=text))
    assert parse_file(tmp_path, told_of(DataConfig, config)) == config
    config = dataclasses.replace(Config(), data=DataConfig(data=f"{text}."))
    assert (
        parse_file(tmp_path, told_of(DataConfig, dataclasses.replace(Config(), data=DataConfig(data=text)))) != config
    )


def told_of(section: type, config: Config) -> str:
    """The lines of one section: reading all of them takes 10 ms, and the others are at their defaults.

    The default of --save-dir depends on the task, so it is there too.
    """
    names = {field.name for field in dataclasses.fields(section)} | {"save_dir"}
    return "\n".join(line for line in dump_yaml(config).split("\n") if line.partition(":")[0].strip('"') in names)


def test_a_whole_configuration_survives_being_written_down(tmp_path: Path) -> None:
    draw = random.Random(21)
    for _ in range(5):
        sections = {
            field.name: draw.choice(list(accepted_sections(section, draw)))
            for field, section in zip(dataclasses.fields(Config), SECTIONS, strict=False)
            if field.name != "optimization"
        }
        config = Config(**sections)
        assert parse_file(tmp_path, dump_yaml(config)) == config


def test_what_is_written_down_differs_where_the_configuration_differs(tmp_path: Path) -> None:
    config = parse(["--lr", "0.1,0.05", "--cpu", "--fast-stat-sync", "--adam-eps", "1e-8"])
    text = dump_yaml(config)
    assert parse_file(tmp_path, text) == config
    assert parse_file(tmp_path, text.replace("[0.1, 0.05]", "[0.1, 0.06]")) != config
    assert parse_file(tmp_path, text.replace("cpu: true", "cpu: false")) != config


def test_the_written_configuration_is_plain_yaml_in_sections() -> None:
    import yaml

    text = dump_yaml(parse(["--task", "bert", "--fast-stat-sync"]))
    lines = text.splitlines()
    assert lines[0] == FIRST_LINE == "# HetSeq run configuration; repeat the run with: hetseq train --config THIS_FILE"
    assert lines[1:4] == ["", "# Task: the task to train, its seed and model settings", "task: bert"]
    loaded = yaml.safe_load(text)
    assert (loaded["adam_eps"], loaded["adam_betas"], loaded["data"]) == (1e-8, [0.9, 0.999], None)
    assert loaded["fast_stat_sync"] is True
    retired = {field.name for field in dataclasses.fields(SECTIONS[-1])} - {"fast_stat_sync"}
    assert set(loaded) == set(Config().flat()) - retired


# ------------------------------------------------------------------------------------------------------- pages


def test_help_is_asked_for_and_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (
        ["--help"], ["-h"], ["--seed", "1", "--help"], ["--help", "--lr", "fast"], ["--nonsense", "-h"],
        ["--help-all"], ["--help_all", "-h"],
    ):  # fmt: skip
        with pytest.raises(HelpRequested) as caught:
            parse(argv)
        assert caught.value.text == help_text(argv)
    assert capsys.readouterr() == ("", "")


def basic_fields() -> list[str]:
    return [field.name for section in SECTIONS for field in dataclasses.fields(section) if field.metadata["basic"]]


def test_the_short_help_shows_the_basic_options_on_little_more_than_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = help_text()
    shown = re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)
    assert shown == [*map(flag, basic_fields()), "--config", "--help", "--help-all"]
    assert 15 <= len(basic_fields()) <= 22
    assert len(text.splitlines()) <= 55
    assert max(map(len, text.splitlines())) < 100
    assert "--max-sentences" not in text
    assert "  --lr LR[,LR...]           learning rate, per epoch; default: 0.001 for adam, adamw, lamb and" in text
    assert "  --max-epoch N             stop after N epochs\n" in text  # without what a 0 would mean
    assert "(default: runs/mnist)" not in text  # the meaning says how it follows from the task
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, help_text().partition("Task\n")[2].splitlines())) <= 60


def test_the_whole_help_shows_every_flag_with_its_default_and_the_retired_last() -> None:
    text = help_text(["--help-all"])
    for section in SECTIONS:
        for field in dataclasses.fields(section):
            assert f" {flag(field.name)}" in text
            assert " ".join(field.metadata["help"].split()) in " ".join(text.split())
            assert all(flag(name) in text for name in (field.name, *field.metadata["also"]))
    assert "(default: 19940802)" in text
    assert "(default: 0.9,0.999)" in text
    assert "  --ranks N, --distributed-gpus\n" in text
    assert text.index("Basic: ") < text.index("--save-dir DIR") < text.index("Task: ") < text.index("--user-dir")
    assert text.index("Log: ") < text.index("Retired: ") < text.index("--fast-stat-sync")
    assert text.count("the entity and NER tasks of 2020") == 1


def test_the_page_of_options_has_every_flag_once() -> None:
    page = markdown()
    for section in SECTIONS:
        for field in dataclasses.fields(section):
            assert page.count(f"`{flag(field.name)} ") + page.count(f"`{flag(field.name)}`") >= 1
            if not field.metadata["retired"]:
                assert page.count(f"| `{flag(field.name)} ") + page.count(f"| `{flag(field.name)}`") == 1
    basic = page[page.index("## Basic") : page.index("## Task")]
    assert re.findall(r"^\| `(--[a-z-]+)", basic, re.MULTILINE) == [*map(flag, basic_fields())]
    assert "| `--batch-size N`, `--max-sentences` |  | most samples that a device of this node computes at" in page
    assert "| `--fast-stat-sync` | always on: counts travel with every step |" in page
    assert page.count("the entity and NER tasks of 2020") == 1
    assert "`--balance auto\\|equal\\|W0,W1,...[/...]`" in page
    assert "## What changed since 2020" in page


def test_the_committed_page_of_options_is_up_to_date(tmp_path: Path) -> None:
    page = REPOSITORY / "docs" / "reference" / "options.md"
    assert page.read_text(encoding="utf-8") == markdown(), "run `make docs/reference/options.md`"
    # the twin: a default that changes, changes the page
    write_page(tmp_path / "options.md")
    written = (tmp_path / "options.md").read_text(encoding="utf-8")
    assert written == markdown() != written.replace("`19940802`", "`0`")


def test_a_retired_option_says_once_what_became_of_it() -> None:
    assert retired_notes(parse(["--ddp-backend", "c10d", "--use-bmuf"])) == [
        "--ddp-backend has no effect (HetSeq reduces gradients itself)",
        "--use-bmuf has no effect (it switched synchronisation off; every step is synchronised)",
    ]
    assert retired_notes(Config()) == []


# --------------------------------------------------------------------------------------------- the user's own

SPIRALS = '''
from __future__ import annotations
from dataclasses import dataclass
from hetseq.task import Task


@dataclass(frozen=True)
class SpiralOptions:
    """How the spirals are wound."""

    turns: float = 2.5
    arms: tuple[int, ...] = (2, 3)
    noise: float | None = None
    flipped: bool = False

    def __post_init__(self):
        if self.turns <= 0:
            raise ValueError(f"--turns {self.turns}: expected a number above 0")


class Spirals(Task):
    Options = SpiralOptions
'''


@pytest.fixture
def own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A task file of the user's; its base class is a stand-in, so that no test waits for torch."""
    base = ModuleType("hetseq.task")
    base.Task = type("Task", (), {"Options": None})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hetseq.task", base)
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in ("task", "optimizer", "lr_scheduler")})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    (tmp_path / "spirals.py").write_text(SPIRALS)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_task_is_imported_only_for_flags_that_nobody_else_knows(own_task: Path) -> None:
    (own_task / "spirals.py").write_text("raise RuntimeError('imported')")
    assert parse(["--task", "spirals.py", "--seed", "3"]).extras == {}
    with pytest.raises(TaskFileError, match=r"spirals.py, line 1: .*RuntimeError: imported"):
        parse(["--task", "spirals.py", "--turns", "3"])


def test_a_task_brings_its_own_flags(own_task: Path) -> None:
    config = parse(["--turns", "3", "--task", "spirals.py:Spirals", "--arms", "4,5", "--flipped"])
    options = config.extras["task"]
    assert dataclasses.astuple(options) == (3.0, (4, 5), None, True)
    assert config.flat()["turns"] == 3.0
    assert refusal("--task", "spirals.py", "--turn", "3") == "unknown option --turn: did you mean --turns?"
    assert refusal("--task", "spirals.py", "--turns", "-3") == "--turns -3.0: expected a number above 0"
    assert refusal("--task", "mnist", "--turns", "3").startswith("unknown option --turns")


def test_own_options_are_written_down_and_read_back(own_task: Path) -> None:
    config = parse(["--task", "spirals.py", "--turns", "3", "--noise", "1e-5"])
    text = dump_yaml(config)
    assert "# Your own options: how the spirals are wound\nturns: 3.0\n" in text
    assert parse_file(own_task, text) == config
    assert parse_file(own_task, text, "--turns", "4").extras["task"].turns == 4
    assert parse_file(own_task, text, "--turns", "4") != config
    file = own_task / "run.yaml"
    line = text.splitlines().index("turns: 3.0") + 1
    assert refusal("--config", str(file), "--task", "mnist").startswith(f"{file}, line {line}: unknown option turns: ")


def test_a_pipe_is_read_once(own_task: Path) -> None:
    reader, writer = os.pipe()  # as in --config <(make_config)
    try:
        os.write(writer, b"task: spirals.py\nturns: 3\nseed: 7\n")
        os.close(writer)
        config = parse(["--config", f"/dev/fd/{reader}"])
    finally:
        os.close(reader)
    assert (config.extras["task"].turns, config.task.seed) == (3.0, 7)


def test_complete_adds_own_options_that_were_not_given(own_task: Path) -> None:
    config = complete(parse(["--task", "spirals.py"]))
    assert config.extras["task"].turns == 2.5
    assert complete(config) == config
    assert complete(Config()) == Config()


def test_own_options_reach_a_fresh_process_as_plain_values(own_task: Path) -> None:
    config = parse(["--task", "spirals.py", "--turns", "3"])
    values = {kind: dataclasses.asdict(options) for kind, options in config.extras.items()}
    bare = dataclasses.replace(config, extras={})
    assert with_own_options(bare, values) == config
    assert with_own_options(bare, {}) != config


def test_help_shows_the_flags_of_the_task_it_is_asked_about(own_task: Path) -> None:
    text = help_text(["--task", "spirals.py", "--help"])
    assert re.search(r"\n\nYour own options\n  --turns VALUE +\(default: 2.5\)\n", text)
    whole = help_text(["--task", "spirals.py", "--help-all"])
    assert "  --turns VALUE\n        (default: 2.5)\n" in whole
    assert whole.index("Log: ") < whole.index("Your own options: how the spirals are wound") < whole.index("Retired: ")
    assert "--turns" not in help_text(["--help"])
    missing = help_text(["--task", "nowhere.py", "--help"])
    assert "The options of your own modules are missing here: --task nowhere.py: does not exist" in missing


@pytest.mark.parametrize("name", registry._INCLUDED_OPTIONS)
def test_an_included_task_brings_its_own_flags(name: str) -> None:
    """The table of the registry, which spares the import of torch, says what the task says."""
    section = registry.find_task(name).Options
    assert section is registry.options_of("task", name)
    assert f"\n--task {name}\n" in help_text(["--task", name])
    assert f"\n--task {name}: " in help_text(["--task", name, "--help-all"])
    page = markdown()
    for field in dataclasses.fields(section):
        assert f"  {flag(field.name)}" in help_text(["--task", name])
        assert f"  {flag(field.name)}" not in help_text(["--task", "mnist"])
        assert f"| `{flag(field.name)}" in page


def test_flags_of_an_included_task_belong_to_it_alone() -> None:
    assert parse(["--task", "bert", "--whole-words"]).extras["task"].whole_words
    assert refusal("--task", "mnist", "--whole-words").startswith("unknown option --whole-words")
    assert complete(parse(["--task", "bert"])).extras["task"] == registry.options_of("task", "bert")()


def test_an_optimizer_of_the_users_folder_brings_its_flags(own_task: Path) -> None:
    folder = own_task / "mine"
    folder.mkdir()
    (folder / "adan.py").write_text(
        "from dataclasses import dataclass\n"
        "from hetseq.registry import register_optimizer\n"
        "@dataclass\n"
        "class AdanOptions:\n"
        "    adan_beta: float = 0.02\n"
        "@register_optimizer('adan', options=AdanOptions)\n"
        "def adan(groups, config, options):\n"
        "    return None\n"
    )
    config = parse(["--user-dir", "mine", "--optimizer", "adan", "--adan-beta", "0.03"])
    assert config.extras["optimizer"].adan_beta == 0.03
    assert list(config.extras) == ["optimizer"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("seed: int = 3", "Options.seed of hetseq_user_spirals_.* gives the option --seed, which TaskConfig .* has"),
        ("table: dict[str, int] | None = None", "Options.table of .* has the type .*: an option is an int, float, str"),
        ("ghost: Nowhere = 3", "the types of Spirals.Options of .* cannot be read: name 'Nowhere' is not defined"),
        ("needed: int", "--needed is missing: expected a whole number, it has no default"),
    ],
)
def test_own_options_that_cannot_become_flags_are_refused(own_task: Path, line: str, said: str) -> None:
    (own_task / "spirals.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom hetseq.task import Task\n"
        f"class Spirals(Task):\n    @dataclass\n    class Options:\n        {line}\n        turns: int = 1\n"
    )
    with pytest.raises(ConfigError, match=said):
        parse(["--task", "spirals.py", "--turns", "3"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_ranks": 2}, "--max-ranks 2: expected --join URL beside it"),
        ({"max_ranks": 2, "join": "tcp://a:1", "min_ranks": 3}, "--max-ranks 2: expected --min-ranks 3 or more"),
        ({"max_ranks": 0, "join": "tcp://a:1", "min_ranks": 1}, "--max-ranks 0: expected"),
    ],
)
def test_limits_of_ranks_that_cannot_be_meant(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        DistributedConfig(**changes)
    assert DistributedConfig(join="tcp://a:1", min_ranks=2, max_ranks=2).max_ranks == 2
