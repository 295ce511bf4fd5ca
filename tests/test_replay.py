"""A replay arrives at the weights of the run, bit for bit, whatever the strategy and whatever happened to it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import squall
from tests.rehearsal import assert_replays, rehearse

SGD = partial(torch.optim.SGD, lr=0.05)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.05)

FAMILY: dict[str, squall.Strategy] = {
    "synchronous": squall.Synchronous(replicas=3, shards=2, optimizer=MOMENTUM),
    "backup, drop": squall.Synchronous(replicas=3, backup=1, optimizer=SGD),
    "backup, fold": squall.Synchronous(replicas=3, backup=1, late="fold", optimizer=SGD),
    "bounded delay": squall.BoundedDelay(replicas=3, shards=2, max_delay=2, optimizer=MOMENTUM),
    "bounded delay, overlap": squall.BoundedDelay(replicas=3, shards=2, max_delay=1, overlap=True, optimizer=SGD),
    "downpour": squall.Downpour(replicas=3, shards=2, optimizer=ADAGRAD),
    "downpour, overlap": squall.Downpour(replicas=3, shards=2, overlap=True, optimizer=ADAGRAD),
    "downpour, summing": squall.Downpour(replicas=3, shards=2, push_every=3, fetch_every=2, optimizer=ADAGRAD),
    "downpour, all": squall.Downpour(
        replicas=3, shards=2, push_every=2, fetch_every=3, overlap=True, warm_start=32, optimizer=ADAGRAD
    ),
    "scaled": squall.AsynchronousSGD(replicas=3, shards=2, optimizer=SGD),
    "compensated": squall.AsynchronousSGD(replicas=3, shards=2, staleness="compensate", adaptive=0.9, optimizer=SGD),
    "delayed proximal": squall.DelayedProximal(replicas=3, shards=2, blocks=3, order="random", optimizer=SGD),
    "averaging": squall.Averaging(replicas=3, shards=2, every=4, optimizer=MOMENTUM),
    "elastic averaging": squall.ElasticAveraging(replicas=3, shards=2, every=4, optimizer=SGD),
    "diloco": squall.DiLoCo(replicas=3, shards=2, optimizer=ADAMW, inner_steps=3),
    "asynchronous diloco": squall.DiLoCo(replicas=3, optimizer=ADAMW, inner_steps=3, form="asynchronous"),
    "matched diloco": squall.DiLoCo(replicas=3, optimizer=ADAMW, inner_steps=4, form="asynchronous", matched=True),
    "decoupled diloco": squall.DiLoCo(replicas=3, optimizer=ADAMW, inner_steps=3, form="decoupled"),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", FAMILY)
def test_the_weights_are_the_same_with_replicas_of_changing_speed_and_one_that_dies(
    name: str, seed: int, tmp_path: Path
) -> None:
    run = rehearse(tmp_path / "run", FAMILY[name], seed=seed, epochs=5, kill_at={80 + 30 * seed: 1})
    assert (run.directory / "schedule" / "0" / "replica-1.1").exists(), "the dead one was replaced"
    assert_replays(run)
