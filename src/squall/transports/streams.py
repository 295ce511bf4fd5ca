"""A process's connections to those on other machines: opened at once, and again when they break.

A frame for a peer that is not connected is dropped: its link sends it again, at once when the connection is there. What
a connection carries already is not given to it a second time. Nothing here waits, and no peer can make it raise: what
is broken or not understood is closed.
"""

from __future__ import annotations

import math
import os
import select
import socket
import ssl
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from squall.protocol.effects import Payload
from squall.protocol.events import Event, FrameArrived, PeerReached, PeerRefused, PeersHeard
from squall.protocol.frames import Frame
from squall.protocol.nodes import COORDINATOR, Node
from squall.transports.forks import abandon_at_fork, ignore_at_fork
from squall.transports.lanes import TRY_AGAIN_S, Lanes
from squall.transports.opening import OPEN_WITHIN_S, Door, Opening
from squall.transports.openings import Openings
from squall.transports.part import Part
from squall.transports.stream import Broken, Foul, Head, Stream, Views
from squall.transports.texts import shown

Address = tuple[str, int]  # host and port
OPENING_AT_MOST = 64  # strangers at a time
HANDSHAKE_S = 1.0  # so long a stranger does not make room for another one
REDIAL_S, REDIAL_AT_MOST_S = 0.05, 2.0
WHY_AT_MOST = 300  # characters of why a peer was refused


class Streams:
    """Named by its certificate. Whoever knows an address dials; the others wait to be called."""

    def __init__(
        self, contexts: tuple[ssl.SSLContext, ssl.SSLContext], part: Part, addresses: Mapping[Node, Address],
        listener: socket.socket | None = None, plaintext: bool = False, lanes: Lanes | None = None,
    ) -> None:  # fmt: skip
        """`plaintext`: both ends prove their names, and then nothing is encrypted."""
        self._part = part
        self._addresses = dict(addresses)
        self._lanes = lanes or Lanes()
        self._streams: dict[Node, Stream] = {}
        self._nodes: dict[int, Node] = {}  # by descriptor
        self._redial: dict[Node, tuple[float, float]] = {}  # when it may be dialled again, and the pause after that
        self._redial_at = 0.0  # the earliest of those
        self._had: dict[Node, int] = {}  # number of the last message of each peer whose numbers have come
        self._forgotten: set[Node] = set()
        self._busy: dict[Node, None] = {}  # whose streams have more that goes at once
        self._try_at = math.inf  # whether streams that wait for their turn have it
        self._heard: dict[Node, None] = {}  # from whom something has come since the last report
        self._report_at = 0.0
        self._epoll = select.epoll()
        self._opening: Openings[Node] = Openings(self._epoll, contexts, plaintext)
        self._arrived: deque[Event] = deque()
        self._door = None if listener is None else Door(listener, self._epoll)
        abandon_at_fork(self)

    def fileno(self) -> int:
        """Readable when there is something to do, beside what `wake_at` tells."""
        return self._epoll.fileno()

    def knows(self, node: Node) -> bool:
        """It is reached over this, and in no other way."""
        return node in self._addresses or node in self._had

    @property
    def wake_at(self) -> float:
        """When there is something to do though nothing came; infinity: never."""
        if self._busy:
            return 0.0
        times = [self._redial_at, self._try_at, *(opening.until for opening, _ in self._opening.values())]
        times += [self._door.wake_at] if self._door is not None else []
        return min([*times, self._report_at] if self._streams else times)

    # ------------------------------------------------------------ what the process asks for

    def send(self, to: Node, frame: Frame, payload: Payload | None = None) -> None:
        stream = self._streams.get(to)
        if stream is not None and stream.ready and (frame.number <= 0 or frame.number > stream.last):
            try:
                stream.put(frame, payload, () if payload is None else self._part.places(payload, to))
            except FileNotFoundError:
                if not self._part.has(to):  # else it has taken the file, as that lay here
                    raise
            else:
                self._busy[to] = None

    @property
    def news(self) -> bool:
        return bool(self._arrived)

    def take(self) -> Event | None:
        """What has arrived, in its order: a frame whose numbers are at their place, or that a peer can be reached.

        The link has to know of the latter before it sends anything: what comes first on a connection must be what the
        one before has not brought.
        """
        if not self._arrived:
            return None
        event = self._arrived.popleft()
        if isinstance(event, PeerReached) and event.node in self._streams:
            self._streams[event.node].ready = True
        return event

    def admit(self, node: Node, machine: int, address: str = "") -> None:
        """The process is there, and may connect from that machine, or is called there from now on."""
        moved = self._part.admit(node, machine, address)
        if moved is not None and moved != self._addresses.get(node):
            self._close(node)  # what had its name before is somewhere else
            self._addresses[node] = moved
            self._redial.pop(node, None)
            self._redial_at = 0.0
        elif self._part.has(node) and node not in self._addresses:
            self._close(node)
            self._had.pop(node, None)  # it has come to this machine, and is not reached over this any more

    def forget(self, node: Node) -> None:
        """Nothing that this peer sends is put anywhere any more."""
        self._forgotten.add(node)
        self._say_goodbye(node)

    def close(self) -> None:
        for node in list(self._streams):
            self._say_goodbye(node)
        for descriptor in list(self._opening):
            self._give_up(descriptor)
        if self._door is not None:
            self._door.close()
        self._epoll.close()
        self._lanes.close()
        ignore_at_fork(self)

    def abandon(self) -> None:
        owners: list[socket.socket | Opening | Door] = [stream.connection for stream in self._streams.values()]
        owners += [opening for opening, _ in self._opening.values()]
        for owner in (*owners, *([] if self._door is None else [self._door])):
            with suppress(OSError):  # one that was being opened has none
                os.close(owner.detach())
        self._epoll.close()  # what is watched is the same for both, so nothing is taken from it
        self._lanes.close()

    # ------------------------------------------------------------ turns

    def turn(self, now: float) -> None:
        """Do what goes without waiting."""
        if now >= self._redial_at:
            self._dial(now)
        if self._door is not None:
            self._door.wake(now)
        for descriptor, _ in self._epoll.poll(0):
            if descriptor in self._nodes:
                self._busy[self._nodes[descriptor]] = None
            elif descriptor in self._opening:
                self._go_on(descriptor)
            elif self._door is not None:
                self._accept(self._door, now)
        for descriptor in [d for d, (opening, _) in self._opening.items() if now >= opening.until]:
            self._give_up(descriptor)
        reporting = now >= self._report_at
        if reporting:
            self._report_at = now + self._part.every_s
            self._busy |= dict.fromkeys(self._streams)  # of numbers a few do not wake this process
        if now >= self._try_at:
            self._try_at = math.inf
            self._busy |= {node: None for node, stream in self._streams.items() if stream.waits}
        busy, self._busy = self._busy, {}
        for node in busy:
            if node in self._streams:
                self._serve(node, self._streams[node], now)
        if reporting and self._heard:
            self._arrived.append(PeersHeard(tuple(self._heard)))
            self._heard.clear()

    def _dial(self, now: float) -> None:
        """Open a connection to everybody whose address is known, and again when it breaks, at growing pauses."""
        self._redial_at = math.inf
        waited_for = {whom for _, whom in self._opening.values()} | self._streams.keys() | self._forgotten
        for node, address in self._addresses.items():
            if node in waited_for:
                continue
            at, pause = self._redial.get(node, (0.0, REDIAL_S))
            if now >= at:
                at = now + pause
                self._redial[node] = at, min(2 * pause, REDIAL_AT_MOST_S)
                with suppress(OSError):
                    self._opening.dial(address, node, now)
            self._redial_at = min(self._redial_at, at)

    def _serve(self, node: Node, stream: Stream, now: float) -> None:
        heads: list[Head] = []
        received, foul = stream.received_bytes, ""
        try:
            more = stream.write(now)
            more |= stream.read(heads)
        except Broken as error:
            self._close(node)
            foul = str(error) if isinstance(error, Foul) else ""
        else:
            if more:
                self._busy[node] = None
            if stream.waits:
                self._try_at = min(self._try_at, now + TRY_AGAIN_S)
            writes = stream.full and not (more or stream.waits)
            self._epoll.modify(stream.connection, select.EPOLLIN | (select.EPOLLOUT if writes else 0))
        for head in heads:
            if head.payload is not None:
                self._had[node] = max(self._had[node], head.frame.number)
            self._arrived.append(FrameArrived(node, shown(node, head.frame)))
            self._redial.pop(node, None)  # not before: it may hang up on us
        if foul:
            self._arrived.append(PeerRefused(node, foul[:WHY_AT_MOST]))
        elif stream.received_bytes > received and self._part.reports(node):
            self._heard[node] = None

    def _accept(self, door: Door, now: float) -> None:
        raw = door.accept(now)
        if raw is None:
            return
        if len(self._opening) >= OPENING_AT_MOST and not self._make_room(now):
            raw.close()
            return
        self._opening.answer(raw, now)

    def _make_room(self, now: float) -> bool:
        """Send the stranger away that came first, if it had its time: processes that call all at once get through."""
        oldest = next((d for d, (_, whom) in self._opening.items() if whom is None), None)
        if oldest is None or now < self._opening[oldest][0].until - OPEN_WITHIN_S + HANDSHAKE_S:
            return False
        self._give_up(oldest)
        return True

    def _go_on(self, descriptor: int) -> None:
        opening, whom = self._opening[descriptor]
        try:
            if not self._opening.go(descriptor):
                return
            connection, node, authority = opening.opened()
            if not self._part.vouches(authority, node):
                raise Broken(f"{authority} cannot have {node}")
            if whom is not None and whom.role == "deputy" and node == COORDINATOR:  # which has gone on in its place
                self._addresses[node] = self._addresses.pop(whom)
            elif node in self._forgotten or (whom is not None and node != whom):
                raise Broken(f"{node} has answered where {whom} was called")
        except Broken:
            self._give_up(descriptor)
            return
        del self._opening[descriptor]
        self._close(node)  # an earlier connection, of which the peer knows no more
        self._epoll.modify(descriptor, select.EPOLLIN)
        self._nodes[descriptor] = node
        self._streams[node] = Stream(connection, partial(self._place, node), self._lanes.to(authority, node))
        self._had.setdefault(node, 0)
        self._busy[node] = None  # something may have been read with the handshake
        self._arrived.append(PeerReached(node))

    def _place(self, node: Node, frame: Frame, payload: Payload | None) -> tuple[Views, bool]:
        """Numbers are taken once, and have a place then: it may be in use when they come again."""
        wanted = frame.number > self._had[node]
        try:
            self._part.check(node, frame.message, payload)
            views = self._part.places(payload, node) if payload is not None and wanted else ()
        except ValueError as error:
            raise Foul(str(error)) from error
        return views, wanted

    def _give_up(self, descriptor: int) -> None:
        self._redial_at = 0.0
        self._opening.drop(descriptor)

    def _say_goodbye(self, node: Node) -> None:
        """Close, behind what goes at once: the peer may wait for its last words to be acknowledged."""
        if node in self._streams:
            with suppress(Broken):
                self._streams[node].write_out()
            self._close(node)

    def _close(self, node: Node) -> None:
        stream = self._streams.pop(node, None)
        if stream is None:
            return
        self._redial_at = 0.0
        del self._nodes[stream.connection.fileno()]
        self._epoll.unregister(stream.connection)
        stream.close()
