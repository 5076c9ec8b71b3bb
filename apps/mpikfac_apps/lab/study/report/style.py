"""Choose colours, markers, lines and ticks for pictures, and convert figures to files or SVG.

A picture uses the page's colours for text, grid and paper, so that it fits both a light and a dark
page. Text is kept as text, which a reader can search, select and enlarge.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from mpikfac_apps.lab.study.results import OTHER, WAITING

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

WIDTH = 11.0  # inches, of every picture
# Six of eight colours that are distinguishable with any colour vision (Okabe and Ito, 2008). Black
# is left out because it is the colour of text, and yellow because it is pale on white paper.
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = "os^DvP<X>ph*8"  # their number is coprime to that of the colours, so there are 78 pairs
LINES = ("-", "--", ":", "-.")

# Colours that the page replaces: for text and axes, quiet lines, the grid, and the lightest bars.
INK, QUIET, GRID, WAIT, REST = "#222222", "#767676", "#e6e6e6", "#d0d0d0", "#f0f0f0"
PAGE = {INK: "ink", QUIET: "quiet", GRID: "grid", WAIT: "wait", REST: "rest"}
STAGES = {
    "forward": ("#9ecae1", ""),
    "backward": ("#2171b5", ""),
    "statistics": ("#41ab5d", ""),
    "decomposition": ("#006d2c", ""),
    "preconditioning": ("#a1d99b", ""),
    "optimizer": ("#6a51a3", ""),
    "factor messages": ("#d94801", "////"),
    "basis messages": ("#fdae6b", "\\\\\\\\"),
    "gradient messages": ("#a50f15", "xxxx"),
    WAITING: (WAIT, ".."),
    OTHER: (REST, ""),
}
"""The colour and hatch of each part of a step: plain is computation, hatched is communication."""
STYLE: dict[RcKeyType, Any] = {
    **{"font.size": 9, "axes.titlesize": 9, "axes.titleweight": "bold"},
    **{"axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False},
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "hatch.linewidth": 0.5},
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **{"figure.facecolor": "none", "axes.facecolor": "none", "legend.frameon": False},
    **{"svg.fonttype": "none", "svg.hashsalt": "mpikfac"},
    **{"pdf.fonttype": 42},  # TrueType, because publishers reject matplotlib's default fonts
    **{"text.parse_math": False},  # a name can contain dollar signs
}


def styled() -> AbstractContextManager[None]:
    """Return a context in which matplotlib draws in the style of the page."""
    return matplotlib.rc_context(STYLE)


def variant_style(place: int) -> dict[str, Any]:
    """Return the colour, marker and line for the variant at a position in a list of variants."""
    return {
        "color": SERIES[place % len(SERIES)],
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": LINES[place // len(SERIES) % len(LINES)],
        **{"markeredgecolor": INK, "markeredgewidth": 0.4, "linewidth": 1.2},
    }


def hollow(style: Mapping[str, Any]) -> dict[str, Any]:
    """Return a style with hollow markers, in the colour of the line."""
    outline = {"markeredgecolor": style["color"], "markeredgewidth": 1.2}
    return {**style, **outline, "fillstyle": "none"}


def bar_style(part: str) -> dict[str, Any]:
    """Return the colours and the hatch of a bar for a part of a step."""
    colour, hatch = STAGES[part]
    edge = INK if hatch else QUIET
    return {"facecolor": colour, "hatch": hatch, "edgecolor": edge, "linewidth": 0.4}


def bars_between(
    panel: Axes,
    along: Sequence[float],
    heights: Sequence[tuple[float, float, float]],
    style: Mapping[str, Any],
) -> None:
    """Draw a vertical bar at each position, in the colour of a variant's style.

    Args:
        heights: the lower end, the mean and the upper end at each position.
    """
    below = [mean - low for low, mean, _ in heights]
    above = [high - mean for _, mean, high in heights]
    line: Any = {"ecolor": style["color"], "elinewidth": 1, "capsize": 2, "fmt": "none"}
    panel.errorbar(along, [mean for _, mean, _ in heights], [below, above], **line)


def plain_ticks(axis: Axis) -> None:
    """Set ticks of a logarithmic axis at 1, 2 and 5, as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_locator(NullLocator())


def legend(figure: Figure, styles: Mapping[str, Mapping[str, Any]], columns: int = 4) -> None:
    """Put a legend of variants below a figure."""
    keys = [Line2D([], [], **style) for style in styles.values()]
    # matplotlib hides names that begin with an underscore.
    names = [f"\N{WORD JOINER}{name}" if name.startswith("_") else name for name in styles]
    figure.legend(keys, names, loc="outside lower center", ncols=columns, handlelength=3.5)


def name_at_the_right(panel: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Write names to the right of a panel whose limits are final, with a line to each point.

    Args:
        points: x and y by name, in data coordinates.
    """
    to_panel = panel.transData + panel.transAxes.inverted()
    heights = [float(to_panel.transform(point)[1]) for point in points.values()]
    line = {"arrowstyle": "-", "linewidth": 0.5, "color": QUIET, "shrinkA": 0, "shrinkB": 1}
    for (name, point), height in zip(points.items(), spread(heights, 0.055)):
        place: Any = {"textcoords": "axes fraction", "va": "center", "size": 7.5}
        panel.annotate(name, point, (1.06, height), arrowprops=line, annotation_clip=False, **place)


def spread(heights: Sequence[float], apart: float) -> list[float]:
    """Move heights so that they lie in [0, 1] in the same order and differ by at least `apart`."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = list(heights)
    lowest = 0.0
    for place in order:
        placed[place] = max(placed[place], lowest)
        lowest = placed[place] + apart
    highest = 1.0
    for place in reversed(order):
        placed[place] = min(placed[place], highest)
        highest = placed[place] - apart
    return placed


def figure_file(figure: Figure, kind: str) -> bytes:
    """Return the bytes of a figure's file, on white paper; equal figures give equal files.

    Args:
        kind: "pdf", "png" or "svg".
    """
    dates: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    image = io.BytesIO()
    with styled():
        figure.savefig(image, format=kind, dpi=120, facecolor="white", metadata=dates.get(kind))
    return image.getvalue()


def inline_svg(figure: Figure, name: str, title: str) -> str:
    """Return a figure as SVG for use in a page; `name` makes its identifiers unique."""
    file = io.StringIO()
    with styled():
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r"<[^!][^>]*>", lambda tag: _tag(tag[0], name), text)
    words = f'<svg role="img" aria-labelledby="{name}-title"'
    text = text.replace("<svg", words, 1).replace(
        ">", f'><title id="{name}-title">{title}</title>', 1
    )
    return re.sub(r"\n +", "\n", text)  # removes indentation, 1/12 of the text


def _tag(tag: str, name: str) -> str:
    """Return a tag with unique identifiers, and with the page's colours and font."""
    tag = re.sub(r' (?:xmlns|xmlns:xlink|version)="[^"]*"', "", tag).replace("xlink:href", "href")
    tag = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", tag)
    tag = re.sub(r"(font: [^;\"]*?px )'[^;\"]*", r"\g<1>var(--face, sans-serif)", tag)
    for colour, variable in PAGE.items():
        tag = tag.replace(colour, f"var(--{variable}, {colour})")
    return tag
