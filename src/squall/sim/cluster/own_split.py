"""What a batch is to the parts of a task's replica: measured here, as shares of the whole replica's step.

Each part's work is done in this process, so that nobody waits: stages one by one on a microbatch, slices with a group
of torch's that sends nothing, branches on what the model calls them with. What goes between parts is counted.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from squall import splits
from squall.launchers.control_pipe import ControlPipe
from squall.parts.branches import entrances
from squall.parts.check import check_split
from squall.parts.microbatches import Call, given, in_pieces, taken
from squall.parts.slices import layers_of, slice_layers
from squall.parts.stages import Stage, chain_of, cut_chain
from squall.runtime.inside import computing
from squall.runtime.processes import keep_freed_memory
from squall.sim.cluster.forks import answer, forked
from squall.sim.cluster.quiet import Stopwatch
from squall.sim.cluster.split_step import ParallelStep, PipelineStep, SplitStep
from squall.strategies.work import ring_share
from squall.task import Batch, Task, first_batch, loss_and_extras, untouched

CPU = torch.device("cpu")
FEWEST, ROUNDS, ROUNDS_S = 3, 9, 4.0  # rounds at least and at most, and seconds of them
Work = Callable[[], object]
Waits = list[tuple[float, int]]


def own_split(task: Task, parts: int) -> SplitStep:
    """Of a batch of the task's on so many parts. The model is left as it is.

    Raises `ValueError` for what cannot be split, as a run would.
    """
    starts, _ = check_split(task, parts)
    batch = first_batch(task, task.train)
    with untouched(task.model), _without_gradients(task.model):
        match task.split:
            case splits.Pipeline() as split:
                return _pipeline(task, split, cut_chain(chain_of(split, task.model), starts), batch)
            case splits.Tensor() as split:
                return _slices(task, split, parts, batch)
            case splits.Branches() as split:
                return _branches(task, split, batch)
    raise AssertionError(f"no parts of {task.split!r}")


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)


def _shares(whole: Work, works: Sequence[Work]) -> list[float]:
    """What each takes, by what the whole step takes, where freed memory is kept as in a run.

    Else the whole step, which frees all gradients at once, has page faults that its parts do not have.
    """
    if torch.get_num_threads() > 1:  # a pool of threads does not survive a fork
        return _in_rounds(whole, works)
    with forked([partial(_keeping, whole, works)]) as lines:
        shares: list[float] = answer(*lines)["shares"]
    return shares


def _keeping(whole: Work, works: Sequence[Work], line: ControlPipe) -> None:
    keep_freed_memory()
    line.say(shares=_in_rounds(whole, works))


def _in_rounds(whole: Work, works: Sequence[Work]) -> list[float]:
    """Medians of rounds in which all have their turn."""
    rounds: list[list[float]] = []
    whole()  # there may be threads now that there were not before
    watch, until = Stopwatch(torch.get_num_threads()), time.monotonic() + ROUNDS_S
    while len(rounds) <= FEWEST or (len(rounds) <= ROUNDS and time.monotonic() < until):
        times = []
        for work in (whole, *works):
            watch.restart()
            work()
            times.append(watch.seconds())
        rounds.append([seconds / times[0] for seconds in times[1:]])
    return [statistics.median(each) for each in zip(*rounds[1:])]  # the first warms up


def _whole(task: Task, model: nn.Module, batch: Batch) -> Work:
    def work() -> None:
        model.zero_grad(set_to_none=True)
        with computing(task, CPU):
            loss, _ = loss_and_extras(task.loss(model, batch))
        loss.backward()

    return work


def _size(value: Any) -> float:
    """In elements of float32."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 4


# ---------------------------------------------------------------- pipelines


def _pipeline(task: Task, split: splits.Pipeline, stages: Sequence[Stage], batch: Batch) -> PipelineStep:
    piece = in_pieces(batch, task.batch_size // split.microbatches)[0][1]
    call, works, passed = given(task.loss, task.model, piece), [], []
    for number, stage in enumerate(stages):
        last = number == len(stages) - 1
        with computing(task, CPU):
            output = stage(*call[0], **call[1])
        works.append(_stage(task, stage, call, piece if last else None))
        passed.append(round(split.microbatches * _size(output)))
        call = (output if isinstance(output, tuple) else (output,)), {}
    shares = _shares(_whole(task, task.model, batch), works)
    return PipelineStep(
        shares=tuple(split.microbatches * share for share in shares), passed=tuple(passed[:-1]),
        microbatches=split.microbatches, schedule=split.schedule,
    )  # fmt: skip


def _stage(task: Task, stage: Stage, call: Call, piece: Batch | None) -> Work:
    """Forward and backward of a microbatch, whose gradients are added to those that are there. `piece`: the last's."""

    def work() -> None:
        args, kwargs = pytree.tree_map(_detached, call)
        with computing(task, CPU):
            output = stage(*args, **kwargs)
            if piece is not None:
                output, _ = loss_and_extras(taken(task.loss, task.model, piece, output))
        ends = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])

    return work


def _detached(value: Any) -> Any:
    """As the beginning of a graph of its own."""
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


# ---------------------------------------------------------------- slices


def _slices(task: Task, split: splits.Tensor, parts: int, batch: Batch) -> ParallelStep:
    waits = _sums(task, split, parts, batch)
    with forked([partial(_slice, task, split, parts, batch)]) as lines:  # torch remembers groups for ever
        share: float = answer(*lines)["share"]
    return ParallelStep(shares=(share,) * parts, waits=tuple(waits))


def _slice(task: Task, split: splits.Tensor, parts: int, batch: Batch, line: ControlPipe) -> None:
    """Of a process that takes itself for the first of so many, and hears nothing of the others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=parts)
    assert dist.group.WORLD is not None
    model = copy.deepcopy(task.model)
    slice_layers(split, model, DeviceMesh.from_group(dist.group.WORLD, "cpu"))
    (share,) = _shares(_whole(task, task.model, batch), [_whole(task, model, batch)])
    line.say(share=share)


def _sums(task: Task, split: splits.Tensor, parts: int, batch: Batch) -> Waits:
    """A column layer sums the gradients of its inputs, a row layer its outputs; gathered outputs are put together."""
    waits: Waits = []

    def count(slicing: splits.Slicing) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if slicing == "row":
                waits.append((ring_share(parts) * _size(output), 2 * (parts - 1)))
            elif inputs[0].requires_grad:
                waits.append((ring_share(parts) * _size(inputs[0]), 2 * (parts - 1)))
            if slicing == "gathered":
                waits.append((ring_share(parts) / 2 * _size(output), parts - 1))

        return hook

    with ExitStack() as stack, computing(task, CPU):
        for name, slicing in layers_of(split, task.model).items():
            stack.callback(task.model.get_submodule(name).register_forward_hook(count(slicing)).remove)
        task.loss(task.model, batch)
    return waits


# ---------------------------------------------------------------- branches


def _branches(task: Task, split: splits.Branches, batch: Batch) -> ParallelStep:
    calls: list[list[tuple[nn.Module, Call, float]]] = [[] for _ in split.names]  # of each branch, and what comes out

    def see(number: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls[number].append((module, (args, kwargs), _size(output)))

        return hook

    with ExitStack() as stack, computing(task, CPU):
        for number, name in enumerate(split.names):
            for module in entrances(task.model.get_submodule(name)):
                stack.callback(module.register_forward_hook(see(number), with_kwargs=True).remove)
        task.loss(task.model, batch)
    works = [_branch(task, made) for made in calls]
    own = _shares(_whole(task, task.model, batch), works)
    shared = max(0.0, 1 - sum(own))
    waits: Waits = []
    for turn in zip(*calls):
        for sizes in ([output for _, _, output in turn], [_size(_differentiable(call)) for _, call, _ in turn]):
            if sum(sizes):  # each part has its own
                waits.append((sum(sizes) - min(sizes), 1))
    return ParallelStep(shares=tuple(shared + share for share in own), waits=tuple(waits))


def _branch(task: Task, calls: Sequence[tuple[nn.Module, Call, float]]) -> Work:
    works = [_stage(task, Stage([module]), call, None) for module, call, _ in calls]

    def work() -> None:
        for each in works:
            each()

    return work


def _differentiable(call: Call) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor) and leaf.requires_grad]
