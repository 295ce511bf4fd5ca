"""The thread that carries between machines: its process does not wait for one that is not there any more."""

from __future__ import annotations

import select

import pytest

from squall.transports.carrier import Carrier
from squall.transports.certificates import Identity
from squall.transports.streams import Streams
from tests.transports.test_streams import SOON_S, End


class Mistaken(Streams):
    def turn(self, now: float) -> None:
        raise ZeroDivisionError


def test_a_mistake_in_the_thread_is_raised_in_the_process() -> None:
    identity = Identity.new_root("a run").issue("machine-0", authority=True)
    carrier = Carrier(Mistaken(identity.contexts(), End.places, lambda authority, node: True, {}))
    watched = select.poll()
    watched.register(carrier, select.POLLIN)
    assert watched.poll(1000 * SOON_S)
    with pytest.raises(RuntimeError, match="nothing is carried") as raised:
        carrier.take()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    carrier.close()
