"""The machines of a run as the head knows them: what they have, how far each has come, and what a run wants of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.orders import Facts
from squall.runtime.placement import Seats
from squall.runtime.run_plan import Plan
from squall.transports.streams import Address


class Room(NamedTuple):
    """A machine, as it is placed on."""

    cores: int
    gpus: int = 0  # that replicas compute on, in place of cores
    roles: tuple[str, ...] = ("replica", "shard", "coordinator", "evaluator")

    def __str__(self) -> str:
        had = [
            f"{count} {name}{'s' * (count > 1)}" for count, name in ((self.cores, "core"), (self.gpus, "GPU")) if count
        ]
        return ", ".join(had) or "no cores"

    @property
    def spread(self) -> Room:
        """As replicas are spread: over what they compute on."""
        return self._replace(cores=self.gpus or self.cores)


class Step(IntEnum):
    """What a machine was told, or has said, last."""

    JOINED = 0
    PLACED = 1  # it knows who is where
    LAUNCHED = 2  # it knows who listens where, and gets the files of a snapshot
    READY = 3  # it has room for its processes
    BEGUN = 4
    ENDED = 5  # what ran there, and it has handed over what it had


@dataclass
class Gathered:
    """A machine of the run."""

    number: int
    name: str
    room: Room
    pipe: ControlPipe
    address: str = ""  # where others reach it; the head's is known to those that have called it
    facts: Facts | None = None  # when it has built the task
    ports: dict[str, int] = field(default_factory=dict)  # of its shards, when it was told who is there
    step: Step = Step.JOINED  # that it has come to
    leaves: bool = False  # it ends with what ran there


class Launched(NamedTuple):
    """What all machines launch."""

    directory: Path
    snapshot: int | None
    lock: int  # descriptor of the directory's
    gpus: str | None = None  # of the launching machine that it may use, as CUDA_VISIBLE_DEVICES; None: all

    @property
    def files(self) -> list[Path]:
        """That who keeps the weights elsewhere needs to go on."""
        if self.snapshot is None:
            return []
        return sorted((self.directory / "snapshots" / f"{self.snapshot:06d}").iterdir())


class Wanted(NamedTuple):
    """What must be there before a run is placed."""

    machines: int  # the head's own included
    least_replicas: int | None = None  # that there are cores for; None: all are placed, whatever cores there are
    threads: int = 1  # of each part of a replica
    device: str = "cpu"  # of the replicas
    plaintext: bool = False  # between machines
    parts: int = 1  # of each replica
    spread_parts: bool | None = False  # over as many machines as possible; None: never over two
    copies: int = 1  # of each shard

    @classmethod
    def of(cls, plan: Plan) -> Wanted:
        settings = plan.settings
        return cls(
            settings.machines or 1, settings.least_replicas, plan.threads, plan.device, settings.plaintext,
            settings.parts, settings.spread_parts, settings.copies,
        )  # fmt: skip


class Standing(NamedTuple):
    """A run that has begun, as the machine knows it on which it goes on."""

    directory: Path
    facts: Facts
    seats: Seats
    addresses: dict[str, Address]  # of those that others call, by name; without a host on this machine


class Provider(Protocol):
    """Who sees to it that the other machines join, where no user does."""

    gone: str  # why it provides nothing any more, if so; who attends to its machines goes next

    @property
    def room(self) -> Room: ...  # of this machine
    def known(self, launched: Launched) -> Launched | None: ...  # with the GPUs of this machine, once they are known
    def start(self, name: str, head: str, token: str) -> None: ...  # machines for the run of that name
    def turn(self, now: float, begun: bool) -> Iterable[str]: ...  # what the user is to be told
    def close(self) -> None: ...  # the run is over


class Guests(Protocol):
    """What becomes of the machines that are let in: a run, or what is to be known of them."""

    machines: dict[int, Gathered]

    @property
    def begun(self) -> bool: ...  # those that were waited for are there
    @property
    def waits(self) -> str: ...  # for what, if not only for machines to come
    def add(self, machine: Gathered, task: bytes) -> None: ...
    def lose(self, number: int) -> None: ...  # its connection is over
    def understands(self, said: dict[str, Any]) -> bool: ...
    def hear(self, number: int, said: dict[str, Any]) -> bool: ...  # False: it is not for this
