"""That `check` sees what is wrong: it is what the other tests rely on."""

from collections.abc import Callable
from typing import Any

import pytest

from squall.protocol.check import check
from squall.protocol.evaluator import Evaluator
from squall.protocol.events import FrameArrived, Started
from squall.protocol.frames import Frame
from squall.protocol.leases import Leases, Limits
from squall.protocol.ledger import Range
from squall.protocol.link import Linked
from squall.protocol.messages import Join, Lease
from squall.protocol.nodes import Node
from tests.protocol.desk import Desk
from tests.protocol.office import Office
from tests.protocol.steps import R0, R1, push, shard_of, tell


def leases() -> Leases:
    ledger = Leases(100, 10, Limits())
    for node in (R0, R1):
        ledger.take(node, 3, 0.0)
    ledger.give_back(R1)
    return ledger


def coordinator() -> Any:
    office = Office()
    a, _ = office.join(0, 1)
    office.ask(a)
    return office.machine


def replica() -> Any:
    return Desk().welcome().grant(3).computed().replica


def shard() -> Any:
    machine = shard_of(R0, R1, max_delay=0)
    tell(machine, R0, push(1))
    return machine


def linked() -> Linked:
    machine = Linked(Evaluator(Node("evaluator", 2), 1))
    machine.on(Started(), 0.0)
    machine.on(FrameArrived(R0, Frame(3, 0, Join(1))), 0.0)
    return machine


def only_link(machine: Linked) -> Any:
    return next(iter(machine._links.values()))


Break = Callable[[Any], Any]
BREAKS: list[tuple[Callable[[], Any], Break, str]] = [
    (leases, lambda m: m.returned.append(Range(0, 20, 40)), "disjoint"),
    (leases, lambda m: m.returned.clear(), "what was dealt"),
    (leases, lambda m: setattr(m, "cursor", 20), "dealt before"),
    (leases, lambda m: m.returned.insert(0, Range(0, 90, 90)), "not empty"),
    (coordinator, lambda m: m.leases.returned.append(Range(0, 0, 10)), "disjoint"),
    (coordinator, lambda m: m.members.live.pop(R0), "held by members"),
    (coordinator, lambda m: m._requests.update({Node("replica", 7): 1}), "requests come from live"),
    (coordinator, lambda m: m.members.live.update({Node("replica", 0, 1): 0}), "one live replica a slot"),
    (coordinator, lambda m: m.members._departing.update({R1: 1}), "nobody is live and departing"),
    (coordinator, lambda m: m.members._joining.update({R1: 1}), "not seen yet"),
    (replica, lambda m: (m._exchanges._answers.clear(), setattr(m._exchanges, "missing", 0)), "is awaited"),
    (replica, lambda m: setattr(m._exchanges, "missing", 3), "are counted"),
    (replica, lambda m: setattr(m, "_batch", object()), "computes or exchanges"),
    (replica, lambda m: setattr(m._exchanges, "_gradient", 1), "1 buffers"),
    (replica, lambda m: setattr(m._exchanges, "clock", -1), "before Welcome"),
    (shard, lambda m: m._waiting.update({9: {Node("replica", 0, 1): push(9)}}), "only live replicas wait"),
    (shard, lambda m: setattr(m._replicas[R1], "clock", 1), "too far ahead"),
    (shard, lambda m: setattr(m._replicas[R1], "clock", -1), "from the entry"),
    (shard, lambda m: m._rounds.update({0: {R0: push(0)}}), "was applied"),
    (shard, lambda m: setattr(m, "_replicas", dict(reversed(m._replicas.items()))), "slot order"),
    (linked, lambda m: only_link(m).unacked.append((9, None)), "newest"),
    (linked, lambda m: setattr(only_link(m), "resend_due", None), "sent again"),
    (linked, lambda m: setattr(m, "_check_at", None), "wakes the node"),
    (linked, lambda m: m._links[R0].early.update({1: Frame(1, 0)}), "wait for a gap"),
    (linked, lambda m: m.machine._awaited.update({R0: None}), "for an evaluation"),
]


@pytest.mark.parametrize(("make", "harm", "complaint"), BREAKS, ids=[complaint for *_, complaint in BREAKS])
def test_what_is_broken_is_named_and_the_state_told(make: Callable[[], Any], harm: Break, complaint: str) -> None:
    machine = make()
    check(machine)
    harm(machine)
    with pytest.raises(AssertionError, match=complaint) as caught:
        check(machine)
    assert "\n    " in str(caught.value)


def test_the_story_names_the_node_and_its_fields() -> None:
    machine = shard()
    machine._waiting[0] = {R1: push(0)}
    with pytest.raises(AssertionError, match=r"(?s)shard-0\.0: .*version = 1.*_waiting = \{"):
        check(machine)


def test_a_held_lease_is_part_of_the_ledger() -> None:
    ledger = leases()
    ledger.held[0].lease = Lease(0, 0, 40, 50)
    with pytest.raises(AssertionError, match="from its start"):
        check(ledger)
