"""Frames and numbers between machines: whole, once, at their place, from whom they say, whatever else is sent."""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from squall.protocol.effects import Payload
from squall.protocol.events import Event, FrameArrived, PeerReached, PeerRefused, PeersHeard
from squall.protocol.frames import Frame, Message
from squall.protocol.messages import Exchange, Stop
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.nursery_messages import ProcessLost
from squall.transports import lanes, stream
from squall.transports.certificates import Identity
from squall.transports.lanes import TRY_AGAIN_S, Lanes
from squall.transports.stream import Views
from squall.transports.streams import REDIAL_S, Streams

REPLICA, SHARD = Node("replica", 1), Node("shard")
GRADIENT = Payload("gradient", REPLICA, 0, 1, 0)
SIZE = 3_000_001  # bytes: more than a turn, and no multiple of a record
SOON_S = 10.0


class End:
    """One process, in this one: its streams, the memory of its machine, and its part. Machine 0 has all processes."""

    every_s = math.inf
    vouches: Callable[[str, Node], bool] = staticmethod(lambda authority, node: authority == "machine-0")

    def __init__(
        self, identity: Identity, peers: dict[Node, tuple[str, int]] | None = None, plaintext: bool = False,
        lanes: Lanes | None = None,
    ) -> None:  # fmt: skip
        self.memory = bytearray(SIZE)
        self.listener = socket.create_server(("127.0.0.1", 0)) if peers is None else None
        self.streams = Streams(identity.contexts(), self, peers or {}, self.listener, plaintext, lanes)
        self.events: list[Event] = []

    @property
    def address(self) -> tuple[str, int]:
        assert self.listener is not None
        host, port = self.listener.getsockname()
        return host, port

    def places(self, payload: Payload, peer: Node) -> Views:
        if payload.kind != "gradient":
            raise ValueError(payload.kind)
        return (memoryview(self.memory),)

    def check(self, sender: Node, message: Message | None, payload: Payload | None) -> None:
        if type(message) is Stop:
            raise ValueError("nobody says that")

    def admit(self, node: Node, machine: int, address: str = "") -> None:
        raise AssertionError

    def has(self, node: Node) -> bool:
        return True

    def reports(self, node: Node) -> bool:
        return node == REPLICA

    def send(self, to: Node, frame: Frame, payload: Payload | None = None) -> None:
        self.streams.send(to, frame, payload)

    @property
    def sent_bytes(self) -> int:
        """Over the connections that there are."""
        return sum(stream.sent_bytes for stream in self.streams._streams.values())

    @property
    def received_bytes(self) -> int:
        return sum(stream.received_bytes for stream in self.streams._streams.values())

    @property
    def frames(self) -> list[Frame]:
        return [event.frame for event in self.events if isinstance(event, FrameArrived)]


def turns(*ends: End, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not until():
        assert time.monotonic() < deadline, [end.events for end in ends]
        for end in ends:
            end.streams.turn(time.monotonic())
            while (event := end.streams.take()) is not None:
                end.events.append(event)


@pytest.fixture
def machine() -> Identity:
    return Identity.new_root("a run").issue("machine-0", authority=True)


@pytest.fixture(params=[False, True], ids=["TLS", "plaintext"])
def plaintext(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def shard(machine: Identity, plaintext: bool) -> Iterator[End]:
    end = End(machine.issue(str(SHARD)), plaintext=plaintext)
    yield end
    end.streams.close()


@pytest.fixture
def replica(machine: Identity, shard: End, plaintext: bool) -> Iterator[End]:
    end = End(machine.issue(str(REPLICA)), {SHARD: shard.address}, plaintext)
    yield end
    end.streams.close()


def connected(replica: End, shard: End) -> None:
    turns(replica, shard, until=lambda: bool(replica.events and shard.events))
    assert replica.events.pop() == PeerReached(SHARD)
    assert shard.events.pop() == PeerReached(REPLICA)


def test_numbers_arrive_at_their_place_with_their_frame(replica: End, shard: End) -> None:
    connected(replica, shard)
    replica.memory[:] = bytes(i % 251 for i in range(SIZE))
    replica.send(SHARD, Frame(1, 0, Exchange(1, gradient=0)), GRADIENT)
    shard.send(REPLICA, Frame(0, 1))
    turns(replica, shard, until=lambda: bool(shard.frames and replica.frames))
    assert shard.frames == [Frame(1, 0, Exchange(1, gradient=0))]
    assert shard.memory == replica.memory
    assert replica.sent_bytes == shard.received_bytes > SIZE


def rows(end: End) -> Views:
    """As of a slice of a matrix: many short ones with gaps between them, a long one, and short ones again."""
    memory = memoryview(end.memory)
    short = [memory[at : at + 700] for at in range(0, 700_000, 1000)]
    return [*short, memory[700_000:900_000], *(memory[at : at + 3] for at in range(900_000, SIZE - 100, 50_000))]


def test_numbers_of_many_places_arrive_at_theirs(replica: End, shard: End, monkeypatch: pytest.MonkeyPatch) -> None:
    connected(replica, shard)
    monkeypatch.setattr(End, "places", lambda end, payload, peer: rows(end))
    replica.memory[:] = bytes(1 + i % 251 for i in range(SIZE))
    for number in (1, 2):
        replica.send(SHARD, Frame(number, 0, Exchange(number, gradient=0)), GRADIENT)
    turns(replica, shard, until=lambda: len(shard.frames) == 2)
    assert [bytes(there) for there in rows(shard)] == [bytes(here) for here in rows(replica)]
    assert sum(map(bool, shard.memory)) == sum(view.nbytes for view in rows(shard)), "and nowhere else"


class Two:
    """A replica that has numbers for two shards of one machine, which read nothing."""

    def __init__(self, machine: Identity, lanes: Path) -> None:
        self.shards = {Node("shard", index): End(machine.issue(f"shard-{index}.0")) for index in (0, 1)}
        peers = {node: shard.address for node, shard in self.shards.items()}
        self.replica = End(machine.issue(str(REPLICA)), peers, lanes=Lanes(lanes))
        self.ends = (self.replica, *self.shards.values())
        turns(*self.ends, until=lambda: len(self.replica.events) == 2)
        for node in self.shards:
            self.replica.send(node, Frame(1, 0, Exchange(1, gradient=0)), GRADIENT)
        self.now = time.monotonic()
        for _ in range(20):
            self.replica.streams.turn(self.now)
        self.first, self.second = (self.replica.streams._streams[node] for node in self.shards)
        assert (self.first.waits, self.second.waits) == (False, True)


@pytest.fixture
def two(machine: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    """Nobody loses patience, however busy this machine is."""
    for limit in ("PATIENCE_S", "PATIENCE_AT_MOST_S"):
        monkeypatch.setattr(lanes, limit, 100 * SOON_S)
    found = Two(machine, tmp_path)
    yield found
    for end in found.ends:
        end.streams.close()


def test_numbers_go_to_a_slow_machine_one_after_the_other(two: Two) -> None:
    assert two.now < two.replica.streams.wake_at <= two.now + TRY_AGAIN_S
    turns(*two.ends, until=lambda: all(shard.frames for shard in two.shards.values()))
    assert all(shard.memory == two.replica.memory for shard in two.shards.values())
    (lane,) = two.replica.streams._lanes._lanes.values()
    assert lane._rests_until == 0, "nobody waited in vain"


def test_a_connection_that_breaks_leaves_its_turn_to_others(two: Two) -> None:
    two.first.connection.shutdown(socket.SHUT_RDWR)
    for _ in range(2):
        two.replica.streams.turn(two.now + TRY_AGAIN_S)
    assert not two.second.waits


def test_who_is_served_meanwhile_does_not_put_off_when_turns_are_looked_at(two: Two) -> None:
    """What it receives, say."""
    for part in range(1, 4):
        two.replica.streams._busy[Node("shard", 1)] = None
        two.replica.streams.turn(two.now + part / 4 * TRY_AGAIN_S)
    assert two.second.waits
    assert two.replica.streams.wake_at <= two.now + TRY_AGAIN_S


def test_what_goes_to_the_coordinator_waits_for_nobody(machine: Identity, tmp_path: Path) -> None:
    """A stop waits for the files of its snapshot, and not for long."""
    coordinator = End(machine.issue(str(COORDINATOR)))
    shard = End(machine.issue(str(SHARD)), {COORDINATOR: coordinator.address}, lanes=Lanes(tmp_path))
    turns(shard, coordinator, until=lambda: bool(shard.events))
    assert Lanes(tmp_path).to("machine-0", SHARD).take(shard.streams._streams[COORDINATOR], 0.0)
    shard.send(COORDINATOR, Frame(1, 0, Exchange(1, gradient=0)), GRADIENT)
    for _ in range(20):
        shard.streams.turn(time.monotonic())
    assert not shard.streams._streams[COORDINATOR].waits
    turns(shard, coordinator, until=lambda: bool(coordinator.frames))
    for end in (shard, coordinator):
        end.streams.close()


def test_what_was_sent_before_the_connection_broke_is_sent_again_and_taken_once(replica: End, shard: End) -> None:
    connected(replica, shard)
    first, second = (Frame(number, 0, Exchange(number, gradient=0)) for number in (1, 2))
    replica.memory[:] = b"1" * SIZE
    replica.send(SHARD, first, GRADIENT)
    replica.send(SHARD, first, GRADIENT)  # the link's time was over: it is under way
    turns(replica, shard, until=lambda: len(shard.frames) == 1)
    shard.streams._streams[REPLICA].connection.shutdown(socket.SHUT_RDWR)
    turns(replica, shard, until=lambda: SHARD not in replica.streams._streams and REPLICA not in shard.streams._streams)
    shard.memory[:] = b"*" * SIZE  # the shard goes on with its own copy
    replica.send(SHARD, first, GRADIENT)  # into the void
    turns(replica, shard, until=lambda: PeerReached(SHARD) in replica.events)
    replica.send(SHARD, first, GRADIENT)
    turns(replica, shard, until=lambda: len(shard.frames) == 2)
    assert shard.memory == b"*" * SIZE
    replica.send(SHARD, second, GRADIENT)
    turns(replica, shard, until=lambda: len(shard.frames) == 3)
    assert shard.memory == replica.memory


def test_a_file_that_has_come_is_not_made_anew_when_it_comes_again(
    replica: End, shard: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its receiver may not have read it yet."""
    made: list[int] = []

    def make(payload: Payload, peer: Node) -> Views:
        made.append(payload.clock)
        return (memoryview(shard.memory),)

    monkeypatch.setattr(shard, "places", make)
    monkeypatch.setattr(replica, "places", lambda payload, peer: (memoryview(replica.memory),))
    connected(replica, shard)
    for number in (1, 2):
        replica.memory[:] = b"%d" % number * SIZE
        for times in range(1, 3):
            replica.send(SHARD, Frame(number, 0, Exchange(number)), Payload("copy", REPLICA, SIZE, number, 0))
            turns(replica, shard, until=lambda: len(shard.frames) == 2 * number - 2 + times)  # noqa: B023
            replica.events.clear()
            replica.streams._close(SHARD)
            turns(replica, shard, until=lambda: PeerReached(SHARD) in replica.events)
        assert shard.memory == replica.memory
    assert made == [1, 2]


def test_what_the_peer_has_taken_as_it_lay_here_is_not_sent(
    replica: End, shard: End, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A file that both have, being on one machine: who has it says so when it is asked next."""
    connected(replica, shard)

    def gone(end: End, payload: Payload, peer: Node) -> Views:
        raise FileNotFoundError

    monkeypatch.setattr(End, "places", gone)
    replica.send(SHARD, Frame(1, 0, Exchange(1, gradient=0)), GRADIENT)
    replica.send(SHARD, Frame(2, 0, ProcessLost(REPLICA, "killed")))
    turns(replica, shard, until=lambda: bool(shard.frames))
    assert [frame.number for frame in shard.frames] == [2]
    monkeypatch.setattr(End, "has", lambda end, node: False)
    with pytest.raises(FileNotFoundError):
        replica.send(SHARD, Frame(3, 0, Exchange(2, gradient=0)), GRADIENT)


def test_a_new_connection_begins_with_what_the_last_one_has_not_brought(replica: End, shard: End) -> None:
    """The process hears late of a connection that is over again; nothing new goes before the old."""
    first, second = (Frame(number, 0, Exchange(number)) for number in (1, 2))

    def turns_unheard(until: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SOON_S
        while not until():
            assert time.monotonic() < deadline
            for end in (replica, shard):
                end.streams.turn(time.monotonic())

    turns_unheard(lambda: SHARD in replica.streams._streams)
    replica.streams._close(SHARD)
    assert replica.streams.take() == PeerReached(SHARD)
    replica.send(SHARD, first)  # into the void
    turns_unheard(lambda: SHARD in replica.streams._streams)
    replica.send(SHARD, second)
    turns(replica, shard, until=lambda: PeerReached(SHARD) in replica.events)
    for frame in (first, second):
        replica.send(SHARD, frame)
    turns(replica, shard, until=lambda: len(shard.frames) == 2)
    assert shard.frames == [first, second]


def test_numbers_that_break_off_are_taken_when_they_come_again(replica: End, shard: End) -> None:
    connected(replica, shard)
    replica.memory[:] = b"1" * SIZE
    replica.send(SHARD, Frame(1, 0, Exchange(1, gradient=0)), GRADIENT)
    turns(replica, shard, until=lambda: shard.received_bytes > 1000)
    shard.streams._close(REPLICA)
    turns(replica, shard, until=lambda: SHARD not in replica.streams._streams)
    assert not shard.frames
    turns(replica, shard, until=lambda: PeerReached(SHARD) in replica.events)
    replica.send(SHARD, Frame(1, 0, Exchange(1, gradient=0)), GRADIENT)
    turns(replica, shard, until=lambda: bool(shard.frames))
    assert shard.memory == replica.memory


def test_numbers_wake_their_receiver_when_many_have_come(
    replica: End, shard: End, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """They come in records of a slow link, and what wakes for each keeps its process from computing."""
    connected(replica, shard)
    replica.memory[:] = b"1" * SIZE
    record, view = 1 << 14, memoryview(replica.memory)
    records = [view[at : at + record] for at in range(0, SIZE, record)]
    monkeypatch.setattr(replica, "places", lambda payload, peer: records)
    monkeypatch.setattr(stream, "PASS_BYTES", record)  # of a turn
    replica.send(SHARD, Frame(1, 0, Exchange(1, gradient=0)), GRADIENT)
    woken = 0
    while replica.streams.wake_at == 0.0:
        replica.streams.turn(time.monotonic())
        woken += readable(shard)
        while readable(shard) or shard.streams.wake_at == 0.0:
            shard.streams.turn(time.monotonic())
    turns(shard, until=lambda: bool(shard.frames))
    assert woken < len(records) / 8
    assert shard.memory == replica.memory


def test_a_turn_writes_no_more_than_a_pass_however_much_goes(replica: End, shard: End) -> None:
    connected(replica, shard)
    replica.send(SHARD, Frame(1, 0, Exchange(1, gradient=0)), GRADIENT)
    sending = replica.streams._streams[SHARD]
    sending.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, SIZE)  # the kernel takes all of it
    before = sending.sent_bytes
    assert sending.write(0.0), "there is more"
    assert sending.sent_bytes - before < 1.1 * stream.PASS_BYTES < SIZE


def readable(end: End) -> bool:
    return bool(select.select([end.streams], [], [], 0)[0])


def test_a_forgotten_peer_changes_nothing_any_more(replica: End, shard: End) -> None:
    connected(replica, shard)
    replica.memory[:] = b"1" * SIZE
    replica.send(SHARD, Frame(1, 0, Exchange(1, gradient=0)), GRADIENT)
    turns(replica, shard, until=lambda: shard.received_bytes > 1000)
    shard.streams.forget(REPLICA)
    before = bytes(shard.memory)
    turns(replica, shard, until=lambda: SHARD not in replica.streams._streams)
    turns(replica, shard, until=lambda: replica.streams._redial[SHARD][1] > 4 * REDIAL_S)  # it has called again
    assert not shard.frames
    assert shard.memory == before


@pytest.mark.parametrize("part", [lambda end: end.streams.forget(REPLICA), lambda end: end.streams.close()])
def test_who_leaves_hears_that_its_last_words_have_arrived(
    part: Callable[[End], None], replica: End, shard: End
) -> None:
    """At once, though a process that was forked has the connection as well."""
    connected(replica, shard)
    child = os.dup(shard.streams._streams[REPLICA].connection.fileno())
    shard.send(REPLICA, Frame(0, 7))
    part(shard)
    turns(replica, until=lambda: SHARD not in replica.streams._streams)
    assert replica.frames == [Frame(0, 7)]
    os.close(child)


def test_what_a_peer_never_says_costs_its_connection_and_is_told(replica: End, shard: End) -> None:
    connected(replica, shard)
    replica.send(SHARD, Frame(1, 0, Exchange(1)))
    replica.send(SHARD, Frame(2, 0, Stop()))
    turns(replica, shard, until=lambda: REPLICA not in shard.streams._streams)
    assert shard.events == [FrameArrived(REPLICA, Frame(1, 0, Exchange(1))), PeerRefused(REPLICA, "nobody says that")]


def test_texts_of_others_do_nothing_to_a_terminal(replica: End, shard: End) -> None:
    connected(replica, shard)
    replica.send(SHARD, Frame(1, 0, ProcessLost(REPLICA, "it \x1b[2J\rwas killed")))
    turns(replica, shard, until=lambda: bool(shard.frames))
    assert shard.frames == [Frame(1, 0, ProcessLost(REPLICA, "it \ufffd[2J\ufffdwas killed"))]


def test_a_part_of_a_message_tells_that_its_sender_is_there(replica: End, shard: End) -> None:
    """On a slow link it is all that comes for long, and less than wakes whoever waits for numbers."""
    connected(replica, shard)
    shard.every_s = 0.01
    shard.streams._report_at = 0.0
    replica.send(SHARD, Frame(1, 0, Exchange(1, gradient=0)), GRADIENT)
    stream = replica.streams._streams[SHARD]
    stream.connection.send(b"".join(stream._outgoing)[:50_000])
    turns(shard, until=lambda: PeersHeard((REPLICA,)) in shard.events)
    assert not shard.frames


@pytest.mark.parametrize("name", ["replica-2.0", "nobody", "replica-x.y"])
def test_a_member_that_answers_under_another_name_is_not_listened_to(
    name: str, machine: Identity, shard: End, plaintext: bool
) -> None:
    """Names are those of certificates."""
    other = End(machine.issue(name), {SHARD: shard.address, Node("shard", 1): shard.address}, plaintext)
    turns(other, shard, until=lambda: not other.streams._opening)
    assert not other.events
    other.streams.close()


LIARS: list[Callable[[Identity], Identity]] = [
    lambda one: one,
    lambda one: one.issue("machine-0", authority=True),  # a machine makes no machine
    lambda one: one.issue("machine-0"),  # nor does a process
]


@pytest.mark.parametrize("liar", LIARS)
def test_a_machine_names_no_process_that_another_one_has(liar: Callable[[Identity], Identity]) -> None:
    """Neither where it is called, nor where it calls: the connection of the true one stays."""
    root = Identity.new_root("a run")
    machine_0, machine_1 = (root.issue(f"machine-{number}", authority=True) for number in range(2))
    posing = End(liar(machine_1).issue(str(SHARD)))
    caller = End(machine_0.issue(str(REPLICA)), {SHARD: posing.address})
    turns(caller, posing, until=lambda: bool(caller.streams._opening))
    turns(caller, posing, until=lambda: not caller.streams._opening)
    assert not caller.events
    shard = End(machine_0.issue(str(SHARD)))
    true, false = (
        End(identity.issue(str(REPLICA)), {SHARD: shard.address}) for identity in (machine_0, liar(machine_1))
    )
    connected(true, shard)
    turns(false, true, shard, until=lambda: false.streams._redial.get(SHARD, (0.0, 0.0))[1] > 2 * REDIAL_S)
    true.send(SHARD, Frame(1, 0, Exchange(1)))
    turns(true, shard, until=lambda: bool(shard.events))
    assert shard.events == [FrameArrived(REPLICA, Frame(1, 0, Exchange(1)))]
    for end in (caller, posing, shard, true, false):
        end.streams.close()


def test_a_stranger_is_refused(shard: End, plaintext: bool) -> None:
    """It has a certificate, of another run."""
    other = Identity.new_root("another run").issue("machine-0", authority=True).issue(str(REPLICA))
    stranger = End(other, {SHARD: shard.address}, plaintext)
    turns(stranger, shard, until=lambda: not stranger.streams._opening and not shard.streams._opening)
    assert not shard.events
    stranger.streams.close()


def test_who_is_on_the_way_reads_plain_text_alone(machine: Identity, shard: End, plaintext: bool) -> None:
    """That of an end that wants it: with one that wants none nothing is exchanged, in either direction."""
    with Wire(shard.address) as wire:
        replica = End(machine.issue(str(REPLICA)), {SHARD: wire.address}, plaintext)
        connected(replica, shard)
        replica.memory[:] = b"gradients" * (SIZE // 9) + bytes(SIZE % 9)
        replica.send(SHARD, Frame(1, 0, Exchange(1, gradient=0)), GRADIENT)
        turns(replica, shard, until=lambda: bool(shard.frames))
        replica.streams.close()
        assert shard.memory == replica.memory
        assert (b"gradients" in wire.seen) == plaintext
    other = End(machine.issue(str(REPLICA)), {SHARD: shard.address}, not plaintext)
    shard.events.clear()
    turns(other, shard, until=lambda: other.streams._redial.get(SHARD, (0, 0))[1] > 4 * REDIAL_S)
    assert not other.frames
    assert not shard.frames
    other.streams.close()


class Wire:
    """Carries what is said between one who calls and an address, and keeps what the first one has said."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.seen = bytearray()
        self._address = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._thread = threading.Thread(target=self._carry)

    def __enter__(self) -> Wire:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._listener.close()
        self._thread.join(SOON_S)

    def _carry(self) -> None:
        with self._listener.accept()[0] as one, socket.create_connection(self._address) as other:
            to = {one: other, other: one}
            while True:
                for end in select.select([one, other], [], [], SOON_S)[0]:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    self.seen += data if end is one else b""
                    to[end].sendall(data)
