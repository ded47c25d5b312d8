"""Findings about a node from its facts: each ok, a note, a warning or a problem, with a remedy. Pure.

Decides what counts as bad, and words it. It reads nothing from the machine, and formats nothing.

The one idea: a sentence has placeholders such as `<host>` for private values. The terminal fills them in, and the JSON
file to pass on keeps them, so nothing private has to be found and removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hetseq.cluster.rendezvous.interfaces import is_loopback
from hetseq.commands.doctor.facts import Directory, Facts, Limits, Network, Torch
from hetseq.system.torch_builds import pip_line, release_of

LEVELS = ("ok", "note", "warning", "problem")
GIB, MIB = 2**30, 2**20

_OLDEST_TORCH = (2, 10)  # pyproject.toml
_CORES_PER_GPU = 2  # one feeds the device, one fetches batches
_OPEN_FILES, _PROCESSES, _LOCKED = 1024, 512, 64 * MIB
_SHM_LITTLE, _MEMORY_LITTLE = GIB, 2 * GIB
_DISK_FULL, _DISK_LITTLE, _FILES_LITTLE = 64 * MIB, 5 * GIB, 1000
_SYNC_SLOW_S = 0.5
_AHEAD_S, _AHEAD_FAR_S = 1.0, 60.0
_SLOW_LINK = 1000  # Mbit/s
_FADES = 0.85
_OURS = 0.75  # of the usable cores: what other programs should leave


@dataclass(frozen=True)
class Finding:
    """`text` is the observation, `remedy` what to do about it; `private` fills the placeholders in both."""

    level: str
    topic: str
    text: str
    remedy: str = ""
    private: Mapping[str, str] = field(default_factory=dict)

    def filled(self) -> tuple[str, str]:
        """Text and remedy for the user's terminal."""
        text, remedy = self.text, self.remedy
        for place, value in self.private.items():
            text, remedy = text.replace(f"<{place}>", value), remedy.replace(f"<{place}>", value)
        return text, remedy


def judge(facts: Facts) -> list[Finding]:
    """All findings of one node, topic by topic."""
    found = [*_versions(facts), *_torch(facts.torch), *_devices(facts), *_cores(facts), *_memory(facts.limits)]
    found += [*_limits(facts.limits, has_gpu=bool(facts.gpus)), *_network(facts.network), *_secret(facts)]
    found += _clock(facts)
    return found if facts.directory is None else [*found, *_directory(facts.directory)]


def exit_code(findings: list[Finding]) -> int:
    """1 if there is a problem, else 0."""
    return int(any(finding.level == "problem" for finding in findings))


def size(count: float) -> str:
    """Bytes in readable units: 1.5 GiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def _versions(facts: Facts) -> Iterator[Finding]:
    yield Finding("ok", "versions", f"hetseq {facts.hetseq}, Python {facts.python}, numpy {facts.numpy}")


def _torch(torch: Torch) -> Iterator[Finding]:
    if torch.trouble:
        yield Finding(
            "problem",
            "torch",
            "torch does not work here: <trouble>",
            "if a driver hangs, check whether nvidia-smi answers, and restart the node; otherwise reinstall torch",
            {"trouble": torch.trouble},
        )
    if not torch.version:
        return
    built = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.rocm}" if torch.rocm else "for CPUs"
    nccl = f", NCCL {torch.nccl}" if torch.nccl else ""
    yield Finding("ok", "torch", f"torch {torch.version} ({built}{nccl})")
    if not torch.has_gloo:
        yield Finding(
            "problem", "torch", "this torch is built without gloo, through which ranks communicate",
            "install torch from pytorch.org; its builds for Linux have it",
        )  # fmt: skip
    numbers = torch.version.split("+")[0].split(".")[:2]
    if all(number.isdigit() for number in numbers) and tuple(map(int, numbers)) < _OLDEST_TORCH:
        yield Finding(
            "problem", "torch", f"torch {torch.version} is older than 2.10, the oldest that HetSeq supports",
            "pip install --upgrade torch, on all nodes",
        )  # fmt: skip


def _devices(facts: Facts) -> Iterator[Finding]:
    release = release_of(facts.torch.version)
    for device in facts.torch.devices:
        if device.device == "cpu":
            yield Finding("ok", "devices", f"cpu, memory {size(device.memory_bytes)}; no GPU")
            continue
        free = f"{size(device.free_bytes)} of {size(device.memory_bytes)} free"
        yield Finding("ok", "devices", f"{device.device} {device.name}, {free}, capability {device.capability}")
        if not device.is_built_for:
            yield Finding(
                "problem", "devices",
                f"{device.device}: this torch has no code for capability {device.capability}",
                f"install one that has it: {install_torch(facts, release)}; or leave the device, a {device.name}, out"
                " with --devices",
            )  # fmt: skip
        if device.free_bytes < device.memory_bytes / 2:
            yield Finding(
                "warning", "devices", f"{device.device}: another program holds more than half of its memory",
                "find it with nvidia-smi, or leave the device out with --devices",
            )  # fmt: skip
    if facts.gpus_of_driver and facts.torch.devices and not facts.gpus:
        why = "this torch is built for CPUs" if not facts.torch.cuda else "torch sees none of them"
        other = f"install one for its cards: {install_torch(facts, release)}"
        remedy = other if not facts.torch.cuda else "check CUDA_VISIBLE_DEVICES and nvidia-smi"
        yield Finding("warning", "devices", f"the driver has {facts.gpus_of_driver} GPUs, but {why}", remedy)
    for burn in facts.torch.burns:
        speed = 256 / (burn.fixed_s + 256 * burn.per_sample_s)
        yield Finding(
            "ok", "burn-in", f"{burn.device}: {speed:,.0f} samples/s of a small network, {_flops(burn.tflops)}"
        )
        if burn.fade < _FADES:
            yield Finding(
                "warning", "burn-in", f"{burn.device}: it ended at {burn.fade:.0%} of its initial speed",
                "check its temperature, its power limit and other programs on it; --balance auto follows its speed",
            )  # fmt: skip


def install_torch(facts: Facts, release: str) -> str:
    """The command for this release of torch that fits this node's cards; or why there is none."""
    choice = facts.torch_build(release)
    return choice.trouble or pip_line(release, choice.build)


def _flops(tflops: float) -> str:
    return f"{tflops:.2f} TFLOP/s" if tflops >= 1 else f"{1e3 * tflops:.2g} GFLOP/s"


def _cores(facts: Facts) -> Iterator[Finding]:
    limits, usable = facts.limits, facts.usable_cores
    quota = "" if limits.quota is None else f", {limits.quota:g} by the control group"
    yield Finding("ok", "cores", f"{usable:g} usable of {limits.cores} ({limits.affinity} by affinity{quota})")
    yield from _contention(facts)
    if facts.gpus and usable < _CORES_PER_GPU * len(facts.gpus):
        yield Finding(
            "warning", "cores", f"{usable:g} cores for {len(facts.gpus)} GPUs: fewer than {_CORES_PER_GPU} each",
            f"ask the queue for {_CORES_PER_GPU * len(facts.gpus)} cores (in Slurm --cpus-per-task), or data come late",
        )  # fmt: skip
    workers = max(1, len(facts.torch.devices))
    if facts.omp and not (facts.omp.isdigit() and int(facts.omp)):
        yield Finding(
            "warning", "cores", "OMP_NUM_THREADS is not a number above 0, and HetSeq ignores it",
            f"set it to {facts.threads}, or unset it",
        )  # fmt: skip
    elif facts.omp and int(facts.omp) * workers > usable:
        yield Finding(
            "warning", "cores", f"OMP_NUM_THREADS {facts.omp} times {workers} workers is more than {usable:g} cores",
            "unset it: HetSeq divides the usable cores among the workers",
        )  # fmt: skip
    else:
        who = "by OMP_NUM_THREADS" if facts.omp else "the usable cores divided among the workers"
        yield Finding("ok", "cores", f"{facts.threads} threads for each worker, {who}")
    if limits.quota is not None and not facts.omp and facts.threads * workers > usable:
        yield Finding(
            "warning", "cores",
            f"the control group allows {usable:g} cores, but HetSeq would start {facts.threads * workers} threads",
            f"export OMP_NUM_THREADS={max(1, int(usable / workers))}",
        )  # fmt: skip


def _contention(facts: Facts) -> Iterator[Finding]:
    """Other programs on the cores of this job. The load is that of the machine, and says nothing of a part of it."""
    limits, usable, seen = facts.limits, facts.usable_cores, facts.contention
    is_whole = limits.quota is None and limits.affinity == limits.cores
    is_taken = seen is not None and limits.affinity - seen.cores < _OURS * usable
    if not is_taken and not (is_whole and facts.load > usable):
        return
    taken = f"{seen.cores:.1f} of {limits.affinity} cores in use, " if seen else ""
    waiting = f", a program waits for a core {seen.waiting:.0%} of the time" if seen and seen.waiting else ""
    who = "the busiest: <programs>" if seen and seen.programs else "find them with top, outside the container if any"
    yield Finding(
        "warning", "cores",
        f"other programs use this machine: {taken}load {facts.load:.1f} on {limits.cores} cores{waiting}",
        f"{who}; until they end, the measured speeds are too low, and --balance auto adapts to them",
        {"programs": ", ".join(seen.programs)} if seen else {},
    )  # fmt: skip


def _memory(limits: Limits) -> Iterator[Finding]:
    group = "" if limits.memory_limit_bytes is None else f", {size(limits.memory_limit_bytes)} by the control group"
    yield Finding("ok", "memory", f"{size(limits.available_bytes)} available of {size(limits.memory_bytes)}{group}")
    if limits.available_bytes < _MEMORY_LITTLE:
        yield Finding(
            "warning", "memory", "less than 2 GiB of memory is available",
            "ask the queue for more (in Slurm --mem), or end other programs here",
        )  # fmt: skip
    if limits.shm_bytes is None:
        yield Finding(
            "problem", "memory", "there is no /dev/shm, through which loader processes pass their batches",
            "ask the administrator to mount a tmpfs there, or use --num-workers 0 and --memory-buffer-size 0",
        )  # fmt: skip
        return
    yield Finding("ok", "memory", f"/dev/shm {size(limits.shm_free_bytes)} free of {size(limits.shm_bytes)}")
    if limits.shm_free_bytes < _SHM_LITTLE:
        yield Finding(
            "warning", "memory", "less than 1 GiB is free in /dev/shm, which checkpoints and batches pass through",
            "start the container with --shm-size 8g, remove left-over files there, or use --num-workers 0",
        )  # fmt: skip


def _limits(limits: Limits, *, has_gpu: bool) -> Iterator[Finding]:
    def said(count: int | None) -> str:
        return "unlimited" if count is None else str(count)

    locked = "unlimited" if limits.locked_bytes is None else size(limits.locked_bytes)
    words = f"open files {said(limits.open_files)}, processes {said(limits.processes)}, locked memory {locked}"
    yield Finding("ok", "limits", words)
    if limits.open_files is not None and limits.open_files < _OPEN_FILES:
        yield Finding(
            "warning", "limits", f"a process may have {limits.open_files} open files, fewer than {_OPEN_FILES}",
            "run ulimit -n 4096 before the command, or ask the administrator for more",
        )  # fmt: skip
    if limits.processes is not None and limits.processes < _PROCESSES:
        yield Finding(
            "warning", "limits", f"you may have {limits.processes} processes and threads, fewer than {_PROCESSES}",
            "run ulimit -u 4096 before the command, or ask the administrator for more",
        )  # fmt: skip
    if has_gpu and limits.locked_bytes is not None and limits.locked_bytes < _LOCKED:
        yield Finding(
            "note", "limits", f"{locked} of memory may be locked, possibly too little for the libraries of InfiniBand",
            "run ulimit -l unlimited, if the administrator allows it; HetSeq itself locks none",
        )  # fmt: skip


def _network(network: Network) -> Iterator[Finding]:
    chosen = next((one for one in network.addresses if one.address == network.chosen), None)
    kind = chosen.kind if chosen else "loopback" if is_loopback(network.chosen) else "unknown"
    speed = f", {chosen.mbit_per_s} Mbit/s" if chosen and chosen.mbit_per_s else ""
    is_wished = network.wish and not network.trouble and not network.wish.startswith("^")
    why = "chosen by GLOO_SOCKET_IFNAME" if is_wished else "chosen by the default route"
    private = {"interface": chosen.interface if chosen else "-", "address": network.chosen, "host": network.host}
    yield Finding("ok", "network", f"other nodes use <address> of <interface> ({kind}{speed}), {why}", private=private)
    yield from _wish(network, private)
    others = [one for one in network.addresses if one.address != network.chosen and one.kind != "loopback"]
    if others:
        listed = ", ".join(f"{one.interface} {one.address}" for one in others)
        kinds = ", ".join(sorted({one.kind for one in others}))
        yield Finding("ok", "network", f"other addresses ({kinds}): <others>", private={"others": listed})
    if kind == "loopback":
        yield Finding(
            "warning", "network", "this node has no address that another node can reach",
            "connect it to the others' network, or set GLOO_SOCKET_IFNAME to its interface; it can train alone",
        )  # fmt: skip
    elif kind in ("wireless", "containers", "tunnel"):
        yield Finding(
            "warning", "network", f"the other nodes are reached through <interface>, which is {_WAYS[kind]}",
            "set GLOO_SOCKET_IFNAME to a wired interface that the other nodes reach", private,
        )  # fmt: skip
    elif chosen and chosen.mbit_per_s and chosen.mbit_per_s < _SLOW_LINK:
        yield Finding(
            "warning", "network", f"<interface> runs at {chosen.mbit_per_s} Mbit/s, less than 1000",
            "check its cable and its switch, or set GLOO_SOCKET_IFNAME to a faster interface", private,
        )  # fmt: skip
    if network.nccl_wish and not network.wish:
        yield Finding(
            "note", "network", "NCCL_SOCKET_IFNAME is set, but ranks of HetSeq use gloo, which does not read it",
            "set GLOO_SOCKET_IFNAME to one name to choose an interface",
        )  # fmt: skip
    if not network.host_means:
        yield Finding(
            "note", "network", "this host's own name <host> does not resolve here",
            "let nodes meet at an IP address instead of this name", private,
        )  # fmt: skip
    elif all(map(is_loopback, network.host_means)):
        yield Finding(
            "note", "network", "this host's own name <host> means <meaning>, which no other machine can reach",
            "HetSeq gives others <address> instead; use an IP address in --join if they cannot reach that",
            {**private, "meaning": network.host_means[0]},
        )  # fmt: skip


def _wish(network: Network, private: Mapping[str, str]) -> Iterator[Finding]:
    """Mistakes in GLOO_SOCKET_IFNAME."""
    names = list(dict.fromkeys(one.interface for one in network.addresses))
    places = {**private, "wish": network.wish, "interfaces": ", ".join(names)}
    if network.trouble:
        yield Finding(
            "problem", "network",
            "GLOO_SOCKET_IFNAME <wish>: no such interface with an address; there are <interfaces>",
            "set it to <interface>, which has the default route, or unset it", places,
        )  # fmt: skip
    elif network.wish.startswith("^"):
        yield Finding(
            "warning", "network", "GLOO_SOCKET_IFNAME <wish>: gloo takes one name; only NCCL takes lists with ^",
            "unset it, or set it to <interface>, which is used now", places,
        )  # fmt: skip
    elif network.told:
        yield Finding(
            "note", "network", "GLOO_SOCKET_IFNAME <wish>: only the first of several names counts",
            "set it to <interface>, which is used now", places,
        )  # fmt: skip


_WAYS = {"wireless": "a radio link", "containers": "a bridge of containers", "tunnel": "a tunnel"}


def _secret(facts: Facts) -> Iterator[Finding]:
    if facts.secret == "usable":
        yield Finding("ok", "secret", "the secret file exists, and only you can read it")
    elif facts.secret == "missing":
        yield Finding(
            "note", "secret", "there is no secret file yet",
            "the first start of several nodes creates it; without a shared home, copy it to the other nodes with scp",
        )  # fmt: skip
    else:
        yield Finding(
            "problem", "secret", "the secret cannot be used: <trouble>",
            "make it a file owned by you with mode 600, or name another one with --secret-file",
            {"trouble": facts.secret},
        )  # fmt: skip


def _clock(facts: Facts) -> Iterator[Finding]:
    if facts.wall_clock_s < facts.code_s:
        behind = (facts.code_s - facts.wall_clock_s) / 60
        yield Finding(
            "warning", "clock", f"the clock is {behind:.0f} minutes behind the files of HetSeq",
            "set the clock; until then, times in logs and names of runs are wrong",
        )  # fmt: skip
    elif facts.is_clock_kept is False:
        yield Finding(
            "note", "clock", "this clock is not synchronised with a time server",
            "start ntpd or chrony; HetSeq never compares two clocks, but logs are easier to read",
        )  # fmt: skip
    else:
        kept = "synchronised with a time server" if facts.is_clock_kept else "the kernel does not say if synchronised"
        yield Finding("ok", "clock", f"plausible; {kept}")


def _directory(directory: Directory) -> Iterator[Finding]:
    private = {"dir": directory.path, "trouble": directory.trouble}
    if directory.trouble:
        yield Finding(
            "problem", "directory", "<dir> <trouble>",
            "name a directory that exists on all nodes and that you may write to; mount it, if this node lacks it",
            private,
        )  # fmt: skip
    if directory.mode is None:
        return
    kind = directory.kind or "a file system of unknown kind"
    yield Finding("ok", "directory", f"<dir> is on {kind}, mode {directory.mode:04o}", private=private)
    if directory.is_local:
        yield Finding(
            "note", "directory", f"<dir> is on a local file system of this node ({directory.kind})",
            "for several nodes, name a directory on a network mount that all of them have", private,
        )  # fmt: skip
    if directory.mode & 0o022 and not directory.mode & 0o1000:
        yield Finding(
            "warning", "directory", "other users may write to <dir>, and so remove the files of HetSeq there",
            "chmod go-w <dir>, or use a directory inside it with mode 700", private,
        )  # fmt: skip
    promises = (
        (directory.has_one_creator, "problem", "an exclusive create of a file succeeded twice", _ELSEWHERE),
        (directory.has_whole_renames, "problem", "a file was incomplete or absent while it was replaced", _ELSEWHERE),
        (directory.has_links, "note", "it has no hard links that fail when the name is taken", _NO_LINKS),
        (directory.keeps_modes, "warning", "it does not keep the mode of a file", _NO_MODES),
        (directory.sees_at_once, "note", "a file that this node has just created is not listed at once", _LATE),
    )
    for is_kept, level, text, remedy in promises:
        if is_kept is False:
            yield Finding(level, "directory", f"<dir>: {text}", remedy, private)
    if all(is_kept for is_kept, *_ in promises):
        yield Finding(
            "ok", "directory", "exclusive create, hard links, renames, modes and listings work as they should"
        )
    yield from _directory_numbers(directory, private)


_ELSEWHERE = "let nodes meet at tcp://HOST:PORT instead of file://, and keep --save-dir on another file system"
_NO_LINKS = "nothing to do: HetSeq uses mkdir there; a rendezvous at tcp://HOST:PORT needs neither"
_NO_MODES = "keep the secret file elsewhere (--secret-file), and let no other user mount this file system"
_LATE = "expect nodes to find each other some seconds later there, or let them meet at tcp://HOST:PORT"


def _directory_numbers(directory: Directory, private: Mapping[str, str]) -> Iterator[Finding]:
    if directory.free_bytes is not None:
        level = "problem" if directory.free_bytes < _DISK_FULL else "warning"
        if directory.free_bytes < _DISK_LITTLE:
            yield Finding(
                level, "directory", f"only {size(directory.free_bytes)} free in <dir>",
                "make room for at least three checkpoints (hetseq checkpoints prune RUN --keep N removes old ones)",
                private,
            )  # fmt: skip
        else:
            yield Finding("ok", "directory", f"{size(directory.free_bytes)} free")
    if directory.free_files is not None and directory.free_files < _FILES_LITTLE:
        yield Finding(
            "warning", "directory", f"only {directory.free_files} more files fit into <dir>",
            "remove unneeded files, or ask for a larger quota of files", private,
        )  # fmt: skip
    if directory.fsync_s is not None:
        is_slow = directory.fsync_s > _SYNC_SLOW_S
        yield Finding(
            "warning" if is_slow else "ok", "directory",
            f"1 MiB is on the disk after {directory.fsync_s * 1000:.0f} ms",
            "save less often (--save-interval-updates), or to a faster file system" if is_slow else "",
        )  # fmt: skip
    if directory.ahead_s is not None:
        far = abs(directory.ahead_s)
        where = "ahead of" if directory.ahead_s > 0 else "behind"
        if far > _AHEAD_S:
            yield Finding(
                "warning" if far > _AHEAD_FAR_S else "note", "directory",
                f"the clock of the file system is {far:.0f} s {where} the clock of this node",
                "synchronise both with a time server; HetSeq never compares them, but make and people do",
            )  # fmt: skip
        else:
            yield Finding("ok", "directory", "its clock agrees with this node's within a second")
