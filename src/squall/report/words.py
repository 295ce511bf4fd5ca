"""Numbers as people read them, the same in the terminal and on the page."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table


class Words(NamedTuple):
    """What a run does with examples, in words."""

    done: str  # what happens to one
    time: str
    first: str  # what is seen first of it


TRAINING = Words("trained", "training time", "step")
ANSWERING = Words("answered", "time", "answer")
LOSSES = ("loss", "objective")  # metrics that are to fall; the second is what Sandblaster minimizes


def trains(state: Mapping[str, str]) -> bool:
    """Whether a run moves weights, by the state in its record; else it answers."""
    return state.get("optimizer") != ""


def words_of(state: Mapping[str, str]) -> Words:
    return TRAINING if trains(state) else ANSWERING


def clock(seconds: float) -> str:
    """A duration: ``4.2 s``, ``12:05``, ``3:01:20``."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def two_columns(lines: Sequence[tuple[str, str]]) -> str:
    """(name, value) one below the other, in 80 columns."""
    table = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(*line)
    return plain(table)


def plain(*parts: RenderableType, width: int = 80) -> str:
    """Tables and sentences one below the other, as text without colours."""
    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None, force_terminal=False, markup=False)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().strip("\n").splitlines())


def number(value: float) -> str:
    """Counts and rates with thousands separated; below 1,000, four significant digits."""
    if math.isfinite(value) and (abs(value) >= 1000 or value == int(value)):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def size(bytes_: int) -> str:
    """``640 B``, ``1.5 MB``: three significant digits, decimal units."""
    value = float(bytes_)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            return f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError


def percent(part: float, whole: float) -> str:
    """`part` of `whole`, without decimals."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def plural(count: int, noun: str) -> str:
    """``1 example``, ``2,000 examples``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def loss_text(value: float) -> str:
    """A loss with a steady number of digits, so that a column of them does not jitter."""
    return f"{value:.4f}" if 0.001 <= value < 10_000 else number(value)


def rate_text(value: float) -> str:
    """Something per second: whole numbers, or two digits of a slow one."""
    return f"{value:.2g}" if 0 < value < 10 else number(round(value))
