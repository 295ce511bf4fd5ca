"""What the machines of a run are, and what they send each other, for its record."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from squall.protocol.effects import Effect, End, PublishSnapshot
from squall.protocol.events import Event
from squall.protocol.messages import Stats
from squall.protocol.nodes import Node
from squall.protocol.notes import MemberJoined, WorkReported
from squall.record.inventory import Inventory
from squall.runtime.driver import HostAround
from squall.runtime.job import Job
from squall.runtime.recorder import CoordinatorHost
from squall.runtime.site import Site

FACT = "traffic"  # of the record
Bytes = dict[int, list[int]]  # machine -> numbers sent, and received, in bytes


class TrafficHost(HostAround):
    """The coordinator's. It counts what replicas push to shards on other machines and fetch from there."""

    def __init__(self, host: CoordinatorHost, job: Job, site: Site) -> None:
        super().__init__(host)
        self._recorder = host
        self._machine = {Node(role, index): at for (role, index), at in site.seats.items()}
        shards = job.recipe.shards
        ranges = [job.layout.shard_range(shard, shards) for shard in range(shards)]
        self._shards = [
            (site.seats["shard", shard], 4 * (stop - start) // job.recipe.work.blocks, 4 * (stop - start))
            for shard, (start, stop) in enumerate(ranges)
        ]  # of each: its machine, and bytes of a push and a fetch
        before = host.record.fact("inventory") if job.restored is not None else None
        placed = {row[0]: row for row in msgspec.json.decode(before or "{}", type=Inventory).machines}
        placed |= {row[0]: row for row in site.inventory.machines}
        inventory = msgspec.structs.replace(site.inventory, machines=[placed[machine] for machine in sorted(placed)])
        host.facts(inventory=msgspec.json.encode(inventory).decode())
        self._bytes: Bytes = defaultdict(lambda: [0, 0])
        if job.restored is not None and (before := host.record.fact(FACT)):
            self._bytes.update(msgspec.json.decode(before, type=Bytes))

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case MemberJoined(node, _, machine):
                self._machine[node] = machine
            case WorkReported(node, stats):
                self._add(self._machine[node], stats)
            case PublishSnapshot() | End():
                self._recorder.facts(**{FACT: msgspec.json.encode(dict(sorted(self._bytes.items()))).decode()})
        return super().perform(effect, now)

    def _add(self, here: int, stats: Stats) -> None:
        for there, pushed, fetched in self._shards:
            if there != here:
                self._bytes[here][0] += stats.pushes * pushed
                self._bytes[there][1] += stats.pushes * pushed
                self._bytes[there][0] += stats.fetches * fetched
                self._bytes[here][1] += stats.fetches * fetched
