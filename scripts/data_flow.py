"""Draw jaxserve's data flow for README.md: `python scripts/data_flow.py` writes scripts/results/data-flow-*.svg.

There is one SVG for GitHub's light theme and one for its dark theme, both without a background.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

RESULTS = Path(__file__).parent / "results"
WIDTH, HEIGHT = 920, 412
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Theme:
    """Colours of one theme.

    Attributes:
        text: box titles.
        muted: second lines and arrow labels.
        line: arrows.
        host: fill and border of boxes for Python code.
        device: fill and border of the compiled program.
        inner: fill of boxes inside the compiled program.
    """

    text: str
    muted: str
    line: str
    host: tuple[str, str]
    device: tuple[str, str]
    inner: str


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#59636e", ("#ddf4ff", "#54aeff"), ("#fff8c5", "#d4a72c"), "#ffffff"),
    "dark": Theme("#f0f6fc", "#b7bdc8", "#9198a1", ("#0c2d6b", "#388bfd"), ("#3b2300", "#bb8009"), "#161b22"),
}


@dataclass(frozen=True)
class Box:
    """A rectangle with a title and further lines, centred."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()

    def draw(self, theme: Theme, fill: str, border: str) -> str:
        """Return the box as SVG."""
        middle = self.x + self.width / 2
        top = self.y + self.height / 2 - 8 * len(self.lines) + 5
        texts = [_text(middle, top, self.title, theme.text, size=15, weight=600)]
        texts += [_text(middle, top + 17 * i, line, theme.muted) for i, line in enumerate(self.lines, 1)]
        return _rectangle(self.x, self.y, self.width, self.height, fill, border) + "".join(texts)


HOST = (
    Box(10, 44, 156, 92, "LLM", ("generate, chat,", "stream, batch files")),
    Box(216, 44, 140, 92, "Tokenizer", ("chat template,", "token ids")),
    Box(406, 44, 216, 92, "Scheduler", ("one token budget for prefill", "and decode; KV pages,", "prefix cache")),
    Box(704, 44, 206, 92, "BatchPacker", ("one token axis,", "padded to a bucket")),
    Box(10, 272, 156, 92, "Outputs", ("text, stop strings,", "logprobs")),
)
DEVICE = Box(286, 218, 624, 184, "")
STEPS = (
    Box(758, 258, 136, 76, "Embedding", ("tokens of all rows",)),
    Box(498, 258, 220, 76, "Layers", ("paged attention for prefill", "and decode rows, then MLP")),
    Box(302, 258, 156, 76, "Sampling", ("per-request seeds,", "penalties, logprobs")),
)
STATE = Box(302, 350, 592, 40, "State: KV pages and request slots, donated and updated in place")


def draw(theme: Theme) -> str:
    """Return the figure as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="{FONT}"><title>Data flow of jaxserve</title>',
        f'<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        f'orient="auto"><path d="M0 0L10 5L0 10z" fill="{theme.line}"/></marker></defs>',
        _text(10, 26, "Host: Python", theme.muted, size=14, weight=600, anchor="start"),
        *(box.draw(theme, *theme.host) for box in HOST),
        DEVICE.draw(theme, *theme.device),
        _text(302, 244, "Device: serve_step, one compiled program", theme.muted, size=14, weight=600, anchor="start"),
        *(box.draw(theme, theme.inner, theme.device[1]) for box in (*STEPS, STATE)),
        _arrow(theme, (166, 90), (216, 90)),
        _arrow(theme, (356, 90), (406, 90)),
        _arrow(theme, (622, 90), (704, 90)),
        _text(662, 80, "StepPlan", theme.muted),
        _arrow(theme, (822, 136), (822, 258)),
        _text(812, 190, "StepBatch: one int32 upload", theme.muted, anchor="end"),
        _arrow(theme, (758, 296), (718, 296)),
        _arrow(theme, (498, 296), (458, 296)),
        _arrow(theme, (302, 318), (166, 318)),
        _text(226, 336, "StepOutput:", theme.muted),
        _text(226, 353, "one download", theme.muted),
        _arrow(theme, (226, 318), (226, 176), (514, 176), (514, 136)),
        _text(236, 168, "sampled tokens: update()", theme.muted, anchor="start"),
        _arrow(theme, (88, 272), (88, 136)),
        _text(98, 210, "RequestOutput", theme.muted, anchor="start"),
    ]
    return "\n".join([*parts, "</svg>\n"])


def _rectangle(x: int, y: int, width: int, height: int, fill: str, border: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{border}"/>'


def _text(
    x: float, y: float, text: str, fill: str, *, size: int = 13, weight: int = 400, anchor: str = "middle"
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>' if text else ""


def _arrow(theme: Theme, *points: tuple[int, int]) -> str:
    path = "L".join(f"{x} {y}" for x, y in points)
    return f'<path d="M{path}" fill="none" stroke="{theme.line}" stroke-width="1.6" marker-end="url(#head)"/>'


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name, theme in THEMES.items():
        (RESULTS / f"data-flow-{name}.svg").write_text(draw(theme))


if __name__ == "__main__":
    main()
