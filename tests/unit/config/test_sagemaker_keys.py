"""Keys of SageMaker's model-parallel library in a file of `--config`: their meaning as options, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetseq.config import dump_yaml, parse, retired_notes
from hetseq.config.sections import DistributedConfig
from hetseq.errors import ConfigError


def found(folder: Path, text: str, *words: str) -> DistributedConfig:
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return parse(["--config", str(folder / "run.yaml"), *words]).distributed


@pytest.mark.parametrize(
    ("text", "words", "model", "groups"),
    [
        ("hybrid_shard_degree: 0", "", "all", "auto"),
        ("hybrid_shard_degree: 1", "", "none", "all"),
        ('{"hybrid_shard_degree": 4}', "", "all", "4"),
        ("hybrid_shard_degree: 4\nshard_model: state", "", "state", "4"),
        ("hybrid_shard_degree: 4", "--shard-model auto", "auto", "4"),
        ("hybrid_shard_degree: 4\nshard_groups: 4", "", "all", "4"),
        ("hybrid_shard_degree: 1\nshard_model: none", "--shard-groups all", "none", "all"),
        ("hybrid_shard_degree: null", "", "none", "all"),
        ("hybrid_shard_degree: 4", "--hybrid-shard-degree 2", "all", "2"),
    ],
)
def test_a_degree_is_the_model_and_the_groups(tmp_path: Path, text: str, words: str, model: str, groups: str) -> None:
    config = found(tmp_path, text, *words.split())
    assert (config.shard_model, config.shard_groups) == (model, groups)


def test_all_ranks_in_one_group_are_no_groups_and_others_have_to_divide_the_ranks(tmp_path: Path) -> None:
    config = found(tmp_path, "hybrid_shard_degree: 4")
    config.check_world(4)
    config.check_world(8)
    for ranks in (2, 6):
        with pytest.raises(
            ConfigError, match=f"hybrid_shard_degree: groups of 4 ranks do not divide the {ranks} ranks"
        ):
            config.check_world(ranks)


def test_what_is_written_beside_the_checkpoints_are_options(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text('{"hybrid_shard_degree": 2, "context_parallel_degree": 1}', encoding="utf-8")
    config = parse(["--config", str(tmp_path / "run.yaml")])
    written = dump_yaml(config)
    assert "shard_degree" not in written
    assert "context" not in written
    (tmp_path / "config.yaml").write_text(written, encoding="utf-8")
    assert parse(["--config", str(tmp_path / "config.yaml")]) == config


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        ("hybrid_shard_degree: -1", "", "FILE, line 1: hybrid_shard_degree -1: expected a whole number of 0 or more"),
        ("hybrid_shard_degree: true", "", "FILE, line 1: hybrid_shard_degree: true: expected a whole number"),
        ("hybrid_shard_degree: 1", "--shard-model state", "FILE, line 1: hybrid_shard_degree 1 keeps all of the"
         " state on every rank, but shard_model is state (--shard-model): keep one of them"),
        ("shard_model: none\nhybrid_shard_degree: 4", "", "FILE, line 2: hybrid_shard_degree 4 divides the state among"
         " ranks, but shard_model is none (FILE, line 1): keep one of them"),
        ("hybrid_shard_degree: 4", "--shard-groups node", "FILE, line 1: hybrid_shard_degree 4 means shard_model all"
         " and shard_groups 4, but shard_groups is node (--shard-groups): keep one of them"),
        ("hybrid_shard_degree: 1", "--shard-groups 2", "FILE, line 1: hybrid_shard_degree 1 means shard_model none, but"
         " shard_groups is 2 (--shard-groups): keep one of them"),
        ("hybrid_shard_degree: 0\nshard_groups: all", "", "hybrid_shard_degree 0 means shard_model all and shard_groups"
         " auto, but shard_groups is all (FILE, line 2)"),
        ("", "--hybrid-shard-degree 0 --shard-model none", "hybrid_shard_degree 0 divides the state among ranks, but"
         " shard_model is none (--shard-model): keep one of them"),
        ("context_parallel_degree: 2", "", "FILE, line 1: context_parallel_degree 2 cannot be given to HetSeq: set it"
         " to 1, or leave it out; long rows fit by --checkpoint-modules and --offload-activations"),
        ("expert_parallel_degree: 0", "", "FILE, line 1: expert_parallel_degree 0 cannot be given to HetSeq: set it"
         " to 1, or leave it out; experts have owners like all other parameters, by --shard-model all"),
        ("random_seed: 5", "", "FILE, line 1: unknown option random_seed: SageMaker's library seeds divided layers with"
         " it; the seed of a run is seed"),
        ("", "--random-seed 5", "unknown option --random-seed: SageMaker's library seeds divided layers with it"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_one_sentence(tmp_path: Path, text: str, words: str, told: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        found(tmp_path, text, *words.split())
    assert told in str(refusal.value).replace(str(tmp_path / "run.yaml"), "FILE")


def test_keys_without_effect_say_so(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("allow_empty_shards: true\nfsdp_cache_flush_warnings: 0\n", encoding="utf-8")
    assert retired_notes(parse(["--config", str(tmp_path / "run.yaml")])) == [
        "--allow-empty-shards has no effect (a rank may always own nothing)",
        "--fsdp-cache-flush-warnings has no effect (HetSeq divides parameters without FSDP)",
    ]
