"""The files that a model is written to: one pair of functions a suffix, which write it and make it run again."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.func import functional_call

from squall.errors import SquallError
from squall.export import engines
from squall.export.calls import Call, free_shapes
from squall.export.extra import imported, quiet
from squall.export.stand_in import StandIn, onnx_module
from squall.usercode.blame import failure

MODULE = "pkg.torch.onnx.name_scopes"  # of a node: the names of the modules that it is inside of
MOST_ONNX_BYTES = 2_000_000_000  # a protobuf message ends at 2 GiB; of a larger model weights lie in a file beside it


@dataclass(frozen=True)
class Trained:
    """A trained model, and two calls of it with other numbers of examples."""

    model: nn.Module
    one: Call
    other: Call


@dataclass(frozen=True)
class Format:
    """`write(trained, path)` makes a file (or more, which begin with its name), and `read(path, trained)` runs it."""

    what: str
    packages: tuple[str, ...]  # that it needs
    write: Callable[[Trained, Path], None]
    read: Callable[[Path, Trained], Callable[..., Any]]
    machine: Callable[[], None] = lambda: None  # raises `ValueError` where it cannot be written on this one

    def check(self) -> None:
        """Raise `ValueError` that says what is missing here."""
        self.machine()
        for package in self.packages:
            imported(package)


def format_of(path: Path) -> Format:
    """Raises `ValueError` with all suffixes for another one."""
    if path.suffix not in FORMATS:
        known = ", ".join(f"{suffix} ({each.what})" for suffix, each in FORMATS.items())
        raise ValueError(f"{path} has no suffix that squall can write: name it by one of {known}")
    return FORMATS[path.suffix]


# ---------------------------------------------------------------- state alone


def write_state(trained: Trained, path: Path) -> None:
    """Tensors by the names of `state_dict()`; of tied ones the first name."""
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    path.touch()
    readable = path.stat().st_mode
    try:
        save_model(trained.model, str(path))
        path.chmod(readable)  # it is made as a private file
    except SafetensorError as error:
        raise ValueError(f"{path.name} cannot be written: {error}") from error


def read_state(path: Path, trained: Trained) -> Callable[..., Any]:
    """The trained model, called with the tensors of the file in the place of its own."""
    from safetensors.torch import load_file

    state, own = load_file(path), trained.model.state_dict()
    held = {own[name].data_ptr() for name in state}
    if missing := [name for name, tensor in own.items() if tensor.numel() and tensor.data_ptr() not in held]:
        raise SquallError(f"safetensors holds no {', '.join(missing)}: nothing was written")
    return lambda *args, **kwargs: functional_call(trained.model, state, args, kwargs)


# ---------------------------------------------------------------- Keras


def write_keras(trained: Trained, path: Path) -> None:
    from squall.keras import save_keras

    save_keras(trained.model, path)


def read_keras(path: Path, trained: Trained) -> nn.Module:
    from squall.keras import load_keras

    return load_keras(path, trained.model)


# ---------------------------------------------------------------- torch.export


def program(trained: Trained) -> ExportedProgram:
    """The model as a graph of operators, with a free batch size. Raises `SquallError` that names what cannot be."""
    shapes = free_shapes(trained.model, trained.one, trained.other)
    try:
        with quiet():
            return torch.export.export(trained.model, trained.one.args, trained.one.kwargs, dynamic_shapes=shapes)
    except Exception as error:  # of a dozen classes
        raise SquallError(f"torch.export cannot follow the model: {_why(error)}") from error


def _why(error: Exception) -> str:
    """One line of an error, with the operator and the user's line, where they are known."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    text = str(error)
    operators = re.findall(r"op='([\w.]+)'|torch\.ops\.([\w.]+)", "\n".join(map(str, chain)))
    if operators:
        return f"the operator {''.join(operators[0])} has no counterpart: {_first_line(str(chain[-1]))}"
    constant = re.search(r"your code specialized it to be a constant \(\d+\)", text)
    line = f"the batch's size is free, but {constant[0]}" if constant else _first_line(text) or type(error).__name__
    place = re.search(r"The following call raised this error:\n\s*(File .*\n.*)", text)
    found = failure(error)
    where = " ".join(place[1].split()) if place else f"{found.file}, line {found.line}" if found.file else ""
    return f"{line} ({where})" if where else line


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def write_program(trained: Trained, path: Path) -> None:
    file = BytesIO()  # where a disk is full, torch would abort the process
    with quiet():
        torch.export.save(program(trained), file)
    path.write_bytes(file.getbuffer())


def read_program(path: Path, trained: Trained | None = None) -> nn.Module:
    with quiet():
        return torch.export.load(path).module()


# ---------------------------------------------------------------- ONNX


def write_onnx(trained: Trained, path: Path) -> None:
    """With a free dimension "batch". Raises `SquallError` that names the operator without a counterpart in ONNX."""
    exported = program(trained)
    try:
        with quiet():
            found = torch.onnx.export(exported, verbose=False)
    except Exception as error:
        raise SquallError(f"the model cannot be written as ONNX: {_why(error)}") from error
    assert found is not None
    graph = found.model_proto
    _tidy(graph)
    if too_large(trained.model):
        beside = path.with_name(f"{path.name}.data")
        imported("onnx").save_model(graph, str(path), save_as_external_data=True, location=beside.name)
        beside.chmod(path.stat().st_mode)  # it is made as a private file
    else:
        path.write_bytes(graph.SerializeToString())


def too_large(model: nn.Module) -> bool:
    """Whether one ONNX file cannot hold its weights."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) > MOST_ONNX_BYTES


def _tidy(model: Any) -> None:
    """Call the batch's dimension "batch", not s31 or the like, and leave out where each node stands in users' files."""
    shapes = [each.type.tensor_type.shape.dim for each in model.graph.input]
    batch = next((dims[0].dim_param for dims in shapes if len(dims) and dims[0].dim_param), None)
    for each in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in each.type.tensor_type.shape.dim:
            if batch and dim.dim_param == batch:
                dim.dim_param = "batch"
    for node in model.graph.node:
        kept = [prop for prop in node.metadata_props if prop.key == MODULE]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)


def by_onnx(convert: Callable[[Path, Path], None]) -> Callable[[Trained, Path], None]:
    """Write what `convert(onnx_file, path)` makes of an ONNX file."""

    def write(trained: Trained, path: Path) -> None:
        between = path.with_suffix(".between.onnx")
        write_onnx(trained, between)
        try:
            convert(between, path)
        finally:
            for each in path.parent.iterdir():
                if each.name.startswith(between.name):
                    each.unlink()

    return write


def as_before(read: Callable[..., StandIn]) -> Callable[[Path, Trained], StandIn]:
    """Read a file as what returns such an output as the trained model does."""
    return lambda path, trained: read(path, like=trained.one.of(trained.model))


EXTRA = ("onnx", "onnxscript", "onnxruntime")
FORMATS = {
    ".onnx": Format("ONNX", EXTRA, write_onnx, as_before(onnx_module)),
    ".pt2": Format("torch.export", (), write_program, read_program),
    ".safetensors": Format("the model's state", (), write_state, read_state),
    ".keras": Format("Keras, of a task by Task.from_keras", ("keras",), write_keras, read_keras),
    ".xml": Format(
        "OpenVINO", (*EXTRA, "openvino"), by_onnx(engines.write_openvino), as_before(engines.read_openvino)
    ),
    ".engine": Format(
        "TensorRT", (*EXTRA, "tensorrt"), by_onnx(engines.write_tensorrt), as_before(engines.read_tensorrt),
        engines.check_gpu,
    ),
}  # fmt: skip
