"""Processes that stand still: which, in a world, and that those which hang are killed in time, and no others (I22)."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from squall.protocol.effects import Effect, KillMember
from squall.protocol.events import Event, ProcessesSeen
from squall.protocol.hangs import TIMES, Sight
from squall.protocol.nodes import Node
from squall.runtime.driver import DOING
from squall.runtime.world import World
from squall.runtime.world_nodes import Answer
from squall.sim.proof.broken import Broken
from squall.sim.proof.faults import Fault, Hang, Pause, Role, Suspend, UserStop

if TYPE_CHECKING:
    from squall.sim.proof.chaos import Chaos

WATCHED = 0.25  # of the worlds have nurseries that look for who hangs
AFTER_S, LOOK_EVERY_S = 2.5, 0.25  # longer than most pauses
SLOW, SLOW_S = 0.5, 1.3 * AFTER_S  # of these have a replica that takes so long for a batch
BATCHES_AT_MOST = 12  # of a world with one
SLEEPS = 0.6  # of these have a machine that stands still as a whole
HUNG = 0.5  # of the user's stops find somebody who does not answer
SLACK_S = 4 * LOOK_EVERY_S


def watched(seed: int) -> bool:
    return random.Random(f"{seed} watched").random() < WATCHED  # of its own: other worlds stay as they were


def hangs(seed: int, machines: int, others: list[Role], events: int) -> tuple[Fault, ...]:
    """Of processes, one of them in the midst of computing at most, and the sleep of a machine."""
    if not watched(seed):
        return ()
    chance = random.Random(f"{seed} hangs")
    roles = [Role("coordinator"), *others, *others]
    found: list[Fault] = [
        Hang(chance.randrange(events), AFTER_S + 2 * SLACK_S, chance.choice(roles), stopped=True)
        for _ in range(chance.randint(0, 2))
    ]
    found.append(Hang(chance.randrange(events), TIMES * SLOW_S + SLACK_S, chance.choice(others), stopped=False))
    if chance.random() < SLEEPS:
        seconds = chance.choice((1.0, 2 * AFTER_S, 2 * TIMES * SLOW_S))
        found.append(Suspend(chance.randrange(events), seconds, chance.randrange(machines)))
    return tuple(found)


def slowed(seed: int, paces: tuple[float, ...], batches: int) -> tuple[float, ...]:
    """The first replica is slow, where others do most of the work, or there is little."""
    slow = watched(seed) and batches <= BATCHES_AT_MOST and random.Random(f"{seed} slow").random() < SLOW
    return (SLOW_S, *paces[1:]) if slow else paces


def at_stops(seed: int, faults: tuple[Fault, ...], others: list[Role]) -> tuple[Fault, ...]:
    """The faults, and processes that stand still when the user stops the run, for longer than a user waits."""
    chance = random.Random(f"{seed} hung")  # of its own: all else of a seed's world stays as it was
    stops = [fault.at for fault in faults if isinstance(fault, UserStop) and chance.random() < HUNG]
    pauses = [Pause(max(0, at - chance.randint(0, 10)), 30.0, chance.choice(others)) for at in stops]
    return tuple(sorted((*faults, *pauses), key=lambda fault: fault.at))


@dataclass
class _Still:
    """A process that stands still, and not because its machine does."""

    since: float
    until: float
    stopped: bool
    by: float = math.inf  # it is to be killed


class Stillness:
    """Of one life."""

    def __init__(self, world: World, machine: Callable[[Node], int], chaos: Chaos) -> None:
        """`machine` says where a node is."""
        self._world, self._machine = world, machine
        self._patience_s = TIMES * max(AFTER_S, *chaos.paces)
        self._in_parts = chaos.parts > 1  # a replica stands still where a part of it does, or is not there
        self._still: dict[Node, _Still] = {}
        self._until = dict[Node, float]()  # who stands still, with its machine or alone, does so
        self._moved = dict[Node, float]()  # when it last did
        self._steps = Counter[Node]()
        world.on_kill.append(self._forget)
        if chaos.watched:
            self._look_again()

    def _forget(self, node: Node) -> None:
        """It is dead. A shard's successor has its name."""
        self._still.pop(node, None)
        self._until.pop(node, None)

    def cause(self, fault: Pause | Hang | Suspend) -> bool:
        """Whether a nursery is among those who stand still."""
        now, found = self._world.now, self._nodes(fault)
        for node in found:
            before = self._still.get(node)
            # Who goes on between two looks seems to stand still all along.
            goes_on = before is not None and before.stopped and before.until >= now - LOOK_EVERY_S
            began = before.since if before is not None and goes_on else now
            if isinstance(fault, Hang) and not fault.stopped and self._world.processes[node].busy_until >= now:
                began = min(began, self._moved.get(node, now))  # in the midst of a step
            seconds = math.inf if isinstance(fault, Hang) else fault.seconds
            if isinstance(fault, Suspend) and node.role != "nursery":  # which may look before
                seconds += 2 * LOOK_EVERY_S
            self._world.pause(node, seconds)
            until = self._until[node] = max(now, self._until.get(node, now)) + seconds  # added up, as the world does
            match fault:
                case Suspend() if before is not None and before.until > now:
                    before.until = until
                case Pause() if until < math.inf:
                    self._still[node] = _Still(began, until, stopped=True)
                case Hang(stopped=stopped) if before is None or before.until < math.inf:
                    nursery = self._world.processes.get(Node("nursery", self._machine(node)))
                    sees = max(now, nursery.busy_until if nursery is not None else now)  # it may stand still itself
                    by = sees + (AFTER_S if stopped else self._patience_s) + SLACK_S
                    self._still[node] = _Still(began, math.inf, stopped, by)
            if node.role == "nursery":  # meanwhile it looks at nobody
                for other, still in self._still.items():
                    still.by += (fault.seconds + SLACK_S) * (self._machine(other) == node.index)

        return any(node.role == "nursery" for node in found)

    def _nodes(self, fault: Pause | Hang | Suspend) -> list[Node]:
        there = [node for node, process in self._world.processes.items() if process.end is None]
        if isinstance(fault, Suspend):
            return [node for node in there if self._machine(node) == fault.machine]
        return [node for node in there if Role.of(node) == fault.part]

    def _look_again(self) -> None:
        self._world.at(self._world.now + LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        world = self._world
        for nursery, process in list(world.processes.items()):
            if nursery.role == "nursery" and process.end is None and process.busy_until <= world.now:
                world.post(nursery, Answer(partial(self._seen, nursery)))  # as they are when it has come to them
        self._look_again()

    def _seen(self, nursery: Node) -> Event:
        processes = self._world.processes.items()
        there = [node for node, other in processes if other.home == nursery != node and other.end is None]
        return ProcessesSeen(tuple(map(self._sight, there)), AFTER_S)

    def _sight(self, node: Node) -> Sight:
        now, moved = self._world.now, self._moved.get(node, 0.0)
        busy = now < self._world.processes[node].busy_until
        still = self._still.get(node)
        stopped = still is not None and still.stopped and now < still.until
        return Sight(node, moved, "step" if busy else "none", self._steps[node], "stopped" if stopped else "runs")

    def watch(self, node: Node, what: Event | Effect) -> None:
        now = self._world.now
        if isinstance(what, Event):
            self._moved[node] = now
        elif type(what) in DOING:
            self._steps[node] += 1
        if isinstance(what, KillMember) and what.why:
            still = self._still.get(what.node)
            waits = self._in_parts and what.node.role == "replica"
            seen_s = AFTER_S - LOOK_EVERY_S  # at least: who was stopped shortly before as well may seem to be all along
            if not waits and (still is None or not still.since + seen_s <= now < still.until):
                raise Broken("I22", f"{what.node} is killed, and goes on by itself: {what.why}")
        for hung, still in self._still.items():
            if now > still.by and hung in self._world.processes and self._watches(hung):
                raise Broken("I22", f"{hung} has hung since {still.since:.2f} s, and lives")

    def _watches(self, node: Node) -> bool:
        nursery = self._world.processes.get(Node("nursery", self._machine(node)))
        return nursery is not None and nursery.end is None
