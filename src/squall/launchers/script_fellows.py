"""The processes of a replica whose parts run a script: how they begin, and how one ends when another has.

A script says things of its own through the group of its parts. So where a connection breaks under it, it is told apart
whether another part has died, which is its replica's death, or the script has made a mistake.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

from setproctitle import setproctitle
from torch.distributed import DistError

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.leaving import DONE, LOST, RAISED, leave
from squall.launchers.parts import folder, meet, raised, shared_vector, tell_raised, traceback_file, with_own
from squall.launchers.script_parts import Following, Speaking
from squall.launchers.script_replica import ReplicaBackend, ScriptBackend, WholeBackend
from squall.parts.host import Watch
from squall.parts.meeting import TAG
from squall.parts.neighbours import SPEAKER, NeighbourLost
from squall.parts.spent import count_waits
from squall.protocol.nodes import Node
from squall.runtime.batches import loader_killed
from squall.runtime.job import Job
from squall.runtime.processes import fork

ENDS_WITHIN_S = 1.0  # a part whose connections are broken, after they are


class Fellows:
    """The other processes of this one's replica, if it has parts."""

    def __init__(self, node: Node, sockets: Path) -> None:
        self._node, self._sockets = node, sockets
        self.part = SPEAKER
        self._others: list[int] = []  # pids, on part 0

    def backend(self, job: Job, pipe: ControlPipe) -> ScriptBackend:
        """What stands behind the session of this process, as of `forked`."""
        return self.forked(job, partial(self._first, pipe), pipe.connection.close)

    def _first(self, pipe: ControlPipe, job: Job, watch: Watch | None) -> WholeBackend:
        return ReplicaBackend(job, self._node, self._sockets, pipe, watch)

    def forked(
        self, job: Job, first: Callable[[Job, Watch | None], WholeBackend], let_go: Callable[[], None],
        replayed: bool = False,
    ) -> ScriptBackend:  # fmt: skip
        """What stands behind the session of this process: it is forked into the replica's parts, each of which has one.

        `first` makes that of the first part, which watches the others; these `let_go` of what is its own.
        Raises `NeighbourLost` where one of them dies meanwhile.
        """
        node, parts = self._node, job.plan.settings.parts
        if parts == 1:
            return first(job, None)
        folder(self._sockets, node).mkdir(mode=0o700)
        job, scratch = with_own(job), shared_vector(job)
        for part in range(1, parts):
            if not (pid := fork()):
                self.part, self._others = part, []
                let_go()
                setproctitle(f"squall replica {node.index} part {part} of {job.directory.name}")
                break
            self._others.append(pid)
        try:
            neighbours = meet(job, node, self._sockets, self.part, self._others, TAG)
        except RuntimeError as error:
            raise NeighbourLost(str(error)) from error
        count_waits(neighbours.spent)
        if self.part != SPEAKER:
            return Following(job, node, neighbours, scratch, replayed)
        return Speaking(first(job, Watch(self._others)), job, neighbours, scratch)

    def leave(self) -> None:
        """The script has come to its end here: part 0 waits for the others'."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self._others]
        if any(code != DONE for code in codes):
            leave(RAISED if traceback_file(self._sockets, self._node).exists() else LOST)

    def fail(self, error: BaseException, story: str) -> NoReturn:
        """The script has raised here: tell the nursery, unless another process is gone, and its replica with it."""
        if loader_killed(error):
            leave(LOST)
        if any(map(_of_a_connection, _chain(error))):
            if self.part != SPEAKER:
                if not isinstance(error, NeighbourLost):
                    self._story(self.part).write_text(story)
                leave(LOST)
            story = self._told(error, story)
        tell_raised(self._sockets, self._node, story)
        leave(RAISED)

    def _told(self, error: BaseException, story: str) -> str:
        """Of what has broken the connections of part 0; does not return where that is another part's end."""
        codes = self._ended()
        if traceback_file(self._sockets, self._node).exists():
            leave(RAISED)
        told = next(self._stories(), None)
        if any(code not in (None, LOST) for code in codes) or (isinstance(error, NeighbourLost) and told is None):
            leave(LOST)
        return story if told is None else told

    def told(self, error: BaseException, story: str) -> str:
        """The story of the part that has failed, as a replay's first part has it."""
        if not any(map(_of_a_connection, _chain(error))):
            return story
        self._ended()
        return next(self._stories(), "") or raised(self._sockets, self._node) or story

    def _stories(self) -> Iterator[str]:
        """What other parts have raised as their connections broke."""
        paths = map(self._story, range(1, len(self._others) + 1))
        return (path.read_text() for path in paths if path.exists())

    def _ended(self) -> list[int | None]:
        """Exit codes of the other parts, None of one that lives on."""
        codes: list[int | None] = [None] * len(self._others)
        deadline = time.monotonic() + ENDS_WITHIN_S
        while None in codes and time.monotonic() < deadline:
            for number, pid in enumerate(self._others):
                with suppress(ChildProcessError):
                    if codes[number] is None and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                        codes[number] = os.waitstatus_to_exitcode(ended[1])
            if any(code not in (None, LOST) for code in codes):
                break
            time.sleep(0.01)
        return codes

    def _story(self, part: int) -> Path:
        return folder(self._sockets, self._node) / f"{part}.traceback"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _of_a_connection(error: BaseException) -> bool:
    """torch says `RuntimeError` where a connection breaks, as it does of much else."""
    broken = isinstance(error, RuntimeError) and (isinstance(error, DistError) or "gloo" in str(error))
    return broken or isinstance(error, NeighbourLost)
