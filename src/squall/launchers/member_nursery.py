"""The nursery of a machine that has joined a run of another one."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.coordinator_line import PipeLine, StreamLine
from squall.launchers.nursery import GRACE_S, Nursery
from squall.launchers.orders import OVER, Facts
from squall.launchers.schedules import give_schedules
from squall.protocol.effects import Admit, Effect, End, Forget
from squall.protocol.events import Event, LauncherLost, LeaveRequested, ProcessesSeen, Started
from squall.protocol.frames import Frame, encode
from squall.protocol.link import Linked
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.nursery import LetIn, NurseryMachine, Redirect
from squall.protocol.nursery_messages import Placed
from squall.runtime.job import Job
from squall.runtime.snapshot import Snapshots
from squall.transports.doorbell import Doorbell


class MemberNursery(Nursery):
    """It is there until the coordinator wants no more of it, also while nothing runs here.

    `head` leads to the launching process of the run, `attendant` to `squall join` on this machine.
    """

    def __init__(self, head: ControlPipe, attendant: ControlPipe, job: Job, sockets: Path) -> None:
        super().__init__(head, job, sockets)
        assert job.site is not None
        self._attendant = attendant
        self._machine = job.site.machine
        self._linked = Linked(NurseryMachine(Node("nursery", self._machine), job.site.pulse))
        self._site = job.site
        self._bell: Doorbell | None = None  # by which its processes hear where the coordinator is
        self._placed: Placed | None = None  # where that is, if it has moved
        self.moved = False  # it has, and the run's first machine counts for nothing more
        self.end: End | None = None  # how all that ran here has ended, as far as is known here
        self.leaves = False  # this machine, in order

    def run(self) -> None:
        super().run()
        if self._launcher.open:
            self._launcher.connection.flush()

    def _begin(self) -> None:
        self._connect()
        super()._begin()

    def _connect(self) -> None:
        self._line = StreamLine(self._site)
        self._tell(Started())

    @property
    def _stays(self) -> bool:
        return self.end is None

    def _verdict(self) -> dict[str, Any]:
        assert self.end is not None
        return {"status": "left" if self.leaves else self.end.status, "reason": self.end.reason}

    def _sources(self) -> list[Any]:
        return [*super()._sources(), *([self._attendant.connection] if self._attendant.open else [])]

    def _attend(self, source: object) -> None:
        if source is self._attendant.connection:
            self._hear_attendant(self._attendant.hear())
        elif source is self._launcher.connection:
            self._hear_head()
        else:
            super()._attend(source)

    def _hear_attendant(self, said: dict[str, Any] | None) -> None:
        if said is None or said["kind"] == "leave":
            self._leave()
        else:  # another machine has joined this one
            super()._hear_launcher(said)

    def _hear_head(self) -> None:
        if self._launcher.connection.poll():  # else it is about what goes out
            self._hear_launcher(self._launcher.hear())

    def _leave(self) -> None:
        self.leaves = True
        self._tell(LeaveRequested("interrupted there"))

    def _hear_launcher(self, said: dict[str, Any] | None) -> None:
        """The run's head is the launcher here."""
        if said is None:
            self._tell(LauncherLost())
            return
        if said["kind"] == "unattended":
            self._attendant.open = False
            return
        self._over(End(said["status"], said["reason"]))
        if said["kind"] == "kill":
            self._kill_all()
        elif said["status"] in ("failed", "moved"):
            self._kill_waiting()

    def _tell(self, event: Event) -> None:
        if self.end is None or not isinstance(event, ProcessesSeen):  # behind a training scripts may do anything
            super()._tell(event)

    def _do(self, effect: Effect) -> None:
        match effect:
            case End():
                self._over(effect)
            case Admit(node, machine, address):
                self._line.admit(Placed(node, machine, address))
            case Forget(node):
                self._line.forget(node)
            case Redirect(placed):
                self._redirect(placed)
            case LetIn(number):
                self._let_in(number)
            case _:
                super()._do(effect)

    def _redirect(self, placed: Placed) -> None:
        """Where the coordinator is now, to the processes of this machine; those to come inherit it."""
        self._leave_head()
        if placed != self._placed:  # it is said again, while another coordinator may be reached already
            self._placed = placed
            if not self._site.has(COORDINATOR):
                self._site.moved(COORDINATOR, placed.machine, self._site.called(placed.address))
                lost = f"the run's first machine is lost: the run goes on from machine {placed.machine}"
                self._attendant.say(kind="told", text=lost)
            self._line.admit(placed)
        self._bell = self._bell or Doorbell(Node("nursery", self._machine), self._sockets)
        for child in self._children.values():  # one that starts hears no bell yet
            if child.node != COORDINATOR and child.node.role != "part" and child.told != placed:
                child.told = placed if self._bell.ring(child.node, encode(Frame(0, 0, placed))) else None

    def _replace(self, node: Node, ends: Node | None = None) -> None:
        if node == COORDINATOR and isinstance(self._line, StreamLine):
            self._leave_head()
            self._line.close()
            self._line = PipeLine()
        kept = self._job.deputies.get(ends) if ends is not None else None
        super()._replace(node, ends)
        if kept is not None and node == COORDINATOR:
            here = f"the run's first machine is lost: the run goes on from this one, in {self._job.directory}"
            self._attendant.say(kind="told", text=here)
            self._attendant.say(kind="holds")
            self._attendant.hand(kept.lock)

    def _let_in(self, number: int) -> None:
        """Have `squall join` on this machine let further ones into the run."""
        site, machine = self._site, self._machine
        if not site.has(COORDINATOR):
            return
        here = {str(node): ("" if site.has(node) else host, port) for node, (host, port) in site.addresses.items()}
        self._attendant.say(
            kind="leads", directory=str(self._job.directory), machine=machine, number=number, host=site.host,
            facts=Facts.of(self._job.task, self._job.starts), addresses=here,
            seats=[(role, index, at) for (role, index), at in site.seats.items()],
        )  # fmt: skip

    @property
    def last_words(self) -> End:
        """To the user of this machine, to whom the first one says nothing any more."""
        assert self.end is not None
        if not self._site.has(COORDINATOR):
            return self.end
        said, how = self.end.reason or OVER.reason, ""
        if self.end.status != "finished" and Snapshots(self._job.directory).numbers():
            how = f": squall resume {self._job.directory} goes on with it"
        return End(self.end.status, f"{said}; it is kept in {self._job.directory}{how}")

    def _leave_head(self) -> None:
        """It may be there again, and say what is so for nobody else."""
        self.moved, self._launcher.open = True, False

    def _ended(self) -> None:
        super()._ended()
        assert self._end is not None
        self._over(End(self._end["status"], self._end["reason"]))

    def _over(self, end: End) -> None:
        if self.end is not None and self.end.status != "failed" and end.status == "moved":  # the coordinator says less
            self.end = end
        elif self.end is None:
            self.end = end
            self._deadline = time.monotonic() + GRACE_S
            if end.status == "failed":
                sys.stderr.write(f"squall: machine {self._machine} has left the run: {end.reason}\n")

    def _hand_over(self) -> None:
        """The schedules of this machine's processes, without which there is no replay."""
        if self._job.schedule is not None and self._launcher.open:
            give_schedules(self._launcher, self._job.schedule, shards=self.end is None or self.end.status != "left")

    def _late(self) -> None:
        self._deadline = None
        self._kill_all()

    def _detach(self, node: Node) -> None:
        super()._detach(node)
        self._attendant.connection.close()
