"""INT8 of real small models: what is quantized, what is left in float, and what a verdict is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import squall
from squall.export import quantize
from squall.export.calls import call_with
from squall.export.formats import Trained, format_of
from squall.export.int8 import quantized
from squall.export.stand_in import onnx_module
from squall.export.timing import rounds
from squall.export.verdict import Verdict
from tests.export.models import accuracy, classes, convolutions, features, images


def faster(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Figures, where the last way is the fastest. What is to be timed does run."""
    for run in runs.values():
        run()
    return {name: 1.0 / 2**number for number, name in enumerate(runs)}


def judged(
    task: squall.Task, folder: Path, tolerance: float = 0.1, exported: bytes | None = None, name: str = "m.onnx"
) -> Verdict:  # fmt: skip
    """Of the model in float, exported here if it has not been."""
    task.model.eval()
    model = Trained(task.model, call_with(task, 5), call_with(task, 7))
    if exported is None:
        format_of(Path(name)).write(model, folder / name)
    else:
        (folder / name).write_bytes(exported)
    return quantized(task, folder / name, model.one.of(task.model), tolerance, times=faster)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The layers of `mlp`."""
    judged(classes(features(16)), folder := tmp_path_factory.mktemp("exported"), tolerance=0)
    return (folder / "int8/plain.onnx").read_bytes()


def test_convolutions_are_static_and_the_written_file_computes_in_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = classes(images(), model=convolutions())
    verdict = judged(task, tmp_path)
    assert [each.name for each in verdict.tried] == ["dynamic INT8", "static INT8"]
    assert verdict.accepted == "static INT8"
    assert set(verdict.before.metrics) == {"accuracy"}
    assert set(verdict.before.latency_s) == {1, 64}
    with torch.no_grad():
        expected = task.model(images())
        off = (onnx_module(tmp_path / "m.onnx")(images()) - expected).abs().max() / expected.abs().max()
    assert 1e-6 < off < 0.1


@pytest.mark.parametrize(("instructions", "largest"), [("avx avx2", 64), ("avx avx2 avx512_vnni", 127), ("asimd", 127)])
def test_weights_have_seven_bits_where_the_processor_would_saturate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instructions: str, largest: int
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : {instructions}")
    monkeypatch.setattr(quantize, "CPU", tmp_path / "cpuinfo")
    task = classes(images(), model=convolutions())
    format_of(Path("m.onnx")).write(
        Trained(task.model.eval(), call_with(task, 5), call_with(task, 7)), tmp_path / "m.onnx"
    )
    quantizer = quantize.Quantizer(task, tmp_path / "m.onnx", tmp_path)
    for way in quantize.WAYS:
        graph = onnx.load(quantizer.write(way, quantizer.layers_of(way), batches=1)).graph
        weights = [numpy_helper.to_array(each) for each in graph.initializer if each.data_type == onnx.TensorProto.INT8]
        assert max(abs(each.astype(int)).max() for each in weights if each.ndim > 1) == largest


class Spoilt(nn.Module):
    """Its first layer's outputs lie 10,000 apart, and the digits behind that count: no 8 bits hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.tall, self.out = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)
        with torch.no_grad():
            for layer in (self.wide, self.tall):
                layer.weight.copy_(torch.eye(12))
                layer.bias.zero_()
            self.out.weight.copy_(torch.eye(12)[:4])
            self.out.bias.zero_()
            self.wide.bias[11] = 1e4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.tall(self.wide(x) - self.wide.bias))
        return found


def test_a_layer_that_quantization_spoils_is_left_in_float(tmp_path: Path) -> None:
    verdict = judged(classes(features(), model=Spoilt()), tmp_path)
    static = verdict.tried[1]
    assert verdict.before.metrics["accuracy"] > 0.95
    assert static.metrics["accuracy"] > 0.85
    assert static.in_float == ("wide (Gemm)",)
    assert "static INT8 leaves in float: wide (Gemm)" in str(verdict)


def test_what_is_spoilt_beyond_the_tolerance_is_refused_and_float_stays(tmp_path: Path, exported: bytes) -> None:
    noise = iter(range(100))
    metrics = {"accuracy": lambda model, batch: accuracy(model, batch) * 0 + next(noise)}
    verdict = judged(classes(features(), metrics=metrics), tmp_path, exported=exported)
    assert verdict.accepted is None
    assert set(verdict.refused) == {"dynamic INT8", "static INT8"}
    assert b"DynamicQuantizeLinear" in (tmp_path / "int8/dynamic.onnx").read_bytes()
    assert b"QuantizeLinear" not in (tmp_path / "m.onnx").read_bytes()


@pytest.mark.parametrize("name", ["static.onnx", "dynamic.onnx", "plain.onnx"])
def test_a_file_may_be_called_as_what_is_tried(tmp_path: Path, exported: bytes, name: str) -> None:
    verdict = judged(classes(features()), tmp_path, tolerance=-1.0, exported=exported, name=name)
    assert verdict.accepted is None
    assert (tmp_path / name).read_bytes() == exported


def test_a_metric_that_looks_into_the_model_is_refused(tmp_path: Path, exported: bytes) -> None:
    metrics = {"first": lambda model, batch: model.first(batch[0])}
    with pytest.raises(ValueError, match=r"no attribute 'first'.*let the metric call it, as `model\(\.\.\.\)`"):
        judged(classes(features(), metrics=metrics), tmp_path, exported=exported)


def test_the_loss_judges_where_there_is_no_metric(tmp_path: Path, exported: bytes) -> None:
    verdict = judged(replace(classes(features()), metrics={}), tmp_path, exported=exported)
    assert set(verdict.before.metrics) == {"loss"}


def test_a_model_without_products_is_refused(tmp_path: Path, exported: bytes) -> None:
    import onnx

    graph = onnx.load_from_string(exported)
    del graph.graph.node[:]
    graph.graph.node.append(onnx.helper.make_node("Identity", ["input"], [graph.graph.output[0].name]))
    task = classes(features(), metrics={}, loss=lambda model, batch: model(batch[0]).mean())
    with pytest.raises(ValueError, match="no layer to quantize"):
        judged(task, tmp_path, exported=graph.SerializeToString())


def test_all_are_timed_in_each_round() -> None:
    order: list[str] = []
    found = rounds({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in found.values())
    assert "".join(order).count("ab") == 4  # at the beginning, to see how often they are to be called, and each round
