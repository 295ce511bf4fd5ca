"""The nursery of a script's run on its first machine: it judges the scripts of all machines.

The coordinator is in charge of a script from `session.batches` to the end of the training, and this nursery before and
after: who stops the run then ends the scripts where they are, and a leader that dies then fails the run.

Scripts on other machines are heard through the launching process (`launchers.script_relay`), where the coordinator had
them started and nowhere else, and answered through it:

    launcher -> nursery    "script" with what one has said, "exited" of another machine, "gone": a machine was lost,
                           "alone": all others have ended
    nursery -> launcher    "data" that is trained on, "trained" with how that has ended, "noted" for a script elsewhere
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from squall.launchers.child import Child
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.coordinator_line import PipeLine
from squall.launchers.late_rows import add_end, add_values
from squall.launchers.leaving import RAISED, explain
from squall.launchers.nursery import GRACE_S
from squall.launchers.script_forks import ScriptForks
from squall.protocol.events import StopRequested
from squall.protocol.nodes import Node
from squall.record.rows import RecordError
from squall.runtime.job import Job


class ScriptNursery(ScriptForks):
    def __init__(self, launcher: ControlPipe, job: Job, sockets: Path) -> None:
        super().__init__(launcher, job, sockets)
        self._alone = job.site is None  # no other machine has scripts
        self._unfinished: dict[int, str] = {}  # replica -> how its last process was lost
        self._over: set[int] = set()  # replicas whose scripts have come to their ends
        self._line = line = PipeLine()
        self._at = line.placed  # replica -> the machine that it is on
        if job.site is not None:
            self._at.update((index, at) for (role, index), at in job.site.seats.items() if role == "replica")

    @property
    def _stays(self) -> bool:
        """Scripts on other machines are not at their ends, and may take their time."""
        finished = self._end is None or self._end["status"] == "finished"
        return finished and not (self._alone or self._killing)

    def _hear_launcher(self, said: dict[str, Any] | None) -> None:
        self._hear()  # where the coordinator has had a replica started, before what that says
        match said:
            case {"kind": "script", "machine": machine, "replica": replica, "said": told}:
                if self._at.get(replica) == machine:
                    self._hear_script(replica, told, machine)
            case {"kind": "exited", "machine": machine, "node": node, "pid": pid, "why": why}:
                lost = Node.parse(node)
                if lost.role == "replica" and self._at.get(lost.index) == machine:
                    self._lose_script(lost.index, f"pid {pid} on machine {machine}", why)
            case {"kind": "gone", "machine": machine}:
                self._lose_machine(machine)
            case {"kind": "alone"}:
                self._alone = True
            case _:
                super()._hear_launcher(said)

    def _hear_script(self, replica: int, said: dict[str, Any], machine: int = 0) -> None:
        match said["kind"]:
            case "leave":
                self._tell(StopRequested(said["why"], wanted=True))
            case "logged" if machine:
                error = self._log(said["values"])
                self._launcher.say(kind="noted", machine=machine, replica=replica, error=error)
            case "logged":
                self._answer(replica, self._log(said["values"]))
            case "over":
                self._over.add(replica)
            case "begin":
                self._over.discard(replica)
                self._unfinished.pop(replica, None)
                self._compare(replica, {name: value for name, value in said.items() if name != "kind"})

    def _log(self, values: dict[str, float | str]) -> str:
        """Record what a script has measured behind its loop. Returns why that was not possible; "" if it was."""
        if self._end is None:  # the record has one writer, which is the coordinator
            return "the training goes on without this replica: what it measures now is not kept"
        try:
            add_values(self._job, {name: float(value) for name, value in values.items()})
        except RecordError as error:
            return str(error)
        return ""

    def _compare(self, replica: int, data: dict[str, Any]) -> None:
        """A script has come to its batches: those of the first one are what is trained on."""
        if self._trained_on is None:
            if self._job.restored is not None:
                self._job.restored.manifest.check_examples(data["examples"])
            if not self._alone:
                self._launcher.say(kind="data", data=data)
            self._train_on(data)
        elif data != self._trained_on:
            where = f" on machine {self._at[replica]}" if not self._alone else ""
            what = "session.batches must be given the same dataset length, batch_size and epochs in every replica"
            self._fail(f"{what}: replica {replica}{where} has {data} after {self._trained_on}")

    def _fail(self, why: str) -> None:
        self._launcher.say(kind="failed", error=why, task=False)
        self._kill_all()

    def _ended(self) -> None:
        """The scripts elsewhere hear of it as soon as they can have the last weights."""
        assert self._end is not None
        if not self._alone:
            self._launcher.say(kind="trained", **self._end)
        self._end_scripts(**self._end)
        if self._stopping and self._end["status"] == "finished":
            self._stop(self._stopping)  # it came too late for the training, and not for the scripts

    def _stop(self, why: str) -> None:
        if self._trained_on is not None and self._end is None:
            super()._stop(why)
            return
        if self._trained_on is None:
            self._end = {"status": "interrupted", "reason": f"{why} before the training began"}
        self._amend("interrupted", f"{why} when the training was complete, and the script not at its end")
        self._killing = True
        self._deadline = time.monotonic() + GRACE_S
        self._interrupt_scripts()

    def _lose(self, child: Child, code: int) -> None:
        super()._lose(child, code)
        if child.node.role == "replica":
            self._lose_script(child.node.index, f"pid {child.pid}", explain(code))

    def _lose_script(self, replica: int, process: str, how: str) -> None:
        self._over.add(replica)
        if self._trained_on is None:
            self._kill_all()  # there is no coordinator to replace it
        elif self._end is None or how != explain(0):  # behind its loop a script may leave by os._exit(0)
            why = f"the script of replica {replica} ({process}) did not come to its end: {how}"
            self._unfinished[replica] = why
            if how == explain(RAISED):
                self._amend("failed", why)

    def _lose_machine(self, machine: int) -> None:
        """The coordinator sees to its replicas, as long as there is one."""
        assert self._job.site is not None
        if self._trained_on is None and machine in self._job.site.cores:
            self._fail(f"machine {machine} was lost before the training began: launch the run again")
        elif self._end is not None:
            for replica in (replica for replica, at in self._at.items() if at == machine and replica not in self._over):
                self._unfinished[replica] = f"machine {machine} was lost before the scripts there came to their ends"

    def _verdict(self) -> dict[str, Any]:
        """The coordinator has judged the training; scripts may have been lost since."""
        for replica, why in sorted(self._unfinished.items()):
            if replica == 0:
                self._amend("failed", f"{why}; the training is complete, in the last snapshot")
            elif self._end is not None and self._end["status"] == "finished":
                sys.stderr.write(f"squall: warning: {why}\n")
        return super()._verdict()

    def _amend(self, status: str, reason: str) -> None:
        """Change the end of a run that had finished, here and in the record."""
        if self._end is None or self._end["status"] != "finished":
            return
        self._end = {"status": status, "reason": reason}
        try:
            add_end(self._job, status, reason)
        except RecordError as error:
            sys.stderr.write(f"squall: warning: the record does not say that the script was {status}: {error}\n")
