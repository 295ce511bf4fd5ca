"""What machines say that are looked at and do not train: a closed set, as it comes from other machines.

head -> machine      what is shipped, "look", "listen", "call" another machine, "measure"; last "kill"
machine -> head      the answer to each: "looked", "listens", "called", "measured"; or "failed"
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from squall.doctor import Finding
from squall.launchers.joining.hello import Hello
from squall.launchers.member_messages import Failed, Message, Port
from squall.report.words import size
from squall.sim.cluster.parts import Overhead


class Looked(Message, frozen=True):
    """What its own doctor found."""

    hello: Hello
    findings: list[Finding]


class Listens(Message, frozen=True):
    """Where others call it, as they call a run's processes."""

    port: Port
    clock: float  # seconds since 1970


class Called(Message, frozen=True):
    """What another machine was found to be over the network."""

    why: str = ""  # it was not reached
    round_trip_s: float = 0.0
    bytes_s: float = 0.0  # of numbers, to there
    carry: float = 0.0  # bytes that were sent in a second of a core


def in_words(there: Called, back: Called) -> str:
    """A link, both ways."""
    round_trip_s = max(there.round_trip_s, back.round_trip_s)
    speeds = [f"{size(round(way.bytes_s))}/s" for way in (there, back)]
    return f"round trip {1e3 * round_trip_s:.3g} ms, {speeds[0]} there, {speeds[1]} back"


class Measured(Message, frozen=True):
    """As of `sim.cluster.measure`, which tells of a machine in these fields; `times` are the trace of its jitter."""

    cores: int
    step_s: float
    slowdown: tuple[float, ...]
    single_s: float | None
    exchange: tuple[tuple[int, float], ...]
    overhead: Overhead
    memory: float
    times: Annotated[tuple[float, ...], msgspec.Meta(min_length=1)]
    others: float
    reduce: tuple[tuple[int, float], ...] = ()  # where replicas form no group


MACHINE = ("cores", "step_s", "slowdown", "single_s", "exchange", "reduce", "overhead", "memory")  # of a `MachineKind`
Answer = Looked | Listens | Called | Measured | Failed


def understood(said: dict[str, Any]) -> Answer | None:
    try:
        return msgspec.convert(said, Answer)  # type: ignore[no-any-return]
    except msgspec.ValidationError:
        return None
