"""A checkout beside this one, and an environment without HetSeq: what a newcomer has before the first command."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.support.docs import ROOT

#: the files that a wheel is built from, and what the manual's commands name
_NEEDED = ("hetseq", "tasks", "preprocessing", "docs/examples", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def checkout(folder: Path) -> Path:
    """Copy the files of the working tree to a folder that does not exist yet."""
    for name in _NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def bare_environment(packages: Path) -> dict[str, str]:
    """The variables of a shell with the Python of this environment and, in `packages`, links to what is installed in it
    except HetSeq: pip has nothing to fetch. An environment made by `python3 -m venv` sees them too."""
    packages.mkdir()
    places = [Path(place) for place in sys.path if place.endswith("site-packages")]
    for entry in (entry for place in places for entry in place.iterdir()):
        if "hetseq" not in entry.name and entry.suffix != ".pth" and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    return {
        "PATH": f"{Path(sys._base_executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(packages),
        "PIP_NO_BUILD_ISOLATION": "false",  # pip reads it as: without isolation
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "OMP_NUM_THREADS": "1",
        "LANG": "C.UTF-8",
    }
