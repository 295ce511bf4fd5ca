"""Keras 3 models, which compute with torch here: `Task.from_keras` trains them, `save_keras` writes what came of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from squall.checks import require_extra
from squall.runtime.seeds import chance_kept

SEED = "seed_generator_state"  # what Keras calls the variable of a `keras.random.SeedGenerator`


class KerasModel(nn.Module):
    """A Keras model as Squall's processes know it; `keras` is the model itself, on the same numbers.

    Trainable weights are parameters, and frozen ones nothing that travels. What layers change themselves is buffers
    (BatchNormalization's statistics, counters): Keras shows it as parameters that nobody trains. Seeds of layers are
    drawn anew for each batch in training, from torch's chance, which Squall seeds by the batch's place in the run.
    """

    def __init__(self, model: Any, loss: Any) -> None:
        super().__init__()
        self._kept = model, loss  # in a tuple: as a submodule it would show every tensor once more
        self._seeds = seeds_of(model)
        self._state: dict[str, Any] = {}  # name of a buffer -> Keras's variable
        changed = {id(variable) for layer in model._flatten_layers() for variable in layer._non_trainable_variables}
        for name, variable in _named(model.weights):
            if variable.trainable:
                self.register_parameter(name, variable.value)
            elif id(variable) in changed:
                self.register_buffer(name, variable.value.detach())
                self._state[name] = variable
        model.compile(optimizer=None, loss=loss, run_eagerly=True)

    @property
    def keras(self) -> Any:
        """The `keras.Model`."""
        return self._kept[0]

    def forward(self, inputs: Any) -> Any:
        """What the Keras model makes of a batch of inputs, in training or not as this module is."""
        import keras

        if self.training:
            reseed(self._seeds)
        with keras.device(str(next(self.parameters()).device)):
            return self.keras(inputs, training=self.training)

    def loss(self, batch: Sequence[Any]) -> Tensor:
        """Keras's own loss of (inputs, targets) or (inputs, targets, sample weights), with what layers add to it."""
        inputs, targets, weights = _parts(batch)
        outputs = self(inputs)
        loss: Tensor = self.keras.compute_loss(x=inputs, y=targets, y_pred=outputs, sample_weight=weights)
        return loss.mean()  # it has a number for each example where the loss is not reduced

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KerasModel:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, variable in self._state.items():  # a module that moves has other buffers, and the same parameters
            variable.value.data = self.get_buffer(name)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasModel:
        """Keras would copy by way of a file, which needs every class to be registered."""
        import keras

        model, loss = self._kept
        with _made_again(model):
            copied = keras.models.clone_model(model)
        for mine, other in zip(model.weights, copied.weights, strict=True):
            other.assign(mine)
            other.trainable = mine.trainable
        return KerasModel(copied, loss).train(self.training)


class Seeded:
    """An augmentation layer of Keras in the data pipeline: of a dataset's item, or in `__getitems__` of a whole batch.

    Squall seeds torch's chance for every batch, from which this seeds the layer at each call; so a batch has the same
    augmentation whoever loads it, and in a replay. By itself such a layer counts its calls, each process for itself.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._seeds: list[Any] | None = None  # a layer may make them when it is first called

    def __call__(self, inputs: Any) -> Any:
        """What the layer makes of the inputs in training, without gradients; the inputs stay as they are."""
        if self._seeds is None:
            with chance_kept(gpus_too=False):
                self._call(inputs)
            self._seeds = seeds_of(self._layer)
        reseed(self._seeds)
        return self._call(inputs)

    def _call(self, inputs: Any) -> Any:
        import keras

        own = keras.tree.map_structure(lambda each: torch.as_tensor(each).clone(), inputs)  # some layers write into it
        with torch.no_grad(), keras.device("cpu"):
            return self._layer(own, training=True)


class KerasMetric:
    """A metric of Keras, which an evaluation feeds with all batches and then asks."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self._metric: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> KerasMetric:
        return KerasMetric(self._given)

    def update(self, targets: Any, outputs: Any) -> None:
        import keras

        with keras.device("cpu"):
            if self._metric is None:
                self._metric = _metric(self._given, targets, outputs)
                self._metric.reset_state()
            self._metric.update_state(targets, outputs)

    def compute(self) -> Any:
        return self._metric.result()

    @staticmethod
    def inputs(model: nn.Module, batch: Sequence[Any]) -> Any:
        """What `update` takes."""
        import keras

        inputs, targets, _ = _parts(batch)
        return keras.tree.map_structure(lambda tensor: tensor.detach().cpu(), (targets, model(inputs)))


def keras_parts(model: Any, loss: Any, metrics: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `Task` that trains a Keras model; see `Task.from_keras`. Raises `ValueError` as that does."""
    require_extra("keras", "Keras")
    _check(model, loss)
    named = metrics if isinstance(metrics, Mapping) else {_name(metric): metric for metric in metrics}
    return {
        "model": KerasModel(model, loss),
        "loss": lambda model, batch: model.loss(batch),
        "metrics": {name: (KerasMetric(metric), KerasMetric.inputs) for name, metric in named.items()},
    }


def _check(model: Any, loss: Any) -> None:
    import keras

    if keras.backend.backend() != "torch":
        raise ValueError(
            f"Keras computes with {keras.backend.backend()} here: set KERAS_BACKEND=torch in the environment, or by"
            " os.environ before Keras is imported (`squall train` does so itself)"
        )
    if not isinstance(model, keras.Model):
        raise ValueError(f"Task.from_keras takes a keras.Model: this is {type(model).__name__}")
    if not model.built:
        raise ValueError(f"{model.name} has no weights yet: begin it with keras.Input, or call it once on a batch")
    if getattr(loss, "reduction", None) == "sum":
        raise ValueError("the loss is a sum: replicas average, so give it the reduction 'sum_over_batch_size'")


def save_keras(model: nn.Module, path: str | Path) -> None:
    """Write a trained model as a .keras file; it is loaded again, and must have the same weights and outputs.

    Args:
        model: `run.model` or `run.best` of a task by `Task.from_keras`.
        path: of the file, which ends in .keras; an older one is replaced.

    Raises:
        ValueError: it is another model, or another ending, or the file gives another model when it is loaded.
    """
    path = Path(path)
    if not isinstance(model, KerasModel):
        raise ValueError(f"this is no model of Task.from_keras: {type(model).__name__}")
    if path.suffix != ".keras":
        raise ValueError(f"{path} must end in .keras")
    part, own = path.with_name(f".{path.stem}.part.keras"), model.keras
    try:
        with _made_again(own):
            own.save(part)
            again = _read(part, own)
        if not _same(own, again):
            raise ValueError(f"{own.name} is another model when it is loaded: do its layers' get_config say all?")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load_keras(path: str | Path, like: nn.Module) -> nn.Module:
    """What `save_keras` has written, with the classes and the loss of another model of Task.from_keras."""
    assert isinstance(like, KerasModel)
    own, loss = like._kept
    return KerasModel(_read(path, own), loss).train(like.training)


def _read(path: str | Path, own: Any) -> Any:
    """The Keras model of a file, whose layers are of the classes of `own`."""
    import keras

    classes = {type(layer).__name__: type(layer) for layer in own._flatten_layers()}
    return keras.models.load_model(path, custom_objects=classes, compile=False)


@contextmanager
def _made_again(model: Any) -> Iterator[None]:
    """In here the model is without its loss, because a function of the user's own could not be read again.

    What fails is a `ValueError` with the remedy.
    """
    model.compiled = False
    try:
        yield
    except OSError:  # of the disk
        raise
    except Exception as error:  # whatever the user's classes raise, or Keras when it reads what they say
        reason = str(error).strip().rpartition("\n")[2]
        raise ValueError(
            f"{model.name} cannot be made again from its configuration ({reason}): each class of your own needs a"
            " get_config with all its arguments, and passes others on: __init__(self, ..., **options)"
        ) from error
    finally:
        model.compiled = True


def _same(own: Any, again: Any) -> bool:
    """Whether two models have the same weights, and give the same on numbers by chance where their inputs are known."""
    import keras

    pairs = zip(own.weights, again.weights, strict=True)
    if not all(torch.equal(mine.value.cpu(), other.value.cpu()) for mine, other in pairs):
        return False
    if not getattr(own, "inputs", None):
        return True

    def example(known: Any) -> Tensor:
        shape = [2 if size is None else size for size in known.shape]
        return torch.rand(shape) if "float" in known.dtype else torch.ones(shape, dtype=torch.int64)

    with torch.no_grad(), chance_kept(), keras.device("cpu"):
        inputs = [example(known) for known in own.inputs]
        given = inputs if len(inputs) > 1 else inputs[0]
        found = (keras.tree.flatten(each(given, training=False)) for each in (own, again))
        return all(torch.allclose(mine, other, rtol=1e-4, atol=1e-5) for mine, other in zip(*found, strict=True))


def seeds_of(layer: Any) -> list[Any]:
    """The variables from which a layer, or a model, draws."""
    return [variable for variable in layer.variables if variable.name == SEED]


def reseed(seeds: Sequence[Any]) -> None:
    """Draw the seeds anew from torch's chance."""
    for seed, drawn in zip(seeds, torch.randint(2**31 - 1, (len(seeds),), dtype=torch.int32)):
        seed.assign(torch.stack([drawn, torch.zeros_like(drawn)]))


def _named(variables: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Each with a name that is the same whenever the model is built: its layer's, without the number of Keras's."""
    seen: dict[str, int] = {}
    for variable in variables:
        name = re.sub(r"_\d+(?=/)", "", "/".join(variable.path.split("/")[-2:])).replace(".", "_")
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}_{seen[name]}", variable


def _parts(batch: Sequence[Any]) -> tuple[Any, Any, Any]:
    if not isinstance(batch, list | tuple) or len(batch) not in (2, 3):
        raise ValueError("a batch for a Keras model is (inputs, targets), or (inputs, targets, sample weights)")
    return batch[0], batch[1], batch[2] if len(batch) == 3 else None


def _name(metric: Any) -> str:
    return metric if isinstance(metric, str) else getattr(metric, "name", None) or metric.__name__


def _metric(given: Any, targets: Any, outputs: Any) -> Any:
    """As `keras.Model.compile` reads a metric: a name, an object, or a function of targets and outputs."""
    import keras

    if str(given).lower() in ("accuracy", "acc"):
        if outputs.shape[-1] == 1:
            return keras.metrics.BinaryAccuracy()
        sparse = targets.ndim < outputs.ndim or targets.shape[-1] == 1
        return keras.metrics.SparseCategoricalAccuracy() if sparse else keras.metrics.CategoricalAccuracy()
    found = keras.metrics.get(given)
    return found if isinstance(found, keras.metrics.Metric) else keras.metrics.MeanMetricWrapper(found)
