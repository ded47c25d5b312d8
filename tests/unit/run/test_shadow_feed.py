"""What a rank keeps for shadows, without any: portions, room, and what the next update waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hetseq.cluster.membership.decide import Tag
from hetseq.cluster.membership.step_commit import Lineage, Verdict
from hetseq.comm.group import LocalGroup
from hetseq.errors import PeerLostError
from hetseq.parallel import portions as parts
from hetseq.parallel.buffers import BufferKeeper
from hetseq.parallel.checksums import checksums
from hetseq.parallel.gradient_sync import Gradients
from hetseq.parallel.replica import Replica
from hetseq.parallel.task_state import KeepsState, TaskState
from hetseq.run import shadow_outlet
from hetseq.run.regroup import PendingWork
from hetseq.run.shadow_feed import ShadowFeed, _packed
from hetseq.run.shadow_outlet import Following, Message, StateMessage
from hetseq.training.controller import TrainingState

FIRST = Lineage(4, 44)


class NoStore:
    """A store in which no shadow says where it listens, until the generation is over."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def set(self, key: str, value: bytes) -> None:
        raise AssertionError(key)

    def get(self, key: str, timeout_s: float) -> bytes:
        self.is_over.wait(timeout_s)
        raise PeerLostError("the generation is over")

    def check(self) -> None:
        pass


class NoState:
    learning_rate_factor, stays_ended = 1.0, False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def replica_of(model: torch.nn.Module, task: KeepsState | None = None) -> Replica:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return Replica(
        model, optimizer, Gradients(trained), BufferKeeper(model, LocalGroup()), TaskState(task or NoState())
    )


@pytest.fixture
def replica() -> Replica:
    torch.manual_seed(0)
    return replica_of(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Conv2d(2, 3, 2)))


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as closing:
        yield closing


def feed_of(replica: Replica, closing: ExitStack, *, watches_task: bool = False) -> ShadowFeed:
    store = NoStore()
    following = Following(("2.0", "3.0"), store, "run/1", b"k" * 32, "127.0.0.1")
    feed = ShadowFeed(
        following, replica, LocalGroup(), lineage=FIRST, describe=lambda state, rows: {}, facts=dict,
        watches_task=watches_task,
    )  # fmt: skip
    closing.callback(store.is_over.set)
    closing.callback(feed.close)
    return feed


@pytest.fixture
def feed(replica: Replica, closing: ExitStack) -> ShadowFeed:
    return feed_of(replica, closing)


def group_of(rank: int, world_size: int) -> Any:
    return SimpleNamespace(rank=rank, world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_the_portions_of_all_replicas_are_everything_once(replica: Replica, world_size: int) -> None:
    seen = {name: torch.zeros(one.numel(), dtype=torch.int64) for name, one in replica.model.named_parameters()}
    sizes = []
    for rank in range(world_size):
        portions = parts.portions_of(replica, group_of(rank, world_size))
        sizes.append(sum(one.end - one.begin for one in portions))
        for one in portions:
            seen[one.name][one.begin : one.end] += 1
    assert all(bool((count == 1).all()) for count in seen.values())
    assert max(sizes) - min(sizes) <= 1


def test_the_state_is_the_same_after_it_was_taken_apart_and_put_together(replica: Replica) -> None:
    replica.model[1].weight.data = replica.model[1].weight.data.to(memory_format=torch.channels_last)
    other = replica_of(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Conv2d(2, 3, 2)))
    parameters = dict(other.model.named_parameters())
    other.optimizer.state.clear()
    for rank in range(3):
        pieces, numbers = parts.state_pieces(replica, parts.portions_of(replica, group_of(rank, 3)))
        assert numbers == {}
        for message in parts.in_messages(pieces):
            told = [parts.Piece.from_record(piece.to_record()) for piece, _ in message]
            header, memory = shadow_outlet._copied(told, [source for _, source in message])
            for piece, offset in zip(told, parts.offsets_of(told)[0]):
                parameter, state = parameters[piece.name], other.optimizer.state[parameters[piece.name]]
                if piece.kind == "param":
                    parts.put_(parameter.detach(), piece, parts.view_of(memory, offset, piece))
                elif piece.shape is not None:
                    state[piece.key] = parts.value_of(memory, offset, piece)
                else:
                    state.setdefault(piece.key, parts.state_like(parameter, piece.dtype))
                    parts.put_(state[piece.key], piece, parts.view_of(memory, offset, piece))
            assert len(header["pieces"]) == len(told)
    for name, parameter in replica.model.named_parameters():
        assert torch.equal(parameter, parameters[name])
        for key, value in replica.optimizer.state[parameter].items():
            assert torch.equal(value, other.optimizer.state[parameters[name]][key]), (name, key)


def test_large_tensors_are_cut_into_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MOST_BYTES", 64)
    whole = torch.arange(50.0)
    piece = parts.Piece("param", "weight", "", "torch.float32", 100, 150)
    messages = list(
        parts.in_messages([(piece, whole), (parts.whole("model", "counter", torch.tensor(3)), torch.tensor(3))])
    )
    assert [[(one.begin, one.end) for one, _ in message] for message in messages] == [
        [(100, 116)], [(116, 132)], [(132, 148)], [(148, 150), (0, 1)],
    ]  # fmt: skip
    assert torch.equal(
        torch.cat([source for message in messages for one, source in message if one.name == "weight"]), whole
    )


def test_a_shadow_that_takes_nothing_has_two_steps_waiting_and_the_other_one_goes_on(feed: ShadowFeed) -> None:
    stopped, quick = feed._outlets
    for step in range(5, 10):
        feed.before_update()
        assert feed._staged is not None
        buffer, takers = feed._staged
        assert (stopped in takers) == (step < 7)
        assert quick in takers
        for outlet in (stopped, quick):
            if outlet in takers:
                outlet.append(Message({}, buffer=buffer), Lineage(step, 1))
            else:
                outlet.lack(Lineage(step, 1))
        assert (stopped.has_unsent_step(), quick.has_unsent_step()) == (step < 7, True)
        quick._drop(quick._waiting.popleft())
        assert not quick.has_unsent_step()
        assert feed.unsent == (step < 7)
    assert len({id(buffer) for buffer in feed._buffers if buffer.users}) == 2


def test_an_update_waits_for_the_copy_of_the_state_and_for_nothing_else(
    replica: Replica, feed: ShadowFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_copy, copied = threading.Event(), []
    real = shadow_outlet._copied

    def slowly(pieces: Any, sources: Any) -> Any:
        may_copy.wait(10.0)
        copied.append([source.clone() for source in sources])
        return real(pieces, sources)

    monkeypatch.setattr(shadow_outlet, "_copied", slowly)
    before = [parameter.detach().clone() for parameter in replica.model.parameters()]
    pieces, _ = parts.state_pieces(replica, feed._portions)
    feed._outlets[0].append_state(StateMessage({"kind": "state", "step": 4}, pieces), FIRST)
    updating = threading.Thread(target=replica.optimizer.step)
    updating.start()
    updating.join(0.2)
    assert updating.is_alive()
    assert all(torch.equal(one, was) for one, was in zip(replica.model.parameters(), before))
    may_copy.set()
    updating.join(10.0)
    assert not updating.is_alive()
    assert not any(torch.equal(one, was) for one, was in zip(replica.model.parameters(), before))
    values = [source for (piece, _), source in zip(pieces, copied[0]) if piece.kind == "param"]
    assert all(torch.equal(value, was.reshape(-1)) for value, was in zip(values, before))


def test_a_copy_that_is_no_longer_wanted_holds_nobody(feed: ShadowFeed, replica: Replica) -> None:
    pieces, _ = parts.state_pieces(replica, feed._portions)
    message = StateMessage({"kind": "state", "step": 4}, pieces)
    message._is_wanted = False
    message.begin()
    message.settle()
    with pytest.raises(shadow_outlet.StreamError, match="could not be copied"):
        list(message.frames())


# what changes besides the update


class Averaging(NoState):
    """A task with an average, and a model with tensors that are not trained."""

    def __init__(self) -> None:
        self.average = torch.zeros(3, dtype=torch.float64)
        self.model = torch.nn.Linear(3, 2)
        self.model.register_buffer("mean", torch.zeros(3))
        self.model.register_parameter("teacher", torch.nn.Parameter(torch.zeros(5), requires_grad=False))

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}


def replace_average(task: Averaging) -> None:
    task.average = task.average + 1.0


def change_data_of_average(task: Averaging) -> None:
    task.average.data.add_(1.0)


def replace_average_in_inference_mode(task: Averaging) -> None:
    with torch.inference_mode():
        task.average = task.average + 1.0


def replace_buffer(task: Averaging) -> None:
    task.model.mean = task.model.mean + 1.0


def change_teacher(task: Averaging) -> None:
    task.model.teacher.data.add_(1.0)


def step_of(feed: ShadowFeed, hook: Callable[[], None]) -> dict[str, Any]:
    """A step of rank zero alone, with a hook of its task: the header of the last message that a shadow gets."""
    step = feed._lineage.step + 1
    controller: Any = SimpleNamespace(
        state=TrainingState(lineage=Lineage(step, 11 * step)), last_update=(Tag(step, 1, 0), Verdict.APPLY),
        rows=np.zeros((1, 4), np.int64),
    )  # fmt: skip
    result: Any = SimpleNamespace(outcome=SimpleNamespace(verdict=Verdict.APPLY, lacking=0))
    feed.before_update()
    feed.after_update(controller, result, PendingWork(step, 1, False, False, 0, None))
    hook()
    feed.after_step(controller, result, [])
    last = feed._outlets[0]._waiting[-1]
    for outlet in feed._outlets:
        while outlet._waiting:
            outlet._drop(outlet._waiting.popleft())
    return last.header


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (replace_average, ["task.average"]), (change_data_of_average, ["task.average"]),
        (replace_average_in_inference_mode, ["task.average"]), (replace_buffer, ["model.mean"]),
        (change_teacher, ["model.teacher"]),
    ],
)  # fmt: skip
def test_what_a_hook_changes_is_told_once_in_whatever_way_it_does_so(
    change: Callable[[Averaging], None], told: list[str], closing: ExitStack
) -> None:
    task = Averaging()
    feed = feed_of(replica_of(task.model, task), closing, watches_task=True)
    for number in range(4):
        header = step_of(feed, (lambda: change(task)) if number % 2 else (lambda: None))
        names = [parts.Piece.from_record(record).name for record in header.get("pieces", [])]
        assert (header["kind"], names) == ("after", told if number % 2 else []), number
        assert ("task_state" in header) == ("task.average" in names), number


def test_a_buffer_that_forward_begins_to_change_later_is_told(closing: ExitStack) -> None:
    task = Averaging()
    feed = feed_of(replica_of(task.model), closing)
    assert step_of(feed, lambda: None)["kind"] == "after"  # the first facts
    assert step_of(feed, lambda: None)["kind"] == "step"
    task.model.mean.add_(1.0)  # in a forward
    header = step_of(feed, lambda: None)
    assert [parts.Piece.from_record(record).name for record in header.get("pieces", [])] == ["model.mean"]
    assert step_of(feed, lambda: None)["kind"] == "step"


@pytest.mark.parametrize("known", ["the same", "another", "the same, which a hook has changed"])
def test_frozen_parameters_that_the_shadow_has_are_no_part_of_its_state(known: str, closing: ExitStack) -> None:
    task = Averaging()
    feed = feed_of(replica_of(task.model, task), closing, watches_task=True)
    sums = dict(zip(("model.teacher", "model.mean"), checksums([task.model.teacher, task.model.mean])))
    if known == "another":
        sums["model.teacher"] += 1
    if known.endswith("changed"):
        for change in (1.0, -1.0):
            step_of(feed, lambda change=change: task.model.teacher.data.add_(change))  # type: ignore[misc]
    controller: Any = SimpleNamespace(state=TrainingState())
    message = feed._state(controller, [], known=sums)
    names = {piece.name for piece, _ in message._pieces if piece.kind == "model"}
    assert names == {"model.mean", *(["model.teacher"] if known != "the same" else [])}


def test_a_message_may_hold_the_widest_numbers() -> None:
    values = [torch.ones(1, dtype=torch.float64), torch.ones(2, dtype=torch.complex128)]
    pieces = [parts.whole("task", str(place), value) for place, value in enumerate(values)]
    memory = _packed(pieces, values)
    for piece, offset, value in zip(pieces, parts.offsets_of(pieces)[0], values):
        assert torch.equal(parts.value_of(memory, offset, piece), value)
