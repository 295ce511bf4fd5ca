"""Squall: train PyTorch models on many processes, with every data-parallel algorithm behind one switch."""

from squall.errors import NotFinite, PeerFault, ProcessLost, SnapshotMismatch, SquallError, TaskError
from squall.fit import fit, resume
from squall.plan import Settings
from squall.run import Run
from squall.strategies import Downpour, SingleProcess, Strategy, Synchronous
from squall.task import Task
from squall.version import __version__

__all__ = [
    "Downpour",
    "NotFinite",
    "PeerFault",
    "ProcessLost",
    "Run",
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
    "resume",
]
