"""Sandblaster against SciPy and torch; and its promises in worlds that lose messages and replicas. Real gradients."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import TensorDataset

import squall
from squall.launchers.inline import InlineRun
from squall.plan import check_together, make_plan
from squall.protocol.check import check
from squall.protocol.effects import Send, Transmit
from squall.protocol.events import StopRequested
from squall.protocol.frames import encode
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.sandblaster.messages import Calculation, Portion
from squall.record.rows import EventRow, MetricRow, ProgressRow
from squall.report import Reader
from squall.run import Run
from squall.runtime.job import private_job
from squall.runtime.run_plan import Aims
from squall.runtime.snapshot import Snapshots
from squall.runtime.wire import Conditions, Network
from squall.task import TaskFunction
from tests import deep
from tests.tasks import INLINE, mean_square, numbers, regression

Fit = Callable[..., Run]
EXACT = {"tolerance_gradient": 1e-6, "tolerance_change": 1e-10}  # as far as float32 goes


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of tiny operations wait for each other where cores are few."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- objectives


def linear(inputs: Any, labels: Any, penalty: float = 1e-3) -> TaskFunction:
    """Logistic regression from zero weights, with two classes or more."""
    features, targets = torch.as_tensor(inputs).float(), torch.as_tensor(labels)
    classes = int(targets.max()) + 1

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0])
        data = binary_cross_entropy_with_logits(logits[:, 0], batch[1].float()) if classes == 2 else cross_entropy(
            logits, batch[1]
        )  # fmt: skip
        return data + penalty * model.weight.square().sum()

    def task() -> squall.Task:
        model = nn.Linear(features.shape[1], 1 if classes == 2 else classes)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return squall.Task(model=model, loss=loss, train=TensorDataset(features, targets), batch_size=64)

    return task


def breast_cancer() -> TaskFunction:
    datasets = pytest.importorskip("sklearn.datasets")
    inputs, labels = datasets.load_breast_cancer(return_X_y=True)
    return linear((inputs - inputs.mean(0)) / inputs.std(0), labels)


def digits() -> TaskFunction:
    datasets = pytest.importorskip("sklearn.datasets")
    inputs, labels = datasets.load_digits(return_X_y=True)
    return linear(inputs / 16, labels)


class Valley(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([-1.2, 1.0] * 3))


def rosenbrock() -> TaskFunction:
    """The same function on every example."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = model.x
        return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum() + 1 + 0 * batch[0].sum()

    return lambda: squall.Task(model=Valley(), loss=loss, train=TensorDataset(torch.zeros(8)), batch_size=2)


def decayed(model: nn.Module, batch: Any) -> Tensor:
    return mean_square(model, batch) + 1e-2 * sum(p.square().sum() for p in model.parameters())


def network() -> TaskFunction:
    data = numbers(200)

    def task() -> squall.Task:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        return squall.Task(model=model, loss=decayed, train=data, batch_size=25)

    return task


OBJECTIVES = {"rosenbrock": rosenbrock, "breast cancer": breast_cancer, "digits": digits, "network": network}


def whole(task: TaskFunction) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """The objective on all examples, in double precision."""
    built = task()
    model, batch = built.model.double(), [t.double() if t.is_floating_point() else t for t in built.train.tensors]  # type: ignore[attr-defined]

    def function(vector: np.ndarray) -> tuple[float, np.ndarray]:
        nn.utils.vector_to_parameters(torch.from_numpy(vector), model.parameters())
        model.zero_grad()
        value = built.loss(model, batch)
        value.backward()
        gradient = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
        return value.item(), gradient.numpy().copy()

    return function


def vector(model: nn.Module) -> np.ndarray:
    return nn.utils.parameters_to_vector(model.parameters()).detach().double().numpy()


def evaluations(run: Run, examples: int) -> float:
    return run.summary().examples / examples


def records(run: Run, table: Any) -> list[Any]:
    reader = Reader(run.directory / "run.sqlite")
    try:
        return reader.rows(table)
    finally:
        reader.close()


@pytest.mark.parametrize("name", deep.sweep(list(OBJECTIVES), 1))
def test_it_finds_the_optimum_of_scipy_and_torch_in_as_many_evaluations(inline: Fit, name: str) -> None:
    task = OBJECTIVES[name]()
    function, examples = whole(task), task().examples
    options = {"maxcor": 10, "gtol": 1e-6, "ftol": 1e-10, "maxfun": 100000, "maxiter": 100000}
    start = vector(task().model)
    theirs = optimize.minimize(function, start, jac=True, method="L-BFGS-B", options=options)
    run = inline(task, squall.Sandblaster(batch="full", replicas=2, shards=2, backup=False, **EXACT))
    found = function(vector(run.model))[0]
    assert found == pytest.approx(theirs.fun, rel=1e-6)
    assert found == pytest.approx(_of_torch(task, function), rel=1e-6)
    assert evaluations(run, examples) <= 1.5 * theirs.nfev


def _of_torch(task: TaskFunction, function: Callable[[np.ndarray], tuple[float, np.ndarray]]) -> float:
    built = task()
    model, batch = built.model.double(), [t.double() if t.is_floating_point() else t for t in built.train.tensors]  # type: ignore[attr-defined]
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=5000, max_eval=10000, history_size=10, tolerance_grad=1e-9,
        tolerance_change=1e-14, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = built.loss(model, batch)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return function(vector(model))[0]


def test_any_number_of_replicas_and_shards_finds_the_same_optimum(inline: Fit) -> None:
    task = breast_cancer()
    function = whole(task)
    found = [
        function(vector(inline(task, squall.Sandblaster(batch="full", replicas=n, shards=k, **EXACT)).model))[0]
        for n, k in ((1, 1), (2, 1), (4, 1), (1, 3), (4, 3))
    ]
    assert found == pytest.approx([found[0]] * 5, rel=1e-6)


@pytest.mark.parametrize("batch", ["full", 200])
def test_two_runs_of_one_configuration_are_the_same_bit_for_bit(inline: Fit, batch: Any) -> None:
    strategy = squall.Sandblaster(replicas=3, shards=2, batch=batch)
    first, second = (vector(inline(breast_cancer(), strategy, steps=12).model) for _ in range(2))
    assert (first == second).all()


@deep.only
def test_armijo_and_batches_learn_as_well(inline: Fit) -> None:
    task = digits()
    function = whole(task)
    best = function(vector(inline(task, squall.Sandblaster(batch="full", **EXACT)).model))[0]
    armijo = inline(task, squall.Sandblaster(batch="full", line_search="armijo", **EXACT))
    assert function(vector(armijo.model))[0] == pytest.approx(best, rel=1e-3)
    sampled = inline(task, squall.Sandblaster(batch=600), steps=40)
    assert function(vector(sampled.model))[0] < 1.3 * best


# ---------------------------------------------------------------- limits, ends, record


def test_steps_are_iterations_and_every_one_is_recorded(inline: Fit) -> None:
    run = inline(digits(), squall.Sandblaster(batch="full"), steps=7)
    losses = [row.value for row in records(run, MetricRow) if row.name == "objective"]
    assert len(losses) == 7
    assert losses == sorted(losses, reverse=True)
    assert run.summary().updates == 7
    assert "7 iterations are done" in [event.text for event in records(run, EventRow)]


def test_a_run_that_is_done_has_nothing_to_go_on_with(inline: Fit) -> None:
    run = inline(digits(), squall.Sandblaster(batch="full"), steps=3)
    again = squall.resume(run.directory)
    assert again.summary().updates == 3
    assert len([row for row in records(again, MetricRow) if row.name == "objective"]) == 3


def test_sampled_batches_end_after_an_epoch_where_nothing_else_is_said(inline: Fit) -> None:
    run = inline(digits(), squall.Sandblaster(batch=300))
    assert 1797 <= run.summary().examples < 1797 + 2 * 300


def test_epochs_count_what_line_searches_compute_as_well(inline: Fit) -> None:
    run = inline(digits(), squall.Sandblaster(batch="full", backup=False), epochs=5)
    assert run.summary().examples == 5 * 1797


def test_a_loss_that_is_no_number_in_a_line_search_shortens_the_step(inline: Fit) -> None:
    data = TensorDataset(torch.linspace(0.5, 1.5, 64))

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([0.05]))

    def task() -> squall.Task:
        loss = lambda model, batch: (batch[0] * model.w - model.w.log()).mean()  # noqa: E731  # NaN below zero
        return squall.Task(model=Scale(), loss=loss, train=data, batch_size=16)

    run = inline(task, squall.Sandblaster(batch="full"))
    assert run.model.w.item() == pytest.approx(1.0, rel=1e-3)


def test_a_loss_that_is_no_number_at_the_start_ends_the_run(inline: Fit) -> None:
    task = regression(loss=lambda model, batch: mean_square(model, batch) + (model[0].weight.sum() * 0).log() * 0)
    with pytest.raises(squall.NotFinite, match=r"iteration 1 begins: NaN or Inf in examples \d+ to \d+ of epoch 0"):
        inline(task, squall.Sandblaster(batch="full"))


# ---------------------------------------------------------------- bad input

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "history": ({"history": 0}, "history is 0: it must be at least 1"),
    "portions": ({"replicas": 4, "portions": 3}, "portions is 3 for 4 replicas"),
    "line search": ({"line_search": "exact"}, "line_search is 'exact'"),
    "batch": ({"batch": 0}, "batch is 0"),
    "batch in words": ({"batch": "half"}, "batch is 'half'"),
    "push_every": ({"push_every": 0}, "push_every is 0"),
    "tolerance": ({"tolerance_change": -1.0}, "tolerance_change is -1.0"),
    "small batch": ({"batch": 3, "replicas": 4}, "a batch of 3 examples is too small for 4 replicas"),
    "no replicas": ({"replicas": 0}, "replicas is 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_the_remedy(inline: Fit, name: str) -> None:
    settings, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        inline(regression(), squall.Sandblaster(**{"batch": "full"} | settings))


@pytest.mark.parametrize("settings", [{}, {"batch": 91}, {"replicas": 7}])
def test_a_small_training_set_is_one_batch_and_every_replica_gets_a_portion(
    inline: Fit, settings: dict[str, Any]
) -> None:
    run = inline(regression(), squall.Sandblaster(**settings), steps=3)
    reader = Reader(run.directory / "run.sqlite")
    assert {row.replica for row in reader.rows(ProgressRow)} == set(range(settings.get("replicas", 2)))
    assert reader.state()["batch"] == "90"
    reader.close()


def test_a_task_that_wants_to_choose_the_steps_is_refused(inline: Fit) -> None:
    schedule = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1)  # noqa: E731
    groups = lambda model: [{"params": model.parameters(), "weight_decay": 0.1}]  # noqa: E731
    with pytest.raises(ValueError, match=r"put a penalty into Task\.loss"):
        inline(regression(groups=groups), squall.Sandblaster(batch="full"))
    for options in ({"schedule": schedule}, {"clip_norm": 1.0}):
        with pytest.raises(ValueError, match=r"L-BFGS chooses its steps by itself: leave it out"):
            inline(regression(**options), squall.Sandblaster(batch="full"))


def test_dropout_and_batchnorm_are_warned_of(inline: Fit) -> None:
    model = lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))  # noqa: E731
    with pytest.warns(RuntimeWarning, match=r"BatchNorm1d, Dropout: a line search compares losses"):
        inline(regression(model), squall.Sandblaster(batch="full"), steps=2)


# ---------------------------------------------------------------- worlds


class World:
    """A run in virtual time, with a network and deaths; `story` counts messages and their bytes."""

    def __init__(
        self, directory: Path, task: TaskFunction, strategy: squall.Strategy, *, steps: int | None = None,
        step_s: Callable[[Node], float] | None = None, network: Network | None = None, seed: int = 0,
        snapshot: int | None = None,
    ) -> None:  # fmt: skip
        plan = make_plan(strategy, INLINE, Aims(steps=steps))
        torch.manual_seed(0)
        built = task()
        layout = check_together(plan, strategy, built)
        restored = Snapshots(directory).restore(snapshot, layout) if snapshot is not None else None
        job = private_job(plan, strategy, built, layout, directory, restored)
        self.run = InlineRun(job, step_s or (lambda node: 0.01))
        self.world = self.run.world
        conditions = Conditions(network or Network(), self.world._conditions.prices, notice_s=0.002)
        self.world._conditions, self.world._arrivals = conditions, conditions.network.arrivals
        self.world._chance = random.Random(seed)
        self.world.trace = self._trace
        self.touched = COORDINATOR
        self.sent: Counter[str] = Counter()
        self.portions: Counter[str] = Counter()
        self.coordinator_bytes = 0
        self.layout = layout
        self.directory = directory

    def _trace(self, now: float, node: Node, what: Any) -> None:
        self.touched = node
        if not isinstance(what, Transmit) or what.frame.message is None or what.again:
            return
        if COORDINATOR in (node, what.to):
            self.coordinator_bytes += len(encode(what.frame))
        self.sent[type(what.frame.message).__name__] += 1
        if isinstance(what.frame.message, Portion) and what.frame.message.number >= 0:
            self.portions[str(what.to)] += 1

    def go(self, actions: dict[int, Callable[[World], None]] | None = None, at_most: int = 50000) -> World:
        number = 0
        while not self.world.ended and number < at_most:
            if actions and number in actions:
                actions[number](self)
            assert self.world._queue, "nothing goes on, and the run has not ended"
            self.world.step()
            number += 1
            place = self.world.processes.get(self.touched)
            if place is not None:
                check(place.linked)
        assert self.world.ended, "the run hangs"
        self.events = number
        return self

    def slow_links(self, chance: random.Random) -> None:
        """Every second message of a replica to another shard than the first is late."""

        def arrivals(sender: Node, effect: Send | Transmit, now: float, _: random.Random) -> list[float]:
            late = sender.role == "replica" and effect.to.role == "shard" and effect.to.index and chance.random() < 0.5
            return [now + (0.02 * chance.random() if late else 0.0005)]

        self.world._arrivals = arrivals

    def kill(self, slot: int) -> None:
        for node in [n for n in self.world.processes if n.role == "replica" and n.index == slot]:
            self.world.kill(node)

    @property
    def machine(self) -> Any:
        return self.world.processes[COORDINATOR].linked.machine

    @property
    def weights(self) -> Tensor:
        snapshots = Snapshots(self.directory)
        return snapshots.restore(snapshots.numbers()[-1], self.layout).tensors["weights"]


LATENCY = Network(latency_s=0.0005)
FAULTY = Network(latency_s=0.0005, jitter_s=0.002, loss=0.02, duplication=0.02)


@pytest.mark.parametrize("seed", deep.seeds(3, 24))
def test_worlds_with_faults_and_deaths_end_at_the_same_optimum(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    strategy = squall.Sandblaster(batch="full", replicas=3, shards=2, push_every=1 + seed % 4)
    actions = {chance.randrange(20, 1500): partial(World.kill, slot=chance.randrange(3)) for _ in range(3)}
    step_s = lambda node: chance.lognormvariate(-5, 0.5)  # noqa: E731
    network = FAULTY if seed % 2 else LATENCY
    found = World(tmp_path, breast_cancer(), strategy, step_s=step_s, network=network, seed=seed).go(actions)
    assert found.run.channel.ended.status == "finished"
    assert found.machine.state.loss == pytest.approx(0.0680828377, rel=1e-6)  # SciPy's, to the digits of float32


def test_one_seed_is_one_world_bit_for_bit(tmp_path: Path) -> None:
    found = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        chance = random.Random(4)
        world = World(
            tmp_path / name, breast_cancer(), squall.Sandblaster(batch="full", replicas=3, shards=2),
            network=FAULTY, seed=4, step_s=lambda node, chance=chance: chance.lognormvariate(-5, 0.5),
        )  # fmt: skip
        found.append((world.go({300: partial(World.kill, slot=1)}).weights, world.events))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_a_replica_killed_at_any_event_costs_only_its_portions(tmp_path: Path) -> None:
    """The sum is right whenever it dies: with a push on its way to one of the shards, with two portions kept ..."""
    strategy = squall.Sandblaster(batch="full", replicas=2, shards=2, push_every=2)
    task = regression(examples=160)

    def world(name: str) -> World:
        return World(tmp_path / name, task, strategy, steps=3, network=LATENCY)

    for name in ("whole", *map(str, range(400))):
        (tmp_path / name).mkdir()
    whole_run = world("whole").go()
    for event in deep.sweep(range(0, min(whole_run.events, 400), 3), 15):
        found = world(str(event)).go({event: lambda w: w.kill(1)})
        assert found.run.channel.ended.status == "finished"
        assert torch.allclose(found.weights, whole_run.weights, rtol=1e-4, atol=1e-6)


def test_a_push_that_has_reached_one_shard_alone_is_computed_again(tmp_path: Path) -> None:
    """Links to all shards but the first are slow, so a dying replica's last push often is on one shard only."""
    worlds = [Audited(tmp_path / str(seed), seed) for seed in range(8 if deep.wanted else 3)]
    for world in worlds:
        chance = world.chance
        world.go({chance.randrange(20, 1200): partial(World.kill, slot=chance.randrange(3)) for _ in range(8)})
        assert world.run.channel.ended.status == "finished"
    assert sum(world.restarts for world in worlds) > 0
    assert max(world.error for world in worlds) < 1e-3


class Audited(World):
    """Compares the shards' sum with the true gradient whenever an evaluation is over."""

    def __init__(self, directory: Path, seed: int) -> None:
        directory.mkdir()
        self.chance = random.Random(seed)
        strategy = squall.Sandblaster(batch="full", replicas=3, shards=2, push_every=1 + seed % 3, **EXACT)
        step_s = lambda node: self.chance.lognormvariate(-5, 0.7)  # noqa: E731
        super().__init__(directory, breast_cancer(), strategy, step_s=step_s)
        self.slow_links(self.chance)
        self.restarts, self.error = 0, 0.0
        self.task = breast_cancer()()
        machine = self.machine
        self._originals = machine._take_back, machine._evaluated
        machine._take_back, machine._evaluated = self._take_back, self._evaluated

    def _take_back(self, *arguments: Any) -> None:
        before = self.machine.dealer.evaluation
        self._originals[0](*arguments)
        self.restarts += self.machine.dealer.evaluation != before

    def _evaluated(self, *arguments: Any) -> None:
        stores = [self.world.processes[Node("shard", index)].host.store for index in range(2)]
        trial, total = (torch.cat([store._vectors[name] for store in stores]) for name in ("trial", "sum"))
        error = (total - self._gradient(trial)).norm() / (1e-3 + total.norm())
        self.error = max(self.error, error.item())
        self._originals[1](*arguments)

    def _gradient(self, trial: Tensor) -> Tensor:
        """Of the whole set."""
        model = self.task.model
        self.layout.read_model(trial, model)
        model.zero_grad()
        self.task.loss(model, self.task.train.tensors).backward()  # type: ignore[attr-defined]
        gradient = torch.zeros(self.layout.length)
        for view, parameter in zip(self.layout.views(gradient), self.layout.parameters_of(model)):
            view.copy_(parameter.grad)
        return gradient


@pytest.mark.parametrize("stop_at", deep.sweep(range(60, 700, 80), 2))
def test_a_run_stopped_anywhere_goes_on_from_its_last_iteration(tmp_path: Path, stop_at: int) -> None:
    strategy = squall.Sandblaster(batch="full", replicas=2, shards=2, tolerance_gradient=1e-6)
    stop = {stop_at: lambda w: w.world.post(COORDINATOR, StopRequested("interrupted"))}
    first = World(tmp_path, breast_cancer(), strategy, network=LATENCY).go(stop)
    assert first.run.channel.ended.status == "interrupted"
    number = Snapshots(tmp_path).numbers()[-1]
    before = first.machine.state.iteration
    reader = Reader(tmp_path / "run.sqlite")
    recorded = [row.updates for row in reader.rows(MetricRow) if row.name == "objective"]
    reader.close()
    assert recorded == list(range(1, before + 1))
    again = World(tmp_path, breast_cancer(), strategy, network=LATENCY, snapshot=number)
    assert again.machine.state.iteration == before
    again.go()
    assert again.machine.state.loss == pytest.approx(0.0680828377, rel=1e-6)
    (tmp_path / "whole").mkdir()
    alone = World(tmp_path / "whole", breast_cancer(), strategy, network=LATENCY).go()
    assert abs(again.machine.state.iteration - alone.machine.state.iteration) <= 3


def iteration_s(tmp_path: Path, replicas: int, slow: float, backup: bool) -> float:
    """Virtual seconds of an iteration; the last replica takes `slow` times as long."""
    path = tmp_path / f"{replicas}-{slow}-{backup}"
    path.mkdir()
    step_s = lambda node: 0.01 * (slow if node.index == replicas - 1 else 1.0)  # noqa: E731
    strategy = squall.Sandblaster(batch="full", replicas=replicas, shards=1, backup=backup, portions=40)
    found = World(path, digits(), strategy, steps=10, step_s=step_s, network=Network(latency_s=0.0001)).go()
    return found.world.now / found.machine.state.iteration


def test_backup_portions_hide_a_slow_replica(tmp_path: Path) -> None:
    without = iteration_s(tmp_path, 3, 1.0, backup=True)
    with_backup = iteration_s(tmp_path, 4, 10.0, backup=True)
    assert with_backup <= 1.3 * without
    assert iteration_s(tmp_path, 4, 10.0, backup=False) > 1.3 * with_backup


def test_a_fast_replica_computes_more_portions(tmp_path: Path) -> None:
    step_s = lambda node: 0.01 * (3 if node.index else 1)  # noqa: E731
    strategy = squall.Sandblaster(batch="full", replicas=2, portions=60)
    found = World(tmp_path, digits(), strategy, steps=5, step_s=step_s, network=LATENCY).go()
    assert 2 < found.portions["replica-0.0"] / found.portions["replica-1.0"] < 4


def test_traffic_through_the_coordinator_does_not_depend_on_the_parameters(tmp_path: Path) -> None:
    def coordinator_bytes(width: int) -> float:
        model = lambda: nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1))  # noqa: E731
        path = tmp_path / str(width)
        path.mkdir()
        world = World(path, regression(model), squall.Sandblaster(batch="full", replicas=2, shards=2), steps=4).go()
        assert world.layout.elements == 8 * width + 1
        return world.coordinator_bytes / world.sent["Calculation"]

    assert coordinator_bytes(125_000) == pytest.approx(coordinator_bytes(1_250), rel=0.05)


@pytest.mark.parametrize("history", [2, 10])
def test_messages_of_an_iteration_do_not_grow_with_the_history(tmp_path: Path, history: int) -> None:
    shards = 2
    strategy = squall.Sandblaster(batch="full", replicas=1, shards=shards, history=history, tolerance_gradient=0.0)
    found = World(tmp_path, digits(), strategy, steps=20).go()
    evaluated = found.machine.trained / 1797
    at_start, iterations = 2, 20
    assert found.sent["Calculation"] == shards * (at_start + iterations + 2 * (evaluated - 1))


def test_calculations_are_small(tmp_path: Path) -> None:
    """A few names and numbers for each vector of the history."""
    found = World(tmp_path, digits(), squall.Sandblaster(batch="full", replicas=1, tolerance_gradient=0.0), steps=15)
    sizes = []

    def trace(now: float, node: Node, what: Any) -> None:
        if isinstance(what, Transmit) and isinstance(what.frame.message, Calculation):
            sizes.append(len(encode(what.frame)))

    found.world.trace = trace
    found.go()
    assert max(sizes) < 1000
