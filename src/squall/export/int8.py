"""A trained model in INT8, if that pays: every way is made, mended, judged by the task's metrics, and timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from squall.export.calls import call_with
from squall.export.quantize import WAYS, Layer, Quantizer
from squall.export.stand_in import StandIn, onnx_module
from squall.export.timing import medians
from squall.export.verdict import Measured, Verdict, decide, spoiled
from squall.runtime.evaluate import evaluate
from squall.task import Task

BATCHES = (1, 64)  # examples, at which latency and throughput are measured
Times = Callable[..., dict[str, float]]  # as `timing.medians`


class Tried(NamedTuple):
    """A file, what the task's metrics say of it, and the layers in it that were left in float."""

    name: str
    file: Path
    metrics: dict[str, float]
    in_float: list[Layer]


def quantized(task: Task, file: Path, like: Any, tolerance: float, times: Times = medians) -> Verdict:
    """Put the best INT8 model in the place of an ONNX file in float32, if one is accepted.

    Args:
        file: in a folder where another one is made for what is tried, for that has names of its own.
        like: an output of the trained model.
        tolerance: as `verdict.spoiled` has it.

    Raises:
        ValueError: no layer can be quantized.
    """
    before = Tried("float32", file, metrics_of(task, onnx_module(file, like=like)), [])
    (folder := file.parent / "int8").mkdir()
    quantizer = Quantizer(task, file, folder)
    tried, failed = [], {}
    for way in WAYS:
        if not quantizer.layers_of(way):
            continue
        try:
            tried.append(mended(task, quantizer, way, like, before.metrics, tolerance))
        except Exception as error:  # the quantizer raises whatever it stumbles over
            failed[f"{way} INT8"] = f"{type(error).__name__}: {error}"
    if not tried:
        raise ValueError(f"the model cannot be quantized: {'; '.join(failed.values())}")
    measured = _measured(task, [before, *tried], times)
    verdict = decide(measured[0], measured[1:], tolerance, failed)
    for each in tried:
        if each.name == verdict.accepted:
            each.file.replace(file)
    return verdict


def metrics_of(task: Task, model: StandIn) -> dict[str, float]:
    """The task's own; of a task without any the validation loss."""
    try:
        return evaluate(task, model, torch.device("cpu"), loss=not task.metrics)
    except AttributeError as error:
        if StandIn.__name__ not in str(error):
            raise
        raise ValueError(
            f"a metric looks into the model ({error}), and an exported model can only be called: let the metric call"
            " it, as `model(...)`"
        ) from error


def mended(
    task: Task, quantizer: Quantizer, way: str, like: Any, before: dict[str, float], tolerance: float
) -> Tried:  # fmt: skip
    """One way, with the layers left in float that spoil it: none, then the worst one, two, four ... of them."""
    layers = quantizer.layers_of(way)
    in_float: list[Layer] = []
    worst: list[Layer] = []
    while True:
        file = quantizer.write(way, [layer for layer in layers if layer not in in_float])
        metrics = metrics_of(task, onnx_module(file, like=like))
        count = max(1, 2 * len(in_float))
        if not spoiled(before, metrics, tolerance) or count >= len(layers):
            return Tried(f"{way} INT8", file, metrics, in_float)
        worst = worst or quantizer.by_error(way)
        in_float = worst[:count]


def _measured(task: Task, files: list[Tried], times: Times) -> list[Measured]:
    """All of them in the same minutes, each on one thread."""
    latency: dict[str, dict[int, float]] = {each.name: {} for each in files}
    models = {each.name: onnx_module(each.file, threads=1) for each in files}
    for examples in BATCHES:
        call = call_with(task, examples)
        runs = {name: partial(model.run, model.inputs(call.args, call.kwargs)) for name, model in models.items()}
        for name, seconds in times(runs).items():
            latency[name][examples] = seconds
    return [
        Measured(name, metrics, latency[name], file.stat().st_size, tuple(map(str, in_float)))
        for name, file, metrics, in_float in files
    ]
