"""What `squall join` gives to its nursery. It imports no torch, for which nobody should wait twice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from squall.launchers.joining.address import Address
from squall.launchers.joining.token import Token

TASK = "task"  # file in a member's own directory: what it was given as it joined


@dataclass(frozen=True)
class Call:
    """What it takes to join a run."""

    head: Address
    token: Token
    wait_s: float  # seconds until nobody is waited for any more
    cores: int | None = None  # to be used, if not all
    number: int = 0  # that it would like to have in the run
    address: str | None = None  # where others reach this machine, if not where it calls from
    directory: Path | None = None  # of the run, for which it fetches at the end what that lacks
    fetches: bool = False  # it does so now, and takes part in nothing
