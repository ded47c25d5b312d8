"""The commands of 2020 and the set of flags: what other people's scripts rely on."""

from __future__ import annotations

import runpy
import shlex
import sys
from pathlib import Path

import pytest

from hetseq import cli
from hetseq.config import all_flags, dump_yaml, parse, retired_notes
from hetseq.config.sections import SAVE_DIR_OF_2020, Config
from hetseq.errors import ConfigError

GOLDEN = Path(__file__).parents[2] / "golden"
UPDATE = 'python -c "from hetseq.config import all_flags; print(*all_flags(), sep=chr(10))" > tests/golden/flags.txt'


def published(program: str = "train.py") -> list[str]:
    lines = (GOLDEN / "commands.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#") and f"/{program} " in line]


def arguments(command: str) -> list[str]:
    """What the program is given: without its name, and without what the shell keeps to itself."""
    words = shlex.split(command)
    start = next(place for place, word in enumerate(words) if word.endswith("train.py")) + 1
    end = next((place for place, word in enumerate(words) if word in ("2>&1", "|")), len(words))
    return words[start:end]


@pytest.mark.parametrize("command", published())
def test_a_published_command_is_accepted_as_written(command: str) -> None:
    argv = arguments(command)
    config = parse(argv, save_dir=SAVE_DIR_OF_2020)
    assert retired_notes(config) == ["--fast-stat-sync has no effect (always on: counts travel with every step)"]
    # the oracle for the rest: each option is the word after its flag
    told = {argv[place]: argv[place + 1] for place, word in enumerate(argv) if word.startswith("--")}
    assert config.task.task == told["--task"]
    assert config.data.data == told["--data"]
    assert config.task.vocab_file == told.get("--dict")
    assert config.task.config_file == told.get("--config_file")
    assert config.data.max_sentences == int(told["--max-sentences"])
    assert config.data.update_freq == (int(told["--update-freq"]),)
    assert config.data.valid_subsets == ("test",)
    assert config.data.num_workers == 4
    assert config.optimization.lr == (float(told["--lr"]),)
    assert config.optimization.max_update == int(told.get("--max-update", 0))
    assert config.optimization.max_epoch == int(told.get("--max-epoch", 0))
    assert config.optimization.total_num_update == int(told["--total-num-update"])
    assert config.checkpoint.save_dir == told.get("--save-dir", "checkpoints")
    assert config.distributed.distributed_init_method == told.get("--distributed-init-method")
    assert config.distributed.distributed_rank == int(told.get("--distributed-rank", 0))
    assert config.distributed.distributed_world_size == (
        int(told["--distributed-world-size"]) if "--distributed-world-size" in told else None
    )


@pytest.mark.parametrize("program", ["train.py", "hetseq/train.py", "hetseq"])
def test_the_programs_of_2020_keep_their_run_directory(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `main` is called with, taken from the programs themselves."""
    given: list[str | None] = []
    monkeypatch.setattr(cli, "train", lambda words, say, *, save_dir: given.append(save_dir) or 0)
    monkeypatch.setattr(sys, "argv", [program, "--seed", "1"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    if program == "hetseq":
        assert cli.main(["train", "--seed", "1"]) == 0
    else:
        with pytest.raises(SystemExit):
            runpy.run_path(str(GOLDEN.parents[1] / program), run_name="__main__")
    assert given == [None if program == "hetseq" else "checkpoints"]


def test_the_one_gpu_bert_command_means_what_it_meant() -> None:
    config = parse(arguments(published()[0]))
    assert (config.task.task, config.data.max_sentences, config.data.update_freq) == ("bert", 32, (4,))
    assert (config.optimization.lr, config.optimization.weight_decay) == ((0.0001,), 0.01)
    assert (config.optimization.warmup_updates, config.optimization.total_num_update) == (10_000, 1_000_000)
    assert (config.data.valid_subset, config.data.valid_subsets) == ("test", ("test",))
    assert (config.optimization.optimizer, config.optimization.clip_norm) == ("adam", 25.0)
    assert config != Config()


def test_a_published_command_survives_being_written_down(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for command in published():
        config = parse(arguments(command))
        file.write_text(dump_yaml(config), encoding="utf-8")
        assert parse(["--config", str(file)]) == config


def test_every_published_command_stands_in_the_file() -> None:
    trained = published()
    # BERT: 2 x one GPU, 2 x one node, 2 + 2 for two nodes, 1 job; MNIST: 1, 1, 2, jobs of 2, 4, 8 nodes; 10 settings
    assert len(trained) == 9 + 4 + 14 + 10
    assert len(set(trained)) == len(trained)
    assert len(published("eval_mnist.py")) == 1
    lines = (GOLDEN / "commands.txt").read_text(encoding="utf-8").splitlines()
    assert sum(1 for line in lines if line and not line.startswith("#")) == len(trained) + 1


def test_a_published_command_with_a_typo_is_refused() -> None:
    argv = arguments(published()[0].replace("--max-sentences", "--max-sentence"))
    with pytest.raises(ConfigError, match="unknown option --max-sentence: did you mean --max-sentences"):
        parse(argv)


def test_a_flag_that_comes_or_goes_is_noticed() -> None:
    frozen = (GOLDEN / "flags.txt").read_text(encoding="utf-8").split()
    added, removed = sorted(set(all_flags()) - set(frozen)), sorted(set(frozen) - set(all_flags()))
    assert not removed, f"{removed} went away, and somebody's script has them: retire them in RetiredConfig instead"
    assert not added, f"{added} is for ever; if it must be: {UPDATE}"
    assert frozen == all_flags()
