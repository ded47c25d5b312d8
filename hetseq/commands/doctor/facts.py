"""Facts about one node: frozen records that nodes send to each other, without judgement. Pure.

Defines the names and units of the facts, and converts them to JSON and back. `collect`, `torch_child` and
`directory_trial` read the machine, `node_findings` judges.

The one idea: a finding is a function of these records alone, so each is tested with a bad fact and with a good one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetseq.system.torch_builds import Choice, build_for, capability_of


@dataclass(frozen=True)
class Device:
    """A device for ranks, as torch sees it; `capability` is empty for a CPU."""

    device: str  # cpu, cuda:0
    name: str
    memory_bytes: int
    free_bytes: int
    capability: str = ""
    is_built_for: bool = True  # whether this torch has code for it


@dataclass(frozen=True)
class Burn:
    """Burn-in of one device: the cost of a training step of a small network, fixed and per sample."""

    device: str
    fixed_s: float
    per_sample_s: float
    tflops: float  # of float32 matrix multiplication
    fade: float  # speed of the last third / speed of the first third
    gradient_bytes: int


@dataclass(frozen=True)
class Torch:
    """Facts about torch that a child process reported before its deadline; `trouble`: why some are missing."""

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
    """Limits of this process: cores, memory, files and processes; None for no limit."""

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
class Contention:
    """What other programs did on the cores of this job before the burn-in."""

    cores: float  # in use, of those that the affinity allows
    waiting: float | None = None  # share of the time in which some program of the machine waited for a core
    programs: tuple[str, ...] = ()  # the busiest ones that are visible from here


@dataclass(frozen=True)
class NamedAddress:
    """An address of this machine; `kind` describes the interface without its name, so it may be published."""

    interface: str
    address: str
    kind: str
    mbit_per_s: int | None = None


@dataclass(frozen=True)
class Network:
    """Addresses of this node, and the one that other nodes get."""

    host: str
    addresses: tuple[NamedAddress, ...]
    chosen: str  # the address; empty if there is none
    wish: str = ""  # GLOO_SOCKET_IFNAME
    told: str = ""  # HetSeq's message about it
    trouble: str = ""  # why it cannot be used
    host_means: tuple[str, ...] = ()  # the addresses of this host's own name
    nccl_wish: str = ""  # NCCL_SOCKET_IFNAME


@dataclass(frozen=True)
class Directory:
    """Results of the tests in the shared directory; None for a test that was not reached."""

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
    ahead_s: float | None = None  # clock of the file system minus clock of this node
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
    code_s: float  # when the newest file of hetseq was written
    is_clock_kept: bool | None  # by NTP; None if the kernel does not tell
    omp: str = ""  # OMP_NUM_THREADS
    threads: int = 1  # per worker, as HetSeq would choose
    load: float = 0.0  # load average of the machine over the minute before the burn-in
    contention: Contention | None = None
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    gpus_of_driver: int = 0  # including GPUs that torch does not see
    capabilities: tuple[str, ...] = ()  # of these, as nvidia-smi names them
    driver: str = ""  # of NVIDIA
    has_amd: bool = False
    directory: Directory | None = None

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The devices other than the CPU."""
        return tuple(device for device in self.torch.devices if device.device != "cpu")

    @property
    def rank_device(self) -> str:
        """The device that the first rank of this node would compute on."""
        return next((device.device for device in self.gpus if device.is_built_for), "cpu")

    @property
    def idle_gpus(self) -> int:
        """GPUs that the driver has but this process does not see, if it sees any."""
        return max(0, self.gpus_of_driver - len(self.gpus)) if self.gpus else 0

    @property
    def usable_cores(self) -> float:
        """Cores allowed by the CPU affinity and the control group."""
        limits = self.limits
        return limits.affinity if limits.quota is None else min(limits.affinity, limits.quota)

    def torch_build(self, release: str) -> Choice:
        """The build of this release of torch for all cards of this node."""
        known = {*self.capabilities, *(gpu.capability for gpu in self.gpus)}
        major = self.driver.partition(".")[0]
        return build_for(
            [capability_of(text) for text in known],
            release,
            driver=int(major) if major.isdigit() else None,
            has_amd=self.has_amd,
        )


def to_json(facts: Facts) -> dict[str, Any]:
    """For another node of the same user; it names this host and its addresses."""
    return dataclasses.asdict(facts)


def from_json(record: Mapping[str, Any]) -> Facts:
    """The inverse of `to_json`; raises KeyError or TypeError for any other record."""
    rest = dict(record)
    directory, contention = rest.pop("directory"), rest.pop("contention")
    if contention is not None:
        contention = Contention(**{**contention, "programs": tuple(contention["programs"])})
    return Facts(
        torch=torch_from_json(rest.pop("torch")),
        limits=Limits(**rest.pop("limits")),
        network=_network(rest.pop("network")),
        directory=None if directory is None else Directory(**directory),
        contention=contention,
        capabilities=tuple(rest.pop("capabilities")),
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
