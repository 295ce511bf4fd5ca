"""From a run to a file, and what is refused before or after the work."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import squall
from squall.errors import SquallError
from squall.export.exporting import export
from squall.run import Run
from tests import deep
from tests.export.models import classes, features
from tests.tasks import regression
from tests.warm import python


@pytest.fixture
def run(inline: Callable[..., Run]) -> Run:
    task = partial(classes, features(), metrics={})
    return inline(task, squall.SingleProcess(), epochs=2, keep_best="loss")


@pytest.mark.parametrize("name", ["m.onnx", "m.pt2", "m[1].safetensors"])
def test_what_was_exported_is_loaded(run: Run, tmp_path: Path, name: str) -> None:
    done = export(run.directory, tmp_path / name)
    assert done.difference < 1e-6
    assert done.bytes == (tmp_path / name).stat().st_size
    assert done.inputs == ["float32[batch, 12]"]
    assert "float32[batch, 12]" in str(done)
    module = squall.load(tmp_path / name, model=classes(features()).model)
    with torch.no_grad():
        assert torch.allclose(module(features()), run.model(features()), atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, "run-1"]


@deep.only
def test_a_model_that_one_onnx_file_cannot_hold_has_its_weights_beside_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("squall.export.formats.MOST_ONNX_BYTES", 100)
    done = export(run.directory, tmp_path / "m.onnx")
    files = [tmp_path / "m.onnx", tmp_path / "m.onnx.data"]
    assert sorted(path for path in tmp_path.iterdir() if path.is_file()) == files
    assert done.bytes == sum(path.stat().st_size for path in files)
    with torch.no_grad():
        assert torch.allclose(squall.load(tmp_path / "m.onnx")(features()), run.model(features()), atol=1e-6)
    files[0].unlink()
    with pytest.raises(ValueError, match=r"m\.onnx\.data exists already"):
        export(run.directory, tmp_path / "m.onnx")
    with pytest.raises(ValueError, match="--int8 takes models of up to 2 GB: leave it out"):
        export(run.directory, tmp_path / "n.onnx", int8=True)


@pytest.mark.parametrize("name", ["m.onnx", "m.pt2", "m.safetensors"])
def test_a_full_disk_is_told_and_nothing_is_left(run: Run, tmp_path: Path, name: str) -> None:
    """In a process of its own, for the limit on a file's size is one of the process, which a full disk resembles."""
    script = (
        "import resource, sys, squall.export.exporting as exporting\n"
        "write = exporting.written\n"
        "def limited(path):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))\n"
        "    return write(path)\n"
        "exporting.written = limited\n"
        "from squall.cli import main\n"
        f"sys.exit(main(['export', {str(run.directory)!r}, {str(tmp_path / name)!r}]))\n"
    )
    (run.directory / "limited.py").write_text(script)
    ran = python(run.directory / "limited.py")
    assert ran.returncode == 1, ran.stderr
    assert re.search(rf"squall: error: .*{re.escape(name)} cannot be written", ran.stderr), ran.stderr
    assert "Traceback" not in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run-1"]


def test_state_has_the_model_s_names(run: Run, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    export(run.directory, tmp_path / "m.safetensors")
    assert load_file(tmp_path / "m.safetensors").keys() == run.model.state_dict().keys()


@pytest.mark.parametrize("name", ["m.onnx", "m.pt2", "m.safetensors"])
def test_a_file_is_as_readable_as_others(run: Run, tmp_path: Path, name: str) -> None:
    other = tmp_path / "other"
    other.touch()
    export(run.directory, tmp_path / name)
    assert (tmp_path / name).stat().st_mode == other.stat().st_mode


def test_an_onnx_file_says_what_it_takes(run: Run, tmp_path: Path) -> None:
    export(run.directory, tmp_path / "m.onnx")
    module = squall.load(tmp_path / "m.onnx")
    for wrong in (torch.zeros(3, 12, dtype=torch.int64), torch.zeros(3, 5)):
        with pytest.raises(ValueError, match=r"m\.onnx takes .*: tensor\(float\)\['batch', 12\]: "):
            module(wrong)


def test_weights_are_chosen(run: Run, tmp_path: Path) -> None:
    first = vector(run.model)
    again = squall.resume(run.directory, epochs=3)
    expected: dict[int | str | None, Tensor] = {1: first, 2: vector(again.model), None: vector(again.model)}
    expected["best"] = vector(Run(run.directory).best)
    for weights, values in expected.items():
        export(run.directory, tmp_path / "m.safetensors", weights=weights, overwrite=True)  # type: ignore[arg-type]
        assert torch.equal(vector(squall.load(tmp_path / "m.safetensors", model=classes(features()).model)), values)
    assert not torch.equal(expected[1], expected[2])
    with pytest.raises(SquallError, match="has no snapshot 3: it has 1, 2"):
        export(run.directory, tmp_path / "n.safetensors", weights=3)


def vector(model: nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters())


def test_a_file_that_is_not_the_model_is_not_there(run: Run, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("squall.export.compare.ALLOWED", -1.0)
    (tmp_path / "m.pt2").write_text("older")
    with pytest.raises(SquallError, match="is not the trained one"):
        export(run.directory, tmp_path / "m.pt2", overwrite=True)
    assert (tmp_path / "m.pt2").read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.pt2", "run-1"]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("m.foo", {}, r"no suffix that squall can write: name it by one of \.onnx"),
        ("there.onnx", {}, "exists already: write over it with --overwrite"),
        ("no/m.onnx", {}, "make it first"),
        ("m.pt2", {"int8": True}, "--int8 writes ONNX, and .* is to be torch.export"),
        ("m.onnx", {"int8": True, "tolerance": 5.0}, "half a point"),
        ("m.engine", {}, "no.* here: write .onnx|tensorrt is missing"),
    ],
)
def test_what_cannot_be_is_refused_before_the_work(
    tmp_path: Path, name: str, options: dict[str, Any], said: str
) -> None:
    (tmp_path / "there.onnx").touch()
    with pytest.raises(ValueError, match=said):
        export(tmp_path / "no run is looked at", tmp_path / name, **options)


@pytest.mark.parametrize(("missing", "name"), [("onnxruntime", "m.onnx"), ("openvino", "m.xml")])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: Any, missing: str, name: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=rf"{missing} is missing: pip install ('squall-train\[export\]'|openvino)"):
        export(tmp_path, tmp_path / name)


def test_runs_without_a_model_are_refused(inline: Callable[..., Run], tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(ValueError, match="holds no run"):
        export(tmp_path, tmp_path / "m.pt2")
    run = inline(regression(), squall.SingleProcess())
    with pytest.raises(ValueError, match="nothing to judge an INT8 model by: give Task validate"):
        export(run.directory, tmp_path / "m.onnx", int8=True)
    (run.directory / "snapshots" / "000001").rename(tmp_path / "moved")
    with pytest.raises(SquallError, match="has no snapshot: nothing was trained yet"):
        export(run.directory, tmp_path / "m.pt2")
    with pytest.raises(SquallError, match="has no snapshot 1: it has none yet"):
        export(run.directory, tmp_path / "m.pt2", weights=1)
