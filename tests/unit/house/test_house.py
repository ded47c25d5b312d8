"""The house rules that a syntax tree can show: which module may do what. Each check has a twin that must fail."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# A mistyped option must not cost the seconds of `import torch`, nor must a launcher, which trains nothing.
WITHOUT_TORCH = (
    "errors", "registry", "run_directory", "which_run", "testing", "cli",
    "system", "balance", "config", "data", "cluster", "checkpoint", "monitor", "launch", "commands",
    "training.micro_batch_size", "nebula.writer", "nebula.memory_budget",
)  # fmt: skip
#: what in these packages does import torch: whatever touches tensors, devices or the task
BUT_WITH_TORCH = (
    "system.device_memory", "system.gpu", "system.matmul_backend", "data.fetch", "data.lanes", "data.loader",
    "monitor.versions", "checkpoint.async_save", "checkpoint.dcp", "checkpoint.export", "checkpoint.holdings",
    "checkpoint.image_copy", "checkpoint.images", "checkpoint.load", "checkpoint.manager",
    "checkpoint.memory_recovery", "checkpoint.part_io", "checkpoint.shared_read", "checkpoint.snapshot",
    "checkpoint.sync_save", "checkpoint.target_memory", "checkpoint.tensor_reader", "checkpoint.tensor_slices",
    "launch.generation", "launch.launcher_link", "launch.rank_life", "launch.script_alone", "launch.script_worker",
    "launch.stop_request", "launch.worker",
    "commands.checkpoints.export_model", "commands.doctor.all_reduce_child", "commands.doctor.torch_child",
    "commands.selftest.checks", "commands.selftest.diagnosis", "commands.selftest.examine",
    "commands.selftest.fixed_randomness", "commands.selftest.measure",
)  # fmt: skip
MAY_CALL_COLLECTIVES = (
    "hetseq/comm/chains.py", "hetseq/comm/group.py", "hetseq/comm/messages.py", "hetseq/comm/slices.py",
    "hetseq/launch/launch.py",
)  # fmt: skip
#: torch's tensor parallelism: DTensor makes the collectives, by the group of a mesh that the caller has made
TENSOR_PARALLEL = ("hetseq/parallel/tensor_parallel.py", "hetseq/parallel/tensor_randomness.py",
                   "hetseq/parallel/tensor_styles.py")  # fmt: skip
#: inside torch.distributed.checkpoint, whose collectives are those of whoever calls `dcp.load`
READER_FOR_OTHERS = "hetseq/checkpoint/dcp.py"
#: for scripts that train without our trainer, in the process group that they have made themselves
RANKS_OF_OTHERS = "hetseq/nebula/ranks.py"
#: the same for SageMaker's calls, which give torch's FSDP its mesh
FSDP_OF_OTHERS = ("hetseq/sagemaker/offload.py", "hetseq/sagemaker/ranks.py", "hetseq/sagemaker/sharding.py")
MAY_READ_ENVIRONMENT = (
    "hetseq/sagemaker/job.py",
    "hetseq/launch/launch.py",
    "hetseq/launch/worker_processes.py",
    "hetseq/system/started_by.py",
    "hetseq/nebula/memory_budget.py",
    "hetseq/commands/doctor/collect.py",
)
MAY_PRINT = ("hetseq/cli.py", "hetseq/commands/demo.py")

LONGEST_FILE = 600
# path -> why it is one file
LONG_FILES = {"hetseq/config/sections.py": "a table: every option with its help and its checks stands here once"}

Check = Callable[[ast.AST], Iterator[str]]


# The checks: from a syntax tree to sentences, each beginning with the line.


def collectives(tree: ast.AST) -> Iterator[str]:
    """Whatever names torch.distributed, by import or by attribute."""
    for node, name in _names(tree):
        if name == "torch.distributed" or name.startswith("torch.distributed."):
            yield f"{node.lineno}: {name} (only comm/ calls collectives)"


def environment(tree: ast.AST) -> Iterator[str]:
    """Environment variables read or written through `os`."""
    for node, name in _names(tree):
        if re.match(r"os\.(environb?|getenvb?|putenv|unsetenv)$", name):
            yield f"{node.lineno}: {name} (for launch/ alone)"


def prints(tree: ast.AST) -> Iterator[str]:
    """Calls of print."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{node.lineno}: print (use logging)"


def unsafe(tree: ast.AST) -> Iterator[str]:
    """Text that would be run and bytes that would be unpickled."""
    for node, name in _names(tree):
        # to catch pickle.UnpicklingError is no harm
        if re.match(
            r"(pickle|_pickle|cloudpickle|dill|marshal|shelve|joblib)\.(?!UnpicklingError$|PickleError$)", name
        ):
            yield f"{node.lineno}: {name} (JSON and safetensors only)"
        if re.search(r"(^|\.)(all_gather|gather|scatter|broadcast|send|recv)_object(_list)?$", name):
            yield f"{node.lineno}: {name} (object collectives unpickle what a peer sends)"
        if re.search(r"^yaml\.(unsafe_|full_)?load(_all)?$", name):
            yield f"{node.lineno}: {name} (yaml.safe_load)"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func)
        given = {word.arg: word.value for word in node.keywords}
        if name in ("eval", "exec", "builtins.eval", "builtins.exec"):
            yield f"{node.lineno}: {name} (never run text)"
        if name == "torch.load" and not _is_true(given.get("weights_only")):
            yield f"{node.lineno}: torch.load without weights_only=True"
        if "allow_pickle" in given and not _is_false(given["allow_pickle"]):
            yield f"{node.lineno}: allow_pickle"


def bare_excepts(tree: ast.AST) -> Iterator[str]:
    """`except:` without a class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{node.lineno}: bare except (catch the narrowest exception)"


def _names(tree: ast.AST) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Every imported name and dotted expression, in full: after `import x.y as z`, `z.f` is x.y.f."""
    short: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                short[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = "." * node.level + (f"{node.module}.{alias.name}" if node.module else alias.name)
                short[alias.asname or alias.name] = full
                yield node, full
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and (name := _dotted(node)):
            head, dot, rest = name.partition(".")
            yield node, short.get(head, head) + dot + rest


def _dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    # `something().all_gather_object` still ends in the name that matters
    parts.append(node.id if isinstance(node, ast.Name) else "?")
    return ".".join(reversed(parts))


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def breaches(check: Check, *, allowed: tuple[str, ...] = (), folders: tuple[str, ...] = ("hetseq",)) -> list[str]:
    """What `check` finds in the code of `folders`, as `path:line: ...`."""
    found = []
    for path in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name not in allowed:
            found += [f"{name}:{line}" for line in sorted(set(check(_tree(path))))]
    return found


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


# The rules, each with what it must not let through.


def test_collectives_are_called_in_few_places() -> None:
    allowed = (*MAY_CALL_COLLECTIVES, READER_FOR_OTHERS, RANKS_OF_OTHERS, *FSDP_OF_OTHERS, *TENSOR_PARALLEL)
    assert breaches(collectives, allowed=allowed) == []
    of_torch = {
        line.split(": ")[1].split(" ")[0] for path in TENSOR_PARALLEL for line in collectives(_tree(ROOT / path))
    }
    kinds = ("torch.distributed.tensor", "torch.distributed.device_mesh")
    assert all(name.startswith(kinds) for name in of_torch), of_torch
    library = {line.split(": ")[1].split(" ")[0] for line in collectives(_tree(ROOT / READER_FOR_OTHERS))}
    assert all(name.startswith("torch.distributed.checkpoint") for name in library), library


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "from torch.distributed.distributed_c10d import AllreduceOptions",
        "import torch\ntorch.distributed.barrier()",
    ],
)
def test_a_collective_elsewhere_is_seen(source: str) -> None:
    assert list(collectives(ast.parse(source)))


def test_the_environment_is_read_in_few_modules() -> None:
    assert (
        breaches(environment, allowed=MAY_READ_ENVIRONMENT, folders=("hetseq", "tasks", "preprocessing", "examples"))
        == []
    )


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['RANK']",
        "import os\nos.getenv('RANK')",
        "from os import environ",
        "import os as system\nsystem.environ.get('RANK')",
    ],
)
def test_an_environment_variable_elsewhere_is_seen(source: str) -> None:
    assert list(environment(ast.parse(source)))


def test_only_the_command_line_prints() -> None:
    assert breaches(prints, allowed=MAY_PRINT) == []


def test_a_print_is_seen_and_a_method_of_that_name_is_not() -> None:
    assert list(prints(ast.parse("def f():\n    print('here')"))) == ["2: print (use logging)"]
    assert list(prints(ast.parse("console.print('here')"))) == []


def test_nothing_runs_text_or_unpickles() -> None:
    assert breaches(unsafe, folders=("hetseq", "tasks", "preprocessing", "examples")) == []


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "exec(text)",
        "import pickle\npickle.loads(data)",
        "import pickle as p\np.dump(it, file)",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import numpy\nnumpy.load(path, allow_pickle=True)",
        "import yaml\nyaml.load(text, Loader)",
        "import torch.distributed as dist\ndist.all_gather_object(out, mine)",
        "group().broadcast_object_list(items)",
    ],
)
def test_text_that_runs_and_pickles_are_seen(source: str) -> None:
    assert list(unsafe(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import pickle\ntry:\n    f()\nexcept pickle.UnpicklingError:\n    pass",
        "import torch\ntorch.load(path, weights_only=True)",
        "import yaml\nyaml.safe_load(text)",
    ],
)
def test_their_harmless_relatives_are_not(source: str) -> None:
    assert list(unsafe(ast.parse(source))) == []


def test_no_bare_except() -> None:
    assert breaches(bare_excepts, folders=("hetseq", "tasks", "preprocessing", "examples")) == []


def test_a_bare_except_is_seen() -> None:
    assert list(bare_excepts(ast.parse("try:\n    f()\nexcept:\n    pass")))
    assert not list(bare_excepts(ast.parse("try:\n    f()\nexcept OSError:\n    pass")))


# Sizes.


def too_long(lengths: dict[str, int], excused: dict[str, str]) -> list[str]:
    """Files over the limit without a reason, and reasons that are no longer needed."""
    found = [f"{name} has {length} lines" for name, length in lengths.items() if length > LONGEST_FILE > 0]
    found = [line for line in found if line.split()[0] not in excused]
    return found + [f"{name} needs no excuse any more" for name in excused if lengths.get(name, 0) <= LONGEST_FILE]


def test_a_long_file_has_a_reason() -> None:
    files = [
        file for folder in ("hetseq", "tasks", "preprocessing", "examples") for file in (ROOT / folder).rglob("*.py")
    ]
    lengths = {file.relative_to(ROOT).as_posix(): len(file.read_text().splitlines()) for file in files}
    assert too_long(lengths, LONG_FILES) == []


def test_a_long_file_and_a_stale_excuse_are_seen() -> None:
    assert too_long({"a.py": 601, "b.py": 600}, {}) == ["a.py has 601 lines"]
    assert too_long({"a.py": 601}, {"a.py": "a table"}) == []
    assert too_long({"a.py": 20}, {"a.py": "a table"}) == ["a.py needs no excuse any more"]


# Shapes: how many things one function is told, and how many modules one builder calls.

MOST_PARAMETERS = 8
CALLED_BY_NAME = {
    "steps"
}  # `run.steps` of a script: all of it is optional or said by name, and there is no configuration
MOST_MODULES = 12


def parameters(tree: ast.AST) -> Iterator[tuple[int, str, int]]:
    """Every function: its line, its name, and its number of parameters, `self` left out."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            rest = [argument for argument in (node.args.vararg, node.args.kwarg) if argument is not None]
            yield node.lineno, node.name, sum(argument.arg not in ("self", "cls") for argument in [*given, *rest])


def modules_called(tree: ast.Module) -> dict[str, set[str]]:
    """For each function of a module the modules whose names its body calls."""
    homes: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            homes |= {alias.asname or alias.name: node.module or "" for alias in node.names}
        elif isinstance(node, ast.Import):
            homes |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
    found: dict[str, set[str]] = {}
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            calls = [
                node.func for statement in function.body for node in ast.walk(statement) if isinstance(node, ast.Call)
            ]
            names = {_dotted(call).partition(".")[0] for call in calls}
            found[function.name] = {homes[name] for name in names if name in homes}
    return found


def crowded(tree: ast.AST) -> Iterator[str]:
    """Functions with more parameters than a reader can hold; an object with a name is due."""
    for line, name, count in parameters(tree):
        if count > MOST_PARAMETERS and name not in CALLED_BY_NAME:
            yield f"{line}: {name} has {count} parameters (at most {MOST_PARAMETERS})"


def test_no_function_has_many_parameters() -> None:
    assert breaches(crowded, folders=("hetseq",)) == []
    assert list(crowded(ast.parse("def f(self, a, b, c, d, e, f, g, h): ..."))) == []
    assert list(crowded(ast.parse("class A:\n    def f(self, a, b, c, d, *, e, f, g, h, i): ...")))
    assert list(crowded(ast.parse("def f(a, b, c, d, e, f, g, *h, **i): ...")))


def test_a_builder_calls_few_modules() -> None:
    called = modules_called(_tree(ROOT / "hetseq" / "run" / "build.py"))
    assert {name: len(modules) for name, modules in called.items() if len(modules) > MOST_MODULES} == {}
    assert len(called["build_feed"]) > 5  # they are seen


def test_parameters_and_calls_are_counted() -> None:
    tree = ast.parse("from a import b\nimport c.d\ndef f(self, x, *, y=b()):\n    c.d.e(b)\n    print(x)")
    assert list(parameters(tree)) == [(3, "f", 2)]
    assert modules_called(tree) == {"f": {"c.d"}}  # a default is not the body


def test_the_contract_of_the_packages_is_short() -> None:
    contract = re.search(r'id = "floors".*?layers = \[\n(.*?)\n\]', (ROOT / "pyproject.toml").read_text(), re.S)
    assert contract is not None
    assert len(contract[1].splitlines()) <= 17


# Nothing of one person's machine.

# absolute paths of a home or of a working folder, not `some/work` and not `/home/<name>`
PRIVATE_PATH = re.compile(r"(?<![\w.~>)}/-])/(?:work|root)/|(?<![\w.~>)}/-])/work\b(?!\w|-)|/(?:home|Users)/\w+")


def committed_files() -> list[Path]:
    """Files that git has or would take, as text; all of them where there is no git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    except (OSError, subprocess.CalledProcessError):
        skipped = {".git", ".venv", "build", "dist", "site", "runs"}
        everything = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        listed = [path.as_posix() for path in everything if not skipped & set(path.parts)]
    return [ROOT / name for name in listed if name and (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def test_no_committed_file_names_a_private_path() -> None:
    found = []
    for path in committed_files():
        content = path.read_bytes()
        if b"\0" in content[:8192]:
            continue
        for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
            if match := PRIVATE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}")
    assert found == []


@pytest.mark.parametrize(
    "path", ["/" + "work/main", "cd /" + "work", "/" + "home/ada/run", "/" + "root/.cache", "=/" + "Users/ada"]
)
def test_a_private_path_is_seen(path: str) -> None:
    assert PRIVATE_PATH.search(path)


@pytest.mark.parametrize(
    "path", ["/home/<name>", "group/" + "work/x", "/workspace", "file:///shared/run", "~/work", "at/work"]
)
def test_a_public_path_is_not(path: str) -> None:
    assert not PRIVATE_PATH.search(path)


# No torch on the way to an error message.

IMPORTER = """
import importlib, importlib.util, sys
for name in sys.argv[1:]:
    if importlib.util.find_spec(name) is not None:
        importlib.import_module(name)
        if "torch" in sys.modules:
            sys.exit(name + " imports torch")
"""


def import_alone(names: tuple[str, ...], folder: Path) -> str:
    """Import the modules in a new process; the first one that brings torch, or the error, or ''."""
    command = [sys.executable, "-c", IMPORTER, *names]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.stderr.strip() if done.returncode else ""


def modules(names: Iterable[str]) -> list[str]:
    """The modules of `hetseq` that have one of these names or are in a package of that name."""
    paths = [path.relative_to(ROOT).with_suffix("").as_posix() for path in sorted((ROOT / "hetseq").rglob("*.py"))]
    found = [path.removesuffix("/__init__").replace("/", ".") for path in paths]
    inside = tuple(f"hetseq.{name}" for name in names)
    return [module for module in found if module in inside or module.startswith(tuple(f"{name}." for name in inside))]


def test_what_answers_at_once_imports_no_torch() -> None:
    with_torch = modules(BUT_WITH_TORCH)
    assert len(with_torch) == len(BUT_WITH_TORCH), "a name that no module has any more"
    names = ["hetseq", *(module for module in modules(WITHOUT_TORCH) if module not in with_torch)]
    assert len(names) > 100
    assert import_alone(tuple(names), ROOT) == ""


# Walls between packages that imports alone do not show.


def test_the_process_that_writes_checkpoints_needs_the_standard_library_alone() -> None:
    """It is started with -I -S, so that no package and no site can hold it up, or fail in it."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import "
    for module, works in (("hetseq.checkpoint.writer, hetseq.nebula.writer", True), ("hetseq.data.plan", False)):
        command = [sys.executable, "-I", "-S", "-c", start + module]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert (done.returncode == 0) is works, done.stderr


STEP_KNOWS_NOTHING_OF = ("hetseq.parallel", "hetseq.checkpoint", "torch.distributed")


def leaks(tree: ast.Module) -> Iterator[str]:
    """What of sharding, collectives or checkpoints a controller knows; in `step` no test of a type either."""
    for node, name in _names(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and name.startswith(STEP_KNOWS_NOTHING_OF):
            yield f"{node.lineno}: {name}"
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name == "step":
            for node, name in _names(function):
                if name == "isinstance" or name.endswith((".config.parallel", ".config.distributed")):
                    yield f"{node.lineno}: {name} in step"


def test_a_step_knows_nothing_of_sharding_and_checkpoints() -> None:
    assert list(leaks(_tree(ROOT / "hetseq" / "training" / "controller.py"))) == []
    bad = "from hetseq.parallel.replica import Replica\ndef step(self):\n    isinstance(self, int)"
    assert len(list(leaks(ast.parse(bad)))) >= 2


#: classes behind a protocol that a training step sees in their place: Group, GradientSync, SharePolicy
BEHIND_PROTOCOLS = {
    "GlooGroup", "LocalGroup", "Gradients", "GradientReducer", "WideReducer", "FixedShares", "MeasuredShares"
}  # fmt: skip


def concrete(tree: ast.AST) -> Iterator[str]:
    """Names of classes for which a protocol is there."""
    for node, name in _names(tree):
        if name.rpartition(".")[2] in BEHIND_PROTOCOLS:
            yield f"{node.lineno}: {name} (name its protocol)"


def test_training_names_protocols_and_not_what_is_behind_them() -> None:
    home = "hetseq/training/share_policy.py"
    assert breaches(concrete, allowed=(home,), folders=("hetseq/training",)) == []
    assert list(concrete(ast.parse("from hetseq.comm.group import GlooGroup")))
    assert list(concrete(ast.parse("import hetseq.comm.group as comm\ndef f(group: comm.LocalGroup): ...")))
    defined = {
        node.name
        for path in (ROOT / "hetseq").rglob("*.py")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ClassDef)
    }
    assert defined >= BEHIND_PROTOCOLS  # no name here is out of date


def test_an_import_of_torch_is_seen_even_at_second_hand(tmp_path: Path) -> None:
    (tmp_path / "torch.py").touch()
    (tmp_path / "lower.py").write_text("import middle")
    (tmp_path / "middle.py").write_text("import torch")
    assert import_alone(("json", "lower"), tmp_path) == "lower imports torch"


# The two lists of dependencies say the same.


def contradictions(project: dict, pinned: list[str]) -> list[str]:  # type: ignore[type-arg]
    """Dependencies without a pin, pins without a dependency, and pins outside the bounds."""
    from packaging.requirements import Requirement

    extras = project.get("optional-dependencies", {})
    stated = [
        Requirement(line) for line in project["dependencies"] + [line for extra in extras.values() for line in extra]
    ]
    bounds = {wanted.name.lower(): wanted.specifier for wanted in stated if wanted.name != project["name"]}
    found, seen = [], set()
    for line in pinned:
        pin = Requirement(line)
        (exact,) = pin.specifier
        seen.add(pin.name.lower())
        if pin.name.lower() not in bounds:
            found.append(f"{pin.name} is pinned and not in pyproject.toml")
        elif exact.operator != "==" or exact.version not in bounds[pin.name.lower()]:
            found.append(f"{line} does not satisfy {bounds[pin.name.lower()]}")
        if pin.extras:
            found.append(
                f"{line} names an extra, which pip refuses in a file of constraints: `make demo` uses it as one"
            )
    return found + [f"{name} has no pin" for name in sorted(bounds.keys() - seen)]


def test_requirements_pin_what_pyproject_asks_for() -> None:
    tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        line for name in ("requirements.txt", "requirements-dev.txt") for line in (ROOT / name).read_text().splitlines()
    ]
    assert contradictions(project, [line for line in lines if line and not line.startswith("#")]) == []


def test_a_contradiction_between_them_is_seen() -> None:
    project = {"name": "x", "dependencies": ["a>=2", "b"], "optional-dependencies": {"all": ["x[some]"]}}
    assert contradictions(project, ["a==1.0", "c==3"]) == [
        "a==1.0 does not satisfy >=2",
        "c is pinned and not in pyproject.toml",
        "b has no pin",
    ]
    assert contradictions(project, ["a==2.1", "b==1"]) == []
    assert [found.partition(" names")[0] for found in contradictions(project, ["a[x]==2.1", "b==1"])] == ["a[x]==2.1"]
