"""What a trained model takes when it is used: torch, compiled torch, ONNX Runtime, and INT8, each on one thread.

Writes the table of docs/inference.md as well.
"""

from __future__ import annotations

import runpy
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import squall
from benchmarks.results import Section, commit, machine, median_ratio
from squall.export.calls import Call, call_with
from squall.export.exporting import export
from squall.export.int8 import BATCHES, Tried, mended, metrics_of
from squall.export.quantize import WAYS, Quantizer
from squall.export.stand_in import onnx_module
from squall.export.timing import rounds
from squall.export.verdict import TOLERANCE
from squall.task import Task

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "inference.md"
BEGIN, END = "<!-- table: written by `python -m benchmarks inference` -->\n", "<!-- end of table -->"
COLUMNS = "| model | run by | metric | ms at 1 | ms at 64 | examples/s at 1 | examples/s at 64 | size |"
digits: Any = runpy.run_path(str(ROOT / "examples" / "digits.py"))
stdlib_lm: Any = runpy.run_path(str(ROOT / "examples" / "stdlib_lm.py"))


def perceptron() -> Task:
    task: Task = digits["task"]()
    layers = (nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return Task(**{**vars(task), "model": nn.Sequential(*layers)})


def convolutions() -> Task:
    task: Task = digits["task"]()
    layers = (
        nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128 * 16, 10),
    )  # fmt: skip
    return Task(**{**vars(task), "model": nn.Sequential(*layers)})


# name -> its task, and batches to train it with: enough for metrics that INT8 could spoil
MODELS: dict[str, tuple[Callable[[], Task], int]] = {
    "perceptron": (perceptron, 400),
    "convolutions": (convolutions, 400),
    "transformer": (stdlib_lm["task"], 600),
}


class Way(NamedTuple):
    """One way to run a model: seconds of a batch by its examples, in each round."""

    name: str
    metric: str
    seconds: dict[int, list[float]]
    bytes: int

    def ms(self, examples: int) -> str:
        return f"{1000 * statistics.median(self.seconds[examples]):.3g}"


def measure(count: int = 15) -> Section:
    print("inference", flush=True)
    section = Section(
        "Inference",
        "A trained model, run by torch, by torch.compile, and, exported, by ONNX Runtime, on one thread: milliseconds"
        " of a batch of 1 and of 64. `perceptron`: 64-1024-1024-10; `convolutions`: 64, 128 and 128 channels on 8 x 8"
        " pixels; `transformer`: that of examples/stdlib_lm.py. docs/inference.md has the metrics.",
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lines = [COLUMNS, "|---|---|---|---|---|---|---|---|"]
    try:
        for model, (task, steps) in MODELS.items():
            ways = _ways(task, steps, count)
            lines += [_line(model, way) for way in ways]
            _compare(section, model, {way.name: way for way in ways})
    finally:
        torch.set_num_threads(threads)
    _write_page(lines)
    return section


def _ways(task: Callable[[], Task], steps: int, count: int) -> list[Way]:
    with tempfile.TemporaryDirectory() as folder:
        return _tried(task, steps, count, Path(folder))


def _tried(task: Callable[[], Task], steps: int, count: int, folder: Path) -> list[Way]:
    adam = squall.SingleProcess(optimizer=partial(torch.optim.AdamW, lr=1e-3))
    settings = squall.Settings(progress=False, threads=1)
    run = squall.fit(task, adam, steps=steps, run_dir=folder / "run", settings=settings)
    built = run.trained()
    model = built.model
    export(run.directory, folder / "float.onnx")
    export(run.directory, folder / "model.safetensors")
    like = call_with(built, 5).of(model)
    whole = Tried("ONNX", folder / "float.onnx", metrics_of(built, onnx_module(folder / "float.onnx", like=like)), [])
    quantizer = Quantizer(built, whole.file, folder)
    int8 = [mended(built, quantizer, way, like, whole.metrics, TOLERANCE) for way in WAYS]
    compiled = torch.compile(model, dynamic=False)
    exported = {each.name: onnx_module(each.file, threads=1) for each in (whole, *int8)}
    seconds: dict[str, dict[int, list[float]]] = {}
    for examples in BATCHES:
        call = call_with(built, examples)
        runs: dict[str, Callable[[], object]] = {"torch": partial(_run, model, call)}
        runs["torch, compiled"] = partial(_run, compiled, call)
        for name, module in exported.items():
            runs[name] = partial(module.run, module.inputs(call.args, call.kwargs))
        for name, taken in rounds(runs, count).items():
            seconds.setdefault(name, {})[examples] = taken
            print(f"  {name}, {examples}: {1000 * statistics.median(taken):.3g} ms", flush=True)
    metric = {each.name: _shown(each.metrics) for each in (whole, *int8)}
    size = {each.name: each.file.stat().st_size for each in (whole, *int8)}
    state = (folder / "model.safetensors").stat().st_size
    return [
        Way(name, metric.get(name, metric["ONNX"]), taken, size.get(name, state)) for name, taken in seconds.items()
    ]


@torch.inference_mode()
def _run(model: Callable[..., Any], call: Call) -> None:
    model(*call.args, **call.kwargs)


def _shown(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def _compare(section: Section, model: str, ways: dict[str, Way]) -> None:
    """Compiled torch and ONNX against torch, and INT8 against ONNX: how many times as fast."""
    pairs = [("torch, compiled", "torch"), ("ONNX", "torch"), ("dynamic INT8", "ONNX"), ("static INT8", "ONNX")]
    for ours, theirs in pairs:
        for examples in BATCHES:
            a, b = ways[ours], ways[theirs]
            ratio = median_ratio(b.seconds[examples], a.seconds[examples])
            what = f"{model}, {ours}, batch of {examples}"
            section.compared(what, f"{a.ms(examples)} ms", f"{theirs} {b.ms(examples)} ms", ratio)


def _line(model: str, way: Way) -> str:
    rates = [f"{examples / statistics.median(way.seconds[examples]):,.0f}" for examples in BATCHES]
    cells = [
        model,
        way.name,
        way.metric,
        *(way.ms(examples) for examples in BATCHES),
        *rates,
        f"{way.bytes / 1e6:.2f} MB",
    ]
    return f"| {' | '.join(cells)} |"


def _write_page(lines: list[str]) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    measured = f"Commit {commit()}, {machine()}; one thread, medians."
    PAGE.write_text("\n".join([before + BEGIN + measured, "", *lines, END + after]))
