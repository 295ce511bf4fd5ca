"""A nursery looks at its processes, and tells no more while nobody hears it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from squall.launchers.lookout import LOOK_EVERY_S, UNHEARD_AT_MOST, Lookout
from squall.protocol.events import ActivitySeen, ProcessesSeen
from squall.protocol.nodes import Node
from squall.runtime.board import Board


def test_what_nobody_hears_is_told_later_at_once() -> None:
    node, lookout = Node("replica", 0), Lookout()
    lookout._board = Board(replicas=1, shards=0, now=0.0)
    lookout._board.entry(node, 0.0)
    child: Any = SimpleNamespace(node=node, pid=os.getpid())
    passed = []
    for look, unheard in enumerate([0, UNHEARD_AT_MOST, UNHEARD_AT_MOST, 0], start=1):
        seen = lookout.look(look * LOOK_EVERY_S, [child], unheard)
        passed.append(next((each.spent[0].seconds for each in seen if isinstance(each, ActivitySeen)), None))
        assert isinstance(seen[0], ProcessesSeen)  # how they stand is looked at also while nobody hears
    assert passed == [LOOK_EVERY_S, None, None, 3 * LOOK_EVERY_S]
