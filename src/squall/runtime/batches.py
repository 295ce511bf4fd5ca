"""From a range of an epoch's order to a collated batch, through torch's DataLoader."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from setproctitle import getproctitle, setproctitle
from torch.utils.data import DataLoader, Dataset, TensorDataset

from squall.runtime.processes import die_with_parent
from squall.runtime.seeds import chance_kept, epoch_order, listed, mix, seed_everything
from squall.task import Batch, Task
from squall.usercode.blame import note_batch

NOTICED_S = 0.5  # that a process which has closed its connections takes at most to be gone


class Counted(Dataset[Any]):
    """A dataset of so many examples, for processes that count examples and never load one."""

    def __init__(self, examples: int) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return self._examples


class Steps(Counted):
    """The dataset of a loop that makes its batches itself: it is dealt the numbers of its steps."""

    def __init__(self, examples: int, step_examples: int) -> None:
        super().__init__(examples)
        self._step_examples = step_examples

    def number(self, start: int) -> int:
        """The number of the step whose first example this is."""
        return start // self._step_examples


class Key(NamedTuple):
    """Examples [start, stop) of an epoch's order."""

    epoch: int
    start: int
    stop: int


class _Request(NamedTuple):
    """What the sampler hands to the dataset, here or in a worker process."""

    seed: int
    indices: torch.Tensor


class _Seeded(Dataset[Any]):
    """Loads a whole batch, its random state first set from the run's seed and the batch's place in the run."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data

    def __getitems__(self, request: _Request) -> list[Any]:
        seed_everything(request.seed)
        indices = request.indices.tolist()
        several = getattr(self.data, "__getitems__", None)
        return list(several(indices)) if several is not None else [self.data[i] for i in indices]


class TrainingBatches:
    """The training batches of one process.

    `expect` announces what will be loaded, so that the loader's worker processes work ahead; where there are none,
    `prepare` loads one batch ahead. The last batch is kept, for the second try of one that gave a NaN.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self._seed = seed
        self._task = task
        self._orders: dict[int, torch.Tensor] = {}
        self._expected: deque[Key] = deque()  # announced, not yet asked of the loader
        self._under_way: deque[Key] = deque()  # asked of the loader
        self._coming: dict[Key, Batch | None] = {}  # announced, where there are no workers; the first may be loaded
        self._last: tuple[Key, Batch] | None = None
        self._steps = task.train if isinstance(task.train, Steps) else None
        # A TensorDataset gives a batch by one indexing of each tensor, instead of one per example and a stack.
        self._tensors = task.train.tensors if type(task.train) is TensorDataset and not task.loader else None
        arguments = loader_arguments(task)
        if arguments.get("num_workers", 0) > 0:
            arguments.setdefault("persistent_workers", True)
        sampler: Any = _Sampler(self._requests)
        self._loader = DataLoader(_Seeded(task.train), batch_sampler=sampler, **arguments)
        self._ahead = self._loader.num_workers > 0
        self._iterator: Iterator[Batch] | None = None

    def expect(self, key: Key) -> None:
        if self._ahead:
            self._expected.append(key)
        else:
            self._coming[key] = None

    def prepare(self) -> None:
        """Load what is announced next, unless workers do. To be called when there is nothing else to do.

        The random state is afterwards what it was: loading seeds it, and a script that breaks out of its loop may go on
        drawing. Loading seeds no GPU.
        """
        key = next(iter(self._coming), None)
        if key is None or self._coming[key] is not None:
            return
        draws = self._tensors is None and self._steps is None
        with chance_kept(gpus_too=False) if draws else contextlib.nullcontext():
            self._coming[key] = self._load(key)

    def load(self, epoch: int, start: int, stop: int) -> Batch:
        key = Key(epoch, start, stop)
        batch = self._announced(key) if key in self._coming else None
        return self._load(key) if batch is None else batch

    def _announced(self, key: Key) -> Batch | None:
        """The batch, if it was prepared. What was announced before it is not wanted any more: its lease was lost."""
        for before in list(self._coming):
            batch = self._coming.pop(before)
            if before == key:
                break
        return batch

    def _load(self, key: Key) -> Batch:
        if self._steps is not None:
            return self._steps.number(key.start)
        if self._tensors is not None:
            indices = self._order(key.epoch)[key.start : key.stop]
            return [tensor[indices] for tensor in self._tensors]
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        if not self._ahead:
            self._expected.append(key)
        try:
            batch = self._next(key)
        except Exception as error:
            note_batch(error, *key)
            raise
        self._last = (key, batch)
        return batch

    def close(self) -> None:
        """End the loader's worker processes now; left to the garbage collector, each can take five seconds.

        A run may end before its data does: what was announced is not wanted any more.
        """
        self._coming.clear()
        self._iterator = None
        del self._loader

    def _next(self, key: Key) -> Batch:
        while True:
            if self._iterator is None:
                if not self._expected:
                    self._expected.append(key)
                self._iterator = iter(self._loader)
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._iterator = None
                continue
            if self._under_way.popleft() == key:
                return batch  # others were announced for a lease that was taken away

    def _requests(self) -> Iterator[_Request]:
        while self._expected:
            key = self._expected.popleft()
            self._under_way.append(key)
            indices = self._order(key.epoch)[key.start : key.stop]
            yield _Request(mix(self._seed, key.epoch, key.start), indices)

    def _order(self, epoch: int) -> torch.Tensor:
        order = self._orders.get(epoch)
        if order is None:
            if len(self._orders) >= 2:  # leases of two epochs can be under way at a time
                del self._orders[min(self._orders)]
            task, count = self._task, len(cast(Sized, self._task.train))
            if task.sampler is None:
                order = epoch_order(self._seed, epoch, count, task.shuffle)
            else:
                order = listed(task.sampler, self._seed, epoch, count)
            self._orders[epoch] = order
        return order


class _Sampler:
    """A batch sampler that is a function; it ends when nothing more is announced."""

    def __init__(self, requests: Callable[[], Iterator[_Request]]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[_Request]:
        return self._requests()


def validation_batches(task: Task) -> Iterator[tuple[int, Batch]]:
    """(examples, batch) over `task.validate` in its order.

    Batches are four times those of training: without a graph to keep, a model needs that much less memory.
    """
    assert task.validate is not None
    total, size = len(cast(Sized, task.validate)), 4 * task.batch_size
    if type(task.validate) is TensorDataset and not task.loader:
        batches: Iterable[Batch] = ([t[i : i + size] for t in task.validate.tensors] for i in range(0, total, size))
    else:
        batches = DataLoader(task.validate, batch_size=size, **loader_arguments(task))
    for start, batch in zip(range(0, total, size), batches):
        yield min(size, total - start), batch


def loader_arguments(task: Task) -> dict[str, Any]:
    """The task's own arguments of a DataLoader, whose worker processes are to end with this one.

    What drop_last drops, no lease is on.
    """
    arguments = {name: value for name, value in task.loader.items() if name != "drop_last"}
    if arguments.get("num_workers", 0) > 0:
        arguments["worker_init_fn"] = partial(_begin_worker, os.getpid(), arguments.get("worker_init_fn"))
    return arguments


def _begin_worker(parent: int, own: Callable[[int], None] | None, number: int) -> None:
    """A loader's worker process is named after its replica, and gone when that is gone, however it ends."""
    die_with_parent(parent)
    title = getproctitle()
    if title.startswith("squall "):
        setproctitle(f"squall loader {number} of {title.removeprefix('squall ')}")
    if own is not None:
        own(number)


def loader_killed(error: BaseException | None) -> bool:
    """Whether a loader's worker process was killed, as when memory runs out.

    torch raises that wherever its handler of SIGCHLD interrupts. Before that, what the worker hands over may break off;
    and where it has looked at its workers by then, it says that one exited, and does not know how.
    """
    if isinstance(error, OSError | EOFError) and callable(signal.getsignal(signal.SIGCHLD)):
        try:
            time.sleep(NOTICED_S)
        except RuntimeError as noticed:
            error = noticed
    while error is not None:
        if re.search(
            r"DataLoader worker .* is killed by signal|worker \(pid\(s\) .*\) exited unexpectedly", str(error)
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move the tensors of a nested batch (tensors, lists, tuples, dicts)."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {k: to_device(v, device) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(v, device) for v in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(v, device) for v in batch)
    return batch
