"""A session's batches and its optimizer, in one process: what an ordinary loop and a framework's loop rely on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

import squall
from squall.protocol.effects import Compute
from squall.protocol.messages import Factors
from squall.runtime.seeds import epoch_order
from squall.session.backend import SessionBackend
from squall.session.batches import Batches
from squall.session.optimizer import taken_apart
from squall.session.session import Session
from squall.task import Batch, Task
from tests.tasks import mean_square, numbers, plain

DATA = numbers(90)


class Replica(SessionBackend):
    """Hands out numbers as batches, and notes what the session does."""

    rank, replicas = 0, 2

    def __init__(self, batches: int = 6) -> None:
        self.work = iter([(0, number) for number in range(batches)])  # epoch, and what the batch is
        self.stepped: list[int] = []
        self.skipped: list[int] = []
        self.done_with: list[int] = []
        self.spoil: int | None = None  # whose gradients are not finite
        self.losses: list[float | None] = []
        self.factors: list[Factors] = []
        self.logged: list[dict[str, float]] = []
        self.left = 0

    def begin(self, task: Task, epochs: int) -> None: ...

    def next(self) -> Compute | None:
        epoch, start = next(self.work, (None, 0))
        return None if epoch is None else Compute(epoch, start, start + 1, 0, False, False)

    def load(self, effect: Compute) -> Batch:
        return effect.start

    def accept(
        self, effect: Compute, loss: float | None, started: float, factors: Factors = (), over: bool = True
    ) -> bool:  # fmt: skip
        self.stepped.append(effect.start)
        self.losses.append(loss)
        self.factors.append(factors)
        return effect.start != self.spoil

    def done(self, effect: Compute) -> None:
        self.done_with.append(effect.start)

    def skip(self, effect: Compute) -> None:
        self.skipped.append(effect.start)

    def log(self, values: Mapping[str, float]) -> None:
        self.logged.append(dict(values))

    def leave(self) -> None:
        self.left += 1


class Shown:
    """Hands batches on as tqdm does."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:  # noqa: UP028  a frame of its own, as tqdm has it
            yield batch


@pytest.fixture
def backend() -> Replica:
    return Replica()


@pytest.fixture
def session(backend: Replica) -> Session:
    return Session(plain(), backend, {})


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize(("batch_size", "length"), [(16, 6), (45, 2), (90, 1), (1000, 1)])
def test_the_length_is_what_there_is_to_come_and_that_of_an_epoch_is_its_own(
    session: Session, batch_size: int, length: int
) -> None:
    batches = session.batches(DATA, batch_size=batch_size, epochs=3)
    assert (len(batches), len(batches.epoch)) == (3 * length, length)


def test_a_loop_that_counts_epochs_gets_what_is_of_one_and_late_batches_of_the_one_before_it() -> None:
    backend = Replica(0)
    backend.work = iter([(0, 0), (0, 1), (1, 2), (0, 3), (1, 4), (3, 5), (3, 6)])
    session = Session(plain(), backend, {})
    batches = session.batches(DATA, epochs=4)
    seen: list[list[int]] = [[], [], [], []]
    for epoch in seen:
        for batch in batches.epoch:
            epoch.append(batch)
            session.step()
    assert seen == [[0, 1], [2, 3, 4], [5, 6], []]
    assert backend.left == 1


def until(number: int, batches: Iterable[Batch], session: Session) -> None:
    """A loop that breaks, or raises for a negative number."""
    for batch in batches:
        session.step()
        if batch == abs(number):
            if number < 0:
                raise KeyError
            break


@pytest.mark.parametrize("hold", [lambda batches: batches, Shown, lambda batches: Shown(Shown(batches))])
def test_a_loop_that_breaks_has_left_however_it_holds_its_batches(
    hold: Callable[[Batches], Iterable[Batch]], session: Session, backend: Replica
) -> None:
    batches = session.batches(DATA)
    held = hold(batches)
    until(2, held, session)
    assert backend.left == 1
    with pytest.raises(RuntimeError, match=r"ended the training: a loop that comes back iterates over batches\.epoch"):
        next(iter(batches))


@pytest.mark.parametrize("hold", [iter, enumerate, lambda batches: batches.epoch, lambda batches: Shown(batches.epoch)])
def test_a_loop_that_may_come_back_goes_on_where_it_stopped(
    hold: Callable[[Batches], Iterable[Any]], session: Session, backend: Replica
) -> None:
    batches = session.batches(DATA)
    held = hold(batches)
    for _ in range(2):
        for _ in islice(held, 2):
            session.step()
    assert backend.stepped == [0, 1, 2, 3]
    assert backend.left == 0
    batches.close()
    assert backend.left == 1
    assert list(hold(batches)) == []


@pytest.mark.parametrize("hold", [lambda batches: batches, Shown])
def test_an_exception_is_no_break(
    hold: Callable[[Batches], Iterable[Batch]], session: Session, backend: Replica
) -> None:
    batches = session.batches(DATA)
    with pytest.raises(KeyError):
        until(-2, hold(batches), session)
    assert backend.left == 0
    batches.close()
    assert backend.left == 1


def test_an_end_that_fails_is_not_told_as_led_to_by_the_break(
    session: Session, backend: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise KeyError("the end")

    monkeypatch.setattr(backend, "leave", fail)
    batches = session.batches(DATA)
    loop = iter(batches)
    next(loop)
    with pytest.raises(KeyError) as found:
        loop.close()  # type: ignore[attr-defined]
    assert found.value.__context__ is None
    monkeypatch.undo()


def test_a_plain_loop_that_breaks_has_left(session: Session, backend: Replica) -> None:
    for _ in session.batches(DATA):
        break
    assert backend.left == 1
    with pytest.raises(RuntimeError, match="has no batch"):
        session.step()


def test_a_batch_that_is_not_stepped_is_an_error_in_the_next_iter_too(session: Session, backend: Replica) -> None:
    batches = session.batches(DATA)
    first = iter(batches)
    next(first)
    for again in (first, iter(batches)):
        with pytest.raises(RuntimeError, match=r"a batch was not stepped: call session\.step\(loss\)"):
            next(again)
    assert backend.left == 0, "an error is no end"


def test_a_batch_may_be_skipped_in_place_of_its_step(session: Session, backend: Replica) -> None:
    for batch in session.batches(DATA):
        if batch == 2:
            session.skip()
            with pytest.raises(RuntimeError, match="has no batch"):
                session.skip()
        else:
            session.step()
    assert (backend.stepped, backend.skipped) == ([0, 1, 3, 4, 5], [2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_sampler": []}, "sets batch_sampler"),
        ({"sampler": []}, "sampler is empty"),
    ],
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
        for batch in islice(batches.epoch, len(batches.epoch)):
            seen.append(batch[0])
            mean_square(model, batch).backward()
            session.step()
    for epoch in (seen[:6], seen[6:]):
        assert sorted(torch.cat(epoch).tolist()) == sorted(DATA.tensors[0].tolist())
    assert list(batches) == []


class Sharp(torch.optim.SGD):
    """Asks for gradients in its step, as methods of sharpness do."""

    def step(self, closure: Any = None) -> None:
        assert torch.is_grad_enabled()
        super().step(closure)


def test_alone_an_optimizer_and_its_schedule_are_as_without_squall() -> None:
    """Warnings are errors here: torch warns of schedules whose optimizer it has not seen step."""
    model = torch.nn.Linear(6, 1)
    session = squall.join(model, partial(Sharp, lr=0.1), schedule=partial(StepLR, step_size=1))
    for batch in session.batches(DATA, batch_size=30):
        mean_square(model, batch).backward()
        session.step()
    session = squall.join(model, partial(torch.optim.SGD, lr=0.1), schedule=partial(StepLR, step_size=1))
    for batch in session.batches(DATA, batch_size=30):
        mean_square(model, batch).backward()
        session.step()


def test_steps_are_numbers_and_chance_is_that_of_each(backend: Replica) -> None:
    drawn: list[dict[int, float]] = []
    for _ in range(2):
        torch.rand(len(drawn))  # whatever was drawn before
        model = plain()
        session = squall.join(model)
        steps = session.steps(5, examples=12)
        assert len(steps) == 5
        drawn.append({})
        for step in steps:
            drawn[-1][step] = torch.rand(1).item() + random.random()
            mean_square(model, DATA.tensors).backward()
            session.optimizer.step()
    assert list(drawn[0]) == [0, 1, 2, 3, 4]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0].values())) == 5
    with pytest.raises(ValueError, match="examples is 0: it must be at least 1"):
        Session(plain(), backend, {}).steps(5, examples=0)


def test_in_a_loop_of_steps_whoever_has_the_step_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    follower = Replica()
    monkeypatch.setattr(follower, "rank", 1)
    session = Session(plain(), follower, {})
    for step in session.steps(6):
        session.log(step=step)
        session.step()
    session.log(behind=1)
    assert follower.logged == [{"step": step} for step in range(6)]


# ---------------------------------------------------------------- the optimizer


@pytest.fixture
def stepping(session: Session) -> Iterator[None]:
    """One batch, not stepped yet."""
    batches = session.batches(DATA)
    dealt = iter(batches)
    next(dealt)
    yield
    batches.close()


def test_what_a_scheduler_makes_of_the_rate_travels_as_a_factor(session: Session, backend: Replica) -> None:
    scheduler = LambdaLR(session.optimizer, lambda step: 1 / (1 + step // 2))
    for _ in session.batches(DATA):
        session.optimizer.step()
        scheduler.step()
    assert backend.factors == [(), (), (0.5,), (0.5,), (1 / 3,), (1 / 3,)]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lr", -1.0, "a learning rate of -1.0: it must be 0 or more"),
        ("lr", float("nan"), "a learning rate of nan"),
        ("momentum", 0.5, "'momentum' of param group 1 to 0.5, which has no effect"),
    ],
)
def test_what_cannot_travel_is_an_error_at_the_next_step(name: str, value: float, message: str) -> None:
    model = plain()
    session = squall.join(model, two_groups(model))
    for _ in session.batches(DATA):
        session.optimizer.param_groups[1][name] = value
        with pytest.raises(ValueError, match=message):
            session.optimizer.step()
        break


# ---------------------------------------------------------------- an optimizer of the script's own


def two_groups(model: nn.Module, **settings: Any) -> torch.optim.SGD:
    weight, *others = model.parameters()
    groups = [{"params": [weight], "lr": 0.05}, {"params": others, "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.2, momentum=0.9, **settings)


def dealt(epochs: int, size: int) -> list[Batch]:
    """What a session deals, in the order of seed 0."""
    parts = [part for epoch in range(epochs) for part in epoch_order(0, epoch, len(DATA)).split(size)]
    return [[tensor[part] for tensor in DATA.tensors] for part in parts]


def test_an_ordinary_loop_ends_where_it_ends_without_squall() -> None:
    """Own groups and rates, several backward passes a step, clipping, a scaler that is off, evaluations between."""
    found = []
    for joined in (False, True):
        torch.manual_seed(0)
        model = plain()
        optimizer: torch.optim.Optimizer = two_groups(model)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        batches: Iterable[Batch] = dealt(epochs=2, size=16)
        if joined:
            session = squall.join(model, optimizer)
            optimizer = session.optimizer
            batches = session.batches(DATA, batch_size=16, epochs=2)
        for step, batch in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + step)
            for part in zip(*(tensor.chunk(2) for tensor in batch)):
                loss = mean_square(model, part) / 2
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert norm.isfinite()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            if step % 4 == 0:
                model.eval()
                with torch.no_grad():
                    mean_square(model, DATA.tensors)
                model.train()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("stepping")
def test_a_closure_is_called_with_gradients_on_and_tells_the_loss(session: Session, backend: Replica) -> None:
    def closure() -> torch.Tensor:
        return torch.ones(1, requires_grad=True).sum() * 3

    with torch.no_grad():
        loss = session.optimizer.step(closure)
    assert loss.requires_grad
    assert backend.losses == [3.0]


def test_an_optimizer_that_is_saved_and_loaded_still_steps_its_session(session: Session, backend: Replica) -> None:
    session.optimizer.load_state_dict(session.optimizer.state_dict())  # what accelerate does to move it
    for _ in session.batches(DATA):
        session.optimizer.step()
    assert backend.stepped == [0, 1, 2, 3, 4, 5]


def adversaries() -> tuple[nn.Module, nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    generator, critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)), nn.Linear(6, 1)
    settings = (generator, {"lr": 0.02, "betas": (0.5, 0.9)}), (critic, {"lr": 0.01, "weight_decay": 0.1})
    return generator, critic, [torch.optim.Adam(each.parameters(), **chosen) for each, chosen in settings]  # type: ignore[arg-type]


def contest(generator: nn.Module, critic: nn.Module, optimizers: Any, batches: Iterable[Batch]) -> Tensor:
    """The critic steps on every batch, the generator on every second."""
    of_generator, of_critic = optimizers
    for number, (real, _) in enumerate(batches):
        noise = torch.full((len(real), 3), 0.1 * number)
        of_critic.zero_grad()
        (critic(generator(noise).detach()).mean() - critic(real).mean()).backward()
        of_critic.step()
        if number % 2 == 0:
            of_generator.zero_grad()
            (-critic(generator(noise)).mean()).backward()
            of_generator.param_groups[0]["lr"] = 0.02 / (1 + number)
            of_generator.step()
    return torch.cat([p.detach().flatten() for each in (generator, critic) for p in each.parameters()])


def test_a_generator_and_its_critic_are_trained_as_without_squall() -> None:
    *models, optimizers = adversaries()
    wanted = contest(*models, optimizers, dealt(epochs=2, size=16))
    *models, optimizers = adversaries()
    session = squall.join(models, optimizers)
    found = contest(*models, session.optimizers, session.batches(DATA, batch_size=16, epochs=2))
    torch.testing.assert_close(found, wanted)
    with pytest.raises(RuntimeError, match=r"several optimizers: step those of session\.optimizers"):
        session.step()


def test_a_batch_of_several_steps_is_over_when_the_next_is_wanted(backend: Replica) -> None:
    *models, optimizers = adversaries()
    session = Session(nn.ModuleList(models), backend, {}, [each.param_groups for each in optimizers])
    backend.spoil = 3
    for batch in session.batches(DATA):
        for optimizer in session.optimizers[: 1 + batch % 2]:
            optimizer.step()
    assert backend.stepped == [0, 1, 1, 2, 3, 4, 5, 5], "what was not finite is not stepped any more"
    assert backend.done_with == [0, 1, 2, 4, 5], "and comes again"
    assert backend.factors[:3] == [(1.0, None), (1.0, None), (None, 1.0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": torch.optim.SGD}, "the optimizers are Adam, SGD: give all one class"),
        ({"twice": True}, "two optimizers have the same parameter"),
        ({"clip_norm": 1.0}, "clip in the loop"),
    ],
)
def test_optimizers_that_do_not_go_together_are_refused(change: dict[str, Any], message: str) -> None:
    generator, critic, (first, second) = adversaries()
    if "kind" in change:
        second = change["kind"](critic.parameters(), lr=0.1)
    if "twice" in change:
        second = first
    with pytest.raises(ValueError, match=message):
        squall.join([generator, critic], [first, second], clip_norm=change.get("clip_norm"))


def test_a_strategy_whose_pushes_are_no_updates_cannot_have_several_optimizers(
    backend: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, critic, optimizers = adversaries()
    backend.several_steps = False
    monkeypatch.setattr("squall.session.entry.launched", lambda *_: backend)
    with pytest.raises(ValueError, match="every push must be an update of its own: use downpour"):
        squall.join([generator, critic], optimizers)
    assert squall.Downpour().recipe().work.several_steps
    assert not squall.Synchronous().recipe().work.several_steps
    assert not squall.Averaging().recipe().work.several_steps


def test_a_scaler_that_finds_an_overflow_leaves_the_batch_out(backend: Replica) -> None:
    model = plain()
    session = Session(model, backend, {})
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    for batch in session.batches(DATA):
        session.optimizer.zero_grad()
        loss = mean_square(model, DATA.tensors) * (math.inf if batch in (1, 4) else 1)
        scaler.scale(loss).backward()
        scaler.step(session.optimizer)
        scaler.update()
        session.optimizer.zero_grad()
    assert (backend.stepped, backend.skipped) == ([0, 2, 3, 5], [1, 4])
    assert scaler.get_scale() == 1.0, "halved twice"


def test_an_optimizer_is_taken_with_its_class_settings_and_groups() -> None:
    model = plain()
    factory, groups = taken_apart([two_groups(model, nesterov=True)], model)
    assert isinstance(factory, partial)
    assert (factory.func, factory.keywords) == (torch.optim.SGD, {"lr": 0.2, "momentum": 0.9, "nesterov": True})
    assert [{k: v for k, v in group.items() if k != "params"} for group in groups(model)] == [
        {"lr": 0.05}, {"weight_decay": 0.1},
    ]  # fmt: skip
    assert "fused" in factory(groups(model), fused=True).defaults, "left open for a shard to choose"


def test_an_optimizer_that_cannot_be_taken_is_refused_and_one_that_is_taken_steps_no_more() -> None:
    model, other = plain(), plain()
    with pytest.raises(ValueError, match="a parameter that is not the model's"):
        squall.join(model, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="leave groups out"):
        squall.join(model, two_groups(model), groups=lambda model: [{"params": model.parameters()}])
    mean_square(model, DATA.tensors).backward()
    optimizer = two_groups(model)
    optimizer.step()
    with pytest.raises(ValueError, match="has stepped already"):
        squall.join(model, optimizer)
    optimizer = two_groups(model)
    squall.join(model, optimizer)
    with pytest.raises(RuntimeError, match=r"step session\.optimizer instead"):
        optimizer.step()


@given(st.floats(1e-8, 10), st.floats(1e-8, 10))
def test_a_rate_that_a_loop_sets_is_the_rate_of_the_step_to_the_bit(first: float, wanted: float) -> None:
    model = plain()
    optimizer = squall.join(model, torch.optim.SGD(model.parameters(), lr=first)).optimizer
    optimizer.param_groups[0]["lr"] = wanted
    (factor,) = optimizer.factors() or (1.0,)
    assert factor is not None
    assert first * factor == pytest.approx(wanted, rel=3e-16)
