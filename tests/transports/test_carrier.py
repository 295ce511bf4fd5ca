"""The thread that carries between machines: its process does not wait for one that is not there any more."""

from __future__ import annotations

import os
import select
import signal

import pytest

from squall.protocol.events import PeerReached
from squall.transports.carrier import Carrier
from squall.transports.certificates import Identity
from squall.transports.streams import Streams
from tests.transports.test_streams import REPLICA, SHARD, SOON_S, End, turns


class Mistaken(Streams):
    def turn(self, now: float) -> None:
        raise ZeroDivisionError


def test_a_mistake_in_the_thread_is_raised_in_the_process() -> None:
    identity = Identity.new_root("a run").issue("machine-0", authority=True)
    end = End(identity)
    carrier = Carrier(Mistaken(identity.contexts(), end, {}))
    watched = select.poll()
    watched.register(carrier, select.POLLIN)
    assert watched.poll(1000 * SOON_S)
    with pytest.raises(RuntimeError, match="nothing is carried") as raised:
        carrier.take()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    carrier.close()
    end.streams.close()


def test_a_process_that_dies_is_seen_at_once_though_what_it_has_forked_lives() -> None:
    """Such as the workers of a DataLoader."""
    machine = Identity.new_root("a run").issue("machine-0", authority=True)
    shard = End(machine.issue(str(SHARD)))
    address = shard.address
    told, tells = os.pipe()
    if not (replica := os.fork()):
        carrier = Carrier(Streams(machine.issue(str(REPLICA)).contexts(), End(machine), {SHARD: address}))
        while not isinstance(carrier.take(), PeerReached):
            select.select([carrier], [], [])
        worker = os.fork()
        os.write(tells, (worker or os.getpid()).to_bytes(4))
        signal.pause()
    turns(shard, until=lambda: bool(shard.events))
    worker = {int.from_bytes(os.read(told, 4)) for _ in range(2)}.pop()
    os.kill(replica, signal.SIGKILL)
    os.waitpid(replica, 0)
    turns(shard, until=lambda: not shard.streams._streams)
    os.kill(worker, signal.SIGKILL)
    shard.streams.close()
    for end in (told, tells):
        os.close(end)
