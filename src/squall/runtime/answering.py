"""What replicas do that answer: run a model on the batches of their leases, and keep what comes out."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn

from squall.protocol.answering.effects import Answer, KeepAnswers, WriteAnswers
from squall.protocol.effects import Effect, End, Expect, Payload
from squall.protocol.events import Answered, AnswersKept, AnswersTaken, Event
from squall.protocol.ledger import gaps
from squall.protocol.nodes import COORDINATOR
from squall.runtime.answers import ONE, Answers, Columns
from squall.runtime.batches import Key, TrainingBatches, to_device
from squall.runtime.driver import Host, HostAround
from squall.runtime.job import Job
from squall.runtime.pieces import Pieces
from squall.runtime.seeds import mix, seed_everything
from squall.task import Batch, Task, check_data, first_batch, untouched
from squall.usercode.blame import note_batch

Predict = Callable[[nn.Module, Batch], Any]
RESERVED = ("file", "allow_pickle")  # arguments of numpy.savez, which has the names of columns among them


class Nothing(nn.Module):
    """Stands for what a run trains, where it trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


@dataclass(frozen=True, kw_only=True)
class PredictionTask(Task):
    """What is answered: `train` is the data, and the parameter vector that of `Nothing`.

    So the model may be anything that can be called, quantised as well, and is shared by fork, with nothing copied.

    Args:
        network: the model, in evaluation mode.
        predict: `predict(network, batch)`, its outputs: a tensor, or several in a dict or tuple, each with one row for
            each example of the batch.
        format: of the files: "numpy" or "arrow".
        out: the directory that they will be in.
        file: that the model was read from, if it is no run's.
    """

    network: nn.Module
    predict: Predict
    format: str = "numpy"
    out: Path | None = None
    file: Path | None = None

    def checksum(self) -> int:
        """CRC-32 of the model's file, else of its state: the same on all machines that answer."""
        if self.file is not None:
            return crc32(self.file.read_bytes())
        found = 0
        for tensor in (*self.network.parameters(), *self.network.buffers()):
            found = crc32(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data, found)
        return found


def call(network: nn.Module, batch: Batch) -> Any:
    """The outputs for a batch, or for the first of what a batch consists of."""
    return network(batch[0] if isinstance(batch, tuple | list) else batch)


def columns(outputs: Any, examples: int) -> dict[str, Tensor]:
    """Outputs by name, on the CPU, in a type that NumPy has. Raises `ValueError` for what is no row an example."""
    if isinstance(outputs, Tensor):
        named: dict[str, Any] = {ONE: outputs}
    elif isinstance(outputs, Mapping):
        named = {str(name): value for name, value in outputs.items()}
    elif isinstance(outputs, tuple | list):
        named = dict(zip(getattr(outputs, "_fields", map(str, range(len(outputs)))), outputs))
    else:
        named = {type(outputs).__name__: outputs}
    found = {}
    for name, value in named.items():
        if "/" in name or name in RESERVED:
            raise ValueError(
                f"no file can be named by the model's output {name!r}: a function predict(model, batch) beside the data"
                " may call it otherwise"
            )
        if not isinstance(value, Tensor) or not value.ndim or len(value) != examples:
            what = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"the model's output {name!r} is {what} for a batch of {examples} examples: it must be a tensor with a"
                " row for each; a function predict(model, batch) beside the data says what to keep"
            )
        kept = value.detach().to("cpu", copy=True)
        found[name] = kept.float() if kept.dtype == torch.bfloat16 else kept
    if not found:
        raise ValueError("the model has no outputs: return a tensor, or a dict or tuple of them")
    return found


def check_prediction(task: PredictionTask) -> None:
    """Try the first batch. Raises `ValueError` for data, outputs or a disk on which that cannot be."""
    try:
        check_data(task)
    except ValueError as error:
        raise ValueError(str(error).replace("Task.train", "what is to be predicted")) from error
    batch, examples = first_batch(task, task.train), min(task.batch_size, len(cast(Sized, task.train)))
    with untouched(task.network), torch.inference_mode():
        try:
            outputs = task.predict(task.network, batch)
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
            raise ValueError(
                f"the model does not take a batch of these data, {shapes(batch)}: {type(error).__name__}: {error}\n"
                "give data of the shape that it was trained on, or a function predict(model, batch) beside them"
            ) from error
    found = columns(outputs, examples)
    if task.out is not None:
        _check_disk(task, task.out, sum(value.nbytes for value in found.values()) / examples)


def _check_disk(task: PredictionTask, out: Path, each: float) -> None:
    """Answers of `each` bytes lie there twice for a moment, in the files of ranges and in one."""
    answered = Answers(out, task.format).found()
    needed = each * (task.examples + sum(stop - start for start, stop in gaps(answered, task.examples)))
    free = shutil.disk_usage(next(path for path in (out, *out.absolute().parents) if path.is_dir())).free
    if needed > free:
        raise ValueError(
            f"the answers need {needed / 1e9:.3g} GB of disk, and where {out} lies {free / 1e9:.3g} GB are free: keep"
            " less of each example, by a function predict(model, batch), or choose another directory"
        )


def shapes(batch: Batch) -> str:
    """What a batch consists of, in words: "[float32[64, 1, 8, 8], int64[64]]"."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{name}: {shapes(value)}" for name, value in batch.items()) + "}"
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return "[" + ", ".join(map(shapes, batch[:8])) + (", ..." if len(batch) > 8 else "") + "]"
    return type(batch).__name__


class AnswerHost(Host):
    """A replica's: the model, its batches, and the answers that are not on the disk yet."""

    def __init__(self, job: Job, slot: int) -> None:
        """On another machine than the coordinator's a file stays here until its pieces have travelled."""
        task = job.task
        assert isinstance(task, PredictionTask)
        self._device = job.device(slot)
        self._network, self._predict = task.network.to(self._device), task.predict
        self._batches, self._seed = TrainingBatches(task, job.plan.seed), job.plan.seed
        self._answers = Answers(job.directory, task.format)
        self._slot, self._pieces = slot, None if job.site is None or job.site.has(COORDINATOR) else job.site.pieces
        self._file = memoryview(b"")  # of the newest answers, what has still to travel
        self._held: list[dict[str, Tensor]] = []  # a batch each

    def attach(self, payload: Payload) -> None:
        assert self._pieces is not None
        self._pieces.view(self._slot)[: payload.buffer] = self._file[: payload.buffer]
        self._file = self._file[payload.buffer :]

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case Answer(start, stop):
                return self._answer(start, stop)
            case KeepAnswers(start, stop):
                self._file = self._answers.encoded(self._together())
                if self._pieces is not None:
                    return AnswersKept(len(self._file))
                return AnswersKept(error=_refusal(partial(self._answers.write, start, stop, self._file)))
            case Expect(epoch, start, stop):
                self._batches.expect(Key(epoch, start, stop))
            case End():
                self._batches.close()
            case _:
                raise AssertionError(f"a replica that answers cannot {effect!r}")
        return None

    def rest(self) -> None:
        self._batches.prepare()

    def _answer(self, start: int, stop: int) -> Answered:
        started = time.perf_counter()
        batch = self._batches.load(0, start, stop)
        seed_everything(mix(self._seed, 0, start, 1), self._device)  # whoever answers, the answer is the same
        try:
            with torch.inference_mode():
                outputs = self._predict(self._network, to_device(batch, self._device))
            found = columns(outputs, stop - start)
        except Exception as error:
            note_batch(error, 0, start, stop)
            raise
        self._held.append(found)
        size = sum(value.nbytes for value in found.values())
        return Answered(time.perf_counter() - started, size)

    def _together(self) -> Columns:
        held, self._held = self._held, []
        try:
            return {name: np.asarray(torch.cat([each[name] for each in held])) for name in held[0]}
        except (KeyError, RuntimeError) as error:
            raise ValueError(
                f"the model's outputs differ from batch to batch: {', '.join(map(shapes, held))}: return tensors of one"
                " shape, padded where they differ"
            ) from error


class ArrivingHost(HostAround):
    """The coordinator's, which writes the answers that come from other machines."""

    def __init__(self, host: Host, job: Job, pieces: Pieces) -> None:
        super().__init__(host)
        assert isinstance(job.task, PredictionTask)
        self._answers, self._pieces = Answers(job.directory, job.task.format), pieces

    def perform(self, effect: Effect, now: float) -> Event | None:
        if not isinstance(effect, WriteAnswers):
            return super().perform(effect, now)
        node, piece = effect.node, effect.piece
        last, view = piece.at + piece.size == piece.total, self._pieces.view(node.index)[: piece.size]
        error = _refusal(partial(self._answers.arrives, piece.start, piece.stop, node, piece.at, view, last))
        return AnswersTaken(node, piece.lease, error)


def _refusal(write: Callable[[], None]) -> str:
    """Of the disk, with the remedy; empty where it takes what is written."""
    try:
        write()
    except ValueError as error:
        return str(error)
    return ""
