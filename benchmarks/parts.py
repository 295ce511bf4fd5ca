"""Replicas of two processes: against bare torch with the same stages or slices, and their memory against one process's.

Both loops are in the same two processes, one thread each, and alternate; a step is forward and backward passes up to
gradients that are complete. Ours begins at the host of the replica's first part and ends with gradients in the arena,
looked at for NaN; bare torch's leaves them where autograd made them. Neither has an optimizer. Then both train, with
SGD: ours is a run, whose gradients go to two shards in every step, and whose weights come from there.
"""

from __future__ import annotations

import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

import squall
from benchmarks.results import Section, median_ratio, rounds
from benchmarks.squall_training import STEADY_AFTER_S, steady
from squall.parts.host import Speaker, follow
from squall.parts.inside import inside
from squall.parts.neighbours import Neighbours
from squall.plan import make_plan
from squall.protocol.effects import Compute, UseWeights
from squall.runtime.groups import Group
from squall.runtime.hosts import ReplicaHost
from squall.runtime.job import Job, private_job
from squall.runtime.processes import keep_freed_memory, private_bytes
from squall.vector import Layout

PARTS = 2
MICROBATCHES = 8
ROUNDS = 12
STEPS = 6  # of each in a round
BATCHES = 4
TRAININGS = 5
MEMORY_STEPS = 24
TRAINING_S, TRAINING_STEPS = 6.0, 30  # of ours, and of bare torch
LR = 0.01
STRATEGY = squall.Downpour(replicas=1, optimizer=partial(torch.optim.SGD, lr=LR))
Step = Callable[[int], object]


class Block(nn.Module):
    """Two layers of a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.down(self.up(inputs).relu())
        return hidden.relu()


def task(split: squall.splits.Split, width: int, blocks: int, batch: int) -> squall.Task:
    torch.manual_seed(0)
    inputs, targets = torch.randn(2, BATCHES * batch, width).unbind()
    model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    return squall.Task(model=model, loss=_loss, train=TensorDataset(inputs, targets), batch_size=batch, split=split)


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return _error(model(batch[0]), batch[1])


def _error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def measure(width: int = 1024, blocks: int = 4, batch: int = 512) -> Section:
    print("parts", flush=True)
    section = Section(
        "Replicas of two processes",
        f"Steps of a perceptron with {2 * blocks} layers of {width}, {batch} examples, {MICROBATCHES} microbatches, on"
        " 2 processes of one thread, against bare torch with the same stages or slices in the same processes. Memory:"
        " that of the larger part that it shares with nobody, against a whole replica's, in a run each, behind"
        f" {MEMORY_STEPS} steps: of 8 layers of 256 and 16,384 examples, of 32 layers of 1,024 and 256 examples (33.6"
        " million parameters), and of 8 layers of 2,048 and 256 examples (16 MiB each).",
    )
    starts = (0, blocks // 2)
    splits: dict[str, squall.splits.Split] = {
        "pipeline, 1F1B": squall.Pipeline(microbatches=MICROBATCHES),
        "pipeline, GPipe": squall.Pipeline(microbatches=MICROBATCHES, schedule="gpipe"),
        "slices": squall.Tensor({"*.up": "column", "*.down": "row"}),
    }
    for name, split in splits.items():
        own, bare = _run(_race, _job(task(split, width, blocks, batch)), starts)[0]
        ratio = statistics.median(b / o for o, b in zip(own, bare))
        print(f"  {name}: {ratio:.3f}", flush=True)
        section.at_least(name, _rate(own, batch), f"bare {_rate(bare, batch)}", ratio, 0.92)
    for name in ("pipeline, 1F1B", "slices"):
        given = partial(task, splits[name], width, blocks, batch)
        found = rounds(
            {
                name: lambda given=given: _trained(given),  # type: ignore[misc]
                "bare": lambda given=given: min(_run(_train_bare, _job(given()), starts)),  # type: ignore[misc]
            },
            TRAININGS,
        )
        ours, theirs = (f"{statistics.median(rates):,.0f} examples/s" for rates in found.values())
        ratio = median_ratio(found[name], found["bare"])
        section.at_least(f"{name}, an exchange every step", ours, f"bare {theirs}", ratio, 0.85)
    sizes = {
        "mostly activations": (256, 4, 16384),
        "mostly parameters": (1024, 16, 256),
        "large layers": (2048, 4, 256),
    }
    for name, of in sizes.items():
        parts = _memory(partial(task, splits["pipeline, 1F1B"], *of), PARTS)
        (whole,) = _memory(partial(task, splits["pipeline, 1F1B"], *of), 1)
        print(f"  memory, {name}: {parts} of {whole} MiB", flush=True)
        what = f"memory of a part, {name}"
        section.at_most(what, f"{max(parts):.0f} MiB", f"whole {whole:.0f} MiB", max(parts) / whole, 0.6)
    return section


def _rate(seconds: list[float], batch: int) -> str:
    return f"{batch / statistics.median(seconds):,.0f} examples/s"


def _job(given: squall.Task) -> Job:
    layout = Layout.of(given.model, [group["params"] for group in given.param_groups()])
    strategy = squall.Downpour(replicas=1, shards=1)
    job = private_job(make_plan(strategy, squall.Settings()), strategy, given, layout, Path())
    job.arena.weights(0, 0).copy_(job.initial)
    return job


def _run(work: Callable[..., Any], job: Job, starts: tuple[int, ...], parts: int = PARTS) -> list[Any]:
    """What each part's process returns."""
    context = get_context("fork")
    barrier, results = context.Barrier(parts), context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (work, job, starts, parts, folder, barrier, results)
        processes = [context.Process(target=_enter, args=(part, *arguments)) for part in range(parts)]
        for process in processes:
            process.start()
        found = dict(results.get() for _ in processes)
        for process in processes:
            process.join()
    return [found[part] for part in range(parts)]


def _enter(
    part: int, work: Callable[..., Any], job: Job, starts: tuple[int, ...], parts: int, folder: str, barrier: Barrier,
    results: Any,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    keep_freed_memory()
    members = [os.getpid()] * parts  # none of them dies
    neighbours = Neighbours(Group("parts", Path(folder), members, part), part, parts) if parts > 1 else None
    results.put((part, work(job, starts, neighbours, barrier)))
    os._exit(0)


def _race(
    job: Job, starts: tuple[int, ...], neighbours: Neighbours, barrier: Barrier
) -> tuple[list[float], list[float]]:
    """Seconds of a step, ours and bare torch's, round by round."""
    bare, _ = bare_step(job.task, starts, neighbours)
    host = ReplicaHost(job, 0, inside(job.task, job.layout, starts, neighbours, torch.device("cpu")))
    speaker = Speaker(host, neighbours)
    own: Step = lambda number: speaker.perform(_compute(job.task, number), 0.0)  # noqa: E731
    seconds: tuple[list[float], list[float]] = ([], [])
    if neighbours.part == 0:
        speaker.perform(UseWeights(0), 0.0)
    for number in range(ROUNDS + 1):
        for step, found in zip((own, bare), seconds):
            barrier.wait()
            started = time.perf_counter()
            if step is own and neighbours.part > 0:
                follow(host, neighbours, STEPS)
            else:
                for each in range(STEPS):
                    step(each)
            barrier.wait()
            if number > 0:
                found.append((time.perf_counter() - started) / STEPS)
    return seconds


def _compute(given: squall.Task, number: int) -> Compute:
    start = number % BATCHES * given.batch_size
    return Compute(0, start, start + given.batch_size, 0, False, False)


def bare_step(given: squall.Task, starts: tuple[int, ...], neighbours: Neighbours) -> tuple[Step, nn.Module]:
    """Forward and backward passes of this part by torch alone, and the module that has its parameters."""
    model = copy.deepcopy(given.model)
    assert isinstance(model, nn.Sequential)
    inputs, targets = given.train.tensors  # type: ignore[attr-defined]
    order = torch.randperm(len(inputs))
    batches = [order[n * given.batch_size : (n + 1) * given.batch_size] for n in range(BATCHES)]
    if isinstance(given.split, squall.Pipeline):
        name = {"1f1b": "1F1B", "gpipe": "GPipe"}[given.split.schedule]
        own = model[: starts[1]] if neighbours.part == 0 else model[starts[1] :]
        stage = PipelineStage(own, neighbours.part, PARTS, torch.device("cpu"), group=neighbours.torch)
        schedule: Any = get_schedule_class(name)(stage, MICROBATCHES, _error)

        def step(number: int) -> None:
            own.zero_grad(set_to_none=True)
            chosen = batches[number % BATCHES]
            if stage.is_first:
                schedule.step(inputs[chosen], return_outputs=False)
            else:
                losses: list[Tensor] = []
                schedule.step(target=targets[chosen], losses=losses, return_outputs=False)
                torch.stack(losses).mean().item()

        return step, own
    mesh = DeviceMesh.from_group(neighbours.torch, "cpu")
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def sliced(number: int) -> None:
        model.zero_grad(set_to_none=True)
        chosen = batches[number % BATCHES]
        loss = _error(model(inputs[chosen]), targets[chosen])
        loss.backward()
        loss.item()

    return sliced, model


def _trained(given: Callable[[], squall.Task]) -> float:
    """Examples a second of a run."""
    strategy = squall.Synchronous(replicas=1, shards=PARTS, optimizer=partial(torch.optim.SGD, lr=LR))
    settings = squall.Settings(
        threads=1, seconds=TRAINING_S + STEADY_AFTER_S, snapshot_every_s=None, progress=False, parts=PARTS
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder:
        return steady(squall.fit(given, strategy, run_dir=Path(folder) / "run", settings=settings))


def _train_bare(job: Job, starts: tuple[int, ...], neighbours: Neighbours, barrier: Barrier) -> float:
    """Examples a second of torch alone."""
    compute, own = bare_step(job.task, starts, neighbours)
    optimizer = torch.optim.SGD(own.parameters(), lr=LR)

    def step(number: int) -> None:
        compute(number)
        optimizer.step()

    for number in range(STEPS):
        step(number)
    barrier.wait()
    started = time.perf_counter()
    for number in range(TRAINING_STEPS):
        step(number)
    barrier.wait()
    return TRAINING_STEPS * job.task.batch_size / (time.perf_counter() - started)


def _memory(given: Callable[[], squall.Task], parts: int) -> list[float]:
    """MiB of its own that each process of a replica has in the last steps of a run."""
    settings = squall.Settings(threads=1, snapshot_every_s=None, progress=False, parts=parts)
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder:
        notes = Path(folder) / "notes"
        run = partial(_noting, given, notes, (MEMORY_STEPS - 2) * (MICROBATCHES if parts > 1 else 1))
        squall.fit(run, STRATEGY, steps=MEMORY_STEPS, run_dir=Path(folder) / "run", settings=settings)
        found = dict(line.split() for line in notes.read_text().splitlines())
    assert len(found) == parts
    return [int(each) / 2**20 for each in found.values()]


def _noting(given: Callable[[], squall.Task], notes: Path, beyond: int) -> squall.Task:
    """The task, whose loss function tells the memory of its process when it was called so often."""
    calls = count()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if next(calls) > beyond:
            with notes.open("a") as file:
                file.write(f"{os.getpid()} {private_bytes()}\n")
        return _loss(model, batch)

    return replace(given(), loss=loss)


if __name__ == "__main__":
    print(measure().markdown())
