"""Whether HetSeq works on a GPU: sections in the order of what they settle, each in a process with a time limit.

    python bench/gpu_check.py [--device cuda:0|cpu] [--budget 420] [--only NAME ...] [--out gpu_check.jsonl]
        [--packages DIR]

A section starts only if its limit fits into the rest of the budget, so the script always ends in time. Each section
writes one line of JSON to `--out` as soon as it ends. The last line holds the whole result; docs/gpu/ collects these
lines. A section that fails does not stop the others. The script prints a table and exits with 1 if a section failed.
`--device cpu` runs everything that needs no GPU. `--packages` names a folder of unpacked wheels, for machines on which
packages are missing. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

from figures import table
from gpu_sections.section import BENCH, CORE, ROOT, Check, one_line, read_lines

FORMAT = 1
MARK = "HETSEQ_GPU_CHECK"  # in the environment of every process that a section starts
LEFT_BEHIND_S = 3.0  # so long processes may take to end after their section


@dataclass(frozen=True)
class Section:
    """A part of the check. `limit_s` is for a machine with a GPU and some cores; one with two cores needs as much."""

    name: str  # of the module in gpu_sections
    limit_s: int
    about: str
    needs: tuple[str, ...] = ()  # packages
    not_built: str = ""  # what HetSeq does not have yet; then there is no such module


SECTIONS = (
    Section("facts", 20, "card, driver, torch and machine; HetSeq can be imported"),
    Section("errors", 45, "memory that runs out, assertions, illegal access, refused registration", CORE),
    Section("gloo", 45, "sums of gloo on this device, and a peer that is killed in one"),
    Section("worlds", 75, "the same losses on one rank, two, and ranks on GPU and CPU", CORE),
    Section("kill", 50, "two ranks are killed and come back, the losses stay", CORE),
    Section("memory", 60, "memory runs out in training, validation and between ranks", CORE),
    Section("lost_device", 60, "a device fails under one rank and the run resumes", CORE),
    Section("snapshot", 60, "a state saved during training is the state of its step", CORE),
    Section("resume", 120, "a run moves between GPU and CPU, and resumes from memory after a kill", CORE),
    Section("precision", 90, "fp32, bf16, fp16 and packing of BERT and GPT", CORE),
    Section("speed", 90, "sequences a second of BERT, and the share of the card's peak", (*CORE, "h5py")),
    Section("overhead", 90, "a step of HetSeq against a bare loop", (*CORE, "h5py")),
    Section("exchange", 40, "bandwidth of gloo and of copies between GPU and host"),
    Section("compiled", 150, "--compile: the losses of an eager run, and what compiling takes", CORE),
    Section("lora", 300, "LoRA on a Llama of 1 B weights, with a rank on the CPU", (*CORE, "transformers", "peft")),
    Section("shard", 300, "two ranks on one card own 3/4 and 1/4 of the state of BERT-large", (*CORE, "h5py")),
    Section("layers", 200, "parameters that come and go: losses of several layouts, and memory", CORE),
    Section("offload", 180, "activations leave for host memory, and come back ahead of backward", CORE),
    Section("nccl", 20, "what torch's NCCL does here; HetSeq does not use it yet"),
    Section(
        "shared_memory",
        0,
        "exchange between GPUs of a node through shared memory",
        not_built="exchange between GPUs of a node through shared memory; they use gloo",
    ),
    Section("marked_tests", 40, "the tests marked gpu", (*CORE, "pytest", "pytest_timeout")),
    Section("fake", 60, "faults of GPUs in torch's own words, on the CPU", CORE),
)
NAMES = tuple(section.name for section in SECTIONS)


@dataclass
class Result:
    """The result of a section."""

    section: str
    result: str  # "passed", "failed" or "skipped"
    seconds: float = 0.0
    cause: str = ""  # one line: why it failed or was skipped
    checks: list[Check] = field(default_factory=list)
    output: str = ""  # the end of what a section that failed has printed

    def figure(self) -> str:
        """Its figure in a table."""
        if self.cause:
            return self.cause
        telling = [check for check in self.checks if check.expected] or self.checks
        return one_line("; ".join(f"{check.name}: {check.figure}" for check in telling[-2:]), most=120)

    def expected(self) -> str:
        """The expected value of the check that failed, or the number of checks."""
        failed = [check for check in self.checks if not check.passed]
        return failed[0].expected if failed else f"{len(self.checks)} checks" if self.checks else ""


class Stopped(Exception):
    """A signal asked the script to stop."""


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments; an error ends the script in words."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="sections: " + "; ".join(f"{section.name}: {section.about}" for section in SECTIONS),
    )
    parser.add_argument("--device", default="cuda:0", help="cuda, cuda:N or cpu (default: cuda:0)")
    parser.add_argument("--budget", type=float, default=420.0, metavar="SECONDS", help="of the whole check")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=list(NAMES), help="these sections alone")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.jsonl"), help="JSON lines are appended to it")
    parser.add_argument("--packages", type=Path, metavar="DIR", help="a folder of unpacked wheels")
    arguments = parser.parse_args(words)
    kind, _, number = arguments.device.partition(":")
    if kind not in ("cuda", "cpu") or (number and not number.isdecimal()) or (kind == "cpu" and number):
        parser.error(f"--device {arguments.device}: expected cuda, cuda:N or cpu")
    arguments.device = "cuda:0" if arguments.device == "cuda" else arguments.device
    unknown = [name for name in arguments.only if name not in NAMES]
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: expected some of {', '.join(NAMES)}")
    if not arguments.budget > 0:
        parser.error(f"--budget {arguments.budget:g}: expected seconds above 0")
    if arguments.packages is not None and not arguments.packages.is_dir():
        parser.error(f"--packages {arguments.packages}: expected a folder")
    if not arguments.out.absolute().parent.is_dir():
        parser.error(f"--out {arguments.out}: expected a file in a folder that exists")
    return arguments


def main(words: Sequence[str] | None = None, sections: Sequence[Section] = SECTIONS) -> int:
    """Run the sections and print the table; 1 where one failed, 2 where there is no such device, 130 if stopped."""
    arguments = parse(words)
    began_s = time.monotonic()
    refusal = refuse(arguments.device, environment_of(arguments, ""))
    if refusal:
        print(f"gpu_check.py: {refusal}", file=sys.stderr)
        return 2
    start = {
        "gpu_check": FORMAT, "time_utc": f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}", "device": arguments.device,
        "budget_s": arguments.budget, "python": platform.python_version(), "commit": commit(),
    }  # fmt: skip
    write(arguments.out, start)
    results: list[Result] = []
    is_stopped = False
    try:
        with stoppable():
            for result in run_all(sections, arguments, began_s + arguments.budget):
                results.append(result)
                write(arguments.out, {"section": asdict(result)})
                print(f"{mark(result)} {result.section:13} {result.seconds:6.1f} s  {result.figure()}", flush=True)
    except Stopped:
        is_stopped = True
    counted = {what: sum(result.result == what for result in results) for what in ("passed", "failed", "skipped")}
    seconds = round(time.monotonic() - began_s, 1)
    end = {
        **start,
        "seconds": seconds,
        **counted,
        "is_stopped": is_stopped,
        "sections": [asdict(one) for one in results],
    }
    write(arguments.out, end)
    print(report(results))
    print(
        f"\n{counted['passed']} sections passed, {counted['failed']} failed, {counted['skipped']} skipped, in"
        f" {seconds:.0f} s{', stopped' if is_stopped else ''}; the last line of {arguments.out} holds all of it"
    )
    return 130 if is_stopped else int(counted["failed"] > 0)


def run_all(sections: Sequence[Section], arguments: argparse.Namespace, deadline_s: float) -> Iterator[Result]:
    """The result of each section that was asked for, in their order, as it comes."""
    with tempfile.TemporaryDirectory(prefix="hetseq-gpu-check-", ignore_cleanup_errors=True) as name:
        shared = Path(name) / "shared"
        shared.mkdir()
        for section in sections:
            if section.name not in arguments.only:
                continue
            left_s = deadline_s - time.monotonic()
            missing = [name for name in section.needs if not is_there(name, arguments.packages)]
            if section.not_built:
                yield Result(section.name, "skipped", cause=f"not built: {section.not_built}")
            elif missing:
                yield Result(section.name, "skipped", cause=f"needs the packages {', '.join(missing)}")
            elif section.limit_s > left_s:
                cause = f"it may take {section.limit_s} s, and {max(0.0, left_s):.0f} s of the budget are left"
                yield Result(section.name, "skipped", cause=cause)
            else:
                folder = Path(name) / section.name
                folder.mkdir()
                yield run_section(section, arguments, folder, shared)


def run_section(section: Section, arguments: argparse.Namespace, folder: Path, shared: Path) -> Result:
    """A section in a process of its own, to its end or its limit."""
    diary, printed, began_s = folder.with_suffix(".diary"), folder.with_suffix(".txt"), time.monotonic()
    token = f"{section.name}-{uuid.uuid4().hex[:12]}"
    command = [sys.executable, "-m", "gpu_sections.child", section.name, arguments.device, folder, shared, diary]
    with printed.open("wb") as output:
        child = subprocess.Popen(
            [*map(str, command)], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=folder,
            env=environment_of(arguments, token), start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            code = child.wait(section.limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if code is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            left = end_processes(token, patience_s=0.0 if code is None else LEFT_BEHIND_S)
    result = judge(section, code, read_lines(diary), left)
    result.seconds = round(time.monotonic() - began_s, 1)
    if result.result == "failed":
        result.output = printed.read_text(encoding="utf-8", errors="replace")[-4000:]
    return result


def judge(section: Section, code: int | None, diary: Sequence[Mapping[str, Any]], left: Sequence[str]) -> Result:
    """The result of a section from what it wrote, how it ended, and the processes that it left behind.

    `code` is its exit code, None where it was ended at its limit.
    """
    checks = [Check(**entry["check"]) for entry in diary if "check" in entry]
    failed = [check for check in checks if not check.passed]
    last = {key: value for entry in diary for key, value in entry.items()}
    doing = f", in: {last['doing']}" if "doing" in last else ""
    result = Result(section.name, "failed", checks=checks)
    if failed:
        result.cause = failed[0].told()
    elif code is None:
        result.cause = f"it did not end within {section.limit_s} s{doing}"
    elif "error" in last:
        result.cause = last["error"]
    elif code < 0:
        result.cause = f"its process was ended by {signal.Signals(-code).name}{doing}"
    elif "skipped" in last or "not_built" in last:
        result.result, result.cause = "skipped", last.get("skipped") or f"not built: {last['not_built']}"
    elif "is_over" not in last:
        result.cause = f"its process ended with {code}{doing}"
    elif left:
        result.cause = f"it left processes behind: {', '.join(left)}"
    elif not checks:
        result.cause = "it checked nothing"
    else:
        result.result = "passed"
    result.cause = one_line(result.cause)
    return result


def end_processes(token: str, *, patience_s: float) -> list[str]:
    """End what a section has left behind after `patience_s`; the names of these processes."""
    deadline_s = time.monotonic() + patience_s
    while (left := processes_of(token)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return sorted(left.values())


def processes_of(token: str) -> dict[int, str]:
    """The processes with this mark in their environment, which children inherit: pid -> command line."""
    found, wanted = {}, f"{MARK}={token}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(path.name)] = one_line(f"{path.name} {words}", most=80)
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def environment_of(arguments: argparse.Namespace, token: str) -> dict[str, str]:
    """The environment of a section: where modules are, the mark, and one thread a rank where cores are few."""
    folders = [str(ROOT), str(BENCH), *([str(arguments.packages.absolute())] if arguments.packages else [])]
    before = os.environ.get("PYTHONPATH")
    environment = {**os.environ, MARK: token, "PYTHONPATH": os.pathsep.join([*folders, *([before] if before else [])])}
    if arguments.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
        environment["CUDA_VISIBLE_DEVICES"] = ""  # the same sections wherever it is asked for
    return environment


def refuse(device: str, environment: Mapping[str, str]) -> str:
    """Why the device cannot be checked, "" where it can; asked in another process, since this one opens no GPU."""
    script = f"""
import torch
device = torch.device({device!r})
count = torch.cuda.device_count()
if device.type == "cuda" and not torch.cuda.is_available():
    why = "was built without CUDA" if torch.version.cuda is None else "sees none (nvidia-smi tells why)"
    print(f"there is no GPU here: torch {{torch.__version__}} {{why}}. --device cpu checks what needs none")
elif device.type == "cuda" and device.index >= count:
    print(f"--device {{device}}: torch sees {{count}} GPUs here, cuda:0 to cuda:{{count - 1}}")
"""
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"torch cannot be imported: {one_line(done.stderr.strip().rpartition(chr(10))[2])}"
    return done.stdout.strip()


def is_there(package: str, folder: Path | None) -> bool:
    """Whether a package can be imported by a section."""
    is_beside = folder is not None and any((folder / name).exists() for name in (package, f"{package}.py"))
    return is_beside or importlib.util.find_spec(package) is not None


def commit() -> str:
    """The commit of this checkout, with "+" where files differ from it; "" outside of git."""
    try:
        asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def write(path: Path, entry: Mapping[str, Any]) -> None:
    """Append a line of JSON, at once."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def mark(result: Result) -> str:
    """The result as the first word of a line."""
    return {"passed": "pass", "failed": "FAIL", "skipped": "skip"}[result.result]


def report(results: Sequence[Result]) -> str:
    """The table at the end, with causes shortened; the lines printed before have them in full."""
    rows = [
        (
            result.section,
            result.result,
            f"{result.seconds:.1f}",
            one_line(result.figure().replace("|", "/"), most=120),
            result.expected(),
        )
        for result in results
    ]
    return "\n" + table(("section", "result", "seconds", "figure, or why not", "expected"), rows)


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise Stopped, so that the results so far are still written and shown."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
