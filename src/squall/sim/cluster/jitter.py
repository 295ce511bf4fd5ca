"""By what factor a step takes longer or shorter than its machine's mean: laws whose mean is 1.

Chance is an argument, so that a simulated run is a function of its seed.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MOST_BYTES = 1 << 20  # of a trace file


@dataclass(frozen=True)
class Constant:
    """Every step takes the same time."""

    def draw(self, chance: random.Random) -> float:
        return 1.0


@dataclass(frozen=True)
class LogNormal:
    """The logarithm of a step time is normal with this standard deviation: many small causes that multiply."""

    sigma: float

    def draw(self, chance: random.Random) -> float:
        return math.exp(chance.gauss(-(self.sigma**2) / 2, self.sigma))


@dataclass(frozen=True)
class Pareto:
    """P(factor > x) falls as x ** -alpha: now and then a step takes many times as long. No step is much shorter."""

    alpha: float  # > 1: else there is no mean

    def draw(self, chance: random.Random) -> float:
        return (self.alpha - 1) / self.alpha * chance.paretovariate(self.alpha)


@dataclass(frozen=True)
class Trace:
    """Times that were measured, drawn with replacement and divided by their mean."""

    file: str  # as the cluster file names it
    times: tuple[float, ...]  # in any one unit

    @cached_property
    def _mean(self) -> float:
        return math.fsum(self.times) / len(self.times)

    def draw(self, chance: random.Random) -> float:
        return chance.choice(self.times) / self._mean


Jitter = Constant | LogNormal | Pareto | Trace


def read_trace(file: str, beside: Path) -> Trace:
    """A file with one time a line; blank lines and what follows a # are left out. `file` is relative to `beside`.

    Raises:
        ValueError: there is no such file, or it holds something else. "what: remedy", with the line in that file.
    """
    path = beside / file
    if not path.is_file():
        raise ValueError(f"there is no file {path}: name a file with one measured time a line, relative to this file")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} is larger than {MOST_BYTES >> 20} MiB: a few hundred times are enough")
    times = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if text:
            times.append(_time(text, f"{path.name}, line {number}"))
    if not times:
        raise ValueError(f"{path} holds no times: write one a line")
    if math.fsum(times) == 0:
        raise ValueError(f"all times in {path} are 0: their mean must be positive")
    return Trace(file, tuple(times))


def _time(text: str, where: str) -> float:
    try:
        time = float(text)
    except ValueError:
        time = math.nan
    if not (0 <= time < math.inf):
        raise ValueError(f"{where}, holds {text[:40]!r}: write one positive number a line, without a unit")
    return time
