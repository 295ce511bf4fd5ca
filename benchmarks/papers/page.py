"""docs/results.md: one section a claim, each with its figure and what agreed and what did not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.results import commit, machine

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "results.md"
HEAD = """# Claims of the papers, tried here

Written by `python -m benchmarks.papers`: scikit-learn's digits, a network 64-256-256-10, batches of 16, test accuracy
on 360 held-out digits, unless a section says otherwise. Replicas run in virtual time, with real gradients and the
protocol that ships, so the machine's cores do not matter. Figures are means over seeds, with the spread from the lowest
to the highest.
"""
NAMES = (  # the page's order
    "distbelief", "figure4", "model_parallel", "staleness", "compensation", "delay", "local_steps", "backup",
)  # fmt: skip


def new_figure() -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(6.4, 3.4), layout="constrained")


def write(
    name: str, title: str, figure: Figure, columns: Sequence[str], rows: Sequence[Sequence[str]], text: str
) -> None:
    """Put a section in place of the one with its name."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    path = DOCS / "figures" / f"{name}.svg"
    path.parent.mkdir(exist_ok=True)
    FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})  # type: ignore[no-untyped-call]
    table = [columns, ["---"] * len(columns), *rows]
    section = "\n".join(
        [
            f"## {title}",
            "",
            f"![{title}](figures/{name}.svg)",
            "",
            *(f"| {' | '.join(row)} |" for row in table),
            "",
            text.strip(),
            "",
            f"`python -m benchmarks.papers {name}`, commit {commit()}, {machine()}.",
            "",
        ]
    )
    _, *others = PAGE.read_text().split("\n## ") if PAGE.exists() else [""]
    kept = {_name(other): f"## {other.strip()}\n" for other in others}
    kept[name] = section
    PAGE.write_text("\n".join([HEAD, *(kept[known] for known in NAMES if known in kept)]))


def _name(section: str) -> str:
    return section.partition("(figures/")[2].partition(".svg")[0]


def spread(values: Sequence[float], digits: int = 1) -> str:
    """mean (lowest to highest)"""
    mean = sum(values) / len(values)
    return f"{mean:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
