"""Where the numbers of payloads lie: at one place of the arena, which is the same on every machine."""

from __future__ import annotations

from pathlib import Path

from squall.protocol.effects import Payload
from squall.protocol.messages import PIECE_BYTES
from squall.protocol.nodes import COORDINATOR, Node, part_nodes
from squall.runtime import whole
from squall.runtime.arena import Shape, Span
from squall.runtime.pieces import Pieces
from squall.runtime.placement import Seats
from squall.runtime.ranges import Ranges
from squall.transports.stream import Views
from squall.vector import Layout

ANSWERS_BYTES = 1 << 36  # of a file of answers at most
RUN_BYTES = 1 << 30  # of all that a coordinator is, at most
HEADER_BYTES, STATE_BYTES = 1 << 24, 1 << 12  # of a shard's file at most: beside its elements, and of each


def state_bytes_at_most(elements: int) -> int:
    """Of weights and an optimizer's state: more is none."""
    return HEADER_BYTES + elements * STATE_BYTES


class Places:
    """The bytes of payloads that a process sends or receives; called with each."""

    def __init__(
        self, node: Node, shards: int, ranges: Ranges, shape: Shape, memory: memoryview, pieces: Pieces, parts: int = 1,
        most: int | None = None, scratch: Path | None = None,
    ) -> None:  # fmt: skip
        """`memory` is the arena's, `parts` those of a replica, `most` bytes of a file that travels; None: a shard's.

        `scratch`: where shards and their backups have what they are as a whole.
        """
        self._scratch = scratch
        self._most = most
        self._node = node
        self._shape = shape
        self._memory = memory
        self._pieces = pieces
        self._shards, self._ranges, self._parts = shards, ranges, parts
        self._views: dict[tuple[str, int, int, int, int], Views] = {}

    def __call__(self, payload: Payload, peer: Node) -> Views:
        """Raises `ValueError` for what this process and the peer do not exchange."""
        if not self._exchanged(payload, peer):
            raise ValueError(f"{payload} between {self._node} and {peer}")
        if payload.kind == "copy" and payload.owner.role == "deputy":
            assert self._scratch is not None
            return (whole.view(self._scratch, payload, RUN_BYTES, sends=self._node == COORDINATOR),)
        if payload.kind == "copy":
            start, stop = self._ranges.shards[payload.shard]
            most, sends = whole.bytes_at_most(stop - start, self._shape), self._node.role == "shard"
            assert self._scratch is not None
            return (whole.view(self._scratch, payload, most, sends=sends),)
        if payload.kind == "piece":
            start, stop = self._ranges.shards[payload.shard if self._shards else 0]
            at, size = payload.clock * PIECE_BYTES, payload.buffer
            most = state_bytes_at_most(stop - start) if self._most is None else self._most
            if not (0 <= at <= most and 0 < size <= PIECE_BYTES):
                raise ValueError(f"no file has a place for {payload}")
            return (self._pieces.view(payload.shard)[:size],)
        if self._node == COORDINATOR:  # the evaluator may be reading its own
            (*_, rates), length = self._find(payload), 4 * self._ranges.length
            return self._pieces.room(peer, length), memoryview(bytearray(rates.nbytes))
        key = payload.kind, payload.slot, payload.buffer, payload.shard, payload.part
        if key not in self._views:
            self._views[key] = self._find(payload)
        return self._views[key]

    def _exchanged(self, payload: Payload, peer: Node) -> bool:
        """Whether the payload goes between this process and the peer."""
        ends = {self._node, peer}
        if payload.kind == "copy" and payload.owner.role == "deputy":
            return ends == {COORDINATOR, payload.owner}
        if self._shards:
            if backup := next((node for node in ends if node.role == "backup"), None):
                mine = payload.kind == "gradient" or (payload.kind == "copy" and payload.owner == backup)
                return mine and ends == {Node("shard", payload.shard), backup} and backup.index == payload.shard
            other = COORDINATOR if payload.kind == "piece" else payload.owner
            if payload.part > 0:
                other = dict(enumerate(part_nodes(payload.owner, self._parts), start=1)).get(payload.part, other)
            return ends == {Node("shard", payload.shard), other}
        replicas = [node for node in ends if node.role == "replica"]
        if COORDINATOR not in ends or len(replicas) != 1:
            return False
        if payload.kind == "piece":
            return payload.owner == replicas[0] and payload.shard == replicas[0].index
        return payload.kind == "weights" and payload.owner.role == "evaluator" and not payload.shard

    def _find(self, payload: Payload) -> Views:
        shape, slot, buffer = self._shape, payload.slot, payload.buffer
        gradient = payload.kind == "gradient"
        buffers = shape.gradients if gradient else shape.weights if slot < shape.replicas else 1
        slots = shape.replicas + (0 if gradient else 1)
        if not (0 <= slot < slots and 0 <= buffer < buffers):
            raise ValueError(f"there is no place for {payload}")
        at = [*shape.buffers(slot)][buffer + shape.weights if gradient else buffer]
        numbers = [self._memory[at + 4 * start : at + 4 * stop] for start, stop in self._ranges(payload).runs]
        if gradient:
            return numbers
        rates = shape.rates_span[0] + 8 * shape.groups * (slot * shape.weights + buffer)
        return *numbers, self._memory[rates : rates + 8 * shape.groups]


def used_spans(shape: Shape, layout: Layout, shards: int, seats: Seats, machine: int) -> list[Span]:
    """What a machine needs of its arena: the slots of its own processes, and its shards' ranges of the others."""
    own = {index for (role, index), at in seats.items() if at == machine and role in ("replica", "evaluator")}
    if not shards:
        own.add(shape.replicas)  # replicas put there what they show to the evaluator
    ranges = [
        layout.shard_range(index, shards)
        for (role, index), at in seats.items()
        if role in ("shard", "backup") and at == machine
    ]
    spans = []
    for slot in range(shape.replicas + any(role == "evaluator" for role, _ in seats)):
        for at in shape.buffers(slot):
            if slot in own:
                spans.append((at, at + shape.stride))
            else:
                spans += [(at + 4 * start, at + 4 * stop) for start, stop in ranges]
    return spans
