"""The messages between a shard, its backup and the coordinator (`protocol.copied`)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from squall.protocol.messages import Address, Count, OrNone, Struct
from squall.protocol.nodes import Node


class CopyJoined(Struct, frozen=True, tag="copy", array_like=True, gc=False):
    """To the coordinator: a backup is there, with nothing yet. If it takes over, its shard is called at `address`."""

    pid: OrNone
    address: Address = ""


class KeepCopy(Struct, frozen=True, tag="keep", array_like=True, gc=False):
    """To a shard: this process is your backup from now on, on that machine, or there is none.

    Replicas `beside` it are on the same machine, and what they push lies there already.
    """

    backup: Node | None
    machine: Count = 0
    beside: tuple[Node, ...] = ()


class Whole(Struct, frozen=True, tag="whole", array_like=True, gc=False):
    """To a backup: all that the shard is, or the next part of that, in so many bytes, which travel beside the frame.

    Parts and entries are numbered together, and taken in that order. One of no size: that cannot be given.
    """

    number: Count
    size: Count
    last: bool = True


class CopyKept(Struct, frozen=True, tag="whole?", array_like=True, gc=False):
    """To the coordinator: the backup has all of that, and the shard says nothing any more that it does not have."""


class Entry(Struct, frozen=True, tag="entry", array_like=True, gc=False):
    """To a backup: the shard has taken this event (`events.pack`). Numbers that it has brought travel along."""

    number: Count
    kind: Annotated[int, msgspec.Meta(ge=0, le=255)]
    event: bytes
    now: float  # by the shard's clock


class Has(Struct, frozen=True, tag="has", array_like=True, gc=False):
    """To the shard: the backup has taken all up to this entry or part, and made the updates."""

    number: Count


Message = CopyJoined | KeepCopy | Whole | CopyKept | Entry | Has
