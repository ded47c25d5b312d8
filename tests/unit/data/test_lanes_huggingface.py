"""Lanes over a Hugging Face `IterableDataset`: read on from its state; a shuffle that loses its buffer is refused."""

from __future__ import annotations

import gc
import json
import re
from typing import Any

import pytest

from hetseq import Lanes
from hetseq.data.lanes import check_is_indexed
from hetseq.errors import TaskError

datasets = pytest.importorskip("datasets")

SHARDS, ROWS, LANES, BATCH = 4, 100, 2, 8


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """400 numbers in four files, as records of a stream."""
    folder = tmp_path_factory.mktemp("rows")
    paths = [folder / f"{shard}.jsonl" for shard in range(SHARDS)]
    for shard, path in enumerate(paths):
        path.write_text("".join(json.dumps({"id": shard * ROWS + row}) + "\n" for row in range(ROWS)))
    files = list(map(str, paths))
    found = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(folder))
    return found.map(lambda row: {"twice": 2 * row["id"]})


def lanes_of(stream: Any) -> Lanes:
    lanes = Lanes(lambda lane: stream.shard(LANES, lane), lanes=LANES, length=SHARDS * ROWS)
    lanes.bind(lambda epoch: BATCH)
    return lanes


def test_each_record_comes_once_and_a_resumed_run_reads_on_at_the_cursor(stream: Any) -> None:
    lanes = lanes_of(stream)
    whole = [lanes[index] for index in range(len(lanes))]
    assert sorted(row["id"] for row in whole) == list(range(SHARDS * ROWS))
    assert all(row["twice"] == 2 * row["id"] for row in whole)
    lanes.learn(lanes.fresh_cursors())
    state = json.loads(json.dumps(lanes.state_dict()))
    assert {at >= 130 for _, _, at, _ in state["cursors"]} == {True}
    later = lanes_of(stream)
    later.load_state_dict(state)
    rest = range(len(lanes) - 10, len(lanes))
    assert [later[index] for index in rest] == [whole[index] for index in rest]


def test_a_shuffle_that_loses_its_buffer_is_refused(stream: Any) -> None:
    def read() -> str:
        lanes = lanes_of(stream.shuffle(seed=1, buffer_size=20))
        try:
            [lanes[index] for index in range(len(lanes))]
        except TaskError as error:
            return str(error)
        return "all was read"

    told = read()
    gc.collect()  # the threads of the stream end with it
    assert re.search(r"load_state_dict does not lead back to record \d+, as after shuffle\(buffer_size", told), told


def test_without_its_state_a_shuffled_stream_is_the_same_again(stream: Any) -> None:
    shuffled = stream.shuffle(seed=1, buffer_size=20)
    found = []
    for _ in range(2):
        lanes = Lanes(lambda lane: iter(shuffled.shard(LANES, lane)), lanes=LANES, length=SHARDS * ROWS)
        lanes.bind(lambda epoch: BATCH)
        found.append([lanes[index]["id"] for index in range(len(lanes))])
    assert found[0] == found[1]
    assert sorted(found[0]) == list(range(SHARDS * ROWS))


def test_the_bare_stream_is_refused_and_a_table_is_taken(stream: Any) -> None:
    with pytest.raises(TaskError, match=r"run.steps got a IterableDataset, which has no index"):
        check_is_indexed(stream, "run.steps got")
    check_is_indexed(datasets.Dataset.from_dict({"id": [1, 2]}), "run.steps got")
