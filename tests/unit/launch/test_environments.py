"""Who started this process: recorded environments against the registry, and what follows from them for the options."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

from hetseq.cluster.rendezvous.meet import OtherNodes
from hetseq.config.sections import DistributedConfig
from hetseq.errors import ConfigError
from hetseq.launch import launch
from hetseq.launch.environments import (
    NAMES,
    Look,
    NowhereError,
    Seen,
    UnreadableError,
    choose,
    leaves_room,
    other_nodes,
    seconds_to_stop,
    see,
)
from hetseq.launch.environments.node_list import expand_counts, expand_hosts
from hetseq.system.processes import STOP_SIGNALS, ringing_on_signals
from hetseq.system.started_by import SSH

RECORDINGS = sorted((Path(__file__).parents[2] / "environments").glob("*.json"))
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_NODELIST": "n[1-2]"}
RUN = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "n1", "MASTER_PORT": "29500", "RANK": "1", "LOCAL_RANK": "1"}
PAIR = RUN | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def recorded(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def named(stem: str) -> dict[str, Any]:
    return recorded(next(path for path in RECORDINGS if path.stem == stem))


def look(environment: Mapping[str, str], files: Mapping[str, str] = {}, host: str = "n1", **more: Any) -> Look:
    return Look(environment, files.get, host, **more)


def look_of(record: Mapping[str, Any]) -> Look:
    return look(record["environment"], record["files"], record["host"], is_terminal=record.get("is_terminal", False))


def seen(environment: Mapping[str, str], **more: Any) -> Seen:
    found = see(look(environment, **more))
    assert found is not None
    return found


@pytest.mark.parametrize("path", RECORDINGS, ids=[path.stem for path in RECORDINGS])
def test_a_recorded_environment_is_seen_as_what_it_is(path: Path) -> None:
    record = recorded(path)
    assert record["source"].startswith("https://"), "every recording says where it is from"
    if "refused" in record:
        with pytest.raises(NowhereError, match=record["refused"]):
            see(look_of(record))
        return
    found = see(look_of(record))
    if record["expected"] is None:
        assert found is None
        return
    assert found is not None
    facts = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(found).items()}
    assert {key: facts[key] for key in record["expected"]} == record["expected"]
    assert found.why
    assert path.stem.startswith(found.system)


@pytest.mark.parametrize("path", RECORDINGS, ids=[path.stem for path in RECORDINGS])
def test_an_environment_asked_for_by_name_is_the_same_and_no_other_takes_it(path: Path) -> None:
    record = recorded(path)
    found = None if "refused" in record else see(look_of(record))
    for name in NAMES:
        if found is not None and name == found.system:
            assert see(look_of(record), name) == found
        elif name not in path.stem.split("-"):  # mpirun in a task of Slurm is both
            with pytest.raises(ConfigError, match=f"--env {name}: this process was not started by it"):
                see(look_of(record), name)


def test_every_environment_has_two_recordings_and_is_a_choice_of_the_option() -> None:
    counts = Counter(path.stem.partition("-")[0] for path in RECORDINGS)
    assert set(counts) == set(NAMES)
    assert min(counts.values()) >= 2
    choices = DistributedConfig.__dataclass_fields__["env"].metadata["choices"]
    assert set(choices) == {"auto", "none", *NAMES}


def test_a_shell_is_never_taken() -> None:
    assert see(look(STEP)) is not None
    assert see(look(STEP, is_terminal=True)) is None
    for own in ("4294967290", "4294967291"):  # the shell of salloc, the body of a batch script
        assert see(look(STEP | {"SLURM_STEP_ID": own})) is None


@pytest.mark.parametrize(
    "stem",
    [
        "sge-unequal-slots", "sge-started-by-qrsh-inherit", "pbs-torque-two-nodes", "pbs-pro-started-by-pbs-tmrsh",
        "lsf-unequal-slots", "htcondor-parallel", "slurm-unequal-tasks",
    ],
)  # fmt: skip
def test_an_interactive_job_is_left_alone_unless_it_is_asked_for(stem: str) -> None:
    assert see(look_of(named(stem) | {"is_terminal": True})) is None


def test_a_name_of_the_job_decides_nothing() -> None:
    for name in ("bash", "interactive", "train"):
        assert see(look(STEP | {"SLURM_JOB_NAME": name})) == see(look(STEP))


def test_torchrun_within_a_task_of_slurm_is_torchrun_and_mpirun_within_pbs_is_mpi() -> None:
    assert seen(STEP | PAIR).system == "torchrun"
    mpi = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
    mpi |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    found = seen(mpi | {"PBS_JOBID": "9", "PBS_NODEFILE": "/f"}, files={"/f": "n1\nn2\n"})
    assert (found.system, found.hosts, found.nodes) == ("mpi", ("n1", "n2"), 2)


def test_mpirun_whose_daemons_srun_has_started_is_mpi() -> None:
    mpi = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    found = seen(STEP | mpi, host="n2")
    assert (found.system, found.hosts, found.processes, found.local_rank) == ("mpi", ("n1", "n2"), 4, 1)


def test_the_processes_of_one_mpirun_meet_in_one_place_though_slurm_tells_its_nodes_different_lists() -> None:
    stems = ["mpi-open-mpi-in-slurm-node-of-mpirun", "mpi-open-mpi-in-slurm-far-node"]
    found = [see(look_of(named(stem))) for stem in stems]
    places = {chosen(one).join for one in found if one is not None}
    assert len(places) == 1
    assert places.pop() == f"tcp://node1:{found[0].port if found[0] else None}"


def test_processes_that_cannot_find_each_other_are_told_how_and_how_to_be_alone() -> None:
    records = [recorded(path) for path in RECORDINGS]
    for record in [record for record in records if "refused" in record]:
        with pytest.raises(NowhereError) as refusal:
            see(look_of(record), tell=lambda line: pytest.fail(f"passed over: {line}"))
        assert all(word in str(refusal.value) for word in ("--join file:///SHARED --min-ranks N", "--env none"))


def test_mpirun_names_the_file_of_the_scheduler_that_is_on_the_first_host_alone() -> None:
    mpi = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
    mpi |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(NowhereError, match="PBS_NODEFILE=/gone: this file cannot be read here"):
        see(look(mpi | {"PBS_JOBID": "9", "PBS_NODEFILE": "/gone"}))


def test_a_host_with_two_queues_has_the_slots_of_both() -> None:
    lines = "n1 2 all.q@n1 UNDEFINED\nn2 1 all.q@n2 UNDEFINED\nn1 3 gpu.q@n1 UNDEFINED\n"
    found = seen({"JOB_ID": "9", "PE_HOSTFILE": "/f"}, files={"/f": lines})
    assert (found.hosts, found.slots) == (("n1", "n2"), (5, 1))


def test_the_pmi_of_srun_is_slurms() -> None:
    assert seen(STEP | {"PMI_RANK": "0", "PMI_SIZE": "2"}).system == "slurm"


def test_processes_of_jsrun_meet_on_the_host_behind_the_launch_node() -> None:
    jsrun = {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "3", "JSM_NAMESPACE_LOCAL_RANK": "1"}
    jsrun |= {"JSM_NAMESPACE_LOCAL_SIZE": "2", "LSB_JOBID": "5", "LSB_DJOB_RANKFILE": "/ranks"}
    found = seen(jsrun, files={"/ranks": "batch3\nc1\nc1\nc2\n"}, host="c1")
    assert (found.hosts, found.slots, found.index, found.nodes) == (("c1", "c2"), (2, 1), 0, 2)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3,07],gpu1.lab", ["n1", "n2", "n3", "n07", "gpu1.lab"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("n[09-11]-ib", ["n09-ib", "n10-ib", "n11-ib"]),
    ],
)
def test_a_node_list_is_written_out(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize("text", ["n[1-", "n[3-1]", "n[a]", "n]1[", "", "n1,,n2"])
def test_what_is_no_node_list_is_told(text: str) -> None:
    with pytest.raises(UnreadableError, match="node list"):
        expand_hosts(text)


def test_counts_are_written_out() -> None:
    assert expand_counts("4(x2),2") == (4, 4, 2)
    with pytest.raises(UnreadableError, match=r"4\(x\) is not a count"):
        expand_counts("1,4(x)")


@pytest.mark.parametrize(
    ("name", "environment", "says"),
    [
        ("pbs", {"PBS_JOBID": "9", "PBS_NODEFILE": "/gone"}, "PBS_NODEFILE=/gone"),
        ("sge", {"JOB_ID": "9", "PE_HOSTFILE": "/bad"}, "/bad, line 1"),
        ("slurm", STEP | {"SLURM_TASKS_PER_NODE": "2"}, "tasks for 1"),
        ("slurm", STEP | {"SLURM_NODEID": "2"}, "SLURM_NODEID=2"),
        ("slurm", STEP | {"SLURM_PROCID": "x"}, "SLURM_PROCID=x"),
        ("torchrun", {"TORCHELASTIC_RUN_ID": "none"}, "WORLD_SIZE"),
        ("sagemaker", {"SM_RESOURCE_CONFIG": "{"}, "not JSON"),
        ("sagemaker", {"SM_RESOURCE_CONFIG": '{"hosts": ["a"], "current_host": "b"}'}, "current_host"),
        ("lsf", {"LSB_JOBID": "9", "LSB_MCPU_HOSTS": "host1 1 host2"}, "pairs"),
    ],
)
def test_an_environment_that_cannot_be_read_is_passed_over_with_a_line_or_refused_by_name(
    name: str, environment: dict[str, str], says: str
) -> None:
    lines: list[str] = []
    assert see(look(environment, {"/bad": "host\n"}), tell=lines.append) is None
    assert len(lines) == 1
    assert says in lines[0]
    assert "--env none" in lines[0]
    with pytest.raises(UnreadableError):
        see(look(environment, {"/bad": "host\n"}), name)


# ------------------------------------------------------------------------------------------ what follows from it


def chosen(found: Seen, gpus: int = 0, **options: Any) -> DistributedConfig:
    return choose(DistributedConfig(**options), found, gpus=lambda: gpus).config


def test_two_processes_of_a_node_meet_over_loopback_with_the_ranks_that_they_have() -> None:
    config = chosen(seen(PAIR))
    assert config.distributed_init_method == f"tcp://127.0.0.1:{seen(PAIR).port}"
    assert (config.distributed_world_size, config.distributed_rank, config.distributed_gpus) == (2, 1, 1)


def test_a_process_for_a_device_takes_its_own_where_it_sees_all_and_the_only_one_where_it_sees_one() -> None:
    assert chosen(seen(PAIR), gpus=4).device_id == 1
    assert chosen(seen(PAIR), gpus=1).device_id == 0
    assert chosen(seen(PAIR), gpus=4, cpu=True).device_id == 0
    assert chosen(seen(PAIR), devices=("cuda:0", "cpu")).devices == ("cpu",)
    with pytest.raises(ConfigError, match="--devices cpu,cpu,cpu names 3 workers, but torchrun started 2 processes"):
        chosen(seen(PAIR), devices=("cpu",) * 3)
    with pytest.raises(ConfigError, match="--ranks 3"):
        chosen(seen(PAIR), distributed_gpus=3)


def test_one_task_per_node_joins_the_first_node_with_all_its_devices() -> None:
    found = seen(STEP | {"SLURM_NODEID": "1", "SLURM_PROCID": "1"})
    config = chosen(found, gpus=4)
    assert config.join == f"tcp://n1:{found.port}"
    assert (config.min_ranks, config.distributed_gpus, config.device_id) == (2, None, 0)
    assert chosen(found, env="slurm", min_ranks=8).min_ranks == 8


def test_an_address_with_colons_stands_in_brackets() -> None:
    found = seen(RUN | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "fd00::1"})
    assert chosen(found).join == f"tcp://[fd00::1]:{found.port}"


def test_unequal_tasks_have_the_ranks_of_slurm_on_each_node_alike() -> None:
    found = seen(STEP | {"SLURM_NODEID": "1", "SLURM_PROCID": "2", "SLURM_TASKS_PER_NODE": "2,1"})
    config = chosen(found, gpus=4)
    assert config.distributed_init_method == f"tcp://n1:{found.port}"
    assert (config.distributed_world_size, config.distributed_rank, config.distributed_gpus) == (3, 2, 1)


def test_torchrun_on_two_nodes_gives_the_ranks_out_where_they_meet() -> None:
    found = seen(RUN | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, host="n2")
    config = chosen(found)
    assert config.join == f"tcp://n1:{found.port}"
    assert (config.min_ranks, config.distributed_gpus, config.distributed_rank) == (4, 1, 0)


@pytest.mark.parametrize("stem", ["sge-unequal-slots", "pbs-torque-unequal-slots", "lsf-unequal-slots"])
def test_a_batch_script_on_the_first_of_its_nodes_runs_there_alone_unless_it_is_named(stem: str) -> None:
    found = see(look_of(named(stem)))
    assert found is not None
    choice = choose(DistributedConfig(), found, gpus=lambda: 4)
    assert choice.config == DistributedConfig()
    assert choice.line is not None
    assert f"only on the first of its {found.nodes} nodes" in choice.line
    assert f"hetseq script {found.system} (--env {found.system}:" in choice.line
    assert chosen(found, env=found.system).join == f"tcp://{found.hosts[0]}:{found.port}"


def test_what_a_scheduler_has_started_beside_the_script_meets_on_the_first_host_too() -> None:
    lsf, pbs = named("lsf-unequal-slots"), named("pbs-torque-two-nodes")
    lsf["environment"]["LSF_PM_TASKID"] = "1"
    pbs["environment"]["PBS_TASKNUM"], pbs["host"] = "2", "compute-0-2"
    for record in (lsf, pbs):
        found = see(look_of(record))
        assert found is not None
        assert found.index == 0
        assert chosen(found).join == f"tcp://{found.hosts[0]}:{found.port}"


@pytest.mark.parametrize(("stem", "host"), [("lsf-unequal-slots", "grid05"), ("pbs-torque-two-nodes", "compute-0-1")])
def test_what_runs_on_a_later_host_of_a_job_is_not_its_script(stem: str, host: str) -> None:
    found = see(look_of(named(stem) | {"host": host}))
    assert found is not None
    assert (found.index, found.is_script) == (1, False)
    assert chosen(found).join == f"tcp://{found.hosts[0]}:{found.port}"


def test_a_world_of_one_meets_nobody() -> None:
    found = seen(STEP | {"SLURM_NODELIST": "n1"})
    choice = choose(DistributedConfig(), found, gpus=lambda: 4)
    assert choice.config == DistributedConfig()
    assert choice.line is not None
    assert "no others to meet" in choice.line


def test_what_the_user_said_wins() -> None:
    for said in (
        {"join": "tcp://n9:29400", "min_ranks": 2}, {"distributed_init_method": "file:///shared/x"},
        {"distributed_world_size": 2}, {"env": "none"},
    ):  # fmt: skip
        assert not leaves_room(DistributedConfig(**said))
    assert leaves_room(DistributedConfig())
    named = DistributedConfig(env="torchrun", join="file:///shared/x", min_ranks=2)
    assert leaves_room(named)
    config = choose(named, seen(PAIR), gpus=lambda: 2).config
    assert (config.join, config.distributed_gpus, config.device_id) == ("file:///shared/x", 1, 1)


def test_only_the_first_process_speaks_and_what_it_pastes_says_the_same() -> None:
    first, second = (seen(PAIR | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01")
    choices = [choose(DistributedConfig(), found, gpus=lambda: 0) for found in (first, second)]
    assert choices[0].line is not None
    assert "torchrun" in choices[0].line
    assert choices[1].line is None
    url = choices[1].config.distributed_init_method
    assert " ".join(choices[1].words) == (
        f"--distributed-init-method {url} --distributed-world-size 2 --ranks 1 --distributed-rank 1"
    )


def test_the_port_of_a_job_is_its_own_and_another_one_after_a_restart() -> None:
    jobs = [STEP | {"SLURM_JOB_ID": str(job)} for job in range(1000, 1040)]
    ports = {seen(job).port for job in jobs}
    assert len(ports) == len(jobs)  # by chance, 4 in 100: these are some for which it holds
    assert all(15000 <= port <= 32767 for port in ports)
    assert seen(jobs[0] | {"SLURM_RESTART_COUNT": "1"}).port != seen(jobs[0]).port
    assert seen(jobs[0] | {"SLURM_STEP_ID": "1"}).port != seen(jobs[0]).port
    assert seen(jobs[0] | {"SLURM_NODEID": "1", "SLURM_PROCID": "1"}).port == seen(jobs[0]).port
    assert seen(STEP | {"SLURM_JOB_ID": "4242"}).port == 15000 + 3256480379 % 17768


def test_the_end_of_the_job_is_known_to_torchrun_in_a_job_of_slurm_too() -> None:
    assert seen(STEP | PAIR | {"SLURM_JOB_END_TIME": "10000"}).end_time == 10000


def test_the_head_stops_the_run_before_the_job_ends() -> None:
    first = seen(STEP | {"SLURM_JOB_END_TIME": "10000"})
    assert first.end_time == 10000
    assert seconds_to_stop(first, 2000.0) == 7700.0
    assert seconds_to_stop(first, 9900.0) == 75.0
    assert seconds_to_stop(first, 10000.0) is None
    other = seen(STEP | {"SLURM_JOB_END_TIME": "10000", "SLURM_NODEID": "1", "SLURM_PROCID": "1"})
    assert seconds_to_stop(other, 2000.0) is None
    assert seconds_to_stop(seen(STEP), 2000.0) is None


def test_a_launcher_is_stopped_by_a_signal_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "seconds_to_stop", lambda *_: 0.1)  # a launcher listens by then
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with launch._stopping_in_time(seen(STEP)), ringing_on_signals() as bell:
            assert wait([bell], timeout=10)
            assert os.read(bell, 1) == bytes([signal.SIGUSR1])
        assert signal.getsignal(signal.SIGUSR1) is before[signal.SIGUSR1]
    finally:  # one that has rung leaves the others ignored
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_interface_that_the_environment_names_is_used_if_there_is_one_and_nobody_names_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = {"SM_HOSTS": '["n1", "n2"]', "SM_CURRENT_HOST": "n1"}
    there, elsewhere = (seen(named | {"SM_NETWORK_INTERFACE_NAME": name}) for name in ("lo", "ethwe"))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert [launch._interface(found) for found in (there, elsewhere, None)] == ["lo", None, None]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert launch._interface(there) == "ib0"


@pytest.mark.parametrize(
    ("environment", "started_by", "others"),
    [
        ({}, "", OtherNodes("hetseq train")),
        (PAIR, "", OtherNodes("hetseq train", 30.0)),
        ({}, SSH, OtherNodes("", 30.0)),
    ],
)
def test_who_starts_the_other_nodes_decides_what_is_said_of_missing_ones(
    environment: dict[str, str], started_by: str, others: OtherNodes
) -> None:
    found = see(look(environment))
    assert other_nodes("hetseq train", found, started_by) == others
