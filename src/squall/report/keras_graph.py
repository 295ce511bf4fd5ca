"""Has torch's tracer know the layers of a Keras model, which calls them by itself: then its graph has them as boxes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

ROOT = "keras"  # the attribute of the traced module below which the tracer finds the layers


@contextmanager
def layers_as_boxes(model: Any, traced: nn.Module) -> Iterator[None]:
    """While `traced` is traced, each layer of the `keras.Model` tells that it is called.

    The tracer takes no name that is not a module's, so there is an empty module in `traced` for each layer.
    """
    import keras

    names: dict[int, str] = {}
    _add(model, ROOT, traced, "__module", names)
    call = keras.layers.Layer.__call__

    def told(layer: Any, *args: Any, **named: Any) -> Any:
        state = torch._C._get_tracing_state()
        if state is None or id(layer) not in names:
            return call(layer, *args, **named)
        state.push_scope(names[id(layer)])
        try:
            return call(layer, *args, **named)
        finally:
            state.pop_scope()

    keras.layers.Layer.__call__ = told
    try:
        yield
    finally:
        keras.layers.Layer.__call__ = call


def _add(layer: Any, name: str, above: nn.Module, path: str, names: dict[int, str]) -> None:
    name = name.replace(".", "_")
    if hasattr(above, name):  # of modules themselves, or of a layer with the same name
        name = f"{name}_{len(names)}"
    module = type(type(layer).__name__, (nn.Module,), {})()  # TensorBoard shows the name of the class
    above.add_module(name, module)
    names[id(layer)] = path = f"{path}.{name}"
    for each in layer._layers:
        _add(each, each.name, module, path, names)
