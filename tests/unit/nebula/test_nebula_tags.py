"""When a tag is complete, which one is the latest, what stays, and what goes to the disk."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import hetseq.nebula as nm
from hetseq.checkpoint.history import read_history
from hetseq.errors import CheckpointError, ConfigError
from tests.support.nebula import begun, save, service, state_of, step_in, stopped_writer, tags

NEVER_DUE = 1e9  # seconds


def test_what_was_saved_is_loaded_again_by_another_start(tmp_path: Path) -> None:
    with begun(tmp_path):
        save(3, "model", "optimizer")
    latest = nm.get_latest_checkpoint(tmp_path)
    assert (latest.tag, latest.status, latest.names) == ("global_step3", "persisted", ["model", "optimizer"])
    assert step_in(latest.load("model")) == step_in(latest.load("optimizer")) == 3
    assert latest.path is not None
    assert latest.path.parent == tmp_path
    assert latest.path.name.startswith("global_step3.")


def test_a_state_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    with begun(tmp_path):
        state = state_of(1)
        checkpoint = nm.Checkpoint("step1")
        checkpoint.save("model", state)
        state["weight"].zero_()
        checkpoint.commit()
        assert step_in(checkpoint.load("model")) == 1


def test_without_a_number_the_next_tag_completes_the_one_before(tmp_path: Path) -> None:
    with begun(tmp_path):
        first = nm.Checkpoint("step1")
        first.save("model", state_of(1))
        assert tags(tmp_path) == []
        second = nm.Checkpoint("step2")
        assert tags(tmp_path) == ["step1"]
        with pytest.raises(ValueError, match="nothing can be added"):
            first.save("more", 1)
        second.save("model", state_of(2))
    assert tags(tmp_path) == ["step2", "step1"]  # the normal end completes the last one


def test_without_a_number_flush_completes_and_waits(tmp_path: Path) -> None:
    with begun(tmp_path):
        checkpoint = nm.Checkpoint("step1")
        checkpoint.save("model", state_of(1))
        nm.flush_persistence(timeout=60)
        assert checkpoint.status == "persisted"


def test_with_a_number_the_last_name_completes_the_tag(tmp_path: Path) -> None:
    with begun(tmp_path):
        checkpoint = nm.Checkpoint("step1", 2)
        checkpoint.save("model", state_of(1))
        assert checkpoint.status == "open"
        checkpoint.save("optimizer", state_of(1))
        assert checkpoint.wait(60) == "persisted"


def test_with_a_number_a_tag_that_lacks_a_name_is_never_visible(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with begun(tmp_path):
        save(1)
        short = nm.Checkpoint("step2", 2)
        short.save("model", state_of(2))
        nm.flush_persistence()
        assert short.status == "open"
    assert "'step2' is abandoned: it had 1 names" in caplog.text
    assert tags(tmp_path) == ["global_step1"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("step2")] == []


def test_minus_two_waits_for_commit_alone(tmp_path: Path) -> None:
    with begun(tmp_path):
        first, second = nm.Checkpoint("step1", -2), nm.Checkpoint("step2", -2)
        second.save("model", state_of(2))
        first.save("model", state_of(1))
        nm.flush_persistence()
        assert tags(tmp_path) == []
        first.commit()
        assert first.wait(60) == "persisted"
    assert tags(tmp_path) == ["step1"]  # the other one was never committed


def test_tags_are_ordered_by_their_integers_and_not_as_text(tmp_path: Path) -> None:
    with begun(tmp_path):
        for tag in ("step9", "step100", "step20"):
            nm.Checkpoint(tag).save("model", 1)
    assert tags(tmp_path) == ["step100", "step20", "step9"]
    assert nm.get_latest_checkpoint(tmp_path).tag == "step100"
    assert sorted(["step9", "step100", "step20"], reverse=True)[0] == "step9"  # what text would say


def test_tags_without_integers_are_ordered_by_time(tmp_path: Path) -> None:
    with begun(tmp_path):
        for tag in ("zebra", "ape"):
            nm.Checkpoint(tag).save("model", tag)
        nm.Checkpoint("zebra", is_best=True).save("model", "again")
    assert tags(tmp_path) == ["zebra", "ape", "zebra"]
    assert nm.get_checkpoint("zebra", tmp_path).load("model") == "again"


def test_an_empty_tag_means_none(tmp_path: Path) -> None:
    with begun(tmp_path):
        none = nm.get_latest_checkpoint()
        assert (none.tag, none.status, none.path, none.names) == ("", "none", None, [])
        assert nm.get_checkpoint("step1").tag == ""
        assert nm.get_latest_checkpoint_path("model") is None
        assert nm.list_checkpoints() == []
        for action in (none.commit, lambda: none.save("model", 1)):
            with pytest.raises(ValueError, match="is not possible with the empty tag"):
                action()
        with pytest.raises(CheckpointError, match="its tag is empty"):
            none.load("model")


def test_a_path_is_found_by_a_name_or_by_the_beginning_of_a_tag(tmp_path: Path) -> None:
    with begun(tmp_path):
        save(1, "model", "ema")
        save(2, "model")
        nm.Checkpoint("other3").save("loss", 0.5)
    newest = {name: nm.get_latest_checkpoint_path(name, tmp_path) for name in ("ema", "model", "global", "other", "no")}
    found = {name: path.name.split(".")[0] if path else None for name, path in newest.items()}
    assert found == {
        "ema": "global_step1",
        "model": "global_step2",
        "global": "global_step2",
        "other": "other3",
        "no": None,
    }


def test_an_interval_keeps_tags_in_memory_and_the_newest_reaches_the_disk_at_the_end(tmp_path: Path) -> None:
    with begun(tmp_path, NEVER_DUE):
        kept = [save(step) for step in range(1, 5)]
        kept[0].wait(60)
        assert [checkpoint.status for checkpoint in kept] == ["persisted", "superseded", "superseded", "memory"]
        assert tags(tmp_path) == ["global_step4", "global_step1"]
        assert nm.get_latest_checkpoint().path is None
        assert step_in(nm.get_latest_checkpoint().load("model")) == 4
        assert [path.name.split(".")[0] for path in tmp_path.iterdir() if path.is_dir()] == ["global_step1"]
        with pytest.raises(CheckpointError, match="superseded"):
            kept[1].load("model")
    assert tags(tmp_path) == ["global_step4", "global_step1"]
    assert step_in(nm.get_latest_checkpoint(tmp_path).load("model")) == 4
    rows = read_history(tmp_path / "checkpointHistories.csv")
    assert [(row["tag"], row["tier"], row["result"]) for row in rows] == [
        ("global_step1", "persistent", "ok"),
        ("global_step2", "memory", "superseded"),
        ("global_step3", "memory", "superseded"),
        ("global_step4", "persistent", "ok"),
    ]


def test_the_best_tag_and_a_flush_reach_the_disk_whatever_the_interval(tmp_path: Path) -> None:
    with begun(tmp_path, NEVER_DUE):
        save(1)
        best = save(2, is_best=True)
        flushed = save(3)
        nm.flush_persistence()
        assert (best.wait(60), flushed.status) == ("persisted", "persisted")


def test_an_interval_that_is_over_makes_the_next_tag_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("hetseq.nebula.service.time.monotonic", lambda: now)
    with begun(tmp_path, 10):
        first, early = save(1), save(2)
        now = 110.0
        late = save(3)
        nm.flush_persistence()
        assert [checkpoint.status for checkpoint in (first, early, late)] == ["persisted", "superseded", "persisted"]


def test_a_save_waits_when_both_slots_are_busy_and_no_tag_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begun(tmp_path):
        with stopped_writer(monkeypatch) as waits:
            save(1)
            save(2)
            assert waits == []
            save(3)
            assert waits != []
        nm.flush_persistence()
    assert tags(tmp_path) == ["global_step3", "global_step2", "global_step1"]
    assert [step_in(nm.get_checkpoint(f"global_step{n}", tmp_path).load("model")) for n in (1, 2, 3)] == [1, 2, 3]


def test_an_open_tag_in_memory_goes_to_the_disk_before_its_memory_is_taken(tmp_path: Path) -> None:
    with begun(tmp_path, NEVER_DUE):
        save(1).wait(60)
        first, second = nm.Checkpoint("step2", -2), nm.Checkpoint("step3", -2)
        first.save("model", state_of(2))
        second.save("model", state_of(3))
        save(4)
        first.commit()
        second.commit()
        nm.flush_persistence()
    assert tags(tmp_path)[:2] == ["global_step4", "step2"]
    assert step_in(nm.get_checkpoint("step2", tmp_path).load("model")) == 2


def test_from_the_third_tag_on_no_memory_is_allocated(tmp_path: Path) -> None:
    with begun(tmp_path):
        sizes = []
        for step in range(6):
            save(step, "model", "optimizer").wait(60)
            sizes.append(service().memory_bytes)
    assert len(set(sizes[1:])) == 1
    assert sizes[0] > 0


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    with begun(tmp_path, num_of_version_in_retention=2):
        save(1, is_best=True).wait(60)
        for step in range(2, 6):
            save(step).wait(60)
    assert tags(tmp_path) == ["global_step5", "global_step4", "global_step1"]
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 3


def test_the_history_has_a_line_for_every_tag(tmp_path: Path) -> None:
    with begun(tmp_path):
        save(1)
        save(2, "a", "b")
    rows = read_history(tmp_path / "checkpointHistories.csv")
    assert [(row["tag"], row["files"], row["result"], row["tier"]) for row in rows] == [
        ("global_step1", "1", "ok", "persistent"),
        ("global_step2", "2", "ok", "persistent"),
    ]
    assert all(int(row["bytes"]) > 0 and float(row["throughput_MBps"]) > 0 for row in rows)


def test_a_tag_may_be_any_text_and_lies_in_one_folder(tmp_path: Path) -> None:
    odd = ["epoch=3-step=500", "../out", "a/b", ".", "ä%", "COMMIT"]
    with begun(tmp_path / "deep" / "er"):
        for tag in odd:
            nm.Checkpoint(tag).save("../x/COMMIT.json", tag)
    root = tmp_path / "deep" / "er"
    assert sorted(tags(root)) == sorted(odd)
    assert {nm.get_checkpoint(tag, root).load("../x/COMMIT.json") for tag in odd} == set(odd)
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_a_hidden_copy_ends_before_the_optimizer_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.BatchNorm1d(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)
    may_copy = threading.Event()
    order = []
    copy = torch._foreach_copy_

    def copy_late(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert may_copy.wait(30)
            order.append("copied")
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", copy_late)
    with begun(tmp_path, overlap_with=optimizer):
        checkpoint = nm.Checkpoint("step1")
        checkpoint.save("model", model)  # returns although nothing of the parameters is copied
        checkpoint.commit()
        model(torch.rand(4, 8)).sum().backward()  # changes the running mean: it is of the saved step all the same
        model.weight.grad = torch.ones(8)
        may_copy.set()
        optimizer.step()
        order.append("stepped")
        saved = checkpoint.load("model")
        nm.flush_persistence()
    assert order == ["copied", "stepped"]
    assert saved["weight"].tolist() == [0.0] * 8
    assert model.weight.tolist() == [-1.0] * 8
    assert saved["running_mean"].tolist() == [0.0] * 8
    assert not optimizer._optimizer_step_pre_hooks
    assert nm.get_latest_checkpoint(tmp_path).load("model")["weight"].tolist() == [0.0] * 8


def test_without_the_hook_everything_is_copied_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()
    copy = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda *lists: (threads.add(threading.current_thread().name), copy(*lists))[1]
    )
    with begun(tmp_path):
        nm.Checkpoint("step1").save("model", nn.Linear(2, 2))
    assert threads == {threading.current_thread().name}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"persistent_time_interval": -1}, "persistent_time_interval is -1"),
        ({"persistent_time_interval": "2"}, "persistent_time_interval is '2'"),
        ({"num_of_version_in_retention": 0}, "num_of_version_in_retention is 0"),
        ({"num_of_version_in_retention": 1.5}, "num_of_version_in_retention is 1.5"),
        ({"memory_buffer_size": "much"}, "memory_buffer_size is 'much'"),
        ({"persistent_storage_path": ""}, "is empty"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_name(tmp_path: Path, options: dict, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError) as caught:
        nm.init(**{"persistent_storage_path": tmp_path, **options})
    assert message in str(caught.value)


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: File exists"):
        nm.init(tmp_path / "file")


def test_what_is_asked_too_early_or_too_often_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetseq.nebula.api._script.make", None)
    with pytest.raises(ConfigError, match=r"call hetseq\.nebula\.init"):
        nm.Checkpoint("step1")
    with begun(tmp_path):
        for number in (0, -3, True, 1.0):
            with pytest.raises(ValueError, match="num_of_files"):
                nm.Checkpoint("step1", number)  # type: ignore[arg-type]
        checkpoint = nm.Checkpoint("step1")
        with pytest.raises(ValueError, match="has no names"):
            checkpoint.commit()
        with pytest.raises(TypeError, match=r"state\['f'\]"):
            checkpoint.save("model", {"f": object()})
        checkpoint.save("model", 1)
        with pytest.raises(ValueError, match="'model' already"):
            checkpoint.save("model", 2)
        with pytest.raises(ValueError, match="name"):
            checkpoint.save("", 2)
        with pytest.raises(ValueError, match="name"):
            checkpoint.save("x" * 201, 2)
        checkpoint.commit()
        with pytest.raises(KeyError, match="'model'"):
            nm.get_latest_checkpoint().load("absent") if checkpoint.wait(60) else None


def test_an_empty_script_starts_no_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with begun(tmp_path):
        before = os.listdir("/proc/self/task")
        assert nm.list_checkpoints() == []
        assert os.listdir("/proc/self/task") == before
        save(1)
        assert len(os.listdir("/proc/self/task")) > len(before)
    assert "MB of shared memory for saved states, at most" in caplog.text
