"""A state that another member gives is looked at before it is used: what is none breaks the group, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor

import squall
from squall.plan import build_checked, make_plan
from squall.protocol.effects import JoinGroup, Payload
from squall.protocol.events import GroupBroken, GroupJoined
from squall.protocol.nodes import COORDINATOR, Node, replica_node
from squall.runtime.collective.member import Member
from squall.runtime.collective.process import GroupedMember
from squall.runtime.collective.showing import ShowingHost
from squall.runtime.driver import Host
from squall.runtime.job import Job, private_job
from squall.runtime.mesh_group import MeshGroup
from squall.runtime.pieces import Pieces
from squall.runtime.places import Places, state_bytes_at_most
from tests.runtime.test_mesh_group import SOON_S, Members
from tests.tasks import LOCAL, regression

SOURCE, RECEIVER = replica_node(0, 0), replica_node(1, 0)
ADAM = partial(torch.optim.Adam, lr=0.01)
Lie = Callable[[dict[str, Tensor]], bytes]


class At:
    """Where a member meets its fellows: they are there."""

    def __init__(self, group: MeshGroup) -> None:
        self._group = group

    def form(self, effect: JoinGroup, own: int) -> MeshGroup:
        return self._group

    def cut(self) -> None: ...

    def left(self) -> None: ...


def trained(directory: Path, optimizer: Any = ADAM, steps: int = 1) -> tuple[Job, Member]:
    """A member with a state."""
    strategy = squall.AllReduce(replicas=2, optimizer=optimizer)
    plan = make_plan(strategy, LOCAL)
    task, layout = build_checked(regression(), plan, strategy)
    job = private_job(plan, strategy, task, layout, directory)
    member = Member(job, 0)
    for parameter in member.parameters:
        parameter.grad = torch.ones_like(parameter)
    for _ in range(steps):
        member.move()
    return job, member


def changed(name: str, value: Tensor) -> Lie:
    return lambda state: save({**state, name: value})


LIES: dict[str, Lie] = {
    "noise": lambda state: b"noise" * 100,
    "nothing": lambda state: b"",
    "no weights": lambda state: save({name: value for name, value in state.items() if name != "weights"}),
    "other weights": changed("weights", torch.zeros(3)),
    "integers": lambda state: save({**state, "weights": state["weights"].int()}),
    "another parameter": changed("state:nobody:exp_avg", torch.zeros(3)),
    "no parameter": changed("what", torch.zeros(3)),
    "another state's shape": changed("state:0.weight:exp_avg", torch.zeros(3)),
    "another state's type": changed("state:0.weight:exp_avg", torch.zeros(9, 6, dtype=torch.int64)),
    "another group": changed("settings:7:lr", torch.zeros(())),
    "a group with a long number": changed(f"settings:{'0' * 5000}:lr", torch.zeros(())),
    "a long name": changed("x" * 100_000, torch.zeros(())),
    "no group": changed("settings:x:lr", torch.zeros(())),
    "another setting": changed("settings:0:params", torch.zeros(())),
    "no number": changed("settings:0:lr", torch.zeros(2)),
}


def given(tmp_path: Path, raw: bytes, size: int) -> tuple[object, Member, Tensor]:
    """What comes of a receiver whose source says that its state has that size, and sends these bytes."""
    _, member = trained(tmp_path)
    before = member.vector.clone()
    members = Members(2)
    far, near = members.groups

    def lie() -> None:
        dist.broadcast(torch.tensor([size]), group=far.torch, group_src=0)
        dist.broadcast(torch.tensor(list(raw), dtype=torch.uint8), group=far.torch, group_src=0)
        dist.all_reduce(torch.zeros(1, dtype=torch.int64), group=far.torch)

    grouped = GroupedMember(member, None, RECEIVER, At(near))
    with ThreadPoolExecutor(1) as pool:
        lying = pool.submit(lie)
        event = grouped.join(JoinGroup(1, (SOURCE, RECEIVER), SOURCE, transfer=True, clock=5))
        far.cut()
        assert lying.exception(SOON_S) is None or isinstance(lying.exception(), RuntimeError)
    members.close()
    return event, member, before


@pytest.mark.parametrize("lie", LIES)
def test_what_is_no_state_breaks_the_group_and_changes_nothing(lie: str, tmp_path: Path) -> None:
    _, source = trained(tmp_path)
    raw = LIES[lie](source.state())
    event, member, before = given(tmp_path, raw, len(raw))
    assert isinstance(event, GroupBroken)
    assert "replica-0.0 gives" in event.why
    assert torch.equal(member.vector, before)
    assert member.clock == 1


@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize(
    "optimizer", [partial(torch.optim.Adafactor, lr=0.01), partial(torch.optim.SGD, lr=0.1, momentum=0.9)]
)
def test_a_state_has_the_shapes_that_the_optimizer_gives_it(optimizer: Any, stepped: bool, tmp_path: Path) -> None:
    """Those of rows and columns, too; a newcomer has none of its own to compare with."""
    (_, source), (_, taker) = trained(tmp_path, optimizer), trained(tmp_path, optimizer, steps=int(stepped))
    state = {name: value for name, value in source.state().items() if name.startswith("state:")}
    numbers = {span.name: number for number, span in enumerate(source.layout.parameters)}
    assert any(value.ndim > 1 for value in state.values())
    for name, value in state.items():
        _, owner, key = name.split(":")
        assert taker.could_have(numbers[owner], key, value)
        assert not taker.could_have(numbers[owner], key, torch.zeros(*value.shape, 3))


@pytest.mark.parametrize("size", [-1, 1 << 62])
def test_a_size_that_no_state_has_breaks_the_group_before_there_is_room_for_it(size: int, tmp_path: Path) -> None:
    event, member, _ = given(tmp_path, b"", size)
    assert isinstance(event, GroupBroken)
    assert f"a state of {size} bytes" in event.why
    assert state_bytes_at_most(member.layout.length) > 4 * member.layout.length


def test_a_state_is_taken_up(tmp_path: Path) -> None:
    _, source = trained(tmp_path)
    source.vector.add_(1)
    raw = save(source.state())
    event, member, _ = given(tmp_path, raw, len(raw))
    assert isinstance(event, GroupJoined)
    assert torch.equal(member.vector, source.vector)
    assert member.clock == 5


class Nobody(Host):
    def perform(self, effect: object, now: float) -> None: ...


def test_what_is_shown_lies_beside_the_evaluators_buffer_until_it_is_measured(tmp_path: Path) -> None:
    job, _ = trained(tmp_path)
    evaluator = Node("evaluator", 2)
    evaluated, pieces = job.arena.weights(2, 0), Pieces()
    places = Places(COORDINATOR, 0, job.ranges, job.arena.shape, memoryview(job.arena.memory), pieces)
    host = ShowingHost(Nobody(), pieces, evaluated)
    evaluated.fill_(7.0)
    for replica, value in ((RECEIVER, 1.0), (SOURCE, 2.0)):
        numbers, *_ = places(Payload("weights", evaluator, 0, 3, 0, 1), replica)
        numbers[:] = torch.full((job.layout.length,), value).numpy().tobytes()
    assert (evaluated == 7.0).all()
    host.attach(Payload("weights", SOURCE, 0, 3, 0, 1))
    assert (evaluated == 2.0).all()
    host.attach(Payload("weights", replica_node(1, 1), 0, 4, 0, 1))  # of this machine, which has put them there
    assert (evaluated == 2.0).all()
