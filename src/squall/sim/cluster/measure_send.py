"""The time until what a part sends is with its neighbour, against its size: in a pipeline that computes nothing.

Two processes are forked and run what the parts of a replica run, on microbatches of one number. What a microbatch takes
them is one way there or back, with all that torch and Python do for it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from squall import splits
from squall.launchers.control_pipe import ControlPipe
from squall.protocol.effects import Compute, UseWeights
from squall.runtime.groups import Group
from squall.runtime.hosts import ReplicaHost
from squall.runtime.job import Job
from squall.runtime.processes import keep_freed_memory
from squall.sim.cluster.forks import forked
from squall.sim.cluster.measure_run import endless_job
from squall.sim.cluster.quiet import Chunks, Enough, calmest, core_s, moment, times_of, waited_s
from squall.strategies import Downpour
from squall.task import Task
from squall.vector import Layout

MANY, FEWEST, MOMENTS = 17, 2, 4  # microbatches; batches of a moment; moments
SEND_BYTES = 16 * MANY  # an element: of every microbatch on its way, both parts


def send_seconds(elements: int, seconds: float) -> float:
    """Of so many float32 elements, one way; measured for about `seconds`."""
    import squall.parts.inside  # noqa: F401  # before the fork, in which both would import it

    model = nn.Sequential(_Handing(elements), _Handing(1))
    data = TensorDataset(torch.zeros(MANY))
    split = splits.Pipeline(microbatches=MANY)
    task = Task(model=model, loss=_loss, train=data, batch_size=MANY, split=split)
    layout = Layout.of(model, [group["params"] for group in task.param_groups()])
    with tempfile.TemporaryDirectory(prefix="squall-measure-") as folder:
        job = replace(endless_job(task, layout, Downpour(replicas=1), 1, folder), starts=(0, 1))
        with forked([partial(_part, job, 1), partial(_part, job, 0)]) as lines:
            turns = [[moment(lines[1:], seconds / MOMENTS, beside=lines[:1])] for _ in range(MOMENTS)]
    return statistics.median(times_of(turn[0] for turn in calmest(turns)))


class _Handing(nn.Module):
    """Hands on so many elements, whatever it is given, and computes nothing."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.zeros(()))
        self._handed = torch.zeros(1, elements)

    def forward(self, inputs: Tensor) -> Tensor:
        handed: Tensor = _Handed.apply(inputs, self.point, self._handed)  # type: ignore[no-untyped-call]
        return handed


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, point: Tensor, handed: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return handed.detach()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (inputs,) = ctx.saved_tensors
        back = inputs.detach() if ctx.needs_input_grad[0] else None
        return back, torch.zeros(()), None


def _loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch[0]).sum()
    return loss


def _part(job: Job, part: int, line: ControlPipe) -> None:
    from squall.parts.host import Speaker, follow
    from squall.parts.inside import inside
    from squall.parts.neighbours import Neighbours

    torch.set_num_threads(1)
    keep_freed_memory()
    neighbours = Neighbours(Group("send", Path(job.directory), [os.getpid()] * 2, part), part, 2)
    host = ReplicaHost(job, 0, inside(job.task, job.layout, job.starts, neighbours, torch.device("cpu")))
    if part > 0:
        neighbours.send(torch.tensor([os.getpid()]), 0)
        follow(host, neighbours)
        return
    pids = os.getpid(), int(neighbours.receive(torch.tensor([0]), 1).item())
    speaker, chunks = Speaker(host, neighbours), Chunks(line)
    times: list[float] = []
    speaker.perform(UseWeights(0), 0.0)
    _batch_s(speaker, MANY, pids), _batch_s(speaker, 1, pids)  # whose shapes torch has not seen yet
    with suppress(Enough):
        chunks.begin()
        while True:
            if len(times) >= FEWEST and chunks.over():
                chunks.next(times=times)
                times = []
            times.append(max(0.0, _batch_s(speaker, MANY, pids) - _batch_s(speaker, 1, pids)) / (MANY - 1))


def _batch_s(speaker: Any, microbatches: int, pids: Sequence[int]) -> float:
    """Seconds, without those for which one of the two was ready and had no core: the other waits for it then.

    Where both are ready at once that is too much, but they cannot be faster than their work on two cores.
    """
    waited, core, began = _sum(waited_s, pids), _sum(core_s, pids), time.perf_counter()
    speaker.perform(Compute(0, 0, microbatches, 0, accumulate=False, local_step=False), 0.0)
    seconds = time.perf_counter() - began
    return max(seconds - (_sum(waited_s, pids) - waited), (_sum(core_s, pids) - core) / len(pids))


def _sum(of_process: Callable[[int], float], pids: Sequence[int]) -> float:
    return sum(of_process(pid) for pid in pids)
