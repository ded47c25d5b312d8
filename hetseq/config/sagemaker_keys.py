"""Keys of SageMaker's model-parallel library that HetSeq reads as options with other values.

Responsible for their meaning as options of HetSeq, and for refusing what HetSeq has not. Keys with equal values are
further spellings of options (`also` in `sections`), and keys without effect are in `RetiredConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetseq.config.fields import Found
from hetseq.config.sections import option
from hetseq.errors import ConfigError

#: the answer to a key that is no option, in place of the nearest name
ELSEWHERE = {"random_seed": "SageMaker's library seeds divided layers with it; the seed of a run is seed"}


@dataclass(frozen=True)
class SageMakerConfig:
    """Keys of SageMaker's model-parallel library; a file of `--config` may have them too."""

    hybrid_shard_degree: int | None = option(
        None,
        "ranks of one sharding group: 0 is --shard-groups auto, 1 is --shard-model none, any other N is --shard-groups"
        " N; with 0 and N, --shard-model is all unless it is given",
        metavar="N",
    )
    context_parallel_degree: int = option(1, "more than 1 is refused: HetSeq divides no rows", metavar="N")
    expert_parallel_degree: int = option(1, "more than 1 is refused: HetSeq divides no experts", metavar="N")


_INSTEAD = {
    "context_parallel_degree": "long rows fit by --checkpoint-modules and --offload-activations",
    "expert_parallel_degree": "experts have owners like all other parameters, by --shard-model all",
}


def as_options(found: Mapping[str, Found]) -> dict[str, Found]:
    """The values found with options of HetSeq in place of these keys. Raises ConfigError for a contradiction."""
    options = dict(found)
    for key, instead in _INSTEAD.items():
        given = options.pop(key, None)
        if given is not None and given.value != 1:
            raise ConfigError(f"{_told(key, given)} cannot be given to HetSeq: set it to 1, or leave it out; {instead}")
    degree = options.pop("hybrid_shard_degree", None)
    if degree is None or degree.value is None:
        return options
    told, number = _told("hybrid_shard_degree", degree), degree.value
    if number < 0:
        raise ConfigError(f"{told}: expected a whole number of 0 or more")
    meant = {"shard_model": "none"} if number == 1 else {"shard_model": "all", "shard_groups": str(number or "auto")}
    model, groups = options.get("shard_model"), options.get("shard_groups")
    if model is not None and (model.value == "none") != (number == 1):
        what = "keeps all of the state on every rank" if number == 1 else "divides the state among ranks"
        raise ConfigError(f"{told} {what}, but shard_model is {model.value} ({model.where}): keep one of them")
    if groups is not None and groups.value != meant.get("shard_groups", "all"):
        means = " and ".join(f"{name} {value}" for name, value in meant.items())
        raise ConfigError(
            f"{told} means {means}, but shard_groups is {groups.value} ({groups.where}): keep one of them"
        )
    return {**{name: Found(value, degree.where) for name, value in meant.items()}, **options}


def _told(key: str, given: Found) -> str:
    """The key, its value, and its place if that is a file."""
    place = "" if given.where.startswith("--") else f"{given.where}: "
    return f"{place}{key} {given.value}"
