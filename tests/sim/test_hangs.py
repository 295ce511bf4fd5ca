"""Processes that hang in worlds, and mistakes in who is taken for one."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from squall.protocol import hangs
from squall.protocol.effects import KillMember
from squall.protocol.hangs import TIMES, Hangs, Sight
from squall.protocol.machine_staffing import MachineStaffing
from squall.protocol.nodes import COORDINATOR
from squall.protocol.nursery_messages import ProcessLost
from squall.sim.proof.chaos import Chaos, chaos
from squall.sim.proof.faults import Hang, Role, Suspend
from squall.sim.proof.hung import AFTER_S, SLOW_S
from squall.sim.proof.trial import Seen, Trial
from tests import deep
from tests.sim.test_planted_faults import Patch, Planted, catch, wrapped


def worlds() -> Iterator[Chaos]:
    """Those in which nurseries look for who hangs."""
    return (world for world in map(chaos, itertools.count()) if world.watched)


def test_who_hangs_is_replaced_in_many_worlds_and_who_is_slow_is_not() -> None:
    """All invariants hold in these worlds; without anybody who looks many of them would never end."""
    killed, slow = Counter[tuple[str, bool]](), 0
    for world in itertools.islice(worlds(), 12):
        seen: list[Seen] = []
        Trial(world, seen.append).go()
        hung = [what for _, _, what in seen if isinstance(what, KillMember) and what.why]
        killed.update((what.node.role, "stopped" in what.why) for what in hung)
        slow += world.paces[0] >= SLOW_S
    assert {role for role, _ in killed} >= {"shard", "replica", "evaluator"}
    assert {stopped for _, stopped in killed} == {True, False}
    assert slow


QUIET = dataclasses.replace(
    chaos(0), faults=(), machines=1, strategy="downpour", replicas=2, shards=1, paces=(SLOW_S, 0.01), watched=True,
    epochs=1, examples=60, batch_size=4, snapshot_every_s=0.02,
)  # fmt: skip
ASLEEP = dataclasses.replace(QUIET, paces=(SLOW_S, SLOW_S), faults=(Suspend(200, 2 * TIMES * SLOW_S, 0),))


def test_a_coordinator_that_hangs_is_succeeded() -> None:
    seen: list[Seen] = []
    world = dataclasses.replace(QUIET, faults=(Hang(60, AFTER_S, Role("coordinator"), stopped=True),))
    assert Trial(world, seen.append).go().lives == 1
    killed = [what for _, _, what in seen if isinstance(what, KillMember)]
    assert [what.node for what in killed] == [COORDINATOR]


def test_a_machine_that_sleeps_loses_nobody() -> None:
    seen: list[Seen] = []
    assert Trial(ASLEEP, seen.append).go().happened["Suspend"] == 1
    assert not [what for _, _, what in seen if isinstance(what, KillMember)]


def changed(**fields: Any) -> Any:
    """Looks at processes as if they all were so."""

    def look(original: Any, watch: Hangs, sights: Iterable[Sight], *given: Any) -> Any:
        return original(watch, [msgspec.structs.replace(sight, **fields) for sight in sights], *given)

    return look


def unnoticed(original: Any, staffing: MachineStaffing, nursery: Any, message: Any, *given: Any) -> None:
    if not (isinstance(message, ProcessLost) and message.stood_s):
        original(staffing, nursery, message, *given)


def setting(name: str, value: float) -> Patch:
    return lambda patch: patch.setattr(hangs, name, value)


def as_any_step(patch: pytest.MonkeyPatch) -> None:
    """The first steps are, also where nobody has seen one whole."""

    def look(original: Any, watch: Hangs, sights: Sequence[Sight], *given: Any) -> Any:
        for sight in sights:
            watch._usual.setdefault((sight.node.role, sight.node.index), 0.0)
        return original(watch, sights, *given)

    setting("FIRST_STEPS", 0)(patch)
    wrapped(Hangs, "look", look)(patch)


def whole(original: Any, watch: Hangs, *given: Any) -> Any:
    """Whoever looked away meanwhile."""
    return dataclasses.replace(original(watch, *given), whole=True)


PLANTED: dict[str, Planted] = {
    "nobody is killed": Planted(wrapped(Hangs, "look", lambda *given: []), 10, "I22"),
    "who waits for others is taken for one that hangs": Planted(
        wrapped(Hangs, "look", changed(work="step")), 10, "I22"),
    "who is stopped is not": Planted(wrapped(Hangs, "look", changed(state="runs")), 10, "I22"),
    "what a process usually takes does not count": Planted(setting("TIMES", 1.0), 30, "I22"),
    "the first steps have no more time than others": Planted(as_any_step, 30, "I22"),
    "who hung is not missed": Planted(wrapped(MachineStaffing, "_on_nursery", unnoticed), 10, "I5"),
}  # fmt: skip


@pytest.mark.parametrize("name", deep.sweep(list(PLANTED), 1))
def test_a_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    catch(PLANTED[name], monkeypatch, worlds())


def test_a_sleep_that_is_held_against_others_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    catch(Planted(setting("ABSENT_S", 1e9), 1, "I22"), monkeypatch, [ASLEEP])


def test_a_step_of_which_a_part_was_missed_and_that_counts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    catch(Planted(wrapped(Hangs, "_see", whole), 1, "I22"), monkeypatch, [chaos(2808029852)])
