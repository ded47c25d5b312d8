"""`hetseq doctor`: is this node, or this cluster, fit for a training, and what should be done about it?

Responsible for the command line; `gathering` asks the machine, `findings` and `prediction` judge, `report` writes. The
one idea: facts first, judgements after, so that every sentence can be tested without a broken machine.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetseq.config import DistributedConfig
from hetseq.doctor.facts import Facts
from hetseq.errors import EXIT_FAILED, ConfigError
from hetseq.registry import nearest

USAGE = """usage: hetseq doctor [--dir DIR] [--seconds S] [--secret-file FILE] [--json FILE]
       hetseq doctor --join URL --min-nodes N [--join-timeout S] [as above]

  --dir DIR           a directory that the nodes share: try what its file system promises
  --seconds S         burn-in of each device, and a forecast from it; default 5, 0 leaves it out
  --secret-file FILE  look at this file of the secret in place of ~/.hetseq/secret
  --join URL          meet the doctors of other nodes there, started with the same line: tcp://HOST:PORT or file:///PATH
  --min-nodes N       with --join: how many nodes there are
  --join-timeout S    with --join: wait so many seconds for the others; default 600
  --json FILE         write what was found to FILE, without names, addresses and paths, for others to read

Each finding is ok, a note, a warning or a problem, with what to do about it. Ends with 1 where anything is a problem.

  hetseq doctor --dir /shared/runs --json doctor.json
  hetseq doctor --join tcp://labA:29400 --min-nodes 2 --dir /shared/runs
"""

_FLAGS = ("--dir", "--seconds", "--secret-file", "--join", "--min-nodes", "--join-timeout", "--json")
_EXAMPLE = "as in: hetseq doctor --dir /shared/runs --json doctor.json"
_LONGEST_S, _LONGEST_WAIT_S = 600.0, 1e6
_MOST_NODES = 256


@dataclass(frozen=True)
class Arguments:
    """The command line; `nodes` is 1 without --join."""

    directory: Path | None = None
    seconds: float = 5.0
    secret_file: str | None = None
    json_file: Path | None = None
    join: str | None = None
    nodes: int = 1
    join_timeout_s: float = 600.0


def parse(words: Sequence[str]) -> Arguments:
    """The command line of `hetseq doctor`. Raises ConfigError."""
    given: dict[str, str] = {}
    left = list(words)
    while left:
        flag, equals, value = left.pop(0).partition("=")
        if flag not in _FLAGS:
            guess = nearest(flag, _FLAGS)
            hint = f"did you mean {guess}?" if guess else f"expected {', '.join(_FLAGS)}"
            raise ConfigError(f"hetseq doctor: unknown option {flag}: {hint}")
        if not equals and not left:
            raise ConfigError(f"hetseq doctor: {flag} stands without a value, {_EXAMPLE}")
        given[flag] = value if equals else left.pop(0)
    for flag in ("--min-nodes", "--join-timeout"):
        if flag in given and "--join" not in given:
            raise ConfigError(f"hetseq doctor: {flag} {given[flag]}: expected --join URL beside it")
    return Arguments(
        directory=Path(given["--dir"]).absolute() if "--dir" in given else None,
        seconds=_number("--seconds", given.get("--seconds", "5"), 0, _LONGEST_S),
        secret_file=given.get("--secret-file"),
        json_file=Path(given["--json"]) if "--json" in given else None,
        join=given.get("--join"),
        nodes=_nodes(given),
        join_timeout_s=_number("--join-timeout", given.get("--join-timeout", "600"), 1, _LONGEST_WAIT_S),
    )


def _number(flag: str, text: str, least: float, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise ConfigError(f"hetseq doctor: {flag} {text}: expected seconds from {least:g} to {most:g}, as in 5")
    return number


def _nodes(given: dict[str, str]) -> int:
    if "--join" not in given:
        return 1
    text = given.get("--min-nodes", "")
    if not (text.isascii() and text.isdigit() and 2 <= int(text) <= _MOST_NODES):
        found = f"--min-nodes {text}" if text else "--join without --min-nodes"
        raise ConfigError(
            f"hetseq doctor: {found}: expected --min-nodes N, the number of nodes, from 2 to {_MOST_NODES}"
        )
    return int(text)


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """Examine this node, or all nodes together; gives the exit code, 1 where anything is a problem.

    Raises ConfigError, and RendezvousError and its kind where the other nodes are not found.
    """
    try:
        return _examine(words, say)
    except KeyboardInterrupt:
        say("stopped before everything was examined")
        return EXIT_FAILED


def _examine(words: Sequence[str], say: Callable[[str], None]) -> int:
    from hetseq.doctor.findings import exit_code, judge
    from hetseq.doctor.gathering import gather
    from hetseq.doctor.prediction import candidates_of, foresee
    from hetseq.doctor.report import document, text

    arguments = parse(words)
    meeting = _meeting(arguments)
    facts = gather(directory=arguments.directory, seconds=arguments.seconds, secret=arguments.secret_file)
    findings = judge(facts)
    if meeting is None:
        findings += foresee(candidates_of(facts.network.host, facts))
    for line in text(findings):
        say(line)
    if arguments.json_file is not None:
        write(arguments.json_file, document([facts], [findings]))
    if meeting is None:
        return exit_code(findings)
    return max(exit_code(findings), _together(arguments, meeting, facts, words, say))


def _meeting(arguments: Arguments) -> DistributedConfig | None:
    """Where to meet, in the words of a run. Raises ConfigError for a URL that is none."""
    if arguments.join is None:
        return None
    usual = DistributedConfig()
    return DistributedConfig(
        join=arguments.join,
        min_ranks=arguments.nodes,
        join_timeout=arguments.join_timeout_s,
        secret_file=arguments.secret_file or usual.secret_file,
    )


def _together(
    arguments: Arguments, meeting: DistributedConfig, facts: Facts, words: Sequence[str], say: Callable[[str], None]
) -> int:
    """The examination of all nodes, told where it is led."""
    from hetseq.doctor.comparing import Examination, compare, side_by_side
    from hetseq.doctor.findings import exit_code, judge
    from hetseq.doctor.meeting import examine_together
    from hetseq.doctor.prediction import foresee
    from hetseq.doctor.report import cluster_document, text

    def judge_all(examined: Examination) -> int:
        each = [judge(one) for one in examined.facts]
        common = [*compare(examined), *foresee(examined.candidates())]
        say("")
        for line in side_by_side(examined):
            say(line)
        for number, (name, found) in enumerate(zip(examined.names, each), 1):
            bad = [finding for finding in found if finding.level in ("warning", "problem")]
            if bad and number > 1:
                say(f"node{number}, {name}:")
                for line in text(bad):
                    say(line)
        say("all nodes together:")
        for line in text(common):
            say(line)
        if arguments.json_file is not None:
            write(arguments.json_file, cluster_document(examined, each, common))
        return exit_code([*common, *(finding for found in each for finding in found)])

    code, is_head = examine_together(
        meeting,
        facts,
        nodes=arguments.nodes,
        directory=arguments.directory,
        interface=facts.network.wish or None,
        command=shlex.join(["hetseq", "doctor", *words]),
        tell=say,
        judge=judge_all,
    )
    if not is_head:
        say(f"all nodes together: {'not fit' if code else 'fit'}; the node that leads says why")
    return code


def write(path: Path, content: object) -> None:
    """A file of JSON. Raises ConfigError where it cannot be written."""
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"hetseq doctor: --json {path} cannot be written ({error.strerror}): name a file in a directory of yours"
        ) from error
