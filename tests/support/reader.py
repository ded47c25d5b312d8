"""A reader of the manual, who types its commands literally."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.support.commands import HETSEQ, Command, Finished, start_command
from tests.support.docs import DATA, HERE, MEETING, ROOT, goes_on_beside
from tests.support.places import free_port

PATIENCE_S = 110
#: for trainings with --data, which otherwise take minutes
_CUT_SHORT = ["--max-update", "4"]
#: a folder of text that a reader brings: some pages of the manual
_TEXT = "text"
_TEXT_PAGES = (
    "reference/errors", "concepts/hetseq-2020", "guides/network", "guides/multi-node", "guides/running",
)  # fmt: skip


class Reader:
    """A reader who types the commands of a page in a private folder, which is also the home directory.

    Commands find their files there, and leave their runs. `closing` ends commands that were not waited for.
    """

    def __init__(self, checkout: Path, closing: ExitStack) -> None:
        (checkout / "docs").symlink_to(ROOT / "docs")
        (checkout / "examples").symlink_to(ROOT / "examples")
        (checkout / "train.py").symlink_to(ROOT / "train.py")
        (checkout / _TEXT).mkdir()
        for name in _TEXT_PAGES:
            page = ROOT / "docs" / f"{name}.md"
            (checkout / _TEXT / f"{page.stem}.txt").symlink_to(page)
        self.checkout = checkout
        self._closing = closing
        self._beside: list[tuple[str, Command]] = []
        self._meeting = f"127.0.0.1:{free_port()}"

    def types(self, command: str, data: Path | None = None, *, is_cold: bool = False) -> str:
        """Run one command, which must succeed; returns its output.

        If it keeps running beside the next ones, `wait` reports its end.
        """
        if command == "wait":
            said = [_printed(earlier, beside.finish(timeout_s=PATIENCE_S)) for earlier, beside in self._beside]
            self._beside.clear()
            return "".join(said)
        words = [self._meant(word, data) for word in shlex.split(command.rstrip().removesuffix("&"))]
        is_long = words[:2] == ["hetseq", "train"] and "--data" in words
        started = start_command(
            [*words[1:], *(_CUT_SHORT if is_long else [])],
            cwd=self.checkout,
            program=HETSEQ if words[0] == "hetseq" else (sys.executable,),
            env={"HOME": str(self.checkout), "GLOO_SOCKET_IFNAME": "lo"},
            is_cold=is_cold,
            is_one_stream=True,
        )
        if goes_on_beside(command):
            self._beside.append((command, self._closing.enter_context(started)))
            return ""
        with started as alone:
            return _printed(command, alone.finish(timeout_s=PATIENCE_S))

    def _meant(self, word: str, data: Path | None) -> str:
        word = str(data) if word == DATA and data else word
        return word.replace(HERE, str(self.checkout)).replace(MEETING, self._meeting)


def _printed(command: str, ended: Finished) -> str:
    assert ended.code == 0, f"{command}\nended with {ended.code}: {ended.out}"
    return ended.out
