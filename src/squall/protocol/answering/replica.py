"""The replica's machine where nothing is trained: it runs the model on a lease, keeps the answers, and tells of it."""

from __future__ import annotations

import math

from squall.protocol.answering.effects import Answer, KeepAnswers
from squall.protocol.answering.messages import AnswersPiece, NotKept
from squall.protocol.effects import Effect, End, Payload, Send
from squall.protocol.events import Answered, AnswersKept, Event, MessageArrived, Started, TimePassed
from squall.protocol.frames import Message
from squall.protocol.held_work import Batch, HeldWork
from squall.protocol.messages import (
    PIECE_BYTES,
    Cover,
    Grant,
    Join,
    Left,
    PieceKept,
    Progress,
    Stats,
    Stop,
    Welcome,
)
from squall.protocol.nodes import COORDINATOR, Node

KEPT_BYTES = 64 << 20  # of answers that are on no disk yet, at most, but for the last batch
LONGEST = 2000  # characters of a reason
KEPT_S = 5.0  # the same, seconds of computing


class Answerer:
    """Its state: `_batch` while the model runs, `_keeping` while answers go onto the disk, else it waits for a grant.

    The answers of a lease are kept together, unless they are large or take long. So a death costs its lease, and files
    are few.
    """

    wake_at: float | None = None

    def __init__(self, node: Node, batch_size: int, pid: int = 0, address: str = "") -> None:
        self.node = node
        self.pid, self._address = pid, address
        self._hand = HeldWork(batch_size)
        self._batch: Batch | None = None  # that the model runs on
        self._answered: Batch | None = None  # examples of a lease of which the answers are not on the disk yet
        self._batches, self._bytes = 0, 0  # of these
        self._keeping = False
        self._sent = self._size = 0  # of their file, bytes that have travelled, and that have to
        self._pieces: dict[int, int] = {}  # of the lease that they are of, pieces that have travelled
        self._member = self._stopping = self._ended = False
        self._compute_s = self._waited_s = 0.0  # since the last report
        self._idle_since: float | None = None

    def on(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case Answered():
                self._on_answered(event, effects)
            case AnswersKept(error=error) if error:  # it goes on keeping: the coordinator ends the run
                effects.append(Send(COORDINATOR, NotKept(error[:LONGEST])))
            case AnswersKept(size):
                self._sent, self._size = 0, size
                self._send_on(effects)
            case MessageArrived(_, message):
                self._on_message(message, now, effects)
            case Started():
                effects.append(Send(COORDINATOR, Join(self.pid, self._address)))
            case TimePassed():
                pass
            case _:
                raise AssertionError(f"{self.node} does not know {event!r}")
        self._proceed(now, effects)
        return effects

    def _on_message(self, message: Message, now: float, effects: list[Effect]) -> None:
        match message:
            case Grant():
                effects += self._hand.take(message, awaited=False)
            case Welcome():
                self._member, self._idle_since = True, now
            case PieceKept():
                self._send_on(effects)
            case Stop():
                self._stopping = True
            case _:
                raise AssertionError(f"{self.node} does not know {message!r}")

    def _on_answered(self, event: Answered, effects: list[Effect]) -> None:
        batch, self._batch = self._batch, None
        assert batch is not None
        self._compute_s += event.seconds
        self._bytes += event.size
        self._batches += 1
        start = batch.start if self._answered is None else self._answered.start
        self._answered = Batch(batch.lease, batch.epoch, start, batch.stop)
        enough = self._bytes >= KEPT_BYTES or self._compute_s >= KEPT_S
        if self._stopping or enough or not self._hand.begun:
            self._keeping = True
            effects.append(KeepAnswers(start, batch.stop))

    def _send_on(self, effects: list[Effect]) -> None:
        """The next piece of answers that have to travel; behind the last one, that all are on the disk."""
        done, at = self._answered, self._sent
        assert done is not None
        if at < self._size:
            number, size = self._pieces.get(done.lease, 0), min(PIECE_BYTES, self._size - at)
            self._pieces, self._sent = {done.lease: number + 1}, at + size
            piece = AnswersPiece(done.lease, done.start, done.stop, number, at, size, self._size)
            payload = Payload("piece", self.node, size, number, self.node.index, done.lease)
            effects.append(Send(COORDINATOR, piece, payload))
        else:
            self._keeping = False
            effects.append(Send(COORDINATOR, Progress(*self._told())))

    def _told(self) -> tuple[tuple[Cover, ...], Stats]:
        """What is on the disk, and was not told yet."""
        done, self._answered = self._answered, None
        if done is None:
            return (), Stats()
        stats = Stats(done.stop - done.start, self._batches, math.nan, self._compute_s, self._waited_s)
        self._batches, self._bytes, self._compute_s, self._waited_s = 0, 0, 0.0, 0.0
        return (Cover(done.lease, done.stop),), stats

    def _proceed(self, now: float, effects: list[Effect]) -> None:
        """Do the next thing, if nothing is under way."""
        if self._ended or self._batch is not None or self._keeping:
            return
        if self._stopping:
            self._ended = True
            effects += [Send(COORDINATOR, Left(*self._told())), End("finished")]
        elif self._member:
            ready, request = self._hand.ready(round_open=False), self._hand.request()
            if request is not None:
                effects.append(Send(COORDINATOR, request))
            if not ready:
                self._idle_since = now if self._idle_since is None else self._idle_since
                return
            if self._idle_since is not None:
                self._waited_s, self._idle_since = self._waited_s + now - self._idle_since, None
            self._batch = self._hand.cut()
            effects.append(Answer(self._batch.start, self._batch.stop))
