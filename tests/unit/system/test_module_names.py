"""The names that a file binds, told by its syntax: one that it might bind is never told to be missing."""

from __future__ import annotations

import ast

import pytest

from hetseq.system.module_names import bound_names


@pytest.mark.parametrize(
    "source",
    [
        "class Mine: pass",
        "if True:\n    class Mine: pass",
        "try:\n    import x\nexcept ImportError:\n    class Mine: pass",
        "from elsewhere import Mine",
        "from elsewhere import Other as Mine",
        "import elsewhere as Mine",
        "Mine = make()",
        "Mine: type = make()",
        "(Other, *Mine) = make()",
        "(Mine := make())",
        "for Mine in tasks(): pass",
        "with task() as Mine: pass",
        "match task:\n    case {'a': Mine}: pass",
        "match task:\n    case [*Mine]: pass",
        "match task:\n    case {**Mine}: pass",
        "def fill():\n    global Mine\n    Mine = 1\nfill()",
        "def Mine(): pass",
    ],
)
def test_a_name_that_a_file_binds_in_any_way_is_known(source: str) -> None:
    assert "Mine" in bound_names(ast.parse(source)).names


@pytest.mark.parametrize(
    "source",
    [
        "",
        "def f():\n    class Mine: pass",
        "class Other:\n    Mine = 1",
        "Mine",
        "x = [lambda Mine: Mine]",
        "a.Mine = 1",
    ],
)
def test_a_name_inside_a_function_or_a_class_is_none_of_the_file(source: str) -> None:
    found = bound_names(ast.parse(source))
    assert "Mine" not in found.names
    assert not found.may_have_more


@pytest.mark.parametrize(
    "source",
    [
        "from elsewhere import *",
        "globals()['Mine'] = 1",
        "vars()['Mine'] = 1",
        "exec('class Mine: pass')",
        "import sys\nsetattr(sys, 'x', 1)",
        "import sys\nsys.modules[__name__] = x",
        "import sys\nsys.__dict__",
        "def __getattr__(name): return make(name)",
    ],
)
def test_a_file_that_may_bind_names_out_of_sight_says_so(source: str) -> None:
    assert bound_names(ast.parse(source)).may_have_more


@pytest.mark.parametrize(
    ("source", "plain"),
    [
        ("class Mine: pass", ("Mine",)),
        ("class Mine(): pass", ("Mine",)),
        ("class Mine(Task): pass", ()),
        ("class Mine(metaclass=Task): pass", ()),
        ("@task\nclass Mine: pass", ()),
        ("class Mine: pass\nMine = make(Mine)", ()),
        ("if x:\n    class Mine: pass\nelse:\n    class Mine(Task): pass", ()),
        ("class Mine: pass\ndef f():\n    global Mine\n    Mine = 1\nf()", ()),
        ("class Other:\n    class Mine: pass", ("Other",)),
    ],
)
def test_a_class_is_plain_if_nothing_can_make_a_task_of_it(source: str, plain: tuple[str, ...]) -> None:
    assert bound_names(ast.parse(source)).plain_classes == plain
