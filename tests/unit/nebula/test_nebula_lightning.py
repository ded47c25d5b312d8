"""Lightning itself saves and goes on through `hetseq.nebula`; without Lightning these tests are skipped."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetseq.nebula as nm
from hetseq.errors import CheckpointRefused
from tests.support.nebula import tags

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # what Lightning warns of is its affair

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pl = pytest.importorskip("lightning.pytorch")
    from hetseq.nebula.lightning import NebulaCallback, NebulaCheckpointIO


class Line(pl.LightningModule):
    """Learns y = 2x; momentum and schedule make its state more than its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 1, "nested": {"rate": 0.1}})
        self.layer = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (x,) = batch
        loss = ((self.layer(x) - 2 * x) ** 2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process in which nobody has called init."""
    monkeypatch.setattr("hetseq.nebula.api._script.root", None)
    yield
    nm.close()


def fit(epochs: int, root: Path, *callbacks: Any, ckpt_path: Any = None, **options: Any) -> tuple[Any, Line]:
    """A trainer after so many epochs of 4 steps, and the model."""
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.arange(8.0).view(8, 1) / 8)
    model = Line()
    trainer = pl.Trainer(
        max_epochs=epochs,
        default_root_dir=root,
        plugins=[NebulaCheckpointIO()],
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2), ckpt_path=ckpt_path)
    return trainer, model


def values(model: nn.Module) -> list[float]:
    return [float(value) for tensor in model.state_dict().values() for value in tensor.flatten()]


def test_a_run_that_goes_on_from_a_tag_ends_as_one_that_was_never_stopped(tmp_path: Path) -> None:
    _, whole = fit(4, tmp_path / "whole", NebulaCallback(dirpath=tmp_path / "whole"))
    fit(2, tmp_path / "parts", NebulaCallback(dirpath=tmp_path / "parts"))
    latest = nm.get_latest_checkpoint(tmp_path / "parts")
    assert (latest.tag, latest.names) == ("epoch=1-step=8", ["checkpoint"])
    named = tmp_path / "parts" / "epoch=1-step=8.ckpt"  # as ModelCheckpoint calls it; there is no such file
    for path in (named, latest.path, tmp_path / "parts"):
        _, again = fit(4, tmp_path / "again", NebulaCallback(dirpath=tmp_path / "again"), ckpt_path=path)
        assert values(again) == values(whole)
    _, fresh = fit(2, tmp_path / "fresh", NebulaCallback(dirpath=tmp_path / "fresh"))
    assert values(fresh) != values(whole)


def test_what_lightning_removes_goes_and_what_it_keeps_stays(tmp_path: Path) -> None:
    callback = NebulaCallback(dirpath=tmp_path, save_top_k=2, monitor="loss", mode="min", save_last=True)
    fit(5, tmp_path, callback)
    kept = {Path(path).name.removesuffix(".ckpt") for path in [*callback.best_k_models, callback.last_model_path]}
    assert set(tags(tmp_path)) == kept
    assert len(callback.best_k_models) == 2
    best = NebulaCheckpointIO().load_checkpoint(callback.best_model_path)
    assert best["callbacks"][callback.state_key]["best_model_score"].equal(callback.best_model_score)
    assert best["hyper_parameters"] == {"width": 1, "nested": {"rate": 0.1}}


def test_the_only_tag_is_not_removed_before_the_next_one_is_there(tmp_path: Path) -> None:
    plugin = NebulaCheckpointIO()
    plugin.save_checkpoint({"step": 1}, tmp_path / "step=1.ckpt")
    nm.flush_persistence()
    plugin.remove_checkpoint(tmp_path / "step=1.ckpt")
    assert tags(tmp_path) == ["step=1"]
    plugin.save_checkpoint({"step": 2}, tmp_path / "step=2.ckpt")
    plugin.teardown()
    assert tags(tmp_path) == ["step=2"]


def test_the_callback_says_where_tags_go_and_an_interval_keeps_them_in_memory(tmp_path: Path) -> None:
    config = {"persistent_storage_path": tmp_path / "place", "persistent_time_interval": 1e9}
    callback = NebulaCallback(
        dirpath=tmp_path / "elsewhere", every_n_train_steps=1, save_top_k=-1, config_params=config
    )
    fit(2, tmp_path, callback)
    assert tags(tmp_path / "place") == ["epoch=1-step=8", "epoch=0-step=1"]  # the first is due, the last the end's
    assert not (tmp_path / "elsewhere").exists() or not list((tmp_path / "elsewhere").iterdir())


def test_with_a_monitor_every_tag_goes_to_the_disk_whatever_the_interval(tmp_path: Path) -> None:
    config = {"persistent_storage_path": tmp_path, "persistent_time_interval": 1e9}
    callback = NebulaCallback(dirpath=tmp_path, save_top_k=-1, monitor="loss", config_params=config)
    fit(3, tmp_path, callback)
    assert tags(tmp_path) == ["epoch=2-step=12", "epoch=1-step=8", "epoch=0-step=4"]
    assert NebulaCheckpointIO().load_checkpoint(callback.best_model_path)["global_step"] > 0


def test_storage_options_are_those_of_nebula(tmp_path: Path) -> None:
    trainer, _ = fit(1, tmp_path, NebulaCallback(dirpath=tmp_path, save_top_k=0))
    options = {"is_best": True, "persist_path": tmp_path / "best"}
    trainer.save_checkpoint(tmp_path / "any" / "best.ckpt", storage_options=options)
    nm.flush_persistence()
    assert tags(tmp_path / "best") == ["best"]
    with pytest.raises(TypeError, match="storage_options"):
        trainer.save_checkpoint(tmp_path / "x.ckpt", storage_options={"fast": True})


def test_a_pickle_is_never_opened_and_a_missing_tag_is_named(tmp_path: Path) -> None:
    torch.save({"state_dict": {}}, tmp_path / "old.ckpt")
    with pytest.raises(CheckpointRefused, match=r"old\.ckpt is a file"):
        NebulaCheckpointIO().load_checkpoint(tmp_path / "old.ckpt")
    with pytest.raises(FileNotFoundError, match="no complete tag 'new'"):
        NebulaCheckpointIO().load_checkpoint(tmp_path / "new.ckpt")


def test_the_callback_needs_the_plugin(tmp_path: Path) -> None:
    trainer = pl.Trainer(max_epochs=1, callbacks=[NebulaCallback(dirpath=tmp_path)], logger=False, accelerator="cpu")
    with pytest.raises(TypeError, match=r"plugins=\[NebulaCheckpointIO"):
        trainer.fit(Line(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2, 1))))
