"""`hetseq doctor`: is this node, or this cluster, fit for a training, and what should be done about it?

Responsible for the command line; `gathering` asks the machine, `findings` and `prediction` judge, `report` writes. The
one idea: facts first, judgements after, so that every sentence can be tested without a broken machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetseq.errors import ConfigError
from hetseq.registry import nearest

USAGE = """usage: hetseq doctor [--dir DIR] [--seconds S] [--secret-file FILE] [--json FILE]

  --dir DIR           a directory that the nodes share: try what its file system promises
  --seconds S         burn-in of each device, and a forecast from it; default 5, 0 leaves it out
  --secret-file FILE  look at this file of the secret in place of ~/.hetseq/secret
  --json FILE         write what was found to FILE, without names, addresses and paths, for others to read

Each finding is ok, a note, a warning or a problem, with what to do about it. Ends with 1 where anything is a problem.

  hetseq doctor --dir /shared/runs --json doctor.json
"""

_FLAGS = ("--dir", "--seconds", "--secret-file", "--json")
_EXAMPLE = "as in: hetseq doctor --dir /shared/runs --json doctor.json"
_LONGEST_S = 600.0


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    directory: Path | None = None
    seconds: float = 5.0
    secret_file: str | None = None
    json_file: Path | None = None


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
    return Arguments(
        directory=Path(given["--dir"]).absolute() if "--dir" in given else None,
        seconds=_seconds(given.get("--seconds", "5")),
        secret_file=given.get("--secret-file"),
        json_file=Path(given["--json"]) if "--json" in given else None,
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _LONGEST_S:
        raise ConfigError(f"hetseq doctor: --seconds {text}: expected seconds from 0 to {_LONGEST_S:.0f}, as in 5")
    return seconds


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """Examine this node; gives the exit code, 1 where anything is a problem. Raises ConfigError."""
    from hetseq.doctor.findings import exit_code, judge
    from hetseq.doctor.gathering import gather
    from hetseq.doctor.prediction import Candidate, foresee
    from hetseq.doctor.report import document, text

    arguments = parse(words)
    facts = gather(directory=arguments.directory, seconds=arguments.seconds, secret=arguments.secret_file)
    findings = [*judge(facts), *foresee([Candidate(facts.network.host, burn) for burn in facts.torch.burns])]
    for line in text(findings):
        say(line)
    if arguments.json_file is not None:
        write(arguments.json_file, document([facts], [findings]))
    return exit_code(findings)


def write(path: Path, content: object) -> None:
    """A file of JSON. Raises ConfigError where it cannot be written."""
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(
            f"hetseq doctor: --json {path} cannot be written ({error.strerror}): name a file in a directory of yours"
        ) from error
