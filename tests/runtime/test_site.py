"""What the processes of a machine have of it, and who is believed to be on which."""

from __future__ import annotations

import socket

import msgspec
import pytest

from squall.protocol.effects import Payload
from squall.protocol.heartbeats import Pulse
from squall.protocol.messages import Exchange, Exchanged, Join, Parcel, Stop, View
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.nursery_messages import Alive, Heard, Refused
from squall.protocol.speaking import COMMON, LOOP
from squall.runtime.part import Part
from squall.runtime.site import Site
from squall.transports.certificates import Identity
from squall.transports.stream import Views

SEATS = {("coordinator", 0): 0, ("shard", 0): 0, ("replica", 0): 0, ("shard", 1): 1, ("replica", 1): 1}
SHARD, FAR = Node("shard", 0), Node("shard", 1)
R1 = Node("replica", 1)


def site(listeners: dict[Node, socket.socket] | None = None) -> Site:
    return Site(0, SEATS, {}, Identity("", b"", b"", b""), listeners or {}, {0: 1, 1: 1}, Pulse())


def places(payload: Payload, peer: Node) -> Views:
    """Buffer 0 of each kind has one."""
    if payload.buffer:
        raise ValueError(f"there is no place for {payload}")
    return ()


def part(node: Node = SHARD) -> Part:
    return Part(node, site(), LOOP, places)


def test_a_process_keeps_its_own_listener_alone() -> None:
    """Else who calls one that is dead would be left waiting."""
    listeners = {node: socket.create_server(("127.0.0.1", 0)) for node in (COORDINATOR, SHARD)}
    addresses = {node: listener.getsockname() for node, listener in listeners.items()}
    site(listeners).close_listeners(keep=[SHARD])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(addresses[COORDINATOR])
    socket.create_connection(addresses[SHARD]).close()
    site(listeners).close_listeners()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(addresses[SHARD])


def test_a_machine_has_the_processes_that_were_placed_there() -> None:
    of = part()
    assert of.vouches("machine-1", R1)
    assert not of.vouches("machine-2", R1)
    again = Node("replica", 1, 1)
    assert not of.vouches("machine-1", again)
    of.admit(again, 2)
    assert of.vouches("machine-2", again)
    assert not of.vouches("machine-1", again)
    assert of.vouches("machine-3", Node("nursery", 3))
    for stranger in (Node("nursery", 3, 1), Node("shard", 1, 1), Node("shard", 7), Node("evaluator", 9)):
        assert not of.vouches("machine-3", stranger)
    assert [of.reports(node) for node in (R1, FAR, again, Node("replica"))] == [True, True, True, False]


def test_each_role_says_its_own() -> None:
    of = part()
    of.check(R1, Exchange(1, 0, 0), Payload("gradient", R1, 0, 1, 0))
    of.check(R1, Exchange(1, -1, 0), None)
    of.check(R1, None, None)
    part(Node("replica")).check(FAR, Exchanged(1, 1), Payload("weights", Node("replica"), 0, 1, 1, 1))
    Part(COORDINATOR, site(), COMMON, places).check(Node("nursery", 1), Alive(), None)
    for message in (Stop(), Join(1), Alive(), View(1, ())):
        with pytest.raises(ValueError, match=f"a replica says {type(message).__name__} to no shard"):
            of.check(R1, message, None)


def test_a_parcel_tells_of_the_numbers_that_it_brings() -> None:
    """A shard names them to its backup by what was told."""
    sender, brought = Node("part", 3), Payload("gradient", R1, 0, 2, 0, part=1)
    part().check(sender, Parcel(2, 0), brought)
    for told in (Parcel(2, 1), Parcel(1, 0)):
        with pytest.raises(ValueError, match="is not what"):
            part().check(sender, told, brought)
    with pytest.raises(ValueError, match="None is not what"):
        part().check(sender, Parcel(2, 0), None)
    with pytest.raises(ValueError, match="there is no place"):
        part().check(sender, Parcel(2, 9), msgspec.structs.replace(brought, buffer=9))


def test_a_process_speaks_of_those_that_it_hears() -> None:
    of = Part(COORDINATOR, site(), LOOP, places)
    for sender, other in ((FAR, R1), (FAR, Node("evaluator", 2)), (R1, FAR)):
        for message in (Heard((other,)), Refused(other, "it lies")):
            of.check(sender, message, None)
    for sender, other in (
        (R1, Node("replica", 0)), (FAR, SHARD), (R1, Node("nursery", 2)), (FAR, Node("nursery")), (R1, Node("a liar")),
    ):  # fmt: skip
        for message in (Heard((other,)), Refused(other, "it lies")):
            with pytest.raises(ValueError, match=f"of a {other.role}, which it does not hear"):
                of.check(sender, message, None)


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (Exchange(1, 7, 0), None),  # a buffer that is not there
        (Exchange(1, 0, 7), None),
        (Exchange(1, 0, 0), Payload("gradient", R1, 0, 2, 0)),  # numbers of another push
        (Exchange(1, 0, 0), Payload("trial", R1, 0, 1, 0)),
        (Exchange(1, -1, 0), Payload("gradient", R1, 0, 1, 0)),
        (None, Payload("gradient", R1, 0, 1, 0)),
    ],
)
def test_numbers_belong_to_their_message_and_to_a_place(message: Exchange | None, payload: Payload | None) -> None:
    with pytest.raises(ValueError, match=r"no place|does not belong|no message"):
        part().check(R1, message, payload)
