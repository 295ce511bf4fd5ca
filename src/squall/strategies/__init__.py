"""Every strategy, by the name that the command line knows it by. A new one adds its file and a row here."""

from __future__ import annotations

from squall.strategies.base import Recipe, Strategy
from squall.strategies.downpour import Downpour
from squall.strategies.single import SingleProcess
from squall.strategies.synchronous import Synchronous

STRATEGIES: dict[str, type[Strategy]] = {
    "single_process": SingleProcess,
    "synchronous": Synchronous,
    "downpour": Downpour,
}

__all__ = ["STRATEGIES", "Downpour", "Recipe", "SingleProcess", "Strategy", "Synchronous"]
