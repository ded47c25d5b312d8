"""The program that `hetseq ssh --install` sends to each host: tells what is there, and runs the commands it gets back.

It decides nothing (`install_plan` does), and needs Python 3.10 with its standard library alone, since HetSeq is not
there yet: it imports nothing of HetSeq, and is sent as text. Messages are lines of JSON on standard input.

The one idea: the commands end when the connection closes, as a run's launcher does (`remote`).
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import os
import platform
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

#: prefix of the one line on standard output that is for the near end
MARK = "hetseq host agent: "
#: what `hetseq ssh --install` did, in the environment
MARKER = "hetseq-install.json"
_ASK_S, _LOOK_S, _END_S = 20.0, 0.2, 5.0
_KFD = Path("/sys/class/kfd/kfd/topology/nodes")


def main() -> int:
    """Report facts, wait for the order, carry it out; returns the code of the first command that fails."""
    asked = json.loads(sys.stdin.buffer.readline() or "null")
    if asked is None:
        return 1
    folder = Path(os.path.abspath(os.path.expanduser(asked["env"])))
    place = next(parent for parent in folder.parents if parent.is_dir())
    claim = place / f".hetseq-{asked['token']}"
    owner, trouble = _claimed(claim, asked["name"])
    try:
        facts = {**facts_of(folder, place), "owner": owner, "trouble": trouble}
        sys.stdout.write(f"{MARK}{json.dumps(facts)}\n")
        sys.stdout.flush()
        order = json.loads(sys.stdin.buffer.readline() or "null")
        return carry_out(order, folder) if order else 0
    finally:
        if owner == asked["name"]:
            claim.unlink(missing_ok=True)


def _claimed(claim: Path, name: str) -> tuple[str, str]:
    """The first host that came to this folder: another one where two hosts share it. And why nothing can be written."""
    try:
        os.symlink(name, claim)  # at once with its content, on a network mount too
    except FileExistsError:
        return os.readlink(claim), ""
    except OSError as error:
        return "", f"{claim.parent} cannot be written: {error.strerror}"
    return name, ""


def facts_of(folder: Path, place: Path) -> dict[str, Any]:
    """What the plan for this host depends on; `place` is the folder above `folder` that is there."""
    has_python = os.access(folder / "bin" / "python", os.X_OK)
    found = dict[str, str]()
    if has_python:
        paths = [str(path) for path in folder.glob("lib/python*/site-packages")]
        for one in importlib.metadata.distributions(path=paths):
            found[re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower()] = one.version
    if torch := _torch_in(folder):
        found["torch"] = torch
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "machine": platform.machine(),
        "host": socket.gethostname(),
        "folder": str(folder),
        "has_python": has_python,
        "is_foreign": not has_python and folder.exists() and (not folder.is_dir() or any(folder.iterdir())),
        "installed": found,
        "marker": _marker(folder),
        "free_bytes": shutil.disk_usage(place).free,
        **cards(),
    }


def _torch_in(folder: Path) -> str:
    """The version of torch with its build tag, which the wheels of some indexes have in this file alone."""
    for path in folder.glob("lib/python*/site-packages/torch/version.py"):
        if found := re.search(r"^__version__\s*(?::.*)?=\s*['\"](.+?)['\"]", path.read_text(), re.M):
            return found[1]
    return ""


def _marker(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / MARKER).read_text()))
    except (OSError, ValueError):
        return {}


def cards() -> dict[str, Any]:
    """The GPUs by their drivers: (name, compute capability) of NVIDIA's, the driver, and whether AMD's are there."""
    rows = _nvidia("driver_version,name,compute_cap") or _nvidia("driver_version,name")
    kfd = (path / "gpu_id" for path in _KFD.glob("*")) if _KFD.is_dir() else ()
    return {
        "nvidia": [(row[1], row[2] if len(row) > 2 else "") for row in rows if len(row) > 1],
        "driver": rows[0][0] if rows else "",
        "has_amd": any(path.is_file() and path.read_text().strip() not in ("", "0") for path in kfd),
    }


def _nvidia(query: str) -> list[list[str]]:
    """The rows of nvidia-smi; none if it is not there, fails or hangs."""
    words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return (
        [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()] if not done.returncode else []
    )


def carry_out(order: dict[str, Any], folder: Path) -> int:
    """Write the files, run the commands one after the other, and note at the end what was done."""
    with tempfile.TemporaryDirectory(prefix="hetseq-") as place:
        for name, content in order["files"].items():
            (Path(place) / name).write_bytes(base64.b64decode(content))
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for words in order["commands"]:
            if code := _run([word.replace("{files}", place) for word in words]):
                return code
    (folder / MARKER).write_text(json.dumps(order["marker"]) + "\n")
    return 0


def _run(words: list[str]) -> int:
    """The exit code of a command; it is ended when standard input closes."""
    child = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
    while child.poll() is None:
        readable, _, _ = select.select([0], [], [], _LOOK_S)
        if readable and not os.read(0, 65536):
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
            return 1
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main())
