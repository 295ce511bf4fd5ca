"""One connection between processes of two machines: frames, each with the numbers that belong to it.

    12 bytes   length of the head, its checksum, and the checksum of these two
    n bytes    the head, as MessagePack: [bytes of numbers, frame, payload or nothing]
    numbers    of the payload; they are received into their place, with no copy between

Both ends have proved who they are before a stream begins (`transports.opening`). A head that is not as it was sent
costs the connection (`Broken`): in plain text it may be changed on its way, and so may numbers, which have no checksum.
What was sent so, and cannot be understood, costs the peer as well (`Foul`).
"""

from __future__ import annotations

import ssl
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from socket import SHUT_RDWR, SO_RCVLOWAT, SOL_SOCKET, socket
from zlib import crc32

import msgspec

from squall.protocol.effects import Payload
from squall.protocol.frames import MAX_FRAME_BYTES, Frame
from squall.protocol.messages import Count
from squall.transports.lanes import Lane, near

PASS_BYTES = 1 << 20  # what a turn reads or writes at most, so that no stream keeps the others waiting
WAKE_BYTES = 1 << 18  # of numbers: fewer do not wake who reads them, or each record would
RECORD_BYTES = (1 << 14) + 256  # of TLS, at most
SMALL_BYTES = 1 << 14  # views of fewer travel together: a call for each row of a sliced matrix would take far longer
MAX_HEAD_BYTES = MAX_FRAME_BYTES + 1024
_PREFIX = struct.Struct("!III")
_SCRATCH = memoryview(bytearray(1 << 16))  # for numbers that nobody needs any more

Views = Sequence[memoryview]  # bytes, one after the other
# Where the numbers belong that come with a frame, and whether they are wanted: False, if they came before.
Place = Callable[[Frame, Payload | None], tuple[Views, bool]]


class Broken(Exception):
    """The connection has ended."""


class Foul(Broken):
    """It has, because the peer has sent what no Squall process sends."""


class Head(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What comes before the numbers."""

    size: Count  # bytes of numbers
    frame: Frame
    payload: Payload | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Head)


def prefix(length: int, check: int) -> bytes:
    """What goes before a head of this length and checksum."""
    return _PREFIX.pack(length, check, crc32(length.to_bytes(4), check))


class Stream:
    """Reads and writes as much as goes without waiting."""

    def __init__(self, connection: socket, place: Place, lane: Lane) -> None:
        self.connection = connection
        self.waits = False  # for its turn in the lane
        self.ready = False  # the process knows of it, and sends again what went with the one before
        self.last = 0  # number of the last message that was given to this connection
        self.sent_bytes = self.received_bytes = 0
        self._place = place
        self._lane = lane
        self._outgoing: deque[memoryview] = deque()
        self._prefix = memoryview(bytearray(_PREFIX.size))
        self._incoming: deque[memoryview] = deque([self._prefix])  # to be filled, one after the other
        self._head: memoryview | None = None  # being read
        self._arrived: Head | None = None  # whose numbers are being read
        self._spread: tuple[memoryview, list[memoryview]] | None = None  # what is read first, and where it then goes
        self._left = 0  # bytes of numbers still to come
        self._unwanted = 0  # those that nobody needs
        self._wakes = 1  # bytes that make the connection readable

    def put(self, frame: Frame, payload: Payload | None = None, numbers: Views = ()) -> None:
        """Send these next. The numbers are read when their turn has come."""
        head = _encoder.encode(Head(sum(view.nbytes for view in numbers), frame, payload))
        self._outgoing.append(memoryview(prefix(len(head), crc32(head)) + head))
        self._outgoing.extend(numbers)
        self.last = max(self.last, frame.number)

    @property
    def full(self) -> bool:
        """There is more to be written."""
        return bool(self._outgoing)

    def write(self, now: float) -> bool:
        """Write what goes, if it is its turn; True if there is more that goes at once. Raises `Broken`."""
        self.waits = self.waits and not self._lane.take(self, now)
        if self.waits:
            return False
        more = self.write_out()
        if not self._outgoing:
            self._lane.leave(self, now)
        elif not more:  # the link is slower than this process
            self.waits = near(self.connection) and not self._lane.take(self, now)
        return more

    def close(self) -> None:
        self._lane.leave(self)
        with suppress(OSError):
            self.connection.shutdown(SHUT_RDWR)  # also where a process that was forked holds it open
        self.connection.close()

    def write_out(self) -> bool:
        """Whoever else sends."""
        budget = PASS_BYTES
        while self._outgoing and budget > 0:
            view = _together(self._outgoing)
            try:
                # OpenSSL goes on for as long as the peer reads: a view may be all of a large vector.
                count = self.connection.send(view[:PASS_BYTES])
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return False
            except (OSError, ValueError) as error:
                raise Broken(str(error)) from error
            budget -= count
            self.sent_bytes += count
            if count == view.nbytes:
                self._outgoing.popleft()
            else:
                self._outgoing[0] = view[count:]
        return bool(self._outgoing)

    def read(self, arrived: list[Head]) -> bool:
        """Add what has come whole, with its numbers; True if there may be more at once. Raises `Broken`."""
        budget = PASS_BYTES
        while budget > 0:
            if self._left and self._spread is None:
                self._read_together()
            into = self._incoming[0] if self._incoming else _SCRATCH[: self._unwanted]
            try:
                count = self.connection.recv_into(into, min(into.nbytes, budget))
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                self._sleep()
                return False
            except (OSError, ValueError) as error:
                raise Broken(str(error)) from error
            if count == 0:
                raise Broken("the other end has closed it")
            budget -= count
            self.received_bytes += count
            self._left -= min(count, self._left)
            if not self._incoming:
                self._unwanted -= count
            elif count == into.nbytes:
                self._incoming.popleft()
                self._put_apart()
            else:
                self._incoming[0] = into[count:]
            if not self._incoming and not self._unwanted:
                self._next(arrived)
        return True

    def _read_together(self) -> None:
        """Read what belongs into several small views at once."""
        small = _small(self._incoming)
        if len(small) > 1:
            for _ in small:
                self._incoming.popleft()
            scratch = memoryview(bytearray(sum(view.nbytes for view in small)))
            self._spread = scratch, small
            self._incoming.appendleft(scratch)

    def _put_apart(self) -> None:
        """What has just come whole may belong into several views."""
        if self._spread is not None:
            (scratch, views), self._spread = self._spread, None
            at = 0
            for view in views:
                view[:] = scratch[at : at + view.nbytes]
                at += view.nbytes

    def _sleep(self) -> None:
        """Have the kernel wake the process when many numbers have come, or all; a part of a record may be read."""
        wakes = max(1, min(self._left - RECORD_BYTES, WAKE_BYTES))
        if wakes != self._wakes:
            self._wakes = wakes
            self.connection.setsockopt(SOL_SOCKET, SO_RCVLOWAT, wakes)

    def _next(self, arrived: list[Head]) -> None:
        """What was being read is whole."""
        if self._arrived is None and self._head is None:
            length, check, _ = _PREFIX.unpack(self._prefix)
            if self._prefix != prefix(length, check):
                raise Broken("what it has sent was changed on its way")
            if not 0 < length <= MAX_HEAD_BYTES:
                raise Foul(f"it begins a message of {length} bytes")
            self._head = memoryview(bytearray(length))
            self._incoming.append(self._head)
            return
        if self._head is not None:
            self._begin(self._head)
            self._head = None
        if not self._incoming and not self._unwanted:
            assert self._arrived is not None
            arrived.append(self._arrived)
            self._arrived = None
            self._incoming.append(self._prefix)

    def _begin(self, encoded: memoryview) -> None:
        """Make ready for the numbers of a frame whose head has come."""
        if crc32(encoded) != _PREFIX.unpack(self._prefix)[1]:
            raise Broken("what it has sent was changed on its way")
        try:
            head = _decoder.decode(encoded)
        except (ValueError, RecursionError) as error:  # the second: nested without end
            raise Foul(f"it sends what is no message: {error}") from error
        self._arrived = head
        views, wanted = self._place(head.frame, head.payload)
        if sum(view.nbytes for view in views) != head.size and (wanted or head.payload is None):
            raise Foul(f"it sends {head.size} bytes of numbers for {head.payload}")
        self._left = head.size
        if wanted:
            self._incoming.extend(view for view in views if view.nbytes)
        else:
            self._unwanted = head.size


def _small(views: deque[memoryview]) -> list[memoryview]:
    """Those at the front that are, as many as go together."""
    found, size = list[memoryview](), 0
    for view in views:
        if view.nbytes >= SMALL_BYTES or size >= RECORD_BYTES:
            break
        found.append(view)
        size += view.nbytes
    return found


def _together(views: deque[memoryview]) -> memoryview:
    """The view at the front, which may have been several."""
    small = _small(views)
    if len(small) > 1:
        for _ in small:
            views.popleft()
        views.appendleft(memoryview(b"".join(small)))
    return views[0]
