"""What a seed decides about machines: how many there are, who begins on which, and what befalls them."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from squall.protocol.heartbeats import Pulse
from squall.protocol.nodes import Node, part_nodes
from squall.protocol.placing import places_taken
from squall.protocol.policy import MachineRoom
from squall.runtime.placement import Parts, place
from squall.sim.proof.faults import (
    Fault,
    Jam,
    Kill,
    Lie,
    MachineComes,
    MachineGone,
    MachineLeaves,
    Partition,
    Pause,
    Role,
    UserStop,
)

if TYPE_CHECKING:
    from squall.sim.proof.chaos import Chaos

MACHINES = (1, 1, 1, 2, 2, 3)  # of a world, equally likely each
FAULTS_AT_MOST = 4  # of machines, in a world of several
LIES, JAMS = 0.15, 0.15  # of the worlds of several machines have a process that lies, and a link that is full
SLOW = 0.5  # of the user's stops there find a link that is full
LATE = 0.3  # of the worlds of several machines begin with a replica that has no room
MORTALITY = 0.7  # of the faults of parts are deaths
SPREAD = 0.5  # of the worlds with parts spread them on purpose, and of the replicas of others
TOGETHER = 0.2  # of the worlds with parts have those of each replica on one machine, as scripts
PARTS = (1, 1, 1, 2, 2, 3)  # of a replica in a world of several machines, equally likely each
BACKED_ELSEWHERE = 0.9  # of the backups are on another machine than their shards
PULSE = Pulse(every_s=0.25, lost_after_s=3.0)  # links send again after 1 s, and then after 2


def machines_of(seed: int) -> int:
    return random.Random(f"{seed} machines").choice(MACHINES)  # of its own: worlds of one machine stay as they were


def parts_of(seed: int) -> Parts:
    chance = random.Random(f"{seed} parts")  # of its own, as above
    parts = Parts(chance.choice(PARTS), chance.random() < SPREAD)
    return parts._replace(spread=None) if random.Random(f"{seed} together").random() < TOGETHER else parts


@cache
def rooms(
    seed: int, machines: int, replicas: int, shards: int, parts: Parts, copies: int = 1, deputy: bool = False,
    keeps: bool = False,
) -> tuple[MachineRoom, ...]:  # fmt: skip
    """With a deputy any machine may be the last one, and has room for a replica.

    Where the best weights are kept, it is in the run's directory: the evaluator is on the coordinator's machine.
    """
    chance = random.Random(f"{seed} rooms")
    on: list[list[Node]] = [[] for _ in range(machines)]
    late = replicas - 1 if chance.random() < LATE else replicas  # this one waits for room
    for node in (*(Node("shard", i) for i in range(shards)), Node("evaluator", replicas)):
        chosen = chance.choice((0, 0, *range(machines)))
        beside = not shards or (keeps and node.role == "evaluator")
        on[0 if beside else chosen].append(node)  # replicas without shards show their weights there
    for slot in range(max(1, late)):
        on[chance.randrange(machines)].append(Node("replica", slot))
        _lay_apart(Node("replica", slot), seed, on, parts)
    for index in range(shards if copies > 1 else 0):
        backs = random.Random(f"{seed} backup {index}")
        others = [nodes for nodes in on if Node("shard", index) not in nodes]
        backs.choice(others if backs.random() < BACKED_ELSEWHERE else on).append(Node("backup", index))
    placed = {node for nodes in on for node in nodes}
    held = [sum(places_taken(node, placed, parts.number) for node in nodes) for nodes in on]
    spare = [chance.choice((0, 0, 1, 2)) for _ in on]
    if late < replicas:
        spare = [0] * machines
    if held[0] < parts.number:
        spare[0] = parts.number - held[0]
    if deputy:
        spare = [max(more, parts.number - has) for more, has in zip(spare, held)]
    return tuple(MachineRoom(i, held[i] + spare[i], tuple(on[i])) for i in range(machines))


def _lay_apart(replica: Node, seed: int, on: list[list[Node]], parts: Parts) -> None:
    chance = random.Random(f"{seed} parts of {replica}")
    if parts.spread is not None and (parts.spread or chance.random() < SPREAD):
        for part in part_nodes(replica, parts.number):
            on[chance.randrange(len(on))].append(part)


def part_faults(seed: int, parts: Parts, replicas: int, events: int) -> tuple[Fault, ...]:
    """Of the other parts of replicas that lie on several machines; of others they come to nothing."""
    chance = random.Random(f"{seed} faults of parts")
    found: list[Fault] = []
    for _ in range(chance.randint(0, FAULTS_AT_MOST) if parts.number > 1 else 0):
        slot, part = chance.randrange(replicas), chance.randrange(1, parts.number)
        at, role = chance.randrange(events), Role("part", slot * parts.number + part)
        found.append(Kill(at, role) if chance.random() < MORTALITY else Pause(at, chance.uniform(0.1, 8.0), role))
        lie = random.Random(f"{seed} lie of {len(found)}")  # of its own, as above
        found += [Lie(lie.randrange(events), role)] if lie.random() < LIES else []
    return tuple(found)


def lies_and_jams(seed: int, machines: int, replicas: int, events: int) -> tuple[Fault, ...]:
    chance = random.Random(f"{seed} lies")  # of its own: all else of a seed's world stays as it was
    if machines == 1:
        return ()
    liars = [*(Role("replica", slot) for slot in range(replicas)), *(Role("nursery", i) for i in range(1, machines))]
    lie = Lie(chance.randrange(events), chance.choice(liars))
    jam = Jam(chance.randrange(events), chance.uniform(0.5, 10.0), chance.randrange(1, machines))
    return (*([lie] if chance.random() < LIES else []), *([jam] if chance.random() < JAMS else []))


def slow_stops(seed: int, machines: int, faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """The faults, and links on which a snapshot's files take their time when the user stops the run."""
    chance = random.Random(f"{seed} slow")  # of its own, as above
    stops = [fault.at for fault in faults if isinstance(fault, UserStop) and machines > 1 and chance.random() < SLOW]
    begin = [max(0, at - chance.randint(0, 10)) for at in stops]
    jams = [Jam(at, chance.uniform(1.0, 20.0), chance.randrange(1, machines)) for at in begin]
    return tuple(sorted((*faults, *jams), key=lambda fault: fault.at))


def without(rooms: dict[int, int], world: Chaos) -> tuple[MachineRoom, ...]:
    """What begins where when a world's run goes on with these machines, which have places for so many parts."""
    parts = world.parted
    numbers = list(rooms)
    cores = [Cores(max(1, room)) for room in rooms.values()]
    seats = place(world.recipe, cores, max(1, sum(rooms.values()) // parts.number), parts, world.copies)
    on: dict[int, list[Node]] = {machine: [] for machine in numbers}
    for (role, index), at in seats.items():
        if role != "coordinator":
            on[numbers[at]].append(Node(role, index))
    placed = {node for nodes in on.values() for node in nodes}
    held = {m: sum(places_taken(node, placed, parts.number) for node in nodes) for m, nodes in on.items()}
    return tuple(MachineRoom(m, max(held[m], room), tuple(on[m])) for m, room in rooms.items())


class Cores(NamedTuple):
    """A machine, as it is placed on."""

    cores: int
    roles: tuple[str, ...] = ("replica", "shard", "coordinator", "evaluator")


def machine_faults(seed: int, machines: int, events: int) -> tuple[Fault, ...]:
    """The first machine, which has the coordinator, is cut off with the others, and its nursery dies with it."""
    if machines == 1:
        return ()
    chance = random.Random(f"{seed} faults of machines")
    return tuple(_fault(chance, machines, events) for _ in range(chance.randint(0, FAULTS_AT_MOST)))


def _fault(chance: random.Random, machines: int, events: int) -> Fault:
    at, machine = chance.randrange(events), chance.randrange(1, machines)
    match chance.randrange(8):
        case 0 | 1 | 2 | 3:
            seconds = chance.choice((0.1, 0.1, 1.0, 5.0, 8.0, 20.0)) * chance.uniform(0.5, 1.0)
            return Partition(at, seconds, machine, chance.choice((None, None, (machine + 1) % machines)))
        case 4:
            return MachineGone(at, machine)
        case 5:
            return MachineLeaves(at, machine)
        case 6:
            return MachineComes(at, machines, chance.randint(1, 2))
    nursery, seconds = Role("nursery", machine), chance.uniform(0.1, 8.0)
    return chance.choice((Pause(at, seconds, nursery), Pause(at, seconds, Role("coordinator")), Kill(at, nursery)))
