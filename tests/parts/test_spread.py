"""A replica whose parts are on several machines trains what one on a single machine does, to the last bit."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import squall
from squall.launchers.leaving import LOST
from squall.parts.assembly import Assembly
from squall.parts.carrying import own_arena
from squall.parts.neighbours import NeighbourLost
from squall.protocol.effects import Compute, End, Keep, PreparePush, UseWeights
from squall.runtime.arena import Shape
from squall.runtime.driver import Host
from squall.runtime.job import Job
from tests import deep
from tests.launchers.processes import wait_for
from tests.parts.replica import DOWNPOUR, apart, compute, pushed, replica, train
from tests.parts.spread import Spread, spread, spread_replica
from tests.parts.test_local import Model, summed
from tests.parts.test_replica import Event
from tests.tasks import mean_square, numbers

CHAIN = squall.Pipeline(lambda m: [m.up, m.norm, m.down, m.again, m.wide, m.tanh, m.head], microbatches=4)
SPLITS: dict[str, tuple[Any, int, tuple[int, ...]]] = {  # and how many parts, and where stages begin
    "pipeline": (CHAIN, 2, (0, 3)),
    "pipeline of three, tied weights in the last two": (CHAIN, 3, (0, 1, 3)),
    "slices": (squall.Tensor({"down": "gathered", "wide": "column", "head": "row"}), 2, ()),
    "branches": (squall.Branches("down", "head"), 2, ()),
}


def model_task(split: Any, **options: Any) -> squall.Task:
    torch.manual_seed(3)
    options = {"loss": summed, "train": numbers(96), "batch_size": 16, "split": split} | options
    return squall.Task(model=Model(), **options)


@pytest.mark.parametrize("clip_norm", deep.sweep([1.0, None], 1))
@pytest.mark.parametrize("split", SPLITS)
def test_parts_on_several_machines_train_what_those_on_one_do(split: str, clip_norm: float | None) -> None:
    how, parts, starts = SPLITS[split]
    near, far = (
        trained(model_task(how, clip_norm=clip_norm), parts, train(10), starts) for trained in (replica, spread_replica)
    )
    assert torch.equal(far.vector, near.vector)
    assert far.losses == near.losses


@deep.only
def test_sums_of_three_slices_are_added_in_another_order() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))
    split = squall.Tensor({"0": "column", "2": "row"})
    task = squall.Task(model=model, loss=mean_square, train=numbers(64), batch_size=16, split=split)
    near, far = (trained(task, 3, train(10)) for trained in (replica, spread_replica))
    assert apart(far.vector, near.vector) < 1e-6


def accumulating(host: Host, job: Job) -> Any:
    """Several batches to a push, on weights that the replica moves by itself in between; a fetch into each buffer."""
    found = []
    for buffer in (0, 1):
        job.arena.weights(0, buffer).copy_(job.initial).mul_(1 + buffer)
        job.arena.rates(0, buffer).fill_(0.5)
        host.perform(UseWeights(buffer), 0.0)
        for number in range(3):
            effect = compute(job.task, 3 * buffer + number)
            host.perform(Compute(effect.epoch, effect.start, effect.stop, buffer, number > 0, number < 2), 0.0)
        found.append(pushed(host, job, buffer).clone())
    host.perform(End("finished"), 0.0)
    return torch.cat(found)


def exchanging(host: Host, job: Job) -> Any:
    """Of a replica with an optimizer of its own: what it pushes, three times."""
    fetched, found = job.arena.weights(0, 0), []
    for number in range(3):
        host.perform(UseWeights(0), 0.0)
        for batch in range(4):
            host.perform(compute(job.task, 4 * number + batch), 0.0)
        host.perform(PreparePush(0), 0.0)
        found.append(pushed(host, job, number).clone())
        fetched.mul_(0.9)
    host.perform(End("finished"), 0.0)
    return torch.cat(found)


def portions(host: Host, job: Job) -> Any:
    """Of Sandblaster: the sum of the portions that count, at two trial weights."""
    found = []
    for trial in range(2):
        job.arena.weights(0, 0).copy_(job.initial).mul_(1 + trial)
        host.perform(UseWeights(0), 0.0)
        for number, weight in enumerate((0.5, 0.25, 2.0)):
            host.perform(msgspec.structs.replace(compute(job.task, number), buffer=-1), 0.0)
            if number != 1:
                host.perform(Keep(0, weight, accumulate=number > 0), 0.0)
        found.append(pushed(host, job, trial).clone())
    host.perform(End("finished"), 0.0)
    return torch.cat(found)


OWN = squall.ElasticAveraging(replicas=1, every=4)
AHEAD = squall.Downpour(replicas=1, shards=1, overlap=True)  # two buffers
SOON_S = 5.0  # on a loaded machine


@pytest.mark.parametrize(
    ("script", "strategy"),
    [
        pytest.param(accumulating, AHEAD, id="steps"),
        pytest.param(exchanging, OWN, id="own", marks=deep.only),
        pytest.param(portions, squall.Sandblaster(replicas=1), id="portions"),
    ],
)
@pytest.mark.parametrize("split", deep.sweep(list(SPLITS), 1))
def test_whatever_a_replica_pushes_is_the_same(split: str, script: Any, strategy: Any) -> None:
    how, parts, starts = SPLITS[split]
    near, far = (
        trained(model_task(how), parts, script, starts, strategy) for trained in (replica, spread_replica)
    )  # fmt: skip
    assert torch.equal(far, near)
    assert near.any()


@pytest.mark.parametrize("dying", [0, 1, 2])
@pytest.mark.parametrize("at_work", [True, False])
def test_a_part_that_dies_ends_the_others_also_when_nobody_is_at_work(
    dying: int, at_work: bool, tmp_path: Path
) -> None:
    def die() -> None:
        (tmp_path / "died").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    event = Event(die) if at_work else nn.Identity()
    modules = [nn.Sequential(nn.Linear(6, 6), event) if part == dying else nn.Linear(6, 6) for part in range(3)]
    task = squall.Task(
        model=nn.Sequential(*modules, nn.Linear(6, 1)), loss=mean_square, train=numbers(64), batch_size=16,
        split=squall.Pipeline(microbatches=4),
    )  # fmt: skip

    def idle(host: Host, job: Job) -> Any:
        host.perform(UseWeights(0), 0.0)
        host.perform(compute(job.task, 0), 0.0)
        (tmp_path / "idle").touch()
        while True:
            wait(list(host.wakes))
            host.poll()

    with spread(task, 3, train() if at_work else idle, (0, 1, 2)) as found:
        if not at_work:
            wait_for((tmp_path / "idle").exists, 60, "the first batch")
            os.kill(found.processes[dying].pid, signal.SIGKILL)  # type: ignore[arg-type]
            (tmp_path / "died").write_text(str(time.monotonic()))
        answers = found.answers()
        ended = time.monotonic()
    assert ended - float((tmp_path / "died").read_text()) < SOON_S
    assert isinstance(answers[0], NeighbourLost) or dying == 0


def test_a_first_part_that_answers_nobody_is_a_lost_neighbour() -> None:
    found = Spread(model_task(CHAIN), 2, (0, 3), DOWNPOUR)
    found.listener.close()
    found.start(1, lambda: found.other(1))
    try:
        assert found.answers() == {1: None}, "else what it has raised"
        found.processes[0].join()
        assert found.processes[0].exitcode == LOST
    finally:
        found.processes[0].kill()


def test_a_part_that_goes_while_the_others_meet_is_a_lost_neighbour() -> None:
    """It has called the first part, and is killed before it says where it listens."""
    found = Spread(model_task(CHAIN), 3, (0, 1, 3), DOWNPOUR)

    def dies(self: Assembly, connection: Any, what: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def second() -> None:
        Assembly._say = dies  # type: ignore[method-assign]
        found.other(2)

    try:
        found.start(0, lambda: found.first(train()))
        found.start(1, lambda: found.other(1))
        found.start(2, second)
        answers = found.answers()
        found.processes[1].join()
    finally:
        for process in found.processes:
            process.kill()
    assert isinstance(answers[0], NeighbourLost)
    assert found.processes[1].exitcode == LOST


def test_a_part_of_its_own_machine_has_an_arena_larger_than_memory() -> None:
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert own_arena(Shape(size, 1)).weights(0, 0).numel() == size
