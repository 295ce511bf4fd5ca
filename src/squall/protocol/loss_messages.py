"""What a shard tells the coordinator of the copies of its numbers, and of what it has lost by dying."""

from __future__ import annotations

from squall.protocol.messages import Count, Cover, Struct


class Kept(Struct, frozen=True, tag="kept!", array_like=True, gc=False):
    """All of this is in the shard's copy of its numbers: it cannot lose it any more."""

    covers: tuple[Cover, ...]


class UpdatesLost(Struct, frozen=True, tag="undone", array_like=True, gc=False):
    """The shard has died inside an update. Of these leases it has lost what was not in its copy.

    It had come from the copy, of version `first`, to version `last`, and goes on from the copy.
    """

    first: Count
    last: Count
    covers: tuple[Cover, ...]


class SnapshotLost(Struct, frozen=True, tag="unsaved", array_like=True, gc=False):
    """The shard has died over its part of the snapshot, which is begun anew."""

    number: Count


Message = Kept | UpdatesLost | SnapshotLost
