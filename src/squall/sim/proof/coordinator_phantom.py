"""The coordinator's host in a world: its record outlives it, and so do the files that come in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from squall.protocol import events
from squall.protocol.copied import CopyTo
from squall.protocol.effects import Effect, PublishSnapshot, WritePiece
from squall.protocol.events import Event
from squall.protocol.nodes import Node
from squall.protocol.notes import Note
from squall.sim.proof.memory import File
from squall.sim.proof.phantom_hosts import PhantomHosts
from squall.sim.proof.phantoms import NOTHING, PIECES, Phantom


class CoordinatorPhantom(Phantom):
    """The record knows how many notes are in it: who goes on in another's place adds none of them again."""

    def __init__(self, hosts: PhantomHosts, node: Node) -> None:
        super().__init__(hosts, node)
        self._came: dict[tuple[int, int], dict[int, tuple[int, int, File]]] = {}  # pieces, which lie in files
        self.told = 0  # notes so far
        self._waiting: list[tuple[int, Note]] = []
        hosts.unwritten = lambda: [note for number, note in self._waiting if number > len(hosts.notes)]

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, WritePiece):
            return self._write(effect)
        if isinstance(effect, CopyTo):
            if effect.backup is None:
                return None
            self.memory.wholes[effect.backup, effect.number] = effect.state, self.told
            return events.CopyKnown(effect.backup, 1)
        if isinstance(effect, Note):
            self.told += 1
            self._waiting.append((self.told, effect))
        if not isinstance(effect, Note) or len(self._waiting) >= self.hosts.together:
            self.hosts.notes += [note for number, note in self._waiting if number > len(self.hosts.notes)]
            self._waiting = []
        if isinstance(effect, PublishSnapshot):
            self.hosts.published += [effect] if effect not in self.hosts.published else []
        return None

    def keeps(self) -> dict[str, object]:
        return {"told": (self.told, self._waiting)}

    def take_again(self, kept: dict[str, Any], since: Sequence[tuple[Effect, float]]) -> None:
        self.told, self._waiting = kept["told"]
        for effect, now in since:
            if isinstance(effect, Note | PublishSnapshot):
                self.perform(effect, now)

    def _write(self, effect: WritePiece) -> Event:
        number, part = effect.piece.number, effect.part
        came = self._came.setdefault((number, part), {})
        torn = self.memory.torn("piece", effect.shard, 0, effect.shard)
        came[effect.piece.start] = (-1, -1, NOTHING) if torn else self.memory.pieces[effect.shard]
        if list(came.values()) == [(number, i, came[0][2]) for i in range(PIECES)]:
            self.hosts.arrived[number, part] = came[0][2]
        return events.PieceWritten(part, number, self.hosts.disk(number))
