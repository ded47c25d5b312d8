"""The command line of `hetseq ssh`."""

from __future__ import annotations

import shlex

import pytest

from hetseq.errors import ConfigError
from hetseq.ssh import parse


def test_hosts_are_names_with_or_without_their_workers() -> None:
    request = parse(shlex.split("--hosts ada@labA:2,labB,[fd00::1]:4 -- --task mnist --global-batch-size 8"))
    assert request.hosts == (("ada@labA", 2), ("labB", None), ("[fd00::1]", 4))
    assert request.address == "labA"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--hosts a:2", "hetseq ssh: expected the options of hetseq train behind --"),
        ("--hosts a:0 -- --task mnist", "'a:0' is no host"),
        ("--hosts=-oProxyCommand=x -- --task mnist", "is no host"),
        ("--hosts a,a -- --task mnist", "names a host twice"),
        ("--hosts a:1,b:1 -- --task mnist --learning-rat 1", "--learning-rat"),
        ("--hosts a:1,b:1 -- --task mnist", "need --global-batch-size N"),
        ("--hosts a:1 -- --task mnist --global-batch-size 8 --distributed-gpus 2", "--hosts says how many workers"),
        ("--host a:1 -- --task mnist", "unknown option --host: did you mean --hosts?"),
        ("-- --task mnist", "--hosts LIST is missing"),
        ("--hosts a:1 --task mnist -- --lr 1", "--task is an option of hetseq train: write it behind --"),
        ("--hosts a:1 --port 0 -- --task mnist", "--port 0: expected a whole number from 1 to 65535"),
    ],
)
def test_a_line_that_cannot_be_meant_is_refused_before_any_connection(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(shlex.split(line))
    assert said in str(refusal.value)
