"""What came out of a training, ready to be called: `squall.load`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from squall.export import engines
from squall.export.formats import read_program
from squall.export.stand_in import onnx_module
from squall.run import Run

READERS: dict[str, Callable[[Path], nn.Module]] = {
    ".onnx": onnx_module, ".pt2": read_program, ".xml": engines.read_openvino, ".engine": engines.read_tensorrt,
}  # fmt: skip


def load(path: str | Path, *, model: nn.Module | None = None) -> nn.Module:
    """A trained model, ready to be called as in training, on the CPU and in evaluation mode.

        model = squall.load("runs/2026-11-21-01")  # or "model.onnx"
        probabilities = model(images).softmax(1)  # float32 [batch, 1, 8, 8] -> [batch, 10]

    That of a run is built by its task, whose code is unpickled, and torch unpickles parts of a .pt2 file: only of what
    you trust. That of a .onnx file is run by ONNX Runtime, that of an .xml file by OpenVINO: they have no parameters,
    take tensors on the CPU, and return a tensor, or a tuple of several.

    Args:
        path: a run's directory, whose newest snapshot counts, or a file that `squall export` has written.
        model: for a .safetensors file, which holds its state alone; it is filled, and returned.

    Raises:
        ValueError: there is no such run or file, or it is of another model; the message says what to do.
        SquallError: the run has no snapshot, or is a script's.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / "run.json").exists():
            raise ValueError(f"{path} holds no run: there is no run.json in it")
        return Run(path).model
    if not path.exists():
        raise ValueError(f"there is no run or file {path}: name a run's directory, or what `squall export` has written")
    if path.suffix == ".safetensors":
        return _filled(path, model)
    if path.suffix not in READERS:
        raise ValueError(f"{path} is no model that squall writes: those end in .safetensors, {', '.join(READERS)}")
    try:
        return READERS[path.suffix](path)
    except ValueError:
        raise
    except Exception as error:  # each reader has its own
        raise ValueError(f"{path} cannot be read ({error}): export it again") from error


def _filled(path: Path, model: nn.Module | None) -> nn.Module:
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    if model is None:
        raise ValueError(f"{path} holds the state of a model alone: squall.load({str(path)!r}, model=build_model())")
    try:
        load_model(model, path)
    except (RuntimeError, SafetensorError) as error:
        raise ValueError(f"{path} does not fit the model: {error}") from error
    return model.eval()
