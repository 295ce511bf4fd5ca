"""The process that all others of a run are forked from, and that watches them.

It imports torch and builds the task once; each role is then a fork, which takes milliseconds and shares the data.
The coordinator decides what is to run (`protocol.nursery`). Over pipes go:

    launcher -> nursery      the task, what `orders` has, "joined" of another machine, "leave", "stop", "kill"
    nursery -> launcher      "listening", "evaluated", "deputed", "stopping", "saving", "exited", "failed", "ended"
    coordinator -> nursery   "frame", "evaluated", "deputed", "placed", "saving", "end"
    nursery -> coordinator   "frame"

When the launcher is gone the nursery asks for a stop as Ctrl-C does, or leaves the run to a deputy on another machine;
the kernel wakes it for that if it was stopped itself. When the nursery is gone, the kernel kills its children. A stop
has its time: who still lives then is killed.
"""

from __future__ import annotations

import gc
import os
import shutil
import time
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from squall.launchers import backups, scratch
from squall.launchers.child import Child, expose, turn
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.coordinator_line import Line, PipeLine
from squall.launchers.leaving import DONE, LAUNCHER_GONE, LOST, RAISED, leave
from squall.launchers.lookout import Lookout
from squall.launchers.parts import raised
from squall.launchers.role_processes import run_role, tell
from squall.protocol.closing import STOP_WITHIN_S
from squall.protocol.effects import Effect, KillMember, KillMembers, StartMember, Transmit
from squall.protocol.events import Event, MachineJoined, ProcessEnded, StopRequested, TimePassed
from squall.protocol.link import Linked
from squall.protocol.nodes import COORDINATOR, Node, whole
from squall.protocol.nursery import NurseryMachine
from squall.protocol.nursery_messages import PartPlace
from squall.protocol.snapshot_rounds import SILENT_S
from squall.runtime.job import Job
from squall.runtime.machines import firsts, nodes, with_legacies
from squall.runtime.processes import fork, outlive_parent, state_of

GRACE_S, STOPPED_GRACE_S = 1.0, 0.3  # for processes to end after the coordinator has; when somebody waits for that
ANSWER_S = 0.3  # seconds that the coordinator may take beyond its own deadlines


class Nursery:
    """Forks, watches and reaps. One instance per process, used by `main` alone."""

    def __init__(self, launcher: ControlPipe, job: Job, sockets: Path) -> None:
        self._launcher, self._job, self._sockets, self._lookout = launcher, job, sockets, Lookout()
        self._children: dict[int, Child] = {}  # by pidfd
        self._killing, self._stopping = False, ""  # whose end was wanted here; why a stop was asked for, if it was
        self._deputed = False  # the coordinator has a deputy that may go on in its place
        self._end: dict[str, Any] | None = None  # what the coordinator said last
        self._deadline: float | None = None  # when processes that still live are killed
        self._linked = Linked(NurseryMachine())
        self._firsts: dict[Node, PartPlace | None] = {}  # first parts of replicas on several machines, by process
        self._line: Line = PipeLine()

    def run(self) -> None:
        self.prepare()
        self._begin()
        self.watch()
        self._line.close()
        backups.remove_unused(self._job)
        shutil.rmtree(self._sockets, ignore_errors=True)
        os.close(self._held)

    def prepare(self) -> None:
        scratch.check_length(self._sockets)
        self._launcher.say(kind="listening")
        outlive_parent()  # from here on it is heard when that goes, and what there is can be saved
        self._held = scratch.make(self._sockets)
        self._job = with_legacies(self._lookout.prepared(self._job))
        gc.collect()
        gc.freeze()  # a collection in a child would otherwise copy the pages that all share

    def _begin(self) -> None:
        self._firsts = firsts(self._job)
        for node in nodes(self._job):
            self._fork(node)
        self._close_listeners()

    def _close_listeners(self, own: Node | None = None) -> None:
        if self._job.site is not None:
            mine = () if own is None else (own, Node(own.role, own.index))
            self._job.site.close_listeners(mine or backups.succeeded(self._job))

    def watch(self) -> None:
        """Until all children are gone."""
        while self._children or self._stays:
            times = (self._deadline, self._linked.wake_at, self._line.wake_at, self._lookout.at)
            timeout = min(at for at in times if at is not None) - time.monotonic()
            ready = wait([*self._sources(), *self._children], max(0.0, timeout))
            now = time.monotonic()
            if self._linked.wake_at is not None and now >= self._linked.wake_at:
                self._tell(TimePassed())
            for source in ready:
                self._attend(source)
            self._hear()
            seen = self._lookout.look(now, self._children.values(), self._linked.unacknowledged)
            for event in seen if self._end is None and self._line.open else ():
                self._tell(event)
            if self._deadline is not None and now >= self._deadline:
                self._late()
        self._hand_over()
        self._launcher.say(kind="ended", **self._verdict())

    def _hand_over(self) -> None:
        """All processes are gone: give the launching process what it does not have."""

    @property
    def _stays(self) -> bool:
        """It is there though it has no children."""
        return False

    def _verdict(self) -> dict[str, Any]:
        """How the run has ended."""
        return self._end or {"status": "", "reason": ""}

    def _sources(self) -> list[Any]:
        return [*([self._launcher.connection] if self._launcher.open else []), *self._line.sources]

    def _attend(self, source: object) -> None:
        if source is self._launcher.connection:
            self._hear_launcher(self._launcher.hear())
        elif source in self._children:
            self._reap(self._children.pop(source))

    def _hear_launcher(self, said: dict[str, Any] | None) -> None:
        self._hear()  # whether there is a deputy
        match said:
            case {"kind": "kill"}:
                self._kill_all()
            case {"kind": "joined", "machine": machine, "cores": cores}:
                self._tell(MachineJoined(machine, cores // self._job.plan.threads))
            case {"kind": "leave", "why": why, "failed": failed}:
                self._tell(StopRequested(why, failed, wanted=True))
            case None if self._deputed and not (self._stopping or self._end):  # as if all this machine were lost
                self._kill_members()
                shutil.rmtree(self._sockets, ignore_errors=True)
                leave(LOST)
            case _:  # a stop, or the launcher is gone
                self._launcher.say(kind="stopping")
                self._stop("interrupted" if said else LAUNCHER_GONE)

    def _hear(self) -> None:
        """What the coordinator has said."""
        for told in self._line.hear():
            if isinstance(told, Event):
                self._tell(told)
            elif told["kind"] in ("evaluated", "saving", "deputed"):
                self._launcher.say(**told)
                self._deputed = told.get("deputed", self._deputed)
                if told["kind"] == "saving" and self._deadline is not None:
                    self._deadline = max(self._deadline, time.monotonic() + SILENT_S + ANSWER_S)
            else:
                self._end = {"status": told["status"], "reason": told["reason"]}
                self._ended()

    def _tell(self, event: Event) -> None:
        """Give the machine an event, and do what it says."""
        for effect in self._linked.on(event, time.monotonic()):
            self._do(effect)
        if isinstance(event, ProcessEnded):  # a coordinator has begun, if a deputy had asked for that
            backups.remove(self._job, event.node)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Transmit():
                self._line.send(effect)
            case StartMember(node, first, ends):
                self._firsts[node] = first
                self._replace(node, ends)
            case KillMember(node, why):
                self._kill(node, why)
            case KillMembers():
                self._kill_members()

    def _kill(self, node: Node, why: str = "") -> None:
        child = next((child for child in self._children.values() if child.node == node), None)
        if child is None:
            self._tell(ProcessEnded(node, "it had ended"))
        else:
            child.ordered, child.why = True, why
            child.kill()

    def _stop(self, why: str) -> None:
        coordinators = (child.pid for child in self._children.values() if child.node == COORDINATOR)
        if "stopped" in map(state_of, coordinators):  # it would not hear of this, and its successor does
            self._kill(COORDINATOR, "it was stopped when the run was to end")
        self._tell(StopRequested(why))
        if self._end is None:
            self._hurry()
        self._stopping = why

    def _hurry(self) -> None:
        """Set the deadline of a stop: processes that live longer are killed."""
        if self._deadline is None:
            self._deadline = time.monotonic() + STOP_WITHIN_S + self._job.save_within_s + ANSWER_S

    def _late(self) -> None:
        """Kill the processes that did not answer to a stop, or did not leave when all was over: they hang."""
        self._deadline = None
        if self._end is None:
            why = "the coordinator did not answer and was killed, so that nothing was saved"
            self._end = {"status": "interrupted", "reason": f"{self._stopping}; {why}"}
        self._kill_all()

    def _ended(self) -> None:
        """The coordinator has told how the training ended, which is now in `self._end`."""
        self._deadline = time.monotonic() + (STOPPED_GRACE_S if self._stopping else GRACE_S)
        if (self._end or {}).get("status") in ("failed", "moved"):
            self._kill_waiting()

    def _kill_waiting(self) -> None:
        """Replicas may wait for what is gone. Nobody waits for them: what they have recorded is written."""
        waiting = ("replica", "part") if self._job.recipe.shards else ()
        for node in [child.node for child in self._children.values() if child.node.role in waiting]:
            self._kill(node)

    def _reap(self, child: Child) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        os.close(child.handle)
        if child.node.role in ("coordinator", "deputy"):
            self._hear()  # its last words
        if child.node != COORDINATOR and child.ordered and not raised(self._sockets, child.node):
            return self._tell(backups.ended(self._job, child.node, self._lookout.explain(code)))
        if code == DONE:
            self._done(child)
        elif not self._killing:
            self._lose(child, code)

    def _done(self, child: Child) -> None:
        if child.node.role in ("backup", "deputy"):  # who goes on in its place waits for its end
            self._tell(ProcessEnded(child.node, "it has ended"))

    def _lose(self, child: Child, code: int) -> None:
        """Tell of a process that has ended before its work was done."""
        why, story = child.why or self._lookout.explain(code), raised(self._sockets, child.node)
        self._launcher.say(kind="exited", node=str(child.node), pid=child.pid, why=why, traceback=story)
        if child.node == COORDINATOR and (story or self._end is not None):
            return self._kill_all()
        if story:
            node = whole(child.node, self._job.plan.settings.parts)
            self._tell(StopRequested(f"{node.role} {node.index} raised an exception", failed=True))
        self._tell(backups.ended(self._job, child.node, why))

    def _kill_all(self) -> None:
        self._killing = True
        self._kill_members()

    def _kill_members(self) -> None:
        for child in self._children.values():
            child.kill()

    def _replace(self, node: Node, ends: Node | None = None) -> None:
        try:
            if node.role in ("replica", "evaluator"):
                self._job.arena.reserve(node.index)
            elif node == COORDINATOR and isinstance(self._line, PipeLine):
                self._line.renew()
            self._fork(node, ends)
        except OSError as error:  # no more processes or memory for now; the coordinator tries again, a few times
            self._tell(ProcessEnded(node, f"could not be started: {error}"))

    def _fork(self, node: Node, ends: Node | None = None) -> None:
        self._job = backups.prepare(self._job, node, ends, {child.node for child in self._children.values()})
        if pid := fork():
            self._look_after(node, pid)
            return self._line.given() if node == COORDINATOR and isinstance(self._line, PipeLine) else None
        status = RAISED
        try:
            self._detach(node)
            pipe = self._line.give() if node == COORDINATOR and isinstance(self._line, PipeLine) else None
            job = replace(self._job, turn=turn(node, self._children.values()), first=self._firsts.get(node))
            run_role(job, node, self._sockets, pipe)
            status = DONE
        except BaseException as error:
            status = tell(node, self._job, self._sockets, error)
        finally:  # a child never returns into the nursery's own code
            leave(status)

    def _look_after(self, node: Node, pid: int) -> None:
        child = Child.watched(node, pid, turn(node, self._children.values()))
        self._children[child.handle] = child

    def _detach(self, node: Node) -> None:
        """In a child, which is that node: close what belongs to the nursery and to others."""
        self._close_listeners(node)
        self._launcher.connection.close()
        self._line.leave()
        expose(node)
        for handle in self._children:
            os.close(handle)
