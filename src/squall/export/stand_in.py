"""An exported file as an `nn.Module`: it stands in where the trained model was, in metrics and in users' programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, SequenceKey, tree_flatten, tree_flatten_with_path, tree_unflatten

from squall.export.extra import imported, present

Arrays = list[np.ndarray[Any, Any]]


@final
class StandIn(nn.Module):
    """Is called as the trained model was: with tensors [batch, ...] on the CPU, by position or name.

    It returns what that returned if `like`, one of its outputs, is given; else a tensor, or a tuple where there are
    several. It has no parameters.

    Args:
        names: of its inputs, in the order of the model's signature.
        run: computes the outputs, in their order, from the inputs.
    """

    def __init__(self, names: Sequence[str], run: Callable[[Arrays], Sequence[Any]], like: Any = None) -> None:
        super().__init__()
        self.names = list(names)
        self.run = run
        self._like = like

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs = [torch.as_tensor(found) for found in self.run(self.inputs(args, kwargs))]
        if self._like is None:
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        leaves, spec = tree_flatten(self._like)
        given = iter(outputs)
        return tree_unflatten([next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arrays:
        """Arrays in the order of `names`. Raises `TypeError` where one is missing."""
        positional = [leaf for leaf in tree_flatten(args)[0] if isinstance(leaf, Tensor)]
        found = {**dict(zip(self.names, positional)), **dict(_named(kwargs))}
        if missing := [name for name in self.names if name not in found]:
            raise TypeError(f"the exported model takes {', '.join(self.names)}: {', '.join(missing)} is missing")
        return [found[name].detach().cpu().numpy() for name in self.names]


def _named(kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors under the names that torch's exporter gives them: `batch_mask` for `batch={"mask": tensor}`."""
    for path, leaf in tree_flatten_with_path(kwargs)[0]:
        if isinstance(leaf, Tensor):
            keys = (k.key if isinstance(k, MappingKey) else k.idx if isinstance(k, SequenceKey) else k for k in path)
            yield "_".join(str(key) for key in keys), leaf


def onnx_module(path: str | Path, *, like: Any = None, threads: int = 0) -> StandIn:
    """An ONNX file, run by ONNX Runtime on the CPU with so many threads (0: as many as there are cores).

    Raises `ValueError` where it cannot be read, or the extra `export` is missing, and its call where inputs do not fit.
    """
    onnx = imported("onnx")
    present("onnxruntime")
    try:
        graph = onnx.load(str(path), load_external_data=False).graph
    except Exception as error:  # protobuf's, for what is no ONNX
        raise ValueError(f"{path} is no ONNX file ({error}): export it again") from error
    constants = {each.name for each in graph.initializer}
    session = _Session(path, threads)
    return StandIn([each.name for each in graph.input if each.name not in constants], session.run, like)


class _Session:
    """Of ONNX Runtime, which starts threads that a process has not that is forked: each process makes its own."""

    def __init__(self, path: str | Path, threads: int) -> None:
        self._path, self._threads = path, threads
        self._made: tuple[int, Any] = (0, None)  # in which process

    def run(self, arrays: Arrays) -> Sequence[Any]:
        if self._made[0] != os.getpid():
            self._made = os.getpid(), self._make()
        session = self._made[1]
        inputs = session.get_inputs()
        try:
            found: Sequence[Any] = session.run(None, dict(zip((each.name for each in inputs), arrays)))
        except Exception as error:  # ONNX Runtime has no base class for its own
            takes = ", ".join(f"{each.name}: {each.type}{each.shape}" for each in inputs)
            raise ValueError(f"{self._path} takes {takes}: {str(error).splitlines()[0]}") from error
        return found

    def _make(self) -> Any:
        runtime = imported("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.log_severity_level = 3  # errors alone
        try:
            return runtime.InferenceSession(str(self._path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ValueError(f"{self._path} cannot be run by ONNX Runtime ({error}): export it again") from error
