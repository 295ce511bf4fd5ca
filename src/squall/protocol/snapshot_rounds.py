"""The snapshots that the coordinator asks for, one at a time: every shard (or one replica) writes its part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from squall.protocol.effects import Effect, PublishSnapshot, Send
from squall.protocol.machine import Refusal
from squall.protocol.membership import Applied
from squall.protocol.messages import SnapshotPiece, SnapshotTaken, TakeSnapshot
from squall.protocol.nodes import Node
from squall.protocol.notes import Remark, SnapshotAsked

SILENT_S = 3.0  # of a shard whose file is on its way, before who is in a hurry gives it up
Extend = Callable[[dict[str, object], Sequence[Applied]], tuple[dict[str, object], Applied]]


class SnapshotRounds:
    """Asks every shard for its part; when all are on disk the snapshot is published with the ledger of the asking.

    The ledger is taken before the shards are asked, so everything that it calls trained is in their files. The shards
    themselves tell what was trained in between (`progress`), of the newest leases, and the coordinator knows of the
    others; where that was of leases granted later, those are added to the ledger (`extended`). Nothing is lost, and
    nothing repeats that all files have.
    """

    def __init__(self, newest: int, every_s: float | None = None, first_s: float = math.inf) -> None:
        """`every_s` and `first_s` are those of the policy's snapshots."""
        self.newest = newest  # number of the last one asked for
        self._every_s, self._pause_s = every_s, first_s
        self.failure = ""  # why the last one could not be written
        self._shards: Sequence[Node] = ()  # who writes, in the order of the parts
        self._answers: dict[Node, SnapshotTaken] | None = None
        self._ledger: dict[str, object] = {}
        self._received: dict[Node, tuple[int, int]] = {}  # bytes of a file that have come in pieces, and all of them
        self._heard: dict[Node, float] = {}  # when something has come of a shard's file last

    @property
    def under_way(self) -> bool:
        return self._answers is not None

    @property
    def awaited(self) -> list[Node]:
        """Who writes the snapshot under way, and has not answered."""
        return [] if self._answers is None else [shard for shard in self._shards if shard not in self._answers]

    def pause_s(self) -> float | None:
        """Until the next one is due, asked once for each; None: never."""
        if self._every_s is None:
            return None
        pause_s, self._pause_s = min(self._every_s, self._pause_s), 2 * self._pause_s
        return pause_s

    def part(self, node: Node) -> tuple[int, int]:
        """Which part of the snapshot it writes, and of how many."""
        return self._shards.index(node), len(self._shards)

    def writer(self, part: int) -> Sequence[Node]:
        """Of a part; none, where the snapshot was given up."""
        return self._shards[part : part + 1]

    def take(self, writers: Sequence[Node], ledger: dict[str, object], effects: list[Effect]) -> None:
        assert not self.under_way
        self._ledger = ledger
        self.ask_again(writers, effects)

    def ask_again(self, writers: Sequence[Node], effects: list[Effect]) -> None:
        """Have a snapshot of the same ledger written by these; others were lost over the one that is under way.

        It has another number, so that what the others have written is none of it.
        """
        self.newest += 1
        effects.append(SnapshotAsked(self.newest))
        self._shards = writers
        self._answers, self._received, self._heard = {}, {}, {}
        effects.extend(Send(shard, TakeSnapshot(self.newest)) for shard in writers)

    def begin_anew(self, ledger: dict[str, object], effects: list[Effect]) -> None:
        """What one of those who write it had, and the ledger says, is lost."""
        self._ledger = ledger
        self.ask_again(self._shards, effects)

    def came(self, nodes: Iterable[Node], now: float) -> None:
        """Something of these has arrived, though perhaps no whole piece of a file."""
        self._heard |= dict.fromkeys(nodes, now)

    def waited_for(self, until: float) -> float:
        """The deadline of who waits `until` at least: later while bytes of every missing file go on arriving."""
        return min((max(until, self._heard.get(shard, -math.inf) + SILENT_S) for shard in self.awaited), default=until)

    @property
    def travelled(self) -> tuple[int, int]:
        """Bytes of files that have come in pieces, and of all that come so, as far as that is known."""
        return sum(start for start, _ in self._received.values()), sum(total for _, total in self._received.values())

    def wants(self, shard: Node, piece: SnapshotPiece) -> bool:
        """Whether the piece is of the snapshot under way: it may be of one that was asked for again meanwhile.

        Raises `Refusal` for a piece that is not the next of the shard's file.
        """
        if piece.number < self.newest:
            return False
        if not self.under_way or piece.number != self.newest or shard not in self.awaited:
            raise Refusal(f"nobody waits for its piece of snapshot {piece.number}")
        start, total = self._received.get(shard, (0, piece.total))
        if (piece.start, piece.total) != (start, total) or start + piece.size > total:
            raise Refusal(f"of its file of {total} bytes {start} are here, and {piece!r} comes")
        self._received[shard] = start + piece.size, total
        return True

    def answered(
        self, shard: Node, message: SnapshotTaken, final: bool, extended: Extend, effects: list[Effect]
    ) -> bool:
        """True when this was the last answer; the snapshot is then published, or its failure noted.

        `extended` adds to the ledger the leases that are in the shards' progress alone, and says what all files have.
        """
        if self._answers is None or message.number != self.newest or shard not in self._shards:
            return False
        self._answers[shard] = message
        if len(self._answers) < len(self._shards):
            return False
        answers = [self._answers[shard] for shard in self._shards]
        self._answers = None
        self.failure = next((answer.error for answer in answers if answer.error), "")
        if self.failure:
            effects.append(Remark("error", f"snapshot {self.newest} could not be written: {self.failure}"))
        else:
            versions = tuple(answer.version for answer in answers)
            covers = [{cover.lease: cover.upto for cover in answer.progress} for answer in answers]
            ledger, held = extended(self._ledger, covers)
            progress = {str(lease): upto for lease, upto in held.items()}
            examples = tuple(answer.examples for answer in answers)
            checksums = tuple(answer.checksum for answer in answers)
            effects.append(PublishSnapshot(self.newest, ledger, versions, examples, progress, checksums, final))
        return True
