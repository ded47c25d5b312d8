"""The ledger task at a pace that the test can change during the run, so that waiting for a host takes steps, not hours.

`HETSEQ_TEST_PACE` names a file with the seconds per forward, read from the start of a process on.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from tests.chaos.ledger_task import Ledger

PACE = "HETSEQ_TEST_PACE"


class Paced(Ledger):
    def loss(self, model: torch.nn.Module, sample: Any) -> dict[str, torch.Tensor]:
        time.sleep(float(Path(os.environ[PACE]).read_text()))
        return super().loss(model, sample)
