"""Chance as a function of (run seed, what it is for), so that augmentation and dropout repeat."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """One 63-bit seed from several integers (the finalizer of SplitMix64, folded over them)."""
    state = 0
    for number in numbers:
        state = (state + 0x9E3779B97F4A7C15 + (number & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_everything(seed: int, device: torch.device | None = None) -> None:
    """Seed torch, NumPy and `random`. `torch.manual_seed` does the same for every device, at 100 times the cost."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed(seed)


def epoch_order(seed: int, epoch: int, examples: int, shuffle: bool = True) -> torch.Tensor:
    """The order in which an epoch visits the dataset: int64 [examples]."""
    if not shuffle:
        return torch.arange(examples)
    generator = torch.Generator().manual_seed(mix(seed, epoch, examples))
    return torch.randperm(examples, generator=generator)


def listed(sampler: Any, seed: int, epoch: int, examples: int) -> torch.Tensor:
    """A sampler's order of an epoch, the same in every process: int64 [len(sampler)].

    All that a sampler can draw from is seeded, and its epoch is set where it has one. It is copied first, so that what
    it counts from list to list is the same in a process that begins late. Raises `ValueError` for what is no order.
    """
    own, chosen = copy.copy(sampler), mix(seed, epoch, len(sampler))
    with chance_kept(gpus_too=False):
        seed_everything(chosen)
        if isinstance(getattr(own, "generator", None), torch.Generator):
            own.generator.manual_seed(chosen)
        if hasattr(own, "set_epoch"):
            own.set_epoch(epoch)
        found = list(own)
    name = f"Task.sampler ({type(sampler).__name__})"
    if any(isinstance(index, list | tuple) for index in found[:1]):
        raise ValueError(f"{name} gives batches: pass the sampler of single examples, and batch_size")
    if len(found) != len(sampler):
        raise ValueError(f"{name} gave {len(found)} examples in epoch {epoch}, and its length is {len(sampler)}")
    order = torch.tensor([int(index) for index in found], dtype=torch.int64)
    if int(order.min()) < 0 or int(order.max()) >= examples:
        raise ValueError(f"{name} gave numbers from {order.min()} to {order.max()}, of {examples} examples")
    return order


@contextlib.contextmanager
def chance_kept(gpus_too: bool = True) -> Iterator[None]:
    """Whatever is seeded in here, the caller's random state is afterwards what it was before.

    To ask the GPUs for theirs makes each of them finish what it is doing.
    """
    gpus = range(torch.cuda.device_count()) if gpus_too and torch.cuda.is_initialized() else ()
    before = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
