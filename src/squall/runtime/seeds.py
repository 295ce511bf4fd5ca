"""Chance as a function of (run seed, what it is for), so that augmentation and dropout repeat."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

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
