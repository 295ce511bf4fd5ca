"""Shards that die inside an update and go back to a copy, in worlds, and mistakes in what follows."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from squall.protocol.effects import Effect
from squall.protocol.events import CopyMade, NumbersTorn
from squall.protocol.ledger import Range
from squall.protocol.loop_coordinator import LoopCoordinator
from squall.protocol.loss_messages import UpdatesLost
from squall.protocol.losses import Losses
from squall.protocol.messages import Lease
from squall.protocol.nodes import Node
from squall.protocol.notes import UpdatesLost as LossTold
from squall.protocol.shard import Shard
from squall.protocol.snapshot_rounds import SnapshotRounds
from squall.protocol.succession import Journaled
from squall.protocol.unsaved import GoBack, Unsaved
from squall.sim.proof.chaos import chaos
from squall.sim.proof.trial import Seen, Trial
from tests import deep
from tests.sim.test_planted_faults import Planted, catch, wrapped


def test_shards_go_back_in_many_worlds_and_what_they_lost_is_trained_again() -> None:
    """All invariants hold in these worlds, and some of what is lost was told as trained before, and some after."""
    told: list[LossTold] = []
    gone_back = 0
    for seed in range(20):
        seen: list[Seen] = []
        Trial(chaos(seed), seen.append).go()
        told += [what for _, _, what in seen if isinstance(what, LossTold)]
        gone_back += sum(isinstance(what, GoBack) for _, _, what in seen)
        if gone_back >= len(told) >= 5 and sum(bool(note.ranges) for note in told) >= 3:
            return
    pytest.fail(f"shards go back {gone_back} times, which is told {len(told)} times")


def never(original: Any, *given: Any) -> None:
    """It does nothing."""


def silently(original: Any, unsaved: Unsaved, torn: NumbersTorn, effects: list[Effect]) -> Any:
    return original(unsaved, torn, [])


def all_but_the_first(
    original: Any, coordinator: LoopCoordinator, shard: Node, lost: UpdatesLost, *given: Any
) -> None:  # fmt: skip
    original(coordinator, shard, replace(lost, covers=lost.covers[1:]), *given)


def one_too_many(original: Any, unsaved: Unsaved, copy: CopyMade, effects: list[Effect]) -> None:
    original(unsaved, CopyMade(copy.version + 1), effects)


def nothing_within(original: Any, losses: Losses, lease: Lease, start: int, stop: int) -> list[Range]:
    return []


def as_if_it_were_the_first(original: Any, losses: Losses, shard: int, lease: Lease, upto: int) -> Any:
    losses._lost.pop(lease.id, None)
    return original(losses, shard, lease, upto)


def without_the_copy(original: Any, linked: Journaled, now: float) -> list[Effect]:
    original(linked, now)
    return []


def machine_and_all(original: Any, shard: Shard, event: Any, now: float) -> list[Effect]:
    effects: list[Effect] = original(shard, event, now)
    if isinstance(event, NumbersTorn):
        shard.version -= event.last - event.version
    return effects


def at_once(original: Any, coordinator: LoopCoordinator) -> Any:
    return coordinator.leases.over()


PLANTED: dict[str, Planted] = {
    "what is lost is not told": Planted(wrapped(Unsaved, "lost", silently), 60, "I1"),
    "too little is dealt again": Planted(wrapped(LoopCoordinator, "_on_updates_lost", all_but_the_first), 60, "I1"),
    "a copy counts before it is whole": Planted(wrapped(Unsaved, "kept", one_too_many), 200, "I7"),
    "what the copy has is dealt again": Planted(wrapped(Losses, "kept", never), 200, "I4"),
    "what is told later as trained stays so": Planted(wrapped(Losses, "within", nothing_within), 200, "I1"),
    "what two shards have lost is dealt twice": Planted(wrapped(Losses, "_new", as_if_it_were_the_first), 600, "I4"),
    "torn numbers are gone on with": Planted(wrapped(Journaled, "_go_back", without_the_copy), 60, "I6"),
    "the machine goes back as well": Planted(wrapped(Shard, "on", machine_and_all), 60, "I6"),
    "labels count what is lost": Planted(wrapped(Journaled, "_reduce", never), 200, "I7"),
    "a snapshot lacks what its ledger has": Planted(wrapped(SnapshotRounds, "begin_anew", never), 600, "I1"),
    "the run ends before a successor has said what it lost": Planted(
        wrapped(LoopCoordinator, "_over", at_once), 60, "I4"),
}  # fmt: skip


@pytest.mark.parametrize("name", deep.sweep(list(PLANTED), 1))
def test_a_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    catch(PLANTED[name], monkeypatch)
