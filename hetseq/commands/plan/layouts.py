"""Layouts of a model too large for some devices: the question of the command line, and the answer as text and JSON.

Reads what `hetseq plan` is told about the model and the memory, and words what `balance.memory_plan` finds, for `hetseq
plan` by rank and for `hetseq simulate` by group. It computes no layout itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetseq.balance.memory_plan import (
    Layout,
    Misfit,
    ModelMemory,
    RankMemory,
    candidates,
    choose,
    in_words,
    may_group,
    nodes_of,
)
from hetseq.balance.shares import Cost
from hetseq.balance.simulation import RankModel
from hetseq.commands.plan.cells import seconds_text, shares_text
from hetseq.commands.plan.measured_run import MeasuredRun, named
from hetseq.config.byte_size import parse_size
from hetseq.config.command_line import CommandOption, Given, number_within
from hetseq.errors import ConfigError
from hetseq.monitor.tables import Cells, table

_MOST_PARAMETERS = 1e15
_MOST_LAYERS = 1e5
_MOST_RANKS = 1e5
_BUCKET_MIB = 25.0
_MBIT_PER_S = 1000
_STATE_BYTES = {"fp64": 2}  # of a number, over those of 32 bits
_CAST_BYTES = {"bf16": 2, "fp16": 2}

# the question


@dataclass(frozen=True)
class ModelQuestion:
    """The options of `hetseq plan` about a model; sizes by the number of a rank, or the name of another machine.

    `run_parameters` None: samples cost what they cost in the run. `ranks_per_node` None: ranks are on the nodes of the
    run. `node_mbit_per_s` None: ranks of a node use the link of `mbit_per_s` between them too.
    """

    parameters: int
    memory: Mapping[str, int]
    host_memory: Mapping[str, int]
    stable: tuple[str, ...]
    activation_bytes: int
    mbit_per_s: float | None
    run_parameters: int | None
    layers: int = ModelMemory.layers
    checkpoints: bool = False
    offloads: bool = False
    frozen_bytes: int = 0
    ranks_per_node: int | None = None
    node_mbit_per_s: float | None = None


def _parameters(text: str) -> int:
    return int(number_within(text, 1, _MOST_PARAMETERS, "the number of parameters, as in 3e9"))


def _layers(text: str) -> int:
    return int(number_within(text, 1, _MOST_LAYERS, "the number of layers, as in 24"))


def _per_node(text: str) -> int:
    return int(number_within(text, 1, _MOST_RANKS, "the number of ranks on each node, as in 8"))


def _mbit(text: str) -> float:
    return number_within(text, 1e-3, 1e9, "10^6 bits per second, as in 1000")


def _size(text: str) -> int:
    try:
        return parse_size(text, "")
    except ConfigError:
        raise ValueError("expected a size, as in 500M or 24G") from None


def _sizes(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in text.split(","):
        name, colon, size = (part.strip() for part in entry.rpartition(":"))
        try:
            if not colon or not name or name in found:
                raise ValueError
            found[name] = _size(size)
        except ValueError:
            raise ValueError("expected RANK:SIZE with each rank once, as in 0:24G,1:12G") from None
    return found


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


OPTIONS = (
    CommandOption(
        "--model-parameters",
        "also print which layouts of a model with N parameters fit: which ranks can own what of its state",
        "N",
        read=_parameters,
    ),
    CommandOption(
        "--memory",
        "with --model-parameters: memory of each rank, as in 0:24G,1:12G; a name that is no rank, as in server:128G, is"
        " a machine that computes nothing",
        "RANK:SIZE[,...]",
        read=_sizes,
    ),
    CommandOption(
        "--host-memory", "memory of the host that a rank may use for state too", "RANK:SIZE[,...]", read=_sizes
    ),
    CommandOption("--stable", "ranks whose node stays until the end, so they own first", "RANK[,...]", read=_names),
    CommandOption("--activation", "what forward keeps of one sample, as in 200M; default: 0", "SIZE", read=_size),
    CommandOption(
        "--layers", "layers of one size, which come and go with --shard-model all; default: 24", "N", read=_layers,
    ),
    CommandOption("--checkpoint", "backward computes each layer again, as with --checkpoint-modules auto"),
    CommandOption(
        "--frozen", "weights beside these parameters that stay frozen, as in 14G; default: 0", "SIZE", read=_size,
    ),
    CommandOption("--offload", "what forward keeps leaves the device, as with --offload-activations"),
    CommandOption(
        "--mbit-per-s", "link of each rank, in 10^6 bits per second; default: 1000", "N",
        read=_mbit,
    ),
    CommandOption(
        "--node-mbit-per-s", "link between ranks of one node; default: as --mbit-per-s", "N", read=_mbit,
    ),
    CommandOption(
        "--ranks-per-node", "so many ranks in a row are on one node; default: as in the run", "N", read=_per_node,
    ),
    CommandOption(
        "--run-parameters",
        "parameters of the model of RUN: its seconds are multiplied by the ratio; default: they stay as measured",
        "N",
        read=_parameters,
    ),
)  # fmt: skip


def question_of(given: Given) -> ModelQuestion | None:
    """The question in these words; None without one. Raises ConfigError for options without --model-parameters."""
    values = {option.flag: given[option.flag] for option in OPTIONS}
    parameters = values.pop("--model-parameters")
    if parameters is None:
        for flag, value in values.items():
            if value not in (None, False):
                raise ConfigError(f"{flag} belongs to --model-parameters N: add that, or leave {flag} out")
        return None
    if values["--memory"] is None:
        raise ConfigError("--model-parameters needs the memory of each rank: add --memory 0:24G,1:12G")
    return ModelQuestion(
        parameters, values["--memory"], values["--host-memory"] or {}, values["--stable"] or (),
        values["--activation"] or 0, values["--mbit-per-s"], values["--run-parameters"],
        values["--layers"] or ModelMemory.layers, values["--checkpoint"], values["--offload"],
        values["--frozen"] or 0, values["--ranks-per-node"], values["--node-mbit-per-s"],
    )  # fmt: skip


def model_in(question: ModelQuestion, options: Mapping[str, Any]) -> ModelMemory:
    """The model in question, trained with the options of the run."""
    return replace(
        model_of(question.parameters, question.activation_bytes, options), layers=question.layers,
        checkpoints=question.checkpoints, offloads=question.offloads, frozen_bytes=question.frozen_bytes,
    )  # fmt: skip


def model_of(parameters: int, activation_bytes: int, options: Mapping[str, Any]) -> ModelMemory:
    """The model that a run with these options trains; options that are missing have their defaults."""
    precision = options.get("precision", "fp32")
    width = 4 * _STATE_BYTES.get(precision, 1)
    moments = 2
    if options.get("optimizer") == "sgd":
        moments = 1 if options.get("momentum") else 0
    bucket = int(options.get("bucket_cap_mb", _BUCKET_MIB) * 2**20) // width
    return ModelMemory(
        parameters, activation_bytes, min(parameters, bucket), width, _CAST_BYTES.get(precision, 0), 0,
        moments * width, width,
    )  # fmt: skip


def ranks_of(
    question: ModelQuestion, measured: MeasuredRun, staying: Sequence[int], added: Sequence[RankModel]
) -> tuple[list[RankMemory], list[str]]:
    """The ranks to plan for, and notes about assumptions. Raises ConfigError for missing or unknown ranks."""
    costs = {str(rank): measured.ranks[rank].cost for rank in staying}
    names = {str(rank): named(rank, measured.ranks[rank].name) for rank in staying}
    costs |= {rank.name: rank.cost for rank in added}
    servers = [name for name in question.memory if name not in costs]
    for name in [*servers, *question.host_memory, *question.stable]:
        if name not in question.memory or (name.isdecimal() and name not in costs):
            known = ", ".join(costs)
            raise ConfigError(f"rank {name} of the memory options is unknown: expected {known}, or a name in --memory")
    if lacking := [name for name in costs if name not in question.memory]:
        raise ConfigError(f"--memory lacks rank {lacking[0]}: expected one size per rank, as in {lacking[0]}:24G")
    factor, notes = measured.scale, []
    if question.run_parameters is None:
        notes.append(
            "a sample is taken to cost what it does in the run; --run-parameters N says how much smaller that model is"
        )
    else:
        factor *= question.parameters / question.run_parameters
    if question.mbit_per_s is None:
        notes.append(f"a link is taken to carry {_MBIT_PER_S:,} Mbit/s; --mbit-per-s N gives another number")
    link = (question.mbit_per_s or _MBIT_PER_S) * 1e6 / 8
    node_link = None if question.node_mbit_per_s is None else question.node_mbit_per_s * 1e6 / 8
    nodes = _nodes(question, measured, staying, list(costs))
    nothing = Cost(0.0, 1.0, limit=0)
    ranks = [
        RankMemory(
            names.get(name, name), costs[name].scaled(factor) if name in costs else nothing, question.memory[name],
            link, question.host_memory.get(name, 0), is_stable=name in question.stable, node=nodes.get(name, ""),
            node_bytes_per_s=node_link,
        )
        for name in [*costs, *servers]
    ]  # fmt: skip
    if question.ranks_per_node is None and may_group(found := nodes_of(ranks)):
        notes.append(
            f"ranks are taken to be on nodes as in the run ({'+'.join(str(len(node)) for node in found)});"
            " --ranks-per-node N gives another number"
        )
    return ranks, notes


def _nodes(
    question: ModelQuestion, measured: MeasuredRun, staying: Sequence[int], names: Sequence[str]
) -> dict[str, str]:
    """The node of each rank that computes, by its name here; a rank that is not there has a node of its own.

    Raises ConfigError if `--ranks-per-node` does not divide the ranks.
    """
    each = question.ranks_per_node
    if each is None:
        return {str(rank): measured.ranks[rank].name.rpartition("/")[0] for rank in staying}
    if len(names) % each:
        raise ConfigError(f"--ranks-per-node {each}: expected a number that divides the {len(names)} ranks")
    return {name: f"node {place // each}" for place, name in enumerate(names)}


# the answer


@dataclass(frozen=True)
class ModelLayouts:
    """The layouts of a model. `groups`: the rows of the table, each with the ranks that it is about."""

    model: ModelMemory
    ranks: tuple[RankMemory, ...]
    total: int
    found: tuple[Layout | Misfit, ...]
    groups: tuple[tuple[str, range], ...]

    @property
    def chosen(self) -> Layout | None:
        """The fastest that fits, within 2 % the simplest; None if nothing does."""
        return choose(self.found) if any(isinstance(one, Layout) for one in self.found) else None


def layouts_of(
    ranks: Sequence[RankMemory], model: ModelMemory, total: int, groups: Sequence[tuple[str, range]] = ()
) -> ModelLayouts:
    """The layouts for a step of `total` samples; without `groups` a rank is one."""
    shown = groups or [(rank.name, range(at, at + 1)) for at, rank in enumerate(ranks)]
    return ModelLayouts(model, tuple(ranks), total, candidates(ranks, model, total), tuple(shown))


def layout_lines(layouts: ModelLayouts) -> list[str]:
    """The layouts as text: a table of them, what each rank does in the chosen one, and why others do not fit."""
    model, chosen = layouts.model, layouts.chosen
    kinds: list[Cells] = [("--shard-model", "step", "computing", "exchange", "rounds", "micro-batch")]
    for one in layouts.found:
        if isinstance(one, Misfit):
            kinds.append((one.name, "does not fit", "", "", "", ""))
        else:
            times = map(seconds_text, (one.step_s, one.compute_s, one.exchange_s))
            kinds.append((one.name, *times, str(one.rounds), str(one.micro_batch)))
    trained_bytes = model.parameter_bytes - model.frozen_bytes
    frozen = f", over {in_words(model.frozen_bytes)} of frozen weights" if model.frozen_bytes else ""
    lines = [
        f"a model of {model.parameters:,} parameters: {in_words(trained_bytes)}, and"
        f" {in_words(model.state_bytes)} of optimizer state and gradient sums{frozen}",
        "",
        *table(kinds, left=(0,)),
    ]
    if chosen is not None:
        lines += ["", *table(_by_group(layouts, chosen), left=(0,)), ""]
        lines.append(f"the best one that fits is --shard-model {chosen.name}, for {layouts.total} samples a step")
    else:
        lines.append("")
    lines += [f"{one.name} does not fit: {one.reason}" for one in layouts.found if isinstance(one, Misfit)]
    return lines


def _by_group(layouts: ModelLayouts, chosen: Layout) -> list[Cells]:
    """One row for each group: of ranks that differ, the most that one owns and sends, and the least that is left."""
    rows: list[Cells] = [(chosen.name, "memory", "share", "owns", "left", "sends", "receives")]
    for name, ranks in layouts.groups:
        row = _row(chosen, name, ranks)
        share = shares_text([chosen.shares[rank] for rank in ranks], shown=1)
        sizes = (in_words(row[key]) for key in ("left_bytes", "sent_bytes", "received_bytes"))
        memory = in_words(layouts.ranks[ranks[0]].device_bytes)
        rows.append((name, memory, share, f"{row['fraction']:.1%}", *sizes))
    return rows


def _row(layout: Layout, name: str, ranks: range) -> dict[str, Any]:
    """The figures of one group; `samples` of all its ranks."""
    return {
        "name": name,
        "ranks": len(ranks),
        "samples": sum(layout.shares[rank] for rank in ranks),
        "fraction": max(layout.fractions[rank] for rank in ranks),
        "left_bytes": min(layout.left_bytes[rank] for rank in ranks),
        "sent_bytes": max(layout.sent_bytes[rank] for rank in ranks),
        "received_bytes": max(layout.received_bytes[rank] for rank in ranks),
    }


def layout_facts(layouts: ModelLayouts) -> dict[str, Any]:
    """The layouts for JSON; by group, of ranks that differ as in the table."""
    model, chosen = layouts.model, layouts.chosen
    found: list[dict[str, Any]] = []
    for one in layouts.found:
        head: dict[str, Any] = {"shard_model": one.shard_model, "shard_groups": "node" if one.groups else "all"}
        if isinstance(one, Misfit):
            missing = {"missing_bytes": max(one.missing_bytes), "missing_state_bytes": one.missing_state_bytes}
            found.append({**head, "fits": False, **missing, "reason": one.reason})
            continue
        times = {"step_s": one.step_s, "computing_s": one.compute_s, "exchange_s": one.exchange_s}
        groups = [_row(one, name, ranks) for name, ranks in layouts.groups]
        rounds = {"rounds": one.rounds, "micro_batch": one.micro_batch}
        found.append({**head, "fits": True, **times, **rounds, "groups": groups})
    return {
        "parameters": model.parameters,
        "parameter_bytes": model.parameter_bytes,
        "state_bytes": model.state_bytes,
        "chosen": None if chosen is None else chosen.shard_model,
        "chosen_groups": None if chosen is None else "node" if chosen.groups else "all",
        "layouts": found,
    }
