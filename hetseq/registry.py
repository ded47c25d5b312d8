"""Finds the class or function for a name on the command line.

A name is one of three: registered by a decorator, included with HetSeq, or an address (`package.module:Class`,
`file.py:Class`). The included ones are in a table of addresses and are imported on demand, so this module imports
neither torch nor a task. It knows no options and no configuration, and requires of a task only that it is a
`hetseq.Task`.

A user's file is imported once, under a name made from its full path, so two files called `model.py` do not collide.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from hetseq.errors import ConfigError, HetSeqError, TaskFileError
from hetseq.system.module_names import USER_PREFIX, bound_names

Thing = TypeVar("Thing")

#: the included components, by kind and name
_INCLUDED: dict[str, dict[str, str]] = {
    "task": {
        "bert": "hetseq.tasks.bert.task:BertTask",
        "bert_classify": "hetseq.tasks.bert.classify:BertClassifyTask",
        "bert_ner": "hetseq.tasks.bert.ner:BertNerTask",
        "gpt": "hetseq.tasks.gpt.task:GptTask",
        "hf_causal_lm": "hetseq.tasks.hf_causal_lm.task:HfCausalLmTask",
        "mnist": "hetseq.tasks.mnist:MNISTTask",
    },
    "optimizer": {
        **{name: f"hetseq.training.optim:{name}" for name in ("adam", "adamw", "sgd", "adadelta", "lamb")},
        "muon": "hetseq.training.muon:muon",
    },
    "lr_scheduler": {
        "polynomial": "hetseq.training.lr_scheduler:polynomial",
        "PolynomialDecayScheduler": "hetseq.training.lr_scheduler:polynomial",
        "polynomial_from_zero": "hetseq.training.lr_scheduler:polynomial_from_zero",
        "constant": "hetseq.training.lr_scheduler:constant",
        "cosine": "hetseq.training.lr_scheduler:cosine",
    },
}
#: dataclasses of included tasks' own options, in modules without torch; other options are in `hetseq.config.sections`
_INCLUDED_OPTIONS = {
    "bert": "hetseq.tasks.options:BertOptions",
    "bert_classify": "hetseq.tasks.options:BertClassifyOptions",
    "bert_ner": "hetseq.tasks.options:BertNerOptions",
    "gpt": "hetseq.tasks.options:GptOptions",
    "hf_causal_lm": "hetseq.tasks.options:HfCausalLmOptions",
}
#: checks of an included task's files before workers start, in a module without torch
_INCLUDED_CHECKS = {
    "bert": "hetseq.tasks.early_checks:check_bert",
    "bert_classify": "hetseq.tasks.early_checks:check_classify",
    "bert_ner": "hetseq.tasks.early_checks:check_ner",
    "gpt": "hetseq.tasks.early_checks:check_gpt",
    "hf_causal_lm": "hetseq.tasks.early_checks:check_hf_causal_lm",
    "mnist": "hetseq.tasks.early_checks:check_mnist",
}
_TASK_BASE = "hetseq.task:Task"
_FLAG = {"task": "--task", "optimizer": "--optimizer", "lr_scheduler": "--lr-scheduler"}
_WORDS = {"task": "task", "optimizer": "optimizer", "lr_scheduler": "learning-rate schedule"}


@dataclass(frozen=True)
class _Entry:
    thing: Any
    options: type | None


_registered: dict[str, dict[str, _Entry]] = {kind: {} for kind in _INCLUDED}


def register_task(name: str, *, options: type | None = None) -> Callable[[Thing], Thing]:
    """Decorator that registers a `Task` subclass as `--task name`; `options` is a dataclass of its own flags.

    Raises ConfigError if the name is already taken.
    """
    return _register("task", name, options)


def register_optimizer(name: str, *, options: type | None = None) -> Callable[[Thing], Thing]:
    """Decorator for `builder(parameter_groups, config, options)`, registered as `--optimizer name`."""
    return _register("optimizer", name, options)


def register_lr_scheduler(name: str, *, options: type | None = None) -> Callable[[Thing], Thing]:
    """Decorator for `builder(config, options)`, registered as `--lr-scheduler name`."""
    return _register("lr_scheduler", name, options)


def find_task(name: str, *, user_dir: str | None = None) -> type[Any]:
    """The `Task` subclass of `--task name`; imports it, and with it usually torch.

    `name` is a registered or included name, `package.module:Class`, `file.py:Class`, or `file.py` if that defines one
    task. Raises ConfigError for an unknown name and TaskFileError for an address that cannot be resolved.
    """
    import_user_dir(user_dir)
    address = _split_address(name)
    if address is None:
        task = _find_named("task", name)
    else:
        place, attribute = address
        module = _load_file(_task_file(place)) if place.endswith(".py") else _import_module(place, attribute)
        task = _get(module, attribute, place) if attribute else _only_task(module, place)
    if not (isinstance(task, type) and issubclass(task, _task_base())):
        raise _not_a_task(name, getattr(task, "__name__", task))
    return task


def find_tracker(name: str) -> Any:
    """The class of `--tracker package.module:Class` or `file.py:Class`; imports it. Raises HetSeqError."""
    place, attribute = _split_address(name) or (name, "")
    if place.endswith(".py"):
        if not os.path.isfile(place):
            raise ConfigError(f"--tracker {name}: there is no file {place}, seen from {Path.cwd()}")
        module = _load_file(Path(place))
    else:
        _append_to_path(Path.cwd())
        try:
            module = importlib.import_module(place)
        except Exception as error:  # a user's module may raise anything; reported with its place
            raise _import_failure(place, error) from error
    return _get(module, attribute, place)


def find_optimizer(name: str) -> Callable[..., Any]:
    """The builder of `--optimizer name`: `builder(parameter_groups, config, options)`.

    `find_task` has imported the user's modules before. Raises ConfigError for an unknown name.
    """
    return _find_builder("optimizer", name)


def find_lr_scheduler(name: str) -> Callable[..., Any]:
    """The builder of `--lr-scheduler name`: `builder(config, options)`. Raises ConfigError for an unknown name."""
    return _find_builder("lr_scheduler", name)


def options_of(kind: str, name: str, *, user_dir: str | None = None) -> type | None:
    """The dataclass of the flags that the named component brings along; None if it brings none.

    Included names import no task; others import `user_dir` and the module of the address. A name that is unknown
    afterwards has no options: `find_task` and the others report it. Raises ConfigError if `Options` is not a
    dataclass, and the errors of `find_task`.
    """
    if name in _INCLUDED[kind]:
        return _find_included_options(name) if kind == "task" and name in _INCLUDED_OPTIONS else None
    import_user_dir(user_dir)
    entry = _registered[kind].get(name)
    if entry is not None:
        thing, options = entry.thing, entry.options
    elif kind == "task" and _split_address(name) is not None:
        thing, options = find_task(name), None
    else:
        return None
    options = options if options is not None else getattr(thing, "Options", None)
    if options is not None and not (isinstance(options, type) and dataclasses.is_dataclass(options)):
        raise ConfigError(
            f"the options of {_FLAG[kind]} {name} are {options!r}: expected a dataclass, as in `@dataclass` and"
            " `class Options:`"
        )
    return options


def check_files(task: str, config: Any) -> None:
    """Check the files that an included task needs for this configuration; does nothing for other tasks.

    Imports no torch. Raises the ConfigError or DataError that the task itself would.
    """
    if task in _INCLUDED_CHECKS:
        place, _, attribute = _INCLUDED_CHECKS[task].partition(":")
        _get(_import_tasks(place), attribute, place)(config)


def check_address(name: str) -> None:
    """Refuse a `--task file.py:Class` that cannot be imported, as far as its text shows it; runs nothing.

    Raises the TaskFileError that `find_task` would. Classes that may be created while the file runs are accepted, and
    so are modules, which only an import finds.
    """
    address = _split_address(name)
    if address is None or not address[0].endswith(".py"):
        return
    place, attribute = address
    bound = bound_names(_parsed(_task_file(place)))
    if bound.may_have_more:
        return
    if attribute and attribute not in bound.names:
        raise _no_such_name(place, attribute, bound.classes)
    if attribute in bound.plain_classes:
        raise _not_a_task(name, attribute)


def check_user_dir(user_dir: str | None) -> None:
    """Refuse a folder that `import_user_dir` would, as far as the text of its files shows it; runs nothing."""
    for path in _user_files(user_dir):
        _parsed(path)


def included_options() -> dict[str, type]:
    """The dataclasses of included tasks' own flags, by the name of the task."""
    return {name: _find_included_options(name) for name in _INCLUDED_OPTIONS}


def _find_included_options(task: str) -> type:
    place, _, attribute = _INCLUDED_OPTIONS[task].partition(":")
    section: type = _get(_import_tasks(place), attribute, place)
    return section


def is_included(kind: str, name: str) -> bool:
    """Whether the name comes with HetSeq, so that no module of the user's has to be imported to know it."""
    return name in _INCLUDED[kind]


def included_names(kind: str) -> tuple[str, ...]:
    """The names that come with HetSeq."""
    return tuple(_INCLUDED[kind])


def is_address(name: str) -> bool:
    """Whether a task is given as `package.module:Class` or by a file."""
    return _split_address(name) is not None


def check_name(kind: str, name: str) -> None:
    """Raise ConfigError, with the nearest known name, unless the name is included or registered."""
    known = list(dict.fromkeys([*_INCLUDED[kind], *_registered[kind]]))  # included ones are registered too
    if name in known:
        return
    guess = nearest(name, known)
    guess = f" (did you mean {guess}?)" if guess else ""
    more = ", or an address as in my_task.py:MyTask or package.module:MyTask" if kind == "task" else ""
    raise ConfigError(
        f"{_FLAG[kind]} {name}: there is no such {_WORDS[kind]}{guess}; expected {', '.join(known)}{more}; your own are"
        " registered by the modules of --user-dir"
    )


def import_user_dir(user_dir: str | None) -> None:
    """Import every `*.py` of the folder, in the order of their names, so that their decorators run.

    Does nothing for None; a module that was imported before is not imported again. Raises ConfigError for a path that
    is not a folder and TaskFileError for a file that cannot be imported.
    """
    for path in _user_files(user_dir):
        _load_file(path)


def _user_files(user_dir: str | None) -> list[Path]:
    if user_dir is None:
        return []
    folder = Path(user_dir).expanduser()
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(f"--user-dir {user_dir}: {found}; expected a folder with Python files")
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("."))
    if not files:
        raise ConfigError(f"--user-dir {user_dir}: expected Python files in it, found none")
    return files


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The entry of `known` that `word` probably means, or None."""
    folded = {name.casefold(): name for name in known}
    closest = difflib.get_close_matches(word.casefold(), folded, n=1)
    return folded[closest[0]] if closest else None


def _register(kind: str, name: str, options: type | None) -> Callable[[Thing], Thing]:
    decorator = f"@register_{kind}"
    if not isinstance(name, str):
        raise ConfigError(f'{decorator} needs a name: write {decorator}("my_name")')
    if not name or _split_address(name) is not None:
        raise ConfigError(f"{decorator}({name!r}): expected a plain name, without a colon and not ending in .py")

    def keep(thing: Thing) -> Thing:
        included = _INCLUDED[kind].get(name)
        if included is not None and included != f"{_module_of(thing)}:{getattr(thing, '__qualname__', '')}":
            raise ConfigError(
                f"{_FLAG[kind]} {name} is defined twice: by {included.partition(':')[0]}, which comes with HetSeq, and"
                f" by {_place(thing)}; register yours under another name"
            )
        entry = _registered[kind].get(name)
        if entry is not None and not _is_same(entry.thing, thing):
            raise ConfigError(
                f"{_FLAG[kind]} {name} is defined twice: by {_place(entry.thing)} and by {_place(thing)};"
                " register one of them under another name"
            )
        if entry is None:
            _registered[kind][name] = _Entry(thing, options)
        return thing

    return keep


def _module_of(thing: object) -> str:
    return str(getattr(thing, "__module__", "?"))


def _file_of(thing: object) -> str | None:
    return _file_of_module(_module_of(thing))


def _file_of_module(name: str) -> str | None:
    return getattr(sys.modules.get(name), "__file__", None)


def _place(thing: object) -> str:
    """The place of its definition, for an error: the module, or the user's file."""
    file, module = _file_of(thing), _module_of(thing)
    place = file if file is not None and module.startswith(USER_PREFIX) else module
    return f"{place} ({getattr(thing, '__qualname__', thing)})"


def _is_same(one: object, other: object) -> bool:
    if one is other:
        return True
    # A file may be imported twice: by its path, and by another of the user's files beside it.
    files = _file_of(one), _file_of(other)
    names = getattr(one, "__qualname__", None), getattr(other, "__qualname__", None)
    if _module_of(one) == _module_of(other) or None in files or None in names:
        return False
    return os.path.realpath(str(files[0])) == os.path.realpath(str(files[1])) and names[0] == names[1]


def _split_address(name: str) -> tuple[str, str] | None:
    """`("file.py" or "package.module", "Class" or "")`, or None for a plain name."""
    if name.endswith(".py"):
        return name, ""
    place, colon, attribute = name.rpartition(":")
    return (place, attribute) if colon else None


def _find_named(kind: str, name: str) -> Any:
    check_name(kind, name)
    if not is_included(kind, name):
        return _registered[kind][name].thing
    place, _, attribute = _INCLUDED[kind][name].partition(":")
    return _get(_import_tasks(place) if kind == "task" else importlib.import_module(place), attribute, place)


def _find_builder(kind: str, name: str) -> Callable[..., Any]:
    builder = _find_named(kind, name)
    if not callable(builder):
        raise ConfigError(f"{_FLAG[kind]} {name}: {builder!r} was registered, expected a function that builds one")
    return builder  # type: ignore[no-any-return]


def _task_base() -> type:
    place, _, attribute = _TASK_BASE.partition(":")
    return getattr(importlib.import_module(place), attribute)  # type: ignore[no-any-return]


def _import_tasks(place: str) -> ModuleType:
    """Import a module of HetSeq."""
    try:
        return importlib.import_module(place)
    except Exception as error:  # a module may raise anything; reported with its place
        raise _import_failure(place, error) from error


def _import_module(place: str, attribute: str) -> ModuleType:
    if not all(part.isidentifier() for part in place.split(".")):
        raise TaskFileError(
            f"--task {place}:...: expected package.module:Class, or a file whose name ends in .py, as in"
            " my_task.py:MyTask"
        )
    # At the end, so that no installed module is hidden: the console command does not look here by itself.
    _append_to_path(Path.cwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{place}.".startswith(f"{error.name}."):
            hidden = Path(*place.split(".")).with_suffix(".py")
            first = place.partition(".")[0]
            if hidden.is_file() and first in sys.modules:
                raise TaskFileError(
                    f"--task {place}:{attribute}: the package {first} of {_file_of_module(first)} hides"
                    f" {hidden.absolute()}: name the file, as in --task {hidden}:{attribute or 'MyTask'}"
                ) from None
            raise TaskFileError(
                f"--task {place}:...: there is no module {error.name}, neither installed nor in {Path.cwd()};"
                " a file is named with its ending, as in my_task.py:MyTask"
            ) from None
        raise _import_failure(place, error) from error
    except HetSeqError:
        raise
    except (Exception, SystemExit) as error:  # a user's module may raise anything; reported with its place
        raise _import_failure(place, error) from error


def _task_file(place: str) -> Path:
    path = Path(place).expanduser()
    if not path.is_file():
        expected = f"expected a Python file, seen from {Path.cwd()}"
        if path.is_dir():
            raise TaskFileError(f"--task {place}: is a folder; {expected}")
        guess = nearest(path.name, (beside.name for beside in path.parent.glob("*.py")))
        hint = f"; did you mean {path.with_name(guess)}?" if guess else ""
        raise TaskFileError(f"--task {place}: does not exist; {expected}{hint} [file-missing]")
    return path


def _load_file(path: Path) -> ModuleType:
    """Import a file by its path, once; its folder becomes importable, after everything that already is."""
    path = path.resolve()
    digest = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:12]
    name = f"{USER_PREFIX}{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TaskFileError(f"{path}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses, pickle and the loader's worker processes look up their module by name.
    sys.modules[name] = module
    _append_to_path(path.parent)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        _forget(name)
        if isinstance(error, HetSeqError) or not isinstance(error, (Exception, SystemExit)):
            raise
        raise _import_failure(str(path), error) from error
    return module


def _parsed(path: Path) -> ast.Module:
    """The syntax of a file. Raises the TaskFileError that importing it would."""
    path = path.resolve()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the import shows them
            with open(path, "rb") as file:
                source = file.read()
            compile(source, path, "exec", dont_inherit=True)  # it finds more errors than the parser alone
            return ast.parse(source)
    except (SyntaxError, ValueError, OSError) as error:
        raise _import_failure(str(path), error) from error


def _forget(module_name: str) -> None:
    """Undo a failed import: a corrected file may be imported again, and registers its names again."""
    del sys.modules[module_name]
    for entries in _registered.values():
        for name in [name for name, entry in entries.items() if _module_of(entry.thing) == module_name]:
            del entries[name]


def _append_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import_failure(what: str, error: BaseException) -> TaskFileError:
    """An error of a module's import in one line: the file, the line and its text."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        text = (error.text or "").strip()
        return TaskFileError(f"{error.filename}, line {error.lineno}: {error.msg}: {text}")
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith("<") and frame.filename != __file__]
    inside = [frame for frame in outside if frame.filename == what] or [
        frame for frame in outside if f"{os.sep}importlib{os.sep}" not in frame.filename
    ]
    place = f"{inside[-1].filename}, line {inside[-1].lineno}: {inside[-1].line}" if inside else what
    if isinstance(error, ModuleNotFoundError) and error.name:
        return TaskFileError(f"{place}: there is no module {error.name}: install it, or put it beside the file")
    if isinstance(error, SystemExit):
        return TaskFileError(
            f'{place}: the import ended the program: keep what runs it under `if __name__ == "__main__":`'
        )
    return TaskFileError(f"{place}: {type(error).__name__}: {error}")


def _get(module: ModuleType, attribute: str, place: str) -> Any:
    if not hasattr(module, attribute):
        raise _no_such_name(place, attribute, [name for name, value in vars(module).items() if isinstance(value, type)])
    return getattr(module, attribute)


def _not_a_task(name: str, found: object) -> TaskFileError:
    return TaskFileError(
        f"--task {name}: {found} is not a task: expected a class that inherits from Task, as in `from hetseq import"
        " Task` and `class Spirals(Task):`"
    )


def _no_such_name(place: str, attribute: str, classes: Iterable[str]) -> TaskFileError:
    guess = nearest(attribute, classes)
    rest = f"did you mean {guess}?" if guess else f"it has {', '.join(sorted(classes)) or 'no class at all'}"
    return TaskFileError(f"{place} has no {attribute}: {rest}")


def _only_task(module: ModuleType, place: str) -> type:
    base = _task_base()
    tasks = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
    ]
    tasks = list(dict.fromkeys(tasks))  # a second name for the same class is not a second task
    if len(tasks) != 1:
        raise _not_one_task(place, [task.__name__ for task in tasks])
    return tasks[0]


def _not_one_task(place: str, tasks: list[str]) -> TaskFileError:
    found = "defines no subclass of Task: name the class"
    if tasks:
        found = f"defines several tasks ({', '.join(tasks)}): name one"
    return TaskFileError(f"--task {place}: the file {found}, as in {place}:{tasks[0] if tasks else 'MyTask'}")
