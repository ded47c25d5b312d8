"""Ranks for a benchmark: processes that hold several trainings at once and do steps of one on request.

All trainings of a comparison, HetSeq's as well as a bare DDP loop, stay alive side by side in the same processes. So
rounds can alternate, and one run of a script compares neighbours in time. Each rank has one thread, a core of its own
(where there are enough of them) and, by default, the process settings of a HetSeq worker. A rank returns its
measurements; the script interprets them.

Two ways to train: `together`, where the ranks of a training wait for each other by themselves, and `side_by_side`,
where each trains alone but none stops before all have been measured, so that every core is busy all the time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import IO, Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 900.0

Request = dict[str, Any]


@dataclass(frozen=True)
class Timing:
    """A rank's measurements of some steps, warm-up steps excluded."""

    wall_s: float
    cpu_s: float  # of the whole process, its threads for the network included
    samples: int  # of all ranks of the training, in all steps
    steps: list[dict[str, Any]]  # by step: samples, loss; of HetSeq also seconds, shares, `owned_facts`
    settling: list[dict[str, Any]]  # the same of the steps before

    @property
    def speed(self) -> float:
        """Samples per second."""
        return self.samples / self.wall_s

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.wall_s / len(self.steps)

    @classmethod
    def whole(cls, parts: Sequence[Timing]) -> Timing:
        """One rank's measurements in several parts, merged."""
        return cls(
            wall_s=sum(part.wall_s for part in parts),
            cpu_s=sum(part.cpu_s for part in parts),
            samples=sum(part.samples for part in parts),
            steps=[step for part in parts for step in part.steps],
            settling=[step for part in parts for step in part.settling],
        )


def there_and_back(
    turns: Sequence[str], number: int, half: Callable[[str], Sequence[Timing]]
) -> dict[str, list[Timing]]:
    """Round `number` of several trainings that take turns, and each rank's measurements of each.

    All have a `half` of their turn, and then the other one in the reversed order, so that drifting machine speed
    affects all of them alike. The order changes from round to round.
    """
    begin = number % len(turns)
    order = [*turns[begin:], *turns[:begin]]
    halves = {turn: list[Sequence[Timing]]() for turn in turns}
    for turn in order + order[::-1]:
        halves[turn].append(half(turn))
    return {turn: [Timing.whole(rank) for rank in zip(*halves[turn])] for turn in turns}


class Ranks:
    """The processes, from the outside. Use it as a context manager."""

    def __init__(self, world_size: int, *, folder: Path, model: str, is_pinned: bool = True) -> None:
        folder.mkdir(parents=True)
        self.world_size = world_size
        cores = sorted(os.sched_getaffinity(0))
        self._ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                core = cores[rank % len(cores)] if is_pinned else None
                self._ranks.append(_Rank(rank, folder, model, core))
        except BaseException:
            self.close()
            raise

    def open(
        self, name: str, words: Sequence[Sequence[str]], *, is_alone: bool = False, shares_memory: bool = False
    ) -> None:
        """Build a training of HetSeq on the first ranks, one list of command-line words for each of them.

        `is_alone`: each of them trains for itself, without the others. `shares_memory`: the ranks exchange gradients
        as on one node, else as between nodes.
        """
        world_size = 1 if is_alone else len(words)
        request = {"do": "open", "name": name, "world_size": world_size, "shares_memory": shares_memory}
        self._ask({rank: {**request, "words": list(own)} for rank, own in enumerate(words)})

    def open_ddp(self, name: str, batch: int) -> None:
        """Build a bare loop under DDP on all ranks, `batch` samples on each."""
        request = {"do": "open_ddp", "name": name, "batch": batch, "world_size": len(self._ranks)}
        self._ask(dict.fromkeys(range(len(self._ranks)), request))

    def open_fsdp(self, name: str, batch: int) -> None:
        """As `open_ddp`, of a GPT under FSDP2: `fully_shard` of each layer, and of the rest."""
        request = {"do": "open_fsdp", "name": name, "batch": batch, "world_size": len(self._ranks)}
        self._ask(dict.fromkeys(range(len(self._ranks)), request))

    @property
    def pids(self) -> list[int]:
        """The processes, by rank."""
        return [rank.pid for rank in self._ranks]

    def together(self, name: str, *, ranks: int | None = None, settle: int, steps: int) -> list[Timing]:
        """Train `settle + steps` steps of a training that has `ranks` ranks (default: all); one timing per rank."""
        request = {"do": "train", "name": name, "settle": settle, "steps": steps, "least_s": 0.0, "goes_on": False}
        answers = self._ask(dict.fromkeys(range(ranks or len(self._ranks)), request))
        return [Timing(**answer) for answer in answers.values()]

    def set_as(self, *, is_worker: bool) -> None:
        """From now on the processes have the settings of HetSeq's workers, or of any other program."""
        self._ask({rank: {"do": "set_as", "is_worker": is_worker} for rank in range(len(self._ranks))})

    def alone(self, name: str, rank: int, *, settle: int, least_s: float) -> Timing:
        """Train on one rank while the others rest, for at least two steps and `least_s` seconds."""
        request = {"do": "train", "name": name, "settle": settle, "steps": 2, "least_s": least_s, "goes_on": False}
        return Timing(**self._ask({rank: request})[rank])

    def side_by_side(self, name: str, *, settle: int, least_s: float) -> list[Timing]:
        """As `alone`, on all ranks at once; each continues, uncounted, until all have been measured."""
        request = {"do": "train", "name": name, "settle": settle, "steps": 2, "least_s": least_s, "goes_on": True}
        answers = self._ask(dict.fromkeys(range(len(self._ranks)), request))
        self._ask({rank: {"do": "rest"} for rank in range(len(self._ranks))})
        return [Timing(**answer) for answer in answers.values()]

    def slow_down(self, name: str, rank: int, factor: float) -> None:
        """Throttle a rank of a training of HetSeq by `factor` from its next step on."""
        self._ask({rank: {"do": "slow_down", "name": name, "factor": factor}})

    def set_speeds(self, rows_per_s: Sequence[float]) -> None:
        """The speeds of the machines that the ranks play, for trainings of `workloads.SLOW` opened from now on."""
        self._ask({rank: {"do": "set_speed", "rows_per_s": speed} for rank, speed in enumerate(rows_per_s)})

    def close(self) -> None:
        for rank in self._ranks:
            rank.end()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, requests: Mapping[int, Request]) -> dict[int, Any]:
        deadline = time.monotonic() + PATIENCE_S
        for rank, request in requests.items():
            self._ranks[rank].tell(request)
        answers = {rank: self._ranks[rank].answer(deadline) for rank in requests}
        if None in answers.values():
            said = "\n".join(f"--- rank {rank.number}\n{rank.said()[-3000:]}" for rank in self._ranks)
            raise SystemExit(f"ranks {[rank for rank, a in answers.items() if a is None]} gave no answer:\n{said}")
        return answers


class _Rank:
    """One process, as its parent sees it."""

    def __init__(self, number: int, folder: Path, model: str, core: int | None) -> None:
        self.number = number
        self._pipe, theirs = Pipe()
        self._log = _output()
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        place = {"descriptor": theirs.fileno(), "rank": number, "folder": str(folder), "model": model, "core": core}
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps({**place, "parent_pid": os.getpid()})],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=environment,
        )  # fmt: skip
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, request: Request) -> None:
        self._pipe.send_bytes(json.dumps(request).encode())

    def answer(self, deadline: float) -> Any:
        """The answer to the last request; None if the process has ended or is late."""
        try:
            if self._pipe.poll(max(0.0, deadline - time.monotonic())):
                return json.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            pass
        return None

    def said(self) -> str:
        log = self._log.fileno()
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()
        self._log.close()


def _output() -> IO[bytes]:
    return tempfile.TemporaryFile()


# In the process of a rank.


@dataclass
class Training:
    """A training that can do a step; `shares` of the last one, by rank, if it is one of HetSeq."""

    step: Callable[[], dict[str, Any]]
    slow_down: Callable[[float], None] | None = None


class Life:
    """A rank: its trainings by name, and the requests it handles."""

    def __init__(self, pipe: Connection, rank: int, folder: Path, model: str) -> None:
        self._pipe, self._rank, self._folder, self._model = pipe, rank, folder, model
        self._trainings: dict[str, Training] = {}

    def run(self) -> None:
        """Handle one request after another until the script ends."""
        deeds: dict[str, Callable[..., Any]] = {
            "open": self._open, "open_ddp": self._open_ddp, "open_fsdp": self._open_fsdp, "train": self._train,
            "slow_down": self._slow_down, "set_speed": self._set_speed, "rest": lambda: {}, "set_as": self._set_as,
        }  # fmt: skip
        while True:
            request = json.loads(self._pipe.recv_bytes())
            answer = deeds[request.pop("do")](**request)
            if answer is not None:
                self._answer(answer)

    def _answer(self, answer: dict[str, Any]) -> None:
        self._pipe.send_bytes(json.dumps(answer).encode())

    def _open(self, name: str, words: list[str], world_size: int, shares_memory: bool) -> dict[str, Any]:
        from hetseq.comm import group as comm

        group: comm.Group = comm.LocalGroup()
        if world_size > 1:
            store = FolderStore(self._folder / "store")
            meeting = comm.GroupMeeting(store, name, name.encode(), shares_memory=shares_memory)
            group = comm.connect(rank=self._rank, world_size=world_size, meeting=meeting, timeout_s=PATIENCE_S)
        save_dir = self._folder / (f"{name}-{self._rank}" if world_size == 1 else name)
        self._trainings[name] = hetseq_training(words, save_dir, group)
        return {}

    def _open_ddp(self, name: str, batch: int, world_size: int) -> dict[str, Any]:
        from torch import nn

        def wrap(model: nn.Module) -> nn.Module:
            return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

        return self._open_bare(name, batch, world_size, wrap)

    def _open_fsdp(self, name: str, batch: int, world_size: int) -> dict[str, Any]:
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        def wrap(model: nn.Module) -> nn.Module:
            mesh = init_device_mesh("cpu", (world_size,))
            for layer in model.layers:  # type: ignore[union-attr]
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            return model

        return self._open_bare(name, batch, world_size, wrap)

    def _open_bare(self, name: str, batch: int, world_size: int, wrap: Callable[[Any], Any]) -> dict[str, Any]:
        """A bare loop in the default process group of torch."""
        import workloads
        from torch import distributed

        store = distributed.FileStore(str(self._folder / "ddp"), world_size)
        distributed.init_process_group(
            "gloo", store=store, rank=self._rank, world_size=world_size, timeout=timedelta(seconds=PATIENCE_S)
        )
        work = workloads.workload(self._model, self._folder.parent / "data")
        step = workloads.bare_loop(work, batch, rank=self._rank, world_size=world_size, wrap=wrap)
        self._trainings[name] = Training(lambda: {"loss": step(), "samples": world_size * batch})
        return {}

    def _train(self, name: str, settle: int, steps: int, least_s: float, goes_on: bool) -> dict[str, Any] | None:
        """Answers with the fields of a `Timing`."""
        step = self._trainings[name].step
        rows: list[dict[str, Any]] = []
        settling = [step() for _ in range(settle)]
        begin, cpu = time.perf_counter(), time.process_time()
        while len(rows) < steps or time.perf_counter() < begin + least_s:
            rows.append(step())
        timing = Timing(
            wall_s=time.perf_counter() - begin,
            cpu_s=time.process_time() - cpu,
            samples=sum(row["samples"] for row in rows),
            steps=rows,
            settling=settling,
        )
        if not goes_on:
            return dataclasses.asdict(timing)
        self._answer(dataclasses.asdict(timing))
        while not self._is_told():
            step()
        return None

    def _set_as(self, is_worker: bool) -> dict[str, Any]:
        import settings

        (settings.as_a_worker if is_worker else settings.as_any_process)()
        return {}

    def _set_speed(self, rows_per_s: float) -> dict[str, Any]:
        import slow_layers

        os.environ[slow_layers.VARIABLE] = str(rows_per_s)
        return {}

    def _is_told(self) -> bool:
        return bool(select.select([self._pipe], [], [], 0)[0])

    def _slow_down(self, name: str, factor: float) -> dict[str, Any]:
        slow_down = self._trainings[name].slow_down
        assert slow_down is not None, "only a training of HetSeq has a throttle"
        slow_down(factor)
        return {}


def hetseq_training(words: Sequence[str], save_dir: Path, group: Any) -> Training:
    """A training of HetSeq with everything a real run does, its rows on disk included. Collective.

    `save_dir` is made by the first rank of the group.
    """
    import numpy as np
    import torch

    from hetseq import config as options
    from hetseq.monitor.metrics import Display, Metrics, Recording
    from hetseq.run import build
    from hetseq.run.loaded_task import load_material
    from hetseq.run_directory import RunDirectory
    from hetseq.training.throttle import Throttle

    throttles: list[Throttle] = []

    def known(factor: float) -> Throttle:
        throttles.append(Throttle(factor))
        return throttles[-1]

    class Kept(Metrics):
        """Keeps the last row as well."""

        last: Mapping[str, Any] = {}

        def step(self, row: Mapping[str, Any]) -> None:
            self.last = row
            super().step(row)

    config = options.complete(options.parse([*words, "--save-dir", str(save_dir)]))
    if group.rank == 0:
        RunDirectory.prepare(save_dir, config_yaml=options.dump_yaml(config))
    group.all_gather_rows(np.zeros(1, np.int64))  # the directory is there
    metrics = Kept(Recording(RunDirectory(save_dir)), Display(config.log), is_writer=group.rank == 0)
    material = load_material(config, torch.device("cpu"))
    with mock.patch.object(build, "Throttle", known):  # no option changes a throttle during a run
        built = build.build_session(build.RankJob(config, RunDirectory(save_dir), group, material, metrics))
    controller = built.controller
    controller.replica.model.train()

    def step() -> dict[str, Any]:
        controller.train_step()
        return {key: metrics.last[key] for key in ("seconds", "loss", "samples", "shares")} | owned_facts(controller)

    def slow_down(factor: float) -> None:
        throttles[-1].factor = factor

    return Training(step, slow_down)


def owned_facts(controller: Any) -> dict[str, int]:
    """With owners: elements of the state that the rank owns, of the whole and of the largest unit; elements that come
    in each round, and of the unit that stays whole during one; bytes that the rank has moved so far, and bytes of
    shared memory that it has made."""
    if controller.replica.owned is None:
        return {}
    exchange = controller.replica.reducer.exchange
    owned, elements = controller.replica.owned.part
    traffic = {"sent_bytes": exchange.sent_bytes, "received_bytes": exchange.received_bytes}
    largest = max(bounds[-1] for bounds in controller.replica.reducer.ownership.bounds)
    shared = sum(len(one.pages) for one in getattr(exchange, "_memory", {}).values())
    facts = {"owned": owned, "elements": elements, "largest_unit": largest, "shared_bytes": shared, **traffic}
    reducer = controller.replica.reducer
    if not controller.replica.has_parameters:
        gathered = sum(unit.flat.numel() for kind, unit in reducer._order() if kind.name != "SUM")
        facts |= {"gathered": gathered, "root": sum(unit.flat.numel() for unit in reducer._root.units)}
    return facts


class FolderStore:
    """A store as ranks need it to find each other: a file per key, which appears complete."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: bytes) -> None:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_bytes(value)
        beside.rename(path)

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while not self._path(key).exists():
            if time.monotonic() > deadline:
                raise SystemExit(f"no rank set {key} within {timeout_s:g} s")
            time.sleep(0.002)
        return self._path(key).read_bytes()

    def check(self) -> None:
        """The waiting process notices a rank that ends."""

    def _path(self, key: str) -> Path:
        return self._folder / key.encode().hex()


def main() -> None:
    """The main function of a rank, whose place is given as JSON."""
    place = json.loads(sys.argv[1])
    if place["core"] is not None:
        os.sched_setaffinity(0, {place["core"]})  # before any thread: they inherit it
    import settings
    import torch

    from hetseq.system.processes import die_with_parent

    die_with_parent(place["parent_pid"])
    torch.set_num_threads(1)
    settings.as_a_worker()
    try:
        Life(Connection(place["descriptor"]), place["rank"], Path(place["folder"]), place["model"]).run()
    except EOFError:
        pass  # the script has ended


if __name__ == "__main__":
    main()
