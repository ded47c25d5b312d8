"""`hetseq doctor`: each finding appears when its fact is bad, and not otherwise; the file for others tells no names."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetseq.balance.simulation import Link
from hetseq.cluster.membership.run_directory_discovery import kind_of as kind_of_file_system
from hetseq.cluster.rendezvous.interfaces import interfaces, is_loopback
from hetseq.commands import doctor
from hetseq.commands.doctor import torch_child as in_torch
from hetseq.commands.doctor.collect import ask_torch, read_torch, secret_state
from hetseq.commands.doctor.contention import between, read, watch
from hetseq.commands.doctor.directory_trial import examine
from hetseq.commands.doctor.facts import (
    Burn,
    Contention,
    Device,
    Directory,
    Facts,
    Limits,
    NamedAddress,
    Network,
    Torch,
    from_json,
    to_json,
)
from hetseq.commands.doctor.forecast import Candidate, candidates_of, foresee
from hetseq.commands.doctor.node_findings import Finding, exit_code, judge, size
from hetseq.commands.doctor.report import COLUMNS, document, text
from hetseq.errors import ConfigError
from hetseq.system.gpu import runs_on

GIB = 2**30
GPU = Device("cuda:0", "RTX A6000", 48 * GIB, 47 * GIB, "8.6")
BURN = Burn("cuda:0", 0.001, 1e-5, 20.0, 1.0, 4 << 20)
LIMITS = Limits(16, 16, None, 64 * GIB, None, 60 * GIB, 32 * GIB, 32 * GIB, 65536, None, None)
WIRED = NamedAddress("eno1", "10.0.0.7", "wired", 10000)
NETWORK = Network("labA", (WIRED,), "10.0.0.7", host_means=("10.0.0.7",))
GOOD_DIRECTORY = Directory(
    "/shared/ada", "", "nfs4", False, 0o700, True, True, True, True, True, True, 0.01, 0.0, 100 * GIB, 10**6
)
TORCH = Torch("2.13.0+cu126", "12.6", "", "2.27.3", True, (GPU,), (BURN,))
GOOD = Facts(
    hetseq="2.0.0",
    python="3.11.7",
    numpy="2.4.6",
    torch=TORCH,
    limits=LIMITS,
    network=NETWORK,
    secret="usable",
    wall_clock_s=2e9,
    code_s=1e9,
    is_clock_kept=True,
    threads=16,
    gpus_of_driver=1,
    directory=GOOD_DIRECTORY,
)


def changed(path: str, value: object) -> Facts:
    """The good facts with one of them replaced: `limits.quota`, 1.0."""
    part, _, name = path.partition(".")
    if not name:
        return replace(GOOD, **{part: value})  # type: ignore[arg-type]
    return replace(GOOD, **{part: replace(getattr(GOOD, part), **{name: value})})


def worth_a_look(facts: Facts) -> list[tuple[str, str, str]]:
    return [(one.level, one.topic, " ".join(one.filled())) for one in judge(facts) if one.level != "ok"]


def test_a_good_node_has_nothing_but_ok() -> None:
    assert worth_a_look(GOOD) == []
    assert exit_code(judge(GOOD)) == 0


BAD: list[tuple[str, Any, str, str]] = [
    (
        "torch.trouble",
        "the drivers of the devices: did not finish within 90 s",
        "problem",
        "did not finish within 90 s",
    ),
    ("torch.has_gloo", False, "problem", "without gloo"),
    ("torch.version", "2.9.1", "problem", "older than 2.10"),
    ("torch.devices", (replace(GPU, is_built_for=False),), "problem", "no code for capability 8.6"),
    ("torch.devices", (replace(GPU, free_bytes=20 * GIB),), "warning", "more than half of its memory"),
    ("torch.devices", (Device("cpu", "CPU", GIB, GIB),), "warning", "the driver has 1 GPUs, but torch sees none"),
    ("torch.burns", (replace(BURN, fade=0.7),), "warning", "70%"),
    ("omp", "many", "warning", "not a number"),
    ("load", 40.0, "warning", "other programs use this machine: load 40.0 on 16 cores find them with top"),
    ("contention", Contention(5.0), "warning", "5.0 of 16 cores in use, load 0.0 on 16 cores find them"),
    (
        "contention",
        Contention(15.9, 0.93, ("make (15.2 cores, pid 7, bob)",)),
        "warning",
        "on 16 cores, a program waits for a core 93% of the time the busiest: make (15.2 cores, pid 7, bob);",
    ),
    ("omp", "32", "warning", "more than 16 cores"),
    ("limits.affinity", 1, "warning", "fewer than 2 each"),
    ("limits.quota", 4.0, "warning", "export OMP_NUM_THREADS=4"),
    ("limits.available_bytes", GIB, "warning", "2 GiB of memory"),
    ("limits.shm_bytes", None, "problem", "no /dev/shm"),
    ("limits.shm_free_bytes", 64 << 20, "warning", "free in /dev/shm"),
    ("limits.open_files", 256, "warning", "ulimit -n"),
    ("limits.processes", 100, "warning", "ulimit -u"),
    ("limits.locked_bytes", 65536, "note", "ulimit -l"),
    ("network", replace(NETWORK, wish="eth9", trouble="no such interface"), "problem", "eth9: no such interface"),
    ("network", replace(NETWORK, wish="^lo", told="it takes one name"), "warning", "^lo: gloo takes one name"),
    ("network", replace(NETWORK, wish="eno1,eno2", told="it uses eno1"), "note", "set it to eno1"),
    ("network.nccl_wish", "eno1", "note", "NCCL_SOCKET_IFNAME is set"),
    ("network.chosen", "127.0.0.1", "warning", "no address that another node can reach"),
    ("network.addresses", (replace(WIRED, kind="wireless"),), "warning", "eno1, which is a radio link"),
    ("network.addresses", (replace(WIRED, kind="containers"),), "warning", "a bridge of containers"),
    ("network.addresses", (replace(WIRED, mbit_per_s=100),), "warning", "eno1 runs at 100 Mbit/s"),
    ("network.host_means", ("127.0.1.1",), "note", "labA means 127.0.1.1"),
    ("network.host_means", (), "note", "labA does not resolve here"),
    ("secret", "missing", "note", "no secret file yet"),
    ("secret", "it has mode 0644", "problem", "mode 0644"),
    ("wall_clock_s", 0.0, "warning", "behind the files of HetSeq"),
    ("is_clock_kept", False, "note", "not synchronised"),
    ("directory.trouble", "does not exist", "problem", "/shared/ada does not exist"),
    ("directory.is_local", True, "note", "a local file system of this node"),
    ("directory.mode", 0o777, "warning", "chmod go-w /shared/ada"),
    ("directory.has_one_creator", False, "problem", "succeeded twice"),
    ("directory.has_whole_renames", False, "problem", "incomplete or absent"),
    ("directory.has_links", False, "note", "hard links"),
    ("directory.keeps_modes", False, "warning", "mode of a file"),
    ("directory.sees_at_once", False, "note", "not listed at once"),
    ("directory.free_bytes", GIB, "warning", "only 1.0 GiB free"),
    ("directory.free_bytes", 1 << 20, "problem", "only 1 MiB free"),
    ("directory.free_files", 3, "warning", "3 more files"),
    ("directory.fsync_s", 2.0, "warning", "2000 ms"),
    ("directory.ahead_s", 5.0, "note", "5 s ahead of"),
    ("directory.ahead_s", -600.0, "warning", "600 s behind"),
]


@pytest.mark.parametrize(("path", "value", "level", "words"), BAD, ids=[f"{bad[0]} {bad[3]}" for bad in BAD])
def test_a_bad_fact_gives_its_finding_and_no_other_one(path: str, value: Any, level: str, words: str) -> None:
    facts = changed(path, value)
    (found,) = worth_a_look(facts)
    assert found[0] == level
    assert words in found[2]
    assert exit_code(judge(facts)) == (level == "problem")
    remedies = [one.remedy for one in judge(facts) if one.level != "ok"]
    assert all(remedies)


@pytest.mark.parametrize(
    ("limits", "load", "used", "is_busy"),
    [
        (replace(LIMITS, affinity=4), 60.0, 0.3, False),  # four cores of its own on a machine that others use
        (replace(LIMITS, affinity=4), 0.0, 2.0, True),
        (replace(LIMITS, quota=8.0), 20.0, 5.0, False),  # any eight of the sixteen cores
        (replace(LIMITS, quota=8.0), 20.0, 12.0, True),
        (LIMITS, 16.0, 3.9, False),
        (LIMITS, 16.1, 3.9, True),
    ],
)
def test_a_job_with_a_part_of_the_cores_is_not_warned_of_programs_on_the_others(
    limits: Limits, load: float, used: float, is_busy: bool
) -> None:
    facts = replace(GOOD, limits=limits, load=load, contention=Contention(used), omp="4", threads=4)
    said = [one.text for one in judge(facts) if "other programs use this machine" in one.text]
    assert len(said) == is_busy


def stat(folder: Path, *, busy: tuple[int, int, int], programs: dict[int, tuple[str, int, int]], waiting: int) -> None:
    """What /proc shows: each of three cores idle and busy, in ticks; programs with name, core and ticks."""
    (folder / "pressure").mkdir(exist_ok=True)
    (folder / "pressure" / "cpu").write_text(f"some avg10=1.00 avg60=0.00 avg300=0.00 total={waiting}\nfull total=0\n")
    lines = [f"cpu{core} {ticks} 0 0 {1000 - ticks} 0 0 0 0 0 0" for core, ticks in enumerate(busy)]
    (folder / "stat").write_text("\n".join(["cpu 0 0 0 0 0 0 0 0 0 0", *lines, "intr 7"]) + "\n")
    for pid, (name, core, ticks) in programs.items():
        (folder / str(pid)).mkdir(exist_ok=True)
        words = ["S", *["0"] * 10, str(ticks), "0", *["0"] * 23, str(core), *["0"] * 13]
        (folder / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(words)}\n")


def test_programs_on_the_cores_of_this_job_are_counted_and_named(tmp_path: Path) -> None:
    stat(tmp_path, busy=(0, 0, 0), programs={}, waiting=0)
    nothing = read(tmp_path)
    before = replace(nothing, cores=dict.fromkeys(range(3), (0, 900)))
    before = replace(before, programs={one: (name, 0, 5) for one, name in ((1, "a) b"), (2, "c"), (3, "d"), (4, "e"))})
    programs = {1: ("a) b", 1, 95), 2: ("c", 2, 95), 3: ("d", 0, 10), 4: ("e", 0, 65), 5: ("new", 0, 90)}
    stat(tmp_path, busy=(50, 90, 100), programs=programs, waiting=500_000)
    found = between(before, read(tmp_path), {0, 1})
    assert found is not None
    assert found.cores == pytest.approx(0.5 + 0.9)
    assert found.waiting == pytest.approx(0.5)  # of a second: 100 ticks
    assert [name.partition(", pid")[0] for name in found.programs] == ["a) b (0.9 cores", "e (0.6 cores"]
    assert between(nothing, nothing, {0, 1}) is None
    assert between(read(tmp_path / "none"), read(tmp_path / "none"), {0}) is None


def test_the_use_of_this_machine_is_read() -> None:
    pauses = list[float]()
    before = read()

    def work(seconds: float) -> None:
        pauses.append(seconds)
        while sum(after[1] - before.cores[core][1] for core, after in read().cores.items() if core in before.cores) < 4:
            pass

    found = watch(work)
    assert pauses == [0.5]
    assert found is None or 0 <= found.cores <= len(before.cores)


INDEX = "https://download.pytorch.org/whl"


ON_CPU = replace(TORCH, version="2.13.0+cpu", cuda="", devices=(Device("cpu", "CPU", GIB, GIB),))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            replace(GOOD, torch=replace(TORCH, devices=(replace(GPU, capability="6.1", is_built_for=False),))),
            f"pip install torch==2.13.0 --index-url {INDEX}/cu126;",
        ),
        (
            replace(GOOD, torch=ON_CPU, capabilities=("8.6",), driver="580.65.06"),
            f"pip install torch==2.13.0 --index-url {INDEX}/cu130",
        ),
        (replace(GOOD, torch=ON_CPU, capabilities=("8.6",), driver="470.1"), "driver 470 is too old: update it to"),
    ],
)
def test_a_torch_that_does_not_fit_the_card_is_answered_with_the_command_in_one_line(facts: Facts, said: str) -> None:
    (found,) = worth_a_look(facts)
    assert said in found[2]
    assert any(said in line for line in text(judge(facts)))


def test_it_is_said_why_an_address_is_the_one_that_others_are_told() -> None:
    def told(**wish: str) -> str:
        findings = judge(replace(GOOD, network=replace(NETWORK, **wish)))
        return next(text for text, _ in (one.filled() for one in findings) if text.startswith("other nodes use"))

    way = "other nodes use 10.0.0.7 of eno1 (wired, 10000 Mbit/s), "
    assert told() == told(wish="^lo", told="for NCCL") == way + "chosen by the default route"
    assert told(wish="eno1") == told(wish="eno1,eno2", told="the first") == way + "chosen by GLOO_SOCKET_IFNAME"


def test_facts_travel_as_json() -> None:
    assert from_json(json.loads(json.dumps(to_json(GOOD)))) == GOOD
    alone = replace(GOOD, directory=None)
    assert from_json(json.loads(json.dumps(to_json(alone)))) == alone


SECRETS = {
    "host": "labhost-7",
    "address": "10.11.12.13",
    "interface": "enp999s0",
    "user": "ada-lovelace",
    "place": "/private/place",
}


def test_the_file_for_others_names_no_host_address_interface_user_or_path() -> None:
    hidden = " ".join(SECRETS.values())
    address = NamedAddress(SECRETS["interface"], SECRETS["address"], "wireless", 100)
    other = replace(address, address="10.11.12.14", interface="enp998s0")
    network = Network(
        SECRETS["host"], (address, other), SECRETS["address"], hidden, hidden, hidden, (SECRETS["address"],), hidden
    )
    looped = replace(network, host_means=("127.66.77.88",))
    found = replace(GOOD_DIRECTORY, path=SECRETS["place"], trouble=hidden, mode=0o777, is_local=True, has_links=False)
    found = replace(found, free_bytes=5, free_files=5, has_one_creator=False, keeps_modes=False)
    for secret, around in ((hidden, network), ("usable", looped)):
        torch = replace(TORCH, trouble=hidden)
        facts = replace(GOOD, network=around, secret=secret, torch=torch, omp=hidden, visible=hidden, directory=found)
        findings = [*judge(facts), *foresee([Candidate(SECRETS["host"], BURN), Candidate("labhost-8", BURN)])]
        shown = json.dumps(document([facts], [findings]))
        for name in (*SECRETS.values(), "10.11.12.14", "enp998s0", "labhost-8", "127.66.77.88"):
            assert name not in shown
        said = "\n".join(text(findings))  # the twin: the terminal has them
        assert SECRETS["host"] in said
        assert SECRETS["address"] in said
    assert '"node1"' in shown


def test_no_line_is_longer_than_the_page() -> None:
    long = Finding("problem", "network", "word " * 80 + "\x1b[2J", "remedy " * 40)
    lines = list(text([long]))
    assert max(map(len, lines)) <= COLUMNS
    assert "\x1b" not in "".join(lines)
    assert lines[-1] == "not ready: 1 problem, 0 warnings, 0 notes"
    fills = COLUMNS - 20 - len(" 102.5 ms")
    for more in range(12):  # wherever the line ends, the number has its unit beside it
        (line,) = [
            line for line in text([Finding("ok", "forecast", "x" * (fills + more) + " 102.5 ms")]) if "102" in line
        ]
        assert line.endswith("102.5 ms")


def test_a_driver_that_hangs_is_told_from_a_torch_that_does_not_import(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "hanging.py").write_text(
        'import time\nprint(\'{"version": "2.13.0", "has_gloo": true}\', flush=True)\ntime.sleep(60)\n'
    )
    (tmp_path / "broken.py").write_text('raise ImportError("libcudart.so.12 is not there")\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    stuck = ask_torch(seconds=0, threads=1, limit_s=0.5, module="hanging")
    assert stuck.version == "2.13.0"
    assert "the drivers of the devices: did not finish" in stuck.trouble
    broken = ask_torch(seconds=0, threads=1, module="broken")
    assert broken.trouble == "import torch: ImportError: libcudart.so.12 is not there"


def test_lines_of_the_child_are_put_together_and_half_a_line_is_none() -> None:
    whole = json.dumps(to_json(GOOD)["torch"])
    assert read_torch([whole], "") == TORCH
    assert read_torch(['{"version": "2.13.0"}', '{"devices": [{"dev'], "it ended").version == "2.13.0"


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (["sm_80", "sm_90"], (8, 6), True),  # of its own generation
        (["sm_80", "sm_90"], (6, 1), False),
        (["sm_90"], (8, 0), False),
        (["sm_80"], (9, 0), False),
        (["sm_80", "compute_80"], (9, 0), True),  # compiled when it is loaded
        (["sm_100", "sm_120"], (12, 0), True),
        ([], (7, 0), True),  # nothing is known
    ],
)
def test_a_gpu_that_torch_has_no_code_for_is_known(built: list[str], capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(built, capability) is runs


def test_a_directory_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    found = examine(tmp_path)
    assert found.trouble == ""
    assert found.has_one_creator
    assert found.has_links
    assert found.has_whole_renames
    assert found.keeps_modes
    assert found.sees_at_once
    assert abs(found.ahead_s or 0.0) < 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_directory_that_is_none_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert examine(tmp_path / "absent").trouble == "does not exist"
    assert examine(tmp_path / "file").trouble == "is not a directory"


def test_the_kind_of_a_file_system_is_that_of_the_innermost_mount() -> None:
    mounts = "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:1 / /shared rw - nfs4 server:/x rw\n"
    assert kind_of_file_system("/shared/ada", mounts) == "nfs4"
    assert kind_of_file_system("/sharedother", mounts) == "ext4"
    assert kind_of_file_system("/shared", "") == ""


def test_the_secret_is_looked_at_and_not_made(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    assert secret_state(str(file)) == "missing"
    assert not file.exists()
    file.write_text("ab" * 32 + "\n")
    file.chmod(0o600)
    assert secret_state(str(file)) == "usable"
    file.chmod(0o644)
    assert "0644" in secret_state(str(file))
    assert "abab" not in secret_state(str(file))


def test_the_forecast_gives_the_faster_device_more_and_says_who_is_worth_having() -> None:
    fast, slow = Candidate("labA", BURN), Candidate("labA", replace(BURN, device="cuda:1", per_sample_s=3e-5))
    findings = list(foresee([fast, slow]))
    said = [finding.filled()[0] for finding in findings]
    assert "labA cuda:0 96, labA cuda:1 32" in said[0]  # 1 ms + n * 10 us and 1 ms + n * 30 us end together
    assert [finding.level for finding in findings] == ["ok", "ok", "ok"]


def told(candidates: list[Candidate]) -> list[str]:
    return [f"{one.level} {' '.join(one.filled())}".strip() for one in foresee(candidates)]


def pair(link: Link, **other: Any) -> list[Candidate]:
    """Two nodes with a GPU each; alone one takes 128 samples in 2.28 ms, and the two half of them in 1.64 ms."""
    return [Candidate("labA", BURN, link), Candidate("labB", replace(BURN, **other), link)]


def test_a_node_is_named_with_what_it_brings_or_costs() -> None:
    assert told(pair(Link(1e11)))[1:] == [
        "ok labA is worth using, a step is 26% shorter: 1.7 ms, without it 2.3 ms",
        "ok labB is worth using, a step is 26% shorter: 1.7 ms, without it 2.3 ms",
    ]
    hardly = told(pair(Link(1e10), per_sample_s=2e-5))  # 0.42 ms of exchange
    assert hardly[1:] == [
        "note labB hardly changes a step (less than 0.1%): 2.3 ms, without it 2.3 ms you may leave it out; from"
        " 2 times the batch on (--update-freq 2) it is worth using"
    ]
    costly = told(pair(Link(4e9), per_sample_s=2e-5))  # 1.05 ms
    assert costly[1] == (
        "warning labB makes a step 28% longer: 2.9 ms, without it 2.3 ms leave it out for a task of this size;"
        " from 4 times the batch on (--update-freq 4) it is worth using"
    )
    assert len(costly) == 2  # that the best node is in the way of the others is nothing to say


def test_a_node_that_no_batch_makes_worth_having_is_told_so() -> None:
    (_, line, *_) = told(pair(Link(1e6)))
    assert line.startswith("warning labB makes a step 1,840 times as long: 4195.9 ms, without it 2.3 ms")
    assert "even 64 times the batch would not change that: only a faster network would" in line
    (_, line) = told(pair(Link(5e10), per_sample_s=1e-2))
    assert line.startswith("warning labB makes a step 4% longer")
    assert "even 64 times the batch would not change that: it is too slow for the others" in line


def test_a_weak_device_of_the_only_node_is_named_with_its_percentage() -> None:
    strong, weak = Candidate("labA", BURN), Candidate("labA", replace(BURN, device="cuda:1", per_sample_s=2e-4))
    lines = told([strong, weak])
    assert lines[1].startswith("ok labA cuda:0 is worth using")
    assert lines[2].startswith("ok labA cuda:1 is worth using, a step is 3% shorter")


def test_one_of_many_equal_nodes_is_worth_having() -> None:
    def many(first_s: float) -> list[str]:
        burns = [replace(BURN, fixed_s=0.0, per_sample_s=1e-5 if number else first_s) for number in range(70)]
        return told([Candidate(f"lab{number}", burn, Link(1e12)) for number, burn in enumerate(burns)])

    assert (
        sum(" is worth using, a step is " in line for line in many(1e-5)) == 70
    )  # 1.5%: 65 samples each in place of 64
    assert many(1e-3)[1].startswith("note lab0 hardly changes a step")


def test_fewer_nodes_that_are_as_fast_as_all_are_told_once() -> None:
    def fewer(links: list[Link], **other: Any) -> list[str]:
        burns = [BURN, BURN, replace(BURN, **other)]
        every = [Candidate(node, burn, link) for node, burn, link in zip(("labA", "labB", "labC"), burns, links)]
        return [line for line in told(every) if "all 3 nodes" in line]

    assert fewer([Link(3e9)] * 3) == [
        "warning labA alone takes 2.9 ms, all 3 nodes 3.5 ms start a task of this size on labA alone, and keep the"
        " others for a larger batch"
    ]
    assert fewer([Link(1e11), Link(1e11), Link(1e9)]) == [
        "warning labA and labB by themselves take 2.0 ms, all 3 nodes 7.2 ms start a task of this size on labA and labB"
        " alone, and keep the others for a larger batch"
    ]
    assert fewer([Link(1e11)] * 3) == []
    assert len(fewer([Link(1e11)] * 3, per_sample_s=1e-2)) == 1  # no slower with it, and no faster


def test_more_devices_in_one_node_are_advised_where_the_network_takes_most_of_a_step() -> None:
    advice = [line for line in told(pair(Link(1e9))) if "in one node" in line]
    assert advice == [
        "note the exchange over the network is 72% of a step; 2 devices like labA cuda:0 in one node would take"
        " 1.6 ms, not 5.8 ms ask for more devices in one node rather than for more nodes, or for a faster network"
        " between them"
    ]
    assert not any("in one node" in line for line in told(pair(Link(1e11))))


def test_gpus_that_a_node_has_idle_are_advised_before_other_nodes_if_they_are_faster() -> None:
    def idle(link: Link) -> list[str]:
        first, second = pair(link)
        return [line for line in told([replace(first, idle_gpus=3), second]) if "did not see" in line]

    assert idle(Link(1e9)) == [
        "note labA has 3 more GPUs that the doctor did not see; with all 4 it would take 1.3 ms alone; all nodes as"
        " they are take 5.8 ms use those GPUs of labA before you add nodes, if they are yours to use"
        " (CUDA_VISIBLE_DEVICES, --gres)"
    ]
    assert idle(Link(1e11)) != []  # four are faster than two over any network
    first, second = pair(Link(1e9))
    assert not any("did not see" in line for line in told([first, second]))
    assert replace(GOOD, gpus_of_driver=4).idle_gpus == 3
    assert replace(GOOD, gpus_of_driver=4, torch=replace(TORCH, devices=())).idle_gpus == 0


def test_ranks_that_take_turns_on_few_cores_are_told_with_what_that_costs() -> None:
    def four(cores: float) -> list[str]:
        return told([Candidate("labA", replace(BURN, device=f"cuda:{index}"), cores=cores) for index in range(4)])

    (line,) = [line for line in four(2) if "take turns" in line]
    assert line == (
        "warning 4 ranks of labA take turns on 2 cores: a step takes 2.6 ms, with a core for each 1.6 ms, and data"
        " loading needs more cores ask the queue for at least 4 cores on labA, better 8 (in Slurm --cpus-per-task)"
    )
    assert not any("take turns" in line for line in four(4))
    cpus = [Candidate("labA", replace(BURN, device="cpu"), cores=0.5)] * 2  # it was measured like that
    assert not any("take turns" in line for line in told(cpus))


def test_the_candidates_of_a_node_know_its_cores_and_its_idle_gpus() -> None:
    (one,) = candidates_of("labA", replace(changed("limits.quota", 3.0), gpus_of_driver=2), Link(1e9))
    assert one == Candidate("labA", BURN, Link(1e9), cores=3.0, idle_gpus=1)


def test_nothing_burnt_nothing_foretold() -> None:
    assert list(foresee([])) == []


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--dri", "x"], "did you mean --dir?"),
        (["--dir"], "has no value"),
        (["--seconds", "soon"], "expected seconds from 0 to 600"),
        (["--seconds", "-1"], "expected seconds from 0 to 600"),
        (["RUN"], "unexpected argument RUN: expected options alone"),
    ],
)
def test_a_wrong_command_line_is_answered(words: list[str], part: str) -> None:
    with pytest.raises(ConfigError, match="hetseq doctor") as caught:
        doctor.parse(words)
    assert part in str(caught.value)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        doctor.write(tmp_path / "absent" / "doctor.json", {})


def test_the_real_command_examines_this_machine(tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "doctor.json"
    code = doctor.run(["--dir", str(tmp_path), "--seconds", "0.1", "--json", str(file)], said.append)
    assert code == int(said[-1].startswith("not ready"))
    assert max(map(len, said)) <= COLUMNS
    (node,) = json.loads(file.read_text())["nodes"]
    assert node["versions"]["python"] == sys.version.split()[0]
    assert node["burn_in"][0]["per_sample_s"] > 0
    hidden = [str(tmp_path), *(one.address for one in interfaces() if not is_loopback(one.address))]
    assert not [name for name in hidden if name in file.read_text()]


def test_sizes_are_written_for_people() -> None:
    assert size(1.5 * GIB) == "1.5 GiB"
    assert size(5 << 20) == "5 MiB"


def test_a_user_who_stops_it_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hetseq.commands.doctor.collect.gather", interrupted)
    said: list[str] = []
    assert doctor.run([], said.append) == 1
    assert said == ["stopped before everything was examined"]


def test_a_gpu_is_told_with_what_is_free_and_whether_there_is_code_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    about = SimpleNamespace(name="GTX 1080", total_memory=8 * GIB, major=6, minor=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (7 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_86"])
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    assert in_torch.gpu(1) == Device("cuda:1", "GTX 1080", 8 * GIB, 7 * GIB, "6.1", is_built_for=False)
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm names its generations otherwise
    assert in_torch.gpu(1).is_built_for


def test_a_slow_device_has_a_speed_and_not_none() -> None:
    facts = changed("torch.burns", (replace(BURN, tflops=0.0042),))
    assert any("4.2 GFLOP/s" in " ".join(one.filled()) for one in judge(facts))
