"""Squall: train PyTorch models on many processes, with every data-parallel algorithm behind one switch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from squall.version import __version__

if TYPE_CHECKING:
    from squall.errors import Interrupted, NotFinite, PeerFault, ProcessLost, SnapshotMismatch, SquallError, TaskError
    from squall.plan import Settings
    from squall.replaying.replayed import Replayed
    from squall.replaying.run import replay
    from squall.run import Run
    from squall.session.batches import Batches
    from squall.session.entry import join
    from squall.session.session import Session
    from squall.sim.cluster.forecast import Forecast
    from squall.sim.cluster.model import Cluster
    from squall.sim.cluster.simulate import simulate
    from squall.strategies import (
        AsynchronousSGD,
        Averaging,
        BoundedDelay,
        DelayedProximal,
        DiLoCo,
        Downpour,
        ElasticAveraging,
        Sandblaster,
        SingleProcess,
        Strategy,
        Synchronous,
    )
    from squall.task import Task
    from squall.train import fit, resume

_HOMES = {
    "session.batches": ("Batches",),
    "session.entry": ("join",),
    "errors": ("Interrupted", "NotFinite", "PeerFault", "ProcessLost", "SnapshotMismatch", "SquallError", "TaskError"),
    "train": ("fit", "resume"),
    "plan": ("Settings",),
    "replaying.replayed": ("Replayed",),
    "replaying.run": ("replay",),
    "run": ("Run",),
    "session.session": ("Session",),
    "sim.cluster.forecast": ("Forecast",),
    "sim.cluster.model": ("Cluster",),
    "sim.cluster.simulate": ("simulate",),
    "strategies": (
        "AsynchronousSGD",
        "Averaging",
        "BoundedDelay",
        "DelayedProximal",
        "DiLoCo",
        "Downpour",
        "ElasticAveraging",
        "Sandblaster",
        "SingleProcess",
        "Strategy",
        "Synchronous",
    ),
    "task": ("Task",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AsynchronousSGD",
    "Averaging",
    "Batches",
    "BoundedDelay",
    "Cluster",
    "DelayedProximal",
    "DiLoCo",
    "Downpour",
    "ElasticAveraging",
    "Forecast",
    "Interrupted",
    "NotFinite",
    "PeerFault",
    "ProcessLost",
    "Replayed",
    "Run",
    "Sandblaster",
    "Session",
    "Settings",
    "SingleProcess",
    "SnapshotMismatch",
    "SquallError",
    "Strategy",
    "Synchronous",
    "Task",
    "TaskError",
    "__version__",
    "fit",
    "join",
    "replay",
    "resume",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for: the command line must not wait for torch before it starts other processes."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'squall' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"squall.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    return __all__
