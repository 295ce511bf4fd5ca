"""Users' loops in the worlds: what they do with a batch is decided by the number of its computation."""

from __future__ import annotations

from collections.abc import Sequence

from squall.protocol.messages import Factors


def rates(number: int) -> Factors:
    """What a loop sets the learning rates of two groups to, as factors; every fifth time it leaves them alone."""
    return () if number % 5 == 0 else (1 / (1 + number % 3), number % 4 / 2)


def leaves_out(number: int) -> bool:
    """Whether a loop skips this batch."""
    return number % 7 == 3


def steps(number: int) -> int:
    """How often a loop of several optimizers steps on this batch."""
    return 1 + number % 3


def rates_of_one(number: int) -> Factors:
    """The same loop's: each step is for one of two groups."""
    return (None, number % 4 / 2) if number % 2 else (1 / (1 + number % 3), None)


def mean_rates(pushes: Sequence[tuple[Factors, int]]) -> Factors:
    """What an update of pushes of these factors and examples must step at."""
    wanted = {factors for factors, _ in pushes}
    if len(wanted) == 1:
        return wanted.pop()
    total = sum(examples for _, examples in pushes)
    shares = [(factors or (1.0, 1.0), examples / total) for factors, examples in pushes]
    return tuple(sum((factors[group] or 0.0) * share for factors, share in shares) for group in range(2))
