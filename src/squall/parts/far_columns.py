"""Columns of replicas that lie on several machines: how their parts meet, and how all of a replica give up together.

The first parts meet where the coordinator says. Then each has told the others where its replica's other parts are, and
these meet. What the parts of a replica have found comes together in the first, which tells all of them once what to
make of it; or, before that, that nobody waits any more, which ends their waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from squall.parts.columns import Columns, NearColumns
from squall.parts.neighbours import SPEAKER, Neighbours
from squall.protocol.collective.messages import Place
from squall.protocol.effects import JoinGroup
from squall.protocol.nodes import NURSERY, Node, is_address, part_nodes
from squall.runtime.collective.meeting import FarFellows
from squall.runtime.collective.member import Member
from squall.runtime.job import Job
from squall.runtime.mesh_group import MeshGroup
from squall.transports.mesh import MeshBroken
from squall.transports.opening import listening

PLACE_BYTES = 512  # that a place takes, where it is told
VALUES = 8  # that parts agree on, at most


def columns_of(job: Job, member: Member, node: Node) -> Columns:
    """Of this process, which is a part of that replica."""
    assert job.inside is not None
    row, site = job.inside.neighbours, job.site
    if site is None:
        assert job.scratch is not None
        return NearColumns(row, node, job.scratch, member.device)
    listener = job.listener or listening()
    own = Place(site.machine, f"{site.host}:{listener.getsockname()[1]}")
    return FarColumns(row, FarFellows.of(_parts(node, row.parts)[row.part], site, listener), own)


class FarColumns:
    """`begin` and `agreed` are for the thread that waits, `cut` and `left` for the process's own."""

    def __init__(self, row: Neighbours, fellows: FarFellows, own: Place) -> None:
        """`own`: where this part is."""
        self._row, self._fellows = row, fellows
        self._verdict = _FirstVerdict(row) if row.part == SPEAKER else _Verdict(row, fellows.cut)
        self._others = torch.empty(0)
        if row.part != SPEAKER:
            row.send(written(own), SPEAKER)
        else:
            places = [row.receive(torch.empty(PLACE_BYTES, dtype=torch.uint8), part) for part in range(1, row.parts)]
            self._others = torch.stack(places)  # [parts - 1, PLACE_BYTES]

    def form(self, effect: JoinGroup, own: int) -> MeshGroup:
        told = torch.zeros(len(effect.members), self._row.parts - 1, PLACE_BYTES, dtype=torch.uint8)
        if self._row.part == SPEAKER:
            try:
                group = self._fellows.form(effect, own)
                dist.all_gather(list(told), self._others, group=group.torch)
            finally:  # the others wait for it; zeros tell them that there is none
                for part in range(1, self._row.parts):
                    self._row.send(told[:, part - 1].contiguous(), part)
                self.begin()
            return group
        told = self._row.receive(told[:, 0].contiguous(), SPEAKER)
        self.begin()
        places = [read_place(place) for place in told]
        members = [_parts(replica, self._row.parts)[self._row.part] for replica in effect.members]
        return self._fellows.meet(effect.number, members, places, own)

    def begin(self) -> None:
        self._verdict.begin()

    def agreed(self, *values: float) -> list[float]:
        said = torch.zeros(1 + VALUES, dtype=torch.float64)
        said[1 : 1 + len(values)] = torch.tensor(values, dtype=torch.float64)
        given_up, *sums = self._verdict.of(said).tolist()
        sums[0] += given_up
        return sums[: len(values)]

    def cut(self) -> None:
        self._fellows.cut()
        self._verdict.give_up()

    def left(self) -> None:
        self._fellows.left()
        self._verdict.forget()


class _FirstVerdict:
    """The first part's end, which has the last word: the sums, or that it was given up (the first value is 1)."""

    def __init__(self, row: Neighbours) -> None:
        self._row = row
        self._others = range(1, row.parts)
        self._lock = threading.Lock()
        self._waited_for = self._given_up = False
        self._on_way: list[tuple[Callable[[], None], Tensor]] = []

    def begin(self) -> None:
        with self._lock:
            self._waited_for = True
            self._tell_given_up()

    def of(self, said: Tensor) -> Tensor:
        theirs = torch.empty_like(said)
        for other in self._others:
            said += self._row.receive(theirs, other)
        with self._lock:
            if self._waited_for:
                self._say(said)
            else:
                said = torch.ones_like(said)
        for wait, _ in self._on_way:
            wait()
        self._on_way.clear()
        return said

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
            self._tell_given_up()

    def forget(self) -> None:
        with self._lock:
            self._given_up = False

    def _tell_given_up(self) -> None:
        if self._given_up and self._waited_for:
            self._say(torch.ones(1 + VALUES, dtype=torch.float64))

    def _say(self, said: Tensor) -> None:
        """Once for each time that they wait."""
        self._waited_for = False
        self._on_way += [(self._row.sending(said, other), said) for other in self._others]


class _Verdict:
    """Another part's end. What the first says may come while this part waits in its column, and then ends that."""

    def __init__(self, row: Neighbours, cut: Callable[[], None]) -> None:
        self._row, self._cut = row, cut
        self._heard = torch.empty(1 + VALUES, dtype=torch.float64)
        self._failed: BaseException | None = None
        self._listening = threading.Thread()

    def begin(self) -> None:
        wait = self._row.receiving(self._heard, SPEAKER)

        def listen() -> None:
            try:
                wait()
            except BaseException as error:
                self._failed = error
            if self._failed is not None or self._heard[0]:
                self._cut()

        self._listening = threading.Thread(target=listen, name="squall verdict", daemon=True)
        self._listening.start()

    def of(self, said: Tensor) -> Tensor:
        self._row.send(said, SPEAKER)
        with self._row.spent.waiting():
            self._listening.join()
        if self._failed is not None:
            raise self._failed
        return self._heard

    def give_up(self) -> None: ...

    def forget(self) -> None: ...


def _parts(replica: Node, parts: int) -> tuple[Node, ...]:
    return replica, *part_nodes(replica, parts)


def written(place: Place) -> Tensor:
    text = msgspec.msgpack.encode(place)
    assert len(text) <= PLACE_BYTES
    return torch.frombuffer(bytearray(text.ljust(PLACE_BYTES, b"\0")), dtype=torch.uint8)


def read_place(place: Tensor) -> Place:
    """Raises `MeshBroken` for what is no place in numbers: no name is looked up for another replica."""
    try:
        found = msgspec.msgpack.decode(place.numpy().tobytes().rstrip(b"\0"), type=Place)
    except msgspec.MsgspecError as error:
        raise MeshBroken(f"another replica does not say where its parts are: {error}") from error
    if not is_address(found.address, near=found.machine == NURSERY.index):
        raise MeshBroken(f"another replica says that a part is called at {found.address!r}")
    return found
