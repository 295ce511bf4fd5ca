"""The order of the data by a torch sampler: the same in every process, under the same leases."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import squall
from squall.report import Reader, audit
from squall.run import Run
from squall.runtime.seeds import listed
from tests.rehearsal import assert_replays, rehearse
from tests.tasks import Noisy, assert_same, mean_square, numbers, plain, regression

Fit = Callable[..., Run]
WEIGHTS = [0.0] * 45 + [1.0] * 45  # the second half alone


class Curriculum(Sampler[int]):
    """More of the data each epoch would change its length: this one has the easy half first, by epoch."""

    epoch = 0

    def __len__(self) -> int:
        return 45

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(45) if self.epoch == 0 else range(45, 90))


class Drawing(Sampler[int]):
    """Draws from everything there is, and counts how often it was asked."""

    asked = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        drawn = [random.randrange(90), int(np.random.randint(90)), int(torch.randint(90, ()))]
        return iter([(index + self.asked) % 90 for index in drawn])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(123)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "weights": lambda: WeightedRandomSampler(WEIGHTS, 70),
    "weights with a generator": lambda: WeightedRandomSampler(WEIGHTS, 70, generator=seeded()),
    "random": lambda: RandomSampler(range(90), generator=seeded()),
    "subset": lambda: SubsetRandomSampler(range(0, 90, 3)),
    "curriculum": Curriculum,
    "drawing": Drawing,
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_list_is_a_function_of_seed_and_epoch_and_leaves_chance_alone(name: str) -> None:
    first, late = SAMPLERS[name](), SAMPLERS[name]()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    lists = [listed(first, 7, epoch, 90).tolist() for epoch in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert listed(late, 7, 2, 90).tolist() == lists[2], "a process that begins in a later epoch"
    assert len(lists[0]) == len(first)
    assert lists[0] != lists[1]
    if name != "curriculum":
        assert listed(first, 8, 0, 90).tolist() != lists[0]


def counted(sampler: Any, counts: Tensor, **options: Any) -> Callable[[], squall.Task]:
    """A task that counts how often an example was computed on."""

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        counts.index_add_(0, batch[2], torch.ones(len(batch[2]), dtype=counts.dtype))
        return mean_square(model, batch)

    inputs, targets = numbers(90).tensors
    train = TensorDataset(inputs, targets, torch.arange(90))
    return lambda: squall.Task(
        model=plain(), loss=loss, train=train, batch_size=16, **{"sampler": sampler() if sampler else None} | options
    )


STRATEGIES = {
    "single": squall.SingleProcess(),
    "downpour": squall.Downpour(replicas=3, push_every=2, fetch_every=3),
    "synchronous": squall.Synchronous(replicas=3),
    "averaging": squall.Averaging(replicas=2, every=2),
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("name", ["weights", "curriculum", "subset"])
def test_every_position_of_an_epoch_is_trained_once(inline: Fit, strategy: squall.Strategy, name: str) -> None:
    counts = torch.zeros(90, dtype=torch.int64)
    run = inline(counted(SAMPLERS[name], counts), strategy, epochs=3, seed=4)
    size = len(SAMPLERS[name]())
    expected = Counter(i for epoch in range(3) for i in listed(SAMPLERS[name](), 4, epoch, 90).tolist())
    expected.update(range(16))  # the check before the launch
    assert counts.tolist() == [expected[i] for i in range(90)]
    assert run.summary().examples == 3 * size
    reader = Reader(run.directory / "run.sqlite")
    assert str(audit(reader)).endswith(f"Epochs 0 to 2: each of {size} positions trained exactly once.")
    reader.close()


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_drop_last_leaves_the_short_batch_out(inline: Fit, strategy: squall.Strategy) -> None:
    counts = torch.zeros(90, dtype=torch.int64)
    run = inline(counted(None, counts, loader={"drop_last": True}), strategy, epochs=3)
    assert counts.sum() == 3 * 80 + 16
    assert run.summary().examples == 240


def test_a_run_with_a_sampler_is_replayed_and_resumed_bit_for_bit(inline: Fit, tmp_path: Path) -> None:
    task = regression(train=Noisy(90), sampler=WeightedRandomSampler(WEIGHTS, 70, generator=seeded()))
    assert_replays(rehearse(tmp_path / "run", squall.Downpour(replicas=3, shards=2), task, epochs=4, kill_at={60: 1}))
    whole = inline(task, squall.SingleProcess(), epochs=4)
    half = inline(task, squall.SingleProcess(), epochs=2)
    assert_same(squall.resume(half.directory, epochs=4), whole, task)
    assert_same(inline(task, squall.Downpour(replicas=1, shards=2), epochs=4), whole, task)


def test_a_session_deals_a_samplers_order() -> None:
    session = squall.join(nn.Linear(6, 1))
    data = TensorDataset(torch.randn(90, 6), torch.arange(90))
    found = []
    batches = session.batches(data, batch_size=16, epochs=2, sampler=Curriculum())
    assert len(batches) == 2 * 3
    for inputs, numbers_ in batches:
        loss = session_loss(session, inputs)
        found += numbers_.tolist()
        session.step(loss)
    assert found == [*range(90)]


def session_loss(session: squall.session.session.Session, inputs: Tensor) -> Tensor:
    loss = session._model(inputs).square().mean()
    loss.backward()
    return loss  # type: ignore[no-any-return]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(numbers(9))


class Short(Curriculum):
    def __iter__(self) -> Iterator[int]:
        return iter(range(44))


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(90))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a loader": ({"train": DataLoader(numbers(9))}, "Task.train is a DataLoader: pass its dataset"),
    "a stream": ({"train": Stream()}, "Task.train is an IterableDataset (Stream), a stream"),
    "batches": ({"sampler": BatchSampler(range(90), 9, False)}, "gives batches: pass the sampler of single examples"),
    "too few": ({"sampler": Short()}, "Task.sampler (Short) gave 44 examples in epoch 0, and its length is 45"),
    "beyond the data": ({"sampler": [0, 90]}, "gave numbers from 0 to 90, of 90 examples"),
    "no length": ({"sampler": Endless()}, "Task.sampler (Endless) has no length"),
    "nothing": ({"sampler": []}, "Task.sampler is empty"),
    "all dropped": ({"loader": {"drop_last": True}, "batch_size": 91}, "drop_last drops all: Task.batch_size is 91"),
    "in the loader": ({"loader": {"sampler": [1]}}, "use Task.batch_size, shuffle and sampler"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_gives_no_order_is_refused_before_the_run(name: str, run_dir: Path) -> None:
    options, message = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        squall.fit(regression(**options), squall.SingleProcess(), run_dir=run_dir)
    assert not run_dir.exists()
