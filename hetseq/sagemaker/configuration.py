"""The configuration of SageMaker's model-parallel library, by its own keys: read and checked, without torch.

Responsible for where it is found, for unknown keys, and for values that cannot be meant. Knows no ranks.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hetseq.errors import ConfigError
from hetseq.launch.environments import Look

HYPERPARAMETERS = "/opt/ml/input/config/hyperparameters.json"
#: the hyperparameter that holds the keys of the library
OF_THE_LIBRARY = "mp_parameters"
WITHOUT_EFFECT = ("allow_empty_shards", "fsdp_cache_flush_warnings")
#: key -> what else there is
NOT_HERE = {
    "context_parallel_degree": "long rows fit by activation checkpointing and offload_wrapper",
    "expert_parallel_degree": "experts are sharded like all other parameters",
}


@dataclass(frozen=True)
class Configuration:
    """What a script asked for. `unused`: the keys that it set and that have no effect."""

    hybrid_shard_degree: int = 0  # ranks of one sharding group; 0: all of them, 1: not sharded
    tensor_parallel_degree: int = 1
    seed: int = 12345  # of the random numbers in tensor-parallel modules
    sm_activation_offloading: bool = False
    activation_loading_horizon: int = 2
    unused: tuple[str, ...] = ()

    @property
    def groups(self) -> str:
        """The two keys that name the groups, for messages."""
        return (
            f"hybrid_shard_degree {self.hybrid_shard_degree} with tensor_parallel_degree {self.tensor_parallel_degree}"
        )


def _number(key: str, value: Any, *, least: int) -> int:
    """A whole number, also as text, which hyperparameters are."""
    text = str(value).strip()
    if isinstance(value, bool) or not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ConfigError(f"{key} is {value!r}: expected a whole number of {least} or more")
    return int(text)


def _switch(key: str, value: Any) -> bool:
    found = {"true": True, "false": False}.get(str(value).strip().lower())
    if found is None:
        raise ConfigError(f"{key} is {value!r}: expected true or false")
    return found


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "hybrid_shard_degree": lambda key, value: _number(key, value, least=0),
    "tensor_parallel_degree": lambda key, value: _number(key, value, least=1),
    "tensor_parallel_seed": lambda key, value: _number(key, value, least=0),
    "random_seed": lambda key, value: _number(key, value, least=0),
    "sm_activation_offloading": _switch,
    "activation_loading_horizon": lambda key, value: _number(key, value, least=0),
    "delayed_parameter_initialization": _switch,
    **dict.fromkeys(NOT_HERE, lambda key, value: _number(key, value, least=1)),
    **dict.fromkeys(WITHOUT_EFFECT, lambda _, value: value),
}


def configuration_of(given: Mapping[str, Any] | str | Path | None, look: Look) -> Configuration:
    """The configuration in a dictionary or a JSON or YAML file, else in the hyperparameters of the SageMaker job.

    Raises ConfigError, which names the source and the key.
    """
    if isinstance(given, (str, Path)):
        return parse(_of_file(Path(given), look), str(given))
    if given is not None:
        return parse(given, "the configuration")
    return parse(*_of_job(look))


def parse(given: Mapping[str, Any], source: str) -> Configuration:
    """The configuration of these keys. Raises ConfigError."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{source}: expected a dictionary of keys such as hybrid_shard_degree, not {given!r}")
    read: dict[str, Any] = {}
    for key, value in given.items():
        if key not in _READERS:
            near = difflib.get_close_matches(str(key), _READERS, n=1, cutoff=0)
            raise ConfigError(f"{source}: there is no key {key!r}; did you mean {near[0]}?")
        try:
            read[key] = _READERS[key](key, value)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
    for key, instead in NOT_HERE.items():
        if read.pop(key, 1) > 1:
            raise ConfigError(f"{source}: {key} above 1 cannot be given here: set it to 1; {instead}")
    if read.pop("delayed_parameter_initialization", False):
        raise ConfigError(
            f"{source}: delayed_parameter_initialization cannot be given to a script's own model: leave it out and"
            " give FSDP a param_init_fn for a model on the device meta, or train by hetseq train --delayed-init"
        )
    unused = tuple(key for key in WITHOUT_EFFECT if read.pop(key, None) is not None)
    seeds = {read.pop(key) for key in ("tensor_parallel_seed", "random_seed") if key in read}
    if len(seeds) > 1:
        raise ConfigError(f"{source}: tensor_parallel_seed and random_seed are one seed under two names: set one")
    return Configuration(**read, unused=unused, **({"seed": seeds.pop()} if seeds else {}))


def _of_file(path: Path, look: Look) -> Mapping[str, Any]:
    text = look.read(str(path))
    if text is None:
        raise ConfigError(f"{path}: this file cannot be read: give init a dictionary, or the path of JSON or YAML")
    try:
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: this is not {'JSON' if path.suffix == '.json' else 'YAML'}: {error}") from None
    return {} if value is None else value


def _of_job(look: Look) -> tuple[Mapping[str, Any], str]:
    """The keys of the job and their source; those among the other hyperparameters, if the library has none."""
    if text := look.get("SM_HP_MP_PARAMETERS"):
        return _json(text, "SM_HP_MP_PARAMETERS"), "SM_HP_MP_PARAMETERS"
    for source, text in (("SM_HPS", look.get("SM_HPS")), (HYPERPARAMETERS, look.read(HYPERPARAMETERS))):
        if not text:
            continue
        every = _json(text, source)
        if OF_THE_LIBRARY in every:
            inside = every[OF_THE_LIBRARY]
            where = f"{source}: {OF_THE_LIBRARY}"
            return (_json(inside, where) if isinstance(inside, str) else inside), where
        return {key: value for key, value in every.items() if key in _READERS}, source
    return {}, "the defaults"


def _json(text: str, source: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source}: this is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: expected a JSON object of keys, not {text}")
    return value
