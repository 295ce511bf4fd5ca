"""Every kind of model that torch allows, through whole inline runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import squall
from squall.run import Run
from squall.vector import Layout
from tests import deep
from tests.tasks import assert_same, mean_square, numbers, regression, snapshot

Fit = Callable[..., Run]
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
TWO = squall.Downpour(replicas=2, shards=2, optimizer=SGD)
LOCKED = squall.Synchronous(replicas=3, shards=2, optimizer=SGD)
REDUCED = squall.AllReduce(replicas=3, optimizer=SGD)


def untrained(task: Callable[[], squall.Task], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return task().model


class Tied(nn.Module):
    """The output layer is the embedding, as in a language model."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 5, sparse=sparse)
        self.head = nn.Linear(5, 12, bias=False)
        if not sparse:
            self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words))


class Switch(nn.Module):
    """Each batch uses one of two layers, told by its first word."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers[int(inputs[0, 0] > 0)](inputs)


class Masked(nn.Module):
    """Constants as buffers: a causal mask of minus infinities, a table, integers, a graph, and a rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1))
        self.register_buffer("table", torch.linspace(0.1, 0.7, 6), persistent=False)
        self.register_buffer("offset", torch.tensor([2**62 + 1]))  # more than float64 holds exactly
        self.register_buffer("allowed", torch.tensor([True, False]))
        self.register_buffer("graph", torch.eye(6).to_sparse())
        self.register_buffer("rotation", torch.full((6,), 1j))

    def forward(self, inputs: Tensor) -> Tensor:
        scores = (inputs.unsqueeze(1) * inputs.unsqueeze(2) + self.mask).softmax(-1)
        mixed = (self.graph @ scores.mean(1).T).T * -(self.rotation**2).real
        return (self.linear(mixed) * self.table).sum(1, keepdim=True)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.0))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, :1] * self.slope


def words_task(sparse: bool) -> Callable[[], squall.Task]:
    words = torch.randint(0, 12, (80,), generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), (batch[0] + 1) % 12)

    return lambda: squall.Task(model=Tied(sparse), loss=loss, train=TensorDataset(words), batch_size=8)


@pytest.mark.parametrize("strategy", [TWO, LOCKED, REDUCED], ids=["downpour", "synchronous", "all-reduce"])
def test_running_statistics_of_several_replicas_are_those_of_the_data(inline: Fit, strategy: squall.Strategy) -> None:
    task = regression(lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)), examples=288, batch_size=16)
    norm = inline(task, strategy, epochs=4).model[0]
    inputs = numbers(288).tensors[0]
    torch.testing.assert_close(norm.running_mean, inputs.mean(0), atol=0.2, rtol=0)
    torch.testing.assert_close(norm.running_var, inputs.var(0), atol=0.35, rtol=0)
    assert norm.num_batches_tracked.item() == pytest.approx(4 * 18 / strategy.replicas, abs=0.5)  # a replica's batches


@pytest.mark.parametrize("strategy", [TWO, LOCKED, REDUCED], ids=["downpour", "synchronous", "all-reduce"])
def test_constant_buffers_stay_as_they_are(inline: Fit, strategy: squall.Strategy) -> None:
    run = inline(regression(Masked), strategy, epochs=8)
    for (name, before), (_, after) in zip(Masked().named_buffers(), run.model.named_buffers()):
        assert torch.equal(before.to_dense(), after.to_dense()), name


def averaged_norm() -> nn.Module:
    """Its statistics are the mean over all batches: the count of them is the rate."""
    return nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 1))


GENTLE = partial(torch.optim.SGD, lr=0.01)
COUNTING = {
    "single process": squall.SingleProcess(optimizer=GENTLE),
    "one replica": squall.Downpour(replicas=1, shards=2, optimizer=GENTLE),
    "downpour": squall.Downpour(replicas=2, shards=2, optimizer=GENTLE),
    "synchronous": squall.Synchronous(replicas=3, shards=2, optimizer=GENTLE),
    "all-reduce": squall.AllReduce(replicas=3, optimizer=GENTLE),
    "unlike pushes and fetches": squall.Downpour(replicas=2, optimizer=GENTLE, push_every=3, fetch_every=2),
    "overlapped": squall.Downpour(replicas=2, optimizer=GENTLE, overlap=True),
    "averaging": squall.Averaging(replicas=2, optimizer=GENTLE, every=3),
    "elastic averaging": squall.ElasticAveraging(replicas=2, optimizer=GENTLE, every=3),
    "diloco": squall.DiLoCo(replicas=2, inner_steps=4),
}


@pytest.mark.parametrize("name", deep.sweep(list(COUNTING), 6))
def test_counts_of_batches_are_those_of_a_replica_and_averages_over_them_are_right(inline: Fit, name: str) -> None:
    strategy = COUNTING[name]
    data = TensorDataset(numbers(288).tensors[0] + 3, numbers(288).tensors[1])  # far from what statistics begin as
    norm = inline(regression(averaged_norm, train=data), strategy, epochs=12).model[0]
    assert norm.num_batches_tracked.item() == pytest.approx(12 * 18 / strategy.recipe().replicas, abs=0.5)
    torch.testing.assert_close(norm.running_mean, data.tensors[0].mean(0), atol=0.25, rtol=0)


class Counted(nn.Module):
    """Counts its batches in buffers of its own: one that is replaced, one that is a flag, one of another kind."""

    def __init__(self, kind: str = "dense") -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)
        self.register_buffer("seen", torch.tensor(0, dtype=torch.int32))
        self.register_buffer("begun", torch.tensor(False))
        self.register_buffer("other", {"sparse": torch.eye(2).to_sparse(), "complex": torch.ones(2) * 1j}.get(kind))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
            self.begun.fill_(True)
            if self.other is not None:
                self.other = self.other * 2
        return self.linear(inputs)


@pytest.mark.parametrize("strategy", [squall.SingleProcess(optimizer=SGD), TWO, LOCKED, REDUCED], ids=str)
def test_buffers_that_a_model_replaces_or_sets_come_back(inline: Fit, strategy: squall.Strategy) -> None:
    model = inline(regression(Counted, examples=96), strategy, epochs=4).model
    assert model.seen.item() == 24 / strategy.recipe().replicas
    assert model.seen.dtype == torch.int32
    assert model.begun.item() is True


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_a_buffer_that_replicas_cannot_share_is_refused_by_name(run_dir: Path, kind: str) -> None:
    with pytest.raises(ValueError, match=f"buffer 'other' is {kind}, and a batch changes it"):
        squall.fit(regression(lambda: Counted(kind)), TWO, run_dir=run_dir)
    assert not run_dir.exists()


def test_counts_go_on_in_a_resumed_run(inline: Fit) -> None:
    task = regression(averaged_norm, examples=96)
    first = inline(task, TWO, epochs=2)
    resumed = squall.resume(first.directory, strategy=LOCKED, epochs=5)
    assert resumed.model[0].num_batches_tracked.item() == 2 * 6 / 2 + 3 * 6 / 3


def test_tied_weights_are_one_parameter_and_stay_tied(inline: Fit) -> None:
    task = words_task(sparse=False)
    built = task()
    assert [span.name for span in Layout.of(built.model, [list(built.model.parameters())]).parameters] == [
        "embedding.weight"
    ]
    model = inline(task, TWO, epochs=3).model
    assert isinstance(model, Tied)
    assert model.head.weight is model.embedding.weight
    assert not torch.equal(model.head.weight, untrained(task).head.weight)


def test_frozen_parameters_are_not_in_the_vector_and_do_not_change(inline: Fit) -> None:
    def frozen() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))
        model[0].requires_grad_(False)
        return model

    task = regression(frozen)
    run = inline(task, TWO, epochs=2, seed=4)
    names = [span.name for span in snapshot(run, task).manifest.layout.parameters]
    assert names == ["2.weight", "2.bias"]
    before = untrained(task, seed=4)
    assert torch.equal(run.model[0].weight, before[0].weight)
    assert not torch.equal(run.model[2].weight, before[2].weight)


def test_parameters_that_no_group_names_are_not_trained(inline: Fit) -> None:
    task = regression(groups=lambda model: [{"params": model[2].named_parameters()}])
    run = inline(task, TWO, epochs=2)
    before = untrained(task)
    assert torch.equal(run.model[0].weight, before[0].weight)
    assert not torch.equal(run.model[2].weight, before[2].weight)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_parameters_unused_in_a_batch_have_no_gradient_there(inline: Fit, clip_norm: float | None) -> None:
    task = regression(Switch, batch_size=8, clip_norm=clip_norm)
    sgd = partial(torch.optim.SGD, lr=0.1)
    reference = inline(task, squall.SingleProcess(optimizer=sgd), epochs=2)
    assert_same(inline(task, squall.Downpour(replicas=1, shards=2, optimizer=sgd), epochs=2), reference, task)
    slow = squall.Downpour(replicas=2, optimizer=sgd, push_every=3)  # sums batches that used different layers
    trained = inline(task, slow, epochs=2).model
    assert all(not torch.equal(a, b) for a, b in zip(trained.parameters(), untrained(task).parameters()))


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_sparse_gradients_train_as_dense_ones(inline: Fit, clip_norm: float | None) -> None:
    def task(sparse: bool) -> Callable[[], squall.Task]:
        def build() -> squall.Task:
            made = words_task(sparse=True)()
            made.model.embedding.sparse = sparse
            return squall.Task(model=made.model, loss=made.loss, train=made.train, batch_size=8, clip_norm=clip_norm)

        return build

    sparse, dense = (inline(task(sparse), TWO, epochs=2) for sparse in (True, False))
    torch.testing.assert_close(sparse.model.embedding.weight, dense.model.embedding.weight, atol=1e-6, rtol=1e-5)
    assert not torch.equal(sparse.model.embedding.weight, untrained(task(True)).embedding.weight)


@pytest.mark.parametrize("kind", [squall.Downpour, squall.Synchronous, squall.SingleProcess])
def test_a_model_of_one_scalar(inline: Fit, kind: Callable[..., squall.Strategy]) -> None:
    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return ((model(batch[0]) - 3 * batch[0][:, :1]) ** 2).mean()

    strategy = kind(optimizer=partial(torch.optim.SGD, lr=0.1))
    slope = inline(regression(Scalar, loss=loss), strategy, epochs=20).model.slope.detach()
    assert slope.shape == ()
    assert float(slope) == pytest.approx(3.0, abs=0.05)


@pytest.mark.parametrize("shards", [2, 3, 5, 7])
def test_shards_that_do_not_divide_the_vector(inline: Fit, shards: int) -> None:
    task = regression(lambda: nn.Sequential(nn.Linear(6, 1, bias=False), nn.BatchNorm1d(1)))  # 8 elements in 64
    reference = inline(task, squall.SingleProcess(optimizer=SGD), epochs=2)
    strategy = squall.Downpour(replicas=1, shards=shards, optimizer=SGD)
    assert_same(inline(task, strategy, epochs=2), reference, task)


class Many(nn.Module):
    """A model of `count` small tensors."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.full((1 + i % 3,), 0.01) for i in range(count)])

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, :1] * torch.cat(list(self.weights)).sum()


def test_thousands_of_tensors(inline: Fit) -> None:
    task = regression(lambda: Many(2500), examples=32)
    optimizer = partial(torch.optim.SGD, lr=1e-5)
    reference = inline(task, squall.SingleProcess(optimizer=optimizer))
    assert_same(inline(task, squall.Downpour(replicas=1, shards=3, optimizer=optimizer)), reference, task)
    assert reference.model.weights[2499][0].item() != pytest.approx(0.01, abs=1e-9)


@pytest.mark.timeout(20)  # quadratic time would take minutes
def test_the_layout_of_twenty_thousand_tensors() -> None:
    model = Many(20_000)
    layout = Layout.of(model, [list(model.parameters())])
    vector = torch.zeros(layout.length)
    layout.write_model(model, vector)
    layout.read_model(vector, model)
    assert len(layout.parameters) == 20_000
    assert not layout.differences(layout)


def test_autocast_computes_in_bfloat16_and_keeps_float32(inline: Fit) -> None:
    seen: set[torch.dtype] = set()

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        output = model(batch[0])
        if torch.is_grad_enabled() and torch.is_autocast_enabled("cpu"):
            seen.add(output.dtype)
        return ((output.float() - batch[1]) ** 2).mean()

    half = inline(regression(loss=loss, autocast=torch.bfloat16, validate=numbers(20)), TWO, epochs=3)
    full = inline(regression(loss=mean_square), TWO, epochs=3)
    assert seen == {torch.bfloat16}
    for mine, theirs in zip(half.model.parameters(), full.model.parameters()):
        assert mine.dtype == torch.float32
        assert not torch.equal(mine, theirs)
        torch.testing.assert_close(mine, theirs, atol=0.05, rtol=0.1)


def test_the_trained_model_is_in_evaluation_mode_and_predicts_what_was_measured(inline: Fit) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Dropout(0.2), nn.Linear(9, 1))

    run = inline(regression(network, validate=numbers(40)), TWO, epochs=3)
    batch = numbers(40).tensors
    assert not run.model.training
    assert run.model is run.model
    assert mean_square(run.model, batch).item() == pytest.approx(run.summary().metrics["loss"], rel=1e-5)
