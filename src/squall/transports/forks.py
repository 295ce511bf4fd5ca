"""What a process that is forked lets go of: one that loads data must not keep the connections open of one that dies."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Abandoned(Protocol):
    def abandon(self) -> None:
        """In a process that was forked: have no part in the connections. Nothing but descriptors may be touched.

        A thread, which is not there, may have been at work on the rest.
        """


_of_this_process: WeakSet[Abandoned] = WeakSet()


def abandon_at_fork(owner: Abandoned) -> None:
    _of_this_process.add(owner)


def ignore_at_fork(owner: Abandoned) -> None:
    """Its connections are closed."""
    _of_this_process.discard(owner)


def _abandon_all() -> None:
    for owner in _of_this_process:
        owner.abandon()
    _of_this_process.clear()


os.register_at_fork(after_in_child=_abandon_all)
