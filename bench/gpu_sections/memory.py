"""Memory runs out: in a share, between ranks when gradients travel, while a sample is moved, and in validation.

Refusals are real: requests that no device can meet, and on a GPU also a limit for this process that real work exceeds.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpu_sections.runs import PICTURES, PLAIN, SGD, Run, Wanted, gap, told, train_all
from gpu_sections.section import Check, Place, within

WITHOUT_VALIDATION = ("--task", PICTURES, *PLAIN, *SGD)
VALIDATING = tuple(word for word in WITHOUT_VALIDATION if word != "--disable-validation")
SMALL = ("--precision", "fp64", "--global-batch-size", 96, "--max-update", 8, "--fits", 20)
#: some 3 MiB a picture and its gradients, so that a GiB holds a few hundred of 1,024
LARGE = ("--side", 64, "--width", 32, "--global-batch-size", 1024, "--max-update", 4)
LIMIT = ("--mib", 1024)


def checks(place: Place) -> Iterator[Check]:
    """Every place in which memory may run out, each in a run that must give the losses of one with memory enough."""
    one, two = place.devices(1), place.devices(2)
    small = (*WITHOUT_VALIDATION, *SMALL)
    wanted = [
        Wanted("enough", (*VALIDATING, *SMALL), one),
        Wanted("late", (*small, "--fault", "exhaust-late", "--bucket-cap-mb", "0.0001", "--balance", "equal"), two),
        Wanted("placing", (*small, "--fault", "exhaust-place"), one),
        Wanted("valid", (*VALIDATING, *SMALL, "--fault", "exhaust-valid"), one),
    ]
    if place.is_gpu:
        large = (*WITHOUT_VALIDATION, *LARGE)
        wanted += [
            Wanted("large", (*VALIDATING, *LARGE, "--batch-size", 64), one),
            Wanted("learned", (*large, *LIMIT), one),
            Wanted("halved", (*large, *LIMIT, "--batch-size", 1024), one),
            Wanted("large-valid", (*VALIDATING, *LARGE, *LIMIT), one),
            Wanted("workers", (*large, *LIMIT, "--batch-size", 1024, "--num-workers", 2), one),
        ]
    runs = train_all(place, wanted)
    for name in ("late", "placing", "valid"):
        yield told(f"{name}: smaller micro-batches", runs[name].logs, "[batch-halved]")
        yield within(f"{name}: losses, nats", gap(runs["enough"], runs[name]), 1e-10)
    yield within("valid: loss of validation, nats", abs(valid_loss(runs["enough"]) - valid_loss(runs["valid"])), 1e-10)
    if not place.is_gpu:
        return
    for name in ("halved", "workers"):
        yield told(f"{name}: smaller micro-batches", runs[name].logs, "[batch-halved]")
    for name in ("learned", "halved", "large-valid", "workers"):
        yield within(f"{name}: losses, nats", gap(runs["large"], runs[name]), 1e-4)  # fp32, other micro-batches
    yield within(
        "large-valid: loss of validation, nats", abs(valid_loss(runs["large"]) - valid_loss(runs["large-valid"])), 1e-4
    )


def valid_loss(run: Run) -> float:
    """The loss of the last validation, in nats."""
    return float(run.validations[-1]["valid_loss"])
