"""How many samples a step is worth: the estimate against gradients whose scatter is known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from hetseq.balance.noise_scale import NoiseScale, PartialGradient

TRUE = np.array([3.0, 4.0])  # |true|^2 = 25
SCATTER = np.array([10.0, 20.0])  # standard deviations by element: the trace of the covariance is 500
EXPECTED = 500 / 25


SAMPLES = 64


def after(
    steps: int, parts: tuple[int, ...], *, scatter: npt.NDArray[np.float64] = SCATTER, remembered: int = 20
) -> NoiseScale:
    """After steps in which each rank has measured the first so many of its samples."""
    rng, scale = np.random.default_rng(7), NoiseScale(remembered)
    for _ in range(steps):
        gradients = TRUE + scatter * rng.standard_normal((SAMPLES, 2))
        measured, begin = [], 0
        for size in parts:
            part = gradients[begin : begin + size].sum(0) / SAMPLES
            measured.append(PartialGradient(size, float(part @ part)))
            begin += size
        scale.add(measured, samples=SAMPLES, norm=float(np.linalg.norm(gradients.mean(0))))
    return scale


@pytest.mark.parametrize("parts", [(8,), (48, 16), (5, 0, 31)], ids=str)
def test_many_steps_give_the_trace_of_the_covariance_by_the_square_of_the_gradient(parts: tuple[int, ...]) -> None:
    estimated = after(20_000, parts, remembered=20_000).samples
    assert estimated == pytest.approx(EXPECTED, rel=0.05)  # five standard errors of the widest of the three


def test_two_batch_sizes_give_what_the_paper_gives() -> None:
    """McCandlish et al. 2018, appendix A.1: with |G_b|^2 of b samples and |G_B|^2 of B."""
    small, big, scale = 8, SAMPLES, NoiseScale()
    square_of_small, square_of_big = 90.0, 40.0  # of the mean gradients
    for _ in range(5):
        part = PartialGradient(small, square_of_small * (small / big) ** 2)
        scale.add([part], samples=big, norm=square_of_big**0.5)
    true = (big * square_of_big - small * square_of_small) / (big - small)
    trace = (square_of_small - square_of_big) / (1 / small - 1 / big)
    assert scale.samples == pytest.approx(trace / true, rel=1e-12)


def test_nothing_is_said_before_a_few_steps_were_measured() -> None:
    assert after(4, (8,)).samples is None
    assert after(5, (8,)).samples is not None


def test_the_newest_steps_count() -> None:
    scale = after(20, (8,))
    for _ in range(20):
        scale.add([PartialGradient(8, 25.0 * (8 / SAMPLES) ** 2 * 2)], samples=SAMPLES, norm=5.0)
    trace = (2 * 25.0 - 25.0) / (1 / 8 - 1 / SAMPLES)
    assert scale.samples == pytest.approx(trace / (25.0 - trace / SAMPLES))


def test_gradients_without_scatter_have_no_noise_scale() -> None:
    assert after(20, (8,), scatter=np.zeros(2)).samples is None


@pytest.mark.parametrize(
    "part", [PartialGradient(), PartialGradient(SAMPLES, 1.0), PartialGradient(8, float("inf"))], ids=str
)
def test_what_measures_nothing_changes_nothing(part: PartialGradient) -> None:
    scale = after(20, (8,))
    before = scale.samples
    scale.add([part], samples=SAMPLES, norm=1.0)
    assert scale.samples == before
