"""A world told line by line: when, who, what came, what followed. Faults stand out."""

from __future__ import annotations

import msgspec

from squall.protocol.effects import Forget, Transmit
from squall.protocol.events import Event, FrameArrived
from squall.protocol.frames import Frame
from squall.protocol.nodes import Node
from squall.sim.proof.trial import Seen


def trace_line(seen: Seen) -> str:
    """One event (`<`), effect (`>`), or fault (`!`)."""
    now, node, what = seen
    if node is None:
        return f"{now:9.4f}  !! {what}"
    match what:
        case FrameArrived(sender, frame):
            return f"{now:9.4f}  {node!s:15} < {_frame(frame)} from {sender}"
        case Transmit(to, frame, payload, again):
            along = f", with {payload.kind} buffer {payload.buffer} of slot {payload.slot}" if payload else ""
            return f"{now:9.4f}  {node!s:15}    > {_frame(frame)} to {to}{along}{', again' if again else ''}"
        case Forget(gone):
            return f"{now:9.4f}  {node!s:15}    > forget {gone}"
    mark = "<" if isinstance(what, Event) else "   >"
    return f"{now:9.4f}  {node!s:15} {mark} {_plain(what)}"


def _frame(frame: Frame) -> str:
    if frame.message is None:
        return f"(seen {frame.seen})"
    return f"#{frame.number} {_plain(frame.message)}"


def _plain(what: object) -> str:
    """A struct without the fields that are at their defaults."""
    if not isinstance(what, msgspec.Struct):
        return str(what)
    shown = []
    for field in msgspec.structs.fields(type(what)):
        value = getattr(what, field.name)
        if field.required or (value != field.default and value not in ({}, ())):
            shown.append(f"{field.name}={_value(value)}")
    return f"{type(what).__name__}({', '.join(shown)})"


def _value(value: object) -> str:
    if isinstance(value, Node):
        return str(value)
    if isinstance(value, tuple):
        return f"({', '.join(_value(each) for each in value)})"
    if isinstance(value, float):
        return f"{value:.6g}"
    return _plain(value) if isinstance(value, msgspec.Struct) else repr(value)
