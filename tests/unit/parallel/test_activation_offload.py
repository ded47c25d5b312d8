"""Activations that leave the device and come back: the same bits, in time, and few of them at once."""

from __future__ import annotations

import copy
import gc
import os
import random
import resource
import signal
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hetseq.errors import HetSeqError
from hetseq.parallel.activation_checkpointing import checkpoint_activations
from hetseq.parallel.activation_offload import ActivationOffload
from hetseq.parallel.offload_tiers import DiskTier, Parcel, Wait, _Places

CPU = torch.device("cpu")
LAYERS, WIDTH, ROWS = 12, 32, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return hidden + mask * self.drop(self.down(functional.relu(self.up(hidden.t().contiguous().t()))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, hidden: Tensor) -> Tensor:
        mask = (hidden > -1).to(hidden.dtype)  # which every layer keeps
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden


class Diary:
    """A tier in memory that writes down what happens, tensors by the order in which they left."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.held = 0
        self._count = 0

    def put(self, tensor: Tensor) -> Parcel:
        self._count += 1
        return _Entry(self, self._count - 1, tensor)

    def close(self) -> None:
        self.said.append("close")


class _Entry:
    def __init__(self, diary: Diary, number: int, tensor: Tensor) -> None:
        self._diary, self._number = diary, number
        self._copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
        self._say("put")
        diary.held += 1

    def _say(self, what: str) -> None:
        self._diary.said.append(f"{what} {self._number}")

    def has_left(self) -> None:
        self._say("left")

    def fetch(self) -> Wait:
        self._say("get")

        def wait() -> Tensor:
            self._say("use")
            return self._copy.detach()

        return wait

    def free(self) -> None:
        self._diary.held -= 1


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(str(tmp_path), CPU)
    yield tier
    tier.close()
    assert not list(tmp_path.iterdir())


def train(model: nn.Module, offload: ActivationOffload | None, *, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The gradients of two micro-batches."""
    model = model.to(dtype)
    for seed in (3, 4):
        torch.manual_seed(seed)
        inputs = torch.randn(ROWS, WIDTH, dtype=dtype)
        if offload is None:
            loss = model(inputs).square().sum()
        else:
            with offload.forward():
                loss = model(inputs).square().sum()
        loss.backward()
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("horizon", [0, 1, 2, 4, 50])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_gradient_has_the_same_bits(
    disk: DiskTier, horizon: int, is_checkpointed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    model = Net()
    expected = train(copy.deepcopy(model), None, dtype=dtype)
    if is_checkpointed:
        checkpoint_activations(model)
    offload = ActivationOffload(model, disk, horizon=horizon, least_bytes=1)
    found = train(model, offload, dtype=dtype)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    facts = offload.facts
    if is_checkpointed:  # the inputs of the layers, and the mask once
        assert facts.tensors == LAYERS + 2
        assert facts.moved == max(0, facts.tensors - horizon)
    assert (facts.moved > 0) == (horizon < facts.tensors)


@pytest.mark.parametrize("horizon", [0, 1, 2, 4])
def test_no_more_is_on_the_device_than_the_horizon_and_two(horizon: int) -> None:
    model, diary = Net(), Diary()
    checkpoint_activations(model)
    offload = ActivationOffload(model, diary, horizon=horizon, least_bytes=1)
    train(model, offload)
    size = ROWS * WIDTH * 4
    assert offload.facts.most_live_bytes <= (horizon + 2 + 1) * size, "one more is the mask, which stays with forward"
    assert diary.held == 0, "backward has freed all places"


def test_backward_takes_them_in_turn_and_has_as_many_on_their_way_as_the_horizon_says() -> None:
    model, diary = nn.Sequential(*(nn.Tanh() for _ in range(6))), Diary()
    offload = ActivationOffload(nn.Linear(1, 1), diary, horizon=2, least_bytes=1)
    with offload.forward():
        total = model(torch.randn(8, requires_grad=True)).sum()
    assert diary.said == ["put 0", "left 0", "put 1", "left 1", "put 2", "left 2", "put 3"]
    diary.said.clear()
    total.backward()
    # results 5 and 4 have stayed, and 3 had not left yet
    assert diary.said == ["get 2", "get 1", "use 2", "get 0", "use 1", "use 0"]


def test_a_tensor_that_was_changed_in_place_is_an_error_and_never_a_wrong_gradient() -> None:
    diary = Diary()
    offload = ActivationOffload(nn.Linear(1, 1), diary, horizon=1, least_bytes=1)
    inputs = torch.randn(8, requires_grad=True)

    def forward(change: Callable[[Tensor], object]) -> Tensor:
        with offload.forward():
            first = inputs.exp()
            change(first)
            return first.exp().exp().sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        forward(lambda first: first.add_(1)).backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        forward(lambda first: first.exp_().exp_().exp_()).backward()
    forward(lambda _: None).backward()
    assert diary.held == 0


def test_so_is_the_change_of_one_that_stays() -> None:
    offload = ActivationOffload(nn.Linear(1, 1), Diary(), horizon=1)
    inputs = torch.randn(8, requires_grad=True)
    with offload.forward():
        small = inputs.exp()
        total = small.exp().sum()
    total.backward()
    with offload.forward():
        small = inputs.exp()
        total = small.mul_(2).sum()
    with pytest.raises(RuntimeError, match=r"of shape \(8,\), has been modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("least_bytes", [1, 1 << 20])
def test_a_result_that_no_loss_needs_is_given_back(least_bytes: int) -> None:
    model, diary = Net(), Diary()
    offload = ActivationOffload(model, diary, horizon=1, least_bytes=least_bytes)
    with offload.forward():
        hidden = model(torch.randn(ROWS, WIDTH))
        aside, total = weakref.ref(hidden.tanh().exp().untyped_storage()), hidden.sum()
    total.backward()
    del hidden, total
    assert aside() is None
    assert diary.held == 0


def test_a_conjugate_is_another_tensor_than_the_one_of_its_memory(disk: DiskTier) -> None:
    offload = ActivationOffload(nn.Linear(1, 1), disk, horizon=0, least_bytes=1)
    inputs = torch.randn(16, 64, requires_grad=True)

    def loss() -> Tensor:
        spectrum = torch.fft.rfft2(inputs)
        return (spectrum * spectrum.conj()).real.square().sum() + (spectrum.conj() * spectrum.exp()).imag.sum()

    (expected,) = torch.autograd.grad(loss(), inputs)
    with offload.forward():
        total = loss()
    assert offload.facts.moved
    assert torch.equal(torch.autograd.grad(total, inputs)[0], expected)


def test_a_graph_may_be_used_twice_or_never() -> None:
    model, diary = Net(), Diary()
    offload = ActivationOffload(model, diary, horizon=2, least_bytes=1)
    inputs = torch.randn(ROWS, WIDTH)
    with offload.forward():
        total = model(inputs).square().sum()
    total.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    total.backward()
    for parameter, single in zip(model.parameters(), once, strict=True):
        assert torch.equal(parameter.grad, 2 * single)  # type: ignore[arg-type]
    del total
    assert diary.held == 0
    with offload.forward():
        unused = model(inputs)
    assert diary.held > 0
    del unused
    assert diary.held == 0


def test_parameters_small_tensors_parts_of_others_and_those_of_other_devices_stay(disk: DiskTier) -> None:
    model = nn.Linear(64, 64, bias=False)
    offload = ActivationOffload(model, disk, horizon=0, least_bytes=64 * 64 * 4)
    with offload.forward():
        rows = torch.randn(64, 128, requires_grad=True)
        left, right = rows.exp().chunk(2, dim=1)  # strides with gaps
        torch.ones(64, 64, device="meta", requires_grad=True).exp()  # of another device
        total = (model(left) * right).sum() + torch.randn(63, 64, requires_grad=True).exp().sum()
    assert offload.facts.tensors == 2, "the result of exp, and of the layer"
    total.backward()


def test_a_disk_that_is_full_is_named_with_the_remedy(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path), CPU)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        offload = ActivationOffload(nn.Linear(1, 1), tier, horizon=0, least_bytes=1)
        with pytest.raises(HetSeqError, match=rf"--offload-dir {tmp_path}: activations cannot be written there \(.+\)"):
            train(Net(), offload)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
        tier.close()
    with pytest.raises(HetSeqError, match="no file can be made there"):
        DiskTier(str(tmp_path / "absent"), CPU)


def test_places_in_the_file_are_used_again(disk: DiskTier) -> None:
    model = Net()
    offload = ActivationOffload(model, disk, horizon=1, least_bytes=1)
    train(model, offload)
    size = os.fstat(disk._file.fileno()).st_size
    train(model, offload)
    assert 0 < size == os.fstat(disk._file.fileno()).st_size


def test_the_file_does_not_grow_with_the_number_of_lengths(disk: DiskTier) -> None:
    model, sizes = Net(), list[int]()
    offload = ActivationOffload(model, disk, horizon=0, least_bytes=1)
    for rows in (70, *range(20, 70)):
        with offload.forward():
            total = model(torch.randn(rows, WIDTH)).sum()
        total.backward()
        sizes.append(os.fstat(disk._file.fileno()).st_size)
    assert sizes == sizes[:1] * 51


def test_no_two_have_the_same_byte_of_the_file() -> None:
    chance, places, taken, most = random.Random(3), _Places(), dict[int, int](), 0
    for _ in range(2000):
        if taken and chance.random() < 0.5:
            begin = chance.choice(list(taken))
            places.give_back(begin, taken.pop(begin))
            continue
        size = chance.randrange(1, 50)
        begin = places.take(size)
        assert all(begin + size <= other or other + length <= begin for other, length in taken.items())
        taken[begin] = size
        most = max(most, sum(taken.values()))
        assert begin + size <= 1.5 * most
    for begin, size in taken.items():
        places.give_back(begin, size)
    assert places.take(10**9) == 0


def test_a_disk_tier_that_nobody_holds_any_more_closes_its_file_without_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        DiskTier(str(tmp_path), CPU)
        gc.collect()
    assert not said
