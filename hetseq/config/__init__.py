"""Parses a command line into a `Config` and back: defaults < the YAML file of `--config` < flags.

Everything follows from the dataclasses of `sections`: flags, YAML keys, the help text, `docs/reference/options.md`.
This package does not know what an option means, prints nothing and imports no torch.

The one idea: a value is *text with a place* (`--lr 0.1`, or line 3 of a file) until the type of its field reads it.
`lr: 1e-4`, text to YAML 1.1, is a number here, `save_dir: 2024` is a name, and `lr: fast` is refused with its place.
Flags and YAML are therefore read by the same function. Read `parsing` first; it uses `fields`, `flags`, `yaml_file`
and `docs_page`. The command lines of the other commands are in `command_line`.
"""

from __future__ import annotations

from hetseq.config.docs_page import all_flags, markdown, retired_notes, write_page
from hetseq.config.parsing import HelpRequested, complete, help_text, parse, with_own_options
from hetseq.config.yaml_file import FIRST_LINE, dump_yaml

__all__ = [
    "FIRST_LINE",
    "HelpRequested",
    "all_flags",
    "complete",
    "dump_yaml",
    "help_text",
    "markdown",
    "parse",
    "retired_notes",
    "with_own_options",
    "write_page",
]
