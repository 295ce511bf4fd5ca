"""A member whose work is done by a thread, while its process hears what is said."""

import threading

from squall.protocol.effects import Effect, LeaveGroup, Payload, Step
from squall.protocol.events import Event
from squall.protocol.nodes import Node
from squall.runtime.collective.apart import Apart
from squall.runtime.driver import Host

OPEN_S = 0.1  # until what is under way may end: who does not wait for it is there before that


class OneAtATime(Host):
    """Its parts have one way to each other, so that no two threads may be at work here."""

    def __init__(self) -> None:
        self.begun, self.gate, self.done = threading.Event(), threading.Event(), list[str]()
        self._free = threading.Lock()

    def perform(self, effect: Effect, now: float) -> Event | None:
        with self._alone():
            self.begun.set()
            assert self.gate.wait(30)
            self.done.append(type(effect).__name__)
        return None

    def attach(self, payload: Payload) -> None:
        with self._alone():
            self.done.append(payload.kind)

    def _alone(self) -> threading.Lock:
        assert not self._free.locked(), "two threads are at work"
        return self._free


def test_weights_are_shown_behind_what_is_under_way() -> None:
    """A replica that leaves its group may have to show its weights before its parts have done so."""
    host = OneAtATime()
    apart = Apart(host)
    apart.perform(Step(1, 0, 0, 8, 8), 0.0)
    assert host.begun.wait(30)
    apart.perform(LeaveGroup(), 0.0)  # behind the step
    threading.Timer(OPEN_S, host.gate.set).start()
    apart.attach(Payload("weights", Node("evaluator", 0), 0, 1, 0, 0))
    assert host.done == ["Step", "LeaveGroup", "weights"]
    apart.finish()
    assert not apart.busy
