"""The processes of a replica whose parts run a script: how they begin, and how one ends when another has.

A script says things of its own through the group of its parts. So where a connection breaks under it, it is told apart
whether another part has died, which is its replica's death, or the script has made a mistake.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from setproctitle import setproctitle
from torch.distributed import DistError

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.leaving import DONE, LOST, RAISED, leave
from squall.launchers.parts import folder, meet, shared_vector, tell_raised, traceback_file, with_own
from squall.launchers.script_parts import Following, Speaking
from squall.launchers.script_replica import ReplicaBackend, ScriptBackend
from squall.parts.host import Watch
from squall.parts.meeting import TAG
from squall.parts.neighbours import SPEAKER, NeighbourLost
from squall.protocol.nodes import Node
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
        """What stands behind the session of this process: it is forked into the replica's parts, each of which has one.

        Raises `NeighbourLost` where one of them dies meanwhile.
        """
        node, parts = self._node, job.plan.settings.parts
        if parts == 1:
            return ReplicaBackend(job, node, self._sockets, pipe)
        folder(self._sockets, node).mkdir(mode=0o700)
        job, scratch = with_own(job), shared_vector(job)
        for part in range(1, parts):
            if not (pid := fork()):
                self.part, self._others = part, []
                pipe.connection.close()
                setproctitle(f"squall replica {node.index} part {part} of {job.directory.name}")
                break
            self._others.append(pid)
        try:
            neighbours = meet(job, node, self._sockets, self.part, self._others, TAG)
        except RuntimeError as error:
            raise NeighbourLost(str(error)) from error
        if self.part != SPEAKER:
            return Following(job, node, neighbours, scratch)
        replica = ReplicaBackend(job, node, self._sockets, pipe, Watch(self._others))
        return Speaking(replica, job, neighbours, scratch)

    def leave(self) -> None:
        """The script has come to its end here: part 0 waits for the others'."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self._others]
        if any(code != DONE for code in codes):
            leave(RAISED if traceback_file(self._sockets, self._node).exists() else LOST)

    def fail(self, error: BaseException, story: str) -> NoReturn:
        """The script has raised here: tell the nursery, unless another part is gone, and its replica with it."""
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
        stories = [path for part in range(1, len(codes) + 1) if (path := self._story(part)).exists()]
        if any(code not in (None, LOST) for code in codes) or (isinstance(error, NeighbourLost) and not stories):
            leave(LOST)
        return stories[0].read_text() if stories else story

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
