"""A replica of real processes, each with its host, on buffers that they share; a plain optimizer in a shard's place."""

from __future__ import annotations

import mmap
import multiprocessing as mp
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import squall
from squall.parts.host import Speaker, follow
from squall.parts.inside import inside
from squall.parts.neighbours import NeighbourLost, Neighbours
from squall.plan import make_plan
from squall.protocol.effects import Compute, End, Payload, UseWeights
from squall.protocol.events import GradientComputed
from squall.protocol.nodes import Node
from squall.runtime.driver import Host
from squall.runtime.groups import Group
from squall.runtime.hosts import ReplicaHost
from squall.runtime.job import Job, private_job
from squall.runtime.portions import PortionHost
from squall.runtime.seeds import epoch_order
from squall.vector import Layout
from tests.tasks import INLINE

SEED = 5
WITHIN_S = 60.0


class Trained(NamedTuple):
    """What came of some steps of SGD with momentum: the whole model's weights and buffers, and each batch's numbers."""

    vector: Tensor
    losses: list[float]
    extras: list[dict[str, float] | None]


Script = Callable[[Host, Job], Any]


DOWNPOUR = squall.Downpour(replicas=1, shards=1)


def job_of(task: squall.Task, strategy: squall.Strategy = DOWNPOUR) -> Job:
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    plan = make_plan(strategy, INLINE, seed=SEED)
    job = private_job(plan, strategy, task, layout, Path("/nowhere"))
    job.arena.weights(0, 0).copy_(job.initial)
    return job


def replica(
    task: squall.Task, parts: int, script: Script, starts: Sequence[int] = (), strategy: squall.Strategy = DOWNPOUR
) -> Any:
    """What the script returns, which part 0 runs with its host; the others follow. Raises what a part has raised."""
    found = answers(task, parts, script, starts, strategy)
    failed = sorted((a for a in found.values() if isinstance(a, Exception)), key=lambda a: isinstance(a, NeighbourLost))
    if failed:
        raise failed[0]  # one of the user's own, if there is one
    return found[0]


def answers(
    task: squall.Task, parts: int, script: Script, starts: Sequence[int] = (), strategy: squall.Strategy = DOWNPOUR
) -> dict[int, Any]:
    """By part, what it has returned or raised; nothing of one that was killed."""
    job, context = job_of(task, strategy), mp.get_context("fork")
    own = torch.frombuffer(mmap.mmap(-1, 4 * job.layout.length), dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(parts)]
        started = [
            context.Process(target=_enter, args=(job, own, folder, part, parts, script, starts, pipes[part][1]))
            for part in range(parts)
        ]
        for process in started:
            process.start()
        for _, ours in pipes:
            ours.close()
        try:
            return _received([pipe for pipe, _ in pipes])
        finally:
            for process in started:
                process.kill()
                process.join()


def _received(pipes: list[Connection]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = wait(list(waiting.values()), WITHIN_S)
        assert ready, f"parts {sorted(waiting)} do not end"
        for part, pipe in list(waiting.items()):
            if pipe in ready:
                del waiting[part]
                with suppress(EOFError):  # it was killed
                    found[part] = pickle.loads(pipe.recv_bytes())
    return found


def _enter(
    job: Job, own: Tensor, folder: str, part: int, parts: int, script: Script, starts: Sequence[int], pipe: Connection
) -> None:
    torch.set_num_threads(1)
    try:
        neighbours = Neighbours(Group("replica", Path(folder), [os.getpid()] * parts, part), part, parts)
        portions = isinstance(job.strategy, squall.Sandblaster)
        if parts == 1:
            host: Host = PortionHost(job, 0) if portions else ReplicaHost(job, 0)
            pipe.send_bytes(pickle.dumps(script(host, job)))
            os._exit(0)
        place = inside(job.task, job.layout, starts, neighbours, torch.device("cpu"))
        host = PortionHost(job, 0, place) if portions else ReplicaHost(job, 0, place, own)
        if part == 0:
            pipe.send_bytes(pickle.dumps(script(Speaker(host, neighbours, job.recipe.work.local is not None), job)))
        else:
            follow(host, neighbours)
            pipe.send_bytes(pickle.dumps(None))
    except Exception as error:
        error.at = time.monotonic()  # type: ignore[attr-defined]
        pipe.send_bytes(pickle.dumps(error))
    os._exit(0)


def train(steps: int = 50, lr: float = 0.1) -> Script:
    """SGD with momentum on what the replica pushes."""

    def script(host: Host, job: Job) -> Trained:
        weights, layout = job.arena.weights(0, 0), job.layout
        velocity = torch.zeros(layout.tail)
        losses, extras = [], []
        for number in range(steps):
            host.perform(UseWeights(0), 0.0)
            computed = host.perform(compute(job.task, number), 0.0)
            assert isinstance(computed, GradientComputed)
            losses.append(computed.loss)
            extras.append(computed.extras)
            gradient = pushed(host, job, number)
            if computed.finite:
                velocity.mul_(0.9).add_(gradient[: layout.tail])
                weights[: layout.tail].sub_(lr * velocity)
                weights[layout.tail : layout.counted] = gradient[layout.tail : layout.counted]
                weights[layout.counted :] += gradient[layout.counted :]
        host.perform(End("finished"), 0.0)
        return Trained(weights.clone(), losses, extras)

    return script


def pushed(host: Host, job: Job, number: int) -> Tensor:
    """The gradient, as it lies there when it is pushed."""
    host.attach(Payload("gradient", Node("replica", 0), 0, number, 0))
    return job.arena.gradient(0, 0)


def compute(task: squall.Task, number: int) -> Compute:
    """Of the batch with this number: epoch after epoch, a short one at each end."""
    each = -(-task.examples // task.batch_size)
    epoch, start = divmod(number, each)
    start *= task.batch_size
    return Compute(epoch, start, min(start + task.batch_size, task.examples), 0, False, False)


def plain(task: squall.Task, microbatches: int, steps: int = 50, lr: float = 0.1) -> Trained:
    """The same in one process, by plain PyTorch on the same microbatches of tensors."""
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    parameters = layout.parameters_of(task.model)
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    losses, extras = [], []
    rows = task.batch_size // microbatches
    for number in range(steps):
        effect = compute(task, number)
        indices = epoch_order(SEED, effect.epoch, task.examples, task.shuffle)[effect.start : effect.stop]
        optimizer.zero_grad()
        total, beside = 0.0, {}
        for piece in indices.split(rows):
            loss = task.loss(task.model, [t[piece] for t in task.train.tensors])  # type: ignore[attr-defined]
            loss, more = loss if isinstance(loss, tuple) else (loss, {})
            share = len(piece) / len(indices)
            (loss * share).backward()
            total += share * loss.item()
            for name, value in more.items():
                beside[name] = beside.get(name, 0.0) + share * float(value)
        if task.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, task.clip_norm)
        optimizer.step()
        losses.append(total)
        extras.append(beside or None)
    vector = torch.zeros(layout.length)
    layout.write_model(task.model, vector)
    return Trained(vector, losses, extras)


def apart(one: Tensor, other: Tensor) -> float:
    """How far two vectors are apart, relative to their length."""
    return ((one - other).norm() / other.norm()).item()
