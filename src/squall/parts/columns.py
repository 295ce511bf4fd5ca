"""All-reduce of replicas of several parts: each part meets the same part of the other replicas, in a column.

A column adds up the gradients of what its parts answer for. Then the parts of a replica agree whether all have their
sums, and only then does any of them step: so a replica has made a step or it has not, whatever breaks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor

from squall.parts.agreement import extras_of, squares_of
from squall.parts.neighbours import NOTHING, SPEAKER, Neighbours
from squall.protocol.effects import Gather, JoinGroup, Step
from squall.protocol.events import Event, GroupBroken, GroupJoined, StepTaken
from squall.protocol.nodes import Node
from squall.runtime.collective.adding import Sum, add_up
from squall.runtime.collective.given import broadcast_state
from squall.runtime.collective.holding import Holding
from squall.runtime.collective.meeting import NearFellows, in_a_line
from squall.runtime.collective.member import Member
from squall.runtime.groups import Group
from squall.runtime.inside import Inside, scale
from squall.runtime.mesh_group import MeshGroup
from squall.vector import cut_of

ELSEWHERE = "the group of another part of this replica is broken"


class Columns(Protocol):
    """How a part meets those with its number, and agrees with its replica on what has come of it."""

    def form(self, effect: JoinGroup, own: int) -> Group | MeshGroup:
        """Where `own` is the replica's place among the members. Raises `RuntimeError` where one does not come."""

    def begin(self) -> None:
        """All parts are about to wait, each in its column."""

    def agreed(self, *values: float) -> list[float]:
        """The sums of the parts' values. The first is how many have found their columns broken: so is one cut."""

    def cut(self) -> None:
        """From another thread: what is under way in a column fails in all parts."""

    def left(self) -> None:
        """Nothing is under way: what was cut is over."""


class NearColumns:
    """On one machine."""

    def __init__(self, row: Neighbours, node: Node, directory: Path, device: torch.device) -> None:
        """`directory`: where members find each other. All parts of the replica can be found there when this returns."""
        self._row = row
        self._fellows = NearFellows(node, directory, device, row.part)
        row.agreed(0.0)

    def form(self, effect: JoinGroup, own: int) -> Group | MeshGroup:
        return self._fellows.form(effect, own)

    def begin(self) -> None: ...

    def agreed(self, *values: float) -> list[float]:
        return self._row.agreed(*values)

    def cut(self) -> None: ...

    def left(self) -> None: ...


class ColumnMember:
    """A part of a member. All parts of a replica are told the same, and answer alike."""

    holding: Holding | None = None

    def __init__(self, member: Member, inside: Inside, node: Node, columns: Columns) -> None:
        self.member = member
        self._node = node
        self._row: Neighbours = inside.neighbours
        self._columns = columns
        self._row.later = True
        self._column: Group | MeshGroup | None = None
        self._number = 0

    # ------------------------------------------------------------ the group

    def join(self, effect: JoinGroup) -> Event:
        self._number = effect.number
        own, source, why = effect.members.index(self._node), effect.members.index(effect.source), ""
        given = None
        try:
            self._column = self._columns.form(effect, own)
            if effect.transfer:
                state = self.member.state() if own == source else None
                given = broadcast_state(self._column, source, state, self.member, whole=True)
        except RuntimeError as error:
            why = in_a_line(error)
        if self._columns.agreed(bool(why))[0]:
            return self._broken(why)
        if given is not None and own != source:  # only now: who fails to join has come no further
            self.member.take_up(given, effect.clock)
        self._sum = Sum(self.member.parameters, 1)  # the last: parts whose own gradient is not finite
        return GroupJoined(effect.number, self.member.clock)

    def _broken(self, why: str) -> GroupBroken:
        self.leave()
        return GroupBroken(self._number, why or ELSEWHERE)

    def leave(self) -> None:
        for parameter in self.member.parameters:
            parameter.grad = None
        if self._column is not None:
            self._column.close()
            self._column = None
        self._columns.left()

    def cut(self) -> None:
        self._columns.cut()

    def rest(self) -> None:
        self.member.batches.prepare()

    def gather(self, effect: Gather) -> Event:
        raise AssertionError("the optimizer's state is not divided")

    # ------------------------------------------------------------ steps

    def step(self, effect: Step) -> Event:
        member, started = self.member, time.perf_counter()
        member.look_again()  # what another part answers for has moved
        member.alone()
        share, batch = member.share(effect), member.load(effect)
        self._row.found = NOTHING
        if batch is not None:
            member.backward.differentiate(batch)
        found = self._row.found
        self._bring(share, own_finite=all(map(math.isfinite, found.values)))
        changes = member.buffer_changes(share)
        computed = time.perf_counter()
        member.alone(False)
        self._columns.begin()
        with self._row.spent.elsewhere():
            why = add_up(self._column, self._sum.vector, *([] if changes is None else [changes]))
        reduced = time.perf_counter()
        most, squares = member.task.clip_norm, 0.0
        if most is not None:
            squares = squares_of(self._sum.gradients)
        summed = self._sum.vector[:-1].sum().item(), self._sum.numbers.item()
        told = self._columns.agreed(bool(why), *found.values, squares, *summed)
        broken, loss, own, length, squares, seen, guilty = told
        if broken:
            return self._broken(why)
        extras = extras_of(self._row, found, length)
        finite = math.isfinite(seen) and math.isfinite(squares)
        if finite:
            if most is not None:
                scale(self._sum.gradients, most, torch.tensor(math.sqrt(squares)))
            member.move()
            member.move_buffers(changes)
        speaks = not (math.isfinite(loss) and math.isfinite(own))
        if not guilty and self._column is not None:
            speaks = self._column.own == 0  # nobody's batch: one speaks for all
        compute_s = time.perf_counter() - started - (reduced - computed)
        return StepTaken(self._number, loss, finite, compute_s, reduced - computed, extras, speaks and not finite)

    def _bring(self, share: float, own_finite: bool) -> None:
        """The part's own gradients, times the member's share of the examples, to where they are added up."""
        member = self.member
        self._sum.numbers[0] = not own_finite
        self._sum.bring(member.backward.gradients(), share)
        for computed, stepped, place in zip(member.backward.parameters, member.parameters, self._sum.gradients):
            computed.grad = None
            stepped.grad = place

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Tensor] | None:
        """The first part has that of all, who call this at the same time."""
        row, member = self._row, self.member
        own = {**member.states(range(len(member.parameters))), **member.settings()}
        if row.part != SPEAKER:
            raw = torch.frombuffer(bytearray(save(own)), dtype=torch.uint8)
            row.send(torch.tensor([len(raw)]), SPEAKER)
            row.send(raw, SPEAKER)
            return None
        whole = {"weights": member.vector}  # which all parts share
        self._put(own, whole, SPEAKER)
        for part in range(1, row.parts):
            size = row.receive(torch.zeros(1, dtype=torch.int64), part)
            raw = row.receive(torch.empty(int(size), dtype=torch.uint8), part)
            self._put(load(raw.numpy().tobytes()), whole, part)
        return whole

    def _put(self, state: Mapping[str, Tensor], whole: dict[str, Tensor], part: int) -> None:
        """What a part has, into that of the whole replica, slices into their tensors."""
        spans = {span.name: span for span in self.member.layout.parameters}
        for name, value in state.items():
            owner = name.partition(":")[2].rpartition(":")[0]
            cut = self.member.layout.slices.get(owner)
            if cut is None or not value.ndim:
                whole[name] = value
            else:
                tensor = whole.setdefault(name, torch.empty(spans[owner].shape, dtype=value.dtype))
                cut_of(tensor, msgspec.structs.replace(cut, number=part)).copy_(value)
