"""What a nursery builds once, before the forks that share it: the task, and the job of all processes."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from squall.errors import SquallError, TaskError
from squall.launchers.leaving import DONE, leave
from squall.launchers.orders import Order
from squall.runtime.arena import Arena
from squall.runtime.job import Job, arena_shape, initial_vector
from squall.runtime.places import used_spans
from squall.runtime.processes import ending, fork
from squall.runtime.seeds import seed_everything
from squall.runtime.snapshot import Snapshots
from squall.settings import Settings
from squall.task import Task
from squall.usercode.blame import encode
from squall.usercode.sources import Sources, show
from squall.vector import Layout

CUDA_ERROR_NOT_INITIALIZED = 3


def build_task(message: dict[str, Any]) -> Task:
    sources: Sources = message["sources"]
    show(sources.shipped)
    seed_everything(message["plan"].seed)
    try:
        task: Task = message["task"]()
    except SquallError as error:  # is no fault of the user's code
        raise TaskError(str(error)) from error
    except Exception as error:
        raise TaskError(encode(error)) from error
    show(Sources.now(f"{sources.file}:").imported)
    warn_of_threads("the task function")
    if torch.cuda.is_initialized() or (message["plan"].device != "cpu" and _cuda_has_begun()):
        raise TaskError(
            "the task function used CUDA, as a backward pass does where there is a GPU: build the model on the CPU, and"
            " pass device='cuda' to fit"
        )
    return task


def _cuda_has_begun() -> bool:
    """In this process, so that none that it forks could begin. torch knows of what it has done itself alone."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_ERROR_NOT_INITIALIZED)


@contextmanager
def without_gpus() -> Iterator[None]:
    """torch finds none."""
    found, torch.cuda.is_available = torch.cuda.is_available, lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = found


def warn_of_threads(culprit: str) -> None:
    if len(os.listdir("/proc/self/task")) > 1:
        sys.stderr.write(
            f"squall: warning: {culprit} left threads running (torch.set_num_threads, a client, a tokenizer?);"
            " they are not there in the run's processes, which may wait for them for ever\n"
        )


def build_job(message: dict[str, Any], task: Task, order: Order) -> Job:
    """The job, with everything that all processes of the run share on this machine."""
    strategy = message["strategy"]
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    directory, snapshot, site, starts = order
    restored = Snapshots(directory).restore(snapshot, layout) if snapshot is not None else None
    recipe = strategy.recipe()
    if starts is None:
        starts = cut(task, message["plan"].settings) if "script" not in message else ()
    shape = arena_shape(layout, recipe)
    used = shape.spans(evaluated=task.validate is not None)
    if site is not None:
        used = used_spans(shape, layout, recipe.shards, site.seats, site.machine)
    with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(1) as beside:
        warnings.simplefilter("always")
        # The kernel clears the memory of both, which is most of what a large network's start takes.
        arena = beside.submit(Arena.create, shape, directory, Path(message["shared_memory"]), used)
        initial = initial_vector(layout, task)
    for warning in caught:
        sys.stderr.write(f"squall: warning: {warning.message}\n")
    return Job(
        plan=message["plan"],
        strategy=strategy,
        task=task,
        layout=layout,
        arena=arena.result(),
        initial=initial,
        directory=directory,
        commanded_at=message["commanded_at"],
        restored=restored,
        site=site,
        starts=starts,
        scripted="script" in message,
    )


def cut(task: Task, settings: Settings) -> tuple[int, ...]:
    """Where the stages of replicas of several parts begin, which is told."""
    if settings.parts == 1:
        return ()
    starts, told = _tried_aside(task, settings.parts)
    if settings.progress:
        sys.stderr.write(f"squall: a replica of {settings.parts} parts:\n{told}\n")
    return starts


def _tried_aside(task: Task, parts: int) -> tuple[tuple[int, ...], str]:
    """What `check_split` says, in a fork: the holes that it leaves in a heap would be copied by all that inherit it."""
    readable, writable = os.pipe()
    if not (pid := fork()):
        try:
            from squall.parts.check import check_split  # imports much that a run of one part has no use for

            answer: dict[str, Any] = {"found": check_split(task, parts)}
        except ValueError as error:
            answer = {"refused": str(error)}
        except BaseException as error:
            answer = {"raised": encode(error)}
        finally:  # it never returns into the nursery's own code
            with suppress(BaseException), open(writable, "wb") as pipe:
                pipe.write(msgspec.json.encode(answer))
            leave(DONE)
    os.close(writable)
    with open(readable, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not told:
        how = ending(os.waitstatus_to_exitcode(status))
        raise SquallError(f"the process that tried how the model is split has died: {how}")
    match msgspec.json.decode(told):
        case {"found": [starts, words]}:
            return tuple(starts), words
        case {"refused": why}:
            raise ValueError(why)
        case answer:
            raise TaskError(answer["raised"])
