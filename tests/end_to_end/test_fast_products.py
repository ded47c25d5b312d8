"""Workers on a CPU multiply by the faster library, and a task that wants the other one has the last word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetseq.system import matmul_backend as products
from tests.support.commands import WarmLauncher
from tests.support.refusals import SQUARES, TWO, train, write_task


def chosen() -> str:
    """What a process that computes on this CPU ends up with."""
    before = torch.get_float32_matmul_precision()
    try:
        products.multiply_by_the_faster_library()
        return torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.slow
@pytest.mark.parametrize("own", [None, "highest"])
def test_a_worker_has_chosen_before_the_model_is_built(warm: WarmLauncher, tmp_path: Path, own: str | None) -> None:
    seen = tmp_path / "seen"
    note = f'open({str(seen)!r}, "a").write(torch.get_float32_matmul_precision() + " "); '
    wish = f"torch.set_float32_matmul_precision({own!r}); " if own else ""
    task = write_task(
        tmp_path,
        build_model=f"{note}{wish}return torch.nn.Linear(3, 1)",
        loss=f'{note}return {{"loss": {SQUARES}.sum()}}',
    )
    assert train(warm, tmp_path, "--task", task, *TWO).code == 0
    assert set(seen.read_text().split()) == {chosen(), own or chosen()}
