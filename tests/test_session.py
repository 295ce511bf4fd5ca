"""A session's batches and its optimizer, in one process: what an ordinary loop and a framework's loop rely on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import squall
from squall.protocol.core import Compute
from squall.session import Session
from squall.side import Side
from squall.task import Batch, Task
from tests.tasks import mean_square, numbers, plain

DATA = numbers(90)


class Replica(Side):
    """Hands out numbers as batches, and notes what the session does."""

    rank, replicas = 0, 2

    def __init__(self, batches: int = 6) -> None:
        self.work = iter(range(batches))
        self.stepped: list[int] = []
        self.losses: list[float | None] = []
        self.left = 0

    def begin(self, task: Task, epochs: int) -> None: ...

    def next(self) -> Compute | None:
        start = next(self.work, None)
        return None if start is None else Compute(0, start, start + 1, 0, False, False)

    def load(self, effect: Compute) -> Batch:
        return effect.start

    def accept(self, effect: Compute, loss: float | None, started: float) -> None:
        self.stepped.append(effect.start)
        self.losses.append(loss)

    def log(self, values: Mapping[str, float]) -> None: ...

    def leave(self) -> None:
        self.left += 1


@pytest.fixture
def side() -> Replica:
    return Replica()


@pytest.fixture
def session(side: Replica) -> Session:
    return Session(plain(), side, {})


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize(("batch_size", "length"), [(16, 6), (45, 2), (90, 1), (1000, 1)])
def test_the_length_is_an_epoch_of_all_replicas(session: Session, batch_size: int, length: int) -> None:
    assert len(session.batches(DATA, batch_size=batch_size, epochs=3)) == length


def test_every_iter_goes_on_where_the_last_one_stopped(session: Session, side: Replica) -> None:
    batches = session.batches(DATA)
    seen = []
    for _ in range(4):
        for batch in islice(batches, 2):
            seen.append(batch)
            session.step()
    assert seen == side.stepped == [0, 1, 2, 3, 4, 5]
    assert side.left == 1, "the fourth loop found the data used up"
    assert list(batches) == []


def test_batches_that_are_held_are_not_left_by_a_break(session: Session, side: Replica) -> None:
    batches = session.batches(DATA)
    for batch in batches:
        session.step()
        if batch == 2:
            break
    assert side.left == 0
    batches.close()
    assert side.left == 1
    assert list(batches) == []


def test_a_plain_loop_that_breaks_has_left(session: Session, side: Replica) -> None:
    for _ in session.batches(DATA):
        break
    assert side.left == 1
    with pytest.raises(RuntimeError, match="has no batch"):
        session.step()


def test_a_batch_that_is_not_stepped_is_an_error_in_the_next_iter_too(session: Session, side: Replica) -> None:
    batches = session.batches(DATA)
    next(iter(batches))
    with pytest.raises(RuntimeError, match=r"a batch was not stepped: call session\.step\(loss\)"):
        next(iter(batches))
    assert side.left == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"epochs": 0}, "epochs is 0"), ({"batch_size": 0}, "batch_size is 0"), ({"sampler": []}, "sets sampler")],
)
def test_wrong_arguments_are_told_and_can_be_mended(session: Session, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        session.batches(DATA, **arguments)
    assert len(session.batches(DATA)) == 2


def test_a_script_alone_gets_every_example_once_an_epoch() -> None:
    model = plain()
    session = squall.join(model)
    batches = session.batches(DATA, batch_size=16, epochs=2)
    seen = []
    for _ in range(2):  # by its own count: the batches are never asked for a thirteenth
        for batch in islice(batches, len(batches)):
            seen.append(batch[0])
            mean_square(model, batch).backward()
            session.step()
    for epoch in (seen[:6], seen[6:]):
        assert sorted(torch.cat(epoch).tolist()) == sorted(DATA.tensors[0].tolist())
    assert list(batches) == []


# ---------------------------------------------------------------- the optimizer


@pytest.fixture
def stepping(session: Session) -> Iterator[None]:
    """One batch, not stepped yet."""
    batches = session.batches(DATA)
    next(iter(batches))
    yield
    batches.close()


@pytest.mark.usefixtures("stepping")
def test_a_constant_scheduler_is_fine(session: Session, side: Replica) -> None:
    scheduler = LambdaLR(session.optimizer, lambda step: 1)
    session.optimizer.step()
    scheduler.step()
    assert side.stepped == [0]
    assert side.losses == [None]


@pytest.mark.usefixtures("stepping")
def test_a_scheduler_that_changes_the_rate_is_an_error_at_the_next_step(session: Session, side: Replica) -> None:
    LambdaLR(session.optimizer, lambda step: 0.5)
    with pytest.raises(ValueError, match=r"0\.5, which has no effect.*squall\.join\(model, schedule=\.\.\.\)"):
        session.optimizer.step()
    assert side.stepped == []


@pytest.mark.usefixtures("stepping")
def test_a_closure_is_called_with_gradients_on_and_tells_the_loss(session: Session, side: Replica) -> None:
    def closure() -> torch.Tensor:
        return torch.ones(1, requires_grad=True).sum() * 3

    with torch.no_grad():
        loss = session.optimizer.step(closure)
    assert loss.requires_grad
    assert side.losses == [3.0]


def test_an_optimizer_that_is_saved_and_loaded_still_steps_its_session(session: Session, side: Replica) -> None:
    session.optimizer.load_state_dict(session.optimizer.state_dict())  # what accelerate does to move it
    for _ in session.batches(DATA):
        session.optimizer.step()
    assert side.stepped == [0, 1, 2, 3, 4, 5]
