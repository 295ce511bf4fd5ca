"""Who has the optimizer's state of which parameters, and what the members of a group give each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import squall
from squall.plan import build_checked, make_plan
from squall.protocol.effects import Gather, JoinGroup, Step
from squall.protocol.nodes import replica_node
from squall.runtime.collective.holding import Holding
from squall.runtime.collective.meeting import NearFellows
from squall.runtime.collective.member import Member
from squall.runtime.collective.process import GroupedMember, import_beforehand
from squall.runtime.collective.shares import ShareLost, bounds_of, givers, held_by, runs
from squall.runtime.job import private_job
from squall.transports.mesh import MeshBroken
from squall.transports.near_meeting import COME_WITHIN_S
from squall.vector import Layout
from tests.launchers.processes import wait_for
from tests.tasks import LOCAL, regression

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


@given(SIZES, st.integers(1, 8))
def test_shares_are_runs_of_all_parameters_and_none_is_empty(sizes: list[int], members: int) -> None:
    members = min(members, len(sizes))
    bounds = bounds_of(sizes, members)
    assert bounds[0] == 0
    assert bounds[-1] == len(sizes)
    assert bounds == sorted(set(bounds))
    assert len(bounds) == members + 1


@given(SIZES, st.integers(2, 8), st.integers(0, 7))
def test_a_lost_member_leaves_a_copy_of_everything(sizes: list[int], members: int, lost: int) -> None:
    members = min(members, len(sizes))
    bounds = bounds_of(sizes, members)
    held = [held_by(member, bounds) for member in range(members) if member != lost % members or members == 1]
    found = givers(held, len(sizes))
    assert all(number in held[giver] for number, giver in enumerate(found))
    assert [number for _, first, stop in runs(found) for number in range(first, stop)] == list(range(len(sizes)))


def test_neighbours_take_a_share_with_them() -> None:
    bounds = bounds_of([10] * 8, 4)
    assert bounds == [0, 2, 4, 6, 8]
    held = [held_by(member, bounds) for member in (0, 2)]
    assert len(givers(held, 8)) == 8
    with pytest.raises(ShareLost, match="the optimizer's state of 2 parameters is lost"):
        givers([held_by(member, bounds) for member in (0, 3)], 8)


def test_equal_tensors_are_shared_equally() -> None:
    assert bounds_of([5] * 9, 3) == [0, 3, 6, 9]
    assert bounds_of([100, 1, 1, 1, 97], 2) == [0, 1, 5]


# ---------------------------------------------------------------- processes


def deep() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(9, 1))


class _Work:
    """A member of three, each with 8 examples of a round."""

    def __init__(self, index: int, directory: Path) -> None:
        optimizer = partial(torch.optim.AdamW, lr=0.01)
        strategy = squall.AllReduce(replicas=3, optimizer=optimizer, shard_optimizer=True)
        plan = make_plan(strategy, LOCAL)
        task, layout = build_checked(regression(deep, examples=96, batch_size=8, clip_norm=0.5), plan, strategy)
        self._index, self._directory = index, directory
        self._member = Member(private_job(plan, strategy, task, layout, directory), index)
        self._holding = Holding(self._member)
        node = replica_node(index, 0)
        fellows = NearFellows(node, directory, self._member.device)
        self._grouped = GroupedMember(self._member, self._holding, node, fellows)

    def join(self, number: int, members: Sequence[int], source: int, clock: int) -> tuple[str, object]:
        nodes = tuple(replica_node(member, 0) for member in members)
        return _told(self._grouped.join(JoinGroup(number, nodes, replica_node(source, 0), transfer=True, clock=clock)))

    def step(self, clock: int, breaks: bool) -> tuple[str, object]:
        """`breaks`: the connections do, before the gradients have come, and when another member has made the step."""
        made = self._directory / f"made-{clock}"
        if breaks:
            self._member.look = partial(self._break, made)  # type: ignore[method-assign]
        start = 24 * (clock - 1) + 8 * self._index
        told = _told(self._grouped.step(Step(clock, 0, start, start + 8, 24)))
        made.touch()
        return told

    def _break(self, made: Path) -> bool:
        wait_for(made.exists, COME_WITHIN_S, "another member to make the step")
        del self._member.look
        for parameter in self._member.parameters:
            parameter.grad = torch.full_like(parameter, 1e9)
        raise MeshBroken("replica-1 has ended its connection")

    def gather(self, clock: int) -> tuple[str, object]:
        return _told(self._grouped.gather(Gather(clock)))

    def leave(self) -> None:
        self._grouped.leave()

    def state(self) -> dict[str, Tensor]:
        return {"weights": self._member.vector, **self._member.states(sorted(self._holding.held))}


def _told(event: object) -> tuple[str, object]:
    return type(event).__name__, getattr(event, "lost", False)


def _serve(line: Connection, index: int, directory: Path) -> None:
    torch.set_num_threads(1)
    work = _Work(index, directory)
    while True:
        name, *arguments = line.recv()
        line.send(getattr(work, name)(*arguments))


class Members:
    def __init__(self, directory: Path) -> None:
        context = get_context("fork")
        pairs = [context.Pipe() for _ in range(3)]
        self._lines = [mine for mine, _ in pairs]
        self.processes = [
            context.Process(target=_serve, args=(theirs, index, directory)) for index, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()

    def all(self, name: str, *arguments: Any, of: Sequence[int] = (0, 1, 2)) -> list[Any]:
        return self.each(name, [arguments] * len(of), of)

    def each(self, name: str, arguments: Sequence[Sequence[Any]], of: Sequence[int] = (0, 1, 2)) -> list[Any]:
        for member, own in zip(of, arguments, strict=True):
            self._lines[member].send((name, *own))
        answers = []
        for member in of:
            assert self._lines[member].poll(30), f"no answer from {member}"
            answers.append(self._lines[member].recv())
        return answers

    def begin(self) -> None:
        self.all("leave")  # who answers has told where it is
        assert self.all("join", 1, (0, 1, 2), 0, 0) == [("GroupJoined", False)] * 3
        assert self.all("gather", 0) == [("Gathered", False)] * 3

    def round(self, clock: int, of: Sequence[int] = (0, 1, 2)) -> None:
        assert self.all("step", clock, False, of=of) == [("StepTaken", False)] * len(of)
        assert self.all("gather", clock, of=of) == [("Gathered", False)] * len(of)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[], Members]]:
    import_beforehand()  # once for all members
    groups: list[Members] = []

    def start() -> Members:
        directory = tmp_path / str(len(groups))
        directory.mkdir()
        groups.append(Members(directory))
        return groups[-1]

    yield start
    for process in (process for group in groups for process in group.processes):
        process.kill()
        process.join()


@pytest.mark.parametrize("survivors", [(0, 1, 2), (0, 2), (1, 0)])
def test_a_step_that_one_member_alone_has_made_is_made_by_all(
    started: Callable[[], Members], survivors: tuple[int, ...]
) -> None:
    torn, whole = started(), started()
    for members in (torn, whole):
        members.begin()
        members.round(1)
    whole.round(2)
    assert torn.each("step", [(2, False), (2, True), (2, True)]) == [
        ("StepTaken", False), ("GroupBroken", False), ("GroupBroken", False),
    ]  # fmt: skip
    assert torn.all("gather", 2, of=[0]) == [("GroupBroken", False)]
    assert torn.all("join", 2, survivors, 0, 2, of=survivors) == [("GroupJoined", False)] * len(survivors)
    assert torn.all("gather", 2, of=survivors) == [("Gathered", False)] * len(survivors)
    expected = {name: value for state in whole.all("state") for name, value in state.items()}
    states = torn.all("state", of=survivors)
    for state in states:
        assert all(torch.equal(value, expected[name]) for name, value in state.items())
    assert {name for state in states for name in state} == set(expected)
    torn.round(3, survivors)
    if survivors == (0, 1, 2):
        whole.round(3)
        for mine, theirs in zip(torn.all("state"), whole.all("state")):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)  # a new group adds in another order at first


def test_each_has_the_state_of_its_share_and_of_the_one_before(started: Callable[[], Members]) -> None:
    members = started()
    members.begin()
    members.round(1)
    model = deep()
    spans = Layout.of(model, [list(model.parameters())]).parameters
    bounds = bounds_of([span.numel for span in spans], 3)
    for place, state in enumerate(members.all("state")):
        found = {name: value.numel() for name, value in state.items() if name.endswith(":exp_avg")}
        held = [spans[number] for number in held_by(place, bounds)]
        assert found == {f"state:{span.name}:exp_avg": span.numel for span in held}


def test_who_has_the_state_no_more_is_told_to_all(started: Callable[[], Members]) -> None:
    members = started()
    members.begin()
    members.round(1)
    members.all("leave")
    assert members.all("join", 2, (1,), 1, 1, of=[1]) == [("GroupBroken", True)]
