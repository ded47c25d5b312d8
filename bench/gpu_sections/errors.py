"""Errors of a device: memory that runs out, an assertion, an illegal access, memory that the driver refuses to pin.

Each is made to happen for real, in a run where HetSeq judges it or in a process where torch's words are looked at.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from gpu_sections.runs import PICTURES, PLAIN, SGD, gap, start, told, train
from gpu_sections.section import BENCH, Check, Place, holds, one_line, within

WORDS = ("--task", PICTURES, *PLAIN, *SGD, "--precision", "fp64", "--global-batch-size", 96, "--max-update", 6)


def checks(place: Place) -> Iterator[Check]:
    """Exhaustion and assertion in runs; on a GPU also illegal access and refused registration, alone."""
    one = place.devices(1)
    calm = start(place, "calm", *WORDS, devices=one)
    halved = train(place, "exhausted", *WORDS, "--fault", "exhaust", "--fits", 30, devices=one)
    yield told("smaller micro-batches", halved.logs, "[batch-halved]")
    yield within("losses after exhaustion", gap(calm.end(), halved), 1e-10)
    asserted = train(place, "assertion", *WORDS, "--fault", "assert", devices=one, code=1)
    yield told("a failed assertion ends the run", asserted.output, "[worker-raised]")
    if not place.is_gpu:
        return
    yield from in_process(place, "illegal access", ILLEGAL, "an illegal memory access was encountered; again: True")
    yield from in_process(place, "refused registration", REFUSED, "refused; the next kernel runs: True")


ILLEGAL = """
import torch
from gpu_sections import faults
torch.cuda.set_device({device!r})
try:
    faults.write_to_nowhere()
    torch.cuda.synchronize()
    print("no error")
except torch.AcceleratorError as error:
    first = str(error).partition("\\n")[0].removeprefix("CUDA error: ")
    try:
        torch.zeros(1, device="cuda")
        again = False
    except torch.AcceleratorError:
        again = True
    print(f"{{first}}; again: {{again}}")
"""

# As HetSeq pins the memory of a snapshot: the error that a refusal leaves behind is raised by a kernel of no account.
REFUSED = """
import torch
torch.cuda.set_device({device!r})
torch.zeros(1, device="cuda")
code = int(torch.cuda.cudart().cudaHostRegister(0, 0, 0))
raised = "nothing"
try:
    torch.zeros(1, device="cuda").add_(1)
except RuntimeError as error:
    raised = str(error).partition("\\n")[0]
print(f"code {{code}}; the kernel after it raised: {{raised}}")
print(("refused" if code else "taken") + f"; the next kernel runs: {{torch.ones(3, device='cuda').sum().item() == 3}}")
"""


def in_process(place: Place, name: str, script: str, expected: str) -> Iterator[Check]:
    """The last line that a script prints in a process of its own; those before it are figures."""
    place.begin(name)
    command = [sys.executable, "-c", script.format(device=place.device)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=BENCH, check=False)
    lines = done.stdout.splitlines() or [one_line(done.stderr[-300:]) or f"ended with {done.returncode}"]
    for line in lines[:-1]:
        yield Check(f"{name}, in torch", line)
    yield holds(name, lines[-1] == expected, seen=lines[-1], expected=expected)
