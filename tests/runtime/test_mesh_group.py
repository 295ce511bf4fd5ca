"""Collectives over a mesh are torch's: each member is a thread here, with connections of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from squall.protocol.nodes import replica_node
from squall.runtime.collective.meeting import lost
from squall.runtime.mesh_group import MeshGroup
from squall.transports.mesh import Mesh, MeshBroken

SOON_S = 30.0


class Members:
    def __init__(self, count: int) -> None:
        nodes = [replica_node(slot, 0) for slot in range(count)]
        ends: list[dict[int, socket.socket]] = [{} for _ in nodes]
        for one, other in combinations(range(count), 2):
            ends[one][other], ends[other][one] = socket.socketpair()
        for connection in (connection for own in ends for connection in own.values()):
            connection.setblocking(False)
        names = [str(node) for node in nodes]
        machines = [place % 2 for place in range(count)]
        self.groups = [MeshGroup(Mesh(own, names), nodes, place, machines) for place, own in enumerate(ends)]
        self._pool = ThreadPoolExecutor(count)

    def all(self, work: Callable[[dist.ProcessGroup, int], Any]) -> list[Any]:
        """What it comes to in each."""
        found = [self._pool.submit(work, group.torch, group.own) for group in self.groups]
        return [future.result(SOON_S) for future in found]

    def close(self) -> None:
        for group in self.groups:
            group.close()
        self._pool.shutdown()


@pytest.fixture(params=[1, 2, 3, 5])
def members(request: pytest.FixtureRequest) -> Iterator[Members]:
    made = Members(request.param)
    yield made
    made.close()


@pytest.fixture
def two() -> Iterator[Members]:
    made = Members(2)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
def test_sums_are_the_same_for_all_whatever_the_size(members: Members, dtype: torch.dtype) -> None:
    count = len(members.groups)
    for size in (0, 1, 4, 1001, 700_000):
        given = [(torch.arange(size) % 11 * (place + 1)).to(dtype) for place in range(count)]

        def work(group: dist.ProcessGroup, own: int, given: list[Tensor] = given) -> Tensor:
            mine = given[own].clone()
            dist.all_reduce(mine, group=group)
            return mine

        for found in members.all(work):
            assert torch.equal(found, torch.stack(given).sum(0).to(dtype))


def test_a_broadcast_brings_the_roots_numbers_to_all(members: Members) -> None:
    for root in range(len(members.groups)):

        def work(group: dist.ProcessGroup, own: int, root: int = root) -> Tensor:
            numbers = torch.arange(300_000) * (own + 1)
            dist.broadcast(numbers, group=group, group_src=root)
            return numbers

        assert all(torch.equal(found, torch.arange(300_000) * (root + 1)) for found in members.all(work))


def test_everybody_gathers_all_in_their_order(members: Members) -> None:
    count = len(members.groups)

    def work(group: dist.ProcessGroup, own: int) -> list[int]:
        found = [torch.zeros(2, dtype=torch.int64) for _ in range(count)]
        dist.all_gather(found, torch.tensor([own, own * own]), group=group)
        dist.barrier(group=group)
        return [int(each[1]) for each in found]

    assert members.all(work) == [[place * place for place in range(count)]] * count


def test_two_members_may_receive_before_they_send(two: Members) -> None:
    def work(group: dist.ProcessGroup, own: int) -> int:
        theirs = torch.zeros(1, dtype=torch.int64)
        coming = group.recv([theirs], 1 - own, 0)
        group.send([torch.tensor([own + 7])], 1 - own, 0).wait()
        coming.wait()
        return int(theirs)

    assert two.all(work) == [8, 7]


def test_only_sums_are_formed(two: Members) -> None:
    with pytest.raises(RuntimeError, match="sums alone"):
        dist.all_reduce(torch.zeros(1), dist.ReduceOp.MAX, group=two.groups[0].torch)


def test_who_waits_for_a_member_that_is_gone_has_an_error(two: Members) -> None:
    work = two.groups[0].torch.allreduce([torch.zeros(10)])
    two.groups[1].close()
    with pytest.raises(RuntimeError, match=f"{MeshBroken.__name__}: .*replica-1.0"):
        work.wait()


OPERATIONS: dict[str, Callable[[dist.ProcessGroup], Any]] = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(3), group=group),
    "all_gather": lambda group: dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(3), group=group),
    "broadcast": lambda group: dist.broadcast(torch.ones(3), 1, group=group),
    "barrier": lambda group: dist.barrier(group),
    "recv": lambda group: dist.recv(torch.ones(3), 1, group=group),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_begins_behind_a_broken_connection_fails_as_that(two: Members, operation: str) -> None:
    """Also where torch has a group of its own, and then looks for those of others as it tells of an error."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        two.groups[1].cut()
        with pytest.raises(RuntimeError, match=MeshBroken.__name__) as raised:
            OPERATIONS[operation](two.groups[0].torch)
        assert lost(raised.value)
    finally:
        dist.destroy_process_group()


def test_sparse_gradients_of_an_embedding_are_added_up_as_dense_ones_are(two: Members) -> None:
    """Rows that nobody has are not there, and one whose sum is zero is."""
    words = torch.tensor([[1, 2, 5], [2, 3, 5]])
    weights = torch.tensor([[1.0, -1.0, 1.0], [1.0, 1.0, -1.0]])
    start = torch.randn(8, 4)

    def gradient(group: dist.ProcessGroup, own: int, sparse: bool) -> Tensor:
        model = nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=sparse)
        wrapped = DistributedDataParallel(model, process_group=group, init_sync=False)
        (wrapped(words[own]).sum(1) * weights[own]).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad

    for dense, sparse in zip(two.all(partial(gradient, sparse=False)), two.all(partial(gradient, sparse=True))):
        assert sparse.is_sparse
        assert sparse.coalesce().indices().tolist() == [[1, 2, 3, 5]]
        assert torch.equal(sparse.to_dense(), dense)


def test_data_parallel_training_takes_the_steps_of_one_process(two: Members) -> None:
    inputs, targets = torch.randn(40, 20), torch.randn(40, 3)
    start = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 3)).state_dict()

    def trained(group: dist.ProcessGroup | None, own: int) -> Tensor:
        model: nn.Module = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 3))
        model.load_state_dict(start)
        wrapped, mine = model, slice(None)
        if group is not None:
            wrapped, mine = DistributedDataParallel(model, process_group=group, init_sync=False), slice(own, None, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(20):
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapped(inputs[mine]), targets[mine]).backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    alone = trained(None, 0)
    for found in two.all(trained):
        assert (found - alone).norm() < 1e-6 * alone.norm()
