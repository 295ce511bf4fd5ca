"""What each forked process runs, and the channel between the coordinator and the nursery."""

from __future__ import annotations

import math
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import gethostname

import torch
from setproctitle import setproctitle

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.far_parts import SpreadHost, run_far_part
from squall.launchers.leaving import LOST, RAISED
from squall.launchers.nursery_channel import NurseryChannel
from squall.launchers.parts import die_of, first_part, tell_raised
from squall.parts.host import Speaker
from squall.parts.neighbours import NeighbourLost
from squall.protocol.copied import Copied
from squall.protocol.nodes import COORDINATOR, DEPUTY, NURSERY, Node, shard_nodes, whole
from squall.record.writer import COMMIT_EVERY_S
from squall.runtime.answering import ArrivingHost
from squall.runtime.batches import loader_killed
from squall.runtime.collective.apart import Apart
from squall.runtime.collective.showing import ShowingHost
from squall.runtime.deputing import CopiedHost, DeputyHost
from squall.runtime.driver import Driver, Host
from squall.runtime.first_touch import prepared
from squall.runtime.hosts import SlowedHost
from squall.runtime.interrupts import LeftToLauncher
from squall.runtime.job import Job
from squall.runtime.kinds import host, kind_of, machine
from squall.runtime.machines import has_deputy
from squall.runtime.part import Part
from squall.runtime.parts_told import PartsHost
from squall.runtime.pieces import PiecesHost
from squall.runtime.places import ANSWERS_BYTES, Places
from squall.runtime.processes import keep_freed_memory, never_interrupt
from squall.runtime.recorder import CoordinatorHost
from squall.runtime.recording import recorded_row
from squall.runtime.site import Site
from squall.runtime.traffic import TrafficHost
from squall.strategies.work import Answering, Collective
from squall.transports.carrier import Carrier
from squall.transports.host import HostTransport
from squall.transports.lanes import Lanes
from squall.transports.opening import listening
from squall.transports.streams import Streams
from squall.usercode.blame import encode, note

# Being woken from sleep costs more than a whole exchange of a small vector, so the two ends of an exchange look out
# for the answer, or the next push, for a moment. A replica does so on a core that it would leave idle; a shard, and its
# backup beside it, only where they do not take the core from a replica that computes.
SPIN_S = 1000e-6

# A shard that has this many elements takes far longer for an exchange than the kernel for moving it to another core.
UNHURRIED_ELEMENTS = 1_000_000

# Training has priority over evaluations, and less so where an evaluation may end the run.
EVALUATOR_NICE, JUDGE_NICE = 10, 5


def run_role(job: Job, node: Node, sockets: Path, pipe: ControlPipe | None) -> None:
    """Be one of the run's processes until its machine ends."""
    job = job.with_shares()
    if node.role == "part":
        run_far_part(job, node, partial(tell, node, job, sockets), partial(_part_driver, node=node, sockets=sockets))
        return
    name_process(node, job)
    signal.signal(signal.SIGTERM, LeftToLauncher())
    shard_threads = job.plan.settings.shard_threads
    torch.set_num_threads(
        {"replica": job.plan.threads, "shard": shard_threads, "backup": shard_threads}.get(node.role, 1)
    )
    if node.role == "replica":
        keep_freed_memory()
    elif node.role == "shard" and job.layout.length >= UNHURRIED_ELEMENTS * job.recipe.shards:
        never_interrupt()
    elif node.role == "evaluator":
        os.nice(EVALUATOR_NICE if job.plan.until is None and job.plan.patience is None else JUDGE_NICE)
    spread = job.first is not None
    several = node.role == "replica" and job.plan.settings.parts > 1 and not spread
    watch = None
    if several:
        job, neighbours, watch = first_part(job, node, sockets)
    far_member = node.role == "replica" and job.site is not None and isinstance(job.recipe.work, Collective)
    if spread or far_member:
        job = replace(job, listener=listening())
    transport, carriers = connections(job, node, sockets, pipe, () if watch is None else (watch.fileno(),))
    linked = machine(job, node)
    nursery = NURSERY if job.site is None else Node("nursery", job.site.machine)
    channel = NurseryChannel(pipe, nursery, has_deputy(job)) if pipe is not None else None
    try:
        # The coordinator's rows are written while nobody speaks, too.
        poll_every_s = COMMIT_EVERY_S if node.role in ("coordinator", "deputy") else math.inf
        if spread:
            host: Host = SpreadHost(job, node, partial(make_host, node=node), partial(tell, node, job, sockets))
        else:
            clock = partial(_clock, linked) if isinstance(linked, Copied) else time.monotonic
            host = make_host(job, node, channel, clock)
        own = () if channel is None else (channel,)
        if several:
            host = Speaker(host, neighbours, own_weights=job.recipe.work.local is not None, watch=watch)
            host = recorded_row(host, job, node)
        if far_member:
            host = Apart(host)
        transport.wake_on(host.wakes)
        Driver(linked, transport, host, carriers=(*own, *carriers), entry=job.entry(node)).run(poll_every_s)
    except NeighbourLost as lost:
        die_of(lost, node, sockets, () if watch is None else watch.pids)
    finally:
        close(transport, carriers)


def _part_driver(job: Job, host: Host, node: Node, sockets: Path) -> Driver:
    """Of the exchanges of a part that lies on another machine than the first; they last as long as its process."""
    transport, carriers = connections(job, node, sockets, None, host.wakes)
    return Driver(machine(job, node), transport, host, carriers=carriers)


def connections(
    job: Job, node: Node, sockets: Path, pipe: ControlPipe | None, wake_on: Sequence[int] = ()
) -> tuple[HostTransport, list[Carrier]]:  # fmt: skip
    """What reaches the node's peers on this machine, and those elsewhere.

    A message on the `pipe` wakes it as well, and one of the file descriptors in `wake_on`.
    """
    carriers = [] if job.site is None else [_carrier(job, job.site, node, sockets)]
    peers = _servers(job, node, here=True)
    transport = HostTransport(
        node, sockets, serve=node.role in ("coordinator", "shard"), peers=peers,
        spin_s=_spin_s(job, node) if job.site is None else 0.0,
        wake_on=[
            *wake_on, *([pipe.connection.fileno()] if pipe is not None else []), *(c.fileno() for c in carriers)
        ],
    )  # fmt: skip
    return transport, carriers


def close(transport: HostTransport, carriers: Sequence[Carrier]) -> None:
    transport.close()
    for carrier in carriers:
        carrier.close()


def _carrier(job: Job, site: Site, node: Node, sockets: Path) -> Carrier:
    """What reaches the node's peers on other machines."""
    memory, parts = memoryview(job.arena.memory), job.plan.settings.parts
    most = ANSWERS_BYTES if isinstance(job.recipe.work, Answering) else None
    places = Places(node, job.recipe.shards, job.ranges, job.arena.shape, memory, site.pieces, parts, most, job.scratch)
    elsewhere = _servers(job, node, here=False)  # but a shard that has moved, of which the coordinator will tell
    addresses = {server: site.addresses[server] for server in elsewhere if server in site.addresses}
    contexts = site.identity.issue(str(node)).contexts()
    part = Part(node, site, kind_of(job).says, places)
    listener = site.listeners.get(DEPUTY if node.role == "deputy" else node)
    return Carrier(Streams(contexts, part, addresses, listener, site.plaintext, Lanes(sockets)))


def _servers(job: Job, node: Node, *, here: bool) -> list[Node]:
    """Whom a node connects to, on this machine or elsewhere."""
    if node == COORDINATOR:
        return []
    if node.role == "backup":
        shards: tuple[Node, ...] = (Node("shard", node.index),)
    else:
        shards = shard_nodes(job.recipe.shards) if node.role not in ("shard", "deputy") else ()
    servers = (COORDINATOR, *shards) if node.role != "part" else shards
    return [server for server in servers if (job.site is None or job.site.has(server)) == here]


def _clock(linked: Copied) -> float:
    """What its machine is told; it goes on where it was on another one."""
    return linked.reads(time.monotonic())


def make_host(
    job: Job, node: Node, channel: NurseryChannel | None = None, clock: Callable[[], float] = time.monotonic
) -> Host:
    """`clock`: the coordinator's."""
    if node.role == "deputy":
        return DeputyHost(job, node, _around)
    if node == COORDINATOR:
        assert channel is not None
        recorder = CoordinatorHost(job, channel, clock)
        made = _around(recorder, job)
        made = CopiedHost(made, job, channel.deputed) if has_deputy(job) else made
        if job.journal is not None:
            job.journal.keeps = made.keeps
            recorder.take_again(made, job.journal.carried_out)
        return made
    made, ratio = host(job, node), job.slowness(node)
    if node.role == "shard":
        return prepared(made, job, node.index)
    return SlowedHost(made, ratio) if ratio > 1 else made


def _around(recorder: CoordinatorHost, job: Job) -> Host:
    """What keeps the record, within what looks after parts and other machines."""
    coordinator: Host = recorder if job.site is None else TrafficHost(recorder, job, job.site)
    if job.plan.settings.parts > 1:
        coordinator = PartsHost(coordinator, recorder, job)
    if job.site is None:
        return coordinator
    showing = ShowingHost(coordinator, job.site.pieces, job.arena.weights(job.arena.shape.replicas, 0))
    if isinstance(job.recipe.work, Answering):
        return ArrivingHost(showing, job, job.site.pieces)
    return PiecesHost(showing, job.directory, job.site.pieces)


def _spin_s(job: Job, node: Node) -> float:
    wanted = job.recipe.replicas * job.plan.settings.parts * job.plan.threads + job.recipe.shards
    roomy = wanted <= len(os.sched_getaffinity(0))
    exchanges = node.role == "replica" and job.recipe.shards > 0
    return SPIN_S if exchanges or (node.role in ("shard", "backup") and roomy) else 0.0


def blame(error: BaseException, node: Node, job: Job) -> None:
    """Add to an exception in which process it was raised."""
    where = "" if job.site is None else f", on machine {job.site.machine} ({gethostname()})"
    part, node = _named(node, job)
    note(error, f"in {part}{node.role} {node.index}{where}", role=node.role, index=node.index)


def tell(node: Node, job: Job, sockets: Path, error: BaseException) -> int:
    """Leave to the nursery what this process has raised. Returns the exit status to end with."""
    if loader_killed(error):
        return LOST
    blame(error, node, job)
    if node.role in ("backup", "deputy"):  # the run goes on without one
        traceback.print_exception(error)
    else:
        tell_raised(sockets, node, encode(error))
    return RAISED


def _named(node: Node, job: Job) -> tuple[str, Node]:
    """Of a replica's part, which it is, and the replica."""
    count = job.plan.settings.parts
    return (f"part {node.index % count} of ", whole(node, count)) if node.role == "part" else ("", node)


def name_process(node: Node, job: Job) -> None:
    number = f" {node.index}" if node.role in ("replica", "shard", "backup") else ""
    setproctitle(f"squall {node.role}{number} of {job.directory.name}")
