"""A trial of an optimizer before its state is divided: what may ranks do with parts of what it updates?

Responsible for asking. No list of optimizers says it: copies of the optimizer update small tensors that resemble the
parameters of each group, whole, in pieces, and beside others, each copy as a rank of its own would. Equal bits mean
that it makes no difference. What cannot be tried is refused, since a wrong guess would be silent.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetseq.errors import ConfigError

# Elements of a tensor, and where it is cut: both fill whole vectors, as real cuts do (`balance.ownership.GRAIN`).
_TRIED_BITS = 12
_CUT_AT = 1536
_STEPS = 3
_RATE = 0.01  # a schedule may begin at 0, which would change nothing
_DEEPEST = 3  # collections in the attributes of an optimizer


@dataclass(frozen=True)
class Manner:
    """How an optimizer updates: whether each element by itself, and which keys of its state are tensors that do not
    have an element for each of the parameter's."""

    is_elementwise: bool
    common_keys: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Result:
    """What one copy made of one tensor."""

    value: torch.Tensor
    state: dict[str, Any]


def try_out(optimizer: torch.optim.Optimizer) -> Manner:
    """Ask copies of an optimizer how it updates; it and its parameters stay as they are. Any rank, alone.

    Raises ConfigError for an optimizer that updates one parameter by others, or that cannot be tried.
    """
    name, is_elementwise, common = type(optimizer).__name__, True, set[str]()
    for one in (optimizer, *inner_optimizers(optimizer)):
        if "step" in vars(one) and not hasattr(vars(one)["step"], "_wrapped_by_lr_sched"):
            raise _refusal(name, "has a step() that replaces the one of its class, which can't be tried")
    for place, like in _kinds(optimizer):
        try:
            manner = _try_kind(optimizer, place, like)
        except ConfigError:
            raise
        except Exception as error:  # code of the user
            raise _refusal(name, f"could not be tried ({type(error).__name__}: {error})") from error
        is_elementwise &= manner.is_elementwise
        common |= manner.common_keys
    return Manner(is_elementwise, frozenset(common))


def _refusal(name: str, reason: str) -> ConfigError:
    return ConfigError(f"--shard-model: {name} {reason}. Use another optimizer, or --shard-model none")


def _kinds(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, torch.Tensor]]:
    """Groups with different settings, by their places, and of each a parameter for each number of dimensions."""
    seen = set()
    for place, group in enumerate(optimizer.param_groups):
        settings = repr([(key, value) for key, value in group.items() if key not in ("params", "lr", "initial_lr")])
        homes = [id(one) for one in inner_optimizers(optimizer) if any(group is its for its in one.param_groups)]
        for parameter in group["params"]:
            kind = settings, *homes, parameter.dim(), parameter.dtype, parameter.device
            if parameter.requires_grad and parameter.dim() and kind not in seen:
                seen.add(kind)
                yield place, parameter


def _try_kind(optimizer: torch.optim.Optimizer, place: int, like: torch.Tensor) -> Manner:
    generator = torch.Generator().manual_seed(1)
    size, longer = divmod(_TRIED_BITS, like.dim())
    shape = [2 ** (size + (axis < longer)) for axis in range(like.dim())]

    def draw() -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(like.device, like.dtype)

    mine, other = ([draw() for _ in range(1 + _STEPS)] for _ in range(2))  # a tensor and its gradients, and another
    (alone,), (beside,) = _updated(optimizer, place, like, [mine]), _updated(optimizer, place, like, [other])
    if torch.equal(alone.value, mine[0]):
        raise _refusal(
            type(optimizer).__name__, "changes nothing in a copy of it, as if it kept its parameters elsewhere"
        )
    together = _updated(optimizer, place, like, [mine, other])
    if not all(_is_same(one, two) for one, two in zip(together, (alone, beside), strict=True)):
        raise _refusal(
            type(optimizer).__name__,
            "updates one parameter by others, as with a norm over all of them, but a rank has only what it owns; for"
            " the norm of the whole gradient there is --clip-norm",
        )
    common = frozenset(
        key for key, value in alone.state.items() if isinstance(value, torch.Tensor) and value.shape != mine[0].shape
    )
    try:
        pieces = [
            _updated(optimizer, place, like, [[one.flatten()[start:end] for one in mine]])[0]
            for start, end in ((0, _CUT_AT), (_CUT_AT, mine[0].numel()))
        ]
    except Exception:  # it refuses vectors
        return Manner(is_elementwise=False, common_keys=common)
    return Manner(_is_same(alone, _put_together(pieces, alone)), common)


def _put_together(pieces: Sequence[_Result], like: _Result) -> _Result | None:
    """The result of the whole tensor from its pieces' results; None if they do not fit."""
    keys = set(like.state)
    if any(set(piece.state) != keys for piece in pieces):
        return None
    state = {}
    for key, right in like.state.items():
        values = [piece.state[key] for piece in pieces]
        if isinstance(right, torch.Tensor) and right.shape == like.value.shape:
            if any(value.shape != piece.value.shape for value, piece in zip(values, pieces)):
                return None
            state[key] = torch.cat(values).view(right.shape)
        elif all(_is_equal(value, right) for value in values):
            state[key] = right
        else:
            return None
    return _Result(torch.cat([piece.value for piece in pieces]).view(like.value.shape), state)


def _is_same(one: _Result | None, other: _Result | None) -> bool:
    """Whether two results have the same bits."""
    if one is None or other is None or one.state.keys() != other.state.keys():
        return False
    pairs = [(one.value, other.value), *((one.state[key], other.state[key]) for key in one.state)]
    return all(_is_equal(*pair) for pair in pairs)


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _updated(
    optimizer: torch.optim.Optimizer, place: int, like: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]]
) -> list[_Result]:
    """What a copy makes of tensors in the place of the parameter `like` in the group of this place; each tensor comes
    with its gradients, one for each step."""
    parts = [torch.nn.Parameter(tensor.clone()) for tensor, *_ in tensors]
    trial = _trial_of(optimizer, place, like, parts)
    for step in range(1, 1 + _STEPS):
        for part, tensor in zip(parts, tensors):
            part.grad = tensor[step].clone()
        trial.step()
    return [_Result(part.detach(), dict(trial.state.get(part, {}))) for part in parts]


def _trial_of(
    optimizer: torch.optim.Optimizer, place: int, like: torch.Tensor, parts: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """A copy of the optimizer that trains `parts` in the group of this place, and nothing else."""
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trial = _copied(optimizer, {id(parameter): parameter for parameter in members})
    begun = dict(trial.state.get(like, {}))  # of optimizers that begin it before their first step
    for parameter in list(trial.state):
        del trial.state[parameter]
    for number, group in enumerate(trial.param_groups):
        group["params"][:] = parts if number == place else []
        if "lr" in group:
            rate = group["lr"]
            group["lr"] = torch.full_like(rate, _RATE) if isinstance(rate, torch.Tensor) else _RATE
    for part in parts if begun else ():
        trial.state[part] = {
            key: value.flatten()[:1].expand(part.shape).clone()
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == like.shape
            else copy.deepcopy(value)
            for key, value in begun.items()
        }
    return trial


def _copied(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """A copy with all attributes, of which an optimizer's own copy keeps three; without hooks and a schedule's step."""
    for one in (optimizer, *inner_optimizers(optimizer)):
        memo[id(one)] = object.__new__(type(one))
    for one in (optimizer, *inner_optimizers(optimizer)):
        kept = {key: value for key, value in vars(one).items() if key != "step"}
        vars(memo[id(one)]).update({key: copy.deepcopy(value, memo) for key, value in kept.items()})
        memo[id(one)]._optimizer_step_pre_hooks.clear()
        memo[id(one)]._optimizer_step_post_hooks.clear()
    made: torch.optim.Optimizer = memo[id(optimizer)]
    return made


def inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Optimizers that an optimizer keeps, such as the parts of a joint one."""
    found: list[torch.optim.Optimizer] = []

    def look(one: torch.optim.Optimizer) -> None:
        for value in walk(vars(one)):
            if isinstance(value, torch.optim.Optimizer) and value is not optimizer and value not in found:
                found.append(value)
                look(value)

    look(optimizer)
    return found


def walk(value: Any, depth: int = _DEEPEST) -> Iterator[Any]:
    """A value and what it holds: keys and values of mappings, items of lists, tuples and sets."""
    yield value
    if depth and isinstance(value, Mapping):
        for key, item in list(value.items()):
            yield key
            yield from walk(item, depth - 1)
    elif depth and isinstance(value, (list, tuple, set, frozenset)):
        for item in list(value):
            yield from walk(item, depth - 1)
