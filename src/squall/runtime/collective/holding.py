"""What a member of all-reduce has of an optimizer's state that its group divides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from torch import Tensor

from squall.runtime.collective.member import Member
from squall.runtime.collective.shares import bounds_of, has, held_by


class Holding:
    """A member's parameters by number, and those whose state it has. The optimizer steps on these alone.

    It gives nothing away before all others of a new group have what is theirs: that is so when it has the gradients of
    the group's first step, to which all have brought their part.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self.sizes = [span.numel for span in member.layout.parameters]
        self.held: Set[int] = set(range(len(self.sizes)))
        self.formed = False  # it has been in a group
        self.bounds = [0, len(self.sizes)]  # of the group's shares
        self.place = 0  # the member's among them
        self._params = [list(group["params"]) for group in member.optimizer.param_groups]
        self._number = {id(parameter): number for number, parameter in enumerate(member.parameters)}

    def has(self, clock: int) -> Set[int]:
        """What counts of its state in a group of this round."""
        return has(self.held, self.member.clock, clock, self.formed)

    def behind(self, clock: int) -> bool:
        """It has a share, and has not made this step, which others have."""
        return self.formed and self.member.clock == clock - 1

    def will_hold(self, place: int, members: int) -> set[int]:
        """The parameters whose state a member of a new group is to have."""
        return held_by(place, bounds_of(self.sizes, members))

    def settle(self, place: int, members: int, clock: int) -> None:
        """All that is to be the member's has come."""
        member = self.member
        if member.clock != clock and member.schedule is not None:
            member.schedule.advance(clock)
        self.held = self.has(clock) | self.will_hold(place, members)
        self.bounds, self.place, self.formed, member.clock = bounds_of(self.sizes, members), place, True, clock
        member.look_again()

    def narrow(self) -> None:
        """All others have what is theirs: drop it."""
        held = held_by(self.place, self.bounds)
        if held == self.held and sum(len(g["params"]) for g in self.member.optimizer.param_groups) == len(held):
            return
        self.held = held
        for group, params in zip(self.member.optimizer.param_groups, self._params):
            group["params"] = [parameter for parameter in params if self._number[id(parameter)] in held]
        for number, parameter in enumerate(self.member.parameters):
            if number not in held:
                self.member.optimizer.state.pop(parameter, None)

    def elements(self, first: int, stop: int) -> tuple[int, int]:
        """Where parameters [first, stop) begin and end in the vector; behind the last one is the model's tail."""
        spans = self.member.layout.parameters
        return spans[first].start, spans[stop].start if stop < len(spans) else self.member.layout.tail

    def weights(self, first: int, stop: int) -> Tensor:
        """Of parameters [first, stop), where they lie."""
        begin, end = self.elements(first, stop)
        return self.member.vector[begin:end]

    def tail(self) -> Tensor:
        """The model's buffers, where they lie."""
        return self.member.vector[self.member.layout.tail :]

    def take(self, state: Mapping[str, Tensor], wanted: Iterable[int]) -> None:
        """The state of these parameters, of what `Member.states` gave, in the place of an older one."""
        for number in wanted:
            self.member.optimizer.state.pop(self.member.parameters[number], None)
        self.member.put(state, {self.member.layout.parameters[number].name for number in wanted})

    def part(self) -> tuple[dict[str, Tensor], tuple[int, int]]:
        """What the member writes into a snapshot, and the elements [start, stop) that it is of."""
        first, stop = self.bounds[self.place : self.place + 2]
        begin, end = self.elements(first, stop)
        if stop == len(self.sizes):
            end = self.member.layout.length
        weights = self.member.vector[begin:end].detach().cpu()
        return {"weights": weights, **self.member.states(range(first, stop)), **self.member.settings()}, (begin, end)
