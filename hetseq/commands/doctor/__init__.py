"""`hetseq doctor`: checks whether this node, or a whole cluster, is ready to train, and what to fix.

Parses the command line; `collect` reads the machine, `node_findings` and `forecast` judge, `report` writes. The one
idea: facts first, judgements after, so that every sentence can be tested without a broken machine.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetseq.commands.doctor.facts import Facts
from hetseq.config.command_line import Command, CommandOption, Given, seconds, whole_number
from hetseq.config.sections import DistributedConfig
from hetseq.errors import EXIT_FAILED, ConfigError

_LONGEST_S, _LONGEST_WAIT_S = 600.0, 1e6
_MOST_NODES = 256


COMMAND = Command(
    "doctor",
    "Check whether this node, or the whole cluster, is ready to train, and what to fix.",
    usage=("[options]", "--join URL --min-nodes N [options]"),
    words=(
        CommandOption("--dir", "a directory that the nodes share: test its file system", "DIR"),
        CommandOption(
            "--seconds", "burn-in of each device, and a forecast from it; default 5, 0 skips it", "S",
            read=seconds(0, _LONGEST_S), default=5.0,
        ),
        CommandOption("--secret-file", "check this secret file instead of ~/.hetseq/secret", "FILE"),
        CommandOption(
            "--join",
            "meet the doctors of other nodes there, started with the same command: tcp://HOST:PORT or file:///PATH",
            "URL",
        ),
        CommandOption("--min-nodes", "with --join: the number of nodes", "N", read=whole_number(2, _MOST_NODES)),
        CommandOption(
            "--join-timeout", "with --join: seconds to wait for the others; default 600", "S",
            read=seconds(1, _LONGEST_WAIT_S),
        ),
        CommandOption("--json", "write the findings to FILE, without names, addresses and paths", "FILE"),
    ),
    examples=(
        "hetseq doctor --dir /shared/runs --json doctor.json",
        "hetseq doctor --join tcp://labA:29400 --min-nodes 2 --dir /shared/runs",
    ),
    notes=(
        "Each finding is ok, a note, a warning or a problem, and says what to do about it. Ends with 1 if there is a"
        " problem.",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class DoctorArguments:
    """The command line; `nodes` is 1 without --join."""

    directory: Path | None = None
    seconds: float = 5.0
    secret_file: str | None = None
    json_file: Path | None = None
    join: str | None = None
    nodes: int = 1
    join_timeout_s: float = 600.0


def parse(words: Sequence[str]) -> DoctorArguments:
    """Parse the command line of `hetseq doctor`. Raises ConfigError, HelpRequested."""
    given = COMMAND.read(words)
    for flag in ("--min-nodes", "--join-timeout"):
        if given[flag] is not None and given["--join"] is None:
            raise COMMAND.refusal(f"{flag} {given[flag]:g}: expected --join URL beside it")
    return DoctorArguments(
        directory=Path(given["--dir"]).absolute() if given["--dir"] is not None else None,
        seconds=given["--seconds"],
        secret_file=given["--secret-file"],
        json_file=Path(given["--json"]) if given["--json"] is not None else None,
        join=given["--join"],
        nodes=_nodes(given),
        join_timeout_s=given["--join-timeout"] or DoctorArguments.join_timeout_s,
    )


def _nodes(given: Given) -> int:
    if given["--join"] is None:
        return 1
    if given["--min-nodes"] is None:
        raise COMMAND.refusal(
            f"--join without --min-nodes: expected --min-nodes N, the number of nodes, from 2 to {_MOST_NODES}"
        )
    return int(given["--min-nodes"])


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """Examine this node, or all nodes together; returns the exit code, 1 if there is a problem.

    Raises ConfigError, and RendezvousError or a subclass if the other nodes are not found.
    """
    try:
        return _examine(words, say)
    except KeyboardInterrupt:
        say("stopped before everything was examined")
        return EXIT_FAILED


def _examine(words: Sequence[str], say: Callable[[str], None]) -> int:
    from hetseq.commands.doctor.collect import gather
    from hetseq.commands.doctor.forecast import candidates_of, foresee
    from hetseq.commands.doctor.node_findings import exit_code, judge
    from hetseq.commands.doctor.report import document, text

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


def _meeting(arguments: DoctorArguments) -> DistributedConfig | None:
    """The rendezvous options, as a run has them. Raises ConfigError for an invalid URL."""
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
    arguments: DoctorArguments,
    meeting: DistributedConfig,
    facts: Facts,
    words: Sequence[str],
    say: Callable[[str], None],
) -> int:
    """The examination of all nodes; the head prints the findings."""
    from hetseq.commands.doctor.cluster_findings import Examination, compare, side_by_side
    from hetseq.commands.doctor.coordinator import examine_together
    from hetseq.commands.doctor.forecast import foresee
    from hetseq.commands.doctor.node_findings import exit_code, judge
    from hetseq.commands.doctor.report import cluster_document, text

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
        say(f"all nodes together: {'not ready' if code else 'ready'}; see the findings on the head node")
    return code


def write(path: Path, content: object) -> None:
    """Write a JSON file. Raises ConfigError if it cannot be written."""
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"--json {path} cannot be written ({error.strerror}): name a file in a directory you may write to"
        ) from error
