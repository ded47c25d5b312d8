"""The tests of the repository that need a GPU, as pytest runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

from gpu_sections.section import ROOT, Check, Place, holds, one_line


def checks(place: Place) -> Iterator[Check]:
    """All tests that are marked `gpu`."""
    place.need_gpu()
    files = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    passed = re.search(r"(\d+) passed", lines[-1])
    yield holds("tests marked gpu", done.returncode == 0 and passed is not None,
                seen=one_line("; ".join(failed[:3]) or lines[-1]), expected="all pass")  # fmt: skip
