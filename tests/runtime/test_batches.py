"""The data: the same batches however they are loaded, and every example once an epoch."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from setproctitle import getproctitle
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import squall
from squall.protocol.nodes import Node
from squall.report import Reader, audit
from squall.run import Run
from squall.runtime.batches import Key, TrainingBatches, loader_killed, to_device
from squall.runtime.seeds import epoch_order, mix, seed_everything
from squall.task import Task
from tests.tasks import LOCAL, Noisy, assert_same, mean_square, numbers, plain, regression

Fit = Callable[..., Run]
KEYS = [Key(0, start, min(start + 16, 90)) for start in range(0, 90, 16)] + [Key(1, 32, 48), Key(0, 0, 16)]


class ItemWise(Dataset[Any]):
    """Another dataset, by one item at a time."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


class AtOnce(ItemWise):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError("__getitems__ is there")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert all(type(index) is int for index in indices)
        return [self.data[index] for index in indices]


def stacked(items: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """A collate function of the user's own, with chance in it."""
    inputs, targets = (torch.stack(part) for part in zip(*items))
    return {"inputs": inputs + torch.rand(()), "targets": targets, "noise": torch.tensor(np.random.rand())}


def loaded(data: Dataset[Any], **options: Any) -> list[Any]:
    """The batches of `KEYS`, the loader told what will come."""
    task = Task(model=plain(), loss=mean_square, train=data, batch_size=16, **options)
    batches = TrainingBatches(task, seed=9)
    for key in KEYS:
        batches.expect(key)
    found = [batches.load(*key) for key in KEYS]
    batches.close()
    return found


def assert_equal(mine: Any, theirs: Any) -> None:
    assert type(mine) is type(theirs)
    if isinstance(mine, Tensor):
        assert torch.equal(mine, theirs)
    elif isinstance(mine, dict):
        assert list(mine) == list(theirs)
        assert_equal(list(mine.values()), list(theirs.values()))
    else:
        for a, b in zip(mine, theirs, strict=True):
            assert_equal(a, b)


def test_tensors_indexed_at_once_are_the_items_stacked() -> None:
    assert_equal(loaded(numbers(90)), loaded(ItemWise(numbers(90))))


def test_whole_batches_are_asked_of_a_dataset_that_has_them() -> None:
    assert_equal(loaded(AtOnce(numbers(90))), loaded(numbers(90)))


@pytest.mark.parametrize("options", [{}, {"collate_fn": stacked}, {"persistent_workers": False, "prefetch_factor": 1}])
def test_worker_processes_load_the_same_batches(options: dict[str, Any]) -> None:
    kept = {name: value for name, value in options.items() if name == "collate_fn"}
    here = loaded(Noisy(90), loader=kept)
    assert_equal(loaded(Noisy(90), loader={"num_workers": 2, **options}), here)


def test_worker_processes_index_tensors_at_once_as_well() -> None:
    assert_equal(loaded(numbers(90), loader={"num_workers": 1}), loaded(numbers(90)))


def test_batches_that_were_announced_for_a_lost_lease_are_passed_over() -> None:
    task = Task(model=plain(), loss=mean_square, train=Noisy(90), batch_size=16, loader={"num_workers": 2})
    batches, reference = TrainingBatches(task, 9), loaded(Noisy(90))
    for key in (KEYS[3], KEYS[4], KEYS[1]):
        batches.expect(key)
    assert_equal(batches.load(*KEYS[1]), reference[1])
    batches.expect(KEYS[2])
    assert_equal(batches.load(*KEYS[2]), reference[2])
    assert_equal(batches.load(*KEYS[0]), reference[0])  # was never announced
    batches.close()


class Fatal(ItemWise):
    """Kills the process that loads it."""

    def __getitem__(self, index: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_loader_is_known_to_be_killed_also_where_its_signal_comes_later() -> None:
    """torch looks at its workers while it waits for data, and has then seen one go before its handler could."""
    task = Task(
        model=plain(), loss=mean_square, train=Fatal(numbers(90)), batch_size=16,
        loader={"num_workers": 1, "timeout": 1},
    )  # fmt: skip
    batches = TrainingBatches(task, 9)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        with pytest.raises(RuntimeError, match="exited unexpectedly") as raised:
            batches.load(*KEYS[0])
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    assert loader_killed(raised.value)


class Counted(ItemWise):
    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.seen: Counter[int] = Counter()

    def __getitem__(self, index: int) -> Any:
        self.seen[index] += 1
        return super().__getitem__(index)


def test_the_last_batch_is_kept_for_a_second_try() -> None:
    data = Counted(numbers(90))
    batches = TrainingBatches(Task(model=plain(), loss=mean_square, train=data, batch_size=16), 0)
    assert batches.load(0, 0, 16) is batches.load(0, 0, 16)
    assert set(data.seen.values()) == {1}


def test_one_batch_is_prepared_and_then_not_loaded_again() -> None:
    data = Counted(numbers(90))
    batches = TrainingBatches(Task(model=plain(), loss=mean_square, train=data, batch_size=16), 0)
    batches.prepare()
    assert not data.seen, "nothing is announced"
    for key in KEYS[:2]:
        batches.expect(key)
    chance = torch.get_rng_state()
    for _ in range(2):
        batches.prepare()
    assert torch.equal(torch.get_rng_state(), chance)
    assert data.seen.total() == 16
    for key in KEYS[:2]:
        batches.load(*key)
    assert data.seen.total() == 32


def test_nothing_is_prepared_for_a_run_that_has_ended_before_its_data() -> None:
    data = Counted(numbers(90))
    batches = TrainingBatches(Task(model=plain(), loss=mean_square, train=data, batch_size=16), 0)
    batches.expect(KEYS[0])
    batches.close()
    batches.prepare()
    assert not data.seen


@given(st.lists(st.tuples(st.sampled_from(["expect", "prepare", "load"]), st.sampled_from(KEYS)), max_size=30))
@pytest.mark.parametrize("data", [Noisy(90), numbers(90)])
def test_batches_are_the_same_whatever_is_announced_and_prepared(data: Any, story: list[tuple[str, Key]]) -> None:
    reference = dict(zip(KEYS, loaded(data)))
    batches = TrainingBatches(Task(model=plain(), loss=mean_square, train=data, batch_size=16), seed=9)
    for act, key in story:
        match act:
            case "expect":
                batches.expect(key)
            case "prepare":
                batches.prepare()
            case _:
                assert_equal(batches.load(*key), reference[key])


def test_any_nest_of_a_batch_is_moved() -> None:
    pair = Node("replica")
    batch = {"a": [torch.ones(1), (torch.ones(2), "text")], "b": Key(torch.ones(3), 1, 2), "c": pair}  # type: ignore[arg-type]
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == "text"
    assert isinstance(moved["b"], Key)
    assert moved["b"].epoch.is_meta
    assert moved["c"] is pair


def dictionary_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return mean_square(model, [batch["inputs"], batch["targets"]])


def test_batches_may_be_dictionaries(inline: Fit) -> None:
    task = regression(train=Noisy(90), loss=dictionary_loss, loader={"collate_fn": stacked})
    reference = inline(task, squall.SingleProcess(), epochs=2)
    assert_same(inline(task, squall.Downpour(replicas=1, shards=2), epochs=2), reference, task)


@pytest.mark.parametrize(
    "strategy",
    [
        squall.SingleProcess(),
        squall.Downpour(replicas=3, push_every=2, fetch_every=3),
        squall.Downpour(replicas=2, overlap=True, warm_start=20),
        squall.Synchronous(replicas=3),
    ],
    ids=["single", "downpour", "overlap", "synchronous"],
)
def test_every_example_is_computed_on_once_an_epoch(inline: Fit, strategy: squall.Strategy) -> None:
    counts = torch.zeros(90, dtype=torch.int64)

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        counts[batch[2]] += 1
        return mean_square(model, batch)

    inputs, targets = numbers(90).tensors
    task = regression(train=TensorDataset(inputs, targets, torch.arange(90)), loss=loss)
    checked_on = Counter(dict.fromkeys(range(16), 1))  # the check before the launch
    run = inline(task, strategy, epochs=3)
    assert counts.tolist() == [3 + checked_on[i] for i in range(90)]
    assert run.summary().examples == 270
    reader = Reader(run.directory / "run.sqlite")
    assert str(audit(reader)).endswith("Epochs 0 to 2: each of 90 examples trained exactly once.")
    reader.close()


@pytest.mark.parametrize(
    "strategy", [squall.SingleProcess(), squall.Downpour(replicas=3), squall.Synchronous(replicas=3)]
)
@pytest.mark.parametrize("steps", [1, 4, 13])
def test_steps_are_batches_over_all_replicas(inline: Fit, strategy: squall.Strategy, steps: int) -> None:
    run = inline(regression(), strategy, steps=steps)
    assert run.summary().examples == 16 * (steps - steps // 6) + 10 * (steps // 6)  # the sixth of an epoch is short


def test_processes_share_the_work_by_speed_and_train_every_example_once(tmp_path: Path) -> None:
    """The second replica's first batch lasts until the first has done more than half of all.

    They meet at a pipe: who opens it waits for the other. Each counts in a file of its own, by its process's title.
    """
    examples, epochs = 512, 2
    half = tmp_path / "half"
    os.mkfifo(half)
    inputs, targets = numbers(examples).tensors
    files = [tmp_path / f"replica-{i}" for i in range(2)]
    for path in files:
        np.zeros(examples, dtype=np.int64).tofile(path)

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        title = getproctitle()
        if title.startswith("squall replica"):
            replica = int(title.split()[2])
            counts = np.memmap(files[replica], dtype=np.int64, mode="r+")
            before, meeting = counts.sum(), (examples * epochs // 2, 0)[replica]
            counts[batch[2].numpy()] += 1
            if before <= meeting < counts.sum():
                half.open("wr"[replica]).close()
        return mean_square(model, batch)

    data = TensorDataset(inputs, targets, torch.arange(examples))
    run = squall.fit(
        regression(train=data, loss=loss, batch_size=8), squall.Downpour(replicas=2, shards=2),
        epochs=epochs, settings=LOCAL, run_dir=tmp_path / "run",
    )  # fmt: skip
    fast, slow = (np.fromfile(path, dtype=np.int64) for path in files)
    assert (fast + slow == epochs).all()
    assert 0 < slow.sum() < fast.sum()
    assert run.summary().shares[1] == pytest.approx(slow.sum() / (epochs * examples))


# ---------------------------------------------------------------- chance


def test_every_purpose_has_a_seed_of_its_own() -> None:
    seeds = {mix(seed, epoch, start, *rest) for seed in range(4) for epoch in range(8) for start in range(0, 640, 16)
             for rest in ((), (1,))}  # fmt: skip
    assert len(seeds) == 4 * 8 * 40 * 2
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mix(1, 2) != mix(2, 1)


def test_a_seed_decides_all_three_sources_of_chance() -> None:
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    seed_everything(2**63 - 1)
    first = draw()
    seed_everything(5)
    other = draw()
    seed_everything(2**63 - 1)
    assert draw() == first
    assert not set(first) & set(other)


def test_each_epoch_has_its_order_and_unshuffled_ones_the_datasets() -> None:
    orders = [epoch_order(seed, epoch, 50) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert all(sorted(order.tolist()) == list(range(50)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) == 6
    assert torch.equal(epoch_order(0, 1, 50), orders[1])
    assert epoch_order(3, 2, 50, shuffle=False).tolist() == list(range(50))
