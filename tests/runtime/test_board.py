"""What processes write of themselves is what their nursery reads."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.protocol.effects import Apply, Compute, Effect, End, Send
from squall.protocol.events import Event, MessageArrived, Started
from squall.protocol.frames import Frame, encode
from squall.protocol.link import Linked
from squall.protocol.messages import Exchanged, Join, Stop
from squall.protocol.nodes import COORDINATOR, NURSERY, Node
from squall.runtime.board import Board, Doing, Entry
from squall.runtime.driver import LONG_S, Driver, Host
from squall.runtime.processes import fork

REPLICA, SHARD = Node("replica", 1), Node("shard", 0)
PIDS = {REPLICA: os.getpid()}


def board(now: float = 0.0) -> Board:
    return Board(replicas=2, shards=2, now=now)


@given(st.lists(st.tuples(st.sampled_from(Doing), st.floats(0.001, 10)), min_size=1), st.integers(1, 5))
def test_what_is_read_adds_up_to_the_time_that_has_passed(turns: list[tuple[Doing, float]], every: int) -> None:
    made = board()
    entry, now = made.entry(REPLICA, 0.0), 0.0
    wanted, found, passed = dict.fromkeys(Doing, 0.0), [0.0] * 4, 0.0
    for number, (doing, seconds) in enumerate(turns):
        entry.turns(doing, now)
        now += seconds
        wanted[doing] += seconds
        if number % every == 0:  # read in the midst of it
            (spent,) = made.read(now - seconds / 2, PIDS)
            found = [a + b for a, b in zip(found, (spent.compute_s, spent.apply_s, spent.send_s, spent.wait_s))]
            passed += spent.seconds
    (spent,) = made.read(now, PIDS)
    found = [a + b for a, b in zip(found, (spent.compute_s, spent.apply_s, spent.send_s, spent.wait_s))]
    assert found == pytest.approx([wanted[doing] for doing in list(Doing)[1:]])
    assert passed + spent.seconds == pytest.approx(now)


def test_another_process_reads_what_one_writes_and_a_replacement_begins_anew() -> None:
    made = board()
    if not (pid := fork()):
        made.entry(REPLICA, 0.0).turns(Doing.COMPUTING, 1.0)
        os._exit(0)
    os.waitpid(pid, 0)
    (spent,) = made.read(5.0, PIDS)
    assert (spent.node, spent.seconds, spent.compute_s) == (REPLICA, 5.0, 4.0)
    successor = Node("replica", 1, 1)
    made.entry(successor, 6.0).turns(Doing.APPLYING, 6.0)
    assert made.read(7.0, PIDS) == ()  # it is gone
    made.entry(successor, 7.0).turns(Doing.WAITING, 7.0)
    (spent,) = made.read(9.0, {successor: os.getpid()})
    assert (spent.compute_s, spent.wait_s) == (0.0, 2.0)


def test_the_peer_that_was_waited_for_longest_is_named_also_while_it_is_waited_for() -> None:
    made = board()
    entry = made.entry(REPLICA, 0.0)
    for peer, begin, end in ((SHARD, 0.0, 2.0), (COORDINATOR, 2.0, 3.0)):
        entry.turns(Doing.WAITING, begin)
        entry.waited(peer, end)
    (spent,) = made.read(3.0, PIDS)
    assert (spent.awaited, spent.awaited_s) == (SHARD, 2.0)
    entry.turns(Doing.WAITING, 3.0)
    assert not entry.names
    (spent,) = made.read(4.0, PIDS)
    assert (spent.awaited, spent.wait_s) == (None, 1.0)
    entry.awaits(COORDINATOR, 4.0)
    assert entry.names
    (spent,) = made.read(6.0, PIDS)
    assert (spent.awaited, spent.awaited_s, spent.wait_s) == (COORDINATOR, 3.0, 2.0)


def test_a_long_wait_is_that_of_whoever_was_named_meanwhile() -> None:
    made = board()
    entry = made.entry(REPLICA, 0.0)
    entry.turns(Doing.WAITING, 0.0)
    entry.awaits(SHARD, 1.0)
    entry.awaits(SHARD, 2.0)
    entry.awaits(Node("shard", 1), 5.0)
    (spent,) = made.read(6.0, PIDS)
    assert (spent.awaited, spent.awaited_s, spent.wait_s) == (SHARD, 5.0, 6.0)
    entry.waited(COORDINATOR, 8.0)  # as the others do it says from time to time that it is there
    (spent,) = made.read(8.0, PIDS)
    assert (spent.awaited, spent.awaited_s, spent.wait_s) == (Node("shard", 1), 2.0, 2.0)


def test_what_a_shard_has_waited_for_its_own_backup_is_told_beside_that() -> None:
    made = Board(replicas=2, shards=2, now=0.0, backups=2)
    entry, backup = made.entry(SHARD, 0.0), Node("backup", 0, 3)
    for peer, begin, end in ((REPLICA, 0.0, 2.0), (backup, 2.0, 3.0), (Node("backup", 1), 3.0, 3.5)):
        entry.turns(Doing.WAITING, begin)
        entry.waited(peer, end)
    (spent,) = made.read(4.0, {SHARD: os.getpid()})
    assert (spent.awaited, spent.wait_s, spent.copied_s) == (REPLICA, 3.5, 1.0)
    other = made.entry(REPLICA, 4.0)
    other.turns(Doing.WAITING, 4.0)
    other.waited(backup, 5.0)
    (spent,) = made.read(5.0, PIDS)
    assert spent.copied_s == 0.0  # it has none


def test_what_has_no_row_writes_for_nobody() -> None:
    made = board()
    for entry in (Entry(), made.entry(NURSERY, 0.0), made.entry(Node("part", 3), 0.0)):
        entry.turns(Doing.WAITING, 1.0)
        entry.awaits(SHARD, 2.0)
        entry.waited(SHARD, 2.0)
        entry.corrects(0.5)
    assert made.read(3.0, PIDS) == ()


class Waits:
    """Computes when it begins, and then waits for a shard until it is told to stop."""

    node, wake_at, held = REPLICA, None, True

    def on(self, event: Event, now: float) -> list[Effect]:
        match event:
            case Started():
                return [Compute(0, 0, 8, 0, accumulate=False, local_step=False), Send(COORDINATOR, Join(1))]
            case MessageArrived(_, Stop()):
                return [Apply((), 1.0, 0, 1.0, ()), End("finished")]
        return []

    def awaits(self) -> Node:
        return SHARD


class Clock(Host):
    """Time passes while effects are carried out, and while nothing comes for a while."""

    def __init__(self, *arriving: tuple[float, Node, object]) -> None:
        self.now, self.arriving = 0.0, list(arriving)

    def __call__(self) -> float:
        return self.now

    def perform(self, effect: Effect, now: float) -> None:
        self.now += {Compute: 3.0, Apply: 0.5}.get(type(effect), 0.0)

    def send(self, to: Node, data: bytes) -> None:
        return None

    def receive(self, timeout_s: float | None) -> tuple[Node, bytes] | None:
        at, sender, message = self.arriving[0]
        if timeout_s is not None and self.now + timeout_s < at:
            self.now += timeout_s
            return None
        self.now = max(self.now, at)
        del self.arriving[0]
        return sender, encode(Frame(1, 1, message))


def test_a_driver_tells_what_its_node_does_and_for_whom_it_waits() -> None:
    made = board()
    clock = Clock((4.0, SHARD, Exchanged(0, 0)), (6.5, COORDINATOR, Stop()))
    driver = Driver(Linked(Waits()), clock, clock, clock, entry=made.entry(REPLICA, 0.0))
    driver.start()
    while clock.now <= 3.0:
        driver.step()
    assert clock.now == 3.0 + LONG_S
    (spent,) = made.read(clock.now, PIDS)
    assert (spent.compute_s, spent.awaited, spent.awaited_s) == (3.0, SHARD, pytest.approx(LONG_S))
    while driver.end is None:
        driver.step()
    (spent,) = made.read(clock.now, PIDS)
    assert (spent.wait_s, spent.apply_s) == (pytest.approx(3.5 - LONG_S), 0.5)
    assert (spent.awaited, spent.awaited_s) == (SHARD, pytest.approx(3.5 - LONG_S))
