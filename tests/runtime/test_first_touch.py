"""A shard of a large network takes the optimizer's memory while replicas compute, not when gradients have come."""

from __future__ import annotations

import resource
from functools import partial
from typing import Any

import pytest
import torch

from squall.protocol.effects import Effect, Payload
from squall.protocol.nodes import Node
from squall.runtime.driver import Host
from squall.runtime.first_touch import FirstTouch
from squall.runtime.optimizers import state_vectors

ELEMENTS = 4_000_000
PAGES = 4 * ELEMENTS // resource.getpagesize()
WEIGHTS = Payload("weights", Node("replica", 0), 0, 0, 0, 0)


def faults_of_rest(host: Host) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    host.rest()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


class Attached(Host):
    def __init__(self) -> None:
        self.payloads: list[Payload] = []

    def attach(self, payload: Payload) -> None:
        self.payloads.append(payload)

    def perform(self, effect: Effect, now: float) -> None:
        raise AssertionError(effect)


def test_memory_is_taken_once_and_when_all_have_their_weights() -> None:
    inner = Attached()
    host = FirstTouch(inner, ELEMENTS, payloads=2)
    host.attach(WEIGHTS)
    assert faults_of_rest(host) < PAGES
    host.attach(WEIGHTS)
    assert faults_of_rest(host) >= PAGES
    assert faults_of_rest(host) < PAGES
    assert inner.payloads == [WEIGHTS, WEIGHTS]


@pytest.mark.parametrize(
    ("optimizer", "vectors"),
    [
        (partial(torch.optim.SGD, lr=0.1), 0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1),
        (partial(torch.optim.AdamW, lr=0.1), 2),
        (partial(torch.optim.AdamW, lr=0.1, amsgrad=True), 3),
        (partial(torch.optim.Adagrad, lr=0.1), 0),  # makes its state as it is built
    ],
)
def test_what_a_first_step_adds_is_known(optimizer: Any, vectors: int) -> None:
    assert state_vectors(optimizer) == vectors
