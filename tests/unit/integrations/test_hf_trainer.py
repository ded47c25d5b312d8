"""What HetSeqTrainer refuses and counts; tests/end_to_end/test_hf_trainer.py has its trainings."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hetseq
from hetseq import ConfigError

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None,
    reason="transformers or accelerate is not installed",
)


def test_without_transformers_the_name_says_what_to_install() -> None:
    text = "import sys; sys.modules['transformers'] = None; import hetseq\n"
    text += "try: hetseq.HetSeqTrainer\nexcept hetseq.ConfigError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    told = "HetSeqTrainer needs two packages: pip install 'transformers>=4.57' 'accelerate>=1.1'"
    assert told in done.stdout, done.stderr


@pytest.fixture
def environment() -> Iterator[None]:
    """What the library sets is taken back."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@needs_transformers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"auto_find_batch_size": True}, r"auto_find_batch_size=.* HetSeq halves micro-batches where memory runs out"),
        ({"eval_on_start": True}, r"eval_on_start=.*: call trainer.evaluate\(\) before trainer.train\(\)"),
        ({"include_num_input_tokens_seen": True}, r"include_num_input_tokens_seen=.*: a rank sees its share alone"),
        ({"optim": "lomo"}, r"optim='lomo'\) .* inside backward, before the gradient of the step is complete"),
        ({"torch_compile": True}, r"torch_compile=.*: compile the model before it is given to HetSeqTrainer"),
    ],
)
def test_arguments_that_hetseq_does_not_follow_are_refused_before_the_run(
    given: dict[str, Any], told: str, tmp_path: Path
) -> None:
    from transformers import TrainingArguments

    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, eval_strategy="epoch", **given)
    with pytest.raises(ConfigError, match=told):
        hetseq.HetSeqTrainer(torch.nn.Linear(1, 1), args)


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("given", [{"deepspeed": {}}, {"fsdp": "full_shard"}, {"world_size": 2}])
def test_another_division_of_the_training_is_refused(given: dict[str, Any]) -> None:
    from hetseq.integrations.hf_trainer import _refuse

    plain = {"deepspeed": None, "fsdp": "", "include_num_input_tokens_seen": "no", "optim": "adamw", "world_size": 1}
    _refuse(SimpleNamespace(**plain))
    with pytest.raises(ConfigError):
        _refuse(SimpleNamespace(**{**plain, **{name: value or True for name, value in given.items()}}))


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("environment")
def test_the_precision_is_that_of_the_arguments_and_else_of_the_weights() -> None:
    from hetseq.integrations.hf_trainer import _precision_of

    def found(kind: torch.dtype, **given: bool) -> str | None:
        args = SimpleNamespace(**{"bf16": False, "fp16": False, "tf32": None, **given})
        return _precision_of(args, torch.nn.Linear(1, 1).to(kind))

    assert found(torch.float32, bf16=True) == "bf16"
    assert found(torch.float32, fp16=True) == "fp16"
    assert [found(kind) for kind in (torch.float64, torch.bfloat16, torch.float32)] == ["fp64", "bf16", None]
    assert found(torch.float32, tf32=True) == "tf32"
