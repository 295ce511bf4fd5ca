"""Hosts without numbers for all-reduce whose members divide the optimizer's state.

Of each parameter is known by which rounds its weights have moved, and of each that somebody holds the state of, which
rounds that state has come through.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from squall.protocol.effects import JoinGroup, Payload, Step
from squall.protocol.events import Event, Gathered, GroupBroken, GroupJoined, StepTaken
from squall.protocol.nodes import Node
from squall.runtime.collective.shares import ShareLost, bounds_of, givers, has, held_by
from squall.sim.proof.broken import Broken
from squall.sim.proof.group_phantoms import GroupPhantomHosts, MemberPhantom, Part, Weights

SIZES = (5, 1, 3, 8, 2, 1, 4)  # elements of each parameter; there are more than members
NUMBERS = range(len(SIZES))


class SharePhantom(MemberPhantom):
    """`weights` are those that its share has come to."""

    def __init__(self, hosts: GroupPhantomHosts, node: Node) -> None:
        super().__init__(hosts, node)
        self._formed = False
        self._settled = 0  # the group in which it has got what is its share
        self._place, self._bounds = 0, [0, len(SIZES)]

    def begin(self, weights: Weights) -> None:
        super().begin(weights)
        self.rows = [weights for _ in NUMBERS]  # of each parameter
        self.states = dict.fromkeys(NUMBERS, weights)

    def has(self, clock: int) -> set[int]:
        return set(has(set(self.states), self.weights.clock, clock, self._formed))

    def attach(self, payload: Payload) -> None:
        self._check_whole("it shows")
        super().attach(payload)

    def _check_whole(self, what: str) -> None:
        if any(row != self.weights for row in self.rows):
            raise Broken("I6", f"{self.node}: weights of several rounds are what {what}")

    # ------------------------------------------------------------ what a group does

    def joined(self, form: JoinGroup, members: Mapping[Node, Any]) -> Event:
        try:
            _givers(form, members)
        except ShareLost as error:
            return GroupBroken(form.number, str(error), lost=True)
        if self._formed and self.weights.clock == form.clock - 1:
            self._move(members[form.source].weights)
        return GroupJoined(form.number, self.weights.clock)

    def reduced(self, effect: Step, parts: Mapping[Node, Part]) -> Event:
        self._check_whole("it computes on")
        before = self.weights
        event = super().reduced(effect, parts)
        if isinstance(event, StepTaken) and event.finite:
            held = held_by(self._place, self._bounds)
            self.states = {number: state for number, state in self.states.items() if number in held}
            if set(self.states) != held:
                raise Broken("I15", f"{self.node} has no state of {held - set(self.states)}, which are its share")
            after, self.weights = self.weights, before
            self._move(after)
        return event

    def _move(self, after: Weights) -> None:
        """Its share, by one round."""
        if any(state != self.weights for state in self.states.values()):
            raise Broken("I15", f"{self.node} steps with a state that has come through other rounds than the weights")
        self.weights = after
        self.states = dict.fromkeys(self.states, after)
        for number in self.states:
            self.rows[number] = after

    def gathered(self, form: JoinGroup, members: Mapping[Node, Any]) -> Event:
        if self._settled != form.number:
            self._settle(form, members)
        else:
            for place, other in enumerate(members.values()):
                ends = self._bounds[place : place + 2]
                self.rows[slice(*ends)] = other.rows[slice(*ends)]
            for number in NUMBERS:
                copies = sum(other.states.get(number) == self.weights for other in members.values())
                if copies != min(2, len(members)):
                    raise Broken("I15", f"{copies} members have the newest state of parameter {number}")
        self._check_whole("it has gathered")
        return Gathered(form.number)

    def _settle(self, form: JoinGroup, members: Mapping[Node, SharePhantom]) -> None:
        given, place = _givers(form, members), list(members).index(self.node)
        bounds = bounds_of(SIZES, len(members))
        had = self.has(form.clock)
        self.states = {number: self.states[number] for number in had}
        for number, other in zip(NUMBERS, given):
            self.rows[number] = other.rows[number]
            if number in held_by(place, bounds) - had:
                self.states[number] = other.states[number]
        self.weights = members[form.source].weights
        self._place, self._bounds, self._formed, self._settled = place, bounds, True, form.number

    # ------------------------------------------------------------ snapshots

    def save(self, number: int, part: int) -> int:
        share = range(*self._bounds[self._place : self._place + 2])
        self.hosts.parts.setdefault(number, {})[self._place] = {n: (self.rows[n], self.states.get(n)) for n in share}
        return super().save(number, self._place)


def _givers(form: JoinGroup, members: Mapping[Node, SharePhantom]) -> list[SharePhantom]:
    """Who gives each parameter. Raises `ShareLost`."""
    places = givers([member.has(form.clock) for member in members.values()], len(SIZES))
    return [list(members.values())[place] for place in places]
