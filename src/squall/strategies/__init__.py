"""Every strategy, by the name that the command line knows it by. A new one adds its file and a row here."""

from __future__ import annotations

from squall.strategies.asynchronous import AsynchronousSGD, BoundedDelay
from squall.strategies.averaging import Averaging, ElasticAveraging
from squall.strategies.base import Recipe, Strategy
from squall.strategies.diloco import DiLoCo
from squall.strategies.downpour import Downpour
from squall.strategies.proximal import DelayedProximal
from squall.strategies.sandblaster import Sandblaster
from squall.strategies.single import SingleProcess
from squall.strategies.synchronous import Synchronous

STRATEGIES: dict[str, type[Strategy]] = {
    "single_process": SingleProcess,
    "synchronous": Synchronous,
    "bounded_delay": BoundedDelay,
    "downpour": Downpour,
    "asynchronous_sgd": AsynchronousSGD,
    "delayed_proximal": DelayedProximal,
    "averaging": Averaging,
    "elastic_averaging": ElasticAveraging,
    "diloco": DiLoCo,
    "sandblaster": Sandblaster,
}

__all__ = [
    "STRATEGIES",
    "AsynchronousSGD",
    "Averaging",
    "BoundedDelay",
    "DelayedProximal",
    "DiLoCo",
    "Downpour",
    "ElasticAveraging",
    "Recipe",
    "Sandblaster",
    "SingleProcess",
    "Strategy",
    "Synchronous",
]
