"""What a shard makes of pushes whose parts bring their own of them, and what such a part sends and takes."""

import pytest

from squall.protocol.effects import Apply, Effect, Forget, Payload, Send, UseWeights
from squall.protocol.events import MessageArrived, Moved, PushAsked
from squall.protocol.machine import Refusal
from squall.protocol.messages import Exchange, Exchanged, Member, Parcel, View
from squall.protocol.nodes import COORDINATOR, Node, part_nodes
from squall.protocol.nursery_messages import Placed
from squall.protocol.parcels import Parcelled, PartMachine
from squall.protocol.sandblaster.messages import PortionsTaken, PushPortions
from squall.protocol.sandblaster.shard import BatchShard
from tests.protocol.steps import R0, R1, kinds, push, sent, shard_of, tell

PARTS = 3
SECOND, THIRD = part_nodes(R0, PARTS)


def parcelled() -> Parcelled:
    return Parcelled(shard_of(R0, R1), PARTS, (SECOND, THIRD))


def whole_push(clock: int, basis: int = 0) -> Exchange:
    return Exchange(clock, 0, 0, basis, 8, batches=1)


def weights_of(effects: list[Effect]) -> list[tuple[Node, Payload | None]]:
    return [(e.to, e.payload) for e in effects if isinstance(e, Send) and e.payload is not None]


@pytest.mark.parametrize("last", ["the push", "a parcel"])
def test_a_push_is_applied_when_all_of_it_is_there(last: str) -> None:
    shard = parcelled()
    arriving = [(R0, whole_push(1)), (SECOND, Parcel(1, 0)), (THIRD, Parcel(1, 0))]
    arriving = arriving[1:] + arriving[:1] if last == "the push" else arriving
    *before, found = [tell(shard, sender, message) for sender, message in arriving]
    assert not any(before)
    assert kinds(found) == ["Apply", "Parcel", "Parcel", "Exchanged"]


def test_a_parcel_of_another_push_is_not_of_this_one() -> None:
    shard = Parcelled(shard_of(R0, R1), 2, part_nodes(R0, 2))
    (part,) = part_nodes(R0, 2)
    tell(shard, part, Parcel(1, 0))
    tell(shard, R0, whole_push(1))
    assert not tell(shard, R0, whole_push(2, basis=1))
    assert not tell(shard, part, Parcel(2, 1))  # another buffer
    assert kinds(tell(shard, part, Parcel(2, 0)))[0] == "Apply"


def test_weights_go_to_each_part_and_to_the_replica_last() -> None:
    """Each payload is what of the range is its receiver's: a replica beside a part may move its own at once."""
    payloads = weights_of(tell(parcelled(), R0, Exchange(0, -1, 1)))
    assert payloads == [
        (to, Payload("weights", R0, 1, 0, 0, 0, part)) for to, part in ((SECOND, 1), (THIRD, 2), (R0, 0))
    ]


def test_what_has_no_gradient_waits_for_none() -> None:
    shard = parcelled()
    assert sent(tell(shard, R0, Exchange(1, 0, 0, 0, 0)), Exchanged)  # a replica without data takes part


def test_a_replica_in_one_piece_has_no_parcels() -> None:
    assert kinds(tell(parcelled(), R1, push(1))) == ["Apply", "Exchanged"]
    (_, payload), *others = weights_of(tell(parcelled(), R1, push(1)))
    assert payload is not None
    assert (payload.part, others) == (-1, [])


def test_a_replica_that_was_placed_later_has_its_parts_too() -> None:
    shard = Parcelled(shard_of(R0, R1), PARTS, ())
    for part in (SECOND, THIRD):
        assert kinds(tell(shard, COORDINATOR, Placed(part, 1))) == ["Admit"]
    assert not tell(shard, R0, whole_push(1))


def test_parts_go_with_their_replica() -> None:
    shard = parcelled()
    tell(shard, R0, whole_push(1))
    tell(shard, SECOND, Parcel(1, 0))
    effects = tell(shard, COORDINATOR, View(2, (Member(1, 0, 0),)))
    assert [e.node for e in effects if isinstance(e, Forget)] == [SECOND, THIRD, R0]
    assert not tell(shard, THIRD, Parcel(1, 0))
    assert not any(isinstance(effect, Apply) for effect in effects)


def test_who_pushes_what_cannot_be_is_refused_and_not_the_part_that_came_last() -> None:
    shard = Parcelled(shard_of(R0, R1), 2, part_nodes(R0, 2))
    tell(shard, R0, whole_push(7))
    with pytest.raises(Refusal, match="it pushes for clock 7") as refusal:
        shard.on(MessageArrived(part_nodes(R0, 2)[0], Parcel(7, 0)), 0.0)
    assert refusal.value.of == R0


def test_who_pushes_again_before_the_last_push_is_whole_is_refused() -> None:
    shard = parcelled()
    tell(shard, R0, whole_push(1))
    with pytest.raises(Refusal, match="pushes again"):
        shard.on(MessageArrived(R0, whole_push(2)), 0.0)


def lying(shard: Parcelled) -> set[tuple[Node, int, int]]:
    """Whose, of which clock, and which part."""
    return {(each.owner, each.clock, each.part) for each in shard.waiting()}


def test_what_parts_have_brought_waits_until_it_is_applied() -> None:
    """A backup that begins then is given it: what has come of a push, and then all of that, part by part."""
    shard = Parcelled(shard_of(R0, R1, gather="mean"), PARTS, (SECOND, THIRD))
    tell(shard, THIRD, Parcel(1, 0))
    assert lying(shard) == {(R0, 1, 2)}
    tell(shard, R0, whole_push(1))
    assert lying(shard) == {(R0, 1, 2), (R0, 1, 0)}
    tell(shard, SECOND, Parcel(1, 0))
    assert lying(shard) == {(R0, 1, part) for part in range(PARTS)}
    tell(shard, SECOND, Parcel(2, 1))  # of its next push, as far as this knows
    assert len(shard.waiting()) == len(lying(shard)) == PARTS + 1
    assert "Apply" in kinds(tell(shard, R1, push(1)))
    assert lying(shard) == {(R0, 2, 1)}


def test_each_part_brings_its_own_numbers() -> None:
    shard = parcelled()
    assert shard.brings(THIRD, Parcel(1, 0)) == Payload("gradient", R0, 0, 1, 0, part=2)
    assert shard.brings(R0, whole_push(1)) == Payload("gradient", R0, 0, 1, 0, part=0)
    assert shard.brings(R1, push(1)) == Payload("gradient", R1, 0, 1, 0)
    assert shard.brings(part_nodes(R1, PARTS)[0], Parcel(1, 0)) is None, "it has none"
    assert shard.brings(R0, Exchange(0, -1, 1)) is None


def test_a_shard_that_goes_on_elsewhere_hears_those_alone_that_begin_then() -> None:
    """The others' parts call it where it was."""
    shard, later = parcelled(), Node("replica", 2)
    for part in part_nodes(later, PARTS):
        tell(shard, COORDINATOR, Placed(part, 1))
    tell(shard, R0, whole_push(1))
    effects = shard.on(Moved(), 0.0)
    assert [effect.node for effect in effects if isinstance(effect, Forget)] == [R0, SECOND, THIRD]
    assert not tell(shard, SECOND, Parcel(1, 0))
    assert not tell(shard, THIRD, Parcel(1, 0))
    tell(shard, COORDINATOR, View(2, (Member(1, 0, 0), Member(2, 0, 0))))
    assert not tell(shard, later, whole_push(1))
    assert shard.held


def test_portions_wait_for_parcels_as_well() -> None:
    shard = BatchShard(0)
    shard.on(MessageArrived(COORDINATOR, View(1, (Member(0, 0, 0),))), 0.0)
    whole = Parcelled(shard, 2, part_nodes(R0, 2))
    assert not tell(whole, R0, PushPortions(1, 0, (0,), 1))  # of an evaluation that is over
    assert sent(tell(whole, part_nodes(R0, 2)[0], Parcel(1, 0)), PortionsTaken) == [(R0, PortionsTaken(1, (0,)))]


def test_a_part_brings_its_own_to_each_shard() -> None:
    part = PartMachine(THIRD, PARTS, 2, 2)
    assert part.on(PushAsked(4, 1), 0.0) == [
        Send(Node("shard", shard), Parcel(4, 1), Payload("gradient", R0, 1, 4, shard, part=2)) for shard in range(2)
    ]


def test_a_part_uses_weights_that_have_come_from_all_shards() -> None:
    part = PartMachine(SECOND, PARTS, 2, 2)
    first, second = Node("shard", 0), Node("shard", 1)
    assert not tell(part, first, Parcel(0, 0))
    assert tell(part, second, Parcel(0, 0)) == [UseWeights(0)]
    assert not tell(part, second, Parcel(1, 1))
    assert tell(part, first, Parcel(1, 1)) == [UseWeights(1)]


@pytest.mark.parametrize(
    ("before", "parcel"),
    [
        ([], Parcel(0, 2)),  # a buffer that is not there
        ([(0, Parcel(0, 0))], Parcel(0, 0)),  # again, before the other shard has answered
        ([(1, Parcel(0, 0))], Parcel(1, 0)),  # of another exchange
        ([(1, Parcel(0, 0))], Parcel(0, 1)),
    ],
)
def test_weights_that_were_not_asked_for_are_refused(before: list[tuple[int, Parcel]], parcel: Parcel) -> None:
    part = PartMachine(SECOND, PARTS, 2, 2)
    for shard, earlier in before:
        tell(part, Node("shard", shard), earlier)
    with pytest.raises(Refusal, match="it sends weights"):
        part.on(MessageArrived(Node("shard", 0), parcel), 0.0)


def test_parts_of_a_replica_that_never_joined_are_forgotten_when_another_takes_its_place() -> None:
    shard = parcelled()
    failed, again = (part_nodes(Node("replica", 2, incarnation), PARTS) for incarnation in (0, 1))
    for part in failed:
        tell(shard, COORDINATOR, Placed(part, 1))
    effects = [effect for part in again for effect in tell(shard, COORDINATOR, Placed(part, 1))]
    assert [e.node for e in effects if isinstance(e, Forget)] == list(failed)
    tell(shard, R0, whole_push(1))
    assert not tell(shard, COORDINATOR, Placed(part_nodes(Node("replica", 0, 1), PARTS)[0], 1))[1:], (
        "one in the view stays"
    )
