"""Each kind of file is run again, and gives what the model gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import squall
from squall.errors import SquallError
from squall.export.calls import call_with
from squall.export.compare import difference
from squall.export.formats import Trained, format_of
from tests.export.models import classes, convolutions, features, images, tokens_task


def trained(task: squall.Task) -> Trained:
    task.model.eval()
    return Trained(task.model, call_with(task, 5), call_with(task, 7))


@pytest.mark.parametrize("suffix", [".onnx", ".pt2", ".safetensors"])
@pytest.mark.parametrize(
    "made", [lambda: classes(images(), model=convolutions()), tokens_task], ids=["convolutions", "tokens"]
)
def test_a_file_gives_what_the_model_gives_for_any_batch(
    tmp_path: Path, suffix: str, made: Callable[[], squall.Task]
) -> None:
    task = made()
    kind, path, model = format_of(Path(f"m{suffix}")), tmp_path / f"m{suffix}", trained(task)
    kind.write(model, path)
    read = kind.read(path, model)
    assert difference(task.model, read, [call_with(task, examples) for examples in (1, 2, 33)]) < 1e-5
    if suffix == ".onnx":
        check_onnx(path)


def check_onnx(path: Path) -> None:
    """It names its batch, and nobody's files."""
    import onnx

    graph = onnx.load(path).graph
    for each in (*graph.input, *graph.output):
        first, *others = each.type.tensor_type.shape.dim
        assert first.dim_param == "batch"
        assert all(dim.dim_value for dim in others)
    assert __file__.encode() not in path.read_bytes()


def test_a_difference_is_found(tmp_path: Path) -> None:
    task = classes(features())
    task.model.eval()
    calls = [call_with(task, 3)]

    def off(by: float) -> Callable[[Tensor], Tensor]:
        return lambda x: task.model(x) + by * task.model(x).abs().max()

    assert difference(task.model, off(1e-5), calls) == pytest.approx(1e-5, rel=0.1)
    with pytest.raises(SquallError, match=r"for 3 examples its outputs differ by 0\.001 of the largest"):
        difference(task.model, off(1e-3), calls)
    with pytest.raises(SquallError, match="differ by inf"):
        difference(task.model, lambda x: task.model(x)[:2], calls)
    task.model.train()  # dropout
    with pytest.raises(SquallError, match="not the same function twice"):
        difference(task.model, task.model, calls)


class Bessel(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return torch.special.bessel_j0(super().forward(input))


class Branching(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if input.sum() > 0 else input


class Folded(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).view(5, 4)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Bessel(12, 4), r"cannot be written as ONNX: the operator prims\.bessel_j0 has no counterpart"),
        (Branching(12, 4), r"data-dependent .*test_formats\.py.*input\.sum\(\) > 0"),
        (
            Folded(12, 4),
            r"cannot follow the model: the batch's size is free, but your code .* a constant \(5\)",
        ),
    ],
    ids=["operator", "branch", "constant"],
)
def test_what_cannot_be_exported_is_named(tmp_path: Path, model: nn.Module, said: str) -> None:
    with pytest.raises(SquallError, match=said) as raised:
        format_of(Path("m.onnx")).write(trained(classes(features(), model=model)), tmp_path / "m.onnx")
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())
