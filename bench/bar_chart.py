"""A bar chart as one SVG file without scripts or embedded fonts, readable on light and dark backgrounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _LEFT, _RIGHT, _TOP, _BAR, _GAP = 720, 190, 60, 40, 26, 12  # pixels
_STYLE = """
text{font:14px sans-serif;fill:#333}.title{font-weight:bold}.note{font-size:12px;fill:#666}
.plain{fill:#9aa5b1}.own{fill:#1f6fb4}
@media(prefers-color-scheme:dark){text{fill:#ddd}.note{fill:#aaa}.own{fill:#4c9be8}}
"""


@dataclass(frozen=True)
class Bar:
    """A name, a share of the longest bar's scale from 0 to 1, and whether it is highlighted."""

    name: str
    share: float
    is_own: bool = False


def picture(title: str, bars: Sequence[Bar], note: str) -> str:
    """The bars below each other, with their shares in per cent, as the text of an SVG file."""
    room = _WIDTH - _LEFT - _RIGHT
    parts = [f'<text class="title" x="0" y="18">{escape(title)}</text>']
    for number, bar in enumerate(bars):
        top = _TOP + number * (_BAR + _GAP)
        middle, length = top + _BAR * 0.7, room * bar.share
        kind = "own" if bar.is_own else "plain"
        parts += [
            f'<text x="{_LEFT - 10}" y="{middle:.0f}" text-anchor="end">{escape(bar.name)}</text>',
            f'<rect class="{kind}" x="{_LEFT}" y="{top}" width="{length:.0f}" height="{_BAR}" rx="3"/>',
            f'<text x="{_LEFT + length + 8:.0f}" y="{middle:.0f}">{bar.share:.0%}</text>',
        ]
    bottom = _TOP + len(bars) * (_BAR + _GAP) + 14
    parts.append(f'<text class="note" x="0" y="{bottom}">{escape(note)}</text>')
    height = bottom + 10
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        f' role="img" aria-label="{escape(title)}">'
    )
    return "\n".join([head, f"<style>{_STYLE}</style>", *parts, "</svg>\n"])
