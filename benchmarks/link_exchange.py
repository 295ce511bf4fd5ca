"""The exchange benchmark with its processes on two machines, each with an arena of its own."""

from __future__ import annotations

import dataclasses
import socket
import tempfile
from contextlib import ExitStack
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import squall
from benchmarks.link_payload import forked
from benchmarks.namespaces import Link
from benchmarks.squall_exchange import ReadyGradient, exchange_job, strategy
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.role_processes import close, connections, run_role
from squall.protocol.heartbeats import Pulse
from squall.protocol.nodes import COORDINATOR, Node
from squall.runtime.arena import Arena
from squall.runtime.driver import Driver
from squall.runtime.job import Job, arena_shape
from squall.runtime.kinds import machine
from squall.runtime.placement import Seats
from squall.runtime.places import used_spans
from squall.runtime.site import Site
from squall.transports.certificates import Identity

NEVER_LOST = Pulse(lost_after_s=3600.0)  # nobody says here that a machine is alive


def exchange_seconds(link: Link, elements: int, repeats: int) -> float:
    """Median seconds of an exchange with SGD between a replica on one machine and a shard on the other."""
    seats = {("coordinator", 0): 0, ("replica", 0): 0, ("shard", 0): 1}
    return _median_seconds(link, seats, elements, strategy("sgd"), repeats)[0]


def overlapping_bytes_s(link: Link, elements: int, repeats: int) -> float:
    """Bytes of numbers a second in each direction, as two replicas and two shards exchange without computing.

    Half of every push, and half of the weights that come back, pass the link: as many one way as the other.
    """
    seats = {(role, i): i for role in ("replica", "shard") for i in (0, 1)} | {("coordinator", 0): 0}
    overlapping = strategy("sgd", replicas=2, shards=2, overlap=True)
    return sum(4 * elements / 2 / seconds for seconds in _median_seconds(link, seats, elements, overlapping, repeats))


def _median_seconds(link: Link, seats: Seats, elements: int, strategy: squall.Strategy, repeats: int) -> list[float]:
    """Of each replica."""
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder, ExitStack() as running:
        base = exchange_job(elements, strategy, repeats, 1, Path(folder))
        jobs = _jobs(link, base, seats)
        replicas = []
        for (role, index), at in seats.items():
            node, sockets = Node(role, index), Path(folder) / str(at)
            sockets.mkdir(exist_ok=True)
            mine, theirs = Pipe(duplex=False)
            work = partial(_replicate, theirs) if role == "replica" else _serve
            with link.inside(at):
                running.enter_context(forked(partial(work, jobs[at], node, sockets)))
            if role == "replica":
                theirs.close()
                replicas.append(mine)
        return [replica.recv() for replica in replicas]


def _jobs(link: Link, base: Job, seats: Seats) -> list[Job]:
    """One a machine."""
    root, listeners = Identity.new_root("run"), {}
    for (role, index), at in seats.items():
        if role != "replica":
            with link.inside(at):
                listeners[Node(role, index)] = socket.create_server((link.hosts[at], 0))
    addresses = {node: listener.getsockname() for node, listener in listeners.items()}
    shape, jobs = arena_shape(base.layout, base.recipe), []
    for at in (0, 1):
        own = {node: listener for node, listener in listeners.items() if seats[node.role, node.index] == at}
        identity = root.issue(f"machine-{at}", authority=True)
        site = Site(at, seats, addresses, identity, own, {0: 1, 1: 1}, NEVER_LOST)
        used = used_spans(shape, base.layout, base.recipe.shards, seats, at)
        arena = Arena.create(shape, base.directory, used=used)
        jobs.append(dataclasses.replace(base, site=site, arena=arena))
    return jobs


def _serve(job: Job, node: Node, sockets: Path) -> None:
    mine, _ = Pipe()
    run_role(job, node, sockets, ControlPipe(mine) if node == COORDINATOR else None)


def _replicate(told: Connection, job: Job, node: Node, sockets: Path) -> None:
    """A replica that computes nothing."""
    transport, carriers = connections(job, node, sockets, None)
    host = ReadyGradient()
    try:
        Driver(machine(job, node), transport, host, carriers=carriers).run()
    finally:
        close(transport, carriers)
        told.send(host.median_seconds)
