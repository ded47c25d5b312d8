"""What is saved comes back with the same types and the same values; what would not is refused by its path."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hetseq.checkpoint.records import DamagedError
from hetseq.nebula.state_tree import flatten, rebuild


def there_and_back(state: Any) -> Any:
    """Through JSON and copies of the tensors, as through a file."""
    flat = flatten(state)
    return rebuild(json.loads(json.dumps(flat.tree)), {name: tensor.clone() for name, tensor in flat.tensors.items()})


PLAIN = {
    "none": None,
    "truth": [True, False],
    "numbers": (0, -1, 2**70, 10**3000, 0.1, -0.0, 1e-300, math.inf, -math.inf),
    "text": ["", "ä\n\u2028\ud800", "float", "nan"],
    7: {"nested": [(), [], {}, set(), {1, "a", None}]},
    -1: OrderedDict([("b", 1), ("a", 2)]),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
}


def test_plain_values_come_back_with_their_types() -> None:
    back = there_and_back(PLAIN)
    assert back == PLAIN
    assert list(back) == list(PLAIN)
    assert types_of(back) == types_of(PLAIN)
    assert str(back["numbers"][5]) == "-0.0"
    assert list(back[-1]) == ["b", "a"]
    assert math.isnan(there_and_back(math.nan))


def types_of(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [(key, types_of(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [types_of(item) for item in value]
    return type(value)


def test_types_that_differ_are_seen() -> None:
    assert types_of({"a": (1,)}) != types_of({"a": [1]})
    assert types_of({1: 0}) != types_of({"1": 0})
    assert types_of([1]) != types_of([1.0])
    assert types_of({}) != types_of(OrderedDict())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.arange(6).view(2, 3).t(),
        torch.arange(10)[::3],
        torch.ones(1).expand(4, 5),
        torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
    ],
    ids=["plain", "0-dim", "empty", "transposed", "strided", "expanded", "bf16", "bool", "conjugate", "float8"],
)
def test_a_tensor_comes_back_as_it_was(tensor: torch.Tensor) -> None:
    back = there_and_back([tensor])[0]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert back.to(torch.complex64).equal(tensor.to(torch.complex64))


def test_tied_tensors_stay_tied_and_are_stored_once() -> None:
    weight = torch.arange(4.0)
    flat = flatten({"a": weight, "b": weight, "c": weight.clone()})
    assert sorted(flat.tensors) == ["a", "c"]
    back = there_and_back({"a": weight, "b": weight, "c": weight.clone()})
    back["a"][0] = 9
    assert back["b"][0] == 9
    assert back["c"][0] == 0


def test_views_of_one_memory_come_back_looking_into_one_memory() -> None:
    memory = torch.arange(12.0)
    state = {"rows": memory.view(3, 4), "end": memory[6:], "bits": memory.view(torch.int32)[2:3], "own": torch.ones(2)}
    flat = flatten(state)
    assert sum(tensor.numel() * tensor.element_size() for tensor in flat.tensors.values()) == 12 * 4 + 2 * 4
    back = there_and_back(state)
    assert all(back[key].equal(state[key]) and back[key].dtype == state[key].dtype for key in state)
    back["rows"][2, 3] = -1
    assert back["end"][-1] == -1


def test_views_of_different_types_may_begin_anywhere() -> None:
    memory = torch.arange(6.0)
    state = {"small": memory.view(torch.int16)[1:4], "floats": memory[1:3]}  # bytes 2 to 8 and 4 to 12
    back = there_and_back(state)
    assert all(back[key].equal(state[key]) for key in state)
    back["floats"][0] = 0
    assert back["small"][1:].tolist() == [0, 0]


def test_neighbours_in_one_memory_that_do_not_overlap_are_tensors_of_their_own() -> None:
    memory = torch.arange(1000)
    flat = flatten([memory[:3], memory[900:903]])
    assert [tensor.tolist() for tensor in flat.tensors.values()] == [[0, 1, 2], [900, 901, 902]]


def test_a_parameter_comes_back_as_one() -> None:
    back = there_and_back([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1), requires_grad=False)])
    assert [type(value) for value in back] == [nn.Parameter, nn.Parameter]
    assert [value.requires_grad for value in back] == [True, False]


def test_a_module_and_an_optimizer_are_saved_by_their_state() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    back = there_and_back({"model": model, "optimizer": optimizer})
    assert back["model"]._metadata == model.state_dict()._metadata
    other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    other.load_state_dict(back["model"])
    again = torch.optim.Adam(other.parameters())
    again.load_state_dict(back["optimizer"])
    assert all(one.equal(two) for one, two in zip(other.state_dict().values(), model.state_dict().values()))
    assert again.state_dict()["state"][0]["exp_avg"].equal(optimizer.state_dict()["state"][0]["exp_avg"])


class Stranger:
    pass


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"a": [0, {"b": Stranger()}]}, "state['a'][1]['b'] is a "),
        ({"a": {3: lambda: 0}}, "state['a'][3] is a "),
        ([b"bytes"], "state[0] is a builtins.bytes"),
        ({"d": defaultdict(int)}, "state['d'] is a collections.defaultdict"),
        ({"k": {(1, 2): 0}}, "state['k'] has the key (1, 2)"),
        ({"k": {True: 0}}, "state['k'] has the key True"),
        ({"s": {1.5}}, "state['s'] is a set with 1.5"),
        ({"t": torch.eye(2).to_sparse()}, "state['t'] is torch.float32, torch.sparse_coo"),
        ({"t": torch.empty(1, device="meta")}, "state['t'] is torch.float32"),
        ({"p": Path("x")}, "state['p'] is a pathlib"),
    ],
)
def test_what_would_not_come_back_is_refused_by_its_path(state: Any, path: str) -> None:
    with pytest.raises(TypeError) as caught:
        flatten(state)
    assert path in str(caught.value)


def test_a_state_that_contains_itself_is_refused_and_one_that_shares_is_not() -> None:
    inner: list[Any] = []
    assert there_and_back([inner, inner]) == [[], []]
    inner.append(inner)
    with pytest.raises(ValueError, match="contains itself"):
        flatten({"a": inner})


def test_paths_that_read_alike_are_different_tensors() -> None:
    state = {
        "a": {"b": torch.tensor(1)},
        "a.b": torch.tensor(2),
        "__metadata__": torch.tensor(3),
        1: {"": torch.tensor(4)},
    }
    back = there_and_back(state)
    assert [int(back["a"]["b"]), int(back["a.b"]), int(back["__metadata__"]), int(back[1][""])] == [1, 2, 3, 4]


VIEW = {"dtype": "F32", "offset": 0, "shape": [2], "stride": [1]}


@pytest.mark.parametrize(
    "tree",
    [
        ["tensor", "absent", {}],
        ["no such kind", 1],
        [],
        ["dict", ["a", 1], ["a", 2]],
        ["dict", [["a"], 1]],
        ["float", "1"],
        ["dtype", "load"],
        {"not": "a list"},
        ["tensor", "raw", {"view": {**VIEW, "offset": 15}}],
        ["tensor", "raw", {"view": {**VIEW, "offset": -1}}],
        ["tensor", "raw", {"view": {**VIEW, "stride": [-1]}}],
        ["tensor", "raw", {"view": {**VIEW, "shape": [2**40]}}],
        ["tensor", "plain", {"view": VIEW}],
        json.loads("[" * 900 + "]" * 900),
    ],
)
def test_a_tree_that_nobody_wrote_is_refused(tree: Any) -> None:
    tensors = {"raw": torch.zeros(64, dtype=torch.uint8), "plain": torch.zeros(4)}
    with pytest.raises(DamagedError):
        rebuild(tree, tensors)
    assert rebuild(["tensor", "raw", {"view": VIEW}], tensors).shape == (2,)
