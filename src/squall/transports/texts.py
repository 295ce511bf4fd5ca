"""Texts of other machines, as they may be shown."""

from __future__ import annotations

from typing import Any

import msgspec

from squall.protocol.frames import Frame
from squall.protocol.messages import Exchange, Exchanged
from squall.protocol.nodes import COORDINATOR, Node


def printable(value: Any, kept: str = "\n\t") -> Any:
    """A value without the characters in its texts that do something to a terminal, but for those that are `kept`."""
    match value:
        case str() if not value.isprintable():
            return "".join(c if c.isprintable() or c in kept else "\N{REPLACEMENT CHARACTER}" for c in value)
        case dict():
            return {printable(key, kept): printable(found, kept) for key, found in value.items()}
        case list() | tuple():
            return type(value)(printable(found, kept) for found in value)
        case msgspec.Struct():
            fields = {name: getattr(value, name) for name in value.__struct_fields__}
            return msgspec.structs.replace(value, **printable(fields, kept))
    return value


def shown(sender: Node, frame: Frame) -> Frame:
    """With texts that may be shown, where there are any."""
    if sender == COORDINATOR or frame.message is None or type(frame.message) in (Exchange, Exchanged):
        return frame
    found: Frame = printable(frame)
    return found
