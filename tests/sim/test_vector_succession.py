"""Mistakes in how shards of L-BFGS are succeeded, put into their machine and their vectors: each is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from squall.protocol.effects import AddPortions, Effect
from squall.protocol.events import Event, Started
from squall.protocol.sandblaster.messages import Calculation, Combine
from squall.protocol.sandblaster.shard import BatchShard
from squall.runtime.vectors import Changes
from squall.sim.proof.batch_phantoms import VectorPhantom
from tests.sim.test_planted_faults import Planted, catch, wrapped


def not_asked_again(original: Any, shard: BatchShard, event: Event, now: float) -> list[Effect]:
    if isinstance(event, Started):
        shard._asked.clear()
    answer: list[Effect] = original(shard, event, now)
    return answer


def from_the_start(original: Any, changes: Changes, asked: Calculation) -> Iterator[Combine | None]:
    """Who is asked again makes all changes again."""
    changes._words[0] = 0
    yield from original(changes, asked)


def marked_too_early(original: Any, changes: Changes, asked: Calculation) -> Iterator[Combine | None]:
    """As if a change were made when it is begun."""
    number, made = divmod(changes._words[0], 256)
    if number > asked.number:
        return
    opening = () if asked.opens is None else (None,)
    for place, change in enumerate((*asked.combine, *opening)):
        if number < asked.number or place >= made:
            changes._words[0] = asked.number << 8 | place + 1
            yield change


def added_whenever_asked(original: Callable[..., Any], shard: VectorPhantom, effect: Effect, now: float) -> Any:
    if isinstance(effect, AddPortions):
        effect = replace(effect, number=shard._changes.added + 1)
    return original(shard, effect, now)


PLANTED: dict[str, Planted] = {
    "a calculation that was not answered is not asked for again": Planted(
        wrapped(BatchShard, "on", not_asked_again), 60, "I5", of="sandblaster"),
    "a calculation is made again from its start": Planted(
        wrapped(Changes, "left", from_the_start), 20, "I6", of="sandblaster", first=1100),
    "a change counts as made when it is begun": Planted(
        wrapped(Changes, "left", marked_too_early), 60, "I5 I6", of="sandblaster"),
    "a push that was added and not told is added again": Planted(
        wrapped(VectorPhantom, "perform", added_whenever_asked), 60, "I6", of="sandblaster"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    catch(PLANTED[name], monkeypatch)
