"""Writes the archives of this folder. It is kept to show where they come from, and for the next format.

    unshare --mount --uts sh -c 'hostname old && mount -t tmpfs none /mnt && mount -t tmpfs none /dev/shm &&
        PYTHONPATH=. OMP_NUM_THREADS=1 python tests/golden/write_old.py /mnt'

The script ran at the commits that `old.json` names. It runs the real commands in the given folder and packs the files
that they write. What the present code reads in these files goes into `old.json`. Names on the command line choose some
of the archives. The script refuses to replace an archive. The namespaces keep the names of a machine out of the files.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import hetseq.nebula as nm
from tests.support.commands import HETSEQ, ROOT, Finished, run_command
from tests.support.old_files import GOLDEN, SHARED_MEMORY, describe, flip, losses, plain, planted, started
from tests.support.police import adopt_orphans
from tests.support.trials import checkpoints, events, until

LEFT_OUT = ("log", "status", "tensorboard", "stacks", "report.html", ".lock")

EXACT = shlex.split(
    "train --task old_tasks.py:Exact --devices cpu,cpu,cpu --balance 5,2,1 --precision fp64 --global-batch-size 8"
    " --max-update 12 --optimizer sgd --lr 0.0625 --momentum 0.5 --lr-scheduler constant --clip-norm 0 --seed 7"
    " --save-interval-updates 4 --persistent-time-interval 0"
)
SLOWLY = ["--throttle", "0:300"]  # so that a signal arrives before the run ends; no number changes
MIXED = shlex.split(
    "train --task old_tasks.py:Mixed --devices cpu,cpu --balance 2,1 --global-batch-size 12 --max-update 8 --lr 0.01"
    " --lr-scheduler constant --seed 7 --save-interval-updates 4 --persistent-time-interval 0"
)
OPTIMIZERS = {
    "adamw": ["--optimizer", "adamw", "--weight-decay", "0.01"],
    "lamb": ["--optimizer", "lamb", "--weight-decay", "0.01"],
    "adadelta": ["--optimizer", "adadelta", "--lr", "1"],
    "fp16": ["--task", "old_tasks.py:Loud", "--optimizer", "adamw", "--precision", "fp16"],
}
TEXT = shlex.split(
    "--devices cpu,cpu --balance 3,1 --valid-subset test --global-batch-size 8 --max-update 8 --lr 0.01 --seed 7"
    " --lr-scheduler constant --save-interval-updates 4 --persistent-time-interval 0 --no-epoch-checkpoints"
)
BERT = ["train", "--task", "bert", "--data", "bert_corpus", "--config-file", "bert_network.json", *TEXT]
BERT_HDF5 = ["train", "--task", "bert", "--data", "bert_hdf5_corpus", "--config-file", "bert_network.json", *TEXT]
GPT = ["train", "--task", "gpt", "--data", "gpt_corpus", "--config-file", "gpt_network.json", *TEXT]
BERT_NETWORK = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 32,
}  # fmt: skip
GPT_NETWORK = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 32, "max_position_embeddings": 32, "rms_norm_eps": 1e-5,
}  # fmt: skip


def main(scratch: Path, names: Sequence[str]) -> None:
    """Write the archives of these names, all by default."""
    adopt_orphans()
    path = GOLDEN / "old.json"
    for name in names or list(WRITERS):
        if (GOLDEN / f"{name}.tar.gz").exists():
            sys.exit(f"{name}.tar.gz is there, and an archive is never replaced: give a new format a new name")
        folder = scratch / name
        folder.mkdir()
        shutil.copy(GOLDEN / "old_tasks.py", folder)
        said = WRITERS[name](folder)
        pack(folder, GOLDEN / f"{name}.tar.gz")
        if name == "memory":
            said["resumed_from"] = resumed_from_memory(folder)
        everything = json.loads(path.read_text()) if path.exists() else {}
        content = (GOLDEN / f"{name}.tar.gz").read_bytes()
        everything[name] = {"commit": commit(), "sha256": hashlib.sha256(content).hexdigest(), **said}
        path.write_text(json.dumps(everything, indent=1) + "\n")


def exact(folder: Path) -> dict[str, Any]:
    """An undisturbed run, with its evaluation and predictions."""
    run(folder, [*EXACT, "--save-dir", "exact"])
    evaluated = run(folder, ["evaluate", "exact", "--json"])
    run(folder, ["predict", "exact", "--subset", "valid", "--output", "exact_predictions.txt"])
    return {"command": [*EXACT, "--save-dir", "exact"], **facts(folder / "exact"), "evaluated": evaluated.out}


def stopped(folder: Path) -> dict[str, Any]:
    """A run that SIGTERM stopped, with checkpoints of the kinds `time` and `signal`."""
    command = [*EXACT[:-1], "0.4", "--save-dir", "stopped"]  # of --persistent-time-interval
    with started([*command, *SLOWLY], folder / "stopped", is_cold=True) as trial:
        trial.wait_for_step(7)
        trial.signal(signal.SIGTERM, trial.launcher)
        finished = trial.finish()
    assert finished.code == 75, finished.err
    said = facts(folder / "stopped")
    kinds = {kind for entry in said["checkpoints"] for kind in entry["kinds"]}
    assert {"time", "signal"} <= kinds, kinds
    return {"command": command, **said}


def torn(folder: Path) -> dict[str, Any]:
    """A killed run with a wrong byte in its newest commit, an attempt without a commit, and half a row at its end."""
    command, run_folder = [*EXACT, "--save-dir", "torn"], folder / "torn"
    with started([*command, *SLOWLY, "--memory-interval-updates", "0"], run_folder, is_cold=True) as trial:
        until(lambda: 8 in {each.identity.step for each in checkpoints(run_folder).list()}, "the commit of step 8")
        trial.kill_everything()
    intact = {each.identity.step: each.path for each in checkpoints(run_folder).list()}
    assert sorted(intact) == [4, 5, 8]
    (intact[8] / "COMMIT.json").unlink()  # as if the kill had come before the second part was whole
    (intact[8] / "part-00001.json").unlink()
    flip(intact[5] / "part-00001.safetensors", -5)
    rows = run_folder / "metrics.jsonl"
    whole = rows.read_bytes()
    whole = whole[: whole.rindex(b"\n") + 1]
    last = whole.splitlines()[-1]
    rows.write_bytes(whole + last[: len(last) // 2])
    return {"command": command, **facts(run_folder), "damaged": 5, "resumes_from": 4}


def memory(folder: Path) -> dict[str, Any]:
    """A run that SIGKILL ended between two saves, and its arenas in shared memory."""
    command, run_folder = [*EXACT, "--save-dir", "memory"], folder / "memory"
    with started([*command, *SLOWLY, "--memory-interval-updates", "1"], run_folder, is_cold=True) as trial:
        trial.wait_for_step(7)
        until(lambda: len(checkpoints(run_folder).list()) == 2, "the commits of steps 4 and 5")
        trial.kill_everything()
    arenas = folder / "memory_arenas"
    arenas.mkdir()
    for path in SHARED_MEMORY.glob("hetseq-*"):
        shutil.copy(path, arenas)
        path.unlink()
    assert len(list(arenas.iterdir())) == 6  # two of each rank
    return {"command": command, **facts(run_folder)}


def resumed_from_memory(folder: Path) -> int:
    """The step from which the present code resumes `memory`. Call it after the folder was packed."""
    with planted(folder / "memory_arenas", folder / "memory"):
        run(folder, [*EXACT, "--save-dir", "memory"])
    (event,) = events(folder / "memory", "resume")
    assert event["path"] is None
    return int(event["step"])


def nebula(folder: Path) -> dict[str, Any]:
    """Three tags, of which the newest is damaged, and a folder without COMMIT.json."""
    place, values = folder / "nebula", {}
    nm.init(place)
    for step in (1, 2, 3):
        checkpoint = nm.Checkpoint(f"global_step{step}")
        states = {"model": nebula_state(step), "optimizer": optimizer_state(step), "progress": {"step": step}}
        for name, state in states.items():
            checkpoint.save(name, state)
        checkpoint.commit()
        checkpoint.wait()
        values[checkpoint.tag] = {name: plain(state) for name, state in states.items()}
    nm.close()
    (newest,) = place.glob("global_step3.*")
    attempt = place / "global_step4.0123456789abcdef"
    shutil.copytree(newest, attempt)
    (attempt / "COMMIT.json").unlink()
    flip(newest / "model.safetensors", -5)
    return {"values": values, "damaged": "global_step3"}


def nebula_state(step: int) -> dict[str, Any]:
    """One value of each type that a tag can hold; the tensors `tied`, `same` and `row` share their memory."""
    tied = torch.arange(12, dtype=torch.float32).reshape(3, 4) + step
    kinds = ("float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool", "complex64")
    return {
        "tied": tied,
        "same": tied,
        "row": tied[1],
        "kinds": {name: (torch.arange(5) * step).to(getattr(torch, name)) for name in kinds},
        "nested": [step, (1, (torch.full((2,), step), "text")), {"deep": [None, True, 2.5, -0.0, 1 << 70]}],
        "by_number": {1: "one", step + 10: [1, 2]},
        "ordered": OrderedDict(b=1, a=2),
        "words": {"c", "b"},
        "nothing": torch.empty(0, 3),
        "one": torch.tensor(step),
        "odd": [float("inf"), "Straße", ""],
    }


def optimizer_state(step: int) -> dict[str, Any]:
    """The state of an Adam after so many steps."""
    weight = torch.nn.Parameter(torch.arange(6, dtype=torch.float32))
    optimizer = torch.optim.Adam([weight], lr=0.125)
    for _ in range(step):
        optimizer.zero_grad()
        (weight * weight).sum().backward()
        optimizer.step()
    return optimizer.state_dict()


def bert(folder: Path) -> dict[str, Any]:
    """A corpus of BERT in records, and a run of a tiny network on it."""
    make_corpus(folder, "bert_corpus", ["preprocessing.bert_corpus", "--duplicate", "1"])
    write_network(folder, "bert_corpus/bert_config.json", "bert_network.json", BERT_NETWORK)
    return text_run(folder, [*BERT, "--save-dir", "bert"])


def bert_hdf5(folder: Path) -> dict[str, Any]:
    """The same text in the HDF5 files of 2020, and a run of the same network on them."""
    make_corpus(
        folder, "bert_hdf5_corpus", ["preprocessing.bert_corpus", "--duplicate", "1", "--output-format", "hdf5"]
    )
    write_network(folder, "bert_hdf5_corpus/bert_config.json", "bert_network.json", BERT_NETWORK)
    return text_run(folder, [*BERT_HDF5, "--save-dir", "bert_hdf5"])


def gpt(folder: Path) -> dict[str, Any]:
    """A corpus of GPT, and a run of a tiny network on it."""
    make_corpus(folder, "gpt_corpus", ["preprocessing.gpt_corpus"])
    write_network(folder, "gpt_corpus/config.json", "gpt_network.json", GPT_NETWORK)
    return text_run(folder, [*GPT, "--save-dir", "gpt"])


def make_corpus(folder: Path, name: str, words: Sequence[str]) -> None:
    """A corpus made of 15 kB of this repository's manual; the text itself is not packed."""
    pages = [ROOT / "README.md", ROOT / "docs" / "exactness.md", ROOT / "docs" / "bert.md"]
    text = "\n\n".join(page.read_text() for page in pages).encode("ascii", "ignore").decode()[:15_000]
    source = folder / "text.txt"
    source.write_text(text + "\n")
    made = ["--input", "text.txt", "--output", name, "--vocab-size", "320", "--max-seq-length", "32"]
    program = [sys.executable, "-m", *words, *made]
    subprocess.run(program, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    source.unlink()


def write_network(folder: Path, made: str, name: str, changes: dict[str, Any]) -> None:
    """Write the configuration of a tiny network for the vocabulary of a corpus."""
    before = json.loads((folder / made).read_text())
    kept = before if "bert" in name else {"vocab_size": before["vocab_size"]}
    (folder / name).write_text(json.dumps({**kept, **changes}, indent=2) + "\n")


def text_run(folder: Path, command: list[str]) -> dict[str, Any]:
    """Run the command, and evaluate the run."""
    run(folder, command)
    evaluated = run(folder, ["evaluate", command[-1], "--json"])
    return {"command": command, **facts(folder / command[-1]), "evaluated": evaluated.out}


def optimizers(folder: Path) -> dict[str, Any]:
    """A run of `Mixed` with each of the optimizers, and one of `Loud` in half precision, whose loss scale is halved."""
    said: dict[str, Any] = {}
    for name, words in OPTIMIZERS.items():
        command = [*MIXED, *words, "--save-dir", f"optimizers/{name}"]
        (folder / "optimizers").mkdir(exist_ok=True)
        run(folder, command)
        said[name] = {"command": command, **facts(folder / "optimizers" / name)}
    return {"runs": said}


WRITERS = {
    "exact": exact, "torn": torn, "nebula": nebula, "stopped": stopped, "memory": memory, "bert": bert,
    "bert_hdf5": bert_hdf5, "gpt": gpt, "optimizers": optimizers,
}  # fmt: skip


def facts(run_folder: Path) -> dict[str, Any]:
    """What the present code reads in a run directory."""
    return {"checkpoints": describe(run_folder), "losses": losses(run_folder)}


def run(folder: Path, words: Sequence[str]) -> Finished:
    """`hetseq WORDS` in the folder, which must succeed."""
    finished = run_command(words, cwd=folder, program=HETSEQ)
    assert finished.code == 0, finished.err
    return finished


def commit() -> str:
    """The commit of the present code. Fails if the packages differ from that commit."""
    packages = ["hetseq", "tasks", "preprocessing"]
    changed = subprocess.run(["git", "status", "--porcelain", *packages], cwd=ROOT, capture_output=True, check=True)
    assert not changed.stdout, changed.stdout.decode()
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=True, text=True).stdout[
        :12
    ]


def pack(folder: Path, path: Path) -> None:
    """Pack a folder: names sorted, no owners, no times."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for source in sorted(folder.rglob("*")):
            inside = source.relative_to(folder)
            if source.name == "old_tasks.py" or any(part in LEFT_OUT or part == "__pycache__" for part in inside.parts):
                continue
            entry = archive.gettarinfo(source, arcname=str(inside))
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            entry.mode = 0o700 if source.is_dir() else 0o600
            if source.is_file():
                archive.addfile(entry, io.BytesIO(source.read_bytes()))
            else:
                archive.addfile(entry)
    path.write_bytes(gzip.compress(packed.getvalue(), compresslevel=9, mtime=0))
    print(f"{path.name}: {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
