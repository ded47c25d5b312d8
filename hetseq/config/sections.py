"""The options of a run: one frozen dataclass per concern, each with its checks.

A field is an option: its type, default, help text and old spellings are here once, and the flag, the YAML key and
`docs/reference/options.md` follow from it. Components receive their own dataclass and never the whole `Config`. Nothing
here imports torch, reads the environment or knows argparse, so a mistyped flag is answered at once.

Conventions: a field `weight_decay` is the flag `--weight-decay` and the YAML key `weight_decay`; `None` means "not
given, HetSeq decides"; a tuple is written `1,2,4` and, if its help says so, is per epoch with the last value staying.
Three fields keep the name of 2020, and their flag has a plainer one: see `_FIRST_SPELLINGS`.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hetseq.balance.layout import seat_of
from hetseq.config.byte_size import parse_size
from hetseq.config.tracker_specs import TrackerSpec, read_specs
from hetseq.errors import ConfigError


def option(
    default: Any,
    help: str,
    *,
    also: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    metavar: str = "",
    retired: bool = False,
    per_node: bool = False,
    basic: bool = False,
) -> Any:
    """A dataclass field that is an option.

    `also` holds other spellings of the flag (without dashes in front). A `retired` option is accepted, has no effect,
    and its help is the line that says why. One that is `per_node` may differ between the nodes of a run; all others
    must be equal, because the result depends on them. A `basic` one is on the short page of `--help`.
    """
    metadata: dict[str, Any] = {"help": help, "also": also, "choices": choices, "metavar": metavar}
    metadata |= {"retired": retired, "per_node": per_node, "basic": basic}
    return dataclasses.field(default=default, metadata=metadata)


def node_option(default: Any, help: str, **kind: Any) -> Any:
    """An option that is `per_node`; otherwise as `option`."""
    return option(default, help, per_node=True, **kind)


def many_option(help: str, *, metavar: str) -> Any:
    """An option that is a list, and whose flag may be repeated: the values add up."""
    metadata = option((), help, metavar=metavar).metadata
    return dataclasses.field(default=(), metadata={**metadata, "many": True})


WITHOUT_END = 1_000_000  # decay steps of a run without an end; before 2026-11 of every run


#: The first spelling of a flag whose field keeps the name of 2020, which config.yaml and the tasks of users know.
_FIRST_SPELLINGS = {"max_sentences": "batch_size", "distributed_gpus": "ranks", "restore_file": "resume"}


def flag(name: str) -> str:
    """The flag of a field, in its first spelling: `weight_decay` gives `--weight-decay`."""
    return spelt(_FIRST_SPELLINGS.get(name, name))


def spelt(name: str) -> str:
    """A name as a flag."""
    return "--" + name.replace("_", "-")


def _check_patterns(name: str, patterns: Sequence[str]) -> None:
    """Refuse what cannot be a name of a module with wildcards."""
    for pattern in patterns:
        is_one = re.fullmatch(r"[\w.*?!\[\]-]+", pattern) is not None
        _require(is_one, name, pattern, "auto, or names with wildcards, as in encoder.layer.*")


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{flag(name)} {value}: expected {expected}")


def _weights(name: str, value: str, text: str) -> tuple[float, ...]:
    """The weights in `text`, a part of `value`: all finite, none below 0, at least one above 0. Raises ConfigError."""
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        example = {"balance": "5,2,1", "own": "3,1,0"}[name]
        raise ConfigError(f"{flag(name)} {value}: expected auto, equal, or weights as in {example}") from None
    _require(all(math.isfinite(weight) and weight >= 0 for weight in weights), name, value, "weights of 0 or more")
    _require(any(weights), name, value, "at least one weight above 0")
    return weights


def _check_finite(section: Any) -> None:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{flag(field.name)} {number}: expected a finite number")


def _check_choices(section: Any) -> None:
    for field in dataclasses.fields(section):
        value, choices = getattr(section, field.name), field.metadata.get("choices", ())
        if choices and value is not None and value not in choices:
            raise ConfigError(f"{flag(field.name)} {value}: expected one of {', '.join(choices)}")


def _check_positive(section: Any, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None:
            _require(value > 0, name, value, "a number above 0")


def _check_not_negative(section: Any, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None:
            _require(value >= 0, name, value, "0 or more")


@dataclass(frozen=True)
class TaskConfig:
    """The task to train, its seed and model settings."""

    task: str = node_option(
        "mnist", "a task by name, `package.module:Class`, or `file.py:Class`", metavar="NAME", basic=True
    )
    user_dir: str | None = node_option(None, "a folder of your own modules, imported before the task", metavar="DIR")
    seed: int = option(19940802, "seed of the model, the sample order and dropout", metavar="N", basic=True)
    dropout: float | None = option(None, "dropout rate, for tasks that have one; default: the task's own", metavar="P")
    vocab_file: str | None = node_option(None, "vocabulary file", also=("dict",), metavar="FILE")
    config_file: str | None = node_option(None, "model configuration (JSON) of the task", metavar="FILE")
    max_pred_length: int = option(512, "longest sentence, in tokens, of tasks that build their own rows", metavar="N")

    def __post_init__(self) -> None:
        _check_finite(self)
        _require(0 <= self.seed < 2**63, "seed", self.seed, "an integer from 0 to 2^63 - 1")
        if self.dropout is not None:
            _require(0 <= self.dropout < 1, "dropout", self.dropout, "a rate from 0 up to, not including, 1")
        _check_positive(self, "max_pred_length")


@dataclass(frozen=True)
class DataConfig:
    """The samples, and the size of a step.

    The global batch is `global_batch_size` samples, or else `update_freq` x the sum over ranks of `max_sentences`; it
    is a function of the epoch alone and never of the cluster's later shape. `max_sentences` and `max_tokens` then cap
    one micro-batch of this node.
    """

    data: str | None = node_option(
        None, "file or folder with the data, in the form that the task reads", metavar="PATH", basic=True
    )
    train_subset: str = option("train", "name of the training split", metavar="NAME")
    valid_subset: str = option("valid", "names of the validation splits, separated by commas", metavar="NAMES")
    num_file: int = option(0, "use the first N data files only; 0 means all", metavar="N")
    num_workers: int = node_option(-1, "loader processes of each rank; -1: none on a CPU, 2 on a GPU", metavar="N")
    max_sentences: int | None = node_option(
        None, "most samples that a device of this node computes at a time, in one micro-batch", metavar="N", basic=True
    )
    max_tokens: int | None = node_option(None, "most tokens in one micro-batch of this node", metavar="N")
    global_batch_size: int | None = option(
        None, "samples of one optimizer step over all ranks; --batch-size is then only a cap", metavar="B", basic=True
    )
    update_freq: tuple[int, ...] = option((1,), "micro-batches of every rank in a step, per epoch", metavar="N[,N...]")
    unit_size: int | None = option(
        None,
        "cut every step into micro-batches of N samples, each with its own random numbers: the result is then the same"
        " on any ranks, with dropout too",
        metavar="N",
    )
    required_batch_size_multiple: int = option(
        1, "round micro-batches down to a multiple of N if they hold more", metavar="N"
    )
    curriculum: int = option(0, "keep the data's own order in the first N epochs", metavar="N")
    shuffle_block: int | None = option(
        None,
        "for slow file systems: shuffle blocks of N neighbouring samples, and samples within 16 blocks at a time",
        metavar="N",
    )
    data_by_host: bool = option(
        False,
        "each host has its own part of the training data: read it there, and mix the parts in proportion to their"
        " sizes",
    )

    def __post_init__(self) -> None:
        _check_not_negative(self, "num_file", "curriculum")
        _check_positive(self, "max_sentences", "max_tokens", "global_batch_size", "required_batch_size_multiple")
        _check_positive(self, "unit_size", "shuffle_block")
        _require(self.num_workers >= -1, "num_workers", self.num_workers, "-1, 0 or more")
        _require(bool(self.update_freq), "update_freq", "''", "at least one number, as in 4 or 1,2,4")
        for freq in self.update_freq:
            _require(freq > 0, "update_freq", freq, "numbers above 0")
        if self.global_batch_size is not None and self.update_freq != (1,):
            raise ConfigError(
                "--update-freq and --global-batch-size contradict each other: --global-batch-size already counts all"
                " samples of a step; leave --update-freq out"
            )
        if self.data_by_host:
            self._check_data_by_host()
        if self.unit_size is not None:
            if self.max_tokens is not None:
                raise ConfigError(
                    "--unit-size and --max-tokens contradict each other: a unit has the same number of samples on every"
                    " rank; leave one of them out"
                )
            if self.max_sentences is not None and self.max_sentences < self.unit_size:
                raise ConfigError(
                    f"--batch-size {self.max_sentences} holds no unit of --unit-size {self.unit_size}: a micro-batch"
                    " is one unit; make the unit smaller, or the cap larger"
                )
        if self.global_batch_size is not None and self.max_tokens is not None:
            raise ConfigError(
                "--max-tokens and --global-batch-size contradict each other: one ends a step by tokens, the other by"
                " samples; with --global-batch-size use --batch-size as the cap of a micro-batch"
            )

    def _check_data_by_host(self) -> None:
        if self.max_tokens is not None:
            raise ConfigError(
                "--data-by-host and --max-tokens contradict each other: a step in tokens needs the lengths of all"
                " samples on every rank, and a rank has only its own host's; use --batch-size"
            )
        if self.unit_size is not None:
            raise ConfigError(
                "--data-by-host and --unit-size contradict each other: units promise the same result on any ranks, and"
                " data by host make it depend on which host has what; leave one of them out"
            )

    @property
    def valid_subsets(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.valid_subset.split(",") if name.strip())


@dataclass(frozen=True)
class ValidationConfig:
    """When to evaluate the validation splits, and which checkpoint is the best."""

    validate_interval: int = option(1, "validate every N epochs, and at the end of the run", metavar="N")
    validate_interval_updates: int = option(0, "validate every N steps too; 0 means never", metavar="N")
    disable_validation: bool = option(False, "never validate")
    max_sentences_valid: int | None = node_option(
        None, "most samples in one validation batch; default: --batch-size", metavar="N"
    )
    max_tokens_valid: int | None = node_option(
        None, "most tokens in one validation batch; default: --max-tokens", metavar="N"
    )
    best_checkpoint_metric: str = option(
        "loss", "validation metric that decides which checkpoint is the best", metavar="NAME"
    )
    maximize_best_checkpoint_metric: bool = option(False, "the best checkpoint is the one with the largest metric")

    def __post_init__(self) -> None:
        _check_positive(self, "validate_interval", "max_sentences_valid", "max_tokens_valid")
        _check_not_negative(self, "validate_interval_updates")


@dataclass(frozen=True)
class OptimizationConfig:
    """The length of the run, the optimizer and the learning rate."""

    max_epoch: int = option(0, "stop after N epochs; 0 means never", also=("me",), metavar="N", basic=True)
    max_update: int = option(0, "stop after N optimizer steps; 0 means never", also=("mu",), metavar="N", basic=True)
    optimizer: str = option(
        "adam", "adam (AdamW), adamw, sgd, adadelta, lamb, muon, or one of your own", metavar="NAME", basic=True
    )
    lr: tuple[float, ...] | None = option(
        None,
        "learning rate, per epoch; default: 0.001 for adam, adamw, lamb and muon, 0.1 for sgd, 1 for adadelta",
        also=("learning-rate",),
        metavar="LR[,LR...]",
        basic=True,
    )
    scale_lr: str = option(
        "none",
        "multiply the learning rates for another global batch: linear (by B / N) or sqrt (by its square root), where a"
        " step has B samples and --scale-lr-from says N",
        choices=("none", "linear", "sqrt"),
    )
    scale_lr_from: int | None = option(
        None, "the global batch, in samples, for which --lr was chosen; goes with --scale-lr", metavar="N"
    )
    min_lr: float = option(-1.0, "stop at the end of the epoch in which the learning rate falls to this", metavar="LR")
    clip_norm: float = option(25.0, "scale the gradient of a step down to this L2 norm; 0 means never", metavar="NORM")
    weight_decay: float = option(0.0, "weight decay, on weights of two or more dimensions", also=("wd",), metavar="WD")
    decay_all: bool = option(False, "apply weight decay to biases and norms too, as in 2020")
    adam_betas: tuple[float, ...] = option(
        (0.9, 0.999), "betas of adam, adamw and lamb, and of what muon leaves to AdamW", metavar="B1,B2"
    )
    adam_eps: float = option(1e-8, "epsilon of adam, adamw and lamb, and of what muon leaves to AdamW", metavar="EPS")
    momentum: float = option(0.0, "momentum of sgd, and of muon, where 0 means 0.95", metavar="M")
    adadelta_rho: float = option(0.9, "decay of adadelta's averages", metavar="RHO")
    adadelta_eps: float = option(1e-6, "epsilon of adadelta", metavar="EPS")
    adadelta_weight_decay: float | None = option(
        None,
        "weight decay of adadelta; default: --weight-decay",
        also=("dadelta-weight-decay",),
        metavar="WD",
    )
    lr_scheduler: str = option(
        "PolynomialDecayScheduler",
        "polynomial (PolynomialDecayScheduler), polynomial_from_zero (as in the published recipes of BERT: the decay"
        " counts from step 0), constant, cosine, or your own",
        metavar="NAME",
    )
    warmup_updates: float = option(
        0,
        "raise the learning rate linearly from 0 over N steps; N below 1 is a share of the total",
        metavar="N",
        basic=True,
    )
    total_num_update: int | None = option(
        None,
        "steps after which the decay has ended; default: the length of the run as its first start asks for it, or"
        " 1,000,000 if that has no end",
        metavar="N",
    )
    end_learning_rate: float = option(0.0, "learning rate at the end of the decay", metavar="LR")
    power: float = option(1.0, "exponent of the polynomial decay", metavar="P")
    force_anneal: int | None = option(
        None, "from epoch N on keep the last learning rate of the --lr list", also=("fa",), metavar="N"
    )
    precision: str = option(
        "fp32",
        "floating-point type of the model; bf16 and fp16 apply only to products in forward and backward; tf32 is fp32"
        " whose products and convolutions keep 10 bits of their factors on an NVIDIA GPU from Ampere on",
        choices=("fp32", "tf32", "fp64", "bf16", "fp16"),
        basic=True,
    )
    compile: bool = option(False, "compile the network with torch.compile before it trains, on every rank")
    noise_scale_every: int = option(
        50,
        "every N steps measure how far gradients of samples scatter, which estimates the useful size of a step; 0"
        " means never",
        metavar="N",
    )
    max_skipped_steps: int = option(10, "stop after N steps in a row whose gradient is not finite", metavar="N")

    def __post_init__(self) -> None:
        _check_finite(self)
        _check_choices(self)
        if self.lr is not None:
            _require(bool(self.lr), "lr", "''", "at least one number, as in 0.1 or 0.1,0.05")
            for rate in self.lr:
                _require(rate > 0, "lr", rate, "numbers above 0, as in 0.1 or 0.1,0.05")
        _check_not_negative(
            self,
            "max_epoch",
            "max_update",
            "noise_scale_every",
            "clip_norm",
            "weight_decay",
            "warmup_updates",
            "end_learning_rate",
        )
        _check_not_negative(self, "adadelta_weight_decay", "momentum", "power", "force_anneal")
        _check_positive(self, "adam_eps", "adadelta_eps", "total_num_update", "max_skipped_steps", "scale_lr_from")
        _require(self.momentum < 1, "momentum", self.momentum, "a number below 1")
        _require(0 <= self.adadelta_rho <= 1, "adadelta_rho", self.adadelta_rho, "a number from 0 to 1")
        is_pair = len(self.adam_betas) == 2 and all(0 <= beta < 1 for beta in self.adam_betas)
        _require(is_pair, "adam_betas", self.adam_betas, "two numbers from 0 up to, not including, 1")
        self._check_scale()
        is_whole = self.warmup_updates < 1 or self.warmup_updates == int(self.warmup_updates)
        expected = "a whole number of steps, or a share of --total-num-update, as in 0.1"
        _require(is_whole, "warmup_updates", self.warmup_updates, expected)
        # Only the schedules that read it: one of the user's own may know nothing of a total.
        decays = self.lr_scheduler in ("polynomial", "PolynomialDecayScheduler", "polynomial_from_zero", "cosine")
        if decays and self.total_num_update is not None and self.warmup_steps() >= self.total_num_update:
            raise ConfigError(
                f"--warmup-updates {self.warmup_updates:.0f} leaves nothing of --total-num-update"
                f" {self.total_num_update}: make the total larger than the warm-up"
            )

    def _check_scale(self) -> None:
        if self.scale_lr != "none" and self.scale_lr_from is None:
            raise ConfigError(
                f"--scale-lr {self.scale_lr} needs --scale-lr-from N: the global batch, in samples, for which --lr was"
                " chosen"
            )
        if self.scale_lr == "none" and self.scale_lr_from is not None:
            raise ConfigError(
                f"--scale-lr-from {self.scale_lr_from} says for which global batch --lr was chosen, but not what to"
                " make of it: add --scale-lr linear or --scale-lr sqrt, or leave it out"
            )

    def warmup_steps(self) -> float:
        """The steps of the warm-up; a share of the total is not rounded."""
        return self.warmup_updates * (self.decay_steps() if self.warmup_updates < 1 else 1)

    def decay_steps(self) -> int:
        """The step at which the decay has ended; schedules are given options that say it."""
        return WITHOUT_END if self.total_num_update is None else self.total_num_update


@dataclass(frozen=True)
class MemoryConfig:
    """What a node keeps between forward and backward, and where. Nothing here changes a number."""

    checkpoint_modules: tuple[str, ...] | None = node_option(
        None,
        "modules that keep only their inputs for backward, which runs them again: names with wildcards, as in"
        " 'encoder.layer.*', or auto, the layers of the model",
        metavar="PATTERN[,PATTERN...]",
    )
    offload_activations: bool = node_option(
        False,
        "what forward keeps for backward leaves the GPU for host memory, and comes back in time",
        also=("sm-activation-offloading",),
    )
    loading_horizon: int = node_option(
        2,
        "how many tensors come back ahead of backward: more hide a slow link, fewer need less memory",
        also=("activation-loading-horizon",),
        metavar="N",
    )
    offload_dir: str | None = node_option(
        None, "with --offload-activations: a folder on a disk of this node, instead of host memory", metavar="DIR"
    )

    def __post_init__(self) -> None:
        _check_not_negative(self, "loading_horizon")
        _check_patterns("checkpoint_modules", self.checkpoint_modules or ())
        if self.offload_dir is not None and not self.offload_activations:
            raise ConfigError(
                f"--offload-dir {self.offload_dir} says where activations go, but they stay: add --offload-activations,"
                " or leave it out"
            )


@dataclass(frozen=True)
class DistributedConfig:
    """The workers of this node, how nodes meet, and how a step is divided among the ranks."""

    cpu: bool = node_option(False, "train on the CPU even if there is a GPU", basic=True)
    devices: tuple[str, ...] = node_option(
        (), "one worker per entry, as in cuda:0,cuda:2,cpu; default: every visible GPU", metavar="D[,D...]", basic=True
    )
    device_id: int = node_option(0, "GPU of this node's worker if it has only one", also=("local-rank",), metavar="N")
    distributed_world_size: int | None = option(
        None, "ranks of the run, over all nodes; default: the ranks of this node", metavar="N"
    )
    distributed_rank: int = node_option(0, "rank of this node's first worker", metavar="N")
    distributed_gpus: int | None = node_option(
        None, "ranks of this node, one process each; default: one per visible GPU, at least 1", metavar="N", basic=True
    )
    distributed_backend: str | None = node_option(
        None,
        "gloo or nccl, as in 2020; in this version gradients always travel by gloo",
        choices=("gloo", "nccl"),
    )
    distributed_init_method: str | None = node_option(
        None, "where nodes with given ranks meet: tcp://HOST:PORT or file:///PATH", metavar="URL"
    )
    join: str | None = node_option(
        None,
        "meeting place of nodes that get their ranks there: tcp://HOST:PORT or file:///PATH; needs --min-ranks",
        metavar="URL",
        basic=True,
    )
    min_ranks: int | None = option(
        None,
        "with --join: start once this many ranks are there; if fewer are left, wait --join-timeout for others, then"
        " stop",
        metavar="N",
        basic=True,
    )
    shadow: bool = node_option(
        False,
        "with --join: this node computes nothing; its one worker, on the CPU, follows the updates of the run, and"
        " becomes a rank if no other node has the state any more",
    )
    max_ranks: int | None = option(
        None, "with --join: refuse nodes with which the run would have more ranks", metavar="N"
    )
    join_timeout: float = node_option(1800.0, "seconds to wait for the other nodes", metavar="S")
    max_restarts: int = node_option(3, "how often per hour each lost worker of this node is restarted", metavar="N")
    secret_file: str = node_option(
        "~/.hetseq/secret", "the secret that the nodes of a run prove to each other; made if absent", metavar="FILE"
    )
    env: str = node_option(
        "auto",
        "the launcher or queue that started this process and tells where the nodes meet: auto detects it, none ignores"
        " it; explicit options win",
        choices=("auto", "none", "torchrun", "lsf", "mpi", "slurm", "sagemaker", "sge", "pbs", "htcondor"),
    )
    distributed_no_spawn: bool = node_option(False, "run the only worker in this process, without a launcher")
    bucket_cap_mb: float = option(25.0, "size of the buckets in which gradients travel, in MiB", metavar="MIB")
    reduce_dtype: str | None = option(
        None,
        "add gradients up in double precision: with --unit-size the same bits on any workers of one kind",
        choices=("fp64",),
    )
    balance: str = option(
        "auto",
        "shares of the ranks: auto (by measured speed), equal, or fixed weights as in 5,2,1; several with / between"
        " them take turns every 10 steps, so that one run compares them",
        metavar="auto|equal|W0,W1,...[/...]",
        basic=True,
    )
    shard_model: str = option(
        "none",
        "where parameters, optimizer state and gradient sums live: on every rank (none); the last two divided among the"
        " ranks (state); all divided, so that a rank has whole layers only while it computes them (all); or the first"
        " of these that every rank has room for (auto)",
        choices=("none", "state", "all", "auto"),
    )
    shard_modules: tuple[str, ...] = option(
        ("auto",),
        "with --shard-model all or auto: modules whose parameters come and go together, in the order of forward: names"
        " with wildcards, as in 'encoder.layer.*', or auto, the layers of the model",
        metavar="PATTERN[,PATTERN...]",
    )
    delayed_init: bool = option(
        False,
        "build the model without memory for its parameters, and draw their first numbers later, layer by layer with"
        " --shard-model all: the same numbers on any layout, and others than without this option",
        also=("delayed-parameter-initialization",),
    )
    own: str = option(
        "auto",
        "how much of that state each rank owns: auto (by free memory), equal, or weights as in 3,1,0; 0 owns nothing",
        metavar="auto|equal|W0,W1,...",
    )
    own_memory: str | None = node_option(
        None,
        "most memory of this node for that state with --own auto, as in 24G or 500M; where parameters have owners too,"
        " of its GPUs and its host, as in gpu:8G,host:40G; stable: this node stays, so it is the first to own",
        metavar="[stable,]SIZE|gpu:SIZE,host:SIZE",
    )
    shard_groups: str = option(
        "all",
        "with --shard-model: groups of ranks that each hold all of the state, so that the loss of one costs one step:"
        " all ranks as one group (all), the ranks of each node (node), one of these two by room and links (auto), N"
        " ranks in a row each (N), or their numbers as in 2+1",
        metavar="all|node|auto|N|N+N+...",
    )
    tensor_parallel_degree: str = option(
        "1",
        "ranks that hold one model together, each a part of every large layer; several numbers for groups of ranks in"
        " turn, as in 2+1: two ranks that divide the model, and further ones that each have it whole",
        metavar="N[+N...]",
    )
    tensor_parallel_seed: int = option(
        0, "seed of the random numbers that differ between the ranks of such a group, as of dropout inside of layers"
    )
    throttle: tuple[str, ...] = node_option(
        (), "slow ranks down on purpose, as in 1:3,2:1.5", metavar="RANK:FACTOR[,...]"
    )
    check_replicas_every: int = option(
        1000,
        "compare the replicas of all ranks every N steps, at a start and before a save, and repair differences; 0"
        " means never",
        metavar="N",
    )
    step_deadline: float | None = option(
        None,
        "seconds after which a silent rank counts as lost; default: the larger of 5 s and 10 median steps",
        metavar="S",
    )
    script_deadline: float = option(
        600.0,
        "seconds that a script of hetseq run may take between two steps before its rank counts as lost",
        metavar="S",
    )

    def __post_init__(self) -> None:
        _check_finite(self)
        _check_choices(self)
        _check_not_negative(self, "device_id", "distributed_rank", "distributed_gpus", "check_replicas_every")
        _check_not_negative(self, "max_restarts")
        _check_positive(self, "distributed_world_size", "bucket_cap_mb", "step_deadline", "join_timeout")
        _check_positive(self, "script_deadline")
        _check_positive(self, "min_ranks", "max_ranks")
        self._check_meeting()
        self.balance_weights()
        self._check_owners()
        self.throttle_factors()
        for device in self.devices:
            kind, _, index = device.partition(":")
            is_number = index.isascii() and index.isdigit()
            is_known = device in ("cpu", "cuda") or (kind == "cuda" and is_number)
            _require(is_known, "devices", device, "cpu, cuda or cuda:N")

    @property
    def meeting_url(self) -> str | None:
        """The meeting place of the nodes; None for a run on this node alone."""
        return self.join or self.distributed_init_method

    def _check_meeting(self) -> None:
        self._check_shadow()
        for name in ("join", "distributed_init_method"):
            url = getattr(self, name)
            if url is not None:
                host, colon, port = url.removeprefix("tcp://").rpartition(":")
                is_tcp = url.startswith("tcp://") and bool(colon and host) and port.isdigit() and 0 < int(port) < 65536
                is_file = url.startswith("file:///") and url != "file:///"
                _require(is_tcp or is_file, name, url, "tcp://HOST:PORT or file:///PATH (an absolute path)")
        if self.join is None:
            if self.env in ("auto", "none"):  # others name the place themselves
                _require(self.min_ranks is None, "min_ranks", self.min_ranks, "--join URL beside it")
                _require(self.max_ranks is None, "max_ranks", self.max_ranks, "--join URL beside it")
            return
        if self.distributed_init_method is not None:
            raise ConfigError("--join and --distributed-init-method were both given: name one meeting place")
        if self.min_ranks is None:
            raise ConfigError(f"--join {self.join} needs --min-ranks N: the run starts as soon as N ranks are there")
        if self.max_ranks is not None:
            _require(
                self.max_ranks >= self.min_ranks, "max_ranks", self.max_ranks, f"--min-ranks {self.min_ranks} or more"
            )
        if self.distributed_world_size is not None or self.distributed_rank:
            raise ConfigError(
                "--distributed-world-size and --distributed-rank contradict --join, which gives the ranks out: leave"
                " them out (--ranks N says how many workers this node has)"
            )

    def _check_shadow(self) -> None:
        if not self.shadow:
            return
        if self.join is None:
            raise ConfigError("--shadow follows a run that other nodes have begun: say where they meet with --join URL")
        if self.distributed_gpus not in (None, 0, 1) or self.devices not in ((), ("cpu",)):
            raise ConfigError("--shadow has one worker, on the CPU: leave --ranks and --devices out")

    def balance_weights(self) -> tuple[float, ...] | None:
        """The fixed weights of `--balance 5,2,1`, the first of several, or None for `auto` and `equal`."""
        turns = self.balance_turns()
        return turns[0] if turns else None

    def balance_turns(self) -> tuple[tuple[float, ...], ...]:
        """The fixed weights that take turns, as in `--balance 1,1/3,1`; none for `auto` and `equal`."""
        if self.balance in ("auto", "equal"):
            return ()
        turns = tuple(_weights("balance", self.balance, text) for text in self.balance.split("/"))
        if len(set(map(len, turns))) > 1:
            raise ConfigError(f"--balance {self.balance}: expected as many weights before each / as behind it")
        return turns

    def shard_group_sizes(self) -> tuple[int, ...] | None:
        """The sizes of `--shard-groups 2+1`, or of each group, as in `2`; None for `all`, `node` and `auto`."""
        if self.shard_groups in ("all", "node", "auto"):
            return None
        words = self.shard_groups.split("+")
        are_numbers = all(word.isascii() and word.isdigit() and int(word) > 0 for word in words)
        expected = "all, node, auto, the ranks of each group as in 2+1, or N for groups of N"
        _require(are_numbers, "shard_groups", self.shard_groups, expected)
        return tuple(map(int, words))

    def _begins_of_groups(self) -> list[int]:
        """The first ranks of the groups that `--shard-groups` names by number, but the first; of equal ones some."""
        sizes = self.shard_group_sizes() or ()
        if len(sizes) == 1:
            sizes *= sum(self.tensor_sizes()) + 1
        return list(itertools.accumulate(sizes))[:-1]

    def tensor_sizes(self) -> tuple[int, ...]:
        """The ranks of the groups that each hold one model, by `--tensor-parallel-degree 2+1`; the last one repeats."""
        words = self.tensor_parallel_degree.split("+")
        expected = "the ranks of each model: one number, as in 2, or several, as in 2+1, equal where above 1"
        are_numbers = all(word.isascii() and word.isdigit() and int(word) > 0 for word in words)
        _require(are_numbers, "tensor_parallel_degree", self.tensor_parallel_degree, expected)
        sizes = tuple(map(int, words))
        _require(len({*sizes} - {1}) < 2, "tensor_parallel_degree", self.tensor_parallel_degree, expected)
        return sizes

    @property
    def tensor_degree(self) -> int:
        """The parts into which a layer is divided; 1: models are not divided."""
        return max(self.tensor_sizes())

    @property
    def has_owners(self) -> bool:
        """Whether no rank may hold all of the state."""
        return self.shard_model != "none" or self.tensor_degree > 1

    def own_weights(self) -> tuple[float, ...] | None:
        """The weights of `--own 3,1,0` by slot; () for `equal`, where all ranks own as much, and None for `auto`."""
        if self.own == "auto":
            return None
        return () if self.own == "equal" else _weights("own", self.own, self.own)

    def own_memory_bytes(self) -> int | None:
        """The most memory of this node's devices for the parts of its ranks, with `--own auto`; None: all free memory.
        The device of a rank on the CPU is its host."""
        return self._own_memory().get("gpu")

    def own_host_bytes(self) -> int | None:
        """The memory of this node's host that `--own auto` may use beside its GPUs; None: it isn't mentioned."""
        return self._own_memory().get("host")

    @property
    def is_stable(self) -> bool:
        """Whether this node stays until the end of the run, so that `--own auto` prefers it as owner."""
        return "stable" in self._own_memory()

    def _own_memory(self) -> dict[str, int]:
        """The sizes of `--own-memory` in bytes, by place, of gpu and host; and `stable` if it says so."""
        if self.own_memory is None:
            return {}
        expected = (
            "a size as in 24G or 500M, of the GPUs and the host as in gpu:8G,host:40G, stable for a node that stays, or"
            " both as in stable,24G"
        )
        found: dict[str, int] = {}
        for word in (word.strip() for word in self.own_memory.split(",")):
            place, colon, text = word.rpartition(":")
            place = "stable" if word == "stable" else place if colon else "gpu"
            is_known = place in ("gpu", "host", "stable") and place not in found
            _require(is_known, "own_memory", self.own_memory, expected)
            try:
                found[place] = 0 if place == "stable" else parse_size(text, "")
            except ConfigError:
                raise ConfigError(f"{flag('own_memory')} {self.own_memory}: expected {expected}") from None
        return found

    def _check_owners(self) -> None:
        """Refuse invalid owners, and owners that no other option asks for."""
        self.own_weights()
        self.shard_group_sizes()
        if self.tensor_degree > 1 and self.shard_model in ("all", "auto"):
            raise ConfigError(
                f"--tensor-parallel-degree {self.tensor_parallel_degree} divides layers, which with --shard-model"
                f" {self.shard_model} come and go as a whole: use --shard-model state or none beside it"
            )
        if self.tensor_degree > 1 and self.shadow:
            raise ConfigError(
                f"--shadow follows a run whose ranks have the whole model, and --tensor-parallel-degree"
                f" {self.tensor_parallel_degree} divides it: leave one of them out"
            )
        cut = next((slot for slot in self._begins_of_groups() if seat_of(slot, self.tensor_sizes()).place), None)
        if cut is not None:
            raise ConfigError(
                f"--shard-groups {self.shard_groups}: a group begins with rank {cut}, in the middle of a model that"
                f" --tensor-parallel-degree {self.tensor_parallel_degree} divides: make groups of whole models"
            )
        if self.tensor_degree > 1 and self.delayed_init:
            raise ConfigError(
                f"--tensor-parallel-degree {self.tensor_parallel_degree} divides a model that has its first numbers:"
                " leave --delayed-init out"
            )
        if "host" in self._own_memory() and self.shard_model == "state":
            raise ConfigError(
                f"--own-memory {self.own_memory}: only with --shard-model all does what a rank owns lie apart from what"
                f" it computes with, so that it may be in host memory; --shard-model is {self.shard_model}"
            )
        _check_patterns("shard_modules", self.shard_modules)
        if self.shard_modules != ("auto",) and self.shard_model not in ("all", "auto"):
            raise ConfigError(
                f"--shard-modules {','.join(self.shard_modules)} names what comes and goes with --shard-model all, but"
                f" --shard-model is {self.shard_model}: add --shard-model all, or leave it out"
            )
        given = {"own": None if self.own == "auto" else self.own, "own_memory": self.own_memory}
        given["shard_groups"] = None if self.shard_groups == "all" else self.shard_groups
        for name, value in given.items():
            if value is not None and self.shard_model == "none":
                raise ConfigError(
                    f"{flag(name)} {value} divides the optimizer state, but --shard-model none keeps all of it on every"
                    f" rank: add --shard-model state, or leave {flag(name)} out"
                )
        if self.own != "auto" and self.own_memory is not None:
            raise ConfigError(
                f"--own-memory {self.own_memory} is for --own auto, but --own {self.own} divides the state already:"
                " leave one of them out"
            )

    def throttle_factors(self) -> dict[int, float]:
        """Factor of each throttled rank: `--throttle 1:3` gives {1: 3.0}."""
        factors: dict[int, float] = {}
        for entry in self.throttle:
            rank, colon, factor = entry.partition(":")
            try:
                if not colon:
                    raise ValueError(entry)
                key, value = int(rank), float(factor)
            except ValueError:
                raise ConfigError(f"--throttle {entry}: expected RANK:FACTOR, as in 1:3") from None
            _require(key >= 0 and key not in factors, "throttle", entry, "each rank once, from 0")
            _require(math.isfinite(value) and value >= 1, "throttle", entry, "a factor of 1 or more")
            factors[key] = value
        return factors

    def check_world(self, world_size: int) -> None:
        """Raise ConfigError if weights or throttles do not fit `world_size` ranks."""
        for name, value, weights in (
            ("--balance", self.balance, self.balance_weights()),
            ("--own", self.own, self.own_weights()),
        ):
            if weights and len(weights) != world_size:
                raise ConfigError(
                    f"{name} {value} gives {len(weights)} weights for {world_size} ranks: give one weight per rank"
                )
        sizes = self.shard_group_sizes() or ()
        if len(sizes) == 1 and world_size % sizes[0]:
            raise ConfigError(
                f"--shard-groups {self.shard_groups} or hybrid_shard_degree: groups of {sizes[0]} ranks do not divide"
                f" the {world_size} ranks of the run: give a divisor of {world_size}, or name the ranks of each group,"
                " as in 2+1"
            )
        if len(sizes) > 1 and sum(sizes) != world_size:
            raise ConfigError(
                f"--shard-groups {self.shard_groups} has {sum(sizes)} ranks, and the run has {world_size}: name"
                " each rank once"
            )
        for rank in self.throttle_factors():
            if rank >= world_size:
                raise ConfigError(f"--throttle {rank}:...: the ranks are 0 to {world_size - 1}; leave this one out")


SAVE_DIR_OF_2020 = "checkpoints"
_ABOUT_SAVING = (
    "save_interval", "save_interval_updates", "persistent_time_interval", "keep_interval_updates", "keep_every_updates",
    "keep_last_epochs", "no_epoch_checkpoints", "no_last_checkpoints",
)  # fmt: skip


def default_save_dir(task: str) -> str:
    """The run directory of a command without --save-dir: `runs/` and the name of the task, or of its class or file."""
    name = task.rpartition("/")[2].removesuffix(".py") if task.endswith(".py") else task.rpartition(":")[2]
    return "runs/" + (re.sub(r"[^\w-]+", "-", name.lower()).strip("-") or "task")


@dataclass(frozen=True)
class CheckpointConfig:
    """The run directory, when to save, which checkpoints to keep, and which one to resume from."""

    save_dir: str = node_option(
        "runs/mnist",
        "the run directory; default: runs/ and the name of the task, of its class, or of its file if no class is"
        " named, as in runs/mnist; of `python train.py`, as in 2020: checkpoints",
        metavar="DIR",
        basic=True,
    )
    restore_file: str = option(
        "latest",
        "resume from the latest checkpoint, if there is one, the best, none, the one of a step, or one at a path",
        metavar="latest|best|none|STEP|PATH",
        basic=True,
    )
    reset_dataloader: bool = option(False, "on restore: begin the data anew; allows another seed and global batch")
    reset_lr_scheduler: bool = option(False, "on restore: begin the learning-rate schedule anew")
    reset_meters: bool = option(
        False, "on restore: forget the best metric so far, the task's own state and its learning_rate_factor"
    )
    reset_optimizer: bool = option(False, "on restore: begin with a fresh optimizer; allows another one")
    optimizer_overrides: str = option(
        "{}", "on restore: optimizer settings to change, as in \"{'eps': 1e-6}\"", metavar="DICT"
    )
    save_interval: int = option(1, "save every N epochs", metavar="N")
    save_interval_updates: int = option(0, "save every N steps; 0 means never", metavar="N", basic=True)
    persistent_time_interval: float = option(
        600.0, "save at the latest after this many seconds; 0 means never", metavar="S"
    )
    memory_interval_updates: int = option(
        -1,
        "keep the state in the nodes' memory every N steps, for a restart after a kill, or the loss of a rank that owns"
        " a part of it; -1: as often as it takes a hundredth of the time; 0: never",
        metavar="N",
    )
    memory_buffer_size: str | None = node_option(
        None,
        "memory of this node for checkpoints that wait to be written or stay, as in 2GB; default: half of the free"
        " memory; 0: none, training waits",
        metavar="SIZE",
    )
    keep_interval_updates: int | None = option(
        None,
        "keep the last N checkpoints of --save-interval-updates; -1: all; default: all, or 2 if the run has no end; the"
        " newest 2 of any kind and the best if no option says when to save or what to keep",
        metavar="N",
    )
    keep_every_updates: int = option(
        0, "keep for good every checkpoint of a step that is a multiple of N; 0: none", metavar="N"
    )
    keep_last_epochs: int | None = option(
        None,
        "keep the last N checkpoints of epochs; -1: all; default: as for --keep-interval-updates",
        metavar="N",
    )
    no_save: bool = option(False, "save nothing")
    no_epoch_checkpoints: bool = option(False, "save no checkpoint just because an epoch ends")
    no_last_checkpoints: bool = option(False, "save no checkpoint just because the run ends")
    no_save_optimizer_state: bool = option(False, "leave the optimizer's state out of checkpoints")

    def __post_init__(self) -> None:
        _check_finite(self)
        _check_positive(self, "save_interval")
        _check_not_negative(self, "save_interval_updates", "persistent_time_interval", "keep_every_updates")
        for name in ("keep_interval_updates", "keep_last_epochs"):
            value = getattr(self, name)
            _require(value is None or value == -1 or value > 0, name, value, "-1 (all) or a number above 0")
        _require(bool(self.save_dir), "save_dir", "''", "the name of a folder")
        every = self.memory_interval_updates
        _require(every >= -1, "memory_interval_updates", every, "-1 (by itself), 0 (never) or a number of steps")
        self.optimizer_override_values()
        self.memory_buffer_bytes()

    @property
    def says_when_to_save(self) -> bool:
        """Whether an option says when to save, or which checkpoints to keep."""
        return any(getattr(self, name) != getattr(CheckpointConfig, name) for name in _ABOUT_SAVING)

    @property
    def which_checkpoint(self) -> str:
        """The value of `--resume`; in 2020 `latest` was the name of a file."""
        return "latest" if self.restore_file == "checkpoint_last.pt" else self.restore_file

    def memory_buffer_bytes(self) -> int | None:
        """The value of `--memory-buffer-size`; None: half of the free memory."""
        if self.memory_buffer_size is None:
            return None
        return parse_size(self.memory_buffer_size, flag("memory_buffer_size"))

    def optimizer_override_values(self) -> dict[str, Any]:
        """The value of `--optimizer-overrides`, read as a literal."""
        expected = "a dict of names and plain values, as in \"{'eps': 1e-6}\""
        try:
            values = ast.literal_eval(self.optimizer_overrides)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            values = None
        if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
            raise ConfigError(f"{flag('optimizer_overrides')} {self.optimizer_overrides}: expected {expected}")
        return values


@dataclass(frozen=True)
class LogConfig:
    """The output of a run while it trains."""

    log_format: str = node_option("simple", "simple, or none for no line per step", choices=("simple", "none"))
    log_interval: int | None = node_option(
        None, "a line every N steps; default: a live line on a terminal, else one line every 10 s", metavar="N"
    )
    no_progress_bar: bool = node_option(False, "no live line on a terminal")
    tracker: tuple[str, ...] = many_option(
        "also send rows and events there: wandb:project=P, mlflow:experiment=E, trackio:project=P (guides/trackers.md"
        " has their keys), or my_tracker.py:Class; may be repeated",
        metavar="NAME[:KEY=VALUE,...]",
    )

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_positive(self, "log_interval")
        self.tracker_specs()

    def tracker_specs(self) -> tuple[TrackerSpec, ...]:
        """The value of `--tracker`."""
        return read_specs(self.tracker)


_FINE_TUNING = "only the entity and NER tasks of 2020 read it, which did not start"


@dataclass(frozen=True)
class RetiredConfig:
    """Options of 2020, and keys of SageMaker's library, that are accepted without effect; each logs once why."""

    fast_stat_sync: bool = option(False, "always on: counts travel with every step", retired=True)
    ddp_backend: str | None = option(None, "HetSeq reduces gradients itself", retired=True, metavar="NAME")
    fix_batches_to_gpus: bool = option(False, "the samples of a step never depend on the ranks", retired=True)
    find_unused_parameters: bool = option(False, "unused parameters are always found", retired=True)
    use_bmuf: bool = option(False, "it switched synchronisation off; every step is synchronised", retired=True)
    hetseq_state_dict: str | None = option(None, _FINE_TUNING, retired=True, metavar="FILE")
    transformers_state_dict: str | None = option(None, _FINE_TUNING, retired=True, metavar="FILE")
    train_file: str | None = option(None, _FINE_TUNING, retired=True, metavar="FILE")
    validation_file: str | None = option(None, _FINE_TUNING, retired=True, metavar="FILE")
    test_file: str | None = option(None, _FINE_TUNING, retired=True, metavar="FILE")
    extension_file: str | None = option(None, _FINE_TUNING, retired=True, metavar="FILE")
    load_state_dict_strict: bool = option(False, _FINE_TUNING, retired=True)
    root_data_dir: str | None = option(None, _FINE_TUNING, retired=True, metavar="DIR")
    entities: str | None = option(None, _FINE_TUNING, retired=True, metavar="NAME")
    ent_vecs_filename: str | None = option(None, _FINE_TUNING, retired=True, metavar="FILE")
    allow_empty_shards: str | None = option(None, "a rank may always own nothing", retired=True, metavar="VALUE")
    fsdp_cache_flush_warnings: str | None = option(
        None, "HetSeq divides parameters without FSDP", retired=True, metavar="VALUE"
    )


@dataclass(frozen=True)
class Config:
    """A whole run. Only the command line, the launcher and the controller's builder see more than one section."""

    task: TaskConfig = dataclasses.field(default_factory=TaskConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    validation: ValidationConfig = dataclasses.field(default_factory=ValidationConfig)
    optimization: OptimizationConfig = dataclasses.field(default_factory=OptimizationConfig)
    memory: MemoryConfig = dataclasses.field(default_factory=MemoryConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)
    retired: RetiredConfig = dataclasses.field(default_factory=RetiredConfig)
    #: the `Options` dataclass of the task, optimizer or schedule in use, by "task", "optimizer", "lr_scheduler"
    extras: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def has_own_save_dir(self) -> bool:
        """Whether --save-dir names another directory than a command without it uses."""
        return self.checkpoint.save_dir not in (default_save_dir(self.task.task), SAVE_DIR_OF_2020)

    def sections(self) -> Iterator[Any]:
        """The section dataclasses in order, the extras last."""
        for field in dataclasses.fields(self):
            if field.name != "extras":
                yield getattr(self, field.name)
        yield from self.extras.values()

    def flat(self) -> dict[str, Any]:
        """Every option by its field name, in order: the content of `config.yaml` and of a 2020 task's `args`."""
        return {
            field.name: getattr(section, field.name)
            for section in self.sections()
            for field in dataclasses.fields(section)
        }


SECTIONS: tuple[type, ...] = (
    TaskConfig,
    DataConfig,
    ValidationConfig,
    OptimizationConfig,
    MemoryConfig,
    DistributedConfig,
    CheckpointConfig,
    LogConfig,
    RetiredConfig,
)
