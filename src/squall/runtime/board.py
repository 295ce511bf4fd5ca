"""What each process of a machine is doing, in memory that they share: each writes its own entry, the nursery reads all.

An entry is a row of float64. Time is on the machine's monotonic clock, which all its processes have in common, so what
is under way counts up to the moment when it is read. Nobody waits for anybody: a row that is read in the fraction of a
microsecond in which it is written may have what has just ended twice, and the next look that much less.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from squall.protocol.hangs import Sight, Work
from squall.protocol.nodes import COORDINATOR, DEPUTY, Node, shard_nodes
from squall.protocol.nursery_messages import Spent

if TYPE_CHECKING:
    Row = memoryview[float]


class Doing(IntEnum):
    """The columns of an entry's seconds."""

    OTHER = 0  # the protocol's own work; and the rest of a shard that nobody waits for
    COMPUTING = 1
    APPLYING = 2
    SENDING = 3
    WAITING = 4


# Columns. The incarnation is counted from 1 (0: nobody), the awaited peer's number, too. `_RESTS` is 1 where what it
# does depends on others, whatever `_DOING` says. Behind them are the seconds by `Doing`, and then those waited for each
# peer.
_INCARNATION, _DOING, _SINCE, _AWAITED, _EVENTS, _STEPS, _RESTS, _SECONDS = range(8)
_BY_PEER = _SECONDS + len(Doing)
_PAGE_BYTES = mmap.PAGESIZE
BACKED = ("shard", "coordinator")


class Entry:
    """What one process writes of itself. It costs some 0.3 us each time."""

    def __init__(self, row: Row | None = None, board: Board | None = None) -> None:
        """Without a row: what is written here nobody reads."""
        self._row = row if row is not None else memoryview(bytearray(8 * _BY_PEER)).cast("d")
        self._board = board

    @property
    def names(self) -> bool:
        """Whom it waits for is told."""
        return self._row[_DOING] == Doing.WAITING and self._row[_AWAITED] > 0

    def turns(self, doing: Doing, now: float) -> None:
        """It does this from now on."""
        row = self._row
        row[_SECONDS + int(row[_DOING])] += now - row[_SINCE]
        row[_DOING], row[_SINCE], row[_AWAITED] = doing, now, 0

    def begins(self, doing: Doing, now: float, alone: bool) -> None:
        """A step of this; `alone`: it depends on nobody else."""
        self.turns(doing, now)
        self._row[_STEPS] += 1
        self._row[_RESTS] = not alone

    def works(self) -> None:
        """It does something that depends on nobody else."""
        self._row[_EVENTS] += 1
        self._row[_RESTS] = 0

    def rests(self) -> None:
        """It waits for others, or for something to do."""
        self._row[_RESTS] = 1

    def awaits(self, peer: Node | None, now: float) -> None:
        """It has waited for this peer, and goes on waiting; what it has waited for another one is that one's."""
        if (number := self._number(peer)) is None:
            return
        if self._row[_AWAITED] not in (0, 1 + number):
            self._credit(int(self._row[_AWAITED]) - 1, now)
            self.turns(Doing.WAITING, now)
        self._row[_AWAITED] = 1 + number

    def waited(self, peer: Node, now: float) -> None:
        """Something has come from this peer: that is what it had to wait for, unless it knew better meanwhile."""
        if self._row[_DOING] == Doing.WAITING:
            named = int(self._row[_AWAITED])
            self._credit(named - 1 if named else self._number(peer), now)
        self.turns(Doing.OTHER, now)

    def _credit(self, number: int | None, now: float) -> None:
        if number is not None:
            self._row[_BY_PEER + number] += now - self._row[_SINCE]

    def _number(self, peer: Node | None) -> int | None:
        return None if peer is None or self._board is None else self._board.number(peer)

    def corrects(self, waited_s: float) -> None:
        """So much of what counts as computing was waiting for others."""
        self._row[_SECONDS + Doing.COMPUTING] -= waited_s
        self._row[_SECONDS + Doing.WAITING] += waited_s


class Board:
    """The entries of a run's processes on one machine, which inherit it from the nursery."""

    def __init__(self, replicas: int, shards: int, now: float, backups: int = 0) -> None:
        slots = [Node("replica", slot) for slot in range(replicas)]
        self._nodes = [*slots, Node("evaluator", replicas), *shard_nodes(shards), COORDINATOR]
        self._nodes += [*(Node("backup", index) for index in range(backups)), *([DEPUTY] if backups else [])]
        self._numbers = {(node.role, node.index): number for number, node in enumerate(self._nodes)}
        self._columns = _BY_PEER + len(self._nodes)
        memory = mmap.mmap(-1, 8 * len(self._nodes) * self._columns)
        self._rows = memoryview(memory).cast("d")
        self._table: NDArray[np.float64] = np.frombuffer(memory).reshape(len(self._nodes), -1)
        self._before = np.zeros_like(self._table)  # as they were read last
        self.own = Entry()  # of this process, where it has one
        self._read_at = now

    def number(self, node: Node) -> int | None:
        """Of its row. Nurseries, and parts beside the first, have none."""
        return self._numbers.get((node.role, node.index))

    def entry(self, node: Node, now: float) -> Entry:
        """A new process begins with it."""
        number = self.number(node)
        if number is None:
            return Entry()
        row = self._rows[number * self._columns : (number + 1) * self._columns]
        self._table[number] = 0
        row[_SINCE], row[_INCARNATION] = now, 1 + node.incarnation
        self.own = Entry(row, self)
        return self.own

    def sight(self, node: Node) -> Sight:
        """How the process stands. One that has no entry yet is at work, if it will have one."""
        number = self.number(node)
        if number is None:
            return Sight(node, 0)
        row = self._table[number]
        if row[_INCARNATION] != 1 + node.incarnation:
            return Sight(node, -1, "other")
        # An evaluation ends with what its metrics make of it, which is no batch like the others.
        steps_on = row[_DOING] in (Doing.COMPUTING, Doing.APPLYING) and node.role != "evaluator"
        work: Work = "step" if steps_on else "other"
        moved, steps = float(row[_EVENTS] + row[_STEPS]), float(row[_STEPS])
        return Sight(node, moved, "none" if row[_RESTS] else work, steps)

    def read(self, now: float, pids: Mapping[Node, int]) -> tuple[Spent, ...]:
        """What those processes have done since the last time."""
        table = self._table.copy()
        running = np.arange(len(table)), _SECONDS + table[:, _DOING].astype(int)
        under_way = np.maximum(0.0, now - table[:, _SINCE])
        table[running] += under_way
        awaited = table[:, _AWAITED].astype(int)
        named = np.flatnonzero(awaited)
        table[named, _BY_PEER + awaited[named] - 1] += under_way[named]
        again = table[:, _INCARNATION] == self._before[:, _INCARNATION]
        spent = np.maximum(0.0, table[:, _SECONDS:] - self._before[:, _SECONDS:] * again[:, None])
        passed, self._before, self._read_at = now - self._read_at, table, now
        told, common = [], memory_of(os.getpid())
        for node, pid in pids.items():
            number = self.number(node)
            if number is not None and table[number, _INCARNATION] == 1 + node.incarnation:
                told.append(self._spent(node, pid, passed, common, spent[number]))
        return tuple(told)

    def _spent(self, node: Node, pid: int, passed: float, common: int, seconds: NDArray[np.float64]) -> Spent:
        peers = seconds[len(Doing) :]
        most = int(peers.argmax())
        awaited = self._nodes[most] if peers[most] > 0 else None
        compute_s, apply_s, send_s, wait_s = map(float, seconds[Doing.COMPUTING : len(Doing)])
        memory = max(0, memory_of(pid) - common)
        backup = self.number(DEPUTY if node == COORDINATOR else Node("backup", node.index))
        copied_s = 0.0 if backup is None or node.role not in BACKED else min(passed, float(peers[backup]))
        return Spent(node, passed, compute_s, apply_s, send_s, wait_s, awaited, float(peers[most]), memory, copied_s)


def memory_of(pid: int) -> int:
    """Bytes that no file is behind, also those that it has from who forked it; 0 where it is gone. It takes 20 us."""
    try:
        _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    except (OSError, ValueError):
        return 0
    return max(0, int(resident) - int(shared)) * _PAGE_BYTES
