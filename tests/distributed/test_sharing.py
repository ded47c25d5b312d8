"""Several run directories of one run: whoever is lost, the others know everything."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from hetseq import config as options
from hetseq.checkpoint import CheckpointManager, Identity, Loaded
from hetseq.checkpoint import sync_save as saving
from hetseq.checkpoint.records import seal, unseal
from hetseq.comm import directory_groups as sharing_module
from hetseq.comm.directory_groups import everything_shared, gather_texts, send_bytes, send_tensor, share
from hetseq.comm.group import Group
from hetseq.config.sections import LogConfig
from hetseq.errors import HetSeqError
from hetseq.monitor.metrics import Display, Metrics, Recording, read_events, read_rows
from hetseq.run.build import RankJob, build_session
from hetseq.run.loaded_task import load_material
from hetseq.run.resume import Offer, best_offer
from hetseq.run.state_transfer import complete_rows, send_checkpoint
from hetseq.run_directory import RunDirectory
from hetseq.task import make_task
from tests.support.lives import Line, flat, words
from tests.support.logs import KeepingLines
from tests.support.ranks import run_ranks

APART = ((0,), (1,))


@dataclass
class Life:
    """What one rank saw."""

    losses: list[float | None] = field(default_factory=list)
    parameters: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    first_step: int = 0
    best: float | None = None
    last_step: int = 0
    last_error: str | None = None
    error: str = ""
    lines: list[str] = field(default_factory=list)


def live(
    group: Group,
    places: Sequence[str],
    parts: Sequence[Sequence[int]],
    arguments: list[str],
    *,
    breaks: str | None = None,
) -> Life:
    """Train with one run directory for each part, to the end or to the first refusal; `breaks` at the first step."""
    life, log = Life(), logging.getLogger("hetseq")
    keeping = KeepingLines(life.lines)
    log.addHandler(keeping)
    log.setLevel(logging.INFO)
    sharing = share(group, parts)
    directory = RunDirectory(Path(places[sharing.number]))
    config = options.complete(options.parse([*arguments, "--save-dir", "a-folder-that-nobody-uses"]))
    metrics = Metrics(
        Recording(directory, has_tensorboard=False),
        Display(LogConfig()),
        is_writer=sharing.is_writer,
        has_display=False,
    )
    session = None
    try:
        material = load_material(config, torch.device("cpu"), make_task(Line, config))
        session = build_session(RankJob(config, directory, group, material, metrics=metrics, sharing=sharing))
        if breaks == places[sharing.number] and sharing.is_writer:
            break_saving(breaks)
        controller = session.controller
        life.first_step, take = controller.state.position.step, controller.train_step

        def watched() -> Any:
            result = take()
            life.losses.append(result.loss)
            return result

        controller.train_step = watched  # type: ignore[method-assign]
        session.train()
        life.parameters, life.best = flat(controller.replica.model), controller.state.best
        life.last_step, life.last_error = session.saver.last_step, session.saver.last_error
    except HetSeqError as error:
        life.error = f"{type(error).__name__}: {error}"
    finally:
        metrics.close()
        if session is not None:
            session.close()
        sharing.close()
        log.removeHandler(keeping)
    return life


def live_with_a_bad_disk(group: Group, places: Sequence[str], arguments: list[str]) -> Life:
    return live(group, places, APART, arguments, breaks=places[1])


def prepared(path: Path, names: str) -> list[str]:
    """Run directories of one run, as launchers leave them."""
    first, *others = [RunDirectory.prepare(path / name, config_yaml="") for name in names.split()]
    return [str(place.path) for place in (first, *(other.adopt_run_id(first.run_id) for other in others))]


def lose(place: str, *, run_of: str) -> None:
    """The directory is gone, and a launcher makes it anew."""
    shutil.rmtree(place)
    RunDirectory.prepare(place, config_yaml="").adopt_run_id(RunDirectory(Path(run_of)).run_id)


def attempts(place: str) -> list[str]:
    return sorted(folder.parent.name for folder in Path(place).glob("checkpoints/*/COMMIT.json"))


def steps(place: str) -> list[int]:
    return [row["step"] for row in read_rows(RunDirectory(Path(place)).metrics) if "loss" in row]


def events(place: str) -> list[tuple[str, int]]:
    return [(row["event"], row["step"]) for row in read_events(RunDirectory(Path(place)).events)]


THREE, EIGHT = (words(f"--max-update {steps} --balance equal --keep-last-epochs -1") for steps in (3, 8))


@pytest.fixture(scope="module")
def calm() -> list[Life]:
    """Eight steps in one go."""
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(live, 2, prepared(Path(folder), "a b"), APART, EIGHT)


@pytest.fixture(scope="module")
def three() -> Iterator[tuple[list[Life], Path]]:
    """Three steps, and the folder of the two run directories."""
    with tempfile.TemporaryDirectory() as folder:
        yield run_ranks(live, 2, prepared(Path(folder), "a b"), APART, THREE), Path(folder)


@pytest.fixture(scope="module")
def four() -> Iterator[Path]:
    """The folder of two run directories with commits of steps 2 and 4, the second one the best."""
    arguments = words("--max-update 4 --balance equal --save-interval-updates 2", validate=True)
    with tempfile.TemporaryDirectory() as folder:
        assert [life.error for life in run_ranks(live, 2, prepared(Path(folder), "a b"), APART, arguments)] == ["", ""]
        yield Path(folder)


def copied(folder: Path, path: Path) -> list[str]:
    return [str(shutil.copytree(folder / name, path / name)) for name in "ab"]


# What is kept, and what comes back.


def test_each_directory_holds_the_whole_run(three: tuple[list[Life], Path]) -> None:
    lives, folder = three
    places = [str(folder / name) for name in "ab"]
    assert [life.error for life in lives] == ["", ""]
    assert attempts(places[0]) == attempts(places[1])
    assert len(attempts(places[0])) == 1
    for place in places:
        assert steps(place) == [1, 2, 3]
        assert events(place) == [("save", 3)]
        statuses = [json.loads((Path(place) / "status" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
        assert [(status["state"], status["step"]) for status in statuses] == [("done", 3)] * 2
        assert len({status["pid"] for status in statuses}) == 2
        assert all(status["node"] and status["device"] == "cpu" for status in statuses)
        assert (Path(place) / "checkpointHistories.csv").is_file()


@pytest.mark.parametrize("lost", [0, 1])
def test_whichever_directory_is_lost_the_run_goes_on_and_is_whole_again(
    lost: int, three: tuple[list[Life], Path], calm: list[Life], tmp_path: Path
) -> None:
    hurt, folder = three
    places = copied(folder, tmp_path)
    kept, before = attempts(places[1 - lost]), events(places[1 - lost])
    lose(places[lost], run_of=places[1 - lost])
    again = run_ranks(live, 2, places, APART, EIGHT)
    for before_it, after_it, life in zip(hurt, again, calm):
        assert after_it.error == ""
        assert after_it.first_step == 4
        assert before_it.losses + after_it.losses == life.losses  # to the bit
        assert torch.equal(after_it.parameters, life.parameters)
    assert steps(places[lost]) == list(range(1, 9))
    assert events(places[lost])[: len(before)] == before
    assert kept[0] in attempts(places[lost])  # not only the newest, but what was gone on from
    assert attempts(places[0])[-1] == attempts(places[1])[-1]


def test_what_was_lost_is_told_by_nobody_but_the_other_directory(
    three: tuple[list[Life], Path], calm: list[Life], tmp_path: Path
) -> None:
    """The twin: both ranks with the new directory alone."""
    places = copied(three[1], tmp_path)
    lose(places[0], run_of=places[1])
    again = run_ranks(live, 2, places[:1], (), EIGHT)
    assert [(life.error, life.first_step) for life in again] == [("", 1)] * 2
    assert again[0].losses == calm[0].losses


def test_a_copy_is_kept_so_the_other_node_may_be_lost_before_the_next_save(
    three: tuple[list[Life], Path], tmp_path: Path
) -> None:
    places = copied(three[1], tmp_path)
    lose(places[0], run_of=places[1])
    nothing = run_ranks(live, 2, places, APART, [*THREE])  # nothing left to do
    assert [life.losses for life in nothing] == [[], []]
    lose(places[1], run_of=places[0])
    again = run_ranks(live, 2, places, APART, EIGHT)
    assert [(life.error, life.first_step) for life in again] == [("", 4)] * 2
    assert [steps(place) for place in places] == [list(range(1, 9))] * 2


@pytest.mark.slow
def test_two_ranks_share_a_directory_and_a_third_one_has_its_own(tmp_path: Path) -> None:
    places, parts = prepared(tmp_path, "a b"), ((0, 2), (1,))
    three, eight = (words(f"--max-update {n} --balance 2,1,1") for n in (3, 8))
    calm = run_ranks(live, 3, prepared(tmp_path / "calm", "a b"), parts, eight)
    hurt = run_ranks(live, 3, places, parts, three)
    assert [len(list(Path(place).glob("checkpoints/*/part-*.safetensors"))) for place in places] == [2, 1]
    for lost in (0, 1):
        trial = [str(tmp_path / f"trial-{lost}-{name}") for name in "ab"]
        for place, copy in zip(places, trial):
            shutil.copytree(place, copy)
        lose(trial[lost], run_of=trial[1 - lost])
        again = run_ranks(live, 3, trial, parts, eight)
        assert [life.error for life in again] == [""] * 3
        assert [one.losses + other.losses for one, other in zip(hurt, again)] == [life.losses for life in calm]
        assert steps(trial[lost]) == list(range(1, 9))
        assert sorted(file.name for file in Path(trial[lost], "status").iterdir()) == [
            f"rank-{rank}.json" for rank in range(3)
        ]


# A disk that fails.


def break_saving(place: str) -> None:
    folder = Path(place) / "checkpoints"
    shutil.rmtree(folder)
    folder.write_text("a file where a folder should be")


def test_the_disk_of_one_node_spoils_neither_training_nor_the_saves_of_the_other(tmp_path: Path) -> None:
    places = prepared(tmp_path, "a b")
    arguments = words("--max-update 6 --balance equal --save-interval-updates 2", validate=True)
    lives = run_ranks(live_with_a_bad_disk, 2, places, arguments)
    calm = run_ranks(live, 2, prepared(tmp_path / "calm", "a b"), APART, arguments)
    assert [life.losses for life in lives] == [life.losses for life in calm]
    assert [life.error for life in lives] == ["", ""]
    assert lives[0].last_error is None
    assert lives[1].last_error
    assert [life.last_step for life in lives] == [6, 6]  # the same command goes on from there
    assert lives[0].best == lives[1].best is not None
    assert [step for event, step in events(places[1]) if event == "save_failed"] == [2, 4, 6]
    assert [step for event, step in events(places[0]) if event == "save"] == [2, 4, 6]
    (Path(places[1]) / "checkpoints").unlink()
    again = run_ranks(live, 2, places, APART, words("--max-update 8 --balance equal", validate=True))
    assert [(life.error, life.first_step) for life in again] == [("", 7)] * 2


def test_a_directory_that_cannot_be_read_ends_all_ranks_with_one_sentence(tmp_path: Path) -> None:
    places = prepared(tmp_path, "a b")
    break_saving(places[1])
    lives = run_ranks(live, 2, places, APART, EIGHT)
    assert f"CheckpointRefused: {places[1]} cannot be read" in lives[0].error
    assert lives[0].error == lives[1].error


def live_with_a_slow_disk(group: Group, places: Sequence[str], parts: Any, arguments: list[str]) -> Life:
    """The last rank takes far longer for its part of a checkpoint than a step may take."""
    write = saving.write_part

    def slowly(*given: Any) -> Any:
        if group.rank == group.world_size - 1:
            time.sleep(1.5)
        return write(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "write_part", slowly)
        return live(group, places, parts, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [((0,), (1, 2)), ((0, 1), (2,))])
def test_the_other_directories_wait_for_a_slow_one(parts: Any, tmp_path: Path) -> None:
    arguments = words("--max-update 3 --balance equal --save-interval-updates 1 --step-deadline 0.5")
    lives = run_ranks(live_with_a_slow_disk, 3, prepared(tmp_path, "a b"), parts, arguments)
    assert [(life.error, life.last_step) for life in lives] == [("", 3)] * 3


# Faults of one rank.


def live_with_a_fault(group: Group, places: Sequence[str], arguments: list[str]) -> tuple[str, Life | None]:
    """Rank one runs out of something while it loads."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of everything")

    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 1:
            patch.setattr(CheckpointManager, "load", fail)
        try:
            return "", live(group, places, APART, arguments)
        except RuntimeError as error:
            return str(error), None


def test_what_one_rank_raises_while_loading_all_ranks_hear_of(three: tuple[list[Life], Path], tmp_path: Path) -> None:
    first, second = run_ranks(live_with_a_fault, 2, copied(three[1], tmp_path), EIGHT, timeout_s=20.0)
    assert second == ("out of everything", None)
    assert first[1] is not None
    assert first[1].error == "CheckpointRefused: out of everything"


# Damage.


def damage(place: str) -> None:
    for part in Path(place).glob("checkpoints/*/part-*.safetensors"):
        content = bytearray(part.read_bytes())
        content[-1] ^= 1
        part.write_bytes(content)


def test_a_damaged_checkpoint_is_made_good_for_by_the_other_directory(
    three: tuple[list[Life], Path], tmp_path: Path
) -> None:
    places = copied(three[1], tmp_path)
    damage(places[0])
    lives = run_ranks(live, 2, places, APART, THREE)  # nothing left to do
    assert any("WARNING" in line and "cannot be used" in line for line in lives[0].lines)
    damaged, copy = attempts(places[0])  # not overwritten: its copy has another name
    assert damaged.partition(".")[0] == copy.partition(".")[0]
    again = run_ranks(live, 2, places, APART, EIGHT)
    assert [(life.error, life.first_step) for life in again] == [("", 4)] * 2


def test_damage_everywhere_is_refused_alike(three: tuple[list[Life], Path], tmp_path: Path) -> None:
    places = copied(three[1], tmp_path)
    for place in places:
        damage(place)
    again = run_ranks(live, 2, places, APART, EIGHT)
    assert again[0].error == again[1].error
    assert again[0].error.startswith(f"CheckpointRefused: no checkpoint in {places[0]}")


def test_a_checkpoint_of_a_later_format_is_passed_over_by_nobody(
    three: tuple[list[Life], Path], tmp_path: Path
) -> None:
    places = copied(three[1], tmp_path)
    (path,) = Path(places[1]).glob("checkpoints/*/COMMIT.json")
    record = unseal(path.read_bytes(), source=path)
    path.write_bytes(seal({**record, "version": record["version"] + 1}))
    lives = run_ranks(live, 2, places, APART, EIGHT)
    assert all(f"is a checkpoint of format version {record['version'] + 1}" in life.error for life in lives)
    path.write_bytes(seal(record))
    assert [life.error for life in run_ranks(live, 2, places, APART, EIGHT)] == ["", ""]  # the twin


def offer(step: int = 0, nonce: int = 0, *, generation: int = 0, has_failed: bool = False) -> Offer:
    return Offer(has_failed=has_failed, is_there=bool(step), order=(step, generation), name=(1, nonce, 2))


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ([offer()], None),
        ([offer(has_failed=True), offer()], None),
        ([offer(), offer(1)], 1),
        ([offer(has_failed=True), offer(1)], 1),
        ([offer(3, 9), offer(4, 1)], 1),
        ([offer(4, 1), offer(4, 9)], 0),  # of equals the first
        ([offer(4, 1), offer(4, 1, generation=1)], 1),
    ],
)
def test_the_newest_offer_wins(offers: list[Offer], expected: int | None) -> None:
    assert best_offer([Offer.unpack(one.pack()) for one in offers]) == expected


# --resume.


# each name and each loss once; all pairs of them when there is time
FAST = [("best", 0), ("4", 1), ("latest", 0), ("path", 1)]
ALL = [(which, lost) for which, _ in FAST for lost in (0, 1)]


@pytest.mark.parametrize(
    ("which", "lost"), [pytest.param(*pair, marks=[] if pair in FAST else pytest.mark.slow) for pair in ALL]
)
def test_what_only_one_directory_has_is_found_by_any_name(which: str, lost: int, four: Path, tmp_path: Path) -> None:
    places = copied(four, tmp_path)
    lose(places[lost], run_of=places[1 - lost])
    name = f"{places[1 - lost]}/checkpoints/{attempts(places[1 - lost])[-1]}" if which == "path" else which
    again = run_ranks(live, 2, places, APART, [*EIGHT, "--resume", name])
    assert [(life.error, life.first_step) for life in again] == [("", 5)] * 2


@pytest.mark.parametrize(
    ("which", "told"),
    [("3", "holds no usable checkpoint of step 3"), ("/nowhere/at/all", "/nowhere/at/all does not exist")],
)
def test_what_no_directory_has_is_refused_alike_with_the_words_of_the_first(
    which: str, told: str, four: Path, tmp_path: Path
) -> None:
    places = copied(four, tmp_path)
    lives = run_ranks(live, 2, places, APART, [*EIGHT, "--resume", which])
    assert lives[0].error == lives[1].error
    assert lives[0].error.startswith(f"CheckpointMismatch: --resume {which}: ")
    assert told in lives[0].error


@pytest.mark.parametrize("which", ["none", "2"])
def test_to_go_back_is_refused_for_what_any_directory_holds(which: str, four: Path, tmp_path: Path) -> None:
    places = copied(four, tmp_path)
    lose(places[0], run_of=places[1])
    lives = run_ranks(live, 2, places, APART, [*EIGHT, "--resume", which])
    assert lives[0].error == lives[1].error
    assert f"CheckpointMismatch: --resume {which}" in lives[0].error
    assert f"{places[1]} " in lives[0].error
    assert "step 4" in lives[0].error


def live_at_home(group: Group, homes: Sequence[str], places: Sequence[str], arguments: list[str]) -> Life:
    """Each rank has a working directory of its own, where a relative path means something else."""
    os.chdir(homes[group.rank])
    return live(group, places, APART, arguments)


@pytest.mark.parametrize("reader", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_another_run_that_only_one_node_can_read_is_begun_with_and_not_copied(
    reader: int, four: Path, tmp_path: Path
) -> None:
    places, homes = prepared(tmp_path, "a b"), [tmp_path / "home-0", tmp_path / "home-1"]
    for home in homes:
        home.mkdir()
    shutil.copytree(four / "a", homes[reader] / "old")
    beginning = [*EIGHT, "--resume", "old"]
    idle = run_ranks(live_at_home, 2, homes, places, [*beginning, "--max-update", "4"])
    assert ["has made 4 updates" in life.error for life in idle] == [True] * 2  # so there is nothing to begin
    assert [attempts(place) for place in places] == [[], []]
    lives = run_ranks(live_at_home, 2, homes, places, beginning)
    assert [(life.error, life.first_step) for life in lives] == [("", 5)] * 2
    assert [[name.partition(".")[0] for name in attempts(place)] for place in places] == [["step-000000008"]] * 2
    once_more = run_ranks(live_at_home, 2, homes, places, [*beginning, "--max-update", "9"])
    assert [(life.error, life.first_step) for life in once_more] == [("", 9)] * 2


# Rows.


def test_rows_that_only_one_directory_lacks_come_from_the_other_and_its_own_are_kept(
    four: Path, tmp_path: Path
) -> None:
    places = copied(four, tmp_path)
    lacking = RunDirectory(Path(places[0]))
    lines = lacking.metrics.read_text().splitlines(keepends=True)
    whole = read_rows(lacking.metrics)
    assert [row["step"] for row in whole] == [1, 2, 3, 4, 4]
    lacking.metrics.write_text("".join(lines[2:]) + json.dumps({"step": 9, "loss": 0.5}) + '\n{"torn')
    run_ranks(live, 2, places, APART, words("--max-update 5 --balance equal"))
    assert steps(places[0]) == [1, 2, 3, 4, 5, 9]
    assert [(row["step"], row.get("loss")) for row in read_rows(lacking.metrics)][:5] == [
        (row["step"], row.get("loss")) for row in whole
    ]


# The wire.


def complete(group: Group, places: Sequence[str], source: int, received: Sequence[bool]) -> None:
    sharing = share(group, APART)
    directory = RunDirectory(Path(places[sharing.number]))
    complete_rows(directory, sharing, step=4, source=source, is_received=received[group.rank])


@pytest.mark.parametrize(("received", "expected"), [((True, False), [1, 2, 30, 40]), ((False, False), [1, 2, 3, 4, 5])])
def test_rows_of_steps_that_were_given_up_go_with_them(
    received: tuple[bool, ...], expected: list[int], tmp_path: Path
) -> None:
    """The first directory went on alone to step 5, the second to step 4; the checkpoint of the second is the one."""
    places = prepared(tmp_path, "a b")
    for place, losses in zip(places, ([1, 2, 3, 4, 5], [1, 2, 30, 40])):
        rows = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, 1)]
        RunDirectory(Path(place)).metrics.write_text("".join(rows))
    run_ranks(complete, 2, places, 1, received)
    assert [row["loss"] for row in read_rows(RunDirectory(Path(places[0])).metrics)] == expected
    assert [row["loss"] for row in read_rows(RunDirectory(Path(places[1])).metrics)] == [1, 2, 30, 40]


def carry(group: Group) -> list[Any]:
    """Bytes, tensors of many kinds and a loaded checkpoint from rank 1, in many pieces."""
    sharing_module._CHUNK_BYTES = 1 << 16  # a rank is a process, so it may be changed here
    data = bytes(range(256)) * 700 if group.rank == 1 else b""  # 179,200 bytes: two pieces and a rest
    received = send_bytes(group, data, source=1)
    unwanted = send_bytes(group, data, source=1, is_wanted=False)
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
    tensors = {str(kind): (torch.arange(6).view(2, 3) % 2).to(kind) for kind in kinds}
    tensors |= {"empty": torch.empty(0, 4), "number": torch.tensor(math.pi), "odd": torch.tensor([math.nan, -0.0])}
    large = torch.arange(50_000) * (1 if group.rank == 1 else 0)
    send_tensor(group, large, source=1)
    state = {"a": [1, 0.1, None], "b": {"c": math.inf}}
    loaded = Loaded(tensors, state, Identity(3, 0, "0" * 15 + "f"), ("best",), Path("/x"), [], "run", 2**64 - 1)
    sharing = everything_shared(group)
    got = send_checkpoint(sharing, loaded if group.rank == 1 else None, source=1, has_it=group.rank == 1)
    facts = (got.state, got.identity, got.kinds, got.path, got.run_id, got.nonce)
    return [received == bytes(range(256)) * 700, unwanted, int(large.sum()), bits(got.tensors), facts]


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: (str(t.dtype), tuple(t.shape), t.detach().view(-1).view(torch.uint8).tolist())
        for name, t in tensors.items()
    }


def test_everything_arrives_bit_for_bit() -> None:
    there, source = run_ranks(carry, 2)
    assert there == source
    assert there[:2] == [True, b""]
    assert there[2] == sum(range(50_000))


def carry_into(group: Group) -> list[Any]:
    """A checkpoint from rank 1 into a model of which one tensor has another type; then once more where none may be."""
    sent = {"a": torch.tensor([1.0, -0.0, math.nan]), "b": torch.ones(2, 2)}
    loaded = Loaded(sent, {"x": 1}, Identity(3, 0, "0" * 16), ("best",), Path("/x"), [], "run", 1)
    sharing, is_source, seen = everything_shared(group), group.rank == 1, []
    for answer in (True, False):
        into = {"a": torch.nn.Parameter(torch.zeros(3)), "b": torch.zeros(2, 2, dtype=torch.float64)}
        asked: list[Loaded] = []

        def fits(outline: Loaded, answer: bool = answer, asked: list[Loaded] = asked) -> bool:
            asked.append(outline)
            return answer

        one = send_checkpoint(
            sharing, loaded if is_source else None, source=1, has_it=is_source, into=into, fits=fits
        )  # fmt: skip
        seen += [bits(one.tensors), bits(into), one.tensors["a"] is into["a"], one.tensors["b"] is into["b"]]
        seen.append([(outline.state, {tensor.device.type for tensor in outline.tensors.values()}) for outline in asked])
    return seen


def test_a_checkpoint_arrives_in_the_memory_that_fits_and_only_where_it_may() -> None:
    there, source = run_ranks(carry_into, 2)
    sent, untouched, *_ = source
    assert source == [sent, untouched, False, False, []] * 2  # it has the checkpoint, so nothing of it is written to
    assert untouched["a"] != sent["a"]
    outline = [({"x": 1}, {"meta"})]
    assert there == [
        *(sent, {"a": sent["a"], "b": untouched["b"]}, True, False, outline),
        *(sent, untouched, False, False, outline),
    ]


def refuse_parts(group: Group, several: Sequence[Any]) -> list[str]:
    """What is said of each of these parts."""
    told = []
    for parts in several:
        try:
            share(group, parts).close()
            told.append("")
        except ValueError as error:
            told.append(str(error))
    return told


def test_parts_that_are_no_partition() -> None:
    wrong = [((0,),), ((0, 1), (1,)), ((1,), (0,)), ((1, 0),), ((0, 1), ())]
    for told in run_ranks(refuse_parts, 2, [*wrong, APART, ()]):
        assert all(f"{parts} of 2 ranks: expected every rank once" in line for parts, line in zip(wrong, told))
        assert told[len(wrong) :] == ["", ""]


def gather_some(group: Group) -> tuple[list[str], list[str]]:
    return gather_texts(group, "ä" * group.rank), gather_texts(group, "")


def test_texts_of_different_lengths_reach_every_rank() -> None:
    assert run_ranks(gather_some, 3) == [(["", "ä", "ää"], ["", "", ""])] * 3
