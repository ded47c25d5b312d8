"""What docs/guides/nebula.md shows does what it says, and the package is as cheap to import as it says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import hetseq.nebula as nm
from tests.support.nebula import tags
from tests.unit.house.test_house import ROOT, import_alone

PAGE = (ROOT / "docs" / "guides" / "nebula.md").read_text()


def test_the_script_of_the_page_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script, hiding = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[:2]
    names: dict[str, object] = {}
    for newest in ("global_step4", "global_step8"):
        exec(script, names)
        nm.close()
        assert tags(tmp_path / "runs" / "tags")[0] == newest
    assert len(tags(tmp_path / "runs" / "tags")) == 3
    exec(hiding, names)
    nm.close()


def test_the_page_names_every_call_with_its_defaults() -> None:
    for name in nm.__all__:
        assert f"`{name}(" in PAGE, name
    stated = re.search(r"`init\((.*?)\)`", PAGE)
    assert stated is not None
    defaults = dict(re.findall(r"(\w+)=(\S+?)(?:,|$)", stated[1]))
    parameters = inspect.signature(nm.init).parameters
    assert defaults == {
        name: str(parameter.default)
        for name, parameter in parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is not parameter.empty
    }


def test_neither_the_package_nor_its_writer_imports_torch() -> None:
    assert import_alone(("hetseq.nebula", "hetseq.nebula.writer"), ROOT) == ""
    assert import_alone(("hetseq.nebula.service",), ROOT) == "hetseq.nebula.service imports torch"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Chekpoint'"):
        nm.Chekpoint  # noqa: B018
