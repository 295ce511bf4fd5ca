"""Squall: train PyTorch models on many processes, with every data-parallel algorithm behind one switch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from squall.version import __version__ as __version__

if TYPE_CHECKING:
    from squall.distilling import Distilled as Distilled
    from squall.distilling import distill as distill
    from squall.errors import Interrupted as Interrupted
    from squall.errors import NotFinite as NotFinite
    from squall.errors import PeerFault as PeerFault
    from squall.errors import ProcessLost as ProcessLost
    from squall.errors import SnapshotMismatch as SnapshotMismatch
    from squall.errors import SquallError as SquallError
    from squall.errors import TaskError as TaskError
    from squall.export.loading import load as load
    from squall.predicting import Predictions as Predictions
    from squall.predicting import predict as predict
    from squall.replaying.replayed import Replayed as Replayed
    from squall.replaying.run import replay as replay
    from squall.run import Run as Run
    from squall.session.batches import Batches as Batches
    from squall.session.entry import join as join
    from squall.session.session import Session as Session
    from squall.settings import Settings as Settings
    from squall.sim.cluster.forecast import Forecast as Forecast
    from squall.sim.cluster.model import Cluster as Cluster
    from squall.sim.cluster.simulate import simulate as simulate
    from squall.splits import Branches as Branches
    from squall.splits import Pipeline as Pipeline
    from squall.splits import Tensor as Tensor
    from squall.strategies import AllReduce as AllReduce
    from squall.strategies import AsynchronousSGD as AsynchronousSGD
    from squall.strategies import Averaging as Averaging
    from squall.strategies import BoundedDelay as BoundedDelay
    from squall.strategies import DelayedProximal as DelayedProximal
    from squall.strategies import DiLoCo as DiLoCo
    from squall.strategies import Downpour as Downpour
    from squall.strategies import ElasticAveraging as ElasticAveraging
    from squall.strategies import Sandblaster as Sandblaster
    from squall.strategies import SingleProcess as SingleProcess
    from squall.strategies import Strategy as Strategy
    from squall.strategies import Synchronous as Synchronous
    from squall.task import Task as Task
    from squall.train import fit as fit
    from squall.train import resume as resume

_HOMES = {
    "session.batches": "Batches",
    "session.entry": "join",
    "errors": "Interrupted NotFinite PeerFault ProcessLost SnapshotMismatch SquallError TaskError",
    "export.loading": "load",
    "train": "fit resume",
    "distilling": "Distilled distill",
    "predicting": "Predictions predict",
    "replaying.replayed": "Replayed",
    "replaying.run": "replay",
    "run": "Run",
    "session.session": "Session",
    "settings": "Settings",
    "sim.cluster.forecast": "Forecast",
    "sim.cluster.model": "Cluster",
    "sim.cluster.simulate": "simulate",
    "splits": "Branches Pipeline Tensor",
    "strategies": "AllReduce AsynchronousSGD Averaging BoundedDelay DelayedProximal DiLoCo Downpour ElasticAveraging"
    " Sandblaster SingleProcess Strategy Synchronous",
    "task": "Task",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted([*_HOME_OF, "__version__"])


def __getattr__(name: str) -> Any:
    """Import what is asked for: the command line must not wait for torch before it starts other processes."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'squall' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"squall.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
