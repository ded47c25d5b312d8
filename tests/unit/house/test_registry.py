"""Names to classes: what is found, what is refused, and that a name nobody asked for imports nothing."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hetseq import registry
from hetseq.errors import ConfigError, TaskFileError
from hetseq.registry import (
    check_name,
    find_lr_scheduler,
    find_optimizer,
    find_task,
    nearest,
    options_of,
    register_optimizer,
    register_task,
)

REPOSITORY = Path(__file__).resolve().parents[3]
KINDS = ("task", "optimizer", "lr_scheduler")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder; registries, modules and the path are as before afterwards. No test waits for torch."""
    base = ModuleType("hetseq.task")
    base.Task = type("Task", (), {"Options": None})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hetseq.task", base)
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in KINDS})
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.removeprefix("hetseq.").partition(".")[0] == "tasks"]:
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"from hetseq.task import Task\n{text}\n", encoding="utf-8")
    return path


def refusal(call: Callable[..., Any], *args: Any, kind: type[Exception] = TaskFileError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*args, **options)
    assert type(caught.value) is kind
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ included names


def test_a_name_that_is_asked_about_imports_nothing() -> None:
    program = (
        "import sys\n"
        "from hetseq.errors import ConfigError\n"
        "from hetseq import registry\n"
        "print(registry.options_of('task', 'mnist'), registry.options_of('optimizer', 'lamb'))\n"
        "try:\n"
        "    registry.find_task('mnits')\n"
        "except ConfigError as error:\n"
        "    print('mnist?' in str(error))\n"
        "print(*(name for name in ('torch', 'numpy', 'yaml', 'tasks') if name in sys.modules))\n"
        "registry.included_options()\n"
        "print(*(name for name in ('torch', 'numpy', 'yaml') if name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.stdout) == ("", "None None\nTrue\n\n\n")


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    said = refusal(find_task, "ner", kind=ConfigError)
    known = ", ".join(registry._INCLUDED["task"])
    assert said.startswith(
        f"--task ner: there is no such task; expected {known}, or an address as in my_task.py:MyTask"
    )
    assert "(did you mean mnist?)" in refusal(find_task, "MNITS", kind=ConfigError)
    assert "(did you mean adamw?)" in refusal(find_optimizer, "AdamW2", kind=ConfigError)
    assert "(did you mean cosine?)" in refusal(find_lr_scheduler, "cosin", kind=ConfigError)
    check_name("lr_scheduler", "PolynomialDecayScheduler")


@pytest.fixture
def included(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of `hetseq/tasks`."""
    package = ModuleType("hetseq.tasks")
    package.__path__ = [str(folder / "included")]
    monkeypatch.setitem(sys.modules, "hetseq.tasks", package)
    return folder / "included"


def test_an_included_task_comes_from_our_own_tasks_whatever_else_is_called_so(
    folder: Path, included: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(included / "mnist.py", "class MNISTTask(Task): pass")
    write(folder / "theirs" / "tasks" / "__init__.py", "raise SystemExit")
    write(folder / "theirs" / "tasks" / "mnist.py", "raise SystemExit")
    monkeypatch.syspath_prepend(str(folder / "theirs"))
    assert find_task("mnist") is sys.modules["hetseq.tasks.mnist"].MNISTTask


def test_an_included_task_that_misses_a_package_names_it(included: Path) -> None:
    file = write(included / "mnist.py", "import no_such_package")
    said = refusal(find_task, "mnist")
    assert said.startswith(f"{file}, line 2: import no_such_package: there is no module no_such_package: install it")


# --------------------------------------------------------------------------------------------------- a user's file


def test_a_file_is_a_task_where_it_defines_one(folder: Path) -> None:
    write(folder / "spirals.py", "class Spirals(Task): pass")
    task = find_task("spirals.py")
    assert task.__name__ == "Spirals"
    assert find_task("spirals.py:Spirals") is find_task(str(folder / "spirals.py")) is task


def test_a_class_that_a_file_only_imports_is_not_its_task(folder: Path) -> None:
    write(folder / "base.py", "class Base(Task): pass")
    write(folder / "spirals.py", "from base import Base\nclass Spirals(Base): pass\nSame = Spirals")
    assert find_task("spirals.py").__name__ == "Spirals"
    write(folder / "two.py", "class A(Task): pass\nclass B(A): pass")
    assert refusal(find_task, "two.py") == (
        "--task two.py: the file defines several tasks (A, B): name one, as in two.py:A"
    )
    write(folder / "none.py", "class A: pass")
    assert "defines no subclass of Task: name the class" in refusal(find_task, "none.py")


def test_two_files_of_one_name_do_not_meet(folder: Path) -> None:
    for number in (1, 2):
        write(folder / f"{number}" / "my task.py", f"class Mine(Task):\n    number = {number}")
    assert [find_task(f"{number}/my task.py").number for number in (1, 2)] == [1, 2]


def test_what_a_file_defines_can_be_pickled(folder: Path) -> None:
    write(folder / "spirals.py", "class Data:\n    size = 3\nclass Spirals(Task): pass")
    data = sys.modules[find_task("spirals.py").__module__].Data()  # a data set, on its way to a loader process
    assert pickle.loads(pickle.dumps(data)).size == 3


def test_a_neighbour_of_the_file_hides_no_module_of_python(folder: Path) -> None:
    write(folder / "json.py", "raise RuntimeError")
    write(folder / "spirals.py", "import json\nclass Spirals(Task): pass")
    assert find_task("spirals.py").__name__ == "Spirals"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Spirals(Task)\n    pass", "line 2: expected ':': class Spirals(Task)"),
        ("  x = 1", "line 2: unexpected indent: x = 1"),
        ("import no_such_package", "line 2: import no_such_package: there is no module no_such_package: install it"),
        ("from json import nothing", "line 2: from json import nothing: ImportError: cannot import name 'nothing'"),
        ("def f():\n    return 1 / 0\nf()", "line 3: return 1 / 0: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)", "line 3: sys.exit(3): the import ended the program: keep what runs it under"),
    ],
)
def test_a_file_that_does_not_import_is_told_with_its_line(folder: Path, text: str, said: str) -> None:
    file = write(folder / "spirals.py", text)
    assert refusal(find_task, "spirals.py:Spirals").startswith(f"{file}, {said}")


def test_a_broken_neighbour_is_told_with_its_own_line(folder: Path) -> None:
    file = write(folder / "net.py", "def net(:")
    write(folder / "spirals.py", "import net")
    assert refusal(find_task, "spirals.py").startswith(f"{file}, line 2: ")


def test_a_corrected_file_can_be_imported_again(folder: Path) -> None:
    register = "from hetseq.registry import register_task\n@register_task('spirals')\nclass Spirals(Task): pass\n"
    file = write(folder / "spirals.py", register + "x = 1 / 0")
    assert "ZeroDivisionError" in refusal(find_task, "spirals.py")
    write(file, register + "x = 1 / 1.0")
    assert find_task("spirals.py") is find_task("spirals")


def test_an_address_that_leads_nowhere_is_refused(folder: Path) -> None:
    write(folder / "spirals.py", "class Spirals(Task): pass\nclass Data: pass\nwidth = 3")
    said = refusal(find_task, "spirals.py:Spiral")
    assert said == "spirals.py has no Spiral: did you mean Spirals?"
    assert refusal(find_task, "spirals.py:Qqq") == "spirals.py has no Qqq: it has Data, Spirals, Task"
    assert refusal(find_task, "spirals.py:Data").startswith("--task spirals.py:Data: Data is not a task: expected a")
    assert refusal(find_task, "spirals.py:width").startswith("--task spirals.py:width: 3 is not a task")
    assert refusal(find_task, "nowhere.py").startswith("--task nowhere.py: does not exist; expected a Python file")
    (folder / "folder.py").mkdir()
    assert refusal(find_task, "folder.py").startswith("--task folder.py: is a folder")


def test_a_module_is_found_from_the_folder_of_the_command(folder: Path) -> None:
    write(folder / "package" / "inner.py", "class Spirals(Task): pass")
    assert find_task("package.inner:Spirals").__name__ == "Spirals"
    assert refusal(find_task, "package.inner:Spiral") == "package.inner has no Spiral: did you mean Spirals?"
    assert refusal(find_task, "package.outer:X").startswith(
        "--task package.outer:...: there is no module package.outer"
    )
    assert "there is no module nowhere, neither" in refusal(find_task, "nowhere.at.all:X")
    assert "expected package.module:Class, or a file whose name ends in .py" in refusal(find_task, "./spirals:X")
    assert "expected package.module:Class" in refusal(find_task, ":X")
    file = write(folder / "package" / "broken.py", "import no_such_package")
    assert refusal(find_task, "package.broken:X").startswith(f"{file}, line 2: import no_such_package: there is no")


# ------------------------------------------------------------------------------------------- decorators, user_dir


def test_the_modules_of_a_user_dir_register_by_their_decorators(folder: Path) -> None:
    head = "from hetseq.registry import *\nfrom hetseq.registry import register_lr_scheduler, register_optimizer\n"
    write(folder / "mine" / "b.py", f"{head}import a\n@register_task('spirals')\nclass Spirals(a.Base): pass")
    write(folder / "mine" / "a.py", f"{head}@register_optimizer('adan')\ndef adan(): pass\nclass Base(Task): pass")
    write(folder / "mine" / "c.py", f"{head}@register_lr_scheduler('steps')\ndef steps(): pass")
    write(folder / "mine" / ".#c.py", "an editor's lock file")
    task = find_task("spirals", user_dir="mine")
    assert task.__name__ == "Spirals"
    assert find_task("spirals", user_dir="mine") is task  # a second reading registers nothing twice
    # b.py imports a.py as its neighbour: the same function under two module names is no conflict
    assert [find_optimizer("adan").__name__, find_lr_scheduler("steps").__name__] == ["adan", "steps"]


def test_a_user_dir_that_is_none_is_refused(folder: Path) -> None:
    assert refusal(find_task, "x", user_dir="mine", kind=ConfigError).startswith("--user-dir mine: does not exist")
    (folder / "mine").mkdir()
    assert "expected Python files in it" in refusal(find_task, "x", user_dir="mine", kind=ConfigError)
    file = write(folder / "mine" / "x.py", "import no_such_package")
    assert refusal(find_task, "x", user_dir="mine").startswith(f"{file}, line 2: ")
    assert "is a file" in refusal(find_task, "x", user_dir="mine/x.py", kind=ConfigError)


def test_a_name_of_two_owners_is_refused_with_both(folder: Path) -> None:
    head = "from hetseq.registry import register_task\n@register_task('spirals')\n"
    one = write(folder / "mine" / "one.py", f"{head}class One(Task): pass")
    two = write(folder / "mine" / "two.py", f"{head}class Two(Task): pass")
    assert refusal(find_task, "spirals", user_dir="mine", kind=ConfigError) == (
        f"--task spirals is defined twice: by {one} (One) and by {two} (Two); register one of them under another name"
    )


def test_one_thing_may_register_twice_but_not_two_of_one_module() -> None:
    def build() -> None: ...

    first = build
    assert register_optimizer("mine")(first) is register_optimizer("mine")(first) is first

    def build() -> None: ...  # type: ignore[no-redef]

    assert "is defined twice" in refusal(register_optimizer("mine"), build, kind=ConfigError)


def test_an_included_name_belongs_to_hetseq() -> None:
    class MNISTTask: ...

    said = refusal(register_task("mnist"), MNISTTask, kind=ConfigError)
    assert said.startswith("--task mnist is defined twice: by hetseq.tasks.mnist, which comes with HetSeq, and by ")
    MNISTTask.__module__, MNISTTask.__qualname__ = "hetseq.tasks.mnist", "MNISTTask"
    assert register_task("mnist")(MNISTTask) is MNISTTask


def test_a_decorator_needs_a_plain_name() -> None:
    assert 'write @register_task("my_name")' in refusal(register_task, type("A", (), {}), kind=ConfigError)
    for name in ("", "a:b", "a.py"):
        assert "expected a plain name" in refusal(register_task, name, kind=ConfigError)
    register_optimizer("three")(3)
    assert "3 was registered, expected a function" in refusal(find_optimizer, "three", kind=ConfigError)


# ------------------------------------------------------------------------------------------------------ options


def test_own_options_are_those_registered_or_those_of_the_class(folder: Path) -> None:
    head = "from dataclasses import dataclass\nfrom hetseq.registry import register_optimizer\n"
    options = "@dataclass\nclass Mine:\n    width: int = 3\n"
    write(folder / "spirals.py", f"{head}{options}class Spirals(Task):\n    Options = Mine")
    write(folder / "mine" / "adan.py", f"{head}{options}@register_optimizer('adan', options=Mine)\ndef adan(): pass")
    write(folder / "plain.py", "class Plain(Task): pass")
    for found in (options_of("task", "spirals.py"), options_of("optimizer", "adan", user_dir="mine")):
        assert found is not None
        assert found.__name__ == "Mine"
    assert options_of("task", "plain.py") is None
    assert options_of("task", "nobody", user_dir="mine") is None
    assert options_of("lr_scheduler", "nobody") is None


def test_own_options_that_are_no_dataclass_are_refused(folder: Path) -> None:
    write(folder / "spirals.py", "class Spirals(Task):\n    class Options:\n        width: int = 3")
    assert "expected a dataclass" in refusal(options_of, "task", "spirals.py", kind=ConfigError)


def test_the_nearest_name_is_a_guess_or_none() -> None:
    assert nearest("--MAX-SENTENCE", ["--max-tokens", "--max-sentences"]) == "--max-sentences"
    assert nearest("bert", ["mnist"]) is None


def test_a_module_that_a_package_of_its_name_hides_is_named_with_the_way_out(folder: Path) -> None:
    write(folder / "json" / "mine.py", "class Mine(Task): pass")
    said = refusal(find_task, "json.mine:Mine")
    assert said.startswith("--task json.mine:Mine: the package json of ")
    assert said.endswith(f" hides {folder / 'json' / 'mine.py'}: name the file, as in --task json/mine.py:Mine")


def test_a_file_that_is_missing_may_be_one_beside_it(folder: Path) -> None:
    write(folder / "mine.py", "class Mine(Task): pass")
    begin = f"--task mien.py: does not exist; expected a Python file, seen from {folder}"
    assert refusal(find_task, "mien.py:Mine") == f"{begin}; did you mean mine.py? [file-missing]"
