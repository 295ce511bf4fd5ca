"""Members meet and exchange numbers over a mesh: as they are, in their order, and with nobody else."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest

from squall.protocol.nodes import Node
from squall.transports import meeting
from squall.transports.certificates import Identity, machine_name
from squall.transports.meeting import Guest, Meeting, Way
from squall.transports.mesh import PASS_BYTES, Mesh, MeshBroken, Steps

SOON_S = 10.0


class Member:
    """One of several, each on a machine of its own, all in this process."""

    def __init__(self, place: int, authority: Identity, plaintext: bool) -> None:
        self.node = Node("replica", place)
        self.place = place
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.way = Way(authority.issue(str(self.node)).contexts(), self.listener, plaintext)
        self.guest = Guest(self.node, place, self.listener.getsockname()[:2])

    def meet(self, number: int, guests: list[Guest], within_s: float = SOON_S) -> dict[int, socket.socket]:
        with closing(Meeting(self.way, number, guests, self.place)) as held:
            return held.run(within_s)


Members = Callable[[int], list[Member]]


@pytest.fixture(params=[False, True], ids=["encrypted", "plaintext"])
def members(request: pytest.FixtureRequest) -> Iterator[Members]:
    root = Identity.new_root("squall")
    made: list[Member] = []

    def make(count: int) -> list[Member]:
        authorities = [root.issue(machine_name(place), authority=True) for place in range(count)]
        made.extend(Member(place, authority, request.param) for place, authority in enumerate(authorities))
        return made

    yield make
    for member in made:
        member.listener.close()


def met(members: list[Member], number: int = 1) -> list[Mesh]:
    guests = [member.guest for member in members]
    with ThreadPoolExecutor(len(members)) as pool:
        found = pool.map(lambda member: member.meet(number, guests), members)
        return [Mesh(connections, [str(member.node) for member in members]) for connections in found]


def done(mesh: Mesh, steps: Steps, alone: bool = True) -> Future[None]:
    future: Future[None] = Future()
    mesh.do(steps, lambda error: future.set_exception(error) if error else future.set_result(None), alone=alone)
    return future


def to(mesh: Mesh, peer: int, data: bytes) -> Future[None]:
    def steps() -> Steps:
        yield mesh.send(peer, memoryview(data))

    return done(mesh, steps(), alone=False)


def of(mesh: Mesh, peer: int, room: bytearray) -> Future[None]:
    def steps() -> Steps:
        yield mesh.receive(peer, memoryview(room))

    return done(mesh, steps(), alone=False)


def test_what_each_sends_arrives_whole_and_in_its_order(members: Members) -> None:
    """Both directions at once, in sizes that the kernel does not take at once."""
    meshes = met(members(3))
    chance = random.Random(3)
    sizes = [1, 0, 70_000, 3 * PASS_BYTES + 1, 17]
    sent = {(a, b): [chance.randbytes(size) for size in sizes] for a in range(3) for b in range(3) if a != b}
    rooms = {ends: [bytearray(size) for size in sizes] for ends in sent}
    under_way = [to(meshes[a], b, data) for (a, b), all_data in sent.items() for data in all_data]
    under_way += [of(meshes[b], a, room) for (a, b), all_rooms in rooms.items() for room in all_rooms]
    for future in under_way:
        future.result(SOON_S)
    assert rooms == sent
    for mesh in meshes:
        mesh.close()


def test_whoever_cuts_has_all_others_fail_at_once_and_what_is_asked_for_later(members: Members) -> None:
    meshes = met(members(3))
    waiting = [of(meshes[place], (place + 1) % 3, bytearray(10)) for place in range(3)]
    meshes[0].cut()
    for future in waiting:
        with pytest.raises(MeshBroken):
            future.result(SOON_S)
    with pytest.raises(MeshBroken, match="cut"):
        to(meshes[0], 1, b"late").result(SOON_S)
    for mesh in meshes:
        mesh.close()


def test_who_ends_is_named(members: Members) -> None:
    one, other = met(members(2))
    other.close()
    with pytest.raises(MeshBroken, match=r"replica-1\.0"):
        of(one, 1, bytearray(1)).result(SOON_S)
    one.close()


def test_what_was_sent_before_the_end_is_received(members: Members) -> None:
    one, other = met(members(2))
    room = bytearray(4 * PASS_BYTES)
    received = of(one, 1, room)
    to(other, 0, bytes(range(256)) * (len(room) // 256)).result(SOON_S)
    other.close()
    received.result(SOON_S)
    assert room == bytes(range(256)) * (len(room) // 256)
    one.close()


def test_a_mistake_in_steps_leaves_nobody_waiting(members: Members) -> None:
    one, other = met(members(2))

    def wrong() -> Steps:
        yield one.send(1, memoryview(b"a"))
        raise IndexError("a slip")

    with pytest.raises(MeshBroken, match="IndexError: a slip"):
        done(one, wrong()).result(SOON_S)
    with pytest.raises(MeshBroken):
        of(other, 0, bytearray(100)).result(SOON_S)
    for mesh in (one, other):
        mesh.close()


def test_a_process_that_was_forked_does_not_hold_connections_open(members: Members) -> None:
    one, other = met(members(2))
    line, ends = os.pipe()
    if not (pid := os.fork()):
        os.close(ends)
        os.read(line, 1)
        os._exit(0)
    other.close()
    with pytest.raises(MeshBroken):
        of(one, 1, bytearray(1)).result(SOON_S)
    one.close()
    os.close(ends)
    os.waitpid(pid, 0)
    os.close(line)


# ---------------------------------------------------------------- meetings


def test_a_member_that_cannot_be_called_is_called_again(members: Members) -> None:
    first, second = members(2)
    guests = [first.guest, second.guest]
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(second.meet, 1, guests)
        first.listener.accept()[0].close()  # the link breaks
        meshes = [Mesh(first.meet(1, guests), ["0", "1"]), Mesh(calling.result(SOON_S), ["0", "1"])]
    room = bytearray(3)
    to(meshes[1], 0, b"abc")
    of(meshes[0], 1, room).result(SOON_S)
    assert room == b"abc"
    for mesh in meshes:
        mesh.close()


def test_a_member_that_cannot_be_called_is_not_called_for_ever(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "CALL_FOR_S", 0.3)
    here, gone = members(2)
    gone.listener.close()
    second = Member(1, Identity.new_root("x").issue(machine_name(1), authority=True), False)
    second.way = here.way._replace(listener=second.listener)
    guests = [gone.guest, here.guest]
    with closing(Meeting(here.way, 1, guests, 1)) as held, pytest.raises(MeshBroken, match="cannot be called"):
        held.run(SOON_S)
    second.listener.close()


def test_one_that_does_not_come_is_named(members: Members) -> None:
    here, other = members(2)
    with pytest.raises(MeshBroken, match=r"replica-1.0 did not come within 0.1 s"):
        here.meet(1, [here.guest, other.guest], 0.1)


def test_a_meeting_is_cut_from_another_thread(members: Members) -> None:
    here, other = members(2)
    with closing(Meeting(here.way, 1, [here.guest, other.guest], 0)) as held:
        threading.Timer(0.05, held.cut).start()
        with pytest.raises(MeshBroken, match="given up"):
            held.run(SOON_S)


def test_a_call_for_an_earlier_meeting_is_not_taken(members: Members) -> None:
    """It waits to be answered as the next one begins, and the caller has given it up."""
    first, second = members(2)
    guests = [first.guest, second.guest]
    with pytest.raises(MeshBroken):
        second.meet(1, guests, 0.1)
    for mesh in met([first, second], 2):
        mesh.close()


def test_who_calls_and_says_nothing_does_not_keep_members_out(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest of them makes room; more of them than are answered wait before the member does."""
    monkeypatch.setattr(meeting, "CALLERS_AT_MOST", 2)
    first, second = members(2)
    strangers = [socket.create_connection(first.guest.address) for _ in range(20)]
    meshes = met([first, second])
    for stranger in strangers[:-4]:
        stranger.settimeout(SOON_S)
        assert stranger.recv(1) == b""  # it was sent away
    for each in (*meshes, *strangers):
        each.close()


LIARS = [("replica-1.0", 0), ("replica-2.0", 1), ("nobody", 1)]  # the certificate's name, and the machine


@pytest.mark.parametrize(("name", "machine"), LIARS)
def test_who_is_not_expected_from_that_machine_is_not_let_in(name: str, machine: int) -> None:
    root = Identity.new_root("squall")
    here = Member(0, root.issue(machine_name(0), authority=True), False)
    stranger = root.issue(machine_name(machine), authority=True).issue(name).contexts()[0]
    expected = Guest(Node("replica", 1), 1, ("127.0.0.1", 1))

    def call() -> bytes:
        with socket.create_connection(here.guest.address) as raw, stranger.wrap_socket(raw) as connection:
            connection.sendall((1).to_bytes(8))
            connection.settimeout(SOON_S)
            return connection.recv(1)

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(call)
        with pytest.raises(MeshBroken, match="did not come"):
            here.meet(1, [here.guest, expected], 1.0)
        assert isinstance(answer.exception(SOON_S), OSError) or answer.result() == b""
    here.listener.close()


@pytest.mark.parametrize("nonsense", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 40])
def test_nonsense_costs_its_connection_alone(members: Members, nonsense: bytes) -> None:
    first, second = members(2)
    with socket.create_connection(first.guest.address) as stranger:
        stranger.sendall(nonsense)
        meshes = met([first, second])
        room = bytearray(3)
        to(meshes[1], 0, b"abc")
        of(meshes[0], 1, room).result(SOON_S)
        assert room == b"abc"
    for mesh in meshes:
        mesh.close()
