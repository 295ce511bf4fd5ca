"""No training: a trained model's outputs, of every example once."""

from __future__ import annotations

from dataclasses import dataclass

from squall.strategies.base import Recipe, Strategy
from squall.strategies.work import Answering


@dataclass(frozen=True, kw_only=True)
class Prediction(Strategy):
    """Replicas run a model on what they are dealt, and keep its outputs; `squall.predict` makes one.

    Args:
        replicas: processes that run the model.
        model: whose outputs they are, in words: which run or file, and which state of it.
        data: what they are of, in words.
        format: of the files, "numpy" or "arrow".
        batch_size: examples that the model is called with.
        again: what goes on with it, in words, if it is stopped.

    It is no strategy of `fit`: nothing is trained.
    """

    replicas: int = 2
    model: str = ""
    data: str = ""
    format: str = "numpy"
    batch_size: int = 256
    again: str = ""

    def recipe(self) -> Recipe:
        return Recipe(replicas=self.replicas, shards=0, work=Answering())
