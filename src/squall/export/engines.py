"""Targets by way of ONNX: OpenVINO for Intel's processors, TensorRT for NVIDIA's. Neither is needed for anything else.

The engine of TensorRT was written against the documentation of version 10, and has not been tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from squall.errors import SquallError
from squall.export.extra import imported
from squall.export.stand_in import Arrays, StandIn

BATCH = (1, 64, 1024)  # examples that an engine takes at least, is tuned for, and takes at most


# ---------------------------------------------------------------- OpenVINO


def write_openvino(onnx_file: Path, path: Path) -> None:
    """FILE.xml with the graph, and FILE.bin beside it with the weights, in float32."""
    openvino = imported("openvino")
    openvino.save_model(openvino.convert_model(str(onnx_file)), str(path), compress_to_fp16=False)


def read_openvino(path: Path, like: Any = None) -> StandIn:
    openvino = imported("openvino")
    exact = {"INFERENCE_PRECISION_HINT": "f32"}  # where the CPU has bfloat16, OpenVINO would compute in that
    compiled = openvino.Core().compile_model(str(path), "CPU", exact)
    names = [each.get_any_name() for each in compiled.inputs]

    def run(arrays: Arrays) -> Sequence[Any]:
        found = compiled(arrays)
        return [np.array(found[output]) for output in compiled.outputs]

    return StandIn(names, run, like)


# ---------------------------------------------------------------- TensorRT


def check_gpu() -> None:
    """Raise `ValueError` without a GPU: an engine is made by trying kernels on the one that it will run on."""
    if not torch.cuda.is_available():
        raise ValueError(
            "a TensorRT engine is built on the GPU that will run it, and there is none here: write .onnx, and there"
            " `trtexec --onnx=model.onnx --saveEngine=model.engine`, or this command again"
        )


def write_tensorrt(onnx_file: Path, path: Path) -> None:
    """A serialized engine, in float32 without TF32, for `BATCH` examples."""
    trt = imported("tensorrt")
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
    if not parser.parse(onnx_file.read_bytes()):
        errors = "; ".join(str(parser.get_error(number)) for number in range(parser.num_errors))
        raise SquallError(f"TensorRT cannot read the model: {errors}")
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # ten bits of a product would not be the trained model
    profile = builder.create_optimization_profile()
    for number in range(network.num_inputs):
        each = network.get_input(number)
        profile.set_shape(each.name, *(tuple(size if dim < 0 else dim for dim in each.shape) for size in BATCH))
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise SquallError("TensorRT has built no engine: its log, above, says why")
    path.write_bytes(engine)


def read_tensorrt(path: Path, like: Any = None) -> StandIn:
    trt = imported("tensorrt")
    engine = trt.Runtime(trt.Logger(trt.Logger.ERROR)).deserialize_cuda_engine(path.read_bytes())
    context = engine.create_execution_context()
    tensors = [engine.get_tensor_name(number) for number in range(engine.num_io_tensors)]
    inputs = [name for name in tensors if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]

    def run(arrays: Arrays) -> Sequence[Any]:
        held = {name: torch.from_numpy(array).cuda().contiguous() for name, array in zip(inputs, arrays)}
        for name in inputs:
            context.set_input_shape(name, tuple(held[name].shape))
        for name in tensors:
            if name not in held:
                empty = np.empty(tuple(context.get_tensor_shape(name)), trt.nptype(engine.get_tensor_dtype(name)))
                held[name] = torch.from_numpy(empty).cuda()
            context.set_tensor_address(name, held[name].data_ptr())
        stream = torch.cuda.current_stream()
        context.execute_async_v3(stream.cuda_stream)
        stream.synchronize()
        return [held[name].cpu() for name in tensors if name not in inputs]

    return StandIn(inputs, run, like)
