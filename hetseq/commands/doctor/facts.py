"""What the doctor knows of one node: frozen records, as they travel between nodes, without a judgement. Pure.

Responsible for the names and units of the facts, and for turning them into JSON and back. It refuses to ask a machine
(`collect`, `torch_child`, `directory_trial`) and to judge (`node_findings`).

The one idea: a finding is a function of these records alone, so each is tested with a bad fact and with a good one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Device:
    """A device that ranks compute on, as torch sees it; `capability` is empty for a CPU."""

    device: str  # cpu, cuda:0
    name: str
    memory_bytes: int
    free_bytes: int
    capability: str = ""
    is_built_for: bool = True  # whether this torch has code for it


@dataclass(frozen=True)
class Burn:
    """How one device computed for some seconds: a small network in training, cost of a step by its samples."""

    device: str
    fixed_s: float
    per_sample_s: float
    tflops: float  # of products of matrices in float32
    fade: float  # speed of the last third over that of the first third
    gradient_bytes: int


@dataclass(frozen=True)
class Torch:
    """What a child process told of torch before its deadline; `trouble` is why it told no more."""

    version: str = ""
    cuda: str = ""
    rocm: str = ""
    nccl: str = ""
    has_gloo: bool = False
    devices: tuple[Device, ...] = ()
    burns: tuple[Burn, ...] = ()
    trouble: str = ""


@dataclass(frozen=True)
class Limits:
    """Of this process: cores it may use, memory it may take, files and processes it may have; None for no limit."""

    cores: int  # of the machine
    affinity: int
    quota: float | None  # cores, by the control group
    memory_bytes: int
    memory_limit_bytes: int | None  # by the control group
    available_bytes: int
    shm_bytes: int | None  # None: there is no /dev/shm
    shm_free_bytes: int
    open_files: int | None
    processes: int | None
    locked_bytes: int | None


@dataclass(frozen=True)
class NamedAddress:
    """An address of this machine; `kind` is what may be told of the interface to strangers."""

    interface: str
    address: str
    kind: str
    mbit_per_s: int | None = None


@dataclass(frozen=True)
class Network:
    """Addresses of this node and the one that others are told."""

    host: str
    addresses: tuple[NamedAddress, ...]
    chosen: str  # the address; empty where there is none
    wish: str = ""  # GLOO_SOCKET_IFNAME
    told: str = ""  # what HetSeq says of the wish
    trouble: str = ""  # why the wish cannot be fulfilled
    host_means: tuple[str, ...] = ()  # the addresses of this host's own name
    nccl_wish: str = ""  # NCCL_SOCKET_IFNAME


@dataclass(frozen=True)
class Directory:
    """Trials in the directory that nodes share; None for a trial that was not reached."""

    path: str
    trouble: str = ""
    kind: str = ""  # of its file system
    is_local: bool = False
    mode: int | None = None
    is_own: bool = True
    has_one_creator: bool | None = None
    has_links: bool | None = None
    has_whole_renames: bool | None = None
    keeps_modes: bool | None = None
    sees_at_once: bool | None = None  # a new file is in the listing
    fsync_s: float | None = None  # of 1 MiB, the median of five
    ahead_s: float | None = None  # clock of the file system minus that of this node
    free_bytes: int | None = None
    free_files: int | None = None


@dataclass(frozen=True)
class Facts:
    """One node."""

    hetseq: str
    python: str
    numpy: str
    torch: Torch
    limits: Limits
    network: Network
    secret: str  # usable, missing, or why it cannot be used
    wall_clock_s: float
    code_s: float  # when the youngest file of hetseq was written
    is_clock_kept: bool | None  # by NTP; None where the kernel does not tell
    omp: str = ""  # OMP_NUM_THREADS
    threads: int = 1  # of each worker, as HetSeq would have it
    load: float = 0.0  # processes that ran or wanted to, over the minute before the burn-in
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    gpus_of_driver: int = 0  # whatever torch makes of them
    directory: Directory | None = None

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The devices that are no CPU."""
        return tuple(device for device in self.torch.devices if device.device != "cpu")

    @property
    def rank_device(self) -> str:
        """The device that the first rank of this node would compute on."""
        return next((device.device for device in self.gpus if device.is_built_for), "cpu")

    @property
    def idle_gpus(self) -> int:
        """GPUs that the driver has and this process does not see, where it sees one."""
        return max(0, self.gpus_of_driver - len(self.gpus)) if self.gpus else 0

    @property
    def usable_cores(self) -> float:
        """What the scheduler and the control group leave."""
        limits = self.limits
        return limits.affinity if limits.quota is None else min(limits.affinity, limits.quota)


def to_json(facts: Facts) -> dict[str, Any]:
    """For another node of the same user; it names this host and its addresses."""
    return dataclasses.asdict(facts)


def from_json(record: Mapping[str, Any]) -> Facts:
    """What `to_json` gave; raises KeyError or TypeError for what it cannot have given."""
    rest = dict(record)
    directory = rest.pop("directory")
    return Facts(
        torch=torch_from_json(rest.pop("torch")),
        limits=Limits(**rest.pop("limits")),
        network=_network(rest.pop("network")),
        directory=None if directory is None else Directory(**directory),
        **rest,
    )


def torch_from_json(record: Mapping[str, Any]) -> Torch:
    """A `Torch`; raises KeyError or TypeError as above."""
    devices = tuple(Device(**device) for device in record.get("devices", ()))
    burns = tuple(Burn(**burn) for burn in record.get("burns", ()))
    return Torch(**{**record, "devices": devices, "burns": burns})


def _network(record: Mapping[str, Any]) -> Network:
    addresses = tuple(NamedAddress(**address) for address in record["addresses"])
    return Network(**{**record, "addresses": addresses, "host_means": tuple(record["host_means"])})
