"""The spine of `squall export`: check, load, write beside, compare, judge, rename."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec

from squall.export import compare
from squall.export.calls import call_with
from squall.export.formats import Format, Trained, format_of, too_large
from squall.export.int8 import quantized
from squall.export.verdict import TOLERANCE, Verdict
from squall.report.words import size, two_columns
from squall.run import Run
from squall.runtime.disk import written
from squall.task import Task

TRIED = (1, 5, 7, 64)  # examples of the batches that are compared; 5 and 7 also show which dimensions are the batch's


@dataclass(frozen=True)
class Exported:
    """What an export has done: where the file is, and how far the model in it is off."""

    file: Path
    format: str
    bytes: int | None  # None: nothing was written, because the verdict refused it
    difference: float  # the biggest of an output, as a part of its largest magnitude; of INT8, of the float file before
    inputs: list[str]  # of the model, "dtype[shape]"
    verdict: Verdict | None = None

    def to_json_dict(self) -> dict[str, Any]:
        """The same in JSON's types; NaN becomes None."""
        values: dict[str, Any] = json.loads(msgspec.json.encode({**vars(self), "file": str(self.file)}))
        if self.verdict is not None:
            shown = [values["verdict"]["before"], *values["verdict"]["tried"]]
            for each, measured in zip(shown, [self.verdict.before, *self.verdict.tried], strict=True):
                each["throughput"] = {str(batch): rate for batch, rate in measured.throughput.items()}
        return values

    def __str__(self) -> str:
        off = f"{self.difference:.1g} of the largest output at most ({compare.ALLOWED:g} is allowed)"
        lines = [
            ("format", self.format),
            ("input", ", ".join(self.inputs)),
            ("difference", off),
            *([("size", size(self.bytes))] if self.bytes is not None else []),
        ]
        written = f" written      {'nothing' if self.bytes is None else self.file}"  # no table, which would fold it
        parts = [*([str(self.verdict), ""] if self.verdict is not None else []), two_columns(lines), written]
        return "\n".join(part.strip("\n") for part in parts)


def export(
    run_dir: str | Path, file: str | Path, *, weights: int | Literal["best"] | None = None, int8: bool = False,
    tolerance: float = TOLERANCE, overwrite: bool = False,
) -> Exported:  # fmt: skip
    """Write a run's trained model to a file, which appears when it was run and found to be the same model.

    Args:
        run_dir: of any run but a script's. Its code is unpickled: only of directories that you trust.
        file: .onnx, .pt2, .safetensors, .keras, .xml (OpenVINO) or .engine (TensorRT).
        weights: a snapshot's number or "best"; None: the newest snapshot.
        int8: quantize after training, and write what is best of that if it is faster and as good.
        tolerance: what the verdict lets a metric change by, as `squall.export.verdict.judge` says.
        overwrite: an older file.

    Raises:
        ValueError: what was asked for cannot be; nothing was written.
        SquallError: the run has no such weights, or its model cannot be exported.
    """
    path = Path(file)
    kind = format_of(path)
    _check(path, kind, int8, tolerance, overwrite)
    task = _trained(Path(run_dir), weights, int8)
    calls = {examples: call_with(task, examples) for examples in TRIED}
    trained = Trained(task.model, calls[5], calls[7])
    with TemporaryDirectory(prefix=".export-", dir=path.parent) as beside:
        made = Path(beside) / path.name
        with written(path):
            kind.write(trained, made)
        off = compare.difference(task.model, kind.read(made, trained), list(calls.values()))
        verdict = quantized(task, made, trained.one.of(task.model), tolerance) if int8 else None
        kept = verdict is None or verdict.accepted is not None
        bytes_ = sum(each.stat().st_size for each in _files(made)) if kept else None
        if kept:
            _put(_files(made), path.parent, overwrite)
    inputs = [f"{str(each.dtype).removeprefix('torch.')}{['batch', *each.shape[1:]]}" for each in trained.one.tensors]
    return Exported(path, kind.what, bytes_, off, [each.replace("'", "") for each in inputs], verdict)


def _check(path: Path, kind: Format, int8: bool, tolerance: float, overwrite: bool) -> None:
    if int8 and path.suffix != ".onnx":
        raise ValueError(f"--int8 writes ONNX, and {path} is to be {kind.what}: name a file such as model.onnx")
    if not 0 <= tolerance < 1:
        raise ValueError(f"--tolerance is {tolerance}: it is a part, such as 0.005 for half a point")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no directory {path.parent}: make it first")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: name another place")
    _check_new(path, overwrite)
    kind.check()


def _check_new(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already: write over it with --overwrite, or name another file")


def _trained(run_dir: Path, weights: int | Literal["best"] | None, int8: bool) -> Task:
    if not (run_dir / "run.json").exists():
        raise ValueError(f"{run_dir} holds no run: there is no run.json in it")
    task = Run(run_dir).trained(weights)
    if int8 and too_large(task.model):
        raise ValueError("--int8 takes models of up to 2 GB: leave it out, or train a smaller model (`squall distill`)")
    if int8 and task.validate is None:
        raise ValueError(
            "the task has nothing to judge an INT8 model by: give Task validate, and metrics (else its loss counts)"
        )
    return task


def _put(files: list[Path], folder: Path, overwrite: bool) -> None:
    for each in files:
        _check_new(folder / each.name, overwrite)
    for each in files:
        os.replace(each, folder / each.name)


def _files(made: Path) -> list[Path]:
    """Those that were written, the one that was asked for behind what it needs."""
    found = [each for each in made.parent.iterdir() if each.name.startswith(f"{made.stem}.")]
    return sorted(found, key=lambda each: each == made)
