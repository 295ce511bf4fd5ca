"""What a shard has applied since the last copy of its numbers: all that a death inside an update can take with it."""

from __future__ import annotations

from collections import deque

from squall.protocol.effects import Effect, Send
from squall.protocol.events import CopyMade, NumbersTorn
from squall.protocol.loss_messages import Kept, UpdatesLost
from squall.protocol.messages import Cover
from squall.protocol.nodes import COORDINATOR


class GoBack(Effect, frozen=True, gc=False):
    """Put the copy of the shard's numbers, of this version, in the place of the numbers."""

    version: int


class Unsaved:
    def __init__(self, copied: bool) -> None:
        """`copied`: there are copies."""
        self._copied = copied
        self._pushes: deque[tuple[int, int, tuple[Cover, ...]]] = deque()  # version with it, its examples, its covers

    def add(self, version: int, examples: int, covers: tuple[Cover, ...]) -> None:
        if self._copied:
            self._pushes.append((version, examples, covers))

    def kept(self, copy: CopyMade, effects: list[Effect]) -> None:
        _, covers = self._take(copy.version)
        if covers:
            effects.append(Send(COORDINATOR, Kept(covers)))

    def lost(self, torn: NumbersTorn, effects: list[Effect]) -> int:
        """Returns how many examples are lost."""
        self.kept(CopyMade(torn.version), effects)  # it may not have been told
        if not self._pushes or self._pushes[0][0] > torn.last:
            return 0  # one who has died over going back has told it
        examples, covers = self._take(torn.last)
        if torn.last > torn.version:
            effects.append(Send(COORDINATOR, UpdatesLost(torn.version, torn.last, covers)))
        return examples

    def _take(self, version: int) -> tuple[int, tuple[Cover, ...]]:
        """Forget all up to this version. Returns how many examples that was, and of which leases, up to where."""
        examples, newest = 0, dict[int, int]()
        while self._pushes and self._pushes[0][0] <= version:
            _, its, covers = self._pushes.popleft()
            examples += its
            newest |= {cover.lease: cover.upto for cover in covers}
        return examples, tuple(Cover(*each) for each in newest.items())
