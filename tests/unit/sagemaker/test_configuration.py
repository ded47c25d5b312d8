"""The configuration of an FSDP script: the places where it is found, and refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from hetseq.config.sagemaker_keys import ELSEWHERE, SageMakerConfig
from hetseq.config.sections import SECTIONS
from hetseq.errors import ConfigError
from hetseq.launch.environments import Look
from hetseq.sagemaker.configuration import _READERS, HYPERPARAMETERS, Configuration, configuration_of
from hetseq.sagemaker.ranks import degrees


def look(files: Mapping[str, str] | None = None, **environment: str) -> Look:
    return Look(environment, (files or {}).get, "here")


def read(**given: Any) -> Configuration:
    return configuration_of(given, look())


def test_all_keys_of_the_library_are_read_as_they_are() -> None:
    assert read(
        hybrid_shard_degree=4, sm_activation_offloading=True, activation_loading_horizon=3, tensor_parallel_degree=2,
        tensor_parallel_seed=7, delayed_parameter_initialization=False, context_parallel_degree=1,
        expert_parallel_degree=1, allow_empty_shards=1, fsdp_cache_flush_warnings=0,
    ) == Configuration(4, 2, 7, True, 3, ("allow_empty_shards", "fsdp_cache_flush_warnings"))  # fmt: skip


KEYS = {"hybrid_shard_degree": "2", "sm_activation_offloading": "true", "random_seed": 5}
FOUND = Configuration(hybrid_shard_degree=2, sm_activation_offloading=True, seed=5)


@pytest.mark.parametrize(
    "where",
    [
        look(SM_HP_MP_PARAMETERS=json.dumps(KEYS)),
        look(SM_HPS=json.dumps({"lr": 0.1, "mp_parameters": KEYS})),
        look(SM_HPS=json.dumps({"lr": 0.1, **KEYS})),
        look({HYPERPARAMETERS: json.dumps({"lr": "0.1", "mp_parameters": json.dumps(KEYS)})}),
    ],
    ids=["SM_HP_MP_PARAMETERS", "SM_HPS", "beside others", "file"],
)
def test_a_job_gives_its_hyperparameters(where: Look) -> None:
    assert configuration_of(None, where) == FOUND


def test_a_file_is_json_or_yaml_and_without_anything_there_are_the_defaults() -> None:
    files = {"a.json": json.dumps(KEYS), "a.yaml": "hybrid_shard_degree: 2\nsm_activation_offloading: true\n"}
    assert configuration_of("a.json", look(files)) == FOUND
    assert configuration_of("a.yaml", look(files)).hybrid_shard_degree == 2
    assert configuration_of(None, look()) == Configuration()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"hybrid_shard_degre": 2}, "there is no key 'hybrid_shard_degre'; did you mean hybrid_shard_degree?"),
        ({"hybrid_shard_degree": -1}, "hybrid_shard_degree is -1: expected a whole number of 0 or more"),
        ({"tensor_parallel_degree": 0}, "tensor_parallel_degree is 0: expected a whole number of 1 or more"),
        ({"hybrid_shard_degree": True}, "hybrid_shard_degree is True: expected a whole number"),
        ({"sm_activation_offloading": "on"}, "sm_activation_offloading is 'on': expected true or false"),
        ({"context_parallel_degree": 2}, "context_parallel_degree above 1 cannot be given here: set it to 1"),
        ({"expert_parallel_degree": 4}, "expert_parallel_degree above 1 cannot be given here: set it to 1"),
        ({"delayed_parameter_initialization": True}, "delayed_parameter_initialization cannot be given"),
        ({"tensor_parallel_seed": 1, "random_seed": 2}, "one seed under two names: set one"),
        ("none.json", "none.json: this file cannot be read"),
        ("bad.json", "bad.json: this is not JSON"),
        ("list.json", "list.json: expected a dictionary of keys"),
    ],
)
def test_a_bad_configuration_is_refused_in_words(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration_of(given, look({"bad.json": "{", "list.json": "[2]"}))
    assert sentence in str(caught.value)


def test_ranks_are_replicas_of_sharding_groups_of_ranks_that_share_tensors() -> None:
    assert degrees(Configuration(), 8) == (1, 8, 1)
    assert degrees(Configuration(hybrid_shard_degree=1), 8) == (8, 1, 1)
    assert degrees(Configuration(hybrid_shard_degree=2, tensor_parallel_degree=2), 12) == (3, 2, 2)


@pytest.mark.parametrize(
    ("configuration", "sentence"),
    [
        (Configuration(hybrid_shard_degree=3), "groups of 3 ranks do not divide the 8 ranks"),
        (Configuration(hybrid_shard_degree=16), "groups of 16 ranks do not divide the 8 ranks"),
        (Configuration(tensor_parallel_degree=3), "tensor_parallel_degree 3 does not divide the 8 ranks"),
        (Configuration(8, tensor_parallel_degree=2), "set hybrid_shard_degree to a divisor of 4"),
    ],
)
def test_degrees_that_do_not_divide_the_ranks_are_refused(configuration: Configuration, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        degrees(configuration, 8)


def test_a_run_knows_every_key_that_scripts_may_have() -> None:
    names = {
        name
        for section in (*SECTIONS, SageMakerConfig)
        for field in section.__dataclass_fields__.values()
        for name in (field.name, *(other.replace("-", "_") for other in field.metadata["also"]))
    }
    assert set(_READERS) <= names | set(ELSEWHERE)
