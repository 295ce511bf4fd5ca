"""What the coordinator's deputy works on: a record of its own, kept by the same hosts as the run's.

All that the coordinator is travels to it as a file, as all that a shard is does to its backup (`runtime.whole`):

    state                   uint8, what its machine is (`protocol.copied`)
    kept                    uint8, what its hosts know (`Host.keeps`), pickled
    record                  uint8, the record's file
    run.json, code.pickle   uint8, without which nobody goes on with a run
"""

from __future__ import annotations

import os
import pickle
import sqlite3
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path, PosixPath
from typing import NamedTuple, get_args

import torch
from safetensors.torch import load_file

from squall.protocol.backup import TakeCopy
from squall.protocol.copied import Copied, CopyTo
from squall.protocol.deputies import Deputed
from squall.protocol.effects import Effect, End, Payload
from squall.protocol.events import CopyKnown, CopyTaken, Event, PeerRefused
from squall.protocol.nodes import COORDINATOR, Node
from squall.record.backlog import Backlog
from squall.record.rows import Row
from squall.record.writer import Record
from squall.runtime import whole
from squall.runtime.backing import WHY_AT_MOST
from squall.runtime.divergence import Divergence
from squall.runtime.driver import Host, HostAround
from squall.runtime.folding import Folding, Pieces
from squall.runtime.job import Job
from squall.runtime.journal import Journal
from squall.runtime.left_out import LeftOut
from squall.runtime.pauses import Pauses
from squall.runtime.places import RUN_BYTES
from squall.runtime.recorder import CoordinatorHost
from squall.runtime.snapshot import Snapshots
from squall.runtime.thinning import Thinning

FILES = ("run.json", "code.pickle")
# What hosts of the coordinator know is made of these, and of what its machine is made of.
KNOWN = (
    Backlog, Divergence, Folding, LeftOut, Pauses, Pieces, Record, Snapshots, Thinning, *get_args(Row),
    PosixPath, defaultdict, deque, dict, int, list,
)  # fmt: skip

Around = Callable[[CoordinatorHost, Job], Host]


class Kept(NamedTuple):
    """By a deputy, for the coordinator that may go on in its place."""

    journal: Journal
    directory: Path  # of the run then
    lock: int  # that keeps others from it


class CopiedHost(HostAround):
    """The coordinator's, outermost: packs what all of them know, and tells whether there is a deputy."""

    def __init__(self, host: Host, job: Job, tell: Callable[[bool], None]) -> None:
        super().__init__(host)
        self._directory, self._scratch, self._tell = job.directory, job.scratch, tell

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case Deputed(leads):
                self._tell(leads)
                return None
            case CopyTo(deputy, number=number, state=state):  # the last one, if there was one, is given up
                self._tell(False)
                return None if deputy is None else self._pack(deputy, number, state)
        return super().perform(effect, now)

    def _pack(self, deputy: Node, number: int, state: bytes) -> CopyKnown:
        assert self._scratch is not None
        try:
            with closing(sqlite3.connect(self._directory / "run.sqlite")) as record:  # hosts know what waits
                found = {"state": state, "kept": pickle.dumps(self.keeps()), "record": record.serialize()}
            found |= {name: path.read_bytes() for name in FILES if (path := self._directory / name).exists()}
        except (sqlite3.Error, OSError, MemoryError) as error:
            sys.stderr.write(f"squall: warning: the record cannot be copied to a deputy: {error}\n")
            return CopyKnown(deputy, 0)
        tensors = {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in found.items()}
        return whole.packed(self._scratch, deputy, number, tensors, RUN_BYTES)


class DeputyHost(Host):
    """Has nothing until all that the coordinator is has come."""

    def __init__(self, job: Job, node: Node, around: Around) -> None:
        """`around`: the hosts of a coordinator that keeps such a record."""
        kept = job.deputies[node]
        self._job = replace(job, journal=kept.journal, directory=kept.directory)
        self._journal, self._around = kept.journal, around
        self._host: Host | None = None
        self._copied: Copied | None = None

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case TakeCopy(payload):
                return self._take(payload)
            case End():
                return self.poll()
        assert self._host is not None
        assert self._copied is not None
        self._host.perform(effect, self._copied.now)  # as it was when the coordinator did so
        return None

    def poll(self) -> Event | None:
        return None if self._host is None else self._host.poll()

    def _take(self, payload: Payload) -> Event:
        try:
            return self._taken(payload)
        except Exception as error:
            why = f"it sends what no coordinator is: {type(error).__name__}: {error}"
            return PeerRefused(COORDINATOR, why[:WHY_AT_MOST])

    def _taken(self, payload: Payload) -> CopyTaken:
        """Raises anything for what is no coordinator."""
        assert self._job.scratch is not None
        path = whole.path_of(self._job.scratch, payload.owner, payload.clock)
        found = {name: tensor.numpy().tobytes() for name, tensor in load_file(path).items()}
        path.unlink()
        for name, data in (("run.sqlite", found["record"]), *((n, found[n]) for n in FILES if n in found)):
            _write(self._job.directory / name, data)
        copied, self._journal.kept = whole.machine(found["state"]), whole.known(found["kept"], KNOWN)
        recorder = CoordinatorHost(self._job, Nobody())
        recorder.follow()
        self._host, self._copied = self._around(recorder, self._job), copied
        self._journal.keeps = self._host.keeps
        copied.journal_into(self._journal)
        return CopyTaken(copied)


class Nobody:
    """A coordinator's line to the user, who hears of all this from another one."""

    def end(self, end: End) -> None: ...

    def poll(self) -> Event | None: ...

    def saving(self, received: int, total: int) -> None: ...

    def evaluated(self, number: int, evaluation: dict[str, float]) -> None: ...


def _write(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
