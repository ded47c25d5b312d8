"""The copy button of the manual: what it takes of a terminal can be pasted into one."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from tests.end_to_end.test_report import BROWSER, browse
from tests.support.commands import ROOT

SHOWN = r"""$ hetseq train --task mnist \
    --save-dir runs/first
task MNISTTask: 1,437 training samples
1 rank (cpu)
$ hetseq top runs/first
step 23/115
"""
#: as the theme does it: the attribute stands while the text is read, and blank ends are cut
TAKE = """<script>
const code = document.querySelector("code");
code.setAttribute("data-md-copying", "");
console.log("TAKEN " + encodeURIComponent(code.innerText.trimEnd()) + " END");
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium on this machine")
def test_it_takes_the_commands_without_prompts_and_output(tmp_path: Path) -> None:
    shown = highlight(SHOWN, get_lexer_by_name("console"), HtmlFormatter(nowrap=True))
    assert 'class="gp"' in shown
    assert 'class="go"' in shown
    style = (ROOT / "docs" / "style.css").read_text(encoding="utf-8")
    page = tmp_path / "page.html"
    page.write_text(f"<style>{style}</style><body><pre><code>{shown}</code></pre>{TAKE}", encoding="utf-8")
    found = re.search(r"TAKEN (\S*) END", browse(page, tmp_path, 1, "--dump-dom"))
    assert found is not None
    taken = unquote(found.group(1))
    lines = [line for line in taken.splitlines() if line.strip()]
    assert lines == ["hetseq train --task mnist \\", "    --save-dir runs/first", "hetseq top runs/first"]
