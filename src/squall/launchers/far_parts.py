"""A replica on several machines: its first part meets the others, each of which a nursery has forked by itself.

Each dies with its own nursery, and when its connections to the others break.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from setproctitle import setproctitle

from squall.launchers.leaving import LOST, leave
from squall.launchers.parts import with_own
from squall.parts.assembly import Assembly
from squall.parts.carrying import ConnectionWatch, FarHost, PassingHost, SpreadSpeaker, own_arena
from squall.parts.exchanging import PartExchanges
from squall.parts.far_row import FarRow, ShowingSpeaker
from squall.parts.host import follow
from squall.parts.neighbours import SPEAKER, NeighbourLost, Neighbours, lost_neighbours
from squall.protocol.effects import Effect, End, MeetParts, Payload
from squall.protocol.events import Event
from squall.protocol.nodes import Node, part_nodes, whole
from squall.protocol.nursery_messages import PartPlace
from squall.runtime.driver import Driver, Host
from squall.runtime.job import Job
from squall.runtime.kinds import host
from squall.runtime.processes import keep_freed_memory
from squall.runtime.recording import recorded_row
from squall.strategies.work import Collective
from squall.transports.meeting import Way
from squall.transports.opening import listening

Tell = Callable[[BaseException], object]
Connect = Callable[[Job, Host], Driver]


class SpreadHost(Host):
    """Of the first part. It does nothing until it has met the others, and dies with any of them."""

    def __init__(self, job: Job, node: Node, make: Callable[[Job], Host], tell: Tell) -> None:
        """`make` has the host of a replica whose place in it the job has. `tell`: as of `run_far_part`."""
        self._job, self._node, self._make, self._tell = job, node, make, tell
        self._watch = ConnectionWatch()
        self._met: Host | None = None

    @property
    def wakes(self) -> Sequence[int]:
        return (self._watch.fileno(),)

    def attach(self, payload: Payload) -> None:
        assert self._met is not None
        self._met.attach(payload)

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, MeetParts):
            self._met = self._meet(effect.places)
            return None
        if self._met is None and isinstance(effect, End):
            return None
        assert self._met is not None, f"{effect} before the other parts are known"
        return self._met.perform(effect, now)

    def poll(self) -> Event | None:
        return self._met.poll() if self._met is not None else None

    def rest(self) -> None:
        if self._met is not None:
            self._met.rest()

    def _meet(self, others: Sequence[PartPlace]) -> Host:
        parts = [_place(self._job, self._node), *others]
        job, neighbours = _joined(with_own(self._job), parts, SPEAKER, self._tell, self._watch.news)
        with neighbours.together():
            made = self._make(job)
            if isinstance(job.recipe.work, Collective):
                row = ShowingSpeaker(FarRow(made, neighbours, job), neighbours, watch=self._watch)
                return recorded_row(row, job, self._node)
            return SpreadSpeaker(PassingHost(made, neighbours, job, self._node.index), neighbours, self._watch)


def run_far_part(job: Job, node: Node, tell: Tell, connect: Connect) -> None:
    """Be a part of a replica until that ends. Raises what it raises itself, which it tells before the others end.

    `connect`: make the driver of the part's machine, with this host, and the connections to its peers.
    """
    first, site = job.first, job.site
    assert first is not None
    assert site is not None
    for shard in first.shards:
        site.moved(shard.node, shard.machine, site.called(shard.address))
    count = job.plan.settings.parts
    part, replica = node.index % count, whole(node, count)
    setproctitle(f"squall replica {replica.index} part {part} of {job.directory.name}")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends a run in order
    torch.set_num_threads(job.plan.threads)
    keep_freed_memory()
    machines, watch = job.arena, ConnectionWatch()
    job = with_own(replace(job, arena=own_arena(job.arena.shape), listener=listening(), schedule=None))
    others = [_place(job, node) if other == node else PartPlace(other, -1) for other in part_nodes(replica, count)]
    parts = [first, *others]
    exchanges = driver = None
    if not isinstance(job.recipe.work, Collective):
        exchanges = PartExchanges(job, replica.index, part, machines, watch)
        # Connected before the first part can ask for weights: what comes where nobody is comes again a second later.
        driver = connect(job, exchanges)
    try:
        job, neighbours = _joined(job, parts, part, tell, watch.news)
        with neighbours.together():
            made = host(job, replica)
            if exchanges is None or driver is None:
                far: Host = FarRow(made, neighbours, job)
            else:
                far = FarHost(made, neighbours, job, replica.index, exchanges)
                exchanges.begin(driver, neighbours.fail)
        follow(far, neighbours)
    except NeighbourLost:
        leave(LOST)  # that one knows why


def _joined(
    job: Job, parts: Sequence[PartPlace], own: int, tell: Tell, news: int
) -> tuple[Job, Neighbours]:  # fmt: skip
    """The job with this process's place in the replica, and the way to the other parts."""
    from squall.parts.inside import inside  # which imports torch's compiler

    assert job.site is not None
    assert job.listener is not None
    way = Way(job.site.identity.issue(str(parts[own].node)).contexts(), job.listener, job.site.plaintext)
    with lost_neighbours():
        group = Assembly(way, job.site, parts, own, news).run()
    neighbours = Neighbours(group, own, len(parts))
    neighbours.failing = lambda error: None if isinstance(error, NeighbourLost) else tell(error)
    with neighbours.together():
        place = inside(job.task, job.layout, job.starts, neighbours, job.device(parts[SPEAKER].node.index))
    return replace(job, inside=place), neighbours


def _place(job: Job, node: Node) -> PartPlace:
    """Where this process is, which is that node."""
    assert job.site is not None
    assert job.listener is not None
    return PartPlace(node, job.site.machine, f"{job.site.host}:{job.listener.getsockname()[1]}")
