"""What the machines of a run are, and what they send each other, for its record."""

from __future__ import annotations

import math
from collections import defaultdict

import msgspec
from msgspec.structs import replace

from squall.protocol.effects import Effect, End, Payload, PublishSnapshot
from squall.protocol.events import Event
from squall.protocol.messages import Stats
from squall.protocol.nodes import Node
from squall.protocol.notes import MemberDied, MemberJoined, MemberLeft, MemberReplaced, WorkReported
from squall.record.inventory import Inventory
from squall.runtime.driver import HostAround
from squall.runtime.job import Job
from squall.runtime.recorder import CoordinatorHost
from squall.runtime.site import Site
from squall.strategies.work import Collective, ring_share

FACT = "links"  # of the record
TELL_EVERY_S = 1.0


class TrafficHost(HostAround):
    """The coordinator's. It counts what replicas push to shards on other machines and fetch from there, part by part.

    What a replica pushes goes on to the shard's backup, if that is on neither's machine; what its other parts push, if
    it is not on the shard's. Without shards it is what they send each other in a ring, as it is when they report.
    """

    def __init__(self, host: CoordinatorHost, job: Job, site: Site) -> None:
        super().__init__(host)
        self._recorder = host
        self._machine = {Node(role, index): at for (role, index), at in site.seats.items()}
        self._ring_bytes = 4 * job.layout.length if isinstance(job.recipe.work, Collective) else 0
        self._members: dict[Node, None] = {}  # live replicas
        self._others: dict[Node, tuple[int, ...]] = {}  # machines of other parts
        self._ranges, self._blocks = job.ranges, job.recipe.work.blocks
        self._shards = [site.seats["shard", shard] for shard in range(job.recipe.shards)]  # their machines
        self._backups: dict[int, Node] = {}  # by shard
        self._bytes: dict[tuple[int, int], int] = defaultdict(int)  # numbers, from a machine to another one
        self._copied = 0  # of these, bytes to backups
        self._told_at = -math.inf
        if (kept := job.kept.get("traffic")) is not None:
            self.__dict__.update(kept)
        else:
            self._begin(job, site)

    def _begin(self, job: Job, site: Site) -> None:
        host = self._recorder
        before = host.record.fact("inventory") if job.restored is not None else None
        placed = {row[0]: row for row in msgspec.json.decode(before or "{}", type=Inventory).machines}
        placed |= {row[0]: row for row in site.inventory.machines}
        inventory = msgspec.structs.replace(site.inventory, machines=[placed[machine] for machine in sorted(placed)])
        host.facts(inventory=msgspec.json.encode(inventory).decode())
        if job.restored is not None and (before := host.record.fact(FACT)):
            self._bytes.update({(here, there): sent for here, there, sent in msgspec.json.decode(before)})
            self._copied = int(host.record.fact("copied") or 0)

    def keeps(self) -> dict[str, object]:
        names = ("_machine", "_members", "_others", "_shards", "_backups", "_bytes", "_copied", "_told_at")
        own = {name: self.__dict__[name] for name in names}
        return {**super().keeps(), "traffic": own}

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case MemberJoined(node, _, machine, others):
                self._machine[node], self._others[node] = machine, others
                if node.role == "replica":
                    self._members[node] = None
                elif node.role == "backup":
                    self._backups[node.index] = node
            case MemberReplaced(Node("shard", shard), where) if where:  # by its backup, there
                self._shards[shard] = self._machine[self._backups[shard]]
            case MemberDied(node) | MemberLeft(node):
                self._members.pop(node, None)
                self._backups = {shard: backup for shard, backup in self._backups.items() if backup != node}
            case WorkReported(node, stats):
                self._add(node, stats)
                self._add_round(node, stats)
                if now - self._told_at >= TELL_EVERY_S:
                    self._tell(now)
            case PublishSnapshot() | End():
                self._tell(now)
        return super().perform(effect, now)

    def _tell(self, now: float) -> None:
        self._told_at = now
        self._recorder.record.told += 1  # before what the effect itself tells
        links = [(here, there, sent) for (here, there), sent in sorted(self._bytes.items())]
        machines: dict[int, list[int]] = {}
        for here, there, sent in links:
            machines.setdefault(here, [0, 0])[0] += sent
            machines.setdefault(there, [0, 0])[1] += sent
        told = {"traffic": dict(sorted(machines.items())), FACT: links, "copied": self._copied}
        self._recorder.facts(**{key: msgspec.json.encode(value).decode() for key, value in told.items()})

    def _add_round(self, node: Node, stats: Stats) -> None:
        """What a member of a ring has sent to the one behind it."""
        if not self._ring_bytes or node not in self._members:
            return
        ring = sorted(self._members, key=lambda member: (self._machine[member], member))
        behind = ring[(ring.index(node) + 1) % len(ring)]
        here, there = self._machine[node], self._machine[behind]
        if here != there:
            sent = stats.pushes * round(self._ring_bytes * ring_share(len(ring)))
            self._bytes[here, there] += sent

    def _add(self, node: Node, stats: Stats) -> None:
        others = self._others.get(node, ())
        for part, here in enumerate((self._machine[node], *others)):
            for shard, there in enumerate(self._shards):
                backup = self._backups.get(shard)
                beside = there if backup is None else self._machine[backup]
                if here == there == beside:
                    continue
                payload = Payload("gradient", node, 0, 0, shard, part=part if others else -1)
                pushed = stats.pushes * (self._bytes_of(payload) // self._blocks)
                if here != there:
                    self._bytes[here, there] += pushed
                    self._bytes[there, here] += stats.fetches * self._bytes_of(replace(payload, kind="weights"))
                if beside != there and (beside != here or part):  # another part has buffers of its own
                    self._bytes[there, beside] += pushed
                    self._copied += pushed

    def _bytes_of(self, payload: Payload) -> int:
        return 4 * self._ranges(payload).count
