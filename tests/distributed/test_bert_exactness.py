"""BERT's two terms with two denominators have the gradient of the global batch, however the rows are spread.

The rows hold the trap in which averaging goes wrong: of the 48 of a step, 40 in a row have no masked word, so many a
rank has sentences and no words. Errors are of the whole gradient, ||g - g0|| / ||g0||.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetseq import config as options
from hetseq.comm.group import Group
from hetseq.parallel.gradient_sync import GradientReducer
from hetseq.task import make_task
from tests.support import bert, oracle
from tests.support.nightly import nightly
from tests.support.ranks import run_ranks
from tests.support.training import Facts, prepared, train

BATCH, ROWS = 48, 110  # an epoch ends with 14 rows
SHARES = {
    1: ["equal"],
    2: ["24,24", "30,18", "47,1", "48,0"],
    3: ["16,16,16", "40,6,2", "46,1,1", "0,47,1"],
    4: ["12,12,12,12", "24,16,6,2", "45,1,1,1", "45,0,3,0"],
}
LIMIT = {"fp64": 1e-14, "fp32": 1e-6}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
Case = tuple[str, int, str]  # shares, cap of a micro-batch, precision


def words(data: Path, case: Case, steps: int, batch: int = BATCH) -> list[str]:
    balance, cap, precision = case
    return [
        "--task", f"{bert.__file__}:RecordingBert", "--data", str(data), "--dropout", "0", "--curriculum", "1000000",
        "--seed", str(oracle.SEED), "--clip-norm", "0", "--lr", "0.1", "--lr-scheduler", "constant", "--no-save",
        "--disable-validation", "--global-batch-size", str(batch), "--batch-size", str(cap), "--balance", balance,
        "--max-update", str(steps), "--precision", precision,
    ]  # fmt: skip


def train_cases(
    group: Group, save_dir: str, data: Path, cases: list[Case], steps: int, batch: int
) -> list[Facts]:  # fmt: skip
    return [train(group, save_dir, words(data, case, steps, batch)) for case in cases]


def reference(data: Path, steps: int, precision: str, batch: int = BATCH) -> oracle.Curve:
    task = make_task(bert.RecordingBert, options.parse(["--data", str(data), "--dropout", "0"]))
    torch.manual_seed(oracle.SEED)
    model = task.build_model().to(DTYPES[precision])
    optimizer = task.build_optimizer([{"params": sorted(model.parameters(), key=lambda p: p.dim() < 2)}])
    assert optimizer is not None
    return oracle.train(
        model, optimizer, bert.columns_of(ROWS), bert.loss_of, batch_of_epoch=lambda _: batch, steps=steps,
        dtype=DTYPES[precision],
    )  # fmt: skip


def check(world_size: int, path: Path, cases: list[Case], steps: int, batch: int = BATCH) -> Facts:
    """All ranks have the gradients of the loop; gives what the first saw in the first case."""
    data = bert.write_folder(path / "data", ROWS)
    task = make_task(bert.RecordingBert, options.parse(["--data", str(data)]))
    assert "sequences" in task.load_dataset("train").__getitems__(range(7)), "ranks pack, the loop pads"
    ranks = run_ranks(train_cases, world_size, prepared(path / "run"), data, cases, steps, batch, timeout_s=300)
    for number, case in enumerate(cases):
        curve = reference(data, steps, case[2], batch)
        for facts in (rank[number] for rank in ranks):
            assert len(facts.gradients) == steps
            for mine, right in zip(facts.gradients, curve.gradients, strict=True):
                error = ((mine - right).norm() / right.norm()).item()
                assert error <= LIMIT[case[2]], f"{world_size} ranks, {case}: {error:.1e}"
        assert len({tuple(rank[number].parameters.tolist()) for rank in ranks}) == 1, "replicas differ"
    first: Facts = ranks[0][0]
    return first


@pytest.mark.parametrize("world_size", [1, 3])
def test_words_and_pairs_have_the_gradient_of_the_global_batch(world_size: int, tmp_path: Path) -> None:
    check(world_size, tmp_path, [(SHARES[world_size][-1], 7, "fp64")], 4)


@pytest.mark.parametrize("world_size", [1, 3])
def test_whole_steps_without_a_masked_word_have_the_gradient_of_their_pairs(world_size: int, tmp_path: Path) -> None:
    columns = bert.columns_of(ROWS)["labels"]
    assert [bool((columns[start : start + 14] >= 0).any()) for start in (0, 14, 28, 42)] == [True, False, False, True]
    facts = check(world_size, tmp_path, [(SHARES[world_size][1 % len(SHARES[world_size])], 5, "fp64")], 5, batch=14)
    # no loss at all, and not one of 0
    assert [sorted(terms or {}) for terms in facts.terms] == [["mlm", "nsp"], ["nsp"], ["nsp"], *[["mlm", "nsp"]] * 2]


def loans(group: Group, save_dir: str, words: list[str]) -> list[list[int] | None]:
    """The sizes of the gradients that were to be made where they are sent; None where that was refused."""
    lend, found = GradientReducer._lend, []

    def seen(reducer: GradientReducer, index: int) -> torch.Tensor | None:
        memory = lend(reducer, index)
        found.append(None if memory is None else list(memory.shape))
        return memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientReducer, "_lend", seen)
        train(group, save_dir, words)
    return found


def test_the_gradient_of_the_vocabulary_is_made_where_it_is_sent(tmp_path: Path) -> None:
    """Once a step: what a second micro-batch finds there is added to. Rows 8 to 49 have no masked word."""
    data, whole = bert.write_folder(tmp_path / "data", ROWS), [bert.VOCAB, bert.CONFIG["hidden_size"]]
    for cap, second in ((24, []), (12, [None])):  # rows of a micro-batch
        case = words(data, ("24,24", cap, "fp64"), 2)
        ranks = run_ranks(loans, 2, prepared(tmp_path / f"run-{cap}"), case, timeout_s=60)
        assert ranks == [[whole, whole, *second], [whole, *second]]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, *nightly(2, 3, 4)])
def test_the_whole_matrix(world_size: int, tmp_path: Path) -> None:
    cases = [(shares, cap, kind) for shares in SHARES[world_size] for cap in (48, 7, 1) for kind in LIMIT]
    check(world_size, tmp_path, cases, 4)


def test_the_mean_of_the_ranks_means_is_wrong(tmp_path: Path) -> None:
    """The twin that must fail: averaged over ranks of 24 rows each, one of which has few masked words."""
    task = make_task(bert.RecordingBert, options.parse(["--data", str(bert.write_folder(tmp_path / "data", ROWS))]))
    torch.manual_seed(oracle.SEED)
    model, columns = task.build_model().double().eval(), bert.columns_of(ROWS)

    def gradient(start: int, stop: int) -> torch.Tensor:
        model.zero_grad()
        bert.loss_of(model, {name: column[start:stop] for name, column in columns.items()}).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    right = gradient(40, 88)
    assert ((gradient(40, 64) + gradient(64, 88)) / 2 - right).norm() / right.norm() > 0.01
