"""How a replica of all-reduce meets its fellows: on one machine by their pids, between machines by their addresses."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from socket import socket
from typing import Protocol

import torch
import torch.distributed as dist

from squall.protocol.collective.messages import Place
from squall.protocol.effects import JoinGroup
from squall.protocol.nodes import Node
from squall.runtime.groups import Group
from squall.runtime.job import Job
from squall.runtime.mesh_group import MeshGroup
from squall.runtime.site import Site
from squall.transports.meeting import Guest, Meeting, Way
from squall.transports.mesh import CUT, Mesh, MeshBroken
from squall.transports.near_meeting import meet

MEET_WITHIN_S = 30.0  # whoever does not come, though it lives; who dies has a view cut the waiting


class Fellows(Protocol):
    """Where a process meets those of its group."""

    def form(self, effect: JoinGroup, own: int) -> Group | MeshGroup:
        """`own` is its place among the members. Raises `RuntimeError` where one does not come."""

    def cut(self) -> None:
        """From another thread: what is under way in the group, or in forming it, fails."""

    def left(self) -> None:
        """Nothing is under way: what was cut is over."""


class _UnderWay:
    """A group, or its meeting, that may be cut from another thread: by the process's own, where one waits in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cut = False
        self._under_way: Meeting | Mesh | None = None

    def left(self) -> None:
        with self._lock:
            self._cut, self._under_way = False, None

    def cut(self) -> None:
        with self._lock:
            self._cut = True
            if self._under_way is not None:
                self._under_way.cut()

    def _go_on(self, with_what: Meeting | Mesh | None) -> None:
        """Raises `MeshBroken` where it was cut meanwhile."""
        with self._lock:
            self._under_way = with_what
            if self._cut and with_what is not None:
                with_what.cut()
                if isinstance(with_what, Mesh):
                    with_what.close()
                raise MeshBroken(CUT)


class NearFellows(_UnderWay):
    """On one machine. A meeting is not cut: it ends soon, also where somebody is missing."""

    def __init__(self, node: Node, directory: Path, device: torch.device, part: int = 0) -> None:
        """`directory`: where members find each other, of this start of the run alone.

        Where replicas have several parts, each meets those with its number.
        """
        super().__init__()
        self._directory, self._part = directory, part
        self._gpus = torch.cuda.device_count() if device.type == "cuda" else None
        self._pid_file(node).write_text(str(os.getpid()))  # before it joins, so that all who know it find that

    def form(self, effect: JoinGroup, own: int) -> Group | MeshGroup:
        name, pids = f"{effect.number}-{self._part}", [int(self._pid_file(node).read_text()) for node in effect.members]
        if self._gpus is not None:
            backend = "nccl" if len(pids) <= self._gpus else "gloo"  # the first wants a GPU for each member
            return Group(name, self._directory, pids, own, backend)
        try:
            mesh = Mesh(meet(self._directory, name, pids, own), [str(node) for node in effect.members])
        except OSError as error:  # no more files may be open, or there is no room for one
            raise MeshBroken(f"the group cannot form: {error}") from error
        self._go_on(mesh)
        return MeshGroup(mesh, effect.members, own)

    def _pid_file(self, node: Node) -> Path:
        return self._directory / f"{node}-{self._part}.pid"


class FarFellows(_UnderWay):
    """On several machines."""

    def __init__(self, way: Way, site: Site) -> None:
        super().__init__()
        self._way = way
        self._site = site

    @classmethod
    def of(cls, node: Node, site: Site, listener: socket) -> FarFellows:
        """Of this process, which is that node."""
        return cls(Way(site.identity.issue(str(node)).contexts(), listener, site.plaintext), site)

    def form(self, effect: JoinGroup, own: int) -> MeshGroup:
        return self.meet(effect.number, effect.members, effect.places, own)

    def meet(self, number: int, members: Sequence[Node], places: Sequence[Place], own: int) -> MeshGroup:
        """Those members, at their places, in the meeting of that number."""
        guests = [self._guest(node, place) for node, place in zip(members, places, strict=True)]
        meeting = Meeting(self._way, number, guests, own)
        try:
            self._go_on(meeting)
            connections = meeting.run(MEET_WITHIN_S)
        finally:
            self._go_on(None)
            meeting.close()
        mesh = Mesh(connections, [str(node) for node in members])
        self._go_on(mesh)
        return MeshGroup(mesh, members, own, [place.machine for place in places])

    def _guest(self, node: Node, place: Place) -> Guest:
        """Raises `MeshBroken` for what is no address."""
        try:
            return Guest(node, place.machine, self._site.called(place.address))
        except ValueError as error:
            raise MeshBroken(f"{node} says that it is called at {place.address!r}") from error


def fellows_of(job: Job, node: Node, device: torch.device) -> Fellows:
    """Where a replica of one process meets others."""
    if job.site is None:
        assert job.scratch is not None
        return NearFellows(node, job.scratch, device)
    assert job.listener is not None
    return FarFellows.of(node, job.site, job.listener)


def lost(error: RuntimeError) -> bool:
    """Whether it is about a member, or the connection to it; torch says `RuntimeError` of much else."""
    return isinstance(error, dist.DistError | MeshBroken) or any(
        of in str(error) for of in ("gloo", MeshBroken.__name__)
    )


def in_a_line(error: RuntimeError) -> str:
    """Torch tells of an exception in a thread with all that was around it."""
    text = str(error).rpartition(f"{MeshBroken.__name__}: ")[2] or str(error)
    return next(iter(text.splitlines()), type(error).__name__)
