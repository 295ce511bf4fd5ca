"""A deputy asks nurseries to follow it, and whom it has asked it cannot tell that all is well again."""

from types import SimpleNamespace

import pytest

from squall.protocol.copy_messages import Entry
from squall.protocol.deputies import Deputed, Deputies
from squall.protocol.deputy import Deputy
from squall.protocol.effects import Effect, End, Forget, Send
from squall.protocol.epoch_messages import Follow
from squall.protocol.events import MessageArrived
from squall.protocol.heartbeats import Pulse
from squall.protocol.nodes import COORDINATOR, DEPUTY, Node
from squall.protocol.placing import Placing
from squall.protocol.policy import MachineRoom, Policy
from tests.protocol.steps import give


def silent(accused: bool = False) -> tuple[Deputy, list[Effect]]:
    """A deputy that could take over, when the coordinator has been silent for too long; and what it does."""
    deputy = Deputy(DEPUTY, 1, pulse=Pulse(every_s=1.0, lost_after_s=5.0))
    deputies = SimpleNamespace(whole=True, accused=accused, voters=(0, 1, 2))
    deputy._backup.copied = SimpleNamespace(machine=SimpleNamespace(deputies=deputies, home=0))  # type: ignore[assignment]
    deputy._heartbeats.heard(COORDINATOR, 0.0)
    return deputy, [effect for now in range(1, 7) for effect in deputy._look(float(now))]


def test_it_asks_each_nursery_but_the_coordinators() -> None:
    _, effects = silent()
    follow = Follow(DEPUTY)
    assert effects[:2] == [Send(Node("nursery", 1), follow), Send(Node("nursery", 2), follow)]


def test_who_has_asked_and_hears_the_coordinator_again_ends_as_votes_are_for_ever() -> None:
    deputy, _ = silent()
    assert give(deputy, MessageArrived(COORDINATOR, Entry(1, 0, b"", 0.0)), 7.0) == [
        Forget(COORDINATOR),
        End("finished"),
    ]


def test_it_does_not_take_over_on_a_machine_of_which_something_was_refused() -> None:
    assert silent(accused=True)[1] == []


@pytest.mark.parametrize("machines", [2, 3, 4])
def test_others_could_go_on_where_they_are_most_until_the_deputy_is_to_go(machines: int) -> None:
    policy = Policy(1, 1, rooms=tuple(MachineRoom(machine, 1) for machine in range(machines)), copies=2, deputy=True)
    placing = Placing(policy)
    deputies = Deputies(policy, placing)
    placing.on[DEPUTY] = 1
    effects: list[Effect] = []
    deputies._begin(DEPUTY)
    deputies.kept(DEPUTY, effects)
    told = [effect for effect in effects if isinstance(effect, Deputed)]
    assert told == ([] if machines == 2 else [Deputed(True)])
    deputies.part("another machine has joined", 0.0)
    assert Deputed(False) in deputies.ask(0.0)
