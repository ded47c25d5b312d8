"""What `hetseq ssh --install` does on each host: from the facts of all hosts to the commands of one. Pure.

Opens no connection and runs nothing; `host_agent` tells the facts and runs the commands, `install` carries both. Hosts
that share the folder are one: the first of them installs, for the cards of all.

The one idea: the plan names what is missing, so a second time there is nothing to do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetseq.system.torch_builds import ROCM, Choice, build_for, capability_of, index_of, release_of, tag_of

#: what a host answered, see host_agent.facts_of
HostFacts = Mapping[str, Any]

_GIB = 2**30
_ROOM = {"cpu": 2 * _GIB}  # for torch and the rest, unpacked and while they are unpacked
_ROOM_GPU = 8 * _GIB


@dataclass(frozen=True)
class Wanted:
    """What every host gets: the versions of this node. `packages`: the only source of packages, or None."""

    pins: Mapping[str, str]  # torch with its build tag here
    wheel: str  # file name of HetSeq's wheel
    digest: str
    pip: str  # file name of pip's wheel
    packages: str | None = None

    @property
    def torch(self) -> str:
        """The release of torch."""
        return release_of(self.pins["torch"])


@dataclass(frozen=True)
class Plan:
    """The commands for a host, and what they are for in one line; a `refusal` in place of both if it cannot be done.

    `owner`: the host that does it for this one. In a command, `{files}` is the folder of the wheels.
    """

    about: str = ""
    commands: tuple[tuple[str, ...], ...] = ()
    marker: Mapping[str, str] | None = None
    owner: str = ""
    refusal: str = ""


def plan_all(wanted: Wanted, hosts: Mapping[str, HostFacts]) -> dict[str, Plan]:
    """The plan of each host."""
    plans, groups = {}, dict[str, list[str]]()
    for name, facts in hosts.items():
        groups.setdefault(facts["owner"] or name, []).append(name)
    for owner, names in groups.items():
        first, *others = sorted(names, key=lambda name: name != owner)
        choice = choose(wanted, [hosts[name] for name in names])
        plans[first] = plan(wanted, hosts[first], choice, is_shared=bool(others))
        for name in others:
            plans[name] = Plan(f"shares {hosts[name]['folder']} with {first}, which installs it", owner=first)
    return plans


def choose(wanted: Wanted, hosts: list[HostFacts]) -> Choice:
    """The build of torch for the cards of these hosts."""
    capabilities = [capability_of(capability) for facts in hosts for _, capability in facts["nvidia"]]
    drivers = [int(major) for facts in hosts if (major := facts["driver"].partition(".")[0]).isdigit()]
    unknown = [(8, 0)] if any(not capability for facts in hosts for _, capability in facts["nvidia"]) else []
    return build_for(
        [*capabilities, *unknown], wanted.torch, driver=min(drivers, default=None),
        has_amd=any(facts["has_amd"] for facts in hosts),
    )  # fmt: skip


def plan(wanted: Wanted, facts: HostFacts, choice: Choice, *, is_shared: bool = False) -> Plan:
    """What is missing on one host."""
    installed, build, folder = facts["installed"], choice.build, facts["folder"]
    if facts["trouble"]:
        return Plan(refusal=f"{facts['trouble']}: name another folder with --env")
    if choice.trouble:
        return Plan(refusal=choice.trouble + (", or give --env a folder that these hosts do not share" * is_shared))
    if facts["is_foreign"]:
        return Plan(
            refusal=f"{folder} exists and is no virtual environment: name another folder with --env, or remove it"
        )
    python = f"{folder}/bin/python"
    pip = (
        python,
        "-u",
        f"{{files}}/{wanted.pip}/pip",
        "install",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
    )
    commands: list[tuple[str, ...]] = []
    todo = []
    if not facts["has_python"]:
        commands.append((facts["executable"], "-m", "venv", "--without-pip", folder))
        todo.append(f"{folder} with Python {facts['python']}")
    has_torch = installed.get("torch", "")
    present = tag_of(has_torch) if wanted.packages is None else facts["marker"].get("build", build)
    is_other_build = bool(has_torch) and present != build
    if release_of(has_torch) != wanted.torch or is_other_build:
        # torch alone comes from its index, but for ROCm: only there is what it needs
        alone = () if build == ROCM else ("--no-deps",)
        again = ("--force-reinstall",) if is_other_build else ()
        index = _source(wanted) or ("--index-url", index_of(build))
        commands.append((*pip, *alone, *again, *index, f"torch=={wanted.torch}"))
        is_too_old = build == "cpu" and facts["nvidia"]
        todo.append(f"torch {wanted.torch} ({build}{', as no build has code for its card' if is_too_old else ''})")
    missing = [
        f"{name}=={version}"
        for name, version in wanted.pins.items()
        if name != "torch" and installed.get(_plain(name)) != version
    ]
    marker = {"wheel": wanted.digest, "build": build}
    if commands or missing or "pip" not in installed or facts["marker"].get("build") != build:
        everything = [f"{name}=={version}" for name, version in wanted.pins.items() if name != "torch"]
        commands.append((*pip, *_source(wanted), f"torch=={wanted.torch}", *everything, f"{{files}}/{wanted.pip}"))
        todo += missing
    if "hetseq" not in installed or facts["marker"].get("wheel") != wanted.digest:
        commands.append((*pip, "--no-deps", "--no-index", "--force-reinstall", f"{{files}}/{wanted.wheel}"))
        todo.append(wanted.wheel.removesuffix("-py3-none-any.whl").replace("-", " "))
    if not commands:
        return Plan(f"nothing to do: {folder} has torch {has_torch} and the rest already")
    room = _ROOM.get(build, _ROOM_GPU)
    if not has_torch and facts["free_bytes"] < room:
        return Plan(
            refusal=f"{facts['free_bytes'] / _GIB:.1f} GiB are free in {folder}, and torch with the rest takes about"
            f" {room // _GIB}: make room, or name another folder with --env"
        )
    commands.append((python, "-m", "hetseq", "--version"))
    return Plan(", ".join(todo) or "what was left unfinished", tuple(commands), marker)


def _source(wanted: Wanted) -> tuple[str, ...]:
    """Where pip looks; nothing for the places that it is configured for."""
    if wanted.packages is None:
        return ()
    if re.match(r"https?://", wanted.packages):
        return ("--index-url", wanted.packages)
    return ("--no-index", "--find-links", wanted.packages)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
