"""Images of a state that ranks own in parts: on two nodes each, read back bit by bit after the loss of a node.

Each rank is a node: it keeps images in a folder of its own, and the loss of the node is the loss of the folder.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq.checkpoint import Identity, TensorSlice, arena
from hetseq.checkpoint import images as module
from hetseq.checkpoint.images import Images, images_here
from hetseq.checkpoint.leftover_memory import Remains
from hetseq.checkpoint.records import DamagedError
from hetseq.comm.directory_groups import gather_texts
from hetseq.comm.group import Group
from tests.support.ranks import run_ranks

RUN, START = "run", "this start"
SHAPE = (700, 911)  # 2.5 MB: several chunks for the checksums of no part, a part that is cut anywhere
ELEMENTS = SHAPE[0] * SHAPE[1]


class Node:
    """One rank with a node of its own, which owns a slice of a weight and of its moments."""

    def __init__(self, group: Group, folder: Path, owned: tuple[int, ...], *, node: int | None = None) -> None:
        self.group, self.folder, self.owned = group, folder, owned
        self.memory = folder / f"memory-{group.rank if node is None else node}"
        self.memory.mkdir(exist_ok=True)
        arena.SHARED_MEMORY = self.memory
        (folder / "run").mkdir(exist_ok=True)
        self.images = self.new_images(group)

    def new_images(self, group: Group, owned: tuple[int, ...] | None = None, **options: Any) -> Images:
        messages = group.messages() if group.world_size > 1 else None
        return Images(
            self.folder / "run", RUN, group, start=START, owned=owned or self.owned, messages=messages, **options
        )

    @property
    def extent(self) -> tuple[int, int]:
        ends = [ELEMENTS * sum(self.owned[: rank + 1]) // sum(self.owned) for rank in range(len(self.owned))]
        return ([0, *ends][self.group.rank], ends[self.group.rank])

    def tensors(self, step: int) -> dict[str, Any]:
        begin, end = self.extent
        held: dict[str, Any] = {
            f"{kind}.weight{of}": [TensorSlice(values(step, kind)[begin:end].clone(), begin, end, SHAPE)]
            for kind, of in (("model", ""), ("optim", ".exp_avg"))
        }
        held = held if begin < end else {}
        return {**held, "model.buffer": torch.full((3,), float(step))}

    def make(self, step: int, *, generation: int = 0, nonce: int | None = None) -> bool:
        identity = Identity(step=step, generation=generation, lineage=f"{step:016x}")
        return self.images.make(
            self.tensors(step), {"step": step}, identity=identity, nonce=step if nonce is None else nonce,
            at_once=["model.buffer"], known=[7],
        )  # fmt: skip

    def await_safety(self) -> None:
        self.images.settle()
        deadline = time.monotonic() + 20
        while not self.images.is_safe and time.monotonic() < deadline:
            time.sleep(0.005)
        assert self.images.is_safe
        self.group.all_gather_rows(_NONE)

    def here(self) -> list[tuple[int, tuple[int, ...]]]:
        found = images_here(RUN, self.folder / "run", start=START)
        return [(image.identity.step, image.parts) for image in found]

    def plan_of(self, step: int) -> str:
        """The plan of the image of a step, which some node has."""
        here = images_here(RUN, self.folder / "run", start=START)
        plan = next((image.plan for image in here if image.identity.step == step), "")
        return max(gather_texts(self.group, plan))


_NONE = torch.zeros(1, dtype=torch.int64).numpy()


def values(step: int, kind: str) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(2 * step + (kind == "optim")))


def read(node: Node, images: Images, plan: str, extent: tuple[int, int]) -> dict[str, Any]:
    """What this rank reads of an image: the elements of an extent, and the buffer."""

    def wanted(outline: Mapping[str, torch.Tensor]) -> dict[str, list[tuple[int, int]]]:
        assert outline["model.weight"].shape == SHAPE
        return {name: [extent] for name in outline if "weight" in name}

    loaded = images.read(plan, into={"model.buffer": torch.zeros(3)}, wanted=wanted)
    step = loaded.state["step"]
    for name in ("model.weight", "optim.weight.exp_avg"):
        (one,) = loaded.tensors[name]
        assert torch.equal(one.tensor, values(step, name.partition(".")[0])[extent[0] : extent[1]])
    assert torch.equal(loaded.tensors["model.buffer"], torch.full((3,), float(step)))
    return {"step": step, "generation": loaded.identity.generation}


def live(group: Group, folder: Path, owned: tuple[int, ...], lost: int) -> Any:
    """Three images; then a node is lost, and the others, with new cuts, read the newest."""
    node = Node(group, folder, owned)
    for step in (1, 2, 3):
        assert node.make(step)
        node.await_safety()
    there, plan = node.here(), node.plan_of(3)
    node.images.close(keep=True)
    group.all_gather_rows(_NONE)
    if group.rank == lost:
        shutil.rmtree(node.memory)
        return {"there": there}
    survivors = [rank for rank in range(group.world_size) if rank != lost]
    rest = group.subgroup(survivors, "rest")
    images = node.new_images(rest, (1,) * rest.world_size)
    half = ELEMENTS // 2
    extent = (0, half + 11) if rest.rank == 0 else (half + 11, ELEMENTS)
    found = read(node, images, plan, extent if rest.world_size > 1 else (0, ELEMENTS))
    images.keep_only(plan, holds_state=True, step=3)
    kept = node.here()
    images.close(keep=False)
    images.free()
    return {"there": there, "found": found, "kept": kept, "left": list(node.memory.iterdir())}


@pytest.mark.parametrize(
    ("owned", "lost"), [((3, 1), 0), ((3, 1), 1), ((6, 2, 1), 0), ((1, 0, 1), 2), ((0, 5, 0), 1)], ids=str
)
def test_a_lost_node_takes_nothing_with_it(owned: tuple[int, ...], lost: int, tmp_path: Path) -> None:
    facts = run_ranks(live, len(owned), tmp_path, owned, lost)
    for rank, told in enumerate(facts):
        assert [step for step, _ in told["there"]] == ([3, 2] if told["there"] else []), "two images, the newest ones"
        if rank != lost:
            assert told["found"] == {"step": 3, "generation": 0}
            assert [step for step, _ in told["kept"]] == ([3] if told["kept"] else [])
            assert told["left"] == []
    assert {part for told in facts for _, parts in told["there"] for part in parts} == set(range(sum(map(bool, owned))))


def hold_back(group: Group, folder: Path) -> Any:
    """The second image does not get to its second place."""
    node = Node(group, folder, (1, 1))
    assert node.make(1)
    node.await_safety()
    messages = node.images._messages
    assert messages is not None
    send: Callable[..., None] = messages.send

    def slow(content: memoryview, target: int, **options: Any) -> None:
        if group.rank == 0 and len(content) > 1:
            time.sleep(1.0)
        send(content, target, **options)

    messages.send = slow  # type: ignore[method-assign]
    assert node.make(2)
    node.images.settle()
    time.sleep(0.5)
    is_safe, there = node.images.is_safe, node.here()
    messages.send = send  # type: ignore[method-assign]
    node.await_safety()
    later = node.here()
    node.images.close(keep=False)
    return {"is_safe": is_safe, "there": there, "later": later, "left": list(node.memory.iterdir())}


def test_an_image_is_safe_only_once_its_second_place_has_answered(tmp_path: Path) -> None:
    slow, fast = run_ranks(hold_back, 2, tmp_path)
    assert (slow["is_safe"], fast["is_safe"]) == (False, True)
    assert dict(fast["there"])[1] == (0, 1), "the image before is whole at both places"
    assert dict(fast["there"])[2] == (1,), "its own part of the new one"
    assert dict(slow["later"]) == dict(fast["later"]) == {2: (0, 1), 1: (0, 1)}
    assert slow["left"] == fast["left"] == []


def damage(group: Group, folder: Path, what: str, times: int = 0) -> Any:
    """A byte of both copies of rank 0's part changes before the image is read, or `times` on its way to the other."""
    node = Node(group, folder, (1, 1))
    if what == "way" and group.rank == 1:
        messages = node.images._messages
        assert messages is not None
        receive: Callable[..., None] = messages.receive
        harmed = 0

        def wrong(content: memoryview, source: int, **options: Any) -> None:
            nonlocal harmed
            receive(content, source, **options)
            if len(content) > 1000 and harmed < times:
                content[1000] ^= 1
                harmed += 1

        messages.receive = wrong  # type: ignore[method-assign]
    assert node.make(1)
    node.images.settle()
    if what == "way":
        time.sleep(1.0)
        is_safe = node.images.is_safe
        here = node.here()
        node.images.close(keep=False)
        return {"is_safe": is_safe, "here": here}
    node.await_safety()
    plan = node.plan_of(1)
    node.images.close(keep=True)
    remains = Remains(RUN, node.folder / "run")
    for part in remains.parts:
        if part.index == 0:
            part.arena.image[part.image_bytes - 5] ^= 1
    remains.close(remove=False)
    images = node.new_images(group)
    try:
        read(node, images, plan, node.extent)
    except DamagedError as error:
        return {"error": str(error), "here": node.here()}
    finally:
        images.close(keep=False)
    return {}


def test_a_changed_byte_is_seen_by_all_and_the_image_is_given_up(tmp_path: Path) -> None:
    facts = run_ranks(damage, 2, tmp_path, "memory")
    assert all("the image of step 1 in memory cannot be used: rank " in told["error"] for told in facts)
    assert all(told["here"] == [] for told in facts)


def test_a_byte_that_changes_on_the_way_makes_no_second_place(tmp_path: Path) -> None:
    owner, keeper = run_ranks(damage, 2, tmp_path, "way", 1000)
    assert (owner["is_safe"], keeper["is_safe"]) == (False, True)
    assert dict(keeper["here"])[1] == (1,)


def test_a_part_that_has_arrived_with_other_bytes_is_sent_again(tmp_path: Path) -> None:
    owner, keeper = run_ranks(damage, 2, tmp_path, "way", 2)
    assert (owner["is_safe"], keeper["is_safe"]) == (True, True)
    assert dict(keeper["here"])[1] == (0, 1)


def live_in_little_room(group: Group, folder: Path) -> Any:
    """No rank has room for all that rank 0 owns; later no rank has room for any of it."""
    node = Node(group, folder, (1, 0, 0))
    room = {0: 10**9, 1: 4_000_000, 2: 8_000_000}
    module.available_bytes = lambda: room[group.rank]  # type: ignore[attr-defined]
    assert node.make(1)
    node.await_safety()
    protection, here = node.images.protection, node.here()
    assert protection is not None
    node.images.close(keep=False)
    small = node.new_images(group, memory_bytes=3_000_000)
    node.images = small
    is_made = node.make(2)
    refused = small.protection and small.protection.refusal
    small.close(keep=False)
    return {"keepers": protection.keepers, "here": here, "is_made": is_made, "refused": refused,
            "left": list(node.memory.iterdir())}  # fmt: skip


def test_an_image_is_cut_where_no_node_has_room_for_all_of_it_and_refused_where_there_is_none(tmp_path: Path) -> None:
    facts = run_ranks(live_in_little_room, 3, tmp_path)
    assert all(told["keepers"] == ((1, 2), (), ()) for told in facts)
    assert [dict(told["here"])[1] for told in facts] == [(0, 1), (0,), (1,)]
    assert all(not told["is_made"] and "MB are needed on this node" in told["refused"] for told in facts)
    assert all(told["left"] == [] for told in facts)


def grow_beyond_the_memory(group: Group, folder: Path) -> Any:
    """After a safe image the state grows, and its new layout finds no memory."""
    node = Node(group, folder, (1, 1))
    node.images.close(keep=False)
    node.images = node.new_images(group, memory_bytes=60_000_000)
    assert node.make(1)
    node.await_safety()
    node.images.note_commit(are_all_safe=True)
    tensors, (begin, end) = node.tensors, node.extent
    more = {f"optim.weight.more{number}": [TensorSlice(torch.zeros(end - begin), begin, end, SHAPE)]
            for number in range(20)}  # fmt: skip
    node.tensors = lambda step: {**tensors(step), **more}  # type: ignore[method-assign]
    is_made = node.make(2)
    node.images.note_commit(are_all_safe=node.images.is_safe)
    here, step = node.here(), node.images.safe_step
    node.images.close(keep=False)
    node.images.free()
    return {"is_made": is_made, "here": here, "step": step, "left": list(node.memory.iterdir())}


def test_a_layout_without_memory_takes_no_older_image_with_it(tmp_path: Path) -> None:
    for told in run_ranks(grow_beyond_the_memory, 2, tmp_path):
        assert told == {"is_made": False, "here": [(1, (0, 1))], "step": 1, "left": []}


def lose_the_owner_before_its_sums(group: Group, folder: Path) -> Any:
    """A byte of rank 0's part changes on the way, and the connections are cut before its checksums are sent."""
    node = Node(group, folder, (1, 1))
    messages = node.images._messages
    assert messages is not None
    send: Callable[..., None] = messages.send
    sent = 0

    def wrong(content: memoryview, target: int, **options: Any) -> None:
        nonlocal sent
        if group.rank == 0 and len(content) > 1000:
            content = memoryview(bytearray(content))
            content[-1] ^= 1
            sent += len(content)
        elif group.rank == 0 and sent and len(content) > 1:  # of the checksums
            messages.sever()
        send(content, target, **options)

    messages.send = wrong  # type: ignore[method-assign]
    assert node.make(1)
    node.images.settle()
    time.sleep(1.5)
    here = node.here()
    node.images.close(keep=False)
    return here


def test_a_copy_that_was_not_compared_is_no_image(tmp_path: Path) -> None:
    _, keeper = run_ranks(lose_the_owner_before_its_sums, 2, tmp_path)
    assert dict(keeper)[1] == (1,), "only its own part"


def keep_in_groups(group: Group, folder: Path, groups: tuple[int, ...]) -> Any:
    folder.mkdir(exist_ok=True)
    node = Node(group, folder, (2, 1, 0))
    node.images.close(keep=False)
    node.images = node.new_images(group, groups=groups)
    assert node.make(1)
    node.await_safety()
    protection = node.images.protection
    node.images.close(keep=False)
    assert protection is not None
    return protection.keepers


def test_where_another_group_holds_the_state_too_the_copy_of_an_owner_is_in_its_own(tmp_path: Path) -> None:
    alone = run_ranks(keep_in_groups, 3, tmp_path / "one", ())
    assert alone == [((1,), (2,), ())] * 3
    assert run_ranks(keep_in_groups, 3, tmp_path / "two", (0, 0, 1)) == [((1,), (0,), ())] * 3


def begin_again(group: Group, folder: Path) -> Any:
    """Another start of the run, with images of the one before in memory."""
    node = Node(group, folder, (1, 1))
    assert node.make(3)
    node.await_safety()
    node.images.close(keep=True)
    group.all_gather_rows(_NONE)
    module.available_bytes = lambda: 10**9  # type: ignore[attr-defined]
    later = Images(folder / "run", RUN, group, start="a later start", owned=(1, 1), messages=group.messages())
    later.keep_only("", holds_state=False, step=3)
    kept = node.here()
    node.images = later
    assert node.make(4)
    node.await_safety()
    later.note_commit(are_all_safe=True)
    freed = node.here()
    later.close(keep=False)
    return {"kept": kept, "freed": freed, "left": list(node.memory.iterdir())}


def test_a_start_frees_images_of_an_earlier_one_only_once_its_own_are_safe(tmp_path: Path) -> None:
    for told in run_ranks(begin_again, 2, tmp_path):
        assert told == {"kept": [(3, (0, 1))], "freed": [], "left": []}
