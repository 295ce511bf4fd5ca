"""What the user gives: the model, its loss, the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from squall.metrics import Metric, check_metrics
from squall.runtime.seeds import chance_kept, listed
from squall.splits import Split

Batch = Any  # whatever the dataset's collated items are
OptimizerFactory = Callable[..., Optimizer]  # called with a list of param groups, as `torch.optim.SGD` is


@dataclass(frozen=True, kw_only=True)
class Task:
    """One training problem, built by a function without arguments.

    It is built once, and the processes of a run share it by fork: memory is shared, and so are open files with their
    positions. A dataset that reads a file opens it at its first use, not when it is made.

    Args:
        model: any `nn.Module` with float32 parameters, on the CPU. Tied and frozen parameters are fine.
        loss: `loss(model, batch)`, the mean over the batch, a scalar tensor; or that and a dict of numbers, also means
            over the batch, which are recorded beside it: (loss, {"reconstruction": a, "divergence": b}).
        train: a map-style dataset (`__len__` and `__getitem__`); `__getitems__` is used where it exists.
        validate: a map-style dataset, or None to train without evaluation. Its batches are of 4 x `batch_size`.
        batch_size: examples in one gradient of one replica.
        metrics: name -> `metric(model, batch)`: one value per example, shape [batch], or their mean. Or what is fed the
            whole validation set and then tells, as torchmetrics has it: an object with `update` and `compute`, or what
            makes one. Its update takes (model(batch[0]), batch[1]), or what the function of a pair returns:
            {"f1": (BinaryF1Score(), lambda model, batch: (model(batch["x"]), batch["y"]))}.
        groups: `groups(model)`, param groups in the form that `torch.optim` takes; parameters that no group
            names are not trained. None: one group with every trainable parameter.
        schedule: `schedule(optimizer)`, a learning-rate scheduler, stepped once per update that a shard applies.
        clip_norm: gradients are scaled down to this 2-norm on each replica, before they are pushed (with Synchronous,
            therefore, each replica's gradient and not their mean; with AllReduce their mean).
        autocast: a dtype such as `torch.bfloat16` that the replica computes in; the shards keep float32.
        shuffle: train on each epoch in a new random order (of the run's seed), or in the dataset's order.
        sampler: the order instead: any torch `Sampler` with a length, or a list of indices, for weights, a curriculum
            or a subset. Each process lists it once an epoch, seeded by run and epoch (`set_epoch` is called where there
            is one). An epoch has len(sampler) positions, which leases, audit and replay count in place of examples.
        loader: further arguments for `torch.utils.data.DataLoader`: `num_workers`, `collate_fn`, `drop_last` ...
        split: how a replica of several parts (`parts=` of `fit`) lies on its processes: `squall.Pipeline`,
            `squall.Tensor` or `squall.Branches`. With one part it changes nothing.
    """

    model: nn.Module
    loss: Callable[[nn.Module, Batch], Tensor | tuple[Tensor, Mapping[str, Tensor | float]]]
    train: Dataset[Any]
    validate: Dataset[Any] | None = None
    batch_size: int = 64
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    clip_norm: float | None = None
    autocast: torch.dtype | None = None
    shuffle: bool = True
    sampler: Sampler[int] | Sequence[int] | None = None
    loader: Mapping[str, Any] = field(default_factory=dict)
    split: Split | None = None

    @classmethod
    def from_keras(
        cls, model: Any, *, loss: Any, metrics: Sequence[Any] | Mapping[str, Any] = (), **given: Any
    ) -> Task:  # fmt: skip
        """A task that trains a Keras 3 model, on Keras's torch backend (the extra `keras`).

        Its model is a `squall.keras.KerasModel`, to train and in `run.model`; `squall.keras.save_keras` writes it as a
        .keras file. Batches are (inputs, targets) or (inputs, targets, sample weights). The run's seed decides Keras's
        weights and what its layers draw; for augmentation in a dataset there is `squall.keras.Seeded`.

        Args:
            model: a `keras.Model` that is built: it knows its inputs, or has been called once.
            loss: as of `keras.Model.compile`: a name, an object, your own function of (targets, outputs), or a dict of
                these by output. What layers add to it (regularization, `add_loss`) counts as well.
            metrics: names, objects, or functions of (targets, outputs), as of `compile`, in a list or by name.
            given: all other arguments of a Task: train, validate, batch_size ...

        Raises:
            ValueError: Keras is not installed or computes with another backend, or the model or the loss does not fit.
        """
        from squall.keras import keras_parts

        return cls(**keras_parts(model, loss, metrics), **given)

    @property
    def examples(self) -> int:
        """Training examples in an epoch: positions of its order."""
        count = len(cast(Sized, self.train if self.sampler is None else self.sampler))
        return count - count % self.batch_size if self.loader.get("drop_last") else count

    def param_groups(self) -> list[dict[str, Any]]:
        """The trainable parameters by group, each once, frozen ones left out."""
        if self.groups is None:
            return [{"params": [p for p in self.model.parameters() if p.requires_grad]}]
        groups = []
        for group in self.groups(self.model):
            params = group["params"]
            params = [params] if isinstance(params, Tensor) else list(params)
            params = [p[1] if isinstance(p, tuple) else p for p in params]  # named parameters are allowed
            groups.append({**group, "params": [p for p in params if p.requires_grad]})
        return groups


TaskFunction = Callable[[], Task]
OWN_LOADER_ARGUMENTS = ("batch_size", "shuffle", "sampler", "batch_sampler")
MOST_EXTRAS_BYTES = 1 << 20  # of the numbers beside the loss, with their names
NUMBER_BYTES = 16  # of each, and no more, without its name


def check_task(task: object) -> Task:
    """Raise a `ValueError` that says what to change, or return the task. Runs the loss on one small batch."""
    if not isinstance(task, Task):
        raise ValueError(f"the task function must return a squall.Task, it returned {type(task).__name__}")
    check_data(task)
    _check_parameters(task)
    _check_loss(task)
    return task


def check_data(task: Task) -> None:
    for name, data in (("train", task.train), ("validate", task.validate)):
        if data is None:
            continue
        if isinstance(data, DataLoader):
            raise ValueError(f"Task.{name} is a DataLoader: pass its dataset, and its batch_size, sampler and the like")
        if isinstance(data, IterableDataset):
            raise ValueError(
                f"Task.{name} is an IterableDataset ({type(data).__name__}), a stream: leases, audit and replay need"
                " numbered examples, so give a map-style dataset (__len__ and __getitem__), such as list(stream)"
            )
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise ValueError(f"Task.{name} must be map-style (__len__ and __getitem__): it is {type(data).__name__}")
        if len(data) == 0:
            raise ValueError(f"Task.{name} is empty: give at least one example")
    if not (isinstance(task.batch_size, int) and task.batch_size >= 1):
        raise ValueError(f"Task.batch_size is {task.batch_size!r}: it must be at least 1, and whole")
    if task.clip_norm is not None and not task.clip_norm > 0:
        raise ValueError(f"Task.clip_norm is {task.clip_norm}: it must be positive, or None not to clip")
    clash = [name for name in OWN_LOADER_ARGUMENTS if name in task.loader]
    if clash:
        raise ValueError(
            f"Task.loader sets {', '.join(clash)}: leases decide that; use Task.batch_size, shuffle and sampler"
        )
    if task.sampler is not None:
        if not hasattr(task.sampler, "__len__"):
            raise ValueError(f"Task.sampler ({type(task.sampler).__name__}) has no length: leases are ranges of it")
        if len(cast(Sized, task.sampler)) == 0:
            raise ValueError("Task.sampler is empty: give at least one example")
        listed(task.sampler, 0, 0, len(cast(Sized, task.train)))  # the first epoch's order, as every process lists it
    if task.examples == 0:
        raise ValueError(f"loader's drop_last drops all: Task.batch_size is {task.batch_size}, make it smaller")
    try:
        DataLoader(task.train, **task.loader)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Task.loader is not what torch's DataLoader takes: {error}") from error


def _check_parameters(task: Task) -> None:
    if not isinstance(task.model, nn.Module):
        raise ValueError(f"Task.model must be an nn.Module: it is {type(task.model).__name__}")
    trainable = [(n, p) for n, p in task.model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameters: set requires_grad=True on some")
    for name, parameter in trainable:
        if is_lazy(parameter):
            raise ValueError(f"parameter {name!r} has no shape yet (a lazy module): run the model once in the task")
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype}: build the model in float32"
                " (Task.autocast computes in a smaller type)"
            )
        if parameter.device.type != "cpu":
            raise ValueError(f"parameter {name!r} is on {parameter.device}: build the model on the CPU, pass device=")
    groups = task.param_groups()
    grouped = [p for group in groups for p in group["params"]]
    if len({id(p) for p in grouped}) != len(grouped):
        raise ValueError("Task.groups names a parameter twice: give each parameter to one group")
    own = {id(p) for _, p in trainable}
    if not grouped or any(id(p) not in own for p in grouped):
        raise ValueError("Task.groups must name trainable parameters of Task.model")


def _check_loss(task: Task) -> None:
    """The loss on one batch and the metrics on another, without a trace: weights and random state stay as they are."""
    with untouched(task.model):
        before = {name: (buffer, buffer._version) for name, buffer in task.model.named_buffers()}
        loss, extras = loss_and_extras(task.loss(task.model, first_batch(task, task.train)))
        _check_buffers(task.model, before)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"Task.loss must return a scalar, the mean over the batch: it returned {shape}")
        if taken := {"loss", *task.metrics} & set(extras or {}):
            raise ValueError(
                f"Task.loss returns {', '.join(sorted(taken))} beside the loss, which is another metric's name"
            )
        if not loss.requires_grad:
            raise ValueError("Task.loss does not depend on a trainable parameter: its result has no gradient")
        if task.validate is not None and task.metrics:
            task.model.eval()
            batch = first_batch(task, task.validate)
            check_metrics(task.metrics, task.model, batch, _first_count(task, task.validate))


def loss_and_extras(returned: Any) -> tuple[Any, dict[str, float] | None]:
    """What `Task.loss` returned: the loss, and the numbers beside it. Raises `ValueError` for what is no number."""
    if not isinstance(returned, tuple):
        return returned, None
    if len(returned) != 2 or not isinstance(returned[1], Mapping):
        raise ValueError("Task.loss returned a tuple: return the loss, or (loss, {name: number})")
    extras = {}
    for name, value in returned[1].items():
        try:
            extras[str(name)] = float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"Task.loss returned {name!r} beside the loss, which is no number: {value!r:.80}"
            ) from None
    if sum(len(name.encode()) + NUMBER_BYTES for name in extras) > MOST_EXTRAS_BYTES:
        raise ValueError(
            f"Task.loss returned {len(extras):,} numbers beside the loss, which with their names take more than"
            f" {MOST_EXTRAS_BYTES >> 20} MiB: they are recorded in every report, so return sums or means of them"
        )
    return returned[0], extras


def _check_buffers(model: nn.Module, before: Mapping[str, tuple[Tensor, int]]) -> None:
    """Buffers that are no part of the vector stay as the task built them, so training must not change them."""
    for name, buffer in model.named_buffers():
        if name not in before or (buffer.layout == torch.strided and not buffer.is_complex()):
            continue
        tensor, version = before[name]
        if buffer is not tensor or buffer._version != version:
            kind = "complex" if buffer.is_complex() else "sparse"
            raise ValueError(
                f"buffer {name!r} is {kind}, and a batch changes it: replicas share dense real buffers alone, so"
                " register it as one, or leave it as it is while the model is in training mode"
            )


def first_batch(task: Task, data: Dataset[Any]) -> Batch:
    collate = {k: v for k, v in task.loader.items() if k == "collate_fn"}
    return next(iter(DataLoader(data, batch_size=_first_count(task, data), **collate)))


def _first_count(task: Task, data: Dataset[Any]) -> int:
    return min(task.batch_size, len(cast(Sized, data)))


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put parameters, buffers, modes and random state back to what they were before."""
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    modes = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    try:
        with chance_kept(gpus_too=False):
            yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values):
                tensor.copy_(value)
        for module, mode, buffers in modes:
            module.training = mode
            module._buffers.update(buffers)
