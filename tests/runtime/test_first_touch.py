"""A shard of a large network takes the optimizer's memory while replicas compute, not when gradients have come."""

from __future__ import annotations

import functools
import os
import resource
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from squall.protocol.effects import Apply, Effect, Payload
from squall.protocol.nodes import Node
from squall.runtime.driver import Host
from squall.runtime.first_touch import FirstTouch
from squall.runtime.optimizers import state_vectors
from squall.runtime.processes import keep_freed_memory

ELEMENTS = 4_000_000
PAGES = 4 * ELEMENTS // resource.getpagesize()
WEIGHTS = Payload("weights", Node("replica", 0), 0, 0, 0, 0)


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def faults_of_rest(host: Host) -> int:
    before = faults()
    host.rest()
    return faults() - before


class Inner(Host):
    def perform(self, effect: Effect, now: float) -> None:
        return None


def in_a_fork(test: Callable[[], None]) -> Callable[[], None]:
    """The test, run in a fork: it may keep memory, and memory that earlier tests have freed is shared, thus faults."""

    @functools.wraps(test)
    def forked() -> None:
        if (pid := os.fork()) == 0:
            torch.set_num_threads(1)  # others are not there behind a fork
            try:
                test()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    return forked


@in_a_fork
def test_memory_is_taken_once_and_when_all_have_their_weights() -> None:
    host = FirstTouch(Inner(), ELEMENTS, payloads=2)
    host.attach(WEIGHTS)
    assert faults_of_rest(host) < PAGES
    host.attach(WEIGHTS)
    assert faults_of_rest(host) >= PAGES
    assert faults_of_rest(host) < PAGES


@in_a_fork
def test_nothing_is_taken_when_the_optimizer_has_its_memory() -> None:
    host = FirstTouch(Inner(), ELEMENTS, payloads=1)
    host.perform(Apply((), 1.0, 1, 1.0, ()), 0.0)
    host.attach(WEIGHTS)
    assert faults_of_rest(host) < PAGES


@in_a_fork
def test_what_comes_next_is_cut_from_the_memory_that_was_taken() -> None:
    keep_freed_memory()
    FirstTouch(Inner(), 3 * ELEMENTS, payloads=0).rest()
    before = faults()
    state = torch.zeros(3 * ELEMENTS - 1000)  # more than the C library keeps unless it is told to
    assert 10 * (faults() - before) < PAGES
    assert len(state)


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
