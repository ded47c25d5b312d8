"""Memory planner: which layout of a model fits these ranks, and which one is the fastest. Pure.

Responsible for the arithmetic behind `--shard-model auto` and the layouts of `hetseq plan` and `hetseq simulate`:
memory, bytes on the links and seconds of a step. It knows no run, no file and no torch, and it cuts nothing.

The one idea: samples follow speed and state follows memory, independently. `none` keeps optimizer state and gradient
sums whole on every rank. `state` gives each rank a fraction of them, and the parameters stay whole everywhere. `all`
gives each rank a fraction of the parameters too, which come and go layer by layer, in as many rounds as the rank with
the most micro-batches needs; each share is cut evenly into them. With fractions in proportion to the free memory every
rank is left the same part of it. Where nodes have several ranks, both are also planned with one group for each node:
every node holds everything once, and only sums travel between nodes.

Symbols of the comments: P parameters; c, m, o, g bytes per parameter for computing, a separate master copy, the
optimizer and the gradient; A bytes of activations per sample; f_i the fraction that rank i owns; a_i is 1 if it
computes samples, else 0; C the number of ranks that do; n layers; R rounds; G groups. With groups f_i is the fraction
of what a group holds, and C counts the ranks of a group.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetseq.balance.chains import chained_owner
from hetseq.balance.shares import NEGLIGIBLE_GAIN, Cost, balance_shares, step_seconds
from hetseq.errors import ConfigError

SHARD_MODELS = ("none", "state", "all")  # the simpler one first
USABLE = 0.92  # of a rank's memory; the rest is for the runtime, its kernels and gaps between tensors
_FORWARD, _BACKWARD = 1.0, 2.0  # the arithmetic of each, in forwards
_INPUT = 1 / 16  # of what a layer of a transformer keeps for backward: a layer of the included GPT keeps 20 inputs
_SHOWN_RANKS = 8


@dataclass(frozen=True)
class ModelMemory:
    """A model as the planner sees it. The defaults are AdamW in fp32, as in HetSeq with every precision but fp64.

    `largest_unit_parameters`: of the largest piece in which gradients travel, a bucket or a larger tensor.
    `cast_bytes_per_parameter`: the 16-bit copies that autocast keeps during a step, 2 with bf16 and fp16. `layers`:
    how many of one size come and go with `all`, beside a root: everything in no layer, None for as much as in one.
    `checkpoints`: backward computes each layer again (`--checkpoint-modules`). `offloads`: activations leave the
    device, and come back `horizon` layers ahead of backward (`--offload-activations`). `frozen_bytes`: of frozen
    parameters, which `parameters` does not count; spread evenly over root and layers.
    """

    parameters: int
    activation_bytes_per_sample: int = 0
    largest_unit_parameters: int = 0
    compute_bytes_per_parameter: int = 4
    cast_bytes_per_parameter: int = 0
    master_bytes_per_parameter: int = 0
    optimizer_bytes_per_parameter: int = 8
    gradient_bytes_per_parameter: int = 4
    layers: int = 24
    root_parameters: int | None = None
    checkpoints: bool = False
    offloads: bool = False
    horizon: int = 2
    frozen_bytes: int = 0

    @property
    def root(self) -> int:
        """The parameters of the root."""
        return -(-self.parameters // (self.layers + 1)) if self.root_parameters is None else self.root_parameters

    @property
    def layer(self) -> int:
        """The parameters of a layer."""
        return -(-(self.parameters - self.root) // self.layers)

    @property
    def kept_bytes_per_sample(self) -> int:
        """What forward keeps of a sample on the device: of all layers, or of their inputs and of one layer at work."""
        kept, at_work = float(self.activation_bytes_per_sample), 0.0
        if self.checkpoints:
            kept, at_work = kept * _INPUT, kept / self.layers
        if self.offloads:
            kept *= min(1.0, (self.horizon + 2) / self.layers)
        return round(kept + at_work)

    @property
    def forward_part(self) -> float:
        """The part of a micro-batch that is forward; the rest is backward."""
        return _FORWARD / (_FORWARD + _BACKWARD + (_FORWARD if self.checkpoints else 0))

    def costs(self, plain: Cost) -> Cost:
        """The cost of a rank whose cost without `checkpoints` this is."""
        if not self.checkpoints:
            return plain
        factor = (_FORWARD + _BACKWARD + _FORWARD) / (_FORWARD + _BACKWARD)
        return replace(plain, per_unit_s=plain.per_unit_s * factor, per_batch_s=plain.per_batch_s * factor)

    @property
    def state_bytes(self) -> int:
        """What has owners with `state`: (m + o + g) P."""
        each = self.master_bytes_per_parameter + self.optimizer_bytes_per_parameter + self.gradient_bytes_per_parameter
        return each * self.parameters

    def owned_bytes(self, shard_model: str) -> int:
        """What has owners: with `all` the parameters too, (c + m + o + g) P, and the frozen ones."""
        return self.state_bytes + (self.parameter_bytes if shard_model == "all" else 0)

    @property
    def parameter_bytes(self) -> int:
        """The whole parameters, c P, and the frozen ones."""
        return self.compute_bytes_per_parameter * self.parameters + self.frozen_bytes

    @property
    def whole_bytes(self) -> int:
        """With `all`: what a rank has whole while it computes, of parameters and of gradients."""
        whole = min(2, self.layers) * self.layer + self.root
        # autograd keeps the copies of 16 bits until backward, unless it computes each layer again
        cast = whole if self.checkpoints else self.parameters
        # of the root, of the layer at work, and of two units that travel
        gradients = self.root + self.layer + 2 * max(self.layer, self.root)
        frozen = round(self.frozen_bytes * (1 + min(2, self.layers)) / (1 + self.layers))
        return (
            frozen
            + whole * self.compute_bytes_per_parameter
            + cast * self.cast_bytes_per_parameter
            + gradients * self.gradient_bytes_per_parameter
        )

    @property
    def received_bytes(self) -> int:
        """With `all`: what an owner of everything receives at a time.

        Of two units that travel the slices of two ranks, and the sums of a round.
        """
        return 6 * max(self.layer, self.root) * self.gradient_bytes_per_parameter

    @property
    def gradient_bytes(self) -> int:
        """A whole gradient, g P."""
        return self.gradient_bytes_per_parameter * self.parameters


@dataclass(frozen=True)
class RankMemory:
    """One rank: its cost in samples (a limit of 0: it computes nothing), its memory and its link.

    `host_bytes` may hold state beside the device. `most_owned_bytes` limits the state there, None for no limit.
    `is_stable`: its node stays until the end of the run. Ranks with an equal `node` are on one node; "" is a node of
    its own. `node_bytes_per_s` is the link between them, None for the link that it has to all others. `must_compute`: a
    layout in which it has no room for its samples does not fit.
    """

    name: str
    cost: Cost
    device_bytes: int
    link_bytes_per_s: float
    host_bytes: int = 0
    most_owned_bytes: int | None = None
    is_stable: bool = False
    node: str = ""
    node_bytes_per_s: float | None = None
    must_compute: bool = False


Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Layout:
    """A layout that fits. Lists are by rank; `left_bytes` is what state and computing leave of the usable memory.

    `micro_batch`: the most samples of one forward. `rounds`: micro-batches of the rank that has the most. `exchange_s`:
    of each exchange the busiest link's, added up; parts are hidden. `groups`: the ranks of each node, which hold
    everything once; none: all ranks together do.
    """

    shard_model: str
    micro_batch: int
    rounds: int
    shares: tuple[int, ...]
    fractions: tuple[float, ...]
    sent_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    left_bytes: tuple[int, ...]
    compute_s: float
    exchange_s: float
    step_s: float
    groups: Groups = ()

    @property
    def name(self) -> str:
        """The values of `--shard-model` and `--shard-groups`, as they are typed."""
        return _named(self.shard_model, self.groups)


@dataclass(frozen=True)
class Misfit:
    """A layout that does not fit, with the micro-batch that lacks the least; `reason` ends in remedies.

    `missing_bytes` is by rank: what each lacks for parameters and samples; `missing_state_bytes` is what all ranks
    together lack for the state, or the ranks of the nodes that lack some. `groups` as of a layout.
    """

    shard_model: str
    missing_bytes: tuple[int, ...]
    missing_state_bytes: int
    reason: str
    groups: Groups = ()

    @property
    def name(self) -> str:
        """As of a layout."""
        return _named(self.shard_model, self.groups)


Candidate = Layout | Misfit


def nodes_of(ranks: Sequence[RankMemory]) -> Groups:
    """The ranks of each node, in the order of their first ranks."""
    found: dict[str | int, list[int]] = {}
    for place, rank in enumerate(ranks):
        found.setdefault(rank.node or place, []).append(place)
    return tuple(map(tuple, found.values()))


def may_group(nodes: Groups) -> bool:
    """Whether one group for each node is a layout of its own: there are several nodes, and one has several ranks."""
    return 1 < len(nodes) < sum(map(len, nodes))


def candidates(
    ranks: Sequence[RankMemory], model: ModelMemory, total: int, kinds: Sequence[str] = SHARD_MODELS
) -> tuple[Candidate, ...]:
    """The best layout of each kind for a step of `total` samples, or why there is none; in the order of `kinds`.

    A kind with owners comes a second time, with one group for each node, if `may_group`. Micro-batches of 1, 2, 4, ...
    samples are tried, up to the whole step. Raises ValueError if no rank computes samples, or if their limits hold
    fewer than `total`.
    """
    found: list[Candidate] = []
    sizes = [*(2**power for power in range(max(1, (total - 1).bit_length()))), total]
    nodes = nodes_of(ranks)
    arrangements: list[tuple[str, Groups]] = []
    for kind in kinds:
        arrangements += [(kind, ()), (kind, nodes)] if kind != "none" and may_group(nodes) else [(kind, ())]
    for kind, groups in arrangements:
        tried = [_candidate(kind, groups, ranks, model, total, size) for size in sizes]
        fitting = [one for one in tried if isinstance(one, Layout)]
        misfits = [one for one in tried if isinstance(one, Misfit)]
        # of equally fast ones the smallest micro-batch, which leaves the most memory
        found.append(
            min(fitting, key=lambda one: one.step_s)
            if fitting
            else min(misfits, key=lambda one: (sum(one.missing_bytes), one.missing_state_bytes))
        )
    return tuple(found)


def choose(found: Sequence[Candidate]) -> Layout:
    """The fastest of the candidates that fit; within 2 % the first of them, which is the simpler.

    Raises ConfigError with the reason of the last one without groups if none fits.
    """
    fitting = [one for one in found if isinstance(one, Layout)]
    if not fitting:
        last = [one for one in found if not one.groups][-1]
        assert isinstance(last, Misfit)
        raise ConfigError(f"--shard-model {last.shard_model}: {last.reason}")
    least_s = min(one.step_s for one in fitting)
    return next(one for one in fitting if one.step_s * (1 - NEGLIGIBLE_GAIN) <= least_s)


def own_fractions(room_bytes: Sequence[int], is_stable: Sequence[bool], needed_bytes: int) -> tuple[float, ...]:
    """The fraction of the state that each rank owns, in proportion to its room. Shape (world_size,), the sum is 1.

    `room_bytes`: memory of each rank that state may take, 0 or more. If the stable ranks have room for all of it, only
    they own. All ranks get the same result from the same numbers. Raises ConfigError if all rooms are too small.
    """
    fractions = _fractions(room_bytes, is_stable, needed_bytes)
    if fractions is None:
        names = [f"rank {rank}" for rank in range(len(room_bytes))]
        raise ConfigError(
            f"--own auto: {_no_room(names, room_bytes, needed_bytes)}, or take an optimizer with less state"
        )
    return fractions


def _fractions(room: Sequence[int], is_stable: Sequence[bool], needed: int) -> tuple[float, ...] | None:
    """As `own_fractions`; None if the rooms are too small."""
    stable = [bytes_ if stays else 0 for bytes_, stays in zip(room, is_stable, strict=True)]
    for chosen in (stable, list(room)):
        if sum(chosen) >= max(needed, 1):
            return tuple(bytes_ / sum(chosen) for bytes_ in chosen)
    return (1 / len(room),) * len(room) if needed <= 0 else None


def _candidate(
    kind: str, groups: Groups, ranks: Sequence[RankMemory], model: ModelMemory, total: int, size: int
) -> Candidate:
    """The layout of this kind with micro-batches of at most `size` samples; without `groups` all ranks are one."""
    usable = [int(USABLE * rank.device_bytes) for rank in ranks]
    costs = [_in_micro_batches(model.costs(rank.cost), size) for rank in ranks]
    while True:
        shares = balance_shares(total, costs)
        rounds = max(-(-share // (cost.batch or size)) for share, cost in zip(shares, costs))
        # with `all` each share is cut evenly into the rounds, and else into full micro-batches
        at_once = [-(-share // rounds) if kind == "all" else min(share, cost.batch or size)
                   for share, cost in zip(shares, costs)]  # fmt: skip
        taken = [_taken_bytes(kind, model, share, most) for share, most in zip(shares, at_once)]
        missing = tuple(
            max(0, bytes_ - most, _above_limit(kind, model, rank)) for bytes_, most, rank in zip(taken, usable, ranks)
        )
        # a rank without room for its samples computes none, and may still own
        others = [replace(cost, limit=0) if lacks and share and not rank.must_compute else cost
                  for cost, lacks, share, rank in zip(costs, missing, shares, ranks)]  # fmt: skip
        if others == costs or sum(total if cost.limit is None else cost.limit for cost in others) < total:
            break
        costs = others
    names = [rank.name for rank in ranks]
    if any(missing):
        return Misfit(kind, missing, 0, _too_small(kind, model, names, missing), groups)
    fractions = [1.0] * len(ranks)
    left = [most - bytes_ for bytes_, most in zip(taken, usable)]
    if kind != "none":
        owned_bytes, _ = _to_own(kind, model)
        left = [bytes_ + rank.host_bytes for bytes_, rank in zip(left, ranks)]
        room = [bytes_ if rank.most_owned_bytes is None else min(bytes_, rank.most_owned_bytes)
                for bytes_, rank in zip(left, ranks)]  # fmt: skip
        every: Groups = groups or (tuple(range(len(ranks))),)
        lacking = 0
        for group in every:
            rooms = [room[rank] for rank in group]
            divided = _fractions(rooms, [ranks[rank].is_stable for rank in group], owned_bytes)
            if divided is None:
                lacking += owned_bytes - sum(rooms)
            for rank, own in zip(group, divided or ()):
                fractions[rank] = own
        if lacking:
            reason = (_no_node_to_own if groups else _no_room_to_own)(kind, model, names, room, every)
            return Misfit(kind, missing, lacking, reason, groups)
        left = [bytes_ - round(own * owned_bytes) for bytes_, own in zip(left, fractions)]
    compute_s = rounds_seconds(shares, costs, rounds) if kind == "all" else step_seconds(shares, costs)
    exchange_s, exposed_s = 0.0, 0.0
    phases = _phases(kind, model, shares, fractions, rounds, Places.of(ranks, groups))
    for part, flows in phases:
        phase_s = max(flow.seconds(rank) for flow, rank in zip(flows, ranks))
        exchange_s += phase_s
        exposed_s += max(0.0, phase_s - part * compute_s)
    sent, received = (
        tuple(round(sum(flows[rank].bytes(way) for _, flows in phases)) for rank in range(len(ranks))) for way in (0, 1)
    )
    return Layout(
        kind, size, rounds, shares, tuple(fractions), sent, received, tuple(left), compute_s, exchange_s,
        compute_s + exposed_s, groups,
    )  # fmt: skip


def _above_limit(kind: str, model: ModelMemory, rank: RankMemory) -> int:
    """By how much the state of a replica is more than a rank may own."""
    if kind != "none" or rank.most_owned_bytes is None:
        return 0
    return max(0, model.state_bytes - rank.most_owned_bytes)


def _in_micro_batches(cost: Cost, size: int) -> Cost:
    """The cost with micro-batches of at most `size` samples, where it knows what a micro-batch costs."""
    return replace(cost, batch=min(cost.batch, size)) if cost.batch else cost


def _taken_bytes(kind: str, model: ModelMemory, share: int, at_once: int) -> int:
    """The memory of a rank that computes `share` samples, `at_once` in a micro-batch, without what it owns."""
    if kind == "all":
        return model.whole_bytes + model.kept_bytes_per_sample * at_once if share else 0
    taken = model.parameter_bytes
    if share:
        taken += model.cast_bytes_per_parameter * model.parameters
        taken += model.kept_bytes_per_sample * at_once
    if kind == "none":
        return taken + model.state_bytes
    unit_bytes = model.largest_unit_parameters * model.gradient_bytes_per_parameter
    if share:  # several micro-batches add up in a whole gradient; of a single one each unit leaves when it is complete
        taken += model.gradient_bytes if share > at_once else 3 * unit_bytes
    return taken + 2 * unit_bytes


def rounds_seconds(shares: Sequence[int], costs: Sequence[Cost], rounds: int) -> float:
    """The time of a step in rounds, each as long as its slowest rank. Full micro-batches come first."""
    # ranks of one group have the same cost, and all but the same share
    alike = [(share, -(-share // rounds), cost) for share, cost in set(zip(shares, costs)) if share]
    # between these rounds no rank's micro-batch changes
    changes = sorted({0, 1, rounds, *(share // size + more for share, size, _ in alike for more in (0, 1))})

    def seconds(number: int, share: int, size: int, cost: Cost) -> float:
        samples = min(size, max(0, share - number * size))
        fixed_s = 0.0 if number else cost.fixed_s
        return fixed_s + cost.per_batch_s + cost.per_unit_s * samples if samples else 0.0

    return sum(
        (end - begin) * max(seconds(begin, *one) for one in alike)
        for begin, end in itertools.pairwise(changes)
        if begin < rounds
    )


@dataclass(frozen=True)
class Places:
    """Where ranks are: the node of each by number, (world_size,), and the groups that hold everything once."""

    nodes: tuple[int, ...]
    groups: Groups

    @classmethod
    def of(cls, ranks: Sequence[RankMemory], groups: Groups) -> Places:
        """Without `groups` all ranks are one."""
        number_of = {rank: number for number, node in enumerate(nodes_of(ranks)) for rank in node}
        return cls(tuple(number_of[rank] for rank in range(len(ranks))), groups or (tuple(range(len(ranks))),))


@dataclass
class Flow:
    """The bytes of one rank in an exchange, sent and received: with other nodes, and with other ranks of its own."""

    far: list[float]  # (2,)
    near: list[float]  # (2,)

    def bytes(self, way: int) -> float:
        """Of both links; `way` 0: sent, 1: received."""
        return self.far[way] + self.near[way]

    def seconds(self, rank: RankMemory) -> float:
        """Both ways at once, on both links at once; if there is only one link, it carries both."""
        if rank.node_bytes_per_s is None:
            return max(map(self.bytes, (0, 1))) / rank.link_bytes_per_s
        return max(max(self.far) / rank.link_bytes_per_s, max(self.near) / rank.node_bytes_per_s)


def _phases(
    kind: str, model: ModelMemory, shares: Sequence[int], fractions: Sequence[float], rounds: int, places: Places
) -> list[tuple[float, list[Flow]]]:
    """The exchanges of a step, one after the other: the part of its compute behind which each can hide, and the bytes
    of each rank."""
    world_size = len(shares)
    forward, backward = model.forward_part, 1 - model.forward_part
    if kind == "none":
        ring = 2 * (world_size - 1) / world_size * model.gradient_bytes
        return [(backward / rounds, [Flow([ring, ring], [0.0, 0.0]) for _ in shares])]
    gathers, sums = _of_one_unit(shares, fractions, places)

    def flows(gathered: int, summed: int, frozen: float = 0.0, *, times: int = 1) -> list[Flow]:
        c = times * (gathered * model.compute_bytes_per_parameter + frozen)
        g = times * summed * model.gradient_bytes_per_parameter
        return [
            Flow([a * c + b * g for a, b in zip(one.far, other.far)],
                 [a * c + b * g for a, b in zip(one.near, other.near)])
            for one, other in zip(gathers, sums)
        ]  # fmt: skip

    # between groups, once a step, before the commit: each owner gives and takes 2 (G - 1) / G of its sums
    groups = len(places.groups)
    ring = 2 * (groups - 1) / groups * model.gradient_bytes
    across = [(0.0, [Flow([ring * own] * 2, [0.0, 0.0]) for own in fractions])] if groups > 1 else []
    if kind == "state":  # forward waits for all parameters; the last backward hides gradients
        return [(0.0, flows(model.parameters, 0)), (backward / rounds, flows(0, model.parameters)), *across]
    # in each round nothing hides the first layer and the root, neither when they come nor when their gradients go. Of
    # the other layers parameters come twice, but for the last one, which stays between forward and backward.
    first, others, hiding = model.layer + model.root, model.parameters - model.layer - model.root, 1 - 1 / model.layers
    of_first = model.frozen_bytes * 2 / (1 + model.layers)
    of_others = model.frozen_bytes - of_first
    return [
        (0.0, flows(first, 0, of_first, times=rounds)),
        (forward * hiding, flows(others, 0, of_others, times=rounds)),
        (backward * hiding, flows(others, others, of_others, times=rounds)),
        (0.0, flows(0, first, times=rounds)),
        *across,
    ]


def _of_one_unit(shares: Sequence[int], fractions: Sequence[float], places: Places) -> tuple[list[Flow], list[Flow]]:
    """What each rank sends and receives when parameters come and when gradients go, for one byte of the model."""
    gathers, sums = ([Flow([0.0, 0.0], [0.0, 0.0]) for _ in shares] for _ in range(2))
    for group in places.groups:
        computing = [rank for rank in group if shares[rank]]
        owner = _chained(group, fractions, computing)
        direct = {rank: 0.0 if rank == owner else fractions[rank] for rank in group}
        owned_on: dict[int, float] = {}
        computing_on: dict[int, int] = {}
        for rank in group:
            node = places.nodes[rank]
            owned_on[node] = owned_on.get(node, 0.0) + direct[rank]
            computing_on[node] = computing_on.get(node, 0) + (shares[rank] > 0)
        whole = sum(direct.values())
        for rank in group:
            node, own, computes = places.nodes[rank], direct[rank], shares[rank] > 0
            # the part that it lacks and computes with, a(1-f), and the part that it gives to others, f(C-a)
            far = [own * (len(computing) - computing_on[node]), computes * (whole - owned_on[node])]
            near = [own * (computing_on[node] - computes), computes * (owned_on[node] - own)]
            gathers[rank], sums[rank] = Flow(far, near), Flow(far[::-1], near[::-1])
        if owner is not None:  # its part goes from rank to rank
            others = [rank for rank in computing if rank != owner]
            for flows, path in ((gathers, [owner, *others]), (sums, [*others, owner])):
                for sender, receiver in itertools.pairwise(path):
                    is_near = places.nodes[sender] == places.nodes[receiver]
                    for rank, way in ((sender, 0), (receiver, 1)):
                        (flows[rank].near if is_near else flows[rank].far)[way] += fractions[owner]
    return gathers, sums


def _chained(group: Sequence[int], fractions: Sequence[float], computing: Sequence[int]) -> int | None:
    """The rank of a group whose part takes a chain (`balance.chains`), None if there is none."""
    place_of = {rank: place for place, rank in enumerate(group)}
    bounds = list(itertools.accumulate((fractions[rank] for rank in group), initial=0.0))
    place = chained_owner(bounds, [place_of[rank] for rank in computing])
    return None if place is None else group[place]


# words


def in_words(count: float) -> str:
    """Bytes in decimal units with three digits, as in 24 GB or 1.3 MB; none for 0."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.3g} {unit}"
    return f"{count:.0f} bytes" if count else "none"


def _named(shard_model: str, groups: Groups) -> str:
    return f"{shard_model} --shard-groups node" if groups else shard_model


def _too_small(kind: str, model: ModelMemory, names: Sequence[str], missing: Sequence[int]) -> str:
    lacking = _listed([f"{name} lacks {in_words(bytes_)}" for name, bytes_ in zip(names, missing) if bytes_])
    again = "" if model.checkpoints else "compute layers again with --checkpoint-modules auto, "
    if kind == "all":
        return (
            f"{lacking} for two layers, the root and one micro-batch: {again}name smaller modules with --shard-modules,"
            " or leave such ranks out"
        )
    if kind == "none":
        return (
            f"{lacking} for a whole replica: divide the optimizer state with --shard-model state, leave such ranks out,"
            " or train a smaller model"
        )
    return (
        f"{lacking} for the whole parameters and one micro-batch: divide the parameters with --shard-model all, {again}"
        "or leave such ranks out"
    )


def _no_room_to_own(kind: str, model: ModelMemory, names: Sequence[str], room: Sequence[int], _: Groups) -> str:
    fewer = "--batch-size" if model.checkpoints else "--batch-size, --checkpoint-modules auto"
    needed, what = _to_own(kind, model)
    return f"{_no_room(names, room, needed, what)}, or compute fewer samples at a time ({fewer})"


def _no_node_to_own(kind: str, model: ModelMemory, names: Sequence[str], room: Sequence[int], nodes: Groups) -> str:
    needed, what = _to_own(kind, model)
    short = [node for node in nodes if sum(room[rank] for rank in node) < needed]
    rooms = _listed(
        [f"{_listed([names[rank] for rank in node])} {in_words(sum(room[rank] for rank in node))}" for node in short]
    )
    return (
        f"each node needs {in_words(needed)} for {what} and gradient sums, and {len(short)} of {len(nodes)} have not as"
        f" much room ({rooms}): divide them among all ranks with --shard-groups all"
    )


def _to_own(kind: str, model: ModelMemory) -> tuple[int, str]:
    """The bytes of what has owners, with what an owner receives, and its name."""
    if kind == "all":
        return model.owned_bytes(kind) + model.received_bytes, "parameters, optimizer state"
    return model.owned_bytes(kind), "optimizer state"


def _no_room(names: Sequence[str], room: Sequence[int], needed: int, what: str = "optimizer state") -> str:
    rooms = _listed([f"{name} {in_words(bytes_)}" for name, bytes_ in zip(names, room)])
    return (
        f"{what} and gradient sums take {in_words(needed)}, and there is room for {in_words(sum(room))}"
        f" ({rooms}): {in_words(needed - sum(room))} are missing. Add a node with memory, which need not compute"
        " (--balance 3,1,0), raise --own-memory where it is set"
    )


def _listed(parts: Sequence[str]) -> str:
    """The parts with commas, each once; of many the first ones and how many follow."""
    parts = list(dict.fromkeys(parts))
    more = len(parts) - _SHOWN_RANKS
    return ", ".join(parts[:_SHOWN_RANKS]) + (f" and {more} more" if more > 0 else "")
