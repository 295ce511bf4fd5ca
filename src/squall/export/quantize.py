"""INT8 after training: layers with weights compute with integers of 8 bits, all else stays in float.

x = scale (q - zero point), where weights have a scale per output channel (Jacob et al. 2018, section 2). *Dynamic*:
the scale of a layer's input is found as it comes, which costs a pass over it. *Static*: it is found before, from
examples of the training set; convolutions can only be had so, for the dynamic ones of ONNX Runtime are several times
slower than float. What a model gains by either depends on its layers, so both are made, and measured. Processors
without VNNI saturate where weights have all 8 bits, so they get 7 there.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np

from squall.export.calls import Call, spread_calls
from squall.export.extra import imported, quiet
from squall.export.formats import MODULE
from squall.export.stand_in import onnx_module
from squall.task import Task

WAYS = {"dynamic": ("MatMul", "Gemm"), "static": ("MatMul", "Gemm", "Conv")}  # operators that they quantize
PASSED_BY = ("Relu", "Clip", "MaxPool", "Reshape", "Flatten")  # integers go through them from layer to layer
CALIBRATED = 256  # examples of the training set
CPU = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Layer:
    """A node of the graph that has weights."""

    node: str
    operator: str
    module: str  # of the trained model

    def __str__(self) -> str:
        return f"{self.module} ({self.operator})"


@final
class Quantizer:
    """Makes INT8 files of one ONNX file in float32, in a folder. Raises `ValueError` where no layer has weights."""

    def __init__(self, task: Task, file: Path, folder: Path) -> None:
        onnx = imported("onnx")
        graph = onnx.load(file)
        del graph.graph.value_info[:]  # of the exporter: with a free batch, the quantizer stumbles over those of Gemm
        self.layers = list(_layers(graph.graph))
        if not self.layers:
            raise ValueError("the model has no layer to quantize: there is no product with weights in it")
        self._passed_by = [node.name for node in graph.graph.node if node.op_type in PASSED_BY]
        self._plain, self._folder = folder / "plain.onnx", folder
        onnx.save(graph, self._plain)
        self._float = onnx_module(file)
        calls = spread_calls(task, task.train, CALIBRATED, task.batch_size)
        self._examples = [self._inputs(call) for call in calls]

    def layers_of(self, way: str) -> list[Layer]:
        """Those that it can quantize, in the order of the graph."""
        return [layer for layer in self.layers if layer.operator in WAYS[way]]

    def write(self, way: str, layers: Sequence[Layer], batches: int | None = None) -> Path:
        """A file with these layers in INT8, with scales from so many batches (None: all).

        What ONNX Runtime's quantizer stumbles over, it raises.
        """
        with quiet():
            library = imported("onnxruntime.quantization")
            path = self._folder / f"{way}.onnx"
            nodes = [layer.node for layer in layers]
            common = {"per_channel": True, "weight_type": library.QuantType.QInt8, "reduce_range": _saturates()}
            if way == "dynamic":
                nodes += [f"{node}_MatMul" for node in nodes]  # what this makes of each Gemm before it looks for them
                library.quantize_dynamic(self._plain, path, nodes_to_quantize=nodes, **common)
            else:
                examples = _reader(library, self._examples[:batches])
                nodes = nodes + self._passed_by
                library.quantize_static(self._plain, path, examples, nodes_to_quantize=nodes, **common)
        return path

    def by_error(self, way: str) -> list[Layer]:
        """The layers, first those that spoil the outputs most when they alone are quantized."""
        feed = self._examples[0]
        expected = self._float.run(list(feed.values()))

        def error(layer: Layer) -> float:
            """The squared difference of the outputs, as a part of their own squares."""
            found = onnx_module(self.write(way, [layer], batches=1)).run(list(feed.values()))
            pairs = [(a, b) for a, b in zip(expected, found) if np.issubdtype(a.dtype, np.floating)]
            parts = [float(((a - b) ** 2).mean() / max(float((a**2).mean()), 1e-30)) for a, b in pairs]
            return max(parts, default=0.0)

        return sorted(self.layers_of(way), key=error, reverse=True)

    def _inputs(self, call: Call) -> dict[str, Any]:
        return dict(zip(self._float.names, self._float.inputs(call.args, call.kwargs)))


def _saturates() -> bool:
    """Whether this processor (x86 without VNNI) adds two products of 8 bits in 16, where only those of 7 have room."""
    with suppress(OSError):
        instructions = CPU.read_text()
        return "avx" in instructions and "vnni" not in instructions
    return False


def _layers(graph: Any) -> Iterator[Layer]:
    weights = {each.name for each in graph.initializer}
    for number, node in enumerate(graph.node):
        node.name = node.name or f"node-{number}"
        if node.op_type in WAYS["static"] and weights & set(node.input[:2]):
            scopes = next((p.value for p in node.metadata_props if p.key == MODULE), "[]")
            yield Layer(node.name, node.op_type, next(iter(literal_eval(scopes)[-2:-1]), "") or node.name)


def _reader(library: Any, examples: list[dict[str, Any]]) -> Any:
    class Reader(library.CalibrationDataReader):  # type: ignore[misc]  # the quantizer takes subclasses alone
        def __init__(self) -> None:
            self._left = iter(examples)

        def get_next(self) -> dict[str, Any] | None:
            return next(self._left, None)

    return Reader()
