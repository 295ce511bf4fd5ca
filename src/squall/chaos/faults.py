"""Faults that can be brought about from outside, by whoever may send a signal to the run's processes."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from squall.chaos.machines import Machines
from squall.chaos.processes import ANY, Family, Found

KILL, PAUSE, FILL_DISK, CUT = "kill", "pause", "fill-disk", "cut"


@dataclass(frozen=True)
class Fault:
    kind: str
    role: str = ANY  # whom it hits; a full disk hits all, and a cut a machine


@dataclass
class Injury:
    """A fault that has come about.

    Attributes:
        at_s: when, in seconds since the first update.
        text: what has happened to whom.
        heal: takes it back; a death has none.
        without_s: the longest time without an update from then until the next fault.
    """

    at_s: float
    text: str
    heal: Callable[[], None] | None = None
    without_s: float = 0.0


def bring(
    fault: Fault, family: Family, chance: random.Random, at_s: float, machines: Machines | None = None,
    whole: bool = True,
) -> Injury | None:  # fmt: skip
    """None: there is nobody whom it could hit, at the moment. `machines`: the run's others, of which one may be cut.

    `whole`: all is there that makes up for a machine, so that one may be lost.
    """
    if fault.kind == CUT:
        assert machines is not None
        if not whole:
            return None
        number = chance.choice(machines.numbers)
        machines.cut(number)
        return Injury(at_s, f"machine {number} is cut off", partial(machines.heal, number))
    victims = [found for found in family.of(fault.role) if whole or found.role != "nursery"]
    if not victims:
        return None
    if fault.kind == FILL_DISK:
        _limit_files(victims, 1)
        return Injury(at_s, "no process can make a file longer", lambda: _limit_files(family.look(), None))
    victim = chance.choice(sorted(victims))
    if fault.kind == PAUSE:
        send(victim, signal.SIGSTOP)
        return Injury(at_s, f"{victim} stands still", partial(send, victim, signal.SIGCONT))
    send(victim, signal.SIGKILL)
    return Injury(at_s, f"{victim} is killed")


def send(victim: Found, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(victim.pid, number)


def _limit_files(processes: Sequence[Found], size: int | None) -> None:
    """To a process that may write so many bytes of a file, and no more, the disk is full. None: as before."""
    for found in processes:
        with suppress(ProcessLookupError):
            _, most = resource.prlimit(found.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(found.pid, resource.RLIMIT_FSIZE, (most if size is None else size, most))
