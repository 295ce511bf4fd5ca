"""Every strategy, by the name that the command line knows it by. A new one adds its file and a row here."""

from __future__ import annotations

from squall.strategies.all_reduce import AllReduce as AllReduce
from squall.strategies.asynchronous import AsynchronousSGD as AsynchronousSGD
from squall.strategies.asynchronous import BoundedDelay as BoundedDelay
from squall.strategies.averaging import Averaging as Averaging
from squall.strategies.averaging import ElasticAveraging as ElasticAveraging
from squall.strategies.base import Recipe as Recipe
from squall.strategies.base import Strategy as Strategy
from squall.strategies.diloco import DiLoCo as DiLoCo
from squall.strategies.downpour import Downpour as Downpour
from squall.strategies.proximal import DelayedProximal as DelayedProximal
from squall.strategies.sandblaster import Sandblaster as Sandblaster
from squall.strategies.single import SingleProcess as SingleProcess
from squall.strategies.synchronous import Synchronous as Synchronous

STRATEGIES: dict[str, type[Strategy]] = {
    "single_process": SingleProcess,
    "synchronous": Synchronous,
    "all_reduce": AllReduce,
    "bounded_delay": BoundedDelay,
    "downpour": Downpour,
    "asynchronous_sgd": AsynchronousSGD,
    "delayed_proximal": DelayedProximal,
    "averaging": Averaging,
    "elastic_averaging": ElasticAveraging,
    "diloco": DiLoCo,
    "sandblaster": Sandblaster,
}
