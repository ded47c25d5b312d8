"""The order of parsing: flags, then the file, then the user's own modules if they are still needed.

A user's task is imported only for flags that are otherwise unknown, for `--help`, and by `complete`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hetseq import registry
from hetseq.config.docs_page import full_help_page, help_page
from hetseq.config.fields import build, catalogue_of
from hetseq.config.flags import read_flags, refuse_unknown
from hetseq.config.sagemaker_keys import SageMakerConfig, as_options
from hetseq.config.sections import SECTIONS, Config, OptimizationConfig, TaskConfig, default_save_dir
from hetseq.config.yaml_file import compose, read_file
from hetseq.errors import HetSeqError

_EXTRA_KINDS = ("task", "optimizer", "lr_scheduler")


class HelpRequested(Exception):
    """`--help` or `--help-all` was on the command line; print `text`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def parse(
    argv: Sequence[str],
    *,
    leave_out: Collection[str] = (),
    also: Collection[str] = (),
    save_dir: str | None = None,
) -> Config:
    """The configuration that `argv` (without the program and its subcommand) describes.

    Keys in `leave_out` are skipped in the file, for a command that uses the file of another one. `also`: the flags that
    such a command has of its own and has taken out of `argv`; a misspelt flag may be meant as one of them.
    `save_dir`: the run directory without --save-dir; default: by the task.

    `extras` holds the options of the user's task, optimizer and schedule if any of them was given; `complete` adds
    the rest. Raises HelpRequested for `--help`, ConfigError for invalid words, and TaskFileError if a task must be
    imported to know its flags and cannot be.
    """
    catalogue = catalogue_of([*SECTIONS, SageMakerConfig])
    line = read_flags(argv, catalogue)
    if line.wants_help:
        raise HelpRequested(help_text(argv))
    entries = [entry for entry in compose(line.config_file) if entry[0].value not in leave_out]
    file = read_file(line.config_file, entries, catalogue)
    own: dict[str, type] = {}
    if line.unknown or file.unknown:
        found = {**file.found, **line.found}
        own = _own_sections(build(TaskConfig, found), build(OptimizationConfig, found))
        if own:
            catalogue = catalogue_of([*SECTIONS, SageMakerConfig, *own.values()])
            line, file = read_flags(argv, catalogue), read_file(line.config_file, entries, catalogue)
        refuse_unknown(line, file, catalogue, also)
    found = as_options({**file.found, **line.found})
    names = [field.name for field in dataclasses.fields(Config) if field.name != "extras"]
    sections = {name: build(section, found) for name, section in zip(names, SECTIONS, strict=True)}
    config = Config(**sections, extras={kind: build(cls, found) for kind, cls in own.items()})
    if "save_dir" not in found:
        save_dir = save_dir or default_save_dir(config.task.task)
        config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, save_dir=save_dir))
    _check_names(config)
    return config


def help_text(argv: Sequence[str] = ()) -> str:
    """The page of `--help`, or of `--help-all` if argv has that; with options of the user's task if argv names it."""
    catalogue = catalogue_of([*SECTIONS, SageMakerConfig])
    line = read_flags(argv, catalogue)
    own: dict[str, type] = {}
    note = ""
    try:
        file = read_file(line.config_file, compose(line.config_file), catalogue)
        found = {**file.found, **line.found}
        own = _own_sections(build(TaskConfig, found), build(OptimizationConfig, found))
    except HetSeqError as error:
        note = f"\nThe options of your own modules are missing here: {error}\n"
    return (full_help_page if line.wants_all else help_page)(own.values(), note)


def complete(config: Config) -> Config:
    """The same configuration with the options of the user's components that were not given, at their defaults.

    Imports the task if it is the user's own. Raises ConfigError for an option that has no default, and what
    `registry.find_task` raises.
    """
    own = _own_sections(config.task, config.optimization)
    missing = {kind: build(cls, {}) for kind, cls in own.items() if kind not in config.extras}
    return dataclasses.replace(config, extras={**config.extras, **missing})


def with_own_options(config: Config, values: Mapping[str, Mapping[str, Any]]) -> Config:
    """`complete`, for a process that has the values of own options by kind but not yet their classes."""
    own = _own_sections(config.task, config.optimization)
    given = {kind: cls(**values[kind]) for kind, cls in own.items() if kind in values}
    return complete(dataclasses.replace(config, extras={**config.extras, **given}))


def _own_sections(task: TaskConfig, optimization: OptimizationConfig) -> dict[str, type]:
    """The dataclasses that the user's components bring along, by kind; included names need no import."""
    # The task first: importing its file may register the optimizer and the schedule.
    names = {"task": task.task, "optimizer": optimization.optimizer, "lr_scheduler": optimization.lr_scheduler}
    sections = {kind: registry.options_of(kind, names[kind], user_dir=task.user_dir) for kind in _EXTRA_KINDS}
    return {kind: section for kind, section in sections.items() if section is not None}


def _check_names(config: Config) -> None:
    """Refuse an unknown optimizer or schedule at once, unless a module of the user's is still to be imported."""
    if config.task.user_dir is None and not registry.is_address(config.task.task):
        registry.check_name("optimizer", config.optimization.optimizer)
        registry.check_name("lr_scheduler", config.optimization.lr_scheduler)
