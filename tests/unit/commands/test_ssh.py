"""The command line of `hetseq ssh`."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetseq.commands.run_script import Program
from hetseq.commands.ssh import command as ssh
from hetseq.commands.ssh import connections
from hetseq.commands.ssh import remote as far_end
from hetseq.commands.ssh.command import COMMAND, FanOut
from hetseq.errors import EXIT_STOPPED, ConfigError, RendezvousError
from hetseq.system.processes import ECHO_S
from tests.unit.commands.test_script import program

#: the far end, played by a shell: what it does after the word to begin follows from the name of its host
FAR_END = """
while [[ "$1" == -* ]]; do [ "$1" = -o ] && shift; shift; done
[ "$1" = mute ] && exec sleep 100
[ "$1" = off ] && { echo "ssh: no route" >&2; exit 255; }
read words
[ "$1" = echoes ] && echo "$words"
echo 'hetseq far end: {"workers": 1, "port": 7, "secret": "same"}'
read begin || exit 75
case "$1" in
  lost) kill -9 $$ ;;
  cut) exit 255 ;;
  deaf) exec sleep 100 ;;
  polite) read stop; echo "heard $stop"; exit 75 ;;
esac
echo one; printf 'two, and no end' ; exit 0
"""


STATE = "--task mnist --global-batch-size 8 --shard-model state"


def parse(words: list[str]) -> ssh.SshRequest:
    return ssh.parse(COMMAND.read(words))


def test_hosts_are_names_with_or_without_their_workers() -> None:
    request = parse(shlex.split("--hosts ada@labA:2,labB,[fd00::1]:4 -- --task mnist --global-batch-size 8"))
    assert request.hosts == (("ada@labA", 2), ("labB", None), ("[fd00::1]", 4))
    assert request.address == "labA"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--hosts a:2", "hetseq ssh: expected the options of hetseq train after --"),
        ("--hosts a:0 -- --task mnist", "'a:0' is not a host"),
        ("--hosts=-oProxyCommand=x -- --task mnist", "is not a host"),
        ("--hosts a,a -- --task mnist", "names a host twice"),
        ("--hosts a:1,b:1 -- --task mnist --learning-rat 1", "--learning-rat"),
        ("--hosts a:1,b:1 -- --task mnist", "need --global-batch-size N"),
        ("--hosts a:1,b:1 -- run --cpu", "found no script behind run: expected -- run [options] SCRIPT.py [arguments]"),
        ("--hosts a:1,b:1 -- run --ranks 2 train.py", "--hosts sets the workers"),
        ("--hosts a:1 -- --task mnist --global-batch-size 8 --ranks 2", "--hosts sets the workers"),
        ("--host a:1 -- --task mnist", "unknown option --host: did you mean --hosts?"),
        ("-- --task mnist", "--hosts LIST is missing"),
        ("--hosts a:1 --task mnist -- --lr 1", "--task is an option of hetseq train: write it after --"),
        ("--hosts a:1 --port 0 -- --task mnist", "--port 0: expected a whole number from 1 to 65535"),
        (
            f"--hosts a,b --own-memory c:24G -- {STATE}",
            "--own-memory c:24G: expected HOST:VALUE with a host of --hosts",
        ),
        (f"--hosts a,b --own-memory stable -- {STATE}", "--own-memory stable: expected HOST:VALUE"),
        (f"--hosts a --own-memory a:1G --own-memory a:2G -- {STATE}", "--own-memory a:2G: expected HOST:VALUE"),
        (f"--hosts a,b --own-memory a:24X -- {STATE}", "--own-memory 24X: expected a size as in 24G or 500M"),
        (
            "--hosts a --own-memory a:1G -- --global-batch-size 8",
            "but --shard-model none keeps all of it on every rank",
        ),
    ],
)
def test_a_line_that_cannot_be_meant_is_refused_before_any_connection(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(shlex.split(line))
    assert said in str(refusal.value)


def test_options_about_the_meeting_are_read_on_a_host_that_does_not_know_the_place_yet() -> None:
    words = "--task mnist --cpu --global-batch-size 8 --ranks 2 --min-ranks 1 --max-ranks 9"
    assert far_end._facts(Program(tuple(shlex.split(words))))["workers"] == 2


class Fan:
    """Hosts that a shell plays, and what was said of them."""

    def __init__(self, folder: Path) -> None:
        self.out, self.err = list[str](), list[str]()
        self.bell, self.ring = os.pipe()
        self._ssh = folder / "ssh"
        program(self._ssh, FAR_END)

    def run(self, hosts: str, options: str = "", **limits: float) -> int:
        words = f"--hosts {hosts} --ssh {self._ssh} {options} -- {STATE}"
        fan = FanOut(parse(shlex.split(words)), self.bell, self.out.append, **limits)
        try:
            return fan.run()
        finally:
            fan.close()

    def close(self) -> None:
        os.close(self.bell)
        os.close(self.ring)


@pytest.fixture
def fan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fan]:
    found = Fan(tmp_path)
    monkeypatch.setattr(FanOut, "_tell", staticmethod(found.err.append))
    monkeypatch.setattr(connections, "_HANG_UP_S", 0.05)
    monkeypatch.setattr(connections, "_LOOK_S", 0.02)
    yield found
    found.close()


def test_the_memory_of_a_host_is_told_to_that_host_alone(fan: Fan) -> None:
    assert fan.run("echoes:2,b", "--own-memory echoes:stable,64G") == 0
    told = json.loads(next(line for line in fan.out if "words" in line).removeprefix("[echoes] "))
    assert told["words"][-4:] == ["--ranks", "2", "--own-memory", "stable,64G"]
    assert parse(shlex.split(f"--hosts a,b --own-memory b:24G -- {STATE}")).own_memory == {"b": "24G"}


def test_each_line_has_its_host_and_the_last_one_needs_no_end(fan: Fan) -> None:
    assert fan.run("a,b") == 0
    assert sorted(fan.out) == ["[a] one", "[a] two, and no end", "[b] one", "[b] two, and no end"]


@pytest.mark.parametrize(("hosts", "code", "why"), [("a,lost,b", 137, "it ended with 137"), ("a,cut", 1, "is lost")])
def test_a_host_that_ends_in_the_middle_is_told_and_the_others_stay(fan: Fan, hosts: str, code: int, why: str) -> None:
    assert fan.run(hosts) == code
    (said,) = [line for line in fan.err if line.startswith(hosts.split(",")[1])]
    assert why in said
    assert "the others wait for it. Ctrl-C" in said
    assert "[a] one" in fan.out


@pytest.mark.parametrize(("hosts", "end"), [("off", "your key there"), ("off,a", ". The other hosts are stopped")])
def test_a_host_that_ssh_does_not_reach_ends_the_command_with_1(fan: Fan, hosts: str, end: str) -> None:
    assert fan.run(hosts) == 1
    assert fan.err[-1].startswith("off cannot take part: it ended with 255 (ssh: no route); `")
    assert fan.err[-1].endswith(end)


def test_a_host_that_never_answers_is_named_twice(fan: Fan) -> None:
    with pytest.raises(RendezvousError, match=r"mute did not answer within 0.3 s over ssh; .* -o BatchMode=yes mute"):
        fan.run("mute", answer_s=0.3, said_s=0.0)
    assert fan.err == ["no answer from mute yet; the time limit is 0.3 s"]
    assert fan.out == []


def test_a_signal_is_passed_on_as_a_word(fan: Fan) -> None:
    os.write(fan.ring, bytes([signal.SIGTERM]))  # before anybody has answered
    assert fan.run("a,b") == EXIT_STOPPED
    assert fan.err[0] == "SIGTERM: all hosts finish their step; a second signal stops them at once"


def test_after_a_second_signal_a_deaf_host_is_cut_off(fan: Fan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "ECHO_S", -1.0)  # no time between the two
    begin = FanOut._begin

    def begin_and_stop_twice(self: FanOut) -> None:
        begin(self)
        self._heed(bytes([signal.SIGINT]))
        self._heed(bytes([signal.SIGINT]))

    monkeypatch.setattr(FanOut, "_begin", begin_and_stop_twice)
    assert fan.run("deaf,polite", last_s=0.1) == 137
    assert '[polite] heard {"stop": 2}' in fan.out


def test_the_echo_of_a_signal_is_no_second_one(fan: Fan, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ECHO_S > 0
    cuts = list[float | None]()
    begin = FanOut._begin

    def begin_and_echo(self: FanOut) -> None:
        begin(self)
        self._heed(bytes([signal.SIGINT]))
        self._heed(bytes([signal.SIGINT]))
        cuts.append(self._last_s)

    monkeypatch.setattr(FanOut, "_begin", begin_and_echo)
    assert fan.run("polite") == EXIT_STOPPED
    assert cuts == [None]
