"""Groups of ranks that each hold all of the state: which ranks are a group, and what `--shard-groups auto` chooses.

Responsible for these two decisions alone, from the rooms that all ranks have gathered: all ranks decide alike. Measures
nothing and moves nothing.

The one idea of `auto`: before the first step no link has been measured and it is not known what forward keeps. So links
between nodes are taken to be a tenth as fast as within one, nothing of a transfer to be hidden, and half of each node's
room to be needed for what forward keeps.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

from hetseq.balance.memory_plan import Groups, Misfit, candidates, in_words
from hetseq.balance.shares import NEGLIGIBLE_GAIN
from hetseq.run.rank_room import RankRoom, StateMemory, planned_ranks

RULES = ("all", "node")  # that `auto` chooses from
_NODE_LINK = 10  # times as fast as the link between nodes
_FOR_STATE = 0.5  # of a node's room; at least as much is left for what forward keeps


def chosen_rule(
    rooms: Sequence[RankRoom], room: Sequence[int], weights: Sequence[float] | None, memory: StateMemory
) -> tuple[str, str]:
    """What `--shard-groups auto` chooses, one of `RULES`, and why.

    `room`: bytes that each rank has for state; `weights`: of `--own`, None if it follows memory.
    """
    nodes = _by_key([one.host for one in rooms])
    if len(nodes) < 2:
        return "all", "all ranks are on one node"
    if len(nodes) == len(rooms):
        return "all", "each node has one rank"
    for node in nodes:
        who = f"the node of rank {node[0]}"
        if weights is not None and not any(weights[rank] for rank in node):
            return "all", f"{who} owns nothing by --own"
        has = sum(room[rank] for rank in node)
        if _FOR_STATE * has < memory.bytes:
            return "all", (
                f"{who} has room for {in_words(has)}, less than twice the {in_words(memory.bytes)} of the state, and"
                " what forward keeps is not known yet"
            )
    ranks = planned_ranks(rooms, with_host=memory.has_layers, node_link=_NODE_LINK)
    together, by_node = candidates(ranks, memory.model, 2 * len(ranks), (memory.kind,))
    if isinstance(together, Misfit) or isinstance(by_node, Misfit):
        return "all", by_node.reason if isinstance(by_node, Misfit) else "one group alone does not fit"
    part = by_node.exchange_s / together.exchange_s
    told = f"{part:.2g} of the time, if links within a node are {_NODE_LINK} times as fast as between nodes"
    if part < 1 - NEGLIGIBLE_GAIN:
        return "node", f"every node has room for twice the state, and the transfers of a step take {told}"
    return "all", f"with a group for each node the transfers of a step would take {told}"


def ranks_in_groups(
    rule: str | Sequence[int],
    rooms: Sequence[RankRoom],
    room: Sequence[int],
    weights: Sequence[float] | None,
    memory: StateMemory,
    slots: Sequence[int],
    has_model: Callable[[Sequence[int]], bool] | None = None,
) -> Groups:
    """The groups of ranks that each hold all of the state; none if that is all of them.

    `rule`: one of `RULES`, or the sizes of the groups, by slot. A group that lost ranks, and with them the room for the
    state, joins the first other one; so does one of whose ranks `has_model` says that they lack parts of the model.
    `room` and `weights` as in `chosen_rule`.
    """
    if rule == "all":
        return ()
    keys = [one.host for one in rooms] if isinstance(rule, str) else [_number(slot, rule) for slot in slots]
    groups = list(map(list, _by_key(keys)))

    def can_hold(group: Sequence[int]) -> bool:
        if has_model is not None and not has_model(group):
            return False
        if weights is not None:
            return any(weights[rank] for rank in group)
        return sum(room[rank] for rank in group) >= memory.bytes

    while len(groups) > 1 and (short := next((group for group in groups if not can_hold(group)), None)):
        groups.remove(short)
        groups[0] = sorted([*groups[0], *short])
    return tuple(sorted(map(tuple, groups))) if len(groups) > 1 else ()


def _number(slot: int, sizes: Sequence[int]) -> int:
    """The number of the group of a slot. Of one size are all groups, and slots behind several sizes are in the last."""
    if len(sizes) == 1:
        return slot // sizes[0]
    return min(bisect.bisect_right(list(itertools.accumulate(sizes)), slot), len(sizes) - 1)


def _by_key(keys: Sequence[int]) -> Groups:
    """The ranks of each key, in the order of their first ranks."""
    found: dict[int, list[int]] = {}
    for rank, key in enumerate(keys):
        found.setdefault(key, []).append(rank)
    return tuple(map(tuple, found.values()))
