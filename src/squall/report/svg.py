"""Drawing with matplotlib for a page: figures without a background, as SVG in the page's own colours."""

import io
import re
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # matplotlib takes a second to import, and only a report needs it
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Matplotlib draws in these stand-ins; `to_svg` puts the page's variables in their place, for light and dark.
INK, GRID = "#010203", "#010204"
SERIES = [f"#0102{16 + i:02x}" for i in range(8)]
# 331 points: on a phone the text keeps its size, on a desk two charts stand side by side.
WIDTH = 4.6  # inches
VARIABLES = {INK: "ink", GRID: "grid"} | {color: f"series-{i}" for i, color in enumerate(SERIES)}


def new_figure(height: float, letters: int = 6, legend: int = 0) -> "Figure":
    """An empty figure, `height` in inches, with room for `letters` left of the axes and lines of a `legend` above.

    Margins that matplotlib finds itself take as long as all else of a chart.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), facecolor="none")
    left, right, bottom, top = 0.1 + 0.08 * letters, 0.12, 0.42, 0.08 + 0.18 * legend
    figure.subplots_adjust(left / WIDTH, bottom / height, 1 - right / WIDTH, 1 - top / height)
    return figure


def name_lines(figure: "Figure", columns: int, size: int) -> None:
    """A legend in the room above the axes."""
    figure.legend(
        loc="upper left", ncols=columns, frameon=False, borderpad=0, borderaxespad=0.2, handlelength=1.2, fontsize=size,
        labelcolor=INK,
    )  # fmt: skip


def style(axes: "Axes") -> None:
    """Quiet axes: one line at the bottom, faint lines across."""
    axes.set_facecolor("none")
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.tick_params(which="both", colors=INK, length=0, labelsize=9)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)


def scale(axes: "Axes", values: list[float], zero: bool) -> None:
    """Choose the scale for finite `values`: from zero on, or by powers of ten where they span many."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xlim(left=0)
    if zero:
        axes.set_ylim(0, max(values) * 1.08 or 1)
    elif min(values) > 0 and max(values) > 30 * min(values):
        axes.set_yscale("log")
        # Matplotlib writes powers as markup, which would stand on the page as it is.
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    for axis in (axes.xaxis, axes.yaxis):
        engineering(axis, axis.get_data_interval()[1])


def engineering(axis: "Axis", largest: float) -> None:
    """Write large numbers as 20k, 3M."""
    from matplotlib.ticker import EngFormatter

    if largest >= 10_000:
        axis.set_major_formatter(EngFormatter(sep=""))


def to_svg(figure: "Figure", title: str) -> str:
    """The figure as an element of a page: text stays text, and colours become the page's variables."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    text = io.StringIO()
    # A salt of its own gives each chart its own ids, and the same ones every time.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        FigureCanvasSVG(figure).print_figure(text, format="svg", metadata={"Date": None}, dpi=72)
    svg = text.getvalue()
    svg = svg[svg.index(">", svg.index("<svg")) + 1 :]
    # The global style, namespaces, metadata and names of groups have no place within a page.
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg).replace("xlink:href", "href")
    svg = re.sub("font-family: [^;]*; ?", "", svg)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var(--{variable})")
    width, height = figure.get_size_inches() * 72
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">{svg}'
