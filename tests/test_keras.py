"""Keras models train as any other: their state travels, chance is the run's, and a .keras file comes out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import squall
from squall.export.exporting import export
from squall.keras import KerasModel, Seeded, load_keras, save_keras
from squall.report.tensorboard import begin_tensorboard
from squall.run import Run
from squall.runtime.seeds import seed_everything
from squall.task import check_task
from tests import deep
from tests.rehearsal import assert_replays
from tests.report.test_tensorboard import read
from tests.tasks import assert_same

# Keras asks NumPy for an array of one of its variables, which knows an older version of that question.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning")

Fit = Callable[..., Run]


@pytest.fixture(scope="module")
def kit() -> Any:
    """`tests.keras_models`."""
    if find_spec("keras") is None:
        pytest.skip("pip install 'squall-train[keras]'")
    from tests import keras_models

    return keras_models


ADAM = partial(torch.optim.Adam, lr=0.02)
STRATEGIES = {
    "downpour": squall.Downpour(replicas=2, shards=2, optimizer=ADAM),
    "synchronous": squall.Synchronous(replicas=2, optimizer=ADAM),
    "all_reduce": squall.AllReduce(replicas=2, optimizer=ADAM),
}


@pytest.mark.parametrize("name", deep.sweep(list(STRATEGIES), 1))
def test_a_model_with_state_learns_and_becomes_a_keras_file(name: str, kit: Any, inline: Fit, tmp_path: Path) -> None:
    run = inline(kit.classification(), STRATEGIES[name], epochs=6)
    assert run.summary().metrics["accuracy"] > 0.9
    model = run.model
    assert isinstance(model, KerasModel)
    moved, counted = model.keras.get_layer("backbone").layers[2].moving_variance, model.keras.layers[1].calls
    assert (moved.value - 1).abs().max() > 0.1, "its statistics are those of the training"
    assert 12 <= int(counted.value) <= 36, "of one replica, as all counts are"
    save_keras(model, tmp_path / "model.keras")
    again = kit.keras.models.load_model(tmp_path / "model.keras", custom_objects={"Scale": kit.Scale}, compile=False)
    pictures, labels = kit.images(60)
    assert torch.equal(again(pictures, training=False), model(pictures))
    assert (again(pictures, training=False).argmax(1) == labels).float().mean() > 0.9
    assert [path.name for path in tmp_path.glob("*.keras")] == ["model.keras"]


def test_its_layers_are_boxes_in_the_graph_also_where_one_is_called_twice(kit: Any, tmp_path: Path) -> None:
    """And where their names are such as modules have themselves."""
    keras, twice = kit.keras, kit.keras.layers.Dense(6, name="forward")
    model = keras.Sequential(
        [
            keras.Input((6,)),
            twice,
            keras.Sequential([twice, keras.layers.ReLU()], name="in.side"),
            keras.layers.Dense(1),
        ]
    )
    train = TensorDataset(torch.randn(8, 6), torch.randn(8, 1))
    call = keras.layers.Layer.__call__
    begin_tensorboard(tmp_path, squall.Task.from_keras(model, loss="mse", train=train))
    assert keras.layers.Layer.__call__ is call
    boxes = {node.name.rpartition("/")[0].partition("[model]/")[2] for node in read(tmp_path).Graph().node}
    named = {re.sub(r"_\d+\b", "", box) for box in boxes}
    assert {f"Sequential[keras]/{inner}" for inner in (
        "Dense[forward]", "Sequential[in_side]/Dense[forward]", "Sequential[in_side]/ReLU[re_lu]", "Dense[dense]",
    )} <= named  # fmt: skip


def test_chance_is_the_runs_in_weights_layers_and_data(kit: Any, inline: Fit) -> None:
    """Also for a task that is built after others, and so has other numbers in its names."""
    task, strategy = kit.classification(), squall.Downpour(replicas=2, optimizer=ADAM)
    run = inline(task, strategy)
    assert_same(run, inline(task, strategy), task)
    assert_replays(run)


def test_an_augmentation_is_that_of_torchs_chance_and_leaves_its_input(kit: Any) -> None:
    """Also of a layer that writes into its input, in the first call as in later ones."""
    lit, pictures = Seeded(kit.keras.layers.RandomBrightness(0.2, value_range=(-2, 3))), kit.images(6)[0]
    before, found = pictures.clone(), []
    for seed in (1, 2, 1):
        seed_everything(seed)
        found.append(lit(pictures))
    assert torch.equal(pictures, before)
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_weights_of_a_file_are_the_beginning_and_frozen_ones_stay(kit: Any, inline: Fit, tmp_path: Path) -> None:
    """As of keras.applications: a body with weights from a file, which is not trained, and a new head."""
    seed_everything(7)
    before = kit.backbone()
    before.layers[2].moving_mean.assign(torch.arange(4.0))
    before.save_weights(tmp_path / "body.weights.h5")

    def build() -> Any:
        body = kit.backbone()
        body.load_weights(tmp_path / "body.weights.h5")
        body.trainable = False
        return kit.keras.Sequential([kit.keras.Input((6, 6, 1)), body, kit.keras.layers.Dense(3)])

    run = inline(kit.classification(build), squall.Downpour(replicas=2, optimizer=ADAM), epochs=2)
    body = run.model.keras.get_layer("backbone")  # type: ignore[union-attr, operator]
    assert all(torch.equal(mine.value, was.value) for mine, was in zip(body.weights, before.weights))
    assert [name for name, _ in run.model.named_parameters()] == ["dense/kernel", "dense/bias"]
    assert run.summary().metrics["accuracy"] > 0.5


def by_hand(name: str, targets: Tensor, outputs: Tensor) -> float:
    if name == "top":
        return float((outputs.argmax(1) == targets).float().mean())
    if name == "close":
        return float((outputs.softmax(1).gather(1, targets[:, None]) > 0.5).float().mean())
    return float((outputs.topk(2).indices == targets[:, None]).any(1).float().mean())


def test_metrics_are_names_objects_and_functions(kit: Any, inline: Fit) -> None:
    metrics = {"top": "accuracy", "close": kit.close, "two": kit.keras.metrics.SparseTopKCategoricalAccuracy(k=2)}
    loss = kit.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    run = inline(kit.classification(loss=loss, metrics=metrics), squall.Downpour(optimizer=ADAM), epochs=2)
    pictures, labels = kit.images(60)
    found = run.summary().metrics
    with torch.no_grad():
        outputs = run.model(pictures)
    for name in metrics:
        assert found[name] == pytest.approx(by_hand(name, labels, outputs), abs=1e-6)
    added = run.model.keras.losses  # type: ignore[union-attr]
    whole = nn.functional.cross_entropy(outputs, labels) + sum(added)  # type: ignore[arg-type]
    assert found["loss"] == pytest.approx(float(whole), abs=1e-5)


def loss_of(kit: Any, loss: Any) -> Any:
    """Of (class, reduction), made when Keras is there."""
    return loss if isinstance(loss, str) else getattr(kit.keras.losses, loss[0])(reduction=loss[1])


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "expected"),
    [
        ("mse", [[1.0], [3.0]], [0.0, 0.0], 5.0),
        ("binary_crossentropy", [[0.5], [0.5]], [0.0, 1.0], 0.6931),
        (("MeanAbsoluteError", "none"), [[1.0], [3.0]], [0.0, 0.0], 2.0),
    ],
)
def test_losses_of_keras_are_means_over_the_batch(
    loss: Any, outputs: Sequence[Any], targets: Sequence[float], expected: float, kit: Any
) -> None:
    same = kit.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    task = squall.Task.from_keras(
        kit.keras.Sequential([kit.keras.Input((1,)), same]),
        loss=loss_of(kit, loss),
        train=TensorDataset(torch.ones(4, 1), torch.ones(4)),
    )
    found = task.loss(task.model, [torch.tensor(outputs), torch.tensor(targets)])
    assert isinstance(found, Tensor)
    assert found.item() == pytest.approx(expected, abs=1e-4)
    weighed = task.loss(task.model, [torch.tensor(outputs), torch.tensor(targets), torch.tensor([0.0, 0.0])])
    assert isinstance(weighed, Tensor)
    assert weighed.item() == 0.0


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (lambda kit: nn.Linear(1, 1), "mse", "takes a keras.Model: this is Linear"),
        (
            lambda kit: kit.keras.Sequential([kit.keras.layers.Dense(1)]),
            "mse",
            "has no weights yet: begin it with keras.Input",
        ),
        (lambda kit: kit.network(), ("MeanSquaredError", "sum"), "the loss is a sum"),
    ],
)
def test_what_does_not_fit_is_refused(model: Callable[[Any], Any], loss: Any, message: str, kit: Any) -> None:
    with pytest.raises(ValueError, match=message):
        squall.Task.from_keras(model(kit), loss=loss_of(kit, loss), train=kit.Augmented())


def test_another_backend_is_refused_with_the_remedy(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit.keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError, match="Keras computes with jax here: set KERAS_BACKEND=torch"):
        kit.classification()()


def test_a_batch_that_is_no_pair_is_told_of(kit: Any) -> None:
    task = kit.classification()()
    with pytest.raises(ValueError, match=r"a batch for a Keras model is \(inputs, targets\)"):
        check_task(squall.Task(model=task.model, loss=task.loss, train=kit.images(8)[0]))  # type: ignore[arg-type]


def test_what_is_no_keras_file_is_refused(kit: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"this is no model of Task\.from_keras: Linear"):
        save_keras(nn.Linear(1, 1), tmp_path / "model.keras")
    model = kit.classification()().model
    with pytest.raises(ValueError, match=r"must end in \.keras"):
        save_keras(model, tmp_path / "model.pt")


@pytest.mark.parametrize("kind", ["Network", "Telling"])
def test_a_model_that_is_a_class_becomes_a_file_if_it_tells_its_arguments(
    kind: str, kit: Any, inline: Fit, tmp_path: Path
) -> None:
    def build() -> Any:
        model = getattr(kit, kind)(4)
        model(torch.zeros(1, 6, 6, 1))
        return model

    told = kind == "Telling"
    with nullcontext() if told else pytest.raises(ValueError, match="each class of your own needs a get_config"):
        run = inline(kit.classification(build), squall.Downpour(replicas=2, optimizer=ADAM), epochs=2)
        assert int(run.summary().updates or 0) == 12
        assert float(run.model.keras.normal.moving_mean.value.abs().max()) > 0  # type: ignore[union-attr, operator]
        save_keras(run.model, tmp_path / "model.keras")
    assert (tmp_path / "model.keras").exists() == told


def test_a_file_that_gives_another_model_is_not_left_behind(kit: Any, tmp_path: Path) -> None:
    class Forgetful(kit.Scale):
        def get_config(self) -> dict[str, Any]:
            return {**super().get_config(), "start": 2.0}

        def call(self, inputs: Tensor, training: bool = False) -> Any:
            return inputs + self.start

    build = lambda: kit.keras.Sequential([kit.keras.Input((6, 6, 1)), kit.keras.layers.Flatten(), Forgetful(1.0)])  # noqa: E731
    with pytest.raises(ValueError, match="is another model when it is loaded"):
        save_keras(kit.classification(build)().model, tmp_path / "model.keras")
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_exported_as_a_keras_file(kit: Any, inline: Fit, tmp_path: Path) -> None:
    run = inline(kit.classification(), squall.Downpour(optimizer=ADAM), epochs=1)
    done = export(run.directory, tmp_path / "model.keras")
    assert (done.format, done.difference) == ("Keras, of a task by Task.from_keras", 0.0)
    pictures, _ = kit.images(7)
    assert torch.equal(load_keras(tmp_path / "model.keras", run.model)(pictures), run.model(pictures))
