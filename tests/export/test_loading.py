"""`squall.load`, of what is there and what is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

import squall
from squall.run import Run
from tests.tasks import numbers, plain, regression


def test_a_run_gives_its_model(inline: Callable[..., Run]) -> None:
    run = inline(regression(), squall.SingleProcess())
    module = squall.load(run.directory)
    inputs = numbers(5).tensors[0]
    assert not module.training
    assert torch.equal(module(inputs), run.model(inputs))


def test_what_cannot_be_loaded_says_what_to_do(tmp_path: Path) -> None:
    save_model(plain(), str(tmp_path / "m.safetensors"))
    for name in ("m.txt", "m.onnx", "m.pt2"):
        (tmp_path / name).write_text("no model")
    with pytest.raises(ValueError, match="holds no run"):
        squall.load(tmp_path)
    with pytest.raises(ValueError, match="there is no run or file"):
        squall.load(tmp_path / "no.onnx")
    with pytest.raises(ValueError, match=r"those end in .safetensors, .onnx"):
        squall.load(tmp_path / "m.txt")
    with pytest.raises(ValueError, match=r"model=build_model\(\)"):
        squall.load(tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"does not fit the model: (?s:.*)size mismatch"):
        squall.load(tmp_path / "m.safetensors", model=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))
    with pytest.raises(ValueError, match="is no ONNX file"):
        squall.load(tmp_path / "m.onnx")
    with pytest.raises(ValueError, match="cannot be read"):
        squall.load(tmp_path / "m.pt2")
