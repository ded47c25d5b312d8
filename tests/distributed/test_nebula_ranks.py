"""`hetseq.nebula` under plain torch.distributed: every rank saves its own names into one tag, whole or not at all."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import hetseq.nebula as nm
from hetseq.errors import CheckpointError
from tests.support.nebula import begun, state_of, step_in, tags
from tests.support.ranks import RankRaised, run_ranks

NEVER_DUE = 1e9


@contextmanager
def default_group(group: Any, store: str) -> Iterator[None]:
    """torch's own process group, as a script without HetSeq makes it."""
    from torch import distributed

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(store, group.world_size), rank=group.rank, world_size=group.world_size
    )
    distributed.barrier()  # a rank that ends at once may not take its links away while another one still connects
    try:
        yield
    finally:
        distributed.destroy_process_group()


def play(group: Any, store: str, path: str, act: Callable[[int], Any], options: dict[str, Any]) -> Any:
    """What `act` gives on each rank, between init and close."""
    logging.captureWarnings(False)
    with default_group(group, store), begun(Path(path), **options):
        return act(group.rank)


def together(tmp_path: Path, world_size: int, act: Callable[[int], Any], **options: Any) -> list[Any]:
    place = tmp_path / "tags"
    return run_ranks(play, world_size, str(tmp_path / "store"), str(place), act, options)


def save(rank: int, step: int, number: int = -1, *, names: int = 1) -> nm.Checkpoint:
    checkpoint = nm.Checkpoint(f"step{step}", number)
    for index in range(names):
        checkpoint.save(f"model-{rank}-{index}", state_of(step + rank))
    return checkpoint


def two_tags(rank: int) -> tuple[str, str, list[str]]:
    save(rank, 10).commit()
    second = save(rank, 20)
    second.commit()
    return second.wait(60), str(second.path), second.names


def test_all_ranks_save_into_one_folder(tmp_path: Path) -> None:
    results = together(tmp_path, 3, two_tags)
    assert {status for status, _, _ in results} == {"persisted"}
    assert len({path for _, path, _ in results}) == 1
    assert results[0][2] == [f"model-{rank}-0" for rank in range(3)]
    latest = nm.get_latest_checkpoint(tmp_path / "tags")
    assert latest.tag == "step20"
    assert [step_in(latest.load(f"model-{rank}-0")) for rank in range(3)] == [20, 21, 22]
    assert len(list((tmp_path / "tags").glob("step*"))) == 2


def uneven(rank: int) -> str:
    """Rank r saves r names: rank zero has none of its own."""
    checkpoint = save(rank, 10, names=rank)
    checkpoint.commit()
    return checkpoint.wait(60)


def test_a_rank_without_names_completes_all_the_same(tmp_path: Path) -> None:
    assert together(tmp_path, 3, uneven) == ["persisted"] * 3
    assert nm.get_latest_checkpoint(tmp_path / "tags").names == ["model-1-0", "model-2-0", "model-2-1"]


def counted(rank: int) -> str:
    checkpoint = save(rank, 10, 5, names=rank + 2)
    while checkpoint.status == "open":  # nobody commits: the fifth name does
        pass
    return checkpoint.status


def test_the_last_of_n_names_completes_the_tag_whichever_rank_saves_it(tmp_path: Path) -> None:
    assert together(tmp_path, 2, counted) == ["persisted"] * 2
    assert len(nm.get_latest_checkpoint(tmp_path / "tags").names) == 5


def miscounted(rank: int) -> str:
    checkpoint = save(rank, 10, 5)
    checkpoint.commit()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.wait(60)
    return str(caught.value)


def test_a_tag_with_too_few_names_is_given_up_by_all(tmp_path: Path) -> None:
    said = together(tmp_path, 2, miscounted)
    assert "2 names were saved, expected 5" in said[0]
    assert "rank 0 gave it up" in said[1]
    assert list((tmp_path / "tags").glob("step*")) == []


def same_names(rank: int) -> str:
    checkpoint = nm.Checkpoint("step1")
    checkpoint.save("model", state_of(rank))
    checkpoint.commit()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.wait(60)
    return str(caught.value)


def test_two_ranks_that_save_one_name_are_told(tmp_path: Path) -> None:
    said = together(tmp_path, 2, same_names)
    assert any("File exists" in text or "two ranks saved the name" in text for text in said)
    assert tags(tmp_path / "tags") == []


def in_memory(rank: int) -> list[str]:
    kept = []
    for step in range(1, 6):
        checkpoint = save(rank, step)
        checkpoint.commit()
        kept.append(checkpoint)
    kept[0].wait(60)
    found = [checkpoint.status for checkpoint in kept]
    nm.flush_persistence(60)
    return [*found, kept[-1].status]


def test_rank_zeros_clock_decides_for_all_which_tag_is_due(tmp_path: Path) -> None:
    results = together(tmp_path, 2, in_memory, persistent_time_interval=NEVER_DUE)
    assert results == [["persisted", *["superseded"] * 3, "memory", "persisted"]] * 2
    assert tags(tmp_path / "tags") == ["step5", "step1"]


def differing(rank: int) -> None:
    save(rank, 10 + rank)  # rank zero is also told at its end, by the want of rank one


def test_ranks_that_begin_different_tags_are_told(tmp_path: Path) -> None:
    with pytest.raises(RankRaised, match=r"rank 1 creates the tag 'step11' .* and rank 0 another one"):
        run_ranks(impatient, 2, str(tmp_path / "store"), str(tmp_path / "tags"), differing)


def by_itself(rank: int) -> str:
    if rank != 0:
        return ""
    checkpoint = save(rank, 10)
    checkpoint.commit()
    return checkpoint.wait(60)


def test_one_rank_alone_saves_where_it_was_told_to(tmp_path: Path) -> None:
    assert together(tmp_path, 2, by_itself, together=False) == ["persisted", ""]
    assert nm.get_latest_checkpoint(tmp_path / "tags").names == ["model-0-0"]


def absent(rank: int) -> str:
    """Rank one begins the tag and says nothing more."""
    checkpoint = nm.Checkpoint("step1", -2)
    if rank == 1:
        return ""
    checkpoint.save("model", 1)
    checkpoint.commit()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.wait(60)
    return str(caught.value)


def test_a_rank_that_never_commits_is_named(tmp_path: Path) -> None:
    said = run_ranks(impatient, 2, str(tmp_path / "store"), str(tmp_path / "tags"), absent)
    assert "rank 1 did not complete its part in 1 s" in said[0]
    assert "together=False" in said[0]


def impatient(group: Any, store: str, path: str, act: Callable[[int], Any]) -> Any:
    from hetseq.nebula import api as facade

    facade._PATIENCE_S = 1.0  # this process is the test's alone
    return play(group, store, path, act, {})


def test_the_same_integers_reach_every_rank(tmp_path: Path) -> None:
    assert run_ranks(agree, 2, str(tmp_path / "store")) == [[0, 2**63 - 1]] * 2


def agree(group: Any, store: str) -> list[int]:
    from hetseq.nebula import ranks

    with default_group(group, store):
        assert ranks.world() == (group.rank, 2)
        return ranks.of_rank_zero([group.rank, 2**63 - 1 - group.rank])


def test_a_script_without_ranks_is_a_world_of_one() -> None:
    from hetseq.nebula import ranks

    assert ranks.world() == (0, 1)
    assert not torch.distributed.is_initialized()
