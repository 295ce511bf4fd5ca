"""Vectors for L-BFGS: whoever dies over a change of them, another process makes it again, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from squall.protocol.sandblaster.messages import Calculation, Combine
from squall.runtime.arena import Arena, Shape
from squall.runtime.legacy import shared_memory
from squall.runtime.vectors import VectorStore, vectors_bytes
from squall.vector import Layout

HISTORY = 2
OPENS = Calculation(1, (Combine("trial", (("weights", 1.0),)),), opens=1)
ACCEPTS = Calculation(
    3,
    (
        Combine("s0", (("direction", 0.5),)), Combine("y0", (("sum", 1.0), ("gradient", -1.0))),
        Combine("gradient", (("sum", 1.0),)), Combine("weights", (("trial", 1.0),)),
    ),
    rows=("y0", "gradient"), columns=("s0", "y0", "gradient"), largest=("gradient",),
)  # fmt: skip
MOVES = Calculation(
    2, (Combine("direction", (("gradient", -1.0),)), Combine("trial", (("weights", 1.0), ("direction", 0.5)))), opens=2
)
Step = Callable[[VectorStore], Any]
STEPS: list[Step] = [
    lambda store: store.calculate(OPENS),
    lambda store: store.add(0, 0, 1),
    lambda store: store.add(1, 0, 2),
    lambda store: store.calculate(MOVES),
    lambda store: store.add(1, 0, 3),
    lambda store: store.calculate(ACCEPTS),
]


class Killed(Exception):
    """In place of SIGKILL."""


class Shards:
    """Of processes, one after the other on the same memory."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = nn.Linear(9, 5)
        self.layout = Layout.of(model, [[*model.parameters()]])
        self.arena = Arena.private(Shape(self.layout.length, 2, groups=1))
        for slot in range(2):
            self.arena.gradient(slot, 0).normal_()
        self.memory = shared_memory(vectors_bytes(self.layout.length, HISTORY))
        self.process().begin(torch.randn(self.layout.length))

    def process(self) -> VectorStore:
        return VectorStore(self.layout, 0, 1, HISTORY, self.arena, self.memory)


def everything(store: VectorStore) -> list[Tensor]:
    return [*store.state().values(), store._vectors["trial"], store._vectors["sum"], store._vectors["direction"]]


def killed_at(number: int, patch: pytest.MonkeyPatch) -> list[bool]:
    """Somebody is, in the operation of that number; it leaves numbers that are none. Empty: not yet."""
    operations, happened = iter(range(1000)), list[bool]()

    def deadly(original: Any) -> Any:
        def operation(*given: Any, **named: Any) -> Any:
            target = named.get("out", given[0])
            if next(operations) == number:
                target.fill_(torch.nan)
                happened.append(True)
                raise Killed
            return original(*given, **named)

        return operation

    for owner, name in ((torch, "add"), (torch, "mul"), (Tensor, "add_"), (Tensor, "zero_")):
        patch.setattr(owner, name, deadly(getattr(owner, name)))
    return happened


def test_who_dies_over_any_change_leaves_what_a_successor_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Shards().process()
    answers = [step(whole) for step in STEPS]
    for number in range(1000):
        shards = Shards()
        store, found = shards.process(), list[Any]()
        with monkeypatch.context() as patch:
            happened = killed_at(number, patch)
            for step in STEPS:
                try:
                    found.append(step(store))
                except Killed:
                    store = shards.process()
                    found.append(step(store))
        if not happened:
            break
        assert found == answers
        assert all(map(torch.equal, everything(store), everything(whole)))
    assert number > len(STEPS)


@pytest.mark.parametrize("number", range(len(STEPS)))
def test_what_is_asked_for_again_changes_nothing(number: int) -> None:
    shards = Shards()
    store = shards.process()
    for step in STEPS[:number]:
        step(store)
    answer = STEPS[number](store)
    before = [vector.clone() for vector in everything(store)]
    successor = shards.process()
    assert STEPS[number](successor) == answer
    assert all(map(torch.equal, everything(successor), before))
