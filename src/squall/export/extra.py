"""Packages that few need: asked for where they are used, with the line that installs them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from typing import Any

INSTALL = {
    "onnx": "pip install 'squall-train[export]'",
    "onnxscript": "pip install 'squall-train[export]'",
    "onnxruntime": "pip install 'squall-train[export]'",
    "keras": "pip install 'squall-train[keras]'",
    "openvino": "pip install openvino",
    "tensorrt": "pip install tensorrt (on a machine with an NVIDIA GPU)",
}


def imported(name: str) -> Any:
    """The module. Raises `ValueError` with the remedy where it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] not in INSTALL:
            raise
        raise ValueError(f"{package} is missing: {INSTALL[package]}") from None


def present(name: str) -> None:
    """Raises `ValueError` with the remedy where it is not installed; it is not imported yet."""
    if find_spec(name) is None:
        raise ValueError(f"{name} is missing: {INSTALL[name]}")


@contextmanager
def quiet() -> Iterator[None]:
    """What exporters and quantizers say on the way is of no use to a user; their errors are raised."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
