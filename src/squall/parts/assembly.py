"""How the parts of a replica come together that lie on several machines.

Each calls the first, which the coordinator has told from which machines they come. Where there are more than two, each
says where it listens, the first tells all, and then each calls those before it. A name is believed from its machine
alone; what the machines of the others are, a part believes the first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from socket import socket
from typing import TypeVar

import msgspec

from squall.protocol.messages import Address
from squall.protocol.nursery_messages import PartPlace
from squall.runtime.mesh_group import MeshGroup
from squall.runtime.site import Site
from squall.transports.meeting import Guest, Meeting, Way
from squall.transports.mesh import Mesh, MeshBroken

MEET_WITHIN_S = 30.0  # whoever does not come, though it lives; of a death the coordinator knows

LENGTH_BYTES = 2
T = TypeVar("T")


class Assembly:
    """Of the parts of `first.node`, its own included, in their order."""

    def __init__(self, way: Way, site: Site, parts: Sequence[PartPlace], own: int, news: int | None = None) -> None:
        """`news`: an eventfd that is written to when a connection has broken. Others' places need not be known yet."""
        self._way, self._site = way, site
        self._parts, self._own, self._news = parts, own, news
        self._until = time.monotonic() + MEET_WITHIN_S

    def run(self) -> MeshGroup:
        """Raises `MeshBroken` where one does not come in time, or is gone."""
        first, count = self._parts[0], len(self._parts)
        if self._own == 0:
            connections = self._meet([*map(_expected, self._parts)], 0)
        else:
            connections = self._meet([self._guest(first), _expected(self._parts[self._own])], 1)
        if count > 2:
            connections |= self._among_each_other(connections)
        names = [str(part.node) for part in self._parts]
        mesh = Mesh(connections, names, self._news)
        return MeshGroup(mesh, [part.node for part in self._parts], self._own, name=names[0])

    def _among_each_other(self, connections: Mapping[int, socket]) -> dict[int, socket]:
        """The connections between those that are not the first."""
        if self._own == 0:
            told = [(part, self._hear(connections[k], Address)) for k, part in enumerate(self._parts) if k]
            places = [PartPlace(part.node, part.machine, address) for part, address in told]
            for connection in connections.values():
                self._say(connection, places)
            return {}
        self._say(connections[0], self._parts[self._own].address)
        places = self._hear(connections[0], list[PartPlace])
        if [place.node for place in places] != [part.node for part in self._parts[1:]]:
            raise MeshBroken(f"{self._parts[0].node} names other parts than there are")
        met = self._meet([self._guest(place) for place in places], self._own - 1)
        return {place + 1: connection for place, connection in met.items()}

    def _meet(self, guests: Sequence[Guest], own: int) -> dict[int, socket]:
        meeting = Meeting(self._way, self._parts[0].node.incarnation, guests, own)
        try:
            return meeting.run(self._left_s())
        finally:
            meeting.close()

    def _guest(self, place: PartPlace) -> Guest:
        try:
            return Guest(place.node, place.machine, self._site.called(place.address))
        except ValueError as error:
            raise MeshBroken(f"{place.node} is said to be called at {place.address!r}") from error

    def _left_s(self) -> float:
        return max(0.001, self._until - time.monotonic())

    def _say(self, connection: socket, what: object) -> None:
        text = msgspec.msgpack.encode(what)
        connection.settimeout(self._left_s())
        try:
            connection.sendall(len(text).to_bytes(LENGTH_BYTES) + text)
        except OSError as error:
            raise MeshBroken(f"a part has gone while they met: {error}") from error
        connection.setblocking(False)

    def _hear(self, connection: socket, kind: type[T]) -> T:
        connection.settimeout(self._left_s())
        try:
            text = _exactly(connection, int.from_bytes(_exactly(connection, LENGTH_BYTES)))
            said = msgspec.msgpack.decode(text, type=kind)
        except (OSError, msgspec.MsgspecError) as error:
            raise MeshBroken(f"a part has gone while they met: {error}") from error
        connection.setblocking(False)
        return said


def _expected(place: PartPlace) -> Guest:
    """It calls, or is this process itself."""
    return Guest(place.node, place.machine, ("", 0))


def _exactly(connection: socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        if not (more := connection.recv(count - len(found))):
            raise OSError("it has hung up")
        found += more
    return found
