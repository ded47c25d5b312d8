"""Collects the facts of this machine: kernel, environment, name server, and a child process that imports torch.

Gets an answer or an error before a deadline, whatever hangs: a GPU driver, a name server, a network mount. It judges
nothing.

The one idea: a question that may hang is asked in a thread or a process that is left behind after its deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, TypeVar

import hetseq
from hetseq.cluster.rendezvous.interfaces import VARIABLE, chosen_address, interfaces, is_loopback, outward_address
from hetseq.cluster.rendezvous.secret import SecretError, load_secret, secret_file
from hetseq.cluster.rendezvous.sockets import AddressError
from hetseq.commands.doctor.contention import watch
from hetseq.commands.doctor.directory_trial import examine
from hetseq.commands.doctor.facts import Directory, Facts, Limits, NamedAddress, Network, Torch, torch_from_json
from hetseq.commands.ssh.host_agent import cards
from hetseq.launch.worker_processes import threads_per_worker
from hetseq.system import host_memory

TORCH_S = 90.0  # to import it from a slow disk and to start the drivers of all devices
DIRECTORY_S = 60.0
_NAME_S = 8.0
_END_S = 2.0
_MOST_DEVICES = 16  # burn-ins one after the other before the child counts as stuck
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_NET = Path("/sys/class/net")
_T = TypeVar("_T")


def gather(*, directory: Path | None, seconds: float, secret: str | None) -> Facts:
    """The facts of this node. `seconds` of burn-in per device; `secret` is the file given by --secret-file."""
    load, contention = os.getloadavg()[0], watch()  # first, because the burn-in would raise both
    by_driver = cards()
    facts = Facts(
        hetseq=hetseq.__version__,
        python=platform.python_version(),
        numpy=importlib.metadata.version("numpy"),
        torch=ask_torch(seconds=seconds, threads=threads_per_worker(1)),
        limits=limits(),
        network=network(),
        secret=secret_state(secret),
        wall_clock_s=time.time(),
        code_s=max(file.stat().st_mtime for file in Path(hetseq.__file__).parent.rglob("*.py")),
        is_clock_kept=_is_clock_kept(),
        omp=os.environ.get("OMP_NUM_THREADS", ""),
        load=load,
        contention=contention,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        gpus_of_driver=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        capabilities=tuple(capability for _, capability in by_driver["nvidia"]),
        driver=by_driver["driver"],
        has_amd=by_driver["has_amd"],
        directory=None if directory is None else examine_in_time(directory),
    )
    return replace(facts, threads=threads_per_worker(max(1, len(facts.torch.devices))))


def within(limit_s: float, work: Callable[[], _T]) -> _T | None:
    """The result of `work`; None if it raises OSError, or takes more than `limit_s` seconds and is left behind."""
    found: list[_T] = []

    def run() -> None:
        with contextlib.suppress(OSError):
            found.append(work())

    thread = threading.Thread(target=run, name="question", daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else None


def examine_in_time(path: Path) -> Directory:
    """The tests of a directory, or a trouble that says its mount hangs."""
    found = within(DIRECTORY_S, lambda: examine(path))
    return found or Directory(str(path), trouble=f"did not answer within {DIRECTORY_S:.0f} s")


# torch


def ask_torch(
    *, seconds: float, threads: int, limit_s: float = TORCH_S, module: str = "hetseq.commands.doctor.torch_child"
) -> Torch:
    """The facts that a child process prints before `limit_s` plus the time of its burn-in."""
    words = [sys.executable, "-m", module, f"{seconds:g}", str(threads)]
    limit_s += 2 * _MOST_DEVICES * seconds
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=errors)
        try:
            code = child.wait(limit_s)
            trouble = "" if code == 0 else _last_line(errors) or f"ended with code {code}"
        except subprocess.TimeoutExpired:
            trouble = f"did not finish within {limit_s:.0f} s"
        finally:
            _end(child)
        return read_torch(_lines(out), trouble)


def read_torch(lines: list[str], trouble: str) -> Torch:
    """The facts from the lines of the child, and the piece of work in which it failed, if it did."""
    told: dict[str, object] = {}
    for line in lines:
        with contextlib.suppress(ValueError):
            told.update(json.loads(line))
    if trouble:
        place = "the burn-in" if "devices" in told else "the drivers of the devices" if told else "import torch"
        told["trouble"] = f"{place}: {trouble}"
    return torch_from_json(told)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a child that still runs; a child stuck in a driver cannot be killed, and is left behind."""
    if child.poll() is None:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_S)


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").splitlines()


def _last_line(file: IO[bytes]) -> str:
    return next((line.strip() for line in reversed(_lines(file)) if line.strip()), "")


# kernel


def limits() -> Limits:
    """The limits of this process."""
    shm = within(_NAME_S, lambda: os.statvfs("/dev/shm"))
    machine = host_memory.machine_bytes()
    limit, _ = host_memory.group_memory()
    return Limits(
        cores=os.cpu_count() or 1,
        affinity=len(os.sched_getaffinity(0)),
        quota=_quota(),
        memory_bytes=machine,
        memory_limit_bytes=limit if limit is not None and limit < machine else None,
        available_bytes=host_memory.available_bytes(),
        shm_bytes=None if shm is None else shm.f_blocks * shm.f_frsize,
        shm_free_bytes=0 if shm is None else shm.f_bavail * shm.f_frsize,
        open_files=_soft(resource.RLIMIT_NOFILE),
        processes=_soft(resource.RLIMIT_NPROC),
        locked_bytes=_soft(resource.RLIMIT_MEMLOCK),
    )


def _soft(number: int) -> int | None:
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft


def _quota() -> float | None:
    """Cores that the control groups allow; None for no limit."""
    found = []
    for file in host_memory.group_files("cpu", "cpu.max", "cpu.cfs_quota_us"):
        with contextlib.suppress(OSError, ValueError):
            words = file.read_text().split()
            period = words[1] if len(words) > 1 else file.with_name("cpu.cfs_period_us").read_text()
            if int(words[0]) > 0:
                found.append(int(words[0]) / int(period))
    return min(found, default=None)


def _is_clock_kept() -> bool | None:
    """Whether the kernel's clock follows an NTP server, by adjtimex(2), which only reads if modes is 0."""
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    if adjtimex is None:
        return None
    state = adjtimex(ctypes.create_string_buffer(512))  # struct timex has 208 bytes; modes, its first field, is 0
    return None if state < 0 else state != _TIME_ERROR


# network


def network() -> Network:
    """Addresses of this node, and the one that HetSeq would give to other nodes."""
    wish = os.environ.get(VARIABLE, "")
    told: list[str] = []
    default, trouble = outward_address(), ""
    try:
        chosen = chosen_address(default, wish or None, tell=told.append)
    except AddressError as error:
        chosen, trouble = default, str(error)
    host = socket.gethostname()
    found = within(_NAME_S, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)) or []
    return Network(
        host=host,
        addresses=tuple(
            NamedAddress(one.name, one.address, kind_of(one.name, one.address), _speed(one.name))
            for one in interfaces()
        ),
        chosen=chosen,
        wish=wish,
        told="; ".join(told),
        trouble=trouble,
        host_means=tuple(dict.fromkeys(str(address[0]) for *_, address in found)),
        nccl_wish=os.environ.get("NCCL_SOCKET_IFNAME", ""),
    )


def kind_of(name: str, address: str) -> str:
    """The kind of an interface, by the kernel's folder and by the usual names."""
    folder = _NET / name
    if is_loopback(address):
        return "loopback"
    if (folder / "wireless").exists() or name.startswith("wl"):
        return "wireless"
    if _text(folder / "type") == "32" or name.startswith("ib"):  # ARPHRD_INFINIBAND
        return "infiniband"
    if re.match(r"(docker|br-|veth|virbr|cni|flannel|cali|podman|lxc|lxdbr)", name):
        return "containers"
    if re.match(r"(tun|tap|wg|tailscale|ppp|zt)", name):
        return "tunnel"
    return "wired"


def _speed(name: str) -> int | None:
    """Megabits per second; None if the kernel does not know, as for virtual interfaces."""
    text = _text(_NET / name / "speed")
    return int(text) if text.isdigit() and int(text) else None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def secret_state(path: str | None) -> str:
    """`usable`, `missing`, or why the secret file cannot be used; its content does not leave this function."""
    try:
        if not os.path.lexists(secret_file(path)):
            return "missing"
        load_secret(secret_file(path), create=False, patience_s=0.0)
    except SecretError as error:
        return str(error)
    return "usable"
