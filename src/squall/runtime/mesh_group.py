"""A process group: torch's collectives over the connections of a mesh, within a machine or between several.

`DistributedDataParallel`, `ZeroRedundancyOptimizer` and what sends and receives find no difference to torch's Gloo. But
whoever waits when a member is gone has an error at once, and nobody speaks with a stranger. Sums alone are formed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import Work, _register_process_group
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

from squall.protocol.nodes import Node
from squall.runtime.ring import Ring
from squall.transports.mesh import Mesh, Steps

Result = list[Tensor] | Callable[[], list[Tensor]]  # what an operation comes to, or how that is made when it is over


class MeshGroup:
    """Of this process and others, which have met (`transports.meeting`, on one machine `transports.near_meeting`)."""

    def __init__(
        self, mesh: Mesh, members: Sequence[Node], own: int, machines: Sequence[int] = (), name: str = ""
    ) -> None:  # fmt: skip
        """`own` is this process's place among the members, whose machines these are.

        Those of one machine follow on each other in the ring, so that it crosses between machines as rarely as can be.
        By a `name` DTensor finds the group, as Gloo's have one.
        """
        self.members, self.own = tuple(members), own
        self._mesh = mesh
        order = list(range(len(members)))
        if machines:
            order.sort(key=lambda member: (machines[member], member))
        self.torch = MeshProcessGroup(mesh, own, order, name)
        c10d._world.pg_group_ranks[self.torch] = {rank: rank for rank in range(len(members))}
        # Where an operation fails torch looks for this, and would raise another error if it were not there.
        c10d._world.pg_map[self.torch] = (self.torch.getBackendName(), None)  # type: ignore[assignment]
        if name:
            group_name = c10d.GroupName(name)
            _register_process_group(group_name, self.torch)
            c10d._world.pg_names[self.torch] = group_name

    def cut(self) -> None:
        """Whoever waits for this process in the group has an error at once, and so has this one."""
        self._mesh.cut()

    def close(self) -> None:
        """Leave the group, whose operations are over or have failed."""
        self._mesh.close()
        c10d._world.pg_group_ranks.pop(self.torch, None)
        c10d._world.pg_map.pop(self.torch, None)


class _Work(Work):
    def __init__(self, future: Future[list[Tensor]]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: object = None) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def get_future(self) -> Future[list[Tensor]]:
        return self._future


class MeshProcessGroup(dist.ProcessGroup):
    """Of the member `rank`; `order` is the ring's. An operation that cannot be done raises `MeshBroken`."""

    def __init__(self, mesh: Mesh, rank: int, order: Sequence[int], name: str = "") -> None:
        super().__init__(rank, len(order))  # type: ignore[call-arg]  # it has no store
        self._name = name
        self._mesh = mesh
        self._ring = Ring(mesh, rank, order)

    def getBackendName(self) -> str:
        return "squall"

    @property
    def group_name(self) -> c10d.GroupName:
        return c10d.GroupName(self._name)

    # torch has overloads of these, which it does not call itself.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:  # type: ignore[override]
        if opts is not None and opts.reduceOp != ReduceOp.SUM:
            raise RuntimeError("this group forms sums alone")
        if tensors[0].is_sparse:
            return self._sum_sparse(tensors[0])
        return self._do(tensors, lambda: _each(self._ring.sum, tensors))

    def _sum_sparse(self, tensor: Tensor) -> _Work:
        """Of an embedding's gradient: all rows travel, and which of them anybody has."""
        own = tensor.coalesce()
        rows, there = own.to_dense(), torch.zeros(own.shape[: own.sparse_dim()])
        there[tuple(own.indices())] = 1.0

        def found() -> list[Tensor]:
            indices = there.nonzero().T
            return [torch.sparse_coo_tensor(indices, rows[tuple(indices)], own.shape, check_invariants=True)]

        return self._do(found, lambda: _each(self._ring.sum, (rows, there)))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> _Work:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Work:  # type: ignore[override]
        return self._do(tensors, lambda: _each(lambda tensor: self._ring.broadcast(tensor, opts.rootRank), tensors))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Work:  # type: ignore[override]
        return self._do(outputs[0], lambda: self._ring.gather(outputs[0], inputs[0]))

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> _Work:
        parts = list(output.view(self.size(), -1))
        return self._do([output], lambda: self._ring.gather(parts, own.view(-1)))

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Work:
        """As DTensor asks for it: into tensors that hold those of all members one behind the other."""

        def gather_each() -> Steps:
            for output, own in zip(outputs, inputs):
                yield from self._ring.gather(list(output.view(self.size(), -1)), own.view(-1))

        return self._do(outputs, gather_each)

    def barrier(self, opts: Any = None) -> _Work:
        nothing = torch.zeros(1)
        return self._do([nothing], lambda: self._ring.sum(nothing))

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> _Work:
        return self._do(tensors, lambda: self._ring.send(tensors[0], to), alone=False)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> _Work:
        return self._do(tensors, lambda: self._ring.receive(tensors[0], source), alone=False)

    def _do(self, result: Result, steps: Callable[[], Steps], alone: bool = True) -> _Work:
        done: Future[Exception | None] = Future()
        work = _Work(done.then(partial(_result, result)))
        self._mesh.do(steps(), done.set_result, alone=alone)
        return work


def _each(steps: Callable[[Tensor], Steps], tensors: Sequence[Tensor]) -> Steps:
    for tensor in tensors:
        yield from steps(tensor)


def _result(found: Result, done: Future[Exception | None]) -> list[Tensor]:
    if (error := done.value()) is not None:
        raise error
    return found if isinstance(found, list) else found()
